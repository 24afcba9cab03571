"""The way back of a layer: down-projection, sums of each token's expert rows, sums of the ranks."""

import triton
import triton.language as tl

from ..context import NUM_RANKS, PHASE_TILES, RANK
from ..grouped_gemm.kernels import finish_tile, gemm_tile
from ..grouped_gemm.schedule_kernels import unpack_tile
from ..lang import (
    as_pointer,
    consume_token,
    device_function,
    is_broken,
    put,
    round_to,
    row_pointers,
    symm_at,
    wait,
)
from ..slots_kernels import deal, open_regions, raise_chunks, received_rows, region
from ..stages_kernels import first_distance, first_tiles, load_staged_tile, stage_of
from ..work import (
    arrive_after_tma,
    claim,
    finish_call,
    is_last_program,
    let_next_start,
    take,
    wait_for_previous,
)
from .kernels import wait_returned


@triton.jit(
    do_not_specialize=["stage_count", "N", "K"],
    do_not_specialize_on_alignment=["tiles", "first_tile", "computed"],
)
def staged_gemm_kernel(
    a,  # ragged descriptor of [M, K]
    w,  # descriptor of the weights, see `gemm_tile`
    out,  # ragged descriptor of [1, M, N]
    tiles,  # int64 [max_tiles], sorted by stage, local ones last
    first_tile,  # int32 [S + 1]: tile that begins each turn
    computed,  # int64 [S]: programs that have computed their tiles of each turn
    stage_count,
    N,
    K,
    STAGES_PAD: tl.constexpr,
    SUBTILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out [M, N] = A @ w[expert].T, stage by stage; a program that has passed a stage says so in
    `computed`, for `return_sums_kernel`, which runs beside it on SMs that are left to it.

    An early launch behind `dispatch_gemm_kernel`.
    """
    let_next_start(OVERLAP)
    wait_for_previous(OVERLAP)
    num_n = tl.cdiv(N, BLOCK_N)
    first_m = first_tiles(first_tile, stage_count, num_n, STAGES_PAD)
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    num_tiles = tl.load(first_tile + stage_count) * num_n
    turns = tl.arange(0, STAGES_PAD)
    for tile in tl.range(program, num_tiles, num_programs, flatten=True):
        word, block = load_staged_tile(tiles, tile, first_m, num_tiles, num_n, GROUP_M)
        expert, row, end_row = unpack_tile(word)
        n = block * BLOCK_N
        # fmt: off
        acc = gemm_tile(
            a, w, row, end_row, expert, n, 0, K, K,
            False, False, 1, BLOCK_M, BLOCK_N, BLOCK_K,
        )
        # fmt: on
        # Before this tile is stored, when the last one's store has long ended.
        before = stage_of(tile - num_programs, first_m, num_n)
        turn = stage_of(tile, first_m, num_n)
        arrive_after_tma(computed + turns, (turns >= before) & (turns < turn))
        # fmt: off
        finish_tile(acc, out, None, None, None, 0, row, end_row, expert, n, N, "none", SUBTILES)
        # fmt: on
    last = program + (num_tiles - 1 - program + num_programs) // num_programs * num_programs
    before = stage_of(last - num_programs, first_m, num_n)
    arrive_after_tma(computed + turns, (turns >= before) & (turns < stage_count))


@triton.jit(do_not_specialize=["max_rows", "stage_count", "num_gemm_programs"])
def return_sums_kernel(
    y,  # [M, H] expert rows
    expert_row,  # int32 [R, max_rows, NUM_TOPK]
    lane_weight,  # float32 [R, max_rows, NUM_TOPK]
    rank_prefix_matrix,  # int32 [R, R]
    computed,  # int64 [S], see `staged_gemm_kernel`, or None
    claimed,  # int64 [S]: spans that programs have taken of each turn
    context,
    stage_count,
    num_gemm_programs,
    max_rows,
    hidden,
    row_bytes,
    NUM_TOPK: tl.constexpr,
    RANKS_PAD: tl.constexpr,
    CHUNK_ROWS: tl.constexpr,
    SPAN: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Sum the weighted expert rows of each token of other ranks, and return one row to its rank.

    Stage by stage, each when all `num_gemm_programs` of the launch before have computed it.
    Programs for which there is no room yet join in when those end: spans of chunks are taken from a
    counter. An early launch; without `computed` it waits for the launch before to end.
    """
    let_next_start(OVERLAP)
    if computed is None:
        wait_for_previous(OVERLAP)
    if is_broken(context) == 0:
        lane = tl.arange(0, 1)
        rank = tl.load(context + RANK).to(tl.int32)
        for turn in range(0, stage_count):
            stage = (turn + 1) % stage_count
            first = tl.maximum(first_distance(stage, stage_count, context), 1)
            end = first_distance(stage + 1, stage_count, context)
            token = tl.full((), 1, tl.int32)
            if computed is not None:
                if end > first:
                    flags = (computed + turn).to(tl.int64) + lane * 8
                    # fmt: off
                    token = wait(
                        flags, lane == 0, num_gemm_programs, lane + rank, context, PHASE_TILES
                    )
                    # fmt: on
            if (end > first) & (token == 1):
                rows = as_pointer(consume_token(y.to(tl.int64), token), y.dtype.element_ty)
                # fmt: off
                return_sums(
                    rows, expert_row, lane_weight, rank_prefix_matrix, claimed + turn, context,
                    first, end, max_rows, hidden, row_bytes, NUM_TOPK, RANKS_PAD, CHUNK_ROWS, SPAN,
                    AT_ONCE, BLOCK_H,
                )
                # fmt: on
    wait_for_previous(OVERLAP)


SUM_ROWS = tl.constexpr(16)
"""Tokens whose expert rows a program sums at a time."""
SUM_STAGES = tl.constexpr(4)
"""Blocks of their columns that it reads ahead, into shared memory."""
OWN_LANES = tl.constexpr(4)
"""Expert rows of each token that are read at once, where rows of other ranks are read as well."""


@device_function
def return_sums(
    y,
    expert_row,
    lane_weight,
    rank_prefix_matrix,
    claimed,
    context,
    first_distance,
    end_distance,
    max_rows,
    hidden,
    row_bytes,
    NUM_TOPK: tl.constexpr,
    RANKS_PAD: tl.constexpr,
    CHUNK_ROWS: tl.constexpr,
    SPAN: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Return the tokens that came from distances first .. end, from rank - d at d, all at the same
    pace: SPAN chunks at a time, as long as the counter `claimed` has any left.

    AT_ONCE: expert rows of each token that are read ahead; few tokens have more, which take longer.
    """
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    rank = tl.load(context + RANK).to(tl.int32)
    ranks = tl.arange(0, RANKS_PAD)
    distance = (rank - ranks + num_ranks) % num_ranks
    here = (ranks < num_ranks) & (distance >= first_distance) & (distance < end_distance)
    num_rows = tl.where(here, received_rows(rank_prefix_matrix, ranks, context), 0)
    own, most_rows = open_regions(num_rows, 0, row_bytes, context)
    first_peer = rank - end_distance + 1 + num_ranks
    num_peers = end_distance - first_distance
    num_chunks = tl.cdiv(most_rows, CHUNK_ROWS)
    first_chunk = take(claimed) * SPAN
    while first_chunk < num_chunks:
        end_chunk = tl.minimum(first_chunk + SPAN, num_chunks)
        end = tl.minimum(end_chunk * CHUNK_ROWS, most_rows)
        for first in range(first_chunk * CHUNK_ROWS * num_peers, end * num_peers, SUM_ROWS):
            peers, rows = deal(first, first_peer, num_peers, context, SUM_ROWS)
            inside = (rows < end) & (rows < received_rows(rank_prefix_matrix, peers, context))
            to = symm_at(own + rows.to(tl.int64) * row_bytes, peers, context)
            to_rows = as_pointer(to, y.dtype.element_ty)
            lane0 = (peers * max_rows + rows) * NUM_TOPK
            # fmt: off
            lanes = load_lanes(y, expert_row, lane_weight, lane0, inside, hidden, NUM_TOPK, AT_ONCE)
            if num_lanes(lanes) <= AT_ONCE:
                for column in tl.range(0, hidden, BLOCK_H, num_stages=SUM_STAGES):
                    total = sum_lanes(lanes, column, hidden, BLOCK_H, False)
                    _return_columns(to_rows, total, inside, column, hidden, BLOCK_H)
            else:
                for column in range(0, hidden, BLOCK_H):
                    total = sum_lanes(lanes, column, hidden, BLOCK_H, True)
                    _return_columns(to_rows, total, inside, column, hidden, BLOCK_H)
            # fmt: on
        raise_chunks(first_chunk, end_chunk, num_rows, context, CHUNK_ROWS, SPAN)
        first_chunk = take(claimed) * SPAN


@device_function
def _return_columns(to_rows, total, inside, column, hidden, BLOCK_H: tl.constexpr):
    columns = column + tl.arange(0, BLOCK_H)
    real = inside[:, None] & _in_row(columns, hidden, to_rows)[None, :]
    values = round_to(total, to_rows.dtype.element_ty)
    put(row_pointers(to_rows, columns, True), values, real)


@device_function
def _in_row(columns, hidden, y):
    """`columns < hidden`, which is a multiple of 16 bytes; see `lang.row_mask`."""
    return tl.max_constancy(columns < hidden, 128 // y.dtype.element_ty.primitive_bitwidth)


@device_function
def load_lanes(
    y,
    expert_row,
    lane_weight,
    lane0,
    inside,
    hidden,
    NUM_TOPK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """The expert rows of tokens [B] whose lanes begin at `lane0`, for `sum_lanes`, AT_ONCE of each:
    a token's rows stand in its first lanes."""
    TOPK_PAD: tl.constexpr = triton.next_power_of_2(NUM_TOPK)
    lanes = tl.arange(0, TOPK_PAD)
    has = inside[:, None] & (lanes < NUM_TOPK)[None, :]
    at = tl.load(expert_row + lane0[:, None] + lanes[None, :], mask=has, other=-1)
    num_lanes = tl.max(tl.sum((at >= 0).to(tl.int32), 1), 0)
    rows = ()
    weights = ()
    for lane in tl.static_range(min(AT_ONCE, NUM_TOPK)):
        row, weight = _lane(y, expert_row, lane_weight, lane0 + lane, inside, hidden)
        rows = rows + (row,)
        weights = weights + (weight,)
    return rows, weights, (y, expert_row, lane_weight, lane0, inside, num_lanes)


@device_function
def num_lanes(lanes):
    """Most expert rows of any of the tokens."""
    return lanes[2][5]


@device_function
def _lane(y, expert_row, lane_weight, at, inside, hidden):
    """(addresses of the expert rows, 0 where there is none, weights) of lanes `at` [B]."""
    place = tl.load(expert_row + at, mask=inside, other=-1)
    weight = tl.load(lane_weight + at, mask=place >= 0, other=0.0)
    row = (y + place.to(tl.int64) * hidden).to(tl.int64)
    return tl.where(place >= 0, row, 0), weight


@device_function
def sum_lanes(lanes, column, hidden, BLOCK_H: tl.constexpr, ALL: tl.constexpr):
    """fp32 [B, BLOCK_H]: columns `column` .. of the expert rows of B tokens (see `load_lanes`),
    times their weights, added up in top-k lane order; without ALL only those read at once."""
    rows, weights, rest = lanes
    y, expert_row, lane_weight, lane0, inside, num_lanes = rest
    columns = column + tl.arange(0, BLOCK_H)
    in_row = _in_row(columns, hidden, y)
    parts = ()
    for lane in tl.static_range(len(rows)):
        parts = parts + (_columns(rows[lane], columns, in_row, y),)
    total = tl.zeros([inside.shape[0], BLOCK_H], tl.float32)
    for lane in tl.static_range(len(rows)):
        total += weights[lane][:, None] * parts[lane].to(tl.float32)
    if ALL:
        for lane in range(len(rows), num_lanes):
            row, weight = _lane(y, expert_row, lane_weight, lane0 + lane, inside, hidden)
            total += weight[:, None] * _columns(row, columns, in_row, y).to(tl.float32)
    return total


@device_function
def _columns(rows, columns, in_row, y):
    """Columns [B, C] of the rows at addresses [B]; 0 for address 0."""
    pointers = row_pointers(as_pointer(rows, y.dtype.element_ty), columns, True)
    return tl.load(pointers, mask=(rows != 0)[:, None] & in_row[None, :], other=0.0)


@triton.jit(do_not_specialize=["num_tokens", "max_rows", "stage_count", "num_gemm_programs"])
def layer_sum_kernel(
    out,  # [T, H], out
    y,  # [M, H] expert rows
    expert_row,  # int32 [R, max_rows, NUM_TOPK]
    lane_weight,  # float32 [R, max_rows, NUM_TOPK]
    send_head,  # int32 [T, R]: row * R + rank of each returned row, in the order of the sum
    computed,  # int64 [S], see `staged_gemm_kernel`, or None
    context,
    stage_count,
    num_gemm_programs,
    num_tokens,
    max_rows,
    hidden,
    row_bytes,
    NUM_TOPK: tl.constexpr,
    RANKS: tl.constexpr,
    RANKS_PAD: tl.constexpr,
    STAGES_PAD: tl.constexpr,
    CHUNK_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_H: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Add up the sums of all ranks for each token, in `send_head`'s order: those of the others as
    they returned them, this rank's own made here, and rounded as the others' are. fp32, rounded
    once. The last program finishes the call.

    An early launch behind `return_sums_kernel`, while which it takes tokens whose rows are back: it
    waits for all `num_gemm_programs` to have computed all turns. Without `computed`, and on one
    rank, it waits for the launch before to end.
    """
    token = tl.full((), 1, tl.int32)
    rank = tl.load(context + RANK).to(tl.int32)
    if computed is None:
        wait_for_previous(OVERLAP)
    else:
        turns = tl.arange(0, STAGES_PAD)
        # fmt: off
        token = wait(
            (computed + turns).to(tl.int64), turns < stage_count, num_gemm_programs,
            turns * 0 + rank, context, PHASE_TILES,
        )
        # fmt: on
    y = as_pointer(consume_token(y.to(tl.int64), token), y.dtype.element_ty)
    num_groups = tl.where(token == 1, tl.cdiv(num_tokens, GROUP), 0)
    group = claim(context)
    while group < num_groups:
        tokens = group * GROUP + tl.arange(0, GROUP)
        token = wait_returned(send_head, tokens, num_tokens, context, CHUNK_ROWS, RANKS, RANKS_PAD)
        inside = (tokens < num_tokens) & (token == 1)
        addresses = ()
        own_place = tl.full([GROUP], -1, tl.int32)
        own_row = tl.full([GROUP], -1, tl.int32)
        for place in tl.static_range(RANKS):
            head = tl.load(send_head + tokens * RANKS + place, mask=inside, other=-1)
            row = head // RANKS
            at = consume_token(region(head % RANKS, context), token) + row.to(tl.int64) * row_bytes
            is_own = (head >= 0) & (head % RANKS == rank)
            own_place = tl.where(is_own, place, own_place)
            own_row = tl.where(is_own, row, own_row)
            addresses = addresses + (tl.where((head >= 0) & (is_own == 0), at, 0),)
        lane0 = (rank * max_rows + own_row) * NUM_TOPK
        lanes = load_lanes(
            y, expert_row, lane_weight, lane0, own_row >= 0, hidden, NUM_TOPK, OWN_LANES
        )
        for column in range(0, hidden, BLOCK_H):
            own = sum_lanes(lanes, column, hidden, BLOCK_H, True)
            own = round_to(own, out.dtype.element_ty).to(tl.float32)
            columns = column + tl.arange(0, BLOCK_H)
            in_row = _in_row(columns, hidden, out)
            total = tl.zeros([GROUP, BLOCK_H], tl.float32)
            for place in tl.static_range(RANKS):
                part = _columns(addresses[place], columns, in_row, out)
                total += tl.where((own_place == place)[:, None], own, part.to(tl.float32))
            to = row_pointers(out + tokens.to(tl.int64) * hidden, columns, True)
            values = round_to(total, out.dtype.element_ty)
            tl.store(to, values, mask=inside[:, None] & in_row[None, :])
        group = claim(context)
    wait_for_previous(OVERLAP)
    if is_broken(context) == 0:
        if is_last_program(context):
            finish_call(context)
