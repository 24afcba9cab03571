"""Every rank tells the others its counts: for a dispatch by rank and expert, for a layer by
expert."""

import triton
import triton.language as tl

from ..device.context import (
    KIND_DISPATCH,
    KIND_MOE_FFN,
    NUM_RANKS,
    PHASE_CAPACITY,
    RANK,
    REPORT_ROWS,
    ROLE_EXCHANGE,
    SIGNATURE_WORDS,
)
from ..device.lang import (
    as_pointer,
    begin_span,
    consume_token,
    current_epoch,
    device_function,
    end_span,
    is_broken,
    put,
    report_failure,
    report_pointer,
)
from ..device.programs import pdl_wait
from ..device.signature import (
    own_call,
    publish_signature,
    put_signature,
    signature_of,
    wait_signatures,
)
from ..device.slots import COUNTS_AT, region

MANY_ROWS = tl.constexpr(0x7FFFFFFF)
"""What a negative number of rows counts as: no memory holds so many."""


@triton.jit(do_not_specialize=["may_grow"])
def exchange_kernel(
    num_tokens_per_rank,  # int32 [R]
    num_tokens_per_expert,  # int32 [E]
    rank_prefix_matrix,  # int32 [R, R], out: rows of ranks 0..i to rank j
    recv_expert_counts,  # int32 [R, L], out: rows of each source for each local expert
    expert_offsets,  # int32 [L + 1], out
    call_signature,  # int32 [SIGNATURE_WORDS], out
    context,
    max_rows,
    num_local_experts,
    payload_bytes,
    num_topk,
    item_bytes,
    num_scales,
    may_grow,
    RANKS_PAD: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    ALL_EXPERTS_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs 0 .. R-1 write this rank's counts [E + R] to one peer each; program R reads all
    ranks'. A later role, it waits for the flags of all ranks and refuses a signature that is not
    its own. Where any rank has more than `max_rows` rows for another one, or fewer than none, all
    ranks stop here alike.

    A PDL launch behind the send plan, of which it reads nothing. What follows must not begin
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
        pdl_wait(PDL)
    if is_broken(context):
        return
    num_experts = num_local_experts * num_ranks
    # fmt: off
    signature = signature_of(
        KIND_DISPATCH, payload_bytes, num_topk, num_experts, item_bytes, num_scales, 0, 0, may_grow,
        own_call(context), context,
    )
    # fmt: on
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
    tl.store(call_signature + tl.arange(0, SIGNATURE_WORDS), signature)
    token = wait_signatures(signature, context, RANKS_PAD)
    if token == 0:  # the counts of another shape mean nothing: numbers of rows stay 0
        return
    rank = tl.load(context + RANK).to(tl.int32)
    rows = tl.zeros([RANKS_PAD], tl.int32)
    totals = tl.zeros([EXPERTS_PAD], tl.int32)
    most_rows = tl.full((), 0, tl.int32)
    for source in range(0, num_ranks):
        counts = _counts_of(source, token, context)
        sent = tl.load(counts + num_experts + ranks, mask=ranks < num_ranks, other=0)
        most_rows = tl.maximum(most_rows, tl.max(tl.where(sent < 0, MANY_ROWS, sent), 0))
        rows += sent
        tl.store(rank_prefix_matrix + source * num_ranks + ranks, rows, mask=ranks < num_ranks)
        received = tl.load(counts + rank * num_local_experts + experts, mask=real, other=0)
        tl.store(recv_expert_counts + source * num_local_experts + experts, received, mask=real)
        totals += received
    if most_rows > max_rows:
        tl.store(report_pointer(context) + REPORT_ROWS, most_rows.to(tl.int64))
        report_failure(rank, current_epoch(context), context, PHASE_CAPACITY)
    else:
        tl.store(expert_offsets + 1 + experts, tl.cumsum(totals, 0), mask=real)


# --- A layer -----------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["stage_count", "back_stages"])
def exchange_fused_kernel(
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
    PDL: tl.constexpr,
):
    """Programs 0 .. R-1 write this rank's counts [E] to one peer each. Program R + d, a later role,
    waits for those of all ranks and finds where rows begin on rank d.

    Example, 2 ranks of 2 experts: rank 0 has [2, 1, 1, 3] lanes for experts 0 to 3 and rank 1 has
    [1, 0, 2, 2]. Rank 0 receives [3, 1] rows, [1, 0] of them from rank 1, and rank 1 [3, 5], [1, 3]
    from rank 0: num_remote [1, 4], expert_begin [0, 3, 0, 3], remote_begin [0, 1, 0, 1], and on
    rank 0 expert_offsets [0, 3, 4] and remote_offsets [0, 1, 1].

    A PDL launch behind the layout; see `exchange_kernel` for what follows.
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
    pdl_wait(PDL)
    if is_broken(context):
        return
    # fmt: off
    signature = signature_of(
        KIND_MOE_FFN, payload_bytes, num_topk, num_experts, item_bytes, 0, stage_count, back_stages,
        0, own_call(context), context,
    )
    # fmt: on
    if program < RANKS:
        counts, token = _open_counts(program, signature, context)
        if token == 1:
            all_experts = tl.arange(0, ALL_EXPERTS_PAD)
            has = all_experts < num_experts
            put(counts + all_experts, tl.load(num_tokens_per_expert + all_experts, has, 0), has)
            _send_counts(program, context)
        return
    since = begin_span()
    token = wait_signatures(signature, context, RANKS_PAD)
    if token == 1:  # else numbers of rows stay 0: the counts of another shape mean nothing
        totals = tl.zeros([EXPERTS_PAD], tl.int32)
        remote = tl.zeros([EXPERTS_PAD], tl.int32)
        for source in tl.static_range(RANKS):
            counts = _counts_of(source, token, context)
            sent = tl.load(counts + dest * num_local_experts + experts, mask=real, other=0)
            totals += sent
            remote += tl.where(source == dest, 0, sent)
        ends, remote_ends = tl.cumsum(totals, 0), tl.cumsum(remote, 0)
        to = dest * num_local_experts + experts
        tl.store(expert_begin + to, ends - totals, mask=real)
        tl.store(remote_begin + to, remote_ends - remote, mask=real)
        tl.store(num_remote + dest, tl.sum(remote, 0))
        tl.store(expert_offsets + 1 + experts, ends, mask=real & is_own)
        tl.store(remote_offsets + 1 + experts, remote_ends, mask=real & is_own)
    end_span(ROLE_EXCHANGE, dest, since, context)


# --- Both ----------------------------------------------------------------------------------------


@device_function
def _open_counts(peer, signature, context):
    """Store the signature on `peer`: (where the counts go there, a token)."""
    lane = tl.arange(0, 1)
    there, token = put_signature(peer + lane, lane == 0, signature, context)
    return as_pointer(tl.max(there, 0), tl.int32) + COUNTS_AT, token


@device_function
def _send_counts(peer, context):
    """Publish the signature and the counts that were stored after it."""
    lane = tl.arange(0, 1)
    publish_signature(peer + lane, lane == 0, context)


@device_function
def _counts_of(source, token, context):
    """Pointer to the counts of `source`."""
    return as_pointer(consume_token(region(source, context), token), tl.int32) + COUNTS_AT
