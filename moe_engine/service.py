"""What a Buffer has beside its verbs: events, its stream, its memory, copies, a first use."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

import torch
import torch.distributed as dist

from . import checks
from .agreement import Wishes
from .device.lang import INTERPRETED
from .engines.base import Engine, verb
from .engines.kernel import KernelEngine
from .engines.low_latency import LowLatency
from .errors import (
    BackendError,
    CapacityError,
    MoeEngineError,
    OutOfStep,
    PeerTimeout,
    ShapeError,
    TooManyTokens,
    VerbsNotThereYet,
)
from .events import EventHandle, EventOverlap
from .layer_config import LayerChoices, LayerConfig
from .options import Options, Programs
from .streams import CallStreams
from .symm import SymmetricTensor, allocate, exchange
from .symm.ring import Ring, RingLayout
from .symm.slots import ReturnRowLayout, SlotLayout, Slots

T = TypeVar("T")
LEAVE_OUT_OF_STEP = TooManyTokens, OutOfStep
"""Errors before a call's first launch that other ranks do not raise alike."""
forks = 0
"""How often this process was forked from one that had imported this."""


def _note_fork() -> None:
    global forks
    forks += 1


os.register_at_fork(after_in_child=_note_fork)


class Service(VerbsNotThereYet):
    """The part of `Buffer` that sends nothing of its own, but for `warmup`."""

    backend: str
    device: torch.device
    group_size: int
    options: Options
    _engine: Engine | None
    _forks: int
    _low_latency: LowLatency | None
    _streams: CallStreams
    _unreleased: torch.Tensor | None

    if TYPE_CHECKING:
        combine: Any
        dispatch: Any
        get_dispatch_layout: Any

        def _ready(self, sends: bool = True) -> Engine: ...

    def __copy__(self) -> Self:
        """A Buffer is shared by the copies of what holds it: memory of all ranks belongs to it."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise BackendError(
            "a Buffer cannot be pickled or saved: it is memory that ranks share. Save a module's "
            "state_dict(), and make a Buffer on each rank where it is loaded."
        )

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether kernels are compiled for sm_90 or later here: they are for the GPU that is
        there."""
        return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)

    @staticmethod
    def capture() -> EventOverlap:
        """The current stream up to here, as an event."""
        return EventOverlap(EventHandle())

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream of asynchronous calls, of high priority, this Buffer's own. BackendError on a
        CPU, which has no streams."""
        return self._streams.comm_stream()

    def warmup(
        self, hidden: int, num_experts: int, num_topk: int, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        """Compile on all ranks together what dispatch and combine of this shape need. Collective.

        Without it the first call of a shape does so, under a deadline 5 minutes longer.
        """
        checks.check_at_least(1, hidden=hidden, num_topk=num_topk)
        checks.check_dtype("dtype", dtype, checks.PAYLOAD_DTYPES)
        x = torch.empty(0, hidden, dtype=dtype, device=self.device)
        idx = torch.empty(0, num_topk, dtype=torch.int64, device=self.device)
        per_rank, _, per_expert, in_rank, _ = self.get_dispatch_layout(idx, num_experts)
        rows, _, weights, _, handle, _ = self.dispatch(
            x, None, per_rank, None, in_rank, per_expert, idx, idx.float()
        )
        self.dispatch(x, handle)
        for topk_weights in (None, weights):
            self.combine(rows, handle, topk_weights)
        self.check()

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: Sequence[int] | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> torch.Tensor:
        """This rank's ring of slots from byte `offset` on, as `dtype`: `size`, or all in one row.

        To be read only: peers that are ahead may already have written the next call's rows there.
        It is the normal calls' memory, use_rdma_buffer or not. CapacityError for more than that.
        """
        engine = self._ready(sends=False)
        if not isinstance(engine, KernelEngine):
            raise BackendError(f"a Buffer with backend {self.backend!r} has no memory of its own.")
        ring = engine.slots.block.local[engine.slots.layout.slots :]
        return checks.memory_view(ring, dtype, size, offset)

    def layer_config(self, w_gate_up: torch.Tensor, num_topk: int) -> LayerConfig:
        """How `moe_ffn` runs with experts w_gate_up [L, 2I, H]: as `Options.layer` says, else what
        `moe-engine tune` had measured when this Buffer was made, as rank 0 read it, else what the
        model of `layer_config.py` predicts to be fastest."""
        engine = self._ready()
        if not isinstance(engine, KernelEngine):
            raise BackendError(
                "a collective Buffer runs its layers step by step; only Buffers with kernels "
                "choose. Make it with backend='auto' where GPUs see each other's memory."
            )
        shape = ["L", "2I", "H"]
        checks.check_tensor("w_gate_up", w_gate_up, shape, checks.PAYLOAD_DTYPES, self.device)
        num_topk = checks.check_int("num_topk", num_topk, 1)
        if 0 in w_gate_up.shape:
            raise ShapeError(f"w_gate_up has shape {list(w_gate_up.shape)}; no size may be 0.")
        row = ReturnRowLayout(w_gate_up.shape[2] * w_gate_up.itemsize, num_topk)
        return engine.layer_config(w_gate_up, row)

    @verb
    def check(self) -> None:
        """Synchronise and raise what went wrong: PeerTimeout, a call that did not match or was
        abandoned, RoutingError."""
        self._check_process()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for engine in self._engines():
            engine.check()
        for engine in self._engines():
            engine.check_ids()

    def _engines(self) -> list[Engine | LowLatency]:
        """What this Buffer has, as long as it is not destroyed."""
        return [engine for engine in (self._engine, self._low_latency) if engine is not None]

    def _finish(self, result: T) -> T:
        """The `result` of a call; RoutingError with it for ids that were known to be bad before the
        call began. With Options.debug waits, and raises what went wrong in this call too."""
        if self.options.debug:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            for engine in self._engines():
                engine.check()
        for engine in self._engines():
            engine.check_ids(result)
        return result

    def _break_off(self, error: BaseException) -> None:
        """End the calls of this Buffer on all ranks where an error leaves this one out of step.

        Arguments that are refused before the first launch leave it in step, as all ranks refuse
        them alike; all else that breaks off a call does not. The others are told, unless they
        find out by themselves, as of a lost rank, or have told this one.
        """
        contexts = [context for engine in self._engines() for context in engine.contexts()]
        broken = next((one for one in contexts if one.step is not None or one.has_ended), None)
        leaves_others = self.group_size > 1 and isinstance(error, LEAVE_OUT_OF_STEP)
        is_refusal = isinstance(error, MoeEngineError) and not leaves_others
        if not contexts or contexts[0].has_told or (broken is None and is_refusal):
            return
        kind, text = (broken or contexts[0]).notice(error)
        knows = isinstance(error, PeerTimeout) or any(one.was_told for one in contexts)
        for context in contexts:
            cause = None if broken is None else broken.ended
            context.abandon(kind, text, not knows and not context.shrinks, cause)

    def destroy(self) -> None:
        """Give the memory back. Collective: no rank may still be in a call. Twice is harmless."""
        self._check_process()
        if self._engine is not None:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self._engine.free()
            self._engine = None
            self._streams.uses("slots")
            if self._low_latency is not None:
                self._low_latency.free()
                self._low_latency = None
                self._streams.uses("ring")

    def _check_process(self) -> None:
        if self._forks != forks:
            raise BackendError(
                "this Buffer was made before this process was forked, and belongs to its parent; "
                "make a Buffer here, or start ranks by spawn."
            )


def default_device() -> torch.device:
    """The current GPU, or the CPU where kernels are interpreted."""
    if torch.cuda.is_available() and not INTERPRETED:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


Where = tuple[dist.ProcessGroup | None, int, str, torch.device, float, CallStreams]
"""A Buffer's group, rank, backend, device, deadline and streams: nothing that knows the Buffer,
which would outlive its last name."""


def new_engines(
    where: Where, num_ranks: int, wishes: Wishes, programs: Programs
) -> tuple[KernelEngine, LowLatency | None]:
    """The engines with kernels, on memory of all ranks. Collective."""
    num_slots, low_latency = wishes.options.num_slots, None
    layout = SlotLayout.fit(wishes.num_bytes, num_ranks, num_slots)
    if wishes.ring_bytes:
        ring = RingLayout.fit(wishes.ring_bytes, num_ranks, num_slots)
        low_latency = LowLatency(new_ring(*where, ring), wishes.enable_shrink)
    layers = LayerChoices(wishes.options.layer, wishes.measured)
    most, new = wishes.options.max_tokens, partial(new_slots, *where, wishes.number)
    return KernelEngine(layout, new, programs, most, layers), low_latency


def new_ring(
    group: dist.ProcessGroup | None,
    rank: int,
    backend: str,
    device: torch.device,
    timeout_s: float,
    streams: CallStreams,
    layout: RingLayout,
) -> Ring:
    """Low-latency memory of `layout` on all ranks, which the streams are told of. Collective."""
    new_block = partial(allocate, group, backend=backend, device=device, timeout_s=timeout_s)
    ring = Ring(new_block, layout, rank, timeout_s)
    streams.uses("ring", ring.block.local, ring.context.fields)
    return ring


def new_slots(
    group: dist.ProcessGroup | None,
    rank: int,
    backend: str,
    device: torch.device,
    timeout_s: float,
    streams: CallStreams,
    buffer: int,
    layout: SlotLayout,
    was_captured: bool,
    epoch: int,
) -> Slots:
    """Memory of `layout` on all ranks, which the streams are told of. Collective. CapacityError, on
    all ranks, where one of them has captured the memory that this would replace. buffer, epoch: see
    `DeviceContext`."""

    def new_block(num_bytes: int, was_captured: bool) -> SymmetricTensor:
        captured = exchange(group, lambda: was_captured, "replacing memory", timeout_s)
        if any(captured):
            ranks = ", ".join(str(rank) for rank, one in enumerate(captured) if one)
            raise CapacityError(
                f"this call needs {num_bytes} bytes, more than this Buffer has, and it cannot "
                f"grow: CUDA graphs captured on ranks {ranks} use its memory. Make a new Buffer "
                "with the bytes of Buffer.size_hint(...), or for as many tokens."
            )
        return allocate(group, num_bytes, backend, device, timeout_s)

    slots = Slots(new_block, layout, rank, timeout_s, was_captured, buffer, epoch)
    streams.uses("slots", slots.block.local, slots.context.fields)
    return slots
