"""Where received rows come from, and how many rows experts have."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device.context import NUM_RANKS, RANK
from ..device.lang import device_function


class Places(NamedTuple):
    """Where received rows come from, and where they go; see `reference.place`."""

    src_metadata: tl.tensor  # int32 [N, 2 + K]
    psum_per_expert: tl.tensor  # int32 [L]
    num_per_expert: tl.tensor  # int32 [L]
    psum_per_rank: tl.tensor  # int32 [R]


class DescribeSizes(NamedTuple):
    """Compile-time constants of `describe_received_kernel`."""

    NUM_TOPK: Any
    TOPK_PAD: Any
    EXPERTS_PAD: Any
    BLOCK_ROWS: Any


@triton.jit(do_not_specialize=["num_rows"])
def copy_ids_kernel(
    topk_idx,  # int64 [N, K]
    copy,  # int64 [N, K]
    num_rows,  # N
    NUM_TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy the ids of all rows, also of those past the received ones, which are -1."""
    for first in range(tl.program_id(0) * BLOCK, num_rows * NUM_TOPK, tl.num_programs(0) * BLOCK):
        items = first + tl.arange(0, BLOCK)
        inside = items < num_rows * NUM_TOPK
        tl.store(copy + items, tl.load(topk_idx + items, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_local", "alignment", "max_tokens"])
def describe_received_kernel(
    topk_idx,  # int64 [N, K], local ids, -1 for none
    src_idx,  # int32 [N]
    rank_prefix_matrix,  # int32 [R, R]
    group_counts,  # int32 [E]: rows of all ranks for each expert
    places,  # Places, out
    stats,  # int32 [L]: the rows of each expert are added to it; or None
    context,
    num_rows,  # N
    num_local,  # L
    alignment,
    max_tokens,  # of a rank
    SIZES: tl.constexpr,  # DescribeSizes
):
    """Say of each received row where it comes from, how many rows each expert has, and the running
    total of these, each padded to a multiple of the alignment. No row gets a place."""
    end = num_received(rank_prefix_matrix, num_rows, context)
    if tl.program_id(0) == 0:
        experts = tl.arange(0, SIZES.EXPERTS_PAD)
        at = group_counts + tl.load(context + RANK) * num_local + experts
        total = tl.load(at, mask=experts < num_local, other=0)
        ends = tl.cumsum(tl.cdiv(total, alignment) * alignment, 0)
        put_counts(ends, total, places, stats, rank_prefix_matrix, num_local, context)
    k = tl.arange(0, SIZES.TOPK_PAD)
    no_slots = tl.full([SIZES.BLOCK_ROWS, SIZES.TOPK_PAD], -1, tl.int32)
    step = tl.num_programs(0) * SIZES.BLOCK_ROWS
    for first in range(tl.program_id(0) * SIZES.BLOCK_ROWS, num_rows, step):
        rows = first + tl.arange(0, SIZES.BLOCK_ROWS)
        came = rows < end
        has = came[:, None] & (k < SIZES.NUM_TOPK)[None, :]
        at = topk_idx + rows.to(tl.int64)[:, None] * SIZES.NUM_TOPK + k[None, :]
        is_here = tl.load(at, mask=has, other=-1) >= 0
        source = tl.zeros([SIZES.BLOCK_ROWS], tl.int32)
        for rank in range(0, tl.load(context + NUM_RANKS).to(tl.int32) - 1):
            source += (rows >= _end_of(rank, rank_prefix_matrix, context)).to(tl.int32)
        token_idx = tl.load(src_idx + rows, mask=came, other=0)
        # fmt: off
        put_src_metadata(
            places.src_metadata, rows, rows < num_rows, came, source, token_idx, is_here, no_slots,
            max_tokens, SIZES.NUM_TOPK,
        )
        # fmt: on


@device_function
def put_src_metadata(
    src_metadata, rows, has_room, came, source, token_idx, is_here, slots, max_tokens,
    NUM_TOPK: tl.constexpr,
):  # fmt: skip
    """Write the metadata of received rows (block), see `reference.place`; -1 for those for which
    there is room and that did not come. is_here [B, TOPK_PAD]: where the expert of k is here."""
    k = tl.arange(0, is_here.shape[1])
    last_k = tl.max(tl.where(is_here, k[None, :], -1), 1)
    row = src_metadata + rows.to(tl.int64) * (2 + NUM_TOPK)
    tl.store(row, tl.where(came, source * max_tokens + token_idx, -1), mask=has_room)
    tl.store(row + 1, tl.where(came, source * NUM_TOPK + last_k, -1), mask=has_room)
    is_slot = has_room[:, None] & (k < NUM_TOPK)[None, :]
    tl.store(row[:, None] + 2 + k[None, :], tl.where(came[:, None], slots, -1), mask=is_slot)


@device_function
def num_received(rank_prefix_matrix, num_rows, context):
    """How many rows came; at most num_rows."""
    last = tl.load(context + NUM_RANKS).to(tl.int32) - 1
    return tl.minimum(_end_of(last, rank_prefix_matrix, context), num_rows)


@device_function
def _end_of(rank, rank_prefix_matrix, context):
    """The received row after the last one of a source rank."""
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    return tl.load(rank_prefix_matrix + rank * num_ranks + tl.load(context + RANK).to(tl.int32))


@device_function
def put_counts(ends, total, places, stats, rank_prefix_matrix, num_local, context):
    """Write where the rows of experts end and how many these have, blocks of at least num_local,
    add these to the stats, and write where the rows of each source rank end."""
    experts = tl.arange(0, ends.shape[0])
    real = experts < num_local
    tl.store(places.psum_per_expert + experts, ends, mask=real)
    tl.store(places.num_per_expert + experts, total, mask=real)
    if stats is not None:
        tl.store(stats + experts, tl.load(stats + experts, mask=real) + total, mask=real)
    for rank in range(0, tl.load(context + NUM_RANKS).to(tl.int32)):
        tl.store(places.psum_per_rank + rank, _end_of(rank, rank_prefix_matrix, context))
