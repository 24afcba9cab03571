"""Dispatch, the sending half: push rows to the ranks of their experts."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..device.context import KIND_CACHED_DISPATCH, NODE_RANKS, RANK
from ..device.lang import as_pointer, device_function, is_broken, put, symm_at
from ..device.programs import pdl_launch_dependents, pdl_wait
from ..device.push import Source, copy_block, open_regions, peer_at, push_rows, row_at
from ..device.signature import open_call
from ..device.slots import first_near_rank, is_near
from ..device.tiles import deal


class SendPlan(NamedTuple):
    """Which tokens a rank sends to which rank of its node: to rank r ends[r] - begins[r] of
    them."""

    ends: tl.tensor  # int32 [R]
    begins: tl.tensor  # int32 [R], or None for zeros
    send_token_idx: tl.tensor  # int32 [L, T]: token of each row for each rank of the node


class Metadata(NamedTuple):
    """What goes with the payload of tokens; None where it does not."""

    scales: tl.tensor  # int32 [T, NUM_SCALES] of any strides
    topk_idx: tl.tensor  # int64 [T, NUM_TOPK]
    topk_weights: tl.tensor  # float32 [T, NUM_TOPK]; where these are None, their place has ids


class MetadataSizes(NamedTuple):
    """What `metadata_kernel` is compiled for."""

    NUM_TOPK: int
    NUM_SCALES: int
    TRAILER_PAD: int  # int32 of ids, weights and token, padded
    BLOCK_SCALES: int  # scales of a row that a program copies at a time
    BLOCK_ROWS: int  # rows whose metadata a program writes at a time
    RANKS_PAD: int
    IS_EARLY: bool = False  # whether it begins during `send_rows_kernel`


@triton.jit(do_not_specialize=["num_tokens", "scale_stride_token", "scale_stride"])
def metadata_kernel(
    metadata,  # Metadata
    plan,  # SendPlan
    dispatched,  # int32 [SIGNATURE_WORDS] of a handle, or None after an exchange
    context,
    num_tokens,
    scale_stride_token,
    scale_stride,
    row,  # slots.Row
    shape,  # signature.RowShape
    SIZES: tl.constexpr,  # MetadataSizes
    PDL: tl.constexpr,
):
    """Write what goes with this rank's rows into its region on every rank: scales, then ids,
    weights and token. `push_kernel` raises the rows' flags after it has seen this kernel's end.

    A PDL launch, which waits for the launch before it first, or IS_EARLY at the end: that one is
    `send_rows_kernel`, which has waited for an exchange. After an exchange all ranks are in the
    call, and what slots held has been read. With a handle there is no exchange: program 0 begins
    the call instead, and the others write.
    """
    tl.static_assert(dispatched is None or not SIZES.IS_EARLY)
    if not SIZES.IS_EARLY:
        pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    if is_broken(context):
        pdl_wait(PDL)
        return
    ranks = tl.arange(0, SIZES.RANKS_PAD)
    near = is_near(ranks, context)
    counts = _num_tokens(plan, ranks, near, 0)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    if dispatched is not None:
        if program == 0:
            unsound = near & ((counts < 0) | (counts > num_tokens))
            is_sound = tl.max(unsound.to(tl.int32), 0) == 0
            # fmt: off
            open_call(KIND_CACHED_DISPATCH, shape, dispatched, is_sound, context, SIZES.RANKS_PAD)
            # fmt: on
            return
        program, num_programs = program - 1, num_programs - 1
    counts = tl.minimum(counts, num_tokens)
    first_row, most_rows = open_regions(counts, row, context)
    num_peers = tl.load(context + NODE_RANKS).to(tl.int32)
    step = num_programs * SIZES.BLOCK_ROWS
    for first in range(program * SIZES.BLOCK_ROWS, most_rows * num_peers, step):
        peers, rows = deal(first + tl.arange(0, SIZES.BLOCK_ROWS), num_peers)
        peers = peer_at(peers, context, False)
        token_idx, has = _sent_token(plan, num_tokens, peers, rows, most_rows, context)
        to = row_at(first_row, tl.load(context + RANK), rows, row, context)
        # fmt: off
        put_metadata(
            metadata, symm_at(to, peers, context), token_idx, has, scale_stride_token, scale_stride,
            row, SIZES,
        )
        # fmt: on
    pdl_wait(PDL)


@device_function
def put_metadata(
    metadata, to, token_idx, has, scale_stride_token, scale_stride, row, SIZES: tl.constexpr
):
    """Write what goes with the payload of tokens into rows at the addresses `to` (blocks)."""
    if SIZES.NUM_SCALES > 0:
        from_scales = metadata.scales + token_idx.to(tl.int64) * scale_stride_token
        to_scales = as_pointer(to + row.scales, tl.int32)
        for start in range(0, SIZES.NUM_SCALES, SIZES.BLOCK_SCALES):
            columns = start + tl.arange(0, SIZES.BLOCK_SCALES)
            inside = has[:, None] & (columns < SIZES.NUM_SCALES)[None, :]
            at = from_scales[:, None] + columns.to(tl.int64)[None, :] * scale_stride
            put(to_scales[:, None] + columns[None, :], tl.load(at, mask=inside), inside)
    # Ids, weights and token are stored as one run, since each write pays for its own packet.
    field = tl.arange(0, SIZES.TRAILER_PAD)
    weights_at: tl.constexpr = (SIZES.NUM_TOPK + 3) // 4 * 4
    trailer = tl.where((field == 2 * weights_at)[None, :], token_idx[:, None], 0)
    if SIZES.NUM_TOPK > 0:
        k = field % weights_at
        inside = has[:, None] & ((field < 2 * weights_at) & (k < SIZES.NUM_TOPK))[None, :]
        at = token_idx[:, None] * SIZES.NUM_TOPK + k[None, :]
        ids = tl.load(metadata.topk_idx + at, mask=inside, other=-1)
        ids = tl.minimum(tl.maximum(ids, -1), 0x7FFFFFFF)  # what is out of range stays so
        part = ids.to(tl.int32)
        if metadata.topk_weights is not None:
            weights = tl.load(metadata.topk_weights + at, mask=inside, other=0.0)
            weights = weights.to(tl.int32, bitcast=True)
            part = tl.where((field < weights_at)[None, :], part, weights)
        trailer = tl.where(inside, part, trailer)
    to_trailer = as_pointer(to + row.ids, tl.int32)[:, None] + field[None, :]
    put(to_trailer, trailer, has[:, None] & (field <= 2 * weights_at)[None, :])


@triton.jit(do_not_specialize=["num_tokens", "lets_next_begin", "waits"])
def push_kernel(
    x,  # vectors [T, num_vecs]
    plan,  # SendPlan
    context,
    lets_next_begin,  # 1: the next launch may begin concurrently
    waits,  # 1: wait for the launch before, and only then let the next one begin
    num_tokens,
    num_vecs,
    row,  # slots.Row
    SIZES: tl.constexpr,  # push.PushSizes
    PDL: tl.constexpr,
):
    """Write the payload of this rank's rows into its region on the others; see `push_rows`.

    A PDL launch after `metadata_kernel`, whose stores happen before the rows' flags. Rows to this
    rank itself have no payload, see `payload_address`. Where the next launch may begin
    concurrently, either its programs are too few to fill the chip, or all ranks are in the call
    when they begin. After an exchange all ranks are. With a handle this launch `waits` for
    `metadata_kernel`, which waits for the signatures of all ranks.
    """
    if waits > 0:
        pdl_wait(PDL)
    if lets_next_begin > 0:
        pdl_launch_dependents(PDL)
    if is_broken(context):
        pdl_wait(PDL)
        return
    ranks = tl.arange(0, SIZES.RANKS_PAD)
    counts = _num_tokens(plan, ranks, is_near(ranks, context), 0)
    counts = tl.minimum(counts, num_tokens)
    num_peers = tl.load(context + NODE_RANKS).to(tl.int32) - 1
    source = Source(x, None, num_tokens, num_vecs, num_peers)
    # fmt: off
    push_rows(
        source, plan, counts, tl.program_id(0), tl.num_programs(0), row, context,
        _sent_row, copy_block, SIZES, PDL,
    )
    # fmt: on


@device_function
def _num_tokens(plan, ranks, mask=None, other: tl.constexpr = None):
    """How many tokens go to `ranks` (block), or `other` outside of the mask."""
    counts = tl.load(plan.ends + ranks, mask=mask, other=other)
    if plan.begins is not None:
        counts -= tl.load(plan.begins + ranks, mask=mask, other=other)
    return counts


@device_function
def _sent_row(source, plan, peers, rows, end, context):
    """The rows of x that are `rows` (block) for `peers`; see `push_rows`."""
    token_idx, has = _sent_token(plan, source.num_rows, peers, rows, end, context)
    return source.x + token_idx.to(tl.int64) * source.num_columns, token_idx, has


@device_function
def _sent_token(plan, num_tokens, peers, rows, end, context):
    """(token of `rows` (block) for `peers`, whether there is one). Counts that a caller made up
    lead to no other memory."""
    has = (rows < end) & (rows < _num_tokens(plan, peers))
    at = plan.send_token_idx + (peers - first_near_rank(context)) * num_tokens + rows
    token_idx = tl.load(at, mask=rows < end, other=0)
    return tl.maximum(tl.minimum(token_idx, num_tokens - 1), 0), has
