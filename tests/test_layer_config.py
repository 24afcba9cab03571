"""What the model of a layer chooses, and that a user's choice is taken."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from moe_engine import Buffer, Options
from moe_engine.cli import app
from moe_engine.errors import ShapeError
from moe_engine.layer_config import MOST_RETURN_PROGRAMS, LayerConfig, LayerProblem, back_us

QWEN3 = {"num_experts": 128, "num_topk": 8, "hidden": 2048, "num_columns": 768}
MIXTRAL = {"num_experts": 8, "num_topk": 2, "hidden": 4096, "num_columns": 14336}


def test_one_rank_has_nobody_to_wait_for():
    assert not LayerConfig.choose(LayerProblem(1, 8192, **QWEN3)).fused


def test_narrow_experts_hide_their_rows_in_more_stages():
    """Their GEMMs are short beside their rows; wide ones hide all behind this rank's own rows."""
    narrow = LayerConfig.choose(LayerProblem(4, 8192, **QWEN3))
    wide = LayerConfig.choose_fused(LayerProblem(4, 8192, **MIXTRAL))
    assert narrow.fused
    assert narrow.num_stages > wide.num_stages == 2
    assert narrow.num_return_programs > wide.num_return_programs


def test_last_rows_travel_behind_own_work():
    problem = LayerProblem(4, 8192, **QWEN3)
    few, many = (back_us(problem, count) for count in (2, 4))
    assert many < few


@given(
    num_ranks=st.integers(1, 16),
    max_tokens=st.integers(0, 20_000),
    num_local=st.integers(1, 64),
    num_topk=st.integers(1, 16),
    hidden=st.integers(1, 8192),
    num_columns=st.integers(1, 16384),
)
def test_any_problem_has_a_choice(num_ranks, max_tokens, num_local, num_topk, hidden, num_columns):
    sizes = num_local * num_ranks, num_topk, hidden, num_columns
    problem = LayerProblem(num_ranks, max_tokens, *sizes)
    for config in (LayerConfig.choose(problem), LayerConfig.choose_fused(problem)):
        assert 1 <= config.num_stages <= max(2, num_ranks)
        assert 1 <= config.num_return_stages <= max(2, num_ranks)
        assert 0 < config.num_return_programs <= MOST_RETURN_PROGRAMS


def buffer_with(group, layers):
    """What a Buffer says to the LayerConfig of each rank."""
    options = Options(layer=layers[group.rank() if group else 0])
    try:
        Buffer.for_tokens(group, 8, 16, 4, 2, options=options).destroy()
    except ShapeError as error:
        return str(error)
    return None


def test_ranks_agree_on_all_but_programs(pool):
    """Stages decide what ranks wait for; how many programs a rank lets push is its own."""
    programs = [LayerConfig(num_push_programs=count) for count in (4, 8)]
    assert pool.run(buffer_with, programs, num_ranks=2) == [None, None]
    stages = [LayerConfig(num_stages=count) for count in (1, 2)]
    for text in pool.run(buffer_with, stages, num_ranks=2):
        assert "layer) differ" in text
    [text] = pool.run(buffer_with, [LayerConfig(num_stages=0)], num_ranks=1)
    assert "num_stages" in text


def test_command_line():
    sizes = "--tokens 8192 --experts 128 --topk 8 --hidden 2048 --intermediate 768".split()
    for ranks in (1, 4):
        result = CliRunner().invoke(app, ["layer", *sizes, "--ranks", str(ranks)])
        assert result.exit_code == 0
        assert f"fused={ranks == 4}" in result.output
    assert "3 stages" in result.output
