"""Combine: return rows, or sums of expert rows, to the tokens' ranks and add them up there."""

import triton
import triton.language as tl

from ..context import NUM_RANKS, PHASE_RETURNED_ROWS, RANK
from ..lang import (
    as_pointer,
    consume_token,
    current_epoch,
    device_function,
    finish_call,
    is_broken,
    is_last_program,
    notify,
    put,
    put_rows,
    round_to,
    row_mask,
    row_pointers,
    symm_at,
    wait,
)
from ..slots_kernels import (
    chunk_flag,
    open_region,
    received_rows,
    region,
    staged_peer,
)


@triton.jit
def return_rows_kernel(
    x,  # words [N, num_words], rows in receive order
    topk_weights,  # float32 [N, K] with HAS_WEIGHTS
    rank_prefix_matrix,  # int32 [R, R]
    context,
    num_words,
    row_bytes,
    weights_offset,
    HAS_WEIGHTS: tl.constexpr,
    NUM_TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    """Write each received row back to its source, into this rank's region, in the same order."""
    if is_broken(context):
        return
    rank = tl.load(context + RANK).to(tl.int32)
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    lanes = tl.arange(0, TOPK_PAD)
    for stage in range(0, num_ranks):
        peer = staged_peer(stage, context)
        num_rows = received_rows(rank_prefix_matrix, peer, context)
        start = tl.load(rank_prefix_matrix + peer * num_ranks + rank) - num_rows
        own, num_rows = open_region(peer, num_rows, 0, row_bytes, context)
        for chunk in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
            rows = chunk * ROWS + tl.arange(0, ROWS)
            inside = rows < num_rows
            to = symm_at(own + rows.to(tl.int64) * row_bytes, peer, context)
            put_rows(
                as_pointer(to, x.dtype.element_ty),
                x + (start + rows).to(tl.int64) * num_words,
                num_words,
                inside,
                ALIGNED,
                BLOCK_WORDS,
            )
            if HAS_WEIGHTS:
                real = inside[:, None] & (lanes < NUM_TOPK)[None, :]
                at = (start + rows)[:, None] * NUM_TOPK + lanes[None, :]
                to_weights = as_pointer(to + weights_offset, tl.float32)
                put(
                    to_weights[:, None] + lanes[None, :],
                    tl.load(topk_weights + at, mask=real, other=0.0),
                    real,
                )
            notify(chunk_flag(rank, chunk, context), peer, current_epoch(context), context)


@triton.jit(do_not_specialize=["max_rows"])
def return_sums_kernel(
    y,  # [M, H] expert rows
    expert_row,  # int32 [R, max_rows, K]: row of y of each lane, or -1
    lane_weight,  # float32 [R, max_rows, K]
    rank_prefix_matrix,  # int32 [R, R]
    context,
    max_rows,
    hidden,
    row_bytes,
    NUM_TOPK: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Sum the expert rows of each received token, weighted, and write one row to its source.

    fp32, in top-k lane order, rounded once to the type of `y`. A chunk of ROWS rows, which share
    a flag, is summed BLOCK rows at a time.
    """
    if is_broken(context):
        return
    rank = tl.load(context + RANK).to(tl.int32)
    for stage in range(0, tl.load(context + NUM_RANKS).to(tl.int32)):
        peer = staged_peer(stage, context)
        num_rows = received_rows(rank_prefix_matrix, peer, context)
        own, num_rows = open_region(peer, num_rows, 0, row_bytes, context)
        for chunk in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
            for first in range(chunk * ROWS, min(chunk * ROWS + ROWS, num_rows), BLOCK):
                rows = first + tl.arange(0, BLOCK)
                inside = rows < num_rows
                to = symm_at(own + rows.to(tl.int64) * row_bytes, peer, context)
                to_rows = as_pointer(to, y.dtype.element_ty)
                lane0 = (peer * max_rows + rows) * NUM_TOPK
                for column in range(0, hidden, BLOCK_H):
                    columns = column + tl.arange(0, BLOCK_H)
                    in_row = row_mask(columns, hidden, y.dtype.element_ty, ALIGNED)
                    total = tl.zeros([BLOCK, BLOCK_H], tl.float32)
                    for lane in range(0, NUM_TOPK):
                        at = tl.load(expert_row + lane0 + lane, mask=inside, other=-1)
                        weight = tl.load(lane_weight + lane0 + lane, mask=at >= 0, other=0.0)
                        real = (at >= 0)[:, None] & in_row[None, :]
                        rows_of_y = y + at.to(tl.int64) * hidden
                        part = tl.load(
                            row_pointers(rows_of_y, columns, ALIGNED), mask=real, other=0.0
                        )
                        total += weight[:, None] * part.to(tl.float32)
                    real = inside[:, None] & in_row[None, :]
                    values = round_to(total, y.dtype.element_ty)
                    put(row_pointers(to_rows, columns, ALIGNED), values, real)
            notify(chunk_flag(rank, chunk, context), peer, current_epoch(context), context)


@triton.jit(do_not_specialize=["num_tokens"])
def final_sum_kernel(
    out,  # [T, H], out
    out_weights,  # float32 [T, K], out with HAS_WEIGHTS
    bias_0,  # [T, H] with NUM_BIASES >= 1
    bias_1,  # [T, H] with NUM_BIASES == 2
    send_head,  # int32 [T, R]: row * R + rank of each returned row, in the order of the sum
    context,
    num_tokens,
    hidden,
    row_bytes,
    weights_offset,
    NUM_BIASES: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    NUM_TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    ALIGNED: tl.constexpr,
    RANKS_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Add the returned rows of each token: bias_0 + bias_1 first, then `send_head`'s order.

    fp32, rounded once. A program waits for just the chunks that hold the rows of its tokens. The
    last program finishes the call.
    """
    if is_broken(context):
        return
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    ranks = tl.arange(0, RANKS_PAD)
    lanes = tl.arange(0, TOPK_PAD)
    for first in range(tl.program_id(0) * BLOCK, num_tokens, tl.num_programs(0) * BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        heads = tl.load(
            send_head + tokens[:, None] * num_ranks + ranks[None, :],
            mask=(tokens < num_tokens)[:, None] & (ranks < num_ranks)[None, :],
            other=-1,
        )
        head = tl.reshape(heads, [BLOCK * RANKS_PAD])
        writer = tl.where(head >= 0, head % num_ranks, 0)
        token = wait(
            chunk_flag(writer, tl.where(head >= 0, head // num_ranks // ROWS, 0), context),
            head >= 0,
            current_epoch(context),
            writer,
            context,
            PHASE_RETURNED_ROWS,
        )
        inside = (tokens < num_tokens) & (token == 1)
        for column in range(0, hidden, BLOCK_H):
            columns = column + tl.arange(0, BLOCK_H)
            in_row = row_mask(columns, hidden, out.dtype.element_ty, ALIGNED)
            real = inside[:, None] & in_row[None, :]
            at = tokens.to(tl.int64) * hidden
            total = tl.zeros([BLOCK, BLOCK_H], tl.float32)
            if NUM_BIASES >= 1:
                total += tl.load(
                    row_pointers(bias_0 + at, columns, ALIGNED), mask=real, other=0.0
                ).to(tl.float32)
            if NUM_BIASES == 2:
                total += tl.load(
                    row_pointers(bias_1 + at, columns, ALIGNED), mask=real, other=0.0
                ).to(tl.float32)
            for place in range(0, num_ranks):
                address, sent = _returned_row(
                    send_head, tokens, inside, place, num_ranks, row_bytes, token, context
                )
                row = as_pointer(address, out.dtype.element_ty)
                part = tl.load(
                    row_pointers(row, columns, ALIGNED),
                    mask=sent[:, None] & in_row[None, :],
                    other=0.0,
                )
                total += part.to(tl.float32)
            tl.store(
                row_pointers(out + at, columns, ALIGNED),
                round_to(total, out.dtype.element_ty),
                mask=real,
            )
        if HAS_WEIGHTS:
            weights = tl.zeros([BLOCK, TOPK_PAD], tl.float32)
            for place in range(0, num_ranks):
                address, sent = _returned_row(
                    send_head, tokens, inside, place, num_ranks, row_bytes, token, context
                )
                row = as_pointer(address + weights_offset, tl.float32)
                real = sent[:, None] & (lanes < NUM_TOPK)[None, :]
                weights += tl.load(row[:, None] + lanes[None, :], mask=real, other=0.0)
            tl.store(
                out_weights + tokens[:, None] * NUM_TOPK + lanes[None, :],
                weights,
                mask=inside[:, None] & (lanes < NUM_TOPK)[None, :],
            )
    if is_last_program(context):
        finish_call(context)


@device_function
def _returned_row(send_head, tokens, inside, place, num_ranks, row_bytes, token, context):
    """Addresses of the returned rows of `tokens` at `place` of the sum, and which exist."""
    head = tl.load(send_head + tokens * num_ranks + place, mask=inside, other=-1)
    sent = head >= 0
    head = tl.where(sent, head, 0)
    base = consume_token(region(head % num_ranks, context), token)
    return base + (head // num_ranks).to(tl.int64) * row_bytes, sent
