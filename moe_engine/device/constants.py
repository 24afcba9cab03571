"""Compile-time constants of a kernel, handed over as one argument."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, TypeVar

import triton.language as tl

from .ptx import INTERPRETED

T = TypeVar("T", bound=NamedTuple)


@functools.lru_cache(maxsize=None, typed=True)
def constants(values: T) -> T:
    """A NamedTuple of numbers, strings, types and such NamedTuples as one `tl.constexpr` argument
    of a kernel, whose fields are constants there: `kernel[grid](x, SIZES=constants(Sizes(RANKS=4,
    BLOCK=32)))`.

    Equal values give the same object, which is equal to itself alone: Triton looks it up at each
    launch, and would hash and compare field by field in Python. Pickled, it is these values.
    """
    wrapped: Any = values if INTERPRETED else _wrapped(type(values), values)
    return wrapped


@functools.cache
def _wrapped(kind: Any, values: Any) -> Any:
    identity = {name: getattr(object, name) for name in ("__hash__", "__eq__", "__ne__")}
    fields = (constants(one) if isinstance(one, tuple) else one for one in values)
    more = {"__slots__": (), "__reduce__": lambda self: (constants, (values,))}
    return type(kind.__name__, (kind,), identity | more)(*map(tl.constexpr, fields))
