"""`grouped_gemm` and `grouped_mlp`: checks, the choice of tiles, and gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..checks import check_out_apart, check_tensor, packed
from ..errors import BackendError, ShapeError
from ..prepared import prepared
from ..utils import saved_tensors
from .activations import Activation, AnyActivation, check_layer_activation, num_parts
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
    split_scales,
)
from .schedule import INDEX_DTYPES, TileSchedule, checked_block_m, tile_schedule


@dataclass(frozen=True, slots=True)
class Grouping:
    """Which rows belong to which expert: a schedule of the output's rows, and where each of them
    comes from. Row r takes row row_index[r] of x, or the row that begins row_offset[r] elements
    after x, or row r."""

    schedule: TileSchedule
    num_rows: int
    row_index: torch.Tensor | None
    row_offset: torch.Tensor | None

    @property
    def offsets(self) -> torch.Tensor:
        """Where the rows of each expert begin, [L + 1]."""
        return self.schedule.offsets

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """What a backward reads again: autograd keeps them, and refuses them if they have changed
        since."""
        return self.offsets, self.row_index, self.row_offset

    def rows(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> Rows:
        """The rows of x in the order of the output."""
        if self.row_index is None:
            return Rows(x, self.row_offset, scale)
        index = self.row_index.long()
        return Rows(x, index * x.stride(0), None if scale is None else scale[index])

    def rows_gradient(self, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The gradient of x [M, K] from that of its rows in the order of the output."""
        if self.row_index is None:
            return clear_rest(grad, self.offsets)
        return gathered_sum(grad, self.row_index, self.offsets, x.shape[0])


def grouped_gemm(
    x: Operand,
    w: Operand,
    offsets: torch.Tensor,
    *,
    row_index: torch.Tensor | None = None,
    row_offset: torch.Tensor | None = None,
    activation: AnyActivation = "none",
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
    take for each row of the output; by default row r for row r. row_offset, instead of it: int64
    [rows], how many elements after x the row begins, at a multiple of 16 bytes; it may lie outside
    of x, as the rows of `dispatch(in_place=True)` do. bias [L, N], of w's dtype; row_weight:
    float32 [rows]. schedule: `tile_schedule(offsets, rows, ...)`, where several calls can share it;
    the offsets of that are then used. `out` must not overlap the operands.

    activation, a name or an `Activation`: "none", "silu", "gelu", "gelu_tanh" and "relu2" give
    [rows, N]. "swiglu", "geglu" and "geglu_tanh" take w [L, 2I, K], rows of gate before rows of up,
    and give silu(gate) * up or gelu(gate) * up [rows, I]; gelu is the exact one. Sums are fp32,
    rounded once to the dtype of x. Rows from offsets[L] on are left as they are in `out`, and are
    undefined without it; gradients of them are ignored, and those of x's rows there are 0.

    fp8, forward only: x = (e4m3 [M, K], float32 scales [M, K / 128]) and w = (e4m3 [L, N, K],
    float32 scales [L, N / 128, K / 128]), sizes rounded up, give bf16 with bf16 bias.

    Four tokens a, b, c, d; expert 0 gets c and a, expert 1 gets d, b and c:

        row_index = [2, 0, 3, 1, 2], offsets = [0, 2, 5]
        out = [c @ w0.T, a @ w0.T, d @ w1.T, b @ w1.T, c @ w1.T]

    x, w and the pre-activations are saved for the gradients. With a gradient for row_weight the
    product is rounded before it is weighted. What tensors hold is not checked: `row_index`,
    `row_offset` and `offsets` must be in range.

    Raises ShapeError and DtypeError for arguments of the wrong kind, BackendError for CPU tensors
    without the interpreter, and for `out`, row_offset or fp8 where a gradient is wanted.
    """
    if out is not None:
        read_in_place = row_index is None and row_offset is None
        rows, values = (one[0] if isinstance(one, tuple) and one else one for one in (x, w))
        check_out_apart(out, w=values, x=rows if read_in_place else None)
    if not _wants_gradients(x, w, bias, row_weight):
        forward = _forward if row_index is None else _forward.__wrapped__  # which computes offsets
        args = x, w, offsets, row_index, row_offset, activation, bias, row_weight, out, schedule
        product: torch.Tensor = forward(*args)
        return product
    (x, x_scale), (w, _) = _operands(x, w, row_index, row_offset, activation, bias)
    grouping, config = _group(
        x, w, offsets, row_index, row_offset, row_weight, activation, schedule
    )
    forward_only = {"out": out, "row_offset": row_offset, "fp8": x_scale}
    for name, value in forward_only.items():
        if value is not None:
            raise BackendError(
                f"an argument requires grad, and there is no gradient with {name}. Call it under "
                "torch.no_grad(), or without."
            )
    if row_weight is not None and row_weight.requires_grad:
        y: torch.Tensor = _GroupedGemm.apply(x, w, bias, None, grouping, activation, config)
        with torch.no_grad():  # rows that were not written may be NaN, and NaN times 0 is NaN
            clear_rest(y, grouping.offsets)
        rows = torch.arange(grouping.num_rows, device=y.device)
        of_experts = torch.where(rows < grouping.offsets[-1], row_weight, 0.0)
        return (y * of_experts[:, None]).to(y.dtype)
    result: torch.Tensor = _GroupedGemm.apply(x, w, bias, row_weight, grouping, activation, config)
    return result


@prepared
def _forward(
    x: Operand,
    w: Operand,
    offsets: torch.Tensor,
    row_index: torch.Tensor | None,
    row_offset: torch.Tensor | None,
    activation: AnyActivation,
    bias: torch.Tensor | None,
    row_weight: torch.Tensor | None,
    out: torch.Tensor | None,
    schedule: TileSchedule | None,
) -> torch.Tensor:
    """`grouped_gemm` without gradients."""
    (x, x_scale), (w, w_scale) = _operands(x, w, row_index, row_offset, activation, bias)
    grouping, config = _group(
        x, w, offsets, row_index, row_offset, row_weight, activation, schedule
    )
    weights, epilogue = Weights(w, w_scale, bias), Epilogue(activation, row_weight)
    rows, schedule = grouping.rows(x, x_scale), grouping.schedule
    return multiply(rows, weights, epilogue, schedule, grouping.num_rows, out, config)


def _operands(
    x: Operand,
    w: Operand,
    row_index: torch.Tensor | None,
    row_offset: torch.Tensor | None,
    activation: AnyActivation,
    bias: torch.Tensor | None,
) -> tuple[tuple[torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor | None]]:
    """((x, its scales or None), (w, its scales or None)), checked."""
    rows, x_scale = split_scales("x", x)
    weights, w_scale = split_scales("w", w)
    check_rows(rows, x_scale)
    check_weights(rows, weights, rows.shape[1], activation, w_scale, bias)
    if row_offset is not None and (row_index is not None or x_scale is not None):
        other = "row_index" if row_index is not None else "fp8 rows"
        raise ShapeError(f"row_offset and {other} are given together; pass one of them.")
    return (rows, x_scale), (weights, w_scale)


def grouped_mlp(
    x: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    offsets: torch.Tensor,
    *,
    row_index: torch.Tensor | None = None,
    row_weight: torch.Tensor | None = None,
    activation: AnyActivation = "swiglu",
    b_up: torch.Tensor | None = None,
    b_down: torch.Tensor | None = None,
) -> torch.Tensor:
    """The experts' feed-forward: y[r] = (activation(x[r] @ w_up[e].T + b_up[e]) @ w_down[e].T +
    b_down[e]) * row_weight[r], [rows, H], with gradients for all but the indices.

    w_up is [L, 2I, H] for gated activations, else [L, I, H]; w_down [L, H, I]; the other arguments
    are those of `grouped_gemm`. x and the pre-activations [rows, 2I] are saved for the gradients;
    the backward computes the activation again, with its gradient.
    """
    tensors = x, w_up, w_down, b_up, b_down, row_weight
    if not _wants_gradients(*tensors):
        forward = _mlp if row_index is None else _mlp.__wrapped__  # which computes offsets
        y: torch.Tensor = forward(*tensors, offsets, row_index, activation)
        return y
    _check_mlp(*tensors[:-1], activation)
    grouping, config = _group(x, w_up, offsets, row_index, None, row_weight, activation, None)
    result: torch.Tensor = _GroupedMlp.apply(*tensors, grouping, activation, config)
    return result


def _check_mlp(
    x: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    b_up: torch.Tensor | None,
    b_down: torch.Tensor | None,
    activation: AnyActivation,
) -> None:
    """Raise unless the weights of a feed-forward fit x and each other."""
    parts = num_parts(activation)
    check_layer_activation(activation)
    check_rows(x, None)
    check_weights(x, w_up, x.shape[1], activation, bias=b_up, name="w_up")
    intermediate = w_up.shape[1] // parts
    check_weights(x, w_down, intermediate, "none", bias=b_down, name="w_down")
    if w_down.shape[0] != w_up.shape[0]:
        raise ShapeError(
            f"w_up has {w_up.shape[0]} experts, w_down {w_down.shape[0]}; both must have as many."
        )


@prepared
def _mlp(
    x: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    b_up: torch.Tensor | None,
    b_down: torch.Tensor | None,
    row_weight: torch.Tensor | None,
    offsets: torch.Tensor,
    row_index: torch.Tensor | None,
    activation: AnyActivation,
) -> torch.Tensor:
    """`grouped_mlp` without gradients."""
    _check_mlp(x, w_up, w_down, b_up, b_down, activation)
    grouping, config = _group(x, w_up, offsets, row_index, None, row_weight, activation, None)
    up, down = Weights(w_up, bias=b_up), Weights(w_down, bias=b_down)
    return _two_gemms(grouping, x, up, down, Epilogue(activation), row_weight, config)


def _two_gemms(
    grouping: Grouping,
    x: torch.Tensor,
    up: Weights,
    down: Weights,
    first: Epilogue,
    row_weight: torch.Tensor | None,
    config: GemmConfig,
) -> torch.Tensor:
    """The products of a feed-forward; config: of the first."""
    schedule, num_rows = grouping.schedule, grouping.num_rows
    act = multiply(grouping.rows(x), up, first, schedule, num_rows, None, config)
    config = gemm_config(down.w, num_rows, block_m=schedule.block_m)
    second = Epilogue(row_weight=row_weight)
    return multiply(Rows(act), down, second, schedule, num_rows, None, config)


def _wants_gradients(*operands: Operand | None) -> bool:
    if not torch.is_grad_enabled():
        return False
    values = (one[0] if isinstance(one, tuple) and one else one for one in operands)
    return any(getattr(one, "requires_grad", False) for one in values)


def _group(
    x: torch.Tensor,
    w: torch.Tensor,
    offsets: torch.Tensor,
    row_index: torch.Tensor | None,
    row_offset: torch.Tensor | None,
    row_weight: torch.Tensor | None,
    activation: AnyActivation,
    schedule: TileSchedule | None,
) -> tuple[Grouping, GemmConfig]:
    """Check the arguments that say where rows are and how they are weighted, and choose the tile
    shape of their product with w."""
    num_rows = x.shape[0]
    if row_index is not None:
        check_tensor("row_index", row_index, ("rows",), INDEX_DTYPES)
        num_rows = row_index.shape[0]
        check_taken("row_index", x, num_rows)
    if row_offset is not None:
        check_tensor("row_offset", row_offset, ("rows",), (torch.int64,))
        row_offset, num_rows = row_offset.contiguous(), row_offset.shape[0]
        check_taken("row_offset", x, num_rows)
    check_tensor("offsets", offsets, (w.shape[0] + 1,), INDEX_DTYPES)
    check_devices(x, offsets=offsets, row_index=row_index, row_offset=row_offset)
    check_row_weight(x, row_weight, num_rows)
    gathered = row_index is not None or row_offset is not None
    block_m = checked_block_m(schedule)
    config = gemm_config(w, num_rows, activation, gathered=gathered, block_m=block_m)
    if schedule is None:
        schedule = tile_schedule(offsets, num_rows, config.block_m)
    return Grouping(schedule, num_rows, row_index, row_offset), config


class _GroupedGemm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        row_weight: torch.Tensor | None,
        grouping: Grouping,
        activation: AnyActivation,
        config: GemmConfig,
    ) -> torch.Tensor:
        is_linear = Activation.of(activation).name == "none"
        pre = None if is_linear else x.new_empty(grouping.num_rows, w.shape[1])
        ctx.save_for_backward(x, w, row_weight, pre, *grouping.tensors)
        ctx.grouping, ctx.activation = grouping, activation
        epilogue = Epilogue(activation, row_weight, pre)
        schedule, weights = grouping.schedule, Weights(w, bias=bias)
        return multiply(
            grouping.rows(x), weights, epilogue, schedule, grouping.num_rows, None, config
        )

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        _refuse_second_order()
        x, w, row_weight, pre, *_ = saved_tensors(ctx)
        grouping: Grouping = ctx.grouping
        grad = packed(grad)
        if row_weight is not None:
            grad = (grad * row_weight[:, None]).to(grad.dtype)
        if pre is not None:
            grad = activation_gradient(grad, pre, grouping.offsets, ctx.activation)
        needs = ctx.needs_input_grad
        return (
            _gradient_of_x(grad, x, w, grouping) if needs[0] else None,
            _gradient_of_w(grad, x, grouping) if needs[1] else None,
            bias_gradient(grad, grouping.offsets).to(w.dtype) if needs[2] else None,
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
        grouping: Grouping,
        activation: AnyActivation,
        config: GemmConfig,
    ) -> torch.Tensor:
        pre = x.new_empty(grouping.num_rows, w_up.shape[1])
        ctx.save_for_backward(x, w_up, w_down, b_down, row_weight, pre, *grouping.tensors)
        ctx.grouping, ctx.activation = grouping, activation
        up, down = Weights(w_up, bias=b_up), Weights(w_down, bias=b_down)
        first = Epilogue(activation, pre=pre)
        return _two_gemms(grouping, x, up, down, first, row_weight, config)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        _refuse_second_order()
        x, w_up, w_down, b_down, row_weight, pre, *_ = saved_tensors(ctx)
        grouping, needs = ctx.grouping, ctx.needs_input_grad
        offsets = grouping.offsets
        grad = packed(grad)
        pre_grad, act, of_weight = activation_dgrad(
            grad, w_down, pre, grouping.schedule, ctx.activation, row_weight, b_down
        )
        return (
            _gradient_of_x(pre_grad, x, w_up, grouping) if needs[0] else None,
            _gradient_of_w(pre_grad, x, grouping) if needs[1] else None,
            wgrad(grad, act, offsets) if needs[2] else None,
            bias_gradient(pre_grad, offsets).to(x.dtype) if needs[3] else None,
            bias_gradient(grad, offsets, row_weight).to(x.dtype) if needs[4] else None,
            of_weight if needs[5] else None,
            *(None,) * 3,
        )


def _refuse_second_order() -> None:
    """Raise BackendError: a graph of the gradients (create_graph=True) would silently lose them."""
    if torch.is_grad_enabled():
        raise BackendError(
            "grouped GEMMs have no second-order gradients; call backward without create_graph."
        )


def _gradient_of_x(
    grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor, grouping: Grouping
) -> torch.Tensor:
    rows = dgrad(grad, w, grouping.offsets, schedule=grouping.schedule)
    return grouping.rows_gradient(rows, x)


def _gradient_of_w(grad: torch.Tensor, x: torch.Tensor, grouping: Grouping) -> torch.Tensor:
    rows = grouping.rows(x)
    return wgrad(grad, rows.x, grouping.offsets, row_offset=rows.offset)
