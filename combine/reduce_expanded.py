"""Host side of the sums of expert rows that a rank makes before they return."""

from __future__ import annotations

import torch

from ..device.constants import constants
from ..device.lang import INTERPRETED
from ..hardware import gpu
from ..symm.slots import Slots
from ..utils import next_power_of_2
from .reduce_expanded_kernels import ExpertRows, ReducedRows, ReduceSizes, reduce_expanded_kernel

NUM_WARPS = 8
BLOCK_ROWS, BLOCK_COLUMNS = 4, 1024
"""Rows that a program sums at a time, and columns of each."""


def reduce_expanded(
    rows: ExpertRows,
    src_metadata: torch.Tensor,
    rank_prefix_matrix: torch.Tensor,
    out: ReducedRows,
    slots: Slots,
) -> None:
    """Sum expert rows [M, H] to the received rows `out` [N, H], in their order."""
    hidden = rows.x.shape[1]
    sizes = ReduceSizes(
        NUM_TOPK=src_metadata.shape[1] - 2,
        BLOCK_ROWS=16 if INTERPRETED else BLOCK_ROWS,
        BLOCK_H=min(next_power_of_2(hidden), BLOCK_COLUMNS),
        ALIGNED=hidden * rows.x.itemsize % 16 == 0,
    )
    slots.context.launch(
        reduce_expanded_kernel,
        (2 if INTERPRETED else 4 * gpu().num_sms,),
        rows,
        src_metadata,
        rank_prefix_matrix,
        out,
        slots.context.fields,
        len(out.x),
        len(rows.x),
        hidden,
        SIZES=constants(sizes),
        num_warps=NUM_WARPS,
    )
