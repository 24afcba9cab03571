"""Gradients of a sharded transformers model with gradient checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

from transformers_cases import build

from moe_engine.checkpointing import save_routing_policy
from moe_engine.emulation import RankPool
from moe_engine.integrations.forward_passes import ForwardPasses
from moe_engine.integrations.transformers import shard_experts
from moe_engine.tools.models import Kind


def train(group: dist.ProcessGroup) -> tuple[bool, list[int]]:
    """Whether two micro-batches, both forward before the first backward, have the gradients of a
    model without checkpoints; and how often it asked the other hosts without them, and with."""
    model = build(Kind.QWEN3_MOE).train()
    buffer = shard_experts(model, group, max_tokens=16)
    lengths = (3, 7) if group.rank() == 0 else (6, 2)
    batches = [torch.full((1, length), 40 + length, device=model.device) for length in lengths]
    asked: list[int] = []
    ask = ForwardPasses._ask

    def note(passes: Any, num_tokens: int) -> None:
        asked.append(num_tokens)
        ask(passes, num_tokens)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        losses = [model(batch).logits.float().square().mean() for batch in batches]
        for loss in losses:
            loss.backward()
        return [one.grad for one in model.parameters() if one.grad is not None]

    found, counts = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ForwardPasses, "_ask", note)
        for contexts in (None, save_routing_policy):
            if contexts is not None:
                how = {"use_reentrant": False, "context_fn": contexts}
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
            asked.clear()
            found.append(gradients())
            counts.append(len(asked))
    buffer.check()
    buffer.destroy()
    return all(map(torch.equal, *found)), counts


@pytest.mark.slow
def test_checkpoints_ask_nobody_again(pool: RankPool) -> None:
    for same, counts in pool.run(train, num_ranks=2):
        assert same
        assert counts == [2, 2]
