"""The life of a Buffer: its ranks meet and allocate, make calls in step, and free the memory."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, NoReturn, ParamSpec, Self, TypeVar
from weakref import WeakMethod, WeakValueDictionary

import torch
import torch.distributed as dist

from .agreement import Group, Settings, agree, check_settings
from .checks import memory_view
from .engines.allocation import Allocator
from .engines.base import Engine
from .engines.collective import CollectiveEngine
from .engines.hooked_calls import HookedCalls
from .engines.kernel_verbs import KernelVerbs
from .errors import (
    BackendError,
    CapacityError,
    MoeEngineError,
    OutOfStep,
    PeerTimeout,
    RoutingError,
    TooManyTokens,
)
from .options import DEFAULT_OPTIONS, Options, size_hint
from .streams import CallStreams, EventOverlap
from .symm import choose_backend, resolve_device
from .symm.device_context import DeviceContext
from .symm.slots import SlotLayout
from .torch_privates import has_modes, without_modes
from .utils import is_in_backward, untraced

LEAVE_OUT_OF_STEP = TooManyTokens, OutOfStep
"""Errors that one rank raises before a call's first launch, and the other ranks do not."""

P = ParamSpec("P")
T = TypeVar("T")
B = TypeVar("B", bound="BufferLifecycle")


def verb(method: Callable[Concatenate[B, P], T]) -> Callable[Concatenate[B, P], T]:
    """A method that all ranks call. Its result passes `_finish` where that has anything to do; the
    other ranks are told of an error that breaks it off on this one, and of a call that it refuses.
    torch.compile does not trace it, and no mode sees its operators."""
    return _verb(method, sends=True)


def local_verb(method: Callable[Concatenate[B, P], T]) -> Callable[Concatenate[B, P], T]:
    """A `verb` that sends nothing: a rank that is refused one misses no call of the others."""
    return _verb(method, sends=False)


def _verb(method: Callable[Concatenate[B, P], T], sends: bool) -> Callable[Concatenate[B, P], T]:
    @untraced
    @wraps(method)
    def call(self: B, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if has_modes():
            with without_modes():
                return call(self, *args, **kwargs)
        was_made = False
        try:
            result = method(self, *args, **kwargs)
            was_made = True
            return self._finish(result) if self._with_bad_ids or self.options.debug else result
        except BaseException as raised:
            error, trace = self._explained(raised), raised.__traceback__
            binds = trace is not None and trace.tb_next is not None  # else an argument is missing
            if not (binds and self._break_off(error)) and sends and not was_made:
                self.note_refusal(method.__name__, error)
            if error is not raised:
                raise error from None
            raise

    return call


class BufferLifecycle:
    """What a Buffer is without its verbs. It makes the engines, which carry the verbs out.

    backend, device, group, group_size, options, rank: as agreed with the other ranks. id: the
    number of this Buffer in this process, by which operators of torch.library find it.
    takes_sub_batches: whether a layer may have more tokens than one call takes (`passes.py`).
    """

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
        self._forks = forks
        members, device = Group.of(group), resolve_device(None)
        given = comm, backend, num_nvl_bytes, num_rdma_bytes, low_latency_mode, enable_shrink

        def make_settings() -> Settings:
            return check_settings(members, device, *given, options)

        settings = agree(members, make_settings)
        self.group, self.rank, self.group_size = members.process_group, members.rank, members.size
        self.device, self.backend = device, backend
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.enable_shrink = low_latency_mode, settings.enable_shrink
        self.explicitly_destroy, self.options = explicitly_destroy, settings.options
        self._engine: Engine | None = None
        self._low_latency: HookedCalls | None = None
        self._engines: list[Engine | HookedCalls] = []
        self._with_bad_ids: list[Engine | HookedCalls] = []
        self.num_nodes = 1
        self._unreleased: torch.Tensor | None = None  # x of a dispatch in place, until release()
        self._streams = CallStreams(device)
        self._in_flight: dict[int, EventOverlap] = {}  # by the address of what a call returned
        with torch.inference_mode(False):  # as calls outside it store to this
            self._overflow = torch.zeros(1, dtype=torch.int32, device=device)  # `_note_overflow`
        self._before_destroy: list[WeakMethod[Callable[[], None]]] = []
        self.id = next(_ids)
        _buffers[self.id] = self
        if backend != "collective":
            self.backend = choose_backend(self.group, backend, device, or_collective=True)
        if self.backend == "collective":
            self._engine = CollectiveEngine(self.group, self._streams.callers)
        else:
            allocator = Allocator(members, settings, self.backend, device, self._streams)
            engine, self._low_latency = allocator.new_engines()
            self._engine, self.num_nodes = engine, engine.slots.layout.num_nodes
        self._engines += [one for one in (self._engine, self._low_latency) if one is not None]
        most_tokens = self.options.max_tokens or 0
        self.takes_sub_batches = self.backend != "collective" and most_tokens > SlotLayout.most_rows

    size_hint = staticmethod(size_hint)

    def destroy(self) -> None:
        """Give the memory back. Collective: no rank may still be in a call. Twice is harmless. What
        the last calls did wrong is told by `check()`, before this, and not by this."""
        self._check_process()
        if self._engines and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        while self._before_destroy:
            if (free := self._before_destroy.pop()()) is not None:
                free()
        for engine in self._engines:
            engine.free()
        self._engine, self._low_latency = None, None
        self._engines, self._with_bad_ids = [], []
        self._unreleased = None
        self._streams.uses("slots")
        self._streams.uses("ring")

    @property
    def is_destroyed(self) -> bool:
        """Whether `destroy` has given the memory back."""
        return self._engine is None

    @property
    def has_fused_layers(self) -> bool:
        """Whether a layer is one call, on ranks of one node; else it is a dispatch, products and a
        combine, and saves no pre-activations."""
        return self.backend != "collective" and self.num_nodes == 1

    def new_tag(self, name: str) -> str:
        """A tag for one more layer of this name, which says how many of the name this Buffer has.
        Ranks that ask for tags in the same order get the same ones; see `moe_engine.moe_ffn`."""
        return self._streams.callers.new_tag(name)

    # --- Work that holds calls ---------------------------------------------------------------

    @verb
    def launch(self, work: Callable[[], T]) -> T:
        """`work()`, which launches calls of this Buffer without calling its verbs, as the replay of
        a CUDA graph does; or which captures such a graph. Collective, as these calls are.

        It raises what a verb raises before and after its own launches: what has ended earlier
        calls, replayed ones included, and BackendError where the Buffer was destroyed. The other
        ranks are told of an error in `work`. The order of `work` and of calls on other streams is
        the caller's.
        """
        self._ready()
        return work()

    def before_destroy(self, free: Callable[[], None]) -> None:
        """Let `destroy` call the method `free` before it gives the memory back, if its object lives
        by then: what holds graphs of this Buffer's calls frees them."""
        self._before_destroy.append(WeakMethod(free))

    # --- Copies ------------------------------------------------------------------------------

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

    # --- Streams and memory ------------------------------------------------------------------

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream of asynchronous calls, of high priority, this Buffer's own. BackendError on a
        CPU, which has no streams."""
        return self._streams.comm_stream()

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: Sequence[int] | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> torch.Tensor:
        """This rank's ring of slots from byte `offset` on, as `dtype`: `size`, or all in one row.

        To be read only: peers that are ahead may already have written the next call's rows to it.
        It is the normal calls' memory, use_rdma_buffer or not. CapacityError for more than that.
        """
        engine = self._ready(sends=False)
        if not isinstance(engine, KernelVerbs):
            raise BackendError(f"a Buffer with backend {self.backend!r} has no memory of its own.")
        ring = engine.slots.block.local[engine.slots.layout.slots :]
        return memory_view(ring, dtype, size, offset)

    # --- Checks ------------------------------------------------------------------------------

    @local_verb
    def check(self) -> None:
        """Synchronise and raise what went wrong: PeerTimeout, a call that did not match or was
        abandoned, RoutingError; CapacityError where `ops.dispatch` had more rows than max_rows;
        BackendError after `destroy`."""
        self._check_process()
        if self.is_destroyed:
            raise BackendError("this Buffer was destroyed; check() it before.")
        self._synchronise()

    def _ready(self, sends: bool = True) -> Engine:
        """The engine, if it can go on: with rows in place, only for a call that sends nothing."""
        if self._forks != forks:
            self._check_process()
        if self._engine is None:
            raise BackendError("this Buffer was destroyed; make a new one.")
        self._with_bad_ids = [engine for engine in self._engines if engine.check()]
        if sends and self._unreleased is not None:
            raise BackendError(
                "the last dispatch left its rows in place; call release() when they are read."
            )
        return self._engine

    def _finish(self, result: T) -> T:
        """The `result` of a call; RoutingError with it for ids that were known to be bad before the
        call began, unless autograd runs: that would end a backward on this rank alone, whose other
        calls the other ranks wait for. With Options.debug waits, and raises what went wrong in this
        call too."""
        if self.options.debug:
            self._synchronise()
        if self._with_bad_ids and not is_in_backward():
            for engine in self._with_bad_ids:
                engine.check_ids(result)
        return result

    def _synchronise(self) -> None:
        """Wait for the device, and raise what ended a call."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._with_bad_ids = [engine for engine in self._engines if engine.check()]
        num_rows = int(self._overflow)
        if num_rows:
            self._overflow.zero_()
            raise CapacityError(
                f"rank {self.rank}: a dispatch needed {num_rows} expert rows more than max_rows; "
                "their tokens were not sent to these experts. Pass a larger max_rows, and repeat "
                "what was computed since the last check. The Buffer can go on."
            )

    def _note_overflow(self, overflow: torch.Tensor) -> None:
        """Let the next `check` tell of expert rows for which there was no room, int32 [1]."""
        if self._overflow.device != overflow.device:
            self._overflow = self._overflow.to(overflow.device)
        torch.maximum(self._overflow, overflow, out=self._overflow)

    def note_refusal(self, verb: str, error: BaseException) -> None:
        """Count a call that `verb` refused with this error before it sent anything, so that later
        calls of a rank that the others did not refuse theirs are out of step. An error that passes
        several verbs counts once; one that ends the calls, or comes after a call, does not count.
        """
        if not isinstance(error, MoeEngineError | TypeError) or isinstance(error, RoutingError):
            return
        if getattr(error, "noted_by", None) == self.id or self._engine is None:
            return
        if any(engine.has_ended or engine.has_sent for engine in self._engines):
            return
        with suppress(AttributeError):
            error.noted_by = self.id  # type: ignore[union-attr]
        self._streams.callers.refuse(verb.lstrip("_"), error)
        with self._streams.call():
            for context in self._contexts():
                context.refuse()

    def _contexts(self) -> list[DeviceContext]:
        return [context for engine in self._engines for context in engine.contexts()]

    def _explained(self, error: BaseException) -> BaseException:
        """What to raise for an error: OutOfStep where a rank was waited for in vain that has begun
        a call in other memory of this Buffer, so that neither saw the other's."""
        if not isinstance(error, PeerTimeout):
            return error
        contexts = self._contexts()
        ended = next((one for one in contexts if one.ended is error), None)
        if ended is None or (ours := ended.begun_by(self.rank, error.epoch)) is None:
            return error
        for other in contexts:
            theirs = None if other is ended else other.begun_by(error.peer)
            if theirs is not None:
                return ended.end_out_of_step(error.peer, ours, theirs)
        return error

    def _break_off(self, error: BaseException) -> bool:
        """End the calls of this Buffer on all ranks where an error leaves this one out of step.
        Whether they have ended.

        Arguments that are refused before the first launch end nothing, as all ranks may refuse them
        alike; all else that breaks off a call does. The others are told, unless they find out by
        themselves, as of a lost rank, or have told this one.
        """
        contexts = self._contexts()
        broken = next((one for one in contexts if one.step is not None or one.has_ended), None)
        leaves_others = self.group_size > 1 and isinstance(error, LEAVE_OUT_OF_STEP)
        is_refusal = isinstance(error, MoeEngineError) and not leaves_others
        if not contexts or (broken is None and is_refusal):
            return False
        if contexts[0].has_told:
            return True
        kind, text = (broken or contexts[0]).notice(error)
        knows = isinstance(error, PeerTimeout) or any(one.was_told for one in contexts)
        for context in contexts:
            cause = None if broken is None else broken.ended
            context.abandon(kind, text, not knows and not context.shrinks, cause)
        return True

    def _check_process(self) -> None:
        if self._forks != forks:
            raise BackendError(
                "this Buffer was made before this process was forked, and belongs to its parent; "
                "make a Buffer here, or start ranks by spawn."
            )


_ids = itertools.count(1)
_buffers: WeakValueDictionary[int, Any] = WeakValueDictionary()


def live_buffer(buffer_id: int) -> Any:
    """The Buffer with this `id`. BackendError where it is gone."""
    buffer = _buffers.get(int(buffer_id))
    if buffer is None:
        raise BackendError(
            f"buffer_id is {buffer_id}; this process has no such Buffer any more. Keep the Buffer "
            "for as long as calls and backwards use it, and pass buffer.id."
        )
    return buffer


forks = 0
"""How often this process was forked from one that had imported this module."""


def _note_fork() -> None:
    global forks
    forks += 1


os.register_at_fork(after_in_child=_note_fork)
