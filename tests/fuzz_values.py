"""Odd values by kind of parameter, each made from the good one. What a call may do with it:

EQUAL      refuse it, or give the same as with the good one
REFUSED    refuse it
ANY        refuse it, or give something else, as another size does
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_engine import EventHandle, EventOverlap

EQUAL, REFUSED, ANY = "equal", "refused", "any"


@dataclass(frozen=True)
class Odd:
    """An odd value: `make(good)`."""

    name: str
    make: Callable[[Any], Any]
    outcome: str


class Number(enum.IntEnum):
    """An int by another name."""

    TWO = 2


class Tagged(torch.Tensor):
    """A subclass with memory of its own."""


class Standing(torch.Tensor):
    """A subclass that stands for another tensor, as a DTensor does."""

    @staticmethod
    def __new__(cls, tensor):
        return torch.Tensor._make_wrapper_subclass(cls, tensor.shape, dtype=tensor.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was called")


def constant(value, outcome=REFUSED, name=None):
    return Odd(name or f"{value!r:.30}", lambda _: value, outcome)


def strided(tensor):
    """The same values, twice as far apart."""
    if tensor.dim() == 0:
        return tensor
    return torch.stack([tensor, tensor], -1).flatten(-2)[..., ::2]


def unaligned(tensor):
    """The same values, from an address on that is no multiple of 16."""
    memory = tensor.new_empty(tensor.numel() + 1)
    memory[1:] = tensor.flatten()
    return memory[1:].view(tensor.shape)


def freed(tensor):
    """As FSDP leaves parameters."""
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def fake(tensor):
    with FakeTensorMode() as mode:
        return mode.from_tensor(tensor)


def nested(tensor):
    return torch.nested.nested_tensor([tensor.float(), tensor.float()]).to(tensor.dtype)


def with_gradient(tensor):
    tensor = tensor.clone()
    return tensor.requires_grad_() if tensor.is_floating_point() else tensor


NOTHING = constant(None)
OBJECT = constant(object(), name="object()")
TENSORS = [
    Odd("strided", strided, EQUAL),
    Odd("unaligned", unaligned, EQUAL),
    Odd("transposed", lambda t: t.mT.contiguous().mT if t.dim() > 1 else t, EQUAL),
    Odd("tagged", lambda t: t.clone().as_subclass(Tagged), EQUAL),
    Odd("parameter", lambda t: torch.nn.Parameter(t, requires_grad=False), EQUAL),
    Odd("expanded", lambda t: t[:1].expand_as(t), ANY),
    Odd("empty", lambda t: t[:0], ANY),
    Odd("shorter", lambda t: t[:-1], ANY),
    Odd("longer", lambda t: torch.cat([t, t]), ANY),
    Odd("narrower", lambda t: t[..., :-1], ANY),
    Odd("wider", lambda t: torch.cat([t, t], -1), ANY),
    Odd("no columns", lambda t: t[..., :0], ANY),
    Odd("one more size", lambda t: t[None], ANY),
    Odd("flat", lambda t: t.flatten(), ANY),
    Odd("one item", lambda t: t.flatten()[0] if t.numel() else t, ANY),
    Odd("double", lambda t: t.double(), ANY),
    Odd("float", lambda t: t.float(), ANY),
    Odd("bf16", lambda t: t.bfloat16(), ANY),
    Odd("gradient", with_gradient, ANY),
    Odd("half", lambda t: t.half(), REFUSED),
    Odd("int16", lambda t: t.to(torch.int16), REFUSED),
    Odd("complex", lambda t: t.to(torch.complex64), REFUSED),
    Odd("meta", lambda t: t.to("meta"), REFUSED),
    Odd("sparse", lambda t: t.to_sparse(), REFUSED),
    Odd("compressed", lambda t: (t if t.dim() > 1 else t[None]).to_sparse_csr(), REFUSED),
    Odd("nested", nested, REFUSED),
    Odd("freed", freed, REFUSED),
    Odd("standing", Standing, REFUSED),
    Odd("fake", fake, REFUSED),
    Odd("numpy", lambda t: t.float().numpy(), REFUSED),
    Odd("list", lambda t: t.tolist(), REFUSED),
    Odd("pair", lambda t: (t, t), REFUSED),
    constant(0),
    constant("x"),
    OBJECT,
]
INTS = [
    Odd("numpy int64", numpy.int64, EQUAL),
    Odd("numpy uint8", lambda n: numpy.uint8(n) if 0 <= n < 256 else n, EQUAL),
    Odd("enum", lambda n: Number.TWO if n == 2 else n, EQUAL),
    Odd("one more", lambda n: n + 1, ANY),
    Odd("one less", lambda n: n - 1, ANY),
    constant(0, ANY),
    constant(1, ANY),
    constant(-1, ANY),
    Odd("a float", float, REFUSED),
    Odd("and a half", lambda n: n + 0.5, REFUSED),
    Odd("a string", str, REFUSED),
    Odd("a tensor", torch.tensor, REFUSED),
    Odd("a numpy array", lambda n: numpy.array([n]), REFUSED),
    Odd("a list", lambda n: [n], REFUSED),
    constant(float("nan")),
    constant(float("inf")),
    constant(10**5000, name="10**5000"),
    constant(True),
    constant(1j),
    constant(b"8"),
    OBJECT,
]
BIG_INTS = [constant(n, ANY) for n in (-(2**63), 2**31 - 1, 2**31, 2**62)]
FLAGS = [
    Odd("an int", int, EQUAL),
    Odd("the other", lambda flag: not flag, ANY),
    *map(constant, ("yes", 2, -1, 1.5, b"", "", [], {})),
    constant(torch.tensor([True, False]), name="two flags"),
    constant(torch.tensor(1.0), name="a tensor"),
    constant(numpy.array([True]), name="an array"),
    NOTHING,
    OBJECT,
]
NUMBERS = [
    Odd("a numpy float", numpy.float32, EQUAL),
    *map(constant, (0, -1, 0.0, -1e-9, float("nan"), float("inf"), -float("inf"), 1e300)),
    *map(constant, ("5", b"5", [5], True, 1j)),
    constant(10**400, name="10**400"),
    constant(torch.tensor(5.0), name="a tensor"),
    OBJECT,
]
WORDS = [
    *map(constant, ("", "relu", "Auto", "nvshmem", b"auto", 3, ["auto"], ("auto",), {})),
    constant(torch.zeros(2), name="a tensor"),
    constant(numpy.array(["auto", "none"]), name="an array"),
    NOTHING,
    OBJECT,
]
DTYPES = [
    *map(constant, ("bfloat16", 4, numpy.float32, float, torch.float16, torch.int64)),
    *map(constant, (torch.complex64, torch.quint8, torch.bool)),
    constant(numpy.dtype("float32"), name="a numpy dtype"),
    constant(torch.zeros(2), name="a tensor"),
    constant(torch.float32, ANY),
    NOTHING,
    OBJECT,
]
EVENTS = [
    Odd("an event", lambda _: EventHandle(), EQUAL),
    Odd("an overlap", lambda _: EventOverlap(EventHandle()), EQUAL),
    Odd("an empty overlap", lambda _: EventOverlap(), EQUAL),
    Odd("an overlap of a number", lambda _: EventOverlap(3), REFUSED),
    constant(torch.zeros(1), name="a tensor"),
    *map(constant, (0, "event", True)),
    OBJECT,
]
OBJECTS = [
    *map(constant, (0, -1, "x", True, 2.5, [], (), {"num_sms": 4})),
    constant(torch.zeros(2), name="a tensor"),
    constant(int, name="a type"),
    OBJECT,
]
SIZES = [
    *map(constant, (8, "8", {}, {8}, [-1], [2.0], [None], ["2"], [True], [[2]])),
    *(constant(size, ANY) for size in ([], [0], [2, 2], (1,), [2**31, 2**31], [2**62, 4])),
    constant(torch.tensor([2]), name="a tensor"),
]
UNUSED = [
    Odd(f"{value!r:.30}", partial(lambda value, _: value, value), EQUAL)
    for value in (None, 3, "x", object, [], torch.float32)
]
ANY_DTYPES = [
    Odd(odd.name, odd.make, ANY if isinstance(odd.make(None), torch.dtype) else odd.outcome)
    for odd in DTYPES
]
KINDS = {
    "tensor": [NOTHING, *TENSORS],
    "optional tensor": [constant(None, ANY), *TENSORS],
    "int": [NOTHING, *INTS],
    "any int": [NOTHING, *INTS, *BIG_INTS],
    "optional int": [constant(None, ANY), *INTS],
    "flag": FLAGS,
    "number": NUMBERS,
    "word": WORDS,
    "dtype": DTYPES,
    "any dtype": ANY_DTYPES,
    "optional dtype": [constant(None, ANY), *(odd for odd in DTYPES if odd is not NOTHING)],
    "event": EVENTS,
    "object": [NOTHING, *OBJECTS],
    "callable": [NOTHING, *(odd for odd in OBJECTS if odd.name != "a type")],
    "optional object": [constant(None, ANY), *OBJECTS],
    "sizes": SIZES,
    "unused": UNUSED,
}


TUPLES = [
    *(odd for odd in OBJECTS if odd.name != "()"),
    Odd("a list of the same", list, ANY),
    Odd("one item less", lambda items: tuple(items)[:-1], REFUSED),
    Odd("one item more", lambda items: (*items, items[0]), REFUSED),
    Odd("backwards", lambda items: tuple(items)[::-1], REFUSED),
    Odd("nothing in it", lambda items: (None,) * len(items), REFUSED),
    constant((), REFUSED),
]


def odds_of(kind, good):
    """The odd values for a good one. Of a tuple of tensors and ints, as handles are:
    wrong as a whole, or in one item."""
    if kind == "low-latency handle":
        return odd_handles(good)
    if kind not in ("tuple", "optional tuple"):
        return KINDS[kind]
    odds = [*TUPLES, constant(None, REFUSED if kind == "tuple" else ANY)]
    for index, item in enumerate(good):
        of_item = KINDS["tensor" if isinstance(item, torch.Tensor) else "any int"]
        odds += [
            Odd(f"item {index}: {odd.name}", partial(_with_item, index, odd), ANY)
            for odd in of_item
        ]
    return odds


def odd_handles(handle):
    """Of a `LowLatencyHandle`: wrong as a whole, or in one field."""
    odds = [
        *(odd for odd in OBJECTS if odd.name != "()"),
        *(Odd(one.__name__, one, REFUSED) for one in (tuple, list)),
        Odd("its memory", lambda handle: handle.memory, REFUSED),
        Odd("one item less", lambda handle: handle[:-1], REFUSED),
        constant((), REFUSED),
        constant(None, REFUSED),
    ]
    odds += [
        Odd(f"memory: {odd.name}", partial(_with_field, "memory", odd), ANY)
        for odd in KINDS["tensor"]
    ]
    odds += [Odd(f"sizes: {odd.name}", partial(_with_field, "sizes", odd), ANY) for odd in TUPLES]
    for name in handle.sizes._fields:
        odds += [
            Odd(f"{name}: {odd.name}", partial(_with_size, name, odd), ANY)
            for odd in KINDS["any int"]
        ]
    return odds


def _with_field(name, odd, handle):
    return dataclasses.replace(handle, **{name: odd.make(getattr(handle, name))})


def _with_size(name, odd, handle):
    sizes = handle.sizes
    sizes = sizes._replace(**{name: odd.make(getattr(sizes, name))})
    return dataclasses.replace(handle, sizes=sizes)


def _with_item(index, odd, items):
    items = list(items)
    items[index] = odd.make(items[index])
    return tuple(items)
