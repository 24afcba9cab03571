"""Sharded models of transformers whose layers the ranks call in different orders."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

from transformers_cases import build

from moe_engine import MoeEngineError
from moe_engine.emulation import RankPool
from moe_engine.integrations.transformers import fix_max_tokens, shard_experts
from moe_engine.tools.models import Kind


def layers_of(group: dist.ProcessGroup) -> tuple[Any, Any, list[Any]]:
    """(the model, its Buffer, a call of each layer's experts)."""
    model = build(Kind.MIXTRAL, num_hidden_layers=2)
    buffer = shard_experts(model, group, max_tokens=8)
    x = torch.randn(3, model.config.hidden_size, device=model.device)
    idx = torch.tensor([[0, 1], [2, 3], [1, 2]], device=model.device)
    weights = torch.rand(idx.shape, device=model.device)
    calls = [lambda at=at: at.mlp.experts(x, idx, weights) for at in model.model.layers]
    return model, buffer, calls


@torch.no_grad()
def call_in_turns(group: dist.ProcessGroup, by_threads: bool) -> str:
    """The error of two layers that are called in another order on each rank: by a thread, or each
    by a thread of its own, as two requests of a server may interleave."""
    model, buffer, calls = layers_of(group)
    error = ""

    def call(one: Any) -> None:
        nonlocal error
        try:
            with torch.no_grad():
                one()
        except MoeEngineError as raised:
            error = error or f"{type(raised).__name__}: {raised}"

    with fix_max_tokens(model, 8):
        for one in calls[::-1] if group.rank() else calls:
            if by_threads:
                thread = threading.Thread(target=call, args=[one])
                thread.start()
                thread.join()
            else:
                call(one)
    try:
        buffer.check()
    except MoeEngineError as raised:
        error = error or f"{type(raised).__name__}: {raised}"
    dist.barrier(group)
    buffer.destroy()
    return error


@pytest.mark.parametrize("by_threads", [False, True])
def test_layers_in_another_order_are_named(pool: RankPool, by_threads: bool) -> None:
    for error in pool.run(call_in_turns, by_threads, num_ranks=2):
        assert error.startswith("OutOfStep: ranks ")
        assert "layer 'model.layers.0.mlp.experts'" in error
        assert "layer 'model.layers.1.mlp.experts'" in error
