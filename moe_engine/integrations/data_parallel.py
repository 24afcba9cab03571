"""Data parallelism around experts that are DTensors: FSDP2, DistributedDataParallel, clipping.

A rank's gradient of its experts is the sum over the batches of all ranks of its expert-parallel
group, where that of the other parameters is of its own batch alone. So experts are reduced apart,
over the ranks that hold the same ones, and divided by the number of all batches:

    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("efsdp", "ep"))
    shard_experts(model, mesh=mesh["ep"])
    fully_shard_experts(model, mesh["efsdp"])
    fully_shard(model, mesh=init_device_mesh("cuda", (8,)))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.weak import WeakIdKeyDictionary

from ..checks import shown
from ..errors import BackendError, ShapeError
from ..layer import MoEFeedForward
from ..sharded_weights import local, note_replaced
from .expert_parts import adapter_parts, lora_wrappers
from .transformers_experts import is_experts

MIXED_PRECISION = MixedPrecisionPolicy()


def fully_shard_experts(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    mp_policy: MixedPrecisionPolicy = MIXED_PRECISION,
    **options: Any,
) -> None:
    """Apply torch's `fully_shard` to each experts module of `model`; the rest is the caller's.

    `mesh` has the ranks that hold the same experts in one dimension, and comes of one mesh with
    that of the experts: mesh["efsdp"], of size 1 where each expert is on one rank alone. mp_policy
    and other options are those of `fully_shard`, which is called for the model's layers, and the
    model, afterwards. mp_policy casts weights and gradients; x has to come in its param_dtype, and
    the top-k weights stay float32.

    Parameters are split by experts, or inside each expert where `mesh` does not divide the experts
    of a rank. Gradients are added up and then divided by the number of ranks in both meshes, as
    each has a batch: the loss of a rank is the mean of its batch.

    Raises BackendError if experts are no DTensors, ShapeError if `mesh` divides neither.
    """
    found = [(one, list(one.parameters())) for one in _experts_modules(model)]
    placements = [_placement(weights, mesh) for _, weights in found]
    for (experts, weights), placement in zip(found, placements, strict=True):
        for weight in weights:
            note_replaced(weight)
        fully_shard(
            experts,
            mesh=mesh,
            shard_placement_fn=placement,
            mp_policy=replace(mp_policy, cast_forward_inputs=False),
            **options,
        )
        experts.set_gradient_divide_factor(weights[0].device_mesh.size() * mesh.size())
        # NCCL scales by PREMUL_SUM else, which up to torch 2.13 reads powers of 2 as 0 in bf16. On
        # one rank, torch would divide twice.
        experts.set_force_sum_reduction_for_comms(mesh.size() > 1)


def average_expert_gradients(model: nn.Module, mesh: DeviceMesh | None = None) -> None:
    """Leave the experts out of a `DistributedDataParallel(model)` to come, and average their
    gradients as it does those of the rest.

        average_expert_gradients(model)
        model = DistributedDataParallel(model)

    mesh: as in `fully_shard_experts`, None where each expert is on one rank alone. With a mesh the
    gradients of experts are added up over it in each backward, also within `no_sync()`. Experts may
    be DTensors or ordinary tensors of a rank's share, with LoRA adapters or without. Another call
    for the same model takes the place of the one before. Experts look before their forward whether
    they, or copies of them, have weights that are new or were frozen before. Move the model to its
    device first, as torch converts no DTensors that have hooks.

    Raises BackendError for whole experts, for those that FSDP2 has, and for a MoEFeedForward with a
    `wgrad`, whose gradients autograd does not see.
    """
    groups, names = _groups_of_experts(model), []
    for name, weight in model.named_parameters():
        if id(weight) in groups:
            names.append(name)
            if weight in _hooks:
                _hooks.pop(weight).remove()
            _average(weight, groups[id(weight)], mesh)

    def look(experts: Any, *_: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if (buffer := _buffer_of(experts)) is not None:  # else they are whole again
            for weight in experts.parameters():
                if not isinstance(weight, DTensor) or weight.device_mesh.ndim == 1:
                    _average(weight, buffer.group, mesh)

    for experts in _found_experts(model):
        if (before := vars(experts).get(_LOOKS)) is not None:
            before.remove()
        vars(experts)[_LOOKS] = experts.register_forward_pre_hook(look)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)


def _average(weight: Tensor, group: dist.ProcessGroup | None, mesh: DeviceMesh | None) -> None:
    """Average the gradients of a weight of experts, unless they are already."""
    if not isinstance(weight, DTensor):
        _groups[weight] = group
    if weight.requires_grad and weight not in _hooks:
        num_ranks = 1 if group is None else group.size()
        _hooks[weight] = weight.register_hook(_averaging(num_ranks * _size(mesh), mesh))


def param_groups(parameters: Iterable[Tensor]) -> list[dict[str, list[Tensor]]]:
    """The ordinary tensors, and the DTensors of each mesh, as groups for an optimizer:

        optimizer = torch.optim.AdamW(param_groups(model.parameters()))

    torch's foreach and fused steps, which are the default on GPUs, refuse ordinary tensors and
    DTensors in one group, as a model under DistributedDataParallel has whose experts are DTensors.
    The groups are the same under FSDP2, so one loads the checkpoint of the other.
    """
    by_mesh: dict[Any, list[Tensor]] = {}
    for one in parameters:
        by_mesh.setdefault(getattr(one, "device_mesh", None), []).append(one)
    return [{"params": some} for some in by_mesh.values()]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` for parameters on several meshes: the norm before clipping,
    equal on all ranks.

    Collective over the ranks of all meshes. Of gradients that are no DTensors, those of experts
    count on all ranks, if `average_expert_gradients` knows them. Others count as they are, so they
    must be equal on all ranks, as those of DistributedDataParallel.
    """
    by_ranks: dict[Any, list[Tensor]] = {}
    for one in [parameters] if isinstance(parameters, Tensor) else parameters:
        if one.grad is not None:
            ranks = getattr(one.grad, "device_mesh", None) or _groups.get(one)
            by_ranks.setdefault(ranks, []).append(one)
    norms = [_norm([one.grad for one in some], norm_type, at) for at, some in by_ranks.items()]
    norm = get_total_norm(norms, norm_type)
    for some in by_ranks.values():
        clip_grads_with_norm_(some, max_norm, norm)
    return norm


_groups: Any = WeakIdKeyDictionary()
"""The group of each weight of experts that is no DTensor, and that DistributedDataParallel leaves
out."""

_hooks: Any = WeakIdKeyDictionary()
"""The handle of the hook that averages the gradient of a weight of experts."""

_LOOKS = "_moe_looks_for_weights"
"""The attribute of experts that holds their forward hook's handle. The hook looks for weights."""


def _norm(grads: list[Any], norm_type: float, ranks: Any) -> Tensor:
    """That of gradients on one mesh or group, over all of its ranks."""
    norm = get_total_norm(grads, norm_type)
    if isinstance(ranks, dist.ProcessGroup):
        norms = [torch.empty_like(norm) for _ in range(ranks.size())]
        dist.all_gather(norms, norm, group=ranks)
        return get_total_norm(norms, norm_type)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _groups_of_experts(model: nn.Module) -> dict[int, dist.ProcessGroup | None]:
    """The expert-parallel group of each parameter of experts and of their adapters, by its id."""
    groups = {}
    for experts in _found_experts(model):
        if (buffer := _buffer_of(experts)) is None:
            raise BackendError(
                f"{type(experts).__name__} has all experts: first call shard_experts(model, group)."
            )
        if getattr(experts, "wgrad", None) is not None:
            raise _not_seen(shown(experts.wgrad))
        for name, weight in experts.named_parameters():
            if isinstance(weight, DTensor) and weight.device_mesh.ndim != 1:
                raise _unfit(experts, name, "of FSDP2 already")
            groups[id(weight)] = buffer.group
    for wrapper in lora_wrappers(model):
        group = wrapper.get_base_layer().moe_share.buffer.group
        groups |= {id(part.weight): group for part in adapter_parts(wrapper)}
    return groups


def _buffer_of(experts: Any) -> Any:
    """That of a MoEFeedForward, or of sharded experts; None of whole ones."""
    return getattr(getattr(experts, "moe_share", experts), "buffer", None)


def _found_experts(model: nn.Module) -> list[Any]:
    """The modules of experts; BackendError if there are none."""
    found = [one for one in model.modules() if isinstance(one, MoEFeedForward) or is_experts(one)]
    if not found:
        raise BackendError(
            f"{type(model).__name__} has no experts that this package runs: none is a "
            "MoEFeedForward, or of a model of transformers. Apply torch's own functions."
        )
    return found


def _experts_modules(model: nn.Module) -> list[Any]:
    """The modules of experts, whose parameters are DTensors of one dimension of ranks."""
    found = _found_experts(model)
    for experts in found:
        for name, weight in experts.named_parameters():
            if not isinstance(weight, DTensor):
                raise _unfit(experts, name, "no DTensor")
            if weight.device_mesh.ndim != 1:
                raise _unfit(experts, name, "of FSDP2 already")
    return found


def _unfit(experts: nn.Module, name: str, kind: str) -> BackendError:
    return BackendError(
        f"{name} of {type(experts).__name__} is {kind}, and all experts must be sharded: first "
        'call shard_experts(model, mesh=mesh["ep"]), or make each MoEFeedForward with '
        'mesh=mesh["ep"], and call this once, before fully_shard.'
    )


def _not_seen(wgrad: str) -> BackendError:
    return BackendError(
        f"wgrad of a MoEFeedForward is {wgrad}, and average_expert_gradients averages what "
        "autograd gives to .grad. Set wgrad to None, or average the memory of the sink yourself."
    )


def _size(mesh: DeviceMesh | None) -> int:
    """How many ranks hold the same experts."""
    return 1 if mesh is None else mesh.size()


def _placement(weights: list[Any], mesh: DeviceMesh) -> Callable[[nn.Parameter], Shard]:
    """In which dimension `mesh` divides each of these weights, as `fully_shard` asks for it."""
    shapes = [list(weight.to_local().shape) for weight in weights]
    for dim in (0, 1):
        if all(shape[dim] % mesh.size() == 0 for shape in shapes):
            return lambda _: Shard(dim)
    raise ShapeError(
        f"mesh has {mesh.size()} ranks, which divide neither the experts of a rank nor the rows of "
        f"each expert's weights, {shapes}. Choose a number that divides one of them."
    )


def _averaging(num_batches: int, mesh: DeviceMesh | None) -> Any:
    """A hook that makes the mean over all batches of a gradient that is a sum."""

    def average(grad: Any) -> Any:
        if grad is None:
            raise _not_seen("a WgradSink or a DelayedWgrad, set since")
        mean = grad / num_batches
        if mesh is not None and mesh.size() > 1:
            dist.all_reduce(local(mean), group=mesh.get_group())
        return mean

    return average
