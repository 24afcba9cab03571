"""Low-latency dispatch over several nodes, its end: the rows that came, packed by expert."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..device.context import NUM_RANKS, RANK
from ..device.lang import as_pointer, device_function, put_rows, ticks
from ..device.programs import end_call


class Packed(NamedTuple):
    """What a rank gets, packed by expert, then source rank, then token, and what combine needs."""

    x: tl.tensor  # [L, R * M, H]
    scales: tl.tensor  # int32 [L, S, R * M], or None
    counts: tl.tensor  # int32 [L]
    src_info: tl.tensor  # int32 [L, R * M]: the token of each row
    layout_range: tl.tensor  # int64 [L, R]: begin << 32 | count by source
    dst_row: tl.tensor  # int32 [R * M, K]: of each received row in x, by slot of the top-k, or -1
    src_idx: tl.tensor  # int32 [R * M]: the token of each received row
    rank_prefix_matrix: tl.tensor  # int32 [R, R], see `launch.Counts`
    signature: tl.tensor  # int32 [SIGNATURE_WORDS]
    node_rows: tl.tensor  # these three as in `internode.Routes`
    node_head: tl.tensor
    rank_head: tl.tensor


class PackSizes(NamedTuple):
    """What the kernels here are compiled for."""

    NUM_TOPK: int
    TOPK_PAD: int
    NUM_SCALES: int
    SCALES_PAD: int
    RANKS_PAD: int
    BLOCK_IDS: int  # rows whose ids a program reads at a time
    BLOCK_ROWS: int  # rows that a program copies at a time
    BLOCK_VECS: int  # vectors of each
    ALIGNED: bool  # whether rows are a multiple of 16 bytes


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["recv_stats"])
def pack_plan_kernel(
    arrived,  # receive.Received, x as addresses
    packed,  # Packed, out
    recv_stats,  # int32 [L], added to, or None
    context,
    num_rows,  # R * M
    SIZES: tl.constexpr,  # PackSizes
):
    """Program e finds where the received rows stand that are for local expert e. They are received
    by source rank, then token, so that it only counts."""
    expert, num_ranks = tl.program_id(0), tl.load(context + NUM_RANKS).to(tl.int32)
    ranks, k = tl.arange(0, SIZES.RANKS_PAD), tl.arange(0, SIZES.TOPK_PAD)
    column = packed.rank_prefix_matrix + tl.load(context + RANK)
    real = ranks < num_ranks
    ends = tl.load(column + ranks * num_ranks, mask=real, other=0)
    begins = tl.load(column + (ranks - 1) * num_ranks, mask=real & (ranks > 0), other=0)
    end = tl.minimum(tl.max(ends, 0), num_rows)
    count = tl.full((), 0, tl.int32)
    first_rows, last_rows = tl.zeros_like(ends), tl.zeros_like(ends)
    for first in range(0, end, SIZES.BLOCK_IDS):
        rows = first + tl.arange(0, SIZES.BLOCK_IDS)
        inside = rows < end
        real_ids = inside[:, None] & (k < SIZES.NUM_TOPK)[None, :]
        at = rows[:, None] * SIZES.NUM_TOPK + k[None, :]
        ids = tl.load(arrived.topk_idx + at, mask=real_ids, other=-1)
        is_here = tl.max((ids == expert).to(tl.int32), 1)  # once, if a token names it twice
        dst_row = expert * num_rows + count + tl.cumsum(is_here, 0) - is_here
        tl.store(packed.dst_row + at, tl.broadcast_to(dst_row[:, None], at.shape), ids == expert)
        if expert == 0:
            tl.store(packed.dst_row + at, tl.full(at.shape, -1, tl.int32), real_ids & (ids < 0))
        token_idx = tl.load(arrived.src_idx + rows, mask=is_here == 1, other=0)
        tl.store(packed.src_info + dst_row, token_idx, mask=is_here == 1)
        count += tl.sum(is_here, 0)
        first_rows += tl.sum(tl.where(rows[:, None] < begins[None, :], is_here[:, None], 0), 0)
        last_rows += tl.sum(tl.where(rows[:, None] < ends[None, :], is_here[:, None], 0), 0)
    tl.store(packed.counts + expert, count)
    of_sources = (first_rows.to(tl.int64) << 32) | (last_rows - first_rows).to(tl.int64)
    tl.store(packed.layout_range + expert * num_ranks + ranks, of_sources, mask=real)
    if recv_stats is not None:
        tl.store(recv_stats + expert, tl.load(recv_stats + expert) + count)


@triton.jit(do_not_specialize=["num_rows"])
def pack_rows_kernel(
    arrived,  # receive.Received, x as addresses
    dst_row,  # int32 [R * M, K], see `Packed`; K need not be the top-k
    rank_prefix_matrix,  # int32 [R, R]
    x,  # vectors of experts' rows, out
    scales,  # int32 [L, S, R * M], or None, out
    context,
    num_rows,  # R * M
    num_vecs,
    SIZES: tl.constexpr,  # PackSizes
    ENDS: tl.constexpr,
):
    """Copy each row that has an address to its experts' rows. If the launch ENDS the call, its last
    program does."""
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    last = rank_prefix_matrix + (num_ranks - 1) * num_ranks + tl.load(context + RANK)
    end = tl.minimum(tl.load(last), num_rows)
    step = tl.num_programs(0) * SIZES.BLOCK_ROWS
    for first in range(tl.program_id(0) * SIZES.BLOCK_ROWS, end, step):
        rows = first + tl.arange(0, SIZES.BLOCK_ROWS)
        address = tl.load(arrived.x + rows, mask=rows < end, other=0)
        source = as_pointer(address, x.dtype.element_ty)
        for k in tl.static_range(SIZES.NUM_TOPK):
            at = dst_row + rows * SIZES.NUM_TOPK + k
            row = tl.load(at, mask=address != 0, other=-1)
            has = row >= 0
            to = x + row.to(tl.int64) * num_vecs
            # fmt: off
            put_rows(to, source, num_vecs, has, ticks(), 0, SIZES.ALIGNED, SIZES.BLOCK_VECS)
            # fmt: on
            if SIZES.NUM_SCALES > 0:
                _pack_scales(arrived, scales, rows, row, has, num_rows, SIZES)
    if ENDS:
        end_call(context)


@device_function
def _pack_scales(arrived, packed, rows, dst_row, has, num_rows, SIZES: tl.constexpr):
    """Copy the scales of received rows [B] to `packed`, to those of dst_row [B], column-major for
    each expert."""
    columns = tl.arange(0, SIZES.SCALES_PAD)
    inside = has[:, None] & (columns < SIZES.NUM_SCALES)[None, :]
    at = rows[:, None] * SIZES.NUM_SCALES + columns[None, :]
    scales = tl.load(arrived.scales + at, mask=inside)
    first = (dst_row // num_rows).to(tl.int64) * num_rows * SIZES.NUM_SCALES + dst_row % num_rows
    to = first[:, None] + columns.to(tl.int64)[None, :] * num_rows
    tl.store(packed + to, scales, mask=inside)
