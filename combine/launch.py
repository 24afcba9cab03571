"""Host side of combine: return rows to the tokens' ranks, then add them up."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from ..device.constants import constants
from ..device.lang import INTERPRETED
from ..device.push import PushSizes
from ..hardware import BYTES_IN_FLIGHT, gpu
from ..row_vectors import COPY_ROWS
from ..symm.slots import BARE_HEADER, RowLayout, SlotLayout, Slots, row_in_region
from ..utils import next_power_of_2
from .kernels import SumSizes, final_sum_kernel, return_rows_kernel

NUM_WARPS = 16
BLOCK_TOKENS = 16
"""Tokens whose returned rows are waited for together."""
BLOCK_SUMS = 8192
"""fp32 sums that a program holds at a time."""
SLACK = 49
"""A push is 2% slower than the link: the sums read memory concurrently."""


def num_push_programs(num_programs: int) -> int:
    """How many of a combine's programs push; the others sum. Nine nearly fill the link."""
    return 1 if INTERPRETED else min(num_programs, max(8, 9 * num_programs // 16))


class ReturnedRows(NamedTuple):
    """The rows that a rank returns: x [N, H], in receive order, and weights float32 [N, K], which
    travel along, or None."""

    x: torch.Tensor
    weights: torch.Tensor | None

    @property
    def row(self) -> RowLayout:
        num_topk = 0 if self.weights is None else self.weights.shape[1]
        return RowLayout(self.x.shape[1] * self.x.itemsize, num_topk)


class Sums(NamedTuple):
    """The sums that a combine makes: out [T, H] = biases + returned rows of each token, weights
    float32 [T, K] = the returned weights, or None; up to two biases [T, H], or None. From the
    dispatch: send_head int32 [T, R], row * R + rank of each returned row in the order of the sum;
    rank_prefix_matrix int32 [R, R]."""

    out: torch.Tensor
    weights: torch.Tensor | None
    bias_0: torch.Tensor | None
    bias_1: torch.Tensor | None
    send_head: torch.Tensor
    rank_prefix_matrix: torch.Tensor


@functools.cache
def push_sizes(
    layout: SlotLayout, row: RowLayout, item_bytes: int, relays: bool = False
) -> PushSizes:
    """Of rows of such items. relays: to ranks that forward their sums, while none are made."""
    columns = BYTES_IN_FLIGHT // item_bytes // COPY_ROWS
    sizes = PushSizes(
        ALIGNED=row.payload_bytes % 16 == 0,
        RANKS_PAD=next_power_of_2(layout.num_ranks),
        CHUNK_ROWS=layout.chunk_rows(row.num_bytes),
        SPAN=1 if relays else layout.span(row.num_bytes),
        BLOCK_ROWS=COPY_ROWS,
        BLOCK_COLUMNS=min(next_power_of_2(row.payload_bytes // item_bytes), columns),
        NUM_TOPK=row.num_topk,
        SLACK=0 if relays else SLACK,
        RELAYS=relays,
    )
    return constants(sizes)


@functools.cache
def sum_sizes(
    layout: SlotLayout,
    row: RowLayout,
    item_bytes: int,
    num_parts: int,
    block_tokens: int = BLOCK_TOKENS,
) -> SumSizes:
    """Of sums of up to num_parts rows each."""
    hidden = row.payload_bytes // item_bytes
    sizes = SumSizes(
        NUM_TOPK=row.num_topk,
        TOPK_PAD=next_power_of_2(max(1, row.num_topk)),
        ALIGNED=row.payload_bytes % 16 == 0,
        RANKS=num_parts,
        RANKS_PAD=next_power_of_2(num_parts),
        CHUNK_ROWS=layout.chunk_rows(row.num_bytes),
        BLOCK_TOKENS=block_tokens,
        BLOCK_H=min(next_power_of_2(hidden), BLOCK_SUMS // block_tokens),
    )
    return constants(sizes)


def return_and_sum(
    returned: ReturnedRows,
    dispatched: torch.Tensor,
    sums: Sums,
    num_comm_sms: int,
    slots: Slots,
) -> None:
    """Write rows back to their sources while some of the sums are made, then make the others. A
    whole call, which begins with `dispatched`, the signature in the handle of the dispatch."""
    num_tokens, hidden = sums.out.shape
    row, item_bytes = returned.row, returned.x.itemsize
    arguments: dict[str, Any] = dict(
        own=returned,
        sums=sums,
        context=slots.context.fields,
        num_tokens=num_tokens,
        num_rows=len(returned.x),
        region_rows=slots.layout.max_rows(row.num_bytes, BARE_HEADER),
        hidden=hidden,
        row=row_in_region(row, BARE_HEADER),
        SUM=sum_sizes(slots.layout, row, item_bytes, slots.num_ranks),
        num_warps=NUM_WARPS,
    )
    slots.context.launch(
        return_rows_kernel,
        (1 + num_comm_sms,),
        dispatched=dispatched,
        num_push_programs=num_push_programs(num_comm_sms),
        PUSH=push_sizes(slots.layout, row, item_bytes),
        step="return_rows",
        **arguments,
    )
    slots.context.launch(final_sum_kernel, (2 * gpu().num_sms,), step="final_sum", **arguments)
    slots.context.end_call()
