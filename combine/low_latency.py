"""Host side of low-latency combine: its launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..device.lang import INTERPRETED
from ..hardware import has_pdl, pdl_options
from ..symm.ring import LowLatencyRow, Ring, message_bytes
from ..utils import next_power_of_2, round_up
from .low_latency_kernels import low_latency_combine_kernel

NUM_RETURN_PROGRAMS = 2 if INTERPRETED else 264
"""Rounded up to a multiple of the ranks, so that each returns rows to one rank alone: what it waits
for from a lost rank holds up no rows to others, who would take this rank for lost."""
NUM_WARPS = 8
REGISTERS = 168
"""Before Hopper: left to itself, the compiler spills there for a second program on an SM."""


@dataclass(frozen=True, slots=True)
class Returning:
    """A low-latency combine: x [.., H] contiguous, the experts' rows where dispatch packed theirs;
    topk_idx int64 [T, K] and topk_weights float32 [T, K] of the tokens, None where they travelled
    with the dispatch; returns and call of the dispatch; out [T, H]; the epoch of this call, int64
    [1], made by the launch that sends."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor | None
    returns: torch.Tensor
    dispatched: torch.Tensor
    out: torch.Tensor
    call: torch.Tensor
    num_experts: int


def low_latency_combine(
    rows: Returning, wait_stats: torch.Tensor | None, phases: str, shrink: bool, ring: Ring
) -> None:
    """Return sums of the experts' rows, add them up, or both: phases "send", "receive" or "both".
    wait_stats int64 [R] (ns) are added to."""
    ring.context.step = f"low_latency_combine, {phases}"
    num_ranks, max_tokens = rows.returns.shape[:2]
    num_tokens, num_topk = rows.topk_idx.shape
    num_local, hidden = rows.num_experts // num_ranks, rows.out.shape[1]
    row = LowLatencyRow(hidden * rows.out.itemsize)
    num_return_programs = round_up(NUM_RETURN_PROGRAMS, num_ranks)
    grid = 0 if phases == "receive" else 1 + num_ranks + num_return_programs
    grid += 0 if phases == "send" else 1 + num_tokens
    low_latency_combine_kernel[(grid,)](
        rows.x,
        rows.topk_idx,
        rows.topk_weights,
        rows.returns,
        rows.dispatched,
        rows.out,
        wait_stats,
        rows.call,
        ring.context.fields,
        num_return_programs,
        num_tokens,
        max_tokens,
        hidden,
        message_bytes(max_tokens, num_topk),
        row.num_bytes,
        NUM_TOPK=num_topk,
        ALIGNED=row.payload_bytes % 16 == 0,
        RANKS=num_ranks,
        EXPERTS=num_local,
        BLOCK=next_power_of_2(hidden),
        PHASES=phases,
        SHRINK=shrink,
        PDL=has_pdl(),
        num_warps=NUM_WARPS,
        **(pdl_options() or ({} if INTERPRETED else {"maxnreg": REGISTERS})),
    )
    ring.context.step = None
