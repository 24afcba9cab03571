"""What the model of a layer chooses, and that a user's choice is taken."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from moe_engine import Buffer, Options
from moe_engine.errors import DtypeError, MoeEngineError, ShapeError
from moe_engine.hardware import H100, H200
from moe_engine.layer_config import (
    MODELS,
    STAGE_US,
    LayerChoices,
    LayerConfig,
    LayerProblem,
    combine_us,
    dispatch_us,
    keep_layer,
    kept_layers,
)
from moe_engine.tools.cli import app

QWEN3 = {"num_experts": 128, "num_topk": 8, "hidden": 2048, "num_columns": 768}
STAGES = ("num_stages", "num_return_stages")


def stages_of(problem):
    config = LayerConfig.predicted(problem)
    return [getattr(config, name) for name in STAGES]


def test_one_rank_has_nobody_to_wait_for():
    assert stages_of(LayerProblem(1, 8192, **QWEN3)) == [1, 1]


def test_more_programs_copy_where_none_runs_concurrently_with_products():
    """On one rank, and where e4m3 tiles leave no registers: these come and return one after the
    other, so stages of arrival would hide nothing."""

    def predicted(num_ranks, itemsize=2, **more):
        problem = LayerProblem(num_ranks, 8192, **QWEN3, itemsize=itemsize)
        return LayerConfig.predicted(problem, **more)

    one_rank, cast = predicted(1), predicted(2, itemsize=1)
    some = predicted(2, is_backward=True)  # where no own tiles come first
    assert one_rank == predicted(1, itemsize=1)
    assert one_rank.num_copy_programs == 4 * some.num_copy_programs
    assert cast.num_copy_programs == 8 * some.num_copy_programs
    assert cast.num_push_programs == 2 * some.num_push_programs
    assert cast.num_return_programs == 2 * some.num_return_programs
    assert cast.num_stages == 1 and 1 < cast.num_return_stages <= 4 < some.num_return_stages
    few = LayerProblem(2, 8, **QWEN3, itemsize=1)
    assert LayerConfig.predicted(few).num_return_stages <= 2


def test_own_tiles_of_e4m3_stay_with_the_others_of_their_expert():
    """All rows have come before them; in bf16 they go apart where experts have many own rows."""
    mixtral = dict(num_experts=8, num_topk=2, hidden=4096, num_columns=14336)
    apart = {
        itemsize: LayerConfig.predicted(LayerProblem(2, 4096, **mixtral, itemsize=itemsize))
        for itemsize in (1, 2)
    }
    assert apart[2].own_first == apart[2].num_stages and not apart[1].own_first


def test_tiles_are_claimed_where_weights_take_the_time():
    """On an H100 of all models with few rows for an expert, if programs have many tiles; on an
    H200, whose memory is faster, of long rows alone."""
    slower = 0.7 * H200.hbm_gbs

    def claiming(hbm_gbs: float, num_ranks: int, max_tokens: int) -> set[str]:
        found = {
            name: LayerProblem(num_ranks, max_tokens, experts, topk, hidden, columns)
            for name, (experts, hidden, columns, topk) in MODELS.items()
            if name in ("mixtral-8x7b", "qwen2-57b", "qwen3-30b", "deepseek-v3")
        }
        chosen = {name: LayerConfig.predicted(one, hbm_gbs) for name, one in found.items()}
        return {name for name, config in chosen.items() if config.claims_tiles}

    assert claiming(slower, 1, 1024) == {"qwen2-57b", "qwen3-30b", "deepseek-v3"}
    assert claiming(slower, 1, 2048) == {"qwen3-30b", "deepseek-v3"}
    assert claiming(H200.hbm_gbs, 1, 2048) == claiming(slower, 2, 2048) == {"deepseek-v3"}
    assert not claiming(slower, 2, 4096)
    cast = (LayerProblem(ranks, 1024, 256, 8, 7168, 2048, itemsize=1) for ranks in (1, 2))
    assert not any(LayerConfig.predicted(one, slower).claims_tiles for one in cast)


def test_rows_of_a_backward_come_in_stages_on_one_rank():
    """Unless the user chose how many."""
    problem = LayerProblem(1, 8192, **QWEN3)
    alone = LayerConfig.predicted(problem)
    changed = LayerChoices().choose(problem, is_backward=True)
    assert alone.num_stages == 1 < changed.num_stages
    assert replace(changed, num_stages=1, num_copy_programs=alone.num_copy_programs) == alone
    assert LayerChoices(alone).choose(problem, is_backward=True) == alone


def early_stages(model, itemsize=2, num_ranks=2, hbm_gbs=H200.hbm_gbs, is_backward=False):
    """How many own stages come first at 1024, 2048, 4096 and 8192 tokens."""
    num_experts, hidden, columns, num_topk = MODELS[model]
    sizes = num_experts, num_topk, hidden, columns, itemsize
    problems = (LayerProblem(num_ranks, 1024 << n, *sizes) for n in range(4))
    return [LayerConfig.predicted(one, hbm_gbs, is_backward).own_first for one in problems]


def test_some_own_tiles_come_first_between_two_gpus():
    """Where experts have many own rows, until the first rows of the other arrive."""
    assert early_stages("qwen3-30b") == [0, 0, 0, 2]
    assert early_stages("qwen2-57b") == [0, 0, 2, 2]
    assert early_stages("phi-3.5-moe")[:3] == [0, 0, 0]  # its rows are long
    config = LayerConfig.predicted(LayerProblem(2, 8192, **QWEN3))
    assert (config.num_stages, config.num_copy_programs) == (5, 2 * H200.num_sms)


@pytest.mark.parametrize(
    "other",
    [{"itemsize": 1}, {"hbm_gbs": H100.hbm_gbs}, {"is_backward": True}, {"num_ranks": 3}],
    ids=str,
)
def test_no_own_tiles_come_first_elsewhere(other):
    """In e4m3, with slower memory, in a backward, and between more GPUs."""
    assert not any(early_stages("qwen3-30b", **other))


def test_more_programs_copy_dy_where_its_product_is_short():
    """Of Qwen3-30B alone, unless the number was chosen otherwise."""
    config, one = LayerConfig(), H200.num_sms
    columns = {name: shape[2] for name, shape in MODELS.items()}
    copying = {name: config.for_dy(n, 2).num_copy_programs for name, n in columns.items()}
    assert copying == dict.fromkeys(MODELS, one) | {"qwen3-30b": 2 * one}
    chosen = LayerConfig(num_copy_programs=5)
    assert chosen.for_dy(768, 2) == chosen


def test_rows_that_take_long_come_in_stages():
    """Beside the same GEMMs, rows of no bytes need none."""
    assert stages_of(LayerProblem(4, 8192, **QWEN3, itemsize=0)) == [1, 1]
    assert min(stages_of(LayerProblem(4, 8192, **QWEN3))) > 4


def test_few_tokens_are_not_worth_a_stage():
    assert stages_of(LayerProblem(4, 8, **QWEN3)) == [1, 1]


@pytest.mark.parametrize(
    ("model", "num_ranks", "max_tokens", "in_stages"),
    [
        ("deepseek-v3", 2, 4096, False),
        ("deepseek-v3", 2, 8192, False),
        ("deepseek-v3", 2, 1024, True),  # a tile has all rows of an expert
        ("deepseek-v3", 8, 8192, True),  # many tiles share the weights
        ("qwen3-30b", 2, 4096, True),  # a tile takes a short time
        ("qwen2-57b", 2, 4096, True),
    ],
)
def test_rows_come_at_once_where_stages_would_lose_the_weights(
    model, num_ranks, max_tokens, in_stages
):
    """On a GPU whose memory is slower than an H200's; sums return as they do there."""
    num_experts, hidden, columns, num_topk = MODELS[model]
    problem = LayerProblem(num_ranks, max_tokens, num_experts, num_topk, hidden, columns)
    fast, slow = (LayerChoices(hbm_gbs=kind.hbm_gbs).choose(problem) for kind in (H200, H100))
    assert fast.num_stages > 1 and slow.num_return_stages == fast.num_return_stages > 1
    in_turns = LayerConfig.predicted(problem, is_backward=True)  # no early own tiles
    assert slow.num_stages == (in_turns.num_stages if in_stages else 1)


def test_what_was_measured_is_found_on_memory_of_any_speed(tmp_path, monkeypatch):
    """The cache is that of one kind of GPU."""
    monkeypatch.setenv("MOE_ENGINE_CACHE", str(tmp_path))
    problem, config = LayerProblem(2, 4096, **QWEN3), LayerConfig(3, 2)
    keep_layer(problem, config)
    for hbm_gbs in (1.0, H200.hbm_gbs):
        assert LayerChoices(kept=kept_layers(), hbm_gbs=hbm_gbs).choose(problem) == config


@given(
    num_ranks=st.integers(1, 16),
    max_tokens=st.integers(0, 20_000),
    num_local=st.integers(1, 64),
    num_topk=st.integers(1, 16),
    hidden=st.integers(1, 8192),
    num_columns=st.integers(1, 16384),
)
def test_any_problem_has_a_choice(num_ranks, max_tokens, num_local, num_topk, hidden, num_columns):
    """It is valid, and hides something, but no more than the shorter of GEMM and rows."""
    sizes = num_local * num_ranks, num_topk, hidden, num_columns
    problem = LayerProblem(num_ranks, max_tokens, *sizes)
    config = LayerConfig.predicted(problem)
    config.check()
    rows_us = problem.link_us
    for gemm_us, us in (
        (problem.gemm_us(2 * num_columns), dispatch_us(problem, config.num_stages)),
        (problem.gemm_us(num_columns), combine_us(problem, config.num_return_stages)),
    ):
        rounding = 1e-9 * us
        assert max(rows_us, gemm_us) - rounding <= us <= rows_us + gemm_us + STAGE_US + rounding


NUMBERS = [name for name in LayerConfig.__dataclass_fields__ if name != "claims_tiles"]
POSITIVE = [name for name in NUMBERS if name != "num_own_stages"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, 0) for name in POSITIVE),
        *((name, 17) for name in (*STAGES, "num_own_stages")),
        ("num_own_stages", -1),
    ],
)
def test_numbers_out_of_range_are_refused(name, value):
    with pytest.raises(ShapeError, match=rf"LayerConfig\.{name} is {value}; it must be [01] "):
        LayerConfig(**{name: value}).check()


@pytest.mark.parametrize("value", [2.0, "2", True, None, [2]])
def test_what_is_no_number_is_refused(value):
    for name in NUMBERS:
        with pytest.raises(DtypeError, match=rf"LayerConfig\.{name} is .*; it must be an int"):
            LayerConfig(**{name: value}).check()
    if value is not True:
        with pytest.raises(DtypeError, match=r"claims_tiles is .*; it must be True or False"):
            LayerConfig(claims_tiles=value).check()


def test_largest_numbers_are_taken():
    LayerConfig(16, 16, 10_000, 10_000, 10_000, 16, 10_000).check()


def buffer_with(group, layers):
    """What a Buffer says to the LayerConfig of each rank."""
    options = Options(layer=layers[group.rank() if group else 0])
    try:
        Buffer.for_tokens(group, 8, 16, 4, 2, options=options).destroy()
    except MoeEngineError as error:
        return str(error)
    return None


def test_ranks_agree_on_all_but_programs(pool):
    """Stages decide what ranks wait for; how many programs a rank lets communicate is its own."""
    programs = [LayerConfig(num_push_programs=8), LayerConfig(num_return_programs=4)]
    assert pool.run(buffer_with, programs, num_ranks=2) == [None, None]
    for name in STAGES:
        stages = [LayerConfig(**{name: count}) for count in (1, 2)]
        for text in pool.run(buffer_with, stages, num_ranks=2):
            assert "layer differs" in text
    [text] = pool.run(buffer_with, [LayerConfig(num_stages=0)], num_ranks=1)
    assert "num_stages" in text


@pytest.mark.parametrize("ranks", [1, 4])
def test_command_line(ranks):
    sizes = "--tokens 8192 --experts 128 --topk 8 --hidden 2048 --intermediate 768".split()
    result = CliRunner().invoke(app, ["layer", *sizes, "--ranks", str(ranks)])
    assert result.exit_code == 0
    config = LayerConfig.predicted(LayerProblem(ranks, 8192, **QWEN3))
    assert str(config) in result.output
    assert f"in {config.num_stages} stages" in result.output
    assert f"in {config.num_return_stages}\n" in result.output
