"""Routed experts of torchtitan over this engine: results and gradients against the oracle.

"stand-ins" are those of `torchtitan_cases.py`. "torchtitan" are its own classes through its own
overrides, where it is installed; its `GroupedExperts` compute in bf16.
"""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from ops_cases import check_layer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torchtitan_cases import (
    WAYS,
    Dispatcher,
    FusedRoutedExperts,
    grads_of,
    load,
    sizes_of,
    stand_in,
)
from training_cases import end, make_case, on_device

from moe_engine.checkpointing import SAVED_OPS
from moe_engine.emulation import PerRank
from moe_engine.errors import BackendError, ShapeError
from moe_engine.integrations import torchtitan

SOURCES = "stand-ins", "torchtitan"
CASE = dict(num_ranks=2, num_tokens=[6, 6], num_local=2, num_topk=2, intermediate=16)


def skip_without(source):
    if source == "torchtitan":
        moe = pytest.importorskip("torchtitan.models.common.moe", reason="pip install torchtitan")
        if "x_TD" not in inspect.signature(moe.RoutedExperts.forward).parameters:
            pytest.skip("calls of torchtitan up to 0.3.0 differ")


# --- Layers --------------------------------------------------------------------------------------


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


def test_layers_share_a_buffer_of_their_group(monkeypatch):
    """Not one of an earlier group with the same name, nor one that was destroyed."""

    def new_buffer(group, *sizes):
        return SimpleNamespace(group=group, is_destroyed=False)

    monkeypatch.setattr(torchtitan, "_buffers", {})
    monkeypatch.setattr(torchtitan.Buffer, "for_tokens", new_buffer)
    groups = [mock.Mock(group_name="0") for _ in range(2)]
    first, again, other = (torchtitan._shared_buffer(groups[i], 8, 16) for i in (0, 0, 1))
    assert first is again and first.group is groups[0] and other.group is groups[1]
    first.is_destroyed = True
    new = torchtitan._shared_buffer(groups[0], 8, 16)
    assert new is not first and new is torchtitan._shared_buffer(groups[0], 8, 16)


# --- What is refused -----------------------------------------------------------------------------


def test_tokens_of_three_dimensions_are_refused(monkeypatch):
    """As torchtitan 0.3.0 has them."""
    pytest.importorskip("torchtitan.models.common.moe", reason="pip install torchtitan")
    from moe_engine.integrations import torchtitan_overrides

    monkeypatch.setattr(torchtitan_overrides.RoutedExperts, "forward", lambda self, x_BLD: x_BLD)
    with pytest.raises(BackendError, match="tokens of three dimensions"):
        torchtitan_overrides.routed_experts(SimpleNamespace())


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
