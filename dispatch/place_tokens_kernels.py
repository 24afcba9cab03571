"""The kernel that numbers the rows of experts by which ElasticBuffer's tokens travel.

No atomics decide on a row, so the same routing always gives the same rows.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device.context import NUM_RANKS
from ..device.lang import device_function
from ..device.programs import pdl_launch_dependents, pdl_wait
from .place_rows_kernels import number_in_expert


class ExpertNumbers(NamedTuple):
    """The numbers of the rows of all experts of all ranks, in their order."""

    of_tokens: tl.tensor  # int64 [T, K]: the row of each k of this rank's tokens, or -1
    begins: tl.tensor  # int32 [E + 1]: the first row of each expert; the end of all


class PlaceTokensSizes(NamedTuple):
    """Compile-time constants of `place_tokens_kernel`."""

    NUM_TOPK: Any
    TOPK_PAD: Any
    EXPERTS_PAD: Any
    BLOCK_TOKENS: Any
    STEP: Any


@triton.jit(do_not_specialize=["num_tokens", "alignment"])
def place_tokens_kernel(
    topk_idx,  # int64 [T, K]
    earlier_counts,  # int32 [B, E + R], `block_counts` of `layout_sum_kernel`
    counts,  # launch.Counts
    numbers,  # ExpertNumbers, out
    context,
    num_tokens,
    num_local,  # L
    alignment,  # the rows of each expert begin at its multiples
    SIZES: tl.constexpr,  # PlaceTokensSizes
    PDL: tl.constexpr,
):
    """Program b numbers the rows of the tokens of block b, token by token, k by k; the blocks are
    those of `layout_kernel`. A rank's experts have the numbers from the first row of its first
    expert on: less that, a number is the place of a row there.

    A PDL launch after an exchange, or on several nodes after the send plan that follows it. Either
    may let it begin, and began after the layout had ended: so this kernel reads topk_idx and
    earlier_counts before its `pdl_wait`, and counts after it. After that wait all ranks are in the
    call, so the next launch may fill the chip.

    Example, 2 ranks of 2 experts, alignment 2, topk_idx [[0, 3], [1, 0], [2, -1], [0, -1]] on rank
    0 and [[3, 0]] on rank 1: experts get 4, 1, 1 and 2 rows, which begin at 0, 4, 6 and 8, and
    of_tokens is [[0, 8], [4, 1], [6, -1], [2, -1]] on rank 0 and [[9, 3]] on rank 1. Rank 1 has
    rows 6 to 9, at its places 0 to 3.
    """
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    num_experts = num_local * num_ranks
    # fmt: off
    tokens, k, inside, ids, number = number_in_expert(
        topk_idx, earlier_counts, num_tokens, num_experts, num_ranks, SIZES
    )
    # fmt: on
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    begin, end = _rows_of_group(counts.group_counts, num_experts, alignment, SIZES)
    if tl.program_id(0) == 0:
        experts = tl.arange(0, SIZES.EXPERTS_PAD)
        tl.store(numbers.begins + experts, begin, mask=experts < num_experts)
        tl.store(numbers.begins + num_experts, end)
    number += tl.gather(begin, tl.maximum(ids, 0), 0)
    number += tl.load(counts.earlier_ranks + ids, mask=ids >= 0, other=0)
    to = numbers.of_tokens + tokens.to(tl.int64) * SIZES.NUM_TOPK + k
    tl.store(to, tl.where(ids >= 0, number, -1).to(tl.int64), mask=inside)


@device_function
def _rows_of_group(group_counts, num_experts, alignment, SIZES: tl.constexpr):
    """(number of the first row of each expert [EXPERTS_PAD], end of all rows)."""
    experts = tl.arange(0, SIZES.EXPERTS_PAD)
    total = tl.load(group_counts + experts, mask=experts < num_experts, other=0)
    aligned = tl.cdiv(total, alignment) * alignment
    return tl.cumsum(aligned, 0) - aligned, tl.sum(aligned, 0)
