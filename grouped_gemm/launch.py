"""Host side of the grouped GEMM: checks, tile schedule and launch. Nothing waits for the device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from ..checks import PAYLOAD_DTYPES, check_no_grad, check_runnable, check_tensor
from ..config import GemmConfig
from ..errors import ShapeError
from ..lang import INTERPRETED
from .kernels import _grouped_gemm_kernel, _tile_schedule_kernel

ACTIVATIONS = ("none", "swiglu")
INDEX_DTYPES = (torch.int32, torch.int64)
NUM_INTERPRETED_PROGRAMS = 2


@dataclass(frozen=True, slots=True)
class TileSchedule:
    """Which rows each tile of rows computes, on the device; made by `tile_schedule`.

    Tile i < num_tiles holds the block_m rows from row[i] on that are before
    offsets[expert[i] + 1]. `expert` and `row` are int32 [max_tiles], `num_tiles` int32 [1].
    """

    expert: torch.Tensor
    row: torch.Tensor
    num_tiles: torch.Tensor
    offsets: torch.Tensor
    block_m: int


def tile_schedule(offsets: torch.Tensor, max_rows: int, block_m: int) -> TileSchedule:
    """Cut the rows of each expert into tiles of `block_m` rows.

    offsets: int32 or int64 [L + 1], rising from 0; expert e owns rows offsets[e] .. offsets[e+1].
    Rows from `max_rows` on get no tile. With offsets [0, 3, 3, 4] and block_m 2, the tiles are
    rows 0-1 and 2 of expert 0, and row 3 of expert 2: expert [0, 0, 2], row [0, 2, 3].
    """
    check_tensor("offsets", offsets, ("L+1",), INDEX_DTYPES)
    check_runnable(offsets.device)
    num_experts = offsets.numel() - 1
    if num_experts < 1 or max_rows < 0 or block_m < 1:
        raise ShapeError(
            f"offsets has {offsets.numel()} elements, max_rows is {max_rows} and block_m is "
            f"{block_m}; offsets needs one element more than there are experts, at least 2."
        )
    offsets = offsets.contiguous()
    max_tiles = triton.cdiv(max_rows, block_m) + num_experts
    expert = torch.empty(max_tiles, dtype=torch.int32, device=offsets.device)
    row = torch.empty_like(expert)
    num_tiles = torch.empty(1, dtype=torch.int32, device=offsets.device)
    with torch.cuda.device_of(offsets):
        _tile_schedule_kernel[(num_experts,)](
            offsets,
            expert,
            row,
            num_tiles,
            num_experts,
            max_rows,
            BLOCK_M=block_m,
            MAX_EXPERTS=triton.next_power_of_2(num_experts),
            STEP=128,
        )
    return TileSchedule(expert, row, num_tiles, offsets, block_m)


def grouped_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    offsets: torch.Tensor,
    *,
    row_index: torch.Tensor | None = None,
    activation: str = "none",
    out: torch.Tensor | None = None,
    schedule: TileSchedule | None = None,
) -> torch.Tensor:
    """Multiply the rows of each expert by its weights: out[r] = activation(x[r] @ w[e].T).

    x: bf16 or fp32 [M, K]. w: [L, N, K], same dtype, contiguous. Rows of x and w are multiples of
    16 bytes. offsets: int32 or int64 [L + 1], rising from 0, on the same device; expert e owns
    rows offsets[e] .. offsets[e+1]. row_index: int32 or int64 [rows], the row of x to take for each
    row of the output; by default row r for row r. schedule: `tile_schedule(offsets, ...)`, where
    several calls can share it.

    activation "none" gives [rows, N]. "swiglu" takes w [L, 2I, K], rows of gate before rows of
    up, and gives silu(gate) * up [rows, I]. Sums are fp32, rounded once to the dtype of x. Rows
    from offsets[L] on are left as they are in `out`, undefined without it.

    Four tokens a, b, c, d; expert 0 gets c and a, expert 1 gets d, b and c:

        row_index = [2, 0, 3, 1, 2], offsets = [0, 2, 5]
        out = [c @ w0.T, a @ w0.T, d @ w1.T, b @ w1.T, c @ w1.T]

    What tensors hold is not checked: `row_index` and `offsets` must be in range.

    Raises ShapeError and DtypeError for arguments of the wrong kind, BackendError for CPU tensors
    without the interpreter and for arguments that require grad.
    """
    check_tensor("x", x, ("M", "K"), PAYLOAD_DTYPES)
    _check_row_bytes("x", x)
    if x.stride(1) != 1 or x.stride(0) * x.itemsize % 16 or x.data_ptr() % 16:
        raise ShapeError(
            f"x has strides {tuple(x.stride())} and starts at address {x.data_ptr():#x}; its rows "
            "must be contiguous and start at multiples of 16 bytes. Pass x.contiguous() or a clone."
        )
    if row_index is None:
        num_rows, row_offset = x.shape[0], None
    else:
        check_tensor("row_index", row_index, ("rows",), INDEX_DTYPES)
        num_rows, row_offset = row_index.numel(), row_index.to(torch.int64) * x.stride(0)
    check_weights(x, w, x.shape[1], activation)
    check_no_grad(x=x, w=w)
    check_tensor("offsets", offsets, (w.shape[0] + 1,), INDEX_DTYPES)
    _check_devices(x, offsets=offsets, row_index=row_index)
    config = gemm_config(w, num_rows, activation)
    if schedule is None:
        schedule = tile_schedule(offsets, num_rows, config.block_m)
    config = replace(config, block_m=schedule.block_m)
    return _launch(x, row_offset, w, schedule, num_rows, activation, out, config)


def gathered_gemm(
    base: torch.Tensor,
    row_offset: torch.Tensor,
    w: torch.Tensor,
    schedule: TileSchedule,
    *,
    activation: str = "none",
    out: torch.Tensor | None = None,
    config: GemmConfig | None = None,
) -> torch.Tensor:
    """`grouped_gemm` on rows that lie anywhere: row r starts row_offset[r] elements after `base`.

    base: a tensor of the dtype of w; only its address counts, and it holds at least one row.
    row_offset: int64 [rows], every row at a multiple of 16 bytes; rows is a worst case, of which
    schedule.offsets[L] are read, computed and written. config: `gemm_config` by default.
    """
    check_tensor("base", base, tuple(base.shape), PAYLOAD_DTYPES)
    if base.data_ptr() % 16:
        raise ShapeError(
            f"base starts at address {base.data_ptr():#x}; it must be a multiple of 16."
        )
    check_tensor("row_offset", row_offset, ("rows",), (torch.int64,))
    check_weights(base, w, "K", activation)
    check_no_grad(base=base, w=w)
    _check_devices(base, row_offset=row_offset)
    num_rows = row_offset.numel()
    if config is None:
        config = replace(gemm_config(w, num_rows, activation), block_m=schedule.block_m)
    if config.block_m != schedule.block_m:
        raise ShapeError(
            f"config has block_m {config.block_m} and schedule has {schedule.block_m}; "
            "make the schedule with tile_schedule(offsets, max_rows, config.block_m)."
        )
    return _launch(base, row_offset, w, schedule, num_rows, activation, out, config)


def gemm_config(w: torch.Tensor, num_rows: int, activation: str = "none") -> GemmConfig:
    """The tile shape for about `num_rows` rows in all times w [L, N, K]."""
    num_columns = w.shape[1] // _num_parts(activation)
    interpreted = INTERPRETED or w.device.type == "cpu"
    capability = None if interpreted else torch.cuda.get_device_capability(w.device)
    return GemmConfig.choose(w.dtype, num_columns, num_rows // w.shape[0], capability)


def _launch(
    a: torch.Tensor,
    row_offset: torch.Tensor | None,
    w: torch.Tensor,
    schedule: TileSchedule,
    num_rows: int,
    activation: str,
    out: torch.Tensor | None,
    config: GemmConfig,
) -> torch.Tensor:
    num_experts, num_weight_rows, depth = w.shape
    parts = _num_parts(activation)
    num_columns = num_weight_rows // parts
    if out is None:
        out = a.new_empty((num_rows, num_columns))
    else:
        check_tensor("out", out, (num_rows, num_columns), (a.dtype,))
        _check_devices(a, out=out)
        if not out.is_contiguous():
            raise ShapeError(f"out has strides {tuple(out.stride())}; it must be contiguous.")
    check_tensor("schedule.offsets", schedule.offsets, (num_experts + 1,), INDEX_DTYPES)
    _check_devices(a, **{"schedule.offsets": schedule.offsets})
    if schedule.row.numel() < triton.cdiv(num_rows, schedule.block_m) + num_experts:
        raise ShapeError(
            f"schedule has {schedule.row.numel()} tiles of {schedule.block_m} rows for "
            f"{num_experts} experts, and there are up to {num_rows} rows; make it with "
            f"tile_schedule(offsets, max_rows={num_rows}, ...)."
        )
    if num_rows == 0:
        return out
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    # One part's columns never run into the next part or expert: loads past them give zeros.
    weights = w.view(num_experts * parts, num_columns, depth)
    weights_in = TensorDescriptor.from_tensor(weights, [parts, block_n // parts, block_k])
    rows_in = a
    if row_offset is None:
        rows_in = TensorDescriptor.from_tensor(a, [block_m, block_k])
    num_tiles = schedule.row.numel() * triton.cdiv(num_columns, block_n // parts)
    with torch.cuda.device_of(a):
        _grouped_gemm_kernel[(min(num_tiles, _num_programs(a.device, a.dtype)),)](
            rows_in,
            None if row_offset is None else row_offset.contiguous(),
            weights_in,
            out,
            schedule.expert,
            schedule.row,
            schedule.num_tiles,
            schedule.offsets,
            num_rows,
            num_columns,
            depth,
            ACTIVATION=activation,
            ALIGNED=num_columns * out.itemsize % 16 == 0 and out.data_ptr() % 16 == 0,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            GROUP_M=config.group_m,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return out


@lru_cache
def _num_programs(device: torch.device, dtype: torch.dtype) -> int:
    """As many programs as run at once."""
    if INTERPRETED:
        return NUM_INTERPRETED_PROGRAMS
    num_sms: int = torch.cuda.get_device_properties(device).multi_processor_count
    return num_sms * (2 if dtype == torch.float32 else 1)


def _num_parts(activation: str) -> int:
    """How many rows of the weights make one column of the output."""
    return 2 if activation == "swiglu" else 1


def check_weights(a: torch.Tensor, w: torch.Tensor, depth: int | str, activation: str) -> None:
    """Raise unless w [L, N, K] can multiply rows of `a`'s dtype and device of length `depth`."""
    if activation not in ACTIVATIONS:
        raise ShapeError(f"activation is {activation!r}; it must be one of {ACTIVATIONS}.")
    check_tensor("w", w, ("L", "N", depth), (a.dtype,))
    _check_row_bytes("w", w)
    if 0 in w.shape or w.shape[1] % _num_parts(activation):
        raise ShapeError(
            f"w has shape {list(w.shape)}; L, N and K must be at least 1, and N even for swiglu "
            "(rows of gate, then as many of up)."
        )
    if not w.is_contiguous() or w.data_ptr() % 16:
        raise ShapeError(
            f"w has strides {tuple(w.stride())} and starts at address {w.data_ptr():#x}; it must "
            "be contiguous [L, N, K] and start at a multiple of 16 bytes. Pass w.contiguous() or "
            "a clone, once."
        )
    _check_devices(a, w=w)
    check_runnable(a.device)


def _check_row_bytes(name: str, tensor: torch.Tensor) -> None:
    depth, itemsize = tensor.shape[-1], tensor.itemsize
    if depth * itemsize % 16:
        raise ShapeError(
            f"{name} has K = {depth}, and rows of {depth * itemsize} bytes; they must be multiples "
            f"of 16 bytes. Pad K of x and of w with zeros to {-depth % (16 // itemsize) + depth}."
        )


def _check_devices(a: torch.Tensor, **others: torch.Tensor | None) -> None:
    for name, tensor in others.items():
        if tensor is not None and tensor.device != a.device:
            raise ShapeError(
                f"{name} is on {tensor.device} and the rows are on {a.device}; "
                f"move it with .to('{a.device}')."
            )
