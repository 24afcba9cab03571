"""Routing on the host side: shapes, grids and launches; kernels in `routing_kernels.py`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from .hardware import has_pdl, pdl_options, share_sms
from .routing_kernels import (
    layout_kernel,
    layout_sum_kernel,
    place_rows_kernel,
    send_plan_kernel,
)
from .symm.slots import Slots
from .utils import next_power_of_2

LAYOUT_LANES = 256
"""Lanes that a program of the layout counts."""


def _block_tokens(num_topk: int) -> int:
    """Tokens that a program of the layout counts."""
    return max(16, LAYOUT_LANES // next_power_of_2(num_topk))


class Layout(NamedTuple):
    """What goes where: num_tokens_per_rank int32 [R], num_tokens_per_expert int32 [E],
    is_token_in_rank bool [T, R]; earlier_counts int32 [B, E + R]: what the blocks of tokens before
    each of B blocks, of block_tokens each, send to each expert and rank."""

    num_tokens_per_rank: torch.Tensor
    num_tokens_per_expert: torch.Tensor
    is_token_in_rank: torch.Tensor
    earlier_counts: torch.Tensor
    block_tokens: int


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
    launched = layout_kernel[(num_blocks,)](
        topk_idx,
        block_counts,
        in_rank.view(torch.uint8),
        slots.context.fields,
        num_tokens,
        num_experts // num_ranks,
        NUM_TOPK=num_topk,
        TOPK_PAD=topk_pad,
        EXPERTS_PAD=max(32, next_power_of_2(num_experts)),
        BLOCK=block,
    )
    share_sms(launched)
    launched = layout_sum_kernel[(triton.cdiv(num_experts + num_ranks, 16),)](
        block_counts,
        per_expert,
        per_rank,
        slots.context.fields,
        num_blocks,
        num_experts,
        BLOCK=256,
        COLUMNS=16,
    )
    share_sms(launched)
    return Layout(per_rank, per_expert, in_rank, block_counts, block)


class Places(NamedTuple):
    """Where lanes go, on the device.

    expert_offsets and remote_offsets int32 [L + 1]: where each expert's rows begin on this rank,
    all of them and those from other ranks; num_remote int32 [R]: rows that each rank gets from
    others; expert_begin and remote_begin int32 [E]: the offsets on all ranks; num_to_push int64
    [R, S]: rows that this rank pushes to each one in each stage. See `exchange_fused_kernel`; the
    last is complete behind `place_rows`.
    """

    expert_offsets: torch.Tensor
    remote_offsets: torch.Tensor
    num_remote: torch.Tensor
    expert_begin: torch.Tensor
    remote_begin: torch.Tensor
    num_to_push: torch.Tensor


class LanePlaces(NamedTuple):
    """Where this rank's lanes go: place and position int32 [T, K], own_order int64 [T * K] and
    to_push int64 [R, S, T], see `place_rows_kernel`."""

    place: torch.Tensor
    position: torch.Tensor
    own_order: torch.Tensor
    to_push: torch.Tensor


def place_rows(
    topk_idx: torch.Tensor, layout: Layout, places: Places, copies_offset: int, slots: Slots
) -> LanePlaces:
    """Find where the lanes of this rank go, and tell the others what is to be copied there, in
    `slots.expert_rows` from copies_offset on, in bytes. Early, behind the exchange that found
    `places`."""
    num_tokens, num_topk = topk_idx.shape
    num_blocks, num_ranks = len(layout.earlier_counts), slots.layout.num_ranks
    new = topk_idx.new_empty
    lanes = LanePlaces(
        new((num_tokens, num_topk), dtype=torch.int32),
        new((num_tokens, num_topk), dtype=torch.int32),
        new(num_tokens * num_topk),
        new((*places.num_to_push.shape, num_tokens)),
    )
    launched = place_rows_kernel[(num_blocks,)](
        topk_idx,
        layout.earlier_counts,
        places.expert_begin,
        places.remote_begin,
        places.num_remote,
        *lanes,
        places.num_to_push,
        slots.expert_rows.peer_addresses,
        slots.context.fields,
        num_tokens,
        layout.num_tokens_per_expert.numel() // num_ranks,
        places.num_to_push.shape[1],
        copies_offset,
        NUM_TOPK=num_topk,
        TOPK_PAD=next_power_of_2(num_topk),
        RANKS=num_ranks,
        BLOCK=layout.block_tokens,
        STEP=32,
        PDL=has_pdl(),
        num_warps=8,
        **pdl_options(),
    )
    share_sms(launched)
    return lanes


def send_plan(
    is_token_in_rank: torch.Tensor, topk_idx: torch.Tensor | None, num_experts: int, slots: Slots
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
    slots.context.launch(
        send_plan_kernel,
        (max(1, triton.cdiv(num_tokens, block)), num_ranks),
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
