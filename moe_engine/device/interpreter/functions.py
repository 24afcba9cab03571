"""Functions of the language: casts, selects, loads and sorts."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from .replacing import in_place_of
from .tensors import (
    INTEGERS,
    NUMBERS,
    PLAIN,
    broadcast,
    common_type,
    is_block,
    make,
    numpy_dtype,
    semantic,
    unwrap,
)

LOADED = INTEGERS | {"int8", "int16", "fp16", "bf16", "fp32"}
"""Types of elements that are loaded as they are."""
HINTS = {"cache_modifier", "eviction_policy", "volatile"}
"""Arguments of a load that decide nothing here."""

_filled: dict[Any, Any] = {}


# --- Casts ---------------------------------------------------------------------------------------


@in_place_of(TritonSemantic, "cast")
def convert(self: Any, input: Any, dst_ty: Any, rounding: Any = None) -> Any:
    """By numpy between plain types (to int1 the language compares with 0), and by a table from bf16
    to fp32."""
    source, dtype = input.dtype, dst_ty.scalar
    if source is dtype:
        return input
    if source.name == "bf16" and dtype.name == "fp32" and not rounding:
        return make(fp32_of_bf16()[input.handle.data], dtype, is_block(input))
    if rounding or source.name not in PLAIN or dtype.name not in NUMBERS:
        return convert.general(self, input, dst_ty, rounding)
    return make(input.handle.data.astype(numpy_dtype(dtype)), dtype, is_block(input))


@functools.cache
def fp32_of_bf16() -> Any:
    """What each of the 65536 values of bf16 is to the language."""
    values = make(np.arange(2**16, dtype=np.uint16), tl.bfloat16, True)
    return convert.general(semantic, values, tl.float32).handle.data


@in_place_of(tl, "cast")
@in_place_of(tl.tensor, "to")
def cast(
    input: Any, dtype: Any, fp_downcast_rounding: Any = None, bitcast: Any = False, **more: Any
) -> Any:
    """Integers to pointers, too."""
    dtype = unwrap(dtype)
    if type(input) is not tl.tensor or more:
        return cast.general(input, dtype, fp_downcast_rounding, bitcast, **more)
    if not unwrap(bitcast):
        return convert(semantic, input, dtype, unwrap(fp_downcast_rounding))
    if type(dtype) is tl.pointer_type and input.dtype.name == "int64":
        return make(input.handle.data.view(np.uint64), dtype, is_block(input))
    return semantic.bitcast(input, dtype)


# --- Selects and sorts ---------------------------------------------------------------------------


@in_place_of(tl, "where")
def where(condition: Any, x: Any, y: Any) -> Any:
    x, y = unwrap(x), unwrap(y)
    one, other = (x, y) if type(x) is tl.tensor else (y, x)
    is_plain = type(condition) is type(one) is tl.tensor and condition.dtype.name == "int1"
    dtype = common_type(one.dtype, other) if is_plain else None
    if dtype is None:
        return where.general(condition, x, y)
    data = np.where(condition.handle.data, operand(x, dtype), operand(y, dtype))
    return make(data, dtype, is_block(condition) or is_block(one) or is_block(other))


def operand(value: Any, dtype: Any) -> Any:
    """The data of a tensor, or of a number as one of this type."""
    if type(value) is tl.tensor:
        return value.handle.data
    return np.array([value], numpy_dtype(dtype))


@in_place_of(tl, "sort")
def sort(x: Any, dim: Any = None, descending: Any = False) -> Any:
    data = np.sort(x.handle.data)
    if getattr(descending, "value", descending):
        data = np.flip(data, -1)
    return tl.tensor(interpreter.TensorHandle(data, x.handle.dtype), x.type)


# --- Loads ---------------------------------------------------------------------------------------


@in_place_of(tl, "load")
def load(pointer: Any, mask: Any = None, other: Any = None, **more: Any) -> Any:
    mask, other = unwrap(mask), unwrap(other)
    if not is_plain_load(pointer, mask, other) or not more.keys() <= HINTS:
        return load.general(pointer, mask, other, **more)
    if mask is not None:
        pointer, mask = broadcast(semantic, pointer, mask)
    if type(other) is tl.tensor:
        pointer, other = broadcast(semantic, pointer, other)
    addresses, element = pointer.handle.data, pointer.dtype.element_ty
    dtype = numpy_dtype(element)
    masked = filled(addresses.shape, True, np.bool_) if mask is None else mask.handle.data
    if type(other) is tl.tensor:
        others = other.handle.data
    else:
        others = filled(addresses.shape, other or 0, dtype)
    data = interpreter._interpreter.load(addresses, masked, others, dtype)
    return make(data, element, is_block(pointer))


def is_plain_load(pointer: Any, mask: Any, other: Any) -> bool:
    """Whether `load` serves it: by pointers to elements that are no bool, and where `mask` is not
    set 0, or other numbers that need no cast."""
    if type(pointer) is not tl.tensor or type(pointer.dtype) is not tl.pointer_type:
        return False
    element = pointer.dtype.element_ty
    if element.name not in LOADED:
        return False
    if mask is None:
        return other is None
    if type(mask) is not tl.tensor or mask.dtype.name != "int1" or not fits(mask, pointer):
        return False
    if type(other) is tl.tensor:
        return other.dtype is element and fits(other, pointer)
    if other is None or common_type(element, other) is not None:
        return True
    return type(other) in (int, float) and bool(other == 0)


def fits(tensor: Any, pointer: Any) -> bool:
    """Whether a block is for a block."""
    return is_block(pointer) or not is_block(tensor)


def filled(shape: tuple[int, ...], value: Any, dtype: Any) -> Any:
    """An array that nothing writes."""
    if (key := (shape, value, dtype)) not in _filled:
        _filled[key] = np.full(shape, value, dtype)
    return _filled[key]
