"""Tiles of expert rows and the stages in which they come and go; kernels in `stages_kernels.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from .hardware import early_launch, launches_overlap, share_sms
from .slots import next_power_of_2
from .stages_kernels import staged_schedule_kernel


@dataclass(frozen=True, slots=True)
class StagedSchedule:
    """Tiles of expert rows, on the device.

    tiles int64 [max_tiles], see `TileSchedule`, in the order in which rows arrive and go back;
    first_tile int32 [back_stages + 1]: the tile that begins each stage of the way back. Counters
    int64, from 0 on: pushed and repeated [stages], programs that have pushed and repeated their
    share of a stage; computed and returned [back_stages], those that have computed and returned
    theirs; num_to_sum [back_stages]: tokens whose last row comes back in each stage; listed [R,
    back_stages]: rows that each rank gets back in each stage.
    """

    tiles: torch.Tensor
    first_tile: torch.Tensor
    counters: torch.Tensor
    block_m: int
    stages: int
    back_stages: int

    @property
    def pushed(self) -> torch.Tensor:
        return self.counters[: self.stages]

    @property
    def repeated(self) -> torch.Tensor:
        return self.counters[self.stages :][: self.stages]

    @property
    def computed(self) -> torch.Tensor:
        return self.counters[2 * self.stages :][: self.back_stages]

    @property
    def returned(self) -> torch.Tensor:
        return self.counters[2 * self.stages + self.back_stages :][: self.back_stages]

    @property
    def num_to_sum(self) -> torch.Tensor:
        return self.counters[2 * (self.stages + self.back_stages) :][: self.back_stages]

    @property
    def listed(self) -> torch.Tensor:
        return self.counters[2 * self.stages + 3 * self.back_stages :]


def staged_schedule(
    expert_offsets: torch.Tensor,
    max_expert_rows: int,
    block_m: int,
    stages: int,
    back_stages: int,
    num_ranks: int,
) -> StagedSchedule:
    """Cut expert rows into tiles; see `staged_schedule_kernel`. expert_offsets int32 [L + 1]."""
    num_local_experts = expert_offsets.numel() - 1
    new = expert_offsets.new_empty
    max_tiles = triton.cdiv(max_expert_rows, block_m) + num_local_experts
    num_counters = 2 * stages + (3 + num_ranks) * back_stages
    schedule = StagedSchedule(
        new(max_tiles, dtype=torch.int64),
        new(back_stages + 1),
        new(num_counters, dtype=torch.int64),
        block_m,
        stages,
        back_stages,
    )
    launched = staged_schedule_kernel[(num_local_experts,)](
        expert_offsets,
        schedule.tiles,
        schedule.first_tile,
        schedule.counters,
        num_counters,
        num_local_experts,
        max_tiles,
        BLOCK_M=block_m,
        BACK_STAGES=back_stages,
        EXPERTS_PAD=next_power_of_2(num_local_experts),
        COUNTERS_PAD=next_power_of_2(num_counters),
        STEP=128,
        OVERLAP=launches_overlap(),
        **early_launch(),
    )
    share_sms(launched)
    return schedule
