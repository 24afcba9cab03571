"""Host side of what is said of received rows: one function per launch."""

from __future__ import annotations

import functools

import torch

from ..device.constants import constants
from ..device.lang import INTERPRETED
from ..hardware import gpu
from ..symm.slots import Slots
from ..utils import next_power_of_2
from .describe_received_kernels import (
    DescribeSizes,
    Places,
    copy_ids_kernel,
    describe_received_kernel,
)

DESCRIBED_SLOTS = 256
"""Top-k slots that a program describes at a time."""
COPIED_IDS = 1024
"""Ids that a program copies at a time."""


def copy_ids(topk_idx: torch.Tensor, copy: torch.Tensor, slots: Slots) -> None:
    """Copy ids [N, K], both contiguous, for any number of rows."""
    num_rows, num_topk = topk_idx.shape
    slots.context.launch(
        copy_ids_kernel,
        (2 if INTERPRETED else gpu().num_sms,),
        topk_idx,
        copy,
        num_rows,
        NUM_TOPK=num_topk,
        BLOCK=COPIED_IDS,
    )


@functools.cache
def _describe_sizes(num_topk: int, num_local_experts: int) -> DescribeSizes:
    topk_pad = next_power_of_2(num_topk)
    sizes = DescribeSizes(
        NUM_TOPK=num_topk,
        TOPK_PAD=topk_pad,
        EXPERTS_PAD=max(32, next_power_of_2(num_local_experts)),
        BLOCK_ROWS=max(1, DESCRIBED_SLOTS // topk_pad),
    )
    return constants(sizes)


def describe_received(
    topk_idx: torch.Tensor,
    src_idx: torch.Tensor,
    rank_prefix_matrix: torch.Tensor,
    group_counts: torch.Tensor,
    places: Places,
    stats: torch.Tensor | None,
    alignment: int,
    max_tokens: int,
    slots: Slots,
) -> None:
    """Say where received rows, with local ids topk_idx int64 [N, K] and tokens src_idx int32 [N],
    come from and how many rows experts have, see `reference.place`; rows get no places.
    group_counts int32 [E]: rows of all ranks for each expert."""
    num_rows, num_topk = topk_idx.shape
    num_local = places.num_per_expert.numel()
    slots.context.launch(
        describe_received_kernel,
        (2 if INTERPRETED else gpu().num_sms,),
        topk_idx,
        src_idx,
        rank_prefix_matrix,
        group_counts,
        places,
        stats,
        slots.context.fields,
        num_rows,
        num_local,
        alignment,
        max_tokens,
        SIZES=_describe_sizes(num_topk, num_local),
        num_warps=8,
    )
