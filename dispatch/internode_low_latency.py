"""Host side of a low-latency dispatch over several nodes: the halves of a call.

A call is a dispatch of `internode.py` whose counts follow the rows: the first half waits for no
other rank to begin it, and the host for nothing. Rows are cast before they are sent, once for all
nodes, and packed by expert from where they arrived.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from .. import routing
from ..device.constants import constants
from ..grouped_gemm.quantization import quantize_launch
from ..grouped_gemm.quantization_kernels import QuantizedOut, quantize_rows_kernel
from ..row_vectors import COPY_ROWS, RowVectors
from ..symm.slots import Slots, header_bytes
from ..utils import next_power_of_2
from .internode import Routes, end_call, exchange, forward, plan_nodes, send
from .internode_low_latency_kernels import Packed, PackSizes, pack_plan_kernel, pack_rows_kernel
from .launch import (
    NUM_WARPS,
    Counts,
    DispatchLayout,
    Partition,
    Tokens,
    programs_on_all_sms,
    programs_that_pace,
)
from .low_latency import LowLatencyTokens, new_scales, scale_words
from .receive import Received, locate

BLOCK_IDS = 256
"""Received rows whose ids a program reads at a time."""


class Sent(NamedTuple):
    """What the first half of a dispatch leaves for the second."""

    tokens: Tokens  # as they travel
    layout: DispatchLayout
    routes: Routes
    counts: Counts


class Stats(NamedTuple):
    """What a caller wants to be added to, or None: rows by local expert, int32 [L]; ns waited for
    each rank's counts, int64 [R]."""

    received: torch.Tensor | None
    waited: torch.Tensor | None


def _as_sent(tokens: LowLatencyTokens, slots: Slots) -> Tokens:
    """The tokens in the format in which they travel."""
    x, scales = tokens.x, None
    if tokens.is_cast:
        x = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
        scales = x.new_empty((len(x), tokens.num_scales), dtype=torch.int32)
        to = QuantizedOut(x.view(torch.int8), scales, x.stride(0), scales.stride(0))
        grid, arguments, options = quantize_launch(tokens.x, to, None, tokens.row_format)
        slots.context.launch(quantize_rows_kernel, grid, *arguments, **options)
    return Tokens(x, tokens.topk_idx, tokens.topk_weights, scales)


def send_tokens(tokens: LowLatencyTokens, slots: Slots) -> Sent:
    """The first half: counts and rows leave. Waits only for room in this call's memory, until what
    it held before has been received."""
    max_tokens, num_experts = tokens.max_tokens, tokens.num_experts
    layout = DispatchLayout(*routing.layout(tokens.topk_idx, num_experts, slots)[:3])
    routes = plan_nodes(layout, tokens.topk_idx, max_tokens, slots)
    sent = Sent(_as_sent(tokens, slots), layout, routes, Counts.empty(layout))
    exchange(sent.counts, routes, layout, sent.tokens, max_tokens, 0, slots, "send")
    num_sent = layout.num_tokens_per_rank, None
    how = header_bytes(num_experts, slots.num_ranks), Partition(programs_that_pace(), 0), slots
    send(sent.tokens, routes.node_rows, routes.sent_token_idx, num_sent, *how)
    slots.context.end_call()
    return sent


def new_packed(tokens: LowLatencyTokens, sent: Sent, slots: Slots) -> Packed:
    """Room for what a rank receives."""
    num_ranks, hidden, routes = slots.num_ranks, tokens.x.shape[1], sent.routes
    num_local, num_rows = tokens.num_experts // num_ranks, num_ranks * tokens.max_tokens
    new, int32 = tokens.topk_idx.new_empty, torch.int32
    return Packed(
        sent.tokens.x.new_empty(num_local, num_rows, hidden),
        new_scales(tokens, num_local, num_rows),
        new(num_local, dtype=int32),
        new((num_local, num_rows), dtype=int32),
        new((num_local, num_ranks)),
        new((num_rows, tokens.num_topk), dtype=int32),
        new(num_rows, dtype=int32),
        sent.counts.rank_prefix_matrix,
        sent.counts.signature,
        routes.node_rows,
        routes.node_head,
        routes.rank_head,
    )


@functools.cache
def _pack_sizes(num_ranks: int, num_topk: int, num_scales: int, vectors: RowVectors) -> PackSizes:
    sizes = PackSizes(
        NUM_TOPK=num_topk,
        TOPK_PAD=next_power_of_2(num_topk),
        NUM_SCALES=num_scales,
        SCALES_PAD=next_power_of_2(max(1, num_scales)),
        RANKS_PAD=next_power_of_2(num_ranks),
        BLOCK_IDS=BLOCK_IDS,
        BLOCK_ROWS=COPY_ROWS,
        BLOCK_VECS=vectors.block_vecs,
        ALIGNED=vectors.aligned,
    )
    return constants(sizes)


def receive_tokens(sent: Sent, packed: Packed, stats: Stats, slots: Slots) -> None:
    """The second half: forward what arrives from other nodes, and pack what is for this rank."""
    tokens = sent.tokens
    addresses = torch.empty_like(packed.src_idx, dtype=torch.int64)
    arrived = Received.empty(addresses, tokens)._replace(src_idx=packed.src_idx)
    locate_tokens(sent, arrived, stats.waited, slots)
    vectors = RowVectors.of(tokens.x.shape[1], tokens.x.dtype)
    packed = packed._replace(scales=scale_words(packed.scales))
    slots.context.launch(
        pack_plan_kernel,
        (sent.layout.num_experts // slots.num_ranks,),
        arrived,
        packed,
        stats.received,
        slots.context.fields,
        len(packed.src_idx),
        SIZES=_pack_sizes(slots.num_ranks, tokens.num_topk, tokens.row.num_scales, vectors),
        step="pack",
    )
    of = tokens, sent.counts.rank_prefix_matrix, packed.dst_row
    pack_rows(arrived, *of, packed.x, packed.scales, slots)


def locate_tokens(sent: Sent, arrived: Received, waited: torch.Tensor | None, slots: Slots) -> None:
    """Forward what arrives from other nodes, and write what is for this rank to `arrived`: the
    addresses of rows int64 [R * M] as x, with what came along. waited: see `Stats`."""
    tokens, layout, routes, counts = sent
    max_tokens = len(arrived.x) // slots.num_ranks
    exchange(counts, routes, layout, tokens, max_tokens, 0, slots, "receive", waited)
    prefix, header = counts.rank_prefix_matrix, header_bytes(layout.num_experts, slots.num_ranks)
    forward(tokens.row, routes.row_idx, prefix, header, programs_that_pace(), slots)
    num_local = layout.num_experts // slots.num_ranks
    locate(arrived, tokens, prefix, num_local, header, slots)


def pack_rows(
    arrived: Received,
    tokens: Tokens,
    rank_prefix_matrix: torch.Tensor,
    dst_row: torch.Tensor,
    x: torch.Tensor,
    scales: torch.Tensor | None,
    slots: Slots,
    num_programs: int | None = None,
    ends: bool = True,
) -> None:
    """Copy the rows that arrived to those of x [.., H], and of scales, that dst_row int32
    [R * M, K] names, each to K of them, -1 for none; if it `ends` the call, the last step of it."""
    vectors = RowVectors.of(x.shape[-1], x.dtype)
    slots.context.launch(
        pack_rows_kernel,
        (num_programs or programs_on_all_sms(),),
        arrived,
        dst_row,
        rank_prefix_matrix,
        vectors.view(x),
        scales,
        slots.context.fields,
        len(dst_row),
        vectors.num_vecs,
        SIZES=_pack_sizes(slots.num_ranks, dst_row.shape[1], tokens.row.num_scales, vectors),
        ENDS=ends,
        step="pack",
        num_warps=NUM_WARPS,
    )
    if ends:
        end_call(slots)
