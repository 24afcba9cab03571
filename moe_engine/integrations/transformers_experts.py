"""Which experts modules of transformers the engine can run: those that compute what it computes.

transformers hands the module itself to an implementation, which must apply whatever the module has
beyond weights and activation. So all that a module has must be known here.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import BackendError, DtypeError, ShapeError

WEIGHTS = ("gate_up_proj", "down_proj")
KNOWN = {"num_experts", "hidden_dim", "intermediate_dim", "config", "act_fn", "_is_hf_initialized"}
FLAGS = {"has_gate", "has_bias", "is_transposed", "is_concatenated"}
SERVED = (
    "moe_engine runs experts with gate_up_proj [E, 2I, H] (gate rows, then up rows), down_proj "
    "[E, H, I], SiLU and nothing else, as those of Mixtral, Qwen2-MoE, Qwen3-MoE and DeepSeek-V3."
)


def is_experts(module: nn.Module) -> bool:
    """Whether it is an experts module of transformers."""
    # The decorator `use_experts_implementation` of transformers sets these on each of them.
    return hasattr(module, "has_gate") and hasattr(module, "is_transposed")


def experts_layers(model: Any) -> list[Any]:
    """The experts modules of a model, in layer order; BackendError if there are none."""
    layers = [module for module in model.modules() if is_experts(module)]
    if not layers:
        raise BackendError(
            f"{type(model).__name__} has no experts that transformers (5.17 or later) can run by "
            f"another implementation. {SERVED} A dense model has nothing to spread: run it as it "
            "is."
        )
    return layers


def shape_of(experts: Any) -> tuple[int, int, int, torch.dtype]:
    """(num_experts, hidden, top-k, dtype) of one layer, sharded or not."""
    weight, topk = experts.gate_up_proj, getattr(experts.config, "num_experts_per_tok", None)
    if not isinstance(topk, int):
        raise BackendError(
            f"{type(experts.config).__name__}.num_experts_per_tok is {topk!r}; the Buffer is made "
            "for one number of experts per token, an int. Set it to the most that a layer chooses."
        )
    return experts.num_experts, weight.shape[2], topk, weight.dtype


def check_experts(experts: Any, num_ranks: int) -> None:
    """Raise unless the experts are what `moe_ffn` computes, whole, and divisible by the ranks."""
    name = type(experts).__name__
    if unfit := unfit_parts(experts):
        raise BackendError(f"{name} has {', '.join(unfit)}. {SERVED}")
    up, down = (getattr(experts, weight) for weight in WEIGHTS)
    for weight in (up, down):
        if weight.dtype not in (torch.bfloat16, torch.float32):
            raise DtypeError(
                f"{name} has {weight.dtype} weights; bfloat16 and float32 are allowed."
            )
    if (found := up.shape[0]) != experts.num_experts:
        raise ShapeError(
            f"{name} holds {found} of its {experts.num_experts} experts. Give shard_experts a "
            "whole model."
        )
    if experts.num_experts % num_ranks:
        raise ShapeError(
            f"{name} has {experts.num_experts} experts, which {num_ranks} ranks cannot share "
            "equally. Choose a number of ranks that divides it."
        )


def unfit_parts(
    experts: Any, weight_types: Collection[type] = (nn.Parameter,), known: Collection[str] = ()
) -> list[str]:
    """The parts of a module that the engine cannot apply; weights of other types and attributes
    that are not `known` are such parts."""
    from transformers.integrations import moe

    activation = getattr(experts, "act_fn", None)
    name = getattr(activation, "__name__", type(activation).__name__)
    forward = getattr(type(experts).forward, "__globals__", None)
    gate = getattr(experts._apply_gate, "__func__", None)
    found = {
        "no gate": not experts.has_gate,
        "biases": experts.has_bias,
        "transposed weights": experts.is_transposed,
        "interleaved gate and up rows": not experts.is_concatenated,
        f"the activation {name}": not is_silu(activation),
        "a gate function of its own": gate is not moe._default_apply_gate,
        "a forward of its own": forward is not vars(moe),
    }
    unfit = [what for what, present in found.items() if present]
    for weight in WEIGHTS:
        kind = type(getattr(experts, weight, None))
        if kind not in weight_types:  # quantized or distributed, whatever dtype it shows
            unfit.append(f"{weight} of type {kind.__name__}")
    parts = {
        "parameter": experts._parameters.keys() - set(WEIGHTS),
        "buffer": experts._buffers.keys(),
        "module": experts._modules.keys() - {"act_fn"},
        "attribute": _set_attributes(experts) - KNOWN - FLAGS - set(known),
    }
    unfit += [f"the {part} {n}" for part, names in parts.items() for n in sorted(names)]
    return list(dict.fromkeys(unfit))


def _set_attributes(experts: Any) -> set[str]:
    """What was set on a module beyond what each module has, except what is off: False or None."""
    new = vars(experts).keys() - vars(nn.Module()).keys()
    return {name for name in new if not any(vars(experts)[name] is off for off in (False, None))}


def is_silu(function: Any) -> bool:
    """Whether a function without parameters gives what SiLU gives, far from 0 as well."""
    if isinstance(function, nn.Module) and any(
        True for _ in itertools.chain(function.parameters(), function.buffers())
    ):
        return False
    far = torch.tensor([-1e4, -100.0, 100.0, 1e4], dtype=torch.float32, device="cpu")
    near = torch.linspace(-20.0, 20.0, 60, dtype=torch.float32, device="cpu")
    x = torch.cat([near, far])
    try:
        with torch.no_grad():
            got = function(x.clone())
            return got.shape == x.shape and torch.allclose(got, F.silu(x), rtol=1e-6, atol=1e-6)
    except Exception:
        return False
