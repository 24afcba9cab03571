"""A layer as operators of torch.library: what torch.compile puts into its graph for `moe_ffn`, and
what modes of torch see, such as that of selective checkpointing.

Elsewhere a layer is a node of autograd (`training.py`), which can also return an event, and take
objects. Here the Buffer is its `id`, and what is saved is among the results, with a
size that is known when the rows have come.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .buffer import Buffer
from .engines.base import Saved
from .lifecycle import live_buffer
from .operators import gradient, operator, operators
from .training import (
    LayerOptions,
    LayerTensors,
    chosen_policy,
    wants_gradients,
)
from .training import (
    _backward as run_backward,
)
from .training import (
    _forward as run_forward,
)
from .weight_gradients import LayerWeights
from .weight_layouts import GateUp

TENSORS = "Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor w_gate_up, Tensor w_down"
OPTIONS = "int buffer_id, int? max_tokens, str layout"


def layer_operator(
    tensors: tuple[Any, ...], buffer: Buffer, options: LayerOptions, layout: str
) -> tuple[Tensor, Tensor]:
    """(the result [T, H], counts int32 [E], empty if they are not asked for)."""
    how = *tensors, buffer.id, options.max_tokens, layout
    x, _, *weights = tensors
    if not wants_gradients(x, *weights):
        out, counts = operators.moe_ffn(*how, options.return_counts)
        return out, counts
    save = chosen_policy(options.save, *weights[-1].shape[1:])
    out, counts, *_ = operators.moe_ffn_forward(*how, save)
    return out, counts


def _tensors(parts: tuple[Tensor, ...], layout: str) -> LayerTensors:
    x, topk_idx, topk_weights, w_gate_up, w_down = parts
    weights = LayerWeights(GateUp.of(w_gate_up, layout), w_down)
    return LayerTensors(x, topk_idx, topk_weights, weights)


# --- Without gradients ---------------------------------------------------------------------------


def _fake_layer(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    *_, w_down, buffer_id, _, _, return_counts = args
    num_experts = len(w_down) * live_buffer(buffer_id).group_size
    shape = (num_experts if return_counts else 0,)
    return torch.empty_like(x), x.new_empty(shape, dtype=torch.int32)


@operator(f"moe_ffn({TENSORS}, {OPTIONS}, bool return_counts) -> (Tensor, Tensor)", _fake_layer)
def _layer(*args: Any) -> tuple[Tensor, Tensor]:
    *parts, buffer_id, max_tokens, layout, return_counts = args
    inputs = _tensors(tuple(parts), layout).inputs
    out, _, counts = live_buffer(buffer_id).moe_ffn(inputs, False, max_tokens, return_counts)
    return out, inputs.x.new_empty(0, dtype=torch.int32) if counts is None else counts


# --- With gradients ------------------------------------------------------------------------------


def _fake_forward(*args: Any) -> tuple[Tensor, ...]:
    x, _, _, _, w_down, buffer_id, _, _, save = args
    num_experts = len(w_down) * live_buffer(buffer_id).group_size
    num_rows: Any = 0 if save == "none" else torch.library.get_ctx().new_dynamic_size(min=1)
    return (
        torch.empty_like(x),
        x.new_empty((num_experts,), dtype=torch.int32),
        x.new_empty((num_rows if save in ("pre", "all") else 0, 2 * w_down.shape[2])),
        x.new_empty((num_rows if save in ("rows", "all") else 0, x.shape[1])),
        torch.empty((), dtype=torch.int64, device="cpu"),
    )


@operator(
    f"moe_ffn_forward({TENSORS}, {OPTIONS}, str save) "
    "-> (Tensor out, Tensor counts, Tensor pre, Tensor rows, Tensor num_rows)",
    _fake_forward,
)
def _forward(*args: Any) -> tuple[Tensor, ...]:
    *parts, buffer_id, max_tokens, layout, save = args
    options = LayerOptions(max_tokens, save, None, True)
    options.check()
    tensors = _tensors(tuple(parts), layout)
    out, saved, counts, _ = run_forward(live_buffer(buffer_id), tensors, options)
    x, (pre, rows) = tensors.x, saved.tensors
    assert counts is not None
    pre = x.new_empty(0, 2 * tensors.weights.down.shape[2]) if pre is None else pre
    rows = x.new_empty(0, x.shape[1]) if rows is None else rows
    return out, counts, pre, rows, torch.tensor(saved.num_rows, device="cpu")


def _fake_backward(dy: Tensor, *args: Any) -> tuple[Tensor, ...]:
    _, _, topk_weights, w_gate_up, w_down, *_, of_gate_up, of_down = args
    weights = zip((w_gate_up, w_down), (of_gate_up, of_down), strict=True)
    empty = torch.empty_like
    grads = (empty(one) if want else one.new_empty(0) for one, want in weights)
    return empty(dy), empty(topk_weights), *grads


@operator(
    f"moe_ffn_backward(Tensor dy, {TENSORS}, Tensor pre, Tensor rows, Tensor num_rows, "
    "int buffer_id, str layout, str save, bool of_gate_up, bool of_down) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _fake_backward,
)
def _backward(dy: Tensor, *args: Any) -> tuple[Tensor, ...]:
    *parts, pre, rows, num_rows, buffer_id, layout, save, of_gate_up, of_down = args
    tensors, wanted = _tensors(tuple(parts), layout), (of_gate_up, of_down)
    kept = pre if save in ("pre", "all") else None, rows if save in ("rows", "all") else None
    saved = Saved(save, kept, int(num_rows))
    args = live_buffer(buffer_id), None, wanted, dy, tensors, saved
    dx, dw, _, grads, *_ = run_backward(*args)
    return dx, dw, *(dy.new_empty(0) if one is None else one for one in grads)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *parts, ctx.buffer_id, _, ctx.layout, ctx.save_policy = inputs
    _, *others = output
    ctx.save_for_backward(*parts, *others[1:])
    ctx.mark_non_differentiable(*others)


def _layer_gradients(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
    of_x, _, of_topk, *wanted = ctx.needs_input_grad[:5]
    how = ctx.buffer_id, ctx.layout, ctx.save_policy, *wanted
    dx, dw, *grads = operators.moe_ffn_backward(dy, *ctx.saved_tensors, *how)
    of_weights = (one if want else None for one, want in zip(grads, wanted, strict=True))
    return dx if of_x else None, None, dw if of_topk else None, *of_weights, *(None,) * 4


gradient("moe_ffn_forward", _save, _layer_gradients)
