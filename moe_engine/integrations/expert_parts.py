"""The parameters of a transformers model of which each rank has a part: the weights of experts, and
peft's LoRA adapters of these.

    model = get_peft_model(model, LoraConfig(target_parameters=["gate_up_proj", "down_proj"]))
    shard_experts(model, group)

peft adds `B @ A` to the weight [out, in] of each expert. It keeps A of all experts as one matrix
[E * r, in], expert after expert, and B as [out, r * E], whose columns number the experts last.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import BackendError
from ..sharded_weights import local, note_replaced, sharded
from ..symm import exchange
from .transformers_experts import (
    experts_layers,
    gate_of,
    is_experts,
    is_quantized,
    names_of,
    weights_of,
)

WAIT_S = 1800.0
"""Seconds that ranks wait for one that comes later to restore its parts."""


@dataclass(frozen=True)
class Part:
    """The parameter `name` of `module`, which has its experts in dimension 0; or that of a B of
    adapters, with r = `lora_rank`. Of experts, the model may have it transposed, and gate and
    up interleaved: each rank brings its part into the form of the engine."""

    module: Any
    name: str
    lora_rank: int = 0
    is_transposed: bool = False
    is_interleaved: bool = False

    @property
    def weight(self) -> nn.Parameter:
        return getattr(self.module, self.name)

    @property
    def is_whole(self) -> bool:
        """Whether `restore` has brought it back."""
        return hasattr(self.weight, "is_restored")

    def keep(self, rank: int, num_ranks: int, mesh: DeviceMesh | None) -> None:
        """Replace the whole parameter by this rank's part."""
        whole = self._experts_first(self.weight.detach())
        num_rows = len(whole) // num_ranks
        # A clone, so that the storage of all experts is freed.
        mine = whole[rank * num_rows :][:num_rows].clone(memory_format=torch.contiguous_format)
        self._replace(sharded(self._experts_last(mine), mesh))

    def to_engine_form(self) -> None:
        """Bring this rank's part into the form of the engine: [L, out, in], gate before up.

        Of an expert with H = 2 and I = 2, gpt-oss's weight [[g0, u0, g1, u1], [g2, u2, g3, u3]]
        becomes [[g0, g2], [g1, g3], [u0, u2], [u1, u3]], and its bias [g0, u0, g1, u1] becomes
        [g0, g1, u0, u1].
        """
        if self.is_transposed or self.is_interleaved:
            weight = self.weight.detach()
            weight = weight.transpose(1, 2) if self.is_transposed else weight
            if self.is_interleaved:
                weight = rearrange(weight, "e (rows part) ... -> e (part rows) ...", part=2)
            self._replace(weight.contiguous())

    def _to_model_form(self, weight: Tensor) -> Tensor:
        if self.is_interleaved:
            weight = rearrange(weight, "e (part rows) ... -> e (rows part) ...", part=2)
        return (weight.transpose(1, 2) if self.is_transposed else weight).contiguous()

    def make_local(self) -> None:
        """Replace this rank's part of a DTensor by an ordinary tensor."""
        mine = local(self.weight.detach())
        # The host's memory of a file begins anywhere, and kernels read 16 bytes at a time.
        self._replace(mine.clone() if mine.data_ptr() % 16 else mine)

    def restore(self, group: dist.ProcessGroup | None) -> None:
        """Replace this rank's part by the whole parameter, unless a call before has; collective."""
        if not self.is_whole:
            self._replace(self.gather(group))
            vars(self.weight)["is_restored"] = True

    def gather(self, group: dist.ProcessGroup | None) -> Tensor:
        """The whole parameter, of the parts of all ranks; collective."""
        mine = self._experts_first(local(self.weight.detach())).contiguous()
        return self._to_model_form(self._experts_last(_gather(mine, group)))

    def _experts_first(self, weight: Tensor) -> Tensor:
        """[out, r * E] -> [E, out, r] for a B."""
        if not self.lora_rank:
            return weight
        return rearrange(weight, "out (r e) -> e out r", r=self.lora_rank)

    def _experts_last(self, weight: Tensor) -> Tensor:
        """[E, out, r] -> [out, r * E] for a B."""
        return rearrange(weight, "e out r -> out (r e)") if self.lora_rank else weight

    def _replace(self, value: Tensor) -> None:
        before = self.weight
        note_replaced(before)
        setattr(self.module, self.name, nn.Parameter(value, requires_grad=before.requires_grad))


def expert_parts(model: nn.Module) -> list[Part]:
    """All of a model, in the order of its layers, adapters last."""
    weights = [part for experts in experts_layers(model) for part in _parts_of(experts)]
    return weights + [part for wrapper in lora_wrappers(model) for part in adapter_parts(wrapper)]


def restore_parts(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Make all parameters whole, but for those that a call before has, which then raised.
    Collective. BackendError on all ranks where these differ, as ranks would gather other ones."""
    parts = expert_parts(model)
    num_whole = exchange(group, lambda: sum(one.is_whole for one in parts), "unsharding", WAIT_S)
    if len(set(num_whole)) > 1:
        raise BackendError(
            f"an earlier unshard_experts brought back {num_whole} parameters of experts, by rank, "
            "before it raised. Load the model anew."
        )
    for part in parts:
        part.restore(group)


def _parts_of(experts: Any) -> Iterator[Part]:
    """Those of one layer."""
    gate = gate_of(experts)
    is_interleaved = gate is not None and gate.is_interleaved
    for name in names_of(experts):
        is_transposed = experts.is_transposed and not name.endswith("_bias")
        of_gate = is_interleaved and name.startswith("gate_up")
        yield Part(experts, name, is_transposed=is_transposed, is_interleaved=of_gate)


def adapter_parts(wrapper: Any) -> Iterator[Part]:
    """Those of one module of peft around experts."""
    for adapter, lora_rank in wrapper.r.items():
        yield Part(wrapper.lora_A[adapter], "weight")
        yield Part(wrapper.lora_B[adapter], "weight", lora_rank)


def is_peft(model: nn.Module) -> bool:
    """Whether it is a PeftModel."""
    return "peft" in sys.modules and isinstance(model, sys.modules["peft"].PeftModel)


def lora_wrappers(model: nn.Module) -> list[Any]:
    """peft's modules around experts, each with the adapters of one weight; outer ones first."""
    if "peft" not in sys.modules:
        return []
    try:
        from peft.tuners.lora.layer import ParamWrapper
    except ImportError:  # before 0.17, which has adapters of modules alone
        return []
    found = (module for module in model.modules() if isinstance(module, ParamWrapper))
    return [wrapper for wrapper in found if is_experts(wrapper.get_base_layer())]


def note_num_experts(model: nn.Module) -> None:
    """Tell peft how many experts this rank has now."""
    for wrapper in lora_wrappers(model):
        wrapper.num_experts = len(local(wrapper.get_param()))
        for adapter in wrapper.r:
            for linear in (wrapper.lora_A[adapter], wrapper.lora_B[adapter]):
                linear.out_features, linear.in_features = linear.weight.shape


def callers(model: nn.Module) -> list[Any]:
    """What the model calls in each layer of experts: the experts, or peft's outermost module around
    them."""
    found = {id(experts): experts for experts in experts_layers(model)}
    for wrapper in reversed(lora_wrappers(model)):
        found[id(wrapper.get_base_layer())] = wrapper
    return list(found.values())


def check_adapters(model: nn.Module, mesh: DeviceMesh | None) -> None:
    """Raise BackendError for adapters of experts that cannot be sharded."""
    wrappers = lora_wrappers(model)
    if wrappers and mesh is not None:
        raise BackendError(
            "the experts have LoRA adapters, which peft adds to ordinary tensors alone: call "
            "shard_experts(model, group), without mesh."
        )
    if other := next((type(one).__name__ for one in _others_around(model, wrappers)), None):
        raise BackendError(
            f"peft has put a {other} around experts, and only LoRA's adapters of parameters can be "
            'sharded: LoraConfig(target_parameters=["gate_up_proj", "down_proj"]).'
        )


def _others_around(model: nn.Module, wrappers: list[Any]) -> Iterator[nn.Module]:
    """Modules of peft around experts, other than `wrappers`."""
    if "peft" not in sys.modules:
        return
    try:
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper
    except ImportError:
        return

    known, kinds = {id(wrapper) for wrapper in wrappers}, (BaseTunerLayer, AuxiliaryTrainingWrapper)
    for one in model.modules():
        if isinstance(one, kinds) and id(one) not in known and any(map(is_experts, one.modules())):
            yield one


def check_not_of_fsdp(model: nn.Module) -> None:
    """Raise BackendError for experts that FSDP2 holds, too."""
    first = (weights_of(experts)[0] for experts in experts_layers(model))
    meshes = (getattr(weight, "device_mesh", None) for weight in first)
    if any(mesh is not None and mesh.ndim > 1 for mesh in meshes):
        raise BackendError(
            "FSDP2 holds the experts, whose parameters cannot be replaced. To save the model, pass "
            "save_pretrained the whole state_dict of torch's get_model_state_dict."
        )


@torch.no_grad()
def whole_state_dict(
    model: nn.Module, keep: bool = True, adapters_only: bool = False
) -> dict[str, Tensor]:
    """`model.state_dict()` as if no experts were sharded, for `save_pretrained`.

    Collective over the group of `shard_experts`. Weights of experts are gathered one at a time and
    kept in the host's memory, on ranks that `keep`; on others the result is empty. With
    `adapters_only`, the same on all ranks, weights of experts are left out, and their LoRA adapters
    are not: a PeftModel saves no more.
    """
    share = getattr(experts_layers(model)[0], "moe_share", None)
    if share is None:
        return model.state_dict() if keep else {}
    check_not_of_fsdp(model)
    if any(map(is_quantized, experts_layers(model))):
        raise BackendError(
            "the experts are e4m3, and a checkpoint of the whole model would lack their scales. "
            "Call dequantize_experts(model) on every rank first."
        )
    parts = {id(part.weight): part for part in expert_parts(model)}
    state = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        part = parts.get(id(tensor))
        if adapters_only and part is not None and is_experts(part.module):
            continue
        whole = tensor.detach() if part is None else part.gather(share.passes.group)
        if keep:
            state[name] = whole if part is None else whole.cpu()
    return state


def _gather(mine: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The parts of all ranks, in their order."""
    if group is None or group.size() == 1:
        return mine
    whole = mine.new_empty(group.size() * mine.shape[0], *mine.shape[1:])
    for rank, part in enumerate(whole.chunk(group.size())):
        if rank == group.rank():
            part.copy_(mine)
        dist.broadcast(part.view(torch.uint8), group=group, group_src=rank)
    return whole
