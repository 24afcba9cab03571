"""A layer as operators of torch.library: what torch.compile puts into its graph for `moe_ffn`, and
what modes of torch see, such as that of selective checkpointing.

Elsewhere a layer is a node of autograd (`training.py`), which can also return an event, and take
objects. Here the Buffer is its `id`, and what is saved is among the results, with a size that is
known when the rows have come: of a layer in sub-batches or passes (`passes.py`) that of all its
calls, one after the other. `numbers` [calls, 2] tells them apart: for each sub-batch (the rows, the
number of the forward) of the call with all its tokens and of each slice, with NOT_MADE rows for
calls that were not made, or whose rows had no room.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .buffer import Buffer
from .engines.base import Saved
from .lifecycle import live_buffer
from .operators import gradient, operator, operators
from .passes import (
    NOTHING,
    SubBatch,
    Trained,
    backward_in_passes,
    forward_in_passes,
    may_take_passes,
    num_sub_batches,
    passes_of_slices,
    sub_batches_of,
)
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
from .utils import saved_tensors
from .weight_gradients import LayerWeights
from .weight_layouts import GateUp

TENSORS = "Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor w_gate_up, Tensor w_down"
NOT_MADE = -2
"""In place of a number of rows, which is -1 in a capture."""
OPTIONS = "int buffer_id, int? max_tokens, str layout, str? tag"


def layer_operator(
    tensors: tuple[Any, ...], buffer: Buffer, options: LayerOptions, layout: str
) -> tuple[Tensor, Tensor]:
    """(the result [T, H], counts int32 [E], empty if they are not asked for)."""
    tag = None if options.tag is None else str(options.tag)
    how = *tensors, buffer.id, options.max_tokens, layout, tag
    x, _, *weights = tensors
    if not wants_gradients(x, *weights):
        out, counts = operators.moe_ffn(*how, options.return_counts)
        return out, counts
    save = chosen_policy(options.save, *weights[-1].shape[1:])
    if not buffer.has_fused_layers:  # whose backward sends again what there is no place for here
        save = "none"
    out, counts, *_ = operators.moe_ffn_forward(*how, save)
    return out, counts


def _tensors(parts: tuple[Tensor, ...], layout: str) -> LayerTensors:
    x, topk_idx, topk_weights, w_gate_up, w_down = parts
    weights = LayerWeights(GateUp.of(w_gate_up, layout), w_down)
    return LayerTensors(x, topk_idx, topk_weights, weights)


# --- Without gradients ---------------------------------------------------------------------------


def _fake_layer(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    *_, w_down, buffer_id, _, _, _, return_counts = args
    num_experts = len(w_down) * live_buffer(buffer_id).group_size
    shape = (num_experts if return_counts else 0,)
    return torch.empty_like(x), x.new_empty(shape, dtype=torch.int32)


@operator(f"moe_ffn({TENSORS}, {OPTIONS}, bool return_counts) -> (Tensor, Tensor)", _fake_layer)
def _layer(*args: Any) -> tuple[Tensor, Tensor]:
    *parts, buffer_id, max_tokens, layout, tag, return_counts = args
    tensors, buffer = _tensors(tuple(parts), layout), live_buffer(buffer_id)
    options = LayerOptions(max_tokens, "none", None, return_counts, is_trained=False, tag=tag)
    if may_take_passes(tensors.inputs, buffer, options):
        _, (out, _, counts, _) = _run_passes(buffer, tensors, options)
    else:
        out, _, counts = buffer.moe_ffn(tensors.inputs, False, max_tokens, return_counts, tag)
    return out, tensors.x.new_empty(0, dtype=torch.int32) if counts is None else counts


def _run_passes(
    buffer: Buffer, tensors: LayerTensors, options: LayerOptions
) -> tuple[list[SubBatch], Trained]:
    """See `forward_in_passes`; RoutingError once all calls are made."""
    batches, done = forward_in_passes(buffer, tensors, options, run_forward)
    if done.error is not None:
        raise done.error
    return batches, done


# --- With gradients ------------------------------------------------------------------------------


def _most_calls(buffer: Buffer) -> int:
    """The number of calls that a sub-batch of a layer takes at most: one with all its tokens, and
    where it may take passes one of each slice."""
    num_passes = buffer.options.num_passes(buffer.group_size) if buffer.has_fused_layers else 1
    return 1 if num_passes == 1 else 1 + num_passes


def _fake_forward(*args: Any) -> tuple[Tensor, ...]:
    x, _, _, _, w_down, buffer_id, _, _, _, save = args
    buffer = live_buffer(buffer_id)
    num_experts, most_calls = len(w_down) * buffer.group_size, _most_calls(buffer)
    number = num_sub_batches(buffer)
    num_rows: Any = 0 if save == "none" else torch.library.get_ctx().new_dynamic_size(min=1)
    return (
        torch.empty_like(x),
        x.new_empty((num_experts,), dtype=torch.int32),
        x.new_empty((num_rows if save in ("pre", "all") else 0, 2 * w_down.shape[2])),
        x.new_empty((num_rows if save in ("rows", "all") else 0, x.shape[1])),
        torch.empty(number * most_calls, 2, dtype=torch.int64, device="cpu"),
        x.new_empty((number * (most_calls > 1),), dtype=torch.int32),
    )


@operator(
    f"moe_ffn_forward({TENSORS}, {OPTIONS}, str save) "
    "-> (Tensor out, Tensor counts, Tensor pre, Tensor rows, Tensor numbers, Tensor overflow)",
    _fake_forward,
)
def _forward(*args: Any) -> tuple[Tensor, ...]:
    *parts, buffer_id, max_tokens, layout, tag, save = args
    options = LayerOptions(max_tokens, save, None, True, tag=tag)
    options.check()
    tensors, buffer = _tensors(tuple(parts), layout), live_buffer(buffer_id)
    batches, (out, _, counts, _) = _run_passes(buffer, tensors, options)
    assert counts is not None
    x, is_fused, most_calls = tensors.x, buffer.has_fused_layers, _most_calls(buffer)
    kept = (one.saved.tensors if is_fused else NOTHING.tensors for one in chain(*batches))
    pre, rows = zip(*kept, strict=True)
    calls: list[tuple[int, int]] = []
    for passes in batches:
        made = [(one.saved.num_rows, one.saved.forward) for one in passes]
        not_made = [(NOT_MADE, 0)] * (most_calls - len(made))
        calls += [*made, *not_made] if len(made) == 1 else [*not_made, *made]
    overflow = x.new_empty(len(batches) * (most_calls > 1), dtype=torch.int32)
    for number, passes in enumerate(batches):
        if isinstance(one := passes[0].saved.overflow, Tensor):  # else the host knows of it
            overflow[number] = one[0]
    return (
        *(out, counts),
        _joined(pre, x, 2 * tensors.weights.down.shape[2]),
        _joined(rows, x, x.shape[1]),
        *(torch.tensor(calls, device="cpu"), overflow),
    )


def _joined(parts: Sequence[Tensor | None], x: Tensor, columns: int) -> Tensor:
    """What calls have saved, one after the other; no rows if that is nothing."""
    saved = [one for one in parts if one is not None]
    if not saved:
        return x.new_empty(0, columns)
    return saved[0] if len(saved) == 1 else torch.cat(saved)


def _batches(
    buffer: Buffer, topk_idx: Tensor, save: str, kept: Sequence[Tensor | None], *more: Tensor
) -> list[SubBatch]:
    """The sub-batches of which `_forward` has returned what they saved; more: numbers, overflow."""
    calls, overflows = more[0].tolist(), more[1]
    most_calls = _most_calls(buffer)
    is_captured = calls[0][0] == -1 and most_calls > 1
    sizes = [max(1, num_rows) for num_rows, _ in calls if num_rows != NOT_MADE]
    split = [[None] * len(sizes) if one is None else one.split(sizes) for one in kept]
    tensors, batches = zip(*split, strict=True), []
    for number, whole in enumerate(sub_batches_of(len(topk_idx), len(calls) // most_calls)):
        overflow: Tensor | int = overflows[number:][:1] if is_captured else 0
        every = [whole]
        if most_calls > 1:
            every += passes_of_slices(buffer, topk_idx, whole, overflow)
        of_batch, passes = calls[number * most_calls :][:most_calls], []
        for one, (num_rows, forward) in zip(every, of_batch, strict=True):
            if num_rows != NOT_MADE:
                saved = Saved(save, next(tensors), num_rows, True, overflow, forward)
                passes.append(one._replace(saved=saved))
        batches.append(passes)
    return batches


def _fake_backward(dy: Tensor, *args: Any) -> tuple[Tensor, ...]:
    _, _, topk_weights, w_gate_up, w_down, *_, of_gate_up, of_down = args
    weights = zip((w_gate_up, w_down), (of_gate_up, of_down), strict=True)
    empty = torch.empty_like
    grads = (empty(one) if want else one.new_empty(0) for one, want in weights)
    return empty(dy), empty(topk_weights), *grads


@operator(
    f"moe_ffn_backward(Tensor dy, {TENSORS}, Tensor pre, Tensor rows, Tensor numbers, "
    "Tensor overflow, int buffer_id, str layout, str save, bool of_gate_up, bool of_down) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _fake_backward,
)
def _backward(dy: Tensor, *args: Any) -> tuple[Tensor, ...]:
    *parts, pre, rows, numbers, overflow, buffer_id, layout, save, of_gate_up, of_down = args
    tensors, buffer = _tensors(tuple(parts), layout), live_buffer(buffer_id)
    kept = pre if save in ("pre", "all") else None, rows if save in ("rows", "all") else None
    batches = _batches(buffer, tensors.topk_idx, save, kept, numbers, overflow)
    run = partial(run_backward, buffer, None, (of_gate_up, of_down))
    found, grads = backward_in_passes(dy, tensors, batches, run)
    of_weights = (dy.new_empty(0) if one is None else one for one in grads)
    return found.x, found.topk_weights, *of_weights


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *parts, ctx.buffer_id, _, ctx.layout, _, ctx.save_policy = inputs
    _, *others = output
    ctx.save_for_backward(*parts, *others[1:])
    ctx.mark_non_differentiable(*others)


def _layer_gradients(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
    of_x, _, of_topk, *wanted = ctx.needs_input_grad[:5]
    how = ctx.buffer_id, ctx.layout, ctx.save_policy, *wanted
    dx, dw, *grads = operators.moe_ffn_backward(dy, *saved_tensors(ctx), *how)
    of_weights = (one if want else None for one, want in zip(grads, wanted, strict=True))
    return dx if of_x else None, None, dw if of_topk else None, *of_weights, *(None,) * 5


gradient("moe_ffn_forward", _save, _layer_gradients, "a layer has")
