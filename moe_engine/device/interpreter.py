"""Triton's interpreter without what it repeats: kernels take a third to a half of the time.

The interpreter (Triton 3.6) replaces all functions of its language at each launch and at each call
of a function of `triton.language.standard`, builds a table of 18 types for each array that it
makes, describes every shape anew, computes every integer sum twice to check for an overflow that it
then does not report, and sorts by a network of exchanges. A process that interprets its kernels
compiles none, so it can change the language for good.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import triton.language as tl


def speed_up() -> None:
    """Change the interpreter of this process. Another Triton may lack the names that this replaces:
    its interpreter stays as it is."""
    import numpy as np
    from triton.runtime import interpreter

    names = "_patch_lang", "_LangPatchScope", "_get_np_dtype", "interpreter_builder", "TensorHandle"
    if not all(hasattr(interpreter, name) for name in names):
        return
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    find_dtype, find_type = interpreter._get_np_dtype, tl.core._type_for_tuple_values
    dtypes, types = dict[str, Any](), dict[tuple[int, ...], Any]()

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

    interpreter._get_np_dtype = get_np_dtype
    tl.core._type_for_tuple_values = type_for_tuple_values
    tl.sort = sort
