"""The experts of one rank on rows that a dispatch brought, by grouped GEMMs; and gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..expert_major import Places, place, sum_rows, take_rows
from ..grouped_gemm import TileSchedule, gemm_config, tile_schedule
from ..grouped_gemm.backward import activation_dgrad
from ..grouped_gemm.launch import multiply
from ..grouped_gemm.operands import Epilogue, Rows
from .base import BiasGradients, LayerInputs, WeightGradientRows
from .expert_products import (
    ExpertMemory,
    expert_tiles,
    multiply_down,
    multiply_up,
    received_operand,
)
from .trained_layer import bias_gradients


def sums_of_experts(rows: LayerInputs, num_rows: int) -> torch.Tensor:
    """For rows x [N, ..] as `rows_to_send` gives them, with local ids topk_idx int64 [N, K], -1 for
    none, and weights [N, K]: the weighted sum [N, H] of what their experts give. num_rows: how many
    of the ids are not -1, or at least so many."""
    places = place(rows.topk_idx, rows.topk_weights, len(rows.w_gate_up), 1, num_rows)
    offsets = places.offsets
    x = take_rows(rows.x, places.slots, rows.topk_idx.shape[1], offsets[-1:])
    memory, tiles = ExpertMemory.empty(rows, num_rows), expert_tiles(rows, num_rows)
    schedule = tile_schedule(offsets, num_rows, tiles[0].block_m)
    multiply_up(received_operand(x, rows), rows, schedule, tiles[0], memory)
    y = multiply_down(rows, schedule, tiles[1], memory, places.row_weights)
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
    num_topk, num_local, columns = rows.topk_idx.shape[1], len(rows.w_down), rows.w_down.shape[2]
    places = place(rows.topk_idx, rows.topk_weights, num_local, 1, num_rows)
    x = take_rows(rows.x, places.slots, num_topk, places.offsets[-1:])
    act, pre = x.new_empty(num_rows, columns), x.new_empty(num_rows, rows.parts * columns)
    tiles, _ = expert_tiles(rows, num_rows)
    schedule = tile_schedule(places.offsets, num_rows, tiles.block_m)
    # The activations are not needed: an epilogue with them has gate and up in any layout.
    epilogue = Epilogue(rows.activation, None, pre)
    multiply(Rows(x), rows.up, epilogue, schedule, num_rows, act, tiles, num_free_sms)
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
    of_act = dy, rows.w_down, pre, schedule, rows.activation, row_weight, rows.b_down
    of_pre, act, of_weights = activation_dgrad(*of_act)
    assert of_weights is not None
    weights = rows.up_transposed
    tiles = gemm_config(weights.w, len(x), transposed=True, block_m=schedule.block_m)
    of_x = multiply(Rows(of_pre), weights, Epilogue(), schedule, len(x), None, tiles)
    dx, topk_grads = sum_rows(of_x, places.dst_rows, of_weights)
    assert topk_grads is not None
    biases = bias_gradients(rows, of_pre, dy, row_weight, offsets)
    kept = WeightGradientRows(x, of_pre, act, dy, offsets)
    return ExpertGradients(dx, topk_grads, biases, kept)
