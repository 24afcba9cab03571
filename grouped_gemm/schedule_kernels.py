"""The kernel that cuts rows into tiles, and how GEMMs go through them. A tile is packed into one
64-bit word, as a GEMM waits for it at each tile and so makes one load."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..device.lang import count_inline, device_function
from ..device.programs import pdl_launch_dependents, pdl_wait


class Tiles(NamedTuple):
    """The tiles of a `schedule.TileSchedule`, as kernels take them."""

    packed: tl.tensor  # int64 [max_tiles], see `pack_tile`
    count: tl.tensor  # int32 [1]


class Tile(NamedTuple):
    """The part of the output that a program computes: rows `row` to `end` of an expert, from column
    `n` on."""

    expert: tl.tensor
    row: tl.tensor
    end: tl.tensor
    n: tl.tensor


@triton.jit(do_not_specialize=["num_experts", "max_rows", "max_tiles"])
def _tile_schedule_kernel(
    offsets,
    tiles,
    num_tiles,
    num_experts,
    max_rows,
    max_tiles,
    BLOCK_M: tl.constexpr,
    MAX_EXPERTS: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Cut the rows of each expert into tiles of BLOCK_M; program e writes the tiles of expert e.

    offsets [0, 3, 3, 4], BLOCK_M 2: tiles (expert, row, number of rows) (0, 0, 2) (0, 2, 1)
    (2, 3, 1), num_tiles [3]. A PDL launch, and the GEMM after it is one, too.
    """
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    expert = tl.program_id(0)
    experts = tl.arange(0, MAX_EXPERTS)
    exists = experts < num_experts
    begins = tl.load(offsets + experts, mask=exists, other=0)
    ends = tl.minimum(tl.load(offsets + experts + 1, mask=exists, other=0), max_rows)
    counts = tl.cdiv(tl.maximum(ends - begins, 0), BLOCK_M).to(tl.int32)
    first = tl.sum(tl.where(experts < expert, counts, 0), 0)
    count = tl.sum(tl.where(experts == expert, counts, 0), 0)
    begin = tl.load(offsets + expert).to(tl.int64)
    end = tl.minimum(tl.load(offsets + expert + 1), max_rows).to(tl.int64)
    for start in range(0, count, STEP):
        tile = start + tl.arange(0, STEP)
        row = begin + tile.to(tl.int64) * BLOCK_M
        packed = pack_tile(expert, row, tl.minimum(end - row, BLOCK_M))
        # Offsets that fall would make more tiles than there is room for.
        tl.store(tiles + first + tile, packed, mask=(tile < count) & (first + tile < max_tiles))
    if expert == num_experts - 1:
        tl.store(num_tiles, tl.minimum(first + count, max_tiles))


@device_function
def pack_tile(expert, row, num_rows):
    """A tile as one word: its first row, from bit 32 on its number of rows, from bit 40 to 55 its
    expert. Bits 56 to 63 are free."""
    return row.to(tl.int64) | num_rows.to(tl.int64) << 32 | expert.to(tl.int64) << 40


@device_function
def unpack_tile(packed):
    """(expert, first row, end of the rows) of a tile."""
    row = (packed & 0x7FFFFFFF).to(tl.int32)
    expert = (packed >> 40 & 0xFFFF).to(tl.int32)
    return expert, row, row + (packed >> 32 & 0xFF).to(tl.int32)


class ClaimedTiles(NamedTuple):
    """`Tiles`, and an int64 [1], 0 before, by which programs claim them, or None; see
    `claim_tile`."""

    packed: tl.tensor
    count: tl.tensor
    claimed: tl.tensor


@device_function
def claim_tile(claimed, index):
    """The next tile of a program whose loop has come to `index`, one of every n-th: the next one
    that no program has begun, by their number `claimed`, or without it number `index` itself.

    A program claims as many as it would have without, so that its loop is as long, and pipelined.
    But all claim them in their order: tiles in flight are neighbours, which share rows and weights
    in L2, however unequal the SMs are. Else those that memory serves last fall back from tile to
    tile, and read alone what the others have read together (bench/notes/e4m3_layers.md).
    """
    if claimed is not None:
        index = count_inline(claimed.to(tl.int64))
    return index


@device_function
def tile_coordinates(tile, num_m, num_n, GROUP_M: tl.constexpr):
    """(m, n) of a tile. Tiles in flight together share rows of A and of the weights in L2.

    num_m 3, num_n 2, GROUP_M 2: (0, 0) (1, 0) (0, 1) (1, 1) (2, 0) (2, 1).
    """
    first = tile // (GROUP_M * num_n) * GROUP_M
    height = tl.minimum(num_m - first, GROUP_M)
    inside = tile % (GROUP_M * num_n)
    return first + inside % height, inside // height


@device_function
def load_tile(tiles, index, num_m, num_n, WIDTH: tl.constexpr, GROUP_M: tl.constexpr):
    """Tile `index` of an output of num_m tiles of rows and num_n of WIDTH columns.

    It is one load, as the program waits for it. A tile that is read ahead and handed on from one
    iteration to the next comes out wrong: a flattened loop replaces what is handed on too early
    (Triton 3.6).
    """
    m, block = tile_coordinates(index, num_m, num_n, GROUP_M)
    expert, row, end = unpack_tile(tl.load(tiles.packed + m))
    return Tile(expert, row, end, block * WIDTH)
