"""Stages on the device: which ranks' rows belong to a stage, and the kernel that sorts tiles by it.

A row's distance is how many ranks before this one its source stands: 0 for its own rows. Stage 0
holds distance 0, and the others share the rest evenly, so that rows pushed to rank + 1 first, then
to rank + 2, ... complete the stages in order. With one stage there is no order: it holds them all.
"""

import triton
import triton.language as tl

from .context import NUM_RANKS
from .grouped_gemm.schedule_kernels import pack_tile, tile_coordinates
from .lang import device_function
from .slots_kernels import source_at
from .work import let_next_start, wait_for_previous


@device_function
def first_distance(stage, stage_count, context):
    """Distance at which a stage begins; R for stage `stage_count`.

    Four ranks, 2 stages: 0, 1, 4; 3 stages: 0, 1, 2, 4; 4 stages: 0, 1, 2, 3, 4.
    """
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    remote = 1 + (stage - 1) * (num_ranks - 1) // tl.maximum(stage_count - 1, 1)
    first = tl.where(stage == 0, 0, remote)
    return tl.where(stage == stage_count, num_ranks, first)


@triton.jit(do_not_specialize=["num_local_experts", "stages_there", "stages_back", "max_tiles"])
def staged_schedule_kernel(
    recv_expert_counts,  # int32 [R, L]
    expert_offsets,  # int32 [L + 1]
    tiles,  # int64 [2, max_tiles], out: on the way there, then on the way back
    first_tile,  # int32 [2, S + 1], out: tile that begins each turn
    counters,  # int64 [3, S], out: 0
    context,
    num_local_experts,
    stages_there,
    stages_back,
    max_tiles,
    BLOCK_M: tl.constexpr,
    RANKS_PAD: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    STEP: tl.constexpr,
    MIXED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Cut each expert's rows into tiles of BLOCK_M and sort them by (stage, expert); program (e, w)
    writes those of expert e on way w. An early launch behind the exchange.

    Tiles that hold rows of several stages belong, on the way there, to the last of them, whose rows
    they wait for; on the way back to the first remote one, which waits for them. Without MIXED,
    tiles end where a stage does. Two stages, BLOCK_M 2, experts with [3, 1] and [1, 2] rows by
    stage, as (expert, row, number of rows):

        there: (0, 0, 2) | (0, 2, 2) (1, 4, 2) (1, 6, 1)      first_tile [0, 1, 4]
        back:  (0, 2, 2) (1, 4, 2) (1, 6, 1) | (0, 0, 2)      first_tile [0, 3, 4]
    """
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    expert = tl.program_id(0)
    way = tl.program_id(1)
    experts = tl.arange(0, EXPERTS_PAD)
    distances = tl.arange(0, RANKS_PAD)
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    stage_count = tl.where(way == 0, stages_there, stages_back)
    max_stages = tl.maximum(stages_there, stages_back)
    inside = (distances < num_ranks)[:, None] & (experts < num_local_experts)[None, :]
    source = source_at(distances, context)
    at = recv_expert_counts + source[:, None] * num_local_experts + experts[None, :]
    counts = tl.load(at, mask=inside, other=0)
    num_rows = tl.sum(counts, 0)
    local = _rows_before(1, counts, stage_count, context)
    row0 = tl.load(expert_offsets + expert)
    num_tiles = tl.full((), 0, tl.int32)
    for turn in range(0, stage_count):
        stage = (turn + way) % stage_count
        begin = _rows_before(stage, counts, stage_count, context)
        end = _rows_before(stage + 1, counts, stage_count, context)
        if MIXED:
            if way == 0:
                first = _whole_tiles(begin, num_rows, BLOCK_M)
                last = _whole_tiles(end, num_rows, BLOCK_M)
            else:
                first = _tiles_back(begin, local, num_rows, BLOCK_M)
                last = _tiles_back(end, local, num_rows, BLOCK_M)
            begin = first * BLOCK_M
            end = num_rows
            num = last - first
        else:
            num = tl.cdiv(end - begin, BLOCK_M)
        to = num_tiles + tl.sum(tl.where(experts < expert, num, 0), 0)
        is_mine = experts == expert
        count = tl.sum(tl.where(is_mine, num, 0), 0)
        row_begin = row0 + tl.sum(tl.where(is_mine, begin, 0), 0)
        row_end = row0 + tl.sum(tl.where(is_mine, end, 0), 0)
        for start in range(0, count, STEP):
            tile = start + tl.arange(0, STEP)
            row = row_begin + tile * BLOCK_M
            packed = pack_tile(expert, row, tl.minimum(row_end - row, BLOCK_M))
            mask = (tile < count) & (to + tile < max_tiles)
            tl.store(tiles + way.to(tl.int64) * max_tiles + to + tile, packed, mask=mask)
        if expert == 0:
            tl.store(first_tile + way * (max_stages + 1) + turn, num_tiles)
            zero = tl.full((), 0, tl.int64)
            tl.store(counters + way * max_stages + turn, zero)
            if way == 1:
                tl.store(counters + 2 * max_stages + turn, zero)
        num_tiles += tl.sum(num, 0)
    if expert == 0:
        tl.store(first_tile + way * (max_stages + 1) + stage_count, num_tiles)


@device_function
def _rows_before(stage, counts, stage_count, context):
    """Rows of each expert in earlier stages; counts [RANKS_PAD, EXPERTS_PAD] by distance."""
    distances = tl.arange(0, counts.shape[0])
    earlier = distances < first_distance(stage, stage_count, context)
    return tl.sum(tl.where(earlier[:, None], counts, 0), 0)


@device_function
def _whole_tiles(rows, num_rows, BLOCK_M: tl.constexpr):
    """Tiles that the first `rows` of `num_rows` fill."""
    return tl.where(rows == num_rows, tl.cdiv(num_rows, BLOCK_M), rows // BLOCK_M)


@device_function
def _tiles_back(rows, local, num_rows, BLOCK_M: tl.constexpr):
    """Tiles that begin within the first `rows`, if these are more than the `local` ones; else those
    that the local ones fill, or none if there are no rows before."""
    begun = tl.where(rows > local, tl.cdiv(rows, BLOCK_M), _whole_tiles(local, num_rows, BLOCK_M))
    return tl.where(rows == 0, 0, begun)


@device_function
def first_tiles(first_tile, stage_count, num_n, STAGES_PAD: tl.constexpr):
    """[STAGES_PAD]: the tile of rows that begins each turn, then their number, then very many."""
    turns = tl.arange(0, STAGES_PAD)
    return tl.load(first_tile + turns, mask=turns <= stage_count, other=0x7FFFFFFF // num_n)


@device_function
def stage_of(tile, first_m, num_n):
    """The turn of a tile of the output; the number of turns for one past the last."""
    return tl.sum((first_m * num_n <= tile).to(tl.int32), 0) - 1


@device_function
def load_staged_tile(tiles, tile, first_m, num_tiles, num_n, GROUP_M: tl.constexpr):
    """(packed tile of rows, block of columns) of a tile of the output, in its turn's order; see
    `tile_coordinates`. Past the last tile, that one again; 0, a tile of no rows, if there is none.
    """
    tile = tl.minimum(tile, tl.maximum(num_tiles - 1, 0))
    turn = stage_of(tile, first_m, num_n)
    turns = tl.arange(0, first_m.shape[0])
    begin = tl.sum(tl.where(turns == turn, first_m, 0), 0)
    end = tl.sum(tl.where(turns == turn + 1, first_m, 0), 0)
    m, block = tile_coordinates(tile - begin * num_n, end - begin, num_n, GROUP_M)
    return tl.load(tiles + begin + m, mask=num_tiles > 0, other=0), block
