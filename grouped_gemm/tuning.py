"""Measure tile shapes on this GPU."""

from __future__ import annotations

import torch
from triton.runtime.errors import OutOfResources

from ..checks import PAYLOAD_DTYPES, check_at_least, check_dtype
from ..errors import BackendError
from .choices import tune
from .config import GemmConfig
from .launch import gemm_problem, multiply
from .operands import Epilogue, Rows, Weights, check_rows, check_weights, num_parts
from .schedule import tile_schedule

CALLS, ROUNDS = 5, 7


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
    later calls on this kind of GPU that bring no schedule, with as many rows up to a power of two,
    take it. Returns it with its microseconds. num_columns is that of the output. dtype: bf16 or
    fp32. Raises BackendError without a GPU, ShapeError and DtypeError as `grouped_gemm` does."""
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
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def run(config: GemmConfig) -> float:
        schedule = tile_schedule(ends, num_rows, config.block_m)
        out = x.new_empty(num_rows, num_columns)
        try:
            multiply(rows, weights, epilogue, schedule, num_rows, out, config)
        except OutOfResources:
            return float("inf")
        graph = torch.cuda.CUDAGraph()  # so that the GPU is timed, not Python
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                multiply(rows, weights, epilogue, schedule, num_rows, out, config)
        times = []
        for _ in range(ROUNDS + 2):
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / CALLS)
        return sorted(times[2:])[ROUNDS // 2]

    return tune(problem, run)
