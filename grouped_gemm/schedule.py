"""Which rows each tile computes: made on the device, once for the GEMMs that share it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from ..checks import check_runnable, check_tensor
from ..errors import ShapeError
from ..hardware import early_launch, launches_overlap
from ..utils import next_power_of_2
from .schedule_kernels import _tile_schedule_kernel

INDEX_DTYPES = (torch.int32, torch.int64)
MAX_BLOCK_M = 255
"""As large as the bits of a tile hold."""
MAX_EXPERTS = 2**16
"""The same for experts."""
MAX_ROWS = 2**30
"""Rows of a ragged descriptor."""


@dataclass(frozen=True, slots=True)
class TileSchedule:
    """Which rows each tile of rows computes, on the device; made by `tile_schedule`.

    tiles: int64 [max_tiles], of which the first num_tiles (int32 [1]) count: a tile's first row,
    its number of rows, up to block_m, from bit 32 on, and its expert from bit 40 to 55.
    """

    tiles: torch.Tensor
    num_tiles: torch.Tensor
    offsets: torch.Tensor
    max_rows: int
    block_m: int

    def tolist(self) -> list[tuple[int, int, int]]:
        """(expert, first row, number of rows) of each tile, for a look at it; waits for the
        device."""
        tiles = self.tiles[: int(self.num_tiles)].tolist()
        return [(tile >> 40, tile & 0x7FFFFFFF, tile >> 32 & 0xFF) for tile in tiles]


def tile_schedule(offsets: torch.Tensor, max_rows: int, block_m: int) -> TileSchedule:
    """Cut the rows of each expert into tiles of `block_m` rows.

    offsets: int32 or int64 [L + 1], rising from 0; expert e owns rows offsets[e] .. offsets[e+1].
    Rows from `max_rows` on get no tile. With offsets [0, 3, 3, 4] and block_m 2, the tiles are
    rows 0-1 and 2 of expert 0, and row 3 of expert 2.
    """
    check_tensor("offsets", offsets, ("L+1",), INDEX_DTYPES)
    check_runnable(offsets.device)
    num_experts = offsets.numel() - 1
    if num_experts < 1 or not 0 <= max_rows <= MAX_ROWS or not 1 <= block_m <= MAX_BLOCK_M:
        raise ShapeError(
            f"offsets has {offsets.numel()} elements, max_rows is {max_rows} and block_m is "
            f"{block_m}; offsets needs one element more than there are experts, at least 2, and "
            f"max_rows and block_m lie in 0 .. {MAX_ROWS} and 1 .. {MAX_BLOCK_M}."
        )
    offsets = offsets.contiguous()
    max_tiles = triton.cdiv(max_rows, block_m) + num_experts
    tiles = torch.empty(max_tiles, dtype=torch.int64, device=offsets.device)
    num_tiles = torch.empty(1, dtype=torch.int32, device=offsets.device)
    with torch.cuda.device_of(offsets):
        _tile_schedule_kernel[(num_experts,)](
            offsets,
            tiles,
            num_tiles,
            num_experts,
            max_rows,
            max_tiles,
            BLOCK_M=block_m,
            MAX_EXPERTS=next_power_of_2(num_experts),
            STEP=128,
            OVERLAP=launches_overlap(),
            **early_launch(),
        )
    return TileSchedule(tiles, num_tiles, offsets, max_rows, block_m)
