"""Low-latency dispatch, the receiving half: pack the rows that arrive by expert."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..device.call_fields import call_fields, is_cast, num_scales, report_fields
from ..device.context import PHASE_COUNTS, PHASE_ROWS
from ..device.lang import (
    as_pointer,
    consume_token,
    device_function,
    is_alive,
    row_mask,
    row_pointers,
)
from ..device.programs import pdl_launch_dependents
from ..device.ptx import any_thread
from ..device.ring import (
    COUNT_BITS,
    COUNT_MASK,
    FIELDS,
    columns_at,
    count_at,
    flag_level,
    load_flags,
    masked_ranks,
    note_received,
    pick,
    publish_active_ranks,
    row_at,
    row_flag,
    time_ranks,
    wait_active_ranks,
    wait_ranks,
)
from ..grouped_gemm.schedule_kernels import Tiles, pack_tile

BATCH = tl.constexpr(2)
"""Rows that a program packs together."""


class Received(NamedTuple):
    """What a rank receives, packed by expert, or compactly, one expert after the other. The host
    holds scales [L, R * M, S] as `new_scales` makes them.

    returns says, for each token of each rank, what combine returns: how many of its experts are on
    this rank, then for each of these in top-k order the row of x [K], which slot k of the top-k it
    is [K], and the routing weight as bits [K].
    """

    x: tl.tensor  # [L, R * M, H], compact [N, H]
    scales: tl.tensor  # int32 [L, S, R * M], compact [N, S], or None
    counts: tl.tensor  # int32 [L]; compact: int32 [L + 1], where each expert's rows begin
    src_info: tl.tensor  # int32 [L, R * M]: the token of each row; compact: None
    layout_range: tl.tensor  # int64 [L, R]: begin << 32 | count by source; compact: None
    returns: tl.tensor  # int32 [R, M, 1 + 3 * K]
    call: tl.tensor  # int64 [1 + R]: the dispatch, see `open_slot`; tokens of each rank
    tiles: Tiles | None = None  # of compact rows, for a product of them


@device_function
def receive(
    program, num_programs, slot, received, recv_stats, wait_stats, CONFIG: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program 0 stores how much comes; the others pack the rows as they arrive, each of them every
    n-th: the ranks' first tokens, their second ones, ..."""
    ranks = tl.arange(0, slot.shift.shape[0])
    k = tl.arange(0, CONFIG.K_PAD)
    if wait_stats is not None:
        if program == 0:
            real = ranks < CONFIG.RANKS
            times = time_ranks(count_at(slot, ranks, 0), real, ranks, slot, PHASE_COUNTS)
            times += tl.load(wait_stats + ranks, mask=real, other=0)
            tl.store(wait_stats + ranks, times, mask=real)
    counts = _wait_counts(program, slot, CONFIG)
    if CONFIG.BLOCK_M > 0:
        pdl_launch_dependents(PDL)
    tokens_of = _check_fields(counts, slot, CONFIG)
    index = tl.arange(0, counts.shape[1])
    is_count = (index >= FIELDS) & (index < FIELDS + CONFIG.EXPERTS)
    counts = tl.where(is_count[None, :], tl.maximum(counts, 0), 0)
    begins = tl.cumsum(counts, 0) - counts  # after the rows of the same expert from ranks before
    totals = tl.sum(counts, 0)
    if program == 0:
        note_received(slot)
        tl.store(received.call + 1 + ranks, tokens_of.to(tl.int64), mask=ranks < CONFIG.RANKS)
        _store_counts(counts, begins, totals, received, recv_stats, CONFIG)
        if CONFIG.BLOCK_M > 0:
            _store_tiles(index - FIELDS, totals, received.tiles, slot, CONFIG)
    if received.layout_range is None:
        begins += (tl.cumsum(totals, 0) - totals)[None, :]
    else:
        begins += ((index - FIELDS) * (CONFIG.RANKS * slot.max_tokens))[None, :]
    batch = tl.arange(0, BATCH)
    packer, num_packers = program - 1, num_programs - 1
    end = tl.where(program == 0, packer, tl.max(tokens_of, 0) * CONFIG.RANKS)
    for first in range(packer, end, num_packers * BATCH):
        work_idx = first + batch * num_packers
        sources, token_idx = work_idx % CONFIG.RANKS, work_idx // CONFIG.RANKS
        of_source = sources[:, None] == ranks[None, :]
        inside = token_idx < tl.sum(tl.where(of_source, tokens_of[None, :], 0), 1)
        begins_of = tl.sum(tl.where(of_source[:, :, None], begins[None, :, :], 0), 1)
        flags, level = row_flag(slot, sources, token_idx), flag_level(slot)
        raised, flags = wait_ranks(flags, inside, level, sources, slot, PHASE_ROWS, CONFIG)
        has_row = raised & (flags & COUNT_MASK == 1)
        at = consume_token(row_at(slot, sources, token_idx), has_row.to(tl.int32))
        loaded = ()  # all rows, before any is stored
        for number in tl.static_range(BATCH):
            address, is_row = pick(at, number), pick(has_row.to(tl.int32), number) == 1
            loaded = loaded + (_load_row(address, is_row, slot, CONFIG),)
        trailer = as_pointer(at + slot.rows.trailer, tl.int32)[:, None] + k[None, :]
        real = has_row[:, None] & (k < CONFIG.NUM_TOPK)[None, :]
        expert = tl.load(trailer, mask=real, other=-1)
        dst_row = tl.load(trailer + CONFIG.NUM_TOPK, mask=real, other=0)
        weight = tl.load(trailer + 2 * CONFIG.NUM_TOPK, mask=real, other=0)
        is_expert = (expert + FIELDS)[:, :, None] == index[None, None, :]
        dst_row += tl.sum(tl.where(is_expert, begins_of[:, None, :], 0), 2)
        is_here = expert >= 0
        number_here = tl.cumsum(is_here.to(tl.int32), 1) - 1
        num_here = tl.sum(is_here.to(tl.int32), 1)
        for number in tl.static_range(BATCH):
            for copy in range(0, pick(num_here, number)):
                is_this = is_here & (number_here == copy) & (batch == number)[:, None]
                row = tl.max(tl.max(tl.where(is_this, dst_row, 0), 1), 0)
                of_expert = tl.max(tl.max(tl.where(is_this, expert, 0), 1), 0)
                _store_row(loaded[number], row, of_expert, slot, received, CONFIG)
        entry = (sources * slot.max_tokens + token_idx).to(tl.int64) * CONFIG.ENTRY
        entry = received.returns + entry
        tl.store(entry, num_here, mask=inside)
        to = entry[:, None] + 1 + number_here
        tl.store(to, dst_row, mask=is_here)
        tl.store(to + CONFIG.NUM_TOPK, tl.broadcast_to(k[None, :], is_here.shape), mask=is_here)
        tl.store(to + 2 * CONFIG.NUM_TOPK, weight, mask=is_here)
        if received.src_info is not None:
            of_row = tl.broadcast_to(token_idx[:, None], is_here.shape)
            tl.store(received.src_info + dst_row, of_row, mask=is_here)


@device_function
def _wait_counts(program, slot, CONFIG: tl.constexpr):
    """int32 [R_PAD, FIELDS + L, padded]: fields and counts that each rank sent, -1 where none
    arrived: of all ranks, if the wait has ended in vain. With SHRINK of the ranks that program 0
    found masked, or late past the deadline: it decides for all, as others may look at another
    moment."""
    RANKS_PAD: tl.constexpr = triton.next_power_of_2(CONFIG.RANKS)
    COUNTS_PAD: tl.constexpr = triton.next_power_of_2(FIELDS + CONFIG.EXPERTS)
    flat = tl.arange(0, RANKS_PAD * COUNTS_PAD)
    ranks, index = flat // COUNTS_PAD, flat % COUNTS_PAD
    real = (ranks < CONFIG.RANKS) & (index < FIELDS + CONFIG.EXPERTS)
    flags, level = count_at(slot, ranks, index), flag_level(slot)
    if CONFIG.SHRINK:
        if program == 0:
            before = masked_ranks(slot.context)
            wait_ranks(flags, real, level, ranks, slot, PHASE_COUNTS, CONFIG)
            arrived = (load_flags(flags, real, slot) >= level) | ~real
            arrived = tl.min(tl.reshape(arrived.to(tl.int32), [RANKS_PAD, COUNTS_PAD]), 1)
            rank = tl.arange(0, RANKS_PAD)
            is_active = (arrived == 1) & (rank < CONFIG.RANKS) & is_alive(before, rank)
            bits = tl.where(is_active, tl.full((), 1, tl.int64) << rank.to(tl.int64), 0)
            active = tl.sum(bits, 0)
            publish_active_ranks(slot, active, CONFIG)
        else:
            active = wait_active_ranks(slot, CONFIG, PHASE_COUNTS)
        raised = real & (is_alive(active, ranks) == 0)
        values = load_flags(flags, real, slot)
    else:
        raised, values = wait_ranks(flags, real, level, ranks, slot, PHASE_COUNTS, CONFIG)
        # Warps that hold the same flags may have seen them at another time than the one that
        # decided to go on.
        if tl.max(any_thread((raised & (values < level)).to(tl.int32)), 0) == 1:
            values = load_flags(flags, real, slot)
    values = tl.where(raised, values & COUNT_MASK, -1).to(tl.int32)
    return tl.reshape(values, [RANKS_PAD, COUNTS_PAD])


@device_function
def _check_fields(counts, slot, CONFIG: tl.constexpr):
    """int32 [R_PAD]: tokens of each rank; 0 of all ranks if one of them was called with other
    sizes, which is reported. A rank whose fields have not arrived was called with nothing: another
    program has told the host why, and its report stays as it is."""
    ranks, index = tl.arange(0, counts.shape[0]), tl.arange(0, counts.shape[1])
    expected = call_fields(index, 0, 0, slot, CONFIG)
    differs = (counts != expected[None, :]) & ((index >= 1) & (index < FIELDS))[None, :]
    differs = differs & (counts >= 0)
    tokens = tl.where((index == 0)[None, :], tl.maximum(counts, 0), 0)
    found = tokens + (differs.to(tl.int32) << COUNT_BITS)
    found = tl.sum(found, 1)  # one sum for both, as each costs a meeting of all warps
    tokens_of = tl.minimum(found & COUNT_MASK, slot.max_tokens)
    if tl.max(found, 0) > COUNT_MASK:
        other = tl.max(tl.max(tl.where(differs, ranks[:, None], -1), 1), 0)
        theirs = tl.sum(tl.where((ranks == other)[:, None], counts, 0), 0)
        report_fields(other, theirs, expected, index, slot)
        tokens_of = tokens_of * 0
    return tokens_of


@device_function
def _store_counts(counts, begins, totals, received, recv_stats, CONFIG: tl.constexpr):
    """Write what is known before any row has arrived: counts and, unless rows are packed compactly,
    layout_range. counts, begins [R_PAD, W] and totals [W] are numbered as by `_wait_counts`."""
    ranks, experts = tl.arange(0, counts.shape[0]), tl.arange(0, counts.shape[1]) - FIELDS
    real = (experts >= 0) & (experts < CONFIG.EXPERTS)
    to = received.counts + experts
    if received.layout_range is None:
        tl.store(to + 1, tl.cumsum(totals, 0), mask=real | (experts == -1))
    else:
        tl.store(to, totals, mask=real)
        to = received.layout_range + experts[None, :] * CONFIG.RANKS + ranks[:, None]
        is_real = (ranks < CONFIG.RANKS)[:, None] & real[None, :]
        tl.store(to, (begins.to(tl.int64) << 32) | counts.to(tl.int64), mask=is_real)
    if recv_stats is not None:
        old = tl.load(recv_stats + experts, mask=real, other=0)
        tl.store(recv_stats + experts, old + totals, mask=real)


@device_function
def _store_tiles(experts, totals, tiles, slot, CONFIG: tl.constexpr):
    """Cut the rows of each expert into tiles, as `schedule_kernels._tile_schedule_kernel` does:
    BLOCK_M 2, totals 3, 0, 1 give (expert, row, number of rows) (0, 0, 2) (0, 2, 1) (2, 3, 1)."""
    most_rows = CONFIG.RANKS * slot.max_tokens * min(CONFIG.NUM_TOPK, CONFIG.EXPERTS)
    ends = tl.cumsum(totals, 0)
    begins, ends = tl.minimum(ends - totals, most_rows), tl.minimum(ends, most_rows)
    count = tl.cdiv(ends - begins, CONFIG.BLOCK_M)
    first = tl.cumsum(count, 0) - count
    for number in range(0, tl.max(count, 0)):
        row = begins + number * CONFIG.BLOCK_M
        packed = pack_tile(experts, row, tl.minimum(ends - row, CONFIG.BLOCK_M))
        tl.store(tiles.packed + first + number, packed, mask=number < count)
    tl.store(tiles.count, tl.sum(count, 0))


@device_function
def _load_row(address, has_row, slot, CONFIG: tl.constexpr):
    """(payload, scales) of the row at an address, if it `has_row`."""
    num_vecs = slot.rows.num_vecs
    columns = tl.arange(0, CONFIG.BLOCK // 4 if is_cast(CONFIG.FORMAT) else CONFIG.BLOCK)
    inside = row_mask(columns, num_vecs, CONFIG.VEC, CONFIG.ALIGNED) & has_row
    payload = tl.load(columns_at(address, columns, CONFIG.VEC, CONFIG.ALIGNED), mask=inside)
    block = tl.arange(0, CONFIG.BLOCK // 128)
    scales = block
    if is_cast(CONFIG.FORMAT):
        scales_at = address + tl.cdiv(num_vecs, 4) * 16
        scales_at = columns_at(scales_at, block, tl.int32, CONFIG.ALIGNED)
        scales = tl.load(scales_at, mask=(block < num_scales(num_vecs, CONFIG.FORMAT)) & has_row)
    return payload, scales


@device_function
def _store_row(loaded, row, expert, slot, received, CONFIG: tl.constexpr):
    """Store what `_load_row` gave as row `row` of received.x, one of `expert`'s."""
    payload, scales = loaded
    num_vecs = slot.rows.num_vecs
    columns = tl.arange(0, CONFIG.BLOCK // 4 if is_cast(CONFIG.FORMAT) else CONFIG.BLOCK)
    inside = row_mask(columns, num_vecs, CONFIG.VEC, CONFIG.ALIGNED)
    to = received.x + row.to(tl.int64) * num_vecs
    tl.store(row_pointers(to, columns, CONFIG.ALIGNED), payload, mask=inside)
    if is_cast(CONFIG.FORMAT):
        block = tl.arange(0, CONFIG.BLOCK // 128)
        num_blocks = num_scales(num_vecs, CONFIG.FORMAT)
        if received.layout_range is None:
            scales_to = row.to(tl.int64) * num_blocks + block
        else:
            expert_rows = slot.max_tokens * CONFIG.RANKS
            scales_to = expert.to(tl.int64) * expert_rows * (num_blocks - 1) + row
            scales_to += block.to(tl.int64) * expert_rows
        tl.store(received.scales + scales_to, scales, mask=block < num_blocks)
