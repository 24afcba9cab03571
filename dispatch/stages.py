"""Tiles of expert rows and the stages in which they come and go; kernels in `stages_kernels.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
import triton

from ..device.constants import constants
from ..layer_config import LayerConfig
from ..symm.slots import Slots
from ..utils import next_power_of_2
from .exchange_kernels import exchange_fused_kernel
from .place_rows_kernels import place_rows_kernel
from .stages_kernels import ScheduleSizes, StagedTiles, staged_schedule_kernel


class StagedSchedule(NamedTuple):
    """Tiles of expert rows, up to block_m each, on the device.

    tiles int64 [max_tiles] in the order in which rows arrive, num_own int32 [1], first_tile int32
    [return stages + 2] and last_counter int32 [L]: see `staged_schedule_kernel`.
    """

    tiles: torch.Tensor
    num_own: torch.Tensor
    first_tile: torch.Tensor
    last_counter: torch.Tensor
    block_m: int

    @property
    def num_tiles(self) -> torch.Tensor:
        """int32 [1]: of all stages."""
        return self.first_tile[-1:]

    @property
    def staged(self) -> StagedTiles:
        """What kernels that go through it stage by stage take."""
        return StagedTiles(self.tiles, self.num_own, self.first_tile, self.last_counter)


@dataclass(frozen=True, slots=True)
class StageCounters:
    """Counters of a call by which its kernels tell each other how far they are, int64 on the
    device. `staged_schedule_kernel` zeroes them; each is raised by one kernel:

    claimed [2]: tiles of the up-projection and of the down-projection, or those of a backward, that
    programs have begun; copied [2 * stages]: programs that have copied their share of a stage, of
    own rows, then of others', by `copy_rows_kernel`; pushed [stages]: programs that have pushed
    their share, by `push_fused_kernel`; listed [R, return stages]: rows that each rank gets back in
    each stage, and num_to_sum [return stages]: tokens whose last row comes back in each stage, by
    `send_return_metadata_kernel`; computed [return stages + 1]: programs that have computed their
    tiles of a stage, by `staged_gemm_kernel`; returned [return stages]: programs that have returned
    their share of its sums, by `return_sums_kernel`.

    words: all of them, one after the other. `claimed` comes first, so that its alignment, for which
    kernels are compiled, is always the same.
    """

    words: torch.Tensor
    claimed: torch.Tensor
    copied: torch.Tensor
    pushed: torch.Tensor
    computed: torch.Tensor
    returned: torch.Tensor
    num_to_sum: torch.Tensor
    listed: torch.Tensor

    @staticmethod
    def sizes(config: LayerConfig, num_ranks: int) -> tuple[int, ...]:
        """How many there are of each."""
        stages, returns = config.num_stages, config.num_return_stages
        return 2, 2 * stages, stages, returns + 1, returns, returns, num_ranks * returns

    @classmethod
    def of(cls, words: torch.Tensor, config: LayerConfig, num_ranks: int) -> Self:
        """The counters in `words`."""
        return cls(words, *words.split(cls.sizes(config, num_ranks)))


def staged_schedule(
    offsets: torch.Tensor,
    remote_offsets: torch.Tensor,
    max_expert_rows: int,
    block_m: int,
    config: LayerConfig,
    slots: Slots,
) -> tuple[StagedSchedule, StageCounters]:
    """Cut expert rows into tiles of up to block_m, given where each expert's rows begin and those
    from other ranks, int32 [L + 1]; see `staged_schedule_kernel`."""
    num_local_experts = offsets.numel() - 1
    stages, returns = config.num_stages, config.num_return_stages
    new = offsets.new_empty
    max_tiles = triton.cdiv(max_expert_rows, block_m) + num_local_experts
    counters = new(sum(StageCounters.sizes(config, slots.num_ranks)), dtype=torch.int64)
    schedule = StagedSchedule(
        tiles=new(max_tiles, dtype=torch.int64),
        num_own=new(1),
        first_tile=new(returns + 2),
        last_counter=new(num_local_experts),
        block_m=block_m,
    )
    sizes = ScheduleSizes(
        BLOCK_M=block_m,
        RETURN_STAGES=returns,
        EXPERTS_PAD=next_power_of_2(num_local_experts),
        COUNTERS_PAD=next_power_of_2(len(counters)),
        STEP=128,
    )
    slots.context.launch(
        staged_schedule_kernel,
        (num_local_experts,),
        offsets,
        remote_offsets,
        schedule.staged,
        counters,
        len(counters),
        num_local_experts,
        stages,
        config.own_first,
        max_tiles,
        SIZES=constants(sizes),
        after=(place_rows_kernel, exchange_fused_kernel),
        shares_sms=True,
    )
    return schedule, StageCounters.of(counters, config, slots.num_ranks)
