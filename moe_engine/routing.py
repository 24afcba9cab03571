"""Routing on the host side: shapes, grids and launches; kernels in `routing_kernels.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from .hardware import launches_overlap
from .routing_kernels import (
    expert_count_kernel,
    expert_plan_kernel,
    layout_kernel,
    layout_sum_kernel,
    send_plan_kernel,
)
from .slots import BLOCK_ROWS, RowLayout, Slots, next_power_of_2


def layout(
    topk_idx: torch.Tensor, num_experts: int, slots: Slots
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What goes where: (num_tokens_per_rank int32 [R], num_tokens_per_expert int32 [E],
    is_token_in_rank bool [T, R]) of topk_idx int64 [T, K]. Bad ids count as -1; see
    `Buffer.check`."""
    num_tokens, num_topk = topk_idx.shape
    num_ranks = slots.layout.num_ranks
    topk_pad = next_power_of_2(num_topk)
    block = max(16, 1024 // topk_pad)
    num_blocks = max(1, triton.cdiv(num_tokens, block))
    new = topk_idx.new_empty
    per_rank, per_expert = new(num_ranks, dtype=torch.int32), new(num_experts, dtype=torch.int32)
    in_rank = new((num_tokens, num_ranks), dtype=torch.bool)
    block_counts = new((num_blocks, num_experts + num_ranks), dtype=torch.int32)
    layout_kernel[(num_blocks,)](
        topk_idx,
        block_counts,
        in_rank.view(torch.uint8),
        slots.context.words,
        num_tokens,
        num_experts // num_ranks,
        NUM_TOPK=num_topk,
        TOPK_PAD=topk_pad,
        EXPERTS_PAD=max(32, next_power_of_2(num_experts)),
        BLOCK=block,
    )
    layout_sum_kernel[(triton.cdiv(num_experts + num_ranks, 64),)](
        block_counts,
        per_expert,
        per_rank,
        slots.context.words,
        num_blocks,
        num_experts,
        BLOCK=64,
        COLUMNS=64,
    )
    return per_rank, per_expert, in_rank


def send_plan(
    is_token_in_rank: torch.Tensor, topk_idx: torch.Tensor | None, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(send_token_idx int32 [R, T], send_head int32 [T, R]): see `reference.send_plan`. Entries
    of send_token_idx past a rank's count are not written."""
    num_tokens, num_ranks = is_token_in_rank.shape
    new = is_token_in_rank.new_empty
    send_token_idx = new((num_ranks, num_tokens), dtype=torch.int32)
    send_head = new((num_tokens, num_ranks), dtype=torch.int32)
    num_topk = topk_idx.shape[1] if topk_idx is not None else 1
    topk_pad = next_power_of_2(num_topk)
    block = max(16, 1024 // topk_pad)
    send_plan_kernel[(max(1, triton.cdiv(num_tokens, block)), num_ranks)](
        is_token_in_rank.view(torch.uint8),
        topk_idx,
        send_token_idx,
        send_head,
        num_tokens,
        num_experts // num_ranks,
        HAS_IDS=topk_idx is not None,
        NUM_TOPK=num_topk,
        TOPK_PAD=topk_pad,
        RANKS_PAD=next_power_of_2(num_ranks),
        BLOCK=block,
        SCAN=2048,
        OVERLAP=launches_overlap(),
    )
    return send_token_idx, send_head


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """The received rows as lists by local expert, in stage order.

    row_offset int64 [M]: each expert row, in elements from the start of the symmetric block (this
    rank's own rows lie in its x), grouped by expert; expert_offsets int32 [L + 1]: where each
    expert's rows begin; expert_row int32 [R, max_rows, K]: place in row_offset of each lane of each
    received row, -1 where the expert is elsewhere; lane_weight float32 [R, max_rows, K]. M is a
    worst case: nothing here needs the host to know how many rows came.
    """

    row_offset: torch.Tensor
    expert_offsets: torch.Tensor
    expert_row: torch.Tensor
    lane_weight: torch.Tensor


def expert_plan(
    x: torch.Tensor,
    rank_prefix_matrix: torch.Tensor,
    recv_expert_counts: torch.Tensor,
    expert_offsets: torch.Tensor,
    row: RowLayout,
    header_bytes: int,
    max_rows: int,
    slots: Slots,
) -> ExpertPlan:
    """Wait for all received rows and sort them by expert, on the device; x [T, H] are the tokens
    that this rank sent."""
    num_ranks, num_local_experts = recv_expert_counts.shape
    new = rank_prefix_matrix.new_empty
    topk_pad = next_power_of_2(row.num_topk)
    experts_pad = max(32, next_power_of_2(num_local_experts))
    # A block is ranked as a table of its lanes by the experts, in 64 KB of shared memory.
    block = max(1, min(BLOCK_ROWS, 16384 // (topk_pad * experts_pad)))
    num_blocks = max(1, triton.cdiv(max_rows, block))
    block_counts = new((num_ranks, num_blocks, num_local_experts), dtype=torch.int32)
    lanes = (num_ranks, max_rows, row.num_topk)
    max_expert_rows = num_ranks * max_rows * row.num_topk
    plan = ExpertPlan(
        # Valid offsets even where a lost peer leaves them unwritten: the GEMM reads through them.
        row_offset=rank_prefix_matrix.new_zeros(max_expert_rows, dtype=torch.int64),
        expert_offsets=expert_offsets,
        expert_row=new(lanes, dtype=torch.int32),
        lane_weight=new(lanes, dtype=torch.float32),
    )
    sizes = {
        "NUM_TOPK": row.num_topk,
        "TOPK_PAD": topk_pad,
        "EXPERTS_PAD": experts_pad,
        "ROWS": block,
    }
    grid = (num_blocks, num_ranks)
    expert_count_kernel[grid](
        rank_prefix_matrix,
        block_counts,
        slots.context.words,
        num_local_experts,
        header_bytes,
        row.num_bytes,
        row.ids,
        CHUNK_ROWS=slots.layout.chunk_rows(row.num_bytes),
        **sizes,
    )
    expert_plan_kernel[grid](
        x,
        rank_prefix_matrix,
        recv_expert_counts,
        expert_offsets,
        block_counts,
        plan.row_offset,
        plan.expert_row,
        plan.lane_weight,
        slots.context.words,
        max_rows,
        num_local_experts,
        header_bytes,
        row.num_bytes,
        row.ids,
        row.weights,
        row.token,
        x.shape[1],
        ITEM_BYTES=x.itemsize,
        **sizes,
        num_warps=min(32, max(4, block * topk_pad * experts_pad // 2048)),
    )
    return plan
