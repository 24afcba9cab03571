"""Host side of a combine over several nodes: one function per launch, in their order."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton.language as tl

from ..device.constants import constants
from ..device.context import Kind
from ..device.internode import BOTH
from ..device.signature import RowShape
from ..dispatch.internode import open_call
from ..hardware import gpu
from ..symm.slots import BARE_HEADER, RowLayout, SlotLayout, Slots, row_in_region
from .internode_kernels import (
    SumFormat,
    internode_sum_kernel,
    node_sum_kernel,
    return_to_nodes_kernel,
    return_to_rails_kernel,
)
from .kernels import SumSizes
from .launch import BLOCK_TOKENS, NUM_WARPS, ReturnedRows, Sums, push_sizes, sum_sizes


def _sum_sizes(layout: SlotLayout, row: RowLayout, item_bytes: int, num_parts: int) -> SumSizes:
    """Returns the sizes of sums whose blocks each lie within a chunk."""
    block_tokens = min(BLOCK_TOKENS, layout.chunk_rows(row.num_bytes))
    return sum_sizes(layout, row, item_bytes, num_parts, block_tokens)


@functools.cache
def _sum_format(layout: SlotLayout, row: RowLayout, dtype: torch.dtype) -> SumFormat:
    names = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float16: tl.float16}
    return constants(SumFormat(names[dtype], layout.chunk_rows(row.num_bytes)))


def return_and_sum(
    returned: ReturnedRows,
    dispatched: torch.Tensor,
    sums: Sums,
    node_rows: torch.Tensor,
    rank_head: torch.Tensor,
    round_once: bool,
    num_programs: tuple[int, int],
    slots: Slots,
    kind: Kind = Kind.COMBINE,
) -> None:
    """Write rows back to the ranks that forwarded them, which send their sums to the sources: these
    add them up. A whole call; sums.send_head is the `Routes.node_head` of the dispatch, node_rows
    and rank_head are those of its `Routes`. round_once: sums go over the network in fp32, twice
    the bytes of bf16. num_programs: those that return rows, and those that sum."""
    num_returning, num_summing = num_programs
    if slots.layout.rows_stay:
        num_returning = num_summing  # they send over the network, as those that sum do otherwise
    open_combine(returned, dispatched, slots, kind)
    return_to_rails(returned, sums.rank_prefix_matrix, BARE_HEADER, num_returning, slots)
    how = round_once, BARE_HEADER, slots, num_summing
    node_sums(returned, sums, node_rows, rank_head, *how)


def open_combine(
    returned: ReturnedRows, dispatched: torch.Tensor, slots: Slots, kind: Kind = Kind.COMBINE
) -> None:
    """Begin the call that returns such rows; see `return_and_sum`."""
    row = returned.row
    shape = RowShape(row.payload_bytes, row.num_topk, returned.x.itemsize, 0)
    open_call(kind, dispatched, shape, slots)


def return_to_rails(
    returned: ReturnedRows,
    rank_prefix_matrix: torch.Tensor,
    header_bytes: int,
    num_programs: int,
    slots: Slots,
    sides: int = BOTH.value,
) -> None:
    """Write rows to the ranks of this node that forwarded them, header_bytes after the beginning of
    a region: all, or those from one of the `sides` of `device/internode.py`. On nodes of one rank
    send them to their sources."""
    row, item_bytes = returned.row, returned.x.itemsize
    slots.context.launch(
        return_to_nodes_kernel if slots.layout.rows_stay else return_to_rails_kernel,
        (num_programs,),
        returned,
        rank_prefix_matrix,
        slots.context.fields,
        len(returned.x),
        returned.x.shape[1],
        sides,
        row_in_region(row, header_bytes),
        SIZES=push_sizes(slots.layout, row, item_bytes, relays=True),
        step="return_rows",
        num_warps=NUM_WARPS,
    )


def node_sums(
    returned: ReturnedRows,
    sums: Sums,
    node_rows: torch.Tensor,
    rank_head: torch.Tensor,
    round_once: bool,
    header_bytes: int,
    slots: Slots,
    num_programs: int | None = None,
) -> None:
    """Send the sums of the rows that this node returns, and add up those that come; the rest of a
    call, see `return_and_sum`. Of `returned` only the types matter. num_programs: of both launches;
    None: as run at once."""
    num_programs, how = num_programs or 2 * gpu().num_sms, (round_once, header_bytes, slots)
    send_node_sums(returned, sums, node_rows, rank_head, num_programs, *how)
    add_node_sums(returned, sums, *how, num_programs)


def send_node_sums(
    returned: ReturnedRows,
    sums: Sums,
    node_rows: torch.Tensor,
    rank_head: torch.Tensor,
    num_programs: int,
    round_once: bool,
    header_bytes: int,
    slots: Slots,
    sides: int = BOTH.value,
) -> None:
    """Send the sums of the rows that this node returns to their nodes; see `return_to_rails`, which
    has sent them on nodes of one rank."""
    row, layout = returned.row, slots.layout
    if layout.rows_stay:
        return
    sent = _sum_row(returned, sums, round_once, layout)
    slots.context.launch(
        node_sum_kernel,
        (num_programs,),
        returned,
        sums._replace(bias_0=None, bias_1=None),
        node_rows[1],
        rank_head,
        slots.context.fields,
        rank_head.shape[1],
        sums.out.shape[1],
        sides,
        row_in_region(row, header_bytes),
        sum_row=row_in_region(sent.row, header_bytes),
        SUM=_sum_sizes(layout, row, returned.x.itemsize, layout.ranks_per_node),
        SENT=sent.format,
        step="node_sum",
        num_warps=NUM_WARPS,
    )


def add_node_sums(
    returned: ReturnedRows,
    sums: Sums,
    round_once: bool,
    header_bytes: int,
    slots: Slots,
    num_programs: int | None = None,
) -> None:
    """Add up the sums that the nodes send; ends the call. num_programs: see `node_sums`."""
    layout = slots.layout
    sent = _sum_row(returned, sums, round_once, layout)
    num_tokens, hidden = sums.out.shape
    slots.context.launch(
        internode_sum_kernel,
        (num_programs or 2 * gpu().num_sms,),
        sums,
        sums.send_head,
        slots.context.fields,
        num_tokens,
        layout.max_rows(sent.row.num_bytes, header_bytes),
        hidden,
        SUM=_sum_sizes(layout, sent.row, sent.dtype.itemsize, layout.num_nodes),
        sum_row=row_in_region(sent.row, header_bytes),
        SENT=sent.format,
        step="final_sum",
        num_warps=NUM_WARPS,
    )
    slots.context.end_call()


class _SumRow(NamedTuple):
    """How sums go over the network."""

    dtype: torch.dtype
    row: RowLayout
    format: SumFormat


def _sum_row(returned: ReturnedRows, sums: Sums, round_once: bool, layout: SlotLayout) -> _SumRow:
    # A row that is the sum is not rounded.
    dtype = torch.float32 if round_once and not layout.rows_stay else returned.x.dtype
    row = RowLayout(sums.out.shape[1] * dtype.itemsize, returned.row.num_topk)
    return _SumRow(dtype, row, _sum_format(layout, row, dtype))
