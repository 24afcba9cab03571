"""Experts under FSDP2 and DistributedDataParallel, against one process with the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext

import cases
import pytest
import torch
import torch.distributed as dist
from data_parallel_cases import (
    HIDDEN,
    LR,
    Layer,
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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from moe_engine import MoEFeedForward, WgradSink
from moe_engine.emulation import RankPool
from moe_engine.errors import BackendError, DtypeError, ShapeError
from moe_engine.integrations.data_parallel import (
    average_expert_gradients,
    clip_grad_norm_,
    fully_shard_experts,
    param_groups,
)

MAX_NORM = 0.05
Found = tuple[dict[str, Tensor], list[float], list[float]]
"""The weights, and the loss and the norm of the gradients of each step."""


def with_fsdp(model: nn.Sequential, ep: int) -> nn.Module:
    both, world = meshes(ep)
    fully_shard_experts(model, both["efsdp"])
    for layer in model:
        fully_shard(layer, mesh=world)
    return fully_shard(model, mesh=world)


def with_torch_alone(model: nn.Sequential, ep: int) -> nn.Module:
    """FSDP2 of the experts without what the helper sets."""
    both, world = meshes(ep)
    for layer in model:
        fully_shard(layer.experts, mesh=both["efsdp"])
    return fully_shard(model, mesh=world)


def with_ddp(model: nn.Sequential, ep: int) -> nn.Module:
    both, world = meshes(ep)
    for _ in range(2):  # the second call takes the place of the first
        average_expert_gradients(model, both["efsdp"] if both["efsdp"].size() > 1 else None)
    return DistributedDataParallel(model, process_group=world.get_group())


def without_sync(model: nn.Module, is_last: bool) -> object:
    """All but the last micro-batch of a step."""
    if isinstance(model, DistributedDataParallel):
        return nullcontext() if is_last else model.no_sync()
    model.set_requires_gradient_sync(is_last)
    return nullcontext()


def train(
    group: dist.ProcessGroup,
    wrap: Callable[[nn.Sequential, int], nn.Module],
    ep: int,
    num_experts: int,
    num_steps: int,
    num_micro_batches: int,
    backend: str = "collective",
) -> Found:
    plain, buffer = sharded_model(num_experts, meshes(ep)[0]["ep"], backend=backend)
    take_weights(plain, whole_model(num_experts))
    model = wrap(plain, ep)
    # foreach is the default on GPUs alone.
    optimizer = torch.optim.SGD(param_groups(model.parameters()), lr=LR, foreach=True)
    losses, norms = [], []
    for step in range(num_steps):
        for part in range(num_micro_batches):
            batch = batches(group.size(), step + 100 * part)[group.rank()]
            with without_sync(model, part == num_micro_batches - 1):
                loss = loss_of(model, *batch) / num_micro_batches
                loss.backward()
        dist.all_reduce(mean := loss.detach() / group.size())
        losses.append(float(mean))
        norms.append(float(clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    end(buffer)
    return {name: one.cpu() for name, one in all_weights(plain).items()}, losses, norms


def train_whole(num_ranks: int, num_experts: int, num_steps: int, num_micro_batches: int) -> Found:
    """The same steps in one process, with the batches of all ranks as one."""
    model = whole_model(num_experts).cpu()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses, norms = [], []
    for step in range(num_steps):
        for part in range(num_micro_batches):
            each = batches(num_ranks, step + 100 * part)
            x, target = (torch.cat(parts).cpu() for parts in zip(*each, strict=True))
            loss = loss_of(model, x, target) / num_micro_batches
            loss.backward()
        losses.append(float(loss.detach()))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), losses, norms


def check(
    pool: RankPool,
    wrap: Callable[..., nn.Module],
    ep: int,
    *sizes: int,
    backend: str = "collective",
) -> None:
    num_ranks = pool.num_ranks
    if num_ranks % ep:
        pytest.skip(f"needs {ep} GPUs, has {num_ranks}")
    weights, losses, norms = train_whole(num_ranks, *sizes)
    found = pool.run(train, wrap, ep, *sizes, backend, num_ranks=num_ranks)
    assert min(norms) > MAX_NORM  # gradients are clipped in each step
    assert len({tuple(norms) for _, _, norms in found}) == 1
    for have, have_losses, have_norms in found:
        torch.testing.assert_close(have, weights)
        torch.testing.assert_close(have_losses, losses, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(have_norms, norms, rtol=1e-5, atol=1e-6)


# Experts of a rank that efsdp divides, that it does not divide, and that are on one rank alone.
@pytest.mark.parametrize(
    ("ep", "num_experts"), [(2, 4), (2, 2), (4, 8), pytest.param(1, 4, marks=pytest.mark.multi_gpu)]
)
def test_fsdp_trains_as_one_process(pool: RankPool, ep: int, num_experts: int) -> None:
    check(pool, with_fsdp, ep, num_experts, 5, 1)


@pytest.mark.parametrize("ep", [4, 2])
def test_ddp_trains_as_one_process(pool: RankPool, ep: int) -> None:
    check(pool, with_ddp, ep, 4, 5, 1)


@pytest.mark.parametrize(
    ("wrap", "ep"), [(with_fsdp, 2), pytest.param(with_ddp, 4, marks=pytest.mark.slow)]
)
def test_the_same_by_the_kernels(pool: RankPool, wrap: Callable[..., nn.Module], ep: int) -> None:
    check(pool, wrap, ep, 4, 1, 1, backend="auto")


@pytest.mark.parametrize("wrap", [with_fsdp, with_ddp])
def test_gradients_of_micro_batches_are_added_up(
    pool: RankPool, wrap: Callable[..., nn.Module]
) -> None:
    check(pool, wrap, 2, 4, 2, 2)


def test_fsdp_alone_divides_by_too_little(pool: RankPool) -> None:
    """FSDP2 divides by the ranks of its own mesh, 2, and there are 4 batches."""
    sizes = 4, 1, 1
    weights, _, (norm,) = train_whole(4, *sizes)
    for have, _, (have_norm,) in pool.run(train, with_torch_alone, 2, *sizes, num_ranks=4):
        assert have_norm > 1.1 * norm
        with pytest.raises(AssertionError):
            torch.testing.assert_close(have, weights)


# --- Mixed precision -----------------------------------------------------------------------------


def run_bf16(group: dist.ProcessGroup) -> tuple[float, set[torch.dtype]]:
    """A step's loss with bf16 weights and rows; the types of gradients."""
    both, world = meshes(2)
    model, buffer = sharded_model(8, both["ep"], torch.bfloat16)
    take_weights(model, whole_model(8))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard_experts(model, both["efsdp"], mp_policy=policy)
    for layer in model:
        fully_shard(layer.dense, mesh=world, mp_policy=policy)
    fully_shard(model, mesh=world)
    loss = loss_of(model, *batches(group.size(), 0)[group.rank()])
    loss.backward()
    dist.all_reduce(mean := loss.detach() / group.size())
    end(buffer)
    return float(mean), {one.grad.dtype for one in model.parameters()}


def test_mixed_precision(pool: RankPool) -> None:
    _, (want,), _ = train_whole(4, 8, 1, 1)
    for loss, dtypes in pool.run(run_bf16, num_ranks=4):
        assert loss == pytest.approx(want, rel=2e-2)
        assert dtypes == {torch.float32}


CHANGES = {
    "nothing": lambda model: model,
    "a copy": copy.deepcopy,
    "other weights": lambda model: model.load_state_dict(model.state_dict(), assign=True) and model,
    "frozen before": lambda model: model.requires_grad_(True),
}


def change_after(group: dist.ProcessGroup, change: str) -> list[float]:
    """Norms of the gradients of experts, over those of a model that nothing has changed."""
    both, world = meshes(2)
    whole, found = whole_model(4), []
    for name in ("nothing", change):
        model, buffer = sharded_model(4, both["ep"])
        take_weights(model, whole)
        if name == "frozen before":
            model.requires_grad_(False)
        average_expert_gradients(model, both["efsdp"])
        model = CHANGES[name](model)
        wrapped = DistributedDataParallel(model, process_group=world.get_group())
        loss_of(wrapped, *batches(4, 0)[dist.get_rank(group)]).backward()
        weights = [one for one in model.parameters() if hasattr(one, "device_mesh")]
        found.append([float(one.grad.to_local().norm()) for one in weights])
        end(buffer)
    return [one / other for one, other in zip(*reversed(found), strict=True)]


@pytest.mark.parametrize("change", CHANGES)
def test_gradients_are_averaged_whatever_happens_to_the_weights(
    pool: RankPool, change: str
) -> None:
    for ratios in pool.run(change_after, change):
        assert ratios == pytest.approx([1.0] * len(ratios), rel=1e-5)


def test_one_parameter_is_clipped() -> None:
    weight = nn.Parameter(torch.zeros(4, 4))
    weight.grad = torch.full((4, 4), 50.0)
    assert float(clip_grad_norm_(weight, 0.5)) == pytest.approx(200.0)
    assert float(weight.grad.norm()) == pytest.approx(0.5)


# --- What is refused -----------------------------------------------------------------------------


def refuse(group: dist.ProcessGroup) -> None:
    both, world = meshes(2)
    efsdp = both["efsdp"]
    model, buffer = sharded_model(8, both["ep"])
    sizes = 4, HIDDEN, 8, buffer
    for mesh, error, text in (
        (both, ShapeError, "mesh has 2 dimensions"),
        (world, ShapeError, r"the ranks \[0, 1, 2, 3\], and the experts are on the ranks"),
        ("ep", DtypeError, "it must be a DeviceMesh"),
    ):
        with pytest.raises(error, match=text):
            MoEFeedForward(*sizes, mesh=mesh)
    for use in (fully_shard_experts, average_expert_gradients):
        with pytest.raises(BackendError, match="Linear has no experts"):
            use(nn.Linear(2, 2), efsdp)
    model.append(Layer(MoEFeedForward(*sizes), 8))
    with pytest.raises(BackendError, match="is no DTensor, and all experts must be sharded"):
        fully_shard_experts(model, efsdp)
    del model[-1]
    experts = MoEFeedForward(*sizes, requires_grad=True, wgrad="delayed")
    with pytest.raises(BackendError, match="wgrad of a MoEFeedForward is a DelayedWgrad"):
        average_expert_gradients(experts)
    experts.wgrad = None
    average_expert_gradients(experts)
    experts.wgrad = WgradSink(*map(torch.empty_like, experts.parameters()))
    with pytest.raises(BackendError, match="wgrad of a MoEFeedForward is a WgradSink"):
        average_expert_gradients(experts)
    three = DeviceMesh.from_group(group, cases.device().type)
    uneven = MoEFeedForward(3, HIDDEN, 5, buffer, mesh=both["ep"])
    with pytest.raises(ShapeError, match=r"4 ranks, which divide neither .*\[3, 10, 16\]"):
        fully_shard_experts(uneven, three)

    before = torch.optim.SGD(model.parameters(), lr=LR)
    model = with_fsdp(model, 2)
    for use in (fully_shard_experts, average_expert_gradients):
        with pytest.raises(BackendError, match="is of FSDP2 already"):
            use(model, efsdp)
    loss_of(model, *batches(4, 0)[group.rank()]).backward()
    with pytest.raises(BackendError, match="Make the optimizer afterwards"):
        before.step()
    torch.optim.SGD(model.parameters(), lr=LR).step()
    end(buffer)


def test_what_is_refused(pool: RankPool) -> None:
    pool.run(refuse, num_ranks=4)
