"""Every rank tells the others its counts: for a dispatch by rank and expert, for a layer by
expert."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..device.context import (
    KIND_DISPATCH,
    NUM_RANKS,
    PHASE_CAPACITY,
    PHASE_ROUTING,
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
    report_abandoned,
    report_failure,
    report_pointer,
)
from ..device.programs import pdl_launch_dependents, pdl_wait
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


class ExchangeSizes(NamedTuple):
    """What the exchange kernels are compiled for."""

    RANKS_PAD: int
    EXPERTS: int  # of a rank
    EXPERTS_PAD: int
    ALL_EXPERTS_PAD: int
    RANKS: int = 0  # of a layer alone, like what follows
    STAGES_PAD: int = 0
    NODES: int = 1


@triton.jit(do_not_specialize=["num_early_programs", "max_rows", "form", "caller"])
def exchange_kernel(
    num_tokens_per_rank,  # int32 [R]
    num_tokens_per_expert,  # int32 [E]
    counts,  # launch.Counts, out
    context,
    num_early_programs,
    max_rows,
    shape,  # signature.RowShape
    form,  # see `launch.form_of`
    caller,  # see `callers.Callers`
    SIZES: tl.constexpr,  # ExchangeSizes
    PDL: tl.constexpr,
):
    """Programs 0 .. R-1 write this rank's counts [E + R] to one peer each; program R reads all
    ranks'. A later role, it waits for the flags of all ranks and refuses a signature that is not
    its own. Where any rank has more than `max_rows` rows for another one, or fewer than none, all
    ranks stop here alike.

    A PDL launch after the send plan, of which it reads nothing; the send plan has waited for the
    counts before it lets this begin. The next launch may begin at once if it is one of a few,
    `num_early_programs`, which leave room. Else it would fill the chip while this waits for peers
    that have not come yet: for rows by expert it begins when all are in the call, for rows by token
    when this ends.
    """
    if num_early_programs > 0:
        pdl_launch_dependents(PDL)
    program = tl.program_id(0)
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    if program == num_ranks:
        clear_counts(counts, context, SIZES)
        pdl_wait(PDL)
    if is_broken(context):
        if program == num_ranks:  # the host, which waits for the counts, is to hear of it then
            report_abandoned(context)
        return
    num_experts = SIZES.EXPERTS * num_ranks
    call = own_call(context)
    # fmt: off
    signature = signature_of(
        KIND_DISPATCH, shape, num_experts, 0, 0, form, call, 0, caller, context
    )
    # fmt: on
    if program < num_ranks:
        # fmt: off
        send_counts(
            program, signature, num_tokens_per_expert, num_tokens_per_rank, num_experts, context,
            SIZES,
        )
        # fmt: on
    else:
        read_counts(counts, signature, max_rows, form, context, SIZES, PDL)


@device_function
def clear_counts(counts, context, SIZES: tl.constexpr):
    """Begin with no rows: if the wait for the counts gives up on a lost peer, later launches, which
    may not know of it, see none."""
    num_local_experts: tl.constexpr = SIZES.EXPERTS
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    ranks, experts = tl.arange(0, SIZES.RANKS_PAD), tl.arange(0, SIZES.EXPERTS_PAD)
    real = experts < num_local_experts
    for source in range(0, num_ranks):
        to = counts.rank_prefix_matrix + source * num_ranks + ranks
        tl.store(to, tl.zeros_like(ranks), mask=ranks < num_ranks)
        to = counts.recv_expert_counts + source * num_local_experts + experts
        tl.store(to, tl.zeros_like(experts), mask=real)
    if counts.recv_rank_prefix is not None:
        tl.store(counts.recv_rank_prefix + ranks, tl.zeros_like(ranks), mask=ranks < num_ranks)
    tl.store(counts.expert_offsets + experts, tl.zeros_like(experts), mask=real)
    tl.store(counts.expert_offsets + 1 + experts, tl.zeros_like(experts), mask=real)
    everywhere = tl.arange(0, SIZES.ALL_EXPERTS_PAD)
    is_expert = everywhere < num_local_experts * num_ranks
    tl.store(counts.group_counts + everywhere, tl.zeros_like(everywhere), mask=is_expert)
    if counts.earlier_ranks is not None:
        tl.store(counts.earlier_ranks + everywhere, tl.zeros_like(everywhere), mask=is_expert)
    if counts.num_per_expert is not None:
        tl.store(counts.psum_per_expert + experts, tl.zeros_like(experts), mask=real)
        tl.store(counts.num_per_expert + experts, tl.zeros_like(experts), mask=real)


@device_function
def read_counts(
    counts, signature, max_rows, form, context, SIZES: tl.constexpr, PDL: tl.constexpr = False
):
    """Wait for the counts of all ranks and write what follows from them to `launch.Counts`. Where
    any rank has more than `max_rows` rows for another one, or fewer than none, report it."""
    num_local_experts: tl.constexpr = SIZES.EXPERTS
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    num_experts = num_local_experts * num_ranks
    ranks = tl.arange(0, SIZES.RANKS_PAD)
    experts = tl.arange(0, SIZES.EXPERTS_PAD)
    real = experts < num_local_experts
    tl.store(counts.signature + tl.arange(0, SIGNATURE_WORDS), signature)
    ready = wait_signatures(signature, context, SIZES.RANKS_PAD)
    if counts.earlier_ranks is not None:
        pdl_launch_dependents(PDL)
    if ready == 1:  # else the counts are of another shape, and numbers of rows stay 0
        rank = tl.load(context + RANK).to(tl.int32)
        rows = tl.zeros([SIZES.RANKS_PAD], tl.int32)
        totals = tl.zeros([SIZES.EXPERTS_PAD], tl.int32)
        everywhere = tl.arange(0, SIZES.ALL_EXPERTS_PAD)
        of_group = tl.zeros([SIZES.ALL_EXPERTS_PAD], tl.int32)
        most_rows = tl.full((), 0, tl.int32)
        for source in range(0, num_ranks):
            theirs = _counts_of(source, ready, context)
            sent = tl.load(theirs + num_experts + ranks, mask=ranks < num_ranks, other=0)
            if SIZES.NODES > 1:
                most_rows = tl.maximum(most_rows, tl.load(theirs + num_experts + num_ranks))
            most_rows = tl.maximum(most_rows, tl.max(tl.where(sent < 0, MANY_ROWS, sent), 0))
            rows += sent
            to = counts.rank_prefix_matrix + source * num_ranks + ranks
            tl.store(to, rows, mask=ranks < num_ranks)
            if counts.recv_rank_prefix is not None:
                own = tl.sum(tl.where(ranks == rank, rows, 0), 0)
                tl.store(counts.recv_rank_prefix + source, own)
            received = tl.load(theirs + rank * num_local_experts + experts, mask=real, other=0)
            to = counts.recv_expert_counts + source * num_local_experts + experts
            tl.store(to, received, mask=real)
            totals += received
            if counts.earlier_ranks is not None:
                to = counts.earlier_ranks + everywhere
                tl.store(to, of_group, mask=(everywhere < num_experts) & (source == rank))
            of_group += tl.load(theirs + everywhere, mask=everywhere < num_experts, other=0)
        tl.store(counts.group_counts + everywhere, of_group, mask=everywhere < num_experts)
        if most_rows > max_rows:
            tl.store(report_pointer(context) + REPORT_ROWS, most_rows.to(tl.int64))
            report_failure(rank, current_epoch(context), context, PHASE_CAPACITY)
        else:
            tl.store(counts.expert_offsets + 1 + experts, tl.cumsum(totals, 0), mask=real)
            if counts.num_per_expert is not None:
                alignment = form >> 2  # see `launch.form_of`
                aligned = tl.cdiv(totals, alignment) * alignment
                ends = tl.cumsum(aligned, 0)
                if counts.earlier_ranks is not None:
                    ends -= aligned - totals
                tl.store(counts.psum_per_expert + experts, ends, mask=real)
                tl.store(counts.num_per_expert + experts, totals, mask=real)
                tl.atomic_add(counts.stats + experts, totals, mask=real, sem="relaxed")


# --- A layer -----------------------------------------------------------------------------------


@triton.jit(
    do_not_specialize=[
        "call", "caller", "expected_rows", "most_rows", "dispatch_stages", "combine_stages",
    ]
)  # fmt: skip
def exchange_fused_kernel(
    num_tokens_per_expert,  # int32 [E]
    found,  # fused.ExpertOffsets, out
    context,
    shape,  # signature.RowShape
    call,  # fused.LayerCall
    caller,  # see `callers.Callers`
    expected_rows,
    most_rows,
    dispatch_stages,
    combine_stages,
    SIZES: tl.constexpr,  # ExchangeSizes
    PDL: tl.constexpr,
):
    """Programs 0 .. R-1 write this rank's counts [E] to one peer each. Program R + d, a later role,
    waits for those of all ranks and finds where rows begin on rank d.

    Example, 2 ranks of 2 experts: rank 0 has [2, 1, 1, 3] rows for experts 0 to 3 and rank 1 has
    [1, 0, 2, 2]. Rank 0 receives [3, 1] rows, [1, 0] of them from rank 1, and rank 1 [3, 5], [1, 3]
    from rank 0: counts [3, 1, 3, 5], num_remote [1, 4], expert_begin [0, 3, 0, 3], remote_begin
    [0, 1, 0, 1], and on rank 0 expert_offsets [0, 3, 4] and remote_offsets [0, 1, 1].

    With expected_rows, the number of rows that this rank got in the forward, a backward that would
    bring another number ends this rank's calls: tensors of that size could not hold them.

    A PDL launch, which waits before it reads anything or tells another rank anything: so in a
    second call of the same tokens it says that this rank has read what came in the first. See
    `exchange_kernel` for the next launch.
    """
    program = tl.program_id(0)
    experts = tl.arange(0, SIZES.EXPERTS_PAD)
    num_local_experts: tl.constexpr = SIZES.EXPERTS
    real = experts < num_local_experts
    num_experts: tl.constexpr = num_local_experts * SIZES.RANKS
    dest = program - SIZES.RANKS
    is_own = dest == tl.load(context + RANK)
    if program >= SIZES.RANKS:
        stages = tl.arange(0, SIZES.STAGES_PAD)
        to = found.num_to_push + dest * dispatch_stages + stages
        tl.store(to, stages.to(tl.int64) * 0, mask=stages < dispatch_stages)
        # If this gives up on a lost peer, later launches, which may not know of it, see no rows.
        tl.store(found.num_remote + dest, 0)
        offsets = tl.arange(0, 2 * SIZES.EXPERTS_PAD)
        has = (offsets <= num_local_experts) & is_own
        tl.store(found.expert_offsets + offsets, tl.zeros_like(offsets), mask=has)
        tl.store(found.remote_offsets + offsets, tl.zeros_like(offsets), mask=has)
        if found.overflow is not None:
            tl.store(found.overflow + offsets, tl.zeros_like(offsets), mask=(offsets == 0) & is_own)
    pdl_wait(PDL)
    if is_broken(context):
        return
    # fmt: off
    signature = signature_of(
        call.kind, shape, num_experts, dispatch_stages, combine_stages, 0, own_call(context),
        call.saved, caller, context,
    )
    # fmt: on
    if program < SIZES.RANKS:
        # fmt: off
        send_counts(program, signature, num_tokens_per_expert, None, num_experts, context, SIZES)
        # fmt: on
        return
    since = begin_span()
    ready = wait_signatures(signature, context, SIZES.RANKS_PAD)
    if ready == 1:  # else numbers of rows stay 0: the counts of another shape mean nothing
        totals = tl.zeros([SIZES.EXPERTS_PAD], tl.int32)
        remote = tl.zeros([SIZES.EXPERTS_PAD], tl.int32)
        for source in tl.static_range(SIZES.RANKS):
            theirs = _counts_of(source, ready, context)
            sent = tl.load(theirs + dest * num_local_experts + experts, mask=real, other=0)
            totals += sent
            remote += tl.where(source == dest, 0, sent)
        begin_of_none = 0
        if found.overflow is not None:
            overflow = _most_received(ready, num_local_experts, context, SIZES) - most_rows
            if overflow > 0:
                totals, remote = tl.zeros_like(totals), tl.zeros_like(remote)
                begin_of_none = -1
                tl.store(found.overflow + experts, overflow, mask=(experts == 0) & is_own)
        ends, remote_ends = tl.cumsum(totals, 0), tl.cumsum(remote, 0)
        if is_own & (expected_rows >= 0) & (tl.sum(totals, 0) != expected_rows):
            report_failure(dest, current_epoch(context), context, PHASE_ROUTING)
        else:
            to = dest * num_local_experts + experts
            tl.store(found.counts + to, totals, mask=real)
            tl.store(found.expert_begin + to, ends - totals + begin_of_none, mask=real)
            tl.store(found.remote_begin + to, remote_ends - remote, mask=real)
            tl.store(found.num_remote + dest, tl.sum(remote, 0))
            tl.store(found.expert_offsets + 1 + experts, ends, mask=real & is_own)
            tl.store(found.remote_offsets + 1 + experts, remote_ends, mask=real & is_own)
    end_span(ROLE_EXCHANGE, dest, since, context)


@device_function
def _most_received(ready, num_local_experts, context, SIZES: tl.constexpr):
    """How many rows of experts the rank gets that gets the most."""
    experts = tl.arange(0, SIZES.EXPERTS_PAD)
    most = ready * 0
    for dest in range(0, SIZES.RANKS):
        rows = tl.zeros([SIZES.EXPERTS_PAD], tl.int32)
        for source in tl.static_range(SIZES.RANKS):
            theirs = _counts_of(source, ready, context) + dest * num_local_experts
            rows += tl.load(theirs + experts, mask=experts < num_local_experts, other=0)
        most = tl.maximum(most, tl.sum(rows, 0))
    return most


# --- Both ----------------------------------------------------------------------------------------


@device_function
def send_counts(
    peer,
    signature,
    num_tokens_per_expert,
    num_tokens_per_rank,
    num_experts,
    context,
    SIZES: tl.constexpr,
    most_per_node=None,
):
    """Write the signature to `peer`, then the counts by expert and, unless they are None, by rank
    and the most of a node."""
    one = tl.arange(0, 1)
    to, ready = put_signature(peer + one, one == 0, signature, context)
    counts = as_pointer(tl.max(to, 0), tl.int32) + COUNTS_AT
    if ready == 1:
        experts = tl.arange(0, SIZES.ALL_EXPERTS_PAD)
        real = experts < num_experts
        put(counts + experts, tl.load(num_tokens_per_expert + experts, real, 0), real)
        if num_tokens_per_rank is not None:
            ranks = tl.arange(0, SIZES.RANKS_PAD)
            real = ranks < tl.load(context + NUM_RANKS).to(tl.int32)
            rows = tl.load(num_tokens_per_rank + ranks, real, 0)
            put(counts + num_experts + ranks, rows, real)
        if most_per_node is not None:
            num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
            put(counts + num_experts + num_ranks + one, most_per_node, one == 0)
        publish_signature(peer + one, one == 0, context)


@device_function
def _counts_of(source, ready, context):
    """Pointer to the counts of `source`."""
    return as_pointer(consume_token(region(source, context), ready), tl.int32) + COUNTS_AT
