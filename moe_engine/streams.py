"""Which CUDA stream a Buffer's calls run on, what they wait for, and events in DeepEP's form.

A call with async_finish runs on the Buffer's own stream, any other on the caller's current one.
Calls of one Buffer share its memory, so each begins after the one before has ended, on whatever
stream that was.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from types import TracebackType
from typing import Any, Self

import torch

from .callers import Callers
from .checks import check_flag
from .device.lang import INTERPRETED
from .errors import BackendError, DtypeError, ShapeError
from .launch import DEFAULT_STREAM
from .torch_privates import current_device, raw_stream

_one_call_at_a_time = threading.RLock()
"""One lock for all Buffers, since autograd calls from a thread of its own."""

# --- Events --------------------------------------------------------------------------------------


class EventHandle:
    """A point on the stream that is current when this is made: the end of all work which that
    stream holds by then. On a CPU there is nothing to wait for."""

    def __init__(self) -> None:
        self.event: torch.cuda.Event | None = None
        if not INTERPRETED and _has_gpu():
            self.event = torch.cuda.Event()
            self.event.record(_current_stream())

    def current_stream_wait(self) -> None:
        """Make the current stream wait for this point."""
        if self.event is not None:
            _current_stream().wait_event(self.event)


class EventOverlap:
    """An event, or none, and the tensors that must live until it has been waited for.

    `event` is an EventHandle, or another EventOverlap, whose wait is then part of this one's. It
    may be assigned later; without one, a wait waits for nothing. As a context manager it waits on
    exit, so that the block overlaps with what the event ends:

        with event: ...                        # then wait
        with event(release_handle=True): ...   # then wait, and drop the event and the tensors
    """

    _release_on_exit = False
    _hooks: tuple[Callable[[], Any], ...] = ()

    def __init__(
        self,
        event: EventHandle | EventOverlap | None = None,
        extra_tensors: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self, release_handle: bool = False) -> Any:
        """Make the current stream wait; then run the hooks. `release_handle` drops the event.

        Returns what the first hook returned. Without a hook it returns what the wait of an
        EventOverlap in this one returned, or None.
        """
        check_flag("release_handle", release_handle)
        result = None
        if self.event is not None:
            if not isinstance(self.event, EventHandle | EventOverlap):
                raise DtypeError(
                    f"event is a {type(self.event).__name__}; it must be a moe_engine.EventHandle, "
                    "an EventOverlap, or None."
                )
            result = self.event.current_stream_wait()
        if release_handle:
            self.event = self.extra_tensors = None
        hooks, self._hooks = self._hooks, ()
        results = [hook() for hook in hooks]
        return results[0] if results else result

    def wait(self) -> Any:
        """`current_stream_wait()`."""
        return self.current_stream_wait()

    def register_hook_after_wait(self, hook_after_wait: Callable[[], Any]) -> None:
        """Call `hook_after_wait` once, after the next wait."""
        if not callable(hook_after_wait):
            raise DtypeError(
                f"hook_after_wait is a {type(hook_after_wait).__name__}; it must be a function."
            )
        self._hooks += (hook_after_wait,)

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """This event; `release_handle` is for the `with` block that follows."""
        check_flag("release_handle", release_handle)
        self._release_on_exit = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        release, self._release_on_exit = self._release_on_exit, False
        self.current_stream_wait(release)


# --- Calls ---------------------------------------------------------------------------------------


class Call:
    """One call of a Buffer, which runs while this context is open. See `CallStreams.call`."""

    _runs_on: torch.cuda.Stream | None = None
    _caller: torch.cuda.Stream | None = None
    _switch: AbstractContextManager[Any] | None = None
    _previous: EventHandle | None = None
    _also: EventHandle | None = None
    _event: EventOverlap | None = None
    _is_plain, is_async = True, False
    stream: torch.cuda.Stream | None = None
    """The one on which it runs; a CPU has none."""

    def __init__(self, streams: CallStreams, caller: int | None):
        self._streams, self._caller_number = streams, caller

    @property
    def event(self) -> EventOverlap:
        """What ends the call, if it is asynchronous."""
        if self._event is None:
            self._event = EventOverlap()
        return self._event

    def ordered(
        self, previous: EventHandle | None, is_async: bool, also: EventHandle | None
    ) -> Self:
        """The call, which begins after these events."""
        self._previous, self._also, self.is_async = previous, also, is_async
        self._is_plain = False
        return self

    def reads(self, *tensors: torch.Tensor | None) -> None:
        """Keep the memory of these arguments from being reused before the call has ended, which
        those of a call that is not `is_async` need not be told."""
        record(tensors, self._runs_on)

    def returns(self, *tensors: torch.Tensor | None) -> None:
        """Keep the memory of these results from being reused while the caller's stream uses
        them."""
        record(tensors, self._caller)

    def __enter__(self) -> Self:
        _one_call_at_a_time.acquire()
        streams, caller = self._streams, self._caller_number
        try:
            streams.callers.running = streams.callers.of_block() if caller is None else caller
            if streams.is_on_gpu:
                self.stream = stream = streams.current_stream()
                is_current = current_device() == streams.device_index
                if not (self._is_plain and is_current and stream is streams.only_stream):
                    self._begin(stream)
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None and not (self._is_plain and self.stream is self._streams.only_stream):
                self._end()
        finally:
            if self._switch is None:
                _one_call_at_a_time.release()
            else:
                self._leave()

    def _begin(self, caller: torch.cuda.Stream) -> None:
        streams, stream = self._streams, caller
        if self.is_async:
            stream = streams.comm_stream()
            self._runs_on, self._caller = stream, caller
        if self.is_async or current_device() != streams.device_index:
            self._switch = on_stream(stream)
            self._switch.__enter__()
        if self._previous is not None:
            self._previous.current_stream_wait()
        elif self.is_async:
            stream.wait_stream(caller)
        if self._also is not None:
            self._also.current_stream_wait()
        streams.follow_last_call(stream)
        self.stream = stream

    def _end(self) -> None:
        end = None
        if self.is_async:
            self.event.event = end = EventHandle()
        if self.stream is not None:
            self._streams.note_end(self.stream, end)

    def _leave(self) -> None:
        try:
            if self._switch is not None:
                self._switch.__exit__(None, None, None)
        finally:
            _one_call_at_a_time.release()


class CallStreams:
    """The streams of one Buffer's calls, and its callers."""

    def __init__(self, device: torch.device):
        self.callers = Callers()
        self.device, self.is_on_gpu = device, device.type == "cuda"
        self.device_index: int = device.index
        self._known: dict[int, torch.cuda.Stream] = {}  # by handle
        self._memory: dict[str, tuple[torch.Tensor, ...]] = {}
        self._comm: torch.cuda.Stream | None = None
        # That of the last eager call, where one was recorded. It may be a caller's, so another one
        # is recorded at the end of a call that gives its caller none.
        self._end: torch.cuda.Event | None = None
        self._own_event: torch.cuda.Event | None = None
        self._records_ends = False
        self.only_stream: torch.cuda.Stream | None = None
        """The default stream, while all eager calls have run on it."""
        self._last_eager: torch.cuda.Stream | None = None
        self._last_captured: torch.cuda.Stream | None = None

    def uses(self, name: str, *memory: torch.Tensor) -> None:
        """Declare memory that all kernels of the Buffer use, in addition to their arguments. It
        replaces what was declared under this `name` before."""
        self._memory[name] = memory
        record(memory, self._comm)

    def comm_stream(self) -> torch.cuda.Stream:
        """The Buffer's own stream, of high priority, made when first asked for. BackendError on a
        CPU, which has none."""
        if not self.is_on_gpu:
            raise BackendError(
                "this Buffer lives on the CPU, where there are no streams; every call has ended "
                "when it returns."
            )
        if self._comm is None:
            self._comm = torch.cuda.Stream(self.device, priority=-1)
            self._records_ends, self.only_stream = True, None
            for memory in self._memory.values():
                record(memory, self._comm)
        return self._comm

    def current_stream(self) -> torch.cuda.Stream:
        """The caller's stream on the Buffer's device."""
        known = self._known.get(handle := raw_stream(self.device_index))
        if known is None:
            known = self._known[handle] = _current_stream_on(self.device_index)
        return known

    def call(
        self,
        previous_event: EventOverlap | EventHandle | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        also: EventHandle | None = None,
        caller: int | None = None,
    ) -> Call:
        """A context in which one call runs: after `previous_event`, or else after all that the
        current stream holds; after the event `also`; and after the Buffer's last call. The first
        call that does not run on the default stream, where others did, runs after all that this
        one holds.

        With async_finish it runs on `comm_stream()`, and `event` of the Call ends it; without, it
        runs on the current stream, and `event` is empty. Results of an asynchronous call always
        come from the comm stream's memory, whatever allocate_on_comm_stream says; as in DeepEP that
        flag needs async_finish and a previous_event.

        caller: see `Callers`; None is the one of the block, see `calls_tagged`.
        """
        call = Call(self, caller)
        if async_finish is allocate_on_comm_stream is False and previous_event is also is None:
            return call
        check_flag("async_finish", async_finish)
        check_flag("allocate_on_comm_stream", allocate_on_comm_stream)
        previous = _handle_of(previous_event)
        if allocate_on_comm_stream and (previous is None or not async_finish):
            raise ShapeError(
                "allocate_on_comm_stream needs async_finish=True and a previous_event that holds "
                "an event; results would be written before the current stream has let go of them."
            )
        return call.ordered(previous, bool(async_finish), also)

    def follow_last_call(self, stream: torch.cuda.Stream) -> None:
        """Make `stream` wait for the Buffer's last call, if that ran on another one.

        A captured call and an eager one cannot wait for each other's events: the order of a graph's
        replays is the caller's. So each waits for the last one of its own sort. Within captures
        only streams can be waited for, since the event may be of an earlier graph.
        """
        eager, captured = self._last_eager, self._last_captured
        if (eager is None or eager is stream) and (captured is None or captured is stream):
            return
        capturing = torch.cuda.is_current_stream_capturing()
        last = captured if capturing else eager
        if last is None or last == stream:
            return
        if not capturing:
            if self._end is None:
                self._record_end(last)
            assert self._end is not None
            stream.wait_event(self._end)
            return
        with on_stream(last):
            in_this_capture = torch.cuda.is_current_stream_capturing()
        if in_this_capture:
            stream.wait_stream(last)

    def note_end(self, stream: torch.cuda.Stream, end: EventHandle | None = None) -> None:
        """A call has ended on a stream, which is current. `end`: the event that ends it, if it has
        one already.

        The default stream is never captured, and lives as long as the process. So while all calls
        run on it, no event ends them: its own order lets each end before the next begins. The first
        call on another stream records one there, after the launches of all calls before it, and
        waits for it, and so for all else that the default stream holds by then.
        """
        if not self._records_ends and stream.cuda_stream == DEFAULT_STREAM:
            self._last_eager, self._end, self.only_stream = stream, None, stream
        elif torch.cuda.is_current_stream_capturing():
            self._last_captured = stream
        elif end is not None:
            self._last_eager, self._end = stream, end.event
        else:
            self._record_end(stream)

    def _record_end(self, stream: torch.cuda.Stream) -> None:
        """Let calls on other streams wait for what this one holds by now, and ends of later calls
        be recorded at once."""
        self._records_ends, self.only_stream = True, None
        self._own_event = self._own_event or torch.cuda.Event()
        self._own_event.record(stream)
        self._last_eager, self._end = stream, self._own_event


class SideStream:
    """A second stream, for what runs concurrently with the current one. A CPU has none: there all
    runs in the order in which it is launched."""

    def __init__(self, device: torch.device):
        self._device, self._is_ahead = device, False
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def after_current(self) -> Iterator[None]:
        """What the block launches runs on it, after what the current stream holds by now. Tensors
        that the current stream uses must not be allocated in the block."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._is_ahead = True
        with on_stream(self._stream):
            yield

    def join(self) -> None:
        """The current stream goes on after what this one holds, if it holds more than at the last
        join: in a capture only a stream that is part of it can be waited for."""
        if self._stream is not None and self._is_ahead:
            self._is_ahead = False
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


class ConcurrentReads:
    """Reads results on the host while the GPU runs what was launched after them."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._ready = torch.cuda.Event() if self._stream else None

    def mark(self) -> None:
        """Let the next `read` wait for what the current stream holds by now, and for no more."""
        if self._ready:
            self._ready.record(_current_stream())

    def read(self, make: Callable[[], torch.Tensor]) -> list[int]:
        """The items of the tensor that `make()` computes from what was written by the mark."""
        if self._stream is None or self._ready is None:
            return make().tolist()
        with on_stream(self._stream):
            self._stream.wait_event(self._ready)
            return make().tolist()


def _handle_of(event: EventOverlap | EventHandle | None) -> EventHandle | None:
    while isinstance(event, EventOverlap):
        event = event.event
    if event is not None and not isinstance(event, EventHandle):
        raise DtypeError(
            f"previous_event is or holds a {type(event).__name__}; it must be an EventOverlap, an "
            "EventHandle or None."
        )
    return event


# --- Streams of torch ----------------------------------------------------------------------------
# torch.cuda.stream() and what takes the current device where none is given ask the driver each time
# how many devices there are, and an object for the current stream takes 3 us: an event took the
# host 15 us so, and takes 4 without.

_has_gpu = cache(torch.cuda.is_available)

_known_streams: dict[tuple[int, int], torch.cuda.Stream] = {}
"""By device and handle, all that were current. torch has 32 of each priority."""


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream that is current on a GPU; a CPU has none."""
    return _current_stream_on(device.index) if device.type == "cuda" else None


def _current_stream_on(index: int) -> torch.cuda.Stream:
    """The stream that is current on the device of this number."""
    known = _known_streams.get(key := (index, raw_stream(index)))
    if known is None:
        known = _known_streams[key] = torch.cuda.current_stream(index)
    return known


def _current_stream() -> torch.cuda.Stream:
    """The stream that is current on the current device."""
    return _current_stream_on(current_device())


def on_stream(stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
    """What the block launches runs on this stream."""
    if stream.device_index != current_device():
        return torch.cuda.stream(stream)
    return _OnStream(stream)


class _OnStream:
    """`on_stream` on the current device."""

    def __init__(self, stream: torch.cuda.Stream):
        self._stream = stream

    def __enter__(self) -> None:
        self._previous = _current_stream_on(self._stream.device_index)
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        torch.cuda.set_stream(self._previous)


def is_captured(tensor: torch.Tensor) -> bool:
    """Whether calls on this tensor's device are being captured in a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def record(tensors: Iterable[torch.Tensor | None], stream: torch.cuda.Stream | None) -> None:
    """Keep the memory of tensors from being reused before what `stream` holds by then has ended."""
    if stream is not None:
        for tensor in tensors:
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(stream)
