"""Tile shapes that were measured on this kind of GPU, kept in a file."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch

from .config import GemmConfig, GemmProblem, candidates, predict
from .errors import BackendError
from .slots import next_power_of_2

MAX_SLOWER = 1.5
"""Candidates predicted to take more than this many times the shortest time are not tried."""


def cache_path() -> Path:
    """Where results are kept: a file in $MOE_ENGINE_CACHE, else in ~/.cache/moe_engine."""
    folder = os.environ.get("MOE_ENGINE_CACHE") or Path.home() / ".cache" / "moe_engine"
    return Path(folder) / "gemm.json"


@functools.cache
def _stored(path: Path) -> dict[str, dict[str, int]]:
    try:
        stored = json.loads(path.read_text())
    except (OSError, ValueError):  # none yet, or not ours
        return {}
    return stored if isinstance(stored, dict) else {}


def _key(problem: GemmProblem, block_m: int | None) -> str:
    """Equal for problems that share a result: rows count by powers of two."""
    fields = asdict(replace(problem, num_rows=next_power_of_2(problem.num_rows))) | {
        "block_m": block_m
    }
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return " ".join([device, *(f"{name}={value}" for name, value in fields.items())])


def tuned(problem: GemmProblem, block_m: int | None = None) -> GemmConfig | None:
    """The measured choice for a problem, None where there is none."""
    stored = _stored(cache_path())
    if not stored or problem.capability is None:
        return None
    found = stored.get(_key(problem, block_m))
    try:
        return None if found is None else GemmConfig(**found)
    except TypeError:  # of another version
        return None


@functools.lru_cache(4096)
def best_config(problem: GemmProblem, block_m: int | None = None) -> GemmConfig:
    """The tiles for a problem: those that were measured, else those that `config.py` predicts."""
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
    path = cache_path()
    _stored.cache_clear()  # another process may have written since
    path.parent.mkdir(parents=True, exist_ok=True)
    stored = _stored(path) | {_key(problem, block_m): asdict(best)}
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(stored, indent=1))
    partial.replace(path)
    _stored.cache_clear()
    best_config.cache_clear()
    return best, times[best]
