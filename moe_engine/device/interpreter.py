"""Triton's interpreter without what it repeats: kernels take a tenth of the time.

The interpreter (Triton 3.6) replaces all functions of its language at each launch and at each call
of a function of `triton.language.standard`, builds a table of 18 types for each array that it
makes, describes every shape and the type of every block anew, compares shapes size by size,
computes every integer sum twice to check for an overflow that it then does not report, converts
operands that have one type, checks the item size of each result, and sorts by a network of
exchanges. A process that interprets its kernels compiles none, so it can change the language for
good.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import triton.language as tl

INTEGERS = {"int32", "int64"}
PLAIN = {"int1", "fp32"} | INTEGERS
"""Types of which two make the same type, whatever is computed."""
ARITHMETIC = {
    "__add__": "add",
    "__radd__": "add",
    "__sub__": "subtract",
    "__mul__": "multiply",
    "__rmul__": "multiply",
    "__and__": "bitwise_and",
    "__or__": "bitwise_or",
}
COMPARISONS = {
    "__lt__": "less",
    "__le__": "less_equal",
    "__gt__": "greater",
    "__ge__": "greater_equal",
    "__eq__": "equal",
    "__ne__": "not_equal",
}
"""Functions of numpy that do what these methods of a tensor do."""
SMALLEST, LARGEST = -(2**31), 2**31 - 1


def speed_up() -> None:
    """Change the interpreter of this process. Another Triton may lack the names that this replaces:
    its interpreter stays as it is."""
    import numpy as np
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    names = "_patch_lang", "_LangPatchScope", "_get_np_dtype", "interpreter_builder", "TensorHandle"
    if not all(hasattr(interpreter, name) for name in names):
        return

    def patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantic, function = TritonSemantic(builder), getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(owner, name, call)

    interpreter._patch_attr = patch_attr
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
    builder = interpreter.interpreter_builder
    interpreter.TensorHandle.__post_init__ = lambda self: None
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    find_dtype, find_type = interpreter._get_np_dtype, tl.core._type_for_tuple_values
    describe_block, describe_tensor = tl.block_type.__init__, tl.tensor.__init__
    dtypes, types, shapes = dict[str, Any](), dict[tuple[int, ...], Any](), dict[Any, Any]()
    blocks, tensors = dict[Any, dict[str, Any]](), dict[Any, dict[str, Any]]()

    def get_np_dtype(dtype: Any) -> Any:
        name = (dtype.element_ty if isinstance(dtype, tl.block_type) else dtype).name
        if name not in dtypes:
            dtypes[name] = find_dtype(dtype)
        return dtypes[name]

    def type_for_tuple_values(values: Sequence[Any], fields: Any = None) -> Any:
        sizes = tuple(getattr(value, "value", value) for value in values)
        if fields is not None or any(type(size) is not int for size in sizes):
            return find_type(values, fields)
        if sizes not in types:
            types[sizes] = find_type(values)
        return types[sizes]

    def sort(x: Any, dim: Any = None, descending: Any = False) -> Any:
        data = np.sort(x.handle.data)
        if getattr(descending, "value", descending):
            data = np.flip(data, -1)
        return tl.tensor(interpreter.TensorHandle(data, x.handle.dtype), x.type)

    def init_block(self: Any, element_ty: Any, shape: Sequence[Any]) -> None:
        sizes = tuple([getattr(size, "value", size) for size in shape])
        if (key := (element_ty.name, sizes)) not in blocks:
            describe_block(self, element_ty, shape)
            shapes.setdefault(sizes, self.shape)
            blocks[key] = vars(self) | {"shape": shapes[sizes]}
        vars(self).update(blocks[key])

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in tensors:
            describe_tensor(self, None, type)
            tensors[type.name] = dict(vars(self))
        vars(self).update(tensors[type.name], handle=handle, type=type)

    def shapes_are_equal(self: Any, other: Any) -> Any:
        if isinstance(other, tl.tuple | list):
            return tl.constexpr(self.values == getattr(other, "values", other))
        return compare_shapes(self, other)

    def dtypes_are_equal(self: Any, other: Any) -> Any:
        return other is self or compare_dtypes(self, other)

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        if getattr(lhs.type, "shape", None) is getattr(rhs.type, "shape", None):
            return lhs, rhs
        return make_shapes_equal(self, lhs, rhs)

    def unwrap(value: Any) -> Any:
        if isinstance(value, nested):
            return unwrap_nested(value)
        return value.value if isinstance(value, tl.constexpr) else value

    def common_type(dtype: Any, other: Any) -> Any:
        """The type in which numpy computes as the language does, or None."""
        if type(other) is int:
            return dtype if dtype.name in INTEGERS and SMALLEST <= other <= LARGEST else None
        if type(other) is not tl.tensor:
            return None
        if dtype.name == other.dtype.name:
            return dtype if dtype.name in PLAIN else None
        return tl.int64 if {dtype.name, other.dtype.name} == INTEGERS else None

    def result(data: Any, dtype: Any, *operands: Any) -> Any:
        """Blocks of numpy's shape, if an operand is one."""
        is_block = any(one.shape for one in operands if type(one) is tl.tensor)
        kind = tl.block_type(dtype, list(data.shape)) if is_block else dtype
        return tl.tensor(interpreter.TensorHandle(data, dtype), kind)

    def fast_operator(name: str, function: Any) -> Any:
        """numpy's function for operands of plain types, else the operator of the language."""
        general, is_comparison = getattr(tl.tensor, name), name in COMPARISONS

        def call(self: Any, other: Any, **more: Any) -> Any:
            other = getattr(other, "value", other)
            if (dtype := common_type(self.dtype, other)) is None:
                return general(self, other, **more)
            data = function(self.handle.data, other if type(other) is int else other.handle.data)
            return result(data, tl.int1 if is_comparison else dtype, self, other)

        return call

    def add(self: Any, other: Any, **more: Any) -> Any:
        """Offsets of pointers, too."""
        if not self.dtype.is_ptr():
            return add_numbers(self, other, **more)
        other = getattr(other, "value", other)
        if type(other) is int:
            offset = interpreter.TensorHandle(np.array([other]), tl.int64)
        elif type(other) is tl.tensor and other.dtype.name in INTEGERS:
            offset = other.handle
        else:
            return add_numbers(self, other, **more)
        return result(builder.create_addptr(self.handle, offset).data, self.dtype, self, other)

    def to_tensor(self: Any, value: Any, check_type: bool = True) -> Any:
        return value if type(value) is tl.tensor else make_tensor(self, value, check_type)

    nested, unwrap_nested = (list, tuple, tl.tuple), tl.core._unwrap_if_constexpr
    compare_shapes, compare_dtypes = tl.tuple.__eq__, tl.dtype.__eq__
    make_shapes_equal = TritonSemantic.broadcast_impl_value
    tl.core._unwrap_if_constexpr = unwrap
    tl.dtype.__eq__ = dtypes_are_equal
    TritonSemantic.broadcast_impl_value = broadcast
    interpreter._get_np_dtype = get_np_dtype
    tl.block_type.__init__ = init_block
    tl.tensor.__init__ = init_tensor
    tl.tuple.__eq__ = shapes_are_equal
    tl.core._type_for_tuple_values = type_for_tuple_values
    tl.sort = sort
    for name, function in (ARITHMETIC | COMPARISONS).items():
        setattr(tl.tensor, name, fast_operator(name, getattr(np, function)))
    add_numbers, tl.tensor.__add__ = tl.tensor.__add__, add
    make_tensor, TritonSemantic.to_tensor = TritonSemantic.to_tensor, to_tensor
