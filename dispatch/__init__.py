"""Dispatch: send each token once to every rank that holds one of its experts."""

from .fused import (
    Lanes,
    Places,
    dispatch_gemm,
    exchange_shares,
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
    "Places",
    "collect",
    "dispatch_gemm",
    "exchange",
    "exchange_shares",
    "locate",
    "new_collected",
    "push",
    "push_lanes",
    "release",
    "row_layout",
    "send_metadata",
    "send_records",
]
