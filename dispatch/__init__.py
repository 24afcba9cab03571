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
from .stages import staged_schedule

__all__ = [
    "Counts",
    "DispatchLayout",
    "Dispatched",
    "LayerTokens",
    "Partition",
    "Received",
    "SendPlan",
    "Tokens",
    "collect",
    "copy_rows",
    "dispatch_gemm",
    "exchange",
    "exchange_fused",
    "locate",
    "place_rows",
    "programs_on_all_sms",
    "push",
    "push_fused",
    "release",
    "send_metadata",
    "staged_schedule",
]
