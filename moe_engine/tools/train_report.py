"""What a training saw, as tables and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from .train import Job, Outcome

BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 5e-3}
"""The largest difference of the losses of a step, relative to them: for 50 steps in fp32, 200 in
bf16. Rounding parts two trainings in the end, the sooner the longer they are."""


def report(job: Job, outcomes: Sequence[Outcome], console: Console) -> bool:
    """Print the table of one model, given the outcomes of the ranks; False if a bound is missed."""
    plain, sharded = outcomes[0]
    console.rule(f"{job.kind}: {job.steps} steps of {len(outcomes)} x {job.length} bytes")
    table = Table("", "unsharded", "sharded")
    for name, step in (("loss of the first step", 0), ("loss of the last step", -1)):
        table.add_row(name, *(f"{run.loss[step]:.4f}" for run in (plain, sharded)))
    if job.bias_speed:
        for name, step in (("first", 0), ("last", -1)):
            loads = (f"{run.imbalance[step]:.2f}" for run in (plain, sharded))
            table.add_row(f"largest load over the mean, {name} step", *loads)
    # Times mean something where each rank has a GPU of its own.
    if job.device == "cuda" and torch.cuda.device_count() >= len(outcomes):
        by_rank = list(zip(*outcomes, strict=True))
        slowest = [max(run.seconds for run in runs) for runs in by_rank]
        tokens = len(outcomes) * job.length
        table.add_row("tokens per second", *(f"{tokens / seconds:,.0f}" for seconds in slowest))
        most = [max(run.num_bytes for run in runs) for runs in by_rank]
        table.add_row("memory of a rank, MiB", *(f"{num_bytes >> 20:,}" for num_bytes in most))
    console.print(table)
    losses = torch.tensor([plain.loss, sharded.loss], dtype=torch.float64)
    worst, bound = float(((losses[1] - losses[0]) / losses[0]).abs().max()), BOUNDS[job.dtype]
    passed = worst <= bound  # not so for a NaN
    verdict = "[green]ok[/]" if passed else "[red]missed[/]"
    console.print(
        f"Largest relative difference of the losses of a step: {worst:.1e}, bound {bound:.0e}: "
        f"{verdict}"
    )
    return passed


def draw(jobs: Sequence[Job], results: Sequence[Sequence[Outcome]], path: Path) -> None:
    """Save a picture of the losses, and of the tokens that each expert got at the last step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    num_columns = 3 if any(job.bias_speed for job in jobs) else 2
    size = (5.5 * num_columns, 3.5 * len(jobs))
    figure, grid = plt.subplots(len(jobs), num_columns, squeeze=False, figsize=size, layout="tight")
    for job, outcomes, (losses, load, *more) in zip(jobs, results, grid, strict=True):
        draw_runs(losses, [run.loss for run in outcomes[0]])
        losses.set(title=f"{job.kind}: loss", xlabel="step", ylabel="mean loss of a byte")
        draw_load(load, outcomes)
        for spread in more:
            draw_runs(spread, [run.imbalance for run in outcomes[0]])
            spread.set(title="largest load over the mean", xlabel="step", ylabel="mean of layers")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_runs(axes: Any, values: Sequence[Sequence[float]]) -> None:
    """A line for the unsharded training, and one for the sharded."""
    for line, name, style in zip(values, ("unsharded", "sharded"), ("-", "--"), strict=True):
        axes.plot(line, style, label=name)
    axes.legend()


def draw_load(axes: Any, outcomes: Sequence[Outcome]) -> None:
    """Bars of the tokens of each expert, by layer; lines between the ranks."""
    counts = outcomes[0][1].load
    num_layers, num_experts = counts.shape
    width = 0.8 / num_layers
    for layer, tokens in enumerate(counts.tolist()):
        at = [expert + (layer - (num_layers - 1) / 2) * width for expert in range(num_experts)]
        axes.bar(at, tokens, width, label=f"layer {layer}")
    for rank in range(1, len(outcomes)):
        axes.axvline(rank * num_experts / len(outcomes) - 0.5, color="black", linewidth=0.8)
    axes.set(title="load per expert, last step", xlabel="expert", ylabel="tokens")
    axes.legend()
