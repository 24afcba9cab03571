"""Inputs that tests share: routings of every kind, for 1 to 4 ranks, and comparisons."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

from moe_engine import Buffer, symm
from moe_engine.device.context import ContextField
from moe_engine.device.lang import INTERPRETED
from moe_engine.errors import BackendError

ROUTINGS = ["uniform", "skewed", "one_hot", "empty_rank", "holes", "duplicates", "nothing"]


def routings(*num_ranks: int) -> list[Any]:
    """(kind, number of ranks) of each routing on each number; all but one of a kind are slow."""
    return one_of_each(ROUTINGS, *num_ranks)


def one_of_each(kinds: Iterable[Any], *num_ranks: int) -> list[Any]:
    """(kind, number of ranks) of every kind on every number; all but one of a kind are slow."""
    return [
        pytest.param(
            kind, num, marks=() if at == (index - 1) % len(num_ranks) else pytest.mark.slow
        )
        for index, kind in enumerate(kinds)
        for at, num in enumerate(num_ranks)
    ]


def slow_unless(few: Collection[Any], *all_values: Iterable[Any]) -> list[Any]:
    """Parameters for every combination of the values; those that are not among `few` are slow."""
    return [
        pytest.param(*each, marks=() if each in few else pytest.mark.slow)
        for each in product(*all_values)
    ]


def few_examples() -> int:
    """How many examples of a property run where each takes ranks: half as many in a quick run."""
    num_examples = settings.default.max_examples
    return num_examples if num_examples >= 30 else num_examples // 2


def device() -> torch.device:
    """The device of this rank: its GPU, or the CPU under the interpreter."""
    if torch.cuda.is_available() and not INTERPRETED:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def skip_without_interpreter() -> None:
    """For tests that emulate ranks, also where there are GPUs."""
    try:
        symm.check_emulation_packages()
    except BackendError as error:
        pytest.skip(str(error))


def skip_where_shapes_compile(pool) -> None:
    """Properties over shapes are for the interpreter: on a GPU each new shape compiles."""
    if pool.device == "cuda":
        pytest.skip("each new shape compiles on a GPU")


def route(kind: str, num_tokens: int, num_experts: int, num_topk: int, seed: int) -> torch.Tensor:
    """topk_idx int64 [T, K] of one rank.

    uniform: distinct experts. skewed: Zipf over experts. one_hot: every token to expert 0 first.
    empty_rank: only the first half of the experts. holes: a third of the ids are -1.
    duplicates: experts drawn with replacement. nothing: all -1.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = torch.ones(num_experts)
    if kind == "skewed":
        weights = 1.0 / torch.arange(1, num_experts + 1)
    if kind == "empty_rank":
        weights[max(num_topk, num_experts // 2) :] = 0
    if num_tokens == 0:
        return torch.empty(0, num_topk, dtype=torch.int64)
    idx = torch.multinomial(
        weights.expand(num_tokens, -1), num_topk, kind == "duplicates", generator=generator
    )
    if kind == "one_hot":
        idx = torch.where(idx == 0, idx[:, :1], idx)
        idx[:, 0] = 0
    if kind == "holes":
        idx[torch.rand(idx.shape, generator=generator) < 0.34] = -1
    if kind == "nothing":
        idx[:] = -1
    return idx


def tokens(
    num_tokens: int, hidden: int, num_topk: int, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x [T, H], topk_weights float32 [T, K]) of one rank."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, hidden, generator=generator).to(dtype)
    return x, torch.rand(num_tokens, num_topk, generator=generator)


def used_buffer(
    group: Any, make: Any, use: Any, least_s: float | None = None, times: float = 3.0
) -> tuple[Any, float, Any]:
    """(Buffer, its deadline in seconds, what `use` returned), for tests of waits in vain.

    The Buffer is `make(timeout_s=...)`, after a first `use(buffer)`. The deadline is the same on
    all ranks and scales with the machine: `times` the time that another such Buffer and its use
    take now, at least `least_s` (2 s for each rank). So no rank misses it that is only slow.
    """
    least_s = 2.0 * group.size() if least_s is None else least_s
    dist.barrier(group)
    start = time.monotonic()
    buffer = make(timeout_s=None)
    use(buffer)
    taken_s = torch.tensor(time.monotonic() - start, dtype=torch.float64)
    dist.all_reduce(taken_s, dist.ReduceOp.MAX, group)
    buffer.destroy()
    timeout_s = max(least_s, times * float(taken_s))
    buffer = make(timeout_s=timeout_s)
    result = use(buffer)
    if buffer.backend != "collective":  # the next calls run functions that a test may replace
        buffer._engine.slots.calls.clear()
    dist.barrier(group)
    return buffer, timeout_s, result


def shared_files() -> set[str]:
    """What lies in /dev/shm, but for semaphores: other tests make these at the same time, and the
    package makes none."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


@contextmanager
def filled_memory() -> Iterator[None]:
    """New tensors hold NaN or the largest integer, so that nothing is right by chance."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """||out - expected|| / ||expected|| in fp64; NaN counts as infinite."""
    difference = (out.double() - expected.double()).norm() / expected.double().norm().clamp_min(
        1e-30
    )
    return float(difference.nan_to_num(float("inf")))


def num_low_latency_calls(buffer: Buffer) -> int:
    """Low-latency calls that this rank has made; a layer of few tokens is two."""
    memories = buffer._low_latency.memories if buffer._low_latency else ()
    return sum(int(memory.context.fields[ContextField.EPOCH]) for memory in memories)
