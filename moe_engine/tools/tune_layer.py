"""`moe-engine tune`: find by measuring how a layer is fastest on these GPUs, and keep that."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from ..buffer import Buffer
from ..device.context import MAX_STAGES
from ..emulation import RankPool
from ..engines.kernel import KernelEngine
from ..layer import moe_ffn
from ..layer_config import LayerChoices, LayerConfig, LayerProblem
from ..options import Options
from ..timing import Call, slowest, time_graph
from .timeline import random_layer

REFUSED = float("inf")
"""The time of a configuration that changes the result."""
STAGES = "num_stages", "num_return_stages"
PROGRAMS = "num_push_programs", "num_copy_programs", "num_return_programs"
OWN, CLAIMS = "num_own_stages", "claims_tiles"
FIELDS = (*STAGES, OWN, CLAIMS, *PROGRAMS, "group_m")
"""The fields that are tried, in this order."""
PASSES = 2
"""How often each field is tried."""


@dataclass(frozen=True)
class Job:
    """A layer to tune for; the time of a configuration is the median of `rounds`."""

    problem: LayerProblem
    rounds: int
    device: str


# --- What is tried -------------------------------------------------------------------------------


def neighbours(config: LayerConfig, name: str) -> Iterator[LayerConfig]:
    """Configurations with one field changed: half and twice as many; for stages also 3/4, 3/2; of
    own stages one fewer, one more, none and all."""
    now = getattr(config, name)
    values = [now // 2, 2 * now]
    if name == CLAIMS:
        values = [not now]
    elif name == OWN:
        steps = now - 1, now + 1, 0, config.num_stages
        values = [min(max(value, 0), MAX_STAGES.value) for value in steps]
    elif name in STAGES:
        steps = now // 2, 3 * now // 4, 3 * now // 2, 2 * now
        values = [min(value, MAX_STAGES.value) for value in steps]
    for value in dict.fromkeys(values):
        if value != now and (value or name in (OWN, CLAIMS)):
            yield replace(config, **{name: value})


def descend(
    start: LayerConfig, measure: Callable[[LayerConfig], float]
) -> dict[LayerConfig, float]:
    """The times of `start` and of what was tried after it: one field at a time is changed in the
    fastest configuration so far. Nothing is measured twice."""
    times = {start: measure(start)}
    for _ in range(PASSES):
        for name in FIELDS:
            for config in neighbours(fastest(times), name):
                if config not in times:
                    times[config] = measure(config)
    return times


def fastest(times: dict[LayerConfig, float]) -> LayerConfig:
    """The first of those that took the shortest time."""
    return min(times, key=lambda config: times[config])


# --- On the ranks --------------------------------------------------------------------------------


def run_job(job: Job) -> dict[LayerConfig, float]:
    """Microseconds of what was tried, the predicted one first. RankError if a rank fails."""
    with RankPool(job.problem.num_ranks, job.device, timeout_s=3600.0) as pool:
        return pool.run(run_rank, job)[0]


def run_rank(group: dist.ProcessGroup, job: Job) -> dict[LayerConfig, float]:
    """One rank's part of a job; collective over `group`. All ranks see the times of the slowest, so
    that they try the same."""
    problem = job.problem
    inputs = random_layer(problem, group.rank(), job.device)
    sizes = problem.max_tokens, problem.hidden, problem.num_experts, problem.num_topk
    buffer = Buffer.for_tokens(group, *sizes, options=Options(timeout_s=20.0, decode_tokens=0))
    engine = buffer._engine
    assert isinstance(engine, KernelEngine)
    predicted = LayerConfig.predicted(problem, engine.layers.hbm_gbs)
    first: list[torch.Tensor] = []

    def call() -> torch.Tensor:
        return moe_ffn(*inputs, buffer)

    def measure(config: LayerConfig) -> float:
        engine.run_layers_by(LayerChoices(config))
        out = call()
        first[:] = first or [out]
        us = time_same(call, same_bits(out, first[0]), group, job)
        buffer.check()
        return us

    times = descend(predicted, measure)
    dist.barrier(group)
    buffer.destroy()
    return times


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two results are the same to the bit, NaN and signs of 0 included."""
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def time_same(call: Call, same: bool, group: dist.ProcessGroup, job: Job) -> float:
    """Microseconds of a call on the slowest rank; REFUSED if the result differed on any rank, as
    no configuration may change it."""
    if slowest(float(not same), group):
        return REFUSED
    if job.device == "cuda":
        repeats = 4 if job.problem.max_tokens > 2048 else 10
        return time_graph(call, repeats, job.rounds, group)
    return time_calls(call, group, job.rounds)


def time_calls(call: Call, group: dist.ProcessGroup, rounds: int) -> float:
    """Microseconds of one call on the CPU: the median over rounds of the slowest rank."""
    times = []
    for _ in range(rounds):
        dist.barrier(group)
        begin = time.perf_counter()
        call()
        times.append(slowest(1e6 * (time.perf_counter() - begin), group))
    return sorted(times)[rounds // 2]


# --- What was seen -------------------------------------------------------------------------------


def report(times: dict[LayerConfig, float], console: Console) -> None:
    """Print what was tried: how it differs from the first, predicted one, and its time."""
    first, best = next(iter(times)), fastest(times)
    table = Table("tried", "us", "of the predicted")
    for config, us in times.items():
        cell = "another result, refused" if us == REFUSED else f"{us:.1f}"
        share = "" if us == REFUSED else f"{us / times[first]:.3f}"
        style = "bold" if config == best else None
        table.add_row(difference(config, first), cell, share, style=style)
    console.print(table)


def difference(config: LayerConfig, first: LayerConfig) -> str:
    """The fields in which a configuration differs from the predicted one."""
    before = asdict(first)
    changed = [f"{name} {now}" for name, now in asdict(config).items() if now != before[name]]
    return ", ".join(changed) or "as predicted"
