"""Files of choices that are not as this package writes them: one warning, and no call sees them."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import asdict
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any
from unittest import mock

import pytest
import torch

from moe_engine import LayerConfig, choice_cache, layer_config
from moe_engine.errors import BackendError, DtypeError, ShapeError
from moe_engine.grouped_gemm import config as tiles
from moe_engine.grouped_gemm.config import GemmConfig, GemmProblem, candidates
from moe_engine.layer_config import LayerProblem

GEMM = GemmProblem(torch.bfloat16, 65536, 32, 2048, 768)
LAYER = LayerProblem(2, 9, 4, 2, 16, 8)
CHOICES = {"gemm.json": next(candidates(GEMM)), "layer.json": LayerConfig(num_stages=5)}
KEYS = {"gemm.json": tiles._key(GEMM, None), "layer.json": layer_config._key(LAYER)}
names = pytest.mark.parametrize("name", CHOICES)


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("MOE_ENGINE_CACHE", str(tmp_path))
    return tmp_path


def found(name: str) -> GemmConfig | LayerConfig | None:
    """What calls take from the file."""
    tiles._read_once.cache_clear()
    if name == "gemm.json":
        return tiles.measured(GEMM)
    return layer_config.LayerChoices(kept=layer_config.kept_layers()).measured(LAYER)


def keep(name: str) -> None:
    choice_cache.keep_choice(choice_cache.cache_path(name), KEYS[name], asdict(CHOICES[name]))


def found_with_one_warning(name: str) -> Any:
    """What calls take from a file that another process has not warned of yet."""
    with pytest.warns(UserWarning) as caught:
        first = found(name)
    assert [str(choice_cache.cache_path(name)) in str(one.message) for one in caught] == [True]
    assert "MOE_ENGINE_CACHE" in str(caught[0].message)
    assert caught[0].filename.endswith("choice_cache.py")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found(name) == first
    return first


def write(path: Path, content: Any) -> None:
    """Make what a test is about at the path of a file."""
    if content == "fifo":
        os.mkfifo(path)
    elif content == "folder":
        path.mkdir()
    elif content == "device":
        path.symlink_to("/dev/zero")
    elif content == "loop":
        path.symlink_to(path)
    elif content == "large":
        path.write_text(json.dumps({"x": "y" * choice_cache.MAX_BYTES}))
    else:
        path.write_bytes(content)


NOT_OURS = {
    "nested": (b"[" * 100_000, "nested too deeply"),
    "nested objects": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
    "list": (b"[]", "it holds a list"),
    "number": (b"1", "it holds a int"),
    "null": (b"null", "it holds a NoneType"),
    "empty": (b"", "Expecting value"),
    "cut off": (b'{"', "Unterminated string"),
    "bytes": (b"\xff\xfe\x00", "can't decode"),
    "long number": (b'{"a": ' + b"9" * 100_000 + b"}", "limit"),
    "fifo": ("fifo", "no regular file"),
    "folder": ("folder", "Is a directory"),
    "device": ("device", "no regular file"),
    "loop": ("loop", "symbolic links"),
    "large": ("large", "more than"),
}


def state(path: Path) -> tuple[Any, ...]:
    """What changes if a file is replaced, or another one left in its folder."""
    status = path.lstat()
    return status.st_ino, status.st_mtime_ns, status.st_mode, os.listdir(path.parent)


@names
@pytest.mark.parametrize(("content", "why"), NOT_OURS.values(), ids=NOT_OURS)
def test_a_file_that_is_not_ours(name: str, content: Any, why: str) -> None:
    """It is left as it is by who would add a choice, too."""
    path = choice_cache.cache_path(name)
    write(path, content)
    before = state(path)
    with pytest.warns(UserWarning, match=rf"cannot be read \(.*{why}"):
        choice_cache.read_choices(path, dict)
    choice_cache._warned.clear()
    assert found_with_one_warning(name) is None
    with pytest.raises(BackendError, match=r"was measured, but (is not|cannot be) kept.*CACHE"):
        keep(name)
    assert state(path) == before


@names
def test_what_comes_through_a_fifo_does_not_count(name: str) -> None:
    keep(name)
    path = choice_cache.cache_path(name)
    text = path.read_bytes()
    path.unlink()
    os.mkfifo(path)
    with open(os.open(path, os.O_RDWR), "wb", buffering=0) as fifo:
        fifo.write(text)
        assert found_with_one_warning(name) is None


@names
def test_no_file_is_no_news(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for folder in (tmp_path, tmp_path / "none", Path(os.devnull)):
            monkeypatch.setenv("MOE_ENGINE_CACHE", str(folder))
            assert found(name) is None
    with pytest.raises(BackendError, match="was measured, but cannot be kept"):
        keep(name)  # in the last of these


@names
def test_a_file_of_others_is_not_replaced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the folder is writable."""
    keep(name)
    before = choice_cache.cache_path(name).read_bytes()
    real = os.open

    def refuse(path: Any, *args: Any, **more: Any) -> int:
        if str(path).endswith(name):
            raise PermissionError(13, "Permission denied", path)
        return real(path, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        assert found_with_one_warning(name) is None
        with pytest.raises(BackendError, match=r"cannot be kept: \[Errno 13\].*CACHE"):
            keep(name)
    assert choice_cache.cache_path(name).read_bytes() == before
    assert found(name) == CHOICES[name]


@names
def test_a_shared_file_stays_shared(name: str) -> None:
    keep(name)
    path = choice_cache.cache_path(name)
    path.chmod(0o664)
    choice_cache.keep_choice(path, "another", {})
    assert path.stat().st_mode & 0o777 == 0o664


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def is_absurd(field: str, value: Any) -> bool:
    """Whether a field of CHOICES cannot have the value."""
    if field in ("claims_tiles", "specialized") and value in (True, False, 0):
        return field == "specialized" and value is True  # with other tiles than those that are
    return field != "num_own_stages" or value is False or value != 0


VALUES = [True, False, 4.0, 10**30, -1, 0, "4", "", None, [], {}, [4], {"a": 4}, 1e999, nested(700)]
ABSURD = [
    pytest.param(name, field, value, id=f"{name}-{field}-{str(value)[:20]}")
    for name, choice in CHOICES.items()
    for field in asdict(choice)
    for value in VALUES
    if is_absurd(field, value)
]


@pytest.mark.parametrize(("name", "field", "value"), ABSURD)
def test_absurd_values(name: str, field: str, value: Any) -> None:
    """A choice for another problem stands."""
    other = asdict(CHOICES[name])
    choices = {KEYS[name]: other | {field: value}, "another": other}
    stored = {f"{choice_cache.device_name()} {key}": choice for key, choice in choices.items()}
    choice_cache.cache_path(name).write_text(json.dumps(stored))
    assert found_with_one_warning(name) is None
    kind = type(CHOICES[name])
    assert choice_cache.read_choices(choice_cache.cache_path(name), kind) == {
        "another": CHOICES[name]
    }
    if value != nested(700):
        with pytest.raises((ShapeError, DtypeError), match=field):
            kind(**other | {field: value}).check()


@names
@pytest.mark.parametrize("choice", [{}, [], "abc", 4, None, {"check": 1}, {"num_stages": 4}])
def test_choices_that_are_none(name: str, choice: Any) -> None:
    keep(name)
    path = choice_cache.cache_path(name)
    path.write_text(json.dumps(dict.fromkeys(json.loads(path.read_text()), choice)))
    assert found_with_one_warning(name) is None


def test_tiles_that_the_tuner_never_tries() -> None:
    """They may give wrong results, or fit no GPU: another block_m than the schedule's, say."""
    (high,) = [c for c in candidates(GEMM) if c.block_m == 128]
    path = choice_cache.cache_path(tiles.GEMMS)
    choice_cache.keep_choice(path, tiles._key(GEMM, 64), asdict(high))
    with pytest.warns(UserWarning, match="never tried"):
        assert tiles.measured(GEMM, 64) is None
    tiles._read_once.cache_clear()
    split = GemmConfig(64, 128, 128, 4, 4, num_splits=8)
    choice_cache.keep_choice(path, tiles._key(GEMM, 64), asdict(split))
    assert tiles.measured(GEMM, 64) == split


@pytest.mark.parametrize("field", ["block_m", "block_n", "block_k", "num_warps", "subtiles"])
def test_tiles_are_powers_of_two(field: str) -> None:
    with pytest.raises(ShapeError, match=f"'{field}': 24.*powers of 2"):
        GemmConfig(**asdict(CHOICES["gemm.json"]) | {field: 24}).check()


def test_all_that_is_chosen_passes() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float8_e4m3fn):
        for capability in (None, (8, 0), (9, 0), (10, 0)):
            for rows in (1, 1000, 100_000):
                problem = GemmProblem(dtype, rows, 8, 256, 4096, capability=capability)
                for config in candidates(problem):
                    config.check()
                GemmConfig.for_weights(problem, 2).check()


@names
def test_a_full_disk_leaves_no_files(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **more: Any) -> Any:
        file = NamedTemporaryFile(*args, **more)
        file.write = mock.Mock(side_effect=OSError(28, "No space left on device"))
        return file

    monkeypatch.setattr(choice_cache, "NamedTemporaryFile", full)
    with pytest.raises(BackendError, match="No space left"):
        choice_cache.keep_choice(folder / name, KEYS[name], asdict(CHOICES[name]))
    assert list(folder.iterdir()) == []
