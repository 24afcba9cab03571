"""MoE layers of Megatron-Core over this engine: results and gradients against the oracle.

"stand-ins" make the calls of `MoELayer`, `MoEFlexTokenDispatcher`, `ScheduleNode` and the hooks of
`DistributedDataParallel`, of the source of 22 August 2026 (d98e8a6), in their order and with their
arguments. "Megatron-Core" are its own `MoELayer` and `MoEFlexTokenDispatcher`, where it is
installed; its schedules, router and DistributedDataParallel need GPUs, and are stand-ins there too.
"""

from __future__ import annotations

import builtins
from types import SimpleNamespace

import pytest
import torch
from megatron_cases import (
    SOURCES,
    MicroBatch,
    make_config,
    make_layer,
    one_f_one_b,
    skip_without,
)
from ops_cases import buffer_for, check_layer
from torch import nn
from training_cases import end, make_case, new_buffer, on_device

from moe_engine import reference
from moe_engine.emulation import PerRank
from moe_engine.errors import BackendError, ShapeError
from moe_engine.integrations import megatron
from moe_engine.integrations.megatron_experts import Experts

CASE = dict(num_ranks=2, num_tokens=[6, 4], num_local=2, num_topk=2, intermediate=16, kind="holes")


def cases_of_ranks():
    parts = make_case(**CASE)
    return parts, [PerRank(part) for part in parts]


def halves(parts):
    """Micro-batches (x, topk_idx, topk_weights, dy) whose x and topk_weights are leaves."""
    x, idx, weights, _, _, dy = parts
    found = []
    for batch in zip(*(one.tensor_split(2) for one in (x, idx, weights, dy)), strict=True):
        batch = [one.clone() for one in batch]
        found.append((batch[0].requires_grad_(), batch[1], batch[2].requires_grad_(), batch[3]))
    return found


def taken(outs, batches, up, down):
    """In the order of the oracle: results, gradients of x and topk_weights, of the weights."""
    dx, dw = ([batch[at].grad for batch in batches] for at in (0, 2))
    return [*map(torch.cat, (outs, dx, dw)), up, down]


def grads_of(layer):
    weights = layer.experts.gate_up_proj, layer.experts.down_proj
    found = [one.grad.clone() for one in weights]
    layer.zero_grad()
    return found


def run_layer(group, source, fused, delayed, *parts):
    """By `MoELayer.forward`, and by the 1F1B schedule: what the oracle gives."""
    parts = on_device(parts)
    buffer = buffer_for(group, parts)
    layer = make_layer(group, source, parts, buffer, fused)
    outs, batches = [], halves(parts)
    for x, idx, weights, dy in batches:
        layer.router.routing = idx, weights
        y, bias = layer(x[:, None])  # [sequence, batch, hidden]
        y.backward(dy[:, None])
        outs.append(y.detach()[:, 0])
        assert bias is None
    found = [taken(outs, batches, *grads_of(layer))]
    if delayed:
        layer = make_layer(group, source, parts, buffer, fused, delay_wgrad_compute=True)
    batches = halves(parts)
    nodes = [MicroBatch(layer, *batch) for batch in batches]
    one_f_one_b(*nodes)
    found.append(taken([one.out for one in nodes], batches, *grads_of(layer)))
    if fused and source == "Megatron-Core":
        check_checkpoint(layer.experts, group)
    end(buffer)
    return [[one.cpu() for one in each] for each in found]


def check_checkpoint(experts, group):
    """This rank's experts are its part of all, in the third of four layers that lie together."""
    saved = experts.sharded_state_dict("layers.", ((0, 2, 4),))
    assert list(saved) == ["layers.gate_up_proj", "layers.down_proj"]
    for part, mine in zip(saved.values(), experts.parameters(), strict=True):
        assert part.data is mine
        assert part.global_shape == (4, group.size() * len(mine), *mine.shape[1:])
        assert part.global_offset == (2, group.rank() * len(mine), 0, 0)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    "fused, delayed", [(False, False), (True, True)], ids=["Megatron's experts", "one fused layer"]
)
def test_layers_and_the_1f1b_schedule(pool, source, fused, delayed):
    skip_without(source)
    parts, ranks = cases_of_ranks()
    found = pool.run(run_layer, source, fused, delayed, *ranks, num_ranks=2)
    for way in zip(*found, strict=True):
        check_layer(way, parts)


def run_tensor_parallel(group, *parts):
    """Experts of which each rank has half of the columns, over the ranks of `tp_ep`."""
    x, idx, weights, up, down, dy = on_device(parts)
    halves_of = [one.chunk(2, 1)[group.rank()] for one in (*up.chunk(2, 1), down.transpose(1, 2))]
    mine = torch.cat(halves_of[:2], 1), halves_of[2].transpose(1, 2)
    buffer = new_buffer(group, x, 2 * len(up), 2 * idx.shape[1], 16)
    layer = make_layer(group, "stand-ins", (x, idx, weights, *mine, dy), buffer, False, True)
    x, weights = x.requires_grad_(), weights.requires_grad_()
    layer.router.routing = idx, weights
    y, _ = layer(x)
    y.backward(dy)
    found = [y.detach(), x.grad, weights.grad, *grads_of(layer)]
    end(buffer)
    return [one.cpu() for one in found]


def test_tensor_parallel_experts(pool):
    parts, _ = cases_of_ranks()
    whole = [torch.cat(one) for one in parts[3:5]]
    ranks = [PerRank(one) for one in (*parts[:3], *([one, one] for one in whole), parts[5])]
    found = pool.run(run_tensor_parallel, *ranks, num_ranks=2)
    ups, downs = zip(*(one[3:] for one in found), strict=True)
    gates, values = zip(*(one.chunk(2, 1) for one in ups), strict=True)
    grads = torch.cat([*gates, *values], 1), torch.cat(downs, 2)
    of_experts = zip(*(one.chunk(2) for one in grads), strict=True)
    check_layer([[*have[:3], *of] for have, of in zip(found, of_experts, strict=True)], parts)


# --- Gradients in main_grad ----------------------------------------------------------------------


def make_hook(param, overlaps):
    """That of `DistributedDataParallel._make_backward_post_hook`."""

    def hook(*_):
        assert param.grad is not None or not overlaps
        added = param.grad_added_to_main_grad and not getattr(param, "zero_out_wgrad", False)
        if param.grad is not None and not added:
            param.main_grad.add_(param.grad.data)
        param.grad = None
        param.num_ready = getattr(param, "num_ready", 0) + 1

    return hook


def register(layer, way):
    """Where `DistributedDataParallel` registers its hooks, and where Megatron-FSDP does for the
    dispatch's backward (`setup_delayed_wgrad_acc_hook`); what must not be forgotten meanwhile."""
    kept = []
    for param in layer.experts.parameters():
        assert not param.allreduce
        param.main_grad = torch.zeros_like(param, dtype=torch.float32)
        param.grad_added_to_main_grad = False
        assert param.skip_backward_post_hook == (way != "plain")
        if way == "dispatch backward":
            param.post_wgrad_grad_acc_hook = make_hook(param, True)
        elif way == "schedule":
            layer.experts.register_wgrad_accumulation_and_reduce_hooks(make_hook(param, True))
        else:
            kept.append(param.expand_as(param).grad_fn.next_functions[0][0])
            kept[-1].register_hook(make_hook(param, True))
    return kept


def run_main_grad(group, source, *parts):
    """Two micro-batches into main_grad: added up, by the 1F1B schedule with gradients delayed, and
    by the dispatch's backward; and the second alone, written over NaN."""
    parts = on_device(parts)
    buffer, found = buffer_for(group, parts), []
    ways = {
        "plain": {},
        "schedule": {"delay_wgrad_compute": True},
        "dispatch backward": {"overlap_dispatch_backward_with_experts_wgrad": True},
    }
    for way, config in ways.items():
        if source == "Megatron-Core" and way == "dispatch backward":
            continue  # its streams need a GPU
        how = config | {"gradient_accumulation_fusion": True}
        layer = make_layer(group, source, parts, buffer, True, **how)
        kept = register(layer, way)
        params = list(layer.experts.parameters())
        params[0].zero_out_wgrad = True
        batches = halves(parts)
        nodes = [MicroBatch(layer, *batch) for batch in batches]
        one_f_one_b(*nodes)
        grads = [one.main_grad.clone() for one in params]
        found.append(taken([one.out for one in nodes], batches, *grads))
        assert [one.num_ready for one in params] == [2, 2]
        assert all(one.grad is None and one.grad_added_to_main_grad for one in params)
        if way == "plain":
            for one in params:
                one.overwrite_main_grad = True
                one.get_main_grad = lambda like=one: torch.full_like(like, float("nan"))
            one_f_one_b(*(MicroBatch(layer, *batch) for batch in halves(parts)))
            alone = [one.main_grad.clone() for one in params]
        del kept
    end(buffer)
    return [[one.cpu() for one in each] for each in found], [one.cpu() for one in alone]


@pytest.mark.parametrize("source", SOURCES)
def test_main_grad(pool, source):
    skip_without(source)
    parts, ranks = cases_of_ranks()
    found = pool.run(run_main_grad, source, *ranks, num_ranks=2)
    for way in zip(*(ways for ways, _ in found), strict=True):
        check_layer(way, parts)
    second = [[one.tensor_split(2)[1] for one in part] for part in (*parts[:3], parts[5])]
    wanted = reference.moe_ffn_gradients(*second[:3], *parts[3:5], second[3])
    for (_, alone), want in zip(found, wanted, strict=True):
        for one, other in zip(alone, want[2:], strict=True):
            torch.testing.assert_close(one, other.float(), rtol=1e-5, atol=1e-5)


# --- What is refused -----------------------------------------------------------------------------


def run_refused(group, *parts):
    parts = on_device(parts)
    buffer, found = buffer_for(group, parts), []

    def refused(kind, call):
        with pytest.raises(kind) as error:
            call()
        found.append(str(error.value))

    layer = make_layer(group, "stand-ins", parts, buffer, True, gradient_accumulation_fusion=True)
    refused(BackendError, lambda: megatron.use_moe_engine(nn.Linear(1, 1), buffer))
    refused(BackendError, lambda: megatron.use_moe_engine(layer, buffer, max_rows=64))
    layer.token_dispatcher.ep_size = 4
    refused(ShapeError, lambda: megatron.use_moe_engine(layer, buffer))
    layer.token_dispatcher.ep_size = 2
    layer.config.moe_pad_expert_input_to_capacity = True
    refused(BackendError, lambda: megatron.use_moe_engine(layer, buffer))
    x, idx, weights, dy = halves(parts)[0]
    refused(BackendError, lambda: layer.experts(x, idx, weights)[0].backward(dy))
    config = make_config("stand-ins", parts, 4, add_bias_linear=True)
    refused(BackendError, lambda: Experts(2, config, buffer=buffer))
    groups = SimpleNamespace(expt_tp=group)
    config.add_bias_linear = False
    refused(BackendError, lambda: Experts(2, config, groups, buffer=buffer))
    manager = megatron.DispatchManager(buffer, 4, 2, max_rows=4)
    probs = x.detach().new_ones(4, 4)
    manager.setup_metadata(probs.bool().triu(2), probs)  # 3 rows for rank 1, of each rank
    manager.dispatch(x.detach().new_ones(4, 32))
    assert manager.over_budget.tolist() == [group.rank() == 1]
    random = Experts(2, config, buffer=buffer).gate_up_proj.flatten()[:4].tolist()
    torch.distributed.barrier(group)
    buffer.destroy()
    return found, random


def test_refused_and_first_weights(pool):
    _, ranks = cases_of_ranks()
    (texts, one), (_, other) = pool.run(run_refused, *ranks, num_ranks=2)
    says = (
        "token_dispatcher",
        "max_rows",
        "tp_ep",
        "capacity",
        "main_grad",
        "add_bias_linear",
        "tensor-parallel",
    )
    assert [word in text for word, text in zip(says, texts, strict=True)] == [True] * 7
    assert one != other  # experts of other ranks are others


def test_what_to_install(monkeypatch):
    imported = builtins.__import__

    def without(name, *args, **more):
        if name.startswith("megatron"):
            raise ImportError(name)
        return imported(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="pip install megatron-core"):
        megatron._flex_dispatcher(SimpleNamespace())
