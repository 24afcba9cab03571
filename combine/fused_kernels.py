"""A layer's combine: the down-projection, and sums of the expert rows of each token."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device.context import (
    PHASE_METADATA,
    PHASE_TILES,
    RANK,
    REGION_BYTES,
    ROLE_DGRAD_UP,
    ROLE_DOWN,
    ROLE_RETURN,
)
from ..device.lang import (
    as_pointer,
    begin_span,
    consume_token,
    current_epoch,
    device_function,
    end_span,
    is_broken,
    known_here,
    pace,
    pacing_interval,
    put,
    round_to,
    row_mask,
    row_pointers,
    stagger,
    symm_at,
    wait,
)
from ..device.programs import (
    arrive_after_tma,
    pdl_launch_dependents,
    pdl_wait,
)
from ..device.slots import metadata_flag, region, stage_counts_offset
from ..device.tiles import COMBINE, deal, notify_stage
from ..dispatch.stages_kernels import first_tiles, load_staged_tile, stage_of
from ..grouped_gemm.kernels import finish_tile
from ..grouped_gemm.product_kernels import product_size, product_tile
from ..grouped_gemm.schedule_kernels import Tile, claim_tile, unpack_tile

ROWS_AT_ONCE = tl.constexpr(3)
"""Expert rows of a token that a sum reads before it adds the first."""


@triton.jit(do_not_specialize_on_alignment=["computed", "claimed"])
def staged_gemm_kernel(
    a,  # ragged descriptor of [M, K]
    weights,  # ExpertWeights
    out,  # ragged descriptor of [1, M, N]
    schedule,  # StagedTiles
    computed,  # int64 [STAGES], see `StageCounters`
    claimed,  # int64 [1], 0 before, or None, see `claim_tile`
    context,
    STAGES: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    SHAPE: tl.constexpr,  # TileShape
    PDL: tl.constexpr,
):
    """out [M, N] = A @ w[expert].T + bias[expert], stage by stage; a program that has passed one
    says so in `computed`, for `return_sums_kernel`, which runs concurrently.

    A PDL launch after `send_return_metadata_kernel`, or one that has waited for it: it waits, and
    so for all launches before. What they have stored, later kernels may read once `computed` is
    raised.
    """
    pdl_launch_dependents(PDL)
    pdl_wait(PDL)
    STAGES_PAD: tl.constexpr = triton.next_power_of_2(STAGES + 1)
    ROLE: tl.constexpr = ROLE_DGRAD_UP if TRANSPOSED else ROLE_DOWN
    N, K = product_size(weights.w, SHAPE, TRANSPOSED)
    num_n = tl.cdiv(N, SHAPE.BLOCK_N)
    first_m = first_tiles(schedule.first_tile, num_n, STAGES, STAGES_PAD)
    own = tl.load(schedule.num_own)
    num_m = tl.load(schedule.first_tile + STAGES)
    stages = tl.arange(0, STAGES_PAD)
    since = begin_span()
    FLATTEN: tl.constexpr = weights.scales is None  # see `_grouped_gemm_kernel`
    before = -1  # the stage of this program's last tile
    for turn in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=FLATTEN):
        index = claim_tile(claimed, turn)
        # fmt: off
        packed, block = load_staged_tile(
            schedule.tiles, index, own, num_m, first_m, num_n, SHAPE.GROUP_M
        )
        # fmt: on
        expert, row, end = unpack_tile(packed)
        tile = Tile(expert, row, end, block * SHAPE.BLOCK_N)
        acc = product_tile(a, weights.w, weights.scales, tile, K, SHAPE, TRANSPOSED)
        # Before this tile is stored, when the last one's store has long ended.
        stage = stage_of(index, first_m, num_n)
        if claimed is None:  # computed again, it takes no register meanwhile
            before = stage_of(index - tl.num_programs(0), first_m, num_n)
        arrive_after_tma(computed + stages, (stages >= before) & (stages < stage), PDL)
        before = known_here(stage)
        # fmt: off
        finish_tile(
            acc, out, tile, N, SHAPE.ACTIVATION, SHAPE.SUBTILES, bias=weights.bias
        )
        # fmt: on
        since = end_span(ROLE, index, since, context)
    arrive_after_tma(computed + stages, (stages >= before) & (stages < STAGES), PDL)


class SumSizes(NamedTuple):
    """Compile-time constants of the kernels that sum."""

    NUM_TOPK: Any
    STAGES: Any  # return stages
    RANKS: Any
    RANKS_PAD: Any
    BLOCK_H: Any  # columns at a time
    WEIGHTED: Any  # a sum's rows are weighted; else the gradients of their weights return with it
    LOCAL_EXPERTS: Any


class StageRows(NamedTuple):
    """The rows that return in a stage."""

    first_region: tl.tensor  # address of the region of rank 0
    counts_offset: tl.tensor  # of a region: how many rows there are for its rank
    list_offset: tl.tensor  # of a region: which is the first, the next in the next row
    total: tl.tensor  # most for any rank, times the other ranks


@triton.jit(
    do_not_specialize=["num_gemm_programs", "num_experts"],
    do_not_specialize_on_alignment=["computed", "returned"],
)
def return_sums_kernel(
    y,  # [M, H] expert rows
    weight_grads,  # float32 [M]: the gradients of their weights, or None where rows are weighted
    computed,  # int64 [STAGES + 1], see `StageCounters`
    returned,  # int64 [STAGES], see `StageCounters`
    context,
    num_gemm_programs,
    num_experts,
    hidden,
    rows,  # ReturnRows
    SIZES: tl.constexpr,  # SumSizes
    PDL: tl.constexpr,
):
    """Sum the weighted expert rows of each token of other ranks, and return one row to its rank.
    In a backward the rows have no weights; the gradients of theirs in the forward return instead,
    in the part of the row that brought the weights.

    Stage by stage, each when all `num_gemm_programs` of the launch before have computed it. Small
    programs, which find room on the SMs of the GEMM's programs.

    A PDL launch after `staged_gemm_kernel`, with which it runs concurrently, or after
    `specialized_gemm_kernel`, whose programs count themselves at their end: it reads what the GEMM
    counts in `computed`, and what peers have published with the metadata's flags.

    The next launch may begin once the first stage is computed. Each program of the GEMM has waited,
    before it counted itself there, for all launches before the GEMM, and a program here sees the
    count of all of them: so the next launch may read what those launches have stored. In a
    backward it is a gradient of weights.
    """
    if is_broken(context) == 0:
        one = tl.arange(0, 1)
        rank = tl.load(context + RANK).to(tl.int32)
        ranks = tl.arange(0, SIZES.RANKS_PAD)
        is_peer = (ranks < SIZES.RANKS) & (ranks != rank)
        program, num_programs = tl.program_id(0), tl.num_programs(0)
        turn_bytes = min(hidden, SIZES.BLOCK_H) * y.dtype.element_ty.primitive_bitwidth // 8
        step = pacing_interval(turn_bytes, 1, num_programs, context)
        since = begin_span()
        # The metadata that says which expert rows are of which token.
        flags = metadata_flag(ranks, context)
        ready = wait(flags, is_peer, current_epoch(context), ranks, context, PHASE_METADATA)
        for stage in range(0, SIZES.STAGES):
            if ready == 1:
                flag = (computed + stage).to(tl.int64) + one * 8
                ready = wait(flag, one == 0, num_gemm_programs, one + rank, context, PHASE_TILES)
                pdl_launch_dependents(PDL)  # the first time is what counts
            if ready == 1:
                expert_rows = as_pointer(consume_token(y.to(tl.int64), ready), y.dtype.element_ty)
                first = consume_token(region(0, context), ready)
                row_grads = weight_grads
                if not SIZES.WEIGHTED:
                    row_grads = as_pointer(
                        consume_token(weight_grads.to(tl.int64), ready), tl.float32
                    )
                counts = stage_counts_offset(num_experts) + stage * 4
                theirs = first + ranks * tl.load(context + REGION_BYTES)
                at = as_pointer(theirs + counts, tl.int32)
                most = tl.max(tl.load(at, mask=is_peer, other=0), 0)
                total = most * (SIZES.RANKS - 1)
                of_stage = StageRows(
                    first, counts, rows.first + rows.list_offset + stage * 4, total
                )
                due = stagger(turn_bytes, program, context)
                # A row takes three reads, each of which needs the one before: which row it is, its
                # metadata, the rows to add up. The first two are made for the next rows meanwhile.
                to, metadata = _find_row(program, of_stage, rows, rank, context, SIZES.RANKS)
                # fmt: off
                dst_rows, weights = load_metadata(metadata, rows, 0, SIZES)
                to_next, metadata_next = _find_row(
                    program + num_programs, of_stage, rows, rank, context, SIZES.RANKS
                )
                for work_idx in range(program, total, num_programs):
                    to_then, metadata_then = _find_row(
                        work_idx + 2 * num_programs, of_stage, rows, rank, context, SIZES.RANKS
                    )
                    rows_next, weights_next = load_metadata(metadata_next, rows, 0, SIZES)
                    due = return_row(
                        to, expert_rows, metadata, dst_rows, weights, rows, hidden, due, step,
                        SIZES,
                    )
                    if not SIZES.WEIGHTED:
                        return_weight_gradients(to, metadata, row_grads, rows, SIZES)
                    to, metadata = to_next, metadata_next
                    dst_rows, weights = rows_next, weights_next
                    to_next, metadata_next = to_then, metadata_then
                # fmt: on
                notify_stage(
                    returned + stage, num_programs, COMBINE, stage, context, SIZES.RANKS_PAD
                )
            since = end_span(ROLE_RETURN, stage, since, context)
    pdl_wait(PDL)


@device_function
def _find_row(work_idx, of_stage, rows, rank, context, RANKS: tl.constexpr):
    """(address that a row of a stage returns to, that of its return metadata, 0 for none): see
    `tiles.deal`, of the `total` for all peers."""
    peer, index = deal(work_idx, max(RANKS - 1, 1))
    peer = (rank + 1 + peer) % RANKS
    region_bytes = tl.load(context + REGION_BYTES)
    theirs = of_stage.first_region + peer * region_bytes
    has = work_idx < of_stage.total
    has = has & (index < tl.load(as_pointer(theirs + of_stage.counts_offset, tl.int32)))
    entry = theirs + of_stage.list_offset + index.to(tl.int64) * rows.num_bytes
    row = tl.load(as_pointer(entry, tl.int32), mask=has, other=0)
    offset = rows.first + row.to(tl.int64) * rows.num_bytes
    to = symm_at(of_stage.first_region + rank * region_bytes + offset, peer, context)
    return to, tl.where(has, theirs + offset, 0)


@device_function
def return_row(to, y, metadata, dst_rows, weights, rows, hidden, due, step, SIZES: tl.constexpr):
    """Sum the expert rows of a token and write them to the address `to`, BLOCK_H columns every
    `step`, fewer in proportion; no row where `metadata` is 0. Returns when the next columns are
    due. See `sum_expert_rows`, `put_rows`."""
    to_row = as_pointer(to, y.dtype.element_ty)
    for column in range(0, hidden, SIZES.BLOCK_H):
        columns = column + tl.arange(0, SIZES.BLOCK_H)
        in_row = row_mask(columns, hidden, y.dtype.element_ty, True)
        # fmt: off
        total = sum_expert_rows(
            y, metadata, dst_rows, weights, rows, columns, in_row, hidden, SIZES
        )
        # fmt: on
        values = round_to(total, y.dtype.element_ty)
        due = pace(due, step * min(hidden - column, SIZES.BLOCK_H) // SIZES.BLOCK_H)
        put(row_pointers(to_row, columns, True), values, in_row & (metadata != 0))
    return due


@device_function
def return_weight_gradients(to, metadata, weight_grads, rows, SIZES: tl.constexpr):
    """Write the gradients of the weights of a token's expert rows, in the order of their metadata,
    into the row at the address `to`, where its own rank wrote the weights in the forward."""
    k = tl.arange(0, triton.next_power_of_2(SIZES.NUM_TOPK))
    has = (metadata != 0) & (k < SIZES.NUM_TOPK)
    dst_rows = as_pointer(metadata + rows.dst_rows_offset, tl.int32)
    dst_row = tl.load(dst_rows + k, mask=has, other=-1)
    has = has & (dst_row >= 0)
    grad = tl.load(weight_grads + dst_row, mask=has, other=0.0)
    put(as_pointer(to + rows.weights_offset, tl.float32) + k, grad, has)


@device_function
def load_metadata(metadata, rows, first, SIZES: tl.constexpr):
    """(dst_rows, weights) of ROWS_AT_ONCE of a token's expert rows here, from number `first` on.

    metadata: the address of the row that holds them, 0 for none, which gives no dst_rows. They are
    in the order of k, then -1; see `ReturnRowLayout`. Without WEIGHTED the weights are 1.
    """
    dst_rows_at = as_pointer(metadata + rows.dst_rows_offset, tl.int32) + first
    weights_at = as_pointer(metadata + rows.weights_offset, tl.float32) + first
    dst_rows = ()
    weights = ()
    for index in tl.static_range(ROWS_AT_ONCE):
        has = (metadata != 0) & (first + index < SIZES.NUM_TOPK)
        dst_rows = dst_rows + (tl.load(dst_rows_at + index, mask=has, other=-1),)
        weight = tl.full((), 1.0, tl.float32)
        if SIZES.WEIGHTED:
            weight = tl.load(weights_at + index, mask=has, other=0.0)
        weights = weights + (weight,)
    return dst_rows, weights


@device_function
def sum_expert_rows(
    y, metadata, dst_rows, weights, rows, columns, in_row, hidden, SIZES: tl.constexpr
):
    """fp32 [C]: `columns` of a token's expert rows here times their weights, added up in the order
    of its return metadata, of which the first have been loaded. ROWS_AT_ONCE are read at once."""
    total = tl.zeros([columns.shape[0]], tl.float32)
    total = _add_rows(total, y, dst_rows, weights, columns, in_row, hidden)
    if ROWS_AT_ONCE < SIZES.NUM_TOPK:  # Triton 3.6 does not compile a loop that never runs
        first = tl.full((), ROWS_AT_ONCE, tl.int32)
        more = dst_rows[ROWS_AT_ONCE - 1] >= 0
        while more:
            others, their_weights = load_metadata(metadata, rows, first, SIZES)
            total = _add_rows(total, y, others, their_weights, columns, in_row, hidden)
            first += ROWS_AT_ONCE
            more = (first < SIZES.NUM_TOPK) & (others[ROWS_AT_ONCE - 1] >= 0)
    return total


@device_function
def _add_rows(total, y, dst_rows, weights, columns, in_row, hidden):
    """`total` and rows of y times their weights, one after the other."""
    values = ()
    for index in tl.static_range(ROWS_AT_ONCE):
        row = y + dst_rows[index].to(tl.int64) * hidden
        has = in_row & (dst_rows[index] >= 0)
        values = values + (tl.load(row_pointers(row, columns, True), mask=has, other=0.0),)
    for index in tl.static_range(ROWS_AT_ONCE):
        weight = tl.where(dst_rows[index] >= 0, weights[index], 0.0)
        total += weight * values[index].to(tl.float32)
    return total
