"""Triton's interpreter without what it repeats: kernels take a tenth of the time.

Most of the time of the interpreter (Triton 3.6) is Python around short calls of numpy. It replaces
all functions of its language at each launch and at each call of a device function, describes every
shape and the type of every block anew, makes a table of 18 types for each array, converts operands
that have one type, computes every integer sum twice to check for an overflow that it then does not
report, copies all memory of each argument onto itself, and sorts by a network of exchanges. Here
types are described once (`tensors.py`), the language is replaced once and a launch takes addresses
(`launches.py`), and what kernels do most goes straight to numpy where operands have plain types,
and Triton's general way else (`operators.py`, `functions.py`). Each operation returns the same bits
of the same type, and warns and raises as before. A process that interprets its kernels compiles
none, so it can change the language for good.
"""

from __future__ import annotations


def speed_up() -> None:
    """Change the interpreter of this process. Another Triton may lack the names that this replaces:
    its interpreter stays as it is."""
    from triton.runtime import interpreter

    names = (
        *("_patch_lang", "_LangPatchScope", "_get_np_dtype", "_implicit_cvt", "TensorHandle"),
        *("interpreter_builder", "interpreter_semantic", "InterpretedFunction", "GridExecutor"),
    )
    if all(hasattr(interpreter, name) for name in names):
        from . import functions, launches, operators, replacing, tensors  # noqa: F401 (they register)

        launches.bind_language()
        replacing.replace_all()
