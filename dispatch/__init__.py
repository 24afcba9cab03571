"""Dispatch: send each token once to every rank that holds one of its experts."""

from .fused import dispatch_gemm, dispatch_gemm_config
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
    "Outgoing",
    "Partition",
    "collect",
    "dispatch_gemm",
    "dispatch_gemm_config",
    "exchange",
    "locate",
    "new_collected",
    "push",
    "release",
    "row_layout",
    "send_metadata",
]
