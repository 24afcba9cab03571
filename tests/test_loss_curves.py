"""Losses of trainings by AdamW with experts over two ranks, step by step, against the unsharded
model: the same seed, the same text.

In bf16 rounding decides which experts a token takes whose scores are close, so that the losses of
any two implementations part, the more the fewer tokens a batch has. Hence two tests: with equal
choices every step is within the bound; with choices of their own the trainings stay about as close
as two implementations of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from moe_engine.emulation import RankPool
from moe_engine.tools import train as training
from moe_engine.tools.models import Kind, build_model
from moe_engine.tools.train import Job, train

pytest.importorskip("transformers")

MODELS = Kind.QWEN3_MOE, Kind.MIXTRAL
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 5e-3}
"""Of the difference of the losses of a step, relative to them."""


def make_job(pool: RankPool, kind: Kind, dtype: torch.dtype, steps: int, **changes: Any) -> Job:
    """32 tokens of a rank in each step. Collectives are faster than interpreted kernels."""
    job = Job(kind, pool.device, dtype, steps, 32, 1e-3, "collective")
    return replace(job, **changes)


def errors(losses: list[float], plain: list[float]) -> Tensor:
    """The relative difference of each step."""
    one, other = torch.tensor([losses, plain], dtype=torch.float64)
    return ((one - other) / other).abs()


# --- Equal choices -------------------------------------------------------------------------------


@contextmanager
def after_routers(hook: Any) -> Iterator[None]:
    """Call hook(logits, scores, idx) after each router; what it returns takes their place."""

    def after(module: nn.Module, _: Any, out: Any) -> Any:
        return hook(*out) if type(module).__name__.endswith("TopKRouter") else None

    handle = register_module_forward_hook(after)
    try:
        yield
    finally:
        handle.remove()


def with_equal_choices(group: dist.ProcessGroup, job: Job) -> list[list[float]]:
    """The losses of the unsharded model, and of the sharded. The routers of the second take the
    experts that those of the first chose, with scores and gradients of their own."""
    taken: list[Tensor] = []

    def note(_: Tensor, __: Tensor, idx: Tensor) -> None:
        taken.append(idx.clone())

    def take(logits: Tensor, scores: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        idx = taken.pop(0)
        own = logits.float().softmax(-1).gather(-1, idx)
        return logits, (own / own.sum(-1, keepdim=True)).to(scores.dtype), idx

    with after_routers(note):
        plain = train(group, job, False)
    with after_routers(take):
        sharded = train(group, job, True)
    assert not taken
    return [plain.loss, sharded.loss]


def check(pool: RankPool, job: Job) -> None:
    plain, sharded = pool.run(with_equal_choices, job, num_ranks=2)[0]
    assert job.steps < 8 or plain[-1] < 0.9 * plain[0]  # it learns
    assert errors(sharded, plain).max() <= BOUNDS[job.dtype]


@pytest.mark.parametrize("kind", MODELS)
def test_losses_of_each_step_in_bf16(pool: RankPool, kind: Kind) -> None:
    check(pool, make_job(pool, kind, torch.bfloat16, 8))


def test_the_same_by_the_kernels(pool: RankPool) -> None:
    check(pool, make_job(pool, Kind.MIXTRAL, torch.bfloat16, 3, length=6, backend="auto"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_200_steps_in_bf16(pool: RankPool, kind: Kind) -> None:
    check(pool, make_job(pool, kind, torch.bfloat16, 200))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", MODELS)
def test_200_steps_in_bf16_by_the_kernels(kind: Kind) -> None:
    with RankPool(2, "cpu", timeout_s=1800) as two_ranks:
        job = make_job(two_ranks, kind, torch.bfloat16, 200, length=16, backend="auto")
        check(two_ranks, job)


# --- Choices of their own ------------------------------------------------------------------------


def with_own_choices(group: dist.ProcessGroup, job: Job) -> list[list[float]]:
    """The losses of the unsharded model, of the sharded, and of the unsharded one by another
    implementation of transformers."""

    def by_loops(*how: Any) -> Any:
        model = build_model(*how)
        model.set_experts_implementation("eager")
        return model

    runs = [train(group, job, is_sharded) for is_sharded in (False, True)]
    with patch.object(training, "build_model", by_loops):
        runs.append(train(group, job, False))
    return [run.loss for run in runs]


def check_own_choices(pool: RankPool, job: Job) -> None:
    plain, sharded, by_loops = pool.run(with_own_choices, job, num_ranks=2)[0]
    assert job.steps < 8 or plain[-1] < 0.9 * plain[0]
    error, of_torch = errors(sharded, plain), errors(by_loops, plain)
    if job.dtype == torch.float32:
        assert error.max() <= BOUNDS[job.dtype]
    else:
        assert error.mean() <= max(3 * of_torch.mean(), 1e-3) and error.mean() <= 5e-3


@pytest.mark.parametrize("kind", MODELS)
def test_losses_of_each_step_in_fp32(pool: RankPool, kind: Kind) -> None:
    check_own_choices(pool, make_job(pool, kind, torch.float32, 8))


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_50_steps_in_fp32(pool: RankPool, kind: Kind) -> None:
    check_own_choices(pool, make_job(pool, kind, torch.float32, 50))


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_200_steps_in_bf16_with_own_choices(pool: RankPool, kind: Kind) -> None:
    check_own_choices(pool, make_job(pool, kind, torch.bfloat16, 200))
