"""`generate` on ranks that write different numbers of tokens, token for token as unsharded."""

import random
import time
from typing import Any

import cases
import graph_cases
import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

from transformers.generation.streamers import BaseStreamer
from transformers_cases import build

from moe_engine.emulation import RankError, RankPool
from moe_engine.errors import BackendError, OutOfStep
from moe_engine.integrations import forward_passes
from moe_engine.integrations.transformers import (
    fix_max_tokens,
    join,
    shard_experts,
    unshard_experts,
)
from moe_engine.tools.models import Kind

MAX_TOKENS = 24


class Noted(BaseStreamer):
    """A streamer that keeps what it gets."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.tokens.append(-1)


def write(model: Any, seed: int) -> list[Any]:
    """What a rank writes in up to three calls, with lengths, stops and samples of its own."""
    draw, found = random.Random(seed), []
    for _ in range(draw.randint(0, 3)):
        batch, length = draw.randint(1, 3), draw.randint(1, 8)
        ids = torch.randint(200, (batch, length), generator=torch.Generator().manual_seed(seed))
        how: dict[str, Any] = {
            "max_new_tokens": draw.randint(1, 6),
            "do_sample": draw.random() < 0.4,
        }
        if draw.random() < 0.5:
            how["eos_token_id"] = list(range(draw.randint(1, 250)))  # so that some stop early
        if batch == 1:
            how["streamer"] = Noted()
        torch.manual_seed(seed)
        mask = torch.ones_like(ids).to(model.device)
        out = model.generate(ids.to(model.device), attention_mask=mask, pad_token_id=0, **how)
        found.append(out.tolist())
        if batch == 1:
            assert how["streamer"].tokens == [*out[0].tolist(), -1]
    return found


@torch.inference_mode()
def generate_apart(
    group: dist.ProcessGroup, seeds: list[int], cuda_graphs: bool
) -> list[tuple[Any, Any]]:
    """For each seed, what the unsharded and the sharded model write; a rank calls `generate` as
    often as it likes within `join`, and alone once more on all ranks."""
    rank, model = dist.get_rank(group), build(Kind.MIXTRAL)
    mine = [seed * 100 + rank for seed in seeds]
    want = [(write(model, seed), once(model, seed)) for seed in mine]
    got = []
    with graph_cases.graphs():
        buffer = shard_experts(model, group, max_tokens=MAX_TOKENS, cuda_graphs=cuda_graphs)
        for seed in mine:
            with join(model):
                found = write(model, seed)
            got.append((found, once(model, seed)))
    unshard_experts(model)
    buffer.destroy()
    assert "generate" not in vars(model)
    return list(zip(got, want, strict=True))


def once(model: Any, seed: int) -> list[Any]:
    """One `generate`, whose ranks make 1 to 5 steps."""
    ids = torch.full((1, 1 + seed % 7), seed % 200, device=model.device)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1 + seed * 3 % 5)
    return out.tolist()


@pytest.mark.parametrize(
    ("num_ranks", "num_seeds", "cuda_graphs"),
    [
        *cases.slow_unless([(2, 2, False), (2, 2, True)], [1, 2, 4], [2], [False, True]),
        pytest.param(3, 50, False, marks=pytest.mark.soak),
        pytest.param(3, 50, True, marks=pytest.mark.soak),
    ],
)
def test_ranks_stop_when_they_like(
    pool: RankPool, num_ranks: int, num_seeds: int, cuda_graphs: bool
) -> None:
    if num_ranks > pool.num_ranks:
        pytest.skip(f"{num_ranks} ranks, and the pool has {pool.num_ranks}")
    seeds = list(range(num_seeds))
    found = pool.run(generate_apart, seeds, cuda_graphs, num_ranks=num_ranks)
    num_calls = [{len(calls) for (calls, _), _ in ranks} for ranks in zip(*found, strict=True)]
    assert num_ranks == 1 or any(len(numbers) > 1 for numbers in num_calls)
    for rank in found:
        for got, want in rank:
            assert got == want


@torch.inference_mode()
def wrong_joins(group: dist.ProcessGroup) -> list[str]:
    """The errors of fixed passes in a join, and of a join in fixed passes; generate goes there."""
    model = build(Kind.MIXTRAL)
    ids = torch.full((2, 3), 7, device=model.device)
    buffer = shard_experts(model, group, max_tokens=MAX_TOKENS)
    errors = []
    with fix_max_tokens(model, 8):
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2)
        try:
            with join(model):
                raise AssertionError
        except BackendError as error:
            errors.append(str(error))
    with join(model):
        try:
            with fix_max_tokens(model, 8):
                raise AssertionError
        except BackendError as error:
            errors.append(str(error))
    buffer.destroy()
    return errors


def test_joins_and_fixed_passes_exclude_each_other(pool: RankPool) -> None:
    for errors in pool.run(wrong_joins, num_ranks=2):
        assert "within fix_max_tokens" in errors[0]
        assert "enter it before `generate`" in errors[1]


@torch.inference_mode()
def leave_by_an_error(group: dist.ProcessGroup) -> float:
    """Seconds after which a rank learns that another left a join by an error."""
    model = build(Kind.MIXTRAL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward_passes, "timeout_seconds", lambda: 1.0)
        patch.setattr(forward_passes, "COMPILE_S", 0.0)
        shard_experts(model, group, max_tokens=MAX_TOKENS)
    with join(model):
        if group.rank() == 0:
            raise KeyError("of the caller")
        begin = time.monotonic()
    return time.monotonic() - begin


def test_a_rank_that_leaves_by_an_error_is_missed(pool: RankPool) -> None:
    with pytest.raises(RankError) as info:
        pool.run(leave_by_an_error, num_ranks=2)
    text = str(info.value)
    assert "of the caller" in text
    assert OutOfStep.__name__ in text and "join(model)" in text
