"""Operations in Triton's interpreter, before and after `speed_up`: run in a process of its own,
which it changes for good, this writes each that has another result."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from moe_engine.device.interpreter import speed_up
from moe_engine.device.interpreter.operators import ARITHMETIC, COMPARISONS, OF_INTEGERS

NUMBERS = {"3": 3, "-7": -7, "0": 0, "2**40": 2**40, "2.5": 2.5, "nan": float("nan")}
TYPES = tl.int1, tl.int8, tl.int32, tl.uint32, tl.int64, tl.float32, tl.bfloat16
OPERATORS = sorted({*ARITHMETIC, *COMPARISONS, *OF_INTEGERS, "__xor__", "__truediv__", "__rsub__"})
found: dict[str, Any] = {}
triton.knobs.runtime.interpret = True


def note(name: str, operation: Any, *args: Any, **more: Any) -> Any:
    """What an operation returns, as (type, shape, values), and whether it raises."""
    try:
        result = operation(*args, **more)
    except Exception:
        found[name] = "raises"
        return None
    data = result.handle.data
    data = data.astype(bool) if result.dtype == tl.int1 else data
    found[name] = str(result.type), data.shape, str(data.dtype), data.tobytes()
    return result


def tensors(ints: Any, longs: Any, floats: Any) -> Iterator[tuple[str, Any]]:
    """Scalars and blocks of one size and of two."""
    row, column = tl.arange(0, 8), tl.arange(0, 4)[:, None]
    for name, at in (("scalar", 1), ("row", row), ("column", column), ("block", row + column)):
        for pointers in (ints,) if name == "column" else (ints, longs, floats):
            loaded = tl.load(pointers + at)
            yield f"{loaded.dtype} {name}", loaded
        yield f"int1 {name}", tl.load(ints + at) > 0


def operate(ints: Any, longs: Any, floats: Any, halves: Any) -> None:
    """All operations that `speed_up` replaces."""
    known = dict(tensors(ints, longs, floats))
    operands = known | NUMBERS
    for (one, x), (other, y) in product(known.items(), operands.items()):
        for name in OPERATORS:
            is_shift = "shift" in name and not (type(y) is int and 0 <= y < 8)
            if not is_shift and not (x.dtype == tl.int1 and getattr(y, "dtype", None) == tl.int1):
                note(f"{one} {name} {other}", getattr(x, name), y)
        if x.dtype == tl.int1:
            for third, z in ({"3": 3, "2.5": 2.5, "column": known["int32 column"]}).items():
                note(f"where {one} {third} {other}", tl.where, x, z, y)
                note(f"where {one} {other} {third}", tl.where, x, y, z)
    for (name, x), dtype in product(known.items(), TYPES):
        note(f"{name} to {dtype}", x.to, dtype)
        note(f"{name} as {dtype}", x.to, dtype, bitcast=True)
    every_half = tl.arange(0, 2**16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    for (name, x), dtype in product({"half": tl.load(halves), "all": every_half}.items(), TYPES):
        note(f"bf16 {name} to {dtype}", x.to, dtype)
    for number, dtype in product(NUMBERS, TYPES):
        note(f"full {number} {dtype}", tl.full, (4,), NUMBERS[number], dtype)
        note(f"cast {number} {dtype}", tl.cast, NUMBERS[number], dtype)
    masks = {name: one for name, one in known.items() if name.startswith("int1")}
    for pointers, (name, at) in product((ints, longs, floats, halves), known.items()):
        of = f"{pointers.dtype} + {name}"
        added = note(of, operator.add, pointers, at)
        note(f"{of} as pointers", lambda x: x.to(tl.pointer_type(tl.int8), bitcast=True), at)
        if added is None or not name.startswith("int32"):
            continue
        found[f"{of} element"] = str(added.dtype.element_ty)
        within = pointers + (at & 7)
        note(f"load {of}", tl.load, within)
        others = {"-": None, "row": known["fp32 row"], "long": known["int64 scalar"]} | NUMBERS
        for (mask, is_set), (other, y) in product(masks.items(), others.items()):
            note(f"load {of} {mask} {other}", tl.load, within, mask=is_set, other=y)
    for name, x in known.items():
        note(f"{name} sizes", lambda x: x[:, None], x)
        note(f"{name} more sizes", lambda x: x[None, :, None], x)


@triton.jit
def kernel(ints, longs, floats, halves, number, FIRST: tl.constexpr, pair, default=5):
    operate(ints, longs, floats, halves)
    note("number", operator.add, number, default)
    note("pair", operator.add, pair[0], pair[1])
    note("program", operator.add, tl.program_id(0) * 4 + tl.program_id(1), FIRST)
    note("programs", operator.add, tl.num_programs(0), tl.num_programs(1))


ARGUMENTS = [
    torch.tensor([5, -3, 7, 0, 2, -9, 100, 1] * 2, dtype=torch.int32),
    torch.tensor([3, 2**40, -7, 0, 1, -2, 9, 11] * 2),
    *(
        torch.tensor([1.5, -2.25, 0, 3, float("inf"), -1e-3, 7, 2] * 2, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    ),
]


def results() -> dict[str, Any]:
    """Of all operations, by their names."""
    found.clear()
    kernel[1, 3](*ARGUMENTS, 9, FIRST=2, pair=(4, ARGUMENTS[0]))
    return dict(found)


if __name__ == "__main__":
    np.seterr(all="ignore")
    before = results()
    speed_up()
    after = results()
    assert len(before) == len(after) > 5000, (len(before), len(after))
    assert sum(one == "raises" for one in before.values()) < len(before) / 2
    for name, one in before.items():
        if one != after[name]:
            print(f"{name}: {one}, and then {after[name]}")
