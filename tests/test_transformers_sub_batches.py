"""Models of transformers that read more tokens than one call takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("transformers")

from test_sub_batches import SmallCalls, counted
from transformers_cases import build, difference

from moe_engine.emulation import RankPool
from moe_engine.integrations.transformers import join_empty, shard_experts
from moe_engine.tools.models import Kind

MAX_TOKENS = 20


def ids_of(length: int, device: torch.device) -> Tensor:
    return torch.arange(3, 3 + length, device=device)[None]


@torch.no_grad()
def read(group: dist.ProcessGroup, lengths: list[int]) -> tuple[list[float], list[int], bool]:
    """For each pass how far the logits of a prompt are from the unsharded model's, and how many
    calls all layers take that take several; whether `generate` gives the same tokens."""
    model = build(Kind.MIXTRAL, num_hidden_layers=1)
    prompts = [ids_of(length, model.device) for length in lengths if length]
    want = iter([model(ids).logits for ids in prompts])
    tokens = model.generate(prompts[0], max_new_tokens=3, do_sample=False)
    buffer = shard_experts(model, group, max_tokens=MAX_TOKENS)
    errors, numbers = [], []
    for length in lengths:
        with counted() as calls:
            if length:
                errors.append(difference(model(ids_of(length, model.device)).logits, next(want)))
            else:
                join_empty(model)
        numbers.append(calls.call_count)
    again = model.generate(prompts[0], max_new_tokens=3, do_sample=False)
    buffer.check()
    dist.barrier(group)
    buffer.destroy()
    return errors, numbers, torch.equal(tokens, again)


def test_prompts(pool: RankPool) -> None:
    """Of 20 and 5 tokens, of 9 and none, and of 3 and 8, which one call takes."""
    args = [20, 9, 3], [5, 0, 8]
    found = SmallCalls(pool).run(read_as, *args, num_ranks=2)
    for errors, numbers, same in found:
        num_layers = numbers[1] // 2
        assert num_layers
        assert numbers == [3 * num_layers, 2 * num_layers, 0]
        assert max(errors) <= 1e-5
        assert same


def read_as(group: dist.ProcessGroup, *lengths: list[int]) -> Any:
    return read(group, lengths[group.rank()])


def train(group: dist.ProcessGroup, is_reentrant: bool) -> list[Tensor]:
    """Gradients of two passes, of 4 and of up to 20 tokens, whose layers a checkpoint computes
    again once both have been made: first those of the larger one."""
    model = build(Kind.MIXTRAL, num_hidden_layers=1)
    model.train()
    how = {"use_reentrant": is_reentrant}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
    buffer = shard_experts(model, group, max_tokens=MAX_TOKENS)
    lengths = (4, 20) if group.rank() == 0 else (3, 6)
    batches = [ids_of(length, model.device) for length in lengths]
    losses = [model(ids, labels=ids, use_cache=False).loss for ids in batches]
    for loss in reversed(losses):
        loss.backward()
    buffer.check()
    dist.barrier(group)
    buffer.destroy()
    return [one.grad.cpu() for one in model.parameters()]


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_gradients_of_checkpointed_layers(pool: RankPool, is_reentrant: bool) -> None:
    args = train, is_reentrant
    wanted = pool.run(*args, num_ranks=2)
    for have, want in zip(SmallCalls(pool).run(*args, num_ranks=2), wanted, strict=True):
        for one, other in zip(have, want, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
