"""Kernels between rows as a dispatch brings them, one for each token, and expert rows."""

from typing import NamedTuple

import triton
import triton.language as tl

from .device.lang import device_function, round_to, row_mask, row_pointers


class PlacedRows(NamedTuple):
    """What `expert_major.place` finds, see `Places`."""

    offsets: tl.tensor  # int32 [L + 1]
    slots: tl.tensor  # int32 [M]
    dst_rows: tl.tensor  # int32 [N * K]
    overflow: tl.tensor  # int32 [1]
    row_weights: tl.tensor  # float32 [M], or None


@triton.jit(do_not_specialize=["num_slots", "num_rows"])
def count_rows_kernel(
    topk_idx,  # int64 [N * K]: local experts, or -1
    present,  # int64 [N]: 0 for rows that have no place, or None
    block_counts,  # int32 [B, L], out
    places,  # PlacedRows, out
    num_slots,  # N * K
    num_rows,  # M
    NUM_TOPK: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,  # L
    EXPERTS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program b counts the rows of each expert in block b of the top-k slots. All programs together
    make all expert rows padding; `place_rows_kernel` places rows on them."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = _load_ids(topk_idx, present, at, num_slots, NUM_TOPK)
    histogram = tl.histogram(tl.maximum(ids, 0), EXPERTS_PAD, mask=ids >= 0)
    experts = tl.arange(0, EXPERTS_PAD)
    to = block_counts + tl.program_id(0) * NUM_EXPERTS + experts
    tl.store(to, histogram, mask=experts < NUM_EXPERTS)
    for first in range(tl.program_id(0) * BLOCK, num_rows, tl.num_programs(0) * BLOCK):
        rows = first + tl.arange(0, BLOCK)
        tl.store(places.slots + rows, -1, mask=rows < num_rows)
        if places.row_weights is not None:
            tl.store(places.row_weights + rows, 0.0, mask=rows < num_rows)


@triton.jit(do_not_specialize=["num_blocks", "num_rows", "alignment"])
def begin_rows_kernel(
    block_counts,  # int32 [B, L]; out: of the blocks before each
    places,  # PlacedRows, out
    num_blocks,  # B
    num_rows,  # M
    alignment,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program finds where the rows of each expert begin, and what there is no room for."""
    experts = tl.arange(0, EXPERTS_PAD)
    total = tl.zeros([EXPERTS_PAD], tl.int32)
    for first in range(0, num_blocks, BLOCK):
        blocks = first + tl.arange(0, BLOCK)
        inside = (blocks < num_blocks)[:, None] & (experts < NUM_EXPERTS)[None, :]
        at = block_counts + blocks[:, None] * NUM_EXPERTS + experts[None, :]
        counts = tl.load(at, mask=inside, other=0)
        tl.store(at, total[None, :] + tl.cumsum(counts, 0) - counts, mask=inside)
        total += tl.sum(counts, 0)
    padded = (total + alignment - 1) // alignment * alignment
    ends = tl.cumsum(padded, 0)
    to = places.offsets + 1 + experts
    tl.store(to, tl.minimum(ends, num_rows), mask=experts < NUM_EXPERTS)
    tl.store(places.offsets, 0)
    tl.store(places.overflow, tl.maximum(tl.sum(padded, 0) - num_rows, 0))


@triton.jit(do_not_specialize=["num_slots", "num_rows", "alignment"])
def place_rows_kernel(
    topk_idx,  # int64 [N * K]
    topk_weights,  # float32 [N * K], or None
    present,  # as above
    block_counts,  # int32 [B, L]: of the blocks before each
    places,  # PlacedRows, out
    num_slots,
    num_rows,
    NUM_TOPK: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program b places the rows of block b: each after those of the blocks before, and after those
    of its own block that come before it and have the same expert."""
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    ids = _load_ids(topk_idx, present, at, num_slots, NUM_TOPK)
    has = ids >= 0
    is_before = (ids[:, None] == ids[None, :]) & (at[None, :] < at[:, None])
    row = tl.sum(is_before.to(tl.int32), 1)
    row += tl.load(block_counts + block * NUM_EXPERTS + ids, mask=has, other=0)
    row += tl.load(places.offsets + ids, mask=has, other=0)
    has &= row < num_rows
    tl.store(places.dst_rows + at, tl.where(has, row, -1), mask=at < num_slots)
    tl.store(places.slots + row, at, mask=has)
    if places.row_weights is not None:
        weights = tl.load(topk_weights + at, mask=has, other=0.0)
        tl.store(places.row_weights + row, weights, mask=has)


@device_function
def _load_ids(topk_idx, present, at, num_slots, NUM_TOPK: tl.constexpr):
    """The local experts of top-k slots `at` [B], -1 for none."""
    ids = tl.load(topk_idx + at, mask=at < num_slots, other=-1).to(tl.int32)
    if present is not None:
        is_present = tl.load(present + at // NUM_TOPK, mask=at < num_slots, other=0) != 0
        ids = tl.where(is_present, ids, -1)
    return ids


@triton.jit(do_not_specialize=["num_rows"])
def take_rows_kernel(
    x,  # vectors [N, num_vecs]
    slots,  # int32 [M]: top-k slot n * K + k of each expert row, -1 for padding
    end,  # int32 [1]: expert rows that there are, the others are not written; or None: M
    out,  # vectors [M, num_vecs]
    num_rows,
    num_vecs,
    NUM_TOPK: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_VECS: tl.constexpr,
):
    """out[m] = x[slots[m] // NUM_TOPK], and 0 in padding."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = rows < (num_rows if end is None else tl.load(end))
    slot = tl.load(slots + rows, mask=inside, other=-1)
    source = x + (slot // NUM_TOPK).to(tl.int64) * num_vecs
    to = out + rows.to(tl.int64) * num_vecs
    for first in range(0, num_vecs, BLOCK_VECS):
        vecs = first + tl.arange(0, BLOCK_VECS)
        in_row = row_mask(vecs, num_vecs, out.dtype.element_ty, ALIGNED)[None, :]
        has = in_row & (slot >= 0)[:, None]
        values = tl.load(row_pointers(source, vecs, ALIGNED), mask=has, other=0)
        tl.store(row_pointers(to, vecs, ALIGNED), values, mask=in_row & inside[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def sum_rows_kernel(
    rows,  # [M, H]
    dst_rows,  # int32 [N, K], see `Places`
    out,  # [N, H]
    values,  # float32 [M] of rows, or None
    topk_values,  # float32 [N, K], or None, out
    present,  # int64 [N]: 0 for rows that are not written, or None
    num_rows,  # N
    hidden,
    NUM_TOPK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """out[n] = the sum of rows[dst_rows[n, k]] in the order of k, in fp32, rounded once; and
    topk_values[n, k] = values[dst_rows[n, k]], 0 for none."""
    n = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = n < num_rows
    if present is not None:
        inside = inside & (tl.load(present + n, mask=inside, other=0) != 0)
    in_row = (columns < hidden)[None, :]
    total = tl.zeros([BLOCK_ROWS, BLOCK_H], tl.float32)
    for k in range(0, NUM_TOPK):
        row = tl.load(dst_rows + n * NUM_TOPK + k, mask=inside, other=-1)
        at = rows + row.to(tl.int64)[:, None] * hidden + columns[None, :]
        total += tl.load(at, mask=(row >= 0)[:, None] & in_row, other=0.0).to(tl.float32)
        if topk_values is not None:
            value = tl.load(values + row, mask=row >= 0, other=0.0)
            is_first = inside & (tl.program_id(1) == 0)
            tl.store(topk_values + n * NUM_TOPK + k, value, mask=is_first)
    to = out + n.to(tl.int64)[:, None] * hidden + columns[None, :]
    tl.store(to, round_to(total, out.dtype.element_ty), mask=inside[:, None] & in_row)
