"""Host side of a combine over several nodes: one function per launch, in their order."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton.language as tl

from ..device.constants import constants
from ..device.context import Kind
from ..device.signature import RowShape
from ..dispatch.internode import open_call
from ..hardware import gpu
from ..symm.slots import BARE_HEADER, RowLayout, SlotLayout, Slots, row_in_region
from .internode_kernels import (
    SumFormat,
    internode_sum_kernel,
    node_sum_kernel,
    return_to_rails_kernel,
)
from .kernels import SumSizes
from .launch import BLOCK_TOKENS, NUM_WARPS, ReturnedRows, Sums, push_sizes, sum_sizes


def _sum_sizes(layout: SlotLayout, row: RowLayout, item_bytes: int, num_parts: int) -> SumSizes:
    """Of sums whose blocks lie within a chunk each."""
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
    num_comm_sms: int,
    slots: Slots,
    kind: Kind = Kind.COMBINE,
) -> None:
    """Write rows back to the ranks that forwarded them, which send their sums to the sources: these
    add them up. A whole call; sums.send_head is the `Routes.node_head` of the dispatch, node_rows
    and rank_head are those of its `Routes`. round_once: sums go over the network in fp32, twice
    the bytes of bf16."""
    row = returned.row
    shape = RowShape(row.payload_bytes, row.num_topk, returned.x.itemsize, 0)
    open_call(kind, dispatched, shape, slots)
    return_to_rails(returned, sums.rank_prefix_matrix, BARE_HEADER, num_comm_sms, slots)
    node_sums(returned, sums, node_rows, rank_head, round_once, BARE_HEADER, slots)


def return_to_rails(
    returned: ReturnedRows,
    rank_prefix_matrix: torch.Tensor,
    header_bytes: int,
    num_programs: int,
    slots: Slots,
) -> None:
    """Write rows to the ranks of this node that forwarded them, header_bytes after the beginning of
    a region."""
    row, item_bytes = returned.row, returned.x.itemsize
    slots.context.launch(
        return_to_rails_kernel,
        (num_programs,),
        returned,
        rank_prefix_matrix,
        slots.context.fields,
        len(returned.x),
        returned.x.shape[1],
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
) -> None:
    """Send the sums of the rows that this node returns, and add up those that come; the rest of a
    call, see `return_and_sum`. Of `returned` only the types matter."""
    num_tokens, hidden = sums.out.shape
    row, item_bytes, layout = returned.row, returned.x.itemsize, slots.layout
    in_region, max_rows = row_in_region(row, header_bytes), rank_head.shape[1]
    sum_dtype = torch.float32 if round_once else returned.x.dtype
    sum_row = RowLayout(hidden * sum_dtype.itemsize, row.num_topk)
    sent: dict[str, Any] = dict(
        sum_row=row_in_region(sum_row, header_bytes), SENT=_sum_format(layout, sum_row, sum_dtype)
    )
    slots.context.launch(
        node_sum_kernel,
        (2 * gpu().num_sms,),
        returned,
        sums._replace(bias_0=None, bias_1=None),
        node_rows[1],
        rank_head,
        slots.context.fields,
        max_rows,
        hidden,
        in_region,
        SUM=_sum_sizes(layout, row, item_bytes, layout.ranks_per_node),
        **sent,
        step="node_sum",
        num_warps=NUM_WARPS,
    )
    slots.context.launch(
        internode_sum_kernel,
        (2 * gpu().num_sms,),
        sums,
        sums.send_head,
        slots.context.fields,
        num_tokens,
        layout.max_rows(sum_row.num_bytes, header_bytes),
        hidden,
        SUM=_sum_sizes(layout, sum_row, sum_dtype.itemsize, layout.num_nodes),
        **sent,
        step="final_sum",
        num_warps=NUM_WARPS,
    )
    slots.context.end_call()
