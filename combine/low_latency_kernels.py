"""Low-latency combine: one kernel that sums a token's expert rows on each rank, sends the sums back
and adds up those of the ranks."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..device.call_fields import call_fields, report_fields
from ..device.context import (
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
    columns_at,
    count_at,
    flag_level,
    header_flag,
    load_flags,
    note_received,
    open_slot,
    pick,
    publish_acks,
    region_at,
    row_at,
    row_flag,
    time_ranks,
    wait_ranks,
    wait_slot,
)

BLOCK_WEIGHTS = tl.constexpr(1024)
"""Routing weights that a program sends together, and ids that it copies."""
KEPT_IDS = tl.constexpr(2)
"""The item of `call` from which on the launch that sends leaves a copy of topk_idx: it lies at a
multiple of 16 bytes."""


class ExpertRows(NamedTuple):
    """What a combine returns to the tokens' ranks, and where it adds up what comes back."""

    x: tl.tensor  # [.., H], the experts' rows, in the order of the dispatch's
    topk_idx: tl.tensor  # int64 [T, K]
    topk_weights: tl.tensor  # float32 [T, K], or None: the dispatch has sent them
    returns: tl.tensor  # int32 [R, M, 1 + 3 * K] of the dispatch
    dispatched: tl.tensor  # int64 [1 + R], `call` of the dispatch
    out: tl.tensor  # [T, H], out


@triton.jit(
    do_not_specialize=["num_tokens", "max_tokens", "num_return_programs"],
    do_not_specialize_on_alignment=["wait_stats"],
)
def low_latency_combine_kernel(
    expert_rows,  # `ExpertRows`
    wait_stats,  # int64 [R], ns added to, or None
    call,  # int64 [2 + T * K]: see `open_slot`; ids from KEPT_IDS on, by "send"; None in "both"
    context,
    num_return_programs,
    num_tokens,
    max_tokens,
    rows,  # `device.ring.Rows`
    CONFIG: tl.constexpr,  # `device.ring.CallConfig`
    PHASES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program 0 tells the ranks what this one has received before, programs 1 .. R send them what
    the call was begun with and their tokens' routing weights, the next `num_return_programs` return
    what the ranks get back, one checks that all ranks began the same call, and the last T add up a
    token each. PHASES "receive" or "send" launches only the last 1 + T, or all before.

    fp32: a rank's rows of a token times their weights in top-k order, rounded once; then the ranks'
    by their right-most slot of the top-k, rounded once.
    """
    pdl_launch_dependents(PDL)
    since = begin_span()
    program = tl.program_id(0)
    no_caller = tl.full((), 0, tl.int32)  # the handle's dispatch has named it
    sends: tl.constexpr = PHASES != "receive"
    slot = open_slot(call, context, max_tokens, no_caller, rows, CONFIG, sends, PDL)
    since = end_span(ROLE_OPEN, 0, since, context)
    token_idx = program - 1
    if PHASES != "receive":
        returning = program - 1 - CONFIG.RANKS
        token_idx = returning - num_return_programs - 1
        if program == 0:
            publish_acks(slot, CONFIG)
            if PHASES == "send":
                _keep_ids(call + KEPT_IDS, expert_rows.topk_idx, num_tokens * CONFIG.NUM_TOPK)
        elif returning < 0:
            _send_call(program - 1, slot, expert_rows, num_tokens, CONFIG)
            end_span(ROLE_COUNTS, program - 1, since, context)
        elif token_idx < -1:
            _return_rows(returning, num_return_programs, slot, expert_rows, CONFIG)
            end_span(ROLE_RETURN, returning, since, context)
    if PHASES != "send":
        if token_idx == -1:
            note_received(slot)
            _check_fields(slot, expert_rows.dispatched, CONFIG)
        elif token_idx >= 0:
            _sum_token(token_idx, num_tokens, slot, expert_rows, wait_stats, CONFIG)
            end_span(ROLE_SUM, token_idx, since, context)


@device_function
def _send_call(peer, slot, expert_rows, num_tokens, CONFIG: tl.constexpr):
    """Tell `peer` what this call was begun with. Write topk_weights, if there are some, into the
    header of its region, 0 for ids that are not valid, and raise the header's flag."""
    one = tl.arange(0, 1)
    block = tl.arange(0, BLOCK_WEIGHTS)
    field = tl.arange(0, FIELDS)
    fields = call_fields(field, 0, tl.load(expert_rows.dispatched), slot, CONFIG)
    num_weights = num_tokens * CONFIG.NUM_TOPK
    if expert_rows.topk_weights is not None:
        weights = _valid_weights(expert_rows, block, num_weights, CONFIG)
    may = wait_slot(slot, peer + one, one == 0, CONFIG)
    may = tl.max(may.to(tl.int32), 0) == 1
    shift, level = pick(slot.shift, peer), flag_level(slot)
    to = as_pointer(count_at(slot, slot.rank, 0) + shift, tl.int64)
    put_ll(to + field, level + fields, (field > 0) & may)
    if expert_rows.topk_weights is not None:
        header = as_pointer(region_at(slot, slot.rank) + shift, tl.float32)
        put(header + block, weights, (block < num_weights) & may)
        for first in range(BLOCK_WEIGHTS, num_weights, BLOCK_WEIGHTS):
            index = first + block
            weights = _valid_weights(expert_rows, index, num_weights, CONFIG)
            put(header + index, weights, (index < num_weights) & may)
        flag = header_flag(slot, slot.rank) + shift + one
        publish(flag, (one == 0) & may, level)


@device_function
def _keep_ids(to, topk_idx, num_ids):
    """Copy the ids for the launch that adds up, as the caller may change his before it."""
    block = tl.arange(0, BLOCK_WEIGHTS)
    for first in range(0, num_ids, BLOCK_WEIGHTS):
        inside = first + block < num_ids
        tl.store(to + first + block, tl.load(topk_idx + first + block, mask=inside), mask=inside)


@device_function
def _check_fields(slot, dispatched, CONFIG: tl.constexpr):
    """Wait until all ranks have told what they began this call with; report one that differs."""
    RANKS_PAD: tl.constexpr = triton.next_power_of_2(CONFIG.RANKS)
    flat = tl.arange(0, RANKS_PAD * FIELDS)
    ranks, index = flat // FIELDS, flat % FIELDS
    real = (ranks < CONFIG.RANKS) & (index > 0)
    flags, level = count_at(slot, ranks, index), flag_level(slot)
    raised, _ = wait_ranks(flags, real, level, ranks, slot, PHASE_METADATA, CONFIG)
    theirs = (load_flags(flags, real, slot) & COUNT_MASK).to(tl.int32)
    ours = call_fields(index, 0, tl.load(dispatched), slot, CONFIG)
    other = tl.max(tl.where(raised & (theirs != ours), ranks, -1), 0)
    if other >= 0:
        field = tl.arange(0, FIELDS)
        is_field = (ranks == other)[:, None] & (index[:, None] == field[None, :])
        found = tl.sum(tl.where(is_field, theirs[:, None], 0), 0)
        expected = call_fields(field, 0, tl.load(dispatched), slot, CONFIG)
        report_fields(other, found, expected, field, slot)


@device_function
def _valid_weights(expert_rows, index, num_weights, CONFIG: tl.constexpr):
    """The routing weights number `index` (block) of all tokens, 0 where the id is not valid."""
    ids = tl.load(expert_rows.topk_idx + index, mask=index < num_weights, other=-1)
    weights = tl.load(expert_rows.topk_weights + index, mask=index < num_weights, other=0.0)
    return tl.where((ids >= 0) & (ids < CONFIG.NUM_EXPERTS), weights, 0.0)


@device_function
def _return_rows(program, num_programs, slot, expert_rows, CONFIG: tl.constexpr):
    """Sum what this rank's experts made of each row that they received and write it to the row of
    its token on its rank. Each program takes every `num_programs`-th: the first row of each rank,
    ..."""
    x, returns, dispatched = expert_rows.x, expert_rows.returns, expert_rows.dispatched
    ranks = tl.arange(0, slot.shift.shape[0])
    one = tl.arange(0, 1)
    tokens_of = tl.load(dispatched + 1 + ranks, mask=ranks < CONFIG.RANKS, other=0).to(tl.int32)
    tokens_of = tl.minimum(tokens_of, slot.max_tokens)
    columns = tl.arange(0, CONFIG.BLOCK)
    inside = row_mask(columns, slot.rows.num_vecs, CONFIG.VEC, CONFIG.ALIGNED)
    number = tl.arange(0, CONFIG.K_PAD)
    # Rows are packed compactly where the dispatch has sent the weights, else by expert.
    most: tl.constexpr = (
        min(CONFIG.NUM_TOPK, CONFIG.EXPERTS) if expert_rows.topk_weights is None else CONFIG.EXPERTS
    )
    last_row = CONFIG.RANKS * slot.max_tokens * most - 1
    for work_idx in range(program, tl.max(tokens_of, 0) * CONFIG.RANKS, num_programs):
        # Each rank begins with another.
        peer, token_idx = (slot.rank + 1 + work_idx) % CONFIG.RANKS, work_idx // CONFIG.RANKS
        entry = tl.cast(peer * slot.max_tokens + token_idx, tl.int64) * CONFIG.ENTRY
        entry = returns + entry
        num_rows = tl.load(entry, mask=token_idx < pick(tokens_of, peer), other=0)
        # A dispatch that gave up, replayed in a graph with this, may have left an entry unwritten.
        num_rows = tl.minimum(num_rows, CONFIG.NUM_TOPK)
        real = number < num_rows
        src_rows = tl.load(entry + 1 + number, mask=real, other=0)
        src_rows = tl.maximum(tl.minimum(src_rows, last_row), 0)
        if expert_rows.topk_weights is None:
            bits = tl.load(entry + 1 + 2 * CONFIG.NUM_TOPK + number, mask=real, other=0)
            weights = bits.to(tl.float32, bitcast=True)
        else:
            k = tl.load(entry + 1 + CONFIG.NUM_TOPK + number, mask=real, other=0)
            k = tl.maximum(tl.minimum(k, CONFIG.NUM_TOPK - 1), 0)
        if num_rows > 0:
            first, second = _load_pair(x, src_rows, 0, num_rows, columns, inside, slot, CONFIG)
            # The loads of the rows proceed during the waits.
            may = wait_slot(slot, peer + one, one == 0, CONFIG)
            if expert_rows.topk_weights is not None:
                flag, level = header_flag(slot, peer + one), flag_level(slot)
                may, _ = wait_ranks(flag, may, level, peer + one, slot, PHASE_METADATA, CONFIG)
                may = tl.max(may.to(tl.int32), 0)
                header = as_pointer(consume_token(region_at(slot, peer), may), tl.float32)
                weights = tl.load(
                    header + token_idx * CONFIG.NUM_TOPK + k, mask=real & (may == 1), other=0.0
                )
            else:
                may = tl.max(may.to(tl.int32), 0)
            total = first.to(tl.float32) * pick(weights, 0)
            total += second.to(tl.float32) * pick(weights, 1)
            for begin in range(2, num_rows, 2):
                pair = _load_pair(x, src_rows, begin, num_rows, columns, inside, slot, CONFIG)
                total += pair[0].to(tl.float32) * pick(weights, begin)
                total += pair[1].to(tl.float32) * pick(weights, begin + 1)
            # Where its weights did not come, the token must wait in vain, not get a wrong row.
            shift = pick(slot.shift, peer)
            to = row_at(slot, slot.rank, token_idx) + shift
            to = columns_at(to, columns, CONFIG.VEC, CONFIG.ALIGNED)
            put(to, round_to(total, CONFIG.VEC), inside & (may == 1))
            flag_to = row_flag(slot, slot.rank, token_idx) + shift
            publish(flag_to + one, one < may, flag_level(slot))


@device_function
def _load_pair(x, src_rows, begin, num_rows, columns, inside, slot, CONFIG: tl.constexpr):
    """Rows number `begin` and begin + 1 of the `num_rows` of a token; 0 after the last."""
    row = x + pick(src_rows, begin).to(tl.int64) * slot.rows.num_vecs
    at = row_pointers(row, columns, CONFIG.ALIGNED)
    first = tl.load(at, mask=inside, other=0.0)
    next_row = x + pick(src_rows, begin + 1).to(tl.int64) * slot.rows.num_vecs
    at = row_pointers(next_row, columns, CONFIG.ALIGNED)
    return first, tl.load(at, mask=inside & (begin + 1 < num_rows), other=0.0)


@device_function
def _sum_token(token_idx, num_tokens, slot, expert_rows, wait_stats, CONFIG: tl.constexpr):
    """Add up the ranks' rows of a token, by the right-most slot of the top-k that each rank has."""
    if token_idx < num_tokens:
        ranks = tl.arange(0, slot.shift.shape[0])
        k = tl.arange(0, CONFIG.K_PAD)
        at = expert_rows.topk_idx + token_idx * CONFIG.NUM_TOPK + k
        ids = tl.load(at, mask=k < CONFIG.NUM_TOPK, other=-1)
        owners = tl.where((ids >= 0) & (ids < CONFIG.NUM_EXPERTS), ids // CONFIG.EXPERTS, -1)
        is_owner = owners[None, :] == ranks[:, None]
        last_k = tl.max(tl.where(is_owner, k[None, :], -1), 1)
        flags, has_row, level = row_flag(slot, ranks, token_idx), last_k >= 0, flag_level(slot)
        if wait_stats is not None:
            times = time_ranks(flags, has_row, ranks, slot, PHASE_RETURNED_ROWS)
            tl.atomic_add(wait_stats + ranks, times, mask=has_row)
        raised, _ = wait_ranks(flags, has_row, level, ranks, slot, PHASE_RETURNED_ROWS, CONFIG)
        earlier = (last_k[None, :] < last_k[:, None]) & raised[None, :]
        sum_order = tl.where(raised, tl.sum(earlier.to(tl.int32), 1), CONFIG.RANKS)
        from_ranks = consume_token(row_at(slot, ranks, token_idx), raised.to(tl.int32))
        columns = tl.arange(0, CONFIG.BLOCK)
        inside = row_mask(columns, slot.rows.num_vecs, CONFIG.VEC, CONFIG.ALIGNED)
        total = tl.zeros([CONFIG.BLOCK], tl.float32)
        for number in tl.static_range(CONFIG.RANKS):
            at = tl.sum(tl.where(sum_order == number, from_ranks, 0), 0)
            part = tl.load(
                columns_at(at, columns, CONFIG.VEC, CONFIG.ALIGNED),
                mask=inside & (at != 0),
                other=0.0,
            )
            total += part.to(tl.float32)
        to = expert_rows.out + token_idx.to(tl.int64) * slot.rows.num_vecs
        to = row_pointers(to, columns, CONFIG.ALIGNED)
        tl.store(to, round_to(total, CONFIG.VEC), mask=inside)
