"""The tuner of layers: what it tries, what it keeps, and that Buffers take it, all ranks alike."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from math import log2
from unittest import mock

import cases
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from moe_engine import Buffer, LayerConfig, Options, agreement, choice_cache, layer_config
from moe_engine.emulation import PerRank
from moe_engine.engines.base import LayerInputs
from moe_engine.errors import BackendError
from moe_engine.hardware import H100
from moe_engine.layer_config import LayerProblem
from moe_engine.symm.base import environment
from moe_engine.tools import tune_layer
from moe_engine.tools.cli import app
from moe_engine.tools.tune_layer import FIELDS, PASSES, REFUSED, Job, descend, fastest, neighbours

RANKS, EXPERTS, TOPK, HIDDEN, COLUMNS, TOKENS = 2, 4, 2, 16, 8, 9
PROBLEM = LayerProblem(RANKS, TOKENS, EXPERTS, TOPK, HIDDEN, COLUMNS)
OTHER = LayerConfig(num_stages=5, num_return_stages=3, num_own_stages=5, group_m=2)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("MOE_ENGINE_CACHE", str(tmp_path))
    return tmp_path


def found(problem=PROBLEM):
    return layer_config.LayerChoices(kept=layer_config.kept_layers()).measured(problem)


# --- What is tried -------------------------------------------------------------------------------


@given(
    stages=st.tuples(st.integers(1, 16), st.integers(1, 16)),
    programs=st.tuples(*[st.integers(1, 1000)] * 3),
    num_own_stages=st.integers(0, 16),
    group_m=st.integers(1, 64),
    claims_tiles=st.booleans(),
)
def test_candidates_are_valid_and_differ_in_one_field(
    stages, programs, num_own_stages, group_m, claims_tiles
):
    config = LayerConfig(*stages, *programs, num_own_stages, group_m, claims_tiles)
    assert set(FIELDS) == set(asdict(config))
    for name in FIELDS:
        tried = list(neighbours(config, name))
        assert tried and len(set(tried)) == len(tried)
        for other in tried:
            other.check()
            changed = getattr(other, name)
            assert changed != getattr(config, name) and type(changed) is type(getattr(config, name))
            assert replace(other, **{name: getattr(config, name)}) == config


def distance(config, best):
    """Factors of 2 between two choices."""
    pairs = zip(asdict(config).values(), asdict(best).values(), strict=True)
    return sum(abs(log2(1 + a) - log2(1 + b)) for a, b in pairs)


@pytest.mark.parametrize(
    "best",
    [
        LayerConfig(),
        LayerConfig(12, 12, 264, 66, 528, 12, 4, True),
        LayerConfig(4, 3, 528, 33, 66, 1, 2),  # two steps of each field
    ],
)
def test_descent_finds_the_best_and_asks_nothing_twice(best):
    asked = []

    def measure(config):
        asked.append(config)
        return 100 + distance(config, best)

    times = descend(LayerConfig(), measure)
    assert fastest(times) == best
    assert asked == list(times) and len(set(asked)) == len(asked)


def test_descent_ends_where_nothing_is_gained():
    """Once around when the first pass finds nothing, PASSES times else."""
    around = {config for name in FIELDS for config in neighbours(LayerConfig(), name)}
    flat = descend(LayerConfig(), lambda config: 1.0)
    assert flat.keys() == {LayerConfig()} | around and fastest(flat) == LayerConfig()
    falls = descend(LayerConfig(), lambda config: 1 / config.group_m)
    assert fastest(falls).group_m == LayerConfig().group_m * 2**PASSES


def test_another_result_is_never_chosen():
    times = descend(LayerConfig(), lambda config: 1.0 if config == LayerConfig() else REFUSED)
    assert fastest(times) == LayerConfig()


def time_one(group, same):
    """(time, calls made) where ranks have seen the same result or not."""
    calls = []
    job = Job(PROBLEM, 3, "cpu")
    us = tune_layer.time_same(lambda: calls.append(1), same, group, job)
    return us, len(calls)


def test_another_result_on_one_rank_is_refused_by_all(pool):
    assert pool.run(time_one, PerRank([True, False]), num_ranks=2) == [(REFUSED, 0)] * 2
    (first, calls), second = pool.run(time_one, PerRank([True, True]), num_ranks=2)
    assert (first, calls) == second and 0 < first < 1e6 and calls == 3


def first_tried(group):
    """Where a search on ranks with H100s begins."""
    tried = []
    with (
        mock.patch.object(agreement, "gpu", lambda device: H100),
        mock.patch.object(tune_layer, "descend", lambda start, measure: tried.append(start)),
    ):
        tune_layer.run_rank(group, Job(LayerProblem(2, 512, 4, 2, 4096, 1024), 1, "cpu"))
    return tried


def test_the_search_begins_at_what_is_chosen_on_this_gpu(pool):
    """Such a layer runs in stages on an H200, and a search from there would end before 1."""
    if pool.device == "cuda":
        pytest.skip("emulated: the ranks have GPUs of another kind")
    for (start,) in pool.run(first_tried, num_ranks=2):
        assert start.num_stages == 1


def test_same_bits():
    a = torch.tensor([0.0, float("nan")], dtype=torch.bfloat16)
    assert tune_layer.same_bits(a, a.clone())
    assert not tune_layer.same_bits(a, torch.tensor([-0.0, float("nan")], dtype=torch.bfloat16))


# --- What is kept --------------------------------------------------------------------------------


def test_what_is_kept_is_found_for_as_many_tokens(folder):
    assert found() is None
    layer_config.keep_layer(PROBLEM, OTHER)
    assert found() == found(replace(PROBLEM, max_tokens=16)) == OTHER
    for name in ("max_tokens", "num_ranks", "num_experts", "num_topk", "hidden", "num_columns"):
        assert found(replace(PROBLEM, **{name: 64})) is None
    few = replace(PROBLEM, max_tokens=1)
    layer_config.keep_layer(few, LayerConfig())
    assert (found(few), found()) == (LayerConfig(), OTHER)
    layer_config.keep_layer(PROBLEM, LayerConfig(4))
    assert found() == LayerConfig(4)
    assert [path.name for path in folder.iterdir()] == ["layer.json"]


def test_choices_of_other_devices_do_not_count(folder, monkeypatch):
    layer_config.keep_layer(PROBLEM, OTHER)
    monkeypatch.setattr(choice_cache, "device_name", lambda: "another")
    assert found() is None
    layer_config.keep_layer(PROBLEM, LayerConfig())
    monkeypatch.undo()
    monkeypatch.setenv("MOE_ENGINE_CACHE", str(folder))
    assert found() == OTHER


BAD = [
    {"of another version": 1},
    asdict(OTHER) | {"of another version": 1},
    {"num_stages": 4},
    asdict(OTHER) | {"num_stages": 17},
    asdict(OTHER) | {"num_stages": "4"},
    [4],
    None,
]


@pytest.mark.filterwarnings("ignore:.*layer.json")
@pytest.mark.parametrize("choice", BAD)
def test_choices_of_other_versions_do_not_count(folder, choice):
    layer_config.keep_layer(PROBLEM, OTHER)
    path = folder / "layer.json"
    (key,) = json.loads(path.read_text())
    path.write_text(json.dumps({key: choice}))
    assert layer_config.kept_layers() == {}
    for text in ("", "[]", '{"'):
        path.write_text(text)
        assert layer_config.kept_layers() == {}


def test_a_folder_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MOE_ENGINE_CACHE", str(tmp_path / "file"))
    with pytest.raises(BackendError, match="MOE_ENGINE_CACHE"):
        layer_config.keep_layer(PROBLEM, OTHER)


def tune_noted(group, job):
    """(The configurations that a job timed, those by which layers ran)."""
    choose, ran = layer_config.LayerChoices.choose, []

    def noted(*args, **more):
        ran.append(choose(*args, **more))
        return ran[-1]

    with (
        mock.patch.object(layer_config.LayerChoices, "choose", noted),
        mock.patch.multiple(tune_layer, FIELDS=("num_stages",), PASSES=1),
    ):
        return set(tune_layer.run_rank(group, job)), set(ran)


def test_layers_run_by_what_is_timed(pool):
    """No call is the one that was prepared for the configuration before."""
    for timed, ran in pool.run(tune_noted, Job(PROBLEM, 1, cases.device().type), num_ranks=RANKS):
        assert len(timed) > 1
        assert timed == ran


# --- Who takes it --------------------------------------------------------------------------------


def choices(group, folder, options):
    """How Buffers for TOKENS and 32 tokens run a layer, where the cache is this folder; it changes
    no bit of a result."""
    inputs = tune_layer.random_layer(PROBLEM, group.rank(), cases.device())
    outs = []
    for cache in ("/dev/null", folder):
        with environment({"MOE_ENGINE_CACHE": cache}):
            sizes = TOKENS, HIDDEN, EXPERTS, TOPK
            buffer = Buffer.for_tokens(group, *sizes, options=options)
            large = Buffer.for_tokens(group, 32, *sizes[1:], options=options)
        seen = [one.layer_config(inputs[3], TOPK) for one in (buffer, large)]
        outs.append(buffer.moe_ffn(LayerInputs(*inputs))[0])
        buffer.check()
        torch.distributed.barrier(group)
        buffer.destroy()
        large.destroy()
    assert torch.equal(*outs)
    return seen


def keep_on_rank(group, folder):
    with environment({"MOE_ENGINE_CACHE": folder}):
        layer_config.keep_layer(PROBLEM, OTHER)


def test_buffers_take_what_rank_0_has_read(pool, tmp_path):
    """Also a rank that has read something else, or nothing."""
    pool.run(keep_on_rank, str(tmp_path), num_ranks=1)
    predicted = LayerConfig.predicted(replace(PROBLEM, max_tokens=32))
    kept, empty = str(tmp_path), str(tmp_path / "empty")
    for seen in pool.run(choices, PerRank([kept, empty]), Options(), num_ranks=RANKS):
        assert seen == [OTHER, predicted]
    predicted = [LayerConfig.predicted(PROBLEM), predicted]
    assert OTHER not in predicted
    for seen in pool.run(choices, PerRank([empty, kept]), Options(), num_ranks=RANKS):
        assert seen == predicted


def test_the_user_comes_first(pool, tmp_path):
    pool.run(keep_on_rank, str(tmp_path), num_ranks=1)
    mine = LayerConfig(num_stages=2)
    options = Options(layer=mine)
    for seen in pool.run(choices, str(tmp_path), options, num_ranks=RANKS):
        assert seen == [mine, mine]


# --- The commands --------------------------------------------------------------------------------

SIZES = "--experts 2 --topk 1 --hidden 8 --intermediate 8 --ranks 2 --tokens 2".split()


@pytest.mark.slow
def test_command_line(folder):
    """One that tunes, and one that tells of it."""
    if torch.cuda.device_count() < 2:
        cases.skip_without_interpreter()
    layer = ["layer", *SIZES]
    assert "measured before" not in CliRunner().invoke(app, layer).output
    result = CliRunner().invoke(app, ["tune", *SIZES, "--rounds", "1"])
    assert result.exit_code == 0, result.output
    assert "as predicted" in result.output and "num_stages 2" in result.output
    assert "refused" not in result.output
    (choice,) = json.loads((folder / "layer.json").read_text()).values()
    assert f"kept for this kind of device: {LayerConfig(**choice)}" in result.output
    if not torch.cuda.is_available():
        told = CliRunner().invoke(app, layer).output
        assert f"measured before on this device (cpu), and taken: {LayerConfig(**choice)}" in told


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--model gpt", "deepseek-v3"),
        ("--model tiny --ranks 3", "8 experts"),
        (f"--model tiny {' '.join(SIZES)}", "give a model, or all of"),
        ("--experts 8 --topk 2", "give a model, or all of"),
        ("--experts 2 --topk 3 --hidden 8 --intermediate 8 --ranks 2", "top-3 of 2"),
    ],
)
def test_what_the_command_refuses(options, text):
    result = CliRunner().invoke(app, ["tune", *options.split()])
    assert result.exit_code == 2
    assert text in result.output
