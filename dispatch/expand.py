"""Host side of the copies of received rows in the order of experts."""

from __future__ import annotations

import functools

import torch

from ..device.constants import constants
from ..device.lang import INTERPRETED
from ..hardware import BYTES_IN_FLIGHT
from ..row_vectors import RowVectors
from ..symm.slots import RowLayout, Slots, row_in_region
from ..utils import next_power_of_2
from .expand_kernels import (
    ExpandedRows,
    ExpandSizes,
    ReceivedPlaces,
    Sent,
    expand_rows_kernel,
    zero_rows_kernel,
)
from .internode import end_call
from .internode_kernels import forward_kernel
from .launch import Partition, Tokens, programs_on_all_sms
from .send_kernels import push_kernel

EXPAND_WARPS = 8
EXPAND_BYTES = 64 * 1024
"""A program copies 8 rows at a time if they have no more bytes, else 4. Fewer rows leave less to
copy once the last row has arrived, but flags and places are then read more often."""


@functools.cache
def _expand_sizes(
    row: RowLayout,
    vectors: RowVectors,
    num_topk: int = 0,
    num_local: int = 0,
    chunk_rows: int = 0,
) -> ExpandSizes:
    """The last three are 0 for the padding, which does not need them."""
    limit = next_power_of_2(vectors.num_vecs)
    block_rows = 8 if 8 * row.payload_bytes <= EXPAND_BYTES else 4
    # Half as many bytes as others copy: two programs run on an SM; one loads, the other stores.
    columns = BYTES_IN_FLIGHT // 2 // 4 // block_rows
    sizes = ExpandSizes(
        NUM_TOPK=num_topk,
        TOPK_PAD=next_power_of_2(max(1, num_topk)),
        NUM_LOCAL=num_local,
        NUM_VECS=vectors.num_vecs,
        NUM_SCALES=row.num_scales,
        SCALES_PAD=next_power_of_2(max(1, row.num_scales)),
        CHUNK_ROWS=chunk_rows,
        BLOCK_ROWS=32 if INTERPRETED else block_rows,
        BLOCK_VECS=limit if INTERPRETED else min(limit, columns),
        ALIGNED=vectors.aligned,
    )
    return constants(sizes)


def expand_rows(
    out: ExpandedRows,
    places: ReceivedPlaces,
    tokens: Tokens,
    rank_prefix_matrix: torch.Tensor,
    header_bytes: int,
    partition: Partition,
    scale_rows: int,
    max_tokens: int,
    slots: Slots,
) -> None:
    """Copy received rows to their places in `out`, while others are pushed, and then the rest.
    Scales go to [M, S], or with scale_rows to [S, scale_rows]. Ends a call. In a new dispatch rows
    travel with numbers of expert rows in the place of ids, and places are written."""
    num_topk, row = places.src_metadata.shape[1] - 2, tokens.row
    num_experts = 0 if places.begins is None else places.begins.numel() - 1
    vectors = RowVectors.of(tokens.x.shape[1], tokens.x.dtype)
    num_local, chunk_rows = num_experts // slots.num_ranks, slots.layout.chunk_rows(row.num_bytes)
    sizes = _expand_sizes(row, vectors, num_topk, num_local, chunk_rows)
    for programs, num_push_programs in partition.receiving(programs_on_all_sms()):
        slots.context.launch(
            expand_rows_kernel,
            (programs,),
            Sent(vectors.view(tokens.x), rank_prefix_matrix),
            places,
            _as_vectors(out, vectors),
            slots.context.fields,
            num_push_programs,
            len(places.src_metadata),
            len(out.x),
            scale_rows,
            max_tokens,
            row_in_region(row, header_bytes),
            SIZES=sizes,
            step="expand_rows",
            after=(push_kernel, expand_rows_kernel, forward_kernel)
            if num_push_programs == 0
            else (push_kernel,),
            num_warps=EXPAND_WARPS,
        )
    end_call(slots)


def zero_rows(
    out: ExpandedRows,
    psum_per_expert: torch.Tensor,
    tokens: Tokens,
    alignment: int,
    scale_rows: int,
    slots: Slots,
) -> None:
    """Write 0 between the rows of experts, which end at psum_per_expert int32 [L]."""
    vectors = RowVectors.of(tokens.x.shape[1], tokens.x.dtype)
    num_local = psum_per_expert.numel()
    slots.context.launch(
        zero_rows_kernel,
        (num_local,),
        psum_per_expert,
        _as_vectors(out, vectors),
        len(out.x),
        scale_rows,
        num_local,
        alignment,
        SIZES=_expand_sizes(tokens.row, vectors),
        num_warps=EXPAND_WARPS,
    )


def _as_vectors(rows: ExpandedRows, vectors: RowVectors) -> ExpandedRows:
    scales = None if rows.scales is None else rows.scales.view(torch.int32)
    return ExpandedRows(vectors.view(rows.x), scales, rows.weights)
