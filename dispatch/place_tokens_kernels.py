"""The kernel that numbers the rows of experts by which ElasticBuffer's tokens travel.

No atomics decide on a row, so the same routing always gives the same rows.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device.context import NUM_RANKS, RANK
from ..device.lang import device_function
from .describe_received_kernels import put_counts
from .place_rows_kernels import add_number_in_block


class ExpertNumbers(NamedTuple):
    """The numbers of the rows of all experts of all ranks, in their order."""

    of_tokens: tl.tensor  # int64 [T, K]: the row of each k of this rank's tokens, or -1
    begins: tl.tensor  # int32 [E + 1]: the first row of each expert; the end of all


class PlaceTokensSizes(NamedTuple):
    """Compile-time constants of `place_tokens_kernel`."""

    NUM_TOPK: Any
    TOPK_PAD: Any
    EXPERTS_PAD: Any
    LOCAL_PAD: Any
    BLOCK_TOKENS: Any
    STEP: Any


@triton.jit(do_not_specialize=["num_tokens", "alignment"])
def place_tokens_kernel(
    topk_idx,  # int64 [T, K]
    earlier_counts,  # int32 [B, E + R], `block_counts` of `layout_sum_kernel`
    counts,  # launch.Counts
    numbers,  # ExpertNumbers, out
    places,  # Places, out, but for the metadata
    stats,  # int32 [L]: the rows of each local expert are added to it; or None
    context,
    num_tokens,
    num_local,  # L
    alignment,  # the rows of each expert begin at its multiples
    SIZES: tl.constexpr,  # PlaceTokensSizes
):
    """Program b numbers the rows of the tokens of block b, token by token, k by k; the blocks are
    those of `layout_kernel`. A rank's experts have the numbers from the first row of its first
    expert on: less that, a number is the place of a row there. Program 0 also writes what this
    rank knows of the rows that it gets.

    Example, 2 ranks of 2 experts, alignment 2, topk_idx [[0, 3], [1, 0], [2, -1], [0, -1]] on rank
    0 and [[3, 0]] on rank 1: experts get 4, 1, 1 and 2 rows, which begin at 0, 4, 6 and 8, and
    of_tokens is [[0, 8], [4, 1], [6, -1], [2, -1]] on rank 0 and [[9, 3]] on rank 1. Rank 1 has
    rows 6 to 9, at its places 0 to 3.
    """
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    num_experts = num_local * num_ranks
    _, begin = _rows_of_group(counts.group_counts, num_experts, alignment, SIZES)
    if tl.program_id(0) == 0:
        # fmt: off
        _put_own(
            begin, counts, numbers.begins, places, stats, context, num_local,
            num_experts, alignment, SIZES,
        )
        # fmt: on
    BLOCK: tl.constexpr = SIZES.BLOCK_TOKENS * SIZES.TOPK_PAD
    first = tl.program_id(0) * SIZES.BLOCK_TOKENS
    items = tl.arange(0, BLOCK)
    tokens = first + items // SIZES.TOPK_PAD
    k = items % SIZES.TOPK_PAD
    inside = (tokens < num_tokens) & (k < SIZES.NUM_TOPK)
    at = tokens.to(tl.int64) * SIZES.NUM_TOPK + k
    wide = tl.load(topk_idx + at, mask=inside, other=-1)
    valid = (wide >= 0) & (wide < num_experts)
    ids = tl.where(valid, wide, 0).to(tl.int32)
    before = earlier_counts + tl.program_id(0) * (num_experts + num_ranks) + ids
    number = tl.gather(begin, ids, 0) + tl.load(before, mask=valid, other=0)
    number += tl.load(counts.earlier_ranks + ids, mask=valid, other=0)
    # fmt: off
    number = add_number_in_block(
        number, topk_idx, wide, first, num_tokens, SIZES.NUM_TOPK, SIZES.TOPK_PAD, BLOCK, SIZES.STEP
    )
    # fmt: on
    tl.store(numbers.of_tokens + at, tl.where(valid, number, -1).to(tl.int64), mask=inside)


@device_function
def _rows_of_group(group_counts, num_experts, alignment, SIZES: tl.constexpr):
    """(rows of each expert with padding, their first one), [EXPERTS_PAD]."""
    experts = tl.arange(0, SIZES.EXPERTS_PAD)
    total = tl.load(group_counts + experts, mask=experts < num_experts, other=0)
    aligned = tl.cdiv(total, alignment) * alignment
    return aligned, tl.cumsum(aligned, 0) - aligned


@device_function
def _put_own(
    begin, counts, begins, places, stats, context, num_local, num_experts, alignment,
    SIZES: tl.constexpr,
):  # fmt: skip
    """What program 0 writes; see `place_tokens_kernel`."""
    experts = tl.arange(0, SIZES.EXPERTS_PAD)
    aligned, _ = _rows_of_group(counts.group_counts, num_experts, alignment, SIZES)
    tl.store(begins + experts, begin, mask=experts < num_experts)
    tl.store(begins + num_experts + experts, tl.sum(aligned, 0), mask=experts == 0)
    rank = tl.load(context + RANK).to(tl.int32)
    local = tl.arange(0, SIZES.LOCAL_PAD)
    real = local < num_local
    at = counts.group_counts + rank * num_local + local
    total = tl.load(at, mask=real, other=0)
    aligned = tl.cdiv(total, alignment) * alignment
    ends = tl.cumsum(aligned, 0) - aligned + total
    put_counts(ends, total, places, stats, counts.rank_prefix_matrix, num_local, context)
