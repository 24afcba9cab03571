"""Low-latency combine: one kernel that sums a token's expert rows on each rank, sends the sums back
and adds up those of the ranks."""

import triton
import triton.language as tl

from ..context import NUM_SLOTS, PHASE_METADATA, PHASE_RETURNED_ROWS, RANK
from ..lang import (
    as_pointer,
    consume_token,
    device_function,
    notify,
    now_ns,
    put,
    round_to,
    row_mask,
    symm_at,
)
from ..ring_kernels import (
    begin_send,
    message_flag,
    pointers_at,
    received,
    region_at,
    row_at,
    row_flag,
    tell_received,
    wait_ranks,
    wait_slot,
)
from ..work import let_next_start, wait_for_previous


@triton.jit(do_not_specialize=["num_tokens", "max_tokens", "num_return_programs"])
def low_latency_combine_kernel(
    x,  # [.., H], the experts' rows, where dispatch packed what they came from
    topk_idx,  # int64 [T, K]
    topk_weights,  # float32 [T, K], or None: they travelled with the dispatch
    returns,  # int32 [R, M, 2 + 3 * K] of the dispatch
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
    OVERLAP: tl.constexpr,
):
    """Programs 0 .. R-1 send each rank this rank's routing weights, the next `num_return_programs`
    return what the ranks get back, and the last max(1, T) add up a token each. PHASES "receive" or
    "send" launches only the last, or all before.

    fp32: a rank's rows of a token times their weights in top-k lane order, rounded once; then the
    ranks' by their right-most lane, rounded once.
    """
    let_next_start(OVERLAP)
    wait_for_previous(OVERLAP)
    program = tl.program_id(0)
    token = program
    if PHASES != "receive":
        epoch = begin_send(call, context)
        token = program - RANKS - num_return_programs
        if program < RANKS:
            # fmt: off
            _send_weights(
                program, topk_idx, topk_weights, epoch, context, num_tokens,
                NUM_TOPK, RANKS, EXPERTS, SHRINK,
            )
            # fmt: on
        elif token < 0:
            # fmt: off
            _return_rows(
                program - RANKS, num_return_programs, x, topk_weights, returns, dispatched, epoch,
                context, max_tokens, hidden, header_bytes, row_bytes,
                NUM_TOPK, ALIGNED, RANKS, BLOCK, SHRINK,
            )
            # fmt: on
    else:
        epoch = tl.load(call)
    if PHASES != "send":
        if token >= 0:
            # fmt: off
            _sum_token(
                token, topk_idx, out, wait_stats, epoch, context, num_tokens, hidden, header_bytes,
                row_bytes, NUM_TOPK, ALIGNED, RANKS, EXPERTS, BLOCK, SHRINK,
            )
            # fmt: on


@device_function
def _send_weights(
    peer,
    topk_idx,
    topk_weights,
    epoch,
    context,
    num_tokens,
    NUM_TOPK: tl.constexpr,
    RANKS: tl.constexpr,
    EXPERTS: tl.constexpr,
    SHRINK: tl.constexpr,
):
    """Write topk_weights into `peer`'s message, 0 for ids that are not valid; raise its flag."""
    tell_received(peer, context)
    if topk_weights is not None:
        lane = tl.arange(0, 1)
        may = wait_slot(epoch, peer + lane, lane == 0, context, SHRINK)
        if tl.max(may.to(tl.int32), 0) == 1:
            me = tl.load(context + RANK)
            head = as_pointer(symm_at(region_at(epoch, me, context), peer, context), tl.float32)
            for first in range(0, num_tokens * NUM_TOPK, 1024):
                lanes = first + tl.arange(0, 1024)
                inside = lanes < num_tokens * NUM_TOPK
                ids = tl.load(topk_idx + lanes, mask=inside, other=-1)
                valid = (ids >= 0) & (ids < RANKS * EXPERTS)
                put(head + lanes, tl.load(topk_weights + lanes, mask=valid, other=0.0), inside)
            notify(message_flag(epoch, me, context), peer + lane, lane == 0, epoch, context)


@device_function
def _return_rows(
    program,
    num_programs,
    x,
    topk_weights,
    returns,
    dispatched,
    epoch,
    context,
    max_tokens,
    hidden,
    header_bytes,
    row_bytes,
    NUM_TOPK: tl.constexpr,
    ALIGNED: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHRINK: tl.constexpr,
):
    """Sum what this rank's experts made of each row that came and write it to the row of its token
    on its rank. Each program takes every `num_programs`-th: the first row of each rank, ..."""
    ranks = tl.arange(0, triton.next_power_of_2(RANKS))
    one = tl.arange(0, 1)
    rows_to = tl.load(dispatched + 1 + ranks, mask=ranks < RANKS, other=0).to(tl.int32)
    may = wait_slot(epoch, ranks, rows_to > 0, context, SHRINK)
    if topk_weights is not None:
        flags = message_flag(epoch, ranks, context)
        may = wait_ranks(flags, may, epoch, ranks, context, PHASE_METADATA, SHRINK)
    rows_to = tl.where(may, rows_to, 0)
    me = tl.load(context + RANK).to(tl.int32)
    own = region_at(epoch, me, context) + header_bytes
    columns = tl.arange(0, BLOCK)
    for turn in range(program, tl.max(rows_to, 0) * RANKS, num_programs):
        peer, row = (me + 1 + turn) % RANKS, turn // RANKS  # each rank begins with another
        count = tl.sum(tl.where(ranks == peer, rows_to, 0), 0)
        if row < count:
            entry = returns + tl.cast(peer * max_tokens + row, tl.int64) * (2 + 3 * NUM_TOPK)
            token, num_lanes = tl.load(entry), tl.load(entry + 1)
            # Without lanes the row did not come: its token must wait in vain, not get zeros.
            weights = consume_token(region_at(epoch, peer, context), count)
            weights = as_pointer(weights, tl.float32) + token * NUM_TOPK
            to = symm_at(own + token.to(tl.int64) * row_bytes, peer, context)
            has_lanes = one < num_lanes
            for start in range(0, hidden, BLOCK):
                inside = row_mask(start + columns, hidden, x.dtype.element_ty, ALIGNED)
                inside = inside & (num_lanes > 0)
                total = tl.zeros([BLOCK], tl.float32)
                for number in range(0, num_lanes):
                    place = tl.load(entry + 2 + number).to(tl.int64)
                    if topk_weights is None:
                        weight = tl.load(entry + 2 + 2 * NUM_TOPK + number)
                        weight = weight.to(tl.float32, bitcast=True)
                    else:
                        weight = tl.load(weights + tl.load(entry + 2 + NUM_TOPK + number))
                    at = pointers_at(x + place * hidden, start + columns, ALIGNED)
                    total += weight * tl.load(at, mask=inside, other=0.0).to(tl.float32)
                values = round_to(total, x.dtype.element_ty)
                put(row_at(to, start + columns, x.dtype.element_ty, ALIGNED), values, inside)
            notify(row_flag(epoch, me, token + one, context), peer + one, has_lanes, epoch, context)


@device_function
def _sum_token(
    token,
    topk_idx,
    out,
    wait_stats,
    epoch,
    context,
    num_tokens,
    hidden,
    header_bytes,
    row_bytes,
    NUM_TOPK: tl.constexpr,
    ALIGNED: tl.constexpr,
    RANKS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHRINK: tl.constexpr,
):
    """Add up the ranks' rows of a token, by the right-most lane of each. A rank without tokens has
    a program for token 0 as well, which notes that the call was received."""
    if token == 0:
        tl.store(received(context) + epoch % tl.load(context + NUM_SLOTS), epoch)
    if token < num_tokens:
        ranks = tl.arange(0, triton.next_power_of_2(RANKS))
        lanes = tl.arange(0, triton.next_power_of_2(NUM_TOPK))
        ids = tl.load(topk_idx + token * NUM_TOPK + lanes, mask=lanes < NUM_TOPK, other=-1)
        owners = tl.where((ids >= 0) & (ids < RANKS * EXPERTS), ids // EXPERTS, -1)
        is_owner = owners[None, :] == ranks[:, None]
        last_lane = tl.max(tl.where(is_owner, lanes[None, :], -1), 1)
        flags = row_flag(epoch, ranks, token, context)
        if wait_stats is not None:
            since = now_ns()
            for rank in tl.static_range(RANKS):
                one = tl.arange(0, 1)
                flag = row_flag(epoch, rank, token + one, context)
                has = (one == 0) & (tl.max(tl.where(ranks == rank, last_lane, -1), 0) >= 0)
                wait_ranks(flag, has, epoch, rank + one, context, PHASE_RETURNED_ROWS, SHRINK)
                tl.atomic_add(wait_stats + rank, now_ns() - since)
        # fmt: off
        there = wait_ranks(
            flags, last_lane >= 0, epoch, ranks, context, PHASE_RETURNED_ROWS, SHRINK
        )
        # fmt: on
        earlier = (last_lane[None, :] < last_lane[:, None]) & there[None, :]
        order = tl.where(there, tl.sum(earlier.to(tl.int32), 1), RANKS)
        for start in range(0, hidden, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = row_mask(columns, hidden, out.dtype.element_ty, ALIGNED)
            total = tl.zeros([BLOCK], tl.float32)
            for number in tl.static_range(RANKS):
                rank = tl.max(tl.where(order == number, ranks, -1), 0)
                row = region_at(epoch, tl.maximum(rank, 0), context) + header_bytes
                row = consume_token(row + token.to(tl.int64) * row_bytes, rank)
                at = row_at(row, columns, out.dtype.element_ty, ALIGNED)
                total += tl.load(at, mask=inside & (rank >= 0), other=0.0).to(tl.float32)
            values = round_to(total, out.dtype.element_ty)
            to = pointers_at(out + token.to(tl.int64) * hidden, columns, ALIGNED)
            tl.store(to, values, mask=inside)
