"""Tiles of expert rows and the stages in which they come and go; kernels in `stages_kernels.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from ..hardware import has_pdl, pdl_options, share_sms
from ..routing import Places
from ..utils import next_power_of_2
from .stages_kernels import staged_schedule_kernel


@dataclass(frozen=True, slots=True)
class StagedSchedule:
    """Tiles of expert rows, on the device.

    tiles int64 [max_tiles] in the order in which rows arrive, num_own int32 [1] and first_tile
    int32 [back_stages + 2]: see `staged_schedule_kernel`. Counters int64, from 0 on: pushed
    [stages], programs that have pushed their share of a stage; copied [2 * stages], those that have
    copied theirs, of own rows, then of others'; computed [back_stages + 1], those that have
    computed their tiles of a stage; returned [back_stages], those that have returned its sums;
    num_to_sum [back_stages]: tokens whose last row comes back in each stage; listed [R,
    back_stages]: rows that each rank gets back in each stage.
    """

    tiles: torch.Tensor
    num_own: torch.Tensor
    first_tile: torch.Tensor
    pushed: torch.Tensor
    copied: torch.Tensor
    computed: torch.Tensor
    returned: torch.Tensor
    num_to_sum: torch.Tensor
    listed: torch.Tensor
    stages: int
    back_stages: int
    own_apart: bool


def staged_schedule(
    places: Places,
    max_expert_rows: int,
    block_m: int,
    stages: int,
    back_stages: int,
    own_apart: bool,
    num_ranks: int,
) -> StagedSchedule:
    """Cut expert rows into tiles; see `staged_schedule_kernel`."""
    num_local_experts = places.expert_offsets.numel() - 1
    new = places.expert_offsets.new_empty
    max_tiles = triton.cdiv(max_expert_rows, block_m) + num_local_experts
    parts = stages, 2 * stages, back_stages + 1, back_stages, back_stages, num_ranks * back_stages
    counters = new(sum(parts), dtype=torch.int64)
    pushed, copied, computed, returned, num_to_sum, listed = counters.split(parts)
    schedule = StagedSchedule(
        tiles=new(max_tiles, dtype=torch.int64),
        num_own=new(1),
        first_tile=new(back_stages + 2),
        pushed=pushed,
        copied=copied,
        computed=computed,
        returned=returned,
        num_to_sum=num_to_sum,
        listed=listed,
        stages=stages,
        back_stages=back_stages,
        own_apart=own_apart,
    )
    launched = staged_schedule_kernel[(num_local_experts,)](
        places.expert_offsets,
        places.remote_offsets,
        schedule.tiles,
        schedule.num_own,
        schedule.first_tile,
        counters,
        len(counters),
        num_local_experts,
        stages,
        int(own_apart),
        max_tiles,
        BLOCK_M=block_m,
        BACK_STAGES=back_stages,
        EXPERTS_PAD=next_power_of_2(num_local_experts),
        COUNTERS_PAD=next_power_of_2(len(counters)),
        STEP=128,
        PDL=has_pdl(),
        **pdl_options(),
    )
    share_sms(launched)
    return schedule
