"""Low-latency dispatch, the receiving half: pack the rows that arrive by expert."""

import triton
import triton.language as tl

from ..context import PHASE_COUNTS, PHASE_ROWS
from ..lang import as_pointer, consume_token, device_function, row_mask
from ..ring_kernels import (
    COUNT_MASK,
    flag_level,
    message_flag,
    note_received,
    pick,
    pointers_at,
    region_at,
    row_at,
    row_flag,
    wait_ranks,
    waiting_times,
)
from .exchange_kernels import call_signature, report_signature

SIGNATURE_WORDS = tl.constexpr(8)
"""Of a message: the signature, then the tokens' experts."""
COUNTED = tl.constexpr(512)
"""Lanes of each rank that a program counts together."""
ROWS = tl.constexpr(2)
"""Rows that a program packs together."""


@triton.constexpr_function
def is_cast(row_format):
    """Whether rows are cast to e4m3 on their way, or travel as they are: "bf16" and "fp32"."""
    return row_format in ("fp8", "rounded", "ue8m0")


@device_function
def receive(
    program,
    num_programs,
    slot,
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
    max_tokens,
    num_words,
    header_bytes,
    record_at,
    row_bytes,
    NUM_TOPK: tl.constexpr,
    FORMAT: tl.constexpr,
    ALIGNED: tl.constexpr,
    RANKS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHRINK: tl.constexpr,
):
    """Pack the rows as they come, each program every `num_programs`-th: the ranks' first tokens,
    their second ones, ..."""
    ranks = tl.arange(0, slot.shift.shape[0])
    lanes = tl.arange(0, triton.next_power_of_2(NUM_TOPK))
    level = flag_level(slot)
    if wait_stats is not None:
        if program == 0:
            flags = message_flag(slot, ranks)
            times = waiting_times(flags, ranks < RANKS, level, ranks, slot, context)
            times += tl.load(wait_stats + ranks, mask=ranks < RANKS, other=0)
            tl.store(wait_stats + ranks, times, mask=ranks < RANKS)
    # fmt: off
    there, flags = wait_ranks(
        message_flag(slot, ranks), ranks < RANKS, level, ranks, context, PHASE_COUNTS, SHRINK
    )
    # fmt: on
    tokens_of = tl.where(there, flags & COUNT_MASK, 0).to(tl.int32)
    heads = consume_token(region_at(slot, ranks), there.to(tl.int32))
    fields = tl.arange(0, SIGNATURE_WORDS)
    at = as_pointer(heads, tl.int32)[:, None] + fields[None, :]
    theirs = tl.load(at, mask=there[:, None], other=0)
    word: tl.constexpr = recv_x.dtype.element_ty
    # fmt: off
    signature = low_latency_signature(
        num_words, max_tokens, word, NUM_TOPK, FORMAT, RANKS * EXPERTS
    )
    # fmt: on
    differs = there & (tl.max((theirs != signature[None, :]).to(tl.int32), 1) == 1)
    other = tl.max(tl.where(differs, ranks, -1), 0)
    if other >= 0:
        report_signature(other, region_at(slot, other), slot.epoch, context)
        tokens_of = tokens_of * 0
    most = tl.max(tokens_of, 0)
    ids = heads + SIGNATURE_WORDS * 4
    counts = _count_ids(ids, tokens_of, most, NUM_TOPK, RANKS, EXPERTS)
    begins = tl.cumsum(counts, 0) - counts  # behind the ranks before, for the same expert
    # fmt: off
    begins = _begin_receive(
        program, slot, counts, begins, tokens_of, recv_count, layout_range, recv_stats, call,
        context, max_tokens, RANKS, EXPERTS,
    )
    # fmt: on
    batch = tl.arange(0, ROWS) * num_programs
    for first in range(program, most * RANKS, num_programs * ROWS):
        sources, tokens = (first + batch) % RANKS, (first + batch) // RANKS
        of_source = sources[:, None] == ranks[None, :]
        inside = tokens < tl.sum(tl.where(of_source, tokens_of[None, :], 0), 1)
        ids_at = (
            tl.sum(tl.where(of_source, ids[None, :], 0), 1) + tokens.to(tl.int64) * NUM_TOPK * 4
        )
        ids_at = as_pointer(ids_at, tl.int32)[:, None] + lanes[None, :]
        real = inside[:, None] & (lanes < NUM_TOPK)[None, :]
        experts = tl.load(ids_at, mask=real, other=-1)
        has = tl.max(experts, 1) >= 0
        row_flags = row_flag(slot, sources, tokens)
        came, _ = wait_ranks(row_flags, has, level, sources, context, PHASE_ROWS, SHRINK)
        came = came.to(tl.int32)
        rows = region_at(slot, sources) + header_bytes + tokens.to(tl.int64) * row_bytes
        rows = consume_token(rows, came)
        loaded = ()  # all rows, before any is stored
        for number in tl.static_range(ROWS):
            # fmt: off
            loaded = loaded + (_load_row(
                pick(rows, number), pick(came, number) == 1, num_words, record_at, word,
                NUM_TOPK, FORMAT, ALIGNED, BLOCK,
            ),)
            # fmt: on
        for number in tl.static_range(ROWS):
            if pick(inside.to(tl.int32), number) == 1:
                source, token = pick(sources, number), pick(tokens, number)
                mine = tl.arange(0, ROWS) == number
                expert = tl.sum(tl.where(mine[:, None], experts, 0), 0)
                expert = tl.where(pick(came, number) == 1, expert, -1)
                of_rank = tl.sum(tl.where((ranks == source)[:, None], begins, 0), 0)
                entry = returns + (source * max_tokens + token).to(tl.int64) * (1 + 3 * NUM_TOPK)
                # fmt: off
                _pack_row(
                    loaded[number], token, expert, of_rank, entry, recv_x, recv_scales, src_info,
                    max_tokens * RANKS, num_words, NUM_TOPK, FORMAT, ALIGNED, EXPERTS, BLOCK,
                )
                # fmt: on


@device_function
def _count_ids(
    ids, tokens_of, most, NUM_TOPK: tl.constexpr, RANKS: tl.constexpr, EXPERTS: tl.constexpr
):
    """int32 [R_PAD, L_PAD]: tokens of each rank with each expert here. ids: addresses [R_PAD] of
    int32 [T, K], T as in tokens_of [R_PAD], at most `most`."""
    RANKS_PAD: tl.constexpr = triton.next_power_of_2(RANKS)
    EXPERTS_PAD: tl.constexpr = max(32, triton.next_power_of_2(EXPERTS))
    ranks = tl.arange(0, RANKS_PAD)
    counts = tl.zeros([RANKS_PAD * EXPERTS_PAD], tl.int32)
    for first in range(0, most * NUM_TOPK, COUNTED):
        lanes = first + tl.arange(0, COUNTED)
        inside = lanes[None, :] < (tokens_of * NUM_TOPK)[:, None]
        at = as_pointer(ids, tl.int32)[:, None] + lanes[None, :]
        found = tl.load(at, mask=inside, other=-1)
        bins = tl.reshape(ranks[:, None] * EXPERTS_PAD + found, [RANKS_PAD * COUNTED])
        is_here = tl.reshape(found >= 0, [RANKS_PAD * COUNTED])
        counts += tl.histogram(tl.where(is_here, bins, 0), RANKS_PAD * EXPERTS_PAD, mask=is_here)
    return tl.reshape(counts, [RANKS_PAD, EXPERTS_PAD])


@device_function
def _begin_receive(
    program,
    slot,
    counts,
    begins,
    tokens_of,
    recv_count,
    layout_range,
    recv_stats,
    call,
    context,
    max_tokens,
    RANKS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Program 0 writes what is known before any row is there. Returns where the rows of each rank
    for each expert begin in recv_x, int32 [R_PAD, L_PAD]."""
    ranks = tl.arange(0, counts.shape[0])
    experts = tl.arange(0, counts.shape[1])
    real = experts < EXPERTS
    totals = tl.sum(counts, 0)
    ends = tl.cumsum(totals, 0)
    if program == 0:
        note_received(slot, context)
        tl.store(call + 1 + ranks, tokens_of.to(tl.int64), mask=ranks < RANKS)
        if layout_range is None:
            tl.store(recv_count + experts, tl.zeros_like(totals), mask=experts == 0)
            tl.store(recv_count + 1 + experts, ends, mask=real)
        else:
            tl.store(recv_count + experts, totals, mask=real)
            to = layout_range + experts[None, :] * RANKS + ranks[:, None]
            is_real = (ranks < RANKS)[:, None] & real[None, :]
            tl.store(to, (begins.to(tl.int64) << 32) | counts.to(tl.int64), mask=is_real)
        if recv_stats is not None:
            old = tl.load(recv_stats + experts, mask=real, other=0)
            tl.store(recv_stats + experts, old + totals, mask=real)
    if layout_range is None:
        begins += (ends - totals)[None, :]
    else:
        begins += (experts * (RANKS * max_tokens))[None, :]
    return begins


@device_function
def _load_row(
    address,
    came,
    num_words,
    record_at,
    word: tl.constexpr,
    NUM_TOPK: tl.constexpr,
    FORMAT: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(payload, scales, places, weights) of a row that `came`."""
    lanes = tl.arange(0, triton.next_power_of_2(NUM_TOPK))
    columns = tl.arange(0, BLOCK // 4 if is_cast(FORMAT) else BLOCK)
    inside = row_mask(columns, num_words, word, ALIGNED) & came
    payload = tl.load(row_at(address, columns, word, ALIGNED), mask=inside)
    block = tl.arange(0, BLOCK // 128)
    scales = block
    if is_cast(FORMAT):
        scales_at = row_at(address + tl.cdiv(num_words, 4) * 16, block, tl.int32, ALIGNED)
        scales = tl.load(scales_at, mask=(block < num_scales(num_words, FORMAT)) & came)
    record = as_pointer(address + record_at, tl.int32) + lanes
    real = (lanes < NUM_TOPK) & came
    place = tl.load(record, mask=real, other=0)
    weight = tl.load(record + NUM_TOPK, mask=real, other=0)
    return payload, scales, place, weight


@device_function
def _pack_row(
    loaded,
    token,
    expert,
    begins,
    entry,
    recv_x,
    recv_scales,
    src_info,
    expert_rows,
    num_words,
    NUM_TOPK: tl.constexpr,
    FORMAT: tl.constexpr,
    ALIGNED: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store what `_load_row` gave at its place among the rows of each of its experts here; expert
    [K_PAD] is as in the message: -1 elsewhere, -2 - e for e again.

    entry, int32: how many of the token's lanes are here, then, for each of these in order, the
    place of its row in recv_x [K], its lane [K], its routing weight as bits [K].
    """
    lanes = tl.arange(0, triton.next_power_of_2(NUM_TOPK))
    experts = tl.arange(0, begins.shape[0])
    payload, scales, place, weight = loaded
    expert = tl.where(expert < -1, -2 - expert, expert)
    here = expert >= 0
    place += tl.sum(tl.where(expert[:, None] == experts[None, :], begins[None, :], 0), 1)
    number = tl.cumsum(here.to(tl.int32), 0) - 1
    num_here = tl.sum(here.to(tl.int32), 0)
    tl.store(entry, num_here)
    tl.store(entry + 1 + number, place, mask=here)
    tl.store(entry + 1 + NUM_TOPK + number, lanes, mask=here)
    tl.store(entry + 1 + 2 * NUM_TOPK + number, weight, mask=here)
    if src_info is not None:
        tl.store(src_info + place, tl.zeros_like(place) + token, mask=here)
    columns = tl.arange(0, BLOCK // 4 if is_cast(FORMAT) else BLOCK)
    inside = row_mask(columns, num_words, recv_x.dtype.element_ty, ALIGNED)
    block = tl.arange(0, BLOCK // 128)
    for copy in range(0, num_here):
        is_this = here & (number == copy)
        to = tl.sum(tl.where(is_this, place, 0), 0).to(tl.int64)
        tl.store(pointers_at(recv_x + to * num_words, columns, ALIGNED), payload, mask=inside)
        if is_cast(FORMAT):
            num_blocks = num_scales(num_words, FORMAT)
            first = tl.sum(tl.where(is_this, expert, 0), 0).to(tl.int64) * expert_rows
            scales_to = recv_scales + first * (num_blocks - 1) + to
            scales_to += block.to(tl.int64) * expert_rows
            tl.store(scales_to, scales, mask=block < num_blocks)


# --- Both ----------------------------------------------------------------------------------------


@device_function
def low_latency_signature(
    num_words,
    max_tokens,
    word: tl.constexpr,
    NUM_TOPK: tl.constexpr,
    FORMAT: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
):
    """`call_signature` of a low-latency dispatch: its number of scales is that of their words."""
    word_bytes: tl.constexpr = word.primitive_bitwidth // 8
    scale_words = num_scales(num_words, FORMAT)
    item_bytes: tl.constexpr = 4 if FORMAT == "fp32" else (1 if is_cast(FORMAT) else 2)
    # fmt: off
    return call_signature(
        num_words * word_bytes, NUM_TOPK, NUM_EXPERTS, item_bytes, scale_words, max_tokens, 0
    )
    # fmt: on


@device_function
def num_scales(num_words, FORMAT: tl.constexpr):
    """4-byte words of scales of a row of `num_words` words, of 4 columns each if it was cast."""
    words = num_words * 0
    if FORMAT == "ue8m0":
        words = num_words // 128
    elif is_cast(FORMAT):
        words = num_words // 32
    return words
