"""Which rows each tile computes: made on the device, once for the GEMMs that share it."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from ..checks import check_contiguous, check_int, check_runnable, check_tensor, shown
from ..errors import DtypeError, ShapeError
from ..launch import launch
from ..prepared import prepared
from ..utils import next_power_of_2
from .config import BLOCK_MS
from .schedule_kernels import Tiles, _tile_schedule_kernel

INDEX_DTYPES = (torch.int32, torch.int64)
MAX_BLOCK_M = 255
"""Most rows that the bits of a tile can hold."""
MAX_EXPERTS = 2**16
"""Most experts that they can hold."""
MAX_ROWS = 2**30
"""Most rows of a ragged descriptor."""


class TileSchedule(NamedTuple):
    """Which rows each tile computes; `tile_schedule` makes it, on the device.

    tiles: int64 [max_tiles], of which the first num_tiles (int32 [1]) are in use: a tile's first
    row, its number of rows, up to block_m, from bit 32 on, and its expert from bit 40 to 55.
    """

    tiles: torch.Tensor
    num_tiles: torch.Tensor
    offsets: torch.Tensor
    max_rows: int
    block_m: int

    @classmethod
    def empty(cls, offsets: torch.Tensor, max_rows: int, block_m: int) -> TileSchedule:
        """Room for the tiles."""
        num_tiles = triton.cdiv(max_rows, block_m) + len(offsets) - 1
        tiles = offsets.new_empty(num_tiles, dtype=torch.int64)
        count = offsets.new_empty(1, dtype=torch.int32)
        return cls(tiles, count, offsets, max_rows, block_m)

    @property
    def for_kernels(self) -> Tiles:
        """What a GEMM's kernel reads of it."""
        return Tiles(self.tiles, self.num_tiles)

    def tolist(self) -> list[tuple[int, int, int]]:
        """(expert, first row, number of rows) of each tile, for debugging; this waits for the
        device."""
        tiles = self.tiles[: int(self.num_tiles)].tolist()
        return [(tile >> 40, tile & 0x7FFFFFFF, tile >> 32 & 0xFF) for tile in tiles]


def tile_schedule(offsets: torch.Tensor, max_rows: int, block_m: int) -> TileSchedule:
    """Cut the rows of each expert into tiles of `block_m` rows.

    offsets: int32 or int64 [L + 1], rising from 0; expert e owns rows offsets[e] .. offsets[e+1].
    Rows from `max_rows` on get no tile. With offsets [0, 3, 3, 4] and block_m 2, the tiles are
    rows 0-1 and 2 of expert 0, and row 3 of expert 2.
    """
    return _tile_schedule(offsets, max_rows, block_m)


@prepared
def _tile_schedule(offsets: torch.Tensor, max_rows: int, block_m: int) -> TileSchedule:
    check_tensor("offsets", offsets, ("L+1",), INDEX_DTYPES)
    check_runnable(offsets.device)
    max_rows = check_int("max_rows", max_rows, 0, MAX_ROWS)
    block_m = check_int("block_m", block_m, 1, MAX_BLOCK_M)
    num_experts = offsets.shape[0] - 1
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ShapeError(
            f"offsets has {num_experts + 1} elements; it needs one more than there are experts, 2 "
            f"to {MAX_EXPERTS + 1}."
        )
    offsets = offsets.contiguous()
    schedule = TileSchedule.empty(offsets, max_rows, block_m)
    launch(
        _tile_schedule_kernel,
        (num_experts,),
        *(offsets, *schedule.for_kernels, num_experts, max_rows, len(schedule.tiles)),
        BLOCK_M=block_m,
        MAX_EXPERTS=next_power_of_2(num_experts),
        STEP=128,
    )
    return schedule


def checked_block_m(schedule: TileSchedule | None) -> int | None:
    """block_m of a user's schedule, None without one. Raises ShapeError or DtypeError for what
    `tile_schedule` did not make."""
    if schedule is None:
        return None
    if not isinstance(schedule, TileSchedule):
        raise DtypeError(
            f"schedule is a {type(schedule).__name__}; it must be what tile_schedule(...) returned."
        )
    check_int("schedule.max_rows", schedule.max_rows, 0, MAX_ROWS)
    if type(schedule.block_m) is not int or schedule.block_m not in BLOCK_MS:
        raise ShapeError(
            f"schedule has tiles of {shown(schedule.block_m)} rows; a GEMM takes one of {BLOCK_MS}."
        )
    check_tensor("schedule.offsets", schedule.offsets, ("L+1",), INDEX_DTYPES)
    device, num_experts = schedule.offsets.device, schedule.offsets.shape[0] - 1
    max_tiles = triton.cdiv(schedule.max_rows, schedule.block_m) + num_experts
    check_tensor("schedule.tiles", schedule.tiles, (max_tiles,), (torch.int64,), device)
    check_tensor("schedule.num_tiles", schedule.num_tiles, (1,), (torch.int32,), device)
    check_contiguous("schedule.tiles", schedule.tiles)
    check_contiguous("schedule.offsets", schedule.offsets)
    return schedule.block_m
