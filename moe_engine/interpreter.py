"""Triton's interpreter without the work that it repeats: kernels run in less than half the time.

The interpreter (Triton 3.6) replaces all functions of its language at each launch and at each call
of a function of `triton.language.standard`, builds a table of 18 types for each array that it
makes, and computes every integer sum twice to check for an overflow that it then does not report.
A process that interprets its kernels compiles none, so once is enough.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import triton.language as tl


def speed_up() -> None:
    """Change the interpreter of this process. Another Triton may lack the names that this replaces:
    its interpreter stays as it is."""
    from triton.runtime import interpreter  # brings numpy

    names = "_patch_lang", "_LangPatchScope", "_get_np_dtype", "interpreter_builder"
    if not all(hasattr(interpreter, name) for name in names):
        return
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()

    find, found = interpreter._get_np_dtype, dict[str, Any]()

    def get_np_dtype(dtype: Any) -> Any:
        name = (dtype.element_ty if isinstance(dtype, tl.block_type) else dtype).name
        if name not in found:
            found[name] = find(dtype)
        return found[name]

    interpreter._get_np_dtype = get_np_dtype
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
