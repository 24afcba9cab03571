"""Rows as a dispatch brings them, one for each token and rank, and expert rows: from one to the
other, and sums back. No other rank takes part."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from .device.lang import INTERPRETED
from .expert_major_kernels import (
    PlacedRows,
    begin_rows_kernel,
    count_rows_kernel,
    place_rows_kernel,
    sum_rows_kernel,
    take_rows_kernel,
)
from .launch import launch
from .row_vectors import RowVectors
from .utils import next_power_of_2

PLACE_SLOTS = 256
"""Top-k slots that a program places: it compares each with each."""
BLOCKS_AT_ONCE = 16
"""Blocks of them whose counts are added up at a time."""
TAKE_ROWS, TAKE_VECS = 4, 1024
"""Rows that a program copies at a time, and vectors of each."""
SUM_ROWS, SUM_COLUMNS = 2, 1024
"""Rows that a program sums at a time, and columns of each."""


class Places(NamedTuple):
    """Which received row each expert row is, and back.

    offsets int32 [L + 1]: where the rows of each local expert begin, padding included; slots int32
    [M]: the top-k slot n * K + k of each expert row, -1 for padding; dst_rows int32 [N, K]: the
    expert row of each top-k slot, -1 for none; overflow int32 [1]: rows, with their padding, for
    which there was no room; row_weights float32 [M]: of each expert row, 0 for padding, or None.
    """

    offsets: torch.Tensor
    slots: torch.Tensor
    dst_rows: torch.Tensor
    overflow: torch.Tensor
    row_weights: torch.Tensor | None

    @classmethod
    def empty(
        cls, topk_idx_NK: torch.Tensor, num_local: int, num_rows: int, has_weights: bool = True
    ) -> Places:
        """Memory for num_rows expert rows of received rows with these ids."""
        new, int32 = topk_idx_NK.new_empty, torch.int32
        return cls(
            new(num_local + 1, dtype=int32),
            new(num_rows, dtype=int32),
            new(topk_idx_NK.shape, dtype=int32),
            new(1, dtype=int32),
            new(num_rows, dtype=torch.float32) if has_weights else None,
        )


def place(
    topk_idx_NK: torch.Tensor,
    topk_weights_NK: torch.Tensor | None,
    num_local: int,
    alignment: int,
    num_rows: int,
) -> Places:
    """Sort received rows by expert into num_rows expert rows, those of an expert in the order in
    which they were received, and padded to a multiple of `alignment`. topk_idx int64 [N, K] holds
    local experts, -1 for those of other ranks; topk_weights float32 [N, K]. Nothing waits for the
    device.

    Example, 2 experts, alignment 2, topk_idx of four tokens [[0, -1], [1, 0], [-1, -1], [0, -1]]:
    offsets [0, 4, 6], slots [0, 3, 6, -1, 2, -1], dst_rows [[0, -1], [4, 1], [-1, -1], [2, -1]].
    """
    has_weights = topk_weights_NK is not None
    places = Places.empty(topk_idx_NK, num_local, num_rows, has_weights)
    place_into(places, topk_idx_NK, topk_weights_NK, alignment)
    return places


def place_into(
    places: Places,
    topk_idx_NK: torch.Tensor,
    topk_weights_NK: torch.Tensor | None,
    alignment: int = 1,
    present: torch.Tensor | None = None,
) -> None:
    """`place` into this memory. present int64 [N]: received rows that are 0 there have no place."""
    num_slots, num_topk = topk_idx_NK.numel(), topk_idx_NK.shape[1]
    num_blocks = max(1, triton.cdiv(num_slots, PLACE_SLOTS))
    num_local, num_rows = len(places.offsets) - 1, len(places.slots)
    block_counts = topk_idx_NK.new_empty((num_blocks, num_local), dtype=torch.int32)
    found, experts_pad = PlacedRows(*places), max(32, next_power_of_2(num_local))
    with torch.cuda.device_of(topk_idx_NK):
        launch(
            count_rows_kernel,
            (num_blocks,),
            *(topk_idx_NK, present, block_counts, found, num_slots, num_rows),
            NUM_TOPK=num_topk,
            NUM_EXPERTS=num_local,
            EXPERTS_PAD=experts_pad,
            BLOCK=PLACE_SLOTS,
        )
        launch(
            begin_rows_kernel,
            (1,),
            *(block_counts, found, num_blocks, num_rows, alignment),
            NUM_EXPERTS=num_local,
            EXPERTS_PAD=experts_pad,
            BLOCK=BLOCKS_AT_ONCE,
        )
        launch(
            place_rows_kernel,
            (num_blocks,),
            *(topk_idx_NK, topk_weights_NK, present, block_counts, found, num_slots, num_rows),
            NUM_TOPK=num_topk,
            NUM_EXPERTS=num_local,
            BLOCK=PLACE_SLOTS,
        )


def take_rows(
    x: torch.Tensor, slots: torch.Tensor, num_topk: int, end: torch.Tensor | None = None
) -> torch.Tensor:
    """Expert rows [M, H] of received rows x [N, H]; padding is 0. See `Places`. With `end` int32
    [1] rows from there on are not written."""
    vectors, out = RowVectors.of(x.shape[1], x.dtype), x.new_empty(len(slots), x.shape[1])
    block_rows = 32 if INTERPRETED else TAKE_ROWS
    with torch.cuda.device_of(x):
        launch(
            take_rows_kernel,
            (triton.cdiv(len(slots), block_rows),),
            *(vectors.view(x), slots, end, vectors.view(out), len(slots), vectors.num_vecs),
            NUM_TOPK=num_topk,
            ALIGNED=vectors.aligned,
            BLOCK_ROWS=block_rows,
            BLOCK_VECS=min(next_power_of_2(vectors.num_vecs), TAKE_VECS),
        )
    return out


def sum_rows(
    rows: torch.Tensor,
    dst_rows: torch.Tensor,
    values: torch.Tensor | None = None,
    into: torch.Tensor | None = None,
    present: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[N, H]: the sum of the expert rows of each received row, in the order of its top-k, in fp32
    and rounded once; and float32 [N, K], of values float32 [M] those of its top-k slots, 0 for
    slots without a row. rows [M, H], dst_rows int32 [N, K]. The sums may go `into` this memory;
    with present int64 [N] those of received rows that are 0 there are not written."""
    (num_received, num_topk), hidden = dst_rows.shape, rows.shape[1]
    out = rows.new_empty(num_received, hidden) if into is None else into
    topk_values = None if values is None else values.new_empty(dst_rows.shape)
    block_rows = 32 if INTERPRETED else SUM_ROWS
    block_columns = min(next_power_of_2(hidden), SUM_COLUMNS)
    with torch.cuda.device_of(rows):
        launch(
            sum_rows_kernel,
            (triton.cdiv(num_received, block_rows), triton.cdiv(hidden, block_columns)),
            *(rows, dst_rows, out, values, topk_values, present, num_received, hidden),
            NUM_TOPK=num_topk,
            BLOCK_ROWS=block_rows,
            BLOCK_H=block_columns,
        )
    return out, topk_values
