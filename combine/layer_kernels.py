"""The way back of a layer: down-projection, sums of each token's expert rows, sums of the ranks."""

import triton
import triton.language as tl

from ..context import PHASE_METADATA, PHASE_RETURNED_ROWS, PHASE_TILES, RANK
from ..grouped_gemm.kernels import finish_tile, gemm_tile
from ..grouped_gemm.schedule_kernels import unpack_tile
from ..lang import (
    as_pointer,
    consume_token,
    current_epoch,
    device_function,
    is_broken,
    put,
    round_to,
    row_pointers,
    symm_at,
    ticks,
    time_to_send,
    wait,
)
from ..slots_kernels import metadata_flag, region, stage_counts_offset
from ..stages_kernels import first_tiles, load_staged_tile, stage_of
from ..tiles import BACK, deal_rows, notify_stage, wait_stage
from ..work import (
    arrive_after_tma,
    claim,
    finish_call,
    is_last_program,
    let_next_start,
    wait_for_previous,
)


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
    ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
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
        ITEM_BYTES: tl.constexpr = y.dtype.element_ty.primitive_bitwidth // 8
        step = time_to_send(ROWS * BLOCK_H * ITEM_BYTES, 1, num_programs, context)
        due = ticks()
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
                at = as_pointer(region(ranks, context) + counts, tl.int32)
                total = tl.max(tl.load(at, mask=is_peer, other=0), 0) * (RANKS - 1)
                list_at = list_offset + stage * 4
                # What tells of a batch is asked for a batch ahead.
                # fmt: off
                batch = _look_up(
                    rows, program, context, counts, header_bytes, row_bytes, list_at,
                    places_offset, weights_offset, hidden, NUM_TOPK, RANKS, ROWS, AT_ONCE,
                )
                for first in range(program, total, num_programs * ROWS):
                    to, inside, lanes = batch
                    batch = _look_up(
                        rows, first + num_programs * ROWS, context, counts, header_bytes,
                        row_bytes, list_at, places_offset, weights_offset, hidden, NUM_TOPK,
                        RANKS, ROWS, AT_ONCE,
                    )
                    # fmt: on
                    to_rows = as_pointer(to, y.dtype.element_ty)
                    for column in range(0, hidden, BLOCK_H):
                        columns = column + tl.arange(0, BLOCK_H)
                        in_row = _in_row(columns, hidden, y)
                        total_sum = sum_lanes(lanes, columns, in_row, hidden)
                        while ticks() - due < 0:
                            pass
                        due = due + step
                        values = round_to(total_sum, y.dtype.element_ty)
                        mask = inside[:, None] & in_row[None, :]
                        put(row_pointers(to_rows, columns, True), values, mask)
                notify_stage(returned + stage, num_programs, BACK, stage, context, RANKS_PAD)
    wait_for_previous(OVERLAP)


@device_function
def _look_up(
    y,
    first,
    context,
    counts,
    header_bytes,
    row_bytes,
    list_at,
    places_offset,
    weights_offset,
    hidden,
    NUM_TOPK: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """(addresses [ROWS] on their ranks, whether they exist, their expert rows) of rows to return:
    place `first` of a stage, and ROWS - 1 more."""
    rank = tl.load(context + RANK).to(tl.int32)
    peers, number = deal_rows(first, tl.num_programs(0), RANKS - 1, ROWS)
    peers = (rank + 1 + peers) % RANKS
    theirs = region(peers, context)
    inside = number < tl.load(as_pointer(theirs + counts, tl.int32))
    entry = theirs + header_bytes + number.to(tl.int64) * row_bytes + list_at
    row = tl.load(as_pointer(entry, tl.int32), mask=inside, other=0)
    offset = header_bytes + row.to(tl.int64) * row_bytes
    record = theirs + offset + places_offset
    lanes = load_lanes(y, record, inside, weights_offset, hidden, NUM_TOPK, AT_ONCE)
    return symm_at(region(rank, context) + offset, peers, context), inside, lanes


@device_function
def _in_row(columns, hidden, y):
    """`columns < hidden`, which is a multiple of 16 bytes; see `lang.row_mask`."""
    return tl.max_constancy(columns < hidden, 128 // y.dtype.element_ty.primitive_bitwidth)


@device_function
def load_lanes(
    y, record, inside, weights_offset, hidden, NUM_TOPK: tl.constexpr, AT_ONCE: tl.constexpr
):
    """The expert rows of tokens [B] whose records lie at addresses `record`, for `sum_lanes`; those
    of the first AT_ONCE lanes are looked up at once. A record has the places of a token's expert
    rows, then -1, and `weights_offset` bytes from there on their weights."""
    TOPK_PAD: tl.constexpr = triton.next_power_of_2(NUM_TOPK)
    lanes = tl.arange(0, TOPK_PAD)
    places = as_pointer(record, tl.int32)
    has = inside[:, None] & (lanes < NUM_TOPK)[None, :]
    all_places = tl.load(places[:, None] + lanes[None, :], mask=has, other=-1)
    num_lanes = tl.max(tl.sum((all_places >= 0).to(tl.int32), 1), 0)
    weights = as_pointer(record + weights_offset, tl.float32)
    rows = ()
    factors = ()
    for lane in tl.static_range(min(AT_ONCE, NUM_TOPK)):
        row, factor = _lane(y, places + lane, weights + lane, inside, hidden)
        rows = rows + (row,)
        factors = factors + (factor,)
    return rows, factors, (y, places, weights, inside, num_lanes)


@device_function
def _lane(y, place, weight, inside, hidden):
    """(addresses of the expert rows, 0 where there is none, weights) of one lane of each token."""
    row = tl.load(place, mask=inside, other=-1)
    factor = tl.load(weight, mask=row >= 0, other=0.0)
    return tl.where(row >= 0, (y + row.to(tl.int64) * hidden).to(tl.int64), 0), factor


@device_function
def sum_lanes(lanes, columns, in_row, hidden):
    """fp32 [B, C]: `columns` of the expert rows of B tokens (see `load_lanes`), times their weights,
    added up in top-k lane order."""
    rows, factors, rest = lanes
    y, places, weights, inside, num_lanes = rest
    parts = ()
    for lane in tl.static_range(len(rows)):
        parts = parts + (_columns(rows[lane], columns, in_row, y),)
    total = tl.zeros([inside.shape[0], columns.shape[0]], tl.float32)
    for lane in tl.static_range(len(rows)):
        total += factors[lane][:, None] * parts[lane].to(tl.float32)
    for lane in range(len(rows), num_lanes):
        row, factor = _lane(y, places + lane, weights + lane, inside, hidden)
        total += factor[:, None] * _columns(row, columns, in_row, y).to(tl.float32)
    return total


@device_function
def _columns(rows, columns, in_row, y):
    """Columns [B, C] of the rows at addresses [B]; 0 for address 0."""
    pointers = row_pointers(as_pointer(rows, y.dtype.element_ty), columns, True)
    return tl.load(pointers, mask=(rows != 0)[:, None] & in_row[None, :], other=0.0)


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
    GROUP: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Add up the sums of all ranks for each token, in `send_head`'s order: those of the others as
    they returned them, this rank's own made here, and rounded as the others' are. fp32, rounded
    once. The last program finishes the call.

    An early launch behind `return_sums_kernel`: it waits for all `num_gemm_programs` to have
    computed everything, then, stage by stage, for what other ranks return.
    """
    rank = tl.load(context + RANK).to(tl.int32)
    stages = tl.arange(0, triton.next_power_of_2(STAGES))
    # fmt: off
    token = wait(
        (computed + stages).to(tl.int64), stages < STAGES, num_gemm_programs, stages * 0 + rank,
        context, PHASE_TILES,
    )
    # fmt: on
    y = as_pointer(consume_token(y.to(tl.int64), token), y.dtype.element_ty)
    num_groups = tl.where(token == 1, tl.cdiv(num_tokens, GROUP), 0)
    there = tl.full((), -1, tl.int32)  # stage up to which all rows are there
    group = claim(context)
    while group < num_groups:
        tokens = group * GROUP + tl.arange(0, GROUP)
        inside = tokens < num_tokens
        stage = tl.max(tl.load(last_stage + tokens, mask=inside, other=0), 0)
        if (RANKS > 1) & (there < stage):
            token = wait_stage(BACK, stage, context, RANKS_PAD, PHASE_RETURNED_ROWS)
            there = stage
        inside = inside & (token == 1)
        own_place = tl.full([GROUP], -1, tl.int32)
        own_row = tl.zeros([GROUP], tl.int32)
        addresses = ()
        for place in tl.static_range(RANKS):
            head = tl.load(send_head + tokens * RANKS + place, mask=inside, other=-1)
            row = tl.where(head >= 0, head // RANKS, 0)
            writer = tl.where(head >= 0, head % RANKS, 0)
            at = consume_token(region(writer, context) + header_bytes, token)
            is_own = (head >= 0) & (writer == rank)
            own_place = tl.where(is_own, place, own_place)
            own_row = tl.where(is_own, row, own_row)
            address = at + row.to(tl.int64) * row_bytes
            addresses = addresses + (tl.where((head >= 0) & (is_own == 0), address, 0),)
        record = region(rank, context) + header_bytes + own_row.to(tl.int64) * row_bytes
        # fmt: off
        lanes = load_lanes(
            y, record + places_offset, own_place >= 0, weights_offset, hidden, NUM_TOPK, AT_ONCE
        )
        # fmt: on
        for column in range(0, hidden, BLOCK_H):
            columns = column + tl.arange(0, BLOCK_H)
            in_row = _in_row(columns, hidden, out)
            own = sum_lanes(lanes, columns, in_row, hidden)
            own = round_to(own, out.dtype.element_ty).to(tl.float32)
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
