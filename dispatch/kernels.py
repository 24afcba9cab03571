"""Dispatch, the sending half: exchange counts, push rows to the ranks of their experts."""

import triton
import triton.language as tl

from ..context import (
    NUM_RANKS,
    PHASE_CAPACITY,
    PHASE_COUNTS,
    PHASE_SIGNATURE,
    RANK,
    REPORT_ROWS,
    REPORT_SIGNATURE,
)
from ..lang import (
    as_pointer,
    consume_token,
    current_epoch,
    is_broken,
    notify,
    put,
    put_rows,
    report_failure,
    report_words,
    symm_at,
    take_turns,
    time_to_send,
    wait,
)
from ..slots_kernels import (
    count_flag,
    deal,
    num_chunks_here,
    num_spans,
    open_regions,
    raise_chunks,
    region,
    span,
    wait_slot_free,
)
from ..work import end_push, let_next_start, wait_for_previous


@triton.jit
def exchange_kernel(
    num_tokens_per_rank,  # int32 [R]
    num_tokens_per_expert,  # int32 [E]
    rank_prefix_matrix,  # int32 [R, R], out: rows of ranks 0..i to rank j
    recv_expert_counts,  # int32 [R, L], out: rows of each source for each local expert
    expert_offsets,  # int32 [L + 1], out
    context,
    max_rows,
    num_local_experts,
    payload_bytes,
    num_topk,
    item_bytes,
    num_scales,
    RANKS_PAD: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    ALL_EXPERTS_PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Programs 0 .. R-1 write this rank's counts to one peer each; program R reads all ranks'.

    A signature [8] of what the call was made with and the counts [E + R] stand at the head of
    this rank's region. `count_flags[me]` on the peer is raised after them; program R, a later
    role, waits for the flags of all ranks and refuses a signature that is not its own. Where any
    rank has more than `max_rows` rows for another one, all ranks stop here alike.
    An early launch behind the send plan, of which it reads nothing. What follows must not begin
    before this ends: it would fill the chip while this waits for peers that have not come yet.
    """
    program = tl.program_id(0)
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    ranks = tl.arange(0, RANKS_PAD)
    experts = tl.arange(0, EXPERTS_PAD)
    real = experts < num_local_experts
    if program == num_ranks:
        # No rows, should this give up on a lost peer: what follows may not know of it.
        for source in range(0, num_ranks):
            row = rank_prefix_matrix + source * num_ranks
            tl.store(row + ranks, tl.zeros_like(ranks), mask=ranks < num_ranks)
        tl.store(expert_offsets + experts, tl.zeros_like(experts), mask=real)
        tl.store(expert_offsets + 1 + experts, tl.zeros_like(experts), mask=real)
        wait_for_previous(OVERLAP)
    if is_broken(context):
        return
    rank = tl.load(context + RANK).to(tl.int32)
    num_experts = num_local_experts * num_ranks
    field = tl.arange(0, 8)
    signature = tl.where(field == 0, payload_bytes, tl.where(field == 1, num_topk, 0))
    signature = tl.where(field == 2, num_experts, tl.where(field == 3, item_bytes, signature))
    signature = tl.where(field == 4, num_scales, signature)
    if program < num_ranks:
        lane = tl.arange(0, 1)
        token = wait_slot_free(program + lane, lane == 0, context)
        if token == 1:
            own = consume_token(region(rank, context), token)
            head = as_pointer(symm_at(own, program, context), tl.int32)
            put(head + field, signature, field < 8)
            counts = head + 8
            all_experts = tl.arange(0, ALL_EXPERTS_PAD)
            has = all_experts < num_experts
            put(counts + all_experts, tl.load(num_tokens_per_expert + all_experts, has, 0), has)
            is_rank = ranks < num_ranks
            rows = tl.load(num_tokens_per_rank + ranks, is_rank, 0)
            put(counts + num_experts + ranks, rows, is_rank)
            flag = count_flag(rank, context)
            notify(flag, program + lane, lane == 0, current_epoch(context), context)
        return
    token = wait(
        count_flag(ranks, context),
        ranks < num_ranks,
        current_epoch(context),
        ranks,
        context,
        PHASE_COUNTS,
    )
    if token == 0:
        return
    rows = tl.zeros([RANKS_PAD], tl.int32)
    totals = tl.zeros([EXPERTS_PAD], tl.int32)
    num_others = tl.full((), 0, tl.int32)
    most_rows = tl.full((), 0, tl.int32)
    for source in range(0, num_ranks):
        head = as_pointer(consume_token(region(source, context), token), tl.int32)
        theirs = tl.load(head + field)
        if tl.sum((theirs != signature).to(tl.int32), 0) > 0:
            report = report_words(context) + REPORT_SIGNATURE
            tl.store(report + field, theirs.to(tl.int64))
            report_failure(source, current_epoch(context), context, PHASE_SIGNATURE)
            num_others += 1
        counts = head + 8
        sent = tl.load(counts + num_experts + ranks, mask=ranks < num_ranks, other=0)
        most_rows = tl.maximum(most_rows, tl.max(sent, 0))
        rows += sent
        tl.store(rank_prefix_matrix + source * num_ranks + ranks, rows, mask=ranks < num_ranks)
        received = tl.load(counts + rank * num_local_experts + experts, mask=real, other=0)
        tl.store(recv_expert_counts + source * num_local_experts + experts, received, mask=real)
        totals += received
    if (num_others == 0) & (most_rows > max_rows):
        tl.store(report_words(context) + REPORT_ROWS, most_rows.to(tl.int64))
        report_failure(rank, current_epoch(context), context, PHASE_CAPACITY)
    elif num_others == 0:  # else they stay 0: the counts of another shape mean nothing
        tl.store(expert_offsets + 1 + experts, tl.cumsum(totals, 0), mask=real)


@triton.jit(do_not_specialize=["num_tokens", "scale_stride_token", "scale_stride"])
def metadata_kernel(
    scales,  # int32 [T, NUM_SCALES] of any strides
    topk_idx,  # int64 [T, NUM_TOPK]
    topk_weights,  # float32 [T, NUM_TOPK]
    num_tokens_per_rank,  # int32 [R]
    send_token_idx,  # int32 [R, T]
    context,
    num_tokens,
    scale_stride_token,
    scale_stride,
    num_local_experts,
    header_bytes,
    row_bytes,
    scales_offset,
    ids_offset,
    NUM_TOPK: tl.constexpr,
    TAIL_PAD: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    SCALES_BLOCK: tl.constexpr,
    RANKS_PAD: tl.constexpr,
    LANES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write what goes with this rank's rows into its region on every rank: scales, then ids,
    weights and token. `push_kernel` raises the flags.

    An early launch behind the exchange, whose end it sees before the push may begin. After an
    exchange all ranks are in the call, and what slots held has been read.
    """
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    if is_broken(context):
        return
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    ranks = tl.arange(0, RANKS_PAD)
    num_rows = tl.load(num_tokens_per_rank + ranks, mask=ranks < num_ranks, other=0)
    own, most_rows = open_regions(num_rows, header_bytes, row_bytes, context)
    step = tl.num_programs(0) * LANES
    for first in range(tl.program_id(0) * LANES, most_rows * num_ranks, step):
        peers, rows = deal(first, num_ranks, context, LANES)
        inside = rows < tl.load(num_tokens_per_rank + peers)
        tokens = tl.load(send_token_idx + peers * num_tokens + rows, mask=inside, other=0)
        to = symm_at(own + rows.to(tl.int64) * row_bytes, peers, context)
        if NUM_SCALES > 0:
            from_scales = scales + tokens.to(tl.int64) * scale_stride_token
            to_scales = as_pointer(to + scales_offset, tl.int32)
            for start in range(0, NUM_SCALES, SCALES_BLOCK):
                columns = start + tl.arange(0, SCALES_BLOCK)
                has = inside[:, None] & (columns < NUM_SCALES)[None, :]
                at = from_scales[:, None] + columns.to(tl.int64)[None, :] * scale_stride
                put(to_scales[:, None] + columns[None, :], tl.load(at, mask=has), has)
        # Ids, weights and token as one run of words, since each write pays for a packet of its own.
        words = tl.arange(0, TAIL_PAD)
        weights_at: tl.constexpr = (NUM_TOPK + 3) // 4 * 4
        values = tl.where((words == 2 * weights_at)[None, :], tokens[:, None], 0)
        if NUM_TOPK > 0:
            lane = words % weights_at
            has = inside[:, None] & ((words < 2 * weights_at) & (lane < NUM_TOPK))[None, :]
            at = tokens[:, None] * NUM_TOPK + lane[None, :]
            ids = tl.load(topk_idx + at, mask=has, other=-1) - peers[:, None] * num_local_experts
            local = (ids >= 0) & (ids < num_local_experts)
            weights = tl.load(topk_weights + at, mask=has, other=0.0)
            part = tl.where(
                (words < weights_at)[None, :],
                tl.where(local, ids, -1).to(tl.int32),
                tl.where(local, weights, 0.0).to(tl.int32, bitcast=True),
            )
            values = tl.where(has, part, values)
        tail = as_pointer(to + ids_offset, tl.int32)[:, None] + words[None, :]
        put(tail, values, inside[:, None] & (words <= 2 * weights_at)[None, :])


@triton.jit(do_not_specialize=["num_tokens", "num_early_programs"])
def push_kernel(
    x,  # words [T, num_words]
    num_tokens_per_rank,  # int32 [R]
    send_token_idx,  # int32 [R, T]
    context,
    num_early_programs,
    num_tokens,
    num_words,
    header_bytes,
    row_bytes,
    ALIGNED: tl.constexpr,
    RANKS_PAD: tl.constexpr,
    CHUNK_ROWS: tl.constexpr,
    SPAN: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write the payload of this rank's rows into its region on the others, all at the same pace.

    A chunk's flags are raised after its rows, so that a reader waits for no more than it reads.
    An early launch behind `metadata_kernel`, whose stores happen before the flags: it is waited
    for before the first is raised. Rows to this rank itself have no payload, see `payload_address`.
    The launch behind may begin meanwhile if it is one of `num_early_programs`, and not of so many
    that they fill the chip.
    """
    if num_early_programs > 0:
        let_next_start(OVERLAP)
    if is_broken(context):
        wait_for_previous(OVERLAP)
        return
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    num_programs = tl.num_programs(0)
    ranks = tl.arange(0, RANKS_PAD)
    num_rows = tl.load(num_tokens_per_rank + ranks, mask=ranks < num_ranks, other=0)
    own, most_rows = open_regions(num_rows, header_bytes, row_bytes, context)
    num_peers = num_ranks - 1
    num_chunks = tl.cdiv(most_rows, CHUNK_ROWS)
    num_blocks = tl.cdiv(num_words, BLOCK_WORDS)
    chunks_here = num_chunks_here(num_chunks, num_programs, SPAN)
    due = take_turns(LANES * row_bytes // num_blocks, context)
    for turn in range(0, num_spans(num_chunks, num_programs, SPAN)):
        first_chunk, end_chunk = span(turn, num_chunks, num_programs, SPAN)
        end = min(end_chunk * CHUNK_ROWS, most_rows)
        for first in range(first_chunk * CHUNK_ROWS * num_peers, end * num_peers, LANES):
            peers, rows = deal(first, num_peers, context, LANES)
            inside = (rows < end) & (rows < tl.load(num_tokens_per_rank + peers))
            tokens = tl.load(send_token_idx + peers * num_tokens + rows, mask=rows < end, other=0)
            to = symm_at(own + rows.to(tl.int64) * row_bytes, peers, context)
            num_bytes = tl.sum(inside.to(tl.int32), 0) * row_bytes
            due = put_rows(
                as_pointer(to, x.dtype.element_ty),
                x + tokens.to(tl.int64) * num_words,
                num_words,
                inside,
                due,
                time_to_send(num_bytes, chunks_here, num_chunks, context) // num_blocks,
                ALIGNED,
                BLOCK_WORDS,
            )
        wait_for_previous(OVERLAP)
        raise_chunks(first_chunk, end_chunk, num_rows, context, CHUNK_ROWS, SPAN)
    wait_for_previous(OVERLAP)
    end_push(context)
