"""Which rows each tile computes: made on the device, once for the GEMMs that share it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from ..checks import check_runnable, check_tensor
from ..errors import ShapeError
from ..hardware import early_launch, launches_overlap
from .schedule_kernels import _tile_schedule_kernel

INDEX_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class TileSchedule:
    """Which rows each tile of rows computes, on the device; made by `tile_schedule`.

    Tile i < num_tiles holds the block_m rows from row[i] on that are before
    offsets[expert[i] + 1]. `expert` and `row` are int32 [max_tiles], `num_tiles` int32 [1].
    """

    expert: torch.Tensor
    row: torch.Tensor
    num_tiles: torch.Tensor
    offsets: torch.Tensor
    block_m: int

    def arguments(self) -> tuple[torch.Tensor, ...]:
        """What kernels are launched with."""
        return self.expert, self.row, self.num_tiles, self.offsets


def tile_schedule(offsets: torch.Tensor, max_rows: int, block_m: int) -> TileSchedule:
    """Cut the rows of each expert into tiles of `block_m` rows.

    offsets: int32 or int64 [L + 1], rising from 0; expert e owns rows offsets[e] .. offsets[e+1].
    Rows from `max_rows` on get no tile. With offsets [0, 3, 3, 4] and block_m 2, the tiles are
    rows 0-1 and 2 of expert 0, and row 3 of expert 2: expert [0, 0, 2], row [0, 2, 3].
    """
    check_tensor("offsets", offsets, ("L+1",), INDEX_DTYPES)
    check_runnable(offsets.device)
    num_experts = offsets.numel() - 1
    if num_experts < 1 or max_rows < 0 or block_m < 1:
        raise ShapeError(
            f"offsets has {offsets.numel()} elements, max_rows is {max_rows} and block_m is "
            f"{block_m}; offsets needs one element more than there are experts, at least 2."
        )
    offsets = offsets.contiguous()
    max_tiles = triton.cdiv(max_rows, block_m) + num_experts
    expert = torch.empty(max_tiles, dtype=torch.int32, device=offsets.device)
    row = torch.empty_like(expert)
    num_tiles = torch.empty(1, dtype=torch.int32, device=offsets.device)
    with torch.cuda.device_of(offsets):
        _tile_schedule_kernel[(num_experts,)](
            offsets,
            expert,
            row,
            num_tiles,
            num_experts,
            max_rows,
            BLOCK_M=block_m,
            MAX_EXPERTS=triton.next_power_of_2(num_experts),
            STEP=128,
            OVERLAP=launches_overlap(),
            **early_launch(),
        )
    return TileSchedule(expert, row, num_tiles, offsets, block_m)
