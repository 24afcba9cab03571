"""Host side of the grouped GEMM: one function per launch. Nothing waits for the device."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import lru_cache

import torch
import triton
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..checks import PAYLOAD_DTYPES, check_int, check_no_grad, check_tensor, shown
from ..device.lang import INTERPRETED
from ..errors import DtypeError, ShapeError
from ..hardware import has_pdl, pdl_options
from .choices import best_config
from .config import HEIGHTS, GemmConfig, GemmProblem
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
    check_row_weight,
    check_taken,
    check_weights,
    num_parts,
    output_dtype,
)
from .schedule import INDEX_DTYPES, MAX_ROWS, TileSchedule, height_of

MAX_TILE = 1024
"""Of a tile in any direction, and of anything else in a `GemmConfig`."""
NUM_INTERPRETED_PROGRAMS = 2


def gathered_gemm(
    base: torch.Tensor,
    row_offset: torch.Tensor,
    w: torch.Tensor,
    schedule: TileSchedule,
    *,
    activation: str = "none",
    row_weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    pre: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: GemmConfig | None = None,
) -> torch.Tensor:
    """`grouped_gemm` on rows that lie anywhere: row r starts row_offset[r] elements after `base`.

    base: a tensor of the dtype of w; only its address counts, and it holds at least one row.
    row_offset: int64 [rows], every row at a multiple of 16 bytes; rows is a worst case, of which
    schedule.offsets[L] are read, computed and written. pre [rows, N], where it is given, gets what
    the activation is of. config: `gemm_config` by default. No gradients.
    """
    check_tensor("base", base, None, PAYLOAD_DTYPES)
    if base.data_ptr() % 16:
        raise ShapeError(
            f"base starts at address {base.data_ptr():#x}; it must be a multiple of 16."
        )
    check_tensor("row_offset", row_offset, ("rows",), (torch.int64,))
    check_weights(base, w, "K", activation, bias=bias)
    check_no_grad(base=base, w=w, bias=bias, row_weight=row_weight)
    check_devices(base, row_offset=row_offset)
    num_rows = row_offset.shape[0]
    check_taken("row_offset", base, num_rows)
    check_row_weight(base, row_weight, num_rows)
    if pre is not None:
        check_out(base, pre, (num_rows, w.shape[1]), name="pre")
    block_m = height_of(schedule)
    if block_m is None:
        raise DtypeError("schedule is None; it must be what tile_schedule(...) returned.")
    if config is None:
        config = gemm_config(w, num_rows, activation, gathered=True, block_m=block_m)
    check_config(config)
    if config.block_m != schedule.block_m:
        raise ShapeError(
            f"config has block_m {config.block_m} and schedule has {schedule.block_m}; "
            "make the schedule with tile_schedule(offsets, max_rows, config.block_m)."
        )
    rows = Rows(base, row_offset.contiguous())
    weights, epilogue = Weights(w, bias=bias), Epilogue(activation, row_weight, pre)
    return multiply(rows, weights, epilogue, schedule, num_rows, out, config)


def gemm_config(
    w: torch.Tensor,
    num_rows: int,
    activation: str = "none",
    *,
    gathered: bool = False,
    transposed: bool = False,
    block_m: int | None = None,
) -> GemmConfig:
    """The tile shape for about `num_rows` rows in all times w [L, N, K], or w transposed; of height
    block_m, where a schedule fixes that."""
    problem = gemm_problem(
        w, num_rows, activation=activation, gathered=gathered, transposed=transposed
    )
    if block_m is not None and (type(block_m) is not int or block_m not in HEIGHTS):
        raise ShapeError(f"block_m is {shown(block_m)}; it must be one of {HEIGHTS}, or None.")
    return best_config(problem, block_m)


def gemm_problem(
    w: torch.Tensor,
    num_rows: int,
    *,
    activation: str = "none",
    gathered: bool = False,
    transposed: bool = False,
) -> GemmProblem:
    """What `grouped_gemm/config.py` chooses for."""
    num_rows = check_int("num_rows", num_rows, 0, MAX_ROWS)
    check_tensor("w", w, ("L", "N", "K"), (*PAYLOAD_DTYPES, FP8))
    parts = num_parts(activation)
    num_columns, depth = w.shape[:0:-1] if transposed else w.shape[1:]
    interpreted = INTERPRETED or w.device.type == "cpu"
    capability = None if interpreted else torch.cuda.get_device_capability(w.device)
    return GemmProblem(
        w.dtype,
        num_rows,
        w.shape[0],
        num_columns // parts,
        depth,
        parts == 2,
        gathered,
        capability,
        1 if interpreted else num_sms(w.device),
    )


def multiply(
    rows: Rows,
    weights: Weights,
    epilogue: Epilogue,
    schedule: TileSchedule,
    num_rows: int,
    out: torch.Tensor | None,
    config: GemmConfig,
) -> torch.Tensor:
    """The grouped GEMM of checked operands: out [num_rows, N / parts], made where it is None."""
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
    if config.num_splits > 1 and rows.scale is None:
        _multiply_split(rows, weights, epilogue, schedule, out, config)
    else:
        _launch(rows, weights, epilogue, schedule, out[None], replace(config, num_splits=1))
    return out


def _launch(
    rows: Rows,
    weights: Weights,
    epilogue: Epilogue,
    schedule: TileSchedule,
    out: torch.Tensor,  # [num_splits, rows, N / parts]
    config: GemmConfig,
) -> None:
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    parts, num_columns = epilogue.parts, out.shape[2]
    w, depth = canonical(weights.w), weights.depth
    if weights.transposed:
        w_in = TensorDescriptor.from_tensor(w, [1, block_k, block_n])
    else:
        # One part's columns never run into the next part or expert: loads past them give zeros.
        by_part = w.view(-1, num_columns, depth)
        w_in = TensorDescriptor.from_tensor(by_part, [parts, block_n // parts, block_k])
    x_in = rows.x
    if rows.offset is None:
        x_in = create_ragged_descriptor(canonical(rows.x), [block_m, block_k])
    num_tiles = schedule.tiles.numel() * triton.cdiv(num_columns, block_n // parts)
    with torch.cuda.device_of(rows.x):
        _grouped_gemm_kernel[grid(num_tiles * config.num_splits, out.device, config)](
            x_in,
            rows.offset,
            rows.scale,
            w_in,
            weights.scale,
            *_outputs(epilogue, out, block_m, block_n // parts // config.subtiles),
            weights.bias,
            epilogue.row_weight,
            schedule.tiles,
            schedule.num_tiles,
            num_columns,
            depth,
            SPLITS=config.num_splits,
            ACTIVATION=epilogue.activation,
            TRANSPOSED=weights.transposed,
            PDL=has_pdl(),
            **config.launch_options(),
            **pdl_options(),
        )


def _multiply_split(
    rows: Rows,
    weights: Weights,
    epilogue: Epilogue,
    schedule: TileSchedule,
    out: torch.Tensor,
    config: GemmConfig,
) -> None:
    """The shares of the depth into float32 memory, then their sum and the epilogue."""
    num_rows, num_columns = out.shape
    block_m, block_n = config.block_m, min(config.block_n, 128)
    shape = (config.num_splits, num_rows, weights.num_columns)
    partial = out.new_empty(shape, dtype=torch.float32)
    plain = replace(weights, bias=None)
    _launch(rows, plain, Epilogue(), schedule, partial, replace(config, subtiles=1))
    num_tiles = schedule.tiles.numel() * triton.cdiv(num_columns, block_n // epilogue.parts)
    with torch.cuda.device_of(rows.x):
        _split_sum_kernel[grid(num_tiles, out.device, config)](
            partial,
            *_outputs(epilogue, out[None], block_m, block_n // epilogue.parts),
            weights.bias,
            epilogue.row_weight,
            schedule.tiles,
            schedule.num_tiles,
            num_rows,
            num_columns,
            config.num_splits,
            ACTIVATION=epilogue.activation,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            num_warps=8,
        )


def _outputs(
    epilogue: Epilogue, out: torch.Tensor, block_m: int, width: int
) -> tuple[TensorDescriptor, TensorDescriptor | None]:
    """Descriptors of what a tile stores to, blocks of `width` columns: out, and pre or None."""
    pre = epilogue.pre
    if pre is not None:
        pre = by_parts(pre, epilogue.parts)
    return ragged(out, block_m, width), None if pre is None else ragged(pre, block_m, width)


def by_parts(tensor: torch.Tensor, parts: int) -> torch.Tensor:
    """[rows, parts * N] as [parts, rows, N]."""
    return tensor.unflatten(1, (parts, -1)).transpose(0, 1)


def ragged(tensor: torch.Tensor, block_m: int, width: int) -> TensorDescriptor:
    """A descriptor of [parts, rows, N] in blocks [1, block_m, width], through which the rows of one
    expert are written without a look at the next one's; see `kernels.store_rows`."""
    return create_ragged_descriptor(tensor, [1, block_m, width], ragged_dim=1)


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


ANY_NUMBER = "num_stages", "programs_per_sm", "group_m", "num_splits"
"""Fields of a config that need not be powers of 2."""


def check_config(config: GemmConfig) -> None:
    """Raise unless these can be the tiles of a GEMM."""
    if not isinstance(config, GemmConfig):
        raise DtypeError(
            f"config is a {type(config).__name__}; it must be what gemm_config(...) returned."
        )
    for field in fields(config):
        value = check_int(f"config.{field.name}", getattr(config, field.name), 1, MAX_TILE)
        if field.name not in ANY_NUMBER and value & (value - 1):
            raise ShapeError(f"config.{field.name} is {value}; it must be a power of 2.")
    if min(config.block_n // config.subtiles, config.block_k) < 16 or config.num_warps > 16:
        raise ShapeError(
            f"config is {config}; block_n / subtiles and block_k must be 16 or more, and num_warps "
            "16 or less."
        )


def grid(num_tiles: int, device: torch.device, config: GemmConfig) -> tuple[int]:
    """As many programs as run at once, or fewer where there is less to do."""
    return (min(num_tiles, num_compute_programs(device, config)),)


def num_compute_programs(device: torch.device, config: GemmConfig) -> int:
    """As many programs as run at once."""
    if INTERPRETED:
        return NUM_INTERPRETED_PROGRAMS
    return num_sms(device) * config.programs_per_sm


@lru_cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
