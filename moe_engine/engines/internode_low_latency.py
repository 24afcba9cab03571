"""The low-latency engine of ranks on several nodes: a token crosses the network once for each node.

Its calls are those of `dispatch/internode.py` and `combine/internode.py` without counts for the
host, each in a lane of memory of its own; see `symm/lanes.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..call_memory import leaves
from ..combine.internode import return_and_sum
from ..combine.internode_low_latency import NodeExpertRows, add_up, return_rows
from ..combine.launch import ReturnedRows, Sums
from ..device.context import Kind
from ..device.internode import BOTH
from ..dispatch import Received, Tokens, programs_on_all_sms, programs_that_pace
from ..dispatch.internode_low_latency import (
    Sent,
    Stats,
    locate_tokens,
    new_packed,
    pack_rows,
    receive_tokens,
    send_tokens,
)
from ..dispatch.internode_low_latency_kernels import Packed
from ..dispatch.low_latency import LowLatencyTokens
from ..errors import ShapeError
from ..kinds import Described
from ..low_latency_handle import LowLatencySizes
from ..streams import current_stream, record
from ..symm.lanes import LaneLayout
from ..symm.layout import RankMemory
from ..symm.ring import MAX_LOCAL_EXPERTS
from ..symm.slots import RowLayout, Slots
from .base import LayerInputs, check_layer_weights
from .expert_products import rows_to_send
from .hooked_calls import HookedCalls, Receive
from .received_part import Part


class InternodeLowLatencyHandle(NamedTuple):
    """What `low_latency_combine` needs from a dispatch of ranks on several nodes; the first five
    are DeepEP's, the others are described by `Packed`."""

    src_info: torch.Tensor  # int32 [L, R * M]: each received row's token on its source
    layout_range: torch.Tensor  # int64 [L, R]: begin << 32 | count of each source's rows
    num_max_dispatch_tokens_per_rank: int
    hidden: int
    num_experts: int
    dst_row: torch.Tensor  # int32 [R * M, K]
    src_idx: torch.Tensor  # int32 [R * M]
    rank_prefix_matrix: torch.Tensor  # int32 [R, R]
    signature: torch.Tensor  # int32 [16]
    node_rows: torch.Tensor  # int32 [2, N]
    node_head: torch.Tensor  # int32 [T, N]
    rank_head: torch.Tensor  # int32 [N, M, L]

    @property
    def sizes(self) -> LowLatencySizes:
        """The sizes of the dispatch."""
        num_ranks, num_topk = len(self.rank_prefix_matrix), self.dst_row.shape[1]
        return LowLatencySizes(*self[2:5], num_ranks, num_topk)


class Returns(NamedTuple):
    """What returning the rows of a layer's dispatch takes; see `InternodeLowLatencyHandle`."""

    rank_prefix_matrix: torch.Tensor
    signature: torch.Tensor
    node_head: torch.Tensor
    node_rows: torch.Tensor
    rank_head: torch.Tensor


class InternodeLowLatency(HookedCalls):
    """Low-latency verbs on lanes. The caller has checked all arguments, except whether they fit the
    memory, and their number of tokens against a handle's."""

    def __init__(self, lanes: list[Slots], layout: LaneLayout):
        super().__init__(lanes, len(lanes))
        self.lanes, self.layout = lanes, layout
        self._num_calls = 0

    @property
    def next_memory(self) -> Slots:
        """Calls take the lanes in turn, on all ranks alike."""
        return self.lanes[self._num_calls % len(self.lanes)]

    def owner(self, memory: RankMemory[Any]) -> Any:
        return memory

    @property
    def num_ranks(self) -> int:
        return self.layout.num_ranks

    # --- Verbs -------------------------------------------------------------------------------

    def dispatch(
        self,
        tokens: LowLatencyTokens,
        recv_stats: torch.Tensor | None = None,
        wait_stats: torch.Tensor | None = None,
        hooked: bool = False,
        described: Described | None = None,
    ) -> tuple[Packed, Receive | None]:
        """See `HookedCalls`."""
        self._check_capacity(tokens)
        args = tokens, Stats(recv_stats, wait_stats)
        packed, sent = self._call(_dispatch, *args, hooked=hooked, described=described)
        self._num_calls += 1
        if not hooked:
            return packed, None
        assert sent is not None
        decided = described and described.more(leaves((packed, sent)))
        used = *leaves((packed, sent)), recv_stats, wait_stats
        hook = self._hook(_receive, *args, packed, sent, uses=used, described=decided)

        def receive() -> None:
            record(tuple(leaves(sent)), current_stream(packed.x.device))
            hook()

        return packed, receive

    def new_handle(self, got: Packed, sizes: LowLatencySizes) -> InternodeLowLatencyHandle:
        """The handle of the last dispatch."""
        _, _, _, src_info, layout_range, *more = got
        self._note_handle(src_info)
        return InternodeLowLatencyHandle(src_info, layout_range, *sizes[:3], *more)

    def expert_rows(
        self,
        y: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: InternodeLowLatencyHandle,
        out: torch.Tensor | None,
    ) -> NodeExpertRows:
        """What `combine` takes. ShapeError where there are not the tokens of the dispatch."""
        num_tokens = len(handle.node_head)
        if len(topk_idx) != num_tokens:
            raise ShapeError(
                f"topk_idx has {len(topk_idx)} tokens, and the handle is of {num_tokens}. On "
                "several nodes pass as many as low_latency_dispatch got."
            )
        return NodeExpertRows(y, topk_idx, topk_weights, out, *handle[5:])

    def combine(
        self,
        rows: NodeExpertRows,
        num_experts: int,
        wait_stats: torch.Tensor | None = None,
        hooked: bool = False,
        described: Described | None = None,
    ) -> tuple[torch.Tensor, None, Receive | None]:
        """See `HookedCalls`."""
        num_tokens, num_topk = rows.max_tokens, rows.topk_idx.shape[1]
        self._check_fits(num_tokens, num_topk, num_experts, RowLayout(2 * rows.y.shape[2]))
        out = self._call(_combine, rows, wait_stats, hooked=hooked, described=described)
        self._num_calls += 1
        if not hooked:
            return out, None, None
        decided = described and described.more((out,))
        used = out, *rows[4:]
        return out, None, self._hook(_add_up, rows, out, uses=used, described=decided)

    def moe_ffn(
        self, inputs: LayerInputs, max_tokens: int, described: Described | None = None
    ) -> torch.Tensor:
        """See `HookedCalls`. `described` is not of a lane, so each call is described anew."""
        self._check_hooks(2)
        sums, returns = self._call(_dispatch_to_experts, inputs, max_tokens)
        self._num_calls += 1
        out: torch.Tensor = self._call(_return_sums, sums, returns, len(inputs.x))
        self._num_calls += 1
        return out

    def fits_layer(self, max_tokens: int, num_topk: int, row_bytes: int) -> bool:
        """See `HookedCalls`."""
        return self.fits(max_tokens, num_topk, row_bytes)

    # --- Checks ------------------------------------------------------------------------------

    def fits(self, max_tokens: int, num_topk: int, row_bytes: int) -> bool:
        """Whether calls of rows with so many bytes of payload have room, of the most experts."""
        most = self.num_ranks * MAX_LOCAL_EXPERTS
        return self.layout.fits(max_tokens, num_topk, most, RowLayout(row_bytes, num_topk))

    def _check_capacity(self, tokens: LowLatencyTokens) -> None:
        self._check_local_experts(tokens.num_experts)
        hidden, num_topk = tokens.x.shape[1], tokens.num_topk
        for row in (
            RowLayout(tokens.row.payload_bytes, num_topk, tokens.num_scales),
            RowLayout(2 * hidden),  # a combine does not cast
        ):
            self._check_fits(tokens.max_tokens, num_topk, tokens.num_experts, row)

    def _check_fits(self, max_tokens: int, num_topk: int, num_experts: int, row: RowLayout) -> None:
        if not self.layout.fits(max_tokens, num_topk, num_experts, row):
            raise self._too_large(max_tokens, row.payload_bytes, num_topk, num_experts)


# --- The bodies of calls -----------------------------------------------------------------------


def _dispatch(
    lane: Slots, tokens: LowLatencyTokens, stats: Stats, phases: str
) -> tuple[Packed, Sent | None]:
    sent = send_tokens(tokens, lane)
    packed = new_packed(tokens, sent, lane)
    if phases == "send":
        return packed, sent
    receive_tokens(sent, packed, stats, lane)
    return packed, None


def _receive(
    lane: Slots, tokens: LowLatencyTokens, stats: Stats, packed: Packed, sent: Sent
) -> None:
    receive_tokens(sent, packed, stats, lane)


def _combine(
    lane: Slots, rows: NodeExpertRows, wait_stats: torch.Tensor | None, phases: str
) -> torch.Tensor:
    out = rows.out
    if out is None:
        out = rows.y.new_empty(len(rows.topk_idx), rows.y.shape[2])
    return_rows(rows, out, wait_stats, lane)
    if phases == "both":
        add_up(rows, out, lane)
    return out


def _dispatch_to_experts(
    lane: Slots, inputs: LayerInputs, max_tokens: int, phases: str
) -> tuple[torch.Tensor, Returns]:
    """The first call of a layer, and its products: (sums [R * M, H] of each row that came, what
    returning them takes)."""
    check_layer_weights(inputs)  # before anything is sent, as in `LowLatency.moe_ffn`
    _, topk_idx, topk_weights, w_gate_up, *_ = inputs
    x = rows_to_send(inputs)
    num_topk, num_received = topk_idx.shape[1], lane.num_ranks * max_tokens
    row_format = "bf16" if x.dtype == torch.bfloat16 else "fp32"
    how = max_tokens, len(w_gate_up) * lane.num_ranks, row_format
    # Before anything is sent: what is large enough to be refused.
    addresses = topk_idx.new_empty(num_received)
    arrived = Received.empty(addresses, Tokens(x, topk_idx, topk_weights))
    # A token may name an expert twice. Balanced routing brings as many rows as a rank sends out.
    num_rows, balanced = num_received * num_topk, max_tokens * num_topk
    rows = Part.empty(BOTH.value, inputs, arrived, num_rows, balanced)
    sums = x.new_empty(num_received, inputs.x.shape[1])
    sent = send_tokens(LowLatencyTokens(x, topk_idx, topk_weights, *how), lane)
    locate_tokens(sent, arrived, None, lane)
    rows.place()
    of = sent.tokens, sent.counts.rank_prefix_matrix, rows.places.dst_rows
    pack_rows(arrived, *of, rows.rows, None, lane)
    lane.context.step = "multiply"
    rows.down(inputs, rows.up(inputs), sums)
    lane.context.end_call()
    counts, routes = sent.counts, sent.routes
    parts = counts.rank_prefix_matrix, counts.signature, routes.node_head
    return sums, Returns(*parts, routes.node_rows, routes.rank_head)


def _return_sums(
    lane: Slots, sums: torch.Tensor, returns: Returns, num_tokens: int, phases: str
) -> torch.Tensor:
    """The second call of a layer."""
    prefix, signature, node_head, node_rows, rank_head = returns
    out = sums.new_empty(num_tokens, sums.shape[1])
    added = Sums(out, None, None, None, node_head, prefix)
    how = False, (programs_that_pace(), programs_on_all_sms()), lane, Kind.MOE_FFN_COMBINE
    return_and_sum(ReturnedRows(sums, None), signature, added, node_rows, rank_head, *how)
    return out


def _add_up(lane: Slots, rows: NodeExpertRows, out: torch.Tensor) -> None:
    add_up(rows, out, lane)
