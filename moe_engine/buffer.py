"""Buffer: the object users hold. Checks arguments, owns the memory, speaks DeepEP's V1 calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from .checks import PAYLOAD_DTYPES, check_no_grad, check_runnable, check_tensor
from .collective import CollectiveEngine
from .engine import Engine, Handle, KernelEngine, Tokens
from .errors import BackendError, ShapeError
from .events import EventHandle, EventOverlap
from .lang import INTERPRETED
from .slots import RowLayout, SlotLayout, Slots, header_bytes, round_up, timeout_seconds
from .symm import allocate, choose_backend


@dataclass(frozen=True, slots=True)
class Options:
    """Less common choices of a Buffer, equal on all ranks.

    num_slots: calls in flight before a writer waits for its reader (2 or more). max_tokens: most
    tokens per rank, which sizes the work space of `moe_ffn`. timeout_s: deadline of every wait,
    None for MOE_ENGINE_TIMEOUT_S (100 s). debug: synchronise after every call and raise at once.
    """

    num_slots: int = 2
    max_tokens: int | None = None
    timeout_s: float | None = None
    debug: bool = False


class Buffer:
    """Expert-parallel dispatch and combine over the ranks of `group`.

    The signatures, shapes and receive order are those of DeepEP V1's `Buffer`. Every rank of the
    group must make the same calls on its Buffers in the same order, as with NCCL; T may differ
    per rank and be 0. Tensors are bf16 or fp32, contiguous, on this rank's device.

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
        options: Options = Options(),
    ):
        if comm is not None:
            raise BackendError("comm= (mpi4py) is not taken; pass group=, any torch process group.")
        if options.num_slots < 2:
            raise ShapeError(f"num_slots is {options.num_slots}; it must be 2 or more.")
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.group_size = dist.get_world_size(group) if group is not None else 1
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy, self.enable_shrink = explicitly_destroy, enable_shrink
        self.options = options
        self.device = _device()
        self._engine: Engine | None = None
        if backend == "collective":
            self.backend = backend
            self._engine = CollectiveEngine(group)
            return
        self.backend = choose_backend(group, backend, self.device)
        check_runnable(self.device)
        layout = SlotLayout.fit(
            max(num_nvl_bytes, num_rdma_bytes), self.group_size, options.num_slots
        )
        block = allocate(group, layout.num_bytes, self.backend, self.device)
        slots = Slots(block, layout, self.rank, options.timeout_s or timeout_seconds())
        self._engine = KernelEngine(slots, lambda: Buffer.num_sms, options.max_tokens)

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
        options: Options = Options(),
    ) -> Buffer:
        """A Buffer for up to `max_tokens` tokens per rank of this shape, by formula."""
        num_ranks = dist.get_world_size(group) if group is not None else 1
        num_bytes = cls.size_hint(
            max_tokens, hidden * dtype.itemsize, num_ranks, num_experts, num_topk, options.num_slots
        )
        options = Options(options.num_slots, max_tokens, options.timeout_s, options.debug)
        return cls(group, num_bytes, backend=backend, options=options)

    @staticmethod
    def size_hint(
        max_tokens: int,
        hidden_bytes: int,
        num_ranks: int,
        num_experts: int,
        num_topk: int,
        num_slots: int = 2,
    ) -> int:
        """Bytes of symmetric memory per rank: num_slots * num_ranks * max_tokens * row bytes, a
        row being the payload and 8 bytes per top-k lane, plus counts and flags. Never exceeded."""
        row = RowLayout(hidden_bytes, num_topk)
        region = header_bytes(num_experts, num_ranks) + max(1, max_tokens) * row.num_bytes
        return SlotLayout(num_ranks, round_up(region, 16), num_slots).num_bytes

    # --- Verbs -------------------------------------------------------------------------------

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Count what goes where. topk_idx int64 [T, K], -1 = not routed.

        Returns (num_tokens_per_rank int32 [R], None, num_tokens_per_expert int32 [E],
        is_token_in_rank bool [T, R], event). Ids out of range count as -1 and raise RoutingError
        at the next call or `check()`.
        """
        engine = self._ready(previous_event)
        self._check_topk(topk_idx, num_experts)
        per_rank, per_expert, in_rank = engine.layout(topk_idx.contiguous(), num_experts)
        self._after_call()
        return per_rank, None, per_expert, in_rank, _event(async_finish)

    def dispatch(
        self,
        x: torch.Tensor,
        handle: tuple[torch.Tensor, ...] | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Any = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[
        torch.Tensor,
        torch.Tensor | None,
        torch.Tensor | None,
        list[int] | None,
        Handle | None,
        EventOverlap,
    ]:
        """Send each token x[t] once to every rank that holds one of its experts.

        x: [T, H]. topk_idx int64 [T, K] and topk_weights float32 [T, K] travel along. The counts
        and is_token_in_rank are those of `get_dispatch_layout`. With a `handle` of an earlier
        dispatch only x is sent, to the same places.

        Returns (recv_x [N, H], recv_topk_idx int64 [N, K] with local ids, -1 where the expert is
        elsewhere, recv_topk_weights float32 [N, K], 0 there, rows per local expert rounded up to
        expert_alignment, handle, event); with a handle (recv_x, None, None, None, None, event).
        Rows stand by source rank, then token. num_worst_tokens > 0 returns that many rows and no
        list, without synchronising the host.

        Example, 2 ranks of 2 experts, rank 0 sends 4 tokens with topk_idx [[0], [2], [1], [3]],
        rank 1 none: rank 0 receives tokens 0, 2 with local ids [[0], [1]], rank 1 tokens 1, 3 with
        [[0], [1]].
        """
        engine = self._ready(previous_event)
        self._check_rows("x", x)
        if handle is not None:
            cached = _as_handle(handle)
            self._check_rows("x", x, cached.is_token_in_rank.shape[0])
            recv_x = engine.dispatch_cached(_packed(x), None, cached).x
            self._after_call()
            return recv_x, None, None, None, None, _event(async_finish)
        if num_tokens_per_rank is None or is_token_in_rank is None or num_tokens_per_expert is None:
            raise ShapeError(
                "dispatch needs num_tokens_per_rank, is_token_in_rank and num_tokens_per_expert "
                "(all three from get_dispatch_layout), or a handle."
            )
        num_tokens, num_experts = x.shape[0], num_tokens_per_expert.numel()
        self._check_experts(num_experts)
        check = check_tensor
        check(
            "num_tokens_per_rank", num_tokens_per_rank, [self.group_size], [torch.int32], x.device
        )
        check("num_tokens_per_expert", num_tokens_per_expert, ["E"], [torch.int32], x.device)
        in_rank_shape = [num_tokens, self.group_size]
        check("is_token_in_rank", is_token_in_rank, in_rank_shape, [torch.bool], x.device)
        if topk_idx is not None:
            self._check_topk(topk_idx, num_experts, num_tokens)
            if topk_weights is None:
                raise ShapeError("topk_idx came without topk_weights; pass both or neither.")
            shape = list(topk_idx.shape)
            check("topk_weights", topk_weights, shape, [torch.float32], x.device)
            topk_idx, topk_weights = topk_idx.contiguous(), topk_weights.contiguous()
        tokens = Tokens(
            _packed(x),
            topk_idx,
            topk_weights if topk_idx is not None else None,
            num_tokens_per_rank.contiguous(),
            num_tokens_per_expert.contiguous(),
            is_token_in_rank.contiguous(),
        )
        rows, per_expert, new_handle = engine.dispatch(tokens, num_worst_tokens)
        self._after_call()
        aligned = [round_up(count, expert_alignment) for count in per_expert]
        event = _event(async_finish)
        return rows.x, rows.topk_idx, rows.topk_weights, aligned, new_handle, event

    def combine(
        self,
        x: torch.Tensor,
        handle: tuple[torch.Tensor, ...],
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | Sequence[torch.Tensor] | None = None,
        config: Any = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Return rows x [N, H] (in receive order) to their tokens and add them up there.

        Unweighted; fp32 from bias (none, one or two of [T, H]) on, ranks by right-most top-k
        lane, one rounding. topk_weights float32 [N, K] are summed likewise.
        Returns (out [T, H], weights float32 [T, K] or None, event).
        """
        engine = self._ready(previous_event)
        known = _as_handle(handle)
        self._check_rows("x", x, known.recv_src_idx.numel())
        if topk_weights is not None:
            check_tensor("topk_weights", topk_weights, (x.shape[0], "K"), [torch.float32], x.device)
            topk_weights = topk_weights.contiguous()
        biases = () if bias is None else (bias,) if isinstance(bias, torch.Tensor) else tuple(bias)
        if len(biases) > 2:
            raise ShapeError(f"bias has {len(biases)} tensors; at most 2 are taken.")
        for part in biases:
            shape = [known.is_token_in_rank.shape[0], x.shape[1]]
            check_tensor("bias", part, shape, [x.dtype], x.device)
        out, weights = engine.combine(
            _packed(x), known, topk_weights, [_packed(part) for part in biases]
        )
        self._after_call()
        return out, weights, _event(async_finish)

    def moe_ffn(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        w_gate_up: torch.Tensor,
        w_down: torch.Tensor,
    ) -> torch.Tensor:
        """The routed experts of a layer; see `moe_engine.moe_ffn`."""
        engine = self._ready(None)
        self._check_rows("x", x)
        num_experts = w_gate_up.shape[0] * self.group_size
        self._check_topk(topk_idx, num_experts, x.shape[0])
        shape = list(topk_idx.shape)
        check_tensor("topk_weights", topk_weights, shape, [torch.float32], x.device)
        hidden = x.shape[1]
        check_tensor("w_gate_up", w_gate_up, ["L", "2I", hidden], [x.dtype], x.device)
        if w_gate_up.shape[1] % 2:
            raise ShapeError(
                f"w_gate_up has shape {list(w_gate_up.shape)}; its second size must be even: gate "
                "rows, then up rows."
            )
        down_shape = [w_gate_up.shape[0], hidden, w_gate_up.shape[1] // 2]
        check_tensor("w_down", w_down, down_shape, [x.dtype], x.device)
        topk_idx = topk_idx.contiguous()
        per_rank, per_expert, in_rank = engine.layout(topk_idx, num_experts)
        tokens = Tokens(
            _packed(x), topk_idx, topk_weights.contiguous(), per_rank, per_expert, in_rank
        )
        out = engine.moe_ffn(tokens, w_gate_up, w_down)
        self._after_call()
        return out

    # --- Service -----------------------------------------------------------------------------

    @classmethod
    def set_num_sms(cls, num_sms: int) -> None:
        """Programs that communication uses, for all Buffers; even and positive, as in DeepEP."""
        if num_sms <= 0 or num_sms % 2:
            raise ShapeError(f"num_sms is {num_sms}; it must be positive and even.")
        cls.num_sms = num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """The current stream up to here, as an event."""
        return EventOverlap(EventHandle())

    def check(self) -> None:
        """Synchronise and raise what went wrong on the device: PeerTimeout, RoutingError."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self._engine is not None:
            self._engine.check()

    def destroy(self) -> None:
        """Give the memory back. Collective: no rank may still be in a call. Twice is harmless."""
        if self._engine is not None:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self._engine.free()
            self._engine = None

    # --- Checks ------------------------------------------------------------------------------

    def _ready(self, previous_event: EventOverlap | None) -> Engine:
        if self._engine is None:
            raise BackendError("this Buffer was destroyed; make a new one.")
        self._engine.check()
        if previous_event is not None:
            previous_event.current_stream_wait()
        return self._engine

    def _after_call(self) -> None:
        if self.options.debug:
            self.check()

    def _check_rows(self, name: str, rows: torch.Tensor, num_rows: int | str = "T") -> None:
        device = None if self.backend == "collective" else self.device
        check_tensor(name, rows, [num_rows, "H"], PAYLOAD_DTYPES, device)
        if rows.shape[1] == 0:
            raise ShapeError(f"{name} has shape {list(rows.shape)}; H must be positive.")
        check_no_grad(**{name: rows})

    def _check_experts(self, num_experts: int) -> None:
        if num_experts <= 0 or num_experts % self.group_size:
            raise ShapeError(
                f"num_experts is {num_experts}; it must be a positive multiple of the "
                f"{self.group_size} ranks. Pad with experts that no token is routed to."
            )

    def _check_topk(
        self, topk_idx: torch.Tensor, num_experts: int, num_tokens: int | str = "T"
    ) -> None:
        self._check_experts(num_experts)
        device = None if self.backend == "collective" else self.device
        check_tensor("topk_idx", topk_idx, [num_tokens, "K"], [torch.int64], device)
        if topk_idx.shape[1] == 0:
            raise ShapeError("topk_idx has shape [T, 0]; K must be positive.")


def _device() -> torch.device:
    if torch.cuda.is_available() and not INTERPRETED:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a copy of it, contiguous and at a multiple of 16 bytes."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _event(recorded: bool) -> EventOverlap:
    return EventOverlap(EventHandle()) if recorded else EventOverlap()


def _as_handle(handle: tuple[torch.Tensor, ...]) -> Handle:
    if len(handle) != len(Handle._fields):
        raise ShapeError(
            f"handle has {len(handle)} items; it must be the {len(Handle._fields)} tensors that "
            "dispatch returned."
        )
    return Handle(*handle)
