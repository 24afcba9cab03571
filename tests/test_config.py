"""The choice of tiles: from dimensions, and from what was measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from moe_engine import choice_cache
from moe_engine.errors import BackendError
from moe_engine.grouped_gemm import config as tiles
from moe_engine.grouped_gemm.config import GemmConfig, GemmProblem, candidates, explain, predict
from moe_engine.grouped_gemm.tuning import tune
from moe_engine.tools.cli import app

BF16, FP8, FP32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32


def block_m_of(num_rows: int, **changes: int) -> int:
    sizes = dict(num_experts=64, num_columns=4096, depth=7168) | changes
    return GemmConfig.predicted(GemmProblem(BF16, num_rows, **sizes)).block_m


def test_tiles_are_as_high_as_experts_have_rows() -> None:
    assert [block_m_of(64 * rows) for rows in (1, 8, 16, 30, 1024)] == [32, 32, 32, 64, 128]


def test_few_tiles_share_the_depth() -> None:
    """2 experts of 16 columns make 2 tiles, for 132 SMs."""
    config = GemmConfig.predicted(GemmProblem(BF16, 8, 2, 16, 14336))
    assert config.num_splits > 1


@given(
    dtype=st.sampled_from([BF16, FP32, FP8]),
    num_rows=st.integers(0, 1 << 20),
    num_experts=st.integers(1, 512),
    num_columns=st.integers(1, 4096).map(lambda n: 16 * n),
    depth=st.integers(1, 4096).map(lambda n: 16 * n),
    gated=st.booleans(),
    gathered=st.booleans(),
    capability=st.sampled_from([None, (8, 0), (9, 0), (10, 0)]),
    block_m=st.sampled_from([None, 16, 32, 64, 128]),
)
def test_no_shape_is_refused(block_m: int | None, **sizes) -> None:  # type: ignore[no-untyped-def]
    problem = GemmProblem(**sizes)
    config = GemmConfig.predicted(problem, block_m)
    assert predict(config, problem).us > 0
    assert block_m is None or config.block_m == block_m
    assert GemmConfig.for_weights(problem, 2).block_m and explain(problem)


def test_explain_names_the_choice_and_its_limit() -> None:
    lines = explain(GemmProblem(BF16, 64, 64, 2048, 768)).splitlines()
    assert lines[0] == "64 rows, 64 experts, 2048 columns, depth 768, bfloat16"
    (chosen,) = (line for line in lines if line.startswith("->"))
    assert re.search(r"32 x 128 x 128, 1 per SM, 1 splits: +\d+ us, memory", chosen)


def test_what_was_measured_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOE_ENGINE_CACHE", str(tmp_path))
    problem = GemmProblem(BF16, 65536, 32, 2048, 768)
    assert tiles.measured(problem) is None
    fast = next(c for c in candidates(problem) if c.block_m == 64)
    best, us = tune(problem, lambda config: 50.0 if config == fast else 100.0)
    assert (best, us) == (fast, 50.0)
    as_many = GemmProblem(BF16, 40000, 32, 2048, 768)
    assert tiles.measured(problem) == tiles.measured(as_many) == tiles.choose(problem) == fast
    assert tiles.measured(GemmProblem(BF16, 32768, 32, 2048, 768)) is None
    assert tiles.measured(problem, 128) is None
    assert [path.name for path in tmp_path.iterdir()] == ["gemm.json"]
    tiles._choose.cache_clear()


@pytest.mark.filterwarnings("ignore:.*gemm.json")
def test_a_bad_file_of_measurements_is_as_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MOE_ENGINE_CACHE", str(tmp_path))
    problem = GemmProblem(BF16, 65536, 32, 2048, 768)
    path = choice_cache.cache_path(tiles.GEMMS)
    for text in ("", "[]"):
        path.write_text(text)
        tiles._read_once.cache_clear()
        assert tiles.measured(problem) is None
    path.unlink()
    choice_cache.keep_choice(path, tiles._key(problem, None), {"of another version": 1})
    tiles._read_once.cache_clear()
    assert tiles.measured(problem) is None
    tiles._read_once.cache_clear()
    with pytest.raises(BackendError, match="refused every tile"):
        tune(problem, lambda config: float("inf"))


def test_command_line() -> None:
    sizes = "--rows 512 --experts 64 --columns 2048 --depth 768".split()
    result = CliRunner().invoke(app, ["gemm", *sizes, "--activation", "swiglu"])
    assert result.exit_code == 0 and "->" in result.output and "4096 columns" in result.output
    result = CliRunner().invoke(app, ["gemm", *sizes, "--activation", "relu"])
    assert result.exit_code == 2 and "it must be one of" in result.output


@pytest.mark.gpu
def test_tune_on_one_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from moe_engine.grouped_gemm import gemm_config, tune_gemm

    monkeypatch.setenv("MOE_ENGINE_CACHE", str(tmp_path))
    config, us = tune_gemm(512, 8, 512, 1024, activation="swiglu", gathered=True)
    assert 0 < us < 1e6
    w = torch.empty(8, 1024, 1024, dtype=BF16, device="cuda")
    assert gemm_config(w, 512, "swiglu", gathered=True) == config
    tiles._choose.cache_clear()
