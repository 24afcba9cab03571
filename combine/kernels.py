"""Combine: return rows to the tokens' ranks and add them up on these."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..device.context import KIND_COMBINE, MAX_CHUNKS, NUM_RANKS, PHASE_RETURNED_ROWS, RANK
from ..device.lang import (
    as_pointer,
    consume_token,
    current_epoch,
    device_function,
    is_broken,
    pace,
    put,
    report_abandoned,
    round_to,
    row_mask,
    row_pointers,
    wait,
)
from ..device.programs import claim, claim_next, finish_call, is_last_program
from ..device.push import Source, copy_block, push_rows
from ..device.signature import RowShape, open_call
from ..device.slots import chunk_flag, received_rows, region, rows_in_region
from .reduce_expanded_kernels import expert_sums, expert_weights, slots_of


class SumSizes(NamedTuple):
    """What a sum is compiled for."""

    NUM_TOPK: int  # weights of a row, 0 for none
    TOPK_PAD: int
    ALIGNED: bool  # whether rows are a multiple of 16 bytes
    RANKS: int
    RANKS_PAD: int
    CHUNK_ROWS: int  # rows that share a flag
    BLOCK_TOKENS: int  # tokens that a program sums at a time
    BLOCK_H: int  # columns of each
    NUM_SUMMED: int = 0  # expert rows that a row of this rank may be the sum of; 0: it is a row


class ExpertPlan(NamedTuple):
    """Which expert rows are added up for the ranks that they return to."""

    rank_prefix_matrix: tl.tensor  # int32 [R, R]
    x: tl.tensor  # [M, H]
    src_metadata: tl.tensor  # int32 [N, 2 + NUM_SUMMED], see `reference.place`
    num_expanded: tl.tensor  # M


class OwnSums(NamedTuple):
    """Sums of expert rows for tokens of this rank, blocks [B]; see `reduce_expanded_kernels`."""

    number: tl.tensor  # at which the sum is added to those of other ranks, -1 for none
    slots_at: tl.tensor  # pointers to the numbers of the rows
    x: tl.tensor  # [M, H]
    weights: tl.tensor  # float32 [M], or None
    num_expanded: tl.tensor  # M


@triton.jit(do_not_specialize=["num_tokens", "num_push_programs", "num_rows", "num_expanded"])
def return_rows_kernel(
    own,  # launch.ReturnedRows
    dispatched,  # int32 [SIGNATURE_WORDS] of the handle
    sums,  # launch.Sums, see `final_sum_kernel`
    context,
    num_tokens,
    num_push_programs,
    num_rows,  # N, that were received
    num_expanded,  # M, rows by expert
    hidden,
    row,  # slots.Row
    SUM: tl.constexpr,  # SumSizes
    PUSH: tl.constexpr,  # push.PushSizes
):
    """Write each received row, or the sum of its expert rows, back to its source, into this rank's
    region, in the same order.

    Program 0 begins the call. The next num_push_programs push, or, where rows are sums, as many as
    `_num_pushing` says. The others concurrently sum the tokens whose rows have come back, from the
    first one on, and leave the rest to `final_sum_kernel` when the push ends. Rows of this rank's
    own tokens are not written: the sum reads them, or the expert rows that they are sums of, where
    they are.
    """
    # These reads are on their way while the next line waits for its answer.
    counts = received_rows(sums.rank_prefix_matrix, tl.arange(0, SUM.RANKS_PAD), context)
    if is_broken(context):
        report_abandoned(context)
        return
    program = tl.program_id(0) - 1
    first_summing = num_push_programs
    if SUM.NUM_SUMMED > 0:
        # A program that sums waits for rows and fills an SM. So of the first three fifths those
        # that do not push end at once, and leave their SMs to other kernels.
        num_pushing = _num_pushing(counts, num_push_programs, PUSH)
        first_summing = tl.maximum(num_pushing, num_push_programs * 3 // 5)
        num_push_programs = num_pushing
    if program < 0:
        is_sound = (tl.min(counts, 0) >= 0) & (tl.sum(counts, 0) <= num_rows)
        item_bytes: tl.constexpr = sums.out.dtype.element_ty.primitive_bitwidth // 8
        shape = RowShape(hidden * item_bytes, SUM.NUM_TOPK, item_bytes, 0, 0)
        open_call(KIND_COMBINE, shape, dispatched, is_sound, context, SUM.RANKS_PAD)
    elif program < num_push_programs:
        num_peers = tl.load(context + NUM_RANKS).to(tl.int32) - 1
        prefix = sums.rank_prefix_matrix
        if SUM.NUM_SUMMED == 0:
            source = Source(own.x, own.weights, num_rows, hidden, num_peers)
            # fmt: off
            push_rows(
                source, prefix, counts, program, num_push_programs, row, context, received_row,
                copy_block, PUSH, False,
            )
            # fmt: on
        else:
            source = Source(sums.out, own.weights, num_rows, hidden, num_peers)
            plan = ExpertPlan(prefix, own.x, own.src_metadata, num_expanded)
            # fmt: off
            push_rows(
                source, plan, counts, program, num_push_programs, row, context, _summed_row,
                _put_sums, PUSH, False,
            )
            # fmt: on
    elif program >= first_summing:
        block = claim(context)
        while block < tl.cdiv(num_tokens, SUM.BLOCK_TOKENS):
            # fmt: off
            _sum_block(
                block, own, sums, context, num_tokens, num_rows, num_expanded, hidden, row, SUM
            )
            # fmt: on
            block = claim_next(num_push_programs, context)


@device_function
def _num_pushing(counts, num_programs, PUSH: tl.constexpr):
    """How many of the programs push counts [RANKS_PAD] rows of sums: as few as push all chunks in
    the same number of rounds, two at least. A program that makes sums pushes slowly: if a few had
    one chunk more, all others would wait for them. And with two rounds the final sums begin before
    all rows have come. Of 52 programs 32 push 64 chunks, two each, and 43 push 128, three each."""
    num_chunks = tl.maximum(tl.cdiv(tl.max(counts, 0), PUSH.CHUNK_ROWS), 1)
    return tl.cdiv(num_chunks, tl.maximum(tl.cdiv(num_chunks, num_programs), 2))


@device_function
def received_row(source, rank_prefix_matrix, peers, rows, end, context):
    """The received rows that are `rows` (block) of those from `peers`; see `push_rows`."""
    index, has = _received_index(source, rank_prefix_matrix, peers, rows, end, context)
    return source.x + index.to(tl.int64) * source.num_columns, index, has


@device_function
def _summed_row(source, plan, peers, rows, end, context):
    """`received_row` for sums of expert rows, an `ExpertPlan`. They are no rows yet: there are
    numbers in the place of pointers."""
    index, has = _received_index(source, plan.rank_prefix_matrix, peers, rows, end, context)
    return index, index, has


@device_function
def _received_index(source, rank_prefix_matrix, peers, rows, end, context):
    """(numbers of the received rows that are `rows` (block) of those from `peers`, whether there is
    one). A handle that a caller made up leads to no other memory."""
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    count = received_rows(rank_prefix_matrix, peers, context)
    rank = tl.load(context + RANK).to(tl.int32)
    index = tl.load(rank_prefix_matrix + peers * num_ranks + rank) - count + rows
    return index, (rows < end) & (rows < count) & (index >= 0) & (index < source.num_rows)


@device_function
def _put_sums(
    source, plan, from_rows, src_row, has, to, due, step, row, SIZES: tl.constexpr
):  # fmt: skip
    """`push.copy_block` of sums of expert rows, rounded to the type of source.x.

    Example, that of `expand_rows_kernel`: the sums for A B D E are y[0], y[4] + y[1], y[2], y[3].
    """
    slots_at = slots_of(plan.src_metadata, src_row, SIZES.NUM_SUMMED)
    dtype: tl.constexpr = source.x.dtype.element_ty
    for start in range(0, source.num_columns, SIZES.BLOCK_COLUMNS):
        columns = start + tl.arange(0, SIZES.BLOCK_COLUMNS)
        # fmt: off
        total = expert_sums(
            plan.x, slots_at, has, plan.num_expanded, columns, source.num_columns, SIZES.NUM_SUMMED,
            SIZES.ALIGNED,
        )
        # fmt: on
        part = tl.minimum(source.num_columns - start, SIZES.BLOCK_COLUMNS)
        due = pace(due, step * part // SIZES.BLOCK_COLUMNS)
        is_sum = has[:, None] & row_mask(columns, source.num_columns, dtype, SIZES.ALIGNED)[None, :]
        to_columns = row_pointers(as_pointer(to, dtype), columns, SIZES.ALIGNED)
        put(to_columns, round_to(total, dtype), is_sum)
    if source.weights is not None:
        k = tl.arange(0, triton.next_power_of_2(SIZES.NUM_SUMMED))
        # fmt: off
        weights = expert_weights(
            source.weights, slots_at, has, plan.num_expanded, SIZES.NUM_SUMMED
        )
        # fmt: on
        is_weight = has[:, None] & (k < SIZES.NUM_SUMMED)[None, :]
        put(as_pointer(to + row.weights, tl.float32)[:, None] + k[None, :], weights, is_weight)
    return due


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "num_expanded"])
def final_sum_kernel(
    own,  # launch.ReturnedRows: what this rank returned
    sums,  # launch.Sums
    context,
    num_tokens,
    num_rows,  # N
    num_expanded,  # M
    hidden,
    row,  # slots.Row
    SUM: tl.constexpr,  # SumSizes
):
    """Sum the tokens that `return_rows_kernel` has not; the last program finishes the call.

    Whether calls have ended is not asked here, where it would cost the time of an atomic: a wait
    then ends at once, and `return_rows_kernel` has told the host.
    """
    block = claim(context)
    while block < tl.cdiv(num_tokens, SUM.BLOCK_TOKENS):
        # fmt: off
        _sum_block(
            block, own, sums, context, num_tokens, num_rows, num_expanded, hidden, row, SUM
        )
        # fmt: on
        block = claim(context)
    if is_last_program(context):
        finish_call(context)


@device_function
def _sum_block(
    block,
    own,
    sums,
    context,
    num_tokens,
    num_rows,
    num_expanded,
    hidden,
    row,
    SUM: tl.constexpr,
):
    """Add the returned rows of BLOCK_TOKENS tokens: bias_0 + bias_1 first, then `send_head`'s
    order.

    fp32, rounded once; sums of expert rows are rounded before. Waits for just the chunks that hold
    these rows. No entry of send_head leads beyond a region, or the rows that this rank returned.
    """
    rank = tl.load(context + RANK).to(tl.int32)
    token_idx = block * SUM.BLOCK_TOKENS + tl.arange(0, SUM.BLOCK_TOKENS)
    ready = wait_returned(sums.send_head, token_idx, num_tokens, context, SUM)
    inside = (token_idx < num_tokens) & (ready == 1)
    own_start = tl.load(sums.rank_prefix_matrix + rank * SUM.RANKS + rank)
    own_start -= received_rows(sums.rank_prefix_matrix, rank, context)
    region_rows = rows_in_region(row, context, SUM.CHUNK_ROWS)
    own_number = tl.full([SUM.BLOCK_TOKENS], -1, tl.int32)
    own_idx = tl.zeros([SUM.BLOCK_TOKENS], tl.int32)
    # Every address before any row is read: each would otherwise wait for a read of its own.
    addresses = ()
    weight_addresses = ()
    for number in tl.static_range(SUM.RANKS):
        head = tl.load(sums.send_head + token_idx * SUM.RANKS + number, mask=inside, other=-1)
        rows = head // SUM.RANKS
        at = consume_token(region(head % SUM.RANKS, context) + row.header_bytes, ready)
        at += rows.to(tl.int64) * row.num_bytes
        weights_at = at + row.weights
        is_own = head % SUM.RANKS == rank
        has = (head >= 0) & (rows < tl.where(is_own, num_rows - own_start, region_rows))
        has = has & ((is_own == 0) | (own_start >= 0))
        if SUM.NUM_SUMMED > 0:
            own_number = tl.where(has & is_own, number, own_number)
            own_idx = tl.where(has & is_own, own_start + rows, own_idx)
            has = has & (is_own == 0)
        else:
            own_row = (own.x + (own_start + rows).to(tl.int64) * hidden).to(tl.int64)
            at = tl.where(is_own, own_row, at)
            if own.weights is not None:
                own_row = (own.weights + (own_start + rows) * SUM.NUM_TOPK).to(tl.int64)
                weights_at = tl.where(is_own, own_row, weights_at)
        addresses = addresses + (tl.where(has, at, 0),)
        weight_addresses = weight_addresses + (tl.where(has, weights_at, 0),)
    at = token_idx.to(tl.int64) * hidden
    dtype: tl.constexpr = sums.out.dtype.element_ty
    own_sums = None
    if SUM.NUM_SUMMED > 0:
        slots_at = slots_of(own.src_metadata, own_idx, SUM.NUM_SUMMED)
        own_sums = OwnSums(own_number, slots_at, own.x, own.weights, num_expanded)
    add_rows(addresses, own_sums, sums.out + at, sums, at, inside, hidden, dtype, SUM)
    if own.weights is not None:
        to_weights = sums.weights + token_idx * SUM.NUM_TOPK
        add_weights(weight_addresses, own_sums, to_weights, inside, SUM)


@device_function
def add_rows(
    addresses, own, to, sums, at, inside, hidden, dtype: tl.constexpr, SUM: tl.constexpr
):  # fmt: skip
    """Write the sums of rows of `dtype` at `addresses`, SUM.RANKS blocks of them of which 0 stands
    for no row, to the rows `to` (block): the rows at `at` of the biases first, then in this
    order, with NUM_SUMMED the `OwnSums` own at their numbers."""
    for column in range(0, hidden, SUM.BLOCK_H):
        columns = column + tl.arange(0, SUM.BLOCK_H)
        in_row = row_mask(columns, hidden, to.dtype.element_ty, SUM.ALIGNED)
        real = inside[:, None] & in_row[None, :]
        total = tl.zeros([SUM.BLOCK_TOKENS, SUM.BLOCK_H], tl.float32)
        if sums.bias_0 is not None:
            bias = row_pointers(sums.bias_0 + at, columns, SUM.ALIGNED)
            total += tl.load(bias, mask=real, other=0.0).to(tl.float32)
        if sums.bias_1 is not None:
            bias = row_pointers(sums.bias_1 + at, columns, SUM.ALIGNED)
            total += tl.load(bias, mask=real, other=0.0).to(tl.float32)
        if SUM.NUM_SUMMED > 0:
            # fmt: off
            own_part = expert_sums(
                own.x, own.slots_at, own.number >= 0, own.num_expanded, columns, hidden,
                SUM.NUM_SUMMED, SUM.ALIGNED,
            )
            # fmt: on
            own_part = round_to(own_part, dtype).to(tl.float32)
        for number in tl.static_range(SUM.RANKS):
            returned = as_pointer(addresses[number], dtype)
            part = tl.load(
                row_pointers(returned, columns, SUM.ALIGNED),
                mask=(addresses[number] != 0)[:, None] & in_row[None, :],
                other=0.0,
            )
            part = part.to(tl.float32)
            if SUM.NUM_SUMMED > 0:
                part = tl.where((own.number == number)[:, None], own_part, part)
            total += part
        values = round_to(total, to.dtype.element_ty)
        tl.store(row_pointers(to, columns, SUM.ALIGNED), values, mask=real)


@device_function
def add_weights(addresses, own, to, inside, SUM: tl.constexpr):
    """Write the sums of weights [NUM_TOPK] at `addresses`, see `add_rows`, to `to` (block)."""
    k = tl.arange(0, SUM.TOPK_PAD)
    weights = tl.zeros([SUM.BLOCK_TOKENS, SUM.TOPK_PAD], tl.float32)
    if SUM.NUM_SUMMED > 0:
        has_own = own.number >= 0
        weights += expert_weights(
            own.weights, own.slots_at, has_own, own.num_expanded, SUM.NUM_SUMMED
        )
    for number in tl.static_range(SUM.RANKS):
        returned = as_pointer(addresses[number], tl.float32)[:, None]
        has = (addresses[number] != 0)[:, None] & (k < SUM.NUM_TOPK)[None, :]
        weights += tl.load(returned + k[None, :], mask=has, other=0.0)
    tl.store(to[:, None] + k[None, :], weights, inside[:, None] & (k < SUM.NUM_TOPK)[None, :])


@device_function
def wait_returned(send_head, token_idx, num_tokens, context, SUM: tl.constexpr):
    """Wait until the other ranks have returned all rows of `token_idx` [B]. Returns 1, or 0 where
    the wait expired."""
    rank = tl.load(context + RANK).to(tl.int32)
    numbers = tl.arange(0, SUM.RANKS_PAD)
    inside = (token_idx < num_tokens)[:, None] & (numbers < SUM.RANKS)[None, :]
    at = send_head + token_idx[:, None] * SUM.RANKS + numbers[None, :]
    heads = tl.load(at, mask=inside, other=-1)
    head = tl.reshape(heads, [SUM.BLOCK_TOKENS * SUM.RANKS_PAD])
    sent = (head >= 0) & (head % SUM.RANKS != rank)
    writer = tl.where(sent, head % SUM.RANKS, 0)
    last_chunk = tl.load(context + MAX_CHUNKS).to(tl.int32) - 1
    chunk = tl.minimum(head // SUM.RANKS // SUM.CHUNK_ROWS, last_chunk)
    flags = chunk_flag(writer, tl.where(sent, chunk, 0), context)
    return wait(flags, sent, current_epoch(context), writer, context, PHASE_RETURNED_ROWS)
