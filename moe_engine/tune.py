"""Choices that were measured on this kind of GPU, kept in files: the tiles of a grouped GEMM, and
how a layer runs."""

from __future__ import annotations

import functools
import json
import os
import shutil
import stat
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar

import torch

from .config import GemmConfig, GemmProblem, candidates, predict
from .errors import BackendError, ShapeError
from .lang import INTERPRETED
from .layer_config import LayerConfig, LayerProblem
from .utils import next_power_of_2

GEMMS, LAYERS = "gemm.json", "layer.json"
MAX_SLOWER = 1.5
"""Candidates predicted to take more than this many times the shortest time are not tried."""
MOST_BYTES = 4 << 20
"""Of a file that is read: thousands of choices, and rank 0 can still send them to the others."""
C = TypeVar("C", GemmConfig, LayerConfig)


# --- Files ---------------------------------------------------------------------------------------


def cache_path(name: str) -> Path:
    """Where choices are kept: a file in $MOE_ENGINE_CACHE, else in ~/.cache/moe_engine."""
    folder = os.environ.get("MOE_ENGINE_CACHE") or os.path.expanduser("~/.cache/moe_engine")
    return Path(folder) / name


def device_name() -> str:
    """What choices are measured for: a kind of GPU, or "cpu" where kernels are interpreted."""
    on_gpu = torch.cuda.is_available() and not INTERPRETED
    return torch.cuda.get_device_name() if on_gpu else "cpu"


def read_choices(path: Path) -> dict[str, Any]:
    """The choices for this kind of device, by problem; none without a file. Warns of a file that is
    not ours."""
    begin = f"{device_name()} "
    try:
        choices = _read(path).items()
    except (OSError, ValueError) as error:
        _warn(path, f"cannot be read ({error})")
        return {}
    return {key.removeprefix(begin): choice for key, choice in choices if key.startswith(begin)}


def read_configs(path: Path, kind: type[C]) -> dict[str, C]:
    """`read_choices` as configs. Warns of those that this version cannot take, and leaves them
    out."""
    found = {}
    choices = read_choices(path)
    for key, choice in choices.items():
        try:
            config = kind(**choice)
            config.check()
        except (TypeError, ShapeError, RecursionError):
            continue
        if asdict(config) == choice:
            found[key] = config
    if len(found) < len(choices):
        _warn(path, f"has {len(choices) - len(found)} choices that this version cannot take")
    return found


def keep_choice(path: Path, problem: str, choice: dict[str, Any]) -> None:
    """Add a choice to a file. Who reads it meanwhile sees the old one or the new; of two who add at
    once one may be lost. BackendError where it cannot be written, or holds what is not ours."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        choices = _read(path) | {f"{device_name()} {problem}": choice}
        text = json.dumps(choices, indent=1)
        with NamedTemporaryFile("w", dir=path.parent, suffix=path.suffix, delete=False) as partial:
            partial.write(text)
        if path.exists():
            shutil.copymode(path, partial.name)  # others may share it
        Path(partial.name).replace(path)
    except OSError as error:
        raise BackendError(
            f"{choice} was measured, but cannot be kept: {error}. Set MOE_ENGINE_CACHE to a folder "
            "that can be written."
        ) from None
    except (ValueError, RecursionError) as error:
        raise BackendError(
            f"{choice} was measured, but is not kept: {path} exists and is not ours ({error}). "
            "Remove it, or set MOE_ENGINE_CACHE to another folder."
        ) from None


def _read(path: Path) -> dict[str, Any]:
    """What a file holds, nothing without one. OSError where it cannot be read, ValueError for what
    `keep_choice` never writes."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError("it is no regular file")
            text = file.read(MOST_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    if len(text) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    try:
        stored = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(stored, dict):
        raise ValueError(f"it holds a {type(stored).__name__}")
    return stored


def _open_at_once(path: str, flags: int) -> int:
    """Does not wait for the writer of a FIFO."""
    return os.open(path, flags | os.O_NONBLOCK)


_warned: set[Path] = set()


def _warn(path: Path, why: str) -> None:
    """Say once why a file, or a part of it, is not used."""
    if path not in _warned:
        _warned.add(path)
        warnings.warn(
            f"{path} {why}. This is ignored: remove the file, or set MOE_ENGINE_CACHE to another "
            "folder.",
            stacklevel=2,
        )


def _fields(fields: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in fields.items())


# --- Tiles of a grouped GEMM ---------------------------------------------------------------------


@functools.cache
def _read_once(path: Path) -> dict[str, GemmConfig]:
    return read_configs(path, GemmConfig)


def _key(problem: GemmProblem, block_m: int | None) -> str:
    """Equal for problems that share a result: rows count by powers of two."""
    rounded = replace(problem, num_rows=next_power_of_2(problem.num_rows))
    return _fields(asdict(rounded) | {"block_m": block_m})


def tuned(problem: GemmProblem, block_m: int | None = None) -> GemmConfig | None:
    """The measured choice for a problem, None where there is none, or none that would be tried."""
    stored = _read_once(cache_path(GEMMS))
    if not stored or problem.capability is None:
        return None
    found = stored.get(_key(problem, block_m))
    if found is None or replace(found, num_splits=1) in candidates(problem, block_m):
        return found
    _warn(cache_path(GEMMS), f"has {found} for {problem}, which is never tried")
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
    keep_choice(cache_path(GEMMS), _key(problem, block_m), asdict(best))
    _read_once.cache_clear()
    best_config.cache_clear()
    return best, times[best]


# --- Layers --------------------------------------------------------------------------------------


def _layer_key(problem: LayerProblem) -> str:
    """Equal for layers that share a result: tokens count by powers of two."""
    return _fields(asdict(replace(problem, max_tokens=next_power_of_2(problem.max_tokens))))


def keep_layer(problem: LayerProblem, config: LayerConfig) -> None:
    """Let Buffers that are made from now on run such layers so."""
    keep_choice(cache_path(LAYERS), _layer_key(problem), asdict(config))


@dataclass(frozen=True, slots=True)
class LayerChoices:
    """How layers run: as the user says, else as was measured, else as is predicted.

    Ranks that differ in their stages would wait for one another in vain, and a file may change
    between the reads of two ranks. So all ranks of a Buffer take `measured` from rank 0, which
    reads the file when the Buffer is made: a choice that is kept later is for later Buffers.
    """

    user: LayerConfig | None = None
    measured: Mapping[str, LayerConfig] = field(default_factory=dict)

    def of(self, problem: LayerProblem) -> LayerConfig:
        """The choice for a layer."""
        return self.user or self.found(problem) or LayerConfig.choose(problem)

    def found(self, problem: LayerProblem) -> LayerConfig | None:
        """What was measured for a layer, None where nothing was."""
        return self.measured.get(_layer_key(problem)) if self.measured else None


def measured_layers() -> dict[str, LayerConfig]:
    """The choices of `keep_layer` for this kind of device; those of other versions are left out."""
    return read_configs(cache_path(LAYERS), LayerConfig)
