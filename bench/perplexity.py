"""The perplexity of small models with experts in bf16 and in e4m3: python bench/perplexity.py

A model of two layers of each family reads the first four fifths of moe_engine's text, byte by
byte, in AdamW steps of transformers' own; then `perplexity` is that of all of the text and of the
rest, which it has not seen. impl `transformers` has its own experts, and moe_engine those of
`shard_experts`, in dtype fp8 after `quantize_experts`.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from _common import save

from moe_engine.emulation import RankPool, send_message
from moe_engine.integrations.quantized_experts import quantize_experts
from moe_engine.integrations.transformers import shard_experts
from moe_engine.tools.models import Kind, build_config, build_model

KINDS = Kind.MIXTRAL, Kind.QWEN3_MOE
LENGTH, BATCH = 128, 8
LEARNING_RATE = 1e-3


def main(
    steps: Annotated[int, typer.Option(help="Of AdamW.")] = 300,
    path: Annotated[Path | None, typer.Option(help="Result file.")] = None,
) -> None:
    """Run on one rank, of a GPU if there is one."""

    def show(rank: int, line: dict[str, Any]) -> None:
        print(save("perplexity", path, **line), flush=True)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with RankPool(1, device, timeout_s=1800) as pool:
        pool.run(run_rank, steps, device, on_message=show)


def run_rank(group: dist.ProcessGroup, steps: int, device: str) -> None:
    """All models on one rank."""
    text = files("moe_engine.tools").joinpath("data/alice.txt").read_bytes()
    tokens = torch.tensor(list(text), device=device)
    seen, new = tokens[: len(tokens) * 4 // 5], tokens[len(tokens) * 4 // 5 :]
    for kind in KINDS:
        model = build_model(build_config(kind, hidden_size=128), device)
        train(model, seen, steps)
        model = model.bfloat16().eval()

        def send(impl: str, dtype: str, kind: Kind = kind, model: Any = model) -> None:
            for part, ids in (("seen", seen), ("new", new)):
                fields = dict(impl=impl, dtype=dtype, model=f"{kind}, small", ranks=1)
                value = round(perplexity(model, ids), 4)
                send_message(fields | dict(verb=part, tokens=len(ids), perplexity=value))

        send("transformers", "bf16")
        buffer = shard_experts(model, group, max_tokens=LENGTH)
        send("moe_engine", "bf16")
        quantize_experts(model)
        send("moe_engine", "fp8")
        buffer.destroy()


def train(model: Any, tokens: torch.Tensor, steps: int) -> None:
    """Steps on drawn parts of the text."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - LENGTH, (BATCH,), generator=generator).tolist()
        ids = torch.stack([tokens[start:][:LENGTH] for start in starts])
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def perplexity(model: Any, tokens: torch.Tensor) -> float:
    """Of the text in parts of LENGTH, each by itself."""
    parts = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
    losses = [model(ids[None], labels=ids[None]).loss.float() for ids in parts]
    return float(torch.stack(losses).mean().exp())


if __name__ == "__main__":
    typer.run(main)
