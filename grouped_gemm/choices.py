"""The tiles of a grouped GEMM: those that were measured on this kind of GPU, else the predicted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from ..choice_cache import cache_path, keep_choice, problem_key, read_configs, warn
from ..errors import BackendError
from ..utils import next_power_of_2
from .config import GemmConfig, GemmProblem, candidates, predict

GEMMS = "gemm.json"
MAX_SLOWER = 1.5
"""Candidates predicted to take more than this many times the shortest time are not tried."""


@functools.cache
def _read_once(path: Path) -> dict[str, GemmConfig]:
    return read_configs(path, GemmConfig)


def _key(problem: GemmProblem, block_m: int | None) -> str:
    """Equal for problems that share a result: rows count by powers of two."""
    rounded = replace(problem, num_rows=next_power_of_2(problem.num_rows))
    return problem_key(asdict(rounded) | {"block_m": block_m})


def tuned(problem: GemmProblem, block_m: int | None = None) -> GemmConfig | None:
    """The measured choice for a problem, None where there is none, or none that would be tried."""
    stored = _read_once(cache_path(GEMMS))
    if not stored or problem.capability is None:
        return None
    found = stored.get(_key(problem, block_m))
    if found is None or replace(found, num_splits=1) in candidates(problem, block_m):
        return found
    warn(cache_path(GEMMS), f"has {found} for {problem}, which is never tried")
    return None


@functools.lru_cache(4096)
def best_config(problem: GemmProblem, block_m: int | None = None) -> GemmConfig:
    """The tiles for a problem: those that were measured, else those predicted."""
    return tuned(problem, block_m) or GemmConfig.choose(problem, block_m)


def tune(
    problem: GemmProblem, run: Callable[[GemmConfig], float], block_m: int | None = None
) -> tuple[GemmConfig, float]:
    """Measure the promising candidates with `run`, which returns microseconds, and keep the best.
    Returns it with its time."""
    shapes = list(candidates(problem, block_m))
    limit = MAX_SLOWER * min(predict(config, problem).us for config in shapes)
    times = {config: run(config) for config in shapes if predict(config, problem).us <= limit}
    best = min(times, key=lambda config: times[config])
    if times[best] == float("inf"):
        raise BackendError("the GPU refused every tile shape; there is nothing to keep.")
    keep_choice(cache_path(GEMMS), _key(problem, block_m), asdict(best))
    _read_once.cache_clear()
    best_config.cache_clear()
    return best, times[best]
