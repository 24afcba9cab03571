"""Buffer: the object users hold. Checks arguments, owns the memory, speaks DeepEP's V1 calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from . import checks, service
from . import options as buffer_options
from .agreement import Group, agree, wishes
from .debug_checks import check_handle_values, check_layout_values
from .dispatch import DispatchLayout, Tokens
from .engines.base import Engine, Handle, verb
from .engines.collective import CollectiveEngine
from .engines.low_latency import LowLatency
from .errors import BackendError, MoeEngineError, ShapeError
from .events import EventHandle, EventOverlap
from .handles import check_handle
from .low_latency_verbs import LowLatencyVerbs
from .options import DEFAULT_OPTIONS, Config, Options, Programs
from .service import Service, default_device, new_engines
from .streams import CallStreams
from .symm import choose_backend
from .symm.slots import SlotLayout
from .utils import round_up


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

    use_fabric, num_qps_per_rank and the allow_ flags are DeepEP's, and change nothing.

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
        use_fabric: bool = False,
    ):
        self._forks = service.forks
        members = Group.of(group)
        self.group, self.rank, self.group_size = members.ranks, members.rank, members.size
        self.device = default_device()
        given = comm, backend, num_nvl_bytes, num_rdma_bytes, low_latency_mode, enable_shrink
        mine = agree(members, lambda: wishes(members, self.device, *given, options))
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.enable_shrink = low_latency_mode, mine.enable_shrink
        self.explicitly_destroy, self.options = explicitly_destroy, mine.options
        self._engine: Engine | None = None
        self._low_latency: LowLatency | None = None
        self._unreleased: torch.Tensor | None = None  # x of a dispatch whose rows are in place
        self._programs = Programs(lambda: Buffer.num_sms)
        self._streams = CallStreams(self.device)
        self.backend = backend
        if backend == "collective":
            self._engine = CollectiveEngine(self.group)
            return
        self.backend = choose_backend(self.group, backend, self.device)
        place = self.group, self.rank, self.backend, self.device
        where = *place, mine.timeout_s, self._streams
        self._engine, self._low_latency = new_engines(where, members.size, mine, self._programs)

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
        try:
            sizes = max_tokens, hidden, num_experts, num_topk, dtype, Group.of(group).size
            num_bytes, ring_bytes, options = buffer_options.sizes_for_tokens(options, *sizes)
        except MoeEngineError as problem:  # which all ranks raise, where they meet
            bad: Any = problem
            return cls(group, backend=backend, options=bad)
        return cls(group, num_bytes, ring_bytes, ring_bytes > 0, backend=backend, options=options)

    size_hint = staticmethod(buffer_options.size_hint)

    # --- Verbs -------------------------------------------------------------------------------

    @verb
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
        num_experts = checks.check_experts(num_experts, self.group_size)
        checks.check_topk(topk_idx, device=self._rows_device)
        when = _when(previous_event, async_finish, allocate_on_comm_stream)
        with self._streams.call(*when) as call:
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
        buffer_options.check_config(config)
        expert_alignment = checks.check_int("expert_alignment", expert_alignment, 1)
        most = self.group_size * SlotLayout.most_rows
        num_worst_tokens = checks.check_int("num_worst_tokens", num_worst_tokens, 0, most)
        checks.check_flag("in_place", in_place)
        when = _when(previous_event, async_finish, allocate_on_comm_stream)
        if handle is not None:
            cached = check_handle(handle, self.group_size, rows.device)
            if topk_idx is not None or topk_weights is not None or in_place:
                raise ShapeError(
                    "with a handle only x is sent, to rows of the caller's; leave out topk_idx, "
                    "topk_weights and in_place."
                )
            if rows.shape[0] != cached.send_head.shape[0]:
                checks.check_payload(x, cached.send_head.shape[0])
            with self._streams.call(*when) as call, self._programs.of(config):
                if self.options.debug:
                    check_handle_values(cached, self.rank)
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
        if topk_idx is not None or topk_weights is not None:
            checks.check_routing(rows, topk_idx, topk_weights)
        with self._streams.call(*when) as call, self._programs.of(config):
            if self.options.debug:
                check_layout_values(*layout, topk_idx, self.rank)
            call.reads(rows, scales, topk_idx, topk_weights, *layout)
            tokens = Tokens(
                checks.packed(rows),
                None if topk_idx is None else checks.packed(topk_idx),
                None if topk_weights is None else checks.packed(topk_weights),
                scales,
            )
            where = DispatchLayout(*(counts.contiguous() for counts in layout))
            send = engine.dispatch_in_place if in_place else engine.dispatch
            got, per_expert, new_handle = send(tokens, where, num_worst_tokens)
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
        checks.check_rows("x", x, "N", self._rows_device)
        known = check_handle(handle, self.group_size, x.device)
        if x.shape[0] != known.recv_src_idx.shape[0]:
            checks.check_rows("x", x, known.recv_src_idx.shape[0])
        if topk_weights is not None:
            shape = (x.shape[0], "K")
            checks.check_tensor("topk_weights", topk_weights, shape, [torch.float32], x.device)
            checks.check_no_grad(topk_weights=topk_weights)
        biases = checks.check_biases(bias, known.is_token_in_rank.shape[0], x)
        buffer_options.check_config(config)
        when = _when(previous_event, async_finish, allocate_on_comm_stream)
        with self._streams.call(*when) as call, self._programs.of(config):
            if self.options.debug:
                check_handle_values(known, self.rank)
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
        checks.check_expert_weights(x, w_gate_up, w_down)
        num_experts = w_gate_up.shape[0] * self.group_size
        checks.check_experts(num_experts, self.group_size)
        checks.check_routing(x, topk_idx, topk_weights)
        checks.check_flag("async_finish", async_finish)
        max_tokens = checks.check_max_tokens(len(x), max_tokens)
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

    # --- Service -----------------------------------------------------------------------------
    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Programs that communication uses, for all Buffers; even and positive, as in DeepEP."""
        Buffer.num_sms = buffer_options.check_num_sms(new_num_sms)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """A Config of `num_sms` programs, for any number of ranks."""
        checks.check_at_least(1, num_ranks=num_ranks)
        return Config(Buffer.num_sms)

    get_combine_config = get_dispatch_config

    # --- Checks ------------------------------------------------------------------------------

    def _ready(self, sends: bool = True) -> Engine:
        """The engine, if it can go on: with rows in place, only with what sends nothing."""
        if self._forks != service.forks:
            self._check_process()
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


def _when(
    previous_event: EventOverlap | EventHandle | None, async_finish: bool, allocate_there: bool
) -> tuple[EventOverlap | EventHandle | None, bool, bool]:
    """The arguments of `CallStreams.call`."""
    checks.check_flag("async_finish", async_finish)
    checks.check_flag("allocate_on_comm_stream", allocate_there)
    return previous_event, async_finish, allocate_there
