"""Traces of layers are complete, well nested, on one clock, and do not change the result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace

import cases
import pytest
import torch
import triton
from dispatch_cases import make_inputs
from layer_cases import make_weights
from typer.testing import CliRunner

from moe_engine import Buffer, DelayedWgrad, LayerConfig, Options, moe_ffn, symm
from moe_engine.device import ptx
from moe_engine.device.context import ROLE_SUM, Phase, Role
from moe_engine.device.lang import begin_span, end_span
from moe_engine.emulation import PerRank, RankError, RankPool
from moe_engine.errors import BackendError, CapacityError, PeerTimeout
from moe_engine.grouped_gemm import gemm_config, num_compute_programs
from moe_engine.layer_config import LayerProblem
from moe_engine.symm.slots import SlotLayout, Slots
from moe_engine.tools import timeline, trace
from moe_engine.tools.cli import app
from moe_engine.tools.trace import Clock, Recorder, Span, align_clocks, summarize

RANKS, TOKENS, NUM_LOCAL, TOPK, HIDDEN, COLUMNS = 2, [12, 5], 3, 3, 136, 72
STAGES, RETURN_STAGES = 3, 2


@pytest.fixture(scope="module")
def traced_pool():
    device = "cuda" if torch.cuda.device_count() >= RANKS else "cpu"
    if device == "cpu":
        cases.skip_without_interpreter()
    with RankPool(RANKS, device, timeout_s=240, env={"MOE_ENGINE_TRACE": "1"}) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def inputs():
    parts = make_inputs(RANKS, TOKENS, HIDDEN, RANKS * NUM_LOCAL, TOPK, "one_hot", "bf16")
    return *parts, *make_weights(RANKS, NUM_LOCAL, HIDDEN, COLUMNS, "bf16")


def run_layer(group, x, topk_idx, topk_weights, up, down, claims_tiles=False):
    """(result, spans, clocks, programs of a GEMM, block_m, block_n of both GEMMs), without spans
    and clocks where kernels do not record."""
    device = cases.device()
    args = [part.to(device) for part in (x, topk_idx, topk_weights, up, down)]
    options = Options(layer=LayerConfig(STAGES, RETURN_STAGES, claims_tiles=claims_tiles))
    sizes = max(TOKENS), HIDDEN, RANKS * NUM_LOCAL, TOPK
    buffer = Buffer.for_tokens(group, *sizes, options=options)
    first = moe_ffn(*args, buffer)
    spans, clocks = [], []
    if ptx.TRACING:
        recorder = Recorder(buffer._engine.slots.context)
        clocks = align_clocks(group)
        moe_ffn(*args, buffer)
        recorder.clear()
    torch.distributed.barrier(group)
    out = moe_ffn(*args, buffer)
    buffer.check()
    if ptx.TRACING:
        spans = recorder.read(clocks[group.rank()])
    torch.distributed.barrier(group)
    buffer.destroy()
    assert torch.equal(out, first)
    tiles = gemm_config(args[3], max(TOKENS) * TOPK, "swiglu")
    down_tiles = gemm_config(args[4], max(TOKENS) * TOPK, block_m=tiles.block_m)
    programs = num_compute_programs(device, tiles)
    return out.cpu(), spans, clocks, programs, tiles.block_m, tiles.block_n, down_tiles.block_n


@pytest.fixture(scope="module")
def results(traced_pool, inputs):
    return traced_pool.run(run_layer, *map(PerRank, inputs))


def all_spans(results):
    return [span for result in results for span in result[1]]


def test_a_trace_changes_no_bit(pool, results, inputs):
    plain = pool.run(run_layer, *map(PerRank, inputs), num_ranks=RANKS)
    for (out, spans, *_), (expected, none, *_) in zip(results, plain, strict=True):
        assert torch.equal(out, expected)
        assert spans and not none


def test_the_file_opens_and_spans_nest(results, tmp_path):
    spans = all_spans(results)
    trace.save(spans, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            begin, length = (round(1000 * event[name]) for name in ("ts", "dur"))
            assert length >= 0
            tracks[event["pid"], event["tid"]].append((begin, -(begin + length), event["name"]))
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert named == tracks.keys()
    assert {e["pid"] for e in events if e["name"] == "process_name"} == set(range(RANKS))
    assert sum(map(len, tracks.values())) == len(spans)
    for track in tracks.values():
        around = []
        for begin, minus_end, name in sorted(track):
            while around and around[-1][0] <= begin:
                around.pop()
            assert not around or -minus_end <= around[-1][0]
            assert not around or name.startswith("wait for")
            around.append((-minus_end, name))


def test_the_file_of_two_spans():
    spans = [span(64 * 2 + 8, Role.UP, 1500, 2750, rank=1), span(0, Phase.ROWS, 1000, 1250)]
    events = trace.chrome_trace(spans)["traceEvents"]
    times = [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert times == [(1, 136, "up", 0.5, 1.25), (0, 0, "wait for rows", 0.0, 0.25)]
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == [
        "SM 0, warp 0",
        "SM 2, warp 8",
    ]


LAYER_ROLES = {role for role in Role if role < Role.OPEN}
"""The others are those of low-latency calls."""


def test_every_role_is_recorded(traced_pool, results):
    waits = {Phase.COUNTS, Phase.ROWS, Phase.METADATA, Phase.TILES, Phase.RETURNED_ROWS}
    for result in results:
        assert {span.role for span in result[1]} == LAYER_ROLES | waits | {Phase.SLOT_FREE}
        if traced_pool.device == "cpu":
            assert all(span.sm == span.program for span in result[1])


def test_each_tile_and_stage_is_recorded_once(results, inputs):
    check_each_is_recorded_once(results, inputs)
    for _, spans, _, programs, *_ in results:
        tiles = [span for span in spans if span.role in (Role.UP, Role.DOWN)]
        assert all(span.program == span.item % programs for span in tiles)


def test_each_claimed_tile_is_recorded_once(traced_pool, inputs):
    parts = *map(PerRank, inputs), True
    check_each_is_recorded_once(traced_pool.run(run_layer, *parts), inputs)


def check_each_is_recorded_once(results, inputs):
    """Each tile, and each stage of a program."""
    ids = torch.cat([idx.flatten() for idx in inputs[1]])
    counts = torch.bincount(ids, minlength=RANKS * NUM_LOCAL).view(RANKS, NUM_LOCAL)
    for rank, (_, spans, _, _, block_m, up_n, down_n) in enumerate(results):
        num_m = int((-(-counts[rank] // block_m)).sum())
        widths = {Role.UP: (COLUMNS, up_n // 2), Role.DOWN: (HIDDEN, down_n)}
        for role, (columns, width) in widths.items():
            tiles = [span for span in spans if span.role == role]
            expected = range(num_m * -(-columns // width))
            assert sorted(span.item for span in tiles) == list(expected)
        of_stages = (Role.PUSH, STAGES, 1), (Role.COPY, STAGES, 2), (Role.RETURN, RETURN_STAGES, 1)
        for role, stages, times in of_stages:
            parts = Counter((s.program, s.item) for s in spans if s.role == role)
            here = {program for program, _ in parts}
            each = [(p, stage) for p in here for stage in range(stages)]
            assert parts == Counter(each * times)
        exchanges = [span.item for span in spans if span.role == Role.EXCHANGE]
        assert sorted(exchanges) == list(range(RANKS))
        num_waits = sum(span.role == Phase.ROWS for span in spans)
        assert num_waits >= num_m * -(-COLUMNS // (up_n // 2))


def test_what_follows_from_another_begins_after_it(results):
    """On the clock of rank 0, and as far as clocks are known."""
    spans, clocks = all_spans(results), results[0][2]
    error = sum(clock.error_ns for clock in clocks)
    first_push = min(span.begin for span in spans if span.role == Role.PUSH)
    for rank in range(RANKS):
        end = {
            role: max(s.end for s in spans if (s.rank, s.role) == (rank, role))
            for role in LAYER_ROLES
        }
        tile = min(s.end for s in spans if (s.rank, s.role) == (rank, Role.UP))
        assert tile >= first_push - error
        assert end[Role.SUM] >= max(end[Role.DOWN], end[Role.UP])
        others = [s.end for s in spans if s.role == Role.RETURN and s.rank != rank]
        assert end[Role.SUM] >= max(others) - error


# --- The backward --------------------------------------------------------------------------------


def run_backward(group, save):
    """What `moe-engine trace --backward` records of a tiny layer."""
    return timeline.run_rank(group, timeline.Job("tiny", 9, 2, cases.device().type, save))[0]


SENDS = {Role.EXCHANGE, Role.PUSH, Role.COPY}
PRODUCTS = {Role.DGRAD_DOWN, Role.DGRAD_UP, Role.WGRAD_DOWN, Role.WGRAD_UP}
RETURNS = {Role.RETURN_METADATA, Role.RETURN, Role.SUM}
BETWEEN = {Role.ACTIVATION_GRADIENT}


def check_one_span_a_program(spans, role):
    """Of this role, whose item is the program's number."""
    found = [(span.program, span.item) for span in spans if span.role == role]
    assert found and sorted(found) == [(program, program) for program in range(len(found))]


AGAIN = ("none", 3, True), ("pre", 2, False), ("rows", 1, True)


@pytest.mark.parametrize(
    "save, num_sends, is_again",
    [pytest.param(*one, marks=[pytest.mark.slow] * (one[0] != "rows")) for one in AGAIN],
)
def test_steps_of_a_backward(traced_pool, save, num_sends, is_again):
    """Each is recorded, as often as its policy takes it, and no step of the forward."""
    for spans in traced_pool.run(run_backward, save):
        work = [span for span in spans if not span.is_wait]
        again = {Role.UP} if is_again else set()
        assert {span.role for span in work} == SENDS | PRODUCTS | RETURNS | again | BETWEEN
        assert sum(span.role == Role.EXCHANGE for span in work) == num_sends * RANKS
        for role in PRODUCTS | again:
            items = sorted(span.item for span in work if span.role == role)
            assert items == list(range(len(items)))
        first = {role: min(span.begin for span in work if span.role == role) for role in PRODUCTS}
        assert first[Role.DGRAD_DOWN] < first[Role.DGRAD_UP] < first[Role.WGRAD_DOWN]
        assert first[Role.WGRAD_DOWN] < first[Role.WGRAD_UP]
        check_one_span_a_program(work, Role.ACTIVATION_GRADIENT)
        begin = min(s.begin for s in work if s.role == Role.ACTIVATION_GRADIENT)
        assert first[Role.DGRAD_DOWN] < begin < first[Role.DGRAD_UP]
        summary = summarize(spans)[0]
        assert summary.roles["wgrad up"].num_spans and 0 < summary.computing_ns < summary.layer_ns


def run_kept(group):
    """Spans of a forward that saves rows, and of a backward that delays gradients of weights."""
    job = timeline.Job("tiny", 9, 1, cases.device().type, "rows")
    num_experts, hidden, columns, num_topk = timeline.sizes_of_model(job.model)
    problem = LayerProblem(RANKS, job.tokens, num_experts, num_topk, hidden, columns)
    inputs = timeline.random_layer(problem, group.rank(), job.device)
    buffer = Buffer.for_tokens(group, job.tokens, hidden, num_experts, num_topk)
    recorder, clock = Recorder(buffer._engine.slots.context), Clock(0, 0)
    delayed = DelayedWgrad()
    weights = [one.requires_grad_() for one in inputs[3:]]
    y = moe_ffn(*inputs, buffer, save="rows", wgrad=delayed)
    forward = recorder.read(clock)
    recorder.clear()
    y.float().sum().backward()
    backward = recorder.read(clock)
    delayed.backward_dw()
    torch.distributed.barrier(group)
    buffer.destroy()
    assert all(one.grad is not None for one in weights)
    return forward, backward


def test_rows_that_are_kept(traced_pool):
    for forward, backward in traced_pool.run(run_kept):
        for spans, after in (forward, Role.UP), (backward, Role.DGRAD_UP):
            check_one_span_a_program(spans, Role.KEEP)
            begin = min(span.begin for span in spans if span.role == Role.KEEP)
            assert begin >= max(span.end for span in spans if span.role == after)


# --- Clocks --------------------------------------------------------------------------------------


def compare_clocks(group, ahead_s):
    """Clocks as each rank sees them, while those of the ranks are `ahead_s`."""
    shift = int(1e9 * ahead_s[group.rank()])
    ptx.time = SimpleNamespace(monotonic_ns=lambda: time.monotonic_ns() + shift, sleep=time.sleep)
    try:
        return align_clocks(group)
    finally:
        ptx.time = time


@pytest.mark.parametrize("ahead_s", [[0, 0], [3, 8], [3, -1]])
def test_clocks_are_compared(traced_pool, ahead_s):
    if traced_pool.device == "cuda":
        pytest.skip("the clocks of GPUs are what they are")
    for clocks in traced_pool.run(compare_clocks, ahead_s):
        assert clocks[0] == Clock(0, 0)
        assert abs(clocks[1].ahead_ns - 1e9 * (ahead_s[1] - ahead_s[0])) <= clocks[1].error_ns
        assert clocks[1].error_ns < 2e8


def test_the_quickest_answer_counts():
    assert trace.best_clock([(200, 5170, 300), (100, 5060, 120)]) == Clock(4950, 10)
    assert trace.best_clock([(100, 60, 121)]) == Clock(-50, 11)


def lose_rank_1(group):
    """What `align_clocks` raises when rank 1 does not answer, and after how many seconds."""
    real, begin = trace.ping_kernel, time.monotonic()
    if group.rank() == 1:
        trace.ping_kernel = None
    os.environ["MOE_ENGINE_TIMEOUT_S"] = "3"
    try:
        align_clocks(group)
    except PeerTimeout as error:
        return str(error), error.peer, time.monotonic() - begin
    finally:
        trace.ping_kernel = real
        del os.environ["MOE_ENGINE_TIMEOUT_S"]


def test_a_rank_that_does_not_answer_is_named(traced_pool):
    for text, peer, seconds in traced_pool.run(lose_rank_1):
        assert peer == 1 and "clocks" in text and "TypeError" in text and "(rank 1)" in text
        assert seconds < 30


# --- The recorder --------------------------------------------------------------------------------


@triton.jit
def record_items(context, first):
    since = begin_span()
    for item in range(first, first + 3):
        since = end_span(ROLE_SUM, item, since, context)


def fill(group):
    """(spans so far, items that were recorded, what follows the buffer) with room for two of
    three spans."""
    slots = Slots(lambda size, _: symm.allocate(group, size), SlotLayout(RANKS, 128), 0, 10.0)
    recorder = Recorder(slots.context)
    buffer = recorder._buffer.new_full((recorder._buffer.numel() + 4,), -1)
    buffer[0] = ptx.MAX_SPANS.value - 2
    slots.context.fields[trace.ContextField.TRACE] = buffer.data_ptr()
    record_items[(1,)](slots.context.fields, 7)
    items = buffer[-12:-4].view(torch.int32)[1::8].tolist()
    return int(buffer[0]), items, buffer[-4:].tolist()


def test_a_full_buffer_takes_no_more(traced_pool):
    for count, items, after in traced_pool.run(fill):
        assert count == ptx.MAX_SPANS.value + 1
        assert items == [7, 8]
        assert after == [-1] * 4


def test_more_spans_than_fit_are_an_error(monkeypatch):
    context = SimpleNamespace(rank=3, fields=torch.zeros(32, dtype=torch.int64))
    with pytest.raises(BackendError, match="MOE_ENGINE_TRACE=1"):
        Recorder(context)
    monkeypatch.setattr(trace, "TRACING", True)
    recorder = Recorder(context)
    assert context.fields[trace.ContextField.TRACE] == recorder._buffer.data_ptr()
    fields = torch.tensor([Role.UP, 5, 9, 64 * 2 + 8], dtype=torch.int32)
    recorder._buffer[:6] = torch.tensor([1, 0, *fields.view(torch.int64).tolist(), 1030, 1050])
    assert recorder.read(Clock(1000, 1)) == [Span(3, 136, 9, Role.UP, 5, 30, 50)]
    recorder._buffer[0] = ptx.MAX_SPANS.value + 1
    with pytest.raises(CapacityError, match=r"1048577 spans were recorded; .* room for 1048576\."):
        recorder.read(Clock(0, 0))
    recorder.clear()
    assert recorder.read(Clock(0, 0)) == []


# --- Sums ----------------------------------------------------------------------------------------


def span(track, role, begin, end, rank=0):
    return Span(rank, track, 0, role, 0, begin, end)


def test_summary_of_the_example():
    """SM 0 computes from 10 to 30 without 4 in waits, and from 40 to 60; SM 1 in two programs from
    20 to 50 and 45 to 70 without 45 to 48; SM 2 never. Mean: (16 + 20 + 47 + 3) / 3."""
    spans = [
        span(0, Role.UP, 10, 30),
        span(0, Phase.ROWS, 12, 15),
        span(0, Phase.ROWS, 29, 30),
        span(0, Phase.ROWS, 30, 33),  # after the tiles
        span(0, Role.DOWN, 40, 60),
        span(64, Role.UP, 20, 50),
        span(68, Role.DOWN, 45, 70),
        span(68, Phase.ROWS, 45, 48),
        span(128, Role.EXCHANGE, 0, 8),
        span(128, Phase.COUNTS, 1, 6),
        span(130, Role.PUSH, 5, 80),
        span(0, Role.SUM, 1000, 1100, rank=1),
    ]
    first, second = summarize(spans)
    assert (first.rank, first.layer_ns) == (0, 80)
    assert first.computing_ns == (36 + 50 + 0) / 3
    assert first.exposed_ns == 80 - 86 / 3
    seen = {name: (r.num_spans, r.busy_ns, r.idle_ns) for name, r in first.roles.items()}
    assert seen == {
        "exchange": (1, 3, 5),
        "push": (1, 75, 0),
        "up": (2, 46, 4),
        "down": (2, 42, 3),
        "wait for rows": (1, 0, 3),
    }
    assert (second.rank, second.layer_ns, second.computing_ns) == (1, 100, 0)
    assert summarize([]) == []


def test_sums_of_a_layer(results):
    for rank, summary in enumerate(summarize(all_spans(results))):
        spans = results[rank][1]
        assert summary.rank == rank
        assert 0 < summary.computing_ns < summary.layer_ns
        total = sum(role.busy_ns + role.idle_ns for role in summary.roles.values())
        inside = sum(s.end - s.begin for s in spans if not s.is_wait)
        outside = sum(r.idle_ns for name, r in summary.roles.items() if name.startswith("wait"))
        assert total == inside + outside
        assert summary.roles["sum"].idle_ns > 0


# --- The command, and what is compiled -----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, products",
    [
        ([], {"up", "down"}),
        (["--fp8"], {"up", "down"}),
        (["--backward"], {"dgrad down", "dgrad up", "wgrad down", "wgrad up"}),
    ],
)
def test_command_line(tmp_path, options, products):
    if torch.cuda.device_count() < RANKS:
        cases.skip_without_interpreter()
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "trace.json", tmp_path / "timeline.png"
    options = [*"trace --model tiny --ranks 2 --tokens 9 --calls 2".split(), *options, "--path"]
    result = CliRunner().invoke(app, [*options, str(path), "--picture", str(picture)])
    assert result.exit_code == 0, result.output
    assert "exposed communication" in result.output
    spans = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    assert f"{len(spans)} spans are in" in result.output
    assert {e["pid"] for e in spans} == {0, 1}
    for name in products:
        tiles = [(e["pid"], e["args"]["item"]) for e in spans if e["name"] == name]
        assert len(tiles) == len(set(tiles)) > 0  # of one call
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_the_command_refuses():
    result = CliRunner().invoke(app, ["trace", "--model", "gpt"])
    assert result.exit_code == 2
    assert "deepseek-v3" in result.output
    result = CliRunner().invoke(app, ["trace", "--model", "tiny", "--ranks", "3"])
    assert result.exit_code == 2
    assert "8 experts" in result.output
    result = CliRunner().invoke(app, ["trace", "--save", "pre"])
    assert result.exit_code == 2
    assert "--backward" in result.output
    result = CliRunner().invoke(app, ["trace", "--backward", "--fp8"])
    assert result.exit_code == 2
    assert "no gradients" in result.output
    result = CliRunner().invoke(app, ["trace", "--backward", "--save", "some"])
    assert result.exit_code == 1
    assert "save is 'some'" in result.output


def test_errors_of_ranks_are_told_plainly(monkeypatch):
    def fail(*_):
        raise RankError({1: BackendError("no such thing")})

    monkeypatch.setattr("moe_engine.tools.timeline.run_job", fail)
    result = CliRunner().invoke(app, ["trace"])
    assert result.exit_code == 1
    assert "BackendError: no such thing" in result.output


@pytest.mark.slow
def test_traced_kernels_compile_as_well():
    """What holds of the kernels of a layer holds where they record."""
    tests = Path(__file__).with_name("test_compile_layer.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)],
        env=os.environ | {"MOE_ENGINE_TRACE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
