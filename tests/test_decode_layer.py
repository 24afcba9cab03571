"""moe_ffn at decode sizes, which makes low-latency calls, against the oracle."""

from __future__ import annotations

import cases
import pytest
import torch
from dispatch_cases import DTYPES, make_inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_cases import TOLERANCE, check_layer, decode_buffer, make_weights

from moe_engine import CapacityError, moe_ffn, reference, start_moe_ffn
from moe_engine.emulation import PerRank


@pytest.mark.parametrize(("kind", "num_ranks"), cases.routings(1, 3, 4))
def test_every_routing(pool, num_ranks, kind):
    check_layer(pool, num_ranks, [5, 0, 8], 32, 24, 12 // num_ranks, 3, kind, "bf16", "decode")


@pytest.mark.parametrize("dtype", cases.slow_unless([("bf16",)], DTYPES))
def test_many_calls(pool, dtype):
    check_layer(pool, 3, [2, 4], 48, 32, 3, 4, "skewed", dtype, "decode", num_calls=3)


@settings(max_examples=cases.few_examples())
@given(
    num_ranks=st.integers(1, 4),
    num_tokens=st.lists(st.integers(0, 10), min_size=1, max_size=4),
    hidden=st.integers(1, 5),
    num_local=st.integers(1, 5),
    num_topk=st.integers(1, 6),
    kind=st.sampled_from(cases.ROUTINGS),
    dtype=st.sampled_from(list(DTYPES)),
    seed=st.integers(0, 99),
)
def test_any_shape(pool, num_ranks, num_tokens, hidden, num_local, num_topk, kind, dtype, seed):
    cases.skip_where_shapes_compile(pool)
    num_topk = min(num_topk, num_ranks * num_local)
    sizes = num_tokens, 8 * hidden, 16, num_local, num_topk
    check_layer(pool, num_ranks, *sizes, kind, dtype, "decode", seed=seed)


# --- Which engine a layer takes ------------------------------------------------------------------


def choose(group, options, hints, x, topk_idx, topk_weights, up, down):
    """Of calls with each hint: how many low-latency calls they made, and the results."""
    num_ranks = torch.distributed.get_world_size(group)
    args = [t.to(cases.device()) for t in (x, topk_idx, topk_weights, up, down)]
    buffer = decode_buffer(group, x, num_ranks * len(up), topk_idx.shape[1], 40, **options)
    made, outs = [], []
    for hint in hints:
        before = cases.num_low_latency_calls(buffer)
        outs.append(moe_ffn(*args, buffer, max_tokens=hint).cpu())
        made.append(cases.num_low_latency_calls(buffer) - before)
    outs.append(start_moe_ffn(*args, buffer, max_tokens=hints[0]).finish().cpu())
    buffer.check()
    torch.distributed.barrier(group)
    buffer.destroy()
    return made, outs


@pytest.mark.parametrize(
    ("options", "hints", "made"),
    [
        ({}, [None, 9, 40], [2, 2, 2]),
        ({"decode_tokens": 20}, [None, 9, 20, 21], [0, 2, 2, 0]),
        ({"decode_tokens": 0}, [None, 9], [0, 0]),
    ],
)
def test_the_hint_and_the_capacity_choose(pool, options, hints, made):
    check_choice(pool, options, hints, made, 2)


def check_choice(pool, options, hints, made, num_ranks=4):
    """What `choose` finds, and the results against the oracle."""
    inputs = make_inputs(num_ranks, [5, 2], 32, 4 * num_ranks, 2, "uniform", "fp32")
    weights = make_weights(num_ranks, 4, 32, 24, "fp32")
    parts = [PerRank(part) for part in (*inputs, *weights)]
    results = pool.run(choose, options, hints, *parts, num_ranks=num_ranks)
    expected = reference.moe_ffn(*inputs, *weights)
    for (calls, outs), want in zip(results, expected, strict=True):
        assert calls == made
        for out in outs:
            assert cases.relative_error(out, want) < 1e-5


def too_small_a_hint(group):
    x = torch.zeros(3, 16, device=cases.device())
    buffer = decode_buffer(group, x, 4, 1, 8)
    idx = torch.zeros(3, 1, dtype=torch.int64, device=x.device)
    up, down = x.new_zeros(4, 32, 16), x.new_zeros(4, 16, 16)
    with pytest.raises(CapacityError, match="max_tokens = 2"):
        moe_ffn(x, idx, x.new_ones(3, 1), up, down, buffer, max_tokens=2)
    assert moe_ffn(x[:0], idx[:0], x.new_ones(0, 1), up, down, buffer, max_tokens=0).shape == (
        0,
        16,
    )
    buffer.destroy()


def test_a_hint_holds_the_tokens_and_may_be_0(pool):
    pool.run(too_small_a_hint, num_ranks=1)


# --- In a CUDA graph -----------------------------------------------------------------------------


def replay(group, options, rounds, up, down):
    """The layer of every round from one captured graph, each rank late in turn."""
    num_ranks = torch.distributed.get_world_size(group)
    up, down = up.cuda(), down.cuda()
    x, topk_idx, topk_weights = (part.cuda() for part in rounds[0])
    sizes = num_ranks * len(up), topk_idx.shape[1], len(x)
    buffer = decode_buffer(group, x, *sizes, **options)
    moe_ffn(x, topk_idx, topk_weights, up, down, buffer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe_ffn(x, topk_idx, topk_weights, up, down, buffer)
    outs = []
    for number, inputs in enumerate(rounds * 4):
        for part, new in zip((x, topk_idx, topk_weights), inputs, strict=True):
            part.copy_(new)
        if number % num_ranks == buffer.rank:
            torch.cuda._sleep(1_000_000)
        graph.replay()
        outs.append(out.cpu())
    buffer.check()
    torch.distributed.barrier(group)
    buffer.destroy()
    return outs


@pytest.mark.multi_gpu
def test_replays_follow_the_routing(pool):
    check_replays(pool)


def check_replays(pool, **options):
    """Replays with other routing, against the oracle."""
    num_ranks = pool.num_ranks
    kinds = ["uniform", "holes", "one_hot", "nothing", "skewed", "empty_rank"]
    rounds = [
        make_inputs(num_ranks, [33], 64, 16, 3, kind, "bf16", seed)
        for seed, kind in enumerate(kinds)
    ]
    weights = make_weights(num_ranks, 16 // num_ranks, 64, 48, "bf16")
    by_rank = [
        [tuple(part[rank] for part in inputs) for inputs in rounds] for rank in range(num_ranks)
    ]
    results = pool.run(replay, options, PerRank(by_rank), *(PerRank(part) for part in weights))
    for number in range(4 * len(rounds)):
        x, idx, w = rounds[number % len(rounds)]
        wide = [[t.double() for t in part] for part in (x, w, *weights)]
        expected = reference.moe_ffn(wide[0], idx, *wide[1:])
        for rank in range(num_ranks):
            assert cases.relative_error(results[rank][number], expected[rank]) < TOLERANCE["bf16"]
