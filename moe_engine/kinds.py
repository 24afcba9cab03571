"""Kinds of calls: what of a call's arguments decides how it is made."""

from __future__ import annotations

import itertools
import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import choice_cache
from .checks import packed
from .torch_privates import TensorGuards

MOST_KINDS = 256
"""Kinds of calls that are kept for one memory; the least recently used go."""
MOST_PREPARED = 512
"""Prepared calls of all kinds of one memory, beyond which no further layer has its own. A graph of
twelve launches takes 0.13 MiB of the GPU."""
MOST_RECENT = 8
"""The most recent prepared calls that are tried before the full lookup: those with arguments of the
same types and a first tensor of the same shape."""

PLAIN = torch.Tensor, torch.nn.Parameter
"""Classes of tensors that torch can compare."""

NO_OPTIONS = torch.Tensor, tuple, list
"""A tuple that holds one of these is described anew at each call."""

_count = itertools.count()
data_ptr, is_grad_enabled = torch.Tensor.data_ptr, torch.is_grad_enabled

Tensors = Sequence[torch.Tensor | None]

_results_are_apart = ContextVar("results_are_apart", default=False)
results_are_apart = _results_are_apart.get


@contextmanager
def results_apart() -> Iterator[None]:
    """Calls within the block return no two tensors of one allocation, as operators of
    torch.library promise."""
    token = _results_are_apart.set(True)
    try:
        yield
    finally:
        _results_are_apart.reset(token)


class Kind:
    """What decides how a call is made. `is_checked`: whether a call of this kind has passed all
    checks that need no more than that; `is_packed`: whether its tensors are as kernels take them;
    `caller`: that of a layer without a tag; `choice`: what was chosen for it; `whole`: the body
    that is all of it, if one is.

    `prepared`: its calls by body, or by (body, address) those of one layer. Layers of a model are
    of one kind, and differ in their weights: `weights` is the place of one tensor of these among
    the tensors of a call, or None, and `shared` how many calls used what all layers share, by the
    address of that tensor. `owner`: the kinds that this one is among."""

    __slots__ = (
        *(
            "caller",
            "check",
            "choice",
            "is_checked",
            "is_packed",
            "owner",
            "prepared",
            "shared",
            "used",
        ),
        *("weights", "whole"),
    )

    def __init__(self, owner: Kinds | None = None) -> None:
        self.prepared: dict[Any, Any] = {}
        self.is_checked, self.is_packed, self.used = False, False, 0
        self.caller: int | None = None
        self.choice: Any = None
        self.check: Callable[..., bool] | None = None  # see `Recent`
        self.whole: Callable[..., Any] | None = None
        self.owner = None if owner is None else weakref.ref(owner)
        self.weights: int | None = None
        self.shared: dict[int, int] = {}

    @property
    def has_room(self) -> bool:
        """Whether one more layer may have launches of its own."""
        owner = None if self.owner is None else self.owner()
        return owner is not None and len(owner) < MOST_PREPARED

    def forget_layers(self) -> None:
        """Prepare calls for all layers alike from now on."""
        self.weights, self.shared = None, {}
        self.prepared = {
            key: one for key, one in self.prepared.items() if not isinstance(key, tuple)
        }


@dataclass(slots=True)
class Described:
    """The arguments of a call: its kind, its tensors, each once, and their addresses; no tensors:
    they have no kind."""

    kind: Kind
    tensors: Sequence[torch.Tensor] | None
    addresses: Sequence[int] = ()

    def more(self, made: Iterable[torch.Tensor | None]) -> Described:
        """The arguments of a later part of the call, which also gets what earlier parts of this
        kind have made."""
        if self.tensors is None:
            return self
        known, tensors, addresses = set(map(id, self.tensors)), [*self.tensors], [*self.addresses]
        for one in made:
            if one is not None and id(one) not in known:
                known.add(id(one))
                tensors.append(one)
                addresses.append(data_ptr(one))
        return Described(self.kind, tensors, addresses)

    @property
    def if_packed(self) -> Described | None:
        """This, if kernels take its tensors as they are; else they get others, which it does not
        describe."""
        return self if self.kind.is_packed else None

    def packed(self, *tensors: Any) -> tuple[Any, ...]:
        """Returns what kernels take for each of these tensors or None: the tensor itself, or its
        packed copy. The first call of a kind decides whether copies are needed."""
        if self.kind.is_packed:
            return tensors
        found = tuple([None if one is None else packed(one) for one in tensors])
        self.kind.is_packed = all(map(operator.is_, found, tensors))
        return found


@dataclass(slots=True)
class Recent:
    """Recent calls with arguments of the same types, and how to see that the next one is of a kind
    of theirs, in a third of the time that a whole description takes.

    `kinds`: by the shape of their first tensor, as most differ in their number of tokens; of each
    its options, and torch's own comparison with its tensors: whether others are distinct, and of
    the same classes, dispatch keys, dtypes, devices, shapes, strides and wishes for gradients.
    `pick_tuples`: the options that are tuples, whose items must be of the same types as well; None
    where there are none. `is_sized`: whether the first size of that tensor is no part of the
    kind.
    """

    pick_options: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    pick_tuples: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None
    pick_tensors: Callable[[tuple[Any, ...]], tuple[torch.Tensor, ...]]
    is_sized: bool
    kinds: dict[Any, tuple[tuple[tuple[Any, ...], Callable[..., bool], Kind], ...]]

    def options(self, num_args: int, every: tuple[Any, ...]) -> tuple[Any, ...]:
        """What is compared of the arguments besides tensors. Types come first, so that no number
        is compared with a tensor in a tuple."""
        tuples = self.pick_tuples
        of_items = tuples and [type(item) for one in tuples(every) for item in one]
        return of_items, num_args, _state(), self.pick_options(every)

    def of(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The key of these tensors in `kinds`."""
        if not tensors:
            return None
        shape = tensors[0].shape
        return shape[1:] if self.is_sized else shape


class Kinds:
    """The kinds of the calls of one memory, of which the last are the first to be asked for."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._kinds: dict[tuple[Any, ...], Kind] = {}
        self._recent: dict[tuple[type, ...], Recent] = {}

    def __len__(self) -> int:
        """How many calls are prepared."""
        return sum(len(kind.prepared) for kind in [*self._kinds.values()])

    def describe(
        self, *args: Any, sized: tuple[Any, ...] = (), weights: torch.Tensor | None = None
    ) -> Described:
        """The kind of a call with these arguments: options, which can be hashed, and of each
        tensor, in tuples or not, the type, shape, strides, dtype, device, where in 16 bytes it
        begins, whether it wants a gradient, and torch's negative bit, which of the dtypes that
        calls take float32 alone has. Of the tensors in `sized` the
        first size is no part of it. Arguments of other types have no kind, nor have tensors of a
        class that torch's functions pass on to their results, which would not be those that a call
        has recorded.
        weights: the one of the tensors by which layers of this kind are told apart."""
        every = args + sized
        types = tuple(map(type, every))
        if (recent := self._recent.get(types)) is not None:
            tensors = recent.pick_tensors(every)
            if (addresses := _aligned(tensors)) is not None:
                options = recent.options(len(args), every)
                for known, check, kind in recent.kinds.get(recent.of(tensors), ()):
                    if known == options and check(*tensors):
                        kind.used = next(_count)
                        return Described(kind, tensors, addresses)
        return self._describe(args, sized, types, weights)

    def _describe(
        self,
        args: tuple[Any, ...],
        sized: tuple[Any, ...],
        types: tuple[type, ...],
        weights: torch.Tensor | None,
    ) -> Described:
        """`describe` where no recent call was of this kind."""
        every = args + sized
        tensors: dict[int, torch.Tensor] = {}
        addresses: list[int] = []
        parts: list[Any] = [*_state(), len(args)]
        num_args, todo = len(args), [*every]  # grows: what is in a tuple comes after all
        try:
            for number, one in enumerate(todo):
                if isinstance(one, torch.Tensor):
                    if not _gives_plain_tensors(one.__class__):
                        return Described(Kind(), None)
                    if id(one) in tensors:
                        parts.append(list(tensors).index(id(one)))
                        continue
                    tensors[id(one)] = one
                    address, shape, dtype = one.data_ptr(), one.shape, one.dtype
                    addresses.append(address)
                    if num_args <= number < len(every):
                        shape = shape[1:]
                    parts += (
                        one.__class__,
                        shape,
                        one.stride(),
                        dtype,
                        one.get_device(),
                        address & 15 if address else _place_without_address(one),
                        one.requires_grad,
                        dtype is torch.float32 and one.is_neg(),
                    )
                elif isinstance(one, tuple | list):
                    parts += one.__class__, len(one)
                    todo += one
                else:
                    parts += one.__class__, one
            kind = self._kinds.get(key := tuple(parts))
            if kind is None:
                with self._lock:
                    kind = self._kinds[key] = Kind(self)
                    kind.used = next(_count)
                    if id(weights) in tensors:  # else what came is refused later
                        kind.weights = list(tensors).index(id(weights))
                    if len(self._kinds) > MOST_KINDS:
                        del self._kinds[min(self._kinds, key=lambda one: self._kinds[one].used)]
                        self._recent.clear()
        except (AttributeError, RuntimeError, TypeError):
            return Described(Kind(), None)
        kind.used = next(_count)
        # A tuple of options is an option itself. A list is not, as its items may change.
        has_list = any(isinstance(one, list) for one in every)
        is_flat = not has_list and not any(
            isinstance(one, NO_OPTIONS) for one in todo[len(every) :]
        )
        num_tensors = sum(isinstance(one, torch.Tensor) for one in every)
        if is_flat and len(addresses) == num_tensors and _aligned(tensors.values()) is not None:
            self._remember(kind, key, args, sized, types)
        return Described(kind, list(tensors.values()), addresses)

    def _remember(
        self,
        kind: Kind,
        key: tuple[Any, ...],
        args: tuple[Any, ...],
        sized: tuple[Any, ...],
        types: tuple[type, ...],
    ) -> None:
        """Let `describe` ask for this kind first, unless a tensor is of a class of its own."""
        every, num_args = args + sized, len(args)
        is_tensor = [issubclass(one, torch.Tensor) for one in types]
        places = [number for number, one in enumerate(is_tensor) if one]
        if any(types[number] not in PLAIN for number in places):
            return
        others = _picker([number for number, one in enumerate(is_tensor) if not one])
        tuples = [number for number, one in enumerate(every) if isinstance(one, tuple)]
        tensors = [every[place] for place in places]
        if kind.check is None or not kind.check(
            *tensors
        ):  # another dispatch key, of inference mode
            sizes = [
                [None if place >= num_args and dim == 0 else n for dim, n in enumerate(shape)]
                for place, shape in ((place, every[place].shape) for place in places)
            ]
            kind.check = _comparison(tensors, sizes)
        with self._lock:
            if kind.check is None or self._kinds.get(key) is not kind:
                return
            if len(self._recent) > MOST_KINDS:
                self._recent.clear()
            is_sized = bool(places) and places[0] >= num_args
            in_tuples = _picker(tuples) if tuples else None
            new = Recent(others, in_tuples, _picker(places), is_sized, {})
            recent = self._recent.get(types, new)
            before = recent.kinds.get(shape := recent.of(tensors), ())
            kept = [one for one in before if one[1] is not kind.check]
            one = recent.options(num_args, every), kind.check, kind
            kinds = {**recent.kinds, shape: (one, *kept[: MOST_RECENT - 1])}
            self._recent[types] = replace(recent, kinds=kinds)


def _gives_plain_tensors(kind: type[torch.Tensor]) -> bool:
    """Whether torch's functions of tensors of this class return those of its own."""
    return kind is torch.Tensor or kind.__torch_function__ is torch.nn.Parameter.__torch_function__


def _place_without_address(one: torch.Tensor) -> int:
    """Below 0: where a tensor without an address begins, which is empty or has no memory."""
    return -3 if one.numel() else -2 if one.storage_offset() else -1


def _state() -> tuple[Any, ...]:
    """What decides how a call is made, besides its arguments."""
    return choice_cache.num_kept, is_grad_enabled(), results_are_apart()


def _aligned(tensors: Iterable[torch.Tensor]) -> list[int] | None:
    """The addresses of these tensors, if there is memory at all of them, which begins at multiples
    of 16 bytes, and all have strides: torch's comparison would end the process at one without."""
    addresses: list[int] = []
    try:
        for one in tensors:
            address = data_ptr(one)
            if not address or address & 15 or one.is_nested:
                return None
            addresses.append(address)
    except RuntimeError:  # a tensor without memory
        return None
    return addresses


def _picker(places: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A function that takes the items at these places of a tuple."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return operator.itemgetter(slice(places[0], places[0] + 1) if places else slice(0))


def _comparison(
    tensors: Sequence[torch.Tensor], sizes: list[list[int | None]]
) -> Callable[..., bool] | None:
    """Whether as many tensors are distinct and like these, but for sizes that are None: what torch
    asks before it runs compiled code. None where this torch does not offer it."""
    more: dict[str, Any] = dict(dynamic_dims_sizes=sizes)
    more |= dict(dynamic_dims_strides=[list(one.stride()) for one in tensors])
    try:
        guards = TensorGuards(*tensors, **more)
        return guards.check if guards.check(*tensors) else None
    except (AttributeError, RuntimeError, TypeError):
        return None
