"""What the commands say to bad input, before any work."""

from __future__ import annotations

import re
import subprocess
import sys
from os import W_OK
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from click.testing import Result
from typer.testing import CliRunner

from moe_engine import BackendError
from moe_engine.emulation import RankError, RankPool
from moe_engine.tools import cli, option_checks

GEMM = "gemm --rows 10 --experts 4 --columns 16 --depth 16"
LAYER = "layer --tokens 8 --ranks 2 --experts 4 --topk 2 --hidden 16 --intermediate 16"
TUNE = "tune --experts 4 --topk 2 --hidden 16 --intermediate 16 --ranks 2"
TRACE = "trace --model tiny --ranks 2"
DEMO = "demo --model mixtral --ranks 2"


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """What is refused is refused before ranks start, and where there are no GPUs."""

    def start(*_: object, **__: object) -> None:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(RankPool, "run", start)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def call(command: str, *more: str) -> Result:
    return CliRunner().invoke(cli.app, [*command.split(), *more], env={"COLUMNS": "300"})


def told(result: Result) -> str:
    """The text of a message, and no traceback."""
    assert isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (GEMM.replace("columns 16", "columns 12"), "columns is 12; it must be a multiple of 8"),
        (GEMM.replace("depth 16", "depth 9"), "depth is 9; it must be a multiple of 8"),
        (f"{GEMM} --activation relu", "it must be one of"),
        (LAYER.replace("ranks 2", "ranks 3"), "4 experts do not divide among 3 ranks"),
        (LAYER.replace("topk 2", "topk 5"), "top-5 of 4 experts"),
        (LAYER.replace("hidden 16", "hidden 12"), "hidden is 12; it must be a multiple of 8"),
        (TUNE.replace("intermediate 16", "intermediate 9"), "intermediate is 9"),
        (TUNE.replace("topk 2", "topk 5"), "top-5 of 4 experts"),
        ("tune --model gpt", "the model is 'gpt'; there are mixtral-8x7b"),
        ("tune --model qwen3-30b", "qwen3-30b on 4 ranks needs as many GPUs, and there are 0"),
        ("trace --model deepseek-v3 --ranks 2", "deepseek-v3 on 2 ranks needs as many GPUs"),
        (f"{TRACE} --path /no/such/trace.json", "--path: there is no folder /no/such; make it"),
        (f"{TRACE} --path /", "--path: / is a folder; name a file in it"),
        (f"{TRACE} --picture /no/such/x.png", "--picture: there is no folder /no/such; make it"),
        (f"{DEMO} --picture /no/such/x.png", "--picture: there is no folder /no/such; make it"),
        (f"{DEMO} --picture routing.doc", "routing.doc does not say its kind; let it end in one"),
        (f"{DEMO} --picture routing", "routing does not say its kind"),
        (f"{DEMO} --backend cuda", "'auto', 'torch', 'nvshmem', 'emulated', 'single',"),
        (f"{DEMO} --backend torch", "torch needs a GPU, and there is none"),
        (f"{DEMO} --backend single", "single serves one rank, not 2"),
        ("demo --model gpt", "'mixtral', 'qwen2-moe', 'qwen3-moe', 'deepseek-v3'"),
        ("demo --ranks 0", "--ranks"),
        ("demos", "No such command 'demos'"),
    ],
)
def test_bad_options_are_refused_before_any_work(command: str, text: str) -> None:
    if "--picture" in command or "--backend" in command:
        pytest.importorskip("matplotlib")
        pytest.importorskip("transformers")
    result = call(command)
    assert result.exit_code == 2
    assert text in told(result)


@pytest.mark.parametrize("command", ["demo", "train", "tune", "trace", "compile", "simulate"])
def test_help_has_the_defaults_that_options_describe(command: str) -> None:
    shown = " ".join(call(command, "--help").output.replace("│", " ").split())
    group: Any = typer.main.get_command(cli.app)
    texts = [getattr(option, "help", None) or "" for option in group.commands[command].params]
    described = [text for one in texts for text in re.findall(r"\[default: .*\]", one)]
    assert described
    for text in described:
        assert text in shown


@pytest.mark.parametrize("option", ["--path", "--picture"])
def test_files_that_cannot_be_written(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    path, read_only = tmp_path / "old.png", {tmp_path}
    monkeypatch.setattr(
        option_checks.os, "access", lambda file, mode: mode != W_OK or file not in read_only
    )

    def refused() -> bool:
        result = call(TRACE, option, str(path))
        if result.exit_code == 2:
            assert f"{option}: {path} cannot be written" in told(result)
        else:
            assert str(result.exception) == "ranks were started"
        return result.exit_code == 2

    assert refused()
    path.touch()  # an existing file can be written in a folder that cannot
    assert not refused()
    read_only.add(path)
    assert refused()
    read_only.clear()
    assert not refused()


# --- What the machine lacks --------------------------------------------------------------------


def without(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    monkeypatch.setattr(
        option_checks, "find_spec", lambda name: None if name in packages else "found"
    )


@pytest.mark.parametrize(
    ("packages", "command", "text"),
    [
        (
            ("transformers", "matplotlib"),
            "demo",
            "the demo needs transformers and matplotlib: pip install 'moe_engine[hf,bench]'",
        ),
        (("matplotlib",), f"{TRACE} --picture x.png", "pip install 'moe_engine[bench]'"),
        (("numpy",), TRACE, "needs numpy: pip install 'moe_engine[emulation]'"),
        (("numpy",), TUNE, "needs numpy: pip install 'moe_engine[emulation]'"),
        (("numpy",), "demo", "needs numpy: pip install 'moe_engine[emulation]'"),
    ],
)
def test_missing_packages_are_named_with_their_extra(
    packages: tuple[str, ...],
    command: str,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    if command == "demo" and packages == ("numpy",):
        pytest.importorskip("transformers")
        pytest.importorskip("matplotlib")
    without(monkeypatch, *packages)
    monkeypatch.setenv("MOE_ENGINE_CACHE", str(tmp_path))
    result = call(command)
    assert result.exit_code == 1
    (line,) = result.output.splitlines()
    assert line.startswith("BackendError: ") and line.endswith(text)


def test_tiles_are_not_tuned_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOE_ENGINE_CACHE", str(tmp_path))
    result = call(f"{GEMM} --tune")
    assert result.exit_code == 1
    assert told(result).endswith("BackendError: tiles are measured on a GPU, and there is none.")


@pytest.mark.parametrize("command", [f"{GEMM} --tune", TUNE])
@pytest.mark.parametrize("name", ["file", "file/folder"])
def test_a_cache_that_cannot_be_written_is_told_before_measuring(
    command: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch(mode=0o777)
    monkeypatch.setenv("MOE_ENGINE_CACHE", str(tmp_path / name))
    result = call(command)
    assert result.exit_code == 1
    text = f"is kept in {tmp_path / name}, and {tmp_path / 'file'} is no folder that can be written"
    assert text in told(result)
    monkeypatch.setenv("MOE_ENGINE_CACHE", str(tmp_path / "new" / "folder"))
    assert "is kept in" not in call(command).output


# --- What goes wrong on a rank -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RankError({1: BackendError("no such thing")}), "BackendError: no such thing"),
        (RankError({1: ChildProcessError("died")}), "ChildProcessError: died"),
        (torch.OutOfMemoryError("too little"), "OutOfMemoryError: too little"),
        (BackendError("[hf,bench]"), "BackendError: [hf,bench]"),
    ],
)
def test_what_is_expected_is_told_in_a_line(
    error: Exception, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("moe_engine.tools.timeline.run_job", fail)
    result = call(TRACE)
    assert (result.exit_code, result.output) == (1, f"{text}\n")


def test_a_mistake_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RankError({0: KeyError("of ours")})

    monkeypatch.setattr("moe_engine.tools.timeline.run_job", fail)
    assert isinstance(call(TRACE).exception, RankError)


def test_a_message_in_a_process_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "moe_engine", *GEMM.split(), "--tune"]
    env = {"MOE_ENGINE_CACHE": "/dev/null", "PATH": "", "COLUMNS": "80"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("BackendError: what is measured is kept in /dev/null")
    assert "splits" in done.stdout
