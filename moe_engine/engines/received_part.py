"""What experts make of the rows that came from some of the ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..device.internode import NEAR
from ..dispatch import NUM_CONCURRENT, Received
from ..expert_major import Places, place_into, sum_rows
from ..grouped_gemm.config import GemmConfig
from ..grouped_gemm.schedule import TileSchedule, tile_schedule
from .base import LayerInputs
from .expert_products import (
    ExpertMemory,
    expert_tiles,
    multiply_down,
    multiply_up,
    received_operand,
    sent_columns,
)


class Part(NamedTuple):
    """The received rows of some ranks, and what their experts make of them.

    sides: see `device/internode.py`. arrived: `Received` of all ranks, whose x are the addresses of
    rows of this part, 0 for others. rows [M, ..]: expert rows, as they travel.
    """

    sides: int
    arrived: Received
    places: Places
    rows: torch.Tensor
    memory: ExpertMemory
    tiles: tuple[GemmConfig, GemmConfig]

    @classmethod
    def empty(
        cls,
        sides: int,
        inputs: LayerInputs,
        arrived: Received,
        num_rows: int,
        balanced: int | None = None,
    ) -> Part:
        """Memory for so many expert rows, where balanced routing brings so many; None: as many."""
        assert arrived.topk_idx is not None
        rows = inputs.x.new_empty(num_rows, sent_columns(inputs))
        places = Places.empty(arrived.topk_idx, len(inputs.w_gate_up), num_rows)
        memory = ExpertMemory.empty(inputs, num_rows)
        tiles = expert_tiles(inputs, num_rows if balanced is None else balanced)
        return cls(sides, arrived, places, rows, memory, tiles)

    def place(self) -> None:
        """Give the rows that arrived places among the expert rows."""
        ids = self.arrived.topk_idx
        assert ids is not None
        place_into(self.places, ids, self.arrived.topk_weights, present=self.arrived.x)

    @property
    def num_free_sms(self) -> int:
        """SMs that the products leave to what runs concurrently with them: a program of theirs and
        one that communicates do not fit on an SM together."""
        return NUM_CONCURRENT if self.sides == NEAR.value else 0

    def up(self, inputs: LayerInputs) -> TileSchedule:
        """The first product."""
        rows, tiles = received_operand(self.rows, inputs), self.tiles[0]
        schedule = tile_schedule(self.places.offsets, len(self.rows), tiles.block_m)
        multiply_up(rows, inputs, schedule, tiles, self.memory, self.num_free_sms)
        return schedule

    def down(self, inputs: LayerInputs, schedule: TileSchedule, sums: torch.Tensor) -> None:
        """The second product, and its sums [N, H] for the rows of this part."""
        how = self.tiles[1], self.memory, self.places.row_weights, self.num_free_sms
        y = multiply_down(inputs, schedule, *how)
        sum_rows(y, self.places.dst_rows, into=sums, present=self.arrived.x)
