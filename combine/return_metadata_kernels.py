"""The kernel that prepares a layer's combine: each rank learns which of its rows it sums."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device.context import RANK, ROLE_RETURN_METADATA
from ..device.lang import (
    as_pointer,
    begin_span,
    current_epoch,
    end_span,
    is_broken,
    notify,
    put,
    symm_at,
)
from ..device.programs import is_last_program, pdl_launch_dependents, pdl_wait
from ..device.slots import metadata_flag, region, stage_counts_offset
from ..dispatch.stages_kernels import return_begin
from ..routing_kernels import sum_order


class PlacedTopk(NamedTuple):
    """The top-k of this rank's tokens, all [T, K]; see `RowPlan`."""

    ids: tl.tensor  # int64
    weights: tl.tensor  # float32
    dst_row: tl.tensor  # int32
    remote_idx: tl.tensor  # int32


class SentCounts(NamedTuple):
    """How many rows there are."""

    earlier: tl.tensor  # int32 [B, E + R], `RoutingLayout.earlier_counts`
    num_remote: tl.tensor  # int32 [R], see `exchange_fused_kernel`


class ReturnRows(NamedTuple):
    """Where the rows that return lie in a region, in bytes, and in each of them what
    `ReturnRowLayout` names."""

    first: tl.tensor  # of the region, row 0
    num_bytes: tl.tensor  # from one row to the next
    list_offset: tl.tensor
    dst_rows_offset: tl.tensor
    weights_offset: tl.tensor


class MetadataSizes(NamedTuple):
    """Compile-time constants of `send_return_metadata_kernel`."""

    NUM_TOPK: Any
    TOPK_PAD: Any
    RANKS: Any
    RANKS_PAD: Any
    RETURN_STAGES: Any
    BLOCK_TOKENS: Any


@triton.jit(
    do_not_specialize=["num_tokens", "num_local_experts"],
    do_not_specialize_on_alignment=["listed", "num_to_sum"],
)
def send_return_metadata_kernel(
    topk,  # PlacedTopk
    counts,  # SentCounts
    listed,  # int64 [R, RETURN_STAGES], see `StageCounters`
    to_sum,  # int32 [RETURN_STAGES, T], out: tokens of which the last row returns in each stage
    num_to_sum,  # int64 [RETURN_STAGES], see `StageCounters`
    send_head,  # int32 [T, R], out: see `send_plan_kernel`
    context,
    num_tokens,
    num_local_experts,
    rows,  # ReturnRows
    SIZES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Tell each rank which of its expert rows belong to each token: their rows and weights, in the
    order of k, then -1. Program b does so for block b of the tokens, as in `layout_kernel`.

    Row i for a rank is the i-th token that goes there; its metadata goes into row i of this rank's
    region there, and its sum returns in row i of the other's region here, in the stage of its last
    expert row. The rows of each stage are listed in any order. `send_head` lists a token's rows in
    the order of the final sum. The last program tells how many rows each stage has, and raises
    `metadata_flags[me]` on every rank.

    A PDL launch after `dispatch_gemm_kernel`, with which it runs concurrently: it reads what
    `push_fused_kernel` has waited for. (Or after `copy_rows_kernel`, of which the same is true, or
    `specialized_gemm_kernel`, which has waited for all before it lets this one begin.)

    Example, 2 ranks of 2 experts, topk_idx [[0, 3], [2, 0], [3, 2], [0, 1]] on rank 0, nothing on
    rank 1: expert rows 0 1 2 | 3 and 0 1 | 2 3. dst_rows for rank 0 [0, -1] [1, -1] [2, 3] (tokens
    0, 1, 3), for rank 1 [2, -1] [0, -1] [3, 1] (tokens 0, 1, 2).
    """
    pdl_launch_dependents(PDL)
    BLOCK: tl.constexpr = SIZES.BLOCK_TOKENS
    TOPK_PAD: tl.constexpr = SIZES.TOPK_PAD
    RANKS: tl.constexpr = SIZES.RANKS
    STAGES: tl.constexpr = SIZES.RETURN_STAGES
    since = begin_span()
    if is_broken(context) == 0:
        rank = tl.load(context + RANK).to(tl.int32)
        tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = tokens < num_tokens
        k = tl.arange(0, TOPK_PAD)
        ranks = tl.arange(0, SIZES.RANKS_PAD)
        has = inside[:, None] & (k < SIZES.NUM_TOPK)[None, :]
        at = tokens[:, None] * SIZES.NUM_TOPK + k[None, :]
        ids = tl.load(topk.ids + at, mask=has, other=-1).to(tl.int32)
        dst_row = tl.load(topk.dst_row + at, mask=has, other=-1)
        remote_idx = tl.load(topk.remote_idx + at, mask=has, other=0)
        weight = tl.load(topk.weights + at, mask=has, other=0.0)
        num_experts = num_local_experts * RANKS
        owner = tl.where(dst_row >= 0, ids // num_local_experts, -1)
        is_sent = tl.zeros([BLOCK, SIZES.RANKS_PAD], tl.int32)
        for peer in tl.static_range(RANKS):
            goes = tl.max((owner == peer).to(tl.int32), 1)
            is_sent = tl.where((ranks == peer)[None, :], goes[:, None], is_sent)
        earlier = counts.earlier + tl.program_id(0) * (num_experts + RANKS) + num_experts
        own = region(rank, context) + rows.first
        last = tl.zeros([BLOCK], tl.int32)
        for peer in range(0, RANKS):
            here = owner == peer
            goes = tl.max(here.to(tl.int32), 1)
            stage = tl.zeros([BLOCK], tl.int32)
            last_idx = tl.max(tl.where(here, remote_idx, -1), 1)
            total = tl.load(counts.num_remote + peer)
            for other in tl.static_range(1, STAGES):
                begin = return_begin(tl.full((), other, tl.int32), total, STAGES)
                stage += (begin <= last_idx).to(tl.int32)
            returns = (goes > 0) & (peer != rank)
            last = tl.maximum(last, tl.where(returns, stage, 0))
            row = tl.load(earlier + peer) + tl.cumsum(goes, 0) - goes
            head = send_head + tokens * RANKS + sum_order(peer, owner, is_sent, RANKS)
            tl.store(head, tl.where(goes > 0, row * RANKS + peer, -1), mask=inside)
            to = symm_at(own + row.to(tl.int64) * rows.num_bytes, peer, context)[:, None]
            dst_rows = as_pointer(to + rows.dst_rows_offset, tl.int32)
            weights = as_pointer(to + rows.weights_offset, tl.float32)
            index = tl.cumsum(here.to(tl.int32), 1) - here.to(tl.int32)
            put(dst_rows + index, dst_row, here)
            put(weights + index, weight, here)
            rest = has & (goes > 0)[:, None] & (k[None, :] >= tl.sum(here.to(tl.int32), 1)[:, None])
            put(dst_rows + k[None, :], tl.full([BLOCK, TOPK_PAD], -1, tl.int32), rest)
            one = tl.full([BLOCK], 1, tl.int64)
            counter = listed + peer * STAGES + stage
            number = tl.atomic_add(counter, one, mask=returns, sem="relaxed", scope="gpu")
            entry = own + number * rows.num_bytes + rows.list_offset + stage * 4
            put(as_pointer(symm_at(entry, peer, context), tl.int32), row, returns)
        one = tl.full([BLOCK], 1, tl.int64)
        number = tl.atomic_add(num_to_sum + last, one, mask=inside, sem="relaxed", scope="gpu")
        tl.store(to_sum + last.to(tl.int64) * num_tokens + number, tokens, mask=inside)
        if is_last_program(context):
            stages = tl.arange(0, triton.next_power_of_2(STAGES))
            real = stages < STAGES
            stage_counts = region(rank, context) + stage_counts_offset(num_experts)
            for peer in range(0, RANKS):
                counter = listed + peer * STAGES + stages
                count = tl.atomic_add(counter, stages.to(tl.int64) * 0, mask=real, sem="relaxed")
                to = as_pointer(symm_at(stage_counts, peer, context), tl.int32)
                put(to + stages, count.to(tl.int32), real)
            flag = metadata_flag(rank, context)
            here = ranks < RANKS
            notify(flag + ranks * 0, ranks, here, current_epoch(context), context)
    end_span(ROLE_RETURN_METADATA, tl.program_id(0), since, context)
    pdl_wait(PDL)
