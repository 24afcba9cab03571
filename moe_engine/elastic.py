"""ElasticBuffer: DeepEP V2's calls, on the engine of `Buffer`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from . import checks
from .agreement import Group
from .combine.reduce_expanded_kernels import ExpertRows
from .debug_checks import check_handle_values
from .dispatch import Tokens
from .dispatch.expand_kernels import ExpandedRows
from .elastic_checks import (
    Events,
    Payload,
    check_cached,
    check_events,
    check_flags,
    check_handle,
    check_most_tokens,
    check_new,
    check_sms,
    check_unset,
    check_x,
)
from .elastic_handle import EPHandle
from .engines import expanded
from .engines.base import NUM_SMS
from .engines.expanded import Numbers, RowsWanted
from .engines.kernel import KernelEngine
from .errors import BackendError, MoeEngineError, ShapeError
from .lifecycle import BufferLifecycle, verb
from .options import MAX_NUM_SMS, Options, elastic_size_hint
from .streams import Call, EventHandle, EventOverlap

DEFAULT_TIMEOUT_S = 100
"""The default of num_gpu_timeout_secs, which stands for MOE_ENGINE_TIMEOUT_S."""


class ElasticBuffer(BufferLifecycle):
    """Expert-parallel dispatch and combine over the ranks of `group`, with DeepEP V2's interface.

    Every rank makes the same calls in the same order, as on a `Buffer`. T may differ per rank and
    be 0. Rows are bf16, or in dispatch e4m3 with scales.

    Its memory is `num_bytes`, or else what num_max_tokens_per_rank tokens of `hidden` columns and
    num_topk experts need (0: 32 experts). With num_max_tokens_per_rank it never grows; with
    num_bytes alone it grows like a `Buffer` in DeepEP's form.

    num_gpu_timeout_secs: the deadline of every wait; 100 stands for MOE_ENGINE_TIMEOUT_S.
    allow_multiple_reduction: the sums of expanded rows that a rank makes are rounded to bf16 before
    they return; without it they return as fp32, in twice the bytes, and a result is rounded once.
    Likewise the sums that nodes make of the rows of their ranks, where there are several.
    allow_hybrid_mode: whether the logical domains are those of nodes; without it all ranks are in
    one. Rows go the same way: once to each node, where they are forwarded.
    deterministic, prefer_overlap_with_compute, sl_idx, num_cpu_timeout_secs and explicitly_destroy
    change nothing: results always have the same bits, and the host waits under the same deadline as
    the GPU.

    Attributes are DeepEP's: rank_idx, num_ranks, num_bytes, num_max_tokens_per_rank,
    num_scaleout_ranks and num_scaleup_ranks (see `get_logical_domain_size`), num_rdma_ranks and
    num_nvlink_ranks (see `get_physical_domain_size`), scaleout_rank_idx and scaleup_rank_idx (this
    rank's place among them), num_allocated_qps (there are no QPs), runtime (the engine, None after
    `destroy`), nccl_comm_handle (None: NCCL is not used).

    Raises ShapeError where neither memory nor tokens are given, CapacityError without room for a
    single row, BackendError for num_cpu_bytes and where GPUs cannot map each other's memory.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = DEFAULT_TIMEOUT_S,
        explicitly_destroy: bool = False,
    ):
        options: Any
        try:
            check_flags(
                use_fp8_dispatch=use_fp8_dispatch,
                deterministic=deterministic,
                allow_hybrid_mode=allow_hybrid_mode,
                allow_multiple_reduction=allow_multiple_reduction,
                prefer_overlap_with_compute=prefer_overlap_with_compute,
                explicitly_destroy=explicitly_destroy,
            )
            checks.check_at_least(0, sl_idx=sl_idx, num_allocated_qps=num_allocated_qps)
            checks.check_at_least(1, num_cpu_timeout_secs=num_cpu_timeout_secs)
            checks.check_at_least(1, num_gpu_timeout_secs=num_gpu_timeout_secs)
            check_most_tokens(num_max_tokens_per_rank)
            if checks.check_int("num_cpu_bytes", num_cpu_bytes, 0):
                raise BackendError(
                    f"num_cpu_bytes is {num_cpu_bytes}; only DeepEP's engram uses memory of the "
                    "host, and it is not there yet. Pass 0."
                )
            if num_bytes is None:
                shape = num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch
                num_bytes = elastic_size_hint(
                    Group.of(group).size, *shape, allow_multiple_reduction
                )
            timeout_s = None if num_gpu_timeout_secs == DEFAULT_TIMEOUT_S else num_gpu_timeout_secs
            options = Options(max_tokens=num_max_tokens_per_rank or None, timeout_s=timeout_s)
        except MoeEngineError as problem:  # which all ranks raise, where they meet
            options, num_bytes = problem, 0
        super().__init__(group, num_bytes, explicitly_destroy=explicitly_destroy, options=options)
        self.num_bytes, self.num_max_tokens_per_rank = num_bytes, num_max_tokens_per_rank
        self.rank_idx, self.num_ranks = self.rank, self.group_size
        self.deterministic, self.allow_hybrid_mode = deterministic, allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.num_allocated_qps = num_allocated_qps or (65 if allow_hybrid_mode else 17)
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = divmod(self.rank, self.num_scaleup_ranks)
        self.nccl_comm_handle = None

    @property
    def runtime(self) -> KernelEngine | None:
        """What makes the calls; None after `destroy`."""
        assert self._engine is None or isinstance(self._engine, KernelEngine)
        return self._engine

    # --- Verbs -------------------------------------------------------------------------------

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
        do_expand, and those of an expert begin at a multiple of expert_alignment. do_zero_padding
        writes 0 between them, else nothing is written there. use_tma_aligned_col_major_sf returns
        scales whose columns are contiguous and begin at multiples of 16 bytes.

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
        0 for `get_theoretical_num_sms`; num_qps changes nothing.

        Example, 2 ranks of 2 experts, expert_alignment 2, rank 0 sends 4 tokens A B C D with
        topk_idx [[0, 3], [1, 0], [2, -1], [0, -1]], rank 1 none. Rank 0 receives A B D, and with
        do_expand A B D - B -, psum_num_recv_tokens_per_expert [3, 5]. Rank 1 receives A C, and with
        do_expand C - A -, psum_num_recv_tokens_per_expert [1, 3].
        """
        check_flags(
            do_handle_copy=do_handle_copy,
            do_cpu_sync=handle is None if do_cpu_sync is None else do_cpu_sync,
            do_expand=do_expand,
            do_zero_padding=do_zero_padding,
            use_tma_aligned_col_major_sf=use_tma_aligned_col_major_sf,
        )
        wanted = RowsWanted(
            bool(do_expand),
            bool(do_zero_padding),
            bool(use_tma_aligned_col_major_sf),
            topk_weights is not None,
        )
        if do_zero_padding and not do_expand:
            raise ShapeError("do_zero_padding needs do_expand: rows by token have no padding.")
        check_x(x, self.device)
        sms = check_sms(num_sms, num_qps, self.num_allocated_qps) or NUM_SMS
        engine, most = self._kernels(), num_max_tokens_per_rank
        if most is None and handle is None:
            most = self.num_max_tokens_per_rank
        given = num_experts, most, expert_alignment
        events = previous_event, previous_event_before_epilogue
        when = events, (async_with_compute_stream, allocate_on_comm_stream)
        stats = cumulative_local_expert_recv_stats
        if handle is not None:
            check_unset(topk_idx=topk_idx, cumulative_local_expert_recv_stats=stats)
            check_unset(do_cpu_sync=do_cpu_sync or None)
            check_cached(handle, given, wanted, self.num_ranks)
            rows, event = self._dispatch_again(engine, x, topk_weights, handle, wanted, sms, when)
            ids = None if do_expand else handle.recv_topk_idx.clone()
            return _payload(rows), ids, rows.weights, handle, event
        numbers = check_new(x, topk_idx, topk_weights, given, stats, self.num_ranks)
        assert topk_idx is not None
        assert num_experts is not None
        waits = do_cpu_sync is None or bool(do_cpu_sync)
        with self._call(*when) as call:
            tensors = x if isinstance(x, tuple) else (x, None)
            call.reads(*tensors, topk_idx, topk_weights, stats)
            tokens = _tokens(x, topk_idx, topk_weights)
            how = stats, numbers, wanted, waits, sms
            got = expanded.dispatch(engine, tokens, num_experts, *how)
            kept_idx = topk_idx.clone() if do_handle_copy else topk_idx
            call.returns(*got.rows, got.topk_idx, *got.places, *got.sent, kept_idx)
        new_handle = EPHandle(
            wanted.expand,
            num_experts,
            numbers.alignment,
            numbers.max_tokens,
            sms,
            kept_idx,
            len(got.topk_idx),
            got.num_expanded,
            got.per_expert,
            got.places.psum_per_rank,
            got.places.psum_per_expert,
            got.places.num_per_expert,
            got.places.src_metadata,
            got.sent,
            got.topk_idx,
        )
        ids = None if do_expand else got.topk_idx
        return _payload(got.rows), ids, got.rows.weights, new_handle, call.event

    def _dispatch_again(
        self,
        engine: KernelEngine,
        x: Payload,
        topk_weights: torch.Tensor | None,
        handle: EPHandle,
        wanted: RowsWanted,
        num_sms: int,
        when: tuple[Events, tuple[bool, bool]],
    ) -> tuple[ExpandedRows, EventOverlap]:
        """A dispatch with a handle: (rows as wanted, event)."""
        rows, scales = x if isinstance(x, tuple) else (x, None)
        checks.check_payload(x, len(handle.topk_idx))
        if topk_weights is not None:
            checks.check_routing(rows, handle.topk_idx, topk_weights)
        if self.options.debug:
            check_handle_values(handle.sent, self.rank)
        with self._call(*when) as call:
            call.reads(rows, scales, topk_weights, handle.topk_idx, *handle.places, *handle.sent)
            topk_idx = None if topk_weights is None else handle.topk_idx
            tokens = _tokens(x, topk_idx, topk_weights)
            of = (
                handle.sent,
                handle.places,
                handle.num_expanded_tokens,
                _numbers(handle, self.num_ranks),
            )
            more = *of, wanted, num_sms
            got = expanded.dispatch_again(engine, tokens, handle.num_experts, *more)
            call.returns(*got)
        return got, call.event

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
        return to their top-k slots. num_sms 0 stands for that of the handle; the other arguments
        are those of `dispatch`.

        Returns (out [T, H], weights float32 [T, K] or None, event).
        """
        engine, device = self._kernels(), self.device
        check_handle(handle, self.num_ranks)
        sms = check_sms(num_sms, num_qps, self.num_allocated_qps) or handle.num_sms
        num_rows = handle.num_expanded_tokens if handle.do_expand else handle.num_recv_tokens
        checks.check_tensor("x", x, [num_rows, "H"], [torch.bfloat16], device)
        checks.check_rows("x", x)
        if topk_weights is not None:
            shape = [num_rows] if handle.do_expand else [num_rows, handle.topk_idx.shape[1]]
            checks.check_tensor("topk_weights", topk_weights, shape, [torch.float32], device)
            checks.check_no_grad(topk_weights=topk_weights)
        biases = checks.check_biases(bias, len(handle.topk_idx), x)
        if self.options.debug:
            check_handle_values(handle.sent, self.rank)
        events = previous_event, previous_event_before_epilogue
        with self._call(events, (async_with_compute_stream, allocate_on_comm_stream)) as call:
            call.reads(x, topk_weights, *biases, *handle.places, *handle.sent)
            weights = None if topk_weights is None else checks.packed(topk_weights)
            rows = ExpertRows(checks.packed(x), weights)
            added = [checks.packed(one) for one in biases]
            places = handle.places if handle.do_expand else None
            how = added, not self.allow_multiple_reduction, sms
            out, sums = expanded.combine(engine, rows, places, handle.sent, *how)
            call.returns(out, sums)
        return out, sums, call.event

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
        with self._call((None, None), (use_comm_stream, False)) as call:
            ids = torch.empty(0, 1, dtype=torch.int64, device=self.device)
            x = torch.empty(0, 1, dtype=torch.bfloat16, device=self.device)
            layout = engine.layout(ids, self.num_ranks)
            engine.dispatch(Tokens(x, ids, ids.float()), layout, 1)
        call.event.current_stream_wait()
        if with_cpu_sync:
            self._synchronise()

    # --- Configuration -----------------------------------------------------------------------

    @staticmethod
    def capture() -> EventHandle:
        """The end of what the current stream holds by now. (`Buffer.capture` wraps it in an
        EventOverlap, as DeepEP V1 does.)"""
        return EventHandle()

    @staticmethod
    def get_buffer_size_hint(
        group: dist.ProcessGroup | None,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes of memory per rank for so many tokens, by the formula of `Buffer.size_hint`, as a
        multiple of 2 MiB. num_topk 0 stands for 32."""
        check_flags(
            use_fp8_dispatch=use_fp8_dispatch,
            allow_hybrid_mode=allow_hybrid_mode,
            allow_multiple_reduction=allow_multiple_reduction,
        )
        shape = num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch
        return elastic_size_hint(Group.of(group).size, *shape, allow_multiple_reduction)

    def get_physical_domain_size(self) -> tuple[int, int]:
        """(nodes that a network connects, ranks of each)."""
        return self.num_nodes, self.group_size // self.num_nodes

    def get_logical_domain_size(self) -> tuple[int, int]:
        """(scale-out ranks, scale-up ranks): nodes, ranks of each; (1, R) without hybrid mode."""
        whole = 1, self.group_size
        return self.get_physical_domain_size() if self.allow_hybrid_mode else whole

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """How many programs communicate in a call unless it says otherwise: 20, as in a `Buffer`.

        DeepEP computes a number from these bandwidths for its own kernels. Here ten programs fill
        the link, whatever the routing, and the others copy or add up meanwhile.
        """
        checks.check_experts(num_experts, self.num_ranks)
        checks.check_at_least(1, num_topk=num_topk)
        most = self.num_scaleout_ranks if self.num_scaleout_ranks > 1 else 0
        checks.check_int("num_scaleout_topk", num_scaleout_topk, 0, most)
        return NUM_SMS

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """What DeepEP gives for calls of num_sms programs, at most num_allocated_qps. No call uses
        a QP here."""
        num_sms = checks.check_int("num_sms", num_sms, 1, MAX_NUM_SMS)
        num_qps = 16 * num_sms + 1 if self.allow_hybrid_mode else min(num_sms, 9)
        return min(num_qps, self.num_allocated_qps)

    # --- Arguments ---------------------------------------------------------------------------

    def _kernels(self) -> KernelEngine:
        """The engine, if it can go on."""
        engine = self._ready()
        assert isinstance(engine, KernelEngine)
        return engine

    @contextmanager
    def _call(self, events: Events, flags: tuple[bool, bool]) -> Iterator[Call]:
        """A context in which one call runs; see `CallStreams.call`. events: previous_event and
        previous_event_before_epilogue; flags: async_with_compute_stream, allocate_on_comm_stream.
        """
        is_async, allocates = flags
        check_flags(async_with_compute_stream=is_async, allocate_on_comm_stream=allocates)
        check_events(*events, allocates)
        previous, before_epilogue = events
        with self._streams.call(previous, is_async) as call:
            if before_epilogue is not None:
                before_epilogue.current_stream_wait()
            yield call


def _numbers(handle: EPHandle, num_ranks: int) -> Numbers:
    """Those of the dispatch of a handle."""
    sizes = handle.expert_alignment, handle.num_max_tokens_per_rank
    return Numbers(handle.num_experts // num_ranks, *sizes, num_ranks)


def _tokens(x: Payload, topk_idx: torch.Tensor | None, topk_weights: torch.Tensor | None) -> Tokens:
    """What is sent. Ids travel with weights: where there are none, with zeros."""
    rows, scales = x if isinstance(x, tuple) else (x, None)
    if topk_idx is not None:
        topk_idx = checks.packed(topk_idx)
        if topk_weights is None:
            topk_weights = topk_idx.new_zeros(topk_idx.shape, dtype=torch.float32)
        topk_weights = checks.packed(topk_weights)
    return Tokens(checks.packed(rows), topk_idx, topk_weights, scales)


def _payload(rows: ExpandedRows) -> Payload:
    """Rows, with their scales where they have some."""
    return rows.x if rows.scales is None else (rows.x, rows.scales)


def _refuse(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    """A call of DeepEP's `ElasticBuffer` that this one does not have."""
    raise BackendError(
        f"ElasticBuffer.{name} is not there yet: this version has dispatch, combine and barrier."
    )


for _name in (
    *("engram_write", "engram_fetch", "get_engram_storage_size_hint"),
    *("pp_set_config", "pp_send", "pp_recv", "get_pp_buffer_size_hint"),
    *("create_agrs_session", "destroy_agrs_session", "agrs_new_session", "agrs_set_config"),
    *("agrs_get_inplace_tensor", "all_gather", "get_agrs_buffer_size_hint"),
    "get_agrs_num_max_session_bytes",
):
    setattr(ElasticBuffer, _name, staticmethod(partial(_refuse, _name)))
