"""Prepared calls: what follows from the shapes of a call's arguments is decided at the first call.

The first call of a kind runs an ordinary function, its *body*, and notes which kernels it launches
and where their arguments lie: in the call's tensors, in its results, or in memory that it needs for
a time. A call of the same kind then allocates its results and that memory, changes the addresses
that differ from the call before, and launches the same kernels, several as one CUDA graph. So it
costs what its launches cost, and the code that decides stays an ordinary function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import torch

from .call_memory import CallMemory, alias_of, check_room, overlap
from .callers import Callers
from .errors import BackendError
from .kinds import MOST_PREPARED, Described, Kinds, Tensors, data_ptr
from .launch import Graphs, Recording, is_collecting, only_launches, stream_of
from .torch_privates import has_modes, without_modes
from .utils import untraced

OWN_AFTER = 4
"""Calls of a layer, or parts of them, after which it has launches of its own: its weights, and
mostly also the rest of its memory, are at the same addresses as in its call before, and a graph
that changes nothing takes less time, see `launch_graph`."""


class PreparedCalls(Kinds):
    """The kinds of calls that were made with one memory. Calling it makes a call.

    held: the tensors that kernels use besides those of a call; they stay where they are. begin:
    makes the context in which the first call of a kind runs. state: its `step` is the launch that
    a call has come to, `launched` the last kernel, and `callers` says which layer the call is of.
    """

    def __init__(
        self,
        held: Sequence[torch.Tensor] = (),
        begin: Callable[..., AbstractContextManager[Any]] = lambda *key: nullcontext(),
        state: Any = None,
    ):
        super().__init__()
        self._held, self._begin = held, begin
        self._is_changing = False
        if state is None:
            state = SimpleNamespace(step=None, launched=None, callers=Callers())
        self._state = state

    def again(self, described: Described, numbers: dict[str, int]) -> Any:
        """What the body that is all of a call returned, from a call with other tensors and numbers;
        None where it must run."""
        kind = described.kind
        if not kind.is_packed or has_modes() or not only_launches():
            return None
        prepared = self._find(described, kind.whole)
        return None if prepared is None else self._make(prepared, described, numbers)

    def __call__(
        self,
        body: Callable[..., Any],
        owner: Any,
        *args: Any,
        described: Described | None = None,
        before: Callable[..., None] | None = None,
        sized: Tensors | None = None,
        as_one: bool = True,
        **numbers: int,
    ) -> Any:
        """`body(owner, *args, **numbers)`, or what it did at the first call of this kind.

        described: the arguments, or others that decide all of them; see `describe`. `sized` is a
        further argument of the body: contiguous tensors, whose first sizes may change from call to
        call, and so may `numbers`, which kernels take by the same names. The owner is the same for
        all calls. A body launches kernels, allocates and makes views, and returns tensors in
        tuples; one that computes anything else by torch runs at each call. `before(*args)` runs
        before the first call of a kind, and may do anything. as_one: whether the launches
        may be one CUDA graph, which begins when all before it has ended and ends before anything
        after it begins; False for a part that overlaps with the part before or after it.
        """
        if described is not None and only_launches() and not has_modes():
            prepared = self._find(described, body)
            if prepared is not None:
                made = described if sized is None else described.more(sized)
                return self._make(prepared, made, numbers)
        more = {} if sized is None else {"sized": sized}
        if Recording.current() is not None:  # a part of a larger body
            return body(owner, *args, **more, **numbers)
        if is_collecting():  # nothing runs that could be repeated
            if before is not None:
                before(*args)
            return body(owner, *args, **more, **numbers)
        if has_modes():
            with without_modes():
                how: dict[str, Any] = dict(before=before, sized=sized, as_one=as_one)
                return self(body, owner, *args, described=described, **how | numbers)
        if described is None or described.tensors is None:
            described = self.describe(*args, sized=tuple(sized or ()))
            if described.tensors is None:
                if before is not None:
                    before(*args)
                return body(owner, *args, **more, **numbers)
        if sized is not None:
            described = described.more(sized)
        prepared = self._find(described, body)
        if prepared is not None:
            return self._make(prepared, described, numbers)
        given = described.tensors
        assert given is not None
        first = body, *_compiled_for((args, sized))
        if before is not None:
            before(*args)
        with self._begin(*first), Recording(self._state) as recording:
            result = body(owner, *args, **more, **numbers)
        can_be_repeated = not recording.computes and not overlap(given, self._held)
        of_rows = *(sized or ()), *recording.of_rows()
        if can_be_repeated and all(one is None or one.numel() for one in of_rows):
            memory = CallMemory(given, self._held, recording, result)
            # Each call of a memory begins after the one before has ended, on whatever streams.
            launches, follow = [launch for launch, _ in recording.launches], bool(self._held)
            graphs = Graphs(launches, follow) if as_one and len(launches) > 1 else None
            parts = recording, self._state, graphs
            self._keep(described, body, PreparedCall(memory, [*numbers], *parts))
        elif (shared := described.kind.prepared.get(body)) is not None:
            self._keep(described, body, shared)
        return result

    def later(
        self,
        body: Callable[..., None],
        owner: Any,
        *args: Any,
        uses: Sequence[torch.Tensor],
        described: Described | None,
    ) -> Callable[[], None]:
        """A function that makes the call, once, with tensors of the sizes that they have now:
        callers may resize them before, or give them other memory; ShapeError if that is less.
        uses: the tensors that its kernels read and write. Where the kind is prepared and its body
        allocates nothing, its launches get their addresses now, and no other call uses them before
        the function has made them."""
        if described is not None and only_launches() and not has_modes():
            kept = described.kind.prepared
            prepared = kept.get(body)
            if prepared is not None and not prepared.memory.num_allocations:
                del kept[body]
                prepared.take(described.addresses, {})
                addresses = [*map(data_ptr, uses)]

                def make() -> None:
                    if [*map(data_ptr, uses)] != addresses:
                        prepared.memory.check_given(described.tensors, uses)
                        prepared.take([*map(data_ptr, described.tensors or ())], {})
                    prepared.launch(self._state)
                    kept[body] = prepared

                return make
        aliases: dict[int, torch.Tensor] = {}
        args, kept_uses = alias_of((args, tuple(uses)), aliases)
        tensors = None
        if described is not None and described.tensors is not None:
            tensors = [alias_of(one, aliases) for one in described.tensors]

        def make_first() -> None:
            for one in kept_uses:
                check_room(one)
            more = described
            if described is not None and tensors is not None:
                more = Described(described.kind, tensors, [*map(data_ptr, tensors)])
            self(body, owner, *args, described=more)

        return make_first

    def _find(self, described: Described, body: Callable[..., Any] | None) -> PreparedCall | None:
        """The prepared call of this body: of this layer, if it has one of its own, else what layers
        share. None where one is to be prepared: the first one, and that of a layer that has made
        OWN_AFTER calls, if there are other layers and room for it."""
        kind, place = described.kind, described.kind.weights
        shared: PreparedCall | None = kind.prepared.get(body)
        if place is None or shared is None:
            return shared
        address = described.addresses[place]
        found: PreparedCall | None = kind.prepared.get((body, address))
        if found is not None:
            return found
        num_calls = kind.shared[address] = kind.shared.get(address, 0) + 1
        wants_own = num_calls > OWN_AFTER and len(kind.shared) > 1
        if len(kind.shared) > MOST_PREPARED or (wants_own and not kind.has_room):
            kind.forget_layers()
        elif wants_own:
            return None
        return shared

    def _keep(
        self, described: Described, body: Callable[..., Any] | None, made: PreparedCall
    ) -> None:
        """Keep what was prepared: the first for all layers, later ones for this layer alone."""
        kind, place = described.kind, described.kind.weights
        if place is None or body not in kind.prepared:
            kind.prepared[body] = made
        else:
            kind.prepared[body, described.addresses[place]] = made

    def _make(self, call: PreparedCall, described: Described, numbers: dict[str, int]) -> Any:
        """Make a call; one after the other, as they share the addresses that they change."""
        with self._lock:
            if self._is_changing:
                raise BackendError(
                    "a call began while another one of this thread was being launched, as from a "
                    "signal handler. Let the handler set a flag, and make the call afterwards."
                )
            self._is_changing = True
            try:
                given = described.tensors or ()
                return call(given, described.addresses, numbers, self._state)
            finally:
                self._is_changing = False

    def clear(self) -> None:
        """Prepare all calls anew: the memory has moved, or they are to run in another way."""
        with self._lock:
            for kind in self._kinds.values():
                kind.prepared.clear()


_without_memory = PreparedCalls()

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R", bound=Tensors)


class Prepared(Protocol[P, T]):
    """What `prepared` makes; `__wrapped__` is the body."""

    __wrapped__: Callable[P, T]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T: ...


def prepared(body: Callable[P, T]) -> Prepared[P, T]:
    """A function of tensors and options, all by position, as the body of prepared calls; see
    `PreparedCalls`. It runs on the device of its first argument."""

    def run(owner: None, *args: Any) -> Any:
        return body(*args)  # type: ignore[call-arg]

    @untraced
    @functools.wraps(body)
    def call(*args: Any) -> Any:
        first = args[0]
        while isinstance(first, tuple) and first:
            first = first[0]
        described = _without_memory.describe(*_ungrouped(args)) if only_launches() else None
        on_gpu = isinstance(first, torch.Tensor) and first.is_cuda
        if on_gpu and first.get_device() != torch.cuda.current_device():
            with torch.cuda.device_of(first):
                return _without_memory(run, None, *args, described=described)
        return _without_memory(run, None, *args, described=described)

    return cast(Prepared[P, T], call)


def _ungrouped(args: tuple[Any, ...]) -> Iterator[Any]:
    """Arguments without the tuples in which they stand, as torch compares no tensors in tuples; at
    the end what these tuples are."""
    groups: list[Any] = []
    for one in args:
        groups += (type(one), len(one)) if isinstance(one, tuple) else (None,)
        yield from one if isinstance(one, tuple) else (one,)
    yield tuple(groups)


class PreparedCall:
    """The launches of one kind of call, and where their arguments lie in its memory."""

    def __init__(
        self,
        memory: CallMemory,
        numbers: Sequence[str],
        recording: Recording,
        state: Any,
        graphs: Graphs | None,
    ):
        self.memory, self._launches, self._graphs = memory, recording.launches, graphs
        self._step = next((step for _, step in self._launches if step is not None), None)
        self._end = state.step, state.launched
        self._stream = stream_of(memory.device)
        # Of each memory (number of a launch, its cells, index there, where it begins).
        self._places: list[list[tuple[int, Any, int, int]]] = [[] for _ in range(len(memory))]
        for number, (launch, _) in enumerate(self._launches):
            for cells, index, tensor in launch.pointers:
                if tensor.numel() and (place := memory.place_of(tensor)) is not None:
                    self._places[place.memory].append((number, cells, index, place.begin))
            launch.forget_tensors()
        self._numbers = [one for name in numbers for one in self._having(name)]
        self._callers, self._caller = self._having("caller"), state.callers.running
        self._addresses: Sequence[int] = [-1] * len(memory)
        self._unknown = self._addresses
        self._counts: dict[str, int] | None = None  # `numbers` of the last call

    def __call__(
        self,
        given: Sequence[torch.Tensor],
        given_at: Sequence[int],
        numbers: dict[str, int],
        state: Any,
    ) -> Any:
        """Make the call with other tensors, at these addresses, and numbers."""
        allocated = self.memory.allocate(numbers)
        self.take([*given_at, *map(data_ptr, allocated)], numbers)
        self.launch(state)
        return self.memory.result(given, allocated)

    def take(self, addresses: Sequence[int], numbers: dict[str, int]) -> None:
        """Let the launches take the memory at these addresses, and these numbers."""
        if addresses != self._addresses:
            self._move(addresses)
        if numbers != self._counts:
            self._count(numbers)

    def _having(self, name: str) -> list[tuple[str, int, Any, Any]]:
        """The launches that take a number of this name, as (name, number of the launch, cells,
        index there)."""
        return [
            (name, number, *launch.numbers[name])
            for number, (launch, _) in enumerate(self._launches)
            if name in launch.numbers
        ]

    def launch(self, state: Any) -> None:
        """Launch all on the current stream."""
        if self._callers and state.callers.running != self._caller:
            self._name(state.callers.running)
        stream, state.step = self._stream(), self._step
        if self._graphs is None or not self._graphs(stream):
            for launch, step in self._launches:
                state.step = step
                launch(stream)
        state.step, state.launched = self._end

    def _move(self, addresses: Sequence[int]) -> None:
        """Let the launches take other memory."""
        known, self._addresses = self._addresses, self._unknown  # as it may be interrupted
        changed = set[int]()
        for address, old, places in zip(addresses, known, self._places, strict=True):
            if address != old:
                for number, cells, index, offset in places:
                    changed.add(number)
                    cells[index] = address + offset
        if self._graphs is not None:
            self._graphs.change(changed)
        self._addresses = addresses

    def _count(self, numbers: dict[str, int]) -> None:
        """Let the launches take other numbers."""
        self._counts = None  # as it may be interrupted
        self._put(self._numbers, numbers)
        self._counts = numbers

    def _name(self, caller: int) -> None:
        """Let the launches say that the call is of this caller."""
        self._caller = None  # as it may be interrupted
        self._put(self._callers, {"caller": caller})
        self._caller = caller

    def _put(self, places: list[tuple[str, int, Any, Any]], numbers: dict[str, int]) -> None:
        for name, _, cells, index in places:
            cells[index] = numbers[name]
        if self._graphs is not None:
            self._graphs.change({number for _, number, _, _ in places})


def with_size(name: str, results: R) -> R:
    """These tensors, or None, which a body has allocated: their first size is its number of this
    name, which is other in other calls."""
    recording = Recording.current()
    if recording is not None:
        new = {id(one): name for one in results if one is not None}
        # Python gets another object from torch.empty_like than the one that was recorded.
        if not new.keys() <= set(map(id, recording.allocated)):
            raise AssertionError("with_size takes what the body allocated, by new_empty.")
        recording.sized |= new
    return results


def apart(result: torch.Tensor) -> torch.Tensor:
    """This tensor, which a body has allocated, and which callers may keep for long: it shares no
    allocation with other results."""
    recording = Recording.current()
    if recording is not None:
        recording.apart.add(id(result))
    return result


def _compiled_for(value: Any) -> Iterator[Any]:
    """What kernels are compiled for, as far as arguments show it: not the number of tokens, which
    is the first size of matrices, and the second one of a plan's."""
    if isinstance(value, torch.Tensor):
        is_plan = value.dim() == 2 and value.dtype == torch.int32
        yield value.dtype, () if is_plan else value.shape[int(value.dim() == 2) :]
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _compiled_for(one)
    else:
        yield value
