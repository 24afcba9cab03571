"""FSDP2's prefetches around sharded experts, with micro-batches and mixed precision: whatever is
gathered early, losses, gradients and weights have the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from data_parallel_cases import (
    LR,
    all_weights,
    batches,
    end,
    loss_of,
    meshes,
    sharded_model,
    take_weights,
    whole_model,
)
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from moe_engine.emulation import RankPool
from moe_engine.integrations.data_parallel import fully_shard_experts
from moe_engine.sharded_weights import local

NUM_EXPERTS, NUM_LAYERS, STEPS, MICRO_BATCHES = 4, 3, 2, 2
FP32 = MixedPrecisionPolicy()
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

# --- What is gathered early ----------------------------------------------------------------------

FORWARD = [f"{i}{part}" for i in range(NUM_LAYERS) for part in ("", ".router", ".experts")]
BACKWARD = [f"{i}{part}" for i in (2, 1, 0) for part in ("", ".experts", ".router")]
"""The modules of FSDP2 in the order in which they need their weights."""


def nothing(model: nn.Sequential) -> None:
    """A module gathers itself alone, where FSDP2 would gather the next one in a backward."""
    for name in FORWARD:
        module = model.get_submodule(name)
        module.set_modules_to_backward_prefetch([module])


def by_default(model: nn.Sequential) -> None:
    """Implicit prefetches."""


def one_module(model: nn.Sequential) -> None:
    """The next one of each."""
    for one, following in pairwise(map(model.get_submodule, FORWARD)):
        one.set_modules_to_forward_prefetch([following])
    for one, following in pairwise(map(model.get_submodule, BACKWARD)):
        one.set_modules_to_backward_prefetch([following])


def one_layer(model: nn.Sequential) -> None:
    """All of the next layer where one begins, and in a layer what the default does."""
    for one, following in pairwise(model):
        parts = [following, following.router, following.experts]
        one.set_modules_to_forward_prefetch(parts)
    for following, one in pairwise(model):
        one.set_modules_to_backward_prefetch([following, following.experts, following.router])


EARLY = {
    nothing: ([], []),
    by_default: ([], BACKWARD[1:]),
    one_module: (FORWARD[1:], BACKWARD[1:]),
    one_layer: (FORWARD[3:], [*BACKWARD[3:6], BACKWARD[2], *BACKWARD[6:]]),
}
"""What is gathered before its own turn, in forwards and in backwards."""


@contextmanager
def gathered_early() -> Iterator[list[str]]:
    """Collect "forward_prefetch for NAME" where FSDP2 sends for that, and so for backwards."""
    open_ones, found = [""], []

    @contextmanager
    def note(name: str) -> Iterator[None]:
        if name.startswith("FSDP::all_gather ") and "_prefetch for " in open_ones[-1]:
            found.append(open_ones[-1].removeprefix("FSDP::"))
        open_ones.append(name)
        yield
        open_ones.pop()

    with patch.object(_fsdp_param_group, "record_function", note):
        yield found


# --- Training ------------------------------------------------------------------------------------


def train(
    group: dist.ProcessGroup, prefetch: Any, policy: MixedPrecisionPolicy, keep: bool, backend: str
) -> tuple[list[float], list[Tensor], dict[str, Tensor]]:
    """The losses and the last gradients of a rank, the weights of all. With `keep`, weights stay
    whole between the micro-batches of a step."""
    both, world = meshes(2)
    dtype = policy.param_dtype or torch.float32
    model, buffer = sharded_model(NUM_EXPERTS, both["ep"], dtype, backend, NUM_LAYERS)
    take_weights(model, whole_model(NUM_EXPERTS, num_layers=NUM_LAYERS))
    fully_shard_experts(model, both["efsdp"], mp_policy=policy)
    for layer in model:
        fully_shard(layer.router, mesh=world)  # in fp32
        fully_shard(layer, mesh=world, mp_policy=policy)
    root = fully_shard(model, mesh=world, mp_policy=policy)
    prefetch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, foreach=True)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(MICRO_BATCHES):
            is_last = part == MICRO_BATCHES - 1
            root.set_requires_gradient_sync(is_last)
            root.set_reshard_after_backward(is_last or not keep)
            batch = batches(group.size(), step + 100 * part)[group.rank()]
            with gathered_early() as early:
                loss = loss_of(model, *batch) / MICRO_BATCHES
                loss.backward()
            if not keep:
                for kind, names in zip(("forward", "backward"), EARLY[prefetch], strict=True):
                    found = [one for one in early if one.startswith(kind)]
                    assert found == [f"{kind}_prefetch for {name}" for name in names]
            losses.append(float(loss.detach()))
        optimizer.step()
    grads = [local(one.grad).cpu() for one in model.parameters()]
    end(buffer)
    return losses, grads, {name: one.cpu() for name, one in all_weights(model).items()}


def run(group: dist.ProcessGroup, policy: MixedPrecisionPolicy, backend: str) -> Any:
    """Losses and weights, which each kind of prefetch gives."""
    losses, grads, weights = train(group, nothing, policy, False, backend)
    for prefetch, keep in (
        (by_default, False),
        (one_module, False),
        (one_layer, False),
        (one_layer, True),
    ):
        have_losses, have_grads, have = train(group, prefetch, policy, keep, backend)
        assert have_losses == losses
        assert all(map(torch.equal, have_grads, grads))
        assert all(torch.equal(have[name], weights[name]) for name in weights)
    assert {one.dtype for one in grads} == {torch.float32}
    return losses, weights


def train_whole() -> tuple[list[float], dict[str, Tensor]]:
    """One process in fp32, with the batches of 4 ranks as one."""
    model = whole_model(NUM_EXPERTS, num_layers=NUM_LAYERS).cpu()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(MICRO_BATCHES):
            each = batches(4, step + 100 * part)
            x, target = (torch.cat(some).cpu() for some in zip(*each, strict=True))
            loss = loss_of(model, x, target) / MICRO_BATCHES
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
    return losses, model.state_dict()


@pytest.mark.parametrize(
    ("policy", "backend", "tolerance"),
    [
        pytest.param(FP32, "collective", 1e-5, id="fp32"),
        pytest.param(BF16, "collective", 1e-2, id="bf16"),
        pytest.param(BF16, "auto", 1e-2, id="kernels", marks=pytest.mark.slow),
    ],
)
def test_prefetches_change_nothing(
    pool: RankPool, policy: MixedPrecisionPolicy, backend: str, tolerance: float
) -> None:
    losses, weights = train_whole()
    found = pool.run(run, policy, backend, num_ranks=4)
    means = torch.tensor([one for one, _ in found]).mean(0)
    torch.testing.assert_close(means, torch.tensor(losses), rtol=tolerance, atol=0.0)
    for _, have in found:
        for name, want in weights.items():
            assert (have[name] - want).abs().max() <= tolerance * want.abs().max()
