"""Host side of what a dispatch receives: rows are copied out of the slot, or read in place."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from ..device.constants import constants
from ..device.internode import BOTH
from ..device.lang import INTERPRETED
from ..hardware import gpu
from ..row_vectors import COPY_ROWS, RowVectors
from ..symm.slots import RowLayout, SlotLayout, Slots, row_in_region
from ..utils import next_power_of_2, round_up
from .internode import end_call
from .internode_kernels import forward_kernel
from .launch import NUM_CONCURRENT, NUM_WARPS, Partition, Tokens, programs_on_all_sms
from .receive_kernels import (
    ReceiveSizes,
    collect_kernel,
    copy_ids_kernel,
    locate_kernel,
    release_kernel,
)
from .send_kernels import push_kernel

LOCATE_ROWS = 128
"""Rows whose addresses a program writes at a time."""


class Received(NamedTuple):
    """What a rank has received, by source rank, then token.

    x [N, H], or int64 [N] with the address of each row; scales [N, S]; topk_idx int64 [N, K] with
    local ids, -1 where the expert is on another rank; topk_weights float32 [N, K], 0 for these;
    src_idx int32 [N], the token's number on its source rank. Scales and top-k tensors are None
    where dispatch had none. For ElasticBuffer src_metadata int32 [N, 2 + K], see
    `reference.place`, where rows have no places; and kept_idx, topk_idx once more, which stays as
    it is when the caller changes that.
    """

    x: torch.Tensor
    scales: torch.Tensor | None
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    src_idx: torch.Tensor
    src_metadata: torch.Tensor | None = None
    kept_idx: torch.Tensor | None = None

    @classmethod
    def empty(cls, rows: torch.Tensor, tokens: Tokens, keeps_ids: bool = False) -> Received:
        """`rows` [N, ...], and room for what goes with them where tokens are like these. What
        `keeps_ids` lies before topk_idx, in one allocation: so that may grow."""
        num_rows, num_topk, scales = rows.shape[0], tokens.num_topk, tokens.scales
        weights = tokens.topk_weights
        ids = kept = None
        if keeps_ids:
            room = round_up(num_rows, 2)  # so that both begin at multiples of 16 bytes
            both = rows.new_empty((2, room, num_topk), dtype=torch.int64)
            kept, ids = both[0, :num_rows], both[1, :num_rows]
        elif num_topk:
            ids = rows.new_empty((num_rows, num_topk), dtype=torch.int64)
        return cls(
            rows,
            None if scales is None else scales.new_empty(num_rows, scales.shape[1]),
            ids,
            None if weights is None else weights.new_empty(num_rows, num_topk),
            rows.new_empty(num_rows, dtype=torch.int32),
            kept_idx=kept,
        )

    @property
    def is_located(self) -> bool:
        """Whether x holds addresses."""
        return self.x.dim() == 1

    @property
    def payload(self) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The rows, with their scales where they have some."""
        return self.x if self.scales is None else (self.x, self.scales)


@functools.cache
def _receive_sizes(
    layout: SlotLayout, row: RowLayout, vectors: RowVectors, block_rows: int
) -> ReceiveSizes:
    sizes = ReceiveSizes(
        NUM_TOPK=row.num_topk,
        TOPK_PAD=next_power_of_2(max(1, row.num_topk)),
        NUM_SCALES=row.num_scales,
        SCALES_PAD=next_power_of_2(max(1, row.num_scales)),
        CHUNK_ROWS=layout.chunk_rows(row.num_bytes),
        BLOCK_ROWS=block_rows,
        BLOCK_VECS=vectors.block_vecs,
        ALIGNED=vectors.aligned,
    )
    return constants(sizes)


def _receive_arguments(
    out: Received,
    tokens: Tokens,
    rank_prefix_matrix: torch.Tensor,
    num_local_experts: int,
    header_bytes: int,
    block_rows: int,
    slots: Slots,
) -> dict[str, Any]:
    """What both kernels that receive are launched with."""
    vectors, row = RowVectors.of(tokens.x.shape[1], tokens.x.dtype), tokens.row
    return dict(
        x=vectors.view(tokens.x),
        rank_prefix_matrix=rank_prefix_matrix,
        received=out._replace(
            x=out.x if out.is_located else vectors.view(out.x),
            scales=None if out.scales is None else out.scales.view(torch.int32),
        ),
        context=slots.context.fields,
        max_rows=len(out.x),
        num_vecs=vectors.num_vecs,
        num_local_experts=num_local_experts,
        row=row_in_region(row, header_bytes),
        SIZES=_receive_sizes(slots.layout, row, vectors, block_rows),
        num_warps=NUM_WARPS,
    )


def receive(
    out: Received,
    tokens: Tokens,
    rank_prefix_matrix: torch.Tensor,
    num_local_experts: int,
    header_bytes: int,
    partition: Partition,
    slots: Slots,
    num_programs: int | None = None,
    max_tokens: int = 0,
) -> None:
    """Copy the received rows out of the slot, and this rank's own out of the tokens it sent;
    release the slot. Ends a call. num_programs: of the last launch; None: as run at once.
    max_tokens: see `TotalsWanted`. Where `out` has room for addresses alone, see `locate`."""
    rows = out, tokens, rank_prefix_matrix, num_local_experts, header_bytes
    if out.is_located:
        locate(*rows, slots)
        return
    arguments = _receive_arguments(*rows, COPY_ROWS, slots)
    for programs, num_push_programs in partition.receiving(num_programs or programs_on_all_sms()):
        slots.context.launch(
            collect_kernel,
            (programs,),
            num_push_programs=num_push_programs,
            max_tokens=max_tokens,
            step="collect",
            after=(push_kernel, collect_kernel, forward_kernel)
            if num_push_programs == 0
            else (push_kernel,),
            **arguments,
        )
    end_call(slots)


def locate(
    out: Received,
    tokens: Tokens,
    rank_prefix_matrix: torch.Tensor,
    num_local_experts: int,
    header_bytes: int,
    slots: Slots,
    sides: int = BOTH.value,
) -> None:
    """Write the addresses of the received rows to out.x int64 [N]; `release` ends the call. Rows of
    one of the `sides` alone may be asked for, see `locate_kernel`, by few programs."""
    # fmt: off
    arguments = _receive_arguments(
        out, tokens, rank_prefix_matrix, num_local_experts, header_bytes, LOCATE_ROWS, slots
    )
    # fmt: on
    num_programs = programs_on_all_sms() if sides == BOTH.value else NUM_CONCURRENT
    slots.context.launch(locate_kernel, (num_programs,), sides=sides, step="locate", **arguments)
    if sides == BOTH.value:
        slots.context.end_call()


def copy_ids(topk_idx: torch.Tensor, copy: torch.Tensor, slots: Slots) -> None:
    """Copy ids [N, K], both contiguous, for any number of rows."""
    num_rows, num_topk = topk_idx.shape
    num_programs = 2 if INTERPRETED else gpu().num_sms
    arguments = topk_idx, copy, num_rows
    slots.context.launch(copy_ids_kernel, (num_programs,), *arguments, NUM_TOPK=num_topk)


def release(slots: Slots) -> None:
    """End a call whose rows were read in place; the slot goes back to its writers."""
    slots.context.launch(release_kernel, (1,), slots.context.fields, step="release")
    end_call(slots)
