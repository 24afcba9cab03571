"""Where the time of a training step goes: python bench/train_step.py

trains Qwen3-30B-A3B of transformers, 4 of its layers with random bf16 weights and a vocabulary cut
to 32768, on one GPU: a forward with labels, a backward, and a step of fused AdamW, which has
moments in bf16. Each rank reads one sequence. impl `transformers, grouped_mm` has transformers' own
experts, and each of several ranks holds all of them; `moe_engine` has those of `shard_experts`.
Both begin with the same weights and see the same tokens: their losses of the first step are
compared, and error is the relative difference of the last step. `--tiny` shows without a GPU that
all of it runs.

us is the median of a step from an idle GPU until the GPU has ended it, and host_us until Python has
launched it, which has the waits for the numbers of rows; slowest rank. A trace of torch.profiler of
further steps gives the time in which kernels of rank 0's GPU run, see `KernelClass`:

- gemm_us: the products of experts, forward and backward. Ours have activations and weights of rows
  inside, and wait there for rows that come.
- comm_us: what else experts do, forward and backward: rows sent, permuted and added up, and
  transformers' activations. On several ranks also NCCL, which adds up gradients.
- dense_us: attention, norms, routers, the output layer and the loss.
- optimizer_us: AdamW.
- busy_us: any kernel. Rows travel while products run, so the others may add up to more.

The GPU is idle for the rest of us. peak_bytes: the most that torch had allocated. tokens are those
per rank, tokens_per_s those of all.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from _common import save, timed_pool
from _kernel_classes import EXPERTS, OPTIMIZER, trace_classes
from rich.console import Console
from rich.table import Table
from torch.profiler import record_function

from moe_engine.emulation import send_message
from moe_engine.integrations.transformers import experts_layers, shard_experts
from moe_engine.timing import now_s, slowest
from moe_engine.tools.models import Kind, build_config, build_model
from moe_engine.tools.train import EPS, average_gradients

THEIRS, OURS = IMPLS = "transformers, grouped_mm", "moe_engine"
"""In the order in which they run."""
MODELS: dict[str, tuple[Kind, dict[str, int]]] = {
    "qwen3-30b": (Kind.QWEN3_MOE, dict(num_experts=128, num_experts_per_tok=8)),
    "mixtral-8x7b": (Kind.MIXTRAL, {}),
}
VOCABULARY = 32768
LEARNING_RATE = 1e-4
WARMUPS, TRACED = 3, 2
"""Steps before those that are timed, and after them those of the trace."""
ERROR = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
"""Largest relative difference of the losses of the first step."""
ROWS = {
    "step, ms": "us",
    "host": "host_us",
    "GPU busy": "busy_us",
    "experts' GEMMs": "gemm_us",
    "communication and permutation": "comm_us",
    "attention and dense": "dense_us",
    "optimizer": "optimizer_us",
}
"""Of the table, with their fields."""


@dataclass(frozen=True)
class Job:
    """A model, and what each rank does with it."""

    model: str
    layers: int
    tokens: int
    steps: int
    device: str

    @property
    def is_large(self) -> bool:
        return self.device == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.is_large else torch.float32

    def config(self) -> Any:
        kind, sizes = MODELS[self.model]
        sizes = sizes | dict(vocab_size=VOCABULARY) if self.is_large else {}
        return build_config(kind, self.is_large, num_hidden_layers=self.layers, **sizes)


def main(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")] = "qwen3-30b",
    layers: Annotated[int, typer.Option(help="Of the model.", min=1)] = 4,
    tokens: Annotated[int, typer.Option(help="Of the sequence of a rank.", min=2)] = 4096,
    ranks: Annotated[int, typer.Option(help="GPUs to use.", min=1)] = 1,
    steps: Annotated[int, typer.Option(help="To time.", min=1)] = 5,
    tiny: Annotated[bool, typer.Option(help="A tiny model on CPU ranks.")] = False,
    path: Annotated[Path | None, typer.Option("--path", "--out", help="Result file.")] = None,
) -> None:
    """Run the bench on `ranks` GPUs. The vocabulary of the model is cut to 32768."""
    if model not in MODELS:
        raise typer.BadParameter(
            f"{model} is unknown; choose one of {', '.join(MODELS)}", param_hint="--model"
        )
    lines: list[dict[str, Any]] = []

    def show(rank: int, line: dict[str, Any]) -> None:
        lines.append(line)
        print(save("train_step", path, **line), flush=True)

    job = Job(model, layers, tokens, steps, "cpu" if tiny else "cuda")
    with timed_pool(ranks, job.device, timeout_s=540, env={"MOE_ENGINE_TIMEOUT_S": "20"}) as pool:
        pool.run(run_rank, job, on_message=show)
    Console().print(table(lines))


def table(lines: list[dict[str, Any]]) -> Table:
    """The result lines side by side."""
    table = Table("", *(line["impl"] for line in lines))
    for name, field in ROWS.items():
        table.add_row(name, *(f"{line[field] / 1000:.2f}" for line in lines))
    idle = (max(0.0, 1 - line["busy_us"] / line["us"]) for line in lines)
    table.add_row("GPU idle", *(f"{share:.0%}" for share in idle))
    table.add_row("tokens per second", *(f"{line['tokens_per_s']:,}" for line in lines))
    most = ((line["peak_bytes"] or 0) >> 20 for line in lines)
    table.add_row("memory of a rank, MiB", *(f"{mebibytes:,}" for mebibytes in most))
    return table


def run_rank(group: dist.ProcessGroup, job: Job) -> None:
    """Both impls on one rank, one after the other; rank 0 reports."""
    their_losses: list[float] = []
    their_us = None
    for impl in IMPLS:
        training = Training(group, job, impl)
        line, losses = training.measure()
        training.close()
        del training
        gc.collect()
        if job.device == "cuda":
            torch.cuda.empty_cache()
        if their_us is not None:
            errors = [abs(a / b - 1) for a, b in zip(losses, their_losses, strict=True)]
            assert errors[0] < ERROR[job.dtype], errors
            line |= dict(ratio_to=THEIRS, ratio=round(line["us"] / their_us, 3))
            line |= dict(error=round(errors[-1], 8))
        their_losses, their_us = losses, line["us"]
        if group.rank() == 0:
            send_message(line)


class Training:
    """A model in training on one rank, with the experts of one impl."""

    def __init__(self, group: dist.ProcessGroup, job: Job, impl: str):
        self.group, self.job, self.impl = group, job, impl
        self.model = build_model(job.config(), job.device, job.dtype).train()
        self.buffer, self.mine = None, set[torch.Tensor]()
        if impl == OURS:
            self.buffer = shard_experts(self.model, group, max_tokens=job.tokens)
            self.mine = {one for e in experts_layers(self.model) for one in e.parameters()}
        else:
            self.model.set_experts_implementation("grouped_mm")
        # After the sharding, which replaces the experts' parameters.
        how: dict[str, Any] = dict(eps=EPS, fused=job.device == "cuda")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), LEARNING_RATE, **how)
        generator = torch.Generator().manual_seed(group.rank())
        vocab_size = self.model.config.vocab_size
        self.ids = torch.randint(vocab_size, (1, job.tokens), generator=generator).to(job.device)

    def step(self) -> torch.Tensor:
        """A step of AdamW; the loss before it."""
        loss = self.model(self.ids, labels=self.ids, use_cache=False).loss
        loss.backward()
        if self.group.size() > 1:
            average_gradients(self.model.parameters(), self.mine, self.group)
        with record_function(OPTIMIZER):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def measure(self) -> tuple[dict[str, Any], list[float]]:
        """The result line, and the losses of the steps that it is of."""
        job, device = self.job, torch.device(self.job.device)
        is_cuda = device.type == "cuda"
        gc.collect()
        if is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        losses, times, host_times = [], [], []
        for _ in range(WARMUPS + job.steps):
            dist.barrier(self.group)
            begin = now_s(device)
            losses.append(self.step())
            host_times.append(time.perf_counter() - begin)
            times.append(now_s(device) - begin)
        seconds, host = (
            slowest(median(each[WARMUPS:]), self.group) for each in (times, host_times)
        )
        line = dict(verb="step", model=job.model, layers=job.layers, tokens=job.tokens)
        line |= dict(ranks=self.group.size(), impl=self.impl, us=round(seconds * 1e6, 1))
        line |= dict(host_us=round(host * 1e6, 1), dtype="bf16" if job.is_large else "fp32")
        line |= dict(tokens_per_s=round(job.tokens * self.group.size() / seconds))
        line |= dict(peak_bytes=torch.cuda.max_memory_allocated() if is_cuda else None)
        return line | self.trace(), [float(loss) for loss in losses]

    def trace(self) -> dict[str, float]:
        """The fields of `class_times`."""
        with ranges_of_experts(self.model):
            return trace_classes(self.step, TRACED, self.job.device)

    def close(self) -> None:
        if self.buffer is not None:
            dist.barrier(self.group)
            self.buffer.destroy()


@contextmanager
def ranges_of_experts(model: Any) -> Iterator[None]:
    """Within the block a range `EXPERTS` is around each forward of experts, and each backward."""
    open_ranges: list[record_function] = []

    def enter(*_: object) -> None:
        open_ranges.append(record_function(EXPERTS))
        open_ranges[-1].__enter__()

    def leave(*_: object) -> None:
        open_ranges.pop().__exit__(None, None, None)

    handles = []
    for experts in experts_layers(model):
        handles += [
            experts.register_forward_pre_hook(enter),
            experts.register_forward_hook(leave),
            experts.register_full_backward_pre_hook(enter),
            experts.register_full_backward_hook(leave),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


if __name__ == "__main__":
    typer.run(main)
