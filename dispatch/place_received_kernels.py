"""The places of received rows in the order of experts.

No atomics decide on a row, so the same routing always gives the same places.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device.context import NUM_RANKS, PHASE_OVERFLOW, RANK
from ..device.lang import current_epoch, device_function, report_failure
from .place_rows_kernels import add_number_in_block


class ReceivedIds(NamedTuple):
    """What came with the received rows that decides on their places."""

    topk_idx: tl.tensor  # int64 [N, K], local ids, -1 for none
    src_idx: tl.tensor  # int32 [N]


class Places(NamedTuple):
    """Where received rows come from, and where they go; see `reference.place`."""

    src_metadata: tl.tensor  # int32 [N, 2 + K]
    psum_per_expert: tl.tensor  # int32 [L]
    num_per_expert: tl.tensor  # int32 [L]
    psum_per_rank: tl.tensor  # int32 [R]


class PlaceReceivedSizes(NamedTuple):
    """Compile-time constants of the kernels that find places."""

    NUM_TOPK: Any
    TOPK_PAD: Any
    EXPERTS_PAD: Any
    BLOCK_ROWS: Any
    BLOCK_PROGRAMS: Any  # programs whose counts are read at a time
    STEP: Any


@triton.jit(do_not_specialize=["num_rows"])
def copy_ids_kernel(
    topk_idx,  # int64 [N, K]
    copy,  # int64 [N, K], out
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
    received,  # ReceivedIds
    rank_prefix_matrix,  # int32 [R, R]
    group_counts,  # int32 [E]: rows of all ranks for each expert
    places,  # Places, out
    stats,  # int32 [L]: the rows of each expert are added to it; or None
    context,
    num_rows,  # N
    num_local,  # L
    alignment,
    max_tokens,  # of a rank
    SIZES: tl.constexpr,  # PlaceReceivedSizes
):
    """Say of each received row where it comes from, how many rows each expert has, and the running
    total of these, each padded to a multiple of the alignment. No row gets a place."""
    end_received = num_received(rank_prefix_matrix, num_rows, context)
    begin, end = _share(end_received)
    if tl.program_id(0) == 0:
        experts = tl.arange(0, SIZES.EXPERTS_PAD)
        at = group_counts + tl.load(context + RANK) * num_local + experts
        total = tl.load(at, mask=experts < num_local, other=0)
        ends = tl.cumsum(tl.cdiv(total, alignment) * alignment, 0)
        _put_counts(ends, total, places, stats, rank_prefix_matrix, num_local, context, SIZES)
    slot = tl.full([SIZES.BLOCK_ROWS * SIZES.TOPK_PAD], -1, tl.int32)
    for first in range(begin, end, SIZES.BLOCK_ROWS):
        ids, _ = _block_ids(received.topk_idx, first, end, num_local, SIZES)
        # fmt: off
        _put_metadata(
            received.src_idx, first, end, ids, slot, places, rank_prefix_matrix, context,
            max_tokens, SIZES,
        )
        # fmt: on
    _clear_metadata(places.src_metadata, end_received, num_rows, SIZES)


@triton.jit(do_not_specialize=["num_rows", "num_local_experts"])
def count_received_kernel(
    topk_idx,  # int64 [N, K]
    rank_prefix_matrix,  # int32 [R, R]
    counts,  # int32 [programs, L], out
    context,
    num_rows,  # N
    num_local_experts,
    SIZES: tl.constexpr,  # PlaceReceivedSizes
):
    """Count the experts of each program's share of the received rows."""
    begin, end = _share(num_received(rank_prefix_matrix, num_rows, context))
    experts = tl.arange(0, SIZES.EXPERTS_PAD)
    total = tl.zeros([SIZES.EXPERTS_PAD], tl.int32)
    for first in range(begin, end, SIZES.BLOCK_ROWS):
        ids, _ = _block_ids(topk_idx, first, end, num_local_experts, SIZES)
        total += _histogram(ids, SIZES)
    to = counts + tl.program_id(0) * num_local_experts + experts
    tl.store(to, total, mask=experts < num_local_experts)


@triton.jit(do_not_specialize=["num_rows", "num_expanded", "alignment", "max_tokens"])
def place_received_kernel(
    received,  # ReceivedIds
    rank_prefix_matrix,  # int32 [R, R]
    counts,  # int32 [programs, L], see `count_received_kernel`
    places,  # Places, out
    stats,  # int32 [L]: the rows of each expert are added to it; or None
    context,
    num_rows,  # N
    num_expanded,  # rows that there is room for
    num_local,  # L
    alignment,  # an expert's rows begin at its multiples
    max_tokens,  # of a rank
    SIZES: tl.constexpr,  # PlaceReceivedSizes
):
    """Say of each received row where it comes from and which row it is among those of each of its
    experts. Programs have the shares of `count_received_kernel`.

    Never gives a place beyond num_expanded: the host is told where there are more rows.
    """
    end_received = num_received(rank_prefix_matrix, num_rows, context)
    begin, end = _share(end_received)
    total, before = _sum_counts(counts, num_local, SIZES)
    aligned = tl.cdiv(total, alignment) * alignment
    first_row = tl.cumsum(aligned, 0) - aligned
    if tl.program_id(0) == 0:
        ends = first_row + total
        _put_counts(ends, total, places, stats, rank_prefix_matrix, num_local, context, SIZES)
        if tl.sum(aligned, 0) > num_expanded:
            epoch = current_epoch(context)
            report_failure(tl.load(context + RANK), epoch, context, PHASE_OVERFLOW)
    running = first_row + before
    BLOCK: tl.constexpr = SIZES.BLOCK_ROWS * SIZES.TOPK_PAD
    for first in range(begin, end, SIZES.BLOCK_ROWS):
        ids, wide = _block_ids(received.topk_idx, first, end, num_local, SIZES)
        slot = tl.gather(running, tl.maximum(ids, 0), 0)
        # fmt: off
        slot = add_number_in_block(
            slot, received.topk_idx, wide, first, end, SIZES.NUM_TOPK, SIZES.TOPK_PAD, BLOCK,
            SIZES.STEP,
        )
        slot = tl.where((ids >= 0) & (slot < num_expanded), slot, -1)
        _put_metadata(
            received.src_idx, first, end, ids, slot, places, rank_prefix_matrix, context,
            max_tokens, SIZES,
        )
        # fmt: on
        running += _histogram(ids, SIZES)
    _clear_metadata(places.src_metadata, end_received, num_rows, SIZES)


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
def _share(num_rows):
    """[begin, end) of this program's rows: programs have as many, in order."""
    per_program = tl.cdiv(num_rows, tl.num_programs(0))
    begin = tl.minimum(tl.program_id(0) * per_program, num_rows)
    return begin, tl.minimum(begin + per_program, num_rows)


@device_function
def _block_ids(topk_idx, first, end, num_local_experts, SIZES: tl.constexpr):
    """(local ids int32 [BLOCK_ROWS * TOPK_PAD], -1 for none; as they are stored, int64)."""
    items = tl.arange(0, SIZES.BLOCK_ROWS * SIZES.TOPK_PAD)
    rows, k = first + items // SIZES.TOPK_PAD, items % SIZES.TOPK_PAD
    inside = (rows < end) & (k < SIZES.NUM_TOPK)
    at = topk_idx + rows.to(tl.int64) * SIZES.NUM_TOPK + k
    wide = tl.load(at, mask=inside, other=-1)
    valid = (wide >= 0) & (wide < num_local_experts)
    return tl.where(valid, wide, -1).to(tl.int32), wide


@device_function
def _histogram(ids, SIZES: tl.constexpr):
    """How often each expert is among local ids."""
    return tl.histogram(tl.maximum(ids, 0), SIZES.EXPERTS_PAD, mask=ids >= 0)


@device_function
def _sum_counts(counts, num_local_experts, SIZES: tl.constexpr):
    """(rows of each expert, those in the shares of programs before this one), [EXPERTS_PAD]."""
    experts = tl.arange(0, SIZES.EXPERTS_PAD)
    total = tl.zeros([SIZES.EXPERTS_PAD], tl.int32)
    before = tl.zeros([SIZES.EXPERTS_PAD], tl.int32)
    for first in range(0, tl.num_programs(0), SIZES.BLOCK_PROGRAMS):
        program = first + tl.arange(0, SIZES.BLOCK_PROGRAMS)
        inside = (program < tl.num_programs(0))[:, None] & (experts < num_local_experts)[None, :]
        at = counts + program[:, None] * num_local_experts + experts[None, :]
        found = tl.load(at, mask=inside, other=0)
        total += tl.sum(found, 0)
        before += tl.sum(tl.where((program < tl.program_id(0))[:, None], found, 0), 0)
    return total, before


@device_function
def _put_counts(
    ends, total, places, stats, rank_prefix_matrix, num_local, context, SIZES: tl.constexpr
):
    """Write where the rows of experts end and how many these have, add these to the stats, and
    write where the rows of each source rank end."""
    experts = tl.arange(0, SIZES.EXPERTS_PAD)
    real = experts < num_local
    tl.store(places.psum_per_expert + experts, ends, mask=real)
    tl.store(places.num_per_expert + experts, total, mask=real)
    if stats is not None:
        tl.store(stats + experts, tl.load(stats + experts, mask=real) + total, mask=real)
    for rank in range(0, tl.load(context + NUM_RANKS).to(tl.int32)):
        tl.store(places.psum_per_rank + rank, _end_of(rank, rank_prefix_matrix, context))


@device_function
def _put_metadata(
    src_idx, first, end, ids, slot, places, rank_prefix_matrix, context, max_tokens,
    SIZES: tl.constexpr,
):  # fmt: skip
    """Write the metadata of a block of received rows, see `reference.place`."""
    rows = first + tl.arange(0, SIZES.BLOCK_ROWS)
    inside = rows < end
    source = tl.zeros([SIZES.BLOCK_ROWS], tl.int32)
    for rank in range(0, tl.load(context + NUM_RANKS).to(tl.int32) - 1):
        source += (rows >= _end_of(rank, rank_prefix_matrix, context)).to(tl.int32)
    k = tl.arange(0, SIZES.TOPK_PAD)
    is_here = tl.reshape(ids, [SIZES.BLOCK_ROWS, SIZES.TOPK_PAD]) >= 0
    last_k = tl.max(tl.where(is_here, k[None, :], -1), 1)
    row = places.src_metadata + rows.to(tl.int64) * (2 + SIZES.NUM_TOPK)
    tl.store(row, source * max_tokens + tl.load(src_idx + rows, mask=inside), mask=inside)
    tl.store(row + 1, source * SIZES.NUM_TOPK + last_k, mask=inside)
    slots = tl.reshape(slot, [SIZES.BLOCK_ROWS, SIZES.TOPK_PAD])
    is_slot = inside[:, None] & (k < SIZES.NUM_TOPK)[None, :]
    tl.store(row[:, None] + 2 + k[None, :], slots, mask=is_slot)


@device_function
def _clear_metadata(src_metadata, begin, end, SIZES: tl.constexpr):
    """Write -1 for rows for which there is room and that did not come."""
    WIDTH: tl.constexpr = SIZES.NUM_TOPK + 2
    BLOCK: tl.constexpr = SIZES.BLOCK_ROWS * SIZES.TOPK_PAD
    memory = src_metadata + begin.to(tl.int64) * WIDTH
    size = (end - begin).to(tl.int64) * WIDTH
    for first in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
        items = first + tl.arange(0, BLOCK)
        tl.store(memory + items, -1, mask=items < size)
