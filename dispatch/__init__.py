"""Dispatch: send each token once to every rank that holds one of its experts."""

from .fused import (
    Dispatched,
    LayerTokens,
    copy_rows,
    dispatch_gemm,
    exchange_fused,
    place_rows,
    push_fused,
)
from .launch import (
    NUM_METADATA_PROGRAMS,
    Collected,
    Counts,
    Outgoing,
    Partition,
    collect,
    exchange,
    locate,
    new_collected,
    push,
    release,
    row_layout,
    send_metadata,
)
from .stages import staged_schedule

__all__ = [
    "NUM_METADATA_PROGRAMS",
    "Collected",
    "Counts",
    "Dispatched",
    "LayerTokens",
    "Outgoing",
    "Partition",
    "collect",
    "copy_rows",
    "dispatch_gemm",
    "exchange",
    "exchange_fused",
    "locate",
    "new_collected",
    "place_rows",
    "push",
    "push_fused",
    "release",
    "row_layout",
    "send_metadata",
    "staged_schedule",
]
