"""The end of a layer: the sums of all ranks for each token."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..device.context import PHASE_RETURNED_ROWS, PHASE_TILES, RANK, REGION_BYTES, ROLE_SUM
from ..device.lang import (
    as_pointer,
    begin_span,
    consume_token,
    device_function,
    end_span,
    is_broken,
    round_to,
    row_mask,
    row_pointers,
    wait,
)
from ..device.programs import claim, end_call, pdl_wait
from ..device.slots import region
from ..device.tiles import COMBINE, wait_stage
from .fused_kernels import ROWS_AT_ONCE, load_metadata, sum_expert_rows


class SumPlan(NamedTuple):
    """What is added up, and when; see `send_return_metadata_kernel`."""

    send_head: tl.tensor  # int32 [T, R]: row * R + rank of each returned row, in sum order
    to_sum: tl.tensor  # int32 [STAGES, T]: tokens of which the last row returns in each stage
    topk_idx: tl.tensor  # int64 [T, K]
    dst_row: tl.tensor  # int32 [T, K], see `RowPlan`


class LayerSums(NamedTuple):
    """What is added up to what. The gradients of weights are those of a backward, else None."""

    out: tl.tensor  # [T, H], out
    y: tl.tensor  # [M, H] expert rows
    topk_grads: tl.tensor = None  # float32 [T, K], out: the gradients of the weights
    weight_grads: tl.tensor = None  # float32 [M]: those of the rows here


@triton.jit(
    do_not_specialize=["num_tokens", "num_gemm_programs"],
    do_not_specialize_on_alignment=["num_to_sum", "computed"],
)
def fused_sum_kernel(
    sums,  # LayerSums
    plan,  # SumPlan
    num_to_sum,  # int64 [STAGES], see `StageCounters`
    computed,  # int64 [STAGES + 1], see `StageCounters`
    context,
    num_gemm_programs,
    num_tokens,
    hidden,
    rows,  # ReturnRows
    SIZES: tl.constexpr,  # SumSizes
    PDL: tl.constexpr,
):
    """Add up the sums of all ranks for each token, in `send_head`'s order: those of the others as
    they returned them, this rank's own made here, and rounded as the others' are. fp32, rounded
    once. In a backward also collect the gradients of the token's weights. The last program finishes
    the call.

    It begins when the last of all tiles, those of own rows, have been computed, and goes on stage
    by stage as other ranks return theirs. Programs that find room later take fewer of the tokens.

    `computed` also says that `send_return_metadata_kernel` has ended, as the GEMM's programs wait
    for it before their first tile: so its lists and this rank's own return metadata have arrived.
    The rows that other ranks return in a stage happen before its flags, see `tiles.notify_stage`.

    A PDL launch after `return_sums_kernel`, with which it runs concurrently, or in a backward after
    gradients of weights, which began after that one. It ends when they have ended, and with it the
    call: so other ranks, which send rows in the next call, overwrite none that are still read.
    """
    rank = tl.load(context + RANK).to(tl.int32)
    one = tl.arange(0, 1)
    flag = (computed + SIZES.STAGES).to(tl.int64) + one * 8
    ready = wait(flag, one == 0, num_gemm_programs, one + rank, context, PHASE_TILES)
    ready = ready * (1 - is_broken(context).to(tl.int32))  # else nobody may have written metadata
    first = consume_token(region(0, context) + rows.first, ready)
    y = as_pointer(consume_token(sums.y.to(tl.int64), ready), sums.y.dtype.element_ty)
    weight_grads = sums.weight_grads
    if not SIZES.WEIGHTED:
        weight_grads = as_pointer(consume_token(weight_grads.to(tl.int64), ready), tl.float32)
    sums = LayerSums(sums.out, y, sums.topk_grads, weight_grads)
    stage = tl.full((), -1, tl.int32)
    begin = tl.full((), 0, tl.int32)  # tokens of earlier stages, and of this one too
    end = tl.full((), 0, tl.int32)
    since = begin_span()
    work_idx = claim(context)
    while (work_idx < num_tokens) & (ready == 1):
        next_idx = claim(context)
        while (work_idx >= end) & (ready == 1):
            stage += 1
            begin = end
            end += tl.load(num_to_sum + stage).to(tl.int32)
            ready = wait_stage(COMBINE, stage, context, SIZES.RANKS_PAD, PHASE_RETURNED_ROWS)
            since = end_span(ROLE_SUM, stage, since, context)
        if ready == 1:
            token_idx = tl.load(plan.to_sum + stage.to(tl.int64) * num_tokens + work_idx - begin)
            # fmt: off
            _sum_token(
                token_idx, sums, plan, consume_token(first, ready), rank, context, hidden, rows,
                SIZES,
            )
            # fmt: on
        work_idx = next_idx
    end_span(ROLE_SUM, SIZES.STAGES, since, context)
    pdl_wait(PDL)
    end_call(context)


@device_function
def _sum_token(token_idx, sums, plan, first_row, rank, context, hidden, rows, SIZES: tl.constexpr):
    """The sum of one token: see `fused_sum_kernel`. first_row: address of row 0 in the region of
    rank 0."""
    RANKS: tl.constexpr = SIZES.RANKS
    region_bytes = tl.load(context + REGION_BYTES)
    heads = ()
    for order in tl.static_range(RANKS):
        heads = heads + (tl.load(plan.send_head + token_idx * RANKS + order),)
    metadata = tl.full((), 0, tl.int64)
    for order in tl.static_range(RANKS):
        at, writer = _row_of_head(heads[order], first_row, region_bytes, rows.num_bytes, RANKS)
        metadata = tl.where((at != 0) & (writer == rank), at, metadata)
    if not SIZES.WEIGHTED:
        # fmt: off
        _store_weight_gradients(
            token_idx, heads, sums, plan, first_row, region_bytes, rank, rows, SIZES
        )
        # fmt: on
    out, y = sums.out, sums.y
    for column in range(0, hidden, SIZES.BLOCK_H):
        columns = column + tl.arange(0, SIZES.BLOCK_H)
        in_row = row_mask(columns, hidden, out.dtype.element_ty, True)
        dst_rows, weights = load_metadata(metadata, rows, 0, SIZES)
        # fmt: off
        own = sum_expert_rows(
            y, metadata, dst_rows, weights, rows, columns, in_row, hidden, SIZES
        )
        # fmt: on
        own = round_to(own, out.dtype.element_ty)
        total = tl.zeros([SIZES.BLOCK_H], tl.float32)
        for begin in tl.static_range(0, RANKS, ROWS_AT_ONCE):
            parts = ()
            for order in tl.static_range(begin, min(begin + ROWS_AT_ONCE, RANKS)):
                # fmt: off
                at, writer = _row_of_head(
                    heads[order], first_row, region_bytes, rows.num_bytes, RANKS
                )
                # fmt: on
                theirs = row_pointers(as_pointer(at, out.dtype.element_ty), columns, True)
                is_theirs = (at != 0) & (writer != rank)
                part = tl.load(theirs, mask=in_row & is_theirs, other=0.0)
                parts = parts + (part,)
            for order in tl.static_range(begin, min(begin + ROWS_AT_ONCE, RANKS)):
                is_own = (heads[order] >= 0) & (heads[order] % RANKS == rank)
                total += tl.where(is_own, own, parts[order - begin]).to(tl.float32)
        to = row_pointers(out + token_idx.to(tl.int64) * hidden, columns, True)
        tl.store(to, round_to(total, out.dtype.element_ty), mask=in_row)


@device_function
def _store_weight_gradients(
    token_idx, heads, sums, plan, first_row, region_bytes, rank, rows, SIZES: tl.constexpr
):
    """The gradients of the weights of one token: of each k from the rank of its expert, which
    returns them in the order of k, see `return_weight_gradients`; 0 for a k without a row."""
    RANKS: tl.constexpr = SIZES.RANKS
    NUM_TOPK: tl.constexpr = SIZES.NUM_TOPK
    k = tl.arange(0, triton.next_power_of_2(NUM_TOPK))
    at = token_idx.to(tl.int64) * NUM_TOPK + k
    ids = tl.load(plan.topk_idx + at, mask=k < NUM_TOPK, other=-1)
    dst_row = tl.load(plan.dst_row + at, mask=k < NUM_TOPK, other=-1)
    owner = tl.where(dst_row >= 0, ids // SIZES.LOCAL_EXPERTS, -1).to(tl.int32)
    is_earlier = (owner[None, :] == owner[:, None]) & (k[None, :] < k[:, None])
    index = tl.sum(is_earlier.to(tl.int32), 1)
    row = tl.zeros_like(at)  # address of the row that returned, 0 for none
    for order in tl.static_range(RANKS):
        returned, writer = _row_of_head(
            heads[order], first_row, region_bytes, rows.num_bytes, RANKS
        )
        is_theirs = (returned != 0) & (writer != rank)
        row = tl.where(is_theirs & (owner == writer), returned, row)
    theirs = as_pointer(row + rows.weights_offset, tl.float32) + index
    grad = tl.load(theirs, mask=row != 0, other=0.0)
    grad += tl.load(sums.weight_grads + dst_row, mask=owner == rank, other=0.0)
    tl.store(sums.topk_grads + at, grad, mask=k < NUM_TOPK)


@device_function
def _row_of_head(head, first_row, region_bytes, row_bytes, RANKS: tl.constexpr):
    """(address of the row that an entry of `send_head` means, 0 for none, the rank that writes
    it)."""
    writer = tl.maximum(head, 0) % RANKS
    row = tl.maximum(head, 0) // RANKS
    at = first_row + writer * region_bytes + row.to(tl.int64) * row_bytes
    return tl.where(head >= 0, at, 0), writer
