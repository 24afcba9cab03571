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
"""Of a message: the signature, then the number of rows for each expert."""
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
    """Pack the rows as they come, each program every `num_programs`-th: rows 0 of all ranks, rows 1
    of all ranks, ..."""
    ranks = tl.arange(0, slot.shift.shape[0])
    experts = tl.arange(0, triton.next_power_of_2(EXPERTS))
    real = experts < EXPERTS
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
    rows_from = tl.where(there, flags & COUNT_MASK, 0).to(tl.int32)
    heads = as_pointer(consume_token(region_at(slot, ranks), there.to(tl.int32)), tl.int32)
    fields = tl.arange(0, SIGNATURE_WORDS)
    theirs = tl.load(heads[:, None] + fields[None, :], mask=there[:, None], other=0)
    at = heads[:, None] + SIGNATURE_WORDS + experts[None, :]
    counts = tl.load(at, mask=there[:, None] & real[None, :], other=0)
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
        rows_from, counts = rows_from * 0, counts * 0
    before = tl.cumsum(counts, 0) - counts  # of the ranks before, for the same expert
    totals = tl.sum(counts, 0)
    if program == 0:
        note_received(slot, context)
        tl.store(call + 1 + ranks, rows_from.to(tl.int64), mask=ranks < RANKS)
        if layout_range is None:
            tl.store(recv_count + experts, tl.zeros_like(totals), mask=experts == 0)
            tl.store(recv_count + 1 + experts, tl.cumsum(totals, 0), mask=real)
        else:
            tl.store(recv_count + experts, totals, mask=real)
            to = layout_range + experts[None, :] * RANKS + ranks[:, None]
            is_real = (ranks < RANKS)[:, None] & real[None, :]
            tl.store(to, (before.to(tl.int64) << 32) | counts.to(tl.int64), mask=is_real)
        if recv_stats is not None:
            old = tl.load(recv_stats + experts, mask=real, other=0)
            tl.store(recv_stats + experts, old + totals, mask=real)
    if layout_range is None:
        before += (tl.cumsum(totals, 0) - totals)[None, :]
    else:
        before += (experts * (RANKS * max_tokens))[None, :]
    batch = tl.arange(0, ROWS) * num_programs
    for first in range(program, tl.max(rows_from, 0) * RANKS, num_programs * ROWS):
        sources, rows = (first + batch) % RANKS, (first + batch) // RANKS
        of_source = sources[:, None] == ranks[None, :]
        has = rows < tl.sum(tl.where(of_source, rows_from[None, :], 0), 1)
        row_flags = row_flag(slot, sources, rows)
        came, _ = wait_ranks(row_flags, has, level, sources, context, PHASE_ROWS, SHRINK)
        addresses = region_at(slot, sources) + header_bytes + rows.to(tl.int64) * row_bytes
        addresses = consume_token(addresses, came.to(tl.int32))
        loaded = ()  # all rows, before any is stored
        for number in tl.static_range(ROWS):
            # fmt: off
            loaded = loaded + (_load_row(
                pick(addresses, number), pick(came.to(tl.int32), number) == 1, num_words, record_at,
                word, NUM_TOPK, FORMAT, ALIGNED, BLOCK,
            ),)
            # fmt: on
        for number in tl.static_range(ROWS):
            if pick(has.to(tl.int32), number) == 1:
                source, row = pick(sources, number), pick(rows, number)
                begins = tl.sum(tl.where((ranks == source)[:, None], before, 0), 0)
                entry = returns + (source * max_tokens + row).to(tl.int64) * (2 + 3 * NUM_TOPK)
                # fmt: off
                _pack_row(
                    loaded[number], begins, entry, recv_x, recv_scales, src_info,
                    max_tokens * RANKS, num_words, NUM_TOPK, FORMAT, ALIGNED, EXPERTS, BLOCK,
                )
                # fmt: on


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
    """(payload, scales, token, its lanes' experts here, places, weights) of a row that `came`; no
    experts of one that did not."""
    lanes = tl.arange(0, triton.next_power_of_2(NUM_TOPK))
    columns = tl.arange(0, BLOCK // 4 if is_cast(FORMAT) else BLOCK)
    inside = row_mask(columns, num_words, word, ALIGNED) & came
    payload = tl.load(row_at(address, columns, word, ALIGNED), mask=inside)
    block = tl.arange(0, BLOCK // 128)
    scales = block
    if is_cast(FORMAT):
        scales_at = row_at(address + tl.cdiv(num_words, 4) * 16, block, tl.int32, ALIGNED)
        scales = tl.load(scales_at, mask=(block < num_scales(num_words, FORMAT)) & came)
    record = as_pointer(address + record_at, tl.int32)
    real = (lanes < NUM_TOPK) & came
    token = tl.load(record, mask=came, other=0)
    expert = tl.load(record + 1 + lanes, mask=real, other=-1)
    place = tl.load(record + 1 + NUM_TOPK + lanes, mask=real, other=0)
    weight = tl.load(record + 1 + 2 * NUM_TOPK + lanes, mask=real, other=0)
    return payload, scales, token, expert, place, weight


@device_function
def _pack_row(
    loaded,
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
    """Store what `_load_row` gave at its place among the rows of each of its experts here.

    entry, int32: the token, how many of its lanes are here, then, for each of these in order, the
    place of its row in recv_x [K], its lane [K], its routing weight as bits [K]. No lanes if it did
    not come.
    """
    word: tl.constexpr = recv_x.dtype.element_ty
    lanes = tl.arange(0, triton.next_power_of_2(NUM_TOPK))
    experts = tl.arange(0, triton.next_power_of_2(EXPERTS))
    payload, scales, token, expert, place, weight = loaded
    here = expert >= 0
    place += tl.sum(tl.where(expert[:, None] == experts[None, :], begins[None, :], 0), 1)
    number = tl.cumsum(here.to(tl.int32), 0) - 1
    tl.store(entry, token)
    tl.store(entry + 1, tl.sum(here.to(tl.int32), 0))
    tl.store(entry + 2 + number, place, mask=here)
    tl.store(entry + 2 + NUM_TOPK + number, lanes, mask=here)
    tl.store(entry + 2 + 2 * NUM_TOPK + number, weight, mask=here)
    if src_info is not None:
        tl.store(src_info + place, tl.zeros_like(place) + token, mask=here)
    columns = tl.arange(0, BLOCK // 4 if is_cast(FORMAT) else BLOCK)
    inside = row_mask(columns, num_words, word, ALIGNED)
    block = tl.arange(0, BLOCK // 128)
    for lane in tl.static_range(NUM_TOPK):
        if pick(here.to(tl.int32), lane) == 1:
            to = pick(place, lane).to(tl.int64)
            tl.store(pointers_at(recv_x + to * num_words, columns, ALIGNED), payload, mask=inside)
            if is_cast(FORMAT):
                num_blocks = num_scales(num_words, FORMAT)
                at = pick(expert, lane).to(tl.int64) * expert_rows * (num_blocks - 1) + to
                scales_to = recv_scales + at + block.to(tl.int64) * expert_rows
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
