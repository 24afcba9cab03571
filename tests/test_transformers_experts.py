"""Which experts modules the integration with transformers takes, on modules made like those of
transformers 5.17 to 5.24."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("transformers")

from transformers import PretrainedConfig
from transformers.activations import ACT2FN, SiLUActivation
from transformers.integrations.moe import use_experts_implementation

from moe_engine import Activation
from moe_engine.errors import BackendError, DtypeError, MoeEngineError, ShapeError
from moe_engine.integrations.transformers_experts import (
    check_experts,
    experts_layers,
    gate_of,
    shape_of,
)

E, H, I = 4, 16, 8


@use_experts_implementation
class Experts(nn.Module):
    """Like 54 of the 65 classes in 5.23: those of Mixtral, Qwen, DeepSeek-V2 and V3, LFM2 ..."""

    def __init__(self, config: Any):
        super().__init__()
        self.num_experts = E
        self.hidden_dim = H
        self.intermediate_dim = I
        self.gate_up_proj = nn.Parameter(torch.zeros(E, 2 * I, H))
        self.down_proj = nn.Parameter(torch.zeros(E, H, I))
        self.act_fn = config.activation

    def forward(self, x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
        return x


def make(
    kind: Any = Experts, activation: Any = ACT2FN["silu"], num_experts_per_tok: Any = 2, **set: Any
) -> Any:
    config = PretrainedConfig(activation=activation, num_experts_per_tok=num_experts_per_tok)
    experts = kind(config)
    for name, value in set.items():
        setattr(experts, name, value)
    return experts


# --- Activations -----------------------------------------------------------------------------


class Swish(nn.Module):
    """x * sigmoid(beta * x), which is SiLU until beta is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)


def clamped(x: Tensor) -> Tensor:
    return F.silu(x.clamp(max=50.0))


def of_two(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


SILU = [nn.SiLU(), nn.SiLU(inplace=True), SiLUActivation(), ACT2FN["swish"], F.silu]
SILU += [lambda x: x * torch.sigmoid(x), partial(F.silu, inplace=True)]
OTHERS = [None, "silu", Swish(), clamped, of_two, torch.sum, nn.Hardswish()]
OTHERS += [ACT2FN["quick_gelu"], ACT2FN["relu"], lambda x: F.silu(x)[None]]


@pytest.mark.parametrize("function", SILU)
def test_silu_is_known_by_what_it_does(function: Any) -> None:
    check_experts(make(activation=function), 2)
    with torch.device("meta"):
        assert gate_of(make(activation=function)) == (Activation("swiglu"), False)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (F.gelu, "geglu"),
        (ACT2FN["gelu"], "geglu"),
        (ACT2FN["gelu_pytorch_tanh"], "geglu_tanh"),
        (ACT2FN["gelu_new"], "geglu_tanh"),
    ],
)
def test_so_is_gelu(function: Any, name: str) -> None:
    experts = make(activation=function)
    check_experts(experts, 2)
    assert gate_of(experts) == (Activation(name), False)


@pytest.mark.parametrize("function", OTHERS)
def test_other_activations_are_refused(function: Any) -> None:
    with pytest.raises(BackendError, match="Experts has the activation"):
        check_experts(make(activation=function), 2)


# --- What a module has beyond weights and activation -----------------------------------------


class Gated(Experts):
    """As BeamExperts and HYV4Experts."""

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.clamp(max=7.0).chunk(2, dim=-1)
        return F.silu(gate) * up


class Limited(Experts):
    """As DeepseekV4Experts."""

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


class InTurn(Experts):
    """As GptOssExperts."""

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(gate * self.alpha)


@pytest.mark.parametrize(
    ("experts", "gate"),
    [
        (make(Limited, limit=7.0), (Activation("swiglu", 7.0), False)),
        (make(Limited, limit=7), (Activation("swiglu", 7.0), False)),
        (make(Limited, ACT2FN["gelu"], limit=7.0), (Activation("geglu", 7.0), False)),
        (make(InTurn, limit=7.0, alpha=1.702), (Activation("swiglu", 7.0, 1.702, 1.0), True)),
    ],
)
def test_gates_are_known_by_what_they_do(experts: Any, gate: tuple[Activation, bool]) -> None:
    check_experts(experts, 2)
    assert gate_of(experts) == gate


class InPlace(Experts):
    """A limit that no attribute tells of, by a gate that overwrites its argument."""

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up[..., ::2].clamp_(max=7.0), gate_up[..., 1::2]
        return F.silu(gate) * up


class TwoResults(Experts):
    def _apply_gate(self, gate_up: Tensor) -> Any:
        return gate_up.chunk(2, dim=-1)


class Dropping(Experts):
    """A gate that does more in training, whichever of both was chosen last."""

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.dropout(F.silu(gate), 0.5, self.training) * up


@pytest.mark.parametrize("kind", [InPlace, TwoResults, Dropping])
@pytest.mark.parametrize("is_training", [True, False])
def test_gates_that_are_not_the_engines(kind: Any, is_training: bool) -> None:
    experts = make(kind).train(is_training)
    with pytest.raises(BackendError, match="a gate function of its own"):
        check_experts(experts, 2)
    assert experts.training is is_training


class WithoutGate(Experts):
    """As NemotronHExperts."""

    def __init__(self, config: Any):
        super().__init__(config)
        del self.gate_up_proj
        self.up_proj = nn.Parameter(torch.zeros(E, I, H))


def without_gate(function: Any) -> Any:
    return make(WithoutGate, function, has_gate=False)


@pytest.mark.parametrize(
    ("function", "name"),
    [(ACT2FN["relu2"], "relu2"), (F.silu, "silu"), (F.gelu, "gelu")],
)
def test_experts_without_a_gate(function: Any, name: str) -> None:
    experts = without_gate(function)
    check_experts(experts, 2)
    assert gate_of(experts) == (Activation(name), False)
    assert shape_of(experts) == (E, H, 2, torch.float32)


class OwnForward(Experts):
    """A subclass that goes past the implementation."""

    def forward(self, x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
        return 2 * x


def with_buffer() -> Any:
    experts = make()
    experts.register_buffer("scale", torch.ones(E))
    return experts


def with_gate_of_instance() -> Any:
    experts = make()
    return make(_apply_gate=MethodType(Gated._apply_gate, experts))


def quantized() -> Any:
    """A weight of a tensor subclass, which shows the dtype that it stands for."""

    class Quantized(nn.Parameter):
        pass

    experts = make()
    experts.down_proj = Quantized(experts.down_proj.data)
    return experts


def without_weights() -> Any:
    experts = make()
    del experts.gate_up_proj
    return experts


NO_TOPK = [None, [2, 2], "2"]
BEYOND: list[tuple[Callable[[], Any], str]] = [
    (partial(make, post_expert_norm=nn.Identity()), "the module post_expert_norm"),  # MuseSpark
    (partial(make, has_post_expert_norm=True), "the attribute has_post_expert_norm"),
    (partial(make, down_proj_bias=nn.Parameter(torch.zeros(E, H))), "the parameter down_proj_bias"),
    (with_buffer, "the buffer scale"),
    (partial(make, limit=7.0), "the attribute limit"),
    (partial(make, limit=0), "the attribute limit"),
    (partial(make, swiglu_limit=7.0, alpha=1.7), "the attribute alpha, the attribute swiglu_limit"),
    (partial(make, _is_expert_parallel=True), "the attribute _is_expert_parallel"),
    (partial(make, forward=F.silu), "the attribute forward"),  # as accelerate's hooks set it
    (partial(make, Gated), "Gated has a gate function of its own"),
    (with_gate_of_instance, "a gate function of its own"),
    (partial(make, OwnForward), "OwnForward has a forward of its own"),
    (partial(make, has_gate=False), "up_proj of type NoneType"),
    (partial(without_gate, nn.Hardswish()), "the activation Hardswish"),
    (partial(make, has_bias=True), "gate_up_proj_bias of type NoneType"),
    (partial(make, Limited, limit=7.0, swiglu_limit=6.0), "the attribute swiglu_limit"),
    (partial(make, Limited, limit=7.0, alpha=2.0), "the attribute alpha"),
    (partial(make, Limited, limit=True), "a gate function of its own"),
    (quantized, "down_proj of type Quantized"),
    (without_weights, "gate_up_proj of type NoneType"),
]


def test_hooks_of_accelerate_are_refused_until_they_are_removed() -> None:
    hooks, experts = pytest.importorskip("accelerate.hooks"), make()
    hooks.add_hook_to_module(experts, hooks.AlignDevicesHook())
    with pytest.raises(BackendError, match=r"device_map=.* load_sharded, .*remove_hook"):
        check_experts(experts, 1)
    hooks.remove_hook_from_module(experts, recurse=True)
    check_experts(experts, 1)


@pytest.mark.parametrize(("build", "text"), BEYOND, ids=[text for _, text in BEYOND])
def test_experts_with_anything_else_are_refused(build: Callable[[], Any], text: str) -> None:
    with pytest.raises(BackendError, match=text) as raised:
        check_experts(build(), 2)
    assert "Mixtral, Qwen3-MoE, DeepSeek-V3 and gpt-oss" in str(raised.value)


def test_what_is_off_may_be_there() -> None:
    check_experts(make(has_post_expert_norm=False, _is_expert_parallel=False, limit=None), 2)
    check_experts(make(_is_hf_initialized=True), 2)  # set by from_pretrained


@pytest.mark.parametrize(
    ("build", "num_ranks", "error", "text"),
    [
        (lambda: make().half(), 2, DtypeError, "float16"),
        (lambda: make(num_experts=8), 2, ShapeError, "holds 4 of its 8 experts"),
        (make, 3, ShapeError, "4 experts, which 3 ranks cannot share equally"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    build: Callable[[], Any], num_ranks: int, error: type[MoeEngineError], text: str
) -> None:
    with pytest.raises(error, match=text):
        check_experts(build(), num_ranks)


@pytest.mark.parametrize("topk", NO_TOPK)
def test_a_config_without_one_top_k_is_refused(topk: Any) -> None:
    assert shape_of(make()) == (E, H, 2, torch.float32)
    with pytest.raises(BackendError, match="num_experts_per_tok is"):
        shape_of(make(num_experts_per_tok=topk))


def test_a_dense_model_is_told_what_is_served() -> None:
    with pytest.raises(BackendError, match="Linear has no experts") as raised:
        experts_layers(nn.Linear(2, 2))
    for text in ("5.17 or later", "Mixtral, Qwen3-MoE", "A dense model has nothing to spread"):
        assert text in str(raised.value)
