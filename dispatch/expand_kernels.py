"""Copies of received rows in the order of experts, made while other rows arrive."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device.context import PHASE_OVERFLOW, RANK
from ..device.internode import BOTH
from ..device.lang import (
    as_pointer,
    current_epoch,
    device_function,
    is_broken,
    put,
    report_abandoned,
    report_failure,
    row_mask,
    row_pointers,
)
from ..device.programs import claim, claim_next, finish_call, is_last_program, pdl_wait
from ..device.slots import payload_address, rows_in_region
from .receive_kernels import (
    clear_rest,
    most_received,
    num_blocks,
    put_src_metadata,
    receive_block,
    report_overflow,
)

EXPERTS = tl.constexpr(16)
"""Experts that a number is compared with at a time."""


class Sent(NamedTuple):
    """What this rank sent, and where the rows that it receives come from."""

    x: tl.tensor  # vectors [T, NUM_VECS], from which rows that it sent to itself are copied
    rank_prefix_matrix: tl.tensor  # int32 [R, R]


class ExpandedRows(NamedTuple):
    """Rows in the order of experts."""

    x: tl.tensor  # vectors [M, NUM_VECS]
    scales: (
        tl.tensor
    )  # int32 [M, NUM_SCALES], or [NUM_SCALES, scale_rows] if that is not 0; or None
    weights: tl.tensor  # float32 [M], or None


class ReceivedPlaces(NamedTuple):
    """Where received rows come from and go. A dispatch with a handle has src_metadata alone, and
    reads it. A new dispatch writes the first three from the numbers that come with rows."""

    src_metadata: tl.tensor  # int32 [N, 2 + NUM_TOPK], see `reference.place`
    topk_idx: tl.tensor = None  # int64 [N, NUM_TOPK]
    src_idx: tl.tensor = None  # int32 [N]
    begins: tl.tensor = None  # int32 [E + 1], see `place_tokens_kernels.ExpertNumbers`
    kept_idx: tl.tensor = None  # as in `receive.Received`: None, as callers get no topk_idx


class ExpandSizes(NamedTuple):
    """Compile-time constants of `expand_rows_kernel`."""

    NUM_TOPK: Any
    TOPK_PAD: Any
    NUM_LOCAL: Any  # experts of a rank in a new dispatch, 0 in one with a handle
    NUM_VECS: Any
    NUM_SCALES: Any
    SCALES_PAD: Any
    CHUNK_ROWS: Any  # rows that share a flag
    BLOCK_ROWS: Any
    BLOCK_VECS: Any
    ALIGNED: Any  # whether rows are a multiple of 16 bytes


@triton.jit(
    do_not_specialize=[
        *("num_push_programs", "max_rows", "num_expanded", "scale_rows", "max_tokens"),
    ]
)
def expand_rows_kernel(
    sent,  # Sent
    places,  # ReceivedPlaces, out in a new dispatch
    out,  # ExpandedRows
    context,
    num_push_programs,
    max_rows,  # N
    num_expanded,  # M
    scale_rows,
    max_tokens,  # of a rank
    row,  # slots.Row
    SIZES: tl.constexpr,  # ExpandSizes
    PDL: tl.constexpr,
):
    """Copy each row that arrives, its scales and its weights to the rows of its experts, and in a
    new dispatch write its places. Rows of `out` that no row goes to are not written. The host is
    told at the end where there is no room for all.

    Its two launches share the work as those of `collect_kernel`, whose memory order it has: the
    first one begins while `num_push_programs` push, and reads what flags guard, and what was
    complete before the push began: rank_prefix_matrix, x, and places or begins. For what
    `place_tokens_kernel` writes that holds because `metadata_kernel`, or on several nodes
    `send_rows_kernel`, waits for its end before it lets the next launch begin.

    Example, that of `place_tokens_kernel`, max_tokens 4: rank 0 gets tokens A B D of rank 0 and E
    of rank 1, with the numbers [0, 8], [4, 1], [2, -1] and [9, 3]. Its own rows are 0 to 5:
    src_metadata [0, 0, 0, -1], [1, 1, 4, 1], [3, 0, 2, -1], [4, 3, -1, 3], ids [0, -1], [1, 0],
    [0, -1], [-1, 0], and `out` A B D E B and a row of padding.
    """
    prefix, most_rows = sent.rank_prefix_matrix, most_received(sent.rank_prefix_matrix, context)
    region_rows = rows_in_region(row, context, SIZES.CHUNK_ROWS)
    end = num_blocks(most_rows, region_rows, context, SIZES.BLOCK_ROWS)
    work_idx = claim(context)
    while work_idx < end:
        # fmt: off
        block = receive_block(
            work_idx, prefix, max_rows, region_rows, BOTH, row, context, SIZES
        )
        if SIZES.NUM_LOCAL > 0:
            _place_block(block, places, num_expanded, max_tokens, row, context, SIZES)
            tl.debug_barrier()  # other threads read what is written here
        _expand_block(
            sent.x, block, places.src_metadata, out, num_expanded, scale_rows, row, context, SIZES
        )
        # fmt: on
        work_idx = claim_next(num_push_programs, context)
    pdl_wait(PDL)
    if num_push_programs > 0:
        return
    if SIZES.NUM_LOCAL > 0:
        clear_rest(places, prefix, max_rows, context, SIZES)
    if is_broken(context):
        report_abandoned(context)
    elif is_last_program(context):
        report_overflow(prefix, most_rows, max_rows, region_rows, context)
        if SIZES.NUM_LOCAL > 0:
            first, last = _own_numbers(places, context, SIZES)
            if last - first > num_expanded:
                rank = tl.load(context + RANK).to(tl.int32)
                report_failure(rank, current_epoch(context), context, PHASE_OVERFLOW)
        finish_call(context)


@device_function
def _own_numbers(places, context, SIZES: tl.constexpr):
    """[first, end) of the numbers of this rank's expert rows."""
    begins = places.begins + tl.load(context + RANK) * SIZES.NUM_LOCAL
    return tl.load(begins), tl.load(begins + SIZES.NUM_LOCAL)


@device_function
def _place_block(block, places, num_expanded, max_tokens, row, context, SIZES: tl.constexpr):
    """Write where a block of rows comes from and goes, and the local ids of its experts, from the
    numbers of expert rows that came in the place of ids."""
    k = tl.arange(0, SIZES.TOPK_PAD)
    is_item = (k < SIZES.NUM_TOPK)[None, :]
    has = block.arrived[:, None] & is_item
    at = as_pointer(block.address + row.ids, tl.int32)[:, None] + k[None, :]
    number = tl.load(at, mask=has, other=-1)
    begins = places.begins + tl.load(context + RANK) * SIZES.NUM_LOCAL
    first, end = _own_numbers(places, context, SIZES)
    is_here = (number >= first) & (number < end)
    # The expert is the last one that begins no later: those without rows begin with the next one.
    expert = tl.full([SIZES.BLOCK_ROWS, SIZES.TOPK_PAD], -1, tl.int32)
    for start in range(0, SIZES.NUM_LOCAL, EXPERTS):
        experts = start + tl.arange(0, EXPERTS)
        begin = tl.load(begins + experts, mask=experts < SIZES.NUM_LOCAL, other=0x7FFFFFFF)
        is_no_later = begin[None, None, :] <= number[:, :, None]
        expert += tl.sum(is_no_later.to(tl.int32), 2)
    rows, has_room = block.dst_row, block.has_room[:, None] & is_item
    to = places.topk_idx + rows.to(tl.int64)[:, None] * SIZES.NUM_TOPK + k[None, :]
    tl.store(to, tl.where(is_here, expert, -1).to(tl.int64), mask=has_room)
    tl.store(places.src_idx + rows, block.token_idx, mask=block.arrived)
    slots = tl.where(is_here & (number - first < num_expanded), number - first, -1)
    put_src_metadata(places, block, is_here, slots, max_tokens, SIZES)


@device_function
def _expand_block(
    x, block, src_metadata, out, num_expanded, scale_rows, row, context, SIZES: tl.constexpr
):
    """Copy a `receive_kernels.Block` of rows to the rows of their experts. Their numbers are read
    each time: K for each row, and addresses, would not fit into registers."""
    slots_at = src_metadata + block.dst_row.to(tl.int64) * (2 + SIZES.NUM_TOPK) + 2
    if SIZES.NUM_SCALES > 0:
        _expand_scales(block, slots_at, out.scales, num_expanded, scale_rows, row, SIZES)
    if out.weights is not None:
        _expand_weights(block, slots_at, out.weights, num_expanded, row, SIZES)
    dtype: tl.constexpr = out.x.dtype.element_ty
    payload = payload_address(
        x, block.source, block.address, block.token_idx, SIZES.NUM_VECS, context
    )
    source = as_pointer(payload, dtype)
    for start in range(0, SIZES.NUM_VECS, SIZES.BLOCK_VECS):
        vecs = start + tl.arange(0, SIZES.BLOCK_VECS)
        in_row = row_mask(vecs, SIZES.NUM_VECS, dtype, SIZES.ALIGNED)[None, :]
        from_row = row_pointers(source, vecs, SIZES.ALIGNED)
        values = tl.load(from_row, mask=block.arrived[:, None] & in_row)
        for k in tl.static_range(SIZES.NUM_TOPK):
            slot = _slot(slots_at + k, block.arrived, num_expanded)
            to = out.x + slot.to(tl.int64) * SIZES.NUM_VECS
            is_copy = (slot >= 0)[:, None] & in_row
            put(row_pointers(to, vecs, SIZES.ALIGNED), values, is_copy)


@device_function
def _expand_scales(
    block, slots_at, scales, num_expanded, scale_rows, row, SIZES: tl.constexpr
):  # fmt: skip
    """Copy the scales of a block of rows."""
    columns = tl.arange(0, SIZES.SCALES_PAD)
    has = block.arrived[:, None] & (columns < SIZES.NUM_SCALES)[None, :]
    at = as_pointer(block.address + row.scales, tl.int32)[:, None] + columns[None, :]
    values = tl.load(at, mask=has)
    for k in tl.static_range(SIZES.NUM_TOPK):
        slot = _slot(slots_at + k, block.arrived, num_expanded)
        to = _scale_pointers(scales, slot, columns, scale_rows, SIZES)
        put(to, values, has & (slot >= 0)[:, None])


@device_function
def _expand_weights(block, slots_at, weights, num_expanded, row, SIZES: tl.constexpr):
    """Copy the weights of a block of rows."""
    k = tl.arange(0, SIZES.TOPK_PAD)
    has = block.arrived[:, None] & (k < SIZES.NUM_TOPK)[None, :]
    slot = _slot(slots_at[:, None] + k[None, :], has, num_expanded)
    at = as_pointer(block.address + row.weights, tl.float32)[:, None] + k[None, :]
    put(weights + slot, tl.load(at, mask=slot >= 0), slot >= 0)


@device_function
def _slot(at, mask, num_expanded):
    """The rows of `out` at these pointers, -1 where there is none. A handle that a caller made up
    leads to no other memory."""
    slot = tl.load(at, mask=mask, other=-1)
    return tl.where((slot >= 0) & (slot < num_expanded), slot, -1)


@triton.jit(do_not_specialize=["num_expanded", "scale_rows", "num_local", "alignment"])
def zero_rows_kernel(
    psum_per_expert,  # int32 [L], where the rows of each expert end
    out,  # ExpandedRows
    num_expanded,  # M
    scale_rows,
    num_local,  # L
    alignment,  # see `place_tokens_kernel`
    SIZES: tl.constexpr,  # ExpandSizes
):
    """Write 0 to the rows between those of experts, their scales and weights."""
    for expert in range(tl.program_id(0), num_local, tl.num_programs(0)):
        begin = tl.load(psum_per_expert + expert)
        end = tl.minimum(tl.cdiv(begin, alignment) * alignment, num_expanded)
        for first in range(begin, end, SIZES.BLOCK_ROWS):
            rows = first + tl.arange(0, SIZES.BLOCK_ROWS)
            inside = (rows >= 0) & (rows < end)
            to = out.x + rows.to(tl.int64) * SIZES.NUM_VECS
            for start in range(0, SIZES.NUM_VECS, SIZES.BLOCK_VECS):
                vecs = start + tl.arange(0, SIZES.BLOCK_VECS)
                in_row = row_mask(vecs, SIZES.NUM_VECS, out.x.dtype.element_ty, SIZES.ALIGNED)
                put(row_pointers(to, vecs, SIZES.ALIGNED), 0, inside[:, None] & in_row[None, :])
            if SIZES.NUM_SCALES > 0:
                columns = tl.arange(0, SIZES.SCALES_PAD)
                has = inside[:, None] & (columns < SIZES.NUM_SCALES)[None, :]
                put(_scale_pointers(out.scales, rows, columns, scale_rows, SIZES), 0, has)
            if out.weights is not None:
                put(out.weights + rows, 0.0, inside)


@device_function
def _scale_pointers(scales, rows, columns, scale_rows, SIZES: tl.constexpr):
    """[B, C] pointers to the scales of rows."""
    row_stride = tl.where(scale_rows > 0, 1, SIZES.NUM_SCALES)
    column_stride = tl.where(scale_rows > 0, scale_rows, 1)
    at = (rows.to(tl.int64) * row_stride)[:, None]
    return scales + at + (columns.to(tl.int64) * column_stride)[None, :]
