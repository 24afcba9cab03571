"""Commands that take a model by its name take the folder of a checkpoint as well, and read its
config alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from transformers import MixtralConfig, NemotronHConfig
from typer.testing import CliRunner

from moe_engine.tools.cli import app
from moe_engine.tools.option_checks import known_model

SIZES = 16, 512, 256, 4
"""Experts, hidden, columns, top-k."""


def call(*arguments: str) -> tuple[int, str]:
    """The exit code and the output in one line."""
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "300"})
    assert "Traceback" not in done.output
    return done.exit_code, " ".join(done.output.replace("│", " ").split())


@pytest.fixture
def folder(tmp_path: Path) -> str:
    num_experts, hidden, columns, num_topk = SIZES
    config: Any = MixtralConfig(
        architectures=["MixtralForCausalLM"],
        num_hidden_layers=2,
        num_local_experts=num_experts,
        hidden_size=hidden,
        intermediate_size=columns,
        num_experts_per_tok=num_topk,
    )
    config.save_pretrained(tmp_path)
    return str(tmp_path)


def test_simulate(folder: str) -> None:
    code, output = call("simulate", f"--model={folder}", "--ranks=16")
    assert code == 0, output
    assert "top-4 of 16" in output


def test_trace_and_tune(folder: str) -> None:
    assert known_model(folder, ranks=2, num_gpus=2) == (folder, SIZES)
    code, output = call("trace", f"--model={folder}", "--ranks=64")
    assert code == 2 and "on 64 ranks needs as many GPUs" in output


def test_compile_takes_it_as_a_checkpoint(folder: str) -> None:
    code, output = call("compile", f"--model={folder}", "--ranks=2")
    assert code == 2 and "is a folder: give it as --checkpoint" in output


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    code, output = call("simulate", f"--model={tmp_path}")
    assert code == 1 and "CheckpointError: the config of" in output


def test_experts_without_a_gate(tmp_path: Path) -> None:
    config: Any = NemotronHConfig(architectures=["NemotronHForCausalLM"])
    config.save_pretrained(tmp_path)
    code, output = call("simulate", f"--model={tmp_path}")
    assert code == 2 and "have no gate" in output
