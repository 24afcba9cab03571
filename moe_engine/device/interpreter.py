"""Triton's interpreter without what it repeats: kernels take a tenth of the time.

The interpreter (Triton 3.6) replaces all functions of its language at each launch and at each call
of a function of `triton.language.standard`, builds a table of 18 types for each array that it
makes, describes every shape and the type of every block anew, compares shapes size by size,
computes every integer sum twice to check for an overflow that it then does not report, converts
operands that have one type, checks the item size of each result, copies all memory of each argument
onto itself, and sorts by a network of exchanges. What kernels do most, as loads, selects, casts and
integer arithmetic, goes straight to numpy here where operands have plain types, and the general way
of the language else. A process that interprets its kernels compiles none, so it can change the
language for good.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import triton.language as tl

INTEGERS = {"int32", "int64"}
NUMBERS = {"fp32"} | INTEGERS
PLAIN = {"int1"} | NUMBERS
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
OF_INTEGERS = {
    "__floordiv__": "divide",
    "__mod__": "fmod",
    "__lshift__": "left_shift",
    "__rshift__": "right_shift",
}
"""Functions of numpy that do what these methods of a tensor do, but for the division."""
LOADED = INTEGERS | {"int8", "int16", "fp16", "bf16", "fp32"}
"""Types of elements that are loaded as they are."""
HINTS = {"cache_modifier", "eviction_policy", "volatile"}
"""Arguments of a load that decide nothing here."""
SMALLEST, LARGEST = -(2**31), 2**31 - 1
MASK = 2**64 - 1


def speed_up() -> None:
    """Change the interpreter of this process. Another Triton may lack the names that this replaces:
    its interpreter stays as it is."""
    import numpy as np
    import torch
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    names = (
        *("_patch_lang", "_LangPatchScope", "_get_np_dtype", "_implicit_cvt", "TensorHandle"),
        *("interpreter_builder", "interpreter_semantic", "InterpretedFunction", "GridExecutor"),
    )
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
    builder, semantic = interpreter.interpreter_builder, interpreter.interpreter_semantic
    TensorHandle = interpreter.TensorHandle
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    find_dtype, find_type = interpreter._get_np_dtype, tl.core._type_for_tuple_values
    describe_block, describe_tensor = tl.block_type.__init__, tl.tensor.__init__
    describe_pointer = tl.pointer_type.__init__
    dtypes, types, shapes = dict[str, Any](), dict[tuple[int, ...], Any](), dict[Any, Any]()
    blocks, kinds, arrays = dict[Any, Any](), dict[Any, Any](), dict[Any, Any]()
    pointers, pointers_to, new = dict[Any, Any](), dict[Any, Any](), object.__new__

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
        return tl.tensor(TensorHandle(data, x.handle.dtype), x.type)

    def new_block(cls: Any, element_ty: Any, shape: Sequence[Any]) -> Any:
        """One object for all equal types of blocks."""
        key = element_ty.name, tuple([getattr(size, "value", size) for size in shape])
        return blocks.get(key) or blocks.setdefault(key, new(cls))

    def init_block(self: Any, element_ty: Any, shape: Sequence[Any]) -> None:
        if not hasattr(self, "name"):
            describe_block(self, element_ty, shape)
            self.shape = shapes.setdefault(tuple(self.shape), self.shape)

    def new_pointer(cls: Any, element_ty: Any, *more: Any, **named: Any) -> Any:
        """And of pointers."""
        key = unwrap(element_ty), more, *named.items()
        return pointers.get(key) or pointers.setdefault(key, new(cls))

    def init_pointer(self: Any, *args: Any, **named: Any) -> None:
        if not hasattr(self, "name"):
            describe_pointer(self, *args, **named)
            element = TensorHandle(None, self).get_element_ty()
            self.item_bytes = max(1, element.primitive_bitwidth // 8)

    def init_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        described = getattr(type, "of_tensors", None)
        if described is None:
            describe_tensor(self, None, type)
            described = type.of_tensors = self.shape, self.numel, self.dtype
        self.handle, self.type = handle, type
        self.shape, self.numel, self.dtype = described

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
        kind = type(value)
        if value is None or kind is tl.tensor or kind is int:
            return value
        if kind is tl.constexpr:
            return value.value
        return unwrap_nested(value) if isinstance(value, nested) else value

    def common_type(dtype: Any, other: Any) -> Any:
        """The type in which numpy computes as the language does, or None."""
        if type(other) is int and SMALLEST <= other <= LARGEST:
            return dtype if dtype.name in NUMBERS else None
        if type(other) is float:
            return dtype if dtype.name == "fp32" else None
        if type(other) is not tl.tensor:
            return None
        if dtype.name == other.dtype.name:
            return dtype if dtype.name in PLAIN else None
        return tl.int64 if {dtype.name, other.dtype.name} == INTEGERS else None

    def is_of_block(tensor: Any) -> bool:
        return tensor.type is not tensor.dtype

    def make(data: Any, dtype: Any, is_block: bool) -> Any:
        """Blocks of numpy's shape."""
        kind = dtype
        if is_block and (kind := kinds.get((dtype.name, data.shape))) is None:
            kind = tl.block_type(dtype, list(data.shape))
            kinds[dtype.name, data.shape] = kind
        handle = new(TensorHandle)
        handle.data, handle.dtype, handle.attr = data, dtype, {}
        if not hasattr(kind, "of_tensors"):
            return tl.tensor(handle, kind)
        tensor = new(tl.tensor)
        tensor.handle, tensor.type = handle, kind
        tensor.shape, tensor.numel, tensor.dtype = kind.of_tensors
        return tensor

    def fast_operator(name: str, function: Any) -> Any:
        """numpy's function for operands of plain types, else the operator of the language."""
        general, is_comparison = getattr(tl.tensor, name), name in COMPARISONS
        of_integers = name in OF_INTEGERS

        def call(self: Any, other: Any, **more: Any) -> Any:
            if type(other) is tl.constexpr:
                other = other.value
            dtype = common_type(self.dtype, other)
            if dtype is None or (of_integers and dtype.name not in INTEGERS):
                return general(self, other, **more)
            is_tensor = type(other) is tl.tensor
            data = function(self.handle.data, other.handle.data if is_tensor else other)
            is_block = is_of_block(self) or (is_tensor and is_of_block(other))
            return make(data, tl.int1 if is_comparison else dtype, is_block)

        return call

    def divide(a: Any, b: Any) -> Any:
        """Towards zero."""
        return (a - np.fmod(a, b)) // b

    def add(self: Any, other: Any, **more: Any) -> Any:
        """Offsets of pointers, too."""
        dtype = self.dtype
        if type(dtype) is not tl.pointer_type:
            return add_numbers(self, other, **more)
        if type(other) is tl.constexpr:
            other = other.value
        if type(other) is int:
            offset, is_block = np.uint64(other * dtype.item_bytes & MASK), is_of_block(self)
        elif type(other) is tl.tensor and other.dtype.name in INTEGERS:
            offset = dtype.item_bytes * other.handle.data.astype(np.uint64)
            is_block = is_of_block(self) or is_of_block(other)
        else:
            return add_numbers(self, other, **more)
        return make(self.handle.data + offset, dtype, is_block)

    def to_tensor(self: Any, value: Any, check_type: bool = True) -> Any:
        kind = type(value)
        if kind is tl.tensor:
            return value
        if kind is int and SMALLEST <= value <= LARGEST:
            return make(np.array([value], np.int32), tl.int32, False)
        return make_tensor(self, value, check_type)

    def scalar_constant(self: Any, value: Any, dtype: Any) -> Any:
        if dtype is None or dtype.name not in PLAIN:
            return make_constant(self, value, dtype)
        return make(np.array([value], get_np_dtype(dtype)), dtype, False)

    def with_element_ty(self: Any, scalar_ty: Any) -> Any:
        return tl.block_type(scalar_ty, self.shape)

    def cast(self: Any, input: Any, dst_ty: Any, rounding: Any = None) -> Any:
        """By numpy between plain types; to int1 the language compares with 0."""
        source, dtype = input.dtype, dst_ty.scalar
        if source is dtype:
            return input
        if rounding or source.name not in PLAIN or dtype.name not in NUMBERS:
            return cast_generally(self, input, dst_ty, rounding)
        return make(input.handle.data.astype(get_np_dtype(dtype)), dtype, is_of_block(input))

    def cast_value(
        input: Any, dtype: Any, fp_downcast_rounding: Any = None, bitcast: Any = False, **more: Any
    ) -> Any:
        """`tl.cast`; integers to pointers, too."""
        dtype = unwrap(dtype)
        if type(input) is not tl.tensor or more:
            how = fp_downcast_rounding, bitcast
            return cast_any(input, dtype, *how, **more)
        if not unwrap(bitcast):
            return cast(semantic, input, dtype, unwrap(fp_downcast_rounding))
        if type(dtype) is tl.pointer_type and input.dtype.name == "int64":
            return make(input.handle.data.view(np.uint64), dtype, is_of_block(input))
        return semantic.bitcast(input, dtype)

    def get_item(self: Any, slices: Any) -> Any:
        """New sizes of 1."""
        is_plain = type(slices) is tuple and len(slices) > 1 and is_of_block(self)
        if is_plain and all(one is None or one == slice(None) for one in slices):
            return make(self.handle.data[slices], self.dtype, True)
        return get_item_generally(self, slices)

    def operand(value: Any, dtype: Any) -> Any:
        """The data of a tensor, or of a number as one of this type."""
        if type(value) is tl.tensor:
            return value.handle.data
        return np.array([value], get_np_dtype(dtype))

    def where(condition: Any, x: Any, y: Any) -> Any:
        x, y = unwrap(x), unwrap(y)
        one, other = (x, y) if type(x) is tl.tensor else (y, x)
        is_plain = type(condition) is type(one) is tl.tensor and condition.dtype.name == "int1"
        dtype = common_type(one.dtype, other) if is_plain else None
        if dtype is None:
            return choose(condition, x, y)
        data = np.where(condition.handle.data, operand(x, dtype), operand(y, dtype))
        is_block = is_of_block(condition) or is_of_block(one)
        is_block = is_block or (type(other) is tl.tensor and is_of_block(other))
        return make(data, dtype, is_block)

    def filled(shape: tuple[int, ...], value: Any, dtype: Any) -> Any:
        """An array that nothing writes."""
        if (key := (shape, value, dtype)) not in arrays:
            arrays[key] = np.full(shape, value, dtype)
        return arrays[key]

    def load(pointer: Any, mask: Any = None, other: Any = None, **more: Any) -> Any:
        """By pointers to elements that are no bool; where `mask` is not set 0, or other numbers
        that need no cast."""
        mask, other = unwrap(mask), unwrap(other)
        is_plain = type(pointer) is tl.tensor and type(pointer.dtype) is tl.pointer_type
        is_plain = is_plain and (not more or more.keys() <= HINTS)
        if not is_plain or pointer.dtype.element_ty.name not in LOADED:
            return load_generally(pointer, mask, other, **more)
        element, is_block = pointer.dtype.element_ty, is_of_block(pointer)
        if mask is None:
            is_plain = other is None
        else:
            is_plain = type(mask) is tl.tensor and mask.dtype.name == "int1"
            is_plain = is_plain and (is_block or not is_of_block(mask))
        if type(other) is tl.tensor:
            is_plain = is_plain and other.dtype is element and (is_block or not is_of_block(other))
        elif other is not None and common_type(element, other) is None:
            is_plain = is_plain and type(other) in (int, float) and other == 0
        if not is_plain:
            return load_generally(pointer, mask, other, **more)
        if mask is not None:
            pointer, mask = broadcast(semantic, pointer, mask)
        if type(other) is tl.tensor:
            pointer, other = broadcast(semantic, pointer, other)
        addresses, dtype = pointer.handle.data, get_np_dtype(element)
        masked = filled(addresses.shape, True, np.bool_) if mask is None else mask.handle.data
        if type(other) is tl.tensor:
            others = other.handle.data
        else:
            others = filled(addresses.shape, other or 0, dtype)
        data = interpreter._interpreter.load(addresses, masked, others, dtype)
        return make(data, element, is_block)

    def call_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        """A device function's call."""
        rewritten = getattr(self, "rewritten", None)
        if rewritten is None:
            rewritten = self.rewritten = self.rewrite()
        try:
            return rewritten(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    def convert(value: Any) -> Any:
        """An argument of a kernel as the kernel gets it."""
        kind = type(value)
        if kind is int and SMALLEST <= value <= LARGEST:
            return make(np.array([value], np.int32), tl.int32, False)
        if isinstance(value, torch.Tensor) and value.dtype in pointers_to:
            return make(np.array([value.data_ptr()], np.uint64), pointers_to[value.dtype], False)
        made = convert_generally(value)
        if isinstance(value, torch.Tensor):
            pointers_to[value.dtype] = made.dtype
        return made

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        """A launch with tensors of the CPU, of which the kernel gets the addresses."""
        if warmup:
            return
        names = self.arg_names
        given = {**defaults_of(self.fn), **dict(zip(names, args, strict=False))}
        given |= {name: value for name, value in named.items() if name in names}
        constants = constants_of(self.fn)
        arguments = {
            name: value if name in constants else convert(value) for name, value in given.items()
        }
        sizes = grid(arguments) if callable(grid) else grid
        grid = (*sizes, *[1] * (3 - len(sizes)))
        builder.set_grid_dim(*grid)
        function = self.rewrite()
        try:
            for place in np.ndindex(*grid):
                builder.set_grid_idx(*place)
                function(**arguments)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    @functools.cache
    def defaults_of(function: Any) -> dict[str, Any]:
        parameters = inspect.signature(function).parameters.values()
        return {one.name: one.default for one in parameters if one.default is not one.empty}

    @functools.cache
    def constants_of(function: Any) -> set[str]:
        executor = interpreter.GridExecutor(function, [*function.__annotations__], (1,))
        return set(executor.constexprs)

    nested, unwrap_nested = (list, tuple, tl.tuple), tl.core._unwrap_if_constexpr
    compare_shapes, compare_dtypes = tl.tuple.__eq__, tl.dtype.__eq__
    make_shapes_equal = TritonSemantic.broadcast_impl_value
    tl.core._unwrap_if_constexpr = unwrap
    tl.dtype.__eq__ = dtypes_are_equal
    TritonSemantic.broadcast_impl_value = broadcast
    interpreter._get_np_dtype = get_np_dtype
    TensorHandle.__init__ = init_handle
    tl.block_type.__new__ = new_block
    tl.block_type.__init__ = init_block
    tl.block_type.with_element_ty = with_element_ty
    tl.pointer_type.__new__ = new_pointer
    tl.pointer_type.__init__ = init_pointer
    tl.tensor.__init__ = init_tensor
    tl.tuple.__eq__ = shapes_are_equal
    tl.core._type_for_tuple_values = type_for_tuple_values
    tl.sort = sort
    for name, function in (ARITHMETIC | COMPARISONS | OF_INTEGERS).items():
        of_numpy = divide if name == "__floordiv__" else getattr(np, function)
        setattr(tl.tensor, name, fast_operator(name, of_numpy))
    add_numbers, tl.tensor.__add__ = tl.tensor.__add__, add
    make_tensor, TritonSemantic.to_tensor = TritonSemantic.to_tensor, to_tensor
    make_constant = TritonSemantic.scalar_constant
    TritonSemantic.scalar_constant = scalar_constant
    cast_generally, TritonSemantic.cast = TritonSemantic.cast, cast
    choose, tl.where = tl.where, where
    load_generally, tl.load = tl.load, load
    cast_any, tl.cast = tl.cast, cast_value
    tl.tensor.to = cast_value
    get_item_generally, tl.tensor.__getitem__ = tl.tensor.__getitem__, get_item
    interpreter.InterpretedFunction.__call__ = call_function
    interpreter.InterpretedFunction.run = run
    convert_generally, interpreter._implicit_cvt = interpreter._implicit_cvt, convert
