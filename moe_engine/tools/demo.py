"""The demo: models read a text with their experts spread over ranks.

Each rank reads its own part of the text, first with the whole model, then with its share of the
experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from ..emulation import send_message
from ..integrations.recorded_routing import Routing, record_routing, replay_routing
from ..integrations.transformers import experts_layers, fix_max_tokens, shard_experts
from ..options import Options
from ..timing import now_s
from .models import Kind, build_config, build_model
from .progress import ranks_with_progress

STEPS = (
    "reads unsharded, fp32",
    "reads sharded, fp32",
    "generates",
    "reads unsharded, bf16",
    "reads sharded, bf16",
    "reads sharded, bf16, routing replayed",
)
EXPERTS, REST = "reading, experts, bf16", "reading, attention and the rest, bf16"
GENERATING = "generating, per token, fp32"
PROMPT = 8
"""The bytes at the end of the text that `generate` continues."""

Seconds = dict[str, float]


@dataclass(frozen=True)
class Job:
    """What each rank does: bytes to read and bytes to generate, with one model."""

    kind: Kind
    device: str
    tokens: int
    new_tokens: int
    backend: str


@dataclass
class Outcome:
    """What one rank saw. Differences are those of logits, relative to the largest logit."""

    num_experts: int = 0
    hidden: int = 0
    routing: list[Tensor] = field(default_factory=list)  # int64 [T, K] per layer
    unsharded: Seconds = field(default_factory=dict)
    sharded: Seconds = field(default_factory=dict)
    same_generated: bool = False
    fp32: float = 0.0
    bf16: float = 0.0  # of tokens whose experts agree in every layer
    bf16_replayed: float = 0.0
    agreeing: int = 0


def run_jobs(jobs: Sequence[Job], num_ranks: int, console: Console) -> list[list[Outcome]]:
    """Run all jobs on a pool of ranks, with a progress bar: the outcomes by job and rank."""
    with ranks_with_progress(num_ranks, jobs[0].device, console) as (pool, progress):
        bar = progress.add_task("the ranks start", total=len(jobs) * num_ranks * len(STEPS))
        outcomes = []
        for job in jobs:

            def advance(_: int, step: str, job: Job = job) -> None:
                progress.update(bar, advance=1, description=f"{job.kind} {step}")

            outcomes.append(pool.run(run_rank, job, on_message=advance))
    return outcomes


def run_rank(group: dist.ProcessGroup, job: Job) -> Outcome:
    """One rank's part of a job; collective over `group`."""
    ids = read_text(dist.get_rank(group), dist.get_world_size(group), job)
    steps = iter(STEPS)

    model = build_model(build_config(job.kind, job.device == "cuda"), ids.device)
    outcome = Outcome(experts_layers(model)[0].num_experts, model.config.hidden_size)
    want, routing, _ = _read(model, ids)
    outcome.routing = [topk_idx.cpu() for topk_idx, _ in routing]
    expected = _generate(model, ids, job, outcome.unsharded)
    send_message(next(steps))
    buffer = shard_experts(model, group, max_tokens=job.tokens, backend=job.backend)
    got, _, _ = _read_sharded(model, ids)
    outcome.fp32 = float(_difference(got, want).max())
    send_message(next(steps))
    outcome.same_generated = _generate(model, ids, job, outcome.sharded) == expected
    buffer.destroy()
    del model
    send_message(next(steps))

    model = build_model(build_config(job.kind, job.device == "cuda"), ids.device, torch.bfloat16)
    want, routing, seconds = _read(model, ids)
    outcome.unsharded |= seconds
    send_message(next(steps))
    buffer = shard_experts(model, group, max_tokens=job.tokens, backend=job.backend)
    got, chosen, seconds = _read_sharded(model, ids)
    outcome.sharded |= seconds
    agree = same_experts(routing, chosen)
    outcome.agreeing = int(agree.sum())
    outcome.bf16 = float(_difference(got, want).where(agree, 0).max())
    send_message(next(steps))
    with replay_routing(model, routing):
        got, _, _ = _read_sharded(model, ids)
    outcome.bf16_replayed = float(_difference(got, want).max())
    buffer.destroy()
    send_message(next(steps))
    return outcome


def read_text(rank: int, num_ranks: int, job: Job) -> Tensor:
    """The bytes of this rank's part of the text as tokens, int64 [1, T]."""
    text = files(__package__).joinpath("data/alice.txt").read_bytes()
    start = len(text) * rank // num_ranks
    part = itertools.islice(itertools.cycle(text), start, start + job.tokens)
    return torch.tensor([list(part)], device=job.device)


def same_experts(a: list[Routing], b: list[Routing]) -> Tensor:
    """Tokens that two runs sent to the same experts in every layer: bool [T]."""
    agree = [
        (idx_a.sort().values == idx_b.sort().values).all(1)
        for (idx_a, _), (idx_b, _) in zip(a, b, strict=True)
    ]
    return torch.stack(agree).all(0)


def _difference(got: Tensor, want: Tensor) -> Tensor:
    """The largest difference of each token's logits, relative to the largest logit: [T]."""
    return (got - want).abs().amax(-1).flatten() / want.abs().max()


@torch.inference_mode()
def _read(model: Any, ids: Tensor) -> tuple[Tensor, list[Routing], Seconds]:
    """Logits in fp32 [1, T, V], what the routers chose, and the time of the phases."""
    if ids.is_cuda:
        model(ids)  # compiles
    with record_routing(model) as routing, _time_experts(model) as seconds:
        start = now_s(ids.device)
        logits = model(ids).logits
        seconds[REST] = now_s(ids.device) - start - seconds[EXPERTS]
    return logits.float(), routing, seconds


def _read_sharded(model: Any, ids: Tensor) -> tuple[Tensor, list[Routing], Seconds]:
    """`_read` through the fused layer, however few the tokens are; `_generate` makes low-latency
    calls."""
    with fix_max_tokens(model, max(ids.numel(), Options().decode_tokens + 1)):
        return _read(model, ids)


@torch.inference_mode()
def _generate(model: Any, ids: Tensor, job: Job, seconds: Seconds) -> list[int]:
    """The bytes that follow, greedily; every rank takes the same number of steps."""
    start = now_s(ids.device)
    prompt = ids[:, -PROMPT:]
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        min_new_tokens=job.new_tokens,
        max_new_tokens=job.new_tokens,
        do_sample=False,
    )
    seconds[GENERATING] = (now_s(ids.device) - start) / job.new_tokens
    return out[0, prompt.shape[1] :].tolist()


@contextmanager
def _time_experts(model: Any) -> Iterator[Seconds]:
    """Add up the time of all experts layers; where sharded, dispatch and combine are part of it."""
    seconds = {EXPERTS: 0.0}

    def before(_: Any, args: tuple[Tensor, ...]) -> None:
        seconds[EXPERTS] -= now_s(args[0].device)

    def after(_: Any, args: tuple[Tensor, ...], out: Tensor) -> None:
        seconds[EXPERTS] += now_s(out.device)

    handles: list[Any] = []
    for experts in experts_layers(model):
        handles += [experts.register_forward_pre_hook(before), experts.register_forward_hook(after)]
    yield seconds
    for handle in handles:
        handle.remove()
