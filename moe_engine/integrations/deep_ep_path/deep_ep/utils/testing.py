"""Timers of DeepEP's tests."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import torch
import torch.distributed as dist

FLUSHED_BYTES = 256 << 20
"""More than the L2 cache of any GPU."""


def bench(
    fn: Callable[[], Any],
    num_warmups: int = 50,
    num_tests: int = 50,
    post_fn: Callable[[], Any] | None = None,
    flush_l2: bool = True,
) -> tuple[float, float, float]:
    """Seconds of GPU time of a call, by CUDA events: (mean, least, most), without the first."""
    for _ in range(num_warmups):
        fn()
    times = []
    for _ in range(num_tests):
        _flush_l2(flush_l2)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        fn()
        end.record()
        times.append((begin, end))
        if post_fn is not None:
            post_fn()
    torch.cuda.synchronize()
    seconds = [begin.elapsed_time(end) / 1e3 for begin, end in times[1:]]
    return sum(seconds) / len(seconds), min(seconds), max(seconds)


def bench_kineto(
    fn: Callable[[], Any],
    kernel_names: str | tuple[str, ...],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: str | None = None,
    flush_l2: bool = True,
    barrier_comm_profiling: bool = False,
    num_kernels_per_period: int = 1,
    barrier: Callable[[], Any] | None = None,
) -> Any:
    """Mean seconds of the kernels whose names contain kernel_names, by torch's profiler: a number
    for a name, a tuple for a tuple. With num_kernels_per_period > 1 it is a list for each name, by
    the place of a kernel among so many.

    The kernels here are not named as DeepEP's are. LookupError says so where a name fits none: run
    DeepEP's tests of V2 with --skip-perf-test.
    """
    names = (kernel_names,) if isinstance(kernel_names, str) else kernel_names
    fn()
    torch.cuda.synchronize()
    token = torch.ones(1, dtype=torch.float32, device="cuda")
    with ExitStack() as stack:
        if suppress_kineto_output:
            stack.enter_context(_silence())
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(num_tests):
                _flush_l2(flush_l2)
                if barrier_comm_profiling:  # so that ranks launch before any of them begins
                    torch.cuda._sleep(20_000_000)
                    dist.all_reduce(token) if barrier is None else barrier()
                fn()
            torch.cuda.synchronize()
    if trace_path is not None:
        profiler.export_chrome_trace(trace_path)
    kernels = sorted(profiler.events(), key=lambda one: one.time_range.start)
    kernels = [one for one in kernels if one.device_type == torch.autograd.DeviceType.CUDA]
    found = [
        _durations([one for one in kernels if name in one.name], name, num_kernels_per_period)
        for name in names
    ]
    return tuple(found) if isinstance(kernel_names, tuple) else found[0]


def _durations(kernels: Sequence[Any], name: str, period: int) -> float | list[float]:
    """Mean seconds of kernels; for period > 1 one for each place among so many."""
    if not kernels:
        raise LookupError(
            f"no kernel has {name!r} in its name: moe_engine's kernels are not DeepEP's. Run its "
            "tests of ElasticBuffer with --skip-perf-test."
        )
    seconds = [one.time_range.elapsed_us() / 1e6 for one in kernels]
    means = [sum(part) / len(part) for part in (seconds[n::period] for n in range(period))]
    return means if period > 1 else means[0]


def _flush_l2(is_wanted: bool) -> None:
    if is_wanted:
        torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda").zero_()


@contextmanager
def _silence() -> Any:
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield
