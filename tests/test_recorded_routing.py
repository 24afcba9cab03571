"""The choices of routers, recorded in one pass and replayed in others."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("transformers")

from test_transformers import read
from transformers_cases import build, difference

from moe_engine.emulation import RankPool
from moe_engine.integrations.recorded_routing import record_routing, replay_routing
from moe_engine.integrations.transformers import experts_layers, shard_experts
from moe_engine.tools.models import Kind


@torch.inference_mode()
def replay_bf16(group: dist.ProcessGroup) -> tuple[float, bool]:
    rank = dist.get_rank(group)
    model = build(Kind.QWEN3_MOE, torch.bfloat16)
    with record_routing(model) as routing:
        want = read(model, rank)
    buffer = shard_experts(model, group, max_tokens=12)
    with replay_routing(model, routing), record_routing(model) as replayed:
        got = read(model, rank)
    buffer.destroy()
    same = [
        torch.equal(idx, idx_again) and torch.equal(weights, weights_again)
        for (idx, weights), (idx_again, weights_again) in zip(routing, replayed, strict=True)
    ]
    return difference(got, want), all(same)


def test_bf16_logits_with_the_routing_replayed(pool: RankPool) -> None:
    for error, same in pool.run(replay_bf16, num_ranks=2):
        assert error <= 2e-2
        assert same


def replay_checkpointed(group: dist.ProcessGroup, reentrant: bool) -> tuple[int, list[Tensor]]:
    """By how much more often routers chose in a step with checkpoints than there are layers, and
    the differences of its gradients to those of a step without. Both have the choices for another
    text."""
    rank, grads = dist.get_rank(group), []
    for is_checkpointed in (False, True):
        model = build(Kind.QWEN3_MOE).train()
        ids, other = (torch.tensor([[rank + n * k for k in range(6)]]) for n in (3, 7))
        ids, other = ids.to(model.device), other.to(model.device)
        if is_checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        buffer = shard_experts(model, group, max_tokens=12, backend="collective")
        with torch.no_grad(), record_routing(model) as routing:
            model(other)
        with replay_routing(model, routing), record_routing(model) as chosen:
            model(ids, labels=ids, use_cache=False).loss.backward()
        grads.append([one.grad.cpu() for one in model.parameters() if one.grad is not None])
        assert len(routing) == len(experts_layers(model))
        dist.barrier(group)
        buffer.destroy()
    return len(chosen) - len(routing), [one - other for one, other in zip(*grads, strict=True)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_compute_layers_again_with_the_same_choices(
    pool: RankPool, reentrant: bool
) -> None:
    for more, differences in pool.run(replay_checkpointed, reentrant, num_ranks=2):
        assert more == 0
        assert max(float(one.abs().max()) for one in differences) < 1e-6
