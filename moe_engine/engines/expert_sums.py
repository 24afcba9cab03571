"""The experts of one rank on rows that a dispatch brought, by grouped GEMMs; and gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..expert_major import Places, place, sum_rows, take_rows
from ..grouped_gemm import (
    TileSchedule,
    dgrad,
    gemm_config,
    grouped_gemm,
    grouped_mlp,
    quantize_rows,
    tile_schedule,
)
from ..grouped_gemm.backward import activation_dgrad
from ..grouped_gemm.launch import multiply
from ..grouped_gemm.operands import Epilogue, Rows, Weights
from .base import BiasGradients, LayerInputs, WeightGradientRows
from .trained_layer import bias_gradients


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


class Recomputed(NamedTuple):
    """What a backward makes again of `sums_of_experts`: where rows lie, the expert rows x [M, H],
    their tiles, and the pre-activations [M, parts * I]."""

    places: Places
    x: torch.Tensor
    schedule: TileSchedule
    pre: torch.Tensor


def recompute(rows: LayerInputs, num_rows: int, num_free_sms: int = 0) -> Recomputed:
    """For the arguments of `sums_of_experts`. num_free_sms: see `launch.multiply`."""
    num_topk, w = rows.topk_idx.shape[1], _joined(rows.w_gate_up)
    places = place(rows.topk_idx, rows.topk_weights, len(w), 1, num_rows)
    x = take_rows(rows.x, places.slots, num_topk, places.offsets[-1:])
    config = gemm_config(w, len(x))
    schedule = tile_schedule(places.offsets, len(x), config.block_m)
    weights, how = Weights(w, bias=rows.b_gate_up), (None, config, num_free_sms)
    pre = multiply(Rows(x), weights, Epilogue(), schedule, len(x), *how)
    return Recomputed(places, x, schedule, pre)


class ExpertGradients(NamedTuple):
    """Those of `sums_of_experts`: of x [N, H], of topk_weights float32 [N, K], and of the biases
    that require grad; and the rows that those of the weights are products of."""

    x: torch.Tensor
    topk_weights: torch.Tensor
    biases: BiasGradients
    of_weights: WeightGradientRows


def gradients_of_experts(
    rows: LayerInputs, made: Recomputed, grad: torch.Tensor
) -> ExpertGradients:
    """Given the gradient of the sums [N, H]."""
    num_topk, (places, x, schedule, pre) = rows.topk_idx.shape[1], made
    row_weight, offsets = places.row_weights, places.offsets
    assert row_weight is not None
    dy = take_rows(grad, places.slots, num_topk, offsets[-1:])
    of_act = dy, _joined(rows.w_down), pre, schedule, rows.activation, row_weight, rows.b_down
    of_pre, act, of_weights = activation_dgrad(*of_act)
    assert of_weights is not None
    of_x = dgrad(of_pre, _joined(rows.w_gate_up), offsets, schedule=schedule)
    dx, topk_grads = sum_rows(of_x, places.dst_rows, of_weights)
    assert topk_grads is not None
    biases = bias_gradients(rows, of_pre, dy, row_weight, offsets)
    kept = WeightGradientRows(x, of_pre, act, dy, offsets)
    return ExpertGradients(dx, topk_grads, biases, kept)


def _joined(w: torch.Tensor) -> torch.Tensor:
    """Weights as grouped GEMMs take them: gate and up in one, contiguous."""
    return (w.flatten(1, 2) if w.dim() == 4 else w).detach().contiguous()
