"""Dispatch: send each token once to every rank that holds one of its experts."""

from .fused import (
    Lanes,
    ReturnMetadata,
    copy_rows,
    dispatch_gemm,
    exchange_fused,
    push_fused,
    send_return_metadata,
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

__all__ = [
    "NUM_METADATA_PROGRAMS",
    "Collected",
    "Counts",
    "Lanes",
    "Outgoing",
    "Partition",
    "ReturnMetadata",
    "collect",
    "copy_rows",
    "dispatch_gemm",
    "exchange",
    "exchange_fused",
    "locate",
    "new_collected",
    "push",
    "push_fused",
    "release",
    "row_layout",
    "send_metadata",
    "send_return_metadata",
]
