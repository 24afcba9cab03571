"""Host side of the numbers of expert rows by which tokens travel."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import triton

from ..device.constants import constants
from ..routing import RoutingLayout
from ..symm.slots import Slots
from ..utils import next_power_of_2
from .describe_received_kernels import Places
from .place_tokens_kernels import (
    ExpertNumbers,
    PlaceTokensSizes,
    place_tokens_kernel,
)

if TYPE_CHECKING:
    from .launch import Counts


@functools.cache
def _place_sizes(num_topk: int, num_experts: int, num_local: int, tokens: int) -> PlaceTokensSizes:
    sizes = PlaceTokensSizes(
        NUM_TOPK=num_topk,
        TOPK_PAD=next_power_of_2(num_topk),
        EXPERTS_PAD=max(32, next_power_of_2(num_experts)),
        LOCAL_PAD=max(32, next_power_of_2(num_local)),
        BLOCK_TOKENS=tokens,
        STEP=32,
    )
    return constants(sizes)


def place_tokens(
    topk_idx: torch.Tensor,
    layout: RoutingLayout,
    counts: Counts,
    places: Places,
    stats: torch.Tensor | None,
    alignment: int,
    slots: Slots,
) -> ExpertNumbers:
    """Number the expert rows of topk_idx int64 [T, K], see `place_tokens_kernel`, and write to
    `places` all but the metadata. An expert's rows begin at a multiple of the alignment."""
    num_tokens, num_topk = topk_idx.shape
    num_local, num_experts = places.num_per_expert.numel(), counts.group_counts.numel()
    new = counts.group_counts.new_empty
    numbers = ExpertNumbers(torch.empty_like(topk_idx), new(num_experts + 1))
    slots.context.launch(
        place_tokens_kernel,
        (max(1, triton.cdiv(num_tokens, layout.block_tokens)),),
        topk_idx,
        layout.earlier_counts,
        counts,
        numbers,
        places,
        stats,
        slots.context.fields,
        num_tokens,
        num_local,
        alignment,
        SIZES=_place_sizes(num_topk, num_experts, num_local, layout.block_tokens),
    )
    return numbers
