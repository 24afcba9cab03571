"""JSON files of choices that were measured on this kind of GPU: for each problem, named by a key,
the config that was the fastest."""

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

from .errors import BackendError, ShapeError
from .hardware import gpu

MAX_BYTES = 4 << 20
"""A larger file is not read: this much holds thousands of choices, and rank 0 can still send them
to the other ranks."""


class Config(Protocol):
    """A dataclass that refuses numbers which make no sense."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def check(self) -> None: ...


C = TypeVar("C", bound=Config)


def cache_path(name: str) -> Path:
    """The path of a file of choices, in $MOE_ENGINE_CACHE, else in ~/.cache/moe_engine."""
    folder = os.environ.get("MOE_ENGINE_CACHE") or os.path.expanduser("~/.cache/moe_engine")
    return Path(folder) / name


def device_name() -> str:
    """The kind of GPU that choices are measured for, "cpu" where kernels are interpreted."""
    return gpu().name


def read_choices(path: Path, kind: Callable[..., C]) -> dict[str, C]:
    """The configs for this kind of device by key; none without a file. It warns of a file that
    `keep_choice` did not write, and of choices that this version cannot take, and leaves them out.
    """
    begin = f"{device_name()} "
    try:
        stored = _read(path)
    except (OSError, ValueError) as error:
        warn(path, f"cannot be read ({error})")
        return {}
    choices = {key.removeprefix(begin): stored[key] for key in stored if key.startswith(begin)}
    configs = {}
    for key, choice in choices.items():
        try:
            config = kind(**choice)
            config.check()
        except (TypeError, ShapeError, RecursionError):
            continue
        if asdict(config) == choice:
            configs[key] = config
    if len(configs) < len(choices):
        warn(path, f"has {len(choices) - len(configs)} choices that this version cannot take")
    return configs


num_kept = 0
"""How many choices this process has kept."""


def keep_choice(path: Path, key: str, choice: dict[str, Any]) -> None:
    """Add a choice to a file; calls that were prepared are prepared anew. A process that reads the
    file meanwhile sees the old one or the new one; of two choices that processes add at once, one
    may be lost. Raises BackendError where the file cannot be written, or holds what `keep_choice`
    never writes."""
    global num_kept
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        choices = _read(path) | {f"{device_name()} {key}": choice}
        text = json.dumps(choices, indent=1)
        partial = NamedTemporaryFile("w", dir=path.parent, suffix=path.suffix, delete=False)
        try:
            with partial:
                partial.write(text)
            if path.exists():
                shutil.copymode(path, partial.name)  # others may share it
            Path(partial.name).replace(path)
        except BaseException:
            Path(partial.name).unlink(missing_ok=True)
            raise
        num_kept += 1
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
    """What a file holds; an empty dict without one. Raises OSError where it cannot be read,
    ValueError for what `keep_choice` never writes."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError("it is no regular file")
            text = file.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    if len(text) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES} bytes")
    try:
        stored = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(stored, dict):
        raise ValueError(f"it holds a {type(stored).__name__}")
    return stored


def _open_at_once(path: str, flags: int) -> int:
    """`os.open` that does not wait for the writer of a FIFO."""
    return os.open(path, flags | os.O_NONBLOCK)


_warned: set[Path] = set()


def warn(path: Path, why: str) -> None:
    """Warn once for each file that it, or a part of it, is not used."""
    if path not in _warned:
        _warned.add(path)
        warnings.warn(
            f"{path} {why}. This is ignored: remove the file, or set MOE_ENGINE_CACHE to another "
            "folder.",
            stacklevel=2,
        )


def problem_key(fields: dict[str, Any]) -> str:
    """The key of a problem with these fields, such as "max_tokens=8 hidden=16"."""
    return " ".join(f"{name}={value}" for name, value in fields.items())
