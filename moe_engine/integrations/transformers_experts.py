"""Which experts modules of transformers the engine can run: those that compute what it computes.

transformers hands the module itself to an implementation, which must apply whatever the module has
beyond weights and activation. So all that a module has must be known here.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import BackendError, DtypeError, ShapeError
from ..grouped_gemm import Activation
from ..layer import NO_BIASES, Biases
from ..sharded_weights import local

WEIGHTS = {True: ("gate_up_proj", "down_proj"), False: ("up_proj", "down_proj")}
"""By whether experts have a gate."""
KNOWN = {"num_experts", "hidden_dim", "intermediate_dim", "config", "act_fn", "_is_hf_initialized"}
KNOWN |= {"hidden_size", "intermediate_size"}
FLAGS = {"has_gate", "has_bias", "is_transposed", "is_concatenated"}
LIMITS, ALPHAS = ("limit", "swiglu_limit"), ("alpha", "swiglu_alpha")
SERVED = (
    "moe_engine runs experts with gate_up_proj and down_proj, transposed or not, their biases, and "
    "SiLU or GELU of a gate, limited or not, as those of Mixtral, Qwen3-MoE, DeepSeek-V3 and "
    "gpt-oss, or without a gate SiLU, GELU or the square of ReLU, and nothing else."
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
    weight, topk = weights_of(experts)[0], getattr(experts.config, "num_experts_per_tok", None)
    if not isinstance(topk, int):
        raise BackendError(
            f"{type(experts.config).__name__}.num_experts_per_tok is {topk!r}; the Buffer is made "
            "for one number of experts per token, an int. Set it to the most that a layer chooses."
        )
    # The parts of sharded experts are as the engine takes them.
    is_transposed = experts.is_transposed and not hasattr(experts, "moe_share")
    dtype = torch.bfloat16 if is_quantized(experts) else weight.dtype
    return experts.num_experts, weight.shape[1 if is_transposed else 2], topk, dtype


def check_experts(experts: Any, num_ranks: int) -> None:
    """Raise unless the experts are what `moe_ffn` computes, whole, and divisible by the ranks."""
    name = type(experts).__name__
    if "_hf_hook" in vars(experts):
        raise BackendError(
            f"{name} has a hook of accelerate, as from_pretrained sets it with device_map=, which "
            "moves weights in each pass. Load the model by load_sharded, or without device_map=; "
            "accelerate.hooks.remove_hook_from_module(model, recurse=True) removes the hooks of a "
            "model that is on this rank's device as a whole."
        )
    if unfit := unfit_parts(experts):
        raise BackendError(f"{name} has {', '.join(unfit)}. {SERVED}")
    weights = [getattr(experts, weight) for weight in names_of(experts)]
    for weight in weights:
        if weight.dtype not in (torch.bfloat16, torch.float32):
            raise DtypeError(
                f"{name} has {weight.dtype} weights; bfloat16 and float32 are allowed."
            )
    if (found := weights[0].shape[0]) != experts.num_experts:
        raise ShapeError(
            f"{name} holds {found} of its {experts.num_experts} experts. Give shard_experts a "
            "whole model."
        )
    if experts.num_experts % num_ranks:
        raise ShapeError(
            f"{name} has {experts.num_experts} experts, which {num_ranks} ranks cannot share "
            "equally. Choose a number of ranks that divides it."
        )


def check_form(experts: Any, what: str) -> None:
    """Raise BackendError for `what`, which takes experts in no other form than the engine's."""
    gate = gate_of(experts)
    if experts.is_transposed or (gate is not None and gate.is_interleaved):
        raise BackendError(
            f"{type(experts).__name__} has transposed weights, or interleaved gate and up, which "
            f"{what} cannot take. Call shard_experts(model, group) without it."
        )


def unfit_parts(
    experts: Any, weight_types: Collection[type] = (nn.Parameter,), known: Collection[str] = ()
) -> list[str]:
    """The parts of a module that the engine cannot apply; weights of other types and attributes
    that are not `known` are such parts."""
    from transformers.integrations import moe

    function = getattr(experts, "act_fn", None)
    name = getattr(function, "__name__", type(function).__name__)
    forward = getattr(type(experts).forward, "__globals__", None)
    gate = gate_of(experts)
    has_own_gate = getattr(experts._apply_gate, "__func__", None) is not moe._default_apply_gate
    found = {
        f"the activation {name}": gate is None and not has_own_gate,
        "a gate function of its own": gate is None and has_own_gate,
        "a forward of its own": forward is not vars(moe),
    }
    unfit = [what for what, present in found.items() if present]
    for weight in names_of(experts):
        kind = type(getattr(experts, weight, None))
        if kind not in weight_types:  # quantized or distributed, whatever dtype it shows
            unfit.append(f"{weight} of type {kind.__name__}")
    parts = {
        "parameter": experts._parameters.keys() - set(names_of(experts)),
        "buffer": experts._buffers.keys(),
        "module": experts._modules.keys() - {"act_fn"},
        "attribute": _set_attributes(experts) - KNOWN - FLAGS - set(known),
    }
    if gate is not None:
        parts["attribute"] -= _numbers_of(experts, gate.activation)
    unfit += [f"the {part} {n}" for part, names in parts.items() for n in sorted(names)]
    return list(dict.fromkeys(unfit))


def _set_attributes(experts: Any) -> set[str]:
    """What was set on a module beyond what each module has, except what is off: False or None."""
    new = vars(experts).keys() - vars(nn.Module()).keys()
    if not has_own_forward(experts):
        new -= {"forward"}
    return {name for name in new if not any(vars(experts)[name] is off for off in (False, None))}


def has_own_forward(module: Any) -> bool:
    """Whether a module runs another forward than its class. One of which accelerate has removed a
    hook has that of its class as an attribute."""
    forward = vars(module).get("forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


def names_of(experts: Any) -> tuple[str, ...]:
    """The parameters of an experts module: its weights, and its biases if it has any."""
    weights = WEIGHTS[bool(experts.has_gate)]
    return *weights, *(f"{name}_bias" for name in weights if experts.has_bias)


def weights_of(experts: Any) -> tuple[Tensor, Tensor]:
    """Those of the two products."""
    first, second = WEIGHTS[bool(experts.has_gate)]
    return getattr(experts, first), getattr(experts, second)


def scale_name(name: str) -> str:
    """That of the scales of a weight in e4m3, as transformers has it."""
    return f"{name}_scale_inv"


def is_quantized(experts: Any) -> bool:
    """Whether `quantize_experts` has made the weights e4m3."""
    return scale_name("down_proj") in experts._parameters


def operands_of(experts: Any) -> tuple[Any, Any]:
    """The weights of this rank's experts, as `moe_ffn` takes them."""
    first, second = weights_of(experts)
    if not is_quantized(experts):
        return local(first), local(second)
    check_still_e4m3(experts)
    scales = (getattr(experts, scale_name(name)) for name in names_of(experts)[:2])
    return (first, next(scales)), (second, next(scales))


def check_still_e4m3(experts: Any) -> None:
    """Raise DtypeError where weights that `quantize_experts` made e4m3 were cast since."""
    dtype = weights_of(experts)[0].dtype
    if dtype is not torch.float8_e4m3fn:
        raise DtypeError(
            f"{type(experts).__name__} was made e4m3 by quantize_experts, and its weights and "
            f"scales are {dtype} now: model.to({dtype}) casts them as if they were ordinary "
            "weights. Cast the model first, then call quantize_experts(model)."
        )


def biases_of(experts: Any) -> Biases:
    """Those of this rank's experts, as `moe_ffn` takes them."""
    if not experts.has_bias:
        return NO_BIASES
    first, second = (local(getattr(experts, name)) for name in names_of(experts)[2:])
    return first, second


class Gate(NamedTuple):
    """What a module does with gate and up, or without a gate with its one product, and whether
    gate and up are interleaved in its weights."""

    activation: Activation
    is_interleaved: bool


def gate_of(experts: Any) -> Gate | None:
    """The gate that gives what the module's own function gives, for values of gate and up near 0
    and far from it; None if the engine has none."""
    function = getattr(experts, "act_fn", None)
    if isinstance(function, nn.Module) and any(
        True for _ in itertools.chain(function.parameters(), function.buffers())
    ):
        return None
    far = torch.tensor([-1e4, -100.0, 100.0, 1e4], dtype=torch.float64, device="cpu")
    near = torch.linspace(-20.0, 20.0, 60, dtype=torch.float64, device="cpu")
    pairs = torch.cartesian_prod(*2 * [torch.cat([near, far])])  # of gate and up
    for is_interleaved in (False, True) if experts.has_gate else (False,):
        given = (pairs if is_interleaved else pairs.T).flatten()[None]
        for activation in _candidates(experts):
            want = activation(pairs.T.flatten()[None])
            if all(_gives(experts, is_training, given, want) for is_training in (True, False)):
                return Gate(activation, is_interleaved)
    return None


def activation_of(experts: Any) -> Activation:
    """That of experts in which `unfit_parts` has found nothing."""
    gate = gate_of(experts)
    assert gate is not None
    return gate.activation


def _gives(experts: Any, is_training: bool, given: Tensor, want: Tensor) -> bool:
    """Whether what the module has between its products makes of `given`, which it may overwrite,
    what is wanted, in training or in inference."""
    before = experts.training
    try:
        experts.training = is_training
        function = experts._apply_gate if experts.has_gate else experts.act_fn
        with torch.no_grad():
            found = function(given.clone())
        return found.shape == want.shape and torch.allclose(found.double(), want, 1e-6, 1e-6)
    except Exception:
        return False
    finally:
        experts.training = before


def _candidates(experts: Any) -> list[Activation]:
    """Activations that a module may have, by its attributes."""
    if not experts.has_gate:
        return [Activation(name) for name in ("relu2", "silu", "gelu", "gelu_tanh")]
    limits = [None, *(one for one in _numbers(experts, LIMITS) if one > 0)]
    found = []
    for limit, shift in itertools.product(limits, (0.0, 1.0)):
        for alpha in (1.0, *_numbers(experts, ALPHAS)):
            found.append(Activation("swiglu", limit, alpha, shift))
        found += [Activation(name, limit, shift=shift) for name in ("geglu", "geglu_tanh")]
    return found


def _numbers(experts: Any, names: Collection[str]) -> list[float]:
    values: list[Any] = [getattr(experts, name, None) for name in names]
    return [float(value) for value in values if type(value) in (int, float)]


def _numbers_of(experts: Any, activation: Activation) -> set[str]:
    """The attributes that an activation was made of."""
    both = (LIMITS, activation.limit), (ALPHAS, activation.alpha)
    return {name for names, one in both for name in names if one in _numbers(experts, [name])}
