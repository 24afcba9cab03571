"""The experts of one rank on rows that a dispatch brought, by grouped GEMMs, with gradients."""

from __future__ import annotations

from typing import Any

import torch

from ..expert_major import place, sum_rows, take_rows, take_weights
from ..grouped_gemm import grouped_gemm, grouped_mlp, quantize_rows
from .base import LayerInputs


def sums_of_experts(rows: LayerInputs) -> torch.Tensor:
    """For rows x [N, H] with local ids topk_idx int64 [N, K], -1 for none, and weights [N, K]: the
    weighted sum [N, H] of what their experts give, with gradients for all but the ids. The host
    waits for the number of expert rows."""
    ids = rows.topk_idx
    places = place(ids, len(rows.w_gate_up), 1, int((ids >= 0).sum()))
    row_weight = take_weights(rows.topk_weights, places.slots)
    x = _TakeRows.apply(rows.x, places.slots, places.dst_rows)
    w_gate_up, w_down = (_joined(w) for w in (rows.w_gate_up, rows.w_down))
    if rows.s_gate_up is not None and rows.s_down is not None:
        up, down = (w_gate_up, rows.s_gate_up), (w_down, rows.s_down)
        more: dict[str, Any] = dict(activation=rows.activation, bias=rows.b_gate_up)
        act = grouped_gemm(quantize_rows(x), up, places.offsets, **more)
        more = dict(bias=rows.b_down, row_weight=row_weight)
        y = grouped_gemm(quantize_rows(act), down, places.offsets, **more)
    else:
        y = grouped_mlp(
            *(x, w_gate_up, w_down, places.offsets),
            row_weight=row_weight,
            activation=rows.activation,
            b_up=rows.b_gate_up,
            b_down=rows.b_down,
        )
    sums: torch.Tensor = _SumRows.apply(y, places.slots, places.dst_rows)
    return sums


def _joined(w: torch.Tensor) -> torch.Tensor:
    """Weights as grouped GEMMs take them: gate and up in one, contiguous."""
    return (w.flatten(1, 2) if w.dim() == 4 else w).contiguous()


class _TakeRows(torch.autograd.Function):
    """Expert rows of received rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slots: Any, dst_rows: Any) -> torch.Tensor:
        ctx.save_for_backward(dst_rows)
        return take_rows(x, slots, dst_rows.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return sum_rows(grad.contiguous(), *ctx.saved_tensors), None, None


class _SumRows(torch.autograd.Function):
    """Sums of the expert rows of each received row."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, slots: Any, dst_rows: Any) -> torch.Tensor:
        ctx.save_for_backward(slots)
        ctx.num_topk = dst_rows.shape[1]
        return sum_rows(y, dst_rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        (slots,) = ctx.saved_tensors
        return take_rows(grad.contiguous(), slots, ctx.num_topk), None, None
