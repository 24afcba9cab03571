"""Operators of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl

from .replacing import in_place_of
from .tensors import INTEGERS, common_type, is_block, make

OfNumpy = Callable[[Any, Any], Any]


def divide(a: Any, b: Any) -> Any:
    """Towards zero."""
    return (a - np.fmod(a, b)) // b


ARITHMETIC: dict[str, OfNumpy] = {
    "__add__": np.add,
    "__radd__": np.add,
    "__sub__": np.subtract,
    "__mul__": np.multiply,
    "__rmul__": np.multiply,
    "__and__": np.bitwise_and,
    "__or__": np.bitwise_or,
}
COMPARISONS: dict[str, OfNumpy] = {
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
}
OF_INTEGERS: dict[str, OfNumpy] = {
    "__floordiv__": divide,
    "__mod__": np.fmod,
    "__lshift__": np.left_shift,
    "__rshift__": np.right_shift,
}
MASK = 2**64 - 1
"""The bits of an address."""


def replace_operator(name: str, of_numpy: OfNumpy) -> None:
    """For operands of plain types numpy's function, else the operator of the language."""
    is_comparison, is_of_integers = name in COMPARISONS, name in OF_INTEGERS

    @in_place_of(tl.tensor, name)
    def operate(self: Any, other: Any, **more: Any) -> Any:
        if type(other) is tl.constexpr:
            other = other.value
        dtype = common_type(self.dtype, other)
        if dtype is None or (is_of_integers and dtype.name not in INTEGERS):
            return operate.general(self, other, **more)
        operand = other.handle.data if type(other) is tl.tensor else other
        data = of_numpy(self.handle.data, operand)
        return make(data, tl.int1 if is_comparison else dtype, is_block(self) or is_block(other))


for _name, _of_numpy in (ARITHMETIC | COMPARISONS | OF_INTEGERS).items():
    replace_operator(_name, _of_numpy)


@in_place_of(tl.tensor, "__add__")
def add(self: Any, other: Any, **more: Any) -> Any:
    """Offsets of pointers; the sums of numbers are those of `replace_operator`."""
    dtype = self.dtype
    if type(dtype) is not tl.pointer_type:
        return add.general(self, other, **more)
    if type(other) is tl.constexpr:
        other = other.value
    if type(other) is int:
        offset = np.uint64(other * dtype.item_bytes & MASK)
    elif type(other) is tl.tensor and other.dtype.name in INTEGERS:
        offset = dtype.item_bytes * other.handle.data.astype(np.uint64)
    else:
        return add.general(self, other, **more)
    return make(self.handle.data + offset, dtype, is_block(self) or is_block(other))


@in_place_of(tl.tensor, "__getitem__")
def get_item(self: Any, slices: Any) -> Any:
    """New sizes of 1."""
    is_plain = type(slices) is tuple and len(slices) > 1 and is_block(self)
    if is_plain and all(one is None or one == slice(None) for one in slices):
        return make(self.handle.data[slices], self.dtype, True)
    return get_item.general(self, slices)
