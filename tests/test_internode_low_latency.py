"""The low-latency verbs of emulated ranks on several nodes against the oracle, to the bit: dispatch
as on one node, combine with a further sum for each node."""

from __future__ import annotations

import time
from collections import Counter

import cases
import low_latency_cases as low_latency
import pytest
import test_low_latency_calls as calls
import test_low_latency_clients as clients
import test_low_latency_failures as failures
import test_low_latency_hooks as hooks
import torch
from low_latency_cases import (
    EXPERTS,
    FORMS,
    HIDDEN,
    MAX_TOKENS,
    SHAPE,
    TOPK,
    batches,
    check_batches,
    check_case,
    combine,
    dispatch,
    make_inputs,
    round_trip,
    run_experts,
)

from moe_engine import BackendError, CapacityError, OutOfStep, PeerTimeout, ShapeError
from moe_engine.device import network
from moe_engine.emulation import PerRank, RankPool
from moe_engine.symm.slots import RowLayout

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of emulated ranks")

REST = (*SHAPE, "bf16")
NUM_TOKENS = [MAX_TOKENS, 0, 2]


@pytest.fixture(scope="module")
def lone_ranks():
    """Four ranks, each on a node of its own."""
    cases.skip_without_interpreter()
    with RankPool(4, nodes=4, timeout_s=120) as ranks:
        yield ranks


# --- Every routing and format ----------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [4, 6])
@pytest.mark.parametrize("kind", cases.ROUTINGS)
def test_every_routing(ranks_of_nodes, num_ranks, kind):
    form = list(FORMS)[(num_ranks // 2 + cases.ROUTINGS.index(kind)) % 4]
    sizes = MAX_TOKENS, HIDDEN, EXPERTS, TOPK
    check_case(ranks_of_nodes, num_ranks, NUM_TOKENS, *sizes, kind, [form], node_ranks=2)


@pytest.mark.parametrize("form", FORMS)
def test_nodes_of_one_rank(lone_ranks, form):
    """With one sum on each node, the bits of one node."""
    sizes = MAX_TOKENS, HIDDEN, EXPERTS, TOPK
    check_case(lone_ranks, 4, NUM_TOKENS, *sizes, "duplicates", [form], node_ranks=None)


@pytest.mark.slow
@pytest.mark.parametrize("kind", cases.ROUTINGS)
def test_nodes_of_four_ranks(kind):
    with RankPool(8, nodes=2, timeout_s=200) as ranks:
        check_case(ranks, 8, NUM_TOKENS, 4, HIDDEN, 16, 4, kind, list(FORMS), node_ranks=4)


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "hidden", "num_experts", "num_topk"),
    [([21, 3, 40, 0], 40, 24, 8, 2), ([1], 1, 7, 4, 1), ([300, 5], 310, 16, 64, 8)],
)
def test_other_shapes(ranks_of_nodes, num_tokens, max_tokens, hidden, num_experts, num_topk):
    """More rows than share a flag, and than ids are read at a time; rows that are not aligned."""
    sizes = max_tokens, hidden, num_experts, num_topk
    check_case(ranks_of_nodes, 4, num_tokens, *sizes, "holes", ["bf16"], node_ranks=2)


def test_rounded_products(ranks_of_nodes):
    """Weights that are no powers of two."""
    x, idx, _ = make_inputs(4, NUM_TOKENS, HIDDEN, EXPERTS, TOPK, "uniform")
    inputs = x, idx, [torch.rand(ids.shape) for ids in idx]
    low_latency.check_inputs(ranks_of_nodes, inputs, *SHAPE, ["bf16"], node_ranks=2)


# --- What goes over the network --------------------------------------------------------------


def bytes_sent(group, x, topk_idx, topk_weights):
    """How often this rank sent messages of each size in a dispatch."""
    buffer = low_latency.make_buffer(group, MAX_TOKENS, HIDDEN, EXPERTS)
    [nic], sizes = network.nics.values(), []
    send = nic.send

    def count(own, timeout_ns, to, source, num_bytes, *more):
        sizes.append(num_bytes)
        send(own, timeout_ns, to, source, num_bytes, *more)

    nic.send = count
    try:
        dispatch(buffer, x, topk_idx, *REST)
    finally:
        del nic.send
    buffer.check()
    torch.distributed.barrier(group)
    buffer.destroy()
    return Counter(sizes)


def test_a_token_crosses_the_network_once_for_each_node(ranks_of_nodes):
    """Tokens that both ranks of the other node want, and those that none wants."""
    x, _, weights = make_inputs(4, [3], HIDDEN, EXPERTS, TOPK, "uniform")
    far = [[[6, 7, 9], [0, 11, 8], [1, 2, 3]], [[0, 1, 2]] * 3, [[0, 3, 6]] * 3, [[0, 9, 1]] * 3]
    sent = ranks_of_nodes.run(
        bytes_sent, *map(PerRank, (x, [torch.tensor(ids) for ids in far], weights)), num_ranks=4
    )
    row_bytes = RowLayout(2 * HIDDEN, TOPK).num_bytes
    for of_rank, num_rows in zip(sent, [2, 0, 3, 3], strict=True):
        rows = num_rows * row_bytes
        assert of_rank[rows] == (num_rows > 0)
        assert of_rank.total() == 1 + (num_rows > 0)  # a header, and one message of rows


# --- Calls in halves, and in turns -----------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1), (2, 0, 3, 1)])
def test_all_send_before_all_receive(ranks_of_nodes, order):
    inputs, own = batches(4, len(order))
    results = ranks_of_nodes.run(hooks.in_halves, order, len(order), own, num_ranks=4)
    check_batches(results, inputs, hooks.FORMS_IN_TURN[: len(order)], node_ranks=2)


def test_two_micro_batches(ranks_of_nodes):
    inputs, own = batches(4, 2)
    results = ranks_of_nodes.run(hooks.two_micro_batches, own, num_ranks=4)
    check_batches(results, inputs, ["fp8", "fp8"], node_ranks=2)


def send_alone(group, x, topk_idx):
    """Rank 0 sends before any other rank has begun, and receives afterwards."""
    buffer = low_latency.make_buffer(group, MAX_TOKENS, HIDDEN, EXPERTS)
    if group.rank():
        torch.distributed.barrier(group)
    *_, counts_0, _, _, hook = buffer.low_latency_dispatch(
        x, topk_idx, *SHAPE, return_recv_hook=True
    )
    if group.rank() == 0:
        torch.distributed.barrier(group)
    hook()
    torch.distributed.barrier(group)
    buffer.destroy()
    return counts_0


def test_a_send_waits_for_nobody(ranks_of_nodes):
    x, idx, _ = make_inputs(4, [2], HIDDEN, EXPERTS, TOPK, "uniform")
    counts = ranks_of_nodes.run(send_alone, *map(PerRank, (x, idx)), num_ranks=4)
    assert sum(int(one.sum()) for one in counts) == 4 * 2 * TOPK


@pytest.mark.parametrize("num_slots", [2, 3])
def test_a_lane_is_not_overwritten_before_it_is_received(ranks_of_nodes, num_slots):
    results = ranks_of_nodes.run(hooks.pipeline, num_slots, 6, num_ranks=4)
    for call, rows in enumerate(results[0]):
        want = torch.arange(24).view(3, 8).repeat(4, 1).bfloat16() + call
        assert torch.equal(rows, want)


def test_too_many_calls_in_flight(ranks_of_nodes):
    results = ranks_of_nodes.run(hooks.too_many_in_flight, 2, num_ranks=4)
    assert results == [[0.0, 1.0]] * 4


def test_normal_calls_in_between(ranks_of_nodes):
    inputs, own = batches(4, 3)
    results = ranks_of_nodes.run(calls.both_kinds, own, num_ranks=4)
    check_batches(results, inputs, ["fp8"] * 3, node_ranks=2)


def test_calls_of_other_shapes(ranks_of_nodes):
    """No memory of an earlier call is taken for that of this one."""
    shapes = [
        (max_tokens, experts, make_inputs(4, [max_tokens, 3], hidden, experts, num_topk, "holes"))
        for max_tokens, hidden, experts, num_topk in [(7, 512, 16, 4), (5, 128, 4, 1)] * 2
    ]
    results = ranks_of_nodes.run(calls.shapes_in_turn, shapes, num_ranks=4)
    for number, (max_tokens, experts, inputs) in enumerate(shapes):
        at_call = [found[number] for found in results]
        low_latency.check(at_call, *inputs, max_tokens, experts, "fp8", node_ranks=2)


def same_bits(group, x, topk_idx, topk_weights):
    """The first of six round trips, if all are the same."""
    buffer = low_latency.make_buffer(group, MAX_TOKENS, HIDDEN, EXPERTS)
    found = []
    for call in range(6):
        if group.rank() == call % 4:
            time.sleep(0.02)
        low_latency.poison(buffer) if call == 0 else None
        torch.distributed.barrier(group) if call == 0 else None
        found.append(round_trip(buffer, x, topk_idx, topk_weights, *REST))
    torch.distributed.barrier(group)
    buffer.destroy()
    return [low_latency.differences(one, found[0]) for one in found]


def test_repeated_calls_give_the_same_bits(ranks_of_nodes):
    inputs = make_inputs(6, NUM_TOKENS, HIDDEN, EXPERTS, TOPK, "skewed")
    for of_rank in ranks_of_nodes.run(same_bits, *map(PerRank, inputs)):
        assert of_rank == [[]] * 6


# --- Options ---------------------------------------------------------------------------------


def count_and_wait(group, x, topk_idx, topk_weights):
    """Received rows per expert, their statistics, and seconds waited for each rank in a round trip
    for whose halves rank 3 is late, after one for which no rank is."""
    buffer = low_latency.make_buffer(group, MAX_TOKENS, HIDDEN, EXPERTS)
    seen = torch.full((EXPERTS // group.size(),), 100, dtype=torch.int32)
    waited = torch.zeros(2, 2, group.size(), dtype=torch.int64)
    pause = torch.zeros(1)

    def wait(call):
        torch.distributed.barrier(group)
        if call and group.rank() == 3:
            time.sleep(float(pause))

    for call in range(2):
        start = time.monotonic()
        wait(call)
        y, counts, handle = dispatch(
            buffer, x, topk_idx, *REST, cumulative_local_expert_recv_stats=seen,
            dispatch_wait_recv_cost_stats=waited[call, 0],
        )  # fmt: skip
        wait(call)
        combine(
            buffer, y, topk_idx, topk_weights, handle, combine_wait_recv_cost_stats=waited[call, 1]
        )
        pause += max(0.8, 3 * (time.monotonic() - start))
        torch.distributed.all_reduce(pause, torch.distributed.ReduceOp.MAX, group)
    torch.distributed.barrier(group)
    buffer.destroy()
    return counts, seen, waited[1] * 1e-9, float(pause)


def test_statistics(ranks_of_nodes):
    inputs = make_inputs(4, [MAX_TOKENS, 2], HIDDEN, EXPERTS, TOPK, "uniform")
    results = ranks_of_nodes.run(count_and_wait, *map(PerRank, inputs), num_ranks=4)
    for rank, (counts, seen, waited, pause) in enumerate(results):
        assert torch.equal(seen, 100 + 2 * counts)
        assert (waited >= 0).all() and (waited < 30 + pause).all()
        if rank in (0, 2):  # rank 1 forwards for rank 3: emulated, it has waited before it looks
            assert (waited[:, 3] > pause / 8).all()
            assert (waited[:, rank] < pause / 2).all()


def options(group, x, topk_idx, topk_weights):
    """Sums by `out` and the combine's own buffer, asynchronously; refused options."""
    buffer = low_latency.make_buffer(group, MAX_TOKENS, HIDDEN, EXPERTS)
    later = {"async_finish": False, "return_recv_hook": True}
    recv_x, counts, handle = dispatch(buffer, x, topk_idx, *REST, later)
    y = run_experts(recv_x, group.rank())
    plain = combine(buffer, y, topk_idx, topk_weights, handle, later)
    own = buffer.get_next_low_latency_combine_buffer(handle)
    assert own.shape == y.shape
    own.copy_(y)
    out = torch.empty_like(x)
    found = combine(buffer, own, topk_idx, topk_weights, handle, zero_copy=True, out=out)
    assert found.data_ptr() == out.data_ptr()
    assert torch.equal(found, plain)
    # An id that is -1 only now counts with weight 0.
    left = torch.where(torch.arange(TOPK) == 1, -1, topk_idx)
    zero = torch.where(left < 0, 0, topk_weights)
    without = combine(buffer, y, left, topk_weights, handle)
    assert torch.equal(without, combine(buffer, y, topk_idx, zero, handle))
    good = y, topk_idx, topk_weights, handle
    with pytest.raises(BackendError, match="logfmt"):
        buffer.low_latency_combine(*good, use_logfmt=True)
    fewer = topk_idx[:-1], topk_weights[:-1]
    narrow = topk_idx[:, :1], topk_weights[:, :1]
    for match, routing in (("the handle is of 3", fewer), ("topk_idx", narrow)):
        with pytest.raises(ShapeError, match=match):
            buffer.low_latency_combine(y, *routing, handle)
    with pytest.raises(CapacityError, match="get_low_latency_rdma_size_hint"):
        buffer.low_latency_dispatch(x, topk_idx, 4096, EXPERTS, use_fp8=False)
    with pytest.raises(BackendError, match="enable_shrink"):
        buffer.low_latency_clean_mask_buffer()
    with pytest.raises(BackendError, match="nodes"):
        low_latency.make_buffer(group, MAX_TOKENS, HIDDEN, EXPERTS, enable_shrink=True)
    buffer.clean_low_latency_buffer(*SHAPE[:1], HIDDEN, EXPERTS)
    buffer.check()
    torch.distributed.barrier(group)
    buffer.destroy()
    return low_latency.result(recv_x, counts, handle, y, plain)


def test_options(ranks_of_nodes):
    inputs = make_inputs(4, [3], HIDDEN, EXPERTS, TOPK, "duplicates")
    results = ranks_of_nodes.run(options, *map(PerRank, inputs), num_ranks=4)
    low_latency.check(results, *inputs, *REST, node_ranks=2)


# --- Clients ---------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["bf16", "ue8m0"])
def test_vllm(ranks_of_nodes, form):
    how = form != "bf16", form == "ue8m0", False
    results, inputs = clients.run_client(
        ranks_of_nodes, clients.vllm, *how, num_ranks=4, kind="duplicates"
    )
    for number in range(2):
        at_batch = [found[number] for found in results]
        low_latency.check(at_batch, *inputs, 3, EXPERTS, form, node_ranks=2)


@pytest.mark.parametrize("use_hook", [False, True])
def test_sglang(ranks_of_nodes, use_hook):
    results, inputs = clients.run_client(
        ranks_of_nodes, clients.sglang, True, use_hook, num_ranks=4
    )
    for number in range(2):
        at_call = [found[number] for found in results]
        low_latency.check(at_call, *inputs, 3, EXPERTS, "fp8", node_ranks=2)


def test_deep_eps_own_checks(ranks_of_nodes):
    generator = torch.Generator().manual_seed(0)
    _, idx, _ = make_inputs(4, [3], HIDDEN, EXPERTS, TOPK, "holes")
    w = PerRank(torch.randn(ids.shape, generator=generator).abs() for ids in idx)
    ranks_of_nodes.run(clients.own_test, clients.FEW_FLAGS, idx, w, num_ranks=4)


# --- Failures --------------------------------------------------------------------------------


def stay_away(group, step, x, topk_idx, topk_weights):
    """(peer, forwarder, phase) of the PeerTimeout of other ranks where rank 0 stops before `step`;
    it lasts, in calls of all lanes."""
    buffer, _ = failures.used_buffer(group, (x, topk_idx, topk_weights))
    seen = None
    try:
        if group.rank():
            round_trip(buffer, x, topk_idx, topk_weights, *REST)
        elif step == "combine":
            dispatch(buffer, x, topk_idx, *REST)
        elif step == "hook":
            buffer.low_latency_dispatch(x, topk_idx, *SHAPE, use_fp8=False, return_recv_hook=True)
        buffer.check()
    except PeerTimeout as error:
        seen = error.peer, error.forwarder, error.phase
        for _ in range(2):
            with pytest.raises(PeerTimeout):
                dispatch(buffer, x, topk_idx, *REST)
    torch.distributed.barrier(group)
    buffer.destroy()
    return seen


@pytest.mark.parametrize("step", ["dispatch", "hook", "combine"])
def test_a_lost_rank_is_named(ranks_of_nodes, step):
    """By what is missing from it, or from the rank of the other node that it forwards for. Without
    its hook, rank 1 alone misses something in the dispatch; the others then miss both."""
    inputs = failures.inputs_of(4)
    results = ranks_of_nodes.run(stay_away, step, *map(PerRank, inputs), num_ranks=4)
    assert results[0] is None
    for rank, (peer, forwarder, _) in enumerate(results[1:], 1):
        assert 0 in (peer, forwarder) or (step == "hook" and rank > 1 and peer == 1)


@pytest.mark.parametrize(
    "other", [{"hidden": 256}, {"max_tokens": 16}, {"num_topk": 2}, {"form": "fp8"}], ids=str
)
def test_ranks_that_disagree_are_told(ranks_of_nodes, other):
    sizes = PerRank([failures.SIZES] * 3 + [failures.SIZES | other])
    for kind, text in ranks_of_nodes.run(failures.call_with, sizes, num_ranks=4):
        assert kind is ShapeError
        assert "different shapes" in text


def other_handles(group, calls_before, x, topk_idx, topk_weights):
    """The error of a combine for which the ranks have handles of different calls."""
    buffer = low_latency.make_buffer(group, MAX_TOKENS, HIDDEN, EXPERTS)
    found = [dispatch(buffer, x, topk_idx, *REST) for _ in range(3)]
    y, _, handle = found[calls_before if group.rank() == 3 else 0]
    error = None
    try:
        combine(buffer, y, topk_idx, topk_weights, handle)
        buffer.check()
    except OutOfStep as caught:
        error = str(caught)
    torch.distributed.barrier(group)
    buffer.destroy()
    return error


@pytest.mark.parametrize("calls_before", [1, 2])
def test_handles_of_other_calls(ranks_of_nodes, calls_before):
    """Of another lane, and of the same one."""
    inputs = make_inputs(4, [2], HIDDEN, EXPERTS, TOPK, "uniform")
    for text in ranks_of_nodes.run(other_handles, calls_before, *map(PerRank, inputs), num_ranks=4):
        assert "out of step" in text and "handle" in text


def handles_of_another_buffer(group, x, topk_idx, topk_weights):
    buffers = [low_latency.make_buffer(group, MAX_TOKENS, HIDDEN, EXPERTS) for _ in range(2)]
    y, _, handle = dispatch(buffers[0], x, topk_idx, *REST)
    with pytest.raises(ShapeError, match="handle"):
        combine(buffers[1], y, topk_idx, topk_weights, handle)
        buffers[1].check()
    for number, change in ((5, lambda part: part[:-1]), (11, lambda part: part.long())):
        parts = list(handle)
        parts[number] = change(parts[number])
        with pytest.raises(Exception, match=f"handle.{handle._fields[number]}"):
            combine(buffers[0], y, topk_idx, topk_weights, tuple(parts))
    combine(buffers[0], y, topk_idx, topk_weights, tuple(handle))  # a plain tuple serves as well
    torch.distributed.barrier(group)
    for buffer in buffers:
        buffer.destroy()


def test_handles_that_are_refused(ranks_of_nodes):
    inputs = make_inputs(4, [2], HIDDEN, EXPERTS, TOPK, "uniform")
    ranks_of_nodes.run(handles_of_another_buffer, *map(PerRank, inputs), num_ranks=4)


def test_bad_ids(ranks_of_nodes):
    good = torch.tensor([[0, 11], [-1, -1], [2, -1]])
    bad = torch.tensor([[0, 11], [2**32 + 2, EXPERTS], [2, -7]])
    per_rank = PerRank([bad, good, good, good])
    (found, texts), *others = ranks_of_nodes.run(failures.bad_ids, per_rank, num_ranks=4)
    x, weights = cases.tokens(3, HIDDEN, 2, torch.bfloat16, 0)
    for number in range(2):
        results = [found[number], *(one[0][number] for one in others)]
        sizes = failures.REST
        low_latency.check(results, [x] * 4, [good] * 4, [weights] * 4, *sizes, node_ranks=2)
    assert len(texts) == 2 and all("3 expert ids" in text for text in texts)
