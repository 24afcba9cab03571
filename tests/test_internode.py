"""Dispatch and combine over several emulated nodes, against the oracle and with faults."""

from __future__ import annotations

import cases
import internode_cases as calls
import pytest
import torch
from dispatch_cases import DTYPES, make_inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from internode_cases import HOLD_S, Nodes, check_case, check_inputs
from test_in_place import read_in_place

from moe_engine import reference
from moe_engine.emulation import PerRank, RankPool
from moe_engine.symm.slots import SIGNATURE_BYTES, RowLayout, internode_rows_offset

FEW, LONE = Nodes(2, 2), Nodes(4, 1)
BOTH = pytest.mark.parametrize("nodes", [FEW, LONE], ids=["2x2", "4x1"])
"""Ranks that forward to others of their node, and ranks that have nobody to forward to."""
MOST = {"slow": (Nodes(2, 4), Nodes(4, 2)), "quick": (FEW, Nodes(3, 2), LONE)}


@pytest.fixture(scope="module")
def pool():
    """Up to 3 nodes of 2 ranks, or as many of one rank."""
    cases.skip_without_interpreter()
    with RankPool(6, nodes=3, timeout_s=240) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def large_pool():
    """8 ranks, on 2 or 4 nodes."""
    cases.skip_without_interpreter()
    with RankPool(8, nodes=2, timeout_s=240) as ranks:
        yield ranks


@pytest.mark.parametrize(("kind", "nodes"), cases.one_of_each(cases.ROUTINGS, *MOST["quick"]))
def test_every_routing(pool, nodes, kind):
    check_case(pool, nodes, [36, 0, 13], 48, 24, 4, kind, "bf16")


@pytest.mark.parametrize(
    ("dtype", "hidden"), cases.slow_unless([("bf16", 33), ("fp32", 40)], DTYPES, [1, 33, 40, 256])
)
def test_payloads(pool, dtype, hidden):
    check_case(pool, FEW, [20, 17], hidden, 8, 2, "holes", dtype)


@settings(max_examples=cases.few_examples())
@given(
    nodes=st.sampled_from(MOST["quick"]),
    num_tokens=st.lists(st.integers(0, 70), min_size=1, max_size=6),
    hidden=st.integers(1, 70),
    num_local=st.integers(1, 5),
    num_topk=st.integers(1, 8),
    kind=st.sampled_from(cases.ROUTINGS),
    dtype=st.sampled_from(list(DTYPES)),
    seed=st.integers(0, 99),
)
def test_any_shape(pool, nodes, num_tokens, hidden, num_local, num_topk, kind, dtype, seed):
    num_experts = nodes.num_ranks * num_local
    num_topk = min(num_topk, num_experts)
    check_case(
        pool, nodes, num_tokens, hidden, num_experts, num_topk, kind, dtype, seed, 1, {"SEED": seed}
    )


@pytest.mark.slow
@pytest.mark.parametrize("nodes", MOST["slow"])
@pytest.mark.parametrize("kind", cases.ROUTINGS)
def test_eight_ranks(large_pool, nodes, kind):
    check_case(large_pool, nodes, [36, 0, 13], 48, 48, 6, kind, "bf16", trips=3)


@pytest.mark.parametrize("seed", cases.slow_unless([(0,), (1,)], range(20)))
def test_messages_in_any_order(pool, seed):
    """Of several chunks to a node each, while another rank is late in each trip."""
    nodes = MOST["quick"][seed % 3]
    nic = {"SEED": seed, "HOLD_S": HOLD_S}
    check_case(pool, nodes, [17, 3, 0, 33], 16, 12, 3, "uniform", "fp32", seed, trips=4, nic=nic)


SHAPES = {
    "one token": ([1], 16, 8, 2),
    "top 1": ([9, 4], 16, 8, 1),
    "top 8": ([9, 4], 16, 16, 8),
    "nothing": ([0], 16, 8, 2),
    "one node without tokens": ([12, 5, 0, 0], 24, 8, 2),
    "many chunks": ([300, 0, 11], 8, 8, 2),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(pool, name):
    check_case(pool, FEW, *SHAPES[name], "uniform", "bf16", trips=1)


@pytest.mark.parametrize("to", [0, 3])
def test_all_tokens_to_one_rank(pool, to):
    x, idx, w = make_inputs(4, [30, 2], 16, 8, 2, "uniform", "fp32")
    idx = [2 * to + torch.arange(2).expand_as(one).contiguous() for one in idx]
    check_inputs(pool, FEW, (x, idx, w), 8)


def test_a_network_that_stalls(pool):
    check_case(pool, FEW, [20], 16, 8, 2, "uniform", "fp32", nic={"STALL_S": 0.7})


@pytest.mark.parametrize(
    ("kind", "num_scales"),
    cases.slow_unless(
        [("float32", 2), ("packed", 3)], ["float32", "column major", "packed"], [1, 2, 3]
    ),
)
def test_fp8_rows_carry_their_scales(pool, kind, num_scales):
    nodes = (LONE, FEW, LONE)[num_scales - 1]
    hidden = (33, 256, 48)[num_scales - 1]
    x, idx, w = make_inputs(4, [20, 17, 0], hidden, 8, 3, "holes", "fp32")
    scales = [torch.rand(len(part), num_scales) for part in x]
    if kind == "column major":
        scales = [part.T.contiguous().T for part in scales]
    if kind == "packed":
        scales = [part.view(torch.int32) for part in scales]
    args = (PerRank(part) for part in (x, idx, w, scales))
    results = nodes.run(pool, calls.send_fp8, 8, *args)
    rows = [part.to(torch.float8_e4m3fn).view(torch.uint8) for part in x]
    want_rows, want_scales, want_wide = (
        reference.dispatch(part, idx, w, 8)
        for part in (rows, scales, [one.bfloat16() for one in x])
    )
    sums = combined([one.x for one in want_wide], want_wide, idx, x, 8, nodes)
    for rank, (*pairs, again, out) in enumerate(results):
        for have_rows, have_scales in pairs:
            assert torch.equal(have_rows, want_rows[rank].x)
            assert torch.equal(have_scales, want_scales[rank].x)
        assert torch.equal(again, want_wide[rank].x)
        assert torch.equal(out, sums[rank])


def combined(y, received, idx, x, num_experts, nodes=FEW):
    """The oracle of a combine on nodes; idx is None where no ids were sent."""
    num_tokens = [len(part) for part in x]
    return reference.combine(y, received, idx, num_tokens, num_experts, None, nodes.ranks_per_node)


def test_without_ids(pool):
    x, idx, w = make_inputs(4, [20, 17, 0], 24, 8, 3, "holes", "fp32")
    results = FEW.run(pool, calls.without_ids, 8, PerRank(x), PerRank(idx))
    received = reference.dispatch(x, idx, w, 8)
    sums = combined([one.x for one in received], received, None, x, 8)
    for (got, ids, weights, out), want, total in zip(results, received, sums, strict=True):
        assert torch.equal(got, want.x)
        assert ids is None
        assert weights is None
        assert torch.equal(out, total)


@BOTH
@pytest.mark.parametrize("num_worst_tokens", [0, 90])
def test_rows_in_place(pool, num_worst_tokens, nodes):
    inputs = make_inputs(4, [20, 0, 13], 48, 12, 3, "holes", "bf16")
    args = "auto", num_worst_tokens, 12, *(PerRank(part) for part in inputs)
    results = nodes.run(pool, read_in_place, *args)
    for rows, want in zip(results, reference.dispatch(*inputs, 12), strict=True):
        assert torch.equal(rows, want.x)


@BOTH
def test_worst_tokens(pool, nodes):
    x, idx, w = make_inputs(4, [20, 0, 13], 16, 8, 2, "uniform", "fp32")
    results = nodes.run(pool, calls.worst_case, 80, 8, *(PerRank(part) for part in (x, idx, w)))
    received = reference.dispatch(x, idx, w, 8)
    sums = combined([one.x for one in received], received, idx, x, 8, nodes)
    for (got, ids, weights, counts, out), want, total in zip(results, received, sums, strict=True):
        num_rows = len(want.x)
        assert (len(got), counts) == (80, [])
        assert torch.equal(got[:num_rows], want.x)
        assert torch.equal(ids[:num_rows], want.topk_idx)
        assert torch.equal(weights[:num_rows], want.topk_weights)
        assert (ids[num_rows:] == -1).all()
        assert torch.equal(out, total)


@BOTH
def test_memory_grows_on_all_ranks(pool, nodes):
    inputs = make_inputs(4, [30, 9], 16, 8, 2, "uniform", "fp32")
    by_rank = nodes.run(pool, calls.outgrow, 8, *(PerRank(part) for part in inputs))
    sizes = by_rank[0][1]
    assert sizes[0] < sizes[1] == sizes[2]
    for call, end in enumerate((1, None, 5)):
        x, idx, w = ([one[:end] for one in part] for part in inputs)
        received = reference.dispatch(x, idx, w, 8)
        sums = combined([one.x for one in received], received, idx, x, 8, nodes)
        for rank, (results, sizes_here) in enumerate(by_rank):
            assert sizes_here == sizes
            assert torch.equal(results[call][0], received[rank].x)
            assert torch.equal(results[call][1], sums[rank])


@pytest.mark.parametrize(
    ("options", "more"),
    [({"num_slots": 3}, {}), ({"debug": True}, {}), ({}, {"async_finish": True})],
    ids=["three slots", "debug", "asynchronous"],
)
def test_options(pool, options, more):
    x, idx, w = make_inputs(4, [20, 0, 9], 16, 8, 3, "holes", "fp32")
    args = (PerRank(part) for part in (x, idx, w))
    results = FEW.run(pool, calls.with_options, options, more, 8, *args)
    received = reference.dispatch(x, idx, w, 8)
    sums = combined([one.x for one in received], received, idx, x, 8)
    for (got, out), want, total in zip(results, received, sums, strict=True):
        assert torch.equal(got, want.x)
        assert torch.equal(out, total)


def test_bad_ids_are_skipped(pool):
    x, idx, w = make_inputs(4, [6, 3], 16, 8, 2, "uniform", "fp32")
    idx[1][0, 0], idx[2][1, 1], idx[2][2] = 8, -7, 2**40
    results = FEW.run(pool, calls.with_bad_ids, 8, *(PerRank(part) for part in (x, idx, w)))
    received = reference.dispatch(x, idx, w, 8)
    sums = combined([one.x for one in received], received, idx, x, 8)
    for rank, (got, ids, out, text) in enumerate(results):
        assert torch.equal(got, received[rank].x)
        assert torch.equal(ids, received[rank].topk_idx)
        assert torch.equal(out, sums[rank])
        assert ("expert ids" in (text or "")) == (rank in (1, 2))


@pytest.mark.parametrize(
    ("num_slots", "nodes", "seed"),
    cases.slow_unless([(2, FEW, 1), (3, Nodes(2, 1), 3)], [2, 3], [FEW, Nodes(2, 1)], range(5)),
)
def test_a_sender_that_is_ahead(pool, num_slots, nodes, seed):
    """What rank 0 sends is held for longer than its calls take, so that it sends a call's messages
    before those of the call before have arrived: these would lower each other's flags."""
    nic = [{"SEED": seed, "HOLD_S": 0.0 if rank else 0.4} for rank in range(nodes.num_ranks)]
    received = nodes.run(pool, calls.one_way, num_slots, 12, nic=nic)[-1]
    for call, rows in enumerate(received):
        assert torch.equal(rows, torch.arange(96.0).view(6, 16) + call)


@pytest.mark.parametrize("nodes", cases.slow_unless([(FEW,)], MOST["quick"]))
def test_bytes_over_the_network(pool, nodes):
    """A row for each token and node, and one header for each node."""
    num_ranks, near = nodes.num_ranks, nodes.ranks_per_node
    num_experts, num_topk, hidden = 2 * num_ranks, 3, 24
    x, idx, w = make_inputs(num_ranks, [30, 0, 13], hidden, num_experts, num_topk, "holes", "fp32")
    args = (PerRank(part) for part in (x, idx, w))
    results = nodes.run(pool, calls.count_bytes, num_experts, *args)
    row = RowLayout(4 * hidden, num_topk).num_bytes
    for rank, (sent, returned) in enumerate(results):
        for peer in range(num_ranks):
            if peer % near != rank % near or peer == rank:
                assert [found.get(peer) for found in (*sent, *returned)] == [None] * 4
                continue
            rows, returns = (calls.tokens_for(idx[a], b // near, num_experts // num_ranks * near)
                             for a, b in ((rank, peer), (peer, rank)))  # fmt: skip
            header = internode_rows_offset(num_experts, num_ranks) + rows * near
            assert sent[1][peer] == header + rows * row
            assert returned[1][peer] == SIGNATURE_BYTES + returns * row
            assert sent[0][peer] == 1 + -(-rows // 8)
            assert returned[0][peer] == 1 + -(-returns // 8)


def sum_whole_numbers(group, num_experts, x, topk_idx, topk_weights, round_once):
    """The sums of rows of whole numbers, to each of which its rank adds 128 and its own number."""
    buffer = calls.small_buffer(group, x, num_experts, topk_idx.shape[1])
    rows, *_, handle, _ = calls.dispatch(buffer, x, topk_idx, topk_weights, num_experts)
    returned = rows + (128 + group.rank())
    out, _ = buffer._engine.combine(returned, handle, None, (), round_once=round_once)
    buffer.check()
    torch.distributed.barrier(group)
    buffer.destroy()
    return out


@pytest.mark.parametrize(
    ("round_once", "nodes"),
    [(False, FEW), (True, FEW), (False, LONE), (True, LONE)],
    ids=["2x2", "2x2 once", "4x1", "4x1 once"],
)
def test_sums_are_rounded_on_each_node_or_once(pool, round_once, nodes):
    """bf16 holds whole numbers up to 256, but not the sums of two ranks of a node. The row of a
    node's only rank is its sum, and is not rounded."""
    num_tokens, num_experts = [12, 0, 9, 20], 8
    x, topk_idx, weights = make_inputs(4, num_tokens, 40, num_experts, 6, "uniform", "bf16")
    x = [torch.randint(0, 2, rows.shape, generator=torch.manual_seed(1)).bfloat16() for rows in x]
    parts = (PerRank(part) for part in (x, topk_idx, weights))
    results = nodes.run(pool, sum_whole_numbers, num_experts, *parts, round_once)
    exact = []
    for rows, ids in zip(x, topk_idx, strict=True):
        total = torch.zeros(rows.shape)
        for rank in range(4):
            to_rank = (ids // 2 == rank).any(1) & (len(ids) > 0)
            total += to_rank[:, None] * (rows.float() + 128 + rank)
        exact.append(total.bfloat16())
    same = [torch.equal(have, want) for have, want in zip(results, exact, strict=True)]
    assert all(same) == (round_once or nodes is LONE)
