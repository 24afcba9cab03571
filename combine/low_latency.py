"""Host side of low-latency combine: its launch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..device.context import Kind
from ..device.ring import Rows
from ..hardware import gpu, limit_registers
from ..low_latency_handle import LowLatencyHandle, LowLatencySizes
from ..symm.ring import LowLatencyRow, Ring, header_bytes
from ..utils import next_power_of_2, round_up
from .low_latency_kernels import KEPT_IDS, ExpertRows, low_latency_combine_kernel

NUM_WARPS = 8
REGISTERS = 168
"""The limit before Hopper, where the compiler, left to itself, spills so that a second program fits
on an SM."""


class LowLatencyRows(NamedTuple):
    """What a combine by a handle gets; `out` is None for a new tensor."""

    x: torch.Tensor  # [L, R * M, H], the experts' rows
    topk_idx: torch.Tensor  # int64 [T, K]
    topk_weights: torch.Tensor  # float32 [T, K]
    memory: torch.Tensor  # of a `LowLatencyHandle`, as its sizes
    sizes: LowLatencySizes
    out: torch.Tensor | None  # [T, H]

    def arguments(self, out: torch.Tensor) -> ExpertRows:
        """As kernels take them."""
        handle = LowLatencyHandle(self.memory, self.sizes)
        returned = handle.returns, handle.call, out
        return ExpertRows(self.x, self.topk_idx, self.topk_weights, *returned)


def new_call(topk_idx: torch.Tensor) -> torch.Tensor:
    """Memory for what the launch of a combine that sends leaves for the one that adds up: the epoch
    of the call, and the ids [T, K]."""
    return topk_idx.new_empty(KEPT_IDS.value + topk_idx.numel())


def kept_ids(call: torch.Tensor, num_topk: int) -> torch.Tensor:
    """The ids [T, K] that a launch has left in `call`."""
    return call[KEPT_IDS.value :].view(-1, num_topk)


def low_latency_combine(
    rows: ExpertRows,
    call: torch.Tensor | None,
    num_experts: int,
    wait_stats: torch.Tensor | None,
    phases: str,
    ring: Ring,
) -> None:
    """Return sums of the experts' rows, add them up, or both: phases "send", "receive" or "both".
    `call`, see `new_call`, goes from the launch that sends to the one that only adds up, else
    None. wait_stats int64 [R] (ns) are added to."""
    num_ranks, max_tokens = rows.returns.shape[:2]
    (num_tokens, num_topk), hidden = rows.topk_idx.shape, rows.out.shape[1]
    row = LowLatencyRow(hidden * rows.out.itemsize)
    kind = Kind.MOE_FFN_COMBINE if rows.topk_weights is None else Kind.LOW_LATENCY_COMBINE
    sizes = row, num_topk, num_experts, rows.x.dtype, next_power_of_2(hidden)
    # Two programs for each SM, rounded up to a multiple of the ranks, so that each returns rows to
    # one rank alone: what it waits for from a lost rank holds up no rows to others, who would take
    # this rank for lost.
    num_return_programs = round_up(2 * gpu().num_sms, num_ranks)
    grid = 0 if phases == "receive" else 1 + num_ranks + num_return_programs
    grid += 0 if phases == "send" else 1 + num_tokens
    ring.context.launch(
        low_latency_combine_kernel,
        (grid,),
        rows,
        wait_stats,
        call,
        ring.context.fields,
        num_return_programs,
        num_tokens,
        max_tokens,
        Rows(hidden, header_bytes(max_tokens, num_topk), row.trailer, row.num_bytes),
        CONFIG=ring.config(kind, *sizes),
        PHASES=phases,
        step=f"low_latency_combine, {phases}",
        num_warps=NUM_WARPS,
        **limit_registers(REGISTERS),
    )
    ring.context.end_call()
