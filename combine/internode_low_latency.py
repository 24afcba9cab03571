"""Host side of a low-latency combine over several nodes: the halves of a call."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from ..device.constants import constants
from ..device.context import Kind
from ..device.signature import RowShape
from ..dispatch.internode import open_call
from ..dispatch.internode_header_kernels import SentWeights
from ..dispatch.launch import programs_that_pace
from ..hardware import gpu
from ..symm.lanes import weights_header_bytes
from ..symm.slots import Slots
from ..utils import next_power_of_2
from .internode import node_sums, return_to_rails
from .internode_low_latency_kernels import ExpertSums, ExpertSumSizes, sum_expert_rows_kernel
from .launch import BLOCK_SUMS, NUM_WARPS, ReturnedRows, Sums

BLOCK_ROWS = 8
"""Rows whose experts' rows a program sums at a time."""


class NodeExpertRows(NamedTuple):
    """What a combine returns to the tokens' ranks, and where it adds up what comes back. All but
    the first four are those of `Packed`."""

    y: torch.Tensor  # bf16 [L, R * M, H], the experts' rows
    topk_idx: torch.Tensor  # int64 [T, K]
    topk_weights: torch.Tensor  # float32 [T, K]
    out: torch.Tensor | None  # bf16 [T, H], or None for a new one
    dst_row: torch.Tensor
    src_idx: torch.Tensor
    rank_prefix_matrix: torch.Tensor
    signature: torch.Tensor
    node_rows: torch.Tensor
    node_head: torch.Tensor
    rank_head: torch.Tensor

    @property
    def max_tokens(self) -> int:
        return self.rank_head.shape[1]

    @property
    def header_bytes(self) -> int:
        """The bytes of a region before the rows that return."""
        return weights_header_bytes(self.max_tokens, self.topk_idx.shape[1])


@functools.cache
def _sum_sizes(num_ranks: int, num_topk: int, hidden: int, item_bytes: int) -> ExpertSumSizes:
    sizes = ExpertSumSizes(
        NUM_TOPK=num_topk,
        RANKS_PAD=next_power_of_2(num_ranks),
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_H=min(next_power_of_2(hidden), BLOCK_SUMS // BLOCK_ROWS),
        ALIGNED=hidden * item_bytes % 16 == 0,
    )
    return constants(sizes)


def return_rows(
    rows: NodeExpertRows, out: torch.Tensor, wait_stats: torch.Tensor | None, slots: Slots
) -> None:
    """The first half: weights go to all ranks, and each rank's sums of its experts' rows to the
    ranks of its node that add them up. Waits for the weights of all ranks, which they send in this
    half: wait_stats int64 [R], ns waited for those of each, is added to."""
    num_topk, hidden, max_tokens = rows.topk_idx.shape[1], out.shape[1], rows.max_tokens
    shape = RowShape(hidden * out.itemsize, num_topk, out.itemsize, 0)
    weights = SentWeights(rows.topk_weights, rows.topk_idx), max_tokens
    open_call(Kind.LOW_LATENCY_COMBINE, rows.signature, shape, slots, *weights, wait_stats)
    returned = ReturnedRows(out.new_empty(len(rows.src_idx), hidden), None)
    slots.context.launch(
        sum_expert_rows_kernel,
        (2 * gpu().num_sms,),
        ExpertSums(rows.y, rows.dst_row, rows.src_idx, rows.rank_prefix_matrix, returned.x),
        slots.context.fields,
        len(rows.src_idx),
        max_tokens,
        rows.y.shape[:2].numel() - 1,
        hidden,
        SIZES=_sum_sizes(slots.num_ranks, num_topk, hidden, out.itemsize),
        step="sum of experts",
        num_warps=NUM_WARPS,
    )
    how = rows.header_bytes, programs_that_pace(), slots
    return_to_rails(returned, rows.rank_prefix_matrix, *how)
    slots.context.end_call()


def add_up(rows: NodeExpertRows, out: torch.Tensor, slots: Slots) -> None:
    """The second half: sums of the rows of each node, sent over the network, and of these."""
    returned = ReturnedRows(out, None)
    sums = Sums(out, None, None, None, rows.node_head, rows.rank_prefix_matrix)
    node_sums(returned, sums, rows.node_rows, rows.rank_head, False, rows.header_bytes, slots)
