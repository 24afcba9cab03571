"""The kernel that gives each token's k a row among those of its expert.

No atomics decide on a row, so the same routing always gives the same rows.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device.context import RANK
from ..device.lang import as_pointer, device_function, is_broken, put
from ..device.programs import pdl_launch_dependents, pdl_wait
from ..device.slots import COUNTS_AT, region
from ..device.tiles import stage_of_row, stage_unit


class RoutedTopk(NamedTuple):
    """The top-k of this rank's tokens, both [T, K]."""

    ids: tl.tensor  # int64
    weights: tl.tensor  # float32, or None: rows come without their weights


class ExpertRowParts(NamedTuple):
    """Where parts of the memory of expert rows begin, in bytes."""

    copies: tl.tensor  # int64 [M]
    weights: tl.tensor  # float32 [M]


class RowBegins(NamedTuple):
    """Where rows begin on all ranks; see `exchange_fused_kernel`."""

    expert_begin: tl.tensor  # int32 [E]
    remote_begin: tl.tensor  # int32 [E]
    num_remote: tl.tensor  # int32 [R]


class RowPlan(NamedTuple):
    """Where the rows of this rank's tokens go."""

    dst_row: tl.tensor  # int32 [T, K]: the row of each k among those of its expert's rank, or -1
    remote_idx: tl.tensor  # int32 [T, K]: its number among that rank's rows from other ranks
    own_order: (
        tl.tensor
    )  # int64 [T * K]: this rank's own rows in their order, dst_row << 32 | token
    to_push: tl.tensor  # int64 [R, S, T]: rows for each rank and stage, dst_row << 32 | token
    num_to_push: tl.tensor  # int64 [R, S]: how many there are


class PlaceSizes(NamedTuple):
    """Compile-time constants of `place_rows_kernel`."""

    NUM_TOPK: Any
    TOPK_PAD: Any
    RANKS: Any
    BLOCK_TOKENS: Any
    STEP: Any


@triton.jit(do_not_specialize=["num_tokens", "num_local_experts", "stage_count"])
def place_rows_kernel(
    topk,  # RoutedTopk
    earlier_counts,  # int32 [B, E + R], `block_counts` of `layout_sum_kernel`
    begins,  # RowBegins
    plan,  # RowPlan, out; num_to_push is 0 before
    expert_rows,  # int64 [R]: address of the expert rows on each rank
    context,
    num_tokens,
    num_local_experts,
    stage_count,
    parts,  # ExpertRowParts
    SIZES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program b places the tokens of block b, token by token, k by k; the blocks are those of
    `layout_kernel`. A k with a bad id has no row.

    A token's first row on another rank is pushed, in the stage of its remote_idx, see
    `tiles.stage_of_row`. Its other rows there are copies: `copies`, int64 [M] on each rank,
    `parts.copies` bytes after the beginning of its expert rows, says for each remote_idx which row
    is a copy of which one, row << 32 | original, and -1 for those pushed. `weights`, a part of the
    same memory, gets the weight of each row, where the call has weights. The flags of
    `push_fused_kernel`, which waits until this kernel has ended, publish both. What they held in
    the call before has been read: the exchange says that all ranks are in this one.

    A PDL launch after `exchange_fused_kernel`, which begins no dependents and has waited for the
    layout: so this kernel reads `earlier_counts` before its `pdl_wait`, and `begins` after it. Or
    after `quantize_rows_kernel`, which lets it begin once the exchange has ended.

    Example, 2 ranks of 2 experts, topk_idx [[0, 3], [2, 3], [3, 0], [1, 1]] on rank 0 and [[2, 3],
    [0, 1]] on rank 1. Rank 0 has rows, as (source, token), (0, 0) (0, 2) (1, 1) | (0, 3) (0, 3)
    (1, 1), and rank 1 (1, 0) (0, 1) | (1, 0) (0, 0) (0, 1) (0, 2). On rank 0 dst_row is [[0, 3],
    [1, 4], [5, 1], [3, 4]], own_order has tokens 0 2 3 3, and token 1 is pushed to rank 1 first,
    where its second row, with remote_idx 2, is a copy: copies of rank 1 are -1 -1 (4 of 1) -1.
    """
    BLOCK: tl.constexpr = SIZES.BLOCK_TOKENS * SIZES.TOPK_PAD
    num_experts = num_local_experts * SIZES.RANKS
    # fmt: off
    tokens, k, inside, ids, index = number_in_expert(
        topk.ids, earlier_counts, num_tokens, num_experts, SIZES.RANKS, SIZES
    )
    # fmt: on
    valid = ids >= 0
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    valid = valid & (is_broken(context) == 0)  # else nobody may have written where rows begin
    begin = tl.load(begins.expert_begin + ids, mask=valid, other=0)
    valid = valid & (begin >= 0)  # else there is no room, and this call sends nothing
    owner = tl.where(valid, ids // num_local_experts, -1)
    is_own = owner == tl.load(context + RANK).to(tl.int32)
    remote = tl.load(begins.remote_begin + ids, mask=valid, other=0)
    dealt, num_own = dealt_index(index, ids, owner, valid, context, SIZES.RANKS)
    dst_row = tl.where(valid, begin + tl.where(is_own, index, num_own + dealt), -1)
    remote_idx = remote + dealt
    tl.store(plan.dst_row + tokens * SIZES.NUM_TOPK + k, dst_row, mask=inside)
    tl.store(plan.remote_idx + tokens * SIZES.NUM_TOPK + k, remote_idx, mask=inside)
    packed = dst_row.to(tl.int64) << 32 | tokens.to(tl.int64)
    tl.store(plan.own_order + (begin - remote + index), packed, mask=is_own)
    # What goes to other ranks.
    is_sent = valid & ~is_own
    original = first_of_token(dst_row, owner, SIZES.BLOCK_TOKENS, SIZES.TOPK_PAD, SIZES.RANKS)
    is_first = is_sent & (dst_row == original)
    unit = stage_unit(tl.load(begins.num_remote + owner, mask=valid, other=1), stage_count)
    part = owner * stage_count + stage_of_row(remote_idx, unit, stage_count)
    one = tl.full([BLOCK], 1, tl.int64)
    counts = plan.num_to_push + part
    number = tl.atomic_add(counts, one, mask=is_first, sem="relaxed", scope="gpu")
    tl.store(plan.to_push + part * num_tokens.to(tl.int64) + number, packed, mask=is_first)
    memory = tl.load(expert_rows + owner, mask=valid, other=0)
    copy = tl.where(is_first, -1, dst_row.to(tl.int64) << 32 | original.to(tl.int64))
    put(as_pointer(memory + parts.copies, tl.int64) + remote_idx, copy, is_sent)
    if topk.weights is not None:
        weight = tl.load(topk.weights + tokens * SIZES.NUM_TOPK + k, mask=valid, other=0.0)
        put(as_pointer(memory + parts.weights, tl.float32) + dst_row, weight, valid)


@device_function
def number_in_expert(
    topk_idx, earlier_counts, num_tokens, num_experts, num_ranks, SIZES: tl.constexpr
):  # fmt: skip
    """The top-k slots of this program's block of tokens, which is one of `layout_kernel`'s, blocks
    [BLOCK_TOKENS * TOPK_PAD]: (token, k, whether there is such a slot, its expert or -1, its number
    among those of this rank for that expert, token by token, k by k).

    SIZES: a `PlaceSizes` or a `PlaceTokensSizes`."""
    BLOCK: tl.constexpr = SIZES.BLOCK_TOKENS * SIZES.TOPK_PAD
    first = tl.program_id(0) * SIZES.BLOCK_TOKENS
    items = tl.arange(0, BLOCK)
    tokens = first + items // SIZES.TOPK_PAD
    k = items % SIZES.TOPK_PAD
    inside = (tokens < num_tokens) & (k < SIZES.NUM_TOPK)
    wide = tl.load(topk_idx + tokens * SIZES.NUM_TOPK + k, mask=inside, other=-1)
    valid = (wide >= 0) & (wide < num_experts)
    ids = tl.where(valid, wide, -1).to(tl.int32)
    at = earlier_counts + tl.program_id(0) * (num_experts + num_ranks) + ids
    index = tl.load(at, mask=valid, other=0)
    # fmt: off
    index = _add_number_in_block(
        index, topk_idx, wide, first, num_tokens, SIZES.NUM_TOPK, SIZES.TOPK_PAD, BLOCK, SIZES.STEP
    )
    # fmt: on
    return tokens, k, inside, ids, index


@device_function
def _add_number_in_block(
    index,
    topk_idx,
    ids,
    first,
    num_tokens,
    NUM_TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """`index` [BLOCK] plus, for each of the top-k slots `ids` [BLOCK] of the tokens from `first`
    on, TOPK_PAD slots for each token: how many slots before it in the block have the same id."""
    items = tl.arange(0, BLOCK)
    for start in tl.static_range(0, BLOCK, STEP):  # unrolled: all reads at once
        others = start + tl.arange(0, STEP)
        other_tokens = first + others // TOPK_PAD
        real = (other_tokens < num_tokens) & (others % TOPK_PAD < NUM_TOPK)
        other_ids = topk_idx + other_tokens * NUM_TOPK + others % TOPK_PAD
        theirs = tl.load(other_ids, mask=real, other=-1)
        is_earlier = (theirs[None, :] == ids[:, None]) & (others[None, :] < items[:, None])
        index += tl.sum(is_earlier.to(tl.int32), 1)
    return index


@device_function
def first_of_token(
    dst_row, owner, BLOCK_TOKENS: tl.constexpr, TOPK_PAD: tl.constexpr, RANKS: tl.constexpr
):
    """For each k, blocks [BLOCK_TOKENS * TOPK_PAD]: the first row of its token on its owner."""
    dst_row = tl.reshape(dst_row, [BLOCK_TOKENS, TOPK_PAD])
    owner = tl.reshape(owner, [BLOCK_TOKENS, TOPK_PAD])
    original = tl.zeros_like(dst_row)
    for rank in tl.static_range(RANKS):
        here = owner == rank
        least = tl.min(tl.where(here, dst_row, 0x7FFFFFFF), 1)
        original = tl.where(here, least[:, None], original)
    return tl.reshape(original, [BLOCK_TOKENS * TOPK_PAD])


@device_function
def dealt_index(index, expert, owner, mask, context, RANKS: tl.constexpr):
    """(number of a row among those that its expert gets from ranks other than the owner, how many
    it gets from the owner itself); the row is number `index` of those from this rank.

    An expert's rows are those of its own rank, then those dealt from the others, as long as these
    have any: the first of the rank before it, of the one before that, ...; then the second of each.
    Sources with 3, 1, 2 rows in this order: rows 0 1 2 | 3 | 4 5; with 2, 3, 2: 0 1 | 2 4 6 | 3 5.
    """
    rank = tl.load(context + RANK).to(tl.int32)
    dealt = tl.zeros_like(index)
    num_own = tl.zeros_like(index)
    for source in tl.static_range(RANKS):
        counts = as_pointer(region(source, context), tl.int32) + COUNTS_AT
        count = tl.load(counts + expert, mask=mask, other=0)
        is_nearer = (owner - source + RANKS) % RANKS < (owner - rank + RANKS) % RANKS
        num_own = tl.where(owner == source, count, num_own)
        dealt += tl.where(owner == source, 0, tl.minimum(index + is_nearer.to(tl.int32), count))
    return dealt, num_own
