"""Each verb of a Buffer: microseconds of the GPUs and of the host, to compare two versions of the
project: python bench/verbs.py --ranks 2

`us`: one call in a CUDA graph of such calls, which all ranks begin together: the median over
replays of the slowest rank. `host_us`: one call from Python, of many without a wait in between: the
least of several batches, on rank 0. Nothing is checked here, as the other benches do so.

With MOE_ENGINE_COMMIT and PYTHONPATH it measures another version, laid out as it is installed.
Versions that are compared take turns on one machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from _common import draw_topk, save, timed_pool

from moe_engine import Buffer, Options, moe_ffn
from moe_engine.emulation import send_message
from moe_engine.layer_config import MODELS
from moe_engine.timing import time_graph

CAPACITY, FEW = 8192, 128
TOKENS = 128, 1024, 4096, 8192
LOW_LATENCY_TOKENS = 1, 128
LAYER_TOKENS = 128, 1024, 4096
GRAPH_CALLS, ROUNDS = 10, 31
HOST_CALLS, BATCHES = 40, 7
HOST_TOKENS = 128
"""Of the calls whose host time is measured: few, so that the GPU keeps up."""


def main(
    ranks: Annotated[int, typer.Option(help="GPUs to use.")] = 2,
    path: Annotated[Path | None, typer.Option(help="Result file.")] = None,
) -> None:
    """Run the bench on `ranks` GPUs."""

    def show(rank: int, line: dict[str, Any]) -> None:
        print(save("verbs", path, **line), flush=True)

    with timed_pool(ranks, timeout_s=400, env={"MOE_ENGINE_TIMEOUT_S": "20"}) as pool:
        pool.run(run_rank, on_message=show)


def host_us(call: Callable[[], Any]) -> float:
    """Microseconds of Python for a call, the least mean of several batches."""
    means = []
    for _ in range(BATCHES):
        torch.cuda.synchronize()
        since = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        means.append((time.perf_counter() - since) * 1e6 / HOST_CALLS)
    torch.cuda.synchronize()
    return min(means)


def run_rank(group: dist.ProcessGroup) -> None:
    """All points on one rank; rank 0 reports."""
    time_verbs(group)
    time_low_latency(group)
    time_layers(group)


def measure(
    group: dist.ProcessGroup,
    verb: str,
    model: str,
    tokens: int,
    call: Callable[[], Any],
    host: bool,
) -> None:
    """Time a call and send the line."""
    us = time_graph(call, GRAPH_CALLS, ROUNDS, group)
    on_host = host_us(call) if host else None
    dist.barrier(group)
    if group.rank() == 0:
        line = dict(verb=verb, model=model, tokens=tokens, ranks=group.size(), routing="uniform")
        send_message(line | dict(impl="moe_engine", dtype="bf16", us=us, host_us=on_host))


def time_verbs(group: dist.ProcessGroup) -> None:
    """Layout, dispatch, cached dispatch and combine."""
    model = "deepseek-v3"
    num_experts, hidden, _, num_topk = MODELS[model]
    sizes = CAPACITY, hidden, num_experts, num_topk
    buffer = Buffer.for_tokens(group, *sizes, options=Options(decode_tokens=0))
    for tokens in TOKENS:
        x = torch.randn(tokens, hidden, device="cuda").bfloat16()
        idx = draw_topk("uniform", tokens, num_experts, num_topk, group.rank())
        weights = torch.rand(tokens, num_topk, device="cuda")
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, num_experts)
        args = None, per_rank, None, in_rank, per_expert, idx, weights, 1, tokens * group.size()
        recv_x, _, recv_weights, _, handle, _ = buffer.dispatch(x, *args)
        calls = {
            "layout": partial(buffer.get_dispatch_layout, idx, num_experts),
            "dispatch": partial(buffer.dispatch, x, *args),
            "cached_dispatch": partial(buffer.dispatch, x, handle),
            "combine": partial(buffer.combine, recv_x, handle, recv_weights),
        }
        for verb, call in calls.items():
            measure(group, verb, model, tokens, call, tokens == HOST_TOKENS)
    buffer.destroy()


def time_low_latency(group: dist.ProcessGroup) -> None:
    """Low-latency dispatch in e4m3 and combine."""
    model = "deepseek-v3"
    num_experts, hidden, _, num_topk = MODELS[model]
    num_bytes = Buffer.get_low_latency_rdma_size_hint(FEW, hidden, group.size(), num_experts)
    buffer = Buffer(group, 0, num_bytes, low_latency_mode=True)
    for tokens in LOW_LATENCY_TOKENS:
        x = torch.randn(tokens, hidden, device="cuda").bfloat16()
        idx = draw_topk("uniform", tokens, num_experts, num_topk, group.rank())
        weights = torch.rand(tokens, num_topk, device="cuda")
        (rows, _), _, handle, _, _ = buffer.low_latency_dispatch(x, idx, FEW, num_experts)
        y = torch.zeros(rows.shape, dtype=torch.bfloat16, device="cuda")
        calls = {
            "low_latency_dispatch": partial(buffer.low_latency_dispatch, x, idx, FEW, num_experts),
            "low_latency_combine": partial(buffer.low_latency_combine, y, idx, weights, handle),
        }
        for verb, call in calls.items():
            measure(group, verb, model, tokens, call, tokens == HOST_TOKENS)
    buffer.destroy()


def time_layers(group: dist.ProcessGroup) -> None:
    """moe_ffn, the low-latency way for few tokens."""
    model = "qwen3-30b"
    num_experts, hidden, columns, num_topk = MODELS[model]
    num_local = num_experts // group.size()
    buffer = Buffer.for_tokens(group, max(LAYER_TOKENS), hidden, num_experts, num_topk)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, device="cuda") * shape[-1] ** -0.5).bfloat16()

    up, down = draw(num_local, 2 * columns, hidden), draw(num_local, hidden, columns)
    for tokens in LAYER_TOKENS:
        x = torch.randn(tokens, hidden, device="cuda").bfloat16()
        idx = draw_topk("uniform", tokens, num_experts, num_topk, group.rank())
        weights = torch.rand(tokens, num_topk, device="cuda")
        hint = tokens if tokens == HOST_TOKENS else None
        call = partial(moe_ffn, x, idx, weights, up, down, buffer, hint)
        measure(group, "layer", model, tokens, call, tokens <= 1024)
    buffer.destroy()


if __name__ == "__main__":
    typer.run(main)
