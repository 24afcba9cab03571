"""Dispatch beside the up-projection: rows go straight to their places in the experts' order."""

import triton
import triton.language as tl

from ..device.context import RANK, ROLE_COPY, ROLE_PUSH, ROLE_RETURN_METADATA, ROLE_UP
from ..device.lang import (
    as_pointer,
    begin_span,
    consume_token,
    current_epoch,
    device_function,
    end_span,
    is_broken,
    notify,
    pacing_interval,
    put,
    stagger,
    symm_at,
    ticks,
)
from ..device.programs import arrive, is_last_program, pdl_launch_dependents, pdl_wait
from ..device.slots import metadata_flag, region, stage_counts_offset
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
from ..grouped_gemm.kernels import finish_tile, gemm_tile
from ..grouped_gemm.schedule_kernels import Tile, tile_coordinates, unpack_tile
from ..routing_kernels import sum_order
from .stages_kernels import return_begin


@triton.jit(
    do_not_specialize=["stage_count", "num_tokens"],
    do_not_specialize_on_alignment=["pushed"],
)
def push_fused_kernel(
    x,  # vectors [T, num_vecs]
    to_push,  # int64 [R, S, T], see `place_rows_kernel`
    num_to_push,  # int64 [R, S]
    pushed,  # int64 [S]: programs that have pushed their share of each stage
    expert_rows,  # int64 [R]: address of the expert rows on each rank
    context,
    num_tokens,
    stage_count,
    num_vecs,
    row_bytes,
    RANKS: tl.constexpr,
    RANKS_PAD: tl.constexpr,
    BATCH: tl.constexpr,
    LANES: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_VECS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy this rank's rows, one for each token and other rank, to their places among the expert
    rows of these, stage by stage.

    Many programs of a warp: they find room on the SMs beside the GEMM's, and all together keep just
    as many bytes in flight as the links take; more would slow the GEMM down.
    A PDL launch behind the places. After an exchange all ranks are in the call, so what their
    expert rows held in the one before has been read. A stage's flags also publish what
    `place_rows_kernel` has told other ranks, as it has ended before.
    """
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    if is_broken(context):
        return
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    step = pacing_interval(LANES * BLOCK_VECS * 4, 1, num_programs, context)
    due = stagger(LANES * BLOCK_VECS * 4, program, context)
    rank = tl.load(context + RANK).to(tl.int32)
    ranks = tl.arange(0, RANKS_PAD)
    since = begin_span()
    # fmt: off
    to_next, token_next = _look_up(
        0, program, to_push, num_to_push, expert_rows, num_tokens, stage_count, row_bytes, rank,
        RANKS, BATCH,
    )
    for stage in range(0, stage_count):
        # The ways of a stage's first rows are looked up while those before it are copied. Their
        # number is not: Triton 3.6 takes a reduction that a loop hands on for its first value.
        counts = num_to_push + ranks * stage_count + stage
        most = tl.max(tl.load(counts, mask=ranks < RANKS, other=0), 0)
        total = most.to(tl.int32) * (RANKS - 1)
        to, token = to_next, token_next
        to_next, token_next = _look_up(
            tl.minimum(stage + 1, stage_count - 1), program, to_push, num_to_push, expert_rows,
            num_tokens, stage_count, row_bytes, rank, RANKS, BATCH,
        )
        for first in range(program, total, num_programs * BATCH):
            if first > program:
                to, token = _look_up(
                    stage, first, to_push, num_to_push, expert_rows, num_tokens, stage_count,
                    row_bytes, rank, RANKS, BATCH,
                )
            num_rows = tl.minimum(tl.cdiv(total - first, num_programs), BATCH)
            due = put_tile(
                to, x + token * num_vecs, num_rows, num_vecs, due, step, LANES, ALIGNED,
                BLOCK_VECS,
            )
        notify_stage(pushed + stage, num_programs, DISPATCH, stage, context, RANKS_PAD)
        since = end_span(ROLE_PUSH, stage, since, context)
    # fmt: on


@device_function
def _look_up(
    stage,
    first,
    to_push,
    num_to_push,
    expert_rows,
    num_tokens,
    stage_count,
    row_bytes,
    rank,
    RANKS: tl.constexpr,
    BATCH: tl.constexpr,
):
    """(addresses [BATCH] that rows of a stage go to, 0 for none, their tokens), from its place
    `first` on; see `tiles.deal`."""
    places = first + tl.arange(0, BATCH) * tl.num_programs(0)
    peers, rows = deal(places, max(RANKS - 1, 1))
    peers = (rank + 1 + peers) % RANKS
    part = peers * stage_count + stage
    has = rows < tl.load(num_to_push + part)
    lane = tl.load(to_push + part.to(tl.int64) * num_tokens + rows, mask=has, other=0)
    to = tl.load(expert_rows + peers) + (lane >> 32) * row_bytes
    return tl.where(has, to, 0), lane & 0x7FFFFFFF


@triton.jit(
    do_not_specialize=["stage_count", "own_apart"],
    do_not_specialize_on_alignment=["num_rows", "num_remote", "copied"],
)
def copy_rows_kernel(
    x,  # vectors [T, num_vecs]
    rows,  # vectors [M, num_vecs]: this rank's expert rows
    own_order,  # int64 [T * K], see `place_rows_kernel`
    copies,  # int64 [M], see `place_rows_kernel`
    num_rows,  # int32 [1]
    num_remote,  # int32 [1]: rows from other ranks
    copied,  # int64 [2 * S]: programs that have copied their share of each stage, see below
    context,
    stage_count,
    own_apart,
    num_vecs,
    row_bytes,
    RANKS_PAD: tl.constexpr,
    BATCH: tl.constexpr,
    LANES: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_VECS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy this rank's own tokens to its expert rows, and each row that others push to the further
    experts of its token here, stage by stage.

    The row that is copied came in the same stage or an earlier one. The first S of `copied` are for
    stages of own rows, the others for those of other ranks', in the order in which programs arrive
    at them: with own_apart own rows all come first, else each stage of them before the same one of
    others. When all programs have arrived all rows of the stage are there, pushed ones too: what
    their ranks did before they raised the stage's flags happens before a program sees these, and so
    before it arrives. A PDL launch behind `push_fused_kernel`, beside which it runs.
    """
    pdl_launch_dependents(PDL)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    token = 1 - is_broken(context).to(tl.int32)
    num_others = tl.load(num_remote)
    num_own = tl.load(num_rows) - num_others
    own_unit = stage_unit(num_own, stage_count)
    unit_others = stage_unit(num_others, stage_count)
    since = begin_span()
    # fmt: off
    for turn in range(0, 2 * stage_count):
        # Own rows in their stages, then those of others; or each own stage before one of others.
        stage = tl.where(own_apart != 0, turn % stage_count, turn // 2)
        is_own = tl.where(own_apart != 0, turn < stage_count, turn % 2 == 0)
        if (is_own == 0) & (token == 1):
            token = wait_stage(DISPATCH, stage, context, RANKS_PAD)
        if token == 1:
            here = tl.where(is_own, num_own, num_others)
            unit = tl.where(is_own, own_unit, unit_others)
            begin = stage_begin(stage, unit, stage_count)
            end = tl.minimum(stage_begin(stage + 1, unit, stage_count), here)
            there = consume_token(rows.to(tl.int64), token)
            entries = tl.where(is_own, own_order.to(tl.int64), copies.to(tl.int64))
            entries = as_pointer(consume_token(entries, token), tl.int64)
            originals = tl.where(is_own, x.to(tl.int64), there)
            for first in range(begin + program, end, num_programs * BATCH):
                positions = first + tl.arange(0, BATCH) * num_programs
                entry = tl.load(entries + positions, mask=positions < end, other=-1)
                entry = tl.sort(entry, descending=True)  # those to be copied come first
                is_copy = entry >= 0
                to = tl.where(is_copy, there + (entry >> 32) * row_bytes, 0)
                source = originals + tl.where(is_copy, entry & 0x7FFFFFFF, 0) * row_bytes
                put_tile(
                    to, as_pointer(source, rows.dtype.element_ty),
                    tl.sum(is_copy.to(tl.int32), 0), num_vecs, ticks(), 0, LANES, ALIGNED,
                    BLOCK_VECS,
                )
            arrive(copied + tl.where(is_own, 0, stage_count) + stage)
        since = end_span(ROLE_COPY, stage, since, context)
    # fmt: on
    pdl_wait(PDL)


@triton.jit(
    do_not_specialize=["num_copy_programs", "stage_count", "N", "K"],
    do_not_specialize_on_alignment=["tiles", "num_tiles", "copied"],
)
def dispatch_gemm_kernel(
    a,  # ragged descriptor of the expert rows [M, K]
    w,  # descriptor of the weights, see `gemm_tile`
    out,  # ragged descriptor of [1, M, N]
    tiles,  # int64 [max_tiles], in the order of `staged_schedule_kernel`
    num_tiles,  # int32 [1]
    copied,  # int64 [2 * S], see `copy_rows_kernel`
    context,
    num_copy_programs,
    stage_count,
    N,
    K,
    RANKS_PAD: tl.constexpr,
    SHAPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [M, N] = silu(gate) * up of the expert rows, each tile once its rows are there.

    The grouped GEMM, but for the wait at each tile. A PDL launch behind `copy_rows_kernel`, of
    which all programs are running then; of what came before it, it reads only what the push has
    waited for.
    """
    pdl_launch_dependents(PDL)
    num_m = tl.load(num_tiles)
    WIDTH: tl.constexpr = SHAPE.BLOCK_N // 2
    num_n = tl.cdiv(N, WIDTH)
    deadline = deadline_from_now(context)
    since = begin_span()
    for index in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=True):
        m, block = tile_coordinates(index, num_m, num_n, SHAPE.GROUP_M)
        word = tl.load(tiles + m)
        expert, row, end = unpack_tile(word)
        n = block * WIDTH
        row += wait_tile(copied + (word >> 56), num_copy_programs, deadline, context, PDL)
        tile = Tile(expert, row, end, n)
        acc = gemm_tile(a, w, tile, K, SHAPE)
        finish_tile(acc, out, tile, N, "swiglu", SHAPE.SUBTILES)
        since = end_span(ROLE_UP, index, since, context)
    end_wait_tile(stage_count, deadline, context, RANKS_PAD)
    pdl_wait(PDL)


@triton.jit(
    do_not_specialize=["num_tokens", "num_local_experts"],
    do_not_specialize_on_alignment=["listed", "num_to_sum"],
)
def send_return_metadata_kernel(
    topk_idx,  # int64 [T, K]
    topk_weights,  # float32 [T, K]
    lane_place,  # int32 [T, K], see `place_rows_kernel`
    lane_position,  # int32 [T, K]
    earlier_counts,  # int32 [B, E + R], see `routing.Layout`
    num_remote,  # int32 [R], see `exchange_fused_kernel`
    listed,  # int64 [R, BACK_STAGES]: rows listed so far
    to_sum,  # int32 [BACK_STAGES, T], out: tokens of which the last row comes back in each stage
    num_to_sum,  # int64 [BACK_STAGES], their numbers, 0 before
    send_head,  # int32 [T, R], out: see `send_plan_kernel`
    context,
    num_tokens,
    num_local_experts,
    header_bytes,
    row_bytes,
    list_offset,
    places_offset,
    weights_offset,
    NUM_TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    RANKS: tl.constexpr,
    RANKS_PAD: tl.constexpr,
    BACK_STAGES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Tell each rank which of its expert rows belong to each token: their places and weights, in
    top-k lane order, then -1. Program b does so for block b of the tokens, as in `layout_kernel`.

    Row i for a rank is the i-th token that goes there; its record stands behind the place of its
    row in this rank's region, and the sum returns in the same place of the other's. It goes back in
    the stage of its last expert row; the rows of each stage are listed in any order. `send_head`
    lists a token's rows in the order of the final sum. The last program tells how many rows there
    are of each stage, and raises `metadata_flags[me]` on every rank. A PDL launch behind
    `dispatch_gemm_kernel`, beside which it runs.

    Example, 2 ranks of 2 experts, topk_idx [[0, 3], [2, 0], [3, 2], [0, 1]] on rank 0, nothing on
    rank 1: expert rows 0 1 2 | 3 and 0 1 | 2 3. Records for rank 0 [0, -1] [1, -1] [2, 3] (tokens
    0, 1, 3), for rank 1 [2, -1] [0, -1] [3, 1] (tokens 0, 1, 2).
    """
    pdl_launch_dependents(PDL)
    since = begin_span()
    if is_broken(context) == 0:
        rank = tl.load(context + RANK).to(tl.int32)
        tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = tokens < num_tokens
        lanes = tl.arange(0, TOPK_PAD)
        ranks = tl.arange(0, RANKS_PAD)
        has = inside[:, None] & (lanes < NUM_TOPK)[None, :]
        at = tokens[:, None] * NUM_TOPK + lanes[None, :]
        ids = tl.load(topk_idx + at, mask=has, other=-1).to(tl.int32)
        place = tl.load(lane_place + at, mask=has, other=-1)
        position = tl.load(lane_position + at, mask=has, other=0)
        weight = tl.load(topk_weights + at, mask=has, other=0.0)
        num_experts = num_local_experts * RANKS
        owner = tl.where(place >= 0, ids // num_local_experts, -1)
        is_sent = tl.zeros([BLOCK, RANKS_PAD], tl.int32)
        for peer in tl.static_range(RANKS):
            goes = tl.max((owner == peer).to(tl.int32), 1)
            is_sent = tl.where((ranks == peer)[None, :], goes[:, None], is_sent)
        earlier = earlier_counts + tl.program_id(0) * (num_experts + RANKS) + num_experts
        own = region(rank, context) + header_bytes
        last = tl.zeros([BLOCK], tl.int32)
        for peer in range(0, RANKS):
            here = owner == peer
            goes = tl.max(here.to(tl.int32), 1)
            stage = tl.zeros([BLOCK], tl.int32)
            last_position = tl.max(tl.where(here, position, -1), 1)
            total = tl.load(num_remote + peer)
            for other in tl.static_range(1, BACK_STAGES):
                begin = return_begin(tl.full((), other, tl.int32), total, BACK_STAGES)
                stage += (begin <= last_position).to(tl.int32)
            returns = (goes > 0) & (peer != rank)
            last = tl.maximum(last, tl.where(returns, stage, 0))
            row = tl.load(earlier + peer) + tl.cumsum(goes, 0) - goes
            head = send_head + tokens * RANKS + sum_order(peer, owner, is_sent, RANKS)
            tl.store(head, tl.where(goes > 0, row * RANKS + peer, -1), mask=inside)
            record = symm_at(own + row.to(tl.int64) * row_bytes, peer, context)[:, None]
            places = as_pointer(record + places_offset, tl.int32)
            weights = as_pointer(record + weights_offset, tl.float32)
            lane = tl.cumsum(here.to(tl.int32), 1) - here.to(tl.int32)
            put(places + lane, place, here)
            put(weights + lane, weight, here)
            rest = (
                has
                & (goes > 0)[:, None]
                & (lanes[None, :] >= tl.sum(here.to(tl.int32), 1)[:, None])
            )
            put(places + lanes[None, :], tl.full([BLOCK, TOPK_PAD], -1, tl.int32), rest)
            one = tl.full([BLOCK], 1, tl.int64)
            counter = listed + peer * BACK_STAGES + stage
            index = tl.atomic_add(counter, one, mask=returns, sem="relaxed", scope="gpu")
            entry = own + index * row_bytes + list_offset + stage * 4
            put(as_pointer(symm_at(entry, peer, context), tl.int32), row, returns)
        one = tl.full([BLOCK], 1, tl.int64)
        number = tl.atomic_add(num_to_sum + last, one, mask=inside, sem="relaxed", scope="gpu")
        tl.store(to_sum + last.to(tl.int64) * num_tokens + number, tokens, mask=inside)
        if is_last_program(context):
            stages = tl.arange(0, triton.next_power_of_2(BACK_STAGES))
            real = stages < BACK_STAGES
            counts = region(rank, context) + stage_counts_offset(num_experts)
            for peer in range(0, RANKS):
                counter = listed + peer * BACK_STAGES + stages
                count = tl.atomic_add(counter, stages.to(tl.int64) * 0, mask=real, sem="relaxed")
                to = as_pointer(symm_at(counts, peer, context), tl.int32)
                put(to + stages, count.to(tl.int32), real)
            flag = metadata_flag(rank, context)
            here = ranks < RANKS
            notify(flag + ranks * 0, ranks, here, current_epoch(context), context)
    end_span(ROLE_RETURN_METADATA, tl.program_id(0), since, context)
    pdl_wait(PDL)
