"""Launches: Triton compiles a kernel, and the driver launches it; or the interpreter runs it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Protocol, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.errors import InterpreterError
from triton.tools.tensor_descriptor import TensorDescriptor

from . import cuda_driver, launch_graph
from .device.lang import INTERPRETED
from .errors import MoeEngineError
from .hardware import has_pdl
from .kernel_bundle import bundle
from .nvshmem_library import linked
from .torch_privates import current_device, raw_stream, returns_of

Grid = tuple[int, ...]
ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}

MOST_STREAMS = 2
"""Streams that have a CUDA graph of a kind of calls each, where these may run concurrently."""

DEFAULT_STREAM = 0
"""The handle of a device's default stream, which is never captured in a CUDA graph."""

_recordings: ContextVar[Recording | None] = ContextVar("recordings", default=None)

Collect = Callable[[Any, Grid, tuple[Any, ...], dict[str, Any]], None]
_collectors: ContextVar[Collect | None] = ContextVar("collectors", default=None)


class Launch(Protocol):
    """A launch that was made, and can be made again on any stream.

    pointers: its arguments that are addresses, as (cells, index, tensor): `cells[index] = address`
    puts other memory in the place of a tensor. numbers: (cells, index) of ints, by the names of the
    arguments.
    """

    pointers: list[tuple[Any, int, torch.Tensor]]
    numbers: dict[str, tuple[Any, Any]]
    name: str

    def __call__(self, stream: int) -> None: ...

    def forget_tensors(self) -> None:
        """Keep no memory from being reused."""


class Recording(TorchDispatchMode):
    """The launches of a block, each with the `step` of a state that it was made at, and the tensors
    that the block allocates, in their order. `computes`: whether torch did anything else in it
    than views, so that the launches are not all. `sized`: by the id of what is allocated, the
    number that its first size is, where that is one. `apart`: ids of what is allocated alone."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.launches: list[tuple[Launch, str | None]] = []
        self.allocated: list[torch.Tensor] = []
        self.sized: dict[int, str] = {}
        self.apart = set[int]()
        self._state = state
        self.computes = self._is_launching = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch asks. True would import its compiler at the first call, which takes seconds; what
        is recorded runs outside compiled code anyway."""
        return False

    @staticmethod
    def current() -> Recording | None:
        """The one that records."""
        return _recordings.get()

    def __enter__(self) -> Self:
        super().__enter__()
        self._token = _recordings.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        _recordings.reset(self._token)
        super().__exit__(*error)

    def of_rows(self) -> list[torch.Tensor]:
        """What is allocated anew for other numbers of rows."""
        return [one for one in self.allocated if id(one) in self.sized]

    def append(self, launch: Launch) -> None:
        """A launch was made."""
        self.launches.append((launch, self._state.step))

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in ALLOCATIONS:
            self.allocated.append(result)
        elif not self._is_launching and not _is_view(function):
            self.computes = True
        return result

    @contextmanager
    def launching(self) -> Iterator[None]:
        """What the interpreter computes is no part of the block."""
        count, self._is_launching = len(self.allocated), True
        try:
            yield
        finally:
            del self.allocated[count:]
            self._is_launching = False


def _is_view(function: Any) -> bool:
    """Whether an operator of torch returns what it was given, seen in another way."""
    returns = returns_of(function)
    return bool(returns) and all(
        one.alias_info is not None and not one.alias_info.is_write for one in returns
    )


def launch(
    kernel: Any, grid: Grid, *arguments: Any, shares_sms: bool = False, **options: Any
) -> None:
    """Launch `kernel` on the current stream, unless the grid is empty. One with an argument PDL is
    a programmatic dependent launch where the GPU has these: it begins when all programs of the
    launch before have called `pdl_launch_dependents`, and sees that launch's stores after its own
    `pdl_wait`.

    shares_sms: programs of a GEMM that begin later may share SMs with those of this launch. An SM
    divides its memory between cache and shared memory as the first program on it prefers, and not
    anew while one runs there. So all launches of a layer prefer shared memory: one that did not
    would keep the GEMM off its SM for as long as what begins there meanwhile runs.
    """
    if 0 in grid:
        return
    options |= _pdl(kernel)
    if (collect := _collectors.get()) is not None:
        collect(kernel, grid, arguments, options)
        return
    one: Launch
    recording = Recording.current()
    if INTERPRETED:
        one = InterpretedLaunch(kernel, grid, arguments, options)
        with nullcontext() if recording is None else recording.launching():
            one(0)
    else:
        function = _function(kernel, grid, arguments, options)
        if shares_sms:
            function.prefer_shared_memory()
        named = dict(zip(kernel.arg_names, arguments, strict=False)) | options
        values = [named[name] for name in kernel.arg_names]
        one = cuda_driver.PackedLaunch(function, kernel.arg_names, grid, values)
        one(current_stream())
    if recording is not None:
        recording.append(one)


def load(kernel: Any, grid: Grid, *arguments: Any, **options: Any) -> None:
    """Compile and load what `launch` takes for these arguments, so that it only launches then. The
    interpreter needs nothing."""
    options |= _pdl(kernel)
    if (collect := _collectors.get()) is not None:
        collect(kernel, grid, arguments, options)
    elif not INTERPRETED:
        _function(kernel, grid, arguments, options)


def _pdl(kernel: Any) -> dict[str, Any]:
    """The options of a kernel's programmatic dependent launch, if it has an argument PDL."""
    if "PDL" not in kernel.arg_names:
        return {}
    return {"PDL": True, "launch_pdl": True} if has_pdl() else {"PDL": False}


def _function(
    kernel: Any, grid: Grid, arguments: Sequence[Any], options: dict[str, Any]
) -> cuda_driver.Function:
    """The compiled kernel for a launch, loaded: from a bundle, else from Triton's cache, else
    compiled now."""
    kernels = bundle()
    if kernels is not None and (found := kernels.find(kernel, arguments, options)):
        return found
    return _loaded(kernel.warmup(*arguments, grid=grid, **linked(kernel), **options))


@functools.cache
def _loaded(compiled: Any) -> cuda_driver.Function:
    """Each kernel that Triton has compiled for a device is loaded once."""
    return cuda_driver.Function(cuda_driver.Binary.of(compiled))


@contextmanager
def collecting(collect: Collect) -> Iterator[None]:
    """Within the block launches are not made: `collect(kernel, grid, arguments, options)` is called
    for each."""
    token = _collectors.set(collect)
    try:
        yield
    finally:
        _collectors.reset(token)


def is_collecting() -> bool:
    """Whether launches are collected in place of being made."""
    return _collectors.get() is not None


def only_launches() -> bool:
    """Whether launches are neither recorded nor collected."""
    return _recordings.get() is None and _collectors.get() is None


def current_stream() -> int:
    """The handle of the current stream; 0 where kernels are interpreted."""
    return 0 if INTERPRETED else raw_stream(current_device())


is_capturing: Callable[[], bool] = (
    torch.cuda.is_current_stream_capturing if torch.backends.cuda.is_built() else lambda: False
)
"""Whether the current stream is being captured in a CUDA graph."""


def stream_of(device: torch.device) -> Callable[[], int]:
    """A function that tells the handle of the stream that is current on this device, 0 on a CPU."""
    if INTERPRETED or device.type != "cuda":
        return lambda: 0
    return functools.partial(raw_stream, device.index)


class Graph(Protocol):
    """Launches that are made as one; see `LaunchGraph`."""

    def __call__(self, stream: int, changed: set[int]) -> bool: ...


def as_graph(launches: Sequence[Any]) -> Graph | None:
    """These launches as one. None where kernels are interpreted, or where the driver is too old;
    and for a single launch, which would lose its overlap with the launches around it."""
    if INTERPRETED or len(launches) < 2:
        return None
    return launch_graph.LaunchGraph(launches)


class Graphs:
    """The launches of a call as one CUDA graph. A graph does not run twice at once. So calls that
    may run concurrently have one for each stream, else one stream would wait for another.

    follow_one_another: each call begins after the one before has ended, on whatever streams.
    """

    def __init__(self, launches: Sequence[Launch], follow_one_another: bool):
        self._launches, self._follow_one_another = launches, follow_one_another
        self._of_streams: dict[int | None, tuple[Graph, set[int]]] = {}
        self._are_offered = True

    def change(self, numbers: set[int]) -> None:
        """The launches of these numbers have other arguments from now on."""
        for _, changed in self._of_streams.values():
            changed |= numbers

    def __call__(self, stream: int) -> bool:
        """Launch all on a stream, given by its handle. False, and nothing is launched, if the
        stream is captured, whose graph gets the kernels one by one; if MOST_STREAMS others have a
        graph; or if the driver makes none."""
        if not self._are_offered or (stream != DEFAULT_STREAM and is_capturing()):
            return False
        key = None if self._follow_one_another else stream
        found = self._of_streams.get(key)
        if found is None:
            if len(self._of_streams) == MOST_STREAMS:
                return False
            graph = as_graph(self._launches)
            if graph is None:
                self._are_offered = False
                return False
            found = self._of_streams[key] = graph, set()
        graph, changed = found
        if graph(stream, changed):
            return True
        self._of_streams.clear()
        self._are_offered = False
        return False


class InterpretedLaunch:
    """A `Launch` through Triton's interpreter, whose cells are this object itself."""

    def __init__(self, kernel: Any, grid: Grid, arguments: Sequence[Any], options: dict[str, Any]):
        self.name, self._kernel, self._grid = kernel.__name__, kernel, grid
        self._arguments = dict(zip(kernel.arg_names, arguments, strict=False)) | options
        self._tensors = list(_tensors(tuple(self._arguments.values())))
        self.pointers = [(self, index, tensor) for index, tensor in enumerate(self._tensors)]
        self.numbers = {
            name: (self, name) for name, value in self._arguments.items() if type(value) is int
        }

    def __setitem__(self, place: int | str, value: int) -> None:
        if isinstance(place, str):
            self._arguments[place] = value
        else:
            self._tensors[place] = tensor_at(value, self._tensors[place])

    def forget_tensors(self) -> None:
        """See `Launch`. Those that stay where they are, are kept; the others until next launch."""
        self.pointers = []
        placeholders = iter([torch.empty_like(one, device="meta") for one in self._tensors])
        self._arguments = {
            name: _replaced(value, placeholders) for name, value in self._arguments.items()
        }

    def __call__(self, stream: int) -> None:
        """Run it. What a wrong use of the network raises comes as it is, not as the interpreter's
        error."""
        tensors = iter(self._tensors)
        try:
            self._kernel[self._grid](
                **{name: _replaced(value, tensors) for name, value in self._arguments.items()}
            )
        except InterpreterError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, MoeEngineError):
                cause = cause.__cause__
            if cause is None:
                raise
            raise cause from None


def tensor_at(address: int, like: torch.Tensor) -> torch.Tensor:
    """CPU memory as a tensor of these sizes, strides and dtype."""
    size = 1 + sum((n - 1) * step for n, step in zip(like.shape, like.stride(), strict=True))
    memory = (ctypes.c_uint8 * (size * like.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=like.dtype).as_strided(like.shape, like.stride())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in an argument, in its order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, TensorDescriptor):
        yield value.base
    elif isinstance(value, tuple):
        for one in value:
            yield from _tensors(one)


def _replaced(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """The argument with other tensors in their places."""
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, TensorDescriptor):
        return replace(value, base=next(tensors))
    if isinstance(value, tuple):
        items = [_replaced(one, tensors) for one in value]
        if any(new is not old for new, old in zip(items, value, strict=True)):
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value
