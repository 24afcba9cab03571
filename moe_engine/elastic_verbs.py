"""DeepEP V2's calls: dispatch and combine by token or by expert, and a barrier."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import checks
from .combine.reduce_expanded_kernels import ExpertRows
from .debug_checks import check_handle_values
from .dispatch import Tokens
from .dispatch.expand_kernels import ExpandedRows
from .elastic_checks import (
    CombineOptions,
    DispatchOptions,
    Events,
    Payload,
    Routing,
    check_cached,
    check_events,
    check_flags,
    check_handle,
    check_new,
    check_options,
    check_same_ids,
    check_sms,
    check_unset,
    check_x,
)
from .elastic_handle import EPHandle
from .engines import expanded
from .engines.base import NUM_SMS
from .engines.expanded import RowsWanted
from .engines.kernel_verbs import KernelVerbs
from .kinds import Described
from .lifecycle import BufferLifecycle, verb
from .streams import Call, EventHandle, EventOverlap


class ElasticVerbs(BufferLifecycle):
    """The calls that all ranks make."""

    num_ranks: int
    num_max_tokens_per_rank: int
    num_allocated_qps: int
    allow_multiple_reduction: bool

    @verb
    def dispatch(
        self,
        x: Payload,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Payload, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]:
        """Send each token x[t] once to every rank that holds one of its experts.

        x: bf16 [T, H], or a pair of e4m3 rows [T, H] and scales [T, S] (float32 or packed int32,
        any strides). topk_idx int64 [T, K], -1 for none; topk_weights float32 [T, K] or None. T is
        at most num_max_tokens_per_rank, which is that of the Buffer unless given, equal on all
        ranks.

        Returns (recv_x, recv_topk_idx, recv_topk_weights, handle, event). Rows [N, H] are by source
        rank, then token; ids int64 [N, K] are local, -1 for experts of other ranks; weights
        float32 [N, K] are 0 for these. With do_expand there is a row [M, H] and a weight [M] for
        each expert of a token here, and no ids: rows are by expert, then in the order without
        do_expand, and those of an expert begin at a multiple of expert_alignment. do_expand is
        equal on all ranks, and with it expert_alignment. do_zero_padding writes 0 between rows of
        experts, else nothing is written there. use_tma_aligned_col_major_sf returns scales whose
        columns are contiguous and begin at multiples of 16 bytes.

        Without do_cpu_sync the host does not wait for the counts, and N and M are the most that
        there can be: R * num_max_tokens_per_rank, and min(K, L) times that and padding. Rows past
        the received ones are not written; their ids are -1. psum_num_recv_tokens_* of the handle
        say how many came.

        With a `handle` the tokens go where those of that dispatch went, with topk_weights or
        without; do_expand is that of the handle, or False. The host never waits then.

        cumulative_local_expert_recv_stats int32 [L]: the rows of each expert are added to it.
        previous_event, which needs allocate_on_comm_stream: what to wait for; the whole call also
        waits for previous_event_before_epilogue. async_with_compute_stream runs on
        `get_comm_stream()` and returns the event that ends the call. num_sms programs communicate,
        0 for `get_theoretical_num_sms`; with do_expand others copy on all SMs meanwhile. num_qps
        changes nothing.

        Example, 2 ranks of 2 experts, expert_alignment 2, rank 0 sends 4 tokens A B C D with
        topk_idx [[0, 3], [1, 0], [2, -1], [0, -1]], rank 1 none. Rank 0 receives A B D, and with
        do_expand A B D - B -, psum_num_recv_tokens_per_expert [3, 5]. Rank 1 receives A C, and with
        do_expand C - A -, psum_num_recv_tokens_per_expert [1, 3].
        """
        engine = self._kernels()
        options = DispatchOptions(
            num_experts,
            num_max_tokens_per_rank,
            expert_alignment,
            do_cpu_sync,
            do_handle_copy,
            do_expand,
            do_zero_padding,
            use_tma_aligned_col_major_sf,
            num_sms,
            num_qps,
            async_with_compute_stream,
            allocate_on_comm_stream,
        )
        events = previous_event, previous_event_before_epilogue
        routing = topk_idx, topk_weights, cumulative_local_expert_recv_stats
        if handle is not None:
            return self._dispatch_again(engine, x, routing, handle, options, events)
        rows, scales, is_pair = checks.pair_of(x)
        described = engine.describe("dispatch", rows, scales, is_pair, *routing, *options)
        kind = described.kind
        if not kind.is_checked:
            how = self._check_options(x, topk_weights, options)
            if num_max_tokens_per_rank is None:
                options = options._replace(num_max_tokens_per_rank=self.num_max_tokens_per_rank)
            kind.choice = *how, check_new(x, *routing, options, self.num_ranks)
        wanted, sms, numbers = kind.choice
        assert topk_idx is not None and num_experts is not None  # which `check_new` refuses
        with self._call(events, options) as call:
            if call.is_async:
                call.reads(rows, scales, *routing)
            got = engine.again(described)
            if got is None:
                tokens, decided = _tokens(described, rows, scales, topk_idx, topk_weights)
                if engine.grows and not self.allow_multiple_reduction:  # sums return in fp32
                    tokens = tokens._replace(returned_bytes=4 * rows.shape[1])
                waits = do_cpu_sync is None or bool(do_cpu_sync)
                sent = expanded.HowSent(waits, bool(do_handle_copy), sms)
                more = routing[2], numbers, wanted, sent, decided
                got = expanded.dispatch(engine, tokens, num_experts, *more)
            received = expanded.shaped(got.rows, scales, got.num_expanded, wanted)
            sent_idx = topk_idx if got.sent_idx is None else got.sent_idx
            if call.is_async:
                call.returns(
                    *received, got.recv_idx, got.topk_idx, *got.places, *got.sent, sent_idx
                )
        kind.is_checked = True
        new_handle = EPHandle(
            wanted.expand,
            numbers,
            sms,
            sent_idx,
            got.topk_idx.shape[0],
            got.num_expanded,
            [*got.per_expert],
            got.places,
            got.sent,
            got.topk_idx,
        )
        if got.sent_idx is None:
            new_handle.keep_callers_idx()
        return _payload(received), got.recv_idx, received.weights, new_handle, call.event

    def _dispatch_again(
        self,
        engine: KernelVerbs,
        x: Payload,
        routing: Routing,
        handle: EPHandle,
        options: DispatchOptions,
        events: Events,
    ) -> tuple[Payload, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]:
        """A dispatch with a handle; `routing`: topk_idx, topk_weights and the stats that it is
        called with."""
        check_handle(handle, self.num_ranks)
        places, (topk_idx, weights, stats) = handle.places, routing
        if weights is not None:
            check_same_ids(handle)
        rows, scales, is_pair = checks.pair_of(x)
        args = rows, scales, is_pair, *routing, *options, *handle.described
        ids = None if options.do_expand else handle.recv_topk_idx
        described = engine.describe("dispatch_again", *args, sized=(places[0], ids))
        kind = described.kind
        if not kind.is_checked:
            kind.choice = wanted, _ = self._check_options(x, weights, options)
            check_unset(topk_idx=topk_idx, cumulative_local_expert_recv_stats=stats)
            check_unset(do_cpu_sync=options.do_cpu_sync or None)
            check_cached(handle, options, wanted)
            checks.check_payload(x, handle.num_tokens)
            if weights is not None:
                checks.check_routing(rows, handle.topk_idx, weights)
        wanted, sms = kind.choice
        num_rows, num_expanded = places.src_metadata.shape[0], handle.num_expanded_tokens
        if self.options.debug:
            check_handle_values(handle.sent, self.rank)
        with self._call(events, options) as call:
            if call.is_async:
                call.reads(rows, scales, weights, handle.topk_idx, *places, *handle.sent)
                call.reads(handle.recv_topk_idx)
            sizes = expanded.sizes_of(num_rows, num_expanded, scales, wanted)
            got = engine.again(described, **sizes)
            if got is None:
                known = None if weights is None else handle.topk_idx
                tokens, decided = _tokens(described, rows, scales, known, weights)
                of = handle.sent, places, handle.numbers, wanted, sms, sizes, ids, decided
                got = expanded.dispatch_again(engine, tokens, *of)
            received, ids = expanded.shaped(got[0], scales, num_expanded, wanted), got[1]
            if call.is_async:
                call.returns(*received, ids)
        kind.is_checked = True
        return _payload(received), ids, received.weights, handle, call.event

    def _check_options(
        self, x: Payload, topk_weights: torch.Tensor | None, options: DispatchOptions
    ) -> tuple[RowsWanted, int]:
        """(the rows that a dispatch with these options wants, programs that communicate)."""
        check_options(options)
        check_x(x, self.device)
        wanted = RowsWanted(
            bool(options.do_expand),
            bool(options.do_zero_padding),
            bool(options.use_tma_aligned_col_major_sf),
            topk_weights is not None,
        )
        sms = check_sms(options.num_sms, options.num_qps, self.num_allocated_qps)
        return wanted, sms or NUM_SMS

    @verb
    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | Sequence[torch.Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Return rows bf16 x, [N, H] or for a handle with do_expand [M, H], to their tokens' ranks
        and add them up.

        The sum has no weights. A rank first adds up the expanded rows of a token, in the order of
        its top-k and in fp32, and rounds to bf16 (see allow_multiple_reduction). The sum of a token
        begins with bias (none, one or two of [T, H]), adds the ranks' rows in order of each rank's
        largest k in fp32, and is rounded once. topk_weights, float32 [N, K] or with do_expand [M],
        return to their top-k slots. num_sms 0 stands for that of the handle; on one node sums of
        expanded rows take nearly all SMs, whatever it is. The other arguments are those of
        `dispatch`.

        Returns (out [T, H], weights float32 [T, K] or None, event).
        """
        engine = self._kernels()
        check_handle(handle, self.num_ranks)
        events = previous_event, previous_event_before_epilogue
        when = async_with_compute_stream, allocate_on_comm_stream
        options = CombineOptions(num_sms, num_qps, *when)
        biases, places = tuple(bias) if isinstance(bias, list) else bias, handle.places
        args = biases, not self.allow_multiple_reduction, *options, *handle.described
        described = engine.describe("combine", *args, sized=(x, topk_weights, places.src_metadata))
        kind, num_rows = described.kind, places.src_metadata.shape[0]
        num_sent = handle.num_expanded_tokens if handle.do_expand else num_rows
        if not kind.is_checked or not checks.have_rows(num_sent, x, topk_weights):
            check_options(options)
            self._check_combine(x, handle, topk_weights, num_sent)
            checks.check_biases(bias, handle.num_tokens, x)
            kind.choice = check_sms(num_sms, num_qps, self.num_allocated_qps)
        biases = (biases,) if isinstance(biases, torch.Tensor) else biases or ()
        if self.options.debug:
            check_handle_values(handle.sent, self.rank)
        with self._call(events, options) as call:
            if call.is_async:
                call.reads(x, topk_weights, *biases, *places, *handle.sent)
            sums = engine.again(described, num_rows=num_rows, num_expanded=x.shape[0])
            if sums is None:
                y, of_y, *added = described.packed(x, topk_weights, *biases)
                how = added, not self.allow_multiple_reduction, kind.choice or handle.num_sms
                of = places if handle.do_expand else None, handle.sent, *how, described.if_packed
                sums = expanded.combine(engine, ExpertRows(y, of_y), *of)
            out, weights = sums
            if out.dtype != torch.bfloat16:
                out = out.bfloat16()
            if call.is_async:
                call.returns(out, weights)
        kind.is_checked = True
        return out, weights, call.event

    def _check_combine(
        self, x: torch.Tensor, handle: EPHandle, topk_weights: torch.Tensor | None, num_rows: int
    ) -> None:
        """Refuse rows and weights of a combine that are not num_rows of this handle."""
        checks.check_tensor("x", x, [num_rows, "H"], [torch.bfloat16], self.device)
        checks.check_rows("x", x)
        if topk_weights is not None:
            shape = [num_rows] if handle.do_expand else [num_rows, handle.num_topk]
            checks.check_tensor("topk_weights", topk_weights, shape, [torch.float32], self.device)
            checks.check_no_grad(topk_weights=topk_weights)

    @verb
    def barrier(
        self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True
    ) -> None:
        """Let what the current stream holds from now on begin after all ranks have come to this
        call: a dispatch without tokens. use_comm_stream: it runs on `get_comm_stream()`;
        with_cpu_sync: the host waits for the device before and after; sequential changes nothing.
        """
        flags = dict(use_comm_stream=use_comm_stream, with_cpu_sync=with_cpu_sync)
        check_flags(sequential=sequential, **flags)
        engine = self._kernels()
        if with_cpu_sync:
            self._synchronise()
        with self._call((None, None), CombineOptions(0, 0, use_comm_stream, False)) as call:
            ids = torch.empty(0, 1, dtype=torch.int64, device=self.device)
            x = torch.empty(0, 1, dtype=torch.bfloat16, device=self.device)
            layout = engine.layout(ids, self.num_ranks)
            engine.dispatch(Tokens(x, ids, ids.float()), layout, 1)
        call.event.current_stream_wait()
        if with_cpu_sync:
            self._synchronise()

    # --- Arguments ---------------------------------------------------------------------------

    def _kernels(self) -> KernelVerbs:
        """The engine, if it can go on."""
        engine = self._ready()
        assert isinstance(engine, KernelVerbs)
        return engine

    def _call(self, events: Events, options: DispatchOptions | CombineOptions) -> Call:
        """A context in which one call runs; see `CallStreams.call`. events: previous_event and
        previous_event_before_epilogue."""
        previous, before_epilogue = events
        if previous is not None or before_epilogue is not None:
            check_events(*events, options.allocate_on_comm_stream)
        return self._streams.call(previous, options.async_with_compute_stream, also=before_epilogue)


def _tokens(
    described: Described,
    rows: torch.Tensor,
    scales: torch.Tensor | None,
    topk_idx: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
) -> tuple[Tokens, Described | None]:
    """What is sent, and the description if it describes all of that. Ids travel with weights: where
    there are none, with zeros."""
    rows, topk_idx, topk_weights = described.packed(rows, topk_idx, topk_weights)
    if topk_idx is None or topk_weights is not None:
        return Tokens(rows, topk_idx, topk_weights, scales), described.if_packed
    zeros = topk_idx.new_zeros(topk_idx.shape, dtype=torch.float32)
    return Tokens(rows, topk_idx, zeros, scales), None


def _payload(rows: ExpandedRows) -> Payload:
    """Rows, with their scales where they have some."""
    return rows.x if rows.scales is None else (rows.x, rows.scales)
