"""Tiles in the order in which rows come and are sent back; kernels in `stages_kernels.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from .hardware import early_launch, launches_overlap
from .slots import next_power_of_2
from .stages_kernels import staged_schedule_kernel


@dataclass(frozen=True, slots=True)
class StagedSchedule:
    """Tiles of expert rows, on the device.

    tiles int64 [2, max_tiles], see `TileSchedule`: in order of rows, as they arrive, and by turn,
    as they are returned: turn s holds the rows of share s of the other ranks' tokens, the last one
    this rank's own. first_tile int32 [turns + 1]: the tile that begins each turn. Counters int64,
    from 0 on: pushed [stage_count], programs that have pushed their share of a stage; computed and
    returned [turns], those that have computed and returned theirs of a turn.
    """

    tiles: torch.Tensor
    first_tile: torch.Tensor
    counters: torch.Tensor
    block_m: int
    stage_count: int

    @property
    def turns(self) -> int:
        return self.first_tile.numel() - 1

    @property
    def pushed(self) -> torch.Tensor:
        return self.counters[: self.stage_count]

    @property
    def computed(self) -> torch.Tensor:
        return self.counters[self.stage_count : self.stage_count + self.turns]

    @property
    def returned(self) -> torch.Tensor:
        return self.counters[self.stage_count + self.turns :]


def staged_schedule(
    expert_rows: torch.Tensor,
    expert_offsets: torch.Tensor,
    max_expert_rows: int,
    block_m: int,
    stage_count: int,
    mixed: bool,
) -> StagedSchedule:
    """Cut expert rows into tiles, in both orders; see `staged_schedule_kernel`. expert_rows int32
    [turns, L]. Early, behind the exchange, and the launch behind it may be early too."""
    turns, num_local_experts = expert_rows.shape
    new = expert_rows.new_empty
    max_tiles = triton.cdiv(max_expert_rows, block_m) + num_local_experts * (1 if mixed else turns)
    num_counters = stage_count + 2 * turns
    schedule = StagedSchedule(
        new((2, max_tiles), dtype=torch.int64),
        new(turns + 1),
        new(num_counters, dtype=torch.int64),
        block_m,
        stage_count,
    )
    staged_schedule_kernel[(num_local_experts, 2)](
        expert_rows,
        expert_offsets,
        schedule.tiles,
        schedule.first_tile,
        schedule.counters,
        num_counters,
        num_local_experts,
        max_tiles,
        BLOCK_M=block_m,
        TURNS=turns,
        EXPERTS_PAD=next_power_of_2(num_local_experts),
        COUNTERS_PAD=next_power_of_2(num_counters),
        STEP=128,
        MIXED=mixed,
        OVERLAP=launches_overlap(),
        **early_launch(),
    )
    return schedule
