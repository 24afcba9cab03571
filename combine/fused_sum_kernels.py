"""The end of a layer: the sums of all ranks for each token."""

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
from .fused_kernels import LANES_AT_ONCE, load_record, sum_lanes


@triton.jit(
    do_not_specialize=["num_tokens", "num_gemm_programs"],
    do_not_specialize_on_alignment=["num_to_sum", "computed"],
)
def fused_sum_kernel(
    out,  # [T, H], out
    y,  # [M, H] expert rows
    send_head,  # int32 [T, R]: row * R + rank of each returned row, in the order of the sum
    to_sum,  # int32 [STAGES, T]: tokens of which the last comes in each stage
    num_to_sum,  # int64 [STAGES]
    computed,  # int64 [STAGES + 1], see `staged_gemm_kernel`
    context,
    num_gemm_programs,
    num_tokens,
    hidden,
    header_bytes,
    row_bytes,
    places_offset,
    weights_offset,
    NUM_TOPK: tl.constexpr,
    STAGES: tl.constexpr,
    RANKS: tl.constexpr,
    RANKS_PAD: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add up the sums of all ranks for each token, in `send_head`'s order: those of the others as
    they returned them, this rank's own made here, and rounded as the others' are. fp32, rounded
    once. The last program finishes the call.

    A PDL launch behind `return_sums_kernel`. When the last of all tiles, those of own rows, have
    been computed, stage by stage as other ranks return theirs. Programs that find room later take
    fewer of the tokens.

    `computed` also says that `send_return_metadata_kernel` has ended, as the GEMM's programs wait
    for it before their first tile: so its lists and this rank's own return metadata are there. Rows
    of a stage of other ranks happen before its flags, see `tiles.notify_stage`.
    """
    rank = tl.load(context + RANK).to(tl.int32)
    lane = tl.arange(0, 1)
    own = (computed + STAGES).to(tl.int64) + lane * 8
    token = wait(own, lane == 0, num_gemm_programs, lane + rank, context, PHASE_TILES)
    token = token * (1 - is_broken(context).to(tl.int32))  # else nobody may have written metadata
    first = consume_token(region(0, context) + header_bytes, token)
    rows = as_pointer(consume_token(y.to(tl.int64), token), y.dtype.element_ty)
    stage = tl.full((), -1, tl.int32)
    begin = tl.full((), 0, tl.int32)  # tokens of earlier stages, and of this one too
    end = tl.full((), 0, tl.int32)
    since = begin_span()
    number = claim(context)
    while (number < num_tokens) & (token == 1):
        next_number = claim(context)
        while (number >= end) & (token == 1):
            stage += 1
            begin = end
            end += tl.load(num_to_sum + stage).to(tl.int32)
            token = wait_stage(COMBINE, stage, context, RANKS_PAD, PHASE_RETURNED_ROWS)
            since = end_span(ROLE_SUM, stage, since, context)
        if token == 1:
            at = to_sum + stage.to(tl.int64) * num_tokens + number - begin
            # fmt: off
            _sum_token(
                tl.load(at), out, rows, send_head, first, token, rank, context, hidden, row_bytes,
                places_offset, weights_offset, NUM_TOPK, RANKS, BLOCK_H,
            )
            # fmt: on
        number = next_number
    end_span(ROLE_SUM, STAGES, since, context)
    pdl_wait(PDL)
    end_call(context)


@device_function
def _sum_token(
    number,
    out,
    y,
    send_head,
    first_row,
    token,
    rank,
    context,
    hidden,
    row_bytes,
    places_offset,
    weights_offset,
    NUM_TOPK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """The sum of one token: see `fused_sum_kernel`. first_row: address of the rows in the region of
    rank 0."""
    region_bytes = tl.load(context + REGION_BYTES)
    first_row = consume_token(first_row, token)
    heads = ()
    for place in tl.static_range(RANKS):
        heads = heads + (tl.load(send_head + number * RANKS + place),)
    record = tl.full((), 0, tl.int64)
    for place in tl.static_range(RANKS):
        at, writer = _place_of_head(heads[place], first_row, region_bytes, row_bytes, RANKS)
        record = tl.where((at != 0) & (writer == rank), at + places_offset, record)
    for column in range(0, hidden, BLOCK_H):
        columns = column + tl.arange(0, BLOCK_H)
        in_row = row_mask(columns, hidden, out.dtype.element_ty, True)
        places, weights = load_record(record, weights_offset, 0, NUM_TOPK)
        # fmt: off
        own = sum_lanes(
            y, record, places, weights, weights_offset, columns, in_row, hidden, NUM_TOPK
        )
        # fmt: on
        own = round_to(own, out.dtype.element_ty)
        total = tl.zeros([BLOCK_H], tl.float32)
        for begin in tl.static_range(0, RANKS, LANES_AT_ONCE):
            parts = ()
            for place in tl.static_range(begin, min(begin + LANES_AT_ONCE, RANKS)):
                at, writer = _place_of_head(heads[place], first_row, region_bytes, row_bytes, RANKS)
                theirs = row_pointers(as_pointer(at, out.dtype.element_ty), columns, True)
                is_theirs = (at != 0) & (writer != rank)
                part = tl.load(theirs, mask=in_row & is_theirs, other=0.0)
                parts = parts + (part,)
            for place in tl.static_range(begin, min(begin + LANES_AT_ONCE, RANKS)):
                is_own = (heads[place] >= 0) & (heads[place] % RANKS == rank)
                total += tl.where(is_own, own, parts[place - begin]).to(tl.float32)
        to = row_pointers(out + number.to(tl.int64) * hidden, columns, True)
        tl.store(to, round_to(total, out.dtype.element_ty), mask=in_row)


@device_function
def _place_of_head(head, first_row, region_bytes, row_bytes, RANKS: tl.constexpr):
    """(address of the row that an entry of `send_head` means, 0 for none, the rank that writes
    it)."""
    writer = tl.maximum(head, 0) % RANKS
    row = tl.maximum(head, 0) // RANKS
    at = first_row + writer * region_bytes + row.to(tl.int64) * row_bytes
    return tl.where(head >= 0, at, 0), writer
