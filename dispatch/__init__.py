"""Dispatch: send each token once to every rank that holds one of its experts."""

from .fused import (
    Lanes,
    Records,
    copy_rows,
    dispatch_gemm,
    exchange_lanes,
    push_lanes,
    send_records,
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
    "Records",
    "collect",
    "copy_rows",
    "dispatch_gemm",
    "exchange",
    "exchange_lanes",
    "locate",
    "new_collected",
    "push",
    "push_lanes",
    "release",
    "row_layout",
    "send_metadata",
    "send_records",
]
