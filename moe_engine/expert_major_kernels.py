"""Kernels between rows as a dispatch brings them, one for each token, and expert rows."""

import triton
import triton.language as tl

from .device.lang import round_to, row_mask, row_pointers


@triton.jit(do_not_specialize=["num_rows"])
def take_rows_kernel(
    x,  # vectors [N, num_vecs]
    slots,  # int32 [M]: top-k slot n * K + k of each expert row, -1 for padding
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
    inside = rows < num_rows
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
    num_rows,  # N
    hidden,
    NUM_TOPK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """out[n] = the sum of rows[dst_rows[n, k]] in the order of k, in fp32, rounded once."""
    n = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = n < num_rows
    in_row = (columns < hidden)[None, :]
    total = tl.zeros([BLOCK_ROWS, BLOCK_H], tl.float32)
    for k in range(0, NUM_TOPK):
        row = tl.load(dst_rows + n * NUM_TOPK + k, mask=inside, other=-1)
        at = rows + row.to(tl.int64)[:, None] * hidden + columns[None, :]
        total += tl.load(at, mask=(row >= 0)[:, None] & in_row, other=0.0).to(tl.float32)
    to = out + n.to(tl.int64)[:, None] * hidden + columns[None, :]
    tl.store(to, round_to(total, out.dtype.element_ty), mask=inside[:, None] & in_row)
