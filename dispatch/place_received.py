"""Host side of the places of received rows in the order of experts: one function per launch."""

from __future__ import annotations

import functools

import torch

from ..device.constants import constants
from ..device.internode import BOTH
from ..device.lang import INTERPRETED
from ..hardware import gpu
from ..row_vectors import RowVectors
from ..symm.slots import Slots, row_in_region
from ..utils import next_power_of_2
from .launch import (
    LOCATE_ROWS,
    NUM_WARPS,
    Tokens,
    programs_on_all_sms,
    receive_sizes,
)
from .place_received_kernels import (
    PlaceReceivedSizes,
    Places,
    ReceivedIds,
    copy_ids_kernel,
    count_received_kernel,
    describe_received_kernel,
    place_received_kernel,
)
from .receive_kernels import ReceivedParts, locate_kernel

PLACE_SLOTS = 256
"""Top-k slots that a program places at a time."""
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
def _place_sizes(num_topk: int, num_local_experts: int) -> PlaceReceivedSizes:
    topk_pad, experts_pad = next_power_of_2(num_topk), max(32, next_power_of_2(num_local_experts))
    sizes = PlaceReceivedSizes(
        NUM_TOPK=num_topk,
        TOPK_PAD=topk_pad,
        EXPERTS_PAD=experts_pad,
        BLOCK_ROWS=max(1, PLACE_SLOTS // topk_pad),
        BLOCK_PROGRAMS=max(1, 4096 // experts_pad),
        STEP=32,
    )
    return constants(sizes)


def describe_received(
    received: ReceivedIds,
    rank_prefix_matrix: torch.Tensor,
    group_counts: torch.Tensor,
    places: Places,
    stats: torch.Tensor | None,
    alignment: int,
    max_tokens: int,
    slots: Slots,
) -> None:
    """Say where received rows come from and how many rows experts have, see `reference.place`;
    rows get no places. group_counts int32 [E]: rows of all ranks for each expert."""
    num_rows, num_topk = received.topk_idx.shape
    num_local = places.num_per_expert.numel()
    slots.context.launch(
        describe_received_kernel,
        (2 if INTERPRETED else gpu().num_sms,),
        received,
        rank_prefix_matrix,
        group_counts,
        places,
        stats,
        slots.context.fields,
        num_rows,
        num_local,
        alignment,
        max_tokens,
        SIZES=_place_sizes(num_topk, num_local),
        num_warps=8,
    )


def place_received(
    received: ReceivedIds,
    rank_prefix_matrix: torch.Tensor,
    places: Places,
    stats: torch.Tensor | None,
    alignment: int,
    max_tokens: int,
    num_expanded: int,
    slots: Slots,
) -> None:
    """Find the places of received rows, see `reference.place`, where there is room for
    num_expanded rows of experts. An expert's rows begin at a multiple of the alignment;
    max_tokens: of a rank."""
    num_rows, num_topk = received.topk_idx.shape
    num_local = places.num_per_expert.numel()
    num_programs = 2 if INTERPRETED else gpu().num_sms
    counts = places.num_per_expert.new_empty(num_programs, num_local)
    sizes = _place_sizes(num_topk, num_local)
    slots.context.launch(
        count_received_kernel,
        (num_programs,),
        received.topk_idx,
        rank_prefix_matrix,
        counts,
        slots.context.fields,
        num_rows,
        num_local,
        SIZES=sizes,
        num_warps=8,
    )
    slots.context.launch(
        place_received_kernel,
        (num_programs,),
        received,
        rank_prefix_matrix,
        counts,
        places,
        stats,
        slots.context.fields,
        num_rows,
        num_expanded,
        num_local,
        alignment,
        max_tokens,
        SIZES=sizes,
        num_warps=8,
    )


def receive_metadata(
    ids: ReceivedIds,
    tokens: Tokens,
    rank_prefix_matrix: torch.Tensor,
    num_local_experts: int,
    header_bytes: int,
    awaits_rows: bool,
    slots: Slots,
) -> None:
    """Write the ids and the tokens of the rows that come, which `expand_rows` will copy.
    awaits_rows: unless `send_metadata` notifies."""
    vectors, row = RowVectors.of(tokens.x.shape[1], tokens.x.dtype), tokens.row
    sizes = receive_sizes(slots.layout, row, vectors, LOCATE_ROWS, awaits_rows)
    slots.context.launch(
        locate_kernel,
        (programs_on_all_sms(),),
        vectors.view(tokens.x),
        rank_prefix_matrix,
        ReceivedParts(None, None, ids.topk_idx, None, ids.src_idx),
        slots.context.fields,
        len(ids.src_idx),
        slots.layout.max_rows(row.num_bytes, header_bytes),
        vectors.num_vecs,
        num_local_experts,
        BOTH.value,
        row_in_region(row, header_bytes),
        SIZES=sizes,
        step="receive_metadata",
        num_warps=NUM_WARPS,
    )
