"""Types, each described once, and tensors, made without checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

from .replacing import in_place_of

semantic = interpreter.interpreter_semantic
INTEGERS = {"int32", "int64"}
NUMBERS = {"fp32"} | INTEGERS
PLAIN = {"int1"} | NUMBERS
"""Types of which two make the same type, whatever is computed."""
SMALLEST, LARGEST = -(2**31), 2**31 - 1
"""The bounds of int32, the type of an int that fits."""

_NESTED = list, tuple, tl.tuple
_dtypes: dict[str, Any] = {}
_tuple_types: dict[tuple[int, ...], Any] = {}
_blocks: dict[Any, Any] = {}
_shapes: dict[tuple[int, ...], Any] = {}
_pointers: dict[Any, Any] = {}
_new = object.__new__


# --- Types ---------------------------------------------------------------------------------------


@in_place_of(interpreter, "_get_np_dtype")
def numpy_dtype(dtype: Any) -> Any:
    """The type of the array of a tensor."""
    name = dtype.scalar.name
    if name not in _dtypes:
        _dtypes[name] = numpy_dtype.general(dtype)
    return _dtypes[name]


@in_place_of(tl.dtype, "__eq__")
def dtypes_are_equal(self: Any, other: Any) -> Any:
    return other is self or dtypes_are_equal.general(self, other)


@in_place_of(tl.block_type, "__new__")
def new_block(cls: Any, element_ty: Any, shape: Sequence[Any]) -> Any:
    """One object for all equal types of blocks, which `init_block` describes."""
    sizes = tuple([getattr(size, "value", size) for size in shape])
    return _blocks.get((element_ty.name, sizes)) or _new(cls)


@in_place_of(tl.block_type, "__init__")
def init_block(self: Any, element_ty: Any, shape: Sequence[Any]) -> None:
    if not hasattr(self, "name"):
        init_block.general(self, element_ty, shape)
        sizes = tuple(self.shape)  # that of Triton has no hash
        self.shape = _shapes.setdefault(sizes, self.shape)
        _blocks[element_ty.name, sizes] = self


@in_place_of(tl.block_type, "with_element_ty")
def with_element_ty(self: Any, scalar_ty: Any) -> Any:
    return tl.block_type(scalar_ty, self.shape)


@in_place_of(tl.pointer_type, "__new__")
def new_pointer(cls: Any, element_ty: Any, *more: Any, **named: Any) -> Any:
    """One object for all equal types of pointers."""
    key = unwrap(element_ty), more, *named.items()
    return _pointers.get(key) or _pointers.setdefault(key, _new(cls))


@in_place_of(tl.pointer_type, "__init__")
def init_pointer(self: Any, *args: Any, **named: Any) -> None:
    if not hasattr(self, "name"):
        init_pointer.general(self, *args, **named)
        element = TensorHandle(None, self).get_element_ty()
        self.item_bytes = max(1, element.primitive_bitwidth // 8)


@in_place_of(tl.core, "_type_for_tuple_values")
def type_for_tuple_values(values: Sequence[Any], fields: Any = None) -> Any:
    sizes = tuple(getattr(value, "value", value) for value in values)
    if fields is not None or any(type(size) is not int for size in sizes):
        return type_for_tuple_values.general(values, fields)
    if sizes not in _tuple_types:
        _tuple_types[sizes] = type_for_tuple_values.general(values)
    return _tuple_types[sizes]


def common_type(dtype: Any, other: Any) -> Any:
    """The type in which numpy computes with a tensor of this type and with `other`, a tensor or a
    number, as the language does; or None."""
    if type(other) is int and SMALLEST <= other <= LARGEST:
        return dtype if dtype.name in NUMBERS else None
    if type(other) is float:
        return dtype if dtype.name == "fp32" else None
    if type(other) is not tl.tensor:
        return None
    if dtype.name == other.dtype.name:
        return dtype if dtype.name in PLAIN else None
    return tl.int64 if {dtype.name, other.dtype.name} == INTEGERS else None


# --- Tensors -------------------------------------------------------------------------------------


@in_place_of(TensorHandle, "__init__")
def init_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr


@in_place_of(tl.tensor, "__init__")
def init_tensor(self: Any, handle: Any, type: Any) -> None:
    described = getattr(type, "of_tensors", None)
    if described is None:
        init_tensor.general(self, None, type)
        described = type.of_tensors = self.shape, self.numel, self.dtype
    self.handle, self.type = handle, type
    self.shape, self.numel, self.dtype = described


def make(data: Any, dtype: Any, is_block: bool) -> Any:
    """A tensor of a scalar, or a block of numpy's shape."""
    kind = dtype
    if is_block:
        kind = _blocks.get((dtype.name, data.shape)) or tl.block_type(dtype, list(data.shape))
    handle, tensor = _new(TensorHandle), _new(tl.tensor)
    handle.data, handle.dtype, handle.attr = data, dtype, {}
    init_tensor(tensor, handle, kind)
    return tensor


def is_block(value: Any) -> bool:
    """Whether it is a tensor that is no scalar."""
    return type(value) is tl.tensor and value.type is not value.dtype


@in_place_of(tl.core, "_unwrap_if_constexpr")
def unwrap(value: Any) -> Any:
    kind = type(value)
    if value is None or kind is tl.tensor or kind is int:
        return value
    if kind is tl.constexpr:
        return value.value
    return unwrap.general(value) if isinstance(value, _NESTED) else value


def int32(value: int) -> Any:
    return make(np.array([value], np.int32), tl.int32, False)


@in_place_of(TritonSemantic, "to_tensor")
def to_tensor(self: Any, value: Any, check_type: bool = True) -> Any:
    kind = type(value)
    if kind is tl.tensor:
        return value
    if kind is int and SMALLEST <= value <= LARGEST:
        return int32(value)
    if kind is tl.constexpr and type(value.value) is tl.tensor:
        return value.value  # a constant times a tensor, which Triton 3.8 does not take out
    return to_tensor.general(self, value, check_type)


@in_place_of(TritonSemantic, "scalar_constant")
def scalar_constant(self: Any, value: Any, dtype: Any) -> Any:
    if dtype is None or dtype.name not in PLAIN:
        return scalar_constant.general(self, value, dtype)
    return make(np.array([value], numpy_dtype(dtype)), dtype, False)


# --- Shapes --------------------------------------------------------------------------------------


@in_place_of(tl.tuple, "__eq__")
def shapes_are_equal(self: Any, other: Any) -> Any:
    if isinstance(other, tl.tuple | list):
        return tl.constexpr(self.values == getattr(other, "values", other))
    return shapes_are_equal.general(self, other)


@in_place_of(TritonSemantic, "broadcast_impl_value")
def broadcast(self: Any, one: Any, other: Any) -> Any:
    if getattr(one.type, "shape", None) is getattr(other.type, "shape", None):
        return one, other
    return broadcast.general(self, one, other)
