"""Every rank tells the others its counts: for a dispatch by rank and expert, for a layer by share of
its tokens as well."""

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
    report_failure,
    report_words,
    symm_at,
    wait,
)
from ..slots_kernels import count_flag, region, wait_slot_free
from ..tiles import rows_per_stage
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
    signature = _signature(payload_bytes, num_topk, num_experts, item_bytes, num_scales, 0)
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


@triton.jit(do_not_specialize=["num_blocks", "blocks_per_share", "stage_count"])
def exchange_shares_kernel(
    earlier_counts,  # int32 [B, E + R], see `routing.Layout`
    num_tokens_per_expert,  # int32 [E]
    num_tokens_per_rank,  # int32 [R]
    share_rows,  # int32 [R, SHARES + 1], out: rows of each source before each share of its tokens
    expert_rows,  # int32 [SHARES + 1, L], out: expert rows by share, this rank's own last
    expert_offsets,  # int32 [L + 1], out
    first_place,  # int32 [SHARES, E], out: see below
    first_lane,  # int32 [E], out: this rank's lanes for earlier experts
    stage_begin,  # int32 [R, S + 1], out
    context,
    num_blocks,
    blocks_per_share,
    num_local_experts,
    payload_bytes,
    item_bytes,
    stage_count,
    NUM_TOPK: tl.constexpr,
    RANKS: tl.constexpr,
    RANKS_PAD: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    COLUMNS_PAD: tl.constexpr,
    SHARES: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Programs 0 .. R-1 write this rank's counts [SHARES, E + R] to one peer each. The others, later
    roles, wait for those of all ranks: program R reads what this rank receives, and PARTS programs
    for each destination find where this rank's lanes go there.

    An expert's rows stand by share of their source's tokens, then by distance of the source, rank -
    d at d; this rank's own stand last. Lane `index` of this rank for an expert thus becomes row
    first_place[share, expert] + index of the expert's rank. stage_begin[d]: which of this rank's
    lanes, sorted by expert, are the first of each stage of rank d, as in `tiles.rows_per_stage`.

    Example, 2 ranks of 2 experts, SHARES 1: rank 0 has [2, 1, 1, 3] lanes for experts 0 to 3 and
    rank 1 has [1, 0, 2, 2]. Rank 0 receives [1 + 2, 0 + 1] rows, its own last; rank 1 receives
    [1 + 2, 3 + 2]. On rank 0 first_place is [1, 3, 0, 3]: its lanes 0 1 | 2 | 3 | 4 5 6 become
    rows 1 2 | 3 of rank 0 and rows 0 | 3 4 5 of rank 1. With 2 stages, 2 rows each on rank 0 and 4
    on rank 1, stage_begin is [[0, 1, 3], [3, 5, 7]].

    An early launch behind the layout; see `exchange_kernel` for what follows.
    """
    program = tl.program_id(0)
    experts = tl.arange(0, EXPERTS_PAD)
    real = experts < num_local_experts
    num_experts = num_local_experts * RANKS
    rank = tl.load(context + RANK).to(tl.int32)
    dest = (program - RANKS - 1) // PARTS
    # No rows, should this give up on a lost peer: what follows may not know of it.
    if program == RANKS:
        tl.store(expert_offsets + experts, tl.zeros_like(experts), mask=real)
        tl.store(expert_offsets + 1 + experts, tl.zeros_like(experts), mask=real)
        for share in range(0, SHARES + 1):
            to = expert_rows + share * num_local_experts + experts
            tl.store(to, tl.zeros_like(experts), mask=real)
            sources = tl.arange(0, RANKS_PAD)
            rows = share_rows + sources * (SHARES + 1) + share
            tl.store(rows, tl.zeros_like(sources), mask=sources < RANKS)
    elif program > RANKS:
        for stage in range((program - RANKS - 1) % PARTS, stage_count + 1, PARTS):
            tl.store(stage_begin + dest * (stage_count + 1) + stage, 0)
    wait_for_previous(OVERLAP)
    if is_broken(context):
        return
    signature = _signature(payload_bytes, NUM_TOPK, num_experts, item_bytes, 0, SHARES)
    if program < RANKS:
        counts, token = _open_counts(program, signature, context)
        if token == 1:
            columns = tl.arange(0, COLUMNS_PAD)
            has = columns < num_experts + RANKS
            before = tl.zeros([COLUMNS_PAD], tl.int32)
            for share in tl.static_range(SHARES):
                # fmt: off
                end = _lanes_before(
                    (share + 1) * blocks_per_share, columns, earlier_counts, num_tokens_per_expert,
                    num_tokens_per_rank, num_blocks, num_experts, RANKS,
                )
                # fmt: on
                put(counts + share * (num_experts + RANKS) + columns, end - before, has)
                before = end
            _send_counts(program, context)
        return
    token = _wait_counts(context, RANKS_PAD)
    if token == 0:
        return
    SHARES_PAD: tl.constexpr = triton.next_power_of_2(SHARES)
    shares = tl.arange(0, SHARES_PAD)
    in_tile = (shares < SHARES)[:, None] & real[None, :]
    row_length = num_experts + RANKS
    if program == RANKS:
        others = tl.zeros([SHARES_PAD, EXPERTS_PAD], tl.int32)
        own = tl.zeros([EXPERTS_PAD], tl.int32)
        num_others = tl.full((), 0, tl.int32)
        for source in tl.static_range(RANKS):
            counts, differs = _counts_of(source, signature, token, context)
            if differs:
                _report_signature(source, context)
                num_others += 1
            at = counts + shares[:, None] * row_length + rank * num_local_experts + experts[None, :]
            received = tl.load(at, mask=in_tile, other=0)
            others += tl.where(source == rank, 0, received)
            own += tl.where(source == rank, tl.sum(received, 0), 0)
            at_rows = counts + shares * row_length + num_experts + rank
            rows = tl.cumsum(tl.load(at_rows, mask=shares < SHARES, other=0), 0)
            to_rows = share_rows + source * (SHARES + 1) + 1 + shares
            tl.store(to_rows, tl.where(num_others == 0, rows, 0), mask=shares < SHARES)
        if num_others == 0:  # else they stay 0: the counts of another shape mean nothing
            to = expert_rows + shares[:, None] * num_local_experts + experts[None, :]
            tl.store(to, others, mask=in_tile)
            tl.store(expert_rows + SHARES * num_local_experts + experts, own, mask=real)
            ends = tl.cumsum(tl.sum(others, 0) + own, 0)
            tl.store(expert_offsets + 1 + experts, ends, mask=real)
        return
    totals = tl.zeros([EXPERTS_PAD], tl.int32)
    before = tl.zeros([SHARES_PAD, EXPERTS_PAD], tl.int32)
    mine = tl.zeros([SHARES_PAD, EXPERTS_PAD], tl.int32)
    differ = tl.full((), 0, tl.int32)
    for source in tl.static_range(RANKS):
        counts, differs = _counts_of(source, signature, token, context)
        differ += differs.to(tl.int32)
        at = counts + shares[:, None] * row_length + dest * num_local_experts + experts[None, :]
        sent = tl.load(at, mask=in_tile, other=0)
        in_all = tl.sum(sent, 0)
        totals += in_all
        earlier = tl.cumsum(sent, 0) - sent
        is_nearer = (dest - source + RANKS) % RANKS < (dest - rank + RANKS) % RANKS
        from_others = earlier + tl.where(is_nearer, sent, 0)
        if rank == dest:
            before += tl.where(source == dest, earlier, in_all[None, :])
        else:
            before += tl.where(source == dest, 0, from_others)
        mine = tl.where(source == rank, sent, mine)
    if differ == 0:
        place = (tl.cumsum(totals, 0) - totals)[None, :] + before
        all_experts = tl.arange(0, COLUMNS_PAD)
        nearer = all_experts < dest * num_local_experts
        num_earlier = tl.sum(tl.load(num_tokens_per_expert + all_experts, mask=nearer, other=0), 0)
        part = (program - RANKS - 1) % PARTS
        if part == 0:
            lanes = tl.sum(mine, 0)
            to_lanes = first_lane + dest * num_local_experts + experts
            tl.store(to_lanes, num_earlier + tl.cumsum(lanes, 0) - lanes, mask=real)
            to = shares[:, None] * num_experts + dest * num_local_experts + experts[None, :]
            first = place - (tl.cumsum(mine, 0) - mine)
            tl.store(first_place + to, first, mask=in_tile)
        num_rows = tl.sum(totals, 0)
        stage_rows = rows_per_stage(num_rows, stage_count)
        for stage in range(part, stage_count + 1, PARTS):
            end = tl.minimum(stage * stage_rows, num_rows)
            earlier = tl.minimum(tl.maximum(end - place, 0), mine)
            to_stage = stage_begin + dest * (stage_count + 1) + stage
            tl.store(to_stage, num_earlier + tl.sum(tl.sum(earlier, 1), 0))


@device_function
def _lanes_before(
    block,
    columns,
    earlier_counts,
    num_tokens_per_expert,
    num_tokens_per_rank,
    num_blocks,
    num_experts,
    RANKS: tl.constexpr,
):
    """What the tokens before a block send to experts and ranks `columns`."""
    has = columns < num_experts + RANKS
    is_expert = columns < num_experts
    if block < num_blocks:
        at = earlier_counts + block * (num_experts + RANKS) + columns
        counts = tl.load(at, mask=has, other=0)
    else:
        counts = tl.load(num_tokens_per_expert + columns, mask=is_expert, other=0)
        to_ranks = num_tokens_per_rank + columns - num_experts
        counts += tl.load(to_ranks, mask=has & (is_expert == 0), other=0)
    return counts


# --- Both ----------------------------------------------------------------------------------------
# A signature [8] of what the call was made with stands before the counts, at the head of this
# rank's region.


@device_function
def _signature(payload_bytes, num_topk, num_experts, item_bytes, num_scales, num_shares):
    """What must be the same on all ranks; num_shares is 0 for a dispatch."""
    field = tl.arange(0, 8)
    signature = tl.where(field == 0, payload_bytes, tl.where(field == 1, num_topk, 0))
    signature = tl.where(field == 2, num_experts, tl.where(field == 3, item_bytes, signature))
    return tl.where(field == 4, num_scales, tl.where(field == 5, num_shares, signature))


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
    return head + 8, token


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
    return head + 8, tl.sum((theirs != signature).to(tl.int32), 0) > 0


@device_function
def _report_signature(source, context):
    """Tell the host what `source` called with."""
    field = tl.arange(0, 8)
    theirs = tl.load(as_pointer(region(source, context), tl.int32) + field)
    tl.store(report_words(context) + REPORT_SIGNATURE + field, theirs.to(tl.int64))
    report_failure(source, current_epoch(context), context, PHASE_SIGNATURE)
