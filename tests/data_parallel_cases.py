"""What the tests of data parallelism share: a model with experts, whole in plain torch and over
ranks, and meshes."""

from __future__ import annotations

from functools import cache
from typing import Any

import cases
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moe_engine import Buffer, MoEFeedForward

HIDDEN, INTERMEDIATE, TOPK, TOKENS, LR = 16, 8, 2, 3, 0.5
FULL = StateDictOptions(full_state_dict=True)


class WholeExperts(nn.Module):
    """All experts, in plain torch: the oracle."""

    def __init__(self, num_experts: int):
        super().__init__()
        up = torch.randn(num_experts, 2 * INTERMEDIATE, HIDDEN) * HIDDEN**-0.5
        down = torch.randn(num_experts, HIDDEN, INTERMEDIATE) * INTERMEDIATE**-0.5
        self.gate_up_proj, self.down_proj = nn.Parameter(up), nn.Parameter(down)

    def forward(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, (up, down) in enumerate(zip(self.gate_up_proj, self.down_proj, strict=True)):
            gate, value = (x @ up.T).chunk(2, -1)
            weight = (topk_weights * (topk_idx == e)).sum(1, keepdim=True)
            out = out + weight * ((F.silu(gate) * value) @ down.T)
        return out


class Layer(nn.Module):
    """A dense part, a router and experts."""

    def __init__(self, experts: nn.Module, num_experts: int):
        super().__init__()
        self.dense, self.router = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, num_experts)
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        weights, idx = self.router(x.float()).softmax(-1).topk(TOPK)
        return x + self.experts(torch.tanh(self.dense(x)), idx, weights)


def whole_model(num_experts: int, seed: int = 0, num_layers: int = 2) -> nn.Sequential:
    """The same on all ranks."""
    torch.manual_seed(seed)
    layers = (Layer(WholeExperts(num_experts), num_experts) for _ in range(num_layers))
    return nn.Sequential(*layers).to(cases.device())


def sharded_model(
    num_experts: int,
    mesh: DeviceMesh,
    dtype: torch.dtype = torch.float32,
    backend: str = "collective",
    num_layers: int = 2,
) -> tuple[nn.Sequential, Buffer]:
    """The same model with its experts over the ranks of `mesh`, with other weights. Collectives are
    faster than interpreted kernels."""
    sizes = TOKENS, HIDDEN, num_experts, TOPK, dtype
    buffer = Buffer.for_tokens(mesh.get_group(), *sizes, backend=backend)
    local = num_experts // mesh.size(), HIDDEN, INTERMEDIATE, buffer, torch.float32
    layers = (
        Layer(MoEFeedForward(*local, requires_grad=True, mesh=mesh), num_experts)
        for _ in range(num_layers)
    )
    return nn.Sequential(*layers).to(cases.device()), buffer


def take_weights(model: nn.Module, whole: nn.Module) -> None:
    """Those of the whole model, under the same names."""
    set_model_state_dict(model, dict(whole.state_dict()), options=FULL)


def all_weights(model: nn.Module) -> dict[str, Tensor]:
    """Those of a model over ranks, whole, on each rank."""
    full = get_model_state_dict(model)
    return {name: getattr(one, "full_tensor", lambda one=one: one)() for name, one in full.items()}


@cache
def meshes(ep: int) -> tuple[DeviceMesh, DeviceMesh]:
    """(experts' mesh of all ranks, with dimensions "efsdp" and "ep"; the mesh of all ranks)."""
    size, device = dist.get_world_size(), cases.device().type
    both = init_device_mesh(device, (size // ep, ep), mesh_dim_names=("efsdp", "ep"))
    return both, init_device_mesh(device, (size,))


def batches(num_ranks: int, step: int) -> list[tuple[Tensor, Tensor]]:
    """(x, target) of each rank."""
    generator = torch.Generator().manual_seed(step)
    drawn = torch.randn(num_ranks, 2, TOKENS, HIDDEN, generator=generator).to(cases.device())
    return [(x, target) for x, target in drawn]


def loss_of(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    """The mean over a batch."""
    return (model(x) - target).float().square().mean()


def end(buffer: Any) -> None:
    """Free a Buffer once all of its ranks are here."""
    buffer.check()
    dist.barrier(buffer.group)
    buffer.destroy()
