"""What the demo saw, as tables and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from .demo import Job, Outcome

FP32_BOUND = 1e-5
BF16_BOUND = 2e-2
AGREEING_BOUND = 0.97


def report(job: Job, outcomes: Sequence[Outcome], console: Console) -> bool:
    """Print the tables of one model, given the outcome of each rank; False if a bound is missed."""
    first = outcomes[0]
    console.rule(
        f"{job.kind}: hidden {first.hidden}, {first.num_experts} experts, "
        f"top {first.routing[0].shape[1]}, {len(first.routing)} layers"
    )
    _print_rows(outcomes, console)
    # Times mean something where each rank has a GPU of its own.
    if job.device == "cuda" and torch.cuda.device_count() >= len(outcomes):
        _print_times(outcomes, console)
    return _print_checks(job, outcomes, console)


def count_rows(topk_idx: Tensor, num_experts: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Rows [R] that tokens with topk_idx [T, K] send to each rank, and copies [R], one per expert.

    A token sends one row to a rank, however many of its experts that rank has.
    """
    to_rank = F.one_hot(topk_idx // (num_experts // num_ranks), num_ranks)  # [T, K, R]
    return to_rank.amax(1).sum(0), to_rank.sum((0, 1))


def _print_rows(outcomes: Sequence[Outcome], console: Console) -> None:
    num_ranks = len(outcomes)
    rows, copies = (torch.zeros(num_ranks, num_ranks, dtype=torch.int64) for _ in range(2))
    for rank, outcome in enumerate(outcomes):
        for topk_idx in outcome.routing:
            layer_rows, layer_copies = count_rows(topk_idx, outcome.num_experts, num_ranks)
            rows[rank] += layer_rows
            copies[rank] += layer_copies
    table = Table("rows sent", *(f"to rank {rank}" for rank in range(num_ranks)))
    for rank, row in enumerate(rows.tolist()):
        cells = [f"[dim]{n} stay[/]" if to == rank else str(n) for to, n in enumerate(row)]
        table.add_row(f"from rank {rank}", *cells)
    console.print(table)
    away = ~torch.eye(num_ranks, dtype=torch.bool)
    sent, unmerged = (int(n[away].sum()) * outcomes[0].hidden * 2 for n in (rows, copies))
    console.print(
        f"Each way {sent:,} bytes (bf16) go to other ranks as one row per token and rank; one row "
        f"per token and expert would be {unmerged:,}. Saved: {unmerged - sent:,}, "
        f"{(unmerged - sent) / max(1, unmerged):.0%}."
    )


def _print_times(outcomes: Sequence[Outcome], console: Console) -> None:
    table = Table("time per phase, ms, slowest rank", "unsharded", "sharded")
    for phase in outcomes[0].sharded:
        seconds = (
            max(o.unsharded[phase] for o in outcomes),
            max(o.sharded[phase] for o in outcomes),
        )
        table.add_row(phase, *(f"{1e3 * s:.1f}" for s in seconds))
    console.print(table)


def _print_checks(job: Job, outcomes: Sequence[Outcome], console: Console) -> bool:
    table = Table("against the unsharded model", "seen", "bound", "")
    share = sum(o.agreeing for o in outcomes) / (len(outcomes) * job.tokens)
    passed = []

    def add(what: str, seen: str, bound: str, good: bool) -> None:
        passed.append(good)
        table.add_row(what, seen, bound, "[green]ok[/]" if good else "[red]missed[/]")

    def add_difference(what: str, seen: Sequence[float], bound: float) -> None:
        worst = float(torch.tensor(seen).max())  # keeps a NaN, which misses the bound
        add(what, f"{worst:.1e}", f"{bound:.0e}", worst <= bound)

    add_difference("fp32, largest difference*", [o.fp32 for o in outcomes], FP32_BOUND)
    add(
        "bf16, tokens with the same experts in every layer",
        f"{share:.1%}",
        f"{AGREEING_BOUND:.0%}",
        share >= AGREEING_BOUND,
    )
    add_difference(
        "bf16, largest difference* on these tokens", [o.bf16 for o in outcomes], BF16_BOUND
    )
    replayed = [o.bf16_replayed for o in outcomes]
    add_difference("bf16, largest difference*, routing replayed", replayed, BF16_BOUND)
    same = sum(o.same_generated for o in outcomes)
    table.add_row("fp32, ranks that generate the same text", f"{same} of {len(outcomes)}", "", "")
    table.caption = "* of any logit, relative to the largest logit"
    console.print(table)
    return all(passed)


def draw(jobs: Sequence[Job], results: Sequence[Sequence[Outcome]], path: Path) -> None:
    """Save a picture of the tokens that each expert got, by the rank they came from."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    num_layers = max(len(outcomes[0].routing) for outcomes in results)
    size = (5 * num_layers, 3 * len(jobs))
    figure, grid = plt.subplots(len(jobs), num_layers, squeeze=False, figsize=size, layout="tight")
    for job, outcomes, row in zip(jobs, results, grid, strict=True):
        for layer, axes in enumerate(row[: len(outcomes[0].routing)]):
            _draw_layer(axes, [outcome.routing[layer] for outcome in outcomes], outcomes[0])
            axes.set_title(f"{job.kind}, mixture-of-experts layer {layer}")
    grid[0][0].legend(fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_layer(axes: Any, routing: Sequence[Tensor], outcome: Outcome) -> None:
    num_experts, num_ranks = outcome.num_experts, len(routing)
    bottom = torch.zeros(num_experts, dtype=torch.int64)
    for rank, topk_idx in enumerate(routing):
        tokens = torch.bincount(topk_idx.flatten(), minlength=num_experts)
        axes.bar(range(num_experts), tokens, bottom=bottom, label=f"from rank {rank}")
        bottom += tokens
    num_local = num_experts // num_ranks
    for rank in range(1, num_ranks):
        axes.axvline(rank * num_local - 0.5, color="black", linewidth=0.8)
    middles = [rank * num_local + (num_local - 1) / 2 for rank in range(num_ranks)]
    axes.set_xticks(middles, [f"experts of\nrank {rank}" for rank in range(num_ranks)])
    axes.set_ylabel("tokens")
