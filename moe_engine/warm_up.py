"""What `Buffer.warmup` calls of layers: of few tokens, of those that train or run in passes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from .device.context import SAVE_POLICIES
from .engines.base import LayerInputs, WeightGradients
from .grouped_gemm import gemm_config
from .grouped_gemm.activations import AnyActivation
from .grouped_gemm.operands import Operand, split_scales
from .lifecycle import BufferLifecycle, verb
from .options import Options

if TYPE_CHECKING:
    from .buffer import Buffer


def layer_of_no_tokens(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    weights: tuple[Operand, Operand],
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    activation: AnyActivation,
) -> LayerInputs:
    """A layer with these weights, x [0, H] and topk_idx [0, K]."""
    both = zip(("weights[0]", "weights[1]"), weights, strict=True)
    (up, s_up), (down, s_down) = (split_scales(*one) for one in both)
    routed = x, topk_idx, topk_idx.float()
    return LayerInputs(*routed, up, down, *biases, activation, s_up, s_down)


def warm_layers(buffer: Buffer, inputs: LayerInputs) -> None:
    """All layers of no tokens with these weights, x [0, H]. Collective."""
    with torch.no_grad():
        for max_tokens in layer_sizes(buffer.options, inputs):
            buffer.moe_ffn(inputs, max_tokens=max_tokens)
        warm_trained_layer(buffer, inputs)


def layer_sizes(options: Options, inputs: LayerInputs) -> Iterator[int | None]:
    """The max_tokens of layers that need kernels of their own: None, as many as the Buffer was made
    for; then, of layers that run by low-latency calls, one for each choice of tiles."""
    yield None  # whose call checks the inputs
    w_gate_up, w_down, num_topk = inputs.w_gate_up, inputs.w_down, inputs.topk_idx.shape[1]
    most, found = options.decode_tokens, set()
    if options.max_tokens is not None:
        most = min(most, options.max_tokens)
    for max_tokens in range(1, most + 1):
        up = gemm_config(w_gate_up, max_tokens * num_topk, inputs.activation)
        tiles = up, gemm_config(w_down, max_tokens * num_topk, block_m=up.block_m)
        if tiles not in found:
            found.add(tiles)
            yield max_tokens


@verb
def warm_trained_layer(buffer: BufferLifecycle, inputs: LayerInputs) -> None:
    """Where a weight requires grad, a layer's forward and backward by each policy; else, where it
    may run in passes (`passes.py`), its forward. Collective."""
    engine, weights = buffer._ready(), (inputs.w_gate_up, inputs.w_down)
    is_trained = any(one.requires_grad for one in weights)
    in_passes = buffer.options.num_passes(buffer.group_size) > 1
    policies = SAVE_POLICIES[1:] if is_trained else ("none",) * in_passes
    with buffer._streams.call():
        for save in policies:
            _, saved, _ = engine.moe_ffn_forward(inputs, save, is_captured=False)
            if is_trained:
                up, down = (torch.empty_like(one) if one.requires_grad else None for one in weights)
                engine.moe_ffn_backward(inputs.x, inputs, saved, WeightGradients(up, down))
