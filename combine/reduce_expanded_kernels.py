"""The rows of one rank's experts, summed for each received row before they return."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device.lang import device_function, round_to, row_mask, row_pointers
from ..dispatch.receive_kernels import num_received


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
        slots_at = slots_of(src_metadata, index, SIZES.NUM_TOPK)
        if rows.weights is not None:
            k = tl.arange(0, triton.next_power_of_2(SIZES.NUM_TOPK))
            has = inside[:, None] & (k < SIZES.NUM_TOPK)[None, :]
            to = out.weights + index.to(tl.int64)[:, None] * SIZES.NUM_TOPK + k[None, :]
            weights = expert_weights(rows.weights, slots_at, inside, num_expanded, SIZES.NUM_TOPK)
            tl.store(to, weights, mask=has)
        for column in range(0, hidden, SIZES.BLOCK_H):
            columns = column + tl.arange(0, SIZES.BLOCK_H)
            in_row = row_mask(columns, hidden, rows.x.dtype.element_ty, SIZES.ALIGNED)
            # fmt: off
            total = expert_sums(
                rows.x, slots_at, inside, num_expanded, columns, hidden, SIZES.NUM_TOPK,
                SIZES.ALIGNED,
            )
            # fmt: on
            sums = row_pointers(out.x + index.to(tl.int64) * hidden, columns, SIZES.ALIGNED)
            is_sum = inside[:, None] & in_row[None, :]
            tl.store(sums, round_to(total, out.x.dtype.element_ty), mask=is_sum)


@device_function
def slots_of(src_metadata, index, NUM_TOPK: tl.constexpr):
    """Pointers to the numbers of the expert rows of received rows `index` (block)."""
    return src_metadata + index.to(tl.int64) * (2 + NUM_TOPK) + 2


@device_function
def expert_sums(
    x, slots_at, inside, num_expanded, columns, hidden, NUM_TOPK: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """fp32 [B, C]: sums of rows of x, whose numbers are at the pointers slots_at [B], NUM_TOPK of
    them each, -1 for none, in this order. A handle that a caller made up leads to no other memory
    than the num_expanded rows."""
    in_row = row_mask(columns, hidden, x.dtype.element_ty, ALIGNED)[None, :]
    total = tl.zeros([slots_at.shape[0], columns.shape[0]], tl.float32)
    for k in tl.static_range(NUM_TOPK):
        slot = tl.load(slots_at + k, mask=inside, other=-1)
        has = ((slot >= 0) & (slot < num_expanded))[:, None] & in_row
        row = x + slot.to(tl.int64) * hidden
        part = tl.load(row_pointers(row, columns, ALIGNED), mask=has, other=0.0)
        total += part.to(tl.float32)
    return total


@device_function
def expert_weights(weights, slots_at, inside, num_expanded, NUM_TOPK: tl.constexpr):
    """fp32 [B, K]: the weights of these rows, 0 in slots without one; see `expert_sums`."""
    k = tl.arange(0, triton.next_power_of_2(NUM_TOPK))
    has = inside[:, None] & (k < NUM_TOPK)[None, :]
    slots = tl.load(slots_at[:, None] + k[None, :], mask=has, other=-1)
    return tl.load(weights + slots, mask=(slots >= 0) & (slots < num_expanded), other=0.0)
