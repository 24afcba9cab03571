"""Buffer: the object users hold. Checks arguments, owns the memory, speaks DeepEP's V1 calls."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from . import buffer_config, checks
from .buffer_config import DEFAULT_OPTIONS, Config, Options, Programs
from .collective import CollectiveEngine
from .deadline import timeout_seconds
from .engine import KernelEngine
from .errors import BackendError, ShapeError
from .events import EventHandle, EventOverlap
from .low_latency import LowLatency
from .low_latency_verbs import LowLatencyVerbs
from .ring import RingLayout
from .service import Service, default_device, new_ring, new_slots
from .slots import SlotLayout
from .streams import CallStreams
from .symm import choose_backend, exchange
from .tune import LayerChoices, measured_layers
from .utils import LINE_BYTES, round_up
from .verbs import Engine, Handle, Tokens, verb


class Buffer(LowLatencyVerbs, Service):
    """Expert-parallel dispatch and combine over the ranks of `group`.

    The signatures, shapes and receive order are those of DeepEP V1's `Buffer`. Every rank of the
    group must make the same calls on its Buffers in the same order, as with NCCL; T may differ
    per rank and be 0. Tensors are bf16 or fp32, on this rank's device.

    Verbs take `previous_event` (what to wait for, instead of all that the current stream holds),
    `async_finish` (run on `get_comm_stream()` and return an event that ends the call, for which
    the caller waits before it uses the results), `allocate_on_comm_stream` (accepted with both of
    these, as in DeepEP; results of asynchronous calls are always allocated there) and `config`
    (its num_sms programs communicate in this call).

    backend: "torch" (GPUs that can map each other's memory), "emulated" (CPU ranks as processes,
    the same kernels through Triton's interpreter), "single" (one rank), "collective" (plain
    torch.distributed, any device), "auto" (the first of these that fits).

    Raises CapacityError without room for a single row, BackendError where the backend cannot run.
    """

    num_sms: ClassVar[int] = 20

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        backend: str = "auto",
        options: Options = DEFAULT_OPTIONS,
    ):
        if comm is not None:
            raise BackendError("comm= (mpi4py) is not taken; pass group=, any torch process group.")
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.group_size = dist.get_world_size(group) if group is not None else 1
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy, self.enable_shrink = explicitly_destroy, enable_shrink
        self.options = options
        self.device = default_device()
        self._engine: Engine | None = None
        self._low_latency: LowLatency | None = None
        self._unreleased: torch.Tensor | None = None  # x of a dispatch whose rows are in place
        self._programs = Programs(lambda: Buffer.num_sms)
        self._streams = CallStreams(self.device)
        if backend == "collective":
            self.backend = backend
            self._engine = CollectiveEngine(group)
            return
        self.backend = choose_backend(group, backend, self.device)
        checks.check_runnable(self.device)
        num_bytes, ring_bytes = max(num_nvl_bytes, num_rdma_bytes), 0
        checks.check_shrink(enable_shrink, self.group_size)
        if low_latency_mode:
            smallest = SlotLayout(self.group_size, LINE_BYTES, options.num_slots).num_bytes
            num_bytes, ring_bytes = max(num_nvl_bytes, smallest), num_rdma_bytes
        given = exchange(group, lambda: ((num_bytes, ring_bytes), options), "Options")
        buffer_config.check_options(options, given)
        measured, number = exchange(
            group,
            lambda: ({}, 0) if self.rank else (measured_layers(), secrets.randbits(31)),
            "layers",
        )[0]
        layers = LayerChoices(options.layer, measured)
        layout = SlotLayout.fit(num_bytes, self.group_size, options.num_slots)
        timeout_s = options.timeout_s or timeout_seconds()
        # Nothing that knows this Buffer, else it would outlive its last name.
        where = group, self.rank, self.backend, self.device, timeout_s, self._streams
        make_slots = partial(new_slots, *where, number)
        if ring_bytes:
            ring = RingLayout.fit(ring_bytes, self.group_size, options.num_slots)
            self._low_latency = LowLatency(new_ring(*where, ring), enable_shrink)
        self._engine = KernelEngine(layout, make_slots, self._programs, options.max_tokens, layers)

    @classmethod
    def for_tokens(
        cls,
        group: dist.ProcessGroup | None,
        max_tokens: int,
        hidden: int,
        num_experts: int,
        num_topk: int,
        dtype: torch.dtype = torch.bfloat16,
        backend: str = "auto",
        options: Options = DEFAULT_OPTIONS,
    ) -> Buffer:
        """A Buffer for up to `max_tokens` tokens per rank of this shape, by formula: `size_hint`,
        and low-latency memory for `Options.decode_tokens` of them."""
        num_ranks = dist.get_world_size(group) if group is not None else 1
        row_bytes, num_slots = hidden * dtype.itemsize, options.num_slots
        sizes = max_tokens, row_bytes, num_ranks, num_experts, num_topk, num_slots
        num_bytes = cls.size_hint(*sizes)
        options = replace(options, max_tokens=max_tokens)
        ring_bytes = buffer_config.decode_bytes(options, row_bytes, num_ranks, num_topk)
        return cls(group, num_bytes, ring_bytes, ring_bytes > 0, backend=backend, options=options)

    size_hint = staticmethod(buffer_config.size_hint)

    # --- Verbs -------------------------------------------------------------------------------

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | EventHandle | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Count what goes where. topk_idx int64 [T, K], -1 = not routed.

        Returns (num_tokens_per_rank int32 [R], None, num_tokens_per_expert int32 [E],
        is_token_in_rank bool [T, R], event). Ids out of range count as -1 and raise RoutingError
        at the next call or `check()`.
        """
        engine = self._ready(sends=False)
        checks.check_experts(num_experts, self.group_size)
        checks.check_topk(topk_idx, device=self._rows_device)
        with self._streams.call(previous_event, async_finish, allocate_on_comm_stream) as call:
            call.reads(topk_idx)
            per_rank, per_expert, in_rank = engine.layout(topk_idx.contiguous(), num_experts)
            call.returns(per_rank, per_expert, in_rank)
        return self._finish((per_rank, None, per_expert, in_rank, call.event))

    @verb
    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        handle: tuple[torch.Tensor, ...] | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | EventHandle | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        in_place: bool = False,
    ) -> tuple[
        torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        torch.Tensor | None,
        torch.Tensor | None,
        list[int] | None,
        Handle | None,
        EventOverlap,
    ]:
        """Send each token x[t] once to every rank that holds one of its experts.

        x: [T, H], or a pair of e4m3 rows [T, H] and scales [T, S] (float32 or packed int32, any
        strides); recv_x is such a pair then. topk_idx int64 [T, K] and topk_weights float32 [T, K]
        travel along. The counts and is_token_in_rank are those of `get_dispatch_layout`. With a
        `handle` of an earlier dispatch only x is sent, to the same places.

        Returns (recv_x [N, H], recv_topk_idx int64 [N, K] with local ids, -1 where the expert is
        elsewhere, recv_topk_weights float32 [N, K], 0 there, rows per local expert rounded up to
        expert_alignment, handle, event); with a handle (recv_x, None, None, None, None, event).
        Rows stand by source rank, then token. num_worst_tokens > 0 returns that many rows and no
        list, without synchronising the host; past the received rows only ids are written, as -1.

        in_place=True saves the copy: recv_x is int64 [N], the address of each row, for kernels that
        follow pointers. The rows lie there until `release()`, which must come before the next
        call that sends; x must stay as it is, as rows that a rank sends to itself are read there.

        Example, 2 ranks of 2 experts, rank 0 sends 4 tokens with topk_idx [[0], [2], [1], [3]],
        rank 1 none: rank 0 receives tokens 0, 2 with local ids [[0], [1]], rank 1 tokens 1, 3 with
        [[0], [1]].
        """
        engine = self._ready()
        rows, scales = checks.check_payload(x, device=self._rows_device)
        buffer_config.check_config(config)
        checks.check_at_least(1, expert_alignment=expert_alignment)
        checks.check_at_least(0, num_worst_tokens=num_worst_tokens)
        when = previous_event, async_finish, allocate_on_comm_stream
        if handle is not None:
            cached = _as_handle(handle)
            if topk_idx is not None or topk_weights is not None or in_place:
                raise ShapeError(
                    "with a handle only x is sent, to rows of the caller's; leave out topk_idx, "
                    "topk_weights and in_place."
                )
            checks.check_payload(x, cached.is_token_in_rank.shape[0])
            with self._programs.of(config), self._streams.call(*when) as call:
                call.reads(rows, scales, *cached)
                received = engine.dispatch_cached(checks.packed(rows), scales, cached)
                call.returns(received.x, received.scales)
            return self._finish((received.payload, None, None, None, None, call.event))
        if num_tokens_per_rank is None or is_token_in_rank is None or num_tokens_per_expert is None:
            raise ShapeError(
                "dispatch needs num_tokens_per_rank, is_token_in_rank and num_tokens_per_expert "
                "(all three from get_dispatch_layout), or a handle."
            )
        layout = num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank
        checks.check_layout(rows, *layout, self.group_size)
        checks.check_routing(rows, topk_idx, topk_weights)
        with self._programs.of(config), self._streams.call(*when) as call:
            call.reads(rows, scales, topk_idx, topk_weights, *layout)
            tokens = Tokens(
                checks.packed(rows),
                None if topk_idx is None else checks.packed(topk_idx),
                None if topk_weights is None else checks.packed(topk_weights),
                num_tokens_per_rank.contiguous(),
                num_tokens_per_expert.contiguous(),
                is_token_in_rank.contiguous(),
                scales,
            )
            send = engine.dispatch_in_place if in_place else engine.dispatch
            got, per_expert, new_handle = send(tokens, num_worst_tokens)
            self._unreleased = tokens.x if in_place else None
            call.returns(
                self._unreleased, got.x, got.scales, got.topk_idx, got.topk_weights, *new_handle
            )
        aligned = [round_up(count, expert_alignment) for count in per_expert]
        return self._finish(
            (got.payload, got.topk_idx, got.topk_weights, aligned, new_handle, call.event)
        )

    @verb
    def release(self) -> None:
        """Give the rows of `dispatch(in_place=True)` back, behind what the current stream holds."""
        engine = self._ready(sends=False)
        if self._unreleased is None:
            raise BackendError(
                "there are no rows in place to release; call dispatch(in_place=True) first."
            )
        with self._streams.call():
            engine.release()
        self._unreleased = None
        self._finish(None)

    @verb
    def combine(
        self,
        x: torch.Tensor,
        handle: tuple[torch.Tensor, ...],
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | Sequence[torch.Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | EventHandle | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Return rows x [N, H] (in receive order) to their tokens and add them up there.

        Unweighted; fp32 from bias (none, one or two of [T, H]) on, ranks by right-most top-k
        lane, one rounding. topk_weights float32 [N, K] are summed likewise.
        Returns (out [T, H], weights float32 [T, K] or None, event).
        """
        engine = self._ready()
        known = _as_handle(handle)
        checks.check_rows("x", x, known.recv_src_idx.numel(), self._rows_device)
        if topk_weights is not None:
            shape = (x.shape[0], "K")
            checks.check_tensor("topk_weights", topk_weights, shape, [torch.float32], x.device)
            checks.check_no_grad(topk_weights=topk_weights)
        biases = checks.check_biases(bias, known.is_token_in_rank.shape[0], x)
        buffer_config.check_config(config)
        when = previous_event, async_finish, allocate_on_comm_stream
        with self._programs.of(config), self._streams.call(*when) as call:
            call.reads(x, topk_weights, *biases, *known)
            out, weights = engine.combine(
                checks.packed(x),
                known,
                None if topk_weights is None else checks.packed(topk_weights),
                [checks.packed(part) for part in biases],
            )
            call.returns(out, weights)
        return self._finish((out, weights, call.event))

    @verb
    def moe_ffn(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        w_gate_up: torch.Tensor,
        w_down: torch.Tensor,
        async_finish: bool = False,
        max_tokens: int | None = None,
    ) -> tuple[torch.Tensor, EventOverlap]:
        """(result [T, H], event) of a layer's routed experts; see `moe_engine.moe_ffn`."""
        engine = self._ready()
        checks.check_rows("x", x, device=self._rows_device)
        num_experts = w_gate_up.shape[0] * self.group_size
        checks.check_experts(num_experts, self.group_size)
        checks.check_routing(x, topk_idx, topk_weights)
        checks.check_expert_weights(x, w_gate_up, w_down)
        checks.check_max_tokens(len(x), max_tokens)
        max_tokens = self.options.max_tokens if max_tokens is None else max_tokens
        with self._streams.call(None, async_finish) as call:
            call.reads(x, topk_idx, topk_weights, w_gate_up, w_down)
            rows = checks.packed(x), topk_idx.contiguous(), topk_weights.contiguous()
            low_latency = self._low_latency
            sizes = x.shape[1] * x.itemsize, topk_idx.shape[1], num_experts  # equal on all ranks
            if low_latency is not None and low_latency.takes(max_tokens, *sizes, self.options):
                checks.check_max_tokens(len(x), max_tokens)
                out = low_latency.moe_ffn(*rows, w_gate_up, w_down, max(1, max_tokens or 0))
            else:
                out = engine.moe_ffn(*rows, w_gate_up, w_down)
            call.returns(out)
        return self._finish((out, call.event))

    def warmup(
        self, hidden: int, num_experts: int, num_topk: int, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        """Compile on all ranks together what dispatch and combine of this shape need. Collective.

        Without it the first call of a shape does so, under a deadline 5 minutes longer.
        """
        x = torch.empty(0, hidden, dtype=dtype, device=self.device)
        idx = torch.empty(0, num_topk, dtype=torch.int64, device=self.device)
        per_rank, _, per_expert, in_rank, _ = self.get_dispatch_layout(idx, num_experts)
        rows, _, weights, _, handle, _ = self.dispatch(
            x, None, per_rank, None, in_rank, per_expert, idx, idx.float()
        )
        assert isinstance(rows, torch.Tensor)
        assert handle is not None
        self.dispatch(x, handle)
        for topk_weights in (None, weights):
            self.combine(rows, handle, topk_weights)
        self.check()

    # --- Service -----------------------------------------------------------------------------
    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Programs that communication uses, for all Buffers; even and positive, as in DeepEP."""
        buffer_config.check_num_sms(new_num_sms)
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """A Config of `num_sms` programs, for any number of ranks."""
        checks.check_at_least(1, num_ranks=num_ranks)
        return Config(Buffer.num_sms)

    get_combine_config = get_dispatch_config

    # --- Checks ------------------------------------------------------------------------------

    def _ready(self, sends: bool = True) -> Engine:
        """The engine, if it can go on: with rows in place, only with what sends nothing."""
        if self._engine is None:
            raise BackendError("this Buffer was destroyed; make a new one.")
        self._engine.check()
        if self._low_latency is not None:
            self._low_latency.check()
        if sends and self._unreleased is not None:
            raise BackendError(
                "the last dispatch left its rows in place; call release() when they are read."
            )
        return self._engine

    @property
    def _rows_device(self) -> torch.device | None:
        """Where rows must lie; None for anywhere."""
        return None if self.backend == "collective" else self.device


def _as_handle(handle: tuple[torch.Tensor, ...]) -> Handle:
    checks.check_handle(handle, Handle._fields)
    return Handle(*handle)
