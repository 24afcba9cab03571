"""What all benches share: routings, timing, and result lines."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from itertools import chain, cycle, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
import typer

from moe_engine.emulation import RankPool
from moe_engine.timing import WARMUP_ROUNDS, Call, capture, slowest, start_together

RESULTS = Path(__file__).parent / "results"
FIELDS = (
    "bench verb model tokens ranks routing impl dtype us p99 floor_us ratio_to ratio tflops "
    "eager_us eager_ratio forward_us saved_bytes peak_bytes host_us remote_gbs num_comm_sms error "
    "layers prompt tokens_per_s perplexity capacity_factor passes gemm_us comm_us dense_us "
    "optimizer_us busy_us commit device torch triton time"
).split()
GRAPH_CALLS = 10
EAGER_CALLS, MIN_EAGER_CALLS, EAGER_ROUNDS = 20, 5, 7
EAGER_US = 1e5
"""How long a round of eager calls may take that has more than MIN_EAGER_CALLS."""
MIN_REPLAYS, MAX_SECONDS = 100, 1.0
"""How few replays are enough if more would take longer than this."""


@triton.jit
def silu_mul_kernel(h, out, N, BLOCK: tl.constexpr):
    """out [rows, N] = silu(gate) * up for h [rows, 2 * N]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    gate = tl.load(h + row * 2 * N + columns, mask=inside).to(tl.float32)
    up = tl.load(h + row * 2 * N + N + columns, mask=inside).to(tl.float32)
    tl.store(out + row * N + columns, (gate * tl.sigmoid(gate) * up).to(tl.bfloat16), mask=inside)


def timed_pool(num_ranks: int, device: str = "cuda", **options: Any) -> RankPool:
    """A pool whose ranks have a GPU each. Ranks that share one take turns, and their times mean
    nothing."""
    num_gpus = torch.cuda.device_count()
    if device == "cuda" and num_gpus < num_ranks:
        raise typer.BadParameter(
            f"{num_ranks} ranks need as many GPUs, and there are {num_gpus}: times of ranks that "
            "share a GPU mean nothing",
            param_hint="--ranks",
        )
    return RankPool(num_ranks, device, **options)


def draw_topk(
    routing: str, num_tokens: int, num_experts: int, num_topk: int, seed: int
) -> torch.Tensor:
    """topk_idx int64 [T, K] on the GPU. uniform; zipf: expert e with weight 1 / (e' + 1), experts
    shuffled in the same way on all ranks; one_hot: half of the tokens have expert 0; empty_rank:
    the last quarter of the experts gets nothing."""
    generator = torch.Generator("cuda").manual_seed(seed)
    weights = torch.ones(num_experts, device="cuda")
    if routing == "zipf":
        order = torch.randperm(num_experts, generator=torch.Generator().manual_seed(0))
        weights = (1.0 / (1 + order.float())).cuda()
    if routing == "empty_rank":
        weights[-(num_experts // 4) :] = 0
    # The Gumbel trick: top-k of perturbed log-weights draws without replacement.
    noise = torch.empty(num_tokens, num_experts, device="cuda")
    noise.exponential_(generator=generator).log_().neg_()
    idx = (weights.log() + noise).topk(num_topk, dim=-1).indices
    if routing == "one_hot":
        half = idx[: num_tokens // 2]
        half[:, 0] = torch.where((half[:, 1:] == 0).any(1), half[:, 0], 0)
    return idx.contiguous()


def time_calls(call: Call, group: dist.ProcessGroup, rounds: int, repeats: int = 1) -> float:
    """Microseconds of one call from Python: the median over rounds of `repeats` calls, on the
    slowest rank."""
    times = [time_round(call, group, repeats) for _ in range(WARMUP_ROUNDS + rounds)]
    return sorted(times[WARMUP_ROUNDS:])[rounds // 2]


def time_round(call: Call, group: dist.ProcessGroup, repeats: int) -> float:
    """Microseconds of one of `repeats` calls from Python on the slowest rank."""
    torch.cuda.synchronize()
    dist.barrier(group)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return slowest(start.elapsed_time(end) * 1e3, group) / repeats


def calls_in_a_round(call: Call, group: dist.ProcessGroup) -> int:
    """As many as EAGER_US takes, from MIN_EAGER_CALLS to EAGER_CALLS; the same on all ranks."""
    affordable = int(EAGER_US / time_calls(call, group, 1))
    return min(EAGER_CALLS, max(MIN_EAGER_CALLS, affordable))


def time_in_turns(calls: Mapping[Any, Call], group: dist.ProcessGroup) -> dict[Any, float]:
    """Microseconds of one of each of these calls from Python: the medians over rounds in which they
    take turns, in their order and back. What is timed depends by up to 4% on what ran before it
    (bench/notes/training.md), so half of the calls of a turn are made before it is timed."""
    repeats = {name: calls_in_a_round(call, group) for name, call in calls.items()}
    times: dict[Any, list[float]] = {name: [] for name in calls}
    for number in range(WARMUP_ROUNDS + EAGER_ROUNDS):
        for name in [*calls][:: -1 if number % 2 else 1]:
            for _ in range(repeats[name]):
                calls[name]()
            times[name].append(time_round(calls[name], group, repeats[name]))
    return {name: round(median(one[WARMUP_ROUNDS:]), 2) for name, one in times.items()}


def time_eager(
    calls: Sequence[Call], group: dist.ProcessGroup, graph_us: float | None = None
) -> dict[str, float | None]:
    """The fields eager_us and eager_ratio of a result line.

    eager_us: microseconds of one call from Python, by CUDA events around a loop of calls, which
    takes `calls` in turns, as DeepEP's own benchmark does. The longer one of host and GPU decides.
    eager_ratio: eager_us over that of a call in a CUDA graph, where there is one.
    """
    turns = cycle(calls)

    def take_turn() -> None:
        next(turns)()

    us = time_calls(take_turn, group, EAGER_ROUNDS, calls_in_a_round(take_turn, group))
    ratio = None if graph_us is None else round(us / graph_us, 3)
    return {"eager_us": round(us, 2), "eager_ratio": ratio}


def time_replays(
    calls: Sequence[Call], group: dist.ProcessGroup, replays: int
) -> tuple[float, float]:
    """Microseconds of one call, the median and the 99th percentile over the replays of a CUDA graph
    of GRAPH_CALLS calls, which takes `calls` in turns.

    A replay takes as long as on the slowest rank, from the end of the one before it. The hosts are
    ahead of the GPUs all the time. No more replays than fit into MAX_SECONDS, but MIN_REPLAYS.
    """

    def compile_all() -> None:
        for call in calls:
            call()

    turns = chain([compile_all], cycle(calls))  # `capture` makes one call before

    def take_turn() -> None:
        next(turns)()

    graph = capture(take_turn, GRAPH_CALLS, group)

    def run(count: int) -> torch.Tensor:
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        start_together(group)
        ends[0].record()
        for end in ends[1:]:
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        milliseconds = [begin.elapsed_time(end) for begin, end in pairwise(ends)]
        times = torch.tensor(milliseconds, device="cuda")
        dist.all_reduce(times, op=dist.ReduceOp.MAX, group=group)
        return times * 1e3 / GRAPH_CALLS

    warmup = 10
    us = float(run(2 * warmup).median())
    affordable = int(MAX_SECONDS * 1e6 / (us * GRAPH_CALLS))
    times = run(warmup + min(replays, max(MIN_REPLAYS, affordable)))[warmup:]
    return float(times.median()), float(times.quantile(0.99))


def commit() -> str:
    """The commit that is measured; MOE_ENGINE_COMMIT where there is no repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return os.environ.get("MOE_ENGINE_COMMIT") or done.stdout.strip() or "unknown"


def save(bench: str, path: Path | None = None, **fields: Any) -> str:
    """Append one result line and return it; fields not given are null."""
    line = dict.fromkeys(FIELDS) | {
        "bench": bench,
        "commit": commit(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    unknown = fields.keys() - line.keys()
    assert not unknown, unknown
    text = json.dumps(line | fields)
    path = path or RESULTS / f"{bench}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text + "\n")
    return text
