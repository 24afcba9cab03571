"""The kernel engine on several nodes: rows cross the network once for each token and node.

What sends and what sums goes through the rail peers, see `dispatch/internode_kernels.py` and
`combine/internode_kernels.py`; what receives is the engine of one node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from .. import combine as combine_verbs
from .. import dispatch as dispatch_verbs
from ..combine import internode as combine_internode
from ..device.context import Kind
from ..dispatch import (
    Counts,
    DispatchLayout,
    Partition,
    Received,
    Tokens,
    programs_on_all_sms,
)
from ..dispatch import internode as dispatch_internode
from ..dispatch.internode import Routes
from ..prepared import Described
from ..symm.slots import BARE_HEADER, header_bytes
from .base import NUM_SMS, LayerInputs
from .expert_sums import sums_of_experts
from .kernel import KernelEngine, num_comm_programs
from .layer_by_verbs import LayerByVerbs


class InternodeHandle(NamedTuple):
    """What combine and a cached dispatch need from a dispatch over N nodes of L ranks: ten tensors,
    as DeepEP's has, with the parts that callers read at their places there. See `Routes`."""

    is_token_in_rank: torch.Tensor  # bool [T, R]
    sent_token_idx: torch.Tensor  # int32 [N + L, T]
    rank_prefix_matrix: torch.Tensor  # int32 [R, R]: rows of ranks 0..i to rank j
    row_idx: torch.Tensor  # int32 [N, L, M]
    node_rows: (
        torch.Tensor
    )  # int32 [2, N]: rows that this rank sends to each node; that it forwards
    signature: torch.Tensor  # int32 [16]
    recv_gbl_rank_prefix_sum: torch.Tensor  # int32 [R]: rows of ranks 0..i to this rank
    recv_src_idx: torch.Tensor  # int32 [N]: each received row's token on its source
    send_head: torch.Tensor  # int32 [T, N]: row * N + node in the order of the final sum, or -1
    rank_head: torch.Tensor  # int32 [N, M, L]: row * L + rank in the order of a node's sum, or -1


class InternodeEngine(KernelEngine, LayerByVerbs):
    """Calls of ranks on several nodes. Layers are dispatch, grouped GEMMs and combine in turn."""

    handle_type: ClassVar[Any] = InternodeHandle
    moe_ffn = LayerByVerbs.moe_ffn
    moe_ffn_forward = LayerByVerbs.moe_ffn_forward
    moe_ffn_backward = LayerByVerbs.moe_ffn_backward

    @property
    def num_ranks(self) -> int:  # type: ignore[override]
        return self.slots.num_ranks

    def expert_sums(self, rows: LayerInputs) -> torch.Tensor:
        """See `LayerByVerbs`; by grouped GEMMs."""
        return sums_of_experts(rows)

    # --- Dispatch ----------------------------------------------------------------------------

    def _exchange(
        self, tokens: Tokens, layout: DispatchLayout, may_grow: bool
    ) -> tuple[Counts, tuple[torch.Tensor, ...]]:
        """Plan the rows and exchange counts: (counts, `Routes`)."""
        max_rows, slots = self._room(tokens, layout, may_grow), self.slots
        counts = Counts.empty(layout)
        routes = dispatch_internode.plan_nodes(layout, tokens.topk_idx, max_rows, slots)
        dispatch_internode.exchange(counts, routes, layout, tokens, max_rows, may_grow, slots)
        return counts, routes

    def _send(
        self,
        tokens: Tokens,
        layout: DispatchLayout,
        counts: Counts,
        routes: tuple[torch.Tensor, ...],
        num_programs: int,
        owned: bool,
    ) -> None:
        """Send metadata and rows, over the network and to this node, and forward."""
        header = header_bytes(layout.num_experts, self.slots.num_ranks)
        of, num_sent = Routes(*routes), (layout.num_tokens_per_rank, None)
        prefix = counts.rank_prefix_matrix
        self._send_all(
            tokens, of.node_rows, of.sent_token_idx, num_sent, of.row_idx, prefix, header
        )

    def _send_all(
        self,
        tokens: Tokens,
        node_rows: torch.Tensor,
        sent_token_idx: torch.Tensor,
        num_sent: tuple[torch.Tensor, torch.Tensor | None],
        row_idx: torch.Tensor,
        prefix: torch.Tensor,
        header: int,
    ) -> None:
        """Send what this rank has, then forward what arrives; see `dispatch_internode.send`."""
        slots, on_all_sms = self.slots, programs_on_all_sms()
        partition = self._partition(on_all_sms, True)
        sent = node_rows, sent_token_idx, num_sent, header, partition
        dispatch_internode.send(tokens, *sent, slots)
        dispatch_internode.forward(tokens.row, row_idx, prefix, header, on_all_sms, slots)

    def _partition(self, num_programs: int, owned: bool) -> Partition:
        """All rows are received by the last launch, as programs forward before it."""
        return Partition(num_programs, 0)

    def _new_handle(  # type: ignore[override]
        self,
        counts: Counts,
        routes: tuple[torch.Tensor, ...],
        out: Received,
        layout: DispatchLayout,
    ) -> InternodeHandle:
        """The handle of a dispatch."""
        of, prefix = Routes(*routes), counts.rank_prefix_matrix
        return InternodeHandle(
            layout.is_token_in_rank,
            of.sent_token_idx,
            prefix,
            of.row_idx,
            of.node_rows,
            counts.signature,
            prefix[:, self.slots.context.rank].contiguous(),
            out.src_idx,
            of.node_head,
            of.rank_head,
        )

    def dispatch_cached(  # type: ignore[override]
        self,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        handle: InternodeHandle,
        num_sms: int = NUM_SMS,
        described: Described | None = None,
        topk: tuple[torch.Tensor, torch.Tensor, int] | None = None,
    ) -> Received:
        """See `KernelEngine.dispatch_cached`."""
        ids, weights, num_experts = topk or (None, None, self.slots.num_ranks)
        tokens, num_rows = Tokens(x, ids, weights, scales), handle.recv_src_idx.numel()
        out = Received.empty(x.new_empty(num_rows, x.shape[1]), tokens)
        fixed = (
            handle.rank_prefix_matrix,
            handle.signature,
            handle.sent_token_idx,
            handle.row_idx,
            handle.node_rows,
        )
        args = tokens, fixed, num_experts // self.slots.num_ranks, num_comm_programs(num_sms)
        more: dict[str, Any] = dict(max_rows=num_rows, described=described)
        self.call(InternodeEngine._again, *args, sized=out, **more)
        return out

    def _again(
        self,
        tokens: Tokens,
        fixed: tuple[torch.Tensor, ...],
        num_local_experts: int,
        num_programs: int,
        sized: Received,
        max_rows: int,
    ) -> None:
        prefix, signature, sent_token_idx, row_idx, node_rows = fixed
        if self._max_tokens is not None:
            self.check_capacity(len(tokens.x), tokens.row, BARE_HEADER)
        rank, shape = self.slots.context.rank, tokens.shape
        dispatch_internode.open_call(Kind.CACHED_DISPATCH, signature, shape, self.slots)
        num_sent = prefix[rank], prefix[rank - 1] if rank else None
        routes = node_rows, sent_token_idx, num_sent, row_idx, prefix
        self._send_all(tokens, *routes, BARE_HEADER)
        rows = prefix, num_local_experts, BARE_HEADER
        partition = self._partition(num_programs, owned=True)
        dispatch_verbs.collect(sized, tokens, *rows, partition, self.slots)

    # --- Combine -----------------------------------------------------------------------------

    def combine(  # type: ignore[override]
        self,
        x: torch.Tensor,
        handle: InternodeHandle,
        topk_weights: torch.Tensor | None,
        bias: Sequence[torch.Tensor],
        num_sms: int = NUM_SMS,
        described: Described | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `KernelEngine.combine`. The sum of each node is rounded before the nodes' sums are
        added."""
        rows = combine_verbs.ReturnedRows(x, topk_weights)
        plan = (
            handle.rank_prefix_matrix,
            handle.signature,
            handle.send_head,
            handle.node_rows,
            handle.rank_head,
        )
        args = plan, tuple(bias), num_comm_programs(num_sms)
        sums: tuple[torch.Tensor, torch.Tensor | None] = self.call(
            InternodeEngine._sum, *args, sized=rows, num_rows=len(x), described=described
        )
        return sums

    def _sum(
        self,
        plan: tuple[torch.Tensor, ...],
        bias: tuple[torch.Tensor, ...],
        num_programs: int,
        sized: combine_verbs.ReturnedRows,
        num_rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        prefix, signature, node_head, node_rows, rank_head = plan
        x, weights = sized
        num_tokens, row = len(node_head), sized.row
        if self._max_tokens is not None:
            self.check_capacity(num_tokens, row, BARE_HEADER)
        out = x.new_empty(num_tokens, x.shape[1])
        if weights is not None:
            weights = weights.new_empty(num_tokens, row.num_topk)
        bias_0, bias_1 = [*bias, None, None][:2]
        sums = combine_verbs.Sums(out, weights, bias_0, bias_1, node_head, prefix)
        combine_internode.return_and_sum(
            sized, signature, sums, node_rows, rank_head, num_programs, self.slots
        )
        return out, weights
