"""The kernel that cuts expert rows into tiles, in two orders."""

import triton
import triton.language as tl

from .grouped_gemm.schedule_kernels import pack_tile, tile_coordinates
from .lang import device_function
from .work import let_next_start, wait_for_previous


@triton.jit(do_not_specialize=["num_local_experts", "num_counters", "max_tiles"])
def staged_schedule_kernel(
    expert_rows,  # int32 [TURNS, L]: rows of each expert by turn, in which order they stand
    expert_offsets,  # int32 [L + 1]
    tiles,  # int64 [2, max_tiles], out: in order of rows, then by turn
    first_tile,  # int32 [TURNS + 1], out: tile that begins each turn
    counters,  # int64 [num_counters], out: 0
    num_counters,
    num_local_experts,
    max_tiles,
    BLOCK_M: tl.constexpr,
    TURNS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    COUNTERS_PAD: tl.constexpr,
    STEP: tl.constexpr,
    MIXED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Cut each expert's rows into tiles of BLOCK_M; program (e, w) writes those of expert e, on the
    way there (w 0) in order of rows, on the way back sorted by (turn, expert). An early launch
    behind the exchange.

    A tile that holds rows of several turns belongs to the first of them, whose rows wait for it.
    Without MIXED, tiles end where a turn does. Two turns, BLOCK_M 2, experts with [3, 1] and [1, 2]
    rows by turn, as (expert, row, number of rows):

        there: (0, 0, 2) (0, 2, 2) (1, 4, 2) (1, 6, 1)
        back:  (0, 0, 2) (0, 2, 2) (1, 4, 2) | (1, 6, 1)      first_tile [0, 3, 4]
    """
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    expert = tl.program_id(0)
    way = tl.program_id(1)
    TURNS_PAD: tl.constexpr = triton.next_power_of_2(TURNS)
    turns = tl.arange(0, TURNS_PAD)
    experts = tl.arange(0, EXPERTS_PAD)
    inside = (turns < TURNS)[:, None] & (experts < num_local_experts)[None, :]
    at = expert_rows + turns[:, None] * num_local_experts + experts[None, :]
    counts = tl.load(at, mask=inside, other=0)
    ends = tl.cumsum(counts, 0)
    begins = ends - counts
    if MIXED:
        first = tl.cdiv(begins, BLOCK_M)
        num = tl.cdiv(ends, BLOCK_M) - first
        begins = first * BLOCK_M
        ends = tl.sum(counts, 0)[None, :] + ends * 0
    else:
        num = tl.cdiv(counts, BLOCK_M)
    # Tiles that stand before those of a turn of this expert.
    is_earlier = (experts < expert)[None, :]
    by_row = tl.sum(tl.where(is_earlier, num, 0)) + tl.sum(
        tl.where((experts == expert)[None, :], tl.cumsum(num, 0) - num, 0), 1
    )
    of_turn = tl.sum(num, 1)
    by_turn = tl.cumsum(of_turn, 0) - of_turn + tl.sum(tl.where(is_earlier, num, 0), 1)
    to = tl.where(way == 0, by_row, by_turn)
    is_mine = (experts == expert)[None, :]
    row0 = tl.load(expert_offsets + expert)
    for turn in range(0, TURNS):
        here = is_mine & (turns == turn)[:, None]
        count = tl.sum(tl.where(here, num, 0))
        row_begin = row0 + tl.sum(tl.where(here, begins, 0))
        row_end = row0 + tl.sum(tl.where(here, ends, 0))
        first_to = tl.sum(tl.where(turns == turn, to, 0))
        for start in range(0, count, STEP):
            tile = start + tl.arange(0, STEP)
            row = row_begin + tile * BLOCK_M
            packed = pack_tile(expert, row, tl.minimum(row_end - row, BLOCK_M))
            mask = (tile < count) & (first_to + tile < max_tiles)
            tl.store(tiles + way.to(tl.int64) * max_tiles + first_to + tile, packed, mask=mask)
    if (expert == 0) & (way == 0):
        tl.store(first_tile, 0)
        tl.store(first_tile + 1 + turns, tl.cumsum(of_turn, 0), mask=turns < TURNS)
        zeros = tl.arange(0, COUNTERS_PAD)
        tl.store(counters + zeros, zeros.to(tl.int64) * 0, mask=zeros < num_counters)


@device_function
def first_tiles(first_tile, num_n, TURNS: tl.constexpr, TURNS_PAD: tl.constexpr):
    """[TURNS_PAD]: the tile of rows that begins each turn, then their number, then very many."""
    turns = tl.arange(0, TURNS_PAD)
    return tl.load(first_tile + turns, mask=turns <= TURNS, other=0x7FFFFFFF // num_n)


@device_function
def turn_of(tile, first_m, num_n):
    """The turn of a tile of the output; the number of turns for one past the last."""
    return tl.sum((first_m * num_n <= tile).to(tl.int32), 0) - 1


@device_function
def load_staged_tile(tiles, tile, first_m, num_n, GROUP_M: tl.constexpr):
    """(packed tile of rows, block of columns) of a tile of the output, in its turn's order; see
    `tile_coordinates`."""
    turn = turn_of(tile, first_m, num_n)
    turns = tl.arange(0, first_m.shape[0])
    begin = tl.sum(tl.where(turns == turn, first_m, 0), 0)
    end = tl.sum(tl.where(turns == turn + 1, first_m, 0), 0)
    m, block = tile_coordinates(tile - begin * num_n, end - begin, num_n, GROUP_M)
    return tl.load(tiles + begin + m), block
