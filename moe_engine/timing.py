"""Times of calls on GPUs, from CUDA graphs: so the GPU is timed, and not Python."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from .torch_privates import sleep

WARMUP_ROUNDS = 2

Call = Callable[[], object]


def now_s(device: torch.device) -> float:
    """Seconds on the host's clock, once the device has done what was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def time_graph(
    call: Call, repeats: int, rounds: int, group: dist.ProcessGroup | None = None
) -> float:
    """Microseconds of one call: the median over `rounds` replays of a CUDA graph of `repeats`
    calls.

    With a group it is collective over its ranks: they begin each replay together, and a replay
    takes as long as on the slowest of them.
    """
    graph = capture(call, repeats, group)
    times = []
    for _ in range(WARMUP_ROUNDS + rounds):
        if group is not None:
            start_together(group)
        times.append(slowest(replay_us(graph), group) / repeats)
    return sorted(times[WARMUP_ROUNDS:])[rounds // 2]


def capture(
    call: Call, repeats: int, group: dist.ProcessGroup | None = None
) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `repeats` calls. It makes one call before, which compiles its kernels."""
    call()
    torch.cuda.synchronize()
    if group is not None:
        dist.barrier(group)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):  # torch.cuda.graph would empty the memory cache
        graph.capture_begin()
        for _ in range(repeats):
            call()
        graph.capture_end()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, replays: int = 1) -> float:
    """Microseconds of so many replays, one after the other; it waits for them."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3


def start_together(group: dist.ProcessGroup) -> None:
    """Let what the ranks launch next begin on all of them at the same time. The GPUs are kept busy
    until the hosts are ahead of them; then they wait for one another."""
    torch.cuda.synchronize()
    dist.barrier(group)
    sleep(1_000_000)
    dist.all_reduce(torch.ones(1, device="cuda"), group=group)


def slowest(value: float, group: dist.ProcessGroup | None) -> float:
    """The largest value of any rank of a group; collective."""
    if group is None:
        return value
    largest = torch.tensor(value, dtype=torch.float64, device="cpu")
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return float(largest)
