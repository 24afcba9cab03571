"""Host side of the gradients: one function per launch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..checks import (
    PAYLOAD_DTYPES,
    check_apart,
    check_flag,
    check_no_grad,
    check_out_apart,
    check_runnable,
    check_tensor,
    has_parts,
)
from ..device.constants import constants
from ..device.context import TracedRole
from ..errors import ShapeError
from ..hardware import gpu
from ..launch import launch
from ..prepared import prepared
from ..utils import next_power_of_2
from .activations import Activation, AnyActivation
from .backward_kernels import (
    ActivationRows,
    _activation_gradient_kernel,
    _bias_gradient_kernel,
    _bias_weight_gradient_kernel,
    _clear_rest_kernel,
    _gathered_sum_kernel,
    _wgrad_kernel,
)
from .config import GemmConfig
from .descriptors import rows_of
from .launch import (
    gemm_config,
    gemm_problem,
    grid,
    multiply,
)
from .operands import (
    Epilogue,
    Rows,
    Weights,
    canonical,
    check_devices,
    check_out,
    check_rows,
    check_taken,
    check_weights,
)
from .schedule import INDEX_DTYPES, TileSchedule, checked_block_m, tile_schedule

BLOCK_ROWS, BLOCK_COLUMNS = 16, 64
GRADIENT_ROWS, GRADIENT_COLUMNS, PROGRAMS_PER_SM = 8, 256, 8
"""The sizes of the gradient of an activation, which reads and writes as a copy does."""


def dgrad(
    grad: torch.Tensor,
    w: torch.Tensor,
    offsets: torch.Tensor,
    *,
    schedule: TileSchedule | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gradient of the rows of a grouped GEMM: out[r] = grad[r] @ w[e], [rows, K].

    grad [rows, N] is the gradient of its output, before any activation; the other arguments are
    those of `grouped_gemm`. With a schedule, the offsets of that are used.
    """
    check_no_grad(grad=grad, w=w)
    check_out_apart(out, w=w, x=grad)
    return _dgrad(grad, w, offsets, schedule, out)


@prepared
def _dgrad(
    grad: torch.Tensor,
    w: torch.Tensor,
    offsets: torch.Tensor,
    schedule: TileSchedule | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    check_rows(grad, None, "grad")
    check_weights(grad, w, "K", "none")
    if grad.shape[1] != w.shape[1]:
        raise ShapeError(
            f"grad has shape {list(grad.shape)} and w {list(w.shape)}; grad must be [rows, N], "
            f"N = {w.shape[1]}."
        )
    check_tensor("offsets", offsets, (w.shape[0] + 1,), INDEX_DTYPES)
    check_devices(grad, offsets=offsets)
    num_rows = grad.shape[0]
    config = gemm_config(w, num_rows, transposed=True, block_m=checked_block_m(schedule))
    if schedule is None:
        schedule = tile_schedule(offsets, num_rows, config.block_m)
    weights = Weights(w, transposed=True)
    return multiply(Rows(grad), weights, Epilogue(), schedule, num_rows, out, config)


def wgrad(
    grad: torch.Tensor,
    x: torch.Tensor,
    offsets: torch.Tensor,
    *,
    row_offset: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
) -> torch.Tensor:
    """Gradient of the weights of a grouped GEMM: out[e] = grad[rows of e].T @ x[rows of e].

    grad [rows, N] is the gradient of its output, before any activation; x [rows, K] has the same
    dtype. With row_offset int64 [rows], row r of x begins row_offset[r] elements after x. out
    [L, N, K] may be float32 for bf16 operands, and of P parts that lie apart, [L, P, N / P, K] of
    any strides in multiples of 16 bytes; with `accumulate` the gradient is added to what it holds.
    An expert without rows gets zeros. Sums are float32, in order: the same input gives the same
    bits.

    Rows g, h, i of grad, a, b, c of x, offsets [0, 2, 3]: out = [g ⊗ a + h ⊗ b, i ⊗ c].
    """
    check_no_grad(grad=grad, x=x)
    check_flag("accumulate", accumulate)
    check_out_apart(out, grad=grad, x=x)
    return launch_wgrad(grad, x, offsets, row_offset, out, bool(accumulate))


@prepared
def launch_wgrad(
    grad: torch.Tensor,
    x: torch.Tensor,
    offsets: torch.Tensor,
    row_offset: torch.Tensor | None,
    out: torch.Tensor | None,
    accumulate: bool,
    num_free_sms: int = 0,
    expected_rows: int | None = None,
) -> torch.Tensor:
    """`wgrad`, which leaves so many SMs to others, of tensors with about so many rows in use; None:
    all of them."""
    check_rows(grad, None, "grad")
    check_tensor("x", x, ("M", "K"), (grad.dtype,))
    check_rows(x, None)
    check_tensor("offsets", offsets, ("L+1",), INDEX_DTYPES)
    if row_offset is not None:
        check_tensor("row_offset", row_offset, (grad.shape[0],), (torch.int64,))
        check_taken("row_offset", x, grad.shape[0])
    check_devices(grad, x=x, offsets=offsets, row_offset=row_offset)
    check_runnable(grad.device)
    num_rows, num_columns = grad.shape
    depth, num_experts = x.shape[1], offsets.numel() - 1
    if num_experts < 1 or num_columns == 0 or depth == 0:
        raise ShapeError(
            f"offsets has {offsets.numel()} elements, grad {num_columns} columns and x {depth}; "
            "there must be at least one expert and one column of each."
        )
    if row_offset is None and x.shape[0] != num_rows:
        raise ShapeError(
            f"x has {x.shape[0]} rows and grad has {num_rows}; they must be as many, or "
            "row_offset must say where the rows of x are."
        )
    shape: tuple[int, ...] = (num_experts, num_columns, depth)
    if out is None:
        if accumulate:
            raise ShapeError("accumulate is True and out is None; pass the gradient to add to.")
        out = grad.new_empty(shape)
    if has_parts(out):
        check_parts(out, shape)
    else:
        check_out(grad, out, shape, PAYLOAD_DTYPES)
    check_apart(out, grad=grad, x=x)
    if num_rows == 0:
        return out if accumulate else out.zero_()
    row_offset = None if row_offset is None else row_offset.contiguous()
    num_used = num_rows if expected_rows is None else expected_rows
    more = row_offset, num_free_sms, not accumulate
    programs, operands, options = wgrad_launch(grad, x, out, num_used, *more)
    rows = offsets.contiguous(), num_rows, None
    launch(_wgrad_kernel, programs, *operands, *rows, ACCUMULATE=accumulate, EARLY=False, **options)
    return out


def wgrad_launch(
    grad: torch.Tensor,
    x: torch.Tensor,
    out: torch.Tensor,
    num_rows: int,
    row_offset: torch.Tensor | None = None,
    num_free_sms: int = 0,
    is_alone: bool = False,
) -> tuple[tuple[int, ...], tuple[Any, Any, Any], dict[str, Any]]:
    """What every kernel that computes `wgrad` is launched with: (grid, grad, x and out as kernels
    take them, options). num_rows: about how many rows are in use, which decides the tile shape.
    is_alone: see `GemmConfig.for_weights`; one that accumulates is not, as it loads what it adds
    to."""
    problem = gemm_problem(out, num_rows, gathered=row_offset is not None)
    config = GemmConfig.for_weights(replace(problem, dtype=grad.dtype), out.itemsize, is_alone)
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    by_part = out if has_parts(out) else canonical(out)[:, None]
    num_experts, num_parts, num_columns, depth = by_part.shape
    num_tiles = num_experts * num_parts * triton.cdiv(num_columns, block_m)
    num_tiles *= triton.cdiv(depth, block_n)
    operands = (
        create_ragged_descriptor(canonical(grad), [block_k, block_m]),
        rows_of(x, row_offset, [block_k, block_n]),
        TensorDescriptor.from_tensor(by_part, [1, 1, block_m, block_n // config.subtiles]),
    )
    programs = grid(num_tiles, grad.device, config, num_free_sms)
    options = config.launch_options() | {"EXPERTS_PAD": next_power_of_2(num_experts)}
    return programs, operands, options


def check_parts(out: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise unless out [L, P, N / P, K] can take the gradient [L, N, K] of this shape."""
    num_experts, num_columns, depth = shape
    check_tensor("out", out, (num_experts, "P", "N / P", depth), PAYLOAD_DTYPES)
    steps = [step * out.itemsize % 16 for step in out.stride()[:-1]]
    is_packed = out.stride(3) == 1 and not any(steps) and out.data_ptr() % 16 == 0
    if out.shape[1] * out.shape[2] != num_columns or not is_packed:
        raise ShapeError(
            f"out has shape {list(out.shape)}, strides {tuple(out.stride())} and starts at address "
            f"{out.data_ptr():#x}; its parts must have {num_columns} rows together, which are "
            "contiguous and start at multiples of 16 bytes."
        )


def activation_dgrad(
    grad: torch.Tensor,
    w: torch.Tensor,
    pre: torch.Tensor,
    schedule: TileSchedule,
    activation: AnyActivation,
    row_weight: torch.Tensor | None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The gradients of a second GEMM and of the activation before it.

    grad [rows, H] is the gradient of (activation(pre) @ w[e].T + bias[e]) * row_weight, w [L, H,
    I], pre [rows, parts * I]. Returns the gradient of pre; activation(pre) * row_weight [rows, I],
    which the gradient of w needs; and the gradient of row_weight float32 [rows], None without one.
    (As in SonicMoE, neither the activations nor the second GEMM's output are kept.)
    """
    return _activation_dgrad(grad, w, pre, schedule, activation, row_weight, bias)


@prepared
def _activation_dgrad(
    grad: torch.Tensor,
    w: torch.Tensor,
    pre: torch.Tensor,
    schedule: TileSchedule,
    activation: AnyActivation,
    row_weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    num_rows, weights = len(grad), Weights(w, transposed=True)
    config = gemm_config(w, num_rows, transposed=True, block_m=schedule.block_m)
    act = multiply(Rows(grad), weights, Epilogue(), schedule, num_rows, None, config)
    weight_grad = None if row_weight is None else pre.new_empty(num_rows, dtype=torch.float32)
    rows = ActivationRows(act, pre, row_weight, torch.empty_like(pre), act, weight_grad)
    launch_activation_gradient(rows, schedule.offsets, activation)
    if bias is not None and weight_grad is not None:
        launch_bias_weight_gradient(grad, bias, weight_grad, schedule.offsets)
    return rows.pre_grad, act, weight_grad


def launch_activation_gradient(
    rows: ActivationRows,
    offsets: torch.Tensor,
    activation: AnyActivation,
    trace: TracedRole | None = None,
) -> None:
    """From the gradient of activations, before they are weighted, to that of pre-activations.

    A pass of its own: as an epilogue of the product, it took up to 1.5 times as long as both,
    since tensor cores idled meanwhile (bench/notes/training.md). Its programs are as many for any
    number of rows: a layer's prepared backward launches as many for more rows as for those of
    its first call.
    """
    num_rows, num_columns = rows.grad.shape
    if num_rows:
        launch(
            _activation_gradient_kernel,
            (PROGRAMS_PER_SM * gpu(offsets.device).num_sms,),
            rows,
            *(offsets, num_rows, offsets.numel() - 1, num_columns, trace),
            ACTIVATION=constants(Activation.of(activation)),
            BLOCK_M=GRADIENT_ROWS,
            BLOCK_N=GRADIENT_COLUMNS,
            num_warps=8,
            shares_sms=True,
        )


def launch_bias_weight_gradient(
    grad: torch.Tensor, bias: torch.Tensor, weight_grad: torch.Tensor, offsets: torch.Tensor
) -> None:
    """Add to weight_grad [rows] the product of each row of grad [rows, H] with its expert's bias,
    which is weighted as the product with the weights is. By a fixed number of programs, as
    `launch_activation_gradient`."""
    num_rows = len(weight_grad)
    if not num_rows:
        return
    num_experts, num_columns = bias.shape
    launch(
        _bias_weight_gradient_kernel,
        (num_experts, triton.cdiv(4 * gpu(grad.device).num_sms, num_experts)),
        *(grad, bias, weight_grad, offsets, num_rows, num_columns),
        BLOCK_M=BLOCK_ROWS,
        BLOCK_N=BLOCK_COLUMNS,
        shares_sms=True,
    )


@prepared
def activation_gradient(
    grad: torch.Tensor, pre: torch.Tensor, offsets: torch.Tensor, activation: AnyActivation
) -> torch.Tensor:
    """Gradient of pre [rows, parts * N] from that of activation(pre), grad [rows, N]."""
    pre_grad = torch.empty_like(pre)
    rows = ActivationRows(grad, pre, None, pre_grad, None, None)
    launch_activation_gradient(rows, offsets, activation)
    return pre_grad


@prepared
def bias_gradient(
    grad: torch.Tensor, offsets: torch.Tensor, row_weight: torch.Tensor | None = None
) -> torch.Tensor:
    """float32 [L, N]: the sum of each expert's rows of grad [rows, N], times their weights."""
    num_rows, num_columns = grad.shape
    num_experts = offsets.numel() - 1
    out = grad.new_empty((num_experts, num_columns), dtype=torch.float32)
    launch(
        _bias_gradient_kernel,
        (num_experts, triton.cdiv(num_columns, BLOCK_COLUMNS)),
        *(grad, row_weight, out, offsets, num_rows, num_columns),
        BLOCK_M=BLOCK_ROWS,
        BLOCK_N=BLOCK_COLUMNS,
        shares_sms=True,
    )
    return out


@prepared
def clear_rest(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Set the rows of x [rows, N], contiguous, from offsets[L] on to 0, and return x."""
    if x.numel():
        num_programs = min(triton.cdiv(len(x), BLOCK_ROWS), gpu(x.device).num_sms)
        launch(
            _clear_rest_kernel,
            (num_programs,),
            *(x, offsets, offsets.numel() - 1, *x.shape),
            BLOCK_M=BLOCK_ROWS,
            BLOCK_N=BLOCK_COLUMNS,
        )
    return x


def gathered_sum(
    grad: torch.Tensor, row_index: torch.Tensor, offsets: torch.Tensor, num_rows: int
) -> torch.Tensor:
    """[num_rows, K]: for each row of x, the sum of the rows of grad [rows, K] that row_index took
    from it, in order, without those from offsets[L] on."""
    rows = torch.arange(len(grad), dtype=torch.int64, device=grad.device)
    row_of_x = torch.where(rows < offsets[-1], row_index.long(), num_rows)
    by_row, order = row_of_x.sort(stable=True)
    begins = torch.arange(num_rows + 1, dtype=torch.int64, device=grad.device)
    first = torch.searchsorted(by_row, begins)
    out = grad.new_empty(num_rows, grad.shape[1])
    block = 32 if grad.device.type == "cpu" else 1024
    if num_rows:
        launch(
            _gathered_sum_kernel,
            (num_rows, triton.cdiv(grad.shape[1], block)),
            *(grad, order, first, out, grad.shape[1]),
            BLOCK_K=block,
        )
    return out
