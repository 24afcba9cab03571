"""Dispatch and combine on symmetric memory, each a short sequence of launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from .. import combine as combine_verbs
from .. import dispatch as dispatch_verbs
from .. import routing
from ..device.lang import INTERPRETED
from ..dispatch import (
    Counts,
    DispatchLayout,
    Partition,
    Received,
    SendPlan,
    Tokens,
    TotalsWanted,
    programs_on_all_sms,
)
from ..hardware import gpu
from ..kinds import Described
from ..prepared import with_size
from ..streams import ConcurrentReads
from ..symm.slots import BARE_HEADER, SlotLayout, Slots, header_bytes
from .base import NUM_SMS, Arrived, Handle, PartsOfHandle
from .growing import GrowingEngine


class KernelVerbs(GrowingEngine):
    """The verbs of a Buffer through the kernels of dispatch/ and combine/."""

    handle_type: ClassVar[Any] = Handle

    def __init__(
        self,
        layout: SlotLayout,
        new_slots: Callable[[SlotLayout, bool, int], Slots],
        max_tokens: int | None,
    ):
        super().__init__(layout, new_slots, max_tokens)
        self.concurrent_reads = ConcurrentReads(self.slots.context.fields.device)

    def layout(
        self, topk_idx: torch.Tensor, num_experts: int, described: Described | None = None
    ) -> DispatchLayout:
        """See `routing.layout`."""
        args = topk_idx, num_experts
        layout: DispatchLayout = self.whole_call(KernelVerbs._layout, *args, described=described)
        return layout

    def _layout(self, topk_idx: torch.Tensor, num_experts: int) -> DispatchLayout:
        return DispatchLayout(*routing.layout(topk_idx, num_experts, self.slots)[:3])

    # --- Dispatch ----------------------------------------------------------------------------

    def dispatch(
        self,
        tokens: Tokens,
        layout: DispatchLayout,
        num_worst_tokens: int,
        num_sms: int = NUM_SMS,
        owned: bool = True,
        described: Described | None = None,
        totals: TotalsWanted | None = None,
    ) -> Arrived:
        """Send the rows and return what came as tensors of the caller's; or with owned=False their
        addresses, int64 [N], good until `release`: in the slot, or in `tokens.x` for rows that this
        rank sent to itself.

        Synchronises the host with the counts, unless `num_worst_tokens` says how many rows to
        return (rows past the received ones are not written; their topk_idx is -1). With `totals`
        rows have src_metadata.
        """
        sent, how = (tokens, layout), (num_comm_programs(num_sms), owned)
        if num_worst_tokens:
            args = *sent, num_worst_tokens, *how, totals
            body = type(self)._dispatch_whole
            arrived: Arrived = self.whole_call(body, *args, described=described)
            return arrived
        grows = self.make_room(*sent)
        counts, routes = self.call(type(self)._exchange, *sent, grows, totals, check=False)
        self.concurrent_reads.mark()
        # Where rows are collected while others are pushed, the parts overlap.
        partition = self._partition(*how)
        as_one, parts = not partition.lets_next_begin, (*sent, counts, routes, partition)
        self.call(type(self)._send, *parts, check=not grows, as_one=as_one)
        num_rows, *per_expert = self.concurrent_reads.read(lambda: self._received(counts))
        if grows and self.has_grown(*sent):
            return self.dispatch(tokens, layout, num_worst_tokens, num_sms, owned, totals=totals)
        self.slots.context.check()
        out, prefix = self.new_rows(tokens, num_rows, owned, totals), counts.rank_prefix_matrix
        received = tokens, prefix, layout.num_experts, how[0], _max_tokens(totals)
        rows: dict[str, Any] = dict(sized=out, max_rows=num_rows)
        self.call(KernelVerbs._receive, *received, as_one=as_one, **rows)
        handle = self.new_handle(counts, routes, out, layout)
        return Arrived(out, per_expert, handle, counts.group_counts, counts.totals)

    def release(self) -> None:
        """End a dispatch of rows in place: what was launched before has read the rows."""
        self.call(KernelVerbs._release)

    def _release(self) -> None:
        dispatch_verbs.release(self.slots)

    def _dispatch_whole(
        self,
        tokens: Tokens,
        layout: DispatchLayout,
        num_worst_tokens: int,
        num_programs: int,
        owned: bool,
        totals: TotalsWanted | None,
    ) -> Arrived:
        """All steps of a dispatch that returns `num_worst_tokens` rows."""
        header = header_bytes(layout.num_experts, self.slots.layout.num_ranks)
        self.check_capacity(len(tokens.x), self._largest_row(tokens), header)
        out = self.new_rows(tokens, num_worst_tokens, owned, totals)
        counts, routes = self._exchange(tokens, layout, False, totals)
        self._send(tokens, layout, counts, routes, self._partition(num_programs, owned))
        prefix, how = counts.rank_prefix_matrix, (num_programs, _max_tokens(totals))
        received = tokens, prefix, layout.num_experts, *how
        self._receive(*received, sized=out, max_rows=num_worst_tokens)
        handle = self.new_handle(counts, routes, out, layout)
        return Arrived(out, (), handle, counts.group_counts, counts.totals)

    def _exchange(
        self,
        tokens: Tokens,
        layout: DispatchLayout,
        may_grow: bool,
        totals: TotalsWanted | None = None,
        num_early_programs: int = 0,
    ) -> tuple[Counts, tuple[torch.Tensor, ...]]:
        """Plan the rows and exchange counts: (counts, what `_tell_counts` returns).
        num_early_programs: see `launch.exchange`."""
        max_rows = self._room(tokens, layout, may_grow)
        form = dispatch_verbs.form_of(may_grow, totals)
        counts = Counts.empty(layout, self.slots.layout.num_nodes, totals)
        routes = self._tell_counts(counts, tokens, layout, max_rows, form, num_early_programs)
        return counts._replace(stats=None), routes  # stats are the caller's, and no result

    def _tell_counts(
        self,
        counts: Counts,
        tokens: Tokens,
        layout: DispatchLayout,
        max_rows: int,
        form: int,
        num_early_programs: int,
    ) -> tuple[torch.Tensor, ...]:
        """Exchange `counts`, see `launch.exchange`: (send_token_idx, send_head)."""
        in_rank, num_experts = layout.is_token_in_rank, layout.num_experts
        routes = routing.send_plan(in_rank, tokens.topk_idx, num_experts, self.slots)
        sizes = max_rows, form, self.slots, num_early_programs
        dispatch_verbs.exchange(counts, layout, tokens, *sizes)
        return routes

    def _room(self, tokens: Tokens, layout: DispatchLayout, may_grow: bool) -> int:
        """How many rows a rank may send to another; TooManyTokens where these may be more, and the
        memory cannot grow."""
        header = header_bytes(layout.num_experts, self.slots.num_ranks)
        if not may_grow:
            row = self._largest_row(tokens) if tokens.returned_bytes else tokens.row
            self.check_capacity(len(tokens.x), row, header)
        return self.slots.layout.max_rows(self._largest_row(tokens).num_bytes, header)

    def _send(
        self,
        tokens: Tokens,
        layout: DispatchLayout,
        counts: Counts,
        routes: tuple[torch.Tensor, ...],
        partition: Partition,
    ) -> None:
        """Send metadata and rows."""
        header = header_bytes(layout.num_experts, self.slots.num_ranks)
        sent = tokens, SendPlan(layout.num_tokens_per_rank, None, routes[0]), header
        dispatch_verbs.send_metadata(*sent, programs_on_all_sms(), self.slots)
        dispatch_verbs.push(*sent, partition, self.slots)

    def _partition(self, num_programs: int, owned: bool) -> Partition:
        """How the programs of a dispatch are shared."""
        return Partition.choose(num_programs, owned)

    def _receive(
        self,
        tokens: Tokens,
        prefix: torch.Tensor,
        num_experts: int,
        num_programs: int,
        max_tokens: int,
        sized: Received,
        max_rows: int,
    ) -> None:
        """Copy what arrives to `sized`, of max_rows rows, or write its addresses there. max_tokens:
        see `TotalsWanted`."""
        num_ranks = self.slots.num_ranks
        rows = prefix, num_experts // num_ranks, header_bytes(num_experts, num_ranks)
        partition = self._partition(num_programs, owned=not sized.is_located)
        how = partition, self.slots
        dispatch_verbs.receive(sized, tokens, *rows, *how, max_tokens=max_tokens)

    def new_handle(
        self,
        counts: Counts,
        routes: tuple[torch.Tensor, ...],
        out: Received,
        layout: DispatchLayout,
    ) -> Handle:
        """The handle of a dispatch."""
        send_token_idx, send_head = routes
        parts = counts.rank_prefix_matrix, send_token_idx, counts.signature
        return Handle(*parts, out.src_idx, layout.is_token_in_rank, send_head)

    def new_rows(
        self, tokens: Tokens, num_rows: int, owned: bool, totals: TotalsWanted | None = None
    ) -> Received:
        """Room for received rows, or for their addresses where they are not `owned`; with `totals`
        also for their metadata, and for a copy of their ids."""
        shape = (num_rows, tokens.x.shape[1]) if owned else (num_rows,)
        rows = tokens.x.new_empty(shape, dtype=tokens.x.dtype if owned else torch.int64)
        received = Received.empty(rows, tokens, keeps_ids=totals is not None)
        if totals is None:
            return received
        metadata = received.src_idx.new_empty(num_rows, 2 + tokens.num_topk)
        return received._replace(src_metadata=metadata)

    def _received(self, counts: Counts) -> torch.Tensor:
        """int32 [1 + L]: rows that this rank receives, in all and by local expert."""
        received = counts.rank_prefix_matrix[-1, self.slots.context.rank]
        return torch.cat([received[None], counts.recv_expert_counts.sum(0)])

    def dispatch_cached(
        self,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        handle: Any,
        num_sms: int = NUM_SMS,
        described: Described | None = None,
        topk: tuple[torch.Tensor, torch.Tensor, int] | None = None,
    ) -> Received:
        """Send x [T, H] where an earlier dispatch sent its tokens; nothing is counted again. topk
        is (topk_idx [T, K] of that dispatch, topk_weights [T, K], num_experts), if these go along.
        """
        ids, weights, num_experts = topk or (None, None, self.slots.num_ranks)
        args = Tokens(x, ids, weights, scales), handle.sent, num_experts // self.slots.num_ranks
        src_idx = handle.recv_src_idx  # one for each row that comes
        more: dict[str, Any] = dict(sized=(src_idx,), max_rows=src_idx.shape[0])
        body, num_programs = type(self)._dispatch_again, num_comm_programs(num_sms)
        out: Received = self.whole_call(body, *args, num_programs, described=described, **more)
        return out

    def _dispatch_again(
        self,
        tokens: Tokens,
        parts: PartsOfHandle,
        num_local_experts: int,
        num_programs: int,
        sized: tuple[torch.Tensor],
        max_rows: int,
    ) -> Received:
        rows = tokens.x.new_empty(max_rows, tokens.x.shape[1])
        out = with_size("max_rows", Received.empty(rows, tokens))
        self._dispatch_cached(tokens, parts, num_local_experts, num_programs, out, max_rows)
        return out

    def send_again(
        self,
        tokens: Tokens,
        plan: PartsOfHandle,
        num_experts: int,
        out: Received,
        num_sms: int,
    ) -> None:
        """`dispatch_cached` into `out`, by what a handle has `sent`."""
        args = tokens, plan, num_experts // self.slots.num_ranks, num_comm_programs(num_sms)
        self.call(type(self)._dispatch_cached, *args, sized=out, max_rows=out.src_idx.shape[0])

    def _dispatch_cached(
        self,
        tokens: Tokens,
        parts: PartsOfHandle,
        num_local_experts: int,
        num_programs: int,
        sized: Received,
        max_rows: int,
    ) -> None:
        partition = self._partition(num_programs, owned=True)
        self.send_cached(tokens, parts, partition)
        rows = parts[0], num_local_experts, BARE_HEADER
        dispatch_verbs.receive(sized, tokens, *rows, partition, self.slots)

    def send_cached(self, tokens: Tokens, parts: PartsOfHandle, partition: Partition) -> None:
        """Begin a cached dispatch: send metadata and rows."""
        prefix, send_token_idx, signature = parts
        if self._max_tokens is not None:
            self.check_capacity(len(tokens.x), tokens.row, BARE_HEADER)
        rank = self.slots.context.rank
        plan = SendPlan(prefix[rank], prefix[rank - 1] if rank else None, send_token_idx)
        # No more than one on an SM: ranks may not be in the call yet. Early ones begin afterwards.
        num_programs = min(partition.push + partition.early, num_comm_programs(gpu().num_sms))
        dispatch_verbs.send_metadata(tokens, plan, BARE_HEADER, num_programs, self.slots, signature)
        dispatch_verbs.push(tokens, plan, BARE_HEADER, partition, self.slots, is_cached=True)

    # --- Combine -----------------------------------------------------------------------------

    def combine(
        self,
        x: torch.Tensor,
        handle: Any,
        topk_weights: torch.Tensor | None,
        bias: Sequence[torch.Tensor],
        num_sms: int = NUM_SMS,
        described: Described | None = None,
        round_once: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return rows x [N, H] to their sources, which sum them, and the weights' rows likewise.
        round_once: sums of several nodes go to the sources in fp32."""
        rows, how = combine_verbs.ReturnedRows(x, topk_weights), (num_sms, described, round_once)
        return self.return_rows(rows, handle.returned, tuple(bias), *how)

    def return_rows(
        self,
        rows: combine_verbs.ReturnedRows,
        plan: PartsOfHandle,
        bias: tuple[torch.Tensor, ...],
        num_sms: int,
        described: Described | None = None,
        round_once: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`combine` of these rows, by what a handle has `returned`. With round_once sums of
        rows by expert return in fp32; the biases and the result are fp32 then, too."""
        args = plan, bias, num_comm_programs(num_sms), round_once
        more: dict[str, Any] = dict(sized=rows, num_rows=rows.num_rows, described=described)
        more |= dict(num_expanded=len(rows.x)) if rows.num_summed else {}
        sums: tuple[torch.Tensor, torch.Tensor | None]
        sums = self.whole_call(type(self)._combine, *args, **more)
        return sums

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
        prefix, signature, send_head = parts
        sized = combine_verbs.ReturnedRows(*sized)
        is_fp32 = round_once and sized.src_metadata is not None
        dtype = torch.float32 if is_fp32 else sized.x.dtype
        num_tokens, row = len(send_head), sized.row_of(dtype)
        if self._max_tokens is not None:
            self.check_capacity(num_tokens, row, BARE_HEADER)
        out, weights = sized.x.new_empty(num_tokens, sized.x.shape[1], dtype=dtype), sized.weights
        if weights is not None:
            weights = weights.new_empty(num_tokens, row.num_topk)
        bias_0, bias_1 = [*bias, None, None][:2]
        sums = combine_verbs.Sums(out, weights, bias_0, bias_1, send_head, prefix)
        combine_verbs.return_and_sum(sized, signature, sums, num_programs, self.slots)
        return out, weights


def _max_tokens(totals: TotalsWanted | None) -> int:
    """Returns the most tokens that a rank may send, or 0 if totals are not wanted."""
    return totals.max_tokens if totals else 0


def num_comm_programs(num_sms: int) -> int:
    """Programs that communicate: fewer where they are interpreted, which is slow."""
    return 2 if INTERPRETED else num_sms
