"""Tiles sorted by the ranks whose rows they hold, on the device; kernels in `stages_kernels.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from .hardware import early_launch, launches_overlap
from .slots import Slots, next_power_of_2
from .stages_kernels import staged_schedule_kernel


@dataclass(frozen=True, slots=True)
class StagedSchedule:
    """Tiles of rows in the order in which their rows come, and in which they are sent back.

    tiles int64 [2, max_tiles], see `TileSchedule`, on the way there and back; first_tile int32 [2,
    S + 1]: the tile that begins each stage's turn, there 0, 1, ..., back 1, 2, ..., 0; counters
    int64 [3, S]: zeros, for programs to count in, turn by turn: who has pushed, who has computed,
    and spans of returned rows that are taken. stages_there, stages_back: how many, S at most.
    """

    tiles: torch.Tensor
    first_tile: torch.Tensor
    counters: torch.Tensor
    block_m: int
    stages_there: int
    stages_back: int


def staged_schedule(
    recv_expert_counts: torch.Tensor,
    expert_offsets: torch.Tensor,
    max_expert_rows: int,
    block_m: int,
    stages: tuple[int, int],
    mixed: bool,
    slots: Slots,
) -> StagedSchedule:
    """Cut rows into tiles and sort them by `stages`, there and back; see `staged_schedule_kernel`.
    Early, behind the exchange, and the launch behind it may be early too."""
    num_ranks, num_local_experts = recv_expert_counts.shape
    new = recv_expert_counts.new_empty
    max_tiles = triton.cdiv(max_expert_rows, block_m) + num_local_experts
    num_stages = max(stages)
    if not mixed:
        max_tiles += num_local_experts * (num_stages - 1)
    schedule = StagedSchedule(
        new((2, max_tiles), dtype=torch.int64),
        new((2, num_stages + 1)),
        new((3, num_stages), dtype=torch.int64),
        block_m,
        *stages,
    )
    staged_schedule_kernel[(num_local_experts, 2)](
        recv_expert_counts,
        expert_offsets,
        schedule.tiles,
        schedule.first_tile,
        schedule.counters,
        slots.context.words,
        num_local_experts,
        *stages,
        max_tiles,
        BLOCK_M=block_m,
        RANKS_PAD=next_power_of_2(num_ranks),
        EXPERTS_PAD=next_power_of_2(num_local_experts),
        STEP=128,
        MIXED=mixed,
        OVERLAP=launches_overlap(),
        **early_launch(),
    )
    return schedule
