"""Compile-time constants of a kernel, handed over as one argument."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, TypeVar

import triton.language as tl

from .ptx import INTERPRETED

T = TypeVar("T", bound=NamedTuple)


@functools.lru_cache(maxsize=None, typed=True)
def constants(values: T) -> T:
    """A NamedTuple of numbers, strings and types as one `tl.constexpr` argument of a kernel, whose
    fields are constants there: `kernel[grid](x, SIZES=constants(Sizes(RANKS=4, BLOCK=32)))`.

    Equal values give one object, which a launch finds faster among the compiled kernels."""
    wrapped: Any = values if INTERPRETED else map(tl.constexpr, values)
    return type(values)(*wrapped)
