"""Buffer: the object users hold, with DeepEP V1's normal calls and `moe_ffn`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist

from . import checks
from .agreement import Group
from .debug_checks import check_handle_values, check_layout_values, check_node_values
from .dispatch import DispatchLayout, Received, Tokens
from .engines.base import NUM_SMS, Engine, Handle
from .engines.internode import InternodeEngine
from .engines.kernel import KernelEngine
from .errors import BackendError, DtypeError, MoeEngineError, ShapeError
from .grouped_gemm.activations import AnyActivation
from .grouped_gemm.operands import Operand
from .handles import check_handle, parts_of
from .layer_config import LayerConfig
from .layer_verbs import LayerVerbs
from .lifecycle import local_verb, verb
from .options import DEFAULT_OPTIONS, Config, Options, check_num_sms, sizes_for_tokens
from .streams import EventHandle, EventOverlap
from .symm.slots import ReturnRowLayout, SlotLayout
from .utils import round_up
from .warm_up import warm_up


class Buffer(LayerVerbs):
    """Expert-parallel dispatch and combine over the ranks of `group`.

    The signatures, shapes and receive order are those of DeepEP V1's `Buffer`. Every rank of the
    group must make the same calls on its Buffers in the same order, as with NCCL; T may differ
    per rank and be 0. Tensors are bf16 or fp32, on this rank's device.

    Verbs take `previous_event` (what to wait for, instead of all that the current stream holds),
    `async_finish` (run on `get_comm_stream()` and return an event that ends the call, for which
    the caller waits before it uses the results), `allocate_on_comm_stream` (accepted with both of
    these, as in DeepEP; results of asynchronous calls are always allocated on that stream) and
    `config` (its num_sms programs communicate in this call).

    backend: "torch" (GPUs that can map each other's memory), "nvshmem" (also GPUs that cannot),
    "emulated" (CPU ranks as processes, the same kernels through Triton's interpreter), "single"
    (one rank), "collective" (plain torch.distributed, any device), "auto" (the one that fits).

    use_fabric, num_qps_per_rank and the allow_ flags are DeepEP's, and change nothing.

    Raises CapacityError without room for a single row, BackendError where the backend cannot run.
    """

    num_sms: ClassVar[int] = NUM_SMS

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
    ) -> Self:
        """A Buffer for up to `max_tokens` tokens per rank of this shape, by formula: `size_hint`,
        and low-latency memory for `Options.decode_tokens` of them. Its calls take up to 65,536
        tokens, and layers of more go in sub-batches (`passes.py`)."""
        try:
            sizes = max_tokens, hidden, num_experts, num_topk, dtype, Group.of(group).size
            num_bytes, ring_bytes, options = sizes_for_tokens(options, *sizes)
        except MoeEngineError as problem:  # which all ranks raise, where they meet
            bad: Any = problem
            return cls(group, backend=backend, options=bad)
        return cls(group, num_bytes, ring_bytes, ring_bytes > 0, backend=backend, options=options)

    # --- Verbs -------------------------------------------------------------------------------

    @local_verb
    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | EventHandle | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Count the tokens for each rank and expert. topk_idx int64 [T, K], -1 = not routed.

        Returns (num_tokens_per_rank int32 [R], num_tokens_per_rdma_rank int32 [N] of the nodes, or
        None on one node, num_tokens_per_expert int32 [E], is_token_in_rank bool [T, R], event). Of
        nodes of one rank the first two are one tensor. Ids out of range count as -1 and raise
        RoutingError at the next call or `check()`.
        """
        engine = self._ready(sends=False)
        described = engine.describe(topk_idx, num_experts)
        if not described.kind.is_checked:
            checks.check_experts(num_experts, self.group_size)
            checks.check_topk(topk_idx, device=self._rows_device)
        with self._streams.call(previous_event, async_finish, allocate_on_comm_stream) as call:
            if call.is_async:
                call.reads(topk_idx)
            layout = engine.again(described)
            if layout is None:
                (idx,) = described.packed(topk_idx)
                layout = engine.layout(idx, int(num_experts), described.if_packed)
            per_rank, per_expert, in_rank = layout
            per_node = None
            if self.num_nodes > 1 and isinstance(engine, InternodeEngine):
                per_node = engine.tokens_per_node(layout)
            if call.is_async:
                call.returns(per_rank, per_node, per_expert, in_rank)
        described.kind.is_checked = True
        return per_rank, per_node, per_expert, in_rank, call.event

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
        are sent along. The counts and is_token_in_rank are those of `get_dispatch_layout`;
        num_tokens_per_rdma_rank may be left out. With a `handle` of an earlier dispatch only x is
        sent, to the same rows.

        Returns (recv_x [N, H], recv_topk_idx int64 [N, K] with local ids, -1 for experts of other
        ranks, recv_topk_weights float32 [N, K], 0 for these, rows per local expert rounded up to
        expert_alignment, handle, event); with a handle (recv_x, None, None, None, None, event).
        Rows are ordered by source rank, then token. num_worst_tokens > 0 returns that many rows
        and no list, without synchronising the host; after the received rows only ids are written,
        as -1.

        in_place=True saves the copy: recv_x is int64 [N], the address of each row, for kernels that
        follow pointers. The rows stay at these addresses until `release()`, which must come before
        the next call that sends. x must not change before, as rows that a rank sends to itself are
        read in x.

        Example, 2 ranks of 2 experts, rank 0 sends 4 tokens with topk_idx [[0], [2], [1], [3]],
        rank 1 none: rank 0 receives tokens 0, 2 with local ids [[0], [1]], rank 1 tokens 1, 3 with
        [[0], [1]].
        """
        engine = self._ready()
        when = previous_event, async_finish, allocate_on_comm_stream
        if handle is not None:
            if topk_idx is not None or topk_weights is not None or in_place:
                raise ShapeError(
                    "with a handle only x is sent, to rows of the caller's; leave out topk_idx, "
                    "topk_weights and in_place."
                )
            checks.check_int("expert_alignment", expert_alignment, 1)
            checks.check_int("num_worst_tokens", num_worst_tokens, 0)
            received = self._dispatch_cached(engine, x, handle, config, *when)
            return received[0].payload, None, None, None, None, received[1]
        layout = num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank
        per_node = num_tokens_per_rdma_rank if self.num_nodes > 1 else None
        if per_node is num_tokens_per_rank and self.num_nodes == self.group_size:
            per_node = None  # as get_dispatch_layout returns it, of nodes of one rank
        routing, rows_per = (topk_idx, topk_weights), (expert_alignment, num_worst_tokens)
        given = *layout, per_node, *routing, *rows_per, in_place
        rows, scales, is_pair = checks.pair_of(x)
        of_call = rows, scales, is_pair, *given, config, Buffer.num_sms
        described = engine.describe("dispatch", *of_call)
        kind = described.kind
        if not kind.is_checked:
            self._check_dispatch(x, layout, routing, *rows_per)
            checks.check_tokens_per_node(per_node, self.num_nodes, layout[0])
            checks.check_flag("in_place", in_place)
        num_sms = _num_sms(config)
        with self._streams.call(*when) as call:
            if self.options.debug:
                counted: tuple[Any, Any, Any] = layout
                check_layout_values(*counted, topk_idx, self.rank)
                check_node_values(per_node, counted[2], self.rank)
            if call.is_async:
                call.reads(rows, scales, *routing, *layout, per_node)
            arrived = engine.again(described)
            if arrived is None:
                rows, ids, weights, *counts = described.packed(rows, *routing, *layout)
                where, tokens = DispatchLayout(*counts), Tokens(rows, ids, weights, scales)
                how = int(num_worst_tokens), num_sms, not in_place, described.if_packed
                arrived = engine.dispatch(tokens, where, *how)
            got, per_expert, new_handle, *_ = arrived
            self._unreleased = rows if in_place else None
            if call.is_async:
                call.returns(self._unreleased, *got, *new_handle)
        kind.is_checked = True
        aligned = [round_up(count, int(expert_alignment)) for count in per_expert]
        return got.payload, got.topk_idx, got.topk_weights, aligned, new_handle, call.event

    def _check_dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        layout: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
        routing: tuple[torch.Tensor | None, torch.Tensor | None],
        expert_alignment: int,
        num_worst_tokens: int,
    ) -> None:
        """Refuse arguments of a dispatch without a handle that do not fit one another."""
        rows, _ = checks.check_payload(x, device=self._rows_device)
        checks.check_int("expert_alignment", expert_alignment, 1)
        most = self.group_size * SlotLayout.most_rows
        checks.check_int("num_worst_tokens", num_worst_tokens, 0, most)
        per_rank, per_expert, in_rank = layout
        if per_rank is None or per_expert is None or in_rank is None:
            raise ShapeError(
                "dispatch needs num_tokens_per_rank, is_token_in_rank and num_tokens_per_expert "
                "(all three from get_dispatch_layout), or a handle."
            )
        checks.check_layout(rows, per_rank, per_expert, in_rank, self.group_size)
        if any(one is not None for one in routing):
            checks.check_routing(rows, *routing)

    def _dispatch_cached(
        self,
        engine: Engine,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        handle: tuple[torch.Tensor, ...],
        config: Config | None,
        *when: Any,
    ) -> tuple[Received, EventOverlap]:
        """A dispatch with a handle: (what came, event)."""
        fixed, of_rows = parts_of(handle, engine.handle_type)
        rows, scales, is_pair = checks.pair_of(x)
        given = rows, scales, is_pair, *fixed, config, Buffer.num_sms
        described = engine.describe("dispatch_cached", *given, sized=(of_rows,))
        if not described.kind.is_checked:
            checks.check_payload(x, device=self._rows_device)
            cached = check_handle(handle, self.group_size, rows.device, self.num_nodes)
            if rows.shape[0] != cached.send_head.shape[0]:
                checks.check_payload(x, cached.send_head.shape[0])
        num_sms = _num_sms(config)
        with self._streams.call(*when) as call:
            if self.options.debug:
                check_handle_values(engine.handle_type(*handle), self.rank)
            if call.is_async:
                call.reads(rows, scales, *handle)
            received = engine.again(described, max_rows=of_rows.shape[0])
            if received is None:
                (sent,) = described.packed(rows)
                cached, known = engine.handle_type(*handle), described.if_packed
                received = engine.dispatch_cached(sent, scales, cached, num_sms, known)
            if call.is_async:
                call.returns(received.x, received.scales)
        described.kind.is_checked = True
        return received, call.event

    @local_verb
    def release(self) -> None:
        """Give the rows of `dispatch(in_place=True)` back, after what the current stream holds."""
        engine = self._ready(sends=False)
        if self._unreleased is None:
            raise BackendError(
                "there are no rows in place to release; call dispatch(in_place=True) first."
            )
        with self._streams.call():
            engine.release()
        self._unreleased = None

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
        """Return rows x [N, H] (in receive order) to their tokens' ranks and add them up.

        The sum has no weights. It begins with bias (none, one or two of [T, H]), adds the ranks'
        rows in order of each rank's largest k in fp32, and is rounded once. topk_weights float32
        [N, K] are summed likewise.
        Returns (out [T, H], weights float32 [T, K] or None, event).
        """
        engine = self._ready()
        biases = tuple(bias) if isinstance(bias, list) else bias
        fixed, of_rows = parts_of(handle, engine.handle_type)
        rows = x, topk_weights, of_rows  # as many of each
        given = *fixed, biases, config, Buffer.num_sms
        described = engine.describe("combine", *given, sized=rows)
        kind = described.kind
        if not kind.is_checked or not checks.have_rows(of_rows.shape[0], x, topk_weights):
            checks.check_rows("x", x, "N", self._rows_device)
            known = check_handle(handle, self.group_size, x.device, self.num_nodes)
            if x.shape[0] != known.recv_src_idx.shape[0]:
                checks.check_rows("x", x, known.recv_src_idx.shape[0])
            if topk_weights is not None:
                shape = (x.shape[0], "K")
                checks.check_tensor("topk_weights", topk_weights, shape, [torch.float32], x.device)
                checks.check_no_grad(topk_weights=topk_weights)
            checks.check_biases(bias, known.is_token_in_rank.shape[0], x)
        biases = (biases,) if isinstance(biases, torch.Tensor) else biases or ()
        num_sms = _num_sms(config)
        with self._streams.call(previous_event, async_finish, allocate_on_comm_stream) as call:
            if self.options.debug:
                check_handle_values(engine.handle_type(*handle), self.rank)
            if call.is_async:
                call.reads(x, topk_weights, *biases, *handle)
            sums = engine.again(described, num_rows=x.shape[0])
            if sums is None:
                y, of_y, *added = described.packed(x, topk_weights, *biases)
                known, decided = engine.handle_type(*handle), described.if_packed
                sums = engine.combine(y, known, of_y, added, num_sms, decided)
            out, weights = sums
            if call.is_async:
                call.returns(out, weights)
        kind.is_checked = True
        return out, weights, call.event

    def warmup(
        self,
        hidden: int,
        num_experts: int,
        num_topk: int,
        dtype: torch.dtype | None = None,
        weights: tuple[Operand, Operand] | None = None,
        biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
        activation: AnyActivation = "swiglu",
    ) -> None:
        """Compile on all ranks together what calls of this shape need: layout, dispatch, combine;
        low-latency dispatch and combine, where the Buffer has memory for them; with weights, a
        layer's (w_gate_up [L, 2I, H], w_down [L, H, I]), which may be pairs (e4m3, scales),
        `moe_ffn` at all sizes, with these biases and this activation, and its backward if one of
        them requires grad. Collective. dtype is that of the rows; None stands for that of the
        weights, and for bf16 where these are e4m3, or there are none.

        Without it the first call of a shape does so, under a deadline 5 minutes longer; with the
        kernels of `moe-engine compile` nothing is left to compile.
        """
        warm_up(self, hidden, num_experts, num_topk, dtype, weights, biases, activation)

    def internode_dispatch(self, *args: Any, **kwargs: Any) -> Any:
        """`dispatch`, which goes between nodes as well, without num_worst_tokens."""
        sent, options = args[:9], args[9:]
        return self.dispatch(*sent, *(0, *options) if options else (), **kwargs)

    def internode_combine(self, *args: Any, **kwargs: Any) -> Any:
        """`combine`, likewise."""
        return self.combine(*args, **kwargs)

    # --- Nodes -------------------------------------------------------------------------------

    @property
    def runtime(self) -> Self | None:
        """What DeepEP asks of the next three; None after `destroy`."""
        return None if self._engine is None else self

    def get_num_rdma_ranks(self) -> int:
        """Nodes of the group: hosts, or sets of ranks, that only a network connects."""
        return self.num_nodes

    def get_rdma_rank(self) -> int:
        """The node of this rank."""
        return self.rank // (self.group_size // self.num_nodes)

    def get_root_rdma_rank(self, is_global: bool) -> int:
        """The rank with this one's place on the first node, or that node's number."""
        return self.rank % (self.group_size // self.num_nodes) if is_global else 0

    # --- Configuration -----------------------------------------------------------------------

    @staticmethod
    def capture() -> EventOverlap:
        """The end of what the current stream holds by now, as an event."""
        return EventOverlap(EventHandle())

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Programs that communication uses, for all Buffers; even and positive, as in DeepEP."""
        Buffer.num_sms = check_num_sms(new_num_sms)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """A Config of `num_sms` programs, for any number of ranks."""
        checks.check_at_least(1, num_ranks=num_ranks)
        return Config(Buffer.num_sms)

    get_combine_config = get_dispatch_config

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether kernels are compiled for sm_90 or later here: they are for the current GPU."""
        return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)

    def layer_config(self, w_gate_up: torch.Tensor, num_topk: int) -> LayerConfig:
        """How `moe_ffn` runs with experts w_gate_up [L, 2I, H]: as `Options.layer` says, else what
        `moe-engine tune` had measured when this Buffer was made, as rank 0 read it, else what the
        model of `layer_config.py` predicts to be fastest."""
        engine = self._ready()
        if not self.has_fused_layers or not isinstance(engine, KernelEngine):
            raise BackendError(
                "a Buffer of several nodes or with backend 'collective' runs its layers step by "
                "step; only Buffers with fused layers choose. Make it for the ranks of one node."
            )
        shape = ["L", "2I", "H"]
        checks.check_tensor("w_gate_up", w_gate_up, shape, checks.PAYLOAD_DTYPES, self.device)
        num_topk = checks.check_int("num_topk", num_topk, 1)
        if 0 in w_gate_up.shape:
            raise ShapeError(f"w_gate_up has shape {list(w_gate_up.shape)}; no size may be 0.")
        row = ReturnRowLayout(w_gate_up.shape[2] * w_gate_up.itemsize, num_topk)
        return engine.layer_config(w_gate_up, row)


def _num_sms(config: Config | None) -> int:
    """Programs that communicate in a call with this Config. DtypeError for anything but a Config or
    None."""
    if config is None:
        return Buffer.num_sms
    if not isinstance(config, Config):
        raise DtypeError(
            f"config is a {type(config).__name__}; it must be a moe_engine.Config or None."
        )
    return config.num_sms
