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
    report_abandoned,
    round_to,
    row_mask,
    row_pointers,
    wait,
)
from ..device.programs import claim, claim_next, finish_call, is_last_program
from ..device.push import Source, push_rows
from ..device.signature import RowShape, open_call
from ..device.slots import chunk_flag, received_rows, region


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


@triton.jit(do_not_specialize=["num_tokens", "num_push_programs", "num_rows", "region_rows"])
def return_rows_kernel(
    own,  # launch.ReturnedRows, in receive order
    dispatched,  # int32 [SIGNATURE_WORDS] of the handle
    sums,  # launch.Sums, see `final_sum_kernel`
    context,
    num_tokens,
    num_push_programs,
    num_rows,
    region_rows,
    hidden,
    row,  # slots.Row
    SUM: tl.constexpr,  # SumSizes
    PUSH: tl.constexpr,  # push.PushSizes
):
    """Write each received row back to its source, into this rank's region, in the same order.

    Program 0 begins the call. The next num_push_programs push. The others concurrently sum the
    tokens whose rows have come back, from the first one on, and leave the rest to
    `final_sum_kernel` when the push ends. Rows of this rank's own tokens are not written: the sum
    reads them where they are.
    """
    # These reads are on their way while the next line waits for its answer.
    counts = received_rows(sums.rank_prefix_matrix, tl.arange(0, SUM.RANKS_PAD), context)
    if is_broken(context):
        report_abandoned(context)
        return
    program = tl.program_id(0) - 1
    if program < 0:
        is_sound = (tl.min(counts, 0) >= 0) & (tl.sum(counts, 0) <= num_rows)
        item_bytes: tl.constexpr = own.x.dtype.element_ty.primitive_bitwidth // 8
        shape = RowShape(hidden * item_bytes, SUM.NUM_TOPK, item_bytes, 0, 0)
        open_call(KIND_COMBINE, shape, dispatched, is_sound, context, SUM.RANKS_PAD)
    elif program < num_push_programs:
        num_peers = tl.load(context + NUM_RANKS).to(tl.int32) - 1
        source = Source(own.x, own.weights, num_rows, hidden, num_peers)
        # fmt: off
        push_rows(
            source, sums.rank_prefix_matrix, counts, program, num_push_programs, row, context,
            received_row, PUSH, False,
        )
        # fmt: on
    else:
        block = claim(context)
        while block < tl.cdiv(num_tokens, SUM.BLOCK_TOKENS):
            # fmt: off
            _sum_block(
                block, own, sums, context, num_tokens, num_rows, region_rows, hidden, row, SUM
            )
            # fmt: on
            block = claim_next(num_push_programs, context)


@device_function
def received_row(source, rank_prefix_matrix, peers, rows, end, context):
    """The received rows that are `rows` (block) of those from `peers`; see `push_rows`. A handle
    that a caller made up leads to no other memory."""
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    count = received_rows(rank_prefix_matrix, peers, context)
    rank = tl.load(context + RANK).to(tl.int32)
    index = tl.load(rank_prefix_matrix + peers * num_ranks + rank) - count + rows
    has = (rows < end) & (rows < count) & (index >= 0) & (index < source.num_rows)
    return source.x + index.to(tl.int64) * source.num_columns, index, has


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "region_rows"])
def final_sum_kernel(
    own,  # launch.ReturnedRows: what this rank returned
    sums,  # launch.Sums
    context,
    num_tokens,
    num_rows,  # N
    region_rows,  # rows that a region holds: no entry of send_head leads beyond them
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
        _sum_block(block, own, sums, context, num_tokens, num_rows, region_rows, hidden, row, SUM)
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
    region_rows,
    hidden,
    row,
    SUM: tl.constexpr,
):
    """Add the returned rows of BLOCK_TOKENS tokens: bias_0 + bias_1 first, then `send_head`'s
    order.

    fp32, rounded once. Waits for just the chunks that hold these rows.
    """
    rank = tl.load(context + RANK).to(tl.int32)
    token_idx = block * SUM.BLOCK_TOKENS + tl.arange(0, SUM.BLOCK_TOKENS)
    ready = wait_returned(sums.send_head, token_idx, num_tokens, context, SUM)
    inside = (token_idx < num_tokens) & (ready == 1)
    own_start = tl.load(sums.rank_prefix_matrix + rank * SUM.RANKS + rank)
    own_start -= received_rows(sums.rank_prefix_matrix, rank, context)
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
        own_row = (own.x + (own_start + rows).to(tl.int64) * hidden).to(tl.int64)
        at = tl.where(is_own, own_row, at)
        if own.weights is not None:
            own_row = (own.weights + (own_start + rows) * SUM.NUM_TOPK).to(tl.int64)
            weights_at = tl.where(is_own, own_row, weights_at)
        addresses = addresses + (tl.where(has, at, 0),)
        weight_addresses = weight_addresses + (tl.where(has, weights_at, 0),)
    at = token_idx.to(tl.int64) * hidden
    dtype: tl.constexpr = sums.out.dtype.element_ty
    add_rows(addresses, sums.out + at, sums, at, inside, hidden, dtype, SUM)
    if own.weights is not None:
        add_weights(weight_addresses, sums.weights + token_idx * SUM.NUM_TOPK, inside, SUM)


@device_function
def add_rows(addresses, to, sums, at, inside, hidden, dtype: tl.constexpr, SUM: tl.constexpr):
    """Write the sums of rows of `dtype` at `addresses`, SUM.RANKS blocks of them of which 0 stands
    for no row, to the rows `to` (block): the rows at `at` of the biases first, then in this
    order."""
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
        for number in tl.static_range(SUM.RANKS):
            returned = as_pointer(addresses[number], dtype)
            part = tl.load(
                row_pointers(returned, columns, SUM.ALIGNED),
                mask=(addresses[number] != 0)[:, None] & in_row[None, :],
                other=0.0,
            )
            total += part.to(tl.float32)
        values = round_to(total, to.dtype.element_ty)
        tl.store(row_pointers(to, columns, SUM.ALIGNED), values, mask=real)


@device_function
def add_weights(addresses, to, inside, SUM: tl.constexpr):
    """Write the sums of weights [NUM_TOPK] at `addresses`, see `add_rows`, to `to` (block)."""
    k = tl.arange(0, SUM.TOPK_PAD)
    weights = tl.zeros([SUM.BLOCK_TOKENS, SUM.TOPK_PAD], tl.float32)
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
