"""Host side of a dispatch over several nodes: one function per launch, in their order."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from .. import routing
from ..device.constants import constants
from ..device.context import Kind
from ..device.lang import INTERPRETED
from ..device.signature import RowShape
from ..row_vectors import COPY_ROWS, RowVectors
from ..symm.slots import RowLayout, SlotLayout, Slots, row_in_region
from ..utils import next_power_of_2
from .internode_header_kernels import (
    Forwarding,
    InternodeSizes,
    NodePlan,
    SentWeights,
    exchange_internode_kernel,
    node_layout_kernel,
    open_internode_kernel,
)
from .internode_kernels import forward_kernel, release_rails_kernel, send_rows_kernel
from .launch import (
    NUM_WARPS,
    Counts,
    DispatchLayout,
    Partition,
    Tokens,
    exchange_sizes,
    metadata_sizes,
    programs_on_all_sms,
    push,
    push_sizes,
    send_metadata,
)
from .send_kernels import Metadata, SendPlan

BLOCK_TOKENS = 128 if INTERPRETED else 1024
"""Tokens whose nodes a program finds at a time."""
HEADER_ITEMS, HEADER_BYTES = (128, 256) if INTERPRETED else (1024, 4096)
"""Pairs of a row and a rank that a program writes to a header at a time, and bytes that it copies
from one."""


class Routes(NamedTuple):
    """How a rank's tokens, and those that it forwards, go on.

    node_rows int32 [2, N]: rows that this rank sends to each node, and rows that it forwards, those
    of its rail peer on each node and its own. sent_token_idx int32 [N + L, T]: the token of each
    row for each node, then for each rank of this one; node_head int32 [T, N]: row * N + node in the
    order of the final sum, then -1. Of the rows that this rank forwards: row_idx int32 [N, L, M],
    which of them is which row for each rank of this node; rank_head int32 [N, M, L]: row * L + rank
    in the order of their sum, then -1.
    """

    node_rows: torch.Tensor
    sent_token_idx: torch.Tensor
    node_head: torch.Tensor
    row_idx: torch.Tensor
    rank_head: torch.Tensor


class NodeLayout(NamedTuple):
    """Where a rank's tokens go: is_token_in_node bool [T, N]; is_token_near bool [T, L], of the
    ranks of this node; counts int32 [N], tokens for each node."""

    is_token_in_node: torch.Tensor
    is_token_near: torch.Tensor
    counts: torch.Tensor


def node_layout(
    is_token_in_rank: torch.Tensor, slots: Slots, counts: torch.Tensor | None = None
) -> NodeLayout:
    """That of is_token_in_rank bool [T, R]; the counts go to memory that is given for them."""
    num_tokens, layout, new = len(is_token_in_rank), slots.layout, is_token_in_rank.new_empty
    num_nodes, num_near = layout.num_nodes, layout.ranks_per_node
    in_node, near = new((num_tokens, num_nodes)), new((num_tokens, num_near))
    counts = new(num_nodes, dtype=torch.int32) if counts is None else counts
    slots.context.launch(
        node_layout_kernel,
        (num_nodes,),
        is_token_in_rank.view(torch.uint8),
        in_node.view(torch.uint8),
        near.view(torch.uint8),
        counts,
        slots.context.fields,
        num_tokens,
        NODE_RANKS_PAD=next_power_of_2(num_near),
        BLOCK=BLOCK_TOKENS,
    )
    return NodeLayout(in_node, near, counts)


def plan_nodes(
    layout: DispatchLayout, topk_idx: torch.Tensor | None, max_rows: int, slots: Slots
) -> Routes:
    """Which tokens go to which node and to which rank of this one. `exchange` fills in the
    rest."""
    num_nodes, num_near = slots.layout.num_nodes, slots.layout.ranks_per_node
    num_tokens, new = len(layout.is_token_in_rank), layout.is_token_in_rank.new_empty
    node_rows = new((2, num_nodes), dtype=torch.int32)
    in_node, near, _ = node_layout(layout.is_token_in_rank, slots, node_rows[0])
    sent = new((num_nodes + num_near, num_tokens), dtype=torch.int32)
    of_nodes, of_ranks = sent[:num_nodes], sent[num_nodes:]
    _, node_head = routing.send_plan(in_node, topk_idx, layout.num_experts, slots, of_nodes)
    routing.send_plan(near, None, num_near, slots, of_ranks)
    shape = num_nodes, num_near, max_rows
    row_idx = new(shape, dtype=torch.int32)
    rank_head = new((num_nodes, max_rows, num_near), dtype=torch.int32)
    return Routes(node_rows, sent, node_head, row_idx, rank_head)


@functools.cache
def _header_sizes(
    layout: SlotLayout, kind: Kind = Kind.DISPATCH, phases: str = "both"
) -> InternodeSizes:
    near = next_power_of_2(layout.ranks_per_node)
    sizes = InternodeSizes(
        HEADER_PAD=256,
        NODE_RANKS_PAD=near,
        NODES_PAD=next_power_of_2(layout.num_nodes),
        BLOCK_ROWS=max(1, HEADER_ITEMS // near),
        BLOCK_BYTES=HEADER_BYTES,
        KIND=int(kind),
        PHASES=phases,
    )
    return constants(sizes)


def exchange(
    counts: Counts,
    routes: Routes,
    layout: DispatchLayout,
    tokens: Tokens,
    max_rows: int,
    form: int,
    slots: Slots,
    phases: str = "both",
    wait_stats: torch.Tensor | None = None,
) -> None:
    """`launch.exchange` over several nodes; and what this rank will forward, see `Routes`. Begins a
    call.

    A low-latency call, of up to `max_rows` tokens of a rank, has two launches, phases "send" and
    "receive". wait_stats int64 [R], ns waited for each rank's counts, is added to by the second.
    """
    num_nodes, num_near = slots.layout.num_nodes, slots.layout.ranks_per_node
    num_ranks, in_rank = slots.num_ranks, layout.is_token_in_rank
    forwarded = in_rank.new_empty((num_nodes, max_rows, num_near))
    kind = Kind.DISPATCH
    if phases != "both":
        is_layer = tokens.topk_weights is not None
        kind = Kind.MOE_FFN_DISPATCH if is_layer else Kind.LOW_LATENCY_DISPATCH
    num_senders, num_receivers = num_nodes - 1 + num_near, num_nodes + 1
    num_programs = {"send": num_senders, "receive": num_receivers}
    slots.context.launch(
        exchange_internode_kernel,
        (num_programs.get(phases, num_senders + num_receivers),),
        layout._replace(is_token_in_rank=in_rank.view(torch.uint8)),
        NodePlan(routes.node_rows[0], routes.sent_token_idx),
        Forwarding(routes.node_rows[1], forwarded.view(torch.uint8), wait_stats),
        counts,
        slots.context.fields,
        len(tokens.x),
        max_rows,
        tokens.shape,
        form,
        slots.context.callers.running,
        SIZES=_header_sizes(slots.layout, kind, phases),
        COUNTS=exchange_sizes(num_ranks, layout.num_experts, num_nodes),
        step="exchange" if phases == "both" else f"exchange, {phases}",
    )
    if phases != "send":
        heads = routes.row_idx, routes.rank_head
        routing.send_plan(forwarded, None, num_near, slots, *heads)


def open_call(
    kind: Kind,
    dispatched: torch.Tensor,
    shape: RowShape,
    slots: Slots,
    weights: SentWeights | None = None,
    max_tokens: int = 0,
    wait_stats: torch.Tensor | None = None,
) -> None:
    """Begin a call that has a handle, with `dispatched`, the signature in it. `weights` of up to
    max_tokens tokens of a rank go along with the signature. wait_stats int64 [R], ns waited for
    each rank, is added to."""
    slots.context.launch(
        open_internode_kernel,
        (2 * slots.layout.num_nodes + slots.layout.ranks_per_node,),
        int(kind),
        dispatched,
        weights,
        wait_stats,
        slots.context.fields,
        shape,
        0 if weights is None else len(weights.topk_idx),
        max_tokens,
        SIZES=_header_sizes(slots.layout),
        RANKS_PAD=next_power_of_2(slots.num_ranks),
        step="open_call",
    )


def send(
    tokens: Tokens,
    node_rows: torch.Tensor,
    sent_token_idx: torch.Tensor,
    num_sent: tuple[torch.Tensor, torch.Tensor | None],
    header_bytes: int,
    partition: Partition,
    slots: Slots,
) -> None:
    """Send all rows: those to other nodes first, as the network takes longest. num_sent: the `ends`
    and `begins` of a `SendPlan`; the others are parts of `Routes`."""
    on_all_sms = programs_on_all_sms()
    plan = SendPlan(*num_sent, sent_token_idx[slots.layout.num_nodes :])
    send_rows(tokens, node_rows, sent_token_idx, header_bytes, on_all_sms, slots)
    send_metadata(tokens, plan, header_bytes, on_all_sms, slots)
    push(tokens, plan, header_bytes, partition, slots)


def send_rows(
    tokens: Tokens,
    node_rows: torch.Tensor,
    sent_token_idx: torch.Tensor,
    header_bytes: int,
    num_programs: int,
    slots: Slots,
) -> None:
    """Send rows, with what goes with them, to the rail peers on the other nodes."""
    vectors, row = RowVectors.of(tokens.x.shape[1], tokens.x.dtype), tokens.row
    scales = None if tokens.scales is None else tokens.scales.view(torch.int32)
    slots.context.launch(
        send_rows_kernel,
        (num_programs,),
        vectors.view(tokens.x),
        Metadata(scales, tokens.topk_idx, tokens.topk_weights),
        NodePlan(node_rows[0], sent_token_idx),
        slots.context.fields,
        len(tokens.x),
        vectors.num_vecs,
        *((0, 0) if scales is None else scales.stride()),
        row_in_region(row, header_bytes),
        METADATA=metadata_sizes(slots.num_ranks, row, COPY_ROWS),
        SIZES=push_sizes(slots.layout, row, vectors, relays=True),
        step="send_rows",
        num_warps=NUM_WARPS,
    )


def forward(
    row: RowLayout,
    row_idx: torch.Tensor,
    rank_prefix_matrix: torch.Tensor,
    header_bytes: int,
    num_programs: int,
    slots: Slots,
) -> None:
    """Forward the rows that arrive from other nodes to the ranks of this node, unless they stay."""
    if slots.layout.rows_stay:
        return
    vectors = RowVectors.of(row.num_bytes, torch.int8)  # whole rows, of any payload
    slots.context.launch(
        forward_kernel,
        (num_programs,),
        row_idx,
        rank_prefix_matrix,
        slots.context.fields,
        row_idx.shape[2],
        row_in_region(row, header_bytes),
        SIZES=push_sizes(slots.layout, row, vectors, relays=True),
        step="forward",
        num_warps=NUM_WARPS,
    )


def end_call(slots: Slots) -> None:
    """End a call whose last launch has read what it received; see `release_rails_kernel`."""
    if slots.layout.rows_stay:
        slots.context.launch(release_rails_kernel, (1,), slots.context.fields, step="release")
    slots.context.end_call()
