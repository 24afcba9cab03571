"""Experts of a sharded transformers model in e4m3: half of the memory, and of the bytes on the way.

    model, buffer = load_sharded(checkpoint, group, **dequantize_options(checkpoint))
    quantize_experts(model)

Weights get a scale for each 128 x 128, as in the checkpoints of DeepSeek-V3 and of Qwen3's FP8
models, whose weights become what they were; rows travel and are multiplied in e4m3, with a scale
for each 128 columns, see `moe_engine.moe_ffn`. Other layers of the model stay as they are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import BackendError, DtypeError, ShapeError
from ..grouped_gemm import dequantize_weights, quantize_weights
from ..grouped_gemm.quantization import check_finite
from ..hardware import gpu
from ..sharded_weights import note_replaced
from .expert_parts import lora_wrappers
from .transformers_experts import (
    check_still_e4m3,
    experts_layers,
    is_quantized,
    names_of,
    scale_name,
)


@torch.inference_mode(False)  # parameters stay ordinary ones
@torch.no_grad()
def quantize_experts(model: Any) -> None:
    """Replace this rank's experts of a model that `shard_experts` or `load_sharded` has sharded by
    e4m3 weights, in place, a layer at a time; for inference.

    All ranks must do so before the next pass. `gate_up_proj` [L, 2I, H] and `down_proj` [L, H, I],
    bf16, become e4m3, with the new parameters `gate_up_proj_scale_inv` [L, 2I / 128, H / 128] and
    `down_proj_scale_inv` [L, H / 128, I / 128], float32, sizes rounded up, named as transformers
    names them. Biases stay in bf16. `dequantize_experts` brings weights in bf16 back, from e4m3.
    Raises BackendError for a model that is not sharded, or with a mesh or LoRA adapters of experts,
    or on a GPU without e4m3; DtypeError for weights other than bf16, or NaN, or infinite;
    ShapeError for sizes H or I that are no multiples of 16, or experts that are quantized already:
    then nothing has changed on this rank. Warns as `quantize_weights` does.
    """
    layers = experts_layers(model)
    paths = {module: path for path, module in model.named_modules()}
    for experts in layers:
        _check(model, experts, paths[experts])
    _forget_graphs(layers)
    for experts in layers:
        weights = {name: getattr(experts, name) for name in names_of(experts)[:2]}
        made = {}  # first both, as this may raise
        for name, one in weights.items():
            made[name] = quantize_weights(one.detach(), f"{paths[experts]}.{name}")
        trained = frozenset(name for name, one in weights.items() if one.requires_grad)
        experts.moe_share = replace(experts.moe_share, trained=trained)
        for name, (values, scales) in made.items():
            _set(experts, name, values, False)
            experts.register_parameter(scale_name(name), nn.Parameter(scales, requires_grad=False))


@torch.inference_mode(False)  # parameters stay ordinary ones
@torch.no_grad()
def dequantize_experts(model: Any) -> None:
    """Replace e4m3 weights of experts, in place, by the bf16 ones that are nearest to them, as
    saving and `unshard_experts` need them, which require gradients where the ones before did.
    Experts that are not quantized stay as they are. Raises DtypeError for weights that were cast
    since they were quantized, as by `model.bfloat16()`."""
    layers = experts_layers(model)
    _forget_graphs(layers)
    for experts in layers:
        if is_quantized(experts):
            check_still_e4m3(experts)
            for name in names_of(experts)[:2]:
                weight, scales = getattr(experts, name), getattr(experts, scale_name(name))
                was_trained = name in experts.moe_share.trained
                _set(experts, name, dequantize_weights(weight, scales), was_trained)
                del experts._parameters[scale_name(name)]


def _forget_graphs(layers: list[Any]) -> None:
    """Free the CUDA graphs of decode steps, which read the weights of before."""
    share = getattr(layers[0], "moe_share", None)
    if share is not None and share.graphs is not None:
        share.graphs.clear()


def _set(experts: Any, name: str, value: Tensor, requires_grad: bool) -> None:
    note_replaced(getattr(experts, name))
    setattr(experts, name, nn.Parameter(value, requires_grad=requires_grad))


def _check(model: Any, experts: Any, path: str) -> None:
    """Raise for a layer, at this path in the model, that cannot be quantized."""
    name = type(experts).__name__
    if not hasattr(experts, "moe_share"):
        raise BackendError(
            f"{name} is not sharded: call shard_experts(model, group) first, then quantize_experts."
        )
    if is_quantized(experts):
        raise ShapeError(f"{name} is quantized already; dequantize_experts(model) undoes it.")
    weights = {one: getattr(experts, one) for one in names_of(experts)[:2]}
    if lora_wrappers(model) or any(hasattr(w, "device_mesh") for w in weights.values()):
        raise BackendError(
            f"{name} has LoRA adapters, or its weights are DTensors of a mesh, which e4m3 weights "
            "have not. Merge the adapters, and call shard_experts(model, group) without mesh."
        )
    for weight, one in weights.items():
        if one.dtype != torch.bfloat16:
            raise DtypeError(
                f"{name} has {one.dtype} weights, and bfloat16 ones can be quantized. Load the "
                "model with dtype=torch.bfloat16."
            )
        if one.shape[-1] % 16:
            raise ShapeError(
                f"{name} has weights of shape {list(one.shape)}; rows in e4m3 must be multiples "
                "of 16 bytes."
            )
        if one.is_cuda and (gpu(one.device).capability or (9, 0)) < (8, 9):
            raise BackendError(
                f"{gpu(one.device).name} has no e4m3, which GPUs have from compute capability 8.9 "
                "on (Ada, Hopper). Leave the experts in bf16."
            )
        check_finite(f"{path}.{weight}", one)
