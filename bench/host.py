"""Host time of each entry point: python bench/host.py --ranks 1

Microseconds that a call keeps Python and the driver busy, while the GPU is busy with earlier work:
the median of 100 calls on rank 0. Ranks may share a GPU here, as its time does not count. The torch
lines are what a layer's experts cost by `torch._grouped_mm`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from _common import draw_topk, save

from moe_engine import Buffer, Options, moe_ffn
from moe_engine.emulation import RankPool, send_message
from moe_engine.grouped_gemm import grouped_gemm, grouped_mlp
from moe_engine.layer_config import MODELS

BATCHES, CALLS = 12, 10
"""The first two batches are not counted."""
SLEEP_CYCLES = 4_000_000
"""About 2 ms, longer than a batch takes on the host."""
TOKENS, FEW = 1024, 128
HOST_MODEL = "qwen3-30b"
Call = Callable[[], Any]


def main(
    ranks: Annotated[int, typer.Option(help="Ranks, which may share a GPU.")] = 1,
    path: Annotated[Path | None, typer.Option(help="Result file.")] = None,
) -> None:
    """Run the bench on `ranks` ranks."""

    def show(rank: int, line: dict[str, Any]) -> None:
        text = save("host", path, **line)
        print(f"{line['ranks']} ranks  {line['impl']:10}  {line['verb']:22} {line['host_us']:7.1f}")
        assert text

    with RankPool(ranks, "cuda", timeout_s=400, env={"MOE_ENGINE_TIMEOUT_S": "20"}) as pool:
        pool.run(run_rank, on_message=show)


def host_us(call: Call) -> float:
    """The median of single calls, with the GPU asleep at the begin of each batch."""
    times = []
    for batch in range(BATCHES):
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)
        for _ in range(CALLS):
            since = time.perf_counter()
            call()
            if batch > 1:
                times.append((time.perf_counter() - since) * 1e6)
    torch.cuda.synchronize()
    return median(times)


def run_rank(group: dist.ProcessGroup) -> None:
    """All entry points on one rank; rank 0 reports."""
    for verb, impl, tokens, call in entry_points(group):
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        dist.barrier(group)
        us = host_us(call)
        dist.barrier(group)
        if group.rank() == 0:
            line = dict(verb=verb, model=HOST_MODEL, tokens=tokens, ranks=group.size())
            send_message(line | dict(impl=impl, dtype="bf16", routing="uniform", host_us=us))


def entry_points(group: dist.ProcessGroup) -> list[tuple[str, str, int, Call]]:
    """(verb, impl, tokens, a call of it) of every entry point."""
    num_experts, hidden, columns, num_topk = MODELS[HOST_MODEL]
    num_ranks = group.size()
    num_local = num_experts // num_ranks
    sizes = TOKENS, hidden, num_experts, num_topk
    buffer = Buffer.for_tokens(group, *sizes, options=Options(decode_tokens=FEW))

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, device="cuda") * shape[-1] ** -0.5).bfloat16()

    def route(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        idx = draw_topk("uniform", tokens, num_experts, num_topk, group.rank())
        return draw(tokens, hidden), idx, torch.rand(tokens, num_topk, device="cuda")

    x, idx, weights = many = route(TOKENS)
    few = route(FEW)
    up, down = draw(num_local, 2 * columns, hidden), draw(num_local, hidden, columns)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, num_experts)
    more = None, per_rank, None, in_rank, per_expert, idx, weights, 1, TOKENS * num_ranks
    recv_x, _, recv_weights, _, handle, _ = buffer.dispatch(x, *more)
    low = partial(buffer.low_latency_dispatch, *few[:2], FEW, num_experts)
    rows, _, low_handle, _, _ = low(use_fp8=False)
    y = torch.zeros_like(rows)
    ends = torch.linspace(0, TOKENS, num_local + 1, device="cuda").int()

    def experts_by_torch() -> torch.Tensor:
        h = torch._grouped_mm(x, up.transpose(1, 2), ends[1:])
        gate, value = h.chunk(2, dim=-1)
        act = torch.nn.functional.silu(gate) * value
        return torch._grouped_mm(act, down.transpose(1, 2), ends[1:])

    hooks: list[Call] = []

    def send_with_hook() -> None:
        hooks.append(low(return_recv_hook=True)[-1])
        hooks.pop()()

    calls: dict[str, tuple[int, Call]] = {
        "layout": (TOKENS, partial(buffer.get_dispatch_layout, idx, num_experts)),
        "dispatch": (TOKENS, partial(buffer.dispatch, x, *more)),
        "dispatch_cached": (TOKENS, partial(buffer.dispatch, x, handle)),
        "combine": (TOKENS, partial(buffer.combine, recv_x, handle, recv_weights)),
        "low_latency_dispatch": (FEW, low),
        "low_latency_combine": (FEW, partial(buffer.low_latency_combine, y, *few[1:], low_handle)),
        "dispatch_and_hook": (FEW, send_with_hook),
        "moe_ffn": (TOKENS, partial(moe_ffn, *many, up, down, buffer)),
        "moe_ffn_decode": (FEW, partial(moe_ffn, *few, up, down, buffer, FEW)),
        "grouped_gemm": (TOKENS, partial(grouped_gemm, x, up, ends)),
        "grouped_mlp": (TOKENS, partial(grouped_mlp, x, up, down, ends)),
    }
    points = [(verb, "moe_engine", tokens, call) for verb, (tokens, call) in calls.items()]
    return [*points, ("grouped_mlp", "torch", TOKENS, experts_by_torch)]


if __name__ == "__main__":
    typer.run(main)
