"""The rows of one rank's experts, summed for each received row before they return."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device.lang import round_to, row_mask, row_pointers
from ..dispatch.place_received_kernels import num_received


class ExpertRows(NamedTuple):
    """Rows in the order of experts."""

    x: tl.tensor  # [M, H]
    weights: tl.tensor  # float32 [M], or None


class ReducedRows(NamedTuple):
    """Sums in the order in which rows were received."""

    x: tl.tensor  # [N, H]
    weights: tl.tensor  # float32 [N, NUM_TOPK], or None


class ReduceSizes(NamedTuple):
    """Compile-time constants of `reduce_expanded_kernel`."""

    NUM_TOPK: Any
    BLOCK_ROWS: Any
    BLOCK_H: Any
    ALIGNED: Any  # whether rows are a multiple of 16 bytes


@triton.jit(do_not_specialize=["num_rows", "num_expanded"])
def reduce_expanded_kernel(
    rows,  # ExpertRows
    src_metadata,  # int32 [N, 2 + NUM_TOPK], see `reference.place`
    rank_prefix_matrix,  # int32 [R, R]
    out,  # ReducedRows
    context,
    num_rows,  # N
    num_expanded,  # M
    hidden,
    SIZES: tl.constexpr,  # ReduceSizes
):
    """Add up the rows of each received row in the order of its top-k, in fp32, rounded once to the
    type of `out`. Weights return to their top-k slots, 0 in slots without a row."""
    end = num_received(rank_prefix_matrix, num_rows, context)
    step = tl.num_programs(0) * SIZES.BLOCK_ROWS
    for first in range(tl.program_id(0) * SIZES.BLOCK_ROWS, end, step):
        index = first + tl.arange(0, SIZES.BLOCK_ROWS)
        inside = index < end
        slots_at = src_metadata + index.to(tl.int64) * (2 + SIZES.NUM_TOPK) + 2
        slots = ()
        for k in tl.static_range(SIZES.NUM_TOPK):
            slot = tl.load(slots_at + k, mask=inside, other=-1)
            slot = tl.where(slot < num_expanded, slot, -1)
            slots = slots + (slot,)
            if rows.weights is not None:
                weight = tl.load(rows.weights + slot, mask=slot >= 0, other=0.0)
                to = out.weights + index.to(tl.int64) * SIZES.NUM_TOPK + k
                tl.store(to, weight, mask=inside)
        for column in range(0, hidden, SIZES.BLOCK_H):
            columns = column + tl.arange(0, SIZES.BLOCK_H)
            in_row = row_mask(columns, hidden, rows.x.dtype.element_ty, SIZES.ALIGNED)[None, :]
            total = tl.zeros([SIZES.BLOCK_ROWS, SIZES.BLOCK_H], tl.float32)
            for k in tl.static_range(SIZES.NUM_TOPK):
                row = rows.x + slots[k].to(tl.int64) * hidden
                has = (slots[k] >= 0)[:, None] & in_row
                part = tl.load(row_pointers(row, columns, SIZES.ALIGNED), mask=has, other=0.0)
                total += part.to(tl.float32)
            sums = row_pointers(out.x + index.to(tl.int64) * hidden, columns, SIZES.ALIGNED)
            tl.store(sums, round_to(total, out.x.dtype.element_ty), mask=inside[:, None] & in_row)
