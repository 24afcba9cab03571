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
    Counts,
    DispatchLayout,
    Partition,
    Received,
    Tokens,
    collect,
    exchange,
    locate,
    programs_on_all_sms,
    push,
    release,
    send_metadata,
)
from .send_kernels import SendPlan

__all__ = [
    "Counts",
    "DispatchLayout",
    "Lanes",
    "Partition",
    "Received",
    "ReturnMetadata",
    "SendPlan",
    "Tokens",
    "collect",
    "copy_rows",
    "dispatch_gemm",
    "exchange",
    "exchange_fused",
    "locate",
    "programs_on_all_sms",
    "push",
    "push_fused",
    "release",
    "send_metadata",
    "send_return_metadata",
]
