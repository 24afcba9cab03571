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
    device_function,
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
    metadata_flag,
    num_chunks_here,
    num_spans,
    open_regions,
    raise_chunks,
    region,
    span,
    wait_slot_free,
)
from ..work import end_push, is_last_program, let_next_start, wait_for_previous


@triton.jit
def exchange_kernel(
    num_tokens_per_rank,  # int32 [R]
    num_tokens_per_expert,  # int32 [E]
    rank_prefix_matrix,  # int32 [R, R], out: rows of ranks 0..i to rank j
    recv_expert_counts,  # int32 [R, L], out: rows of each source for each local expert
    expert_offsets,  # int32 [L + 1], out
    first_place,  # int32 [E], out, or None: where this rank's rows begin in each expert's rank
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
    """Programs 0 .. R-1 write this rank's counts to one peer each; program R reads all ranks', and
    so does program R + 1, if there is one, for `first_place`: see `_find_places`.

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
    if first_place is not None:
        if program == num_ranks + 1:
            # fmt: off
            _find_places(first_place, num_local_experts, context, RANKS_PAD, ALL_EXPERTS_PAD)
            # fmt: on
            wait_for_previous(OVERLAP)
            return
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


@device_function
def _find_places(
    first_place,
    num_local_experts,
    context,
    RANKS_PAD: tl.constexpr,
    ALL_EXPERTS_PAD: tl.constexpr,
):
    """Where this rank's rows begin in the list of each expert: behind those of the rank's earlier
    experts, and those that come to this expert from nearer ranks.

    A rank lists an expert's rows by the distance that they come from: its own first, then those of
    rank - 1, ... Example, counts of experts 0 to 3 from rank 0 [2, 1, 1, 3] and from rank 1
    [1, 0, 2, 2], two on each rank: the lists of rank 0 begin at 0 and 3, those of rank 1 at 0 and
    3; first_place of rank 0 [0, 3, 2, 5], of rank 1 [2, 4, 0, 3].
    """
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    rank = tl.load(context + RANK).to(tl.int32)
    ranks = tl.arange(0, RANKS_PAD)
    experts = tl.arange(0, ALL_EXPERTS_PAD)
    real = experts < num_local_experts * num_ranks
    epoch = current_epoch(context)
    flags = count_flag(ranks, context)
    token = wait(flags, ranks < num_ranks, epoch, ranks, context, PHASE_COUNTS)
    owner = experts // num_local_experts
    distance = (owner - rank + num_ranks) % num_ranks
    totals = tl.zeros([ALL_EXPERTS_PAD], tl.int32)
    nearer = tl.zeros([ALL_EXPERTS_PAD], tl.int32)
    for source in range(0, num_ranks):
        head = as_pointer(consume_token(region(source, context), token), tl.int32)
        sent = tl.load(head + 8 + experts, mask=real & (token == 1), other=0)
        totals += sent
        is_nearer = (owner - source + num_ranks) % num_ranks < distance
        nearer += tl.where(is_nearer, sent, 0)
    first = tl.cumsum(totals, 0) - totals + nearer
    for other in range(1, num_ranks):
        of_earlier_ranks = tl.sum(tl.where(owner < other, totals, 0), 0)
        first -= tl.where(owner == other, of_earlier_ranks, 0)
    tl.store(first_place + experts, first, mask=real)


@triton.jit(do_not_specialize=["num_tokens", "scale_stride_token", "scale_stride"])
def metadata_kernel(
    scales,  # int32 [T, NUM_SCALES] of any strides
    topk_idx,  # int64 [T, NUM_TOPK]
    topk_weights,  # float32 [T, NUM_TOPK]
    lane_index,  # int32 [T, NUM_TOPK], or None
    first_place,  # int32 [E], with lane_index
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
    weights and token. With `lane_index`, the places that rows take in their experts' lists stand
    where ids do. The last program raises `metadata_flags[me]` on every rank; `push_kernel` raises
    the rows' own flags after it has seen this kernel's end.

    An early launch behind the exchange, whose end it sees before the push may begin. After an
    exchange all ranks are in the call, and what slots held has been read.
    """
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    if is_broken(context):
        return
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    rank = tl.load(context + RANK).to(tl.int32)
    ranks = tl.arange(0, RANKS_PAD)
    num_rows = tl.load(num_tokens_per_rank + ranks, mask=ranks < num_ranks, other=0)
    own, most_rows = open_regions(num_rows, header_bytes, row_bytes, context)
    step = tl.num_programs(0) * LANES
    for first in range(tl.program_id(0) * LANES, most_rows * num_ranks, step):
        peers, rows = deal(first, rank + 1, num_ranks, context, LANES)
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
        tail = tl.where((words == 2 * weights_at)[None, :], tokens[:, None], 0)
        if NUM_TOPK > 0:
            lane = words % weights_at
            has = inside[:, None] & ((words < 2 * weights_at) & (lane < NUM_TOPK))[None, :]
            at = tokens[:, None] * NUM_TOPK + lane[None, :]
            ids = tl.load(topk_idx + at, mask=has, other=-1) - peers[:, None] * num_local_experts
            local = (ids >= 0) & (ids < num_local_experts)
            values = ids.to(tl.int32)
            if lane_index is not None:
                first = first_place + peers[:, None] * num_local_experts + ids
                values = tl.load(first, mask=local, other=0)
                values += tl.load(lane_index + at, mask=local, other=0)
            weights = tl.load(topk_weights + at, mask=has, other=0.0)
            part = tl.where(
                (words < weights_at)[None, :],
                tl.where(local, values, -1),
                tl.where(local, weights, 0.0).to(tl.int32, bitcast=True),
            )
            tail = tl.where(has, part, tail)
        to_tail = as_pointer(to + ids_offset, tl.int32)[:, None] + words[None, :]
        put(to_tail, tail, inside[:, None] & (words <= 2 * weights_at)[None, :])
    if is_last_program(context):
        flag = metadata_flag(rank, context)
        notify(flag + ranks * 0, ranks, ranks < num_ranks, current_epoch(context), context)


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

    An early launch behind `metadata_kernel`. The launch behind may begin meanwhile if it is one of
    `num_early_programs`, and not of so many that they fill the chip.
    """
    if num_early_programs > 0:
        let_next_start(OVERLAP)
    if is_broken(context):
        wait_for_previous(OVERLAP)
        return
    # fmt: off
    push_rows(
        x, num_tokens_per_rank, send_token_idx, context, tl.program_id(0), tl.num_programs(0),
        0, tl.load(context + NUM_RANKS).to(tl.int32), num_tokens, num_words, header_bytes,
        row_bytes, True, ALIGNED, RANKS_PAD, CHUNK_ROWS, SPAN, LANES, BLOCK_WORDS, OVERLAP,
    )
    # fmt: on
    wait_for_previous(OVERLAP)
    end_push(context)


@device_function
def push_rows(
    x,
    num_tokens_per_rank,
    send_token_idx,
    context,
    program,
    num_programs,
    first_distance,
    end_distance,
    num_tokens,
    num_words,
    header_bytes,
    row_bytes,
    BY_CHUNK: tl.constexpr,
    ALIGNED: tl.constexpr,
    RANKS_PAD: tl.constexpr,
    CHUNK_ROWS: tl.constexpr,
    SPAN: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program's share of pushing the rows for the ranks at distances first .. end: rank + d at
    d, all of them at the same pace.

    With BY_CHUNK a chunk's flags are raised after its rows, so that a reader waits for no more than
    it reads. The launch before is waited for before the first is raised: metadata happens before
    them as well. Without, the caller says when all rows are there.
    Rows to this rank itself, at distance 0, have flags but no payload, see `payload_address`.
    """
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    rank = tl.load(context + RANK).to(tl.int32)
    ranks = tl.arange(0, RANKS_PAD)
    distance = (ranks - rank + num_ranks) % num_ranks
    here = (ranks < num_ranks) & (distance >= first_distance) & (distance < end_distance)
    num_rows = tl.load(num_tokens_per_rank + ranks, mask=here, other=0)
    own, most_rows = open_regions(num_rows, header_bytes, row_bytes, context)
    first_peer = rank + tl.maximum(first_distance, 1)
    num_peers = end_distance - tl.maximum(first_distance, 1)
    num_chunks = tl.cdiv(most_rows, CHUNK_ROWS)
    num_blocks = tl.cdiv(num_words, BLOCK_WORDS)
    chunks_here = num_chunks_here(num_chunks, program, num_programs, SPAN)
    due = take_turns(LANES * row_bytes // num_blocks, program, context)
    for turn in range(0, num_spans(num_chunks, num_programs, SPAN)):
        first_chunk, end_chunk = span(turn, num_chunks, program, num_programs, SPAN)
        end = min(end_chunk * CHUNK_ROWS, most_rows)
        for first in range(first_chunk * CHUNK_ROWS * num_peers, end * num_peers, LANES):
            peers, rows = deal(first, first_peer, num_peers, context, LANES)
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
        if BY_CHUNK:
            wait_for_previous(OVERLAP)
            raise_chunks(first_chunk, end_chunk, num_rows, context, CHUNK_ROWS, SPAN)
