"""Dispatch, the receiving half: copy rows out of the slot, or say where they are."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..device.context import NUM_RANKS, PHASE_CAPACITY, PHASE_OVERFLOW, RANK
from ..device.internode import BOTH, is_on_side, row_writer
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
from ..device.slots import (
    payload_address,
    received_rows,
    rows_in_region,
    source_at,
    wait_rows,
)

FILLED = tl.constexpr(512)
"""Items that a program sets at a time."""


class ReceiveSizes(NamedTuple):
    """What the kernels here are compiled for."""

    NUM_TOPK: int
    TOPK_PAD: int
    NUM_SCALES: int
    SCALES_PAD: int
    CHUNK_ROWS: int  # rows that share a flag
    BLOCK_ROWS: int  # rows that a program receives at a time
    BLOCK_VECS: int  # vectors of each
    ALIGNED: bool  # whether rows are a multiple of 16 bytes


class Block(NamedTuple):
    """Rows of one source that a program has waited for; blocks [BLOCK_ROWS]."""

    source: tl.tensor  # rank, a scalar
    dst_row: tl.tensor  # number of each among all received rows
    has_room: tl.tensor  # whether there is a row, and room for it
    arrived: tl.tensor  # whether it also came: rows do not come where a wait expires
    address: tl.tensor  # of each in the slot
    token_idx: tl.tensor  # its token on the source


@triton.jit(do_not_specialize=["num_push_programs", "max_rows", "max_tokens", "num_local_experts"])
def collect_kernel(
    x,  # vectors [T, num_vecs], what this rank sent
    rank_prefix_matrix,  # int32 [R, R]
    received,  # receive.Received, x as vectors [N, num_vecs], out
    context,
    num_push_programs,
    max_rows,
    max_tokens,  # of a rank; for `put_src_metadata`
    num_vecs,
    num_local_experts,
    row,  # slots.Row
    SIZES: tl.constexpr,  # ReceiveSizes
    PDL: tl.constexpr,
):
    """Copy the received rows out of the slot, by source rank, then token.

    Never writes beyond `max_rows`, nor reads beyond the rows of a region. Both launches of a
    call are of one compiled kernel. The first, after a push of `num_push_programs`, copies what
    arrives while they push. The last, with num_push_programs 0, copies the rest, and its last
    program finishes the call.

    A PDL launch, which waits for the launch before it at its end. It may begin while the push runs,
    where that lets it: until that end it reads rank_prefix_matrix and x, which were complete before
    the push was launched, and rows that flags guard.
    """
    most_rows = most_received(rank_prefix_matrix, context)
    region_rows = rows_in_region(row, context, SIZES.CHUNK_ROWS)
    end = num_blocks(most_rows, region_rows, context, SIZES.BLOCK_ROWS)
    work_idx = claim(context)
    while work_idx < end:
        # fmt: off
        block = receive_block(
            work_idx, rank_prefix_matrix, max_rows, region_rows, BOTH, row, context, SIZES
        )
        # fmt: on
        payload = payload_address(
            x, block.source, block.address, block.token_idx, num_vecs, context
        )
        put_rows(
            received.x + block.dst_row.to(tl.int64) * num_vecs,
            as_pointer(payload, received.x.dtype.element_ty),
            num_vecs,
            block.arrived,
            ticks(),
            0,
            SIZES.ALIGNED,
            SIZES.BLOCK_VECS,
        )
        _copy_metadata(received, block, max_tokens, num_local_experts, row, context, SIZES)
        work_idx = claim_next(num_push_programs, context)
    pdl_wait(PDL)
    if num_push_programs > 0:
        return
    if SIZES.NUM_TOPK > 0:
        clear_rest(received, rank_prefix_matrix, max_rows, context, SIZES)
    if is_broken(context):
        report_abandoned(context)
    elif is_last_program(context):
        report_overflow(rank_prefix_matrix, most_rows, max_rows, region_rows, context)
        finish_call(context)


@triton.jit(do_not_specialize=["max_rows", "num_local_experts", "sides"])
def locate_kernel(
    x,  # vectors [T, num_vecs], what this rank sent
    rank_prefix_matrix,  # int32 [R, R]
    received,  # receive.Received, x as addresses int64 [N], out
    context,
    max_rows,
    num_vecs,
    num_local_experts,
    sides,  # of the sources, see `internode.is_on_side`: only their rows are waited for
    row,  # slots.Row
    SIZES: tl.constexpr,  # ReceiveSizes
):
    """Wait for rows and say where each is, by source rank, then token: in the slot, or in `x` where
    this rank sent it to itself. The slot stays as it is until `release_kernel`.

    Launches for NEAR and for FAR sources write to the same memory, but for the addresses, and may
    run concurrently: no program of them is the last one."""
    most_rows = most_received(rank_prefix_matrix, context)
    region_rows = rows_in_region(row, context, SIZES.CHUNK_ROWS)
    end = num_blocks(most_rows, region_rows, context, SIZES.BLOCK_ROWS)
    for work_idx in range(tl.program_id(0), end, tl.num_programs(0)):
        # fmt: off
        block = receive_block(
            work_idx, rank_prefix_matrix, max_rows, region_rows, sides, row, context, SIZES
        )
        # fmt: on
        payload = payload_address(
            x, block.source, block.address, block.token_idx, num_vecs, context
        )
        to = received.x + block.dst_row
        tl.store(to, tl.where(block.arrived, payload, 0), mask=block.has_room)
        _copy_metadata(received, block, 0, num_local_experts, row, context, SIZES)
    if SIZES.NUM_TOPK > 0:
        clear_rest(received, rank_prefix_matrix, max_rows, context, SIZES)
    if is_broken(context):
        report_abandoned(context)
    elif sides == BOTH:
        if is_last_program(context):
            report_overflow(rank_prefix_matrix, most_rows, max_rows, region_rows, context)


@triton.jit
def release_kernel(context):
    """Finish a call whose rows were read in place, once the reads have been issued."""
    end_call(context)


@triton.jit(do_not_specialize=["num_rows"])
def copy_ids_kernel(
    topk_idx,  # int64 [N, K]
    copy,  # int64 [N, K], out
    num_rows,  # N
    NUM_TOPK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy the ids of all rows, also of those past the received ones, which are -1. A PDL launch,
    which waits before it writes anything."""
    pdl_wait(PDL)
    end = num_rows * NUM_TOPK
    for first in range(tl.program_id(0) * FILLED, end, tl.num_programs(0) * FILLED):
        items = first + tl.arange(0, FILLED)
        tl.store(copy + items, tl.load(topk_idx + items, mask=items < end), mask=items < end)


@device_function
def receive_block(
    work_idx, rank_prefix_matrix, max_rows, region_rows, sides, row, context, SIZES: tl.constexpr
):
    """Wait for the `Block` number `work_idx`; the sources take turns. Those that are not on one of
    the `sides` have no rows."""
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    rank = tl.load(context + RANK).to(tl.int32)
    source = source_at(work_idx, context)
    rows = work_idx // num_ranks * SIZES.BLOCK_ROWS + tl.arange(0, SIZES.BLOCK_ROWS)
    num_rows = received_rows(rank_prefix_matrix, source, context)
    dst_row = tl.load(rank_prefix_matrix + source * num_ranks + rank) - num_rows + rows
    real = (rows < tl.minimum(num_rows, region_rows)) & is_on_side(source, sides, context)
    begin, writer = row_writer(source, context)
    ready = wait_rows(source, writer, rows, real, context, SIZES.CHUNK_ROWS)
    has_room = real & (dst_row >= 0) & (dst_row < max_rows)
    arrived = has_room & (ready == 1)
    base = consume_token(begin + row.header_bytes, ready)
    address = base + rows.to(tl.int64) * row.num_bytes
    token_idx = tl.load(as_pointer(address + row.token, tl.int32), mask=arrived, other=0)
    return Block(source, dst_row, has_room, arrived, address, token_idx)


@device_function
def _copy_metadata(
    received, block, max_tokens, num_local_experts, row, context, SIZES: tl.constexpr
):  # fmt: skip
    """Copy what came with a block of rows, ids as this rank numbers its experts: -1 and a weight of
    0 for experts of other ranks; ids of rows that did not come are -1."""
    k = tl.arange(0, SIZES.TOPK_PAD)
    columns = tl.arange(0, SIZES.SCALES_PAD)
    tl.store(received.src_idx + block.dst_row, block.token_idx, mask=block.arrived)
    if SIZES.NUM_SCALES > 0:
        has = block.arrived[:, None] & (columns < SIZES.NUM_SCALES)[None, :]
        scales = as_pointer(block.address + row.scales, tl.int32)[:, None] + columns[None, :]
        at = block.dst_row.to(tl.int64)[:, None] * SIZES.NUM_SCALES + columns[None, :]
        tl.store(received.scales + at, tl.load(scales, mask=has), mask=has)
    if SIZES.NUM_TOPK > 0:
        has = block.arrived[:, None] & (k < SIZES.NUM_TOPK)[None, :]
        has_room = block.has_room[:, None] & (k < SIZES.NUM_TOPK)[None, :]
        at = block.dst_row[:, None] * SIZES.NUM_TOPK + k[None, :]
        ids = as_pointer(block.address + row.ids, tl.int32)[:, None] + k[None, :]
        ids = tl.load(ids, mask=has, other=-1)
        ids -= tl.load(context + RANK).to(tl.int32) * num_local_experts
        is_local = has & (ids >= 0) & (ids < num_local_experts)
        local_ids = tl.where(is_local, ids, -1).to(tl.int64)
        tl.store(received.topk_idx + at, local_ids, mask=has_room)
        if received.kept_idx is not None:
            tl.store(received.kept_idx + at, local_ids, mask=has_room)
        if received.topk_weights is not None:
            weights = as_pointer(block.address + row.weights, tl.float32)[:, None] + k[None, :]
            weights = tl.load(weights, mask=has, other=0.0)
            tl.store(received.topk_weights + at, tl.where(is_local, weights, 0.0), mask=has)
        if received.src_metadata is not None:
            put_src_metadata(received, block, is_local, ids * 0 - 1, max_tokens, SIZES)


@device_function
def put_src_metadata(received, block, is_local, places, max_tokens, SIZES: tl.constexpr):
    """Write the metadata of a block of rows, see `reference.place`; -1 for those that did not come.
    is_local [BLOCK_ROWS, TOPK_PAD]: where the expert of k is here; places: its rows there, -1 for
    none, and for rows that did not come.
    """
    k = tl.arange(0, SIZES.TOPK_PAD)
    last_k = tl.max(tl.where(is_local, k[None, :], -1), 1)
    to = received.src_metadata + block.dst_row.to(tl.int64) * (2 + SIZES.NUM_TOPK)
    token = block.source * max_tokens + block.token_idx
    tl.store(to, tl.where(block.arrived, token, -1), mask=block.has_room)
    slot = block.source * SIZES.NUM_TOPK + last_k
    tl.store(to + 1, tl.where(block.arrived, slot, -1), mask=block.has_room)
    has_room = block.has_room[:, None] & (k < SIZES.NUM_TOPK)[None, :]
    tl.store(to[:, None] + 2 + k[None, :], places, mask=has_room)


@device_function
def clear_rest(received, rank_prefix_matrix, max_rows, context, SIZES: tl.constexpr):
    """Set to -1 the ids of rows past the received ones, and their metadata if there are any."""
    first = num_received(rank_prefix_matrix, max_rows, context)
    _fill(received.topk_idx, first * SIZES.NUM_TOPK, max_rows * SIZES.NUM_TOPK)
    if received.kept_idx is not None:
        _fill(received.kept_idx, first * SIZES.NUM_TOPK, max_rows * SIZES.NUM_TOPK)
    if received.src_metadata is not None:
        columns: tl.constexpr = 2 + SIZES.NUM_TOPK
        _fill(received.src_metadata, first * columns, max_rows * columns)


@device_function
def _fill(to, begin, end):
    """Set [begin, end) of `to` to -1."""
    step = tl.num_programs(0) * FILLED
    for first in range(begin + tl.program_id(0) * FILLED, end, step):
        items = first + tl.arange(0, FILLED)
        tl.store(to + items, -1, mask=items < end)


@device_function
def num_received(rank_prefix_matrix, max_rows, context):
    """How many rows came, from 0 to max_rows, whatever a changed handle says."""
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    last = rank_prefix_matrix + (num_ranks - 1) * num_ranks + tl.load(context + RANK)
    return tl.maximum(tl.minimum(tl.load(last), max_rows), 0)


@device_function
def most_received(rank_prefix_matrix, context):
    """The most rows that any source sends to this rank."""
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    most_rows = 0
    for source in range(0, num_ranks):
        most_rows = max(most_rows, received_rows(rank_prefix_matrix, source, context))
    return most_rows


@device_function
def num_blocks(most_rows, region_rows, context, BLOCK_ROWS: tl.constexpr):
    """Blocks of BLOCK_ROWS rows to take from all sources."""
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    return tl.cdiv(tl.minimum(most_rows, region_rows), BLOCK_ROWS) * num_ranks


@device_function
def report_overflow(rank_prefix_matrix, most_rows, max_rows, region_rows, context):
    """Report more received rows than `max_rows` or than a region holds; the rows that there was
    room for were written."""
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    rank = tl.load(context + RANK).to(tl.int32)
    if tl.load(rank_prefix_matrix + (num_ranks - 1) * num_ranks + rank) > max_rows:
        report_failure(rank, current_epoch(context), context, PHASE_OVERFLOW)
    if most_rows > region_rows:
        report_failure(rank, current_epoch(context), context, PHASE_CAPACITY)
