"""Routing on the host side: shapes, grids and launches; kernels in `routing_kernels.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton

from .hardware import early_launch, launches_overlap
from .lang import INTERPRETED
from .routing_kernels import (
    expert_plan_kernel,
    lane_index_kernel,
    layout_kernel,
    layout_sum_kernel,
    send_plan_kernel,
)
from .slots import BLOCK_ROWS, RowLayout, Slots, next_power_of_2

LAYOUT_LANES = 256
"""Lanes that a program of the layout counts."""
NUM_PLAN_PROGRAMS = 2 if INTERPRETED else 96
"""Few enough to leave GPUs room for the launch behind, which begins at once."""


def _block_tokens(num_topk: int) -> int:
    """Tokens that a program of the layout counts."""
    return max(16, LAYOUT_LANES // next_power_of_2(num_topk))


class Layout(NamedTuple):
    """What goes where: num_tokens_per_rank int32 [R], num_tokens_per_expert int32 [E],
    is_token_in_rank bool [T, R]; earlier_counts int32 [B, E + R]: what the blocks of tokens before
    each of B blocks send to each expert and rank."""

    num_tokens_per_rank: torch.Tensor
    num_tokens_per_expert: torch.Tensor
    is_token_in_rank: torch.Tensor
    earlier_counts: torch.Tensor


def layout(topk_idx: torch.Tensor, num_experts: int, slots: Slots) -> Layout:
    """The layout of topk_idx int64 [T, K]. Bad ids count as -1; see `Buffer.check`."""
    num_tokens, num_topk = topk_idx.shape
    num_ranks = slots.layout.num_ranks
    topk_pad = next_power_of_2(num_topk)
    block = _block_tokens(num_topk)
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
    layout_sum_kernel[(triton.cdiv(num_experts + num_ranks, 16),)](
        block_counts,
        per_expert,
        per_rank,
        slots.context.words,
        num_blocks,
        num_experts,
        BLOCK=256,
        COLUMNS=16,
    )
    return Layout(per_rank, per_expert, in_rank, block_counts)


def lane_index(topk_idx: torch.Tensor, layout: Layout) -> torch.Tensor:
    """int32 [T, K]: how many earlier lanes of this rank have the same expert; see
    `reference.lane_index`. Early, behind the send plan."""
    num_tokens, num_topk = topk_idx.shape
    index = topk_idx.new_empty((num_tokens, num_topk), dtype=torch.int32)
    num_blocks, row_length = layout.earlier_counts.shape
    lane_index_kernel[(num_blocks,)](
        topk_idx,
        layout.earlier_counts,
        index,
        num_tokens,
        layout.num_tokens_per_expert.numel(),
        row_length,
        NUM_TOPK=num_topk,
        TOPK_PAD=next_power_of_2(num_topk),
        BLOCK=_block_tokens(num_topk),
        STEP=32,
        OVERLAP=launches_overlap(),
        num_warps=8,
        **early_launch(),
    )
    return index


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
    """The received rows as lists by local expert, each by the distance of the rows' source.

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
    expert_offsets: torch.Tensor,
    first_tile: torch.Tensor,
    row: RowLayout,
    header_bytes: int,
    max_rows: int,
    slots: Slots,
    wait_payload: bool,
) -> ExpertPlan:
    """List the received rows by expert, on the device, once their metadata is there, or with
    `wait_payload` all of them; x [T, H] are the tokens that this rank sent. If a peer is lost,
    first_tile becomes 0. Early, behind the metadata or the push."""
    num_ranks = len(rank_prefix_matrix)
    new = rank_prefix_matrix.new_empty
    lanes = (num_ranks, max_rows, row.num_topk)
    plan = ExpertPlan(
        row_offset=new(num_ranks * max_rows * row.num_topk, dtype=torch.int64),
        expert_offsets=expert_offsets,
        expert_row=new(lanes, dtype=torch.int32),
        lane_weight=new(lanes, dtype=torch.float32),
    )
    topk_pad = next_power_of_2(row.num_topk)
    expert_plan_kernel[(NUM_PLAN_PROGRAMS,)](
        x,
        rank_prefix_matrix,
        plan.row_offset,
        plan.expert_row,
        plan.lane_weight,
        first_tile,
        slots.context.words,
        max_rows,
        first_tile.numel(),
        header_bytes,
        row.num_bytes,
        row.ids,
        row.weights,
        row.token,
        x.shape[1],
        ITEM_BYTES=x.itemsize,
        NUM_TOPK=row.num_topk,
        TOPK_PAD=topk_pad,
        TURNS_PAD=next_power_of_2(first_tile.numel()),
        ROWS=max(BLOCK_ROWS, 1024 // topk_pad),
        CHUNK_ROWS=slots.layout.chunk_rows(row.num_bytes),
        WAIT_PAYLOAD=wait_payload,
        OVERLAP=launches_overlap(),
        num_warps=8,
        **early_launch(),
    )
    return plan
