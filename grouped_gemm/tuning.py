"""Measure tile shapes on this GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from triton.runtime.errors import OutOfResources

from ..checks import PAYLOAD_DTYPES, check_at_least, check_dtype
from ..errors import BackendError
from ..timing import time_graph
from .activations import AnyActivation, num_parts
from .config import GemmConfig, GemmProblem, candidates, keep, predict
from .launch import gemm_problem, multiply
from .operands import Epilogue, Rows, Weights, check_rows, check_weights
from .schedule import tile_schedule

CALLS, ROUNDS = 5, 7
MAX_SLOWER = 1.5
"""Candidates predicted to take more than this many times the shortest time are not tried."""


def tune_gemm(
    num_rows: int,
    num_experts: int,
    num_columns: int,
    depth: int,
    *,
    activation: AnyActivation = "none",
    gathered: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[GemmConfig, float]:
    """Time the promising tile shapes of a grouped GEMM on random rows, spread evenly, and keep the
    fastest. Later calls on this kind of GPU that bring no schedule, with as many rows up to a power
    of two, take it. Returns it with its microseconds.

    num_columns is that of the output; dtype is bf16 or fp32. Raises BackendError without a GPU,
    ShapeError and DtypeError as `grouped_gemm` does.
    """
    if not torch.cuda.is_available():
        raise BackendError("tiles are measured on a GPU, and there is none.")
    check_at_least(1, num_rows=num_rows, num_experts=num_experts)
    check_at_least(1, num_columns=num_columns, depth=depth)
    check_dtype("dtype", dtype, PAYLOAD_DTYPES)
    shape = num_experts, num_columns * num_parts(activation), depth
    w = torch.randn(shape, dtype=dtype, device="cuda")
    x = torch.randn(num_rows, depth, dtype=dtype, device="cuda")
    check_rows(x, None)
    check_weights(x, w, depth, activation)
    ends = torch.linspace(0, num_rows, num_experts + 1, dtype=torch.float64, device="cuda").int()
    offset = (
        torch.randperm(num_rows, dtype=torch.int64, device="cuda") * depth if gathered else None
    )
    rows, weights, epilogue = Rows(x, offset), Weights(w), Epilogue(activation)
    problem = gemm_problem(w, num_rows, activation=activation, gathered=gathered)

    def time_us(config: GemmConfig) -> float:
        schedule = tile_schedule(ends, num_rows, config.block_m)
        operands = rows, weights, epilogue, schedule, num_rows, x.new_empty(num_rows, num_columns)
        try:
            return time_graph(lambda: multiply(*operands, config), CALLS, ROUNDS)
        except OutOfResources:
            return float("inf")

    return tune(problem, time_us)


def tune(
    problem: GemmProblem, time_us: Callable[[GemmConfig], float], block_m: int | None = None
) -> tuple[GemmConfig, float]:
    """Time the promising candidates with `time_us`, inf for one that the GPU refuses, and keep the
    fastest. Returns it with its microseconds."""
    predicted = {config: predict(config, problem).us for config in candidates(problem, block_m)}
    limit = MAX_SLOWER * min(predicted.values())
    times = {config: time_us(config) for config, us in predicted.items() if us <= limit}
    best = min(times, key=lambda config: times[config])
    if times[best] == float("inf"):
        raise BackendError("the GPU refused every tile shape; there is nothing to keep.")
    keep(problem, block_m, best)
    return best, times[best]
