"""The low-latency verbs on emulated ranks (or GPUs) against the oracle, to the bit."""

from __future__ import annotations

import itertools
import time

import cases
import low_latency_cases as low_latency
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from low_latency_cases import (
    EXPERTS,
    FORMS,
    HIDDEN,
    TOPK,
    check_case,
    check_inputs,
    combine,
    dispatch,
    make_inputs,
    to_cpu,
    to_device,
)

from moe_engine.emulation import PerRank

MAX_TOKENS = 4


@pytest.mark.parametrize(("kind", "num_ranks"), cases.routings(1, 2, 3, 4))
def test_every_routing_in_every_form(pool, num_ranks, kind):
    forms = list(FORMS)
    if pool.device == "cpu":  # one of them, so that each routing meets each form once
        forms = [forms[(num_ranks + 2 * cases.ROUTINGS.index(kind)) % 4]]
    check_case(pool, num_ranks, [MAX_TOKENS, 0, 2], MAX_TOKENS, HIDDEN, EXPERTS, TOPK, kind, forms)


def test_more_tokens_than_are_counted_at_once(pool):
    """The rows of a token are counted over blocks of the 128 tokens before it, most of which go
    nowhere here."""
    inputs = make_inputs(1, [131], 128, 4, 2, "skewed")
    inputs[1][0][10:126] = -1
    check_inputs(pool, inputs, 140, 4, ["bf16"])


@settings(max_examples=cases.few_examples())
@given(
    num_ranks=st.integers(1, 4),
    num_tokens=st.lists(st.integers(0, 8), min_size=1, max_size=4),
    room=st.integers(0, 5),
    hidden=st.integers(1, 300),
    num_blocks=st.integers(1, 5),
    form=st.sampled_from(list(FORMS)),
    num_local=st.integers(1, 5),
    num_topk=st.sampled_from([1, 2, 3, 4, 7]),
    kind=st.sampled_from(cases.ROUTINGS),
    seed=st.integers(0, 99),
)
def test_any_shape(
    pool, num_ranks, num_tokens, room, hidden, num_blocks, form, num_local, num_topk, kind, seed
):
    cases.skip_where_shapes_compile(pool)
    hidden = {"bf16": hidden, "ue8m0": 512 * (1 + num_blocks % 2)}.get(form, 128 * num_blocks)
    num_experts = num_ranks * num_local
    num_topk = min(num_topk, num_experts) if kind != "duplicates" else num_topk
    max_tokens = max(1, *num_tokens) + room
    check_case(
        pool, num_ranks, num_tokens, max_tokens, hidden, num_experts, num_topk, kind, [form], seed
    )


def sum_in_order(group, max_tokens, values, x, topk_idx, topk_weights):
    """What comes back where expert e answers values[e] in all columns."""
    args = to_device(x, topk_idx, topk_weights)
    buffer = low_latency.make_buffer(group, max_tokens, x.shape[1], len(values))
    recv_x, _, handle = dispatch(buffer, args[0], args[1], max_tokens, len(values))
    own = values.to(recv_x).chunk(group.size())[group.rank()]
    out = combine(buffer, own[:, None, None].expand_as(recv_x).contiguous(), *args[1:], handle)
    buffer.destroy()
    return out.cpu()


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_sums_are_in_order(pool, num_ranks):
    """Every order of three experts whose sum depends on it."""
    values = torch.tensor([2.0**24, 1.0, -(2.0**24), 0.0])
    idx = torch.tensor(list(itertools.permutations(range(3))))
    inputs = torch.ones(len(idx), 8).bfloat16(), idx, torch.ones(len(idx), 3)
    x, ids, weights = ([part] + [part[:0]] * (num_ranks - 1) for part in inputs)
    per_rank = map(PerRank, (x, ids, weights))
    results = pool.run(sum_in_order, len(idx), values, *per_rank, num_ranks=num_ranks)
    received = low_latency.reference.low_latency_dispatch(x, ids, len(idx), 4, use_fp8=False)
    y = values[:, None, None].expand(4, num_ranks * len(idx), 8).bfloat16().chunk(num_ranks)
    wanted = low_latency.reference.low_latency_combine(list(y), received, ids, weights)
    assert len(wanted[0].unique()) == 2
    for have, want in zip(results, wanted, strict=True):
        assert torch.equal(have, want)


def any_weights(group, x, topk_idx, topk_weights):
    args = to_device(x, topk_idx, topk_weights)
    buffer = low_latency.make_buffer(group, MAX_TOKENS, HIDDEN, EXPERTS)
    out = to_cpu(low_latency.round_trip(buffer, *args, MAX_TOKENS, EXPERTS, "fp8"))
    buffer.destroy()
    return out


def test_any_weights(pool):
    """Products that are rounded, so that a fused multiply-add gives other bits."""
    x, idx, _ = make_inputs(2, [MAX_TOKENS, 3], HIDDEN, EXPERTS, TOPK, "holes")
    weights = [torch.rand(ids.shape) for ids in idx]
    results = pool.run(any_weights, *map(PerRank, (x, idx, weights)), num_ranks=2)
    received = low_latency.reference.low_latency_dispatch(x, idx, MAX_TOKENS, EXPERTS)
    y = [have["y"] for have in results]
    wanted = low_latency.reference.low_latency_combine(y, received, idx, weights)
    for have, want in zip(results, wanted, strict=True):
        assert cases.relative_error(have["out"], want) < 1e-3


# --- Rows that nobody sent -------------------------------------------------------------------


def look_after_the_counts(group, form, x, topk_idx, topk_weights):
    """Whether all rows after the counts are as they were allocated: NaN."""
    x, topk_idx, topk_weights = to_device(x, topk_idx, topk_weights)
    buffer = low_latency.make_buffer(group, MAX_TOKENS, HIDDEN, EXPERTS)
    torch.distributed.barrier(group)
    with cases.filled_memory():
        recv_x, counts, handle = dispatch(buffer, x, topk_idx, MAX_TOKENS, EXPERTS, form)
        rows = recv_x if form == "bf16" else recv_x[0]
        out = combine(buffer, low_latency.run_experts(recv_x, 0), topk_idx, topk_weights, handle)
    unused = torch.arange(rows.shape[1], device=rows.device) >= counts[:, None]
    torch.distributed.barrier(group)
    buffer.destroy()
    return rows.float()[unused].isnan().all().item(), out.isnan().any().item()


@pytest.mark.parametrize("form", ["bf16", "fp8"])
def test_rows_after_the_counts_are_neither_written_nor_read(pool, form):
    inputs = make_inputs(2, [3, 0], HIDDEN, EXPERTS, TOPK, "holes")
    results = pool.run(look_after_the_counts, form, *map(PerRank, inputs), num_ranks=2)
    assert results == [(True, False)] * 2


# --- Many calls ------------------------------------------------------------------------------


def many_calls(group, num_calls, x, topk_idx, topk_weights):
    """Round trips with other routings, forms and flags and random pauses, without a host sync."""
    x, topk_idx, topk_weights = to_device(x, topk_idx, topk_weights)
    buffer = low_latency.make_buffer(group, MAX_TOKENS, HIDDEN, EXPERTS)
    low_latency.poison(buffer)
    torch.distributed.barrier(group)
    pauses = torch.rand(num_calls, generator=torch.Generator().manual_seed(group.rank())) ** 4
    results = []
    for call, pause in enumerate(pauses.tolist()):
        if x.is_cuda:
            torch.cuda._sleep(int(pause * 1e6))
        else:
            time.sleep(pause * 0.02)
        shifted = torch.where(topk_idx >= 0, (topk_idx + call) % EXPERTS, -1)
        form, flags = form_and_flags(call)
        results.append(
            low_latency.round_trip(
                buffer, x + call, shifted, topk_weights, MAX_TOKENS, EXPERTS, form, flags
            )
        )
    buffer.check()
    torch.distributed.barrier(group)
    buffer.destroy()
    return [to_cpu(found) for found in results]


def form_and_flags(call):
    flags = [{}, {"return_recv_hook": True}, {"async_finish": True}][call % 3]
    return list(FORMS)[call % len(FORMS)], flags


@pytest.mark.parametrize("num_calls", cases.slow_unless([(6,)], [6, 24]))
def test_many_calls_with_random_pauses(pool, num_calls):
    """6 calls have each form and each flag, 12 calls have each pair of these."""
    num_ranks = 3
    if pool.device == "cuda":
        num_calls, num_ranks = 200, pool.num_ranks
    x, idx, w = make_inputs(num_ranks, [2, 0, 3, 1], HIDDEN, EXPERTS, TOPK, "holes")
    results = pool.run(many_calls, num_calls, *map(PerRank, (x, idx, w)), num_ranks=num_ranks)
    for call in range(num_calls):
        shifted = [torch.where(ids >= 0, (ids + call) % EXPERTS, -1) for ids in idx]
        at_call, form = [found[call] for found in results], form_and_flags(call)[0]
        rows = [part + call for part in x]
        low_latency.check(at_call, rows, shifted, w, MAX_TOKENS, EXPERTS, form)
