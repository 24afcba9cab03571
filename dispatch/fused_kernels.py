"""A layer's dispatch, which runs concurrently with the up-projection: rows go straight to where
the experts' GEMM reads them."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device.context import RANK, ROLE_COPY, ROLE_DGRAD_DOWN, ROLE_KEEP, ROLE_PUSH, ROLE_UP
from ..device.lang import (
    as_pointer,
    begin_span,
    consume_token,
    device_function,
    end_span,
    is_broken,
    pacing_interval,
    put_rows,
    stagger,
    ticks,
)
from ..device.programs import arrive, pdl_launch_dependents, pdl_wait
from ..device.tiles import (
    DISPATCH,
    deadline_from_now,
    deal,
    end_wait_tile,
    notify_stage,
    put_tile,
    stage_begin,
    stage_unit,
    wait_stage,
    wait_tile,
)
from ..grouped_gemm.kernels import finish_tile
from ..grouped_gemm.product_kernels import is_gated, product_size, product_tile
from ..grouped_gemm.schedule_kernels import Tile, claim_tile, tile_coordinates
from .stages_kernels import unpack_staged_tile


class RowSize(NamedTuple):
    """The size of a row that is copied."""

    num_vecs: tl.tensor
    num_bytes: tl.tensor


class UpOutputs(NamedTuple):
    """What an up-projection stores."""

    act: tl.tensor  # ragged descriptor of [1, M, N]
    pre: tl.tensor  # ragged descriptor of [PARTS, M, N], or None


class CopySizes(NamedTuple):
    """Compile-time constants of kernels that copy rows."""

    BATCH: Any  # rows that a program looks up at a time
    BLOCK_ROWS: Any  # of these, rows that it copies at a time
    BLOCK_VECS: Any  # vectors of each
    TAIL_VECS: Any  # those of a short last block, 0 without one, see `lang.put_rows`
    ALIGNED: Any  # rows are a multiple of 16 bytes
    RANKS: Any
    RANKS_PAD: Any


@triton.jit(
    do_not_specialize=["stage_count", "num_tokens"],
    do_not_specialize_on_alignment=["pushed"],
)
def push_fused_kernel(
    x,  # vectors [T, num_vecs]
    to_push,  # int64 [R, S, T], see `RowPlan`
    num_to_push,  # int64 [R, S]
    pushed,  # int64 [S], see `StageCounters`
    expert_rows,  # int64 [R]: address of the expert rows on each rank
    context,
    num_tokens,
    stage_count,
    row,  # RowSize
    SIZES: tl.constexpr,  # CopySizes
    PDL: tl.constexpr,
):
    """Copy this rank's rows, one for each token and other rank, to their rows among the expert
    rows of these, stage by stage.

    Many programs of a warp: they find room on the SMs of the GEMM's programs, and all together keep
    just as many bytes in flight as the links take; more would slow the GEMM down.

    A PDL launch after `staged_schedule_kernel`, for which it waits before anything else: so later
    launches may read at once what that kernel and those before it have stored. After an exchange
    all ranks are in the call, so what their expert rows held in the one before has been read. The
    flags of a stage also publish what `place_rows_kernel` has told other ranks, which has ended.
    """
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    if is_broken(context):
        return
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    step = pacing_interval(SIZES.BLOCK_ROWS * SIZES.BLOCK_VECS * 4, 1, num_programs, context)
    due = stagger(SIZES.BLOCK_ROWS * SIZES.BLOCK_VECS * 4, program, context)
    rank = tl.load(context + RANK).to(tl.int32)
    plan = Pushes(to_push, num_to_push, expert_rows, num_tokens, stage_count, row.num_bytes, rank)
    ranks = tl.arange(0, SIZES.RANKS_PAD)
    since = begin_span()
    to_next, token_next = _look_up(0, program, plan, SIZES.RANKS, SIZES.BATCH)
    for stage in range(0, stage_count):
        # A stage's first rows are looked up while those before it are copied. Their number is
        # not: Triton 3.6 takes a reduction that a loop hands on for its first value.
        counts = num_to_push + ranks * stage_count + stage
        most = tl.max(tl.load(counts, mask=ranks < SIZES.RANKS, other=0), 0)
        total = most.to(tl.int32) * (SIZES.RANKS - 1)
        to, token = to_next, token_next
        next_stage = tl.minimum(stage + 1, stage_count - 1)
        to_next, token_next = _look_up(next_stage, program, plan, SIZES.RANKS, SIZES.BATCH)
        for first in range(program, total, num_programs * SIZES.BATCH):
            if first > program:
                to, token = _look_up(stage, first, plan, SIZES.RANKS, SIZES.BATCH)
            num_rows = tl.minimum(tl.cdiv(total - first, num_programs), SIZES.BATCH)
            # fmt: off
            due = put_tile(
                to, x + token * row.num_vecs, num_rows, row.num_vecs, due, step,
                SIZES.BLOCK_ROWS, SIZES.ALIGNED, SIZES.BLOCK_VECS, SIZES.TAIL_VECS,
            )
            # fmt: on
        notify_stage(pushed + stage, num_programs, DISPATCH, stage, context, SIZES.RANKS_PAD)
        since = end_span(ROLE_PUSH, stage, since, context)


class Pushes(NamedTuple):
    """The rows that a rank pushes, see `push_fused_kernel`."""

    to_push: tl.tensor
    num_to_push: tl.tensor
    expert_rows: tl.tensor
    num_tokens: tl.tensor
    stage_count: tl.tensor
    row_bytes: tl.tensor
    rank: tl.tensor


@device_function
def _look_up(stage, first, plan, RANKS: tl.constexpr, BATCH: tl.constexpr):
    """(addresses [BATCH] that rows of a stage go to, 0 for none; their tokens), from work_idx
    `first` on; see `tiles.deal`."""
    work_idx = first + tl.arange(0, BATCH) * tl.num_programs(0)
    peers, rows = deal(work_idx, max(RANKS - 1, 1))
    peers = (plan.rank + 1 + peers) % RANKS
    part = peers * plan.stage_count + stage
    has = rows < tl.load(plan.num_to_push + part)
    entries = plan.to_push + part.to(tl.int64) * plan.num_tokens + rows
    entry = tl.load(entries, mask=has, other=0)
    to = tl.load(plan.expert_rows + peers) + (entry >> 32) * plan.row_bytes
    return tl.where(has, to, 0), entry & 0x7FFFFFFF


class CopyLists(NamedTuple):
    """What is copied into expert rows; see `place_rows_kernel`."""

    own_order: tl.tensor  # int64 [T * K]
    copies: tl.tensor  # int64 [M]


@triton.jit(
    do_not_specialize=["stage_count", "own_first"],
    do_not_specialize_on_alignment=["num_rows", "num_remote", "copied"],
)
def copy_rows_kernel(
    x,  # vectors [T, num_vecs]
    rows,  # vectors [M, num_vecs]: this rank's expert rows
    lists,  # CopyLists
    num_rows,  # int32 [1]
    num_remote,  # int32 [1]: rows from other ranks
    copied,  # int64 [2 * S], see `StageCounters`
    context,
    stage_count,
    own_first,
    row,  # RowSize
    SIZES: tl.constexpr,  # CopySizes
    PDL: tl.constexpr,
):
    """Copy this rank's own tokens to its expert rows, and each row that others push to the rows of
    its token's further experts here, stage by stage.

    The row that is copied came in the same stage or an earlier one. The first S of `copied` are for
    stages of own rows, the others for those of other ranks', in the order in which programs arrive
    at them: the first `own_first` stages of own rows come first, each later one before the same one
    of others. When all programs have arrived all rows of the stage have arrived, pushed ones too:
    what their ranks did before they raised the stage's flags happens before a program sees these,
    and so before it arrives.

    A PDL launch after `push_fused_kernel`, with which it runs concurrently: it reads what that
    kernel has waited for before it let this one begin, and pushed rows once flags are raised.
    """
    pdl_launch_dependents(PDL)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    ready = 1 - is_broken(context).to(tl.int32)
    num_others = tl.load(num_remote)
    num_own = tl.load(num_rows) - num_others
    own_unit = stage_unit(num_own, stage_count)
    unit_others = stage_unit(num_others, stage_count)
    since = begin_span()
    for turn in range(0, 2 * stage_count):
        # The first own stages, the same ones of others; then each own stage before one of others.
        is_early = turn < 2 * own_first
        stage = tl.where(is_early, turn % tl.maximum(own_first, 1), turn // 2)
        is_own = tl.where(is_early, turn < own_first, turn % 2 == 0)
        if (is_own == 0) & (ready == 1):
            ready = wait_stage(DISPATCH, stage, context, SIZES.RANKS_PAD)
        if ready == 1:
            here = tl.where(is_own, num_own, num_others)
            unit = tl.where(is_own, own_unit, unit_others)
            begin = stage_begin(stage, unit, stage_count)
            end = tl.minimum(stage_begin(stage + 1, unit, stage_count), here)
            expert_rows = consume_token(rows.to(tl.int64), ready)
            entries = tl.where(is_own, lists.own_order.to(tl.int64), lists.copies.to(tl.int64))
            entries = as_pointer(consume_token(entries, ready), tl.int64)
            originals = tl.where(is_own, x.to(tl.int64), expert_rows)
            for first in range(begin + program, end, num_programs * SIZES.BATCH):
                index = first + tl.arange(0, SIZES.BATCH) * num_programs
                entry = tl.load(entries + index, mask=index < end, other=-1)
                entry = tl.sort(entry, descending=True)  # those to be copied come first
                is_copy = entry >= 0
                to = tl.where(is_copy, expert_rows + (entry >> 32) * row.num_bytes, 0)
                source = originals + tl.where(is_copy, entry & 0x7FFFFFFF, 0) * row.num_bytes
                # fmt: off
                put_tile(
                    to, as_pointer(source, rows.dtype.element_ty),
                    tl.sum(is_copy.to(tl.int32), 0), row.num_vecs, ticks(), 0,
                    SIZES.BLOCK_ROWS, SIZES.ALIGNED, SIZES.BLOCK_VECS, SIZES.TAIL_VECS,
                )
                # fmt: on
            arrive(copied + tl.where(is_own, 0, stage_count) + stage)
        since = end_span(ROLE_COPY, stage, since, context)
    pdl_wait(PDL)


@triton.jit(do_not_specialize_on_alignment=["num_rows"])
def keep_rows_kernel(
    rows,  # vectors [M, num_vecs]: this rank's expert rows
    kept,  # the same, out
    num_rows,  # int32 [1]
    context,
    row,  # RowSize
    SIZES: tl.constexpr,  # CopySizes
    PDL: tl.constexpr,
):
    """Copy the expert rows to memory of this rank alone, where they stay for the backward.

    A PDL launch after one that ends when all rows have arrived, for which it waits.
    """
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    end = tl.where(is_broken(context), 0, tl.load(num_rows))
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    since = begin_span()
    for first in range(program * SIZES.BLOCK_ROWS, end, num_programs * SIZES.BLOCK_ROWS):
        index = (first + tl.arange(0, SIZES.BLOCK_ROWS)).to(tl.int64)
        # fmt: off
        put_rows(
            kept + index * row.num_vecs, rows + index * row.num_vecs, row.num_vecs, index < end,
            ticks(), 0, SIZES.ALIGNED, SIZES.BLOCK_VECS, SIZES.TAIL_VECS,
        )
        # fmt: on
    end_span(ROLE_KEEP, program, since, context)


@device_function
def load_arriving_tile(
    tiles,
    index,
    num_m,
    num_n,
    WIDTH: tl.constexpr,
    GROUP_M: tl.constexpr,
    copied,
    waited_for,
    num_copy_programs,
    deadline,
    context,
    PDL: tl.constexpr,
):
    """(`schedule_kernels.load_tile` of a staged schedule, once the rows of the tile have arrived,
    the counter that said so); see `wait_tile`."""
    m, block = tile_coordinates(index, num_m, num_n, GROUP_M)
    expert, row, end, counter = unpack_staged_tile(tl.load(tiles.packed + m))
    # fmt: off
    zero, waited_for = wait_tile(
        copied, counter.to(tl.int32), waited_for, num_copy_programs, deadline, context, PDL
    )
    # fmt: on
    return Tile(expert, row + zero, end, block * WIDTH), waited_for


@triton.jit(
    do_not_specialize=["num_copy_programs", "stage_count"],
    do_not_specialize_on_alignment=["copied"],
)
def dispatch_gemm_kernel(
    a,  # ragged descriptor of the expert rows [M, K]
    weights,  # ExpertWeights [L, PARTS, N, K]
    out,  # UpOutputs
    tiles,  # `ClaimedTiles`, in the order of `staged_schedule_kernel`
    copied,  # int64 [2 * S], see `StageCounters`
    context,
    num_copy_programs,
    stage_count,
    TRANSPOSED: tl.constexpr,
    RANKS_PAD: tl.constexpr,
    SHAPE: tl.constexpr,  # TileShape
    PDL: tl.constexpr,
):
    """out.act [M, N] = the activation of the expert rows' products, of which it takes PARTS, each
    tile once its rows have arrived; out.pre gets the products. In a backward the rows are those of
    dy, and the weights [L, 1, K, N] are TRANSPOSED.

    The grouped GEMM, but for the wait at each tile.

    A PDL launch after `copy_rows_kernel`, of which all programs are running then; of what came
    before it, it reads only what `push_fused_kernel` has waited for. The scales of e4m3 rows lie in
    the rows; their addresses follow from the tile's row, and so from the wait for it.
    """
    pdl_launch_dependents(PDL)
    N, K = product_size(weights.w, SHAPE, TRANSPOSED)
    num_m = tl.load(tiles.count)
    ROLE: tl.constexpr = ROLE_DGRAD_DOWN if TRANSPOSED else ROLE_UP
    WIDTH: tl.constexpr = SHAPE.BLOCK_N // 2 if is_gated(SHAPE.ACTIVATION.name) else SHAPE.BLOCK_N
    num_n = tl.cdiv(N, WIDTH)
    deadline = deadline_from_now(context)
    since, waited_for = begin_span(), tl.full((), -1, tl.int32)
    FLATTEN: tl.constexpr = weights.scales is None  # see `_grouped_gemm_kernel`
    for turn in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=FLATTEN):
        index = claim_tile(tiles.claimed, turn)
        # fmt: off
        tile, waited_for = load_arriving_tile(
            tiles, index, num_m, num_n, WIDTH, SHAPE.GROUP_M, copied, waited_for,
            num_copy_programs, deadline, context, PDL,
        )
        # fmt: on
        acc = product_tile(a, weights.w, weights.scales, tile, K, SHAPE, TRANSPOSED)
        # fmt: off
        finish_tile(
            acc, out.act, tile, N, SHAPE.ACTIVATION, SHAPE.SUBTILES, out.pre, weights.bias
        )
        # fmt: on
        since = end_span(ROLE, index, since, context)
    end_wait_tile(stage_count, deadline, context, RANKS_PAD)
    pdl_wait(PDL)
