"""`grouped_gemm` and `grouped_mlp`: checks, the choice of tiles, and gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..checks import check_tensor, packed
from ..errors import BackendError, ShapeError
from .backward import (
    activation_dgrad,
    activation_gradient,
    bias_gradient,
    clear_rest,
    dgrad,
    gathered_sum,
    wgrad,
)
from .config import GemmConfig
from .launch import gemm_config, multiply
from .operands import (
    Epilogue,
    Operand,
    Rows,
    Weights,
    check_devices,
    check_row_weight,
    check_rows,
    check_taken,
    check_weights,
    num_parts,
    split_scales,
)
from .schedule import INDEX_DTYPES, TileSchedule, height_of, tile_schedule


@dataclass(frozen=True, slots=True)
class Placement:
    """Which rows are whose: offsets [L + 1], row_index [rows] or None, and their tiles."""

    offsets: torch.Tensor
    row_index: torch.Tensor | None
    schedule: TileSchedule
    num_rows: int

    def rows(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> Rows:
        """x in the order of the output."""
        if self.row_index is None:
            return Rows(x, None, scale)
        index = self.row_index.long()
        return Rows(x, index * x.stride(0), None if scale is None else scale[index])

    def rows_gradient(self, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Gradient of x [M, K] from that of its rows in the order of the output."""
        if self.row_index is None:
            return clear_rest(grad, self.offsets)
        return gathered_sum(grad, self.row_index, self.offsets, x.shape[0])


def grouped_gemm(
    x: Operand,
    w: Operand,
    offsets: torch.Tensor,
    *,
    row_index: torch.Tensor | None = None,
    activation: str = "none",
    bias: torch.Tensor | None = None,
    row_weight: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    schedule: TileSchedule | None = None,
) -> torch.Tensor:
    """Multiply the rows of each expert by its weights:

        out[r] = activation(x[r] @ w[e].T + bias[e]) * row_weight[r]

    with gradients for x, w, bias and row_weight.

    x: bf16 or fp32 [M, K]. w: [L, N, K], same dtype, contiguous. Rows of x, of w and of the output
    are multiples of 16 bytes. offsets: int32 or int64 [L + 1], rising from 0, on the same device;
    expert e owns rows offsets[e] .. offsets[e+1]. row_index: int32 or int64 [rows], the row of x to
    take for each row of the output; by default row r for row r. bias [L, N], of w's dtype;
    row_weight: float32 [rows]. schedule: `tile_schedule(offsets, rows, ...)`, where several calls
    can share it; its offsets count then. `out` must not overlap the operands.

    activation "none", "silu" and "gelu" give [rows, N]. "swiglu" and "geglu" take w [L, 2I, K],
    rows of gate before rows of up, and give silu(gate) * up or gelu(gate) * up [rows, I]; gelu is
    the exact one. Sums are fp32, rounded once to the dtype of x. Rows from offsets[L] on are left
    as they are in `out`, undefined without it; their gradients count for nothing, and are 0 for x.

    fp8, forward only: x = (e4m3 [M, K], float32 scales [M, K / 128]) and w = (e4m3 [L, N, K],
    float32 scales [L, N / 128, K / 128]), sizes rounded up, give bf16 with bf16 bias.

    Four tokens a, b, c, d; expert 0 gets c and a, expert 1 gets d, b and c:

        row_index = [2, 0, 3, 1, 2], offsets = [0, 2, 5]
        out = [c @ w0.T, a @ w0.T, d @ w1.T, b @ w1.T, c @ w1.T]

    Saved for the gradients: x, w and what the activation is of. With a gradient for row_weight the
    product is rounded before it is weighted. What tensors hold is not checked: `row_index` and
    `offsets` must be in range.

    Raises ShapeError and DtypeError for arguments of the wrong kind, BackendError for CPU tensors
    without the interpreter, and where `out` or fp8 meets a gradient.
    """
    x, x_scale = split_scales("x", x)
    w, w_scale = split_scales("w", w)
    check_rows(x, x_scale)
    check_weights(x, w, x.shape[1], activation, w_scale, bias)
    place, config = _place(x, w, offsets, row_index, row_weight, activation, schedule)
    if not _wants_gradients(x, w, bias, row_weight):
        weights = Weights(w, w_scale, bias)
        epilogue = Epilogue(activation, row_weight)
        rows = place.rows(x, x_scale)
        return multiply(rows, weights, epilogue, place.schedule, place.num_rows, out, config)
    if out is not None or x_scale is not None:
        what = "out" if out is not None else "fp8"
        raise BackendError(
            f"an argument requires grad, and there is no gradient with {what}. Call it under "
            "torch.no_grad(), or without."
        )
    if row_weight is not None and row_weight.requires_grad:
        y: torch.Tensor = _GroupedGemm.apply(x, w, bias, None, place, activation, config)
        with torch.no_grad():  # what nobody wrote may be NaN, and that times 0 as well
            clear_rest(y, place.offsets)
        return (y * row_weight[:, None]).to(y.dtype)
    result: torch.Tensor = _GroupedGemm.apply(x, w, bias, row_weight, place, activation, config)
    return result


def grouped_mlp(
    x: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    offsets: torch.Tensor,
    *,
    row_index: torch.Tensor | None = None,
    row_weight: torch.Tensor | None = None,
    activation: str = "swiglu",
    b_up: torch.Tensor | None = None,
    b_down: torch.Tensor | None = None,
) -> torch.Tensor:
    """The experts' feed-forward: y[r] = (activation(x[r] @ w_up[e].T + b_up[e]) @ w_down[e].T +
    b_down[e]) * row_weight[r], [rows, H], with gradients for all but the indices.

    w_up [L, 2I, H] for gated activations, else [L, I, H]; w_down [L, H, I]; the rest as in
    `grouped_gemm`. Saved for the gradients: x and what the activation is of, [rows, 2I]; the
    activation is made again beside its gradient, in the epilogue of a GEMM.
    """
    parts = num_parts(activation)
    if activation == "none":
        raise ShapeError("activation is 'none'; one must stand between the two GEMMs.")
    check_rows(x, None)
    check_weights(x, w_up, x.shape[1], activation, bias=b_up)
    intermediate = w_up.shape[1] // parts
    check_weights(x, w_down, intermediate, "none", bias=b_down)
    if w_down.shape[0] != w_up.shape[0]:
        raise ShapeError(
            f"w_up has {w_up.shape[0]} experts, w_down {w_down.shape[0]}; both must have as many."
        )
    place, config = _place(x, w_up, offsets, row_index, row_weight, activation, None)
    tensors = x, w_up, w_down, b_up, b_down, row_weight
    y: torch.Tensor = _GroupedMlp.apply(
        *tensors, place, activation, config, _wants_gradients(*tensors)
    )
    return y


def _wants_gradients(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _place(
    x: torch.Tensor,
    w: torch.Tensor,
    offsets: torch.Tensor,
    row_index: torch.Tensor | None,
    row_weight: torch.Tensor | None,
    activation: str,
    schedule: TileSchedule | None,
) -> tuple[Placement, GemmConfig]:
    """Check where the rows are and what weighs them, and choose the tiles of their product with
    w."""
    num_rows = x.shape[0]
    if row_index is not None:
        check_tensor("row_index", row_index, ("rows",), INDEX_DTYPES)
        num_rows = row_index.shape[0]
        check_taken("row_index", x, num_rows)
    check_tensor("offsets", offsets, (w.shape[0] + 1,), INDEX_DTYPES)
    check_devices(x, offsets=offsets, row_index=row_index)
    check_row_weight(x, row_weight, num_rows)
    gathered, block_m = row_index is not None, height_of(schedule)
    config = gemm_config(w, num_rows, activation, gathered=gathered, block_m=block_m)
    if schedule is None:
        schedule = tile_schedule(offsets, num_rows, config.block_m)
    return Placement(schedule.offsets, row_index, schedule, num_rows), config


class _GroupedGemm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        row_weight: torch.Tensor | None,
        place: Placement,
        activation: str,
        config: GemmConfig,
    ) -> torch.Tensor:
        pre = None if activation == "none" else x.new_empty(place.num_rows, w.shape[1])
        ctx.save_for_backward(x, w, row_weight, pre)
        ctx.place, ctx.activation = place, activation
        epilogue = Epilogue(activation, row_weight, pre)
        schedule, weights = place.schedule, Weights(w, bias=bias)
        return multiply(place.rows(x), weights, epilogue, schedule, place.num_rows, None, config)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        _refuse_second_order()
        x, w, row_weight, pre = ctx.saved_tensors
        place: Placement = ctx.place
        grad = packed(grad)
        if row_weight is not None:
            grad = (grad * row_weight[:, None]).to(grad.dtype)
        if pre is not None:
            grad = activation_gradient(grad, pre, place.offsets, ctx.activation)
        needs = ctx.needs_input_grad
        return (
            _gradient_of_x(grad, x, w, place) if needs[0] else None,
            _gradient_of_w(grad, x, place) if needs[1] else None,
            bias_gradient(grad, place.offsets).to(w.dtype) if needs[2] else None,
            *(None,) * 4,
        )


class _GroupedMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w_up: torch.Tensor,
        w_down: torch.Tensor,
        b_up: torch.Tensor | None,
        b_down: torch.Tensor | None,
        row_weight: torch.Tensor | None,
        place: Placement,
        activation: str,
        config: GemmConfig,
        needs_pre: bool,
    ) -> torch.Tensor:
        pre = x.new_empty(place.num_rows, w_up.shape[1]) if needs_pre else None
        ctx.save_for_backward(x, w_up, w_down, b_down, row_weight, pre)
        ctx.place, ctx.activation = place, activation
        schedule, num_rows = place.schedule, place.num_rows
        up, down = Weights(w_up, bias=b_up), Weights(w_down, bias=b_down)
        first, second = Epilogue(activation, pre=pre), Epilogue(row_weight=row_weight)
        act = multiply(place.rows(x), up, first, schedule, num_rows, None, config)
        config = gemm_config(w_down, num_rows, block_m=schedule.block_m)
        return multiply(Rows(act), down, second, schedule, num_rows, None, config)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        _refuse_second_order()
        x, w_up, w_down, b_down, row_weight, pre = ctx.saved_tensors
        place, needs = ctx.place, ctx.needs_input_grad
        offsets = place.offsets
        grad = packed(grad)
        pre_grad, act, of_weight = activation_dgrad(
            grad, w_down, pre, place.schedule, ctx.activation, row_weight
        )
        if needs[5] and of_weight is not None and b_down is not None:  # it scales the bias as well
            rows = torch.arange(place.num_rows, dtype=torch.int64, device=grad.device)
            expert = torch.searchsorted(offsets[1:].contiguous(), rows, right=True)
            expert = expert.clamp_(max=len(b_down) - 1)
            of_bias = (grad.float() * b_down[expert]).sum(1)
            of_weight += torch.where(rows < offsets[-1], of_bias, 0.0)
        return (
            _gradient_of_x(pre_grad, x, w_up, place) if needs[0] else None,
            _gradient_of_w(pre_grad, x, place) if needs[1] else None,
            wgrad(grad, act, offsets) if needs[2] else None,
            bias_gradient(pre_grad, offsets).to(x.dtype) if needs[3] else None,
            bias_gradient(grad, offsets, row_weight).to(x.dtype) if needs[4] else None,
            of_weight if needs[5] else None,
            *(None,) * 4,
        )


def _refuse_second_order() -> None:
    """A graph of the gradients (create_graph=True) would lose them in silence."""
    if torch.is_grad_enabled():
        raise BackendError(
            "grouped GEMMs have no second-order gradients; call backward without create_graph."
        )


def _gradient_of_x(
    grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor, place: Placement
) -> torch.Tensor:
    rows = dgrad(grad, w, place.offsets, schedule=place.schedule)
    return place.rows_gradient(rows, x)


def _gradient_of_w(grad: torch.Tensor, x: torch.Tensor, place: Placement) -> torch.Tensor:
    rows = place.rows(x)
    return wgrad(grad, rows.x, place.offsets, row_offset=rows.offset)
