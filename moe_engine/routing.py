"""Routing on the host side: shapes, grids and launches; kernels in `routing_kernels.py`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from .routing_kernels import layout_kernel, layout_sum_kernel, send_plan_kernel
from .symm.slots import Slots
from .utils import next_power_of_2

LAYOUT_IDS = 256
"""Entries of topk_idx that a program of the layout counts."""


def _block_tokens(num_topk: int) -> int:
    """Tokens that a program of the layout counts."""
    return max(16, LAYOUT_IDS // next_power_of_2(num_topk))


class RoutingLayout(NamedTuple):
    """What goes where: num_tokens_per_rank int32 [R], num_tokens_per_expert int32 [E],
    is_token_in_rank bool [T, R]; earlier_counts int32 [B, E + R]: what the blocks of tokens before
    each of B blocks, of block_tokens each, send to each expert and rank."""

    num_tokens_per_rank: torch.Tensor
    num_tokens_per_expert: torch.Tensor
    is_token_in_rank: torch.Tensor
    earlier_counts: torch.Tensor
    block_tokens: int


def layout(
    topk_idx: torch.Tensor, num_experts: int, slots: Slots, copy: torch.Tensor | None = None
) -> RoutingLayout:
    """The layout of topk_idx int64 [T, K], which is copied to `copy` unless that is None. Bad ids
    count as -1; see `Buffer.check`."""
    num_tokens, num_topk = topk_idx.shape
    num_ranks = slots.layout.num_ranks
    block_tokens = _block_tokens(num_topk)
    num_blocks = max(1, triton.cdiv(num_tokens, block_tokens))
    new = topk_idx.new_empty
    per_rank, per_expert = new(num_ranks, dtype=torch.int32), new(num_experts, dtype=torch.int32)
    in_rank = new((num_tokens, num_ranks), dtype=torch.bool)
    block_counts = new((num_blocks, num_experts + num_ranks), dtype=torch.int32)
    slots.context.launch(
        layout_kernel,
        (num_blocks,),
        topk_idx,
        block_counts,
        in_rank.view(torch.uint8),
        copy,
        slots.context.fields,
        num_tokens,
        num_experts // num_ranks,
        NUM_TOPK=num_topk,
        TOPK_PAD=next_power_of_2(num_topk),
        EXPERTS_PAD=max(32, next_power_of_2(num_experts)),
        BLOCK=block_tokens,
        shares_sms=True,
    )
    slots.context.launch(
        layout_sum_kernel,
        (triton.cdiv(num_experts + num_ranks, 16),),
        block_counts,
        per_expert,
        per_rank,
        slots.context.fields,
        num_blocks,
        num_experts,
        BLOCK=256,
        COLUMNS=16,
        shares_sms=True,
    )
    return RoutingLayout(per_rank, per_expert, in_rank, block_counts, block_tokens)


def send_plan(
    is_token_in_rank: torch.Tensor,
    topk_idx: torch.Tensor | None,
    num_experts: int,
    slots: Slots,
    send_token_idx: torch.Tensor | None = None,
    send_head: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(send_token_idx int32 [R, T], send_head int32 [T, R]): see `reference.send_plan`. Entries
    of send_token_idx past a rank's count are not written. Without topk_idx is_token_in_rank, and
    each result with it, may have one more dimension before these: batches of tokens. Results are
    made where no memory is given for them."""
    *batches, num_tokens, num_ranks = is_token_in_rank.shape
    new = is_token_in_rank.new_empty
    if send_token_idx is None:
        send_token_idx = new((*batches, num_ranks, num_tokens), dtype=torch.int32)
    if send_head is None:
        send_head = new((*batches, num_tokens, num_ranks), dtype=torch.int32)
    num_topk = topk_idx.shape[1] if topk_idx is not None else 1
    topk_pad = next_power_of_2(num_topk)
    block = max(16, 1024 // topk_pad)
    slots.context.launch(
        send_plan_kernel,
        (max(1, triton.cdiv(num_tokens, block)), num_ranks, *batches),
        is_token_in_rank.view(torch.uint8),
        topk_idx,
        send_token_idx,
        send_head,
        num_tokens,
        num_experts // num_ranks,
        NUM_TOPK=num_topk,
        TOPK_PAD=topk_pad,
        RANKS_PAD=next_power_of_2(num_ranks),
        BLOCK=block,
        SCAN=2048,
    )
    return send_token_idx, send_head
