"""Rows as a dispatch brings them, one for each token and rank, and expert rows: from one to the
other, and sums back. No other rank takes part."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from .device.lang import INTERPRETED
from .expert_major_kernels import sum_rows_kernel, take_rows_kernel
from .launch import launch
from .row_vectors import RowVectors
from .utils import next_power_of_2

TAKE_ROWS, TAKE_VECS = 4, 1024
"""Rows that a program copies at a time, and vectors of each."""
SUM_ROWS, SUM_COLUMNS = 2, 1024
"""Rows that a program sums at a time, and columns of each."""


class Places(NamedTuple):
    """Which received row each expert row is, and back.

    offsets int32 [L + 1]: where the rows of each local expert begin, padding included; slots int32
    [M]: the top-k slot n * K + k of each expert row, -1 for padding; dst_rows int32 [N, K]: the
    expert row of each top-k slot, -1 for none; overflow int32 [1]: rows for which there was no
    room.
    """

    offsets: torch.Tensor
    slots: torch.Tensor
    dst_rows: torch.Tensor
    overflow: torch.Tensor


def place(topk_idx_NK: torch.Tensor, num_local: int, alignment: int, num_rows: int) -> Places:
    """Sort received rows by expert into num_rows expert rows, those of an expert in the order in
    which they were received, and padded to a multiple of `alignment`. topk_idx int64 [N, K] holds
    local experts, -1 for those of other ranks. Nothing waits for the device.

    Example, 2 experts, alignment 2, topk_idx of four tokens [[0, -1], [1, 0], [-1, -1], [0, -1]]:
    offsets [0, 4, 6], slots [0, 3, 6, -1, 2, -1], dst_rows [[0, -1], [4, 1], [-1, -1], [2, -1]].
    """
    ids, (num_received, num_topk) = topk_idx_NK.flatten(), topk_idx_NK.shape
    by_expert, slots = torch.where(ids < 0, num_local, ids).sort(stable=True)
    experts = torch.arange(num_local + 1, dtype=torch.int64, device=ids.device)
    begins = torch.searchsorted(by_expert, experts)
    padded = (begins.diff() + (alignment - 1)) // alignment * alignment
    offsets = torch.nn.functional.pad(padded.cumsum(0), (1, 0))
    rows = torch.arange(len(ids), dtype=torch.int64, device=ids.device)
    rows = rows + (offsets - begins)[by_expert]
    has_row = (by_expert < num_local) & (rows < num_rows)
    slot_of_row = slots.new_full((num_rows + 1,), -1, dtype=torch.int32)  # the last takes the rest
    slot_of_row.scatter_(0, torch.where(has_row, rows, num_rows), slots.int())
    dst_rows = torch.empty_like(ids, dtype=torch.int32)
    dst_rows.scatter_(0, slots, torch.where(has_row, rows, -1).int())
    return Places(
        offsets.clamp(max=num_rows).int(),
        slot_of_row[:num_rows],
        dst_rows.view(num_received, num_topk),
        (offsets[-1:] - num_rows).clamp(min=0).int(),
    )


def take_rows(x: torch.Tensor, slots: torch.Tensor, num_topk: int) -> torch.Tensor:
    """Expert rows [M, H] of received rows x [N, H]; padding is 0. See `Places`."""
    vectors, out = RowVectors.of(x.shape[1], x.dtype), x.new_empty(len(slots), x.shape[1])
    block_rows = 32 if INTERPRETED else TAKE_ROWS
    with torch.cuda.device_of(x):
        launch(
            take_rows_kernel,
            (triton.cdiv(len(slots), block_rows),),
            *(vectors.view(x), slots, vectors.view(out), len(slots), vectors.num_vecs),
            NUM_TOPK=num_topk,
            ALIGNED=vectors.aligned,
            BLOCK_ROWS=block_rows,
            BLOCK_VECS=min(next_power_of_2(vectors.num_vecs), TAKE_VECS),
        )
    return out


def sum_rows(rows: torch.Tensor, dst_rows: torch.Tensor) -> torch.Tensor:
    """[N, H]: the sum of the expert rows of each received row, in the order of its top-k, in fp32
    and rounded once. rows [M, H], dst_rows int32 [N, K]."""
    (num_received, num_topk), hidden = dst_rows.shape, rows.shape[1]
    out = rows.new_empty(num_received, hidden)
    block_rows = 32 if INTERPRETED else SUM_ROWS
    block_columns = min(next_power_of_2(hidden), SUM_COLUMNS)
    with torch.cuda.device_of(rows):
        launch(
            sum_rows_kernel,
            (triton.cdiv(num_received, block_rows), triton.cdiv(hidden, block_columns)),
            *(rows, dst_rows, out, num_received, hidden),
            NUM_TOPK=num_topk,
            BLOCK_ROWS=block_rows,
            BLOCK_H=block_columns,
        )
    return out


def take_weights(weights_NK: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """float32 [M]: the weights [N, K] of received rows, by expert row; 0 for padding."""
    return torch.where(slots < 0, 0.0, weights_NK.flatten()[slots.clamp(min=0)])


def return_weights(weights_M: torch.Tensor, dst_rows: torch.Tensor) -> torch.Tensor:
    """float32 [N, K]: values of expert rows, by top-k slot; 0 for slots without a row."""
    return torch.where(dst_rows < 0, 0.0, weights_M[dst_rows.clamp(min=0)])
