"""Weights of experts as DTensors: each rank has its share, under the names and shapes of all.

So torch's distributed checkpoint knows which experts a rank has, and loads them into another number
of ranks. Kernels take the share alone.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .checks import shown
from .errors import BackendError, DtypeError, ShapeError


def group_of(mesh: DeviceMesh, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group of a mesh of one dimension. Raise for another mesh, or another order of ranks than
    that of `group`, if there is one."""
    if not isinstance(mesh, DeviceMesh):
        raise DtypeError(f"mesh is {shown(mesh)}; it must be a DeviceMesh of one dimension.")
    have = mesh.mesh.tolist()
    if mesh.ndim != 1:
        raise ShapeError(
            f"mesh has {mesh.ndim} dimensions, {have}; it must have the ranks of one "
            'expert-parallel group in one, as mesh["ep"] of a larger mesh.'
        )
    want = have if group is None else dist.get_process_group_ranks(group)
    if have != want:
        raise ShapeError(
            f"mesh has the ranks {have}, and the experts are on the ranks {want}. Make the Buffer "
            "with the group mesh.get_group()."
        )
    return mesh.get_group()


def sharded(mine: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """This rank's experts [L, ...] as its part of a DTensor [E, ...], Shard(0) on `mesh`, without a
    copy if they are on its device; without a mesh as they are."""
    if mesh is None:
        return mine
    from torch.distributed.tensor import DTensor, Shard  # takes a second to import

    return DTensor.from_local(mine, mesh, [Shard(0)], run_check=False)


def local(weight: Any) -> Any:
    """What this rank has of a weight, with gradients; other tensors than DTensors as they are."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


def arrived(tensor: Any) -> Any:
    """What a collective brings that torch has not waited for: DTensors that changed their layout
    leave such tensors, without memory of their own. With gradients; others as they are."""
    if type(tensor) is Tensor or not hasattr(tensor, "trigger_wait"):
        return tensor
    return _Arrived.apply(tensor)


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, tensor: Any) -> Tensor:
        return tensor.wait()

    @staticmethod
    def backward(_: Any, *grads: Tensor) -> Tensor:
        return grads[0]


# --- Optimizers ----------------------------------------------------------------------------------

_replaced: WeakValueDictionary[int, nn.Parameter] = WeakValueDictionary()
_hooks: list[Any] = []


def note_replaced(parameter: nn.Parameter) -> None:
    """From now on, the step of an optimizer that still has this parameter raises BackendError."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_check_parameters))
    _replaced[id(parameter)] = parameter


def _check_parameters(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for group in optimizer.param_groups:
        for one in group["params"]:
            if id(one) in _replaced:
                raise BackendError(
                    f"an optimizer steps a parameter of experts, {list(one.shape)}, that the model "
                    "no longer has: the experts were sharded, or made whole, after the optimizer "
                    "was made. Make the optimizer afterwards, with model.parameters()."
                )
