"""The language bound once, launches, and calls of device functions."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterError

from .replacing import in_place_of
from .tensors import LARGEST, SMALLEST, int32, make, semantic

builder = interpreter.interpreter_builder
_pointers_to: dict[Any, Any] = {}


def bind_language() -> None:
    """Do once what each launch did: give the interpreter to all functions of the language."""
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_attr = bind
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()


def bind(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    function = getattr(member, "__wrapped__", member)

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    scope.set_attr(owner, name, call)


@in_place_of(InterpretedFunction, "__call__")
def call_function(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A device function's call."""
    rewritten = getattr(self, "rewritten", None)
    if rewritten is None:
        rewritten = self.rewritten = self.rewrite()
    try:
        return rewritten(*args, **kwargs)
    except Exception as error:
        raise InterpreterError(repr(error)) from error


@in_place_of(InterpretedFunction, "run")
def run(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
    """A launch with tensors of the CPU, of which the kernel gets the addresses."""
    if warmup:
        return
    names = self.arg_names
    given = {**defaults_of(self.fn), **dict(zip(names, args, strict=False))}
    given |= {name: value for name, value in named.items() if name in names}
    constants = constants_of(self.fn)
    arguments = {
        name: value if name in constants else argument(value) for name, value in given.items()
    }
    sizes = grid(arguments) if callable(grid) else grid
    grid = (*sizes, *[1] * (3 - len(sizes)))
    builder.set_grid_dim(*grid)
    function = self.rewrite()
    try:
        with np.errstate(invalid="ignore"):  # of values that masks leave out
            for place in np.ndindex(*grid):
                builder.set_grid_idx(*place)
                function(**arguments)
    except Exception as error:
        raise InterpreterError(repr(error)) from error


@in_place_of(interpreter, "_implicit_cvt")
def argument(value: Any) -> Any:
    """An argument of a kernel as the kernel gets it."""
    if type(value) is int and SMALLEST <= value <= LARGEST:
        return int32(value)
    if isinstance(value, torch.Tensor) and value.dtype in _pointers_to:
        return make(np.array([value.data_ptr()], np.uint64), _pointers_to[value.dtype], False)
    made = argument.general(value)
    if isinstance(value, torch.Tensor):
        _pointers_to[value.dtype] = made.dtype
    return made


@functools.cache
def defaults_of(function: Any) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {one.name: one.default for one in parameters if one.default is not one.empty}


@functools.cache
def constants_of(function: Any) -> set[str]:
    executor = interpreter.GridExecutor(function, [*function.__annotations__], (1,))
    return set(executor.constexprs)
