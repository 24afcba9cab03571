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
SUMMED_ROWS, SUMMED_COLUMNS = 8, 1024
"""Rows that a program makes of expert rows at a time, and then pushes, and columns of each; also
the tokens that it sums at a time, where it reads up to K expert rows of this rank for each."""

LEFT_SMS = 8
"""SMs that a combine by expert leaves to other kernels, besides those whose programs have pushed:
so these can run while its sums wait for a rank that has not come."""


def combine_programs(num_programs: int, by_expert: bool) -> tuple[int, int]:
    """(programs of a combine that push, and those that sum concurrently). Nine nearly fill the
    link. Of rows by expert K are read for each that returns: at most two fifths of the SMs push,
    see `return_rows_kernel`, and the others but LEFT_SMS sum, whatever num_programs is."""
    if INTERPRETED:
        return 1, num_programs - 1
    if by_expert:
        num_sms = gpu().num_sms
        num_push = max(1, 2 * num_sms // 5)
        return num_push, max(0, num_sms - num_push - LEFT_SMS)
    num_push = min(num_programs, max(8, 9 * num_programs // 16))
    return num_push, num_programs - num_push


class ReturnedRows(NamedTuple):
    """The rows that a rank returns: x [N, H], in receive order, and weights float32 [N, K], which
    travel along, or None. With src_metadata int32 [N, 2 + K], see `reference.place`, sums of rows
    by expert x [M, H] return, and weights are [M]."""

    x: torch.Tensor
    weights: torch.Tensor | None
    src_metadata: torch.Tensor | None = None

    @property
    def num_summed(self) -> int:
        """K of rows by expert, else 0."""
        return 0 if self.src_metadata is None else self.src_metadata.shape[1] - 2

    @property
    def num_rows(self) -> int:
        """N."""
        return len(self.x if self.src_metadata is None else self.src_metadata)

    @property
    def num_topk(self) -> int:
        """Weights that travel with a row."""
        return 0 if self.weights is None else self.num_summed or self.weights.shape[1]

    @property
    def row(self) -> RowLayout:
        return self.row_of(self.x.dtype)

    def row_of(self, dtype: torch.dtype) -> RowLayout:
        """How a row of this type returns."""
        return RowLayout(self.x.shape[1] * dtype.itemsize, self.num_topk)


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


def _is_aligned(row: RowLayout, item_bytes: int, num_summed: int) -> bool:
    """Whether all rows begin at 16 bytes: those that return, and rows by expert, whose items may
    take 2 bytes where sums take 4."""
    columns = row.payload_bytes // item_bytes
    return columns * (2 if num_summed else item_bytes) % 16 == 0


@functools.cache
def push_sizes(
    layout: SlotLayout, row: RowLayout, item_bytes: int, relays: bool = False, num_summed: int = 0
) -> PushSizes:
    """Returns the sizes of a push of rows. relays: the rows go to ranks that forward their sums,
    and none are summed here. num_summed: the most rows of experts in a sum; flags are raised
    after each chunk, as with longer spans the first ones would come when half is done."""
    block_rows, columns = COPY_ROWS, BYTES_IN_FLIGHT // item_bytes // COPY_ROWS
    if num_summed:
        block_rows, columns = SUMMED_ROWS, SUMMED_COLUMNS
    sizes = PushSizes(
        ALIGNED=_is_aligned(row, item_bytes, num_summed),
        RANKS_PAD=next_power_of_2(layout.num_ranks),
        CHUNK_ROWS=layout.chunk_rows(row.num_bytes),
        SPAN=1 if relays or num_summed else layout.span(row.num_bytes),
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=min(next_power_of_2(row.payload_bytes // item_bytes), columns),
        NUM_TOPK=row.num_topk,
        SLACK=0 if relays else SLACK,
        RELAYS=relays,
        NUM_SUMMED=num_summed,
    )
    return constants(sizes)


@functools.cache
def sum_sizes(
    layout: SlotLayout,
    row: RowLayout,
    item_bytes: int,
    num_parts: int,
    block_tokens: int = BLOCK_TOKENS,
    num_summed: int = 0,
) -> SumSizes:
    """Returns the sizes of sums of up to num_parts rows; this rank's own row is a sum of up to
    num_summed rows of experts."""
    hidden = row.payload_bytes // item_bytes
    block_tokens = SUMMED_ROWS if num_summed else block_tokens
    sizes = SumSizes(
        NUM_TOPK=row.num_topk,
        TOPK_PAD=next_power_of_2(max(1, row.num_topk)),
        ALIGNED=_is_aligned(row, item_bytes, num_summed),
        RANKS=num_parts,
        RANKS_PAD=next_power_of_2(num_parts),
        CHUNK_ROWS=layout.chunk_rows(row.num_bytes),
        BLOCK_TOKENS=block_tokens,
        BLOCK_H=min(next_power_of_2(hidden), BLOCK_SUMS // block_tokens),
        NUM_SUMMED=num_summed,
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
    whole call, which begins with `dispatched`, the signature in the handle of the dispatch. Rows
    return in the type of sums.out."""
    (num_tokens, hidden), num_summed = sums.out.shape, returned.num_summed
    row, item_bytes = returned.row_of(sums.out.dtype), sums.out.itemsize
    num_push, num_sum = combine_programs(num_comm_sms, num_summed > 0)
    arguments: dict[str, Any] = dict(
        own=returned,
        sums=sums,
        context=slots.context.fields,
        num_tokens=num_tokens,
        num_rows=returned.num_rows,
        num_expanded=len(returned.x) if num_summed else 0,
        hidden=hidden,
        row=row_in_region(row, BARE_HEADER),
        SUM=sum_sizes(slots.layout, row, item_bytes, slots.num_ranks, num_summed=num_summed),
        num_warps=NUM_WARPS,
    )
    slots.context.launch(
        return_rows_kernel,
        (1 + num_push + num_sum,),
        dispatched=dispatched,
        num_push_programs=num_push,
        PUSH=push_sizes(slots.layout, row, item_bytes, num_summed=num_summed),
        step="return_rows",
        **arguments,
    )
    slots.context.launch(final_sum_kernel, (2 * gpu().num_sms,), step="final_sum", **arguments)
    slots.context.end_call()
