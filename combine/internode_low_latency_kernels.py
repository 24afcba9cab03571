"""Low-latency combine over several nodes, its beginning: each rank's sums of its experts' rows."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..device.context import NUM_RANKS, RANK, SIGNATURE_WORDS
from ..device.lang import as_pointer, is_broken, round_to, row_mask, row_pointers
from ..device.slots import region


class ExpertSums(NamedTuple):
    """What a rank returns: for each received row the sum of what its experts made of it."""

    y: tl.tensor  # [L, R * M, H], the experts' rows
    dst_row: tl.tensor  # int32 [R * M, K]: of each received row in y, by slot of the top-k, or -1
    src_idx: tl.tensor  # int32 [R * M]: the token of each received row
    rank_prefix_matrix: tl.tensor  # int32 [R, R]
    out: tl.tensor  # [R * M, H], out


class ExpertSumSizes(NamedTuple):
    """What the kernel is compiled for."""

    NUM_TOPK: int
    RANKS_PAD: int
    BLOCK_ROWS: int  # rows that a program sums at a time
    BLOCK_H: int  # columns of each
    ALIGNED: bool  # whether rows are a multiple of 16 bytes


@triton.jit(do_not_specialize=["num_rows", "max_tokens", "last_row"])
def sum_expert_rows_kernel(
    rows_of,  # ExpertSums
    context,
    num_rows,  # R * M
    max_tokens,  # M
    last_row,  # of y: no handle leads beyond it
    hidden,
    SIZES: tl.constexpr,  # ExpertSumSizes
):
    """Add up each received row's rows of y times their weights, in the order of the top-k, in fp32,
    rounded once.

    The weights follow the signatures of the tokens' ranks in their regions: the launch before has
    waited for these.
    """
    if is_broken(context):
        return
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    ranks = tl.arange(0, SIZES.RANKS_PAD)
    column = rows_of.rank_prefix_matrix + tl.load(context + RANK)
    ends = tl.load(column + ranks * num_ranks, mask=ranks < num_ranks, other=num_rows)
    end = tl.minimum(tl.load(column + (num_ranks - 1) * num_ranks), num_rows)
    step = tl.num_programs(0) * SIZES.BLOCK_ROWS
    for first in range(tl.program_id(0) * SIZES.BLOCK_ROWS, end, step):
        rows = first + tl.arange(0, SIZES.BLOCK_ROWS)
        inside = rows < end
        source = tl.sum((ends[None, :] <= rows[:, None]).to(tl.int32), 1)
        source = tl.minimum(source, num_ranks - 1)
        token_idx = tl.load(rows_of.src_idx + rows, mask=inside, other=0)
        token_idx = tl.maximum(tl.minimum(token_idx, max_tokens - 1), 0)
        weights = as_pointer(region(source, context), tl.float32) + SIGNATURE_WORDS
        weights += token_idx * SIZES.NUM_TOPK
        for column_idx in range(0, hidden, SIZES.BLOCK_H):
            columns = column_idx + tl.arange(0, SIZES.BLOCK_H)
            in_row = row_mask(columns, hidden, rows_of.y.dtype.element_ty, SIZES.ALIGNED)
            total = tl.zeros([SIZES.BLOCK_ROWS, SIZES.BLOCK_H], tl.float32)
            for k in tl.static_range(SIZES.NUM_TOPK):
                at = rows_of.dst_row + rows * SIZES.NUM_TOPK + k
                row = tl.minimum(tl.load(at, mask=inside, other=-1), last_row)
                weight = tl.load(weights + k, mask=row >= 0, other=0.0)
                from_row = row_pointers(
                    rows_of.y + row.to(tl.int64) * hidden, columns, SIZES.ALIGNED
                )
                values = tl.load(from_row, mask=(row >= 0)[:, None] & in_row[None, :], other=0.0)
                total += values.to(tl.float32) * weight[:, None]
            to = row_pointers(rows_of.out + rows.to(tl.int64) * hidden, columns, SIZES.ALIGNED)
            values = round_to(total, rows_of.out.dtype.element_ty)
            tl.store(to, values, mask=inside[:, None] & in_row[None, :])
