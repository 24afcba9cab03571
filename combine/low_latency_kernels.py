"""Low-latency combine: one kernel that sums a token's expert rows on each rank, sends the sums back
and adds up those of the ranks."""

import triton
import triton.language as tl

from ..device.call_fields import call_fields, report_fields
from ..device.context import (
    KIND_LOW_LATENCY_COMBINE,
    KIND_MOE_FFN_COMBINE,
    PHASE_METADATA,
    PHASE_RETURNED_ROWS,
    ROLE_COUNTS,
    ROLE_OPEN,
    ROLE_RETURN,
    ROLE_SUM,
)
from ..device.lang import (
    as_pointer,
    begin_span,
    consume_token,
    device_function,
    end_span,
    load_acquire,
    publish,
    put,
    put_ll,
    round_to,
    row_mask,
    row_pointers,
)
from ..device.programs import pdl_launch_dependents
from ..device.ring import (
    COUNT_MASK,
    FIELDS,
    Rows,
    count_at,
    fixed,
    flag_level,
    message_flag,
    note_received,
    open_slot,
    pick,
    publish_acks,
    region_at,
    row_at,
    row_flag,
    wait_ranks,
    wait_slot,
    waiting_times,
)


@triton.jit(
    do_not_specialize=["num_tokens", "max_tokens", "num_return_programs"],
    do_not_specialize_on_alignment=["wait_stats"],
)
def low_latency_combine_kernel(
    x,  # [.., H], the experts' rows, where dispatch packed what they came from
    topk_idx,  # int64 [T, K]
    topk_weights,  # float32 [T, K], or None: they travelled with the dispatch
    returns,  # int32 [R, M, 1 + 3 * K] of the dispatch
    dispatched,  # int64 [1 + R], `call` of the dispatch
    out,  # [T, H], out
    wait_stats,  # int64 [R], ns added to, or None
    call,  # int64 [1], out: epoch
    context,
    num_return_programs,
    num_tokens,
    max_tokens,
    hidden,
    header_bytes,
    row_bytes,
    NUM_TOPK: tl.constexpr,
    ALIGNED: tl.constexpr,
    RANKS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PHASES: tl.constexpr,
    SHRINK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program 0 tells the ranks what this one has received before, programs 1 .. R send them what
    the call was begun with and their tokens' routing weights, the next `num_return_programs` return
    what the ranks get back, one checks that all ranks began the same call, and the last T add up a
    token each. PHASES "receive" or "send" launches only the last 1 + T, or all before.

    fp32: a rank's rows of a token times their weights in top-k lane order, rounded once; then the
    ranks' by their right-most lane, rounded once.
    """
    pdl_launch_dependents(PDL)
    since = begin_span()
    program = tl.program_id(0)
    slot = open_slot(call, context, RANKS, PHASES != "receive", PDL)
    since = end_span(ROLE_OPEN, 0, since, context)
    DTYPE: tl.constexpr = x.dtype.element_ty
    KIND: tl.constexpr = KIND_MOE_FFN_COMBINE if topk_weights is None else KIND_LOW_LATENCY_COMBINE
    FIXED: tl.constexpr = fixed(NUM_TOPK, ALIGNED, RANKS, EXPERTS, BLOCK, SHRINK, None, DTYPE, KIND)
    rows = Rows(max_tokens, header_bytes, row_bytes, hidden, row_bytes)  # without records
    token = program - 1
    if PHASES != "receive":
        returning = program - 1 - RANKS
        token = returning - num_return_programs - 1
        if program == 0:
            publish_acks(slot, context, RANKS)
        elif returning < 0:
            # fmt: off
            _send_call(
                program - 1, slot, rows, topk_idx, topk_weights, dispatched, context, num_tokens,
                FIXED,
            )
            # fmt: on
            end_span(ROLE_COUNTS, program - 1, since, context)
        elif token < -1:
            # fmt: off
            _return_rows(
                returning, num_return_programs, slot, rows, x, topk_weights, returns, dispatched,
                context, FIXED,
            )
            # fmt: on
            end_span(ROLE_RETURN, returning, since, context)
    if PHASES != "send":
        if token == -1:
            note_received(slot, context)
            _check_call(slot, rows, dispatched, context, FIXED)
        elif token >= 0:
            _sum_token(token, slot, rows, topk_idx, out, wait_stats, context, num_tokens, FIXED)
            end_span(ROLE_SUM, token, since, context)


@device_function
def _send_call(
    peer,
    slot,
    rows,
    topk_idx,
    topk_weights,
    dispatched,
    context,
    num_tokens,
    FIXED: tl.constexpr,
):
    """Tell `peer` what this call was begun with. Write topk_weights, if there are some, into its
    message, 0 for ids that are not valid, and raise the message's flag."""
    lane = tl.arange(0, 1)
    block = tl.arange(0, 1024)
    field = tl.arange(0, FIELDS)
    fields = call_fields(field, 0, tl.load(dispatched), rows, FIXED)
    num_lanes = num_tokens * FIXED.NUM_TOPK
    if topk_weights is not None:
        weights = _valid_weights(topk_idx, topk_weights, block, num_lanes, FIXED)
    may = wait_slot(slot, peer + lane, lane == 0, context, FIXED.RANKS, FIXED.SHRINK)
    may = tl.max(may.to(tl.int32), 0) == 1
    shift, level = pick(slot.shift, peer), flag_level(slot)
    to = as_pointer(count_at(slot, slot.rank, 0) + shift, tl.int64)
    put_ll(to + field, level + fields, (field > 0) & may)
    if topk_weights is not None:
        head = as_pointer(region_at(slot, slot.rank) + shift, tl.float32)
        put(head + block, weights, (block < num_lanes) & may)
        for first in range(1024, num_lanes, 1024):
            lanes = first + block
            weights = _valid_weights(topk_idx, topk_weights, lanes, num_lanes, FIXED)
            put(head + lanes, weights, (lanes < num_lanes) & may)
        flag = message_flag(slot, slot.rank) + shift + lane
        publish(flag, (lane == 0) & may, level)


@device_function
def _check_call(slot, rows, dispatched, context, FIXED: tl.constexpr):
    """Wait until all ranks have told what they began this call with; report one that differs."""
    RANKS_PAD: tl.constexpr = triton.next_power_of_2(FIXED.RANKS)
    index = tl.arange(0, RANKS_PAD * FIELDS)
    ranks, words = index // FIELDS, index % FIELDS
    real = (ranks < FIXED.RANKS) & (words > 0)
    flags = count_at(slot, ranks, words)
    there, _ = wait_ranks(
        flags, real, flag_level(slot), ranks, context, PHASE_METADATA, FIXED.SHRINK
    )
    values = load_acquire(as_pointer(tl.where(real, flags, slot.done), tl.int64))
    theirs = (values & COUNT_MASK).to(tl.int32)
    ours = call_fields(words, 0, tl.load(dispatched), rows, FIXED)
    other = tl.max(tl.where(there & (theirs != ours), ranks, -1), 0)
    if other >= 0:
        word = tl.arange(0, FIELDS)
        is_word = (ranks == other)[:, None] & (words[:, None] == word[None, :])
        found = tl.sum(tl.where(is_word, theirs[:, None], 0), 0)
        expected = call_fields(word, 0, tl.load(dispatched), rows, FIXED)
        report_fields(other, found, expected, word, slot, context)


@device_function
def _valid_weights(topk_idx, topk_weights, lanes, num_lanes, FIXED: tl.constexpr):
    """The weights of `lanes` (block) of all tokens, 0 where the id is not valid."""
    ids = tl.load(topk_idx + lanes, mask=lanes < num_lanes, other=-1)
    weights = tl.load(topk_weights + lanes, mask=lanes < num_lanes, other=0.0)
    return tl.where((ids >= 0) & (ids < FIXED.NUM_EXPERTS), weights, 0.0)


@device_function
def _return_rows(
    program,
    num_programs,
    slot,
    rows,
    x,
    topk_weights,
    returns,
    dispatched,
    context,
    FIXED: tl.constexpr,
):
    """Sum what this rank's experts made of each row that came and write it to the row of its token
    on its rank. Each program takes every `num_programs`-th: the first row of each rank, ..."""
    ranks = tl.arange(0, slot.shift.shape[0])
    one = tl.arange(0, 1)
    tokens_of = tl.load(dispatched + 1 + ranks, mask=ranks < FIXED.RANKS, other=0).to(tl.int32)
    tokens_of = tl.minimum(tokens_of, rows.max_tokens)
    columns = tl.arange(0, FIXED.BLOCK)
    inside = row_mask(columns, rows.num_vecs, FIXED.WORD, FIXED.ALIGNED)
    lanes = tl.arange(0, FIXED.K_PAD)
    # Packed by expert, or one expert behind the other.
    most: tl.constexpr = (
        min(FIXED.NUM_TOPK, FIXED.EXPERTS) if topk_weights is None else FIXED.EXPERTS
    )
    last_place = FIXED.RANKS * rows.max_tokens * most - 1
    for turn in range(program, tl.max(tokens_of, 0) * FIXED.RANKS, num_programs):
        # Each rank begins with another.
        peer, token = (slot.rank + 1 + turn) % FIXED.RANKS, turn // FIXED.RANKS
        entry = returns + tl.cast(peer * rows.max_tokens + token, tl.int64) * FIXED.ENTRY
        num_lanes = tl.load(entry, mask=token < pick(tokens_of, peer), other=0)
        # A dispatch that gave up, replayed in a graph with this, may have left an entry unwritten.
        num_lanes = tl.minimum(num_lanes, FIXED.NUM_TOPK)
        real = lanes < num_lanes
        places = tl.load(entry + 1 + lanes, mask=real, other=0)
        places = tl.maximum(tl.minimum(places, last_place), 0)
        if topk_weights is None:
            bits = tl.load(entry + 1 + 2 * FIXED.NUM_TOPK + lanes, mask=real, other=0)
            weights = bits.to(tl.float32, bitcast=True)
        else:
            which = tl.load(entry + 1 + FIXED.NUM_TOPK + lanes, mask=real, other=0)
            which = tl.maximum(tl.minimum(which, FIXED.NUM_TOPK - 1), 0)
        if num_lanes > 0:
            first, second = _load_pair(x, places, 0, num_lanes, rows, columns, inside, FIXED)
            # The rows are on their way meanwhile.
            may = wait_slot(slot, peer + one, one == 0, context, FIXED.RANKS, FIXED.SHRINK)
            if topk_weights is not None:
                flag, level = message_flag(slot, peer + one), flag_level(slot)
                may, _ = wait_ranks(
                    flag, may, level, peer + one, context, PHASE_METADATA, FIXED.SHRINK
                )
                may = tl.max(may.to(tl.int32), 0)
                at = as_pointer(consume_token(region_at(slot, peer), may), tl.float32)
                weights = tl.load(
                    at + token * FIXED.NUM_TOPK + which, mask=real & (may == 1), other=0.0
                )
            else:
                may = tl.max(may.to(tl.int32), 0)
            total = first.to(tl.float32) * pick(weights, 0)
            total += second.to(tl.float32) * pick(weights, 1)
            for number in range(2, num_lanes, 2):
                pair = _load_pair(x, places, number, num_lanes, rows, columns, inside, FIXED)
                total += pair[0].to(tl.float32) * pick(weights, number)
                total += pair[1].to(tl.float32) * pick(weights, number + 1)
            # Where its weights did not come, the token must wait in vain, not get a wrong row.
            shift = pick(slot.shift, peer)
            to = region_at(slot, slot.rank) + rows.header_bytes + shift
            to += tl.cast(token, tl.int64) * rows.row_bytes
            to = row_at(to, columns, FIXED.WORD, FIXED.ALIGNED)
            put(to, round_to(total, FIXED.WORD), inside & (may == 1))
            flag_to = row_flag(slot, slot.rank, token) + shift
            publish(flag_to + one, one < may, flag_level(slot))


@device_function
def _load_pair(x, places, number, num_lanes, rows, columns, inside, FIXED: tl.constexpr):
    """The rows of lanes `number` and the next, of those of a token; 0 behind the last."""
    row = x + pick(places, number).to(tl.int64) * rows.num_vecs
    at = row_pointers(row, columns, FIXED.ALIGNED)
    first = tl.load(at, mask=inside, other=0.0)
    next_row = x + pick(places, number + 1).to(tl.int64) * rows.num_vecs
    at = row_pointers(next_row, columns, FIXED.ALIGNED)
    return first, tl.load(at, mask=inside & (number + 1 < num_lanes), other=0.0)


@device_function
def _sum_token(
    token, slot, rows, topk_idx, out, wait_stats, context, num_tokens, FIXED: tl.constexpr
):
    """Add up the ranks' rows of a token, by the right-most lane of each."""
    if token < num_tokens:
        ranks = tl.arange(0, slot.shift.shape[0])
        lanes = tl.arange(0, FIXED.K_PAD)
        at = topk_idx + token * FIXED.NUM_TOPK + lanes
        ids = tl.load(at, mask=lanes < FIXED.NUM_TOPK, other=-1)
        owners = tl.where((ids >= 0) & (ids < FIXED.NUM_EXPERTS), ids // FIXED.EXPERTS, -1)
        is_owner = owners[None, :] == ranks[:, None]
        last_lane = tl.max(tl.where(is_owner, lanes[None, :], -1), 1)
        flags, has = row_flag(slot, ranks, token), last_lane >= 0
        level = flag_level(slot)
        if wait_stats is not None:
            times = waiting_times(flags, has, level, ranks, slot, context)
            tl.atomic_add(wait_stats + ranks, times, mask=has)
        there, _ = wait_ranks(flags, has, level, ranks, context, PHASE_RETURNED_ROWS, FIXED.SHRINK)
        earlier = (last_lane[None, :] < last_lane[:, None]) & there[None, :]
        order = tl.where(there, tl.sum(earlier.to(tl.int32), 1), FIXED.RANKS)
        from_ranks = region_at(slot, ranks) + rows.header_bytes
        from_ranks += token.to(tl.int64) * rows.row_bytes
        from_ranks = consume_token(from_ranks, there.to(tl.int32))
        columns = tl.arange(0, FIXED.BLOCK)
        inside = row_mask(columns, rows.num_vecs, FIXED.WORD, FIXED.ALIGNED)
        total = tl.zeros([FIXED.BLOCK], tl.float32)
        for number in tl.static_range(FIXED.RANKS):
            at = tl.sum(tl.where(order == number, from_ranks, 0), 0)
            part = tl.load(
                row_at(at, columns, FIXED.WORD, FIXED.ALIGNED), mask=inside & (at != 0), other=0.0
            )
            total += part.to(tl.float32)
        to = row_pointers(out + token.to(tl.int64) * rows.num_vecs, columns, FIXED.ALIGNED)
        tl.store(to, round_to(total, FIXED.WORD), mask=inside)
