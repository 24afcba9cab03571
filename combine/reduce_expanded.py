"""Host side of the sums of expert rows that a rank makes before they return."""

from __future__ import annotations

import torch

from ..device.constants import constants
from ..device.lang import INTERPRETED
from ..hardware import gpu
from ..prepared import with_size
from ..symm.slots import Slots
from ..utils import next_power_of_2
from .launch import ReturnedRows
from .reduce_expanded_kernels import ExpertRows, ReducedRows, ReduceSizes, reduce_expanded_kernel

NUM_WARPS = 8
BLOCK_ROWS, BLOCK_COLUMNS = 4, 1024
"""Rows that a program sums at a time, and columns of each."""


def reduce_expanded(
    returned: ReturnedRows, rank_prefix_matrix: torch.Tensor, dtype: torch.dtype, slots: Slots
) -> ReturnedRows:
    """The sums of rows by expert, as rows [N, H] of `dtype` in the order in which they were
    received, with weights [N, K]."""
    x, weights, src_metadata = returned
    assert src_metadata is not None
    hidden, num_topk = x.shape[1], returned.num_summed
    sizes = ReduceSizes(
        NUM_TOPK=num_topk,
        BLOCK_ROWS=16 if INTERPRETED else BLOCK_ROWS,
        BLOCK_H=min(next_power_of_2(hidden), BLOCK_COLUMNS),
        ALIGNED=hidden * x.itemsize % 16 == 0,
    )
    num_rows = len(src_metadata)
    sums = x.new_empty(num_rows, hidden, dtype=dtype)
    summed = None if weights is None else weights.new_empty(num_rows, num_topk)
    with_size("num_rows", (sums, summed))
    slots.context.launch(
        reduce_expanded_kernel,
        (2 if INTERPRETED else 4 * gpu().num_sms,),
        ExpertRows(x, weights),
        src_metadata,
        rank_prefix_matrix,
        ReducedRows(sums, summed),
        slots.context.fields,
        num_rows,
        len(x),
        hidden,
        SIZES=constants(sizes),
        num_warps=NUM_WARPS,
    )
    return ReturnedRows(sums, summed)
