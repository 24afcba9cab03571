"""Prepared calls: they do, bit for bit, what the first call of their kind did."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from unittest import mock

import cases
import numpy as np
import pytest
import torch
from dispatch_cases import make_inputs, poison
from layer_cases import make_weights
from prepared_cases import prepared_as_graphs

from moe_engine import (
    BackendError,
    Buffer,
    ElasticBuffer,
    Options,
    ShapeError,
    call_memory,
    kinds,
    moe_ffn,
    prepared,
)
from moe_engine.emulation import PerRank
from moe_engine.grouped_gemm import dgrad, grouped_gemm, grouped_mlp, tile_schedule, wgrad
from moe_engine.launch import InterpretedLaunch
from moe_engine.launch_graph import LaunchGraph

EXPERTS, TOPK, HIDDEN, COLUMNS, MAX_TOKENS = 8, 3, 128, 64, 9
COSTS = {  # launches, allocations: of the parts of each call
    "layout": [(2, 2)],
    "dispatch": [(2, 1), (2, 0), (2, 0)],
    "dispatch_worst": [(6, 4)],
    "dispatch_cached": [(4, 2)],
    "dispatch_in_place": [(2, 1), (2, 0), (1, 0)],
    "release": [(1, 0)],
    "combine": [(2, 2)],
    "combine_biased": [(2, 1)],
    "low_latency_dispatch": [(1, 2)],
    "low_latency_fp8": [(1, 3)],
    "low_latency_combine": [(1, 1)],
    "hooked_dispatch": [(1, 2), (1, 0)],
    "hooked_combine": [(1, 2), (1, 0)],
    "moe_ffn": [(12, 2)],
    "moe_ffn_decode": [(4, 2)],
    "by_token_synced": [(2, 3), (2, 1), (2, 0), (2, 0)],
    "by_token": [(8, 6)],
    "by_token_cached": [(5, 5)],
    "by_token_combine": [(2, 2)],
    "by_token_bare": [(5, 3), (2, 1)],
    "by_token_fp8": [(5, 4)],
    "by_expert_synced": [(2, 3), (2, 1), (6, 1)],
    "by_expert": [(10, 6)],
    "by_expert_cached": [(5, 2)],
    "by_expert_combine": [(2, 2)],
    "by_expert_bare": [(5, 1), (2, 1)],
    "by_expert_fp8": [(5, 2)],
}
"""A launch or an allocation more is time of every call: raise a number only on purpose."""
NO_GRAPHS = {"dispatch": 2, "by_token_synced": 2}
"""Parts that are launched one by one, as rows are collected while others are pushed."""


def bits(values):
    """The bytes of tensors, which may hold NaN."""
    return [one.contiguous().view(torch.uint8).cpu() for one in values if one is not None]


def every_call(buffer, fused, x, idx, weights, up, down):
    """(name, results) of each call of a Buffer; `fused` is one without low-latency calls."""
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS)
    yield "layout", (per_rank, per_expert, in_rank)
    layout = None, per_rank, None, in_rank, per_expert
    rows, rows_idx, rows_weights, _, handle, _ = buffer.dispatch(x, *layout, idx, weights)
    yield "dispatch", (rows, rows_idx, rows_weights, *handle[:2], *handle[3:])  # no epoch
    num_rows = buffer.group_size * MAX_TOKENS
    more, _, _, _, worst, _ = buffer.dispatch(x, *layout, idx, weights, num_worst_tokens=num_rows)
    yield "dispatch_worst", (more[: len(rows)], *worst[:2], *worst[4:])
    yield "dispatch_cached", (buffer.dispatch(x, handle)[0],)
    _, rows_idx, *_ = buffer.dispatch(x, *layout, idx, weights, in_place=True)
    yield "dispatch_in_place", (rows_idx,)
    buffer.release()
    yield "release", ()
    yield "combine", buffer.combine(rows, handle, rows_weights)[:2]
    yield "combine_biased", buffer.combine(rows, handle, bias=x)[:1]
    sizes, results = (MAX_TOKENS, EXPERTS), {}
    for name, fp8 in (("low_latency_dispatch", False), ("low_latency_fp8", True)):
        got, count, ll_handle, _, _ = buffer.low_latency_dispatch(x, idx, *sizes, use_fp8=fp8)
        results[name] = got
        yield name, (count, ll_handle.layout_range)
    got = results["low_latency_dispatch"]
    y = torch.zeros_like(got)
    for expert, num in enumerate(count.tolist()):
        y[expert, :num] = got[expert, :num] * (expert + 1)
    yield "low_latency_combine", buffer.low_latency_combine(y, idx, weights, ll_handle)[:1]
    _, count, ll_handle, _, hook = buffer.low_latency_dispatch(
        x, idx, *sizes, use_fp8=False, return_recv_hook=True
    )
    hook()
    yield "hooked_dispatch", (count,)
    out, _, hook = buffer.low_latency_combine(y, idx, weights, ll_handle, return_recv_hook=True)
    hook()
    yield "hooked_combine", (out,)
    yield "moe_ffn", (moe_ffn(x, idx, weights, up, down, fused),)
    yield "moe_ffn_decode", (moe_ffn(x, idx, weights, up, down, buffer, MAX_TOKENS),)


def every_elastic_call(buffer, x, idx, weights):
    """(name, results) of the calls of an ElasticBuffer: with a handle as many rows as came, in
    other calls other numbers of rows."""
    new = dict(num_experts=EXPERTS, expert_alignment=4)
    for name, expand in (("by_token", False), ("by_expert", True)):
        how = dict(do_expand=expand, do_zero_padding=expand)
        _, _, row_weights, handle, _ = buffer.dispatch(x, idx, weights, **new, **how)
        yield f"{name}_synced", ()
        _, _, more_weights, most, _ = buffer.dispatch(
            x, idx, weights, **new, **how, do_cpu_sync=False
        )
        num_rows = handle.num_recv_tokens
        came = more_weights[: len(row_weights)], most.recv_src_metadata[:num_rows]
        yield name, (*came, most.psum_num_recv_tokens_per_expert, most.topk_idx)
        rows, ids, again, _, _ = buffer.dispatch(x, topk_weights=weights, handle=handle, **how)
        yield f"{name}_cached", (rows, ids, again)
        yield f"{name}_combine", buffer.combine(rows, handle, row_weights)[:2]
        rows, ids, *_ = buffer.dispatch(x, handle=handle, **how)
        yield f"{name}_bare", (rows, ids, buffer.combine(rows, handle, bias=x)[0])
        e4m3 = x.to(torch.float8_e4m3fn), x[:, ::HIDDEN].float()
        by_column = dict(handle=handle, use_tma_aligned_col_major_sf=True)
        rows, scales = buffer.dispatch(e4m3, **by_column, **how)[0]
        yield f"{name}_fp8", (rows, scales.flatten())


def run_rounds(group, rounds, up, down):
    """Each round by prepared calls and by ones that are never kept: what a round of the same shapes
    as an earlier one costs, by call. Prepared calls are graphs."""
    with prepared_as_graphs():
        return compare_rounds(group, rounds, up, down)


def compare_rounds(group, rounds, up, down):
    device = cases.device()
    up, down = up.to(device), down.to(device)
    sizes = MAX_TOKENS, HIDDEN, EXPERTS, TOPK
    fused_only = Options(decode_tokens=0)
    elastic = dict(num_max_tokens_per_rank=MAX_TOKENS, hidden=HIDDEN, num_topk=TOPK)
    buffers, plain = (
        (
            Buffer.for_tokens(group, *sizes),
            Buffer.for_tokens(group, *sizes, options=fused_only),
            ElasticBuffer(group, **elastic),
        )
        for _ in range(2)
    )
    seen, costs, no_graphs, real = [], {}, {}, prepared.PreparedCall.launch

    def count(self, *args):
        num_launches = len(self._launches)
        alone = num_launches > 1 and self._graphs is None
        seen.append((num_launches, self.memory.num_allocations, alone))
        real(self, *args)

    with mock.patch.object(prepared.PreparedCall, "launch", count), cases.filled_memory():
        for inputs in rounds:
            x, idx, weights = (one.to(device) for one in inputs)
            for one in (*buffers, *plain):
                poison(one)
            torch.distributed.barrier(group)

            def all_calls(buffer, fused, elastic, routed=(x, idx, weights)):
                yield from every_call(buffer, fused, *routed, up, down)
                yield from every_elastic_call(elastic, *routed)

            with mock.patch.object(kinds, "MOST_KINDS", 0):
                wanted = [(name, bits(got)) for name, got in all_calls(*plain)]
            seen.clear()
            calls = all_calls(*buffers)
            for (name, want), (other, got) in zip(wanted, calls, strict=True):
                assert name == other
                for number, (one, two) in enumerate(zip(want, bits(got), strict=True)):
                    assert torch.equal(one, two), f"{name}, result {number}"
                costs[name] = [(launches, results) for launches, results, _ in seen]
                no_graphs[name] = sum(alone for _, _, alone in seen)
                seen.clear()
    for one in (*buffers, *plain):
        one.check()
        one.destroy()
    return costs, {name: number for name, number in no_graphs.items() if number}


def rounds_of(num_ranks, with_strides):
    """Inputs of each rank: some, rows that do not lie together if asked for, and others of the same
    shapes as the first."""
    sizes = HIDDEN, EXPERTS, TOPK
    kinds = ("uniform", [5, 9]), ("holes", [5, 9])
    rounds = [
        make_inputs(num_ranks, tokens, *sizes, kind, "bf16", seed)
        for seed, (kind, tokens) in enumerate(kinds)
    ]
    by_rank = [[tuple(part[r] for part in one) for one in rounds] for r in range(num_ranks)]
    for inputs in by_rank if with_strides else ():
        x, idx, weights = inputs[0]
        inputs.insert(1, (x.repeat(1, 2)[:, ::2], idx, weights))
    return by_rank


@pytest.mark.parametrize("with_strides", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_prepared_calls_are_plain_calls(pool, with_strides):
    num_ranks = 2
    weights = make_weights(num_ranks, EXPERTS // num_ranks, HIDDEN, COLUMNS, "bf16")
    parts = PerRank(rounds_of(num_ranks, with_strides)), *(PerRank(part) for part in weights)
    for costs, no_graphs in pool.run(run_rounds, *parts, num_ranks=num_ranks):
        assert costs == COSTS
        assert no_graphs == NO_GRAPHS


# --- Grouped GEMMs -------------------------------------------------------------------------------


def products(x, up, down, offsets, out):
    """What grouped GEMMs give, their gradients too."""
    schedule = tile_schedule(offsets, len(x), 16)
    offset = torch.arange(len(x), device=x.device).flip(0) * x.stride(0)
    yield from (
        grouped_gemm(x, up, offsets),
        grouped_gemm(x, up, offsets, activation="swiglu", schedule=schedule),
        grouped_gemm(x, up, offsets, row_offset=offset),
        grouped_gemm(x, up, offsets, row_index=offset // x.stride(0)),
        grouped_gemm(x, up, offsets, out=out),
        grouped_mlp(x, up, down, offsets, row_weight=x[:, 0].float().contiguous()),
    )
    with torch.enable_grad():
        leaves = [one.detach().clone().requires_grad_() for one in (x, up, down)]
        y = grouped_mlp(*leaves, offsets)
        y.backward(torch.ones_like(y))
    yield y.detach()
    yield from (leaf.grad for leaf in leaves)


def run_products(group):
    device, generator = cases.device(), torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).bfloat16().to(device)

    hits, real = [], prepared.PreparedCall.__call__

    def count(self, *args):
        hits.append(self)
        return real(self, *args)

    for num_rows, num_calls in ((11, 3), (16, 2)):
        for call in range(num_calls):
            x, up, down = draw(num_rows, 32), draw(2, 64, 32), draw(2, 32, 32)
            offsets = torch.tensor([0, 2 + call, num_rows], dtype=torch.int32, device=device)
            args = x, up, down, offsets, draw(num_rows, 64)
            empty = prepared.PreparedCalls()
            with mock.patch.object(prepared, "_without_memory", empty), torch.no_grad():
                want = [bits([one]) for one in products(*args)]
            with mock.patch.object(prepared.PreparedCall, "__call__", count), torch.no_grad():
                got = [bits([one]) for one in products(*args)]
            assert all(torch.equal(a[0], b[0]) for a, b in zip(want, got, strict=True))
    return len(hits)


def test_grouped_gemms(pool):
    assert pool.run(run_products, num_ranks=1)[0] > 20


def count_kinds(group):
    """Kinds of a product of two GEMMs, called twice, and how many of them are prepared."""
    device, calls = cases.device(), prepared.PreparedCalls()
    x, up, down = (
        torch.ones(*shape, device=device) for shape in ((4, 32), (1, 64, 32), (1, 32, 32))
    )
    offsets = torch.tensor([0, 4], dtype=torch.int32, device=device)
    with mock.patch.object(prepared, "_without_memory", calls), torch.no_grad():
        for _ in range(2):
            grouped_mlp(x, up, down, offsets)
    return len(calls._kinds), len(calls)


def test_parts_of_a_call_have_no_kinds(pool):
    assert pool.run(count_kinds, num_ranks=1) == [(1, 1)]


def refuse_later(group):
    """What is refused though a call of its kind has passed."""
    device = cases.device()
    x, w = torch.ones(4, 32, device=device), torch.ones(1, 32, 32, device=device)
    offsets = torch.tensor([0, 4], dtype=torch.int32, device=device)
    for overlapping in (False, True):
        out = x.view(4, 32) if overlapping else torch.empty_like(x)
        grads = w.view(1, 32, 32) if overlapping else torch.empty_like(w)
        calls = (
            lambda out=out: grouped_gemm(x, w, offsets, out=out),
            lambda out=out: dgrad(x, w, offsets, out=out),
            lambda out=grads: wgrad(x, x, offsets, out=out),
        )
        for call, refused in zip(calls, (overlapping, overlapping, False), strict=True):
            with pytest.raises(ShapeError, match="overlaps") if refused else nullcontext():
                call()
    buffer = Buffer(group, 1 << 20)
    idx = torch.zeros(4, 1, dtype=torch.int64, device=device)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 1)
    for _ in range(2):
        buffer.get_dispatch_layout(idx[:1], np.int64(1))
    args = None, per_rank, None, in_rank, per_expert
    handle = list(buffer.dispatch(x, *args)[4])
    buffer.combine(x, handle)
    with pytest.raises(ShapeError, match="x has shape"):
        buffer.combine(x[:2], handle)
    with pytest.raises(ShapeError, match="num_worst_tokens"):
        buffer.dispatch(x, handle, num_worst_tokens=-1)
    buffer.destroy()
    values = torch.ones(4, 128, device=device).to(torch.float8_e4m3fn).requires_grad_()
    scales = torch.ones(4, 1, device=device)
    weights = torch.ones(1, 128, 128, device=device).to(torch.float8_e4m3fn), torch.ones(1, 1, 1)
    with pytest.raises(BackendError, match="no gradient with fp8"):
        grouped_gemm((values, scales), (weights[0], weights[1].to(device)), offsets)


def test_what_a_kind_does_not_tell_is_checked_at_each_call(pool):
    pool.run(refuse_later, num_ranks=1)


def interrupt(group):
    """A product within the launch of another one, as by a signal handler, and one after it."""
    device = cases.device()
    x, w = torch.ones(4, 32, device=device), torch.ones(1, 16, 32, device=device)
    args = x, w, torch.tensor([0, 4], dtype=torch.int32, device=device)
    grouped_gemm(*args)
    kind = LaunchGraph if device.type == "cuda" else InterpretedLaunch
    with (
        mock.patch.object(kind, "__call__", lambda *_: grouped_gemm(*args)),
        pytest.raises(BackendError, match="as from a signal handler"),
    ):
        grouped_gemm(*args)
    return bool((grouped_gemm(*args) == 32.0).all())


def test_a_call_within_the_launch_of_another_is_refused(pool):
    assert pool.run(interrupt, num_ranks=1) == [True]


def share(group):
    """Products in two threads at once, whose addresses differ in each call."""
    device = cases.device()
    wrong = []

    def work(value):
        for call in range(6):
            x = torch.full((4, 32), float(value + call), device=device)
            w = torch.full((1, 16, 32), 1.0, device=device)
            y = grouped_gemm(x, w, torch.tensor([0, 4], dtype=torch.int32, device=device))
            wrong.append(not bool((y == 32.0 * (value + call)).all()))

    threads = [threading.Thread(target=work, args=(value,)) for value in (1, 100)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return wrong


@pytest.mark.gpu  # the interpreter runs in one thread
def test_two_threads(pool):
    assert pool.run(share, num_ranks=1)[0] == [False] * 12


# --- What is kept --------------------------------------------------------------------------------


def keep_few(group):
    """How many kinds are kept of more, and that memory does not grow with Buffers."""
    device = cases.device()
    calls = prepared.PreparedCalls()

    def body(owner, x, option):
        return x.new_empty(3)

    with mock.patch.object(kinds, "MOST_KINDS", 3):
        for option in (0, 1, 2, 0, 3, 4):
            calls(body, None, torch.zeros(2, device=device), option)
    kept = {key[-1] for key in calls._kinds}
    calls.clear()
    return kept, len(calls)


def test_the_least_recently_used_go(pool):
    assert pool.run(keep_few, num_ranks=1) == [({0, 3, 4}, 0)]


def take_parts(group):
    """Results that are parts of one allocation, from the first and a later call."""
    calls, x = prepared.PreparedCalls(), torch.zeros(2, device=cases.device())

    def body(owner, x):
        memory = x.new_empty(8)
        return memory[:2], x, memory[4:].view(2, 2).T

    found = []
    for _ in range(3):
        first, given, last = calls(body, None, x)
        shapes = [(one.shape, one.stride(), one.storage_offset()) for one in (first, last)]
        same = first.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
        found.append((shapes, same, given is x))
    return len(calls), found


def test_results_are_parts_of_an_allocation(pool):
    ((count, (first, *later)),) = pool.run(take_parts, num_ranks=1)
    assert (count, later) == (1, [first] * 2)
    assert first == ([((2,), (1,), 0), ((2, 2), (1, 2), 4)], True, True)


def allocate(group):
    """How many allocations the results of a later call have: plans, one that stays apart, rows and
    a result of another dtype; by default, and where results are to be apart."""
    calls, x = prepared.PreparedCalls(), torch.zeros(2, device=cases.device())

    def body(owner, x):
        plans = [x.new_empty(size, dtype=torch.int32) for size in (3, 0, 5)]
        alone = prepared.apart(x.new_empty(7, dtype=torch.int32))
        return *plans, alone, x.new_empty(2, 2), x.new_empty(3, dtype=torch.int64)

    found = []
    for how in (nullcontext, kinds.results_apart, nullcontext):
        with how():
            for _ in range(2):
                results = calls(body, None, x)
        storages = [one.untyped_storage().data_ptr() for one in results if one.numel()]
        begins = [one.storage_offset() * 4 % call_memory.ALIGNMENT for one in results[:4]]
        shapes = [(tuple(one.shape), one.stride(), one.dtype) for one in results]
        found.append((len(set(storages)), begins, shapes, results[3].untyped_storage().nbytes()))
    return found, len(calls)


def test_plans_are_one_allocation(pool):
    ((found, num_kinds),) = pool.run(allocate, num_ranks=1)
    together, alone, again = found
    assert (together[0], alone[0], num_kinds) == (4, 5, 2)
    assert together == again
    assert together[2] == alone[2]
    assert (together[1], together[3]) == ([0] * 4, 7 * 4)


def misuse(group):
    """What a body must not do, and what is run each time instead of being prepared."""
    calls, x, kinds = prepared.PreparedCalls(), torch.zeros(4, device=cases.device()), []

    def computes(owner, x):
        return x + 1

    def returns_a_part(owner, x):
        return x[1:]

    def returns_another_dtype(owner, x):
        return x.new_empty(4).view(torch.int32)

    def returns_a_sized_part(owner, x, count):
        return prepared.with_size("count", (x.new_empty(count),))[0][1:]

    assert torch.equal(calls(computes, None, x), x + 1)
    kinds.append(len(calls))
    for body, more in (
        (returns_a_part, {}),
        (returns_another_dtype, {}),
        (returns_a_sized_part, {"count": 4}),
    ):
        with pytest.raises(AssertionError, match="returns neither"):
            calls(body, None, x, **more)
    calls(lambda owner, x, y: x, None, x, x[2:])  # they share memory
    kinds.append(len(calls))
    with pytest.raises(TypeError, match="refused"):
        calls(refuses, None, x, [])
    return kinds


def refuses(owner, x, option):
    raise TypeError("refused")


def test_what_is_not_prepared(pool):
    assert pool.run(misuse, num_ranks=1) == [[0, 0]]
