"""Routed experts of torchtitan over this engine: results and gradients against the oracle.

"stand-ins" make the calls of `RoutedExperts`, `GroupedExperts` and `BaseEPTokenDispatcher` of the
source of 21 August 2026 (b5bcd76), in their order and with their arguments. "torchtitan" are its
own classes through its own overrides, where it is installed; its `GroupedExperts` compute in bf16.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from ops_cases import check_layer
from ops_cases import experts as grouped_experts
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from training_cases import end, make_case, on_device

from moe_engine.checkpointing import SAVED_OPS
from moe_engine.emulation import PerRank
from moe_engine.errors import BackendError, ShapeError
from moe_engine.integrations import torchtitan

SOURCES = "stand-ins", "torchtitan"
CASE = dict(num_ranks=2, num_tokens=[6, 6], num_local=2, num_topk=2, intermediate=16)


def skip_without(source):
    if source == "torchtitan":
        pytest.importorskip("torchtitan.models.common.moe", reason="pip install torchtitan")


# --- Stand-ins -----------------------------------------------------------------------------------


class BaseDispatcher:
    """`BaseEPTokenDispatcher`."""

    def __init__(self, config):
        self.num_experts, self.top_k, self.ep_mesh = config.num_experts, config.top_k, None

    def wire_meshes(self, *, ep_mesh):
        self.ep_mesh = ep_mesh
        self.init_buffer()


class Dispatcher(torchtitan.EngineDispatcher, BaseDispatcher):
    """The class that `torchtitan_overrides` makes."""


class GroupedExperts(nn.Module):
    """`GroupedExperts`."""

    def __init__(self, config):
        super().__init__()
        shape = config.num_experts, config.hidden_dim, config.dim
        self.w1_EFD, self.w3_EFD = (nn.Parameter(torch.empty(shape)) for _ in range(2))
        self.w2_EDF = nn.Parameter(torch.empty(shape).transpose(1, 2).contiguous())

    def forward(self, x_RD, num_tokens_per_expert_E):
        ends = F.pad(torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32), (1, 0))
        up = torch.cat([self.w1_EFD, self.w3_EFD], 1)
        return grouped_experts(x_RD, ends, up, self.w2_EDF)


class FusedGroupedExperts(nn.Module):
    """`FusedGroupedExperts`, whose weights alone are needed."""

    def __init__(self, config):
        super().__init__()
        self.w13 = nn.Parameter(torch.empty(config.num_experts, config.hidden_dim, 2, config.dim))
        self.w2_EDF = nn.Parameter(torch.empty(config.num_experts, config.dim, config.hidden_dim))


class RoutedExperts(nn.Module):
    """`RoutedExperts`."""

    def __init__(self, config):
        super().__init__()
        self.inner_experts = config.inner_experts
        self.token_dispatcher = config.token_dispatcher

    def forward(self, x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E):
        rows, counts, metadata = self.token_dispatcher.dispatch(
            x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E
        )
        rows = self.inner_experts(rows, counts)
        return self.token_dispatcher.combine(rows, metadata, x_TD)


class FusedRoutedExperts(torchtitan.EngineRoutedExperts, RoutedExperts):
    """The class that `torchtitan_overrides` makes."""


# --- Layers --------------------------------------------------------------------------------------

WAYS = "dispatcher", "w13", "w1 and w3"


def sizes_of(parts, num_ranks):
    x, idx, _, up, down, _ = parts
    inner = SimpleNamespace(dim=x.shape[1], hidden_dim=down.shape[2], num_experts=len(up))
    return inner, num_ranks * len(up), idx.shape[1]


def stand_in(way, parts, num_ranks):
    inner, num_experts, top_k = sizes_of(parts, num_ranks)
    dispatcher = SimpleNamespace(
        num_experts=num_experts, top_k=top_k, num_max_tokens_per_rank=16, hidden_dim=inner.dim,
        dtype=parts[0].dtype, alignment=1,
    )  # fmt: skip
    experts = (FusedGroupedExperts if way == "w13" else GroupedExperts)(inner)
    config = SimpleNamespace(inner_experts=experts, token_dispatcher=Dispatcher(dispatcher))
    return (RoutedExperts if way == "dispatcher" else FusedRoutedExperts)(config)


def of_torchtitan(way, parts, num_ranks):
    """Through its own override mechanism."""
    from torchtitan.config import Configurable
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.common.config_utils import make_routed_experts_config

    from moe_engine.integrations import torchtitan_overrides

    inner, num_experts, top_k = sizes_of(parts, num_ranks)
    config = make_routed_experts_config(
        dim=inner.dim, hidden_dim=inner.hidden_dim, num_experts=num_experts, top_k=top_k,
        param_init={}, comm_backend="standard",
    )  # fmt: skip
    config.inner_experts.num_experts = inner.num_experts  # a rank's own, without DTensors
    name = "token_dispatcher" if way == "dispatcher" else "routed_experts"
    more = {"hidden_dim": inner.dim} if way == "dispatcher" else {"w13": way == "w13"}
    more |= {"num_max_tokens_per_rank": 16, "dtype": parts[0].dtype}
    root = SimpleNamespace(experts=config)
    target = f"{torchtitan_overrides.__name__}.{name}"

    def traverse(kind, **_):
        for fqn, found, parent, attribute in config.traverse(kind):
            yield fqn, found, parent or root, attribute or "experts"

    root.traverse = traverse
    assert isinstance(config, Configurable.Config)
    assert len(apply_overrides(OverrideConfig(imports=[(target, more)]), root)) == 1
    return root.experts.build()


def load(experts, up, down):
    """The weights of the oracle."""
    with torch.no_grad():
        for half, name in zip(up.chunk(2, 1), ("w1_EFD", "w3_EFD"), strict=True):
            if hasattr(experts, name):
                getattr(experts, name).copy_(half)
        if hasattr(experts, "w13"):
            experts.w13.copy_(torch.stack(up.chunk(2, 1), 2))
        experts.w2_EDF.copy_(down)


def grads_of(experts):
    if hasattr(experts, "w13"):
        up = torch.cat(experts.w13.grad.unbind(2), 1)
    else:
        up = torch.cat([experts.w1_EFD.grad, experts.w3_EFD.grad], 1)
    return up, experts.w2_EDF.grad


def run_layer(group, source, way, *parts):
    """What the oracle gives; whether checkpoints that save `SAVED_OPS` give the same bits, and how
    often they call the Buffer in the backward of one."""
    x, idx, weights, up, down, dy = parts = on_device(parts)
    make = of_torchtitan if source == "torchtitan" else stand_in
    layer = make(way, parts, group.size()).to(x.device, x.dtype)
    load(layer.inner_experts, up, down)
    layer.token_dispatcher.wire_meshes(
        ep_mesh=DeviceMesh.from_group(group, x.device.type, mesh_dim_names=("ep",))
    )
    buffer = layer.token_dispatcher.buffer
    counts = torch.bincount(idx.flatten(), minlength=group.size() * len(up))

    def saved():
        return create_selective_checkpoint_contexts(list(SAVED_OPS))

    ways = {
        "plain": layer,
        "checkpoint": lambda *a: checkpoint(layer, *a, use_reentrant=False, context_fn=saved),
    }
    found = []
    for call in ways.values():
        layer.zero_grad()
        leaves = [one.clone().requires_grad_() for one in (x, weights)]
        out = call(leaves[0], leaves[1], idx, counts)
        out.backward(dy)
        grads = [one.grad for one in leaves]
        found.append(
            [out.detach(), *grads, *(one.clone() for one in grads_of(layer.inner_experts))]
        )
    same = all(map(torch.equal, *found))
    torchtitan._buffers.clear()
    end(buffer)
    return [one.cpu() for one in found[0]], same


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("way", WAYS)
def test_routed_experts(pool, source, way):
    skip_without(source)
    own_bf16 = source == "torchtitan" and way == "dispatcher"
    parts = make_case(**CASE, dtype="bf16" if own_bf16 else "fp32")
    found = pool.run(run_layer, source, way, *map(PerRank, parts), num_ranks=2)
    check_layer([one for one, _ in found], parts, "bf16" if own_bf16 else "fp32")
    assert all(same for _, same in found)


def test_selective_activation_checkpointing_saves_the_results():
    skip_without("torchtitan")
    from moe_engine.integrations.torchtitan_overrides import SelectiveAC, selective_ac

    assert {*SAVED_OPS} <= selective_ac(SelectiveAC.Config()).build().get_save_ops()


# --- What is refused -----------------------------------------------------------------------------


def test_refused(monkeypatch):
    config = dict(num_experts=4, top_k=2, num_max_tokens_per_rank=None, hidden_dim=16)
    with pytest.raises(ShapeError, match='comm_backend="deepep"'):
        Dispatcher(SimpleNamespace(**config))
    config |= dict(num_max_tokens_per_rank=16, dtype=torch.float32, alignment=1)
    dispatcher = Dispatcher(SimpleNamespace(**config))
    x = torch.zeros(2, 16)
    with pytest.raises(BackendError, match="wire_meshes"):
        dispatcher.dispatch(x, torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.int64), None)
    layer = SimpleNamespace(inner_experts=nn.Linear(1, 1), token_dispatcher=dispatcher)
    with pytest.raises(BackendError, match="Linear has no w13"):
        FusedRoutedExperts(layer)(x, torch.zeros(2, 2), torch.zeros(2, 2), None)
    monkeypatch.setitem(sys.modules, "torchtitan.config", None)
    monkeypatch.delitem(sys.modules, "moe_engine.integrations.torchtitan_overrides", raising=False)
    with pytest.raises(ImportError, match="pip install torchtitan"):
        import moe_engine.integrations.torchtitan_overrides  # noqa: F401
