"""moe_ffn on every engine against the oracle."""

from __future__ import annotations

import inspect
import time
import typing
from typing import Literal

import cases
import pytest
import torch
from dispatch_cases import DTYPES, make_buffer, make_inputs, poison
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_cases import TOLERANCE, check_layer, make_weights

from moe_engine import (
    Buffer,
    LayerConfig,
    LayerInFlight,
    MoEFeedForward,
    Options,
    RoutingError,
    moe_ffn,
    reference,
    start_moe_ffn,
)
from moe_engine.emulation import PerRank
from moe_engine.grouped_gemm import grouped_gemm


@pytest.mark.parametrize(("kind", "num_ranks"), cases.routings(1, 2, 3, 4))
def test_every_routing(pool, num_ranks, kind):
    check_layer(pool, num_ranks, [20, 0, 11], 32, 24, 24 // num_ranks, 3, kind, "bf16")


def test_many_tokens_and_experts_of_a_token(pool):
    """Of three blocks of the layout, of 16 tokens each."""
    num_ranks, num_tokens = (pool.num_ranks, 16384) if pool.device == "cuda" else (2, 34)
    check_layer(pool, num_ranks, [num_tokens, 5], 64, 32, 12, 16, "uniform", "bf16")


@pytest.mark.parametrize("engine", ["fused", "collective"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_engines_agree(pool, engine, dtype):
    check_layer(pool, 2, [40, 9], 72, 40, 3, 4, "duplicates", dtype, engine)


@settings(max_examples=cases.few_examples())
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


def in_turn(group, x, topk_idx, topk_weights, up, down):
    """The layer from verbs that each end before the next begins; torch sums over k."""
    num_ranks = torch.distributed.get_world_size(group)
    buffer = make_buffer(group, x, num_ranks * len(up), topk_idx.shape[1], 100)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_ranks * len(up))
    rows, ids, weights, _, handle, _ = buffer.dispatch(
        x, None, per_rank, None, in_rank, per_expert, topk_idx, topk_weights
    )
    row, k = (ids >= 0).nonzero(as_tuple=True)
    order = ids[row, k].argsort(stable=True)
    row, k = row[order], k[order]
    ends = torch.bincount(ids[row, k], minlength=len(up)).cumsum(0)
    offsets = torch.nn.functional.pad(ends, (1, 0)).int()
    act = grouped_gemm(rows[row], up, offsets, activation="swiglu")
    y = x.new_zeros(*ids.shape, x.shape[1])
    y[row, k] = grouped_gemm(act, down, offsets)
    out, _, _ = buffer.combine(reference.sum_topk(y, weights), handle)
    torch.distributed.barrier(group)
    buffer.destroy()
    return out


def run_all(group, max_tokens, configs, x, topk_idx, topk_weights, up, down):
    """The layer in turn, then by moe_ffn in each of several ways."""
    num_experts = up.shape[0] * torch.distributed.get_world_size(group)
    args = [t.to(cases.device()) for t in (x, topk_idx, topk_weights, up, down)]
    outs = [in_turn(group, *args).cpu()]
    for config in configs:
        options = Options(layer=config, decode_tokens=0)
        sizes = max_tokens, x.shape[1], num_experts, topk_idx.shape[1], x.dtype
        buffer = Buffer.for_tokens(group, *sizes, options=options)
        poison(buffer)
        torch.distributed.barrier(group)
        outs.append(moe_ffn(*args, buffer).cpu())
        buffer.check()
        torch.distributed.barrier(group)
        buffer.destroy()
    return outs


STAGED_KINDS = ["uniform", "one_hot", "holes"]
FEW_STAGED = ("uniform", 2), ("holes", 3), ("one_hot", 1)
"""Among them both halves of the configs that one meets on a CPU."""


@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    cases.slow_unless(FEW_STAGED, STAGED_KINDS, (1, 2, 3, 4)),
)
def test_stages_do_not_change_a_bit(pool, num_ranks, kind):
    configs = [
        LayerConfig(num_stages=1, num_return_stages=1),  # all rows, then all tiles, then all sums
        LayerConfig(num_stages=3, num_return_stages=2, num_push_programs=7, num_return_programs=9),
        LayerConfig(num_stages=16, num_return_stages=16, num_push_programs=260, claims_tiles=True),
        LayerConfig(5, 4, num_copy_programs=9, num_own_stages=5, claims_tiles=True),
        LayerConfig(6, 2, num_copy_programs=5, num_own_stages=2),
        LayerConfig(num_stages=4, num_return_stages=3, group_m=1),
    ]
    if pool.device == "cpu":  # half of them: each meets each routing and each number of ranks
        half = (num_ranks + STAGED_KINDS.index(kind)) % 2
        configs = [configs[0], *configs[1 + half :: 2]]
    num_tokens = [40, 3, 0, 9][:num_ranks]
    inputs = make_inputs(num_ranks, num_tokens, 64, 3 * num_ranks, 3, kind, "bf16", 5)
    weights = make_weights(num_ranks, 3, 64, 48, "bf16")
    parts = (PerRank(part) for part in (*inputs, *weights))
    results = pool.run(run_all, max(num_tokens), configs, *parts, num_ranks=num_ranks)
    for in_turn_out, *outs in results:
        assert all(torch.equal(out, outs[0]) for out in outs[1:])
        # Not to the bit: on a CPU products depend on where a row stands in its tile, and a GPU adds
        # them to the sum over k before it rounds.
        assert cases.relative_error(outs[0], in_turn_out) < TOLERANCE["bf16"]


def run_delayed(group, num_calls, x, topk_idx, topk_weights, up, down):
    """Whether all of many calls give the same, ranks being late at random."""
    num_ranks, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
    args = [t.to(cases.device()) for t in (x, topk_idx, topk_weights, up, down)]
    buffer = make_buffer(group, x, num_ranks * len(up), topk_idx.shape[1], 48)
    delays = torch.rand(num_calls, generator=torch.Generator().manual_seed(rank)) ** 8
    first = moe_ffn(*args, buffer).clone()
    same = True
    for delay in delays.tolist():
        if args[0].is_cuda:
            torch.cuda._sleep(int(2e6 * delay))
        else:
            time.sleep(0.2 * delay)
        same = same and torch.equal(moe_ffn(*args, buffer), first)
    buffer.check()
    torch.distributed.barrier(group)
    buffer.destroy()
    return same


def test_ranks_that_are_late_change_nothing(pool):
    on_gpu = pool.device == "cuda"
    num_ranks, num_calls, num_tokens = (pool.num_ranks, 500, [20, 7]) if on_gpu else (3, 2, [7, 3])
    inputs = make_inputs(num_ranks, num_tokens, 64, 4 * num_ranks, 3, "skewed", "bf16", 1)
    weights = make_weights(num_ranks, 4, 64, 48, "bf16")
    parts = (PerRank(part) for part in (*inputs, *weights))
    assert all(pool.run(run_delayed, num_calls, *parts, num_ranks=num_ranks))


def run_shared(group, x, topk_idx, topk_weights, up, down):
    """The layer alone, and with other work between start and finish."""
    num_ranks = torch.distributed.get_world_size(group)
    args = [t.to(cases.device()) for t in (x, topk_idx, topk_weights, up, down)]
    buffer = make_buffer(group, x, num_ranks * len(up), topk_idx.shape[1], 48)
    want = moe_ffn(*args, buffer) + args[0] * 2
    layer = start_moe_ffn(*args, buffer)
    out = args[0] * 2
    out += layer.finish()
    torch.distributed.barrier(group)
    buffer.destroy()
    return out.cpu(), want.cpu()


def test_a_shared_expert_runs_between_start_and_finish(pool):
    inputs = make_inputs(2, [20, 7], 64, 8, 3, "uniform", "fp32", 1)
    weights = make_weights(2, 4, 64, 48, "fp32")
    parts = (PerRank(part) for part in (*inputs, *weights))
    for out, want in pool.run(run_shared, *parts, num_ranks=2):
        assert torch.equal(out, want)


def run_wide_ids(group, x, topk_idx, topk_weights, up, down):
    """The layer with -1, and with ids whose lower half is an expert's, which must not count."""
    device = cases.device()
    x, topk_idx, topk_weights, up, down = (
        t.to(device) for t in (x, topk_idx, topk_weights, up, down)
    )
    num_ranks = torch.distributed.get_world_size(group)
    buffer = make_buffer(group, x, num_ranks * len(up), topk_idx.shape[1], 48)
    want = moe_ffn(x, topk_idx, topk_weights, up, down, buffer)
    wide = torch.where(topk_idx < 0, 2**32 + 1, topk_idx)
    out = moe_ffn(x, wide, topk_weights, up, down, buffer)
    with pytest.raises(RoutingError):
        buffer.check()
    torch.distributed.barrier(group)
    buffer.destroy()
    return torch.equal(out, want)


def test_ids_beyond_32_bits_are_no_experts(pool):
    inputs = make_inputs(2, [20, 12], 32, 6, 3, "holes", "bf16", 1)
    weights = make_weights(2, 3, 32, 24, "bf16")
    assert all(pool.run(run_wide_ids, *(PerRank(p) for p in (*inputs, *weights)), num_ranks=2))


@pytest.mark.parametrize("function", [moe_ffn, start_moe_ffn])
def test_types_that_callers_see(function):
    """Overloads differ from the function in what return_counts is alone."""
    seen = {}
    for one in typing.get_overloads(function):
        have, want = inspect.signature(one).parameters, inspect.signature(function).parameters
        assert list(have) == list(want)
        changed = {name for name in want if have[name].default != want[name].default}
        assert changed <= {"return_counts"}
        hints = typing.get_type_hints(one)
        seen[hints["return_counts"]] = hints["return"]
    one, two = torch.Tensor, tuple[torch.Tensor, torch.Tensor]
    wanted = {Literal[False]: one, Literal[True]: two, bool: one | two}
    if function is start_moe_ffn:
        wanted = {given: LayerInFlight[result] for given, result in wanted.items()}
    assert seen == wanted


def run_module(group, x, topk_idx, topk_weights):
    device = cases.device()
    buffer = make_buffer(group, x, 8, topk_idx.shape[1], len(x))
    torch.manual_seed(0)
    layer = MoEFeedForward(8, x.shape[1], 24, buffer, torch.float32).to(device)
    args = x.to(device), topk_idx.to(device), topk_weights.to(device)
    out = layer(*args)
    again, counts = layer.start(*args, return_counts=True).finish()
    assert counts.sum() == topk_idx.numel()
    assert cases.relative_error(again, out) < 1e-5  # without low-latency calls
    buffer.destroy()
    return out.cpu(), layer.gate_up_proj.cpu(), layer.down_proj.cpu()


def test_module(pool):
    [x], [idx], [w] = make_inputs(1, [20], 16, 8, 2, "uniform", "fp32")
    [(out, up, down)] = pool.run(run_module, x, idx, w, num_ranks=1)
    [want] = reference.moe_ffn([x], [idx], [w], [up], [down])
    assert cases.relative_error(out, want) < 1e-5
