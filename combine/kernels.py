"""Combine: return rows, or sums of expert rows, to the tokens' ranks and add them up there."""

import triton
import triton.language as tl

from ..device.context import KIND_COMBINE, MAX_CHUNKS, NUM_RANKS, PHASE_RETURNED_ROWS, RANK
from ..device.lang import (
    as_pointer,
    consume_token,
    current_epoch,
    device_function,
    is_broken,
    pacing_interval,
    put,
    put_rows,
    report_abandoned,
    round_to,
    row_mask,
    row_pointers,
    stagger,
    symm_at,
    wait,
)
from ..device.programs import claim, claim_next, end_push, finish_call, is_last_program
from ..device.signature import open_call
from ..device.slots import (
    chunk_flag,
    deal,
    num_chunks_here,
    num_spans,
    open_regions,
    raise_chunks,
    received_rows,
    region,
    span,
)


@triton.jit(do_not_specialize=["num_tokens", "num_push_programs", "num_rows", "region_rows"])
def return_rows_kernel(
    x,  # [N, H], rows in receive order
    topk_weights,  # float32 [N, K] with HAS_WEIGHTS
    dispatched,  # int32 [SIGNATURE_WORDS] of the handle
    out,  # this and what follows: see `final_sum_kernel`
    out_weights,
    bias_0,
    bias_1,
    send_head,
    rank_prefix_matrix,
    context,
    num_tokens,
    num_push_programs,
    num_rows,
    region_rows,
    hidden,
    header_bytes,
    row_bytes,
    weights_offset,
    NUM_BIASES: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    NUM_TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    ALIGNED: tl.constexpr,
    RANKS: tl.constexpr,
    RANKS_PAD: tl.constexpr,
    CHUNK_ROWS: tl.constexpr,
    SPAN: tl.constexpr,
    LANES: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Write each received row back to its source, into this rank's region, in the same order.

    Program 0 begins the call. The next num_push_programs push; the others meanwhile sum the tokens
    whose rows have come back, from the first one on, and leave what the push leaves them no time
    for to `final_sum_kernel`. What came from this rank itself stays where the sum reads it.
    """
    # These reads are on their way while the next line waits for its answer.
    counts = received_rows(rank_prefix_matrix, tl.arange(0, RANKS_PAD), context)
    rank = tl.load(context + RANK).to(tl.int32)
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    if is_broken(context):
        report_abandoned(context)
        return
    program = tl.program_id(0) - 1
    if program < 0:
        is_sound = (tl.min(counts, 0) >= 0) & (tl.sum(counts, 0) <= num_rows)
        item_bytes: tl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
        # fmt: off
        open_call(
            KIND_COMBINE, hidden * item_bytes, NUM_TOPK, item_bytes, 0, dispatched, is_sound,
            context, RANKS_PAD,
        )
        # fmt: on
    elif program < num_push_programs:
        num_peers = num_ranks - 1
        topk = tl.arange(0, TOPK_PAD)
        own, most_rows = open_regions(counts, header_bytes, row_bytes, context)
        num_chunks = tl.cdiv(most_rows, CHUNK_ROWS)
        num_blocks = tl.cdiv(hidden, COLUMNS)
        chunks_here = num_chunks_here(num_chunks, program, num_push_programs, SPAN)
        due = stagger(LANES * row_bytes // num_blocks, program, context)
        for turn in range(0, num_spans(num_chunks, num_push_programs, SPAN)):
            first_chunk, end_chunk = span(turn, num_chunks, program, num_push_programs, SPAN)
            end = min(end_chunk * CHUNK_ROWS, most_rows)
            for first in range(first_chunk * CHUNK_ROWS * num_peers, end * num_peers, LANES):
                peers, rows = deal(first, rank + 1, num_peers, context, LANES)
                count = received_rows(rank_prefix_matrix, peers, context)
                at = tl.load(rank_prefix_matrix + peers * num_ranks + rank) - count + rows
                inside = (rows < end) & (rows < count) & (at >= 0) & (at < num_rows)
                to = symm_at(own + rows.to(tl.int64) * row_bytes, peers, context)
                num_bytes = tl.sum(inside.to(tl.int32), 0) * row_bytes
                time = pacing_interval(num_bytes, chunks_here, num_chunks, context)
                due = put_rows(
                    as_pointer(to, x.dtype.element_ty),
                    x + at.to(tl.int64) * hidden,
                    hidden,
                    inside,
                    due,
                    time * 50 // 49 // num_blocks,  # 2% slower: meanwhile the sums read memory
                    ALIGNED,
                    COLUMNS,
                )
                if HAS_WEIGHTS:
                    has = inside[:, None] & (topk < NUM_TOPK)[None, :]
                    to_weights = as_pointer(to + weights_offset, tl.float32)[:, None]
                    from_weights = topk_weights + at[:, None] * NUM_TOPK
                    weights = tl.load(from_weights + topk[None, :], mask=has, other=0.0)
                    put(to_weights + topk[None, :], weights, has)
            raise_chunks(first_chunk, end_chunk, counts, context, CHUNK_ROWS, SPAN)
        end_push(context)
    else:
        group = claim(context)
        while group < tl.cdiv(num_tokens, GROUP):
            _sum_group(
                out,
                out_weights,
                x,
                topk_weights,
                bias_0,
                bias_1,
                send_head,
                rank_prefix_matrix,
                context,
                group,
                num_tokens,
                num_rows,
                region_rows,
                hidden,
                header_bytes,
                row_bytes,
                weights_offset,
                NUM_BIASES,
                HAS_WEIGHTS,
                NUM_TOPK,
                TOPK_PAD,
                ALIGNED,
                RANKS,
                RANKS_PAD,
                CHUNK_ROWS,
                GROUP,
                BLOCK_H,
            )
            group = claim_next(num_push_programs, context)


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "region_rows"])
def final_sum_kernel(
    out,  # [T, H], out
    out_weights,  # float32 [T, K], out with HAS_WEIGHTS
    own_rows,  # [N, H], what this rank returned; see `return_rows_kernel`
    own_weights,  # float32 [N, K], likewise, with HAS_WEIGHTS
    bias_0,  # [T, H] with NUM_BIASES >= 1
    bias_1,  # [T, H] with NUM_BIASES == 2
    send_head,  # int32 [T, R]: row * R + rank of each returned row, in the order of the sum
    rank_prefix_matrix,  # int32 [R, R]
    context,
    num_tokens,
    num_rows,  # N
    region_rows,  # rows that a region holds: no entry of send_head leads beyond them
    hidden,
    header_bytes,
    row_bytes,
    weights_offset,
    NUM_BIASES: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    NUM_TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    ALIGNED: tl.constexpr,
    RANKS: tl.constexpr,
    RANKS_PAD: tl.constexpr,
    CHUNK_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Sum the tokens that `return_rows_kernel` has not; the last program finishes the call.

    Whether calls have ended is not asked here, where it would cost the time of an atomic: what
    waits then ends at once, and `return_rows_kernel` has told the host.
    """
    group = claim(context)
    while group < tl.cdiv(num_tokens, GROUP):
        _sum_group(
            out,
            out_weights,
            own_rows,
            own_weights,
            bias_0,
            bias_1,
            send_head,
            rank_prefix_matrix,
            context,
            group,
            num_tokens,
            num_rows,
            region_rows,
            hidden,
            header_bytes,
            row_bytes,
            weights_offset,
            NUM_BIASES,
            HAS_WEIGHTS,
            NUM_TOPK,
            TOPK_PAD,
            ALIGNED,
            RANKS,
            RANKS_PAD,
            CHUNK_ROWS,
            GROUP,
            BLOCK_H,
        )
        group = claim(context)
    if is_last_program(context):
        finish_call(context)


@device_function
def _sum_group(
    out,
    out_weights,
    own_rows,
    own_weights,
    bias_0,
    bias_1,
    send_head,
    rank_prefix_matrix,
    context,
    group,
    num_tokens,
    num_rows,
    region_rows,
    hidden,
    header_bytes,
    row_bytes,
    weights_offset,
    NUM_BIASES: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    NUM_TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    ALIGNED: tl.constexpr,
    RANKS: tl.constexpr,
    RANKS_PAD: tl.constexpr,
    CHUNK_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Add the returned rows of GROUP tokens: bias_0 + bias_1 first, then `send_head`'s order.

    fp32, rounded once. Waits for just the chunks that hold these rows.
    """
    rank = tl.load(context + RANK).to(tl.int32)
    lanes = tl.arange(0, TOPK_PAD)
    tokens = group * GROUP + tl.arange(0, GROUP)
    token = wait_returned(send_head, tokens, num_tokens, context, CHUNK_ROWS, RANKS, RANKS_PAD)
    inside = (tokens < num_tokens) & (token == 1)
    own_start = tl.load(rank_prefix_matrix + rank * RANKS + rank)
    own_start -= received_rows(rank_prefix_matrix, rank, context)
    # Every address before any row is read: each would otherwise wait for a read of its own.
    addresses = ()
    weight_addresses = ()
    for place in tl.static_range(RANKS):
        head = tl.load(send_head + tokens * RANKS + place, mask=inside, other=-1)
        row = head // RANKS
        at = consume_token(region(head % RANKS, context) + header_bytes, token)
        at += row.to(tl.int64) * row_bytes
        weights_at = at + weights_offset
        is_own = head % RANKS == rank
        has = (head >= 0) & (row < tl.where(is_own, num_rows - own_start, region_rows))
        own = (own_rows + (own_start + row).to(tl.int64) * hidden).to(tl.int64)
        at = tl.where(is_own, own, at)
        if HAS_WEIGHTS:
            own = (own_weights + (own_start + row) * NUM_TOPK).to(tl.int64)
            weights_at = tl.where(is_own, own, weights_at)
        addresses = addresses + (tl.where(has, at, 0),)
        weight_addresses = weight_addresses + (tl.where(has, weights_at, 0),)
    for column in range(0, hidden, BLOCK_H):
        columns = column + tl.arange(0, BLOCK_H)
        in_row = row_mask(columns, hidden, out.dtype.element_ty, ALIGNED)
        real = inside[:, None] & in_row[None, :]
        at = tokens.to(tl.int64) * hidden
        total = tl.zeros([GROUP, BLOCK_H], tl.float32)
        if NUM_BIASES >= 1:
            bias = tl.load(row_pointers(bias_0 + at, columns, ALIGNED), mask=real, other=0.0)
            total += bias.to(tl.float32)
        if NUM_BIASES == 2:
            bias = tl.load(row_pointers(bias_1 + at, columns, ALIGNED), mask=real, other=0.0)
            total += bias.to(tl.float32)
        for place in tl.static_range(RANKS):
            part = tl.load(
                row_pointers(as_pointer(addresses[place], out.dtype.element_ty), columns, ALIGNED),
                mask=(addresses[place] != 0)[:, None] & in_row[None, :],
                other=0.0,
            )
            total += part.to(tl.float32)
        values = round_to(total, out.dtype.element_ty)
        tl.store(row_pointers(out + at, columns, ALIGNED), values, mask=real)
    if HAS_WEIGHTS:
        weights = tl.zeros([GROUP, TOPK_PAD], tl.float32)
        for place in tl.static_range(RANKS):
            source = as_pointer(weight_addresses[place], tl.float32)[:, None]
            has = (weight_addresses[place] != 0)[:, None] & (lanes < NUM_TOPK)[None, :]
            weights += tl.load(source + lanes[None, :], mask=has, other=0.0)
        to = out_weights + tokens[:, None] * NUM_TOPK + lanes[None, :]
        tl.store(to, weights, mask=inside[:, None] & (lanes < NUM_TOPK)[None, :])


@device_function
def wait_returned(
    send_head,
    tokens,
    num_tokens,
    context,
    CHUNK_ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    RANKS_PAD: tl.constexpr,
):
    """Wait until the other ranks have returned all rows of `tokens` [B]. Returns a token."""
    rank = tl.load(context + RANK).to(tl.int32)
    places = tl.arange(0, RANKS_PAD)
    inside = (tokens < num_tokens)[:, None] & (places < RANKS)[None, :]
    heads = tl.load(send_head + tokens[:, None] * RANKS + places[None, :], mask=inside, other=-1)
    head = tl.reshape(heads, [tokens.shape[0] * RANKS_PAD])
    sent = (head >= 0) & (head % RANKS != rank)
    writer = tl.where(sent, head % RANKS, 0)
    last_chunk = tl.load(context + MAX_CHUNKS).to(tl.int32) - 1
    chunk = tl.minimum(head // RANKS // CHUNK_ROWS, last_chunk)
    flags = chunk_flag(writer, tl.where(sent, chunk, 0), context)
    return wait(flags, sent, current_epoch(context), writer, context, PHASE_RETURNED_ROWS)
