"""Dispatch and combine on emulated ranks (or GPUs) against the oracle, on every engine."""

from __future__ import annotations

import time

import cases
import pytest
import torch
from dispatch_cases import (
    DTYPES,
    check_case,
    check_round_trip,
    make_buffer,
    make_inputs,
    poison,
    round_trip,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine import Buffer, Options, reference
from moe_engine.emulation import PerRank


@pytest.mark.parametrize(("kind", "num_ranks"), cases.routings(1, 2, 3, 4))
def test_every_routing(pool, num_ranks, kind):
    check_case(pool, num_ranks, [36, 0, 13], 48, 24, 4, kind, "bf16")


@pytest.mark.parametrize("backend", ["auto", "collective"])
def test_ranks_are_summed_in_order(pool, backend):
    """fp32 from four ranks, where another order gives other bits."""
    check_case(pool, 4, [12, 17], 16, 24, 5, "uniform", "fp32", backend=backend)


@pytest.mark.parametrize("backend", ["auto", "collective"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [33, 40, 256])
def test_payloads(pool, backend, dtype, hidden):
    check_case(pool, 2, [40, 17], hidden, 8, 2, "holes", dtype, backend=backend)


@pytest.mark.parametrize(("kind", "num_ranks"), cases.routings(1, 3, 4))
def test_collective_engine(pool, num_ranks, kind):
    check_case(pool, num_ranks, [21, 0, 9], 16, 24, 3, kind, "bf16", backend="collective")


@settings(max_examples=cases.few_examples())
@given(
    num_ranks=st.integers(1, 4),
    num_tokens=st.lists(st.integers(0, 70), min_size=1, max_size=4),
    hidden=st.integers(1, 70),
    num_local=st.integers(1, 5),
    num_topk=st.integers(1, 6),
    kind=st.sampled_from(cases.ROUTINGS),
    dtype=st.sampled_from(list(DTYPES)),
    seed=st.integers(0, 99),
)
def test_any_shape(pool, num_ranks, num_tokens, hidden, num_local, num_topk, kind, dtype, seed):
    cases.skip_where_shapes_compile(pool)
    num_experts = num_ranks * num_local
    num_topk = min(num_topk, num_experts)
    check_case(pool, num_ranks, num_tokens, hidden, num_experts, num_topk, kind, dtype, seed=seed)


def many_calls(group, num_calls, num_experts, max_tokens, x, topk_idx, topk_weights, slow_rank):
    """Repeated round trips on one Buffer, one rank late each time; all results."""
    rank = torch.distributed.get_rank(group)
    buffer = make_buffer(group, x, num_experts, topk_idx.shape[1], max_tokens)
    poison(buffer)
    torch.distributed.barrier(group)
    results = []
    for call in range(num_calls):
        if rank == slow_rank:
            time.sleep(0.002 * (call % 3))
        shift = torch.where(topk_idx >= 0, (topk_idx + call) % num_experts, -1)
        results.append(round_trip(buffer, x + call, shift, topk_weights, num_experts))
    torch.distributed.barrier(group)
    buffer.destroy()
    return results


@pytest.mark.parametrize("num_calls", cases.slow_unless([(5,)], [5, 20]))
def test_calls_with_a_slow_rank(pool, num_calls):
    num_ranks, num_experts = 3, 6
    x, idx, w = make_inputs(num_ranks, [13, 20, 5], 24, num_experts, 2, "holes", "fp32")
    results = pool.run(
        many_calls, num_calls, num_experts, 20, PerRank(x), PerRank(idx), PerRank(w), 1,
        num_ranks=num_ranks,
    )  # fmt: skip
    for call in range(num_calls):
        shifted = [torch.where(i >= 0, (i + call) % num_experts, -1) for i in idx]
        at_call = [rank[call] for rank in results]
        bias = [[torch.zeros_like(part)] for part in x]
        check_round_trip(at_call, [part + call for part in x], shifted, w, num_experts, bias)


def delayed_calls(group, num_calls, num_experts, x, topk_idx, topk_weights):
    """Round trips without a host sync, each begun after a random pause: how many were wrong."""
    rank, num_ranks, device = group.rank(), group.size(), cases.device()
    everyone = torch.cat(x).to(device)
    numbers = list(torch.arange(len(everyone)).float()[:, None].split([len(part) for part in x]))
    own, weights = x[rank].to(device), topk_weights[rank].to(device)
    shifts = []
    for shift in range(num_experts):
        idx = [torch.where(i >= 0, (i + shift) % num_experts, -1) for i in topk_idx]
        rows = reference.dispatch(numbers, idx, topk_weights, num_experts)[rank].x
        copies = reference.layout(idx[rank], num_experts, num_ranks)[2].sum(1, keepdim=True)
        shifts.append([t.to(device) for t in (idx[rank], rows.flatten().long(), copies)])
    buffer = make_buffer(group, own, num_experts, topk_idx[0].shape[1], max(map(len, x)))
    poison(buffer)
    torch.distributed.barrier(group)
    worst = num_ranks * max(map(len, x))
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    pauses = torch.rand(num_calls, generator=torch.Generator().manual_seed(rank)) ** 4
    for call, pause in enumerate(pauses.tolist()):
        if device.type == "cuda":
            torch.cuda._sleep(int(pause * 1e6))
        else:
            time.sleep(pause * 0.01)
        idx, rows, copies = shifts[call % num_experts]
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, num_experts)
        recv, *_, handle, _ = buffer.dispatch(
            own + call, None, per_rank, None, in_rank, per_expert, idx, weights, 1, worst
        )
        out, *_ = buffer.combine(recv, handle)
        wrong += (recv[: len(rows)] != everyone[rows] + call).any() | (
            out != (own + call) * copies
        ).any()
    buffer.check()
    torch.distributed.barrier(group)
    buffer.destroy()
    return int(wrong)


@pytest.mark.parametrize("num_calls", cases.slow_unless([(5,)], [5, 12]))
def test_many_calls_with_random_pauses(pool, num_calls):
    num_calls = 1000 if pool.device == "cuda" else num_calls
    inputs = make_inputs(4, [13, 20, 5, 0], 24, 8, 2, "holes", "fp32")
    assert pool.run(delayed_calls, num_calls, 8, *inputs, num_ranks=4) == [0] * 4


def send_fp8(group, backend, num_experts, x, topk_idx, topk_weights, scales):
    """(rows as bytes, scales) received with a layout, then with the handle alone."""
    device = cases.device()
    x, topk_idx, topk_weights, scales = (t.to(device) for t in (x, topk_idx, topk_weights, scales))
    buffer = make_buffer(group, x.bfloat16(), num_experts, topk_idx.shape[1], 40, backend)
    poison(buffer)
    torch.distributed.barrier(group)
    pair = x.to(torch.float8_e4m3fn), scales
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
    first, *_, handle, _ = buffer.dispatch(
        pair, None, per_rank, None, in_rank, per_expert, topk_idx, topk_weights
    )
    again, *_ = buffer.dispatch(pair, handle)
    torch.distributed.barrier(group)
    buffer.destroy()
    return [(rows.view(torch.uint8).cpu(), found.cpu()) for rows, found in (first, again)]


@pytest.mark.parametrize("backend", ["auto", "collective"])
@pytest.mark.parametrize(("hidden", "num_scales"), [(256, 2), (48, 3), (33, 1)])
@pytest.mark.parametrize("kind", ["float32", "column major", "packed"])
def test_fp8_rows_carry_their_scales(pool, backend, hidden, num_scales, kind):
    x, idx, w = make_inputs(2, [40, 17], hidden, 8, 3, "holes", "fp32")
    scales = [torch.rand(len(part), num_scales) for part in x]
    if kind == "column major":
        scales = [part.T.contiguous().T for part in scales]
    if kind == "packed":
        scales = [part.view(torch.int32) for part in scales]
    inputs = (PerRank(part) for part in (x, idx, w, scales))
    results = pool.run(send_fp8, backend, 8, *inputs, num_ranks=2)
    rows = [part.to(torch.float8_e4m3fn).view(torch.uint8) for part in x]
    want_rows = reference.dispatch(rows, idx, w, 8)
    want_scales = reference.dispatch(scales, idx, w, 8)
    for rank in range(2):
        for have_rows, have_scales in results[rank]:
            assert torch.equal(have_rows, want_rows[rank].x)
            assert torch.equal(have_scales, want_scales[rank].x)


def one_way(group, num_slots, num_calls):
    """What rank 1, always late, gets from rank 0, which never waits for an answer."""
    rank, device = torch.distributed.get_rank(group), cases.device()
    num_tokens = 0 if rank else 6
    options = Options(num_slots=num_slots)
    buffer = Buffer.for_tokens(group, 6, 16, 4, 1, torch.float32, options=options)
    x = torch.arange(num_tokens * 16.0, device=device).view(num_tokens, 16)
    idx = torch.full((num_tokens, 1), 3, device=device)
    weights = torch.ones(num_tokens, 1, device=device)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 4)
    *_, handle, _ = buffer.dispatch(x, None, per_rank, None, in_rank, per_expert, idx, weights)
    received = []
    for call in range(num_calls):
        if rank == 1:
            time.sleep(0.05)
        received.append(buffer.dispatch(x + call, handle)[0].cpu())
    torch.distributed.barrier(group)
    buffer.destroy()
    return received


@pytest.mark.parametrize("num_slots", [2, 3])
def test_a_slot_is_not_overwritten_while_it_is_read(pool, num_slots):
    received = pool.run(one_way, num_slots, 10, num_ranks=2)[1]
    for call, rows in enumerate(received):
        assert torch.equal(rows, torch.arange(96.0).view(6, 16) + call)


def warm_up(group):
    buffer = make_buffer(group, torch.empty(0, 16), 4, 2, 8)
    buffer.warmup(16, 4, 2, torch.float32)
    epochs = int(buffer._engine.slots.context.fields[0])
    buffer.destroy()
    return epochs


def test_warmup_calls_each_verb_without_tokens(pool):
    assert pool.run(warm_up, num_ranks=2) == [5, 5]
