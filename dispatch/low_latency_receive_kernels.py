"""Low-latency dispatch, the receiving half: pack the rows that arrive by expert."""

import triton
import triton.language as tl

from ..device.call_fields import call_fields, is_cast, num_scales, report_fields
from ..device.context import PHASE_COUNTS, PHASE_ROWS
from ..device.lang import (
    as_pointer,
    consume_token,
    device_function,
    is_alive,
    load_acquire,
    row_mask,
    row_pointers,
)
from ..device.ptx import any_thread
from ..device.ring import (
    COUNT_BITS,
    COUNT_MASK,
    FIELDS,
    count_at,
    flag_level,
    masked_ranks,
    note_received,
    pick,
    publish_active_ranks,
    region_at,
    row_at,
    row_flag,
    wait_active_ranks,
    wait_ranks,
    waiting_times,
)

ROWS = tl.constexpr(2)
"""Rows that a program packs together."""


@device_function
def receive(
    program,
    num_programs,
    slot,
    rows,
    recv_x,
    recv_scales,
    recv_count,
    src_info,
    layout_range,
    returns,
    recv_stats,
    wait_stats,
    call,
    context,
    FIXED: tl.constexpr,
):
    """Program 0 says what comes; the others pack the rows as they come, each every n-th: the ranks'
    first tokens, their second ones, ..."""
    ranks = tl.arange(0, slot.shift.shape[0])
    lanes = tl.arange(0, FIXED.K_PAD)
    if wait_stats is not None:
        if program == 0:
            flags, real = count_at(slot, ranks, 0), ranks < FIXED.RANKS
            times = waiting_times(flags, real, flag_level(slot), ranks, slot, context)
            times += tl.load(wait_stats + ranks, mask=real, other=0)
            tl.store(wait_stats + ranks, times, mask=real)
    counts = _wait_counts(program, slot, context, FIXED)
    tokens_of = _check_call(counts, slot, rows, context, FIXED)
    words = tl.arange(0, counts.shape[1])
    counts = tl.where(((words >= FIELDS) & (words < FIELDS + FIXED.EXPERTS))[None, :], counts, 0)
    begins = tl.cumsum(counts, 0) - counts  # behind the ranks before, for the same expert
    totals = tl.sum(counts, 0)
    if program == 0:
        note_received(slot, context)
        tl.store(call + 1 + ranks, tokens_of.to(tl.int64), mask=ranks < FIXED.RANKS)
        _store_counts(counts, begins, totals, recv_count, layout_range, recv_stats, FIXED)
    if layout_range is None:
        begins += (tl.cumsum(totals, 0) - totals)[None, :]
    else:
        begins += ((words - FIELDS) * (FIXED.RANKS * rows.max_tokens))[None, :]
    batch = tl.arange(0, ROWS)
    packer, num_packers = program - 1, num_programs - 1
    end = tl.where(program == 0, packer, tl.max(tokens_of, 0) * FIXED.RANKS)
    for first in range(packer, end, num_packers * ROWS):
        turns = first + batch * num_packers
        sources, tokens = turns % FIXED.RANKS, turns // FIXED.RANKS
        of_source = sources[:, None] == ranks[None, :]
        inside = tokens < tl.sum(tl.where(of_source, tokens_of[None, :], 0), 1)
        of_rank = tl.sum(tl.where(of_source[:, :, None], begins[None, :, :], 0), 1)
        row_flags = row_flag(slot, sources, tokens)
        level = flag_level(slot)
        came, flags = wait_ranks(
            row_flags, inside, level, sources, context, PHASE_ROWS, FIXED.SHRINK
        )
        came = came & (flags & COUNT_MASK == 1)
        at = region_at(slot, sources) + rows.header_bytes + tokens.to(tl.int64) * rows.row_bytes
        at = consume_token(at, came.to(tl.int32))
        loaded = ()  # all rows, before any is stored
        for number in tl.static_range(ROWS):
            address, is_row = pick(at, number), pick(came.to(tl.int32), number) == 1
            loaded = loaded + (_load_row(address, is_row, rows, FIXED),)
        record = as_pointer(at + rows.record_at, tl.int32)[:, None] + lanes[None, :]
        real = came[:, None] & (lanes < FIXED.NUM_TOPK)[None, :]
        expert = tl.load(record, mask=real, other=-1)
        place = tl.load(record + FIXED.NUM_TOPK, mask=real, other=0)
        weight = tl.load(record + 2 * FIXED.NUM_TOPK, mask=real, other=0)
        is_expert = (expert + FIELDS)[:, :, None] == words[None, None, :]
        place += tl.sum(tl.where(is_expert, of_rank[:, None, :], 0), 2)
        here = expert >= 0
        number_here = tl.cumsum(here.to(tl.int32), 1) - 1
        num_here = tl.sum(here.to(tl.int32), 1)
        for number in tl.static_range(ROWS):
            for copy in range(0, pick(num_here, number)):
                is_this = here & (number_here == copy) & (batch == number)[:, None]
                place_of = tl.max(tl.max(tl.where(is_this, place, 0), 1), 0)
                expert_of = tl.max(tl.max(tl.where(is_this, expert, 0), 1), 0)
                _store_row(loaded[number], place_of, expert_of, recv_x, recv_scales, rows, FIXED)
        entry = returns + (sources * rows.max_tokens + tokens).to(tl.int64) * FIXED.ENTRY
        tl.store(entry, num_here, mask=inside)
        to = entry[:, None] + 1 + number_here
        tl.store(to, place, mask=here)
        tl.store(to + FIXED.NUM_TOPK, tl.broadcast_to(lanes[None, :], here.shape), mask=here)
        tl.store(to + 2 * FIXED.NUM_TOPK, weight, mask=here)
        if src_info is not None:
            tl.store(src_info + place, tl.broadcast_to(tokens[:, None], here.shape), mask=here)


@device_function
def _wait_counts(program, slot, context, FIXED: tl.constexpr):
    """int32 [R_PAD, FIELDS + L, padded]: the words that each rank sent beside its rows. With SHRINK
    0 of those that program 0 found masked, or late past the deadline: it decides for all, as others
    may look at another moment."""
    RANKS_PAD: tl.constexpr = triton.next_power_of_2(FIXED.RANKS)
    WORDS_PAD: tl.constexpr = triton.next_power_of_2(FIELDS + FIXED.EXPERTS)
    index = tl.arange(0, RANKS_PAD * WORDS_PAD)
    ranks, words = index // WORDS_PAD, index % WORDS_PAD
    real = (ranks < FIXED.RANKS) & (words < FIELDS + FIXED.EXPERTS)
    flags, level = count_at(slot, ranks, words), flag_level(slot)
    pointers = as_pointer(tl.where(real, flags, slot.done), tl.int64)
    if FIXED.SHRINK:
        if program == 0:
            before = masked_ranks(context)
            wait_ranks(flags, real, level, ranks, context, PHASE_COUNTS, FIXED.SHRINK)
            told = (load_acquire(pointers) >= level) | ~real
            told = tl.min(tl.reshape(told.to(tl.int32), [RANKS_PAD, WORDS_PAD]), 1)
            rank = tl.arange(0, RANKS_PAD)
            is_told = (told == 1) & (rank < FIXED.RANKS) & is_alive(before, rank)
            bits = tl.where(is_told, tl.full((), 1, tl.int64) << rank.to(tl.int64), 0)
            taken = tl.sum(bits, 0)
            publish_active_ranks(slot, taken, context, FIXED.RANKS)
        else:
            taken = wait_active_ranks(slot, context, FIXED.RANKS, PHASE_COUNTS)
        there = real & (is_alive(taken, ranks) == 0)
        values = load_acquire(pointers)
    else:
        there, values = wait_ranks(flags, real, level, ranks, context, PHASE_COUNTS, FIXED.SHRINK)
        # Warps that hold the same words may have seen them at another time than the one that
        # decided to go on.
        if tl.max(any_thread((there & (values < level)).to(tl.int32)), 0) == 1:
            values = load_acquire(pointers)
    values = tl.where(there, values & COUNT_MASK, 0).to(tl.int32)
    return tl.reshape(values, [RANKS_PAD, WORDS_PAD])


@device_function
def _check_call(counts, slot, rows, context, FIXED: tl.constexpr):
    """int32 [R_PAD]: tokens of each rank; none of any if one of them was called with other sizes,
    which is reported."""
    ranks, words = tl.arange(0, counts.shape[0]), tl.arange(0, counts.shape[1])
    expected = call_fields(words, 0, 0, rows, FIXED)
    differs = (counts != expected[None, :]) & ((words >= 1) & (words < FIELDS))[None, :]
    differs = differs & (ranks < FIXED.RANKS)[:, None]
    if FIXED.SHRINK:  # a masked rank has called with nothing
        called = tl.max(tl.where((words == 1)[None, :], counts, 0), 1) > 0
        differs = differs & called[:, None]
    told = tl.where((words == 0)[None, :], counts, 0) + (differs.to(tl.int32) << COUNT_BITS)
    told = tl.sum(told, 1)  # one sum for both, as each costs a meeting of all warps
    tokens_of = tl.minimum(told & COUNT_MASK, rows.max_tokens)
    if tl.max(told, 0) > COUNT_MASK:
        other = tl.max(tl.max(tl.where(differs, ranks[:, None], -1), 1), 0)
        theirs = tl.sum(tl.where((ranks == other)[:, None], counts, 0), 0)
        report_fields(other, theirs, expected, words, slot, context)
        tokens_of = tokens_of * 0
    return tokens_of


@device_function
def _store_counts(
    counts, begins, totals, recv_count, layout_range, recv_stats, FIXED: tl.constexpr
):
    """Write what is known before any row is there: recv_count and, unless rows are packed
    compactly, layout_range. Arguments are [.., W], of the words of `_wait_counts`."""
    ranks, experts = tl.arange(0, counts.shape[0]), tl.arange(0, counts.shape[1]) - FIELDS
    real = (experts >= 0) & (experts < FIXED.EXPERTS)
    if layout_range is None:
        tl.store(recv_count + 1 + experts, tl.cumsum(totals, 0), mask=real | (experts == -1))
    else:
        tl.store(recv_count + experts, totals, mask=real)
        to = layout_range + experts[None, :] * FIXED.RANKS + ranks[:, None]
        is_real = (ranks < FIXED.RANKS)[:, None] & real[None, :]
        tl.store(to, (begins.to(tl.int64) << 32) | counts.to(tl.int64), mask=is_real)
    if recv_stats is not None:
        old = tl.load(recv_stats + experts, mask=real, other=0)
        tl.store(recv_stats + experts, old + totals, mask=real)


@device_function
def _load_row(address, came, rows, FIXED: tl.constexpr):
    """(payload, scales) of a row that `came`."""
    columns = tl.arange(0, FIXED.BLOCK // 4 if is_cast(FIXED.FORMAT) else FIXED.BLOCK)
    inside = row_mask(columns, rows.num_vecs, FIXED.WORD, FIXED.ALIGNED) & came
    payload = tl.load(row_at(address, columns, FIXED.WORD, FIXED.ALIGNED), mask=inside)
    block = tl.arange(0, FIXED.BLOCK // 128)
    scales = block
    if is_cast(FIXED.FORMAT):
        scales_at = row_at(address + tl.cdiv(rows.num_vecs, 4) * 16, block, tl.int32, FIXED.ALIGNED)
        scales = tl.load(scales_at, mask=(block < num_scales(rows.num_vecs, FIXED.FORMAT)) & came)
    return payload, scales


@device_function
def _store_row(loaded, place, expert, recv_x, recv_scales, rows, FIXED: tl.constexpr):
    """Store what `_load_row` gave as row `place` of recv_x, one of `expert`'s."""
    payload, scales = loaded
    columns = tl.arange(0, FIXED.BLOCK // 4 if is_cast(FIXED.FORMAT) else FIXED.BLOCK)
    inside = row_mask(columns, rows.num_vecs, FIXED.WORD, FIXED.ALIGNED)
    to = recv_x + place.to(tl.int64) * rows.num_vecs
    tl.store(row_pointers(to, columns, FIXED.ALIGNED), payload, mask=inside)
    if is_cast(FIXED.FORMAT):
        expert_rows = rows.max_tokens * FIXED.RANKS
        block = tl.arange(0, FIXED.BLOCK // 128)
        num_blocks = num_scales(rows.num_vecs, FIXED.FORMAT)
        scales_to = expert.to(tl.int64) * expert_rows * (num_blocks - 1) + place
        scales_to = recv_scales + scales_to + block.to(tl.int64) * expert_rows
        tl.store(scales_to, scales, mask=block < num_blocks)
