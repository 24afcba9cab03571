"""Ranks that make different calls: each error names both ranks, and no rank takes wrong rows."""

from __future__ import annotations

from functools import partial

import cases
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from rounds import FEW, MOST, Round, draw, expert_weights, new_buffer

from moe_engine import Buffer, MoeEngineError, RoutingError, moe_ffn
from moe_engine.device.context import TOLD_BIT, ContextField
from moe_engine.symm import allocate
from moe_engine.symm.device_context import DeviceContext
from moe_engine.symm.slots import SlotLayout

NUM_LOCAL = 4
TIMEOUT_S = 3.0
"""The least deadline of calls that wait for each other in vain."""


def prepare(buffer):
    """Two dispatches with equally many rows and two low-latency ones; what `CALLS` are made of. A
    layer comes first: its hosts meet once, for the memory of its expert rows."""
    num_experts, rank = NUM_LOCAL * buffer.group_size, buffer.rank
    one = Round("normal", num_tokens=(3, 2))
    x, idx, weights = (part[rank].to(cases.device()) for part in draw(one, 2, NUM_LOCAL))
    layout = buffer.get_dispatch_layout(idx, num_experts)
    per_rank, _, per_expert, in_rank, _ = layout
    args = None, per_rank, None, in_rank, per_expert, idx, weights
    up, down = (w[rank].to(x.device) for w in expert_weights(one, 2, NUM_LOCAL))
    moe_ffn(x, idx, weights, up, down, buffer)

    def dispatch(x, **more):
        return buffer.dispatch(x, *args, **more)

    def low_latency(x, **more):
        return buffer.low_latency_dispatch(x.bfloat16(), idx, FEW, num_experts, **more)

    first, second = dispatch(x), dispatch(x + 1)
    near, far = (low_latency(x + n, use_fp8=False) for n in (0, 1))

    def combine(handle, columns=16, dtype=torch.float32, weights=None):
        rows = first[0].repeat(1, 4)[:, :columns].to(dtype)
        return buffer.combine(rows, handle, topk_weights=weights)

    def low_latency_combine(dispatched):
        return buffer.low_latency_combine(dispatched[0], idx, weights, dispatched[2])

    return {
        "dispatch": lambda: dispatch(x),
        "dispatch of 12 columns": lambda: dispatch(x[:, :12]),
        "dispatch in bf16": lambda: dispatch(x.bfloat16()),
        "cached dispatch": lambda: buffer.dispatch(x, first[4]),
        "cached dispatch of the second": lambda: buffer.dispatch(x, second[4]),
        "cached dispatch of 24 columns": lambda: buffer.dispatch(x.repeat(1, 2)[:, :24], first[4]),
        "combine": lambda: combine(first[4]),
        "combine of the second": lambda: combine(second[4]),
        "combine of 8 columns": lambda: combine(first[4], columns=8),
        "combine of 40 columns": lambda: combine(first[4], columns=40),
        "combine in bf16": lambda: combine(first[4], dtype=torch.bfloat16),
        "combine with weights": lambda: combine(first[4], weights=first[2]),
        "moe_ffn": lambda: moe_ffn(x, idx, weights, up, down, buffer),
        "moe_ffn with one expert fewer": lambda: moe_ffn(
            x, idx[:, 1:].contiguous(), weights[:, 1:].contiguous(), up, down, buffer
        ),
        "moe_ffn of few": lambda: moe_ffn(x, idx, weights, up, down, buffer, FEW),
        "low-latency dispatch": lambda: low_latency(x, use_fp8=False),
        "low-latency combine": lambda: low_latency_combine(near),
        "low-latency combine of the second": lambda: low_latency_combine(far),
    }


NAMES = (
    *("dispatch", "dispatch of 12 columns", "dispatch in bf16", "cached dispatch"),
    *("cached dispatch of the second", "cached dispatch of 24 columns", "combine"),
    *("combine of the second", "combine of 8 columns", "combine of 40 columns", "combine in bf16"),
    *("combine with weights", "moe_ffn", "moe_ffn with one expert fewer", "moe_ffn of few"),
    *("low-latency dispatch", "low-latency combine", "low-latency combine of the second"),
)
LOW_LATENCY = {name for name in NAMES if name.startswith("low-latency")} | {"moe_ffn of few"}


def meet(pair):
    """Whether both calls are made in the same memory, so that each sees what the other is."""
    return (pair[0] in LOW_LATENCY) == (pair[1] in LOW_LATENCY)


def call(group, pairs):
    """What each of several calls, (of rank 0, of rank 1) on a Buffer of their own, raises here."""
    found = []
    for pair in pairs:
        if meet(pair):
            buffer = new_buffer(group, timeout_s=None)
            calls = prepare(buffer)
        else:  # each rank waits in vain
            make = partial(new_buffer, group)
            buffer, _, calls = cases.used_buffer(group, make, prepare, TIMEOUT_S, times=1.0)
        error = None
        torch.distributed.barrier(group)
        try:
            calls[pair[group.rank()]]()
            buffer.check()
        except MoeEngineError as raised:
            error = type(raised).__name__, str(raised)
        torch.distributed.barrier(group)
        buffer.destroy()
        found.append(error)
    return found


def check(pool, pairs):
    by_rank = pool.run(call, pairs, num_ranks=2, timeout_s=300.0)
    for pair, *errors in zip(pairs, *by_rank, strict=True):
        if pair[0] == pair[1]:
            assert errors == [None, None], (pair, errors)
            continue
        assert None not in errors, (pair, errors)
        if meet(pair):
            for kind, text in errors:
                assert kind in ("ShapeError", "OutOfStep"), (pair, kind, text)
                assert "rank 0" in text and "rank 1" in text, (pair, text)


def test_every_call_is_listed(pool):
    assert pool.run(list_calls, num_ranks=2) == [list(NAMES)] * 2


def list_calls(group):
    buffer = new_buffer(group)
    names = list(prepare(buffer))
    torch.distributed.barrier(group)
    buffer.destroy()
    return names


@pytest.mark.parametrize(
    "other", cases.slow_unless([(name,) for name in (NAMES[7], *NAMES[9:12])], NAMES[7:12])
)
def test_combines_that_differ(pool, other):
    check(pool, [("combine", other)])


@pytest.mark.parametrize("other", ["combine", *NAMES[4:6]])
def test_cached_dispatches_that_differ(pool, other):
    check(pool, [("cached dispatch", other)])


@pytest.mark.parametrize(
    "other", cases.slow_unless([("combine",)], ["combine", *NAMES[:4:3], NAMES[13]])
)
def test_layers_and_other_calls(pool, other):
    check(pool, [("moe_ffn", other), (other, "moe_ffn")])


@pytest.mark.parametrize("other", NAMES[-2:])
def test_low_latency_calls_that_differ(pool, other):
    first = "low-latency dispatch" if other == NAMES[-2] else "low-latency combine"
    check(pool, [(first, other), (other, first)])


def one_call_ahead(group):
    """A dispatch of rank 1 while rank 0 combines: rows of the one are no sums of the other."""
    buffer = new_buffer(group, timeout_s=None)
    calls = prepare(buffer)
    names = ["low-latency combine", "low-latency dispatch", "low-latency combine"]
    error = None
    try:
        for name in names[group.rank() :]:
            calls[name]()
        buffer.check()
    except MoeEngineError as raised:
        error = type(raised).__name__
    torch.distributed.barrier(group)
    buffer.destroy()
    return error


def test_a_rank_one_call_ahead_is_no_peer(pool):
    assert pool.run(one_call_ahead, num_ranks=2) == ["OutOfStep", "OutOfStep"]


PAIRS = st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES))


@pytest.mark.timeout(900)
@settings(phases=[Phase.generate], max_examples=cases.few_examples())
@given(pair=PAIRS)
def test_any_two_calls(pool, pair):
    check(pool, [pair])


@pytest.mark.soak
@pytest.mark.timeout(7200)
@settings(max_examples=100)
@given(pairs=st.lists(PAIRS, min_size=5, max_size=5))
def test_any_two_calls_at_length(pool, pairs):
    check(pool, pairs)


# --- One rank that cannot make the call ---------------------------------------------------------


def too_many_tokens(group, verb):
    """The errors of ranks when rank 0 brings more tokens than fit, in one of the verbs."""
    buffer = new_buffer(group, timeout_s=None)
    rank, num_experts = group.rank(), NUM_LOCAL * group.size()
    count = (FEW + 1 if verb == "low_latency" else MOST + 1) if rank == 0 else 2
    x, weights = cases.tokens(count, 16, 3, torch.float32, 0)
    idx = cases.route("uniform", count, num_experts, 3, 0)
    x, idx, weights = (t.to(cases.device()) for t in (x, idx, weights))
    up, down = (w[rank].to(x.device) for w in expert_weights(Round(""), group.size(), NUM_LOCAL))
    found = []
    for _ in range(2):
        try:
            if verb == "low_latency":
                buffer.low_latency_dispatch(x.bfloat16(), idx, FEW, num_experts, use_fp8=False)
            elif verb == "dispatch":
                per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, num_experts)
                buffer.dispatch(x, None, per_rank, None, in_rank, per_expert, idx, weights)
            else:
                moe_ffn(x, idx, weights, up, down, buffer, FEW if verb == "decode" else None)
            buffer.check()
        except MoeEngineError as error:
            found.append((type(error).__name__, str(error)))
    torch.distributed.barrier(group)
    buffer.destroy()
    return found


@pytest.mark.parametrize("verb", ["dispatch", "moe_ffn", "decode", "low_latency"])
def test_too_many_tokens_of_one_rank_are_told_to_all(pool, verb):
    for found in pool.run(too_many_tokens, verb, num_ranks=2):
        assert [kind for kind, _ in found] == ["TooManyTokens"] * 2
        assert f"{FEW + 1 if verb == 'low_latency' else MOST + 1} tokens" in found[0][1]


def told_before(group):
    """The fields of a context that is made once a peer has told of its end."""
    layout = SlotLayout.fit(1 << 16, 1)
    block = allocate(group, layout.num_bytes, "single", cases.device())
    block.local[8 * ContextField.BROKEN + TOLD_BIT // 8] = 1
    return DeviceContext(layout, 0, block, 1.0).fields.tolist()


def test_a_rank_may_break_off_before_another_has_its_context(pool):
    """Once memory is allocated, a peer may tell of its end at any time."""
    [fields] = pool.run(told_before, num_ranks=1)
    assert fields[ContextField.BROKEN] == 1 << TOLD_BIT
    assert fields[ContextField.TIMEOUT_NS] == 10**9
    assert fields[ContextField.NUM_RANKS] == 1


def grow_alone(group):
    """The errors of ranks when one of them does not let its memory grow."""
    num_experts = NUM_LOCAL * group.size()
    buffer = Buffer(group, Buffer.size_hint(MOST, 64, group.size(), num_experts, 3))
    one = Round("normal")
    x, idx, weights = (t[group.rank()].to(cases.device()) for t in draw(one, 2, NUM_LOCAL))
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, num_experts)
    worst = 100 if group.rank() else 0
    text = None
    try:
        buffer.dispatch(x, None, per_rank, None, in_rank, per_expert, idx, weights, 1, worst)
        buffer.check()
    except MoeEngineError as error:
        text = f"{type(error).__name__}: {error}"
    torch.distributed.barrier(group)
    buffer.destroy()
    return text


def test_memory_grows_on_all_ranks_or_on_none(pool):
    for text in pool.run(grow_alone, num_ranks=2):
        assert text.startswith("ShapeError") and "whether memory may grow" in text


def bad_ids_of_one_rank(group, verb):
    """Three rounds, the second after ids of rank 1 were bad: the errors, and what they hold."""
    buffer = new_buffer(group)
    one = Round(verb)
    x, idx, weights = (t[group.rank()].to(cases.device()) for t in draw(one, 2, NUM_LOCAL))
    up, down = (w[group.rank()].to(x.device) for w in expert_weights(one, 2, NUM_LOCAL))
    bad = idx.clone()
    bad[0, 0] = 99
    found, outs = [], []
    for number in range(3):
        ids = bad if number == 0 and group.rank() == 1 else idx
        try:
            out = moe_ffn(x, ids, weights, up, down, buffer, FEW if verb == "decode" else None)
            if x.is_cuda:
                torch.cuda.synchronize()
            found.append(None)
        except RoutingError as error:
            found.append(str(error))
            out = error.result
        outs.append(out)
    buffer.check()
    same = torch.equal(outs[1], outs[2])
    torch.distributed.barrier(group)
    buffer.destroy()
    return found, same


@pytest.mark.parametrize("verb", ["layer", "decode"])
def test_a_rank_with_bad_ids_stays_in_step(pool, verb):
    (first, same), (second, also) = pool.run(bad_ids_of_one_rank, verb, num_ranks=2)
    assert first == [None] * 3
    assert second[0] is None and "1 expert ids" in second[1] and second[2] is None
    assert same and also
