"""Measure tile shapes on this GPU."""

from __future__ import annotations

from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from ..config import GemmConfig
from ..errors import BackendError
from ..tune import tune
from .launch import gemm_problem, multiply
from .operands import Epilogue, Rows, Weights, num_parts
from .schedule import tile_schedule

ROUNDS = 7


def tune_gemm(
    num_rows: int,
    num_experts: int,
    num_columns: int,
    depth: int,
    *,
    activation: str = "none",
    gathered: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[GemmConfig, float]:
    """Time the promising tiles of a grouped GEMM on random rows, spread evenly, and keep the best:
    later calls on this kind of GPU, with as many rows up to a power of two, take it. Returns it
    with its microseconds. num_columns is that of the output. Raises BackendError without a GPU."""
    if not torch.cuda.is_available():
        raise BackendError("tiles are measured on a GPU, and there is none.")
    new: dict[str, Any] = dict(dtype=dtype, device="cuda")
    w = torch.randn(num_experts, num_columns * num_parts(activation), depth, **new)
    x = torch.randn(num_rows, depth, **new)
    ends = torch.linspace(0, num_rows, num_experts + 1, device="cuda").int()
    offset = torch.randperm(num_rows, device="cuda") * depth if gathered else None
    rows, weights, epilogue = Rows(x, offset), Weights(w), Epilogue(activation)
    problem = gemm_problem(w, num_rows, activation=activation, gathered=gathered)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def run(config: GemmConfig) -> float:
        schedule = tile_schedule(ends, num_rows, config.block_m)
        times = []
        for _ in range(ROUNDS + 2):
            start.record()
            try:
                multiply(rows, weights, epilogue, schedule, num_rows, None, config)
            except OutOfResources:
                return float("inf")
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        return sorted(times[2:])[ROUNDS // 2]

    return tune(problem, run)
