"""Copies of received rows in the order of experts, made while other rows arrive."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device.internode import BOTH
from ..device.lang import (
    as_pointer,
    device_function,
    is_broken,
    put,
    report_abandoned,
    row_mask,
    row_pointers,
)
from ..device.programs import claim, claim_next, finish_call, is_last_program, pdl_wait
from ..device.slots import payload_address
from .receive_kernels import most_received, num_blocks, receive_block, report_overflow


class Sent(NamedTuple):
    """What this rank sent, and where the rows that it receives come from."""

    x: tl.tensor  # vectors [T, NUM_VECS], from which rows that it sent to itself are copied
    rank_prefix_matrix: tl.tensor  # int32 [R, R]


class ExpandedRows(NamedTuple):
    """Rows in the order of experts."""

    x: tl.tensor  # vectors [M, NUM_VECS]
    scales: tl.tensor  # int32 [M * NUM_SCALES], see BY_COLUMN, or None
    weights: tl.tensor  # float32 [M], or None


class ExpandSizes(NamedTuple):
    """Compile-time constants of `expand_rows_kernel`."""

    NUM_TOPK: Any
    NUM_VECS: Any
    NUM_SCALES: Any
    SCALES_PAD: Any
    CHUNK_ROWS: Any  # rows that share a flag
    BLOCK_ROWS: Any
    BLOCK_VECS: Any
    ALIGNED: Any  # whether rows are a multiple of 16 bytes
    BY_COLUMN: Any  # scales are [NUM_SCALES, scale_rows], else [M, NUM_SCALES]


@triton.jit(
    do_not_specialize=[
        *("num_push_programs", "max_rows", "region_rows", "num_expanded", "scale_rows"),
    ]
)
def expand_rows_kernel(
    sent,  # Sent
    src_metadata,  # int32 [N, 2 + NUM_TOPK], see `reference.place`
    out,  # ExpandedRows
    context,
    num_push_programs,
    max_rows,  # N
    region_rows,
    num_expanded,  # M
    scale_rows,
    row,  # slots.Row
    SIZES: tl.constexpr,  # ExpandSizes
    PDL: tl.constexpr,
):
    """Copy each row that arrives, its scales and its weights to the rows of its experts. Rows of
    `out` that no row goes to are not written.

    Its two launches share the work as those of `collect_kernel`, whose memory order it has: the
    first one begins while `num_push_programs` push, and reads what flags guard, and src_metadata,
    which was complete before the push let it begin."""
    if num_push_programs == 0:
        pdl_wait(PDL)
    most_rows = most_received(sent.rank_prefix_matrix, context)
    end = num_blocks(most_rows, region_rows, context, SIZES.BLOCK_ROWS)
    work_idx = claim(context)
    while work_idx < end:
        # fmt: off
        block = receive_block(
            work_idx, sent.rank_prefix_matrix, max_rows, region_rows, BOTH, row, context, SIZES
        )
        _expand_block(
            sent.x, block, src_metadata, out, num_expanded, scale_rows, row, context, SIZES
        )
        # fmt: on
        work_idx = claim_next(num_push_programs, context)
    if num_push_programs > 0:
        pdl_wait(PDL)
        return
    if is_broken(context):
        report_abandoned(context)
    elif is_last_program(context):
        report_overflow(sent.rank_prefix_matrix, most_rows, max_rows, region_rows, context)
        finish_call(context)


@device_function
def _expand_block(
    x, block, src_metadata, out, num_expanded, scale_rows, row, context, SIZES: tl.constexpr
):
    """Copy a `receive_kernels.Block` of rows to the rows of their experts. Their numbers are read
    each time: K for each row, and addresses, would not fit into registers."""
    slots_at = src_metadata + block.dst_row.to(tl.int64) * (2 + SIZES.NUM_TOPK) + 2
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
    if SIZES.NUM_SCALES > 0:
        columns = tl.arange(0, SIZES.SCALES_PAD)
        has = block.arrived[:, None] & (columns < SIZES.NUM_SCALES)[None, :]
        scales = as_pointer(block.address + row.scales, tl.int32)[:, None] + columns[None, :]
        values = tl.load(scales, mask=has)
        for k in tl.static_range(SIZES.NUM_TOPK):
            slot = _slot(slots_at + k, block.arrived, num_expanded)
            to = _scale_pointers(out.scales, slot, columns, scale_rows, SIZES)
            put(to, values, has & (slot >= 0)[:, None])
    if out.weights is not None:
        weights = as_pointer(block.address + row.weights, tl.float32)
        for k in tl.static_range(SIZES.NUM_TOPK):
            slot = _slot(slots_at + k, block.arrived, num_expanded)
            has = slot >= 0
            put(out.weights + slot, tl.load(weights + k, mask=has), has)


@device_function
def _slot(at, mask, num_expanded):
    """The rows of `out` at these pointers, -1 where there is none. A handle that a caller made up
    leads to no other memory."""
    slot = tl.load(at, mask=mask, other=-1)
    return tl.where((slot >= 0) & (slot < num_expanded), slot, -1)


@triton.jit(do_not_specialize=["num_expanded", "scale_rows", "num_local", "alignment"])
def zero_rows_kernel(
    places,  # Places
    out,  # ExpandedRows
    num_expanded,  # M
    scale_rows,
    num_local,  # L
    alignment,  # see `place_received_kernel`
    SIZES: tl.constexpr,  # ExpandSizes
):
    """Write 0 to the rows between those of experts, their scales and weights."""
    for expert in range(tl.program_id(0), num_local, tl.num_programs(0)):
        begin = tl.load(places.psum_per_expert + expert)
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
    if SIZES.BY_COLUMN:
        pointers = scales + rows[:, None] + (columns.to(tl.int64) * scale_rows)[None, :]
    else:
        pointers = scales + (rows.to(tl.int64) * SIZES.NUM_SCALES)[:, None] + columns[None, :]
    return pointers
