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
    BATCH: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    IN_FLIGHT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Sum the weighted expert rows of each token of other ranks, and return one row to its rank.

    Stage by stage, each when all `num_gemm_programs` of the launch before have computed it. Small
    programs, which find room beside the GEMM's; a warp reads IN_FLIGHT blocks of columns ahead,
    into shared memory. An early launch behind it.
    """
    let_next_start(OVERLAP)
    if is_broken(context) == 0:
        lane = tl.arange(0, 1)
        rank = tl.load(context + RANK).to(tl.int32)
        ranks = tl.arange(0, RANKS_PAD)
        is_peer = (ranks < RANKS) & (ranks != rank)
        program, num_programs = tl.program_id(0), tl.num_programs(0)
        blocks = tl.cdiv(hidden, BLOCK_H)
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
                for first in range(program, total, num_programs * BATCH):
                    peers, index = deal_rows(first, num_programs, RANKS - 1, BATCH)
                    peers = (rank + 1 + peers) % RANKS
                    theirs = region(peers, context)
                    inside = index < tl.load(as_pointer(theirs + counts, tl.int32))
                    entry = theirs + header_bytes + index.to(tl.int64) * row_bytes + list_offset
                    row = tl.load(as_pointer(entry + stage * 4, tl.int32), mask=inside, other=0)
                    offset = header_bytes + row.to(tl.int64) * row_bytes
                    record = theirs + offset + places_offset
                    # fmt: off
                    lanes = load_lanes(
                        rows, record, inside, weights_offset, hidden, NUM_TOPK, AT_ONCE
                    )
                    # fmt: on
                    to = symm_at(region(rank, context) + offset, peers, context)
                    to = tl.where(inside, to, 0)
                    here = tl.minimum(tl.cdiv(total - first, num_programs), BATCH)
                    if num_lanes(lanes) <= AT_ONCE:
                        for block in tl.range(0, here * blocks, num_stages=IN_FLIGHT):
                            _return_block(to, lanes, block, blocks, hidden, y, BLOCK_H, False)
                    else:
                        for block in range(0, here * blocks):
                            _return_block(to, lanes, block, blocks, hidden, y, BLOCK_H, True)
                notify_stage(returned + stage, num_programs, BACK, stage, context, RANKS_PAD)
    wait_for_previous(OVERLAP)


@device_function
def _return_block(
    to, lanes, block, blocks, hidden, y, BLOCK_H: tl.constexpr, ALL: tl.constexpr
):
    """Sum and return a block of columns of a row of a batch; each row has `blocks`."""
    number = block // blocks + tl.arange(0, 1)
    columns = block % blocks * BLOCK_H + tl.arange(0, BLOCK_H)
    in_row = _in_row(columns, hidden, y)
    values = round_to(sum_lanes(lanes, number, columns, in_row, hidden, ALL), y.dtype.element_ty)
    address = tl.gather(to, number, 0)
    pointers = row_pointers(as_pointer(address, y.dtype.element_ty), columns, True)
    put(pointers, values, (address != 0)[:, None] & in_row[None, :])


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
    most_lanes = tl.max(tl.sum((all_places >= 0).to(tl.int32), 1), 0)
    rows = ()
    factors = ()
    for lane in tl.static_range(min(AT_ONCE, NUM_TOPK)):
        row, factor = _lane(y, record + 4 * lane, weights_offset, inside, hidden)
        rows = rows + (row,)
        factors = factors + (factor,)
    return rows, factors, (y, tl.where(inside, record, 0), weights_offset, most_lanes)


@device_function
def num_lanes(lanes):
    """Most expert rows of any of the tokens."""
    return lanes[2][3]


@device_function
def _lane(y, record, weights_offset, inside, hidden):
    """(addresses of the expert rows, 0 where there is none, weights) of one lane of each token."""
    row = tl.load(as_pointer(record, tl.int32), mask=inside, other=-1)
    at = as_pointer(record + weights_offset, tl.float32)
    factor = tl.load(at, mask=row >= 0, other=0.0)
    return tl.where(row >= 0, (y + row.to(tl.int64) * hidden).to(tl.int64), 0), factor


@device_function
def sum_lanes(lanes, number, columns, in_row, hidden, ALL: tl.constexpr):
    """fp32 [N, C]: `columns` of the expert rows of tokens `number` [N] among those looked up (see
    `load_lanes`), times their weights, added up in top-k lane order; without ALL only those rows
    looked up at once."""
    rows, factors, rest = lanes
    y, record, weights_offset, most_lanes = rest
    parts = ()
    for lane in tl.static_range(len(rows)):
        parts = parts + (_columns(tl.gather(rows[lane], number, 0), columns, in_row, y),)
    total = tl.zeros([number.shape[0], columns.shape[0]], tl.float32)
    for lane in tl.static_range(len(rows)):
        total += tl.gather(factors[lane], number, 0)[:, None] * parts[lane].to(tl.float32)
    if ALL:
        at = tl.gather(record, number, 0)
        for lane in range(len(rows), most_lanes):
            row, factor = _lane(y, at + 4 * lane, weights_offset, at != 0, hidden)
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
    BATCH: tl.constexpr,
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
    end = tl.where(token == 1, num_tokens, 0)
    there = tl.full((), -1, tl.int32)  # stage up to which all rows are there
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    for first in range(program, end, num_programs * BATCH):
        tokens = first + tl.arange(0, BATCH) * num_programs
        inside = tokens < num_tokens
        stage = tl.max(tl.load(last_stage + tokens, mask=inside, other=0), 0)
        if (RANKS > 1) & (there < stage):
            token = wait_stage(BACK, stage, context, RANKS_PAD, PHASE_RETURNED_ROWS)
            there = stage
        inside = inside & (token == 1)
        own_place = tl.full([BATCH], -1, tl.int32)
        own_row = tl.zeros([BATCH], tl.int32)
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
        blocks = tl.cdiv(hidden, BLOCK_H)
        here = tl.minimum(tl.cdiv(end - first, num_programs), BATCH)
        for block in range(0, here * blocks):
            number = block // blocks + tl.arange(0, 1)
            columns = block % blocks * BLOCK_H + tl.arange(0, BLOCK_H)
            in_row = _in_row(columns, hidden, out)
            own = sum_lanes(lanes, number, columns, in_row, hidden, True)
            own = round_to(own, out.dtype.element_ty).to(tl.float32)
            own_at = tl.gather(own_place, number, 0)
            total = tl.zeros([1, BLOCK_H], tl.float32)
            for place in tl.static_range(RANKS):
                part = _columns(tl.gather(addresses[place], number, 0), columns, in_row, out)
                total += tl.where((own_at == place)[:, None], own, part.to(tl.float32))
            token_number = first + number * num_programs
            to = row_pointers(out + token_number.to(tl.int64) * hidden, columns, True)
            values = round_to(total, out.dtype.element_ty)
            tl.store(to, values, mask=((token_number < end) & (token == 1))[:, None] & in_row[None, :])
    wait_for_previous(OVERLAP)
    if is_broken(context) == 0:
        if is_last_program(context):
            finish_call(context)
