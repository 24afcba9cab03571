"""Host side of the grouped GEMM: one function per launch. Nothing waits for the device."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton

from ..checks import PAYLOAD_DTYPES, check_apart, check_int, check_tensor, has_parts, shown
from ..device.constants import constants
from ..device.context import TracedRole
from ..device.lang import INTERPRETED
from ..errors import ShapeError
from ..hardware import gpu
from ..launch import launch
from ..prepared import prepared
from .activations import Activation, AnyActivation, num_parts
from .config import BLOCK_MS, GemmConfig, GemmProblem, choose
from .descriptors import describe_weights, outputs, rows_of, scales_of
from .kernels import _grouped_gemm_kernel, _split_sum_kernel
from .operands import (
    FP8,
    Epilogue,
    Rows,
    Weights,
    check_devices,
    check_out,
    output_dtype,
)
from .schedule import INDEX_DTYPES, MAX_ROWS, TileSchedule
from .specialized import is_specialized, launch_specialized

NUM_INTERPRETED_PROGRAMS = 2


def gemm_config(
    w: torch.Tensor,
    num_rows: int,
    activation: AnyActivation = "none",
    *,
    gathered: bool = False,
    transposed: bool = False,
    block_m: int | None = None,
) -> GemmConfig:
    """The tile shape for about `num_rows` rows in all times w [L, N, K], or w transposed; with this
    block_m, where a schedule fixes it."""
    problem = gemm_problem(
        w, num_rows, activation=activation, gathered=gathered, transposed=transposed
    )
    if block_m is not None and (type(block_m) is not int or block_m not in BLOCK_MS):
        raise ShapeError(f"block_m is {shown(block_m)}; it must be one of {BLOCK_MS}, or None.")
    return choose(problem, block_m)


def gemm_problem(
    w: torch.Tensor,
    num_rows: int,
    *,
    activation: AnyActivation = "none",
    gathered: bool = False,
    transposed: bool = False,
) -> GemmProblem:
    """The problem that `gemm_config` chooses a tile shape for."""
    num_rows = check_int("num_rows", num_rows, 0, MAX_ROWS)
    shape = ("L", "P", "N / P", "K") if has_parts(w) else ("L", "N", "K")
    check_tensor("w", w, shape, (*PAYLOAD_DTYPES, FP8))
    parts = num_parts(activation)
    num_columns, depth = w.shape[1:-1].numel(), w.shape[-1]
    if transposed:
        num_columns, depth = depth, num_columns
    chip = gpu(w.device)
    return GemmProblem(
        w.dtype,
        num_rows,
        w.shape[0],
        num_columns // parts,
        depth,
        parts == 2,
        gathered,
        chip.capability,
        chip.num_sms,
    )


@prepared
def multiply(
    rows: Rows,
    weights: Weights,
    epilogue: Epilogue,
    schedule: TileSchedule,
    num_rows: int,
    out: torch.Tensor | None,
    config: GemmConfig,
    num_free_sms: int = 0,
) -> torch.Tensor:
    """The grouped GEMM of checked operands, out [num_rows, N / parts]; None: a new tensor. Its
    programs leave so many SMs to others."""
    num_experts = weights.w.shape[0]
    num_columns = weights.num_columns // epilogue.parts
    if out is None:
        out = rows.x.new_empty((num_rows, num_columns), dtype=output_dtype(rows.x))
    else:
        check_out(rows.x, out, (num_rows, num_columns))
        check_apart(out, w=weights.w, **({"x": rows.x} if rows.offset is None else {}))
    check_schedule(schedule, rows.x, num_experts, num_rows)
    if num_rows == 0:
        return out
    if config.num_splits > 1:
        _multiply_split(rows, weights, epilogue, schedule, out, config, num_free_sms)
    else:
        launch_product(rows, weights, epilogue, schedule, out[None], config, num_free_sms)
    return out


def launch_product(
    rows: Rows,
    weights: Weights,
    epilogue: Epilogue,
    schedule: TileSchedule,
    out: torch.Tensor,
    config: GemmConfig,
    num_free_sms: int = 0,
    trace: TracedRole | None = None,
    shares_sms: bool = False,
) -> None:
    """The launch of `multiply`, into out [num_splits, rows, N / parts]. trace: its spans' role.
    shares_sms: see `launch`."""
    parts, num_columns, block_n = epilogue.parts, out.shape[2], config.block_n
    num_tiles = schedule.tiles.numel() * triton.cdiv(num_columns, block_n // parts)
    if is_specialized(config, weights, epilogue):
        (num_programs,) = grid(num_tiles, out.device, config, num_free_sms)
        of = rows, weights, epilogue, out[0], schedule.for_kernels, config
        launch_specialized(launch, num_programs, *of, trace=trace, shares_sms=shares_sms)
        return
    config = storing_pre(config.unspecialized(), epilogue)
    launch(
        _grouped_gemm_kernel,
        grid(num_tiles * config.num_splits, out.device, config, num_free_sms),
        rows_of(rows.x, rows.offset, [config.block_m, config.block_k]),
        describe_weights(weights, config, parts),
        scales_of(rows, weights),
        *outputs(epilogue, out, config.block_m, block_n // parts // config.subtiles),
        weights.bias,
        epilogue.row_weight,
        schedule.for_kernels,
        trace,
        TRANSPOSED=weights.transposed,
        **config.launch_options(epilogue.activation),
        shares_sms=shares_sms,
    )


def _multiply_split(
    rows: Rows,
    weights: Weights,
    epilogue: Epilogue,
    schedule: TileSchedule,
    out: torch.Tensor,
    config: GemmConfig,
    num_free_sms: int,
) -> None:
    """The shares of the depth into float32 memory, then their sum and the epilogue."""
    num_rows, num_columns = out.shape
    block_m, block_n = config.block_m, min(config.block_n, 128)
    shape = (config.num_splits, num_rows, weights.num_columns)
    partial = out.new_empty(shape, dtype=torch.float32)
    # Without an activation gate and up are two products, if their weights lie apart.
    are_apart = has_parts(weights.w) and not weights.transposed
    ways = weights.w.unbind(1) if are_apart else (weights.w,)
    in_one_store = replace(config, subtiles=1)
    for w, to in zip(ways, partial.chunk(len(ways), 2), strict=True):
        of = rows, weights._replace(w=w, bias=None), Epilogue(), schedule, to
        launch_product(*of, in_one_store, num_free_sms)
    num_tiles = schedule.tiles.numel() * triton.cdiv(num_columns, block_n // epilogue.parts)
    launch(
        _split_sum_kernel,
        grid(num_tiles, out.device, config, num_free_sms),
        partial,
        *outputs(epilogue, out[None], block_m, block_n // epilogue.parts),
        weights.bias,
        epilogue.row_weight,
        schedule.for_kernels,
        *(num_rows, num_columns, config.num_splits),
        ACTIVATION=constants(Activation.of(epilogue.activation)),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=8,
    )


def storing_pre(config: GemmConfig, epilogue: Epilogue) -> GemmConfig:
    """The tile shape with which pre-activations are stored, too: one store of gate and up takes the
    shared memory of two."""
    return config if epilogue.pre is None else config.stored_in_parts()


def check_schedule(
    schedule: TileSchedule, a: torch.Tensor, num_experts: int, num_rows: int
) -> None:
    """Raise unless the schedule has room for the tiles of these rows."""
    check_tensor("schedule.offsets", schedule.offsets, (num_experts + 1,), INDEX_DTYPES)
    check_devices(a, **{"schedule.offsets": schedule.offsets})
    if schedule.max_rows != num_rows:  # with more of them, tiles would lie beyond the output
        raise ShapeError(
            f"schedule was made for {schedule.max_rows} rows, and there are {num_rows}; make it "
            f"with tile_schedule(offsets, max_rows={num_rows}, ...)."
        )


def grid(
    num_tiles: int, device: torch.device, config: GemmConfig, num_free_sms: int = 0
) -> tuple[int]:
    """One program for each tile, but no more than run at once."""
    return (min(num_tiles, num_compute_programs(device, config, num_free_sms)),)


def num_compute_programs(device: torch.device, config: GemmConfig, num_free_sms: int = 0) -> int:
    """The number of programs that run at once, on all SMs but `num_free_sms`."""
    if INTERPRETED:
        return NUM_INTERPRETED_PROGRAMS
    return max(1, gpu(device).num_sms - num_free_sms) * config.programs_per_sm
