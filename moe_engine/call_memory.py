"""The memory of a prepared call: what each call allocates, and where the arguments of its kernels
and its results lie in that."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from itertools import starmap
from typing import Any, NamedTuple

import torch

from .errors import ShapeError
from .kinds import results_are_apart
from .launch import Recording
from .torch_privates import is_deterministic, new_on_cpu, new_on_gpu, new_view, storage_of
from .utils import round_up

ALIGNMENT = 256
"""What shares an allocation with others begins at multiples of so many bytes."""
MERGED = torch.int32
"""Results of this dtype, the plans and counts of calls, are one allocation, of which they are
views: a view takes 0.6 of the host's time of an allocation, and one that several streams use costs
an event when it is freed. The allocation lives as long as one of them."""
MOST_MERGED_BYTES, MOST_TEMPORARY_BYTES = 2**20, 2**16
"""The most bytes of a result that is merged, and of temporary memory that is merged with results.
The kernels of the call alone use that memory, so what its results' readers do needs no order with
it."""

CPU = torch.device("cpu")


class Place(NamedTuple):
    """Where something lies: in which tensor or allocation of a call, and from which byte on."""

    memory: int
    begin: int


class CallMemory:
    """The memory of one kind of call: its tensors and its allocations, numbered in this order.

    A call allocates the results of the body that was recorded, or what they are views of; what it
    needs for a time, where the size of that is a number; and the rest of what it needs for a time,
    which is one allocation.

    given: the call's tensors; held: those that kernels use besides, and that stay where they are.
    """

    def __init__(
        self,
        given: Sequence[torch.Tensor],
        held: Sequence[torch.Tensor],
        recording: Recording,
        result: Any,
    ):
        self.device = given[0].device if given else held[0].device
        self._new, self._new_filled = _allocator(self.device), _filling_allocator(self.device)
        self._num_given = len(given)
        self._held = {one.untyped_storage().data_ptr() for one in held}
        self._allocations: list[tuple[Any, ...]] = []  # (shape, strides, dtype) of each
        self._sized: list[tuple[int, str]] = []  # which of them have a number for their first size
        self._ranges = [(Place(number, 0), *_range(one)) for number, one in enumerate(given)]
        places = self._plan(recording, result)
        self._views: list[tuple[int, tuple[int, ...], tuple[int, ...], int]] = []
        numbered = {_identity(one): number for number, one in enumerate(given)}
        for one in leaves(result):
            if (key := _identity(one)) not in numbered:
                numbered[key] = self._number_of(one, places, recording)
        self._build = _builder(result, numbered)

    def __len__(self) -> int:
        """How many tensors and allocations there are."""
        return self._num_given + len(self._allocations)

    @property
    def num_allocations(self) -> int:
        """The number of allocations that each call makes."""
        return len(self._allocations)

    def allocate(self, numbers: dict[str, int]) -> list[torch.Tensor]:
        """The allocations of a call with these numbers."""
        allocations = self._allocations
        if self._sized:
            allocations = [*allocations]
            for place, name in self._sized:
                shape, *more = allocations[place]
                allocations[place] = (numbers[name], *shape[1:]), *more
        return [*starmap(self._new_filled if is_deterministic() else self._new, allocations)]

    def result(self, given: Sequence[torch.Tensor], allocated: Sequence[torch.Tensor]) -> Any:
        """What a call with these tensors and allocations returns."""
        memory: list[Any] = [*given, *allocated]
        for number, shape, strides, first in self._views:
            memory.append(new_view(memory[number], shape, strides, first))
        memory.append(None)
        return self._build(memory)

    def check_given(
        self, given: Sequence[torch.Tensor] | None, uses: Sequence[torch.Tensor]
    ) -> None:
        """ShapeError where one of the tensors of a call that it uses has less memory than one of
        its kind takes."""
        used = set(map(id, uses))
        for one, (_, begin, end) in zip(given or (), self._ranges, strict=False):
            if id(one) in used:
                check_room(one, end - begin)

    def place_of(self, tensor: torch.Tensor) -> Place | None:
        """Where an argument of a launch that was recorded lies; None for what stays where it is."""
        address, storage = tensor.data_ptr(), tensor.untyped_storage().data_ptr()
        if storage in self._temporary:
            memory, begin = self._temporary[storage]
            return Place(memory, begin + address - storage)
        for (memory, offset), begin, end in self._ranges:
            if begin <= address < end:
                return Place(memory, offset + address - begin)
        if storage not in self._held:
            raise AssertionError("the body of a call uses a tensor that it was not given.")
        return None

    def _plan(self, recording: Recording, result: Any) -> dict[int, Place]:
        """Decide on the allocations, and return where each tensor lies that the body has allocated,
        by the tensor's id."""
        sized = recording.sized
        kept = {storage_of(one) for one in (*leaves(result), *recording.of_rows())}
        made = [one for one in recording.allocated if storage_of(one) in kept]
        rest = [one for one in recording.allocated if storage_of(one) not in kept and _size(one)]
        alone = sized.keys() | recording.apart
        small = [one for one in made if id(one) not in alone and _is_small(one)]
        if results_are_apart():
            small = []
        separate, together = rest, small
        if small and sum(map(_size, rest)) <= MOST_TEMPORARY_BYTES:
            separate, together = [], small + rest
        if len(together) == 1:
            together = []
        merged, places = set(map(id, together)), dict[int, Place]()
        for one in made:
            if id(one) not in merged:
                places[id(one)] = Place(len(self), 0)
                if (name := sized.get(id(one))) is not None:
                    self._sized.append((len(self._allocations), name))
                self._allocations.append((tuple(one.shape), one.stride(), one.dtype))
        for tensors, dtype in (together, MERGED), (separate, torch.uint8):
            number, end = len(self), 0
            for one in tensors:
                places[id(one)] = Place(number, end)
                end += _size(one)
            if tensors:
                self._allocations.append(((end // dtype.itemsize,), (1,), dtype))
        self._ranges += [(places[id(one)], *_range(one)) for one in made]
        self._temporary = {one.untyped_storage().data_ptr(): places[id(one)] for one in rest}
        return places

    def _number_of(
        self, result: torch.Tensor, places: dict[int, Place], recording: Recording
    ) -> int:
        """The number of a result in the memory of a call: of an allocation, or of a new view."""
        for made in recording.allocated:
            if storage_of(made) != storage_of(result):
                continue
            memory, begin = places[id(made)]
            is_whole = self._allocations[memory - self._num_given][0] == tuple(made.shape)
            if _identity(made) == _identity(result) and is_whole:
                return memory
            if made.dtype != result.dtype or id(made) in recording.sized:
                break
            assert not begin or made.dtype == MERGED
            first = begin // MERGED.itemsize + int(result.storage_offset())
            self._views.append((memory, tuple(result.shape), result.stride(), first))
            return len(self) + len(self._views) - 1
        raise AssertionError(
            "the body of a call returns neither what it was given, nor what it made, nor a view of "
            "that of the same dtype, of a size that stays."
        )


def check_room(tensor: torch.Tensor, num_bytes: int | None = None) -> None:
    """ShapeError where so many bytes no longer lie at a tensor's address; None: those between its
    elements."""
    begin, end = _range(tensor)
    storage, needed = tensor.untyped_storage(), end - begin if num_bytes is None else num_bytes
    if storage.data_ptr() + storage.nbytes() - begin < needed:
        raise ShapeError(
            f"a tensor of {needed} bytes has less memory than at its call: it was freed, or "
            "replaced by less. Give it as much as it had, and call the hook again."
        )


def alias_of(value: Any, made: dict[int, torch.Tensor]) -> Any:
    """Arguments with tensors on the same memory that no caller resizes. made: those by the id of
    their original, which is alive."""
    if isinstance(value, torch.Tensor):
        return made.setdefault(id(value), value.detach())
    if not isinstance(value, tuple):
        return value
    parts = [alias_of(one, made) for one in value]
    return tuple.__new__(type(value), parts)


def leaves(result: Any) -> list[torch.Tensor]:
    """The tensors of a result, those in inner tuples after those in outer ones."""
    tensors, todo = [], [result]  # the latter grows
    for one in todo:
        if isinstance(one, torch.Tensor):
            tensors.append(one)
        elif isinstance(one, tuple):
            todo += one
    return tensors


def overlap(given: Sequence[torch.Tensor], held: Sequence[torch.Tensor]) -> bool:
    """Whether tensors share memory, so that an address would not tell which of them is meant."""
    ranges = [_range(one) for one in given if one.numel()]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in held}
    ranges += [(begin, begin + one.nbytes()) for begin, one in storages.items()]
    ranges.sort()
    return any(begin < end for (_, end), (begin, _) in itertools.pairwise(ranges))


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses between which its elements lie."""
    begin = tensor.data_ptr()
    if not tensor.numel():
        return begin, begin
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.itemsize


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are the same part of the same memory, in the same way."""
    return storage_of(tensor), tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def _size(tensor: torch.Tensor) -> int:
    """Bytes that its allocation takes among others."""
    return round_up(tensor.untyped_storage().nbytes(), ALIGNMENT)


def _is_small(result: torch.Tensor) -> bool:
    """Whether a result may lie in one allocation with others."""
    return result.dtype == MERGED and result.untyped_storage().nbytes() <= MOST_MERGED_BYTES


def _builder(result: Any, numbered: dict[Any, int]) -> Callable[[list[Any]], Any]:
    """A function that makes such a result from the memory of a call, after which stands None."""

    def place(one: torch.Tensor | None) -> int:
        return -1 if one is None else numbered[_identity(one)]

    if isinstance(result, torch.Tensor | None):
        return operator.itemgetter(place(result))
    if not isinstance(result, tuple):
        return lambda memory: result
    make = functools.partial(tuple.__new__, type(result))
    if len(result) > 1 and all(isinstance(one, torch.Tensor | None) for one in result):
        pick = operator.itemgetter(*map(place, result))
        return pick if type(result) is tuple else lambda memory: make(pick(memory))
    parts = [_builder(one, numbered) for one in result]
    return lambda memory: make([part(memory) for part in parts])


def _allocator(device: torch.device) -> Callable[..., torch.Tensor]:
    """A function of (shape, strides, dtype) that allocates on the current device: what torch's own
    compiler calls, in half of the time of `torch.empty_strided`, where this torch has it."""
    new: Callable[..., torch.Tensor] | None = new_on_cpu if device == CPU else new_on_gpu
    return new or _filling_allocator(device)


def _filling_allocator(device: torch.device) -> Callable[..., torch.Tensor]:
    """One that fills the memory as torch.use_deterministic_algorithms(True) asks for."""

    def new(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    return new
