"""Every rank tells the others its counts: for a dispatch by rank and expert, for a layer by
expert."""

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
    ROLE_EXCHANGE,
)
from ..lang import (
    as_pointer,
    begin_span,
    consume_token,
    current_epoch,
    device_function,
    end_span,
    is_broken,
    notify,
    put,
    report_failure,
    report_words,
    symm_at,
    wait,
)
from ..slots_kernels import COUNTS_AT, count_flag, region, wait_slot_free
from ..work import wait_for_previous


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
    """Programs 0 .. R-1 write this rank's counts [E + R] to one peer each; program R reads all
    ranks'. A later role, it waits for the flags of all ranks and refuses a signature that is not
    its own. Where any rank has more than `max_rows` rows for another one, all ranks stop here
    alike.

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
    num_experts = num_local_experts * num_ranks
    signature = _signature(payload_bytes, num_topk, num_experts, item_bytes, num_scales, 0, 0)
    if program < num_ranks:
        counts, token = _open_counts(program, signature, context)
        if token == 1:
            all_experts = tl.arange(0, ALL_EXPERTS_PAD)
            has = all_experts < num_experts
            put(counts + all_experts, tl.load(num_tokens_per_expert + all_experts, has, 0), has)
            is_rank = ranks < num_ranks
            rows = tl.load(num_tokens_per_rank + ranks, is_rank, 0)
            put(counts + num_experts + ranks, rows, is_rank)
            _send_counts(program, context)
        return
    token = _wait_counts(context, RANKS_PAD)
    if token == 0:
        return
    rank = tl.load(context + RANK).to(tl.int32)
    rows = tl.zeros([RANKS_PAD], tl.int32)
    totals = tl.zeros([EXPERTS_PAD], tl.int32)
    num_others = tl.full((), 0, tl.int32)
    most_rows = tl.full((), 0, tl.int32)
    for source in range(0, num_ranks):
        counts, differs = _counts_of(source, signature, token, context)
        if differs:
            _report_signature(source, context)
            num_others += 1
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


# --- A layer -----------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["stage_count", "back_stages"])
def exchange_lanes_kernel(
    num_tokens_per_expert,  # int32 [E]
    expert_offsets,  # int32 [L + 1], out: where each expert's rows begin here
    remote_offsets,  # int32 [L + 1], out: the same of the rows that come from other ranks alone
    num_remote,  # int32 [R], out: rows that each rank receives from others
    expert_begin,  # int32 [E], out: where each expert's rows begin on its rank
    remote_begin,  # int32 [E], out: the same of the rows from other ranks alone
    num_to_push,  # int64 [R, S], out: 0
    context,
    num_local_experts,
    payload_bytes,
    num_topk,
    item_bytes,
    stage_count,
    back_stages,
    RANKS: tl.constexpr,
    RANKS_PAD: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    ALL_EXPERTS_PAD: tl.constexpr,
    STAGES_PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Programs 0 .. R-1 write this rank's counts [E] to one peer each. Program R + d, a later role,
    waits for those of all ranks and finds where rows begin on rank d.

    Example, 2 ranks of 2 experts: rank 0 has [2, 1, 1, 3] lanes for experts 0 to 3 and rank 1 has
    [1, 0, 2, 2]. Rank 0 receives [3, 1] rows, [1, 0] of them from rank 1, and rank 1 [3, 5], [1, 3]
    from rank 0: num_remote [1, 4], expert_begin [0, 3, 0, 3], remote_begin [0, 1, 0, 1], and on
    rank 0 expert_offsets [0, 3, 4] and remote_offsets [0, 1, 1].

    An early launch behind the layout; see `exchange_kernel` for what follows.
    """
    program = tl.program_id(0)
    experts = tl.arange(0, EXPERTS_PAD)
    real = experts < num_local_experts
    num_experts = num_local_experts * RANKS
    dest = program - RANKS
    is_own = dest == tl.load(context + RANK)
    if program >= RANKS:
        stages = tl.arange(0, STAGES_PAD)
        to = num_to_push + dest * stage_count + stages
        tl.store(to, stages.to(tl.int64) * 0, mask=stages < stage_count)
        # No rows, should this give up on a lost peer: what follows may not know of it.
        tl.store(num_remote + dest, 0)
        offsets = tl.arange(0, 2 * EXPERTS_PAD)
        has = (offsets <= num_local_experts) & is_own
        tl.store(expert_offsets + offsets, tl.zeros_like(offsets), mask=has)
        tl.store(remote_offsets + offsets, tl.zeros_like(offsets), mask=has)
    wait_for_previous(OVERLAP)
    if is_broken(context):
        return
    signature = _signature(
        payload_bytes, num_topk, num_experts, item_bytes, 0, stage_count, back_stages
    )
    if program < RANKS:
        counts, token = _open_counts(program, signature, context)
        if token == 1:
            all_experts = tl.arange(0, ALL_EXPERTS_PAD)
            has = all_experts < num_experts
            put(counts + all_experts, tl.load(num_tokens_per_expert + all_experts, has, 0), has)
            _send_counts(program, context)
        return
    since = begin_span()
    token = _wait_counts(context, RANKS_PAD)
    if token == 0:
        return
    totals = tl.zeros([EXPERTS_PAD], tl.int32)
    remote = tl.zeros([EXPERTS_PAD], tl.int32)
    other = tl.full((), -1, tl.int32)  # a rank that called with something else
    for source in tl.static_range(RANKS):
        counts, differs = _counts_of(source, signature, token, context)
        other = tl.where(differs, source, other)
        sent = tl.load(counts + dest * num_local_experts + experts, mask=real, other=0)
        totals += sent
        remote += tl.where(source == dest, 0, sent)
    if other >= 0:  # numbers of rows stay 0: the counts of another shape mean nothing
        _report_signature(other, context)
    else:
        ends, remote_ends = tl.cumsum(totals, 0), tl.cumsum(remote, 0)
        to = dest * num_local_experts + experts
        tl.store(expert_begin + to, ends - totals, mask=real)
        tl.store(remote_begin + to, remote_ends - remote, mask=real)
        tl.store(num_remote + dest, tl.sum(remote, 0))
        tl.store(expert_offsets + 1 + experts, ends, mask=real & is_own)
        tl.store(remote_offsets + 1 + experts, remote_ends, mask=real & is_own)
    end_span(ROLE_EXCHANGE, dest, since, context)


# --- Both ----------------------------------------------------------------------------------------
# A signature [8] of what the call was made with stands before the counts, at the head of this
# rank's region.


@device_function
def _signature(
    payload_bytes, num_topk, num_experts, item_bytes, num_scales, stage_count, back_stages
):
    """What must be the same on all ranks; the stages of both ways are 0 for a dispatch."""
    field = tl.arange(0, 8)
    signature = tl.where(field == 0, payload_bytes, tl.where(field == 1, num_topk, 0))
    signature = tl.where(field == 2, num_experts, tl.where(field == 3, item_bytes, signature))
    signature = tl.where(field == 4, num_scales, tl.where(field == 5, stage_count, signature))
    return tl.where(field == 6, back_stages, signature)


@device_function
def _open_counts(peer, signature, context):
    """Write the signature on `peer`, once the slot is free there: (where the counts go there, a
    token)."""
    lane = tl.arange(0, 1)
    token = wait_slot_free(peer + lane, lane == 0, context)
    own = consume_token(region(tl.load(context + RANK), context), token)
    head = as_pointer(symm_at(own, peer, context), tl.int32)
    field = tl.arange(0, 8)
    put(head + field, signature, (field < 8) & (token == 1))
    return head + COUNTS_AT, token


@device_function
def _send_counts(peer, context):
    """Publish what was written behind the signature: `count_flags[me]` is raised after it."""
    lane = tl.arange(0, 1)
    flag = count_flag(tl.load(context + RANK), context)
    notify(flag, peer + lane, lane == 0, current_epoch(context), context)


@device_function
def _wait_counts(context, RANKS_PAD: tl.constexpr):
    """Wait for the counts of all ranks. Returns a token."""
    ranks = tl.arange(0, RANKS_PAD)
    flags, real = count_flag(ranks, context), ranks < tl.load(context + NUM_RANKS)
    return wait(flags, real, current_epoch(context), ranks, context, PHASE_COUNTS)


@device_function
def _counts_of(source, signature, token, context):
    """(pointer to the counts of `source`, whether its signature differs)."""
    head = as_pointer(consume_token(region(source, context), token), tl.int32)
    theirs = tl.load(head + tl.arange(0, 8))
    return head + COUNTS_AT, tl.sum((theirs != signature).to(tl.int32), 0) > 0


@device_function
def _report_signature(source, context):
    """Tell the host what `source` called with."""
    field = tl.arange(0, 8)
    theirs = tl.load(as_pointer(region(source, context), tl.int32) + field)
    tl.store(report_words(context) + REPORT_SIGNATURE + field, theirs.to(tl.int64))
    report_failure(source, current_epoch(context), context, PHASE_SIGNATURE)
