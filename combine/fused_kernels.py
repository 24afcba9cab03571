"""The way back of a layer: down-projection, and sums of the expert rows of each token."""

import triton
import triton.language as tl

from ..device.context import (
    PHASE_METADATA,
    PHASE_TILES,
    RANK,
    REGION_BYTES,
    ROLE_DOWN,
    ROLE_RETURN,
)
from ..device.lang import (
    as_pointer,
    begin_span,
    consume_token,
    current_epoch,
    device_function,
    end_span,
    is_broken,
    pace,
    pacing_interval,
    put,
    round_to,
    row_mask,
    row_pointers,
    stagger,
    symm_at,
    wait,
)
from ..device.programs import (
    arrive_after_tma,
    pdl_launch_dependents,
    pdl_wait,
)
from ..device.slots import metadata_flag, region, stage_counts_offset
from ..device.tiles import COMBINE, deal, notify_stage
from ..dispatch.stages_kernels import first_tiles, load_staged_tile, stage_of
from ..grouped_gemm.kernels import finish_tile, gemm_tile
from ..grouped_gemm.schedule_kernels import Tile, unpack_tile

LANES_AT_ONCE = tl.constexpr(3)
"""Expert rows of a token that a sum reads before it adds the first."""


@triton.jit(
    do_not_specialize=["N", "K"],
    do_not_specialize_on_alignment=["tiles", "num_own", "first_tile", "computed"],
)
def staged_gemm_kernel(
    a,  # ragged descriptor of [M, K]
    w,  # descriptor of the weights, see `gemm_tile`
    out,  # ragged descriptor of [1, M, N]
    tiles,  # int64 [max_tiles]
    num_own,  # int32 [1], see `staged_schedule_kernel`
    first_tile,  # int32 [STAGES + 1]: tile that begins each stage
    computed,  # int64 [STAGES]: programs that have computed their tiles of each stage
    context,
    N,
    K,
    STAGES: tl.constexpr,
    SHAPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [M, N] = A @ w[expert].T, stage by stage; a program that has passed one says so in
    `computed`, for `return_sums_kernel`, which runs beside it.

    A PDL launch behind `send_return_metadata_kernel`.
    """
    pdl_launch_dependents(PDL)
    pdl_wait(PDL)
    STAGES_PAD: tl.constexpr = triton.next_power_of_2(STAGES + 1)
    num_n = tl.cdiv(N, SHAPE.BLOCK_N)
    first_m = first_tiles(first_tile, num_n, STAGES, STAGES_PAD)
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    own = tl.load(num_own)
    num_m = tl.load(first_tile + STAGES)
    num_tiles = num_m * num_n
    stages = tl.arange(0, STAGES_PAD)
    since = begin_span()
    for index in tl.range(program, num_tiles, num_programs, flatten=True):
        word, block = load_staged_tile(tiles, index, own, num_m, first_m, num_n, SHAPE.GROUP_M)
        expert, row, end = unpack_tile(word)
        tile = Tile(expert, row, end, block * SHAPE.BLOCK_N)
        acc = gemm_tile(a, w, tile, K, SHAPE)
        # Before this tile is stored, when the last one's store has long ended.
        before = stage_of(index - num_programs, first_m, num_n)
        stage = stage_of(index, first_m, num_n)
        arrive_after_tma(computed + stages, (stages >= before) & (stages < stage))
        finish_tile(acc, out, tile, N, "none", SHAPE.SUBTILES)
        since = end_span(ROLE_DOWN, index, since, context)
    last = program + (num_tiles - 1 - program + num_programs) // num_programs * num_programs
    before = stage_of(last - num_programs, first_m, num_n)
    arrive_after_tma(computed + stages, (stages >= before) & (stages < STAGES))


@triton.jit(
    do_not_specialize=["num_gemm_programs", "num_experts"],
    do_not_specialize_on_alignment=["computed", "returned"],
)
def return_sums_kernel(
    y,  # [M, H] expert rows
    computed,  # int64 [STAGES + 1], see `staged_gemm_kernel`
    returned,  # int64 [STAGES]: programs that have returned their part of each stage
    context,
    num_gemm_programs,
    num_experts,
    hidden,
    header_bytes,
    row_bytes,
    list_offset,
    places_offset,
    weights_offset,
    NUM_TOPK: tl.constexpr,
    STAGES: tl.constexpr,
    RANKS: tl.constexpr,
    RANKS_PAD: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum the weighted expert rows of each token of other ranks, and return one row to its rank.

    Stage by stage, each when all `num_gemm_programs` of the launch before have computed it. Small
    programs, which find room beside the GEMM's. A PDL launch behind it.
    """
    pdl_launch_dependents(PDL)
    if is_broken(context) == 0:
        lane = tl.arange(0, 1)
        rank = tl.load(context + RANK).to(tl.int32)
        ranks = tl.arange(0, RANKS_PAD)
        is_peer = (ranks < RANKS) & (ranks != rank)
        program, num_programs = tl.program_id(0), tl.num_programs(0)
        turn_bytes = min(hidden, BLOCK_H) * y.dtype.element_ty.primitive_bitwidth // 8
        step = pacing_interval(turn_bytes, 1, num_programs, context)
        since = begin_span()
        # The metadata that says which expert rows are of which token.
        metadata_flags = metadata_flag(ranks, context)
        token = wait(
            metadata_flags, is_peer, current_epoch(context), ranks, context, PHASE_METADATA
        )
        for stage in range(0, STAGES):
            if token == 1:
                flags = (computed + stage).to(tl.int64) + lane * 8
                # fmt: off
                token = wait(
                    flags, lane == 0, num_gemm_programs, lane + rank, context, PHASE_TILES
                )
                # fmt: on
            if token == 1:
                rows = as_pointer(consume_token(y.to(tl.int64), token), y.dtype.element_ty)
                first = consume_token(region(0, context), token)
                counts = stage_counts_offset(num_experts) + stage * 4
                theirs = first + ranks * tl.load(context + REGION_BYTES)
                at = as_pointer(theirs + counts, tl.int32)
                total = tl.max(tl.load(at, mask=is_peer, other=0), 0) * (RANKS - 1)
                list_at = header_bytes + list_offset + stage * 4
                due = stagger(turn_bytes, program, context)
                # A row takes three reads one behind the other: which it is, its record, the rows
                # to add up. The first two are made for the next rows meanwhile.
                # fmt: off
                to, record = _find_row(
                    program, total, first, counts, list_at, header_bytes, row_bytes, places_offset,
                    rank, context, RANKS,
                )
                places, weights = load_record(record, weights_offset, 0, NUM_TOPK)
                to_next, record_next = _find_row(
                    program + num_programs, total, first, counts, list_at, header_bytes, row_bytes,
                    places_offset, rank, context, RANKS,
                )
                for place in range(program, total, num_programs):
                    to_then, record_then = _find_row(
                        place + 2 * num_programs, total, first, counts, list_at, header_bytes,
                        row_bytes, places_offset, rank, context, RANKS,
                    )
                    places_next, weights_next = load_record(
                        record_next, weights_offset, 0, NUM_TOPK
                    )
                    due = return_row(
                        to, rows, record, places, weights, weights_offset, hidden, due, step,
                        NUM_TOPK, BLOCK_H,
                    )
                    to, record, places, weights = to_next, record_next, places_next, weights_next
                    to_next, record_next = to_then, record_then
                # fmt: on
                notify_stage(returned + stage, num_programs, COMBINE, stage, context, RANKS_PAD)
            since = end_span(ROLE_RETURN, stage, since, context)
    pdl_wait(PDL)


@device_function
def _find_row(
    place,
    total,
    first_region,
    counts,
    list_at,
    header_bytes,
    row_bytes,
    places_offset,
    rank,
    context,
    RANKS: tl.constexpr,
):
    """(address that the row at a place of a stage returns to, that of its record, 0 for none): see
    `tiles.deal`, of the `total` places for all peers."""
    peer, index = deal(place, max(RANKS - 1, 1))
    peer = (rank + 1 + peer) % RANKS
    region_bytes = tl.load(context + REGION_BYTES)
    theirs = first_region + peer * region_bytes
    has = place < total
    has = has & (index < tl.load(as_pointer(theirs + counts, tl.int32)))
    entry = theirs + list_at + index.to(tl.int64) * row_bytes
    row = tl.load(as_pointer(entry, tl.int32), mask=has, other=0)
    offset = header_bytes + row.to(tl.int64) * row_bytes
    to = symm_at(first_region + rank * region_bytes + offset, peer, context)
    return to, tl.where(has, theirs + offset + places_offset, 0)


@device_function
def return_row(
    to,
    y,
    record,
    places,
    weights,
    weights_offset,
    hidden,
    due,
    step,
    NUM_TOPK: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Sum the expert rows of a token and write them to the address `to`, BLOCK_H columns every
    `step`; no row for record 0. Returns when the next columns are due. See `sum_lanes`, `put_rows`.
    """
    to_row = as_pointer(to, y.dtype.element_ty)
    for column in range(0, hidden, BLOCK_H):
        columns = column + tl.arange(0, BLOCK_H)
        in_row = row_mask(columns, hidden, y.dtype.element_ty, True)
        # fmt: off
        total = sum_lanes(
            y, record, places, weights, weights_offset, columns, in_row, hidden, NUM_TOPK
        )
        # fmt: on
        values = round_to(total, y.dtype.element_ty)
        due = pace(due, step)
        put(row_pointers(to_row, columns, True), values, in_row & (record != 0))
    return due


@device_function
def load_record(record, weights_offset, first, NUM_TOPK: tl.constexpr):
    """(places, weights) of LANES_AT_ONCE of a token's expert rows here, from number `first` on.

    The record has the places, in top-k lane order, then -1, and `weights_offset` bytes behind them
    the weights. No places for record 0.
    """
    places_at = as_pointer(record, tl.int32) + first
    weights_at = as_pointer(record + weights_offset, tl.float32) + first
    places = ()
    weights = ()
    for lane in tl.static_range(LANES_AT_ONCE):
        has = (record != 0) & (first + lane < NUM_TOPK)
        places = places + (tl.load(places_at + lane, mask=has, other=-1),)
        weights = weights + (tl.load(weights_at + lane, mask=has, other=0.0),)
    return places, weights


@device_function
def sum_lanes(
    y, record, places, weights, weights_offset, columns, in_row, hidden, NUM_TOPK: tl.constexpr
):
    """fp32 [C]: `columns` of a token's expert rows here times their weights, added up in the order
    of its record, of which the first have been loaded. LANES_AT_ONCE are read at once."""
    total = tl.zeros([columns.shape[0]], tl.float32)
    total = _add_rows(total, y, places, weights, columns, in_row, hidden)
    if LANES_AT_ONCE < NUM_TOPK:  # Triton 3.6 does not compile a loop that never runs
        first = tl.full((), LANES_AT_ONCE, tl.int32)
        more = places[LANES_AT_ONCE - 1] >= 0
        while more:
            others, their_weights = load_record(record, weights_offset, first, NUM_TOPK)
            total = _add_rows(total, y, others, their_weights, columns, in_row, hidden)
            first += LANES_AT_ONCE
            more = (first < NUM_TOPK) & (others[LANES_AT_ONCE - 1] >= 0)
    return total


@device_function
def _add_rows(total, y, places, weights, columns, in_row, hidden):
    """`total` and the rows at `places` times their weights, one after the other."""
    rows = ()
    for lane in tl.static_range(LANES_AT_ONCE):
        row = y + places[lane].to(tl.int64) * hidden
        has = in_row & (places[lane] >= 0)
        rows = rows + (tl.load(row_pointers(row, columns, True), mask=has, other=0.0),)
    for lane in tl.static_range(LANES_AT_ONCE):
        total += tl.where(places[lane] >= 0, weights[lane], 0.0) * rows[lane].to(tl.float32)
    return total
