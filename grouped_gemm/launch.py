"""Host side of the grouped GEMM: one function per launch. Nothing waits for the device."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..checks import PAYLOAD_DTYPES, check_int, check_tensor, has_parts, shown
from ..device.constants import constants
from ..device.context import TracedRole
from ..device.lang import INTERPRETED
from ..errors import ShapeError
from ..hardware import gpu
from ..launch import launch
from ..prepared import prepared
from .activations import Activation, AnyActivation, num_parts
from .config import BLOCK_MS, GemmConfig, GemmProblem, choose
from .kernels import _grouped_gemm_kernel, _split_sum_kernel
from .operands import (
    FP8,
    Epilogue,
    Rows,
    Weights,
    canonical,
    check_apart,
    check_devices,
    check_out,
    output_dtype,
)
from .product_kernels import WIDE, ExpertWeights, Gathered, Scales
from .schedule import INDEX_DTYPES, MAX_ROWS, TileSchedule

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
    config = storing_pre(config, epilogue)
    parts, num_columns, block_n = epilogue.parts, out.shape[2], config.block_n
    num_tiles = schedule.tiles.numel() * triton.cdiv(num_columns, block_n // parts)
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
    plain = weights._replace(bias=None)
    in_one_store = replace(config, subtiles=1)
    launch_product(rows, plain, Epilogue(), schedule, partial, in_one_store, num_free_sms)
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


def describe_weights(weights: Weights, config: GemmConfig, parts: int = 1) -> TensorDescriptor:
    """A descriptor of the weights in blocks of what a tile takes in a step, of `parts` rows for
    each column of the output. One part never runs into the next part or expert: loads past its
    end give zeros. See `product_kernels.gemm_tile`."""
    w, block_n, block_k = weights.w, config.block_n, config.block_k
    if w.dim() == 3:
        w = canonical(w).unflatten(1, (parts, -1))
    block = [1, block_k, block_n] if weights.transposed else [parts, block_n // parts, block_k]
    if weights.scale is not None and block_n > WIDE.value:
        block = [1, WIDE.value, block_k]
    return TensorDescriptor.from_tensor(w, [1, *block])


def expert_weights(
    rows: Rows, weights: Weights, config: GemmConfig, parts: int = 1
) -> ExpertWeights:
    """The weights by which kernels of a layer multiply these rows; see `describe_weights`."""
    described = describe_weights(weights, config, parts)
    return ExpertWeights(described, weights.bias, scales_of(rows, weights))


def rows_of(
    x: torch.Tensor, offset: torch.Tensor | None, block: list[int]
) -> TensorDescriptor | Gathered:
    """Rows x [M, K] as kernels take them: a ragged descriptor with blocks of this shape, or with
    `offset` the rows that begin so many elements after x."""
    if offset is not None:
        return Gathered(x, offset)
    return create_ragged_descriptor(canonical(x), block)


def scales_of(rows: Rows, weights: Weights) -> Scales | None:
    """The scales of e4m3 operands, as kernels take them."""
    if rows.scale is None or weights.scale is None:
        return None
    return Scales(rows.scale, weights.scale, rows.scale.stride(0))


def outputs(
    epilogue: Epilogue, out: torch.Tensor, block_m: int, width: int
) -> tuple[TensorDescriptor, TensorDescriptor | None]:
    """Descriptors of out [parts, rows, N] and of pre (or None), which a tile stores in blocks of
    `width` columns."""
    pre = epilogue.pre
    if pre is not None:  # gate and up of these columns in one block
        by_parts = pre.unflatten(1, (epilogue.parts, -1)).transpose(0, 1)
        pre = ragged(by_parts, block_m, width, epilogue.parts)
    return ragged(out, block_m, width), pre


def storing_pre(config: GemmConfig, epilogue: Epilogue) -> GemmConfig:
    """The tile shape with which pre-activations are stored, too: one store of gate and up takes the
    shared memory of two."""
    return config if epilogue.pre is None else config.stored_in_parts()


def ragged(tensor: torch.Tensor, block_m: int, width: int, parts: int = 1) -> TensorDescriptor:
    """A descriptor of [parts, rows, N] in blocks [parts, block_m, width]. A kernel stores an
    expert's rows through it without a check for where the next expert's begin; see
    `kernels.store_rows`."""
    return create_ragged_descriptor(tensor, [parts, block_m, width], ragged_dim=1)


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
