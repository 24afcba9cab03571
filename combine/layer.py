"""Host side of a layer's way back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..config import GemmConfig
from ..grouped_gemm import num_compute_programs, num_sms, ragged
from ..hardware import early_launch, launches_overlap
from ..lang import INTERPRETED
from ..routing import ExpertPlan
from ..slots import RowLayout, Slots, next_power_of_2
from ..stages import StagedSchedule
from .launch import NUM_SUM_PROGRAMS, NUM_WARPS, WAIT_TOKENS
from .layer_kernels import (
    SUM_ROWS,
    layer_sum_kernel,
    return_sums_kernel,
    staged_gemm_kernel,
)

SUM_ITEMS = 8192
"""fp32 sums that a program holds."""


@dataclass(frozen=True, slots=True)
class LayerSums:
    """The sums of a layer: received tokens by their expert rows, sent ones by ranks.

    plan: which expert rows are of which token; rank_prefix_matrix int32 [R, R] and send_head int32
    [T, R] of the dispatch.
    """

    plan: ExpertPlan
    rank_prefix_matrix: torch.Tensor
    send_head: torch.Tensor

    def arguments(self, hidden: int, itemsize: int, slots: Slots) -> dict[str, Any]:
        """What all kernels that sum are launched with."""
        _, max_rows, num_topk = self.plan.expert_row.shape
        row = RowLayout(hidden * itemsize)
        return dict(
            expert_row=self.plan.expert_row,
            lane_weight=self.plan.lane_weight,
            context=slots.context.words,
            max_rows=max_rows,
            row_bytes=row.num_bytes,
            NUM_TOPK=num_topk,
            RANKS_PAD=next_power_of_2(slots.layout.num_ranks),
            CHUNK_ROWS=slots.layout.chunk_rows(row.num_bytes),
        )


def _sum_columns(hidden: int, items: int, rows: int) -> int:
    """Columns of the `items` fp32 sums that a program holds at a time, for so many rows."""
    return min(next_power_of_2(hidden), items // rows)


def gemm_combine(
    a: torch.Tensor,
    w: torch.Tensor,
    sums: LayerSums,
    schedule: StagedSchedule,
    num_return_programs: int,
    config: GemmConfig,
    slots: Slots,
) -> torch.Tensor:
    """y [M, H]: rows a [M, I] in the plan's order times w [L, H, I], summed by token and written to
    the tokens' ranks meanwhile; `layer_sum` adds them up there. Begins a call; the launch before it
    is `dispatch_gemm`'s.

    Two launches side by side: one that sums needs more warps than one that multiplies has room for.
    `num_return_programs` SMs sum while the others multiply, then all do.
    """
    num_columns, depth = w.shape[1:]
    y = a.new_empty(len(a), num_columns)
    num_programs = num_compute_programs(y.device, config)
    if slots.layout.num_ranks > 1:
        left = num_programs - num_return_programs * config.programs_per_sm
        num_programs = max(1, left, num_programs // 4)
    staged_gemm_kernel[(num_programs,)](
        create_ragged_descriptor(a, [config.block_m, config.block_k]),
        TensorDescriptor.from_tensor(w, [1, config.block_n, config.block_k]),
        ragged(y[None], config.block_m, config.block_n // config.subtiles),
        schedule.tiles[1],
        schedule.first_tile[1],
        schedule.counters[1],
        schedule.num_stages,
        num_columns,
        depth,
        STAGES_PAD=next_power_of_2(schedule.num_stages + 1),
        OVERLAP=launches_overlap(),
        **config.launch_options(),
        **early_launch(),
    )
    return_sums(y, sums, schedule, slots, num_programs)
    return y


def return_sums(
    y: torch.Tensor,
    sums: LayerSums,
    schedule: StagedSchedule,
    slots: Slots,
    num_gemm_programs: int = 0,
) -> None:
    """Write one weighted sum of expert rows y [M, H] per received token to its source. Begins a
    call; the launch before it makes y.

    With `num_gemm_programs` that launch's programs count what they have computed, and sums begin
    beside them on the SMs that they leave.
    """
    if slots.layout.num_ranks == 1:
        return
    hidden = y.shape[1]
    row_bytes = hidden * y.itemsize
    num_chunks = slots.layout.max_rows(row_bytes) // slots.layout.chunk_rows(row_bytes)
    return_sums_kernel[(2 if INTERPRETED else num_sms(y.device),)](
        y,
        rank_prefix_matrix=sums.rank_prefix_matrix,
        computed=schedule.counters[1] if num_gemm_programs else None,
        claimed=schedule.counters[2],
        stage_count=schedule.num_stages,
        num_gemm_programs=num_gemm_programs,
        hidden=hidden,
        SPAN=2 if num_chunks >= 256 else 1,
        AT_ONCE=min(sums.plan.expert_row.shape[2], 6),
        BLOCK_H=_sum_columns(hidden, SUM_ITEMS // 2, SUM_ROWS.value),
        OVERLAP=launches_overlap(),
        num_warps=NUM_WARPS,
        **sums.arguments(hidden, y.itemsize, slots),
        **early_launch(),
    )


def layer_sum(y: torch.Tensor, sums: LayerSums, slots: Slots) -> torch.Tensor:
    """out [T, H]: the sums of all ranks for the tokens of this one, which makes its own from y [M,
    H]. Ends a call; the launch before it is `gemm_combine`'s, or any."""
    num_tokens, hidden = len(sums.send_head), y.shape[1]
    out = y.new_empty(num_tokens, hidden)
    layer_sum_kernel[(NUM_SUM_PROGRAMS,)](
        out,
        y,
        send_head=sums.send_head,
        num_tokens=num_tokens,
        hidden=hidden,
        RANKS=slots.layout.num_ranks,
        GROUP=WAIT_TOKENS,
        BLOCK_H=_sum_columns(hidden, SUM_ITEMS, WAIT_TOKENS),
        OVERLAP=launches_overlap(),
        num_warps=NUM_WARPS,
        **sums.arguments(hidden, y.itemsize, slots),
        **early_launch(),
    )
    return out
