"""The kernel that cuts rows into tiles."""

import triton
import triton.language as tl

from ..work import let_next_start, wait_for_previous


@triton.jit(do_not_specialize=["num_experts", "max_rows"])
def _tile_schedule_kernel(
    offsets,
    tile_expert,
    tile_row,
    num_tiles,
    num_experts,
    max_rows,
    BLOCK_M: tl.constexpr,
    MAX_EXPERTS: tl.constexpr,
    STEP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Cut the rows of each expert into tiles of BLOCK_M; program e writes the tiles of expert e.

    offsets [0, 3, 3, 4], BLOCK_M 2: tile_expert [0, 0, 2], tile_row [0, 2, 3], num_tiles [3].
    An early launch, and the GEMM behind it is one.
    """
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    expert = tl.program_id(0)
    experts = tl.arange(0, MAX_EXPERTS)
    exists = experts < num_experts
    begins = tl.load(offsets + experts, mask=exists, other=0)
    ends = tl.minimum(tl.load(offsets + experts + 1, mask=exists, other=0), max_rows)
    counts = tl.cdiv(tl.maximum(ends - begins, 0), BLOCK_M).to(tl.int32)
    first = tl.sum(tl.where(experts < expert, counts, 0), 0)
    count = tl.sum(tl.where(experts == expert, counts, 0), 0)
    begin = tl.load(offsets + expert).to(tl.int32)
    for start in range(0, count, STEP):
        tiles = start + tl.arange(0, STEP)
        tl.store(tile_expert + first + tiles, expert, mask=tiles < count)
        tl.store(tile_row + first + tiles, begin + tiles * BLOCK_M, mask=tiles < count)
    if expert == num_experts - 1:
        tl.store(num_tiles, first + count)
