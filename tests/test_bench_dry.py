"""The benches run on emulated ranks: with tiny models, and a clock that stands still."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import cases
import pytest
import torch
from torch.overrides import TorchFunctionMode

import moe_engine
from moe_engine import layer_config, timing
from moe_engine.symm.base import environment
from moe_engine.tools.models import build_config

sys.path.append(str(Path(__file__).parents[1] / "bench"))

from _common import FIELDS

MODEL = "qwen3-30b"
SIZES = 8, 256, 128, 2
"""E, H, I, K."""
TOKENS = 16
ERROR = 2e-2
"""Largest relative error of results of few numbers."""


class OnCpu(TorchFunctionMode):
    """What asks for a GPU gets the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")) == "cuda":
            kwargs["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        return function(*args, **kwargs)


class CpuGenerator(torch.Generator):
    def __new__(cls, device: str = "cpu") -> CpuGenerator:
        return super().__new__(cls, "cpu")


class Clock:
    """An event of a GPU on which everything takes a millisecond."""

    numbers = count()

    def __init__(self, enable_timing: bool = True):
        self.number = 0

    def record(self) -> None:
        self.number = next(self.numbers)

    def elapsed_time(self, end: Clock) -> float:
        return float(end.number - self.number)


def deep_eps_config(num_ranks: int) -> SimpleNamespace:
    return SimpleNamespace(get_nvl_buffer_size_hint=lambda row_bytes, num_ranks: 1 << 20)


class TheirBuffer(moe_engine.Buffer):
    """Another class than ours, with the interface of DeepEP's."""


def replayed(call: Callable[[], object], *_: object) -> float:
    call()
    return 1000.0


@contextmanager
def dry() -> Iterator[None]:
    """Benches without a GPU, with a DeepEP."""
    import _common
    import _deep_ep
    import torch._dynamo  # before its types are replaced

    def time_replays(calls, group, replays):
        return replayed(calls[0]), 1000.0

    cuda = {"Event": Clock, "synchronize": lambda: None, "_sleep": lambda cycles: None}
    cuda |= {"empty_cache": lambda: None, "device_count": lambda: 8}
    cuda |= {"reset_peak_memory_stats": lambda: None, "max_memory_allocated": lambda: 1 << 20}
    cuda |= {"memory_allocated": lambda: 0}
    package = SimpleNamespace(Buffer=TheirBuffer)
    TheirBuffer.get_dispatch_config = staticmethod(deep_eps_config)
    with (
        mock.patch.multiple(torch.cuda, **cuda),
        mock.patch.object(torch, "Generator", CpuGenerator),
        mock.patch.dict(layer_config.MODELS, {MODEL: SIZES}),
        mock.patch.object(timing, "time_graph", replayed),
        mock.patch.multiple(_common, time_replays=time_replays, EAGER_ROUNDS=1),
        mock.patch.object(_common, "calls_in_a_round", lambda call, group: 1),
        mock.patch.object(_common, "WARMUP_ROUNDS", 0),
        mock.patch.object(_deep_ep, "deep_ep", lambda num_ranks: package),
        OnCpu(),
    ):
        yield


def run_fused_layer(group) -> list[dict]:
    lines: list[dict] = []
    with dry():
        import fused_layer

        shapes = [fused_layer.Shape(MODEL, TOKENS)]
        with mock.patch.multiple(fused_layer, send_message=lines.append, ERROR=ERROR):
            fused_layer.run_rank(group, "core", shapes, capacity_factor=1.0)
    return lines


def run_mirror(group) -> list[dict]:
    lines: list[dict] = []
    with dry():
        import mirror

        def keep(bench, path, **line):
            lines.append(line)

        with mock.patch.multiple(mirror, save=keep, ERROR=ERROR, PAUSE_S=0.0, ROUNDS=4):
            with mock.patch.multiple(timing, capture=as_graph, replay_us=lambda graph: graph()):
                mirror.main(only=MODEL, tokens=[TOKENS], path=None)
    return lines


def as_graph(call, repeats):
    return lambda: replayed(call)


def run_training(group) -> list[dict]:
    lines: list[dict] = []
    with dry():
        import training

        # The sixteenth part of few tokens' gradients of topk_weights would be one sum that cancels.
        sizes = dict(TOKENS=(4 * TOKENS,), ERROR=ERROR, HOST_CALLS=1)
        with mock.patch.multiple(training, send_message=lines.append, **sizes):
            training.run_rank(group, [MODEL], capacity_factor=1.0)
    return lines


def run_quantized_layer(group) -> list[dict]:
    lines: list[dict] = []
    with dry():
        import quantized_layer

        with mock.patch.object(quantized_layer, "send_message", lines.append):
            quantized_layer.run_rank(group, [MODEL], [12], [4])
    return lines


def run_perplexity(group) -> list[dict]:
    lines: list[dict] = []
    import perplexity

    whole = perplexity.perplexity
    small = dict(KINDS=(perplexity.Kind.QWEN3_MOE,), LENGTH=16, BATCH=1)
    small["perplexity"] = lambda model, ids: whole(model, ids[:32])
    with mock.patch.multiple(perplexity, send_message=lines.append, **small):
        perplexity.run_rank(group, 1, cases.device().type)
    return lines


def run_train_step(group) -> list[dict]:
    lines: list[dict] = []
    import train_step

    sizes = dict(WARMUPS=0, TRACED=1)
    with mock.patch.multiple(train_step, send_message=lines.append, **sizes):
        train_step.run_rank(group, train_step.Job(MODEL, 2, TOKENS, 2, "cpu"))
    return lines


def run_dispatch_combine(group) -> list[dict]:
    lines: list[dict] = []
    with dry():
        import dispatch_combine

        shapes = [dispatch_combine.Shape(MODEL, 12, dtype=dtype) for dtype in ("bf16", "fp8")]
        with mock.patch.object(dispatch_combine, "send_message", lines.append):
            dispatch_combine.run_rank(group, shapes)
    return lines


def run_internode(group) -> list[dict]:
    with dry():
        import dispatch_combine
        import internode

        shapes = [dispatch_combine.Shape(MODEL, 12, dtype=dtype) for dtype in ("bf16", "fp8")]
        return internode.run_rank(group, shapes, 1)


def run_low_latency(group) -> list[dict]:
    lines: list[dict] = []
    with dry():
        import low_latency

        sizes = dict(MIN_CAPACITY=4, PREFILL_TOKENS=8, NUM_INPUTS=1)
        errors = dict(ERROR=ERROR, FP8_ERROR=10 * ERROR)
        with mock.patch.multiple(low_latency, send_message=lines.append, **sizes, **errors):
            verbs = list(low_latency.VERBS)
            low_latency.run_rank(group, [low_latency.Shape(MODEL, 4)], verbs, 1)
    return lines


def run_host(group, *kinds) -> list[dict]:
    lines: list[dict] = []
    with dry():
        import host

        def small(kind, large, **sizes):
            return build_config(kind, hidden_size=SIZES[1], **sizes)

        sizes = dict(
            TOKENS=8, FEW=4, DECODED=2, LAYERS=2, BATCHES=3, CALLS=1, LONG_CALLS=1, STACKED=2
        )
        names = dict(send_message=lines.append, build_config=small)
        with mock.patch.multiple(host, **sizes, **names):
            host.run_rank(group, [getattr(host, kind) for kind in kinds])
    return lines


def run_host_of_nodes(group) -> list[dict]:
    with environment({"MOE_ENGINE_NODE_SIZE": "1"}):
        return run_host(group, "node_points")


def lines_of(pool, function: Callable, num_ranks: int, *args: str) -> list[dict]:
    """What rank 0 sends; the others send nothing."""
    lines, *others = pool.run(function, *args, num_ranks=num_ranks)
    assert not any(others)
    for line in lines:
        assert line.keys() <= set(FIELDS) and line["ranks"] == num_ranks
    return lines


def eager_of(lines: list[dict]) -> set[tuple[str, str]]:
    """(verb, impl) of the lines with times of eager calls, of which `ratio` goes with a graph."""
    timed = [line for line in lines if line.get("eager_us") is not None]
    assert all(line["eager_us"] == 1000.0 for line in timed)
    return {(line["verb"], line["impl"]) for line in timed}


@pytest.mark.parametrize("num_ranks", cases.slow_unless([(1,)], [1, 2]))
def test_quantized_layer(pool, num_ranks):
    lines = lines_of(pool, run_quantized_layer, num_ranks)
    verbs = [line["verb"] for line in lines if line["dtype"] == "bf16"]
    assert verbs == ["decode", "layer", "grouped_mlp"]
    assert [line["ratio"] for line in lines if "ratio" in line] == [1.0] * 3
    assert eager_of(lines) == {(verb, "moe_engine") for verb in verbs[:2]}


def test_perplexity(pool):
    lines = lines_of(pool, run_perplexity, 1)
    assert [line["dtype"] for line in lines] == 4 * ["bf16"] + 2 * ["fp8"]
    of_whole = [line["perplexity"] for line in lines if line["verb"] == "new"]
    assert max(of_whole) < 1.2 * min(of_whole)


@pytest.mark.parametrize(
    "num_ranks",
    [pytest.param(1, marks=pytest.mark.soak), pytest.param(2, marks=pytest.mark.slow)],
)
def test_fused_layer(pool, num_ranks):
    lines = lines_of(pool, run_fused_layer, num_ranks)
    impls = "torch", "moe_engine", "moe_engine, passes", "nccl", "deep_ep"
    assert eager_of(lines) == {("layer", impl) for impl in impls}
    for impl in impls[1:3]:
        assert by_impl(lines)[impl]["eager_ratio"] == 1.0
    check_passes(lines, num_ranks)


def by_impl(lines: list[dict]) -> dict[str, dict]:
    """The lines of a bench with one for each impl."""
    found = {line["impl"]: line for line in lines}
    assert len(found) == len(lines)
    return found


def check_passes(lines: list[dict], num_ranks: int) -> None:
    """One line is of a layer in passes, which the tokens of several ranks need."""
    (line,) = (line for line in lines if "passes" in line)
    assert line["impl"] == "moe_engine, passes"
    assert (line["capacity_factor"], line["passes"]) == (1.0, num_ranks)


def test_mirror(pool):
    """Both layers give the result of torch's, of which each is compared."""
    [lines] = pool.run(run_mirror, num_ranks=1)
    assert [line["impl"] for line in lines] == [
        *("torch", "moe_engine", "moe_engine, as in a backward")
    ]
    assert all((line["us"], line["ratio"], line["ranks"]) == (250.0, 1.0, 2) for line in lines)


@pytest.mark.parametrize(
    "num_ranks", [pytest.param(1, marks=pytest.mark.soak), pytest.param(2, marks=pytest.mark.slow)]
)
def test_training(pool, num_ranks):
    lines = lines_of(pool, run_training, num_ranks)
    policies = {f"moe_engine, {one}" for one in ("none", "pre", "rows", "all", "passes")}
    whole = "torch_layer" if num_ranks == 1 else "nccl"
    assert by_impl(lines).keys() == policies | {"moe_engine", "torch", whole}
    timed = {impl for impl, line in by_impl(lines).items() if "forward_us" in line}
    assert timed == {"moe_engine", "moe_engine, passes", whole}
    assert all(line["us"] == 1000.0 for line in lines)
    check_passes(lines, num_ranks)


@pytest.mark.parametrize("num_ranks", cases.slow_unless([(1,)], [1, 2]))
def test_train_step(pool, num_ranks):
    pytest.importorskip("transformers")
    if pool.device == "cuda":
        pytest.skip("tiny models run on emulated ranks")
    from train_step import IMPLS, ROWS, table

    lines = lines_of(pool, run_train_step, num_ranks)
    assert [line["impl"] for line in lines] == list(IMPLS)
    for line in lines:
        assert 0 < line["host_us"] <= line["us"]
        assert line["tokens_per_s"] == pytest.approx(1e6 * TOKENS * num_ranks / line["us"], abs=1)
        assert all(line[field] is not None for field in ROWS.values())
    assert lines[1]["ratio"] == pytest.approx(lines[1]["us"] / lines[0]["us"], rel=1e-3)
    assert lines[1]["error"] < 1e-5
    assert table(lines).row_count == len(ROWS) + 3


@pytest.mark.slow
def test_dispatch_combine(pool):
    lines = lines_of(pool, run_dispatch_combine, 2)
    verbs = "layout", "dispatch", "dispatch_cached", "combine"
    want = {(verb, impl) for impl in ("moe_engine", "deep_ep") for verb in verbs}
    want |= {("dispatch", "moe_engine, counts on the host")}
    elastic = "ElasticBuffer", "ElasticBuffer, by expert"
    want |= {(verb, impl) for impl in elastic for verb in verbs if verb != "layout"}
    assert eager_of(lines) == want | {(verb, "nccl") for verb in ("dispatch", "combine")}


@pytest.mark.slow
def test_internode(pool):
    if pool.device == "cuda":
        pytest.skip("the bench runs there; NVSHMEM serves one set of ranks")
    lines = lines_of(pool, run_internode, 2)
    assert {line["impl"] for line in lines} == {"moe_engine, 2 nodes, emulated"}
    verbs = "layout", "dispatch", "dispatch_cached"
    assert {line["verb"] for line in lines if line["dtype"] == "fp8"} == {*verbs}
    assert {line["verb"] for line in lines if line["dtype"] == "bf16"} == {*verbs, "combine"}
    for line in lines:
        assert line["ratio"] > 0 and (line["remote_gbs"] is None) == (line["verb"] == "layout")


@pytest.mark.slow
def test_low_latency(pool):
    lines = lines_of(pool, run_low_latency, 2)
    verbs = "dispatch", "combine", "round_trip"
    want = {(verb, impl) for impl in ("moe_engine", "deep_ep", "nccl") for verb in verbs}
    assert eager_of(lines) == want | {("layer", "moe_engine")}


@pytest.mark.slow
def test_host_of_nodes(pool):
    if pool.device == "cuda":
        pytest.skip("the bench runs there; NVSHMEM serves one set of ranks")
    lines = lines_of(pool, run_host_of_nodes, 2)
    assert {line["impl"] for line in lines} == {"moe_engine, 2 nodes"}
    assert len({line["verb"] for line in lines}) == len(lines) == 11


@pytest.mark.parametrize(
    "num_ranks", [pytest.param(1, marks=pytest.mark.soak), pytest.param(2, marks=pytest.mark.slow)]
)
def test_host(pool, num_ranks):
    pytest.importorskip("transformers")
    kinds = "verb_points", "expert_points", "transformers_points"
    lines = lines_of(pool, run_host, num_ranks, *kinds)
    seen = {(line["verb"], line["impl"]) for line in lines}
    assert all(line["host_us"] > 0 for line in lines)
    theirs = {verb for verb, impl in seen if impl == "deep_ep"}
    assert len(theirs) == 10 and theirs < {verb for verb, impl in seen if impl == "moe_engine"}
    for verb in "transformers_decode", "transformers_experts":
        impls = {impl for name, impl in seen if name == verb}
        assert impls == {"moe_engine", "transformers, grouped_mm", "transformers, batched_mm"}


def test_a_bench_of_which_no_part_is_chosen_says_so():
    import fused_layer
    import typer

    with pytest.raises(typer.BadParameter, match="choose one or more of core"):
        fused_layer.main()
