"""Training: models learn a text with their experts spread over ranks, and unsharded, side by side.

Both begin with the same weights and see the same bytes, so their losses must fall alike. Each rank
trains on its own part of the batch. Gradients of what all ranks hold are averaged over them; those
of the experts are sums over the tokens of all ranks already.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from ..emulation import send_message
from ..integrations.balancing import imbalance, record_counts, router_biases, update_biases
from ..integrations.recorded_routing import Routing, record_routing
from ..integrations.transformers import experts_layers, shard_experts
from ..timing import now_s
from .models import Kind, build_config, build_model
from .progress import ranks_with_progress

BIAS_SPEED = 3e-2
"""The speed of the routers' biases: 30 times DeepSeek-V3's, for trainings of few steps."""
EPS = 1e-6
"""AdamW's epsilon. With 1e-8 the first steps magnify the rounding of gradients that are 0 but for
it, till a router chooses another expert."""


@dataclass(frozen=True)
class Job:
    """What each rank does with one model: `steps` steps of AdamW, of `length` bytes for a rank."""

    kind: Kind
    device: str
    dtype: torch.dtype
    steps: int
    length: int
    learning_rate: float
    backend: str
    bias_speed: float = 0.0
    """The speed of the routers' biases, which stay as they are at 0."""


@dataclass
class Run:
    """One training: the mean loss over all ranks at each step; int64 [layers, E], how many tokens
    each expert got at the last step; seconds of a step, without the first; the most bytes that
    torch had allocated on a GPU. Where biases are updated, also the largest load of an expert over
    the mean at each step, the mean of all layers, and the biases at the end, [layers, E]."""

    loss: list[float] = field(default_factory=list)
    load: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    seconds: float = 0.0
    num_bytes: int = 0
    imbalance: list[float] = field(default_factory=list)
    biases: Tensor = field(default_factory=lambda: torch.zeros(0, 0))


Outcome = tuple[Run, Run]
"""Unsharded, and sharded."""


def run_jobs(jobs: Sequence[Job], num_ranks: int, console: Console) -> list[list[Outcome]]:
    """Run all jobs on a pool of ranks, with a progress bar: the outcomes by job and rank."""
    with ranks_with_progress(num_ranks, jobs[0].device, console) as (pool, progress):
        total = sum(2 * job.steps for job in jobs)
        bar = progress.add_task("the ranks start", total=total)

        def advance(rank: int, text: str) -> None:
            if rank == 0:
                progress.update(bar, advance=1, description=text)

        return [pool.run(run_rank, job, on_message=advance) for job in jobs]


def run_rank(group: dist.ProcessGroup, job: Job) -> Outcome:
    """One rank's part of a job; collective over `group`."""
    return train(group, job, False), train(group, job, True)


def train(group: dist.ProcessGroup, job: Job, is_sharded: bool) -> Run:
    """Train a new model."""
    model = build_model(build_config(job.kind), job.device, job.dtype).train()
    buffer, mine = None, set[Tensor]()
    if is_sharded:
        buffer = shard_experts(model, group, max_tokens=job.length, backend=job.backend)
        mine = {weight for layer in experts_layers(model) for weight in layer.parameters()}
    # After the sharding, which replaces the experts' parameters.
    optimizer = torch.optim.AdamW(model.parameters(), job.learning_rate, eps=EPS)
    run, times = Run(), []
    if job.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for step in range(job.steps):
        ids = read_text(group, job, step)
        times.append(now_s(torch.device(job.device)))
        with record_routing(model) as routing, _counts_of_layers(model, job, is_sharded) as counts:
            loss = model(ids, labels=ids).loss
        loss.backward()
        average_gradients(model.parameters(), mine, group)
        optimizer.step()
        optimizer.zero_grad()
        if job.bias_speed:
            load = torch.stack(counts) if is_sharded else count_tokens(model, routing, group)
            update_biases(model, list(load), job.bias_speed)
            run.imbalance.append(float(imbalance(load).mean()))
        run.loss.append(float(_sum(loss.detach(), group)) / group.size())
        name = "sharded" if is_sharded else "unsharded"
        send_message(f"{job.kind} {name}: loss {run.loss[-1]:.3f}")
    times.append(now_s(torch.device(job.device)))
    run.seconds = (times[-1] - times[1]) / max(1, job.steps - 1)
    run.num_bytes = torch.cuda.max_memory_allocated() if job.device == "cuda" else 0
    run.load = count_tokens(model, routing, group).cpu()
    if job.bias_speed:
        run.biases = torch.stack(router_biases(model)).cpu()
    if buffer is not None:
        buffer.destroy()
    return run


def _counts_of_layers(model: Any, job: Job, is_sharded: bool) -> Any:
    """Record the counts that sharded layers return, if they are needed."""
    return record_counts(model) if is_sharded and job.bias_speed else nullcontext(())


def count_tokens(model: Any, routing: list[Routing], group: dist.ProcessGroup) -> Tensor:
    """How many tokens of all ranks each expert gets, int64 [layers, E]."""
    num_experts = experts_layers(model)[0].num_experts
    chosen = [torch.bincount(idx.flatten(), minlength=num_experts) for idx, _ in routing]
    return _sum(torch.stack(chosen), group)


def average_gradients(parameters: Any, experts: set[Tensor], group: dist.ProcessGroup) -> None:
    """Make gradients those of the mean loss over all ranks. `experts` are the weights that this
    rank alone has: their gradients are sums over the tokens of all ranks."""
    for weight in parameters:
        if weight.grad is None:
            continue
        if weight not in experts:
            _sum(weight.grad, group)
        weight.grad /= group.size()


def read_text(group: dist.ProcessGroup, job: Job, step: int) -> Tensor:
    """The bytes of this rank at a step as tokens, int64 [1, T]."""
    text = files(__package__).joinpath("data/alice.txt").read_bytes()
    start = (step * group.size() + group.rank()) * job.length % len(text)
    part = itertools.islice(itertools.cycle(text), start, start + job.length)
    return torch.tensor([list(part)], device=job.device)


def _sum(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over all ranks, in place."""
    dist.all_reduce(tensor, group=group)
    return tensor
