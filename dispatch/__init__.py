"""Dispatch: send each token once to every rank that holds one of its experts."""

from .backward import dispatch_wgrad
from .fused import (
    Dispatched,
    ExpertOffsets,
    LayerCall,
    LayerTokens,
    copy_rows,
    dispatch_gemm,
    exchange_fused,
    keep_rows,
    place_rows,
    push_fused,
    quantize,
)
from .launch import (
    NUM_CONCURRENT,
    Counts,
    DispatchLayout,
    Partition,
    Tokens,
    TotalsWanted,
    exchange,
    form_of,
    programs_on_all_sms,
    programs_that_pace,
    push,
    send_metadata,
)
from .place_rows_kernels import RowPlan
from .receive import Received, copy_ids, locate, receive, release
from .send_kernels import SendPlan
from .stages import staged_schedule

__all__ = [
    "NUM_CONCURRENT",
    "Counts",
    "DispatchLayout",
    "Dispatched",
    "ExpertOffsets",
    "LayerCall",
    "LayerTokens",
    "Partition",
    "Received",
    "RowPlan",
    "SendPlan",
    "Tokens",
    "TotalsWanted",
    "copy_ids",
    "copy_rows",
    "dispatch_gemm",
    "dispatch_wgrad",
    "exchange",
    "exchange_fused",
    "form_of",
    "keep_rows",
    "locate",
    "place_rows",
    "programs_on_all_sms",
    "programs_that_pace",
    "push",
    "push_fused",
    "quantize",
    "receive",
    "release",
    "send_metadata",
    "staged_schedule",
]
