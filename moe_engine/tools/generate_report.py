"""What a checkpoint answered, how fast, and which experts did it, as text and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..integrations.balancing import imbalance
from .generate import Answers, Job


def report(
    job: Job, texts: Sequence[str], answers: Sequence[Answers], tokenizer: Any, console: Console
) -> None:
    """Print each prompt's text with its answer, then figures of the ranks."""
    num_ranks = len(answers)
    for number, text in enumerate(texts):
        tokens = answers[number % num_ranks].tokens[number // num_ranks]
        console.print(Text(text, style="bold"))
        console.print(Text(tokenizer.decode(tokens, skip_special_tokens=True)), end="\n\n")
    console.print(table_of(job, answers))


def table_of(job: Job, answers: Sequence[Answers]) -> Table:
    """Tokens, tokens per second of all ranks in both phases, memory, and the load of experts."""
    num_read = sum(map(len, job.prompts))
    # The first token of an answer comes from the prefill.
    num_decoded = sum(max(0, len(tokens) - 1) for one in answers for tokens in one.tokens)
    table = Table("", "prompts", "answers")
    table.add_row("tokens", f"{num_read:,}", f"{num_decoded + len(job.prompts):,}")
    # Times mean something where each rank has a GPU of its own.
    if job.device == "cuda" and torch.cuda.device_count() >= len(answers):
        prefill = num_read / max(one.prefill_s for one in answers)
        decode = num_decoded / max(1e-9, *(one.decode_s for one in answers))
        table.add_row("tokens per second", f"{prefill:,.0f}", f"{decode:,.0f}")
    table.add_section()
    most = max(one.num_bytes for one in answers)
    where = "GPU" if job.device == "cuda" else "host"
    table.add_row(f"{where} memory of a rank, at most", f"{most / 2**30:,.1f} GiB", "")
    spread = imbalance(answers[0].load)
    layer = int(spread.argmax())
    table.add_row("largest load of an expert over the mean", f"{spread.mean():.2f}", "")
    table.add_row(f"the same in layer {layer} of experts", f"{spread[layer]:.2f}", "")
    return table


def draw(answers: Sequence[Answers], path: Path) -> None:
    """Save a picture of the load of each expert in each layer, with lines between the ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    load = answers[0].load
    num_layers, num_experts = load.shape
    size = (min(16.0, 4 + num_experts / 10), min(12.0, 2 + num_layers / 5))
    figure, axes = plt.subplots(figsize=size, layout="tight")
    share = load / load.double().mean(1, keepdim=True)
    image = axes.imshow(share.numpy(), aspect="auto", vmin=0)
    for rank in range(1, len(answers)):
        axes.axvline(rank * num_experts / len(answers) - 0.5, color="white", linewidth=0.8)
    axes.set(title="load over the mean of the layer", xlabel="expert", ylabel="layer of experts")
    axes.locator_params(integer=True)
    figure.colorbar(image)
    figure.savefig(path, dpi=120)
    plt.close(figure)
