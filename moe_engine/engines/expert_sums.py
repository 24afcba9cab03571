"""The experts of one rank on rows that a dispatch brought, by grouped GEMMs; and gradients."""

from __future__ import annotations

from functools import partial

import torch

from ..expert_major import place, sum_rows, take_rows
from ..grouped_gemm import (
    dgrad,
    gemm_config,
    grouped_gemm,
    grouped_mlp,
    quantize_rows,
    tile_schedule,
)
from ..grouped_gemm.backward import activation_dgrad
from .base import Gradients, LayerInputs, WeightGradientRows
from .trained_layer import bias_gradients, later_weight_gradients


def sums_of_experts(rows: LayerInputs, num_rows: int) -> torch.Tensor:
    """For rows x [N, H] with local ids topk_idx int64 [N, K], -1 for none, and weights [N, K]: the
    weighted sum [N, H] of what their experts give. num_rows: how many of the ids are not -1, or at
    least so many."""
    places = place(rows.topk_idx, rows.topk_weights, len(rows.w_gate_up), 1, num_rows)
    row_weight, offsets = places.row_weights, places.offsets
    x = take_rows(rows.x, places.slots, rows.topk_idx.shape[1], offsets[-1:])
    w_gate_up, w_down = _joined(rows.w_gate_up), _joined(rows.w_down)
    activation, b_gate_up, b_down = rows.activation, rows.b_gate_up, rows.b_down
    if rows.s_gate_up is not None and rows.s_down is not None:
        up, down = (w_gate_up, rows.s_gate_up), (w_down, rows.s_down)
        act = grouped_gemm(quantize_rows(x), up, offsets, activation=activation, bias=b_gate_up)
        y = grouped_gemm(quantize_rows(act), down, offsets, bias=b_down, row_weight=row_weight)
    else:
        y = grouped_mlp(
            *(x, w_gate_up, w_down, offsets),
            row_weight=row_weight,
            activation=activation,
            b_up=b_gate_up,
            b_down=b_down,
        )
    sums, _ = sum_rows(y, places.dst_rows)
    return sums


def gradients_of_experts(rows: LayerInputs, grad: torch.Tensor, num_rows: int) -> Gradients:
    """Those of `sums_of_experts`, given that of the sums [N, H]: of x [N, H] and topk_weights
    [N, K], and of the biases that require grad; those of the weights later. The pre-activations are
    made again."""
    num_topk = rows.topk_idx.shape[1]
    places = place(rows.topk_idx, rows.topk_weights, len(rows.w_gate_up), 1, num_rows)
    row_weight, offsets = places.row_weights, places.offsets
    x, dy = (take_rows(one, places.slots, num_topk, offsets[-1:]) for one in (rows.x, grad))
    assert row_weight is not None
    w_gate_up, w_down = _joined(rows.w_gate_up), _joined(rows.w_down)
    block_m = gemm_config(w_gate_up, len(x)).block_m
    schedule = tile_schedule(offsets, len(x), block_m)
    pre = grouped_gemm(x, w_gate_up, offsets, bias=rows.b_gate_up, schedule=schedule)
    of_act = activation_dgrad(dy, w_down, pre, schedule, rows.activation, row_weight, rows.b_down)
    of_pre, act, of_weights = of_act
    assert of_weights is not None
    of_x = dgrad(of_pre, w_gate_up, offsets, schedule=schedule)
    dx, topk_grads = sum_rows(of_x, places.dst_rows, of_weights)
    assert topk_grads is not None
    biases = bias_gradients(rows, of_pre, dy, row_weight, offsets)
    kept = WeightGradientRows(x, of_pre, act, dy, offsets)
    return dx, topk_grads, partial(later_weight_gradients, kept), biases


def _joined(w: torch.Tensor) -> torch.Tensor:
    """Weights as grouped GEMMs take them: gate and up in one, contiguous."""
    return (w.flatten(1, 2) if w.dim() == 4 else w).detach().contiguous()
