"""Host side of the numbers of expert rows by which tokens travel."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from ..device.constants import constants
from ..hardware import gpu
from ..routing import RoutingLayout
from ..routing_kernels import send_plan_kernel
from ..symm.slots import Slots
from ..utils import next_power_of_2
from .exchange_kernels import exchange_kernel
from .place_tokens_kernels import ExpertNumbers, PlaceTokensSizes, place_tokens_kernel

if TYPE_CHECKING:
    from .launch import Counts


LEFT_SMS = 32
"""SMs without a program that waits for peers."""


@functools.cache
def _place_sizes(num_topk: int, num_experts: int, tokens: int) -> PlaceTokensSizes:
    sizes = PlaceTokensSizes(
        NUM_TOPK=num_topk,
        TOPK_PAD=next_power_of_2(num_topk),
        EXPERTS_PAD=max(32, next_power_of_2(num_experts)),
        BLOCK_TOKENS=tokens,
        STEP=32,
    )
    return constants(sizes)


def num_early_programs(layout: RoutingLayout) -> int:
    """How many programs number the tokens, one for each block of the layout, if they leave SMs to
    other kernels, else 0; see `exchange_kernel`."""
    num_blocks = len(layout.earlier_counts)
    return num_blocks if num_blocks <= gpu().num_sms - LEFT_SMS else 0


def place_tokens(
    topk_idx: torch.Tensor,
    layout: RoutingLayout,
    counts: Counts,
    alignment: int,
    slots: Slots,
) -> ExpertNumbers:
    """Number the expert rows of topk_idx int64 [T, K], see `place_tokens_kernel`. An expert's rows
    begin at a multiple of the alignment."""
    num_topk, num_experts = topk_idx.shape[1], counts.group_counts.numel()
    new = counts.group_counts.new_empty
    numbers = ExpertNumbers(torch.empty_like(topk_idx), new(num_experts + 1))
    slots.context.launch(
        place_tokens_kernel,
        (len(layout.earlier_counts),),
        topk_idx,
        layout.earlier_counts,
        counts,
        numbers,
        slots.context.fields,
        len(topk_idx),
        num_experts // slots.num_ranks,
        alignment,
        SIZES=_place_sizes(num_topk, num_experts, layout.block_tokens),
        after=(exchange_kernel, send_plan_kernel),  # the latter on several nodes
    )
    return numbers
