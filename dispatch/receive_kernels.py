"""Dispatch, the receiving half: copy rows out of the slot, or say where they lie."""

import triton
import triton.language as tl

from ..device.context import NUM_RANKS, PHASE_CAPACITY, PHASE_OVERFLOW, RANK
from ..device.lang import (
    as_pointer,
    consume_token,
    current_epoch,
    device_function,
    is_broken,
    put_rows,
    report_abandoned,
    report_failure,
    ticks,
)
from ..device.programs import (
    claim,
    claim_next,
    end_call,
    finish_call,
    is_last_program,
    pdl_wait,
)
from ..device.slots import payload_address, received_rows, region, source_at, wait_rows


@triton.jit(do_not_specialize=["max_rows", "region_rows", "num_push_programs"])
def collect_kernel(
    x,  # vectors [T, num_vecs], what this rank sent
    rank_prefix_matrix,  # int32 [R, R]
    recv_x,  # vectors [N, num_vecs], out
    recv_scales,  # int32 [N, NUM_SCALES], out
    recv_topk_idx,  # int64 [N, NUM_TOPK], out: local ids, -1 where not here
    recv_topk_weights,  # float32 [N, NUM_TOPK], out: 0 where not here
    recv_src_idx,  # int32 [N], out
    context,
    num_push_programs,
    max_rows,
    region_rows,
    num_vecs,
    header_bytes,
    row_bytes,
    scales_offset,
    ids_offset,
    weights_offset,
    token_offset,
    NUM_TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    SCALES_PAD: tl.constexpr,
    CHUNK_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_VECS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy the received rows out of the slot, by source rank, then token.

    Never writes beyond `max_rows`, nor reads beyond `region_rows` of a region. A launch behind a
    push of `num_push_programs` copies what arrives while they push; one with num_push_programs 0
    copies the rest, and its last program finishes the call. Both are launched alike, as one
    compiled kernel.
    """
    if num_push_programs == 0:
        pdl_wait(PDL)
    most_rows = _most_rows(rank_prefix_matrix, context)
    num_blocks = _num_blocks(most_rows, region_rows, context, ROWS)
    block = claim(context)
    while block < num_blocks:
        # fmt: off
        source, to, fits, inside, address = _received_block(
            block, rank_prefix_matrix, max_rows, region_rows, header_bytes, row_bytes, context,
            CHUNK_ROWS, ROWS,
        )
        # fmt: on
        tokens = tl.load(as_pointer(address + token_offset, tl.int32), mask=inside, other=0)
        payload = payload_address(x, source, address, tokens, num_vecs, context)
        put_rows(
            recv_x + to.to(tl.int64) * num_vecs,
            as_pointer(payload, recv_x.dtype.element_ty),
            num_vecs,
            inside,
            ticks(),
            0,
            ALIGNED,
            BLOCK_VECS,
        )
        _collect_metadata(
            recv_scales,
            recv_topk_idx,
            recv_topk_weights,
            recv_src_idx,
            tokens,
            to,
            fits,
            inside,
            address,
            scales_offset,
            ids_offset,
            weights_offset,
            NUM_TOPK,
            TOPK_PAD,
            NUM_SCALES,
            SCALES_PAD,
        )
        block = claim_next(num_push_programs, context)
    if num_push_programs > 0:
        pdl_wait(PDL)
        return
    if NUM_TOPK > 0:
        _clear_rest(rank_prefix_matrix, recv_topk_idx, max_rows, context, NUM_TOPK, TOPK_PAD, ROWS)
    if is_broken(context):
        report_abandoned(context)
    elif is_last_program(context):
        _report_overflow(rank_prefix_matrix, most_rows, max_rows, region_rows, context)
        finish_call(context)


@triton.jit(do_not_specialize=["max_rows", "region_rows"])
def locate_kernel(
    x,  # [T, H], what this rank sent
    rank_prefix_matrix,  # int32 [R, R]
    recv_address,  # int64 [N], out
    recv_scales,  # this and what follows: see `collect_kernel`
    recv_topk_idx,
    recv_topk_weights,
    recv_src_idx,
    context,
    max_rows,
    region_rows,
    hidden,
    header_bytes,
    row_bytes,
    scales_offset,
    ids_offset,
    weights_offset,
    token_offset,
    NUM_TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    SCALES_PAD: tl.constexpr,
    CHUNK_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Wait for all rows and say where each lies, by source rank, then token: in the slot, or in `x`
    where this rank sent it to itself. The slot stays as it is until `release_kernel`."""
    most_rows = _most_rows(rank_prefix_matrix, context)
    num_blocks = _num_blocks(most_rows, region_rows, context, ROWS)
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        # fmt: off
        source, to, fits, inside, address = _received_block(
            block, rank_prefix_matrix, max_rows, region_rows, header_bytes, row_bytes, context,
            CHUNK_ROWS, ROWS,
        )
        # fmt: on
        tokens = tl.load(as_pointer(address + token_offset, tl.int32), mask=inside, other=0)
        payload = payload_address(x, source, address, tokens, hidden, context)
        tl.store(recv_address + to, tl.where(inside, payload, 0), mask=fits)
        _collect_metadata(
            recv_scales,
            recv_topk_idx,
            recv_topk_weights,
            recv_src_idx,
            tokens,
            to,
            fits,
            inside,
            address,
            scales_offset,
            ids_offset,
            weights_offset,
            NUM_TOPK,
            TOPK_PAD,
            NUM_SCALES,
            SCALES_PAD,
        )
    if NUM_TOPK > 0:
        _clear_rest(rank_prefix_matrix, recv_topk_idx, max_rows, context, NUM_TOPK, TOPK_PAD, ROWS)
    if is_broken(context):
        report_abandoned(context)
    elif is_last_program(context):
        _report_overflow(rank_prefix_matrix, most_rows, max_rows, region_rows, context)


@triton.jit
def release_kernel(context):
    """Finish a call whose rows were read in place, once the reads have been issued."""
    end_call(context)


@device_function
def _clear_rest(
    rank_prefix_matrix,
    recv_topk_idx,
    max_rows,
    context,
    NUM_TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Set the ids of rows past the received ones to -1."""
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    column = rank_prefix_matrix + tl.load(context + RANK)
    lanes = tl.arange(0, TOPK_PAD)
    first_row = tl.load(column + (num_ranks - 1) * num_ranks) + tl.program_id(0) * ROWS
    for first in range(first_row, max_rows, tl.num_programs(0) * ROWS):
        rows = first + tl.arange(0, ROWS)
        inside = (rows < max_rows)[:, None] & (lanes < NUM_TOPK)[None, :]
        tl.store(recv_topk_idx + rows[:, None] * NUM_TOPK + lanes[None, :], -1, mask=inside)


@device_function
def _most_rows(rank_prefix_matrix, context):
    """The most rows that any source sends to this rank."""
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    most_rows = 0
    for source in range(0, num_ranks):
        most_rows = max(most_rows, received_rows(rank_prefix_matrix, source, context))
    return most_rows


@device_function
def _num_blocks(most_rows, region_rows, context, ROWS: tl.constexpr):
    """Blocks of ROWS rows to take from all sources."""
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    return tl.cdiv(tl.minimum(most_rows, region_rows), ROWS) * num_ranks


@device_function
def _report_overflow(rank_prefix_matrix, most_rows, max_rows, region_rows, context):
    """Report more received rows than `max_rows` or than a region holds, those there was room for
    being written."""
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    rank = tl.load(context + RANK).to(tl.int32)
    if tl.load(rank_prefix_matrix + (num_ranks - 1) * num_ranks + rank) > max_rows:
        report_failure(rank, current_epoch(context), context, PHASE_OVERFLOW)
    if most_rows > region_rows:
        report_failure(rank, current_epoch(context), context, PHASE_CAPACITY)


@device_function
def _received_block(
    block,
    rank_prefix_matrix,
    max_rows,
    region_rows,
    header_bytes,
    row_bytes,
    context,
    CHUNK_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Wait for a block of ROWS rows, the sources taking turns: (source, their places among all
    received rows, whether there is room for each, whether it came, their addresses in the slot).
    Rows do not come where a wait expires."""
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    rank = tl.load(context + RANK).to(tl.int32)
    source = source_at(block, context)
    rows = block // num_ranks * ROWS + tl.arange(0, ROWS)
    num_rows = received_rows(rank_prefix_matrix, source, context)
    to = tl.load(rank_prefix_matrix + source * num_ranks + rank) - num_rows + rows
    real = rows < tl.minimum(num_rows, region_rows)
    token = wait_rows(source, rows, real, context, CHUNK_ROWS)
    fits = real & (to >= 0) & (to < max_rows)
    base = consume_token(region(source, context) + header_bytes, token)
    return source, to, fits, fits & (token == 1), base + rows.to(tl.int64) * row_bytes


@device_function
def _collect_metadata(
    recv_scales,
    recv_topk_idx,
    recv_topk_weights,
    recv_src_idx,
    tokens,
    to,
    fits,
    inside,
    address,
    scales_offset,
    ids_offset,
    weights_offset,
    NUM_TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    SCALES_PAD: tl.constexpr,
):
    """Copy what came with a block of rows; ids of rows that did not come are -1."""
    lanes = tl.arange(0, TOPK_PAD)
    columns = tl.arange(0, SCALES_PAD)
    tl.store(recv_src_idx + to, tokens, mask=inside)
    if NUM_SCALES > 0:
        has = inside[:, None] & (columns < NUM_SCALES)[None, :]
        scales = as_pointer(address + scales_offset, tl.int32)[:, None] + columns[None, :]
        at = to.to(tl.int64)[:, None] * NUM_SCALES + columns[None, :]
        tl.store(recv_scales + at, tl.load(scales, mask=has), mask=has)
    if NUM_TOPK > 0:
        has = inside[:, None] & (lanes < NUM_TOPK)[None, :]
        at = to[:, None] * NUM_TOPK + lanes[None, :]
        ids = as_pointer(address + ids_offset, tl.int32)[:, None] + lanes[None, :]
        weights = as_pointer(address + weights_offset, tl.float32)[:, None] + lanes[None, :]
        has_room = fits[:, None] & (lanes < NUM_TOPK)[None, :]
        tl.store(recv_topk_idx + at, tl.load(ids, mask=has, other=-1).to(tl.int64), mask=has_room)
        tl.store(recv_topk_weights + at, tl.load(weights, mask=has, other=0.0), mask=has)
