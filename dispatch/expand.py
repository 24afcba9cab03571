"""Host side of received rows in the order of experts: one function per launch. What came is in
memory of this rank, so these are no part of the exchange with others."""

from __future__ import annotations

import functools

import torch

from ..device.constants import constants
from ..device.lang import INTERPRETED
from ..hardware import gpu
from ..row_vectors import RowVectors
from ..symm.slots import Slots
from ..utils import next_power_of_2
from .expand_kernels import (
    ExpandedRows,
    ExpandSizes,
    PlaceReceivedSizes,
    Places,
    ReceivedIds,
    ReceivedRows,
    copy_ids_kernel,
    count_received_kernel,
    describe_received_kernel,
    expand_rows_kernel,
    place_received_kernel,
)

EXPAND_ROWS, EXPAND_VECS = 4, 1024
"""Rows that a program copies at a time, and vectors of each."""
EXPAND_PROGRAMS = 8
"""Programs on each SM that copy."""
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


@functools.cache
def _expand_sizes(
    num_topk: int, num_scales: int, vectors: RowVectors, by_column: bool, zero_padding: bool
) -> ExpandSizes:
    sizes = ExpandSizes(
        NUM_TOPK=num_topk,
        NUM_SCALES=num_scales,
        SCALES_PAD=next_power_of_2(max(1, num_scales)),
        BLOCK_ROWS=32 if INTERPRETED else EXPAND_ROWS,
        BLOCK_VECS=min(next_power_of_2(vectors.num_vecs), EXPAND_VECS),
        ALIGNED=vectors.aligned,
        BY_COLUMN=by_column,
        ZERO_PADDING=zero_padding,
    )
    return constants(sizes)


def expand_rows(
    received: ReceivedRows,
    places: Places,
    rank_prefix_matrix: torch.Tensor,
    out: ExpandedRows,
    alignment: int,
    scale_rows: int,
    zero_padding: bool,
    slots: Slots,
) -> None:
    """Copy received rows, which are at the addresses `received.x`, to their places in `out`. Scales
    go to [M, S], or with scale_rows to [S, scale_rows]."""
    num_rows, num_topk = len(places.src_metadata), places.src_metadata.shape[1] - 2
    vectors, scales = RowVectors.of(out.x.shape[1], out.x.dtype), received.scales
    num_scales = 0 if scales is None else scales.shape[1]
    sizes = _expand_sizes(num_topk, num_scales, vectors, scale_rows > 0, zero_padding)
    slots.context.launch(
        expand_rows_kernel,
        (2 if INTERPRETED else EXPAND_PROGRAMS * gpu().num_sms,),
        ReceivedRows(
            received.x,
            None if scales is None else scales.view(torch.int32),
            received.weights,
        ),
        places,
        rank_prefix_matrix,
        ExpandedRows(
            vectors.view(out.x),
            None if out.scales is None else out.scales.view(torch.int32),
            out.weights,
        ),
        slots.context.fields,
        num_rows,
        len(out.x),
        scale_rows,
        vectors.num_vecs,
        places.num_per_expert.numel(),
        alignment,
        SIZES=sizes,
    )
