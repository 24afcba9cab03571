"""moe_ffn on every engine against the oracle."""

from __future__ import annotations

import cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_dispatch_combine import DTYPES, make_buffer, make_inputs, poison

from moe_engine import reference

# bf16 rounds four times on the way, each by up to 2^-9; few values may all be rounded alike.
TOLERANCE = {"bf16": 4 * 2**-9, "fp32": 1e-5}


def make_weights(num_ranks, num_local, hidden, intermediate, dtype, seed=0):
    """Per-rank lists (w_gate_up [L, 2I, H], w_down [L, H, I])."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(DTYPES[dtype])

    up = [draw(num_local, 2 * intermediate, hidden) for _ in range(num_ranks)]
    return up, [draw(num_local, hidden, intermediate) for _ in range(num_ranks)]


def run_layer(group, backend, max_tokens, num_calls, x, topk_idx, topk_weights, up, down):
    """moe_ffn a number of times on one Buffer; the last result, after all were the same bits."""
    from moe_engine import moe_ffn

    num_experts = up.shape[0] * torch.distributed.get_world_size(group)
    device = cases.device()
    args = [t.to(device) for t in (x, topk_idx, topk_weights, up, down)]
    buffer = make_buffer(group, x, num_experts, topk_idx.shape[1], max_tokens, backend)
    poison(buffer)
    torch.distributed.barrier(group)
    if device.type == "cuda":
        num_calls = 20
    outs = [moe_ffn(*args, buffer) for _ in range(num_calls)]
    buffer.check()
    torch.distributed.barrier(group)
    buffer.destroy()
    assert all(torch.equal(out, outs[0]) for out in outs)
    return outs[0].cpu()


def check_layer(
    pool, num_ranks, num_tokens, hidden, intermediate, num_local, num_topk, kind, dtype,
    backend="auto", num_calls=1, seed=0,
):  # fmt: skip
    from moe_engine.emulation import PerRank

    num_experts = num_ranks * num_local
    inputs = make_inputs(num_ranks, num_tokens, hidden, num_experts, num_topk, kind, dtype, seed)
    weights = make_weights(num_ranks, num_local, hidden, intermediate, dtype, seed)
    results = pool.run(
        run_layer,
        backend,
        max(num_tokens),
        num_calls,
        *(PerRank(part) for part in (*inputs, *weights)),
        num_ranks=num_ranks,
    )
    doubled = [
        [t.double() if t.is_floating_point() else t for t in part] for part in (*inputs, *weights)
    ]
    expected = reference.moe_ffn(*doubled)
    for have, want in zip(results, expected, strict=True):
        assert have.shape == want.shape
        assert cases.relative_error(have, want) < TOLERANCE[dtype]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", cases.ROUTINGS)
def test_every_routing(pool, num_ranks, kind):
    num_calls = 2 if kind == "uniform" else 1
    num_local = 24 // num_ranks
    check_layer(
        pool, num_ranks, [40, 0, 23], 32, 24, num_local, 3, kind, "bf16", num_calls=num_calls
    )


@pytest.mark.parametrize("backend", ["auto", "collective"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_engines_agree(pool, backend, dtype):
    check_layer(pool, 2, [70, 9], 72, 40, 3, 4, "duplicates", dtype, backend)


@settings(max_examples=10)
@given(
    num_ranks=st.integers(1, 4),
    num_tokens=st.lists(st.integers(0, 50), min_size=1, max_size=4),
    hidden=st.integers(1, 9).map(lambda n: 8 * n),
    intermediate=st.integers(1, 9).map(lambda n: 8 * n),
    num_local=st.integers(1, 5),
    num_topk=st.integers(1, 5),
    kind=st.sampled_from(cases.ROUTINGS),
    dtype=st.sampled_from(list(DTYPES)),
    seed=st.integers(0, 99),
)
def test_any_shape(
    pool, num_ranks, num_tokens, hidden, intermediate, num_local, num_topk, kind, dtype, seed
):
    cases.skip_where_shapes_compile(pool)
    num_topk = min(num_topk, num_local * num_ranks)
    check_layer(
        pool, num_ranks, num_tokens, hidden, intermediate, num_local, num_topk, kind, dtype,
        seed=seed,
    )  # fmt: skip


def sum_lanes(group, y, place, topk_weights):
    """Combine expert rows y [M, H] at `place` int32 [T, K] for the tokens of one rank."""
    from moe_engine import combine
    from moe_engine.routing import ExpertPlan
    from moe_engine.stages import StagedSchedule

    num_tokens, num_topk = place.shape
    device = cases.device()
    y, place, topk_weights = (t.to(device) for t in (y, place, topk_weights))
    buffer = make_buffer(group, y, 6, num_topk, num_tokens)
    none = torch.empty(0, dtype=torch.int64, device=device)
    plan = ExpertPlan(none, none, place[None], topk_weights[None])
    head = torch.arange(num_tokens, dtype=torch.int32, device=device)[:, None]
    prefix = torch.full((1, 1), num_tokens, dtype=torch.int32, device=device)
    schedule = StagedSchedule(none, none, none, 0, 1, 1)
    sums = combine.LayerSums(plan, schedule, prefix, head)
    out = combine.sum_experts(y, sums, buffer._engine.slots)
    buffer.check()
    buffer.destroy()
    return out.cpu()


def test_lanes_are_summed_in_order(pool):
    """fp32, to the bit where products are rounded before they are added."""
    _, w = cases.tokens(40, 16, 5, torch.float32, 0)
    y = torch.randn(200, 16) * 10.0 ** torch.randint(-3, 4, (200, 1))
    place = torch.randperm(200).view(40, 5).int()
    [out] = pool.run(sum_lanes, y, place, w, num_ranks=1)
    want = reference.sum_lanes(y[place.long()], w)
    if pool.device == "cpu":
        assert torch.equal(out, want)
    assert cases.relative_error(out, want) < 1e-6


def run_both(group, max_tokens, configs, x, topk_idx, topk_weights, up, down):
    """moe_ffn in each of several ways."""
    from moe_engine import Buffer, Options, moe_ffn

    num_experts = up.shape[0] * torch.distributed.get_world_size(group)
    args = [t.to(cases.device()) for t in (x, topk_idx, topk_weights, up, down)]
    outs = []
    for config in configs:
        options = Options(layer=config)
        sizes = max_tokens, x.shape[1], num_experts, topk_idx.shape[1], x.dtype
        buffer = Buffer.for_tokens(group, *sizes, options=options)
        poison(buffer)
        torch.distributed.barrier(group)
        outs.append(moe_ffn(*args, buffer).cpu())
        buffer.check()
        torch.distributed.barrier(group)
        buffer.destroy()
    return outs


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", ["uniform", "one_hot", "holes"])
def test_fused_equals_unfused_bit_for_bit(pool, num_ranks, kind):
    from moe_engine import LayerConfig
    from moe_engine.emulation import PerRank

    configs = [
        LayerConfig(fused=False, num_push_programs=1),
        LayerConfig(num_stages=2, num_push_programs=2, num_return_programs=1),
        LayerConfig(num_stages=num_ranks, mixed=False, num_push_programs=1, num_return_programs=1),
        LayerConfig(num_stages=1, group_m=1, num_push_programs=3, num_return_programs=1),
    ]
    num_tokens = [70, 3, 0, 41][:num_ranks]
    inputs = make_inputs(num_ranks, num_tokens, 64, 2 * num_ranks, 3, kind, "bf16", 5)
    weights = make_weights(num_ranks, 2, 64, 48, "bf16")
    parts = (PerRank(part) for part in (*inputs, *weights))
    results = pool.run(run_both, max(num_tokens), configs, *parts, num_ranks=num_ranks)
    for outs in results:
        assert all(torch.equal(out, outs[0]) for out in outs[1:])


def run_module(group, x, topk_idx, topk_weights):
    from moe_engine import MoEFeedForward

    device = cases.device()
    buffer = make_buffer(group, x, 8, topk_idx.shape[1], len(x))
    torch.manual_seed(0)
    layer = MoEFeedForward(8, x.shape[1], 24, buffer, torch.float32).to(device)
    out = layer(x.to(device), topk_idx.to(device), topk_weights.to(device))
    buffer.destroy()
    return out.cpu(), layer.gate_up_proj.cpu(), layer.down_proj.cpu()


def test_module(pool):
    [x], [idx], [w] = make_inputs(1, [20], 16, 8, 2, "uniform", "fp32")
    [(out, up, down)] = pool.run(run_module, x, idx, w, num_ranks=1)
    [want] = reference.moe_ffn([x], [idx], [w], [up], [down])
    assert cases.relative_error(out, want) < 1e-5
