"""The demo at small sizes, from the command line."""

from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from moe_engine.emulation import RankError
from moe_engine.errors import ShapeError
from moe_engine.tools.cli import app
from moe_engine.tools.demo import Job, Outcome
from moe_engine.tools.demo_report import count_rows, report
from moe_engine.tools.models import Kind

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")


@pytest.mark.parametrize(
    ("model", "backend", "ranks", "tokens"),
    [
        pytest.param("qwen2-moe", "collective", 2, 128, marks=pytest.mark.slow),
        ("mixtral", "auto", 2, 4),
    ],
)
def test_demo(tmp_path: Path, model: str, backend: str, ranks: int, tokens: int) -> None:
    picture = tmp_path / "routing.png"
    options = {"model": model, "backend": backend, "ranks": ranks, "tokens": tokens}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    done = CliRunner().invoke(app, ["demo", *arguments, f"--picture={picture}"])
    assert done.exit_code == 0, done.output
    for text in ("rows sent", "Saved:", "largest difference", picture.name):
        assert text in done.output
    if not torch.cuda.is_available():
        assert "Triton interprets the kernels" in done.output and "time per" not in done.output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_demo_says_in_one_line_what_a_rank_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RankError({2: ShapeError("8 experts, which 3 ranks cannot share")})

    monkeypatch.setattr("moe_engine.tools.demo.run_jobs", refuse)
    done = CliRunner().invoke(app, ["demo", "--ranks=3"])
    assert done.exit_code == 1
    assert done.output.endswith("ShapeError: 8 experts, which 3 ranks cannot share\n")


def test_a_token_sends_one_row_to_each_of_its_ranks() -> None:
    topk_idx = torch.tensor([[0, 1], [1, 2], [3, 2], [3, 0]])  # ranks 00, 01, 11, 10
    rows, copies = count_rows(topk_idx, num_experts=4, num_ranks=2)
    assert rows.tolist() == [3, 3]
    assert copies.tolist() == [4, 4]


@pytest.mark.parametrize("fp32", [0.0, 2e-5, float("nan")])
@pytest.mark.parametrize("agreeing", [4, 3])
def test_a_missed_bound_fails_the_demo(fp32: float, agreeing: int) -> None:
    seconds = {"experts": 1.0}
    outcome = Outcome(4, 8, [torch.tensor([[0, 1]] * 4)], seconds, seconds)
    outcome.fp32, outcome.agreeing = fp32, agreeing
    job = Job(Kind.MIXTRAL, "cpu", tokens=4, new_tokens=1, backend="auto")
    assert report(job, [outcome], Console(quiet=True)) is (fp32 == 0.0 and agreeing == 4)
