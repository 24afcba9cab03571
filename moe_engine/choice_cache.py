"""Choices that were measured on this kind of GPU, kept in JSON files: the tiles of a grouped GEMM
(`grouped_gemm/choices.py`), and how a layer runs (`layer_config.py`)."""

from __future__ import annotations

import json
import os
import shutil
import stat
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from .device.lang import INTERPRETED
from .errors import BackendError, ShapeError

MOST_BYTES = 4 << 20
"""Of a file that is read: thousands of choices, and rank 0 can still send them to the others."""


class Config(Protocol):
    """A dataclass that refuses numbers which make no sense."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def check(self) -> None: ...


C = TypeVar("C", bound=Config)


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
        warn(path, f"cannot be read ({error})")
        return {}
    return {key.removeprefix(begin): choice for key, choice in choices if key.startswith(begin)}


def read_configs(path: Path, kind: Callable[..., C]) -> dict[str, C]:
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
        warn(path, f"has {len(choices) - len(found)} choices that this version cannot take")
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


def warn(path: Path, why: str) -> None:
    """Say once why a file, or a part of it, is not used."""
    if path not in _warned:
        _warned.add(path)
        warnings.warn(
            f"{path} {why}. This is ignored: remove the file, or set MOE_ENGINE_CACHE to another "
            "folder.",
            stacklevel=2,
        )


def problem_key(fields: dict[str, Any]) -> str:
    """How a file names a problem: "max_tokens=8 hidden=16" for these two fields."""
    return " ".join(f"{name}={value}" for name, value in fields.items())
