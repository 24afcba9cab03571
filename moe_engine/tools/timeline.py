"""`moe-engine trace`: run a layer, or its backward, whose kernels record, report what they did, and
draw it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from ..buffer import Buffer
from ..emulation import RankPool
from ..engines.kernel import KernelEngine
from ..grouped_gemm import quantize_weights
from ..layer import moe_ffn
from ..layer_config import LayerProblem
from ..options import Options
from ..timing import Call, capture, start_together
from .model_shape import sizes_of_model
from .trace import (
    COMPUTING,
    Clock,
    Recorder,
    Span,
    Summary,
    align_clocks,
    between,
    role_name,
    summarize,
    with_waits,
)

COLOURS = {
    "wait": "#dddddd",
    "up": "#4477aa",
    "down": "#66ccee",
    "dgrad down": "#66ccee",
    "dgrad up": "#332288",
    "wgrad down": "#aa4499",
    "wgrad up": "#882255",
    "exchange": "#aa3377",
    "push": "#ee6677",
    "copy": "#ddaa33",
    "keep": "#bbcc33",
    "return metadata": "#888888",
    "return": "#228833",
    "sum": "#997700",
    "activation gradient": "#44bb99",
}
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
MULTIPLY = *(role_name(role) for role in COMPUTING), "wait for rows"
BELOW = "copy", "keep", "return metadata", "sum"
"""Drawn in the lower half of an SM's row, as they run concurrently with others that communicate."""


@dataclass(frozen=True)
class Job:
    """A layer of a model, as `sizes_of_model` takes it, with `tokens` tokens on each rank; the last
    of `calls` calls is traced. save: trace the backward, by this policy; None: the forward. fp8:
    with e4m3 weights."""

    model: str
    tokens: int
    calls: int
    device: str
    save: str | None = None
    fp8: bool = False

    @property
    def in_graph(self) -> bool:
        """Whether calls are replays of a CUDA graph, as hosts may be slower than a layer. A forward
        that saves rows cannot be captured."""
        return self.device == "cuda" and self.save in (None, "none")


def run_job(job: Job, num_ranks: int) -> tuple[list[Span], list[Clock]]:
    """Spans of all ranks on the clock of rank 0, and how far each clock was ahead of it. RankError
    if a rank fails."""
    with RankPool(num_ranks, job.device, timeout_s=540.0, env={"MOE_ENGINE_TRACE": "1"}) as pool:
        results = pool.run(run_rank, job)
    return [span for spans, _ in results for span in spans], results[0][1]


def run_rank(group: dist.ProcessGroup, job: Job) -> tuple[list[Span], list[Clock]]:
    """One rank's part of a job; collective over `group`."""
    num_experts, hidden, columns, num_topk = sizes_of_model(job.model)
    rank, sizes = group.rank(), (num_experts, num_topk, hidden, columns)
    inputs = random_layer(LayerProblem(group.size(), job.tokens, *sizes), rank, job.device)
    options = Options(decode_tokens=0)
    buffer = Buffer.for_tokens(group, job.tokens, hidden, num_experts, num_topk, options=options)
    assert isinstance(buffer._engine, KernelEngine)
    recorder = Recorder(buffer._engine.slots.context)
    clocks = align_clocks(group)
    trace_last(job, layer_call(job, inputs, buffer, recorder), recorder, group)
    buffer.check()
    spans = recorder.read(clocks[rank])
    dist.barrier(group)
    buffer.destroy()
    return spans, clocks


def random_layer(problem: LayerProblem, rank: int, device: str) -> Inputs:
    """(x, topk_idx, topk_weights, w_gate_up, w_down) of a rank, bf16: random experts and uniform
    routing."""
    num_local = problem.num_experts // problem.num_ranks
    hidden, columns = problem.hidden, problem.num_columns
    torch.manual_seed(rank)
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    up = torch.empty(num_local, 2 * columns, hidden, **options).normal_(std=hidden**-0.5)
    down = torch.empty(num_local, hidden, columns, **options).normal_(std=columns**-0.5)
    x = torch.randn(problem.max_tokens, hidden, **options)
    scores = torch.rand(problem.max_tokens, problem.num_experts, device=device)
    topk_weights, topk_idx = scores.topk(problem.num_topk)
    return x, topk_idx, topk_weights, up, down


def layer_call(job: Job, inputs: Inputs, buffer: Buffer, recorder: Recorder) -> Call:
    """A layer, or one of which the backward follows and is recorded."""
    if job.save is None:
        if not job.fp8:
            return lambda: moe_ffn(*inputs, buffer)
        x, topk_idx, topk_weights, *weights = inputs
        up, down = map(quantize_weights, weights)
        return lambda: moe_ffn(x, topk_idx, topk_weights, up, down, buffer)
    leaves = [one.requires_grad_() for one in inputs if one.is_floating_point()]
    dy, save = torch.randn_like(inputs[0]), job.save

    def call() -> Sequence[torch.Tensor]:
        y = moe_ffn(*inputs, buffer, save=save)
        recorder.clear()
        return torch.autograd.grad(y, leaves, dy)

    return call


def trace_last(job: Job, call: Call, recorder: Recorder, group: dist.ProcessGroup) -> None:
    """Make a call `job.calls` times, all ranks together, and record the last."""
    begin: Callable[[dist.ProcessGroup], Any]
    begin = start_together if job.device == "cuda" else dist.barrier
    if job.in_graph:
        call = capture(call, 1, group).replay
    for number in range(job.calls):
        if number == job.calls - 1:
            recorder.clear()
        begin(group)
        call()


def report(spans: Sequence[Span], clocks: Sequence[Clock], console: Console) -> None:
    """Print the summary of each rank."""
    summaries = summarize(spans)
    ranks = [f"rank {summary.rank}" for summary in summaries]
    table = Table("us", *ranks)
    rows: dict[str, Callable[[Summary], float]] = {
        "first begin to last end": lambda summary: summary.layer_ns,
        "experts compute, mean of SMs": lambda summary: summary.computing_ns,
        "exposed communication": lambda summary: summary.exposed_ns,
    }
    for name, value in rows.items():
        table.add_row(name, *(f"{value(summary) / 1e3:.1f}" for summary in summaries))
    errors = (f"{clock.ahead_ns / 1e3:.1f} ± {clock.error_ns / 1e3:.1f}" for clock in clocks)
    table.add_row("clock ahead of rank 0's", *errors)
    console.print(table)
    table = Table("busy + idle, ms", *ranks)
    for name in dict.fromkeys(name for summary in summaries for name in summary.roles):
        roles = [summary.roles[name] for summary in summaries]
        table.add_row(name, *(f"{r.busy_ns / 1e6:.1f} + {r.idle_ns / 1e6:.1f}" for r in roles))
    console.print(table)


def draw(spans: Sequence[Span], title: str, path: Path) -> None:
    """Save a picture of what the programs of each SM did: for each rank a panel of those that
    multiply, above one of those that communicate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    ranks = sorted({span.rank for span in spans})
    zero = min(span.begin for span in spans)
    size = (12, 0.8 + 2.4 * len(ranks))
    figure, grid = plt.subplots(
        2 * len(ranks), squeeze=False, sharex=True, figsize=size, layout="constrained"
    )
    for index, axes in enumerate(grid[:, 0]):
        rank, communicate = ranks[index // 2], index % 2 == 1
        _draw_rank(axes, [span for span in spans if span.rank == rank], communicate, zero)
        axes.set_ylabel(f"rank {rank}\n" + ("communicate" if communicate else "multiply"))
    grid[-1, 0].set_xlabel("us")
    grid[0, 0].set_title(title)
    names = {span.name for span in spans}
    shown = {name: colour for name, colour in COLOURS.items() if name in {"wait", *names}}
    handles = [Patch(color=colour, label=name) for name, colour in shown.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_rank(axes: Any, spans: Sequence[Span], communicate: bool, zero: int) -> None:
    """The programs of a rank that multiply, or the others, in two halves; a row for each SM, and
    work of any of its programs hides waits of others."""
    from matplotlib.collections import PolyCollection

    boxes: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in COLOURS}

    def add(name: str, span: Span, begin: int, end: int) -> None:
        left, right = (begin - zero) / 1e3, (end - zero) / 1e3
        top = span.sm + (0.5 if span.name in BELOW else 0.0)
        bottom = top + (0.5 if communicate else 1.0)
        boxes[name].append([(left, top), (left, bottom), (right, bottom), (right, top)])

    for span, waits in with_waits(spans):
        if communicate != (span.name in MULTIPLY):
            for wait in [span] if span.is_wait else waits:
                add("wait", span, wait.begin, wait.end)
            if not span.is_wait:
                for begin, end in between(span, waits):
                    add(span.name, span, begin, end)
    for name, corners in boxes.items():
        axes.add_collection(PolyCollection(corners, facecolor=COLOURS[name], edgecolor="none"))
    axes.set_xlim(0, (max(span.end for span in spans) - zero) / 1e3)
    axes.set_ylim(max(span.sm for span in spans) + 1, 0)
    axes.set_yticks([])
