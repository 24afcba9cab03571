"""The kernel engine on several nodes: rows cross the network once for each token and node.

What sends and what sums goes through the rail peers, see `dispatch/internode_kernels.py` and
`combine/internode_kernels.py`; what receives is the engine of one node.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar, NamedTuple

import torch

from .. import combine as combine_verbs
from .. import dispatch as dispatch_verbs
from ..combine import internode as combine_internode
from ..combine.reduce_expanded import reduce_expanded
from ..device.context import Kind
from ..dispatch import (
    NUM_CONCURRENT,
    Counts,
    DispatchLayout,
    Partition,
    Received,
    Tokens,
    programs_on_all_sms,
    programs_that_pace,
)
from ..dispatch import internode as dispatch_internode
from ..dispatch.internode import Routes
from ..kinds import Described
from ..streams import SideStream
from ..symm.slots import BARE_HEADER, header_bytes
from . import internode_layer
from .base import (
    Gradients,
    Into,
    LayerInputs,
    PartsOfHandle,
    Saved,
    check_layer_weights,
)
from .expert_products import rows_to_send
from .expert_sums import sums_of_experts
from .kernel_verbs import KernelVerbs
from .layer_by_verbs import LayerByVerbs


class InternodeHandle(NamedTuple):
    """What combine and a cached dispatch need from a dispatch over N nodes of L ranks: ten tensors,
    as DeepEP's has, with the parts that callers read at their places there. See `Routes`."""

    is_token_in_rank: torch.Tensor  # bool [T, R]
    sent_token_idx: torch.Tensor  # int32 [N + L, T]
    rank_prefix_matrix: torch.Tensor  # int32 [R, R]: rows of ranks 0..i to rank j
    row_idx: torch.Tensor  # int32 [N, L, M]
    node_rows: torch.Tensor  # int32 [2, N]: rows sent to each node; rows of each that it forwards
    signature: torch.Tensor  # int32 [16]
    recv_gbl_rank_prefix_sum: torch.Tensor  # int32 [R]: rows of ranks 0..i to this rank
    recv_src_idx: torch.Tensor  # int32 [N]: each received row's token on its source
    send_head: torch.Tensor  # int32 [T, N]: row * N + node in the order of the final sum, or -1
    rank_head: torch.Tensor  # int32 [N, M, L]: row * L + rank in the order of a node's sum, or -1

    @property
    def sent(self) -> PartsOfHandle:
        """See `Handle`."""
        parts = self.rank_prefix_matrix, self.signature, self.sent_token_idx
        return *parts, self.row_idx, self.node_rows

    @property
    def returned(self) -> PartsOfHandle:
        """See `Handle`."""
        parts = self.rank_prefix_matrix, self.signature, self.send_head
        return *parts, self.node_rows, self.rank_head


class InternodeEngine(KernelVerbs, LayerByVerbs):
    """Calls of ranks on several nodes. Layers are made of dispatch, grouped GEMMs and combine."""

    handle_type: ClassVar[Any] = InternodeHandle

    @functools.cached_property
    def side_stream(self) -> SideStream:
        """See `internode_layer.py`."""
        return SideStream(self.context.fields.device)

    def moe_ffn_forward(
        self,
        inputs: LayerInputs,
        save: str,
        is_captured: bool,
        described: Described | None = None,
    ) -> tuple[torch.Tensor, Saved, torch.Tensor]:
        """See `base.Engine`; in two parts where that is predicted to be faster."""
        # Before anything is sent: the other ranks could not know of a refusal afterwards.
        check_layer_weights(inputs)
        if not self.has_two_parts(inputs):
            return LayerByVerbs.moe_ffn_forward(self, inputs, save, is_captured, described)
        with torch.no_grad():
            return internode_layer.forward(self, inputs, save)

    def moe_ffn_backward(
        self, dy: torch.Tensor, inputs: LayerInputs, saved: Saved, into: Into
    ) -> Gradients:
        """See `internode_layer.backward`."""
        with torch.no_grad():
            return internode_layer.backward(self, dy, inputs, saved, into)

    def has_two_parts(self, inputs: LayerInputs) -> bool:
        """See `internode_layer.is_faster`."""
        num_nodes = self.slots.layout.num_nodes
        return self.may_have_parts and internode_layer.is_faster(inputs, self.num_ranks, num_nodes)

    @property
    def may_have_parts(self) -> bool:
        """Whether layers may have two parts: not in memory that grows."""
        return self._max_tokens is not None

    @property
    def num_ranks(self) -> int:  # type: ignore[override]
        return self.slots.num_ranks

    def tokens_of(self, inputs: LayerInputs) -> Tokens:
        """See `LayerByVerbs`."""
        rows, returned_bytes = rows_to_send(inputs), inputs.x.shape[1] * inputs.x.itemsize
        return Tokens(rows, inputs.topk_idx, inputs.topk_weights, returned_bytes=returned_bytes)

    def most_received(self, tokens: Tokens, num_experts: int) -> int:
        """See `LayerByVerbs`: as many as all ranks may bring to this Buffer."""
        header = header_bytes(num_experts, self.num_ranks)
        return self.num_ranks * max(1, self.max_tokens(self._largest_row(tokens), header))

    def expert_sums(self, rows: LayerInputs, num_rows: int) -> torch.Tensor:
        """See `LayerByVerbs`; by grouped GEMMs."""
        with torch.no_grad():
            return sums_of_experts(rows, num_rows)

    def tokens_per_node(self, layout: DispatchLayout) -> torch.Tensor:
        """int32 [N]: how many tokens go to each node; of nodes of one rank the tensor of those for
        each rank."""
        if self.slots.layout.rows_stay:
            return layout.num_tokens_per_rank
        in_rank = layout.is_token_in_rank
        counts: torch.Tensor = self.call(InternodeEngine._tokens_per_node, in_rank)
        return counts

    def _tokens_per_node(self, is_token_in_rank: torch.Tensor) -> torch.Tensor:
        return dispatch_internode.node_layout(is_token_in_rank, self.slots).counts

    # --- Dispatch ----------------------------------------------------------------------------

    def most_rows(self, tokens: Tokens, num_experts: int) -> int | None:
        """M of an `InternodeHandle` of a dispatch of such tokens; None in memory that grows."""
        header = header_bytes(num_experts, self.num_ranks)
        fits = self.slots.layout.max_rows(self._largest_row(tokens).num_bytes, header)
        return None if self._max_tokens is None else fits

    def _tell_counts(
        self,
        counts: Counts,
        tokens: Tokens,
        layout: DispatchLayout,
        max_rows: int,
        form: int,
        num_early_programs: int,
    ) -> Routes:
        """Exchange `counts` over the nodes. No launch begins before that has ended."""
        routes = dispatch_internode.plan_nodes(layout, tokens.topk_idx, max_rows, self.slots)
        dispatch_internode.exchange(counts, routes, layout, tokens, max_rows, form, self.slots)
        return routes

    def _send(
        self,
        tokens: Tokens,
        layout: DispatchLayout,
        counts: Counts,
        routes: tuple[torch.Tensor, ...],
        partition: Partition,
    ) -> None:
        """Send metadata and rows, over the network and to this node, and forward."""
        self.send_rows(tokens, layout, counts, routes, partition)
        header = header_bytes(layout.num_experts, self.slots.num_ranks)
        of = Routes(*routes).row_idx, counts.rank_prefix_matrix, header
        dispatch_internode.forward(tokens.row, *of, programs_that_pace(), self.slots)

    def send_rows(
        self,
        tokens: Tokens,
        layout: DispatchLayout,
        counts: Counts,
        routes: tuple[torch.Tensor, ...],
        partition: Partition | None = None,
    ) -> None:
        """`_send`, without what this rank forwards. Without a partition the next launch begins
        after this."""
        header = header_bytes(layout.num_experts, self.slots.num_ranks)
        of, num_sent = Routes(*routes), (layout.num_tokens_per_rank, None)
        partition = partition or self._partition(0, owned=False)
        sent = of.node_rows, of.sent_token_idx, num_sent, header, partition
        dispatch_internode.send(tokens, *sent, self.slots)

    def _partition(self, num_programs: int, owned: bool) -> Partition:
        """All SMs send, whatever num_programs is. All rows are received by the last launch, as
        programs forward before it; on nodes of one rank none do, and it may begin at once. There a
        push has no rows to copy, and raises the flags of this rank's own ones."""
        if self.slots.layout.rows_stay:
            return Partition(NUM_CONCURRENT, 0, overlaps=owned)
        return Partition(programs_that_pace(), 0)

    def new_handle(  # type: ignore[override]
        self,
        counts: Counts,
        routes: tuple[torch.Tensor, ...],
        out: Received,
        layout: DispatchLayout,
    ) -> InternodeHandle:
        """The handle of a dispatch."""
        of = Routes(*routes)
        assert counts.recv_rank_prefix is not None
        return InternodeHandle(
            layout.is_token_in_rank,
            of.sent_token_idx,
            counts.rank_prefix_matrix,
            of.row_idx,
            of.node_rows,
            counts.signature,
            counts.recv_rank_prefix,
            out.src_idx,
            of.node_head,
            of.rank_head,
        )

    def send_cached(self, tokens: Tokens, parts: PartsOfHandle, partition: Partition) -> None:
        """Begin a cached dispatch: send rows over the network and to this node, and forward."""
        self.send_planned(tokens, parts, partition)
        self._forward_again(tokens, parts, programs_that_pace())

    def send_planned(
        self, tokens: Tokens, parts: PartsOfHandle, partition: Partition | None = None
    ) -> None:
        """`send_cached`, without what this rank forwards; see `send_rows`."""
        prefix, signature, sent_token_idx, _, node_rows = parts
        if self._max_tokens is not None:
            self.check_capacity(len(tokens.x), tokens.row, BARE_HEADER)
        rank, slots = self.slots.context.rank, self.slots
        dispatch_internode.open_call(Kind.CACHED_DISPATCH, signature, tokens.shape, slots)
        num_sent = prefix[rank], prefix[rank - 1] if rank else None
        partition = partition or self._partition(0, owned=False)
        sent = node_rows, sent_token_idx, num_sent, BARE_HEADER, partition
        dispatch_internode.send(tokens, *sent, slots)

    def receive_again(
        self,
        tokens: Tokens,
        parts: PartsOfHandle,
        num_local_experts: int,
        num_programs: int,
        sized: Received,
        max_rows: int,
    ) -> None:
        """Forward rows after `send_planned`, by num_programs programs, and receive the rows that
        arrive."""
        self._forward_again(tokens, parts, num_programs)
        partition = self._partition(0, owned=False)
        rows = parts[0], num_local_experts, BARE_HEADER
        dispatch_verbs.receive(sized, tokens, *rows, partition, self.slots, num_programs)

    def _forward_again(self, tokens: Tokens, parts: PartsOfHandle, num_programs: int) -> None:
        prefix, _, _, row_idx, _ = parts
        forwarded = row_idx, prefix, BARE_HEADER, num_programs
        dispatch_internode.forward(tokens.row, *forwarded, self.slots)

    # --- Combine -----------------------------------------------------------------------------

    def _combine(
        self,
        parts: PartsOfHandle,
        bias: tuple[torch.Tensor, ...],
        num_programs: int,
        round_once: bool,
        sized: combine_verbs.ReturnedRows,
        num_rows: int,
        num_expanded: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The sum of each node is rounded before the nodes' sums are added; with round_once it is
        not, and takes twice the bytes. Rows by expert are summed first."""
        sized = combine_verbs.ReturnedRows(*sized)
        if sized.src_metadata is not None:
            dtype, round_once = torch.float32 if round_once else sized.x.dtype, False
            sized = reduce_expanded(sized, parts[0], dtype, self.slots)
        num_tokens, both = len(parts[2]), (num_programs, programs_on_all_sms())
        x, weights, _ = sized
        out = x.new_empty(num_tokens, x.shape[1])
        if weights is not None:
            weights = weights.new_empty(num_tokens, weights.shape[1])
        self._return_and_sum(parts, bias, both, round_once, sized, (out, weights))
        return out, weights

    def combine_concurrently(
        self,
        parts: PartsOfHandle,
        into: tuple[torch.Tensor, torch.Tensor],
        sized: combine_verbs.ReturnedRows,
        num_rows: int,
    ) -> None:
        """`_combine` `into` this memory by few programs, which leave SMs to products."""
        few = NUM_CONCURRENT, NUM_CONCURRENT
        self._return_and_sum(parts, (), few, False, sized, into)

    def _return_and_sum(
        self,
        parts: PartsOfHandle,
        bias: tuple[torch.Tensor, ...],
        num_programs: tuple[int, int],
        round_once: bool,
        sized: combine_verbs.ReturnedRows,
        into: tuple[torch.Tensor, torch.Tensor | None],
    ) -> None:
        prefix, signature, node_head, node_rows, rank_head = parts
        out, weights = into
        if self._max_tokens is not None:
            self.check_capacity(len(node_head), sized.row, BARE_HEADER)
        bias_0, bias_1 = [*bias, None, None][:2]
        sums = combine_verbs.Sums(out, weights, bias_0, bias_1, node_head, prefix)
        combine_internode.return_and_sum(
            sized, signature, sums, node_rows, rank_head, round_once, num_programs, self.slots
        )
