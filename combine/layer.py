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
from .layer_kernels import SUM_ROWS, layer_sum_kernel, return_sums_kernel, staged_gemm_kernel

RETURN_BYTES = 8192
"""What a program that returns rows makes at a time."""
READ_AHEAD = 6
"""Expert rows of a token that it reads ahead."""
SUM_TOKENS = 4
"""Tokens that a program sums at a time. Many small programs: they share SMs with those that
return."""


@dataclass(frozen=True, slots=True)
class LayerSums:
    """The sums of a layer: received tokens by their expert rows, sent ones by ranks.

    plan: which expert rows are of which token; schedule: of the GEMM that makes these;
    rank_prefix_matrix int32 [R, R] and send_head int32 [T, R] of the dispatch.
    """

    plan: ExpertPlan
    schedule: StagedSchedule
    rank_prefix_matrix: torch.Tensor
    send_head: torch.Tensor


def gemm_combine(
    a: torch.Tensor,
    w: torch.Tensor,
    sums: LayerSums,
    num_return_programs: int,
    config: GemmConfig,
    slots: Slots,
) -> torch.Tensor:
    """out [T, H]: rows a [M, I] in the plan's order times w [L, H, I], weighted, summed by token.

    A rank sums the rows that it has of a token and writes one to the token's rank, which adds up
    the ranks'. It all runs side by side: `num_return_programs` SMs sum while the others multiply,
    then all do. Three launches, as sums need more warps than products have room for. A call of its
    own; the launch before it is `dispatch_gemm`'s.
    """
    num_columns, depth = w.shape[1:]
    y = a.new_empty(len(a), num_columns)
    schedule, num_programs = sums.schedule, num_compute_programs(y.device, config)
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
        schedule.stages_back,
        num_columns,
        depth,
        STAGES_PAD=next_power_of_2(schedule.stages_back + 1),
        OVERLAP=launches_overlap(),
        **config.launch_options(),
        **early_launch(),
    )
    return _sum(y, sums, num_programs, slots)


def sum_experts(y: torch.Tensor, sums: LayerSums, slots: Slots) -> torch.Tensor:
    """out [T, H] of expert rows y [M, H] that the launch before makes; see `gemm_combine`."""
    return _sum(y, sums, 0, slots)


def _sum(y: torch.Tensor, sums: LayerSums, num_gemm_programs: int, slots: Slots) -> torch.Tensor:
    """Return sums and add them up. With `num_gemm_programs` the launch before is that of y, and its
    programs count what they have computed."""
    hidden, num_ranks = y.shape[1], slots.layout.num_ranks
    if num_ranks > 1:
        row_bytes = hidden * y.itemsize
        num_chunks = slots.layout.max_rows(row_bytes) // slots.layout.chunk_rows(row_bytes)
        return_sums_kernel[(2 if INTERPRETED else num_sms(y.device),)](
            y,
            rank_prefix_matrix=sums.rank_prefix_matrix,
            claimed=sums.schedule.counters[2],
            SPAN=2 if num_chunks >= 256 else 1,
            AT_ONCE=min(sums.plan.expert_row.shape[2], READ_AHEAD),
            BLOCK_H=min(next_power_of_2(hidden), RETURN_BYTES // SUM_ROWS.value // y.itemsize),
            num_warps=16,
            **_arguments(y, sums, num_gemm_programs, slots),
        )
    out = y.new_empty(len(sums.send_head), hidden)
    layer_sum_kernel[(2 if INTERPRETED else 8 * num_sms(y.device),)](
        out,
        y,
        send_head=sums.send_head,
        num_tokens=len(out),
        RANKS=num_ranks,
        STAGES_PAD=next_power_of_2(sums.schedule.stages_back),
        GROUP=SUM_TOKENS,
        BLOCK_H=min(next_power_of_2(hidden), (512 if num_ranks <= 4 else 256) // y.itemsize),
        num_warps=4,
        **_arguments(y, sums, num_gemm_programs if num_ranks > 1 else 0, slots),
    )
    return out


def _arguments(
    y: torch.Tensor, sums: LayerSums, num_gemm_programs: int, slots: Slots
) -> dict[str, Any]:
    """What both kernels that sum are launched with."""
    _, max_rows, num_topk = sums.plan.expert_row.shape
    row = RowLayout(y.shape[1] * y.itemsize)
    return dict(
        expert_row=sums.plan.expert_row,
        lane_weight=sums.plan.lane_weight,
        computed=sums.schedule.counters[1] if num_gemm_programs else None,
        context=slots.context.words,
        stage_count=sums.schedule.stages_back,
        num_gemm_programs=num_gemm_programs,
        max_rows=max_rows,
        hidden=y.shape[1],
        row_bytes=row.num_bytes,
        NUM_TOPK=num_topk,
        RANKS_PAD=next_power_of_2(slots.layout.num_ranks),
        CHUNK_ROWS=slots.layout.chunk_rows(row.num_bytes),
        OVERLAP=launches_overlap(),
        **early_launch(),
    )
