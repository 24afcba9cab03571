"""Host side of the copies of received rows in the order of experts."""

from __future__ import annotations

import functools

import torch

from ..device.constants import constants
from ..row_vectors import COPY_ROWS, RowVectors
from ..symm.slots import RowLayout, SlotLayout, Slots, row_in_region
from ..utils import next_power_of_2
from .expand_kernels import (
    ExpandedRows,
    ExpandSizes,
    Sent,
    expand_rows_kernel,
    zero_rows_kernel,
)
from .launch import NUM_WARPS, Partition, Tokens, programs_on_all_sms
from .place_received_kernels import Places
from .send_kernels import push_kernel


@functools.cache
def _expand_sizes(
    layout: SlotLayout, row: RowLayout, num_topk: int, vectors: RowVectors, by_column: bool
) -> ExpandSizes:
    sizes = ExpandSizes(
        NUM_TOPK=num_topk,
        NUM_VECS=vectors.num_vecs,
        NUM_SCALES=row.num_scales,
        SCALES_PAD=next_power_of_2(max(1, row.num_scales)),
        CHUNK_ROWS=layout.chunk_rows(row.num_bytes),
        BLOCK_ROWS=COPY_ROWS,
        BLOCK_VECS=vectors.block_vecs,
        ALIGNED=vectors.aligned,
        BY_COLUMN=by_column,
    )
    return constants(sizes)


def expand_rows(
    out: ExpandedRows,
    src_metadata: torch.Tensor,
    tokens: Tokens,
    rank_prefix_matrix: torch.Tensor,
    header_bytes: int,
    partition: Partition,
    scale_rows: int,
    slots: Slots,
) -> None:
    """Copy received rows to their places in `out`, while others are pushed, and then the rest.
    Scales go to [M, S], or with scale_rows to [S, scale_rows]. Ends a call."""
    num_topk, row = src_metadata.shape[1] - 2, tokens.row
    vectors = RowVectors.of(tokens.x.shape[1], tokens.x.dtype)
    launches = [(programs_on_all_sms(), 0)]
    if partition.early:
        launches.insert(0, (partition.early, partition.push))
    for programs, num_push_programs in launches:
        slots.context.launch(
            expand_rows_kernel,
            (programs,),
            Sent(vectors.view(tokens.x), rank_prefix_matrix),
            src_metadata,
            _as_vectors(out, vectors),
            slots.context.fields,
            num_push_programs,
            len(src_metadata),
            slots.layout.max_rows(row.num_bytes, header_bytes),
            len(out.x),
            scale_rows,
            row_in_region(row, header_bytes),
            SIZES=_expand_sizes(slots.layout, row, num_topk, vectors, scale_rows > 0),
            step="expand_rows",
            after=() if num_push_programs == 0 else (push_kernel,),
            num_warps=NUM_WARPS,
        )
    slots.context.end_call()


def zero_rows(
    out: ExpandedRows,
    places: Places,
    tokens: Tokens,
    alignment: int,
    scale_rows: int,
    slots: Slots,
) -> None:
    """Write 0 between the rows of experts."""
    num_topk, vectors = (
        places.src_metadata.shape[1] - 2,
        RowVectors.of(tokens.x.shape[1], tokens.x.dtype),
    )
    num_local = places.num_per_expert.numel()
    slots.context.launch(
        zero_rows_kernel,
        (num_local,),
        places,
        _as_vectors(out, vectors),
        len(out.x),
        scale_rows,
        num_local,
        alignment,
        SIZES=_expand_sizes(slots.layout, tokens.row, num_topk, vectors, scale_rows > 0),
        num_warps=NUM_WARPS,
    )


def _as_vectors(rows: ExpandedRows, vectors: RowVectors) -> ExpandedRows:
    scales = None if rows.scales is None else rows.scales.view(torch.int32)
    return ExpandedRows(vectors.view(rows.x), scales, rows.weights)
