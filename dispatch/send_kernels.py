"""Dispatch, the sending half: push rows to the ranks of their experts."""

import triton
import triton.language as tl

from ..device.context import KIND_CACHED_DISPATCH, NUM_RANKS, RANK
from ..device.lang import (
    as_pointer,
    device_function,
    is_broken,
    pacing_interval,
    put,
    put_rows,
    stagger,
    symm_at,
)
from ..device.programs import end_push, pdl_launch_dependents, pdl_wait
from ..device.signature import open_call
from ..device.slots import (
    deal,
    num_chunks_here,
    num_spans,
    open_regions,
    raise_chunks,
    span,
)


@triton.jit(do_not_specialize=["num_tokens", "scale_stride_token", "scale_stride"])
def metadata_kernel(
    scales,  # int32 [T, NUM_SCALES] of any strides
    topk_idx,  # int64 [T, NUM_TOPK]
    topk_weights,  # float32 [T, NUM_TOPK]
    num_tokens_per_rank,  # int32 [R]
    send_token_idx,  # int32 [R, T]
    dispatched,  # int32 [SIGNATURE_WORDS] of a handle, or None after an exchange
    context,
    num_tokens,
    scale_stride_token,
    scale_stride,
    num_local_experts,
    header_bytes,
    row_bytes,
    payload_bytes,
    item_bytes,
    ids_offset,
    NUM_TOPK: tl.constexpr,
    TAIL_PAD: tl.constexpr,
    NUM_SCALES: tl.constexpr,
    SCALES_BLOCK: tl.constexpr,
    RANKS_PAD: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write what goes with this rank's rows into its region on every rank: scales, then ids,
    weights and token. `push_kernel` raises the rows' flags after it has seen this kernel's end.

    A PDL launch behind the exchange, whose end it sees before the push may begin. After an
    exchange all ranks are in the call, and what slots held has been read. With a handle there is no
    exchange: program 0 begins the call instead, and the others write.
    """
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    if is_broken(context):
        return
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    rank = tl.load(context + RANK).to(tl.int32)
    ranks = tl.arange(0, RANKS_PAD)
    num_rows = tl.load(num_tokens_per_rank + ranks, mask=ranks < num_ranks, other=0)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    if dispatched is not None:
        if program == 0:
            unsound = (ranks < num_ranks) & ((num_rows < 0) | (num_rows > num_tokens))
            # fmt: off
            open_call(
                KIND_CACHED_DISPATCH, payload_bytes, 0, item_bytes, NUM_SCALES, dispatched,
                tl.max(unsound.to(tl.int32), 0) == 0, context, RANKS_PAD,
            )
            # fmt: on
            return
        program, num_programs = program - 1, num_programs - 1
    num_rows = tl.minimum(num_rows, num_tokens)
    own, most_rows = open_regions(num_rows, header_bytes, row_bytes, context)
    step = num_programs * LANES
    scales_offset = tl.cdiv(payload_bytes, 16) * 16
    for first in range(program * LANES, most_rows * num_ranks, step):
        peers, rows = deal(first, rank + 1, num_ranks, context, LANES)
        inside = (rows < most_rows) & (rows < tl.load(num_tokens_per_rank + peers))
        tokens = tl.load(send_token_idx + peers * num_tokens + rows, mask=inside, other=0)
        tokens = within(tokens, num_tokens)
        to = symm_at(own + rows.to(tl.int64) * row_bytes, peers, context)
        if NUM_SCALES > 0:
            from_scales = scales + tokens.to(tl.int64) * scale_stride_token
            to_scales = as_pointer(to + scales_offset, tl.int32)
            for start in range(0, NUM_SCALES, SCALES_BLOCK):
                columns = start + tl.arange(0, SCALES_BLOCK)
                has = inside[:, None] & (columns < NUM_SCALES)[None, :]
                at = from_scales[:, None] + columns.to(tl.int64)[None, :] * scale_stride
                put(to_scales[:, None] + columns[None, :], tl.load(at, mask=has), has)
        # Ids, weights and token as one run of words, since each write pays for a packet of its own.
        words = tl.arange(0, TAIL_PAD)
        weights_at: tl.constexpr = (NUM_TOPK + 3) // 4 * 4
        tail = tl.where((words == 2 * weights_at)[None, :], tokens[:, None], 0)
        if NUM_TOPK > 0:
            lane = words % weights_at
            has = inside[:, None] & ((words < 2 * weights_at) & (lane < NUM_TOPK))[None, :]
            at = tokens[:, None] * NUM_TOPK + lane[None, :]
            ids = tl.load(topk_idx + at, mask=has, other=-1) - peers[:, None] * num_local_experts
            local = (ids >= 0) & (ids < num_local_experts)
            weights = tl.load(topk_weights + at, mask=has, other=0.0)
            part = tl.where(
                (words < weights_at)[None, :],
                tl.where(local, ids, -1).to(tl.int32),
                tl.where(local, weights, 0.0).to(tl.int32, bitcast=True),
            )
            tail = tl.where(has, part, tail)
        to_tail = as_pointer(to + ids_offset, tl.int32)[:, None] + words[None, :]
        put(to_tail, tail, inside[:, None] & (words <= 2 * weights_at)[None, :])


@triton.jit(do_not_specialize=["num_tokens", "num_early_programs"])
def push_kernel(
    x,  # vectors [T, num_vecs]
    num_tokens_per_rank,  # int32 [R]
    send_token_idx,  # int32 [R, T]
    context,
    num_early_programs,
    num_tokens,
    num_vecs,
    header_bytes,
    row_bytes,
    ALIGNED: tl.constexpr,
    RANKS_PAD: tl.constexpr,
    CHUNK_ROWS: tl.constexpr,
    SPAN: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_VECS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the payload of this rank's rows into its region on the others, all at the same pace.

    A chunk's flags are raised after its rows, so that a reader waits for no more than it reads.
    A PDL launch behind `metadata_kernel`, whose stores happen before the flags: it is waited
    for before the first is raised. Rows to this rank itself have no payload, see `payload_address`.
    The launch behind may begin meanwhile if it is one of `num_early_programs`, and not of so many
    that they fill the chip.
    """
    if num_early_programs > 0:
        pdl_launch_dependents(PDL)
    if is_broken(context):
        pdl_wait(PDL)
        return
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    rank = tl.load(context + RANK).to(tl.int32)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    ranks = tl.arange(0, RANKS_PAD)
    num_rows = tl.load(num_tokens_per_rank + ranks, mask=ranks < num_ranks, other=0)
    num_rows = tl.minimum(num_rows, num_tokens)
    own, most_rows = open_regions(num_rows, header_bytes, row_bytes, context)
    num_peers = num_ranks - 1
    num_chunks = tl.cdiv(most_rows, CHUNK_ROWS)
    num_blocks = tl.cdiv(num_vecs, BLOCK_VECS)
    chunks_here = num_chunks_here(num_chunks, program, num_programs, SPAN)
    due = stagger(LANES * row_bytes // num_blocks, program, context)
    for turn in range(0, num_spans(num_chunks, num_programs, SPAN)):
        first_chunk, end_chunk = span(turn, num_chunks, program, num_programs, SPAN)
        end = min(end_chunk * CHUNK_ROWS, most_rows)
        for first in range(first_chunk * CHUNK_ROWS * num_peers, end * num_peers, LANES):
            peers, rows = deal(first, rank + 1, num_peers, context, LANES)
            inside = (rows < end) & (rows < tl.load(num_tokens_per_rank + peers))
            tokens = tl.load(send_token_idx + peers * num_tokens + rows, mask=rows < end, other=0)
            tokens = within(tokens, num_tokens)
            to = symm_at(own + rows.to(tl.int64) * row_bytes, peers, context)
            num_bytes = tl.sum(inside.to(tl.int32), 0) * row_bytes
            due = put_rows(
                as_pointer(to, x.dtype.element_ty),
                x + tokens.to(tl.int64) * num_vecs,
                num_vecs,
                inside,
                due,
                pacing_interval(num_bytes, chunks_here, num_chunks, context) // num_blocks,
                ALIGNED,
                BLOCK_VECS,
            )
        pdl_wait(PDL)
        raise_chunks(first_chunk, end_chunk, num_rows, context, CHUNK_ROWS, SPAN)
    pdl_wait(PDL)
    end_push(context)


@device_function
def within(index, size):
    """`index` (block), or the nearest of 0 .. size-1: counts that a caller made up lead nowhere
    else."""
    return tl.maximum(tl.minimum(index, size - 1), 0)
