"""The way back of a layer: down-projection, sums of each token's expert rows, sums of the ranks."""

import triton
import triton.language as tl

from ..context import (
    PHASE_METADATA,
    PHASE_RETURNED_ROWS,
    PHASE_TILES,
    RANK,
    REGION_BYTES,
    ROLE_DOWN,
    ROLE_RETURN,
    ROLE_SUM,
)
from ..grouped_gemm.kernels import finish_tile, gemm_tile
from ..grouped_gemm.schedule_kernels import unpack_tile
from ..lang import (
    as_pointer,
    begin_span,
    consume_token,
    current_epoch,
    device_function,
    end_span,
    is_broken,
    put,
    round_to,
    symm_at,
    wait,
)
from ..slots_kernels import metadata_flag, region, stage_counts_offset
from ..stages_kernels import first_tiles, load_staged_tile, stage_of
from ..tiles import BACK, deal_rows, notify_stage, wait_stage
from ..work import (
    arrive_after_tma,
    finish_call,
    is_last_program,
    let_next_start,
    wait_for_previous,
)

LANES_AT_ONCE = tl.constexpr(4)
"""Expert rows of a token that a sum reads before it adds the first."""


@triton.jit(
    do_not_specialize=["N", "K"],
    do_not_specialize_on_alignment=["tiles", "first_tile", "computed"],
)
def staged_gemm_kernel(
    a,  # ragged descriptor of [M, K]
    w,  # descriptor of the weights, see `gemm_tile`
    out,  # ragged descriptor of [1, M, N]
    tiles,  # int64 [max_tiles]
    first_tile,  # int32 [STAGES + 1]: tile that begins each stage
    computed,  # int64 [STAGES]: programs that have computed their tiles of each stage
    context,
    N,
    K,
    STAGES: tl.constexpr,
    SUBTILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out [M, N] = A @ w[expert].T, stage by stage; a program that has passed one says so in
    `computed`, for `return_sums_kernel`, which runs beside it.

    An early launch behind `send_records_kernel`.
    """
    let_next_start(OVERLAP)
    wait_for_previous(OVERLAP)
    STAGES_PAD: tl.constexpr = triton.next_power_of_2(STAGES + 1)
    num_n = tl.cdiv(N, BLOCK_N)
    first_m = first_tiles(first_tile, num_n, STAGES, STAGES_PAD)
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    num_tiles = tl.load(first_tile + STAGES) * num_n
    stages = tl.arange(0, STAGES_PAD)
    since = begin_span()
    for tile in tl.range(program, num_tiles, num_programs, flatten=True):
        word, block = load_staged_tile(tiles, tile, first_m, num_n, GROUP_M)
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
        stage = stage_of(tile, first_m, num_n)
        arrive_after_tma(computed + stages, (stages >= before) & (stages < stage))
        # fmt: off
        finish_tile(acc, out, None, None, None, 0, row, end_row, expert, n, N, "none", SUBTILES)
        # fmt: on
        since = end_span(ROLE_DOWN, tile, since, context)
    last = program + (num_tiles - 1 - program + num_programs) // num_programs * num_programs
    before = stage_of(last - num_programs, first_m, num_n)
    arrive_after_tma(computed + stages, (stages >= before) & (stages < STAGES))


@triton.jit(
    do_not_specialize=["num_gemm_programs", "num_experts"],
    do_not_specialize_on_alignment=["computed", "returned"],
)
def return_sums_kernel(
    y,  # [M, H] expert rows
    computed,  # int64 [STAGES], see `staged_gemm_kernel`
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
    BATCH: tl.constexpr,
    BLOCK_H: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Sum the weighted expert rows of each token of other ranks, and return one row to its rank.

    Stage by stage, each when all `num_gemm_programs` of the launch before have computed it. Small
    programs, which find room beside the GEMM's. An early launch behind it.
    """
    let_next_start(OVERLAP)
    if is_broken(context) == 0:
        lane = tl.arange(0, 1)
        rank = tl.load(context + RANK).to(tl.int32)
        ranks = tl.arange(0, RANKS_PAD)
        is_peer = (ranks < RANKS) & (ranks != rank)
        program, num_programs = tl.program_id(0), tl.num_programs(0)
        own = region(rank, context) + header_bytes
        since = begin_span()
        # The records that say which expert rows are of which token.
        records = metadata_flag(ranks, context)
        token = wait(records, is_peer, current_epoch(context), ranks, context, PHASE_METADATA)
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
                counts = stage_counts_offset(num_experts) + stage * 4
                regions = consume_token(region(ranks, context), token)
                at = as_pointer(regions + counts, tl.int32)
                total = tl.max(tl.load(at, mask=is_peer, other=0), 0) * (RANKS - 1)
                for first in range(program, total, num_programs * BATCH):
                    peers, index = deal_rows(first, num_programs, RANKS - 1, BATCH)
                    peers = (rank + 1 + peers) % RANKS
                    theirs = consume_token(region(peers, context), token)
                    inside = index < tl.load(as_pointer(theirs + counts, tl.int32))
                    entry = theirs + header_bytes + index.to(tl.int64) * row_bytes + list_offset
                    row = tl.load(as_pointer(entry + stage * 4, tl.int32), mask=inside, other=0)
                    offset = row.to(tl.int64) * row_bytes
                    record = tl.where(inside, theirs + header_bytes + offset + places_offset, 0)
                    to = symm_at(own + offset, peers, context)
                    here = tl.minimum(tl.cdiv(total - first, num_programs), BATCH)
                    for number in range(0, here):
                        # fmt: off
                        return_row(
                            _pick(to, number), rows, _pick(record, number), weights_offset, hidden,
                            NUM_TOPK, BLOCK_H,
                        )
                        # fmt: on
                notify_stage(returned + stage, num_programs, BACK, stage, context, RANKS_PAD)
            since = end_span(ROLE_RETURN, stage, since, context)
    wait_for_previous(OVERLAP)


@device_function
def _pick(values, index):
    """One of a block of values."""
    return tl.sum(tl.where(tl.arange(0, values.shape[0]) == index, values, 0), 0)


@device_function
def return_row(
    to, y, record, weights_offset, hidden, NUM_TOPK: tl.constexpr, BLOCK_H: tl.constexpr
):
    """Sum the expert rows of a token and write them to the address `to`; no row for record 0."""
    to_row = as_pointer(to, y.dtype.element_ty)
    for column in range(0, hidden, BLOCK_H):
        columns = column + tl.arange(0, BLOCK_H)
        in_row = _in_row(columns, hidden, y)
        total = sum_lanes(y, record, weights_offset, columns, in_row, hidden, NUM_TOPK)
        values = round_to(total, y.dtype.element_ty)
        put(_items(to_row, columns), values, in_row & (record != 0))


@device_function
def _in_row(columns, hidden, y):
    """`columns < hidden`, which is a multiple of 16 bytes; see `lang.row_mask`."""
    return tl.max_constancy(columns < hidden, 128 // y.dtype.element_ty.primitive_bitwidth)


@device_function
def _items(row, columns):
    """Pointers to columns of a row, which begins at a multiple of 16 bytes; see
    `lang.row_pointers`."""
    return tl.multiple_of(row + columns, 16)


@device_function
def sum_lanes(y, record, weights_offset, columns, in_row, hidden, NUM_TOPK: tl.constexpr):
    """fp32 [C]: `columns` of a token's expert rows here times their weights, added up in the order
    of its record: their places, in top-k lane order, then -1, and `weights_offset` bytes behind
    these their weights. LANES_AT_ONCE rows are read before the first is added. 0 for record 0."""
    places_at = as_pointer(record, tl.int32)
    weights_at = as_pointer(record + weights_offset, tl.float32)
    total = tl.zeros([columns.shape[0]], tl.float32)
    lane = tl.full((), 0, tl.int32)
    more = record != 0
    while more:
        places = ()
        weights = ()
        for i in tl.static_range(LANES_AT_ONCE):
            has = lane + i < NUM_TOPK
            places = places + (tl.load(places_at + lane + i, mask=has, other=-1),)
            weights = weights + (tl.load(weights_at + lane + i, mask=has, other=0.0),)
        rows = ()
        for i in tl.static_range(LANES_AT_ONCE):
            row = y + places[i].to(tl.int64) * hidden
            has = in_row & (places[i] >= 0)
            rows = rows + (tl.load(_items(row, columns), mask=has, other=0.0),)
        for i in tl.static_range(LANES_AT_ONCE):
            total += tl.where(places[i] >= 0, weights[i], 0.0) * rows[i].to(tl.float32)
        lane += LANES_AT_ONCE
        more = (places[LANES_AT_ONCE - 1] >= 0) & (lane < NUM_TOPK)
    return total


@triton.jit(
    do_not_specialize=["num_tokens", "num_gemm_programs"],
    do_not_specialize_on_alignment=["computed"],
)
def layer_sum_kernel(
    out,  # [T, H], out
    y,  # [M, H] expert rows
    send_head,  # int32 [T, R]: row * R + rank of each returned row, in the order of the sum
    last_stage,  # int32 [T]: stage in which the last of them comes
    computed,  # int64 [STAGES], see `staged_gemm_kernel`
    context,
    num_gemm_programs,
    num_tokens,
    hidden,
    header_bytes,
    row_bytes,
    places_offset,
    weights_offset,
    NUM_TOPK: tl.constexpr,
    STAGES: tl.constexpr,
    RANKS: tl.constexpr,
    RANKS_PAD: tl.constexpr,
    BLOCK_H: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Add up the sums of all ranks for each token, in `send_head`'s order: those of the others as
    they returned them, this rank's own made here, and rounded as the others' are. fp32, rounded
    once. The last program finishes the call.

    An early launch behind `return_sums_kernel`: it waits for all `num_gemm_programs` to have
    computed everything, then, stage by stage, for what other ranks return.
    """
    since = begin_span()
    rank = tl.load(context + RANK).to(tl.int32)
    stages = tl.arange(0, triton.next_power_of_2(STAGES))
    # fmt: off
    token = wait(
        (computed + stages).to(tl.int64), stages < STAGES, num_gemm_programs, stages * 0 + rank,
        context, PHASE_TILES,
    )
    # fmt: on
    if is_broken(context):
        token = token * 0  # then nobody may have written the records
    there = tl.full((), -1, tl.int32)  # stage up to which all rows are there
    for number in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        number_wide = tl.cast(number, tl.int64)
        stage = tl.load(last_stage + number)
        if (RANKS > 1) & (there < stage) & (token == 1):
            token = wait_stage(BACK, stage, context, RANKS_PAD, PHASE_RETURNED_ROWS)
            there = stage
        if token == 1:
            first = consume_token(region(0, context) + header_bytes, token)
            rows = as_pointer(consume_token(y.to(tl.int64), token), y.dtype.element_ty)
            region_bytes = tl.load(context + REGION_BYTES)
            own_place = tl.full((), -1, tl.int32)
            record = tl.full((), 0, tl.int64)
            addresses = ()
            for place in tl.static_range(RANKS):
                head = tl.load(send_head + number * RANKS + place)
                writer = tl.maximum(head, 0) % RANKS
                row = tl.maximum(head, 0) // RANKS
                at = first + writer * region_bytes + row.to(tl.int64) * row_bytes
                is_own = (head >= 0) & (writer == rank)
                own_place = tl.where(is_own, place, own_place)
                record = tl.where(is_own, at + places_offset, record)
                addresses = addresses + (tl.where((head >= 0) & (is_own == 0), at, 0),)
            for column in range(0, hidden, BLOCK_H):
                columns = column + tl.arange(0, BLOCK_H)
                in_row = _in_row(columns, hidden, out)
                own = sum_lanes(rows, record, weights_offset, columns, in_row, hidden, NUM_TOPK)
                own = round_to(own, out.dtype.element_ty)
                parts = ()
                for place in tl.static_range(RANKS):
                    theirs = as_pointer(addresses[place], out.dtype.element_ty)
                    mask = in_row & (addresses[place] != 0)
                    parts = parts + (tl.load(_items(theirs, columns), mask=mask, other=0.0),)
                total = tl.zeros([BLOCK_H], tl.float32)
                for place in tl.static_range(RANKS):
                    total += tl.where(own_place == place, own, parts[place]).to(tl.float32)
                to = _items(out + number_wide * hidden, columns)
                tl.store(to, round_to(total, out.dtype.element_ty), mask=in_row)
    end_span(ROLE_SUM, tl.program_id(0), since, context)
    wait_for_previous(OVERLAP)
    if is_broken(context) == 0:
        if is_last_program(context):
            finish_call(context)
