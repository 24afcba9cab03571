"""Layout and send plan on the device against the plain-torch oracle."""

from __future__ import annotations

import cases
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_engine import reference, routing
from moe_engine.device.context import Report
from moe_engine.symm.single import SingleTensor
from moe_engine.symm.slots import SlotLayout, Slots


def plan_on_rank(group, topk_idx, num_experts, num_ranks):
    """(layout, send plan) through the kernels, as if there were `num_ranks` ranks."""
    layout = SlotLayout(num_ranks, 1024)
    block = SingleTensor(layout.num_bytes, cases.device())
    block.peer_addresses = block.peer_addresses.expand(num_ranks).clone()
    slots = Slots(lambda *_: block, layout, 0, 1.0)
    topk_idx = topk_idx.to(cases.device())
    layout = routing.layout(topk_idx, num_experts, slots)
    in_rank = layout.is_token_in_rank
    plans = [routing.send_plan(in_rank, ids, num_experts, slots) for ids in (topk_idx, None)]
    if cases.device().type == "cuda":
        torch.cuda.synchronize()
    num_bad = int(slots.context.report[Report.BAD_IDS])
    outs = [t.cpu() for t in layout[:4]]
    return (*outs, layout.block_tokens), plans_to_cpu(plans), num_bad


def plans_to_cpu(plans):
    return [[t.cpu() for t in plan] for plan in plans]


def check_plan(pool, topk_idx, num_experts, num_ranks):
    [(layout, plans, num_bad)] = pool.run(
        plan_on_rank, topk_idx, num_experts, num_ranks, num_ranks=1
    )
    *layout, earlier, block_tokens = layout
    expected = reference.layout(topk_idx, num_experts, num_ranks)
    for have, want in zip(layout, expected, strict=True):
        assert torch.equal(have, want)
    assert len(earlier) == max(1, -(-len(topk_idx) // block_tokens))
    for block, counts in enumerate(earlier):
        before = topk_idx[: block * block_tokens]
        ranks, experts, _ = reference.layout(before, num_experts, num_ranks)
        assert torch.equal(counts, torch.cat([experts, ranks]))
    assert num_bad == int(((topk_idx < -1) | (topk_idx >= num_experts)).sum())
    for plan, ids in zip(plans, (topk_idx, None), strict=True):
        sent, head = reference.send_plan(expected[2], ids, num_experts)
        assert torch.equal(plan[1], head)
        for rank, count in enumerate(expected[0].tolist()):
            assert torch.equal(plan[0][rank, :count], sent[rank, :count])


@pytest.mark.parametrize(("kind", "num_ranks"), cases.routings(1, 2, 3, 4, 8))
def test_every_routing(pool, kind, num_ranks):
    check_plan(pool, cases.route(kind, 77, 24, 4, seed=1), 24, num_ranks)


@pytest.mark.parametrize("num_experts", [8, 64])
def test_eight_ranks(pool, num_experts):
    check_plan(pool, cases.route("holes", 300, num_experts, 4, 0), num_experts, 8)


def test_many_blocks(pool):
    check_plan(pool, cases.route("holes", 4200, 24, 9, seed=1), 24, 3)


@given(
    num_tokens=st.integers(0, 600),
    num_ranks=st.integers(1, 5),
    num_local=st.integers(1, 9),
    num_topk=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_any_shape(pool, num_tokens, num_ranks, num_local, num_topk, seed):
    cases.skip_where_shapes_compile(pool)
    num_experts = num_ranks * num_local
    topk_idx = torch.randint(
        -2, num_experts + 2, (num_tokens, num_topk), generator=torch.Generator().manual_seed(seed)
    )
    check_plan(pool, topk_idx, num_experts, num_ranks)
