"""Wrong arguments of the grouped GEMM family raise typed errors before any kernel runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_engine.device.lang import INTERPRETED
from moe_engine.emulation import RankPool
from moe_engine.errors import BackendError, DtypeError, MoeEngineError, ShapeError
from moe_engine.grouped_gemm import (
    Activation,
    dgrad,
    grouped_gemm,
    grouped_mlp,
    tile_schedule,
    wgrad,
)

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
DEVICE = "cpu" if INTERPRETED else "cuda"


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


# Each calls a function with good arguments but for the changes.


def good_arguments() -> dict[str, Any]:
    offsets = torch.tensor([0, 2, 6], device=DEVICE)
    return {"x": zeros(6, 16), "w": zeros(2, 8, 16), "offsets": offsets}


def gemm(**changes: Any) -> None:
    grouped_gemm(**good_arguments() | changes)


def mlp(**changes: Any) -> None:
    weights = {"w_up": zeros(2, 16, 16), "w_down": zeros(2, 16, 8)}
    arguments = good_arguments() | weights
    del arguments["w"]
    grouped_mlp(**arguments | changes)


def of_rows(**changes: Any) -> None:
    arguments = good_arguments() | {"grad": zeros(6, 8)}
    del arguments["x"]
    dgrad(**arguments | changes)


def of_weights(**changes: Any) -> None:
    arguments = good_arguments() | {"grad": zeros(6, 8)}
    del arguments["w"]
    wgrad(**arguments | changes)


def wrong_answers_to_bad_arguments(group: Any) -> list[str]:
    """One line for each bad call that raises nothing, or something else."""
    small, odd = (tile_schedule(torch.tensor([0, 2, 6], device=DEVICE), 6, n) for n in (16, 2))
    row_offset = torch.arange(6, device=DEVICE) * 16
    sizes = {"max_rows": 6, "block_m": 64}
    grad = {"requires_grad": True, "dtype": BF16, "device": DEVICE}
    fp8 = zeros(6, 16, dtype=FP8), zeros(6, 1, dtype=FP32)
    calls: list[tuple[Callable, dict[str, Any], type, str]] = [
        (gemm, {"x": zeros(16)}, ShapeError, r"x has shape \[16\]"),
        (gemm, {"x": [1]}, DtypeError, "x is a list"),
        (gemm, {"x": zeros(6, 16).half()}, DtypeError, "x is float16.*bfloat16 or float32"),
        (gemm, {"x": zeros(16, 6).T}, ShapeError, r"x has strides.*x\.contiguous"),
        (gemm, {"x": zeros(97)[1:].view(6, 16)}, ShapeError, "x .*multiples of 16 bytes"),
        (gemm, {"x": zeros(6, 12), "w": zeros(2, 8, 12)}, ShapeError, "K = 12.*to 16"),
        (gemm, {"w": zeros(2, 8, 24)}, ShapeError, r"w has .*must be \[L, N, 16\]"),
        (gemm, {"w": zeros(2, 8, 16, dtype=FP32)}, DtypeError, "w is float32"),
        (gemm, {"w": zeros(2, 16, 8).mT}, ShapeError, r"w has strides.*w\.contiguous"),
        (gemm, {"w": zeros(0, 8, 16)}, ShapeError, "at least 1"),
        (gemm, {"w": zeros(2**16 + 1, 8, 16)}, ShapeError, "65537 experts.*at most 65536"),
        (gemm, {"w": zeros(2, 8, 16), "activation": "swiglu"}, ShapeError, "multiple of 16"),
        (gemm, {"w": zeros(2, 12, 16)}, ShapeError, "N a multiple of 8.*rows of zeros"),
        (gemm, {"activation": "relu"}, ShapeError, "activation is 'relu'.*'swiglu'"),
        (gemm, {"bias": zeros(2, 9)}, ShapeError, r"bias .*must be \[2, 8\]"),
        (gemm, {"bias": zeros(8, 2).T}, ShapeError, "bias has strides"),
        (
            gemm,
            {"row_weight": zeros(12, dtype=FP32)[::2]},
            ShapeError,
            r"row_weight has strides \(2",
        ),
        (gemm, {"x": (fp8[0], zeros(1, 6, dtype=FP32).expand(6, 6)[:, :1])}, ShapeError, r"x\[1\]"),
        (gemm, {"row_weight": zeros(6)}, DtypeError, "row_weight is bfloat16.*float32"),
        (gemm, {"x": (fp8[0], zeros(6, 2))}, ShapeError, r"x\[1\] .*\[6, 1\]"),
        (gemm, {"x": zeros(6, 16, dtype=FP8)}, DtypeError, "x is float8.*bfloat16 or float32"),
        (gemm, {"x": fp8}, DtypeError, "w is bfloat16.*must be float8"),
        (gemm, {"x": fp8, "w": zeros(2, 8, 16, dtype=FP8)}, DtypeError, "without scales"),
        (gemm, {"x": torch.zeros(6, 16, **grad), "out": zeros(6, 8)}, BackendError, "with out"),
        (mlp, {"w_down": zeros(3, 16, 8)}, ShapeError, "2 experts, w_down 3"),
        (mlp, {"w_down": zeros(2, 16, 16)}, ShapeError, r"w_down .*must be \[L, N, 8\]"),
        (mlp, {"activation": "none"}, ShapeError, 'activation is "none"'),
        (mlp, {"activation": Activation("none")}, ShapeError, 'activation is "none"'),
        (of_rows, {"grad": zeros(6, 16)}, ShapeError, r"grad must be \[rows, N\], N = 8"),
        (of_weights, {"x": zeros(5, 16)}, ShapeError, "x has 5 rows and grad has 6"),
        (of_weights, {"x": zeros(6, 16, dtype=FP32)}, DtypeError, "x is float32.*bfloat16"),
        (of_weights, {"offsets": zeros(1).int()}, ShapeError, "at least one expert"),
        (of_rows, {"offsets": zeros(3).int().to("meta")}, ShapeError, "offsets is on meta"),
        (gemm, {"bias": [1]}, DtypeError, "bias is a list"),
        (of_weights, {"accumulate": True}, ShapeError, "out is None"),
        (of_weights, {"out": zeros(2, 8, 8)}, ShapeError, r"out .*must be \[2, 8, 16\]"),
        (gemm, {"offsets": zeros(2).int()}, ShapeError, r"offsets .*must be \[3\]"),
        (gemm, {"offsets": zeros(3)}, DtypeError, "offsets is bfloat16.*int32 or int64"),
        (gemm, {"offsets": zeros(3).int().to("meta")}, ShapeError, "offsets is on meta"),
        (gemm, {"row_index": zeros(6)}, DtypeError, "row_index is bfloat16"),
        (gemm, {"out": zeros(5, 8)}, ShapeError, r"out .*must be \[6, 8\]"),
        (gemm, {"out": zeros(8, 6).T}, ShapeError, "out has strides"),
        (gemm, {"out": zeros(6, 8, dtype=FP32)}, DtypeError, "out is float32"),
        (gemm, {"x": zeros(29, 16), "schedule": small}, ShapeError, "for 6 rows, and there are 29"),
        (gemm, {"schedule": odd}, ShapeError, r"tiles of 2 rows; a GEMM takes one of \(128, 64"),
        (of_rows, {"w": torch.zeros(2, 8, 16, **grad)}, BackendError, "w requires.*no_grad"),
        (gemm, {"row_offset": row_offset.int()}, DtypeError, "row_offset is int32.*int64"),
        (gemm, {"row_offset": row_offset, "row_index": row_offset}, ShapeError, "and row_index"),
        (
            gemm,
            {"x": fp8, "w": (zeros(2, 8, 16, dtype=FP8), zeros(2, 1, 1, dtype=FP32))}
            | {"row_offset": row_offset},
            ShapeError,
            "row_offset and fp8 rows",
        ),
        (
            gemm,
            {"w": torch.zeros(2, 8, 16, **grad), "row_offset": row_offset},
            BackendError,
            "no gradient with row_offset",
        ),
        (tile_schedule, {"offsets": zeros(1).int(), **sizes}, ShapeError, "offsets has 1 elements"),
    ]
    wrong = []
    for function, changes, kind, text in calls:
        name = f"{function.__name__}({', '.join(changes)}), {text}"
        try:
            function(**changes)
            wrong.append(f"{name}: no error")
        except (MoeEngineError, AssertionError) as error:
            if type(error) is not kind or not re.search(text, str(error)):
                wrong.append(f"{name}: {error!r}")
    return wrong


def test_bad_arguments(pool: RankPool) -> None:
    assert pool.run(wrong_answers_to_bad_arguments, num_ranks=1) == [[]]


@pytest.mark.skipif(INTERPRETED, reason="CPU tensors do run here")
def test_cpu_tensors_need_the_interpreter() -> None:
    x, w, offsets = torch.zeros(6, 16), torch.zeros(2, 8, 16), torch.tensor([0, 2, 6])
    with pytest.raises(BackendError, match="TRITON_INTERPRET=1"):
        grouped_gemm(x, w, offsets)
