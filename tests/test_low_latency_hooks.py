"""Low-latency calls in two halves: sends, and the hooks that receive."""

from __future__ import annotations

import time
from collections import deque
from unittest import mock

import cases
import low_latency_cases as low_latency
import pytest
import torch
from low_latency_cases import (
    EXPERTS,
    HIDDEN,
    MAX_TOKENS,
    SHAPE,
    batches,
    check_batches,
    combine,
    run_experts,
    to_cpu,
    to_device,
)
from node_cases import NodePool

from moe_engine import BackendError, CapacityError, ShapeError
from moe_engine.prepared import PreparedCall

FORMS_IN_TURN = ["fp8", "bf16", "rounded", "fp8"]


def in_halves(group, order, num_slots, own):
    """All sends, then all receives in `order`: of the dispatches, then of the combines."""
    own = [to_device(*batch) for batch in own]
    buffer = low_latency.make_buffer(group, MAX_TOKENS, HIDDEN, EXPERTS, num_slots)
    low_latency.poison(buffer)
    torch.distributed.barrier(group)
    sent = [
        buffer.low_latency_dispatch(
            x, idx, *SHAPE, return_recv_hook=True, **low_latency.FORMS[form]
        )
        for (x, idx, _), form in zip(own, FORMS_IN_TURN, strict=False)
    ]
    for number in order:
        sent[number][4]()
    rows = [run_experts(recv_x, group.rank()) for recv_x, *_ in sent]
    returned = [
        buffer.low_latency_combine(y, idx, weights, handle, return_recv_hook=True)
        for y, (_, idx, weights), (_, _, handle, _, _) in zip(rows, own, sent, strict=True)
    ]
    for number in order:
        returned[number][2]()
    buffer.check()
    torch.distributed.barrier(group)
    buffer.destroy()
    return [
        to_cpu(low_latency.result(recv_x, counts, handle, y, out))
        for (recv_x, counts, handle, _, _), y, (out, _, _) in zip(sent, rows, returned, strict=True)
    ]


@pytest.mark.parametrize(
    ("num_ranks", "order"), [(1, (1, 0)), (2, (0, 1)), (2, (2, 0, 3, 1)), (3, (1, 0))]
)
def test_all_send_before_all_receive(pool, num_ranks, order):
    inputs, own = batches(num_ranks, len(order))
    results = pool.run(in_halves, order, len(order), own, num_ranks=num_ranks)
    check_batches(results, inputs, FORMS_IN_TURN[: len(order)])


def two_micro_batches(group, own):
    """The combine of one half of the tokens is under way while the other half is dispatched."""
    (x0, idx0, w0), (x1, idx1, w1) = (to_device(*batch) for batch in own)
    buffer = low_latency.make_buffer(group, MAX_TOKENS, HIDDEN, EXPERTS)
    recv0, counts0, handle0, _, receive0 = buffer.low_latency_dispatch(
        x0, idx0, *SHAPE, return_recv_hook=True
    )
    receive0()
    y0 = run_experts(recv0, group.rank())
    out0, _, sum0 = buffer.low_latency_combine(y0, idx0, w0, handle0, return_recv_hook=True)
    recv1, counts1, handle1, _, receive1 = buffer.low_latency_dispatch(
        x1, idx1, *SHAPE, return_recv_hook=True
    )
    sum0()
    receive1()
    y1 = run_experts(recv1, group.rank())
    out1, _, sum1 = buffer.low_latency_combine(y1, idx1, w1, handle1, return_recv_hook=True)
    sum1()
    buffer.check()
    torch.distributed.barrier(group)
    buffer.destroy()
    found = (recv0, counts0, handle0, y0, out0), (recv1, counts1, handle1, y1, out1)
    return [to_cpu(low_latency.result(*part)) for part in found]


def test_two_micro_batches(pool):
    inputs, own = batches(3, 2)
    results = pool.run(two_micro_batches, own, num_ranks=3)
    check_batches(results, inputs, ["fp8", "fp8"])


def nothing_before_the_hook(group):
    """Rank 1 calls after rank 0's send has ended: (when the call began, when its hook ended, rows),
    of one clock."""
    x = torch.ones(2, HIDDEN).bfloat16()
    idx, weights = torch.tensor([[0, 7], [3, 4]]), torch.ones(2, 2)
    x, idx, weights = to_device(x, idx, weights)
    buffer = low_latency.make_buffer(group, MAX_TOKENS, HIDDEN, EXPERTS)
    low_latency.round_trip(buffer, x, idx, weights, *SHAPE, "bf16", {"return_recv_hook": True})
    torch.distributed.barrier(group)
    if group.rank() == 1:
        torch.distributed.barrier(group)  # rank 0 has sent
        time.sleep(0.5)
    begun = time.monotonic()
    recv_x, _, _, _, receive = buffer.low_latency_dispatch(
        x, idx, *SHAPE, use_fp8=False, return_recv_hook=True
    )
    if x.is_cuda:
        torch.cuda.current_stream().synchronize()
    if group.rank() == 0:
        torch.distributed.barrier(group)
    receive()
    if x.is_cuda:
        torch.cuda.current_stream().synchronize()
    received = time.monotonic()
    torch.distributed.barrier(group)
    buffer.destroy()
    return begun, received, recv_x[0, :2].cpu()


def test_a_send_waits_for_nobody_and_its_hook_does(pool):
    (_, received, rows), (begun, _, _) = pool.run(nothing_before_the_hook, num_ranks=2)
    assert received > begun
    assert rows.eq(1).all()


def hook_after_the_end(group):
    x, idx = to_device(torch.ones(1, HIDDEN).bfloat16(), torch.tensor([[0]]))
    buffer = low_latency.make_buffer(group, MAX_TOKENS, HIDDEN, EXPERTS)
    _, counts, _, _, receive = buffer.low_latency_dispatch(x, idx, *SHAPE, return_recv_hook=True)
    receive()
    receive()  # the second time it does nothing
    assert counts[0] == 1
    *_, receive = buffer.low_latency_dispatch(x, idx, *SHAPE, return_recv_hook=True)
    buffer.destroy()
    with pytest.raises(BackendError, match="destroyed"):
        receive()


def test_a_hook_after_its_buffer_was_destroyed(pool):
    pool.run(hook_after_the_end, num_ranks=1)


def combine_before_the_hook(group):
    """The sum of a call whose combine was refused until its rows had arrived."""
    x, idx, weights = torch.ones(2, HIDDEN).bfloat16(), torch.tensor([[0], [7]]), torch.ones(2, 1)
    x, idx, weights = to_device(x, idx, weights)
    buffer = low_latency.make_buffer(group, MAX_TOKENS, HIDDEN, EXPERTS)
    sent = [
        buffer.low_latency_dispatch(x, idx, *SHAPE, use_fp8=False, return_recv_hook=True)
        for _ in range(2)
    ]
    sent[0][-1]()
    rows, _, handle, _, receive = sent[1]
    with pytest.raises(BackendError, match="hook was not called"):
        buffer.low_latency_combine(rows, idx, weights, handle)
    first_rows, _, first_handle, *_ = sent[0]
    outs = [buffer.low_latency_combine(first_rows, idx, weights, first_handle)[0]]
    receive()
    outs.append(buffer.low_latency_combine(rows, idx, weights, handle)[0])
    buffer.check()
    torch.distributed.barrier(group)
    buffer.destroy()
    return [out.cpu() for out in outs]


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_combine_before_the_hook_is_refused(pool, num_nodes):
    nodes = NodePool(pool, num_nodes, 2 // num_nodes)
    for outs in nodes.run(combine_before_the_hook, num_ranks=2):
        assert all(out.eq(1).all() for out in outs)


def hooks_that_only_launch(group):
    """How many hooks moved the addresses of their launches, and what each call received."""
    x, idx = to_device(torch.ones(1, HIDDEN).bfloat16(), torch.tensor([[0]]))
    buffer = low_latency.make_buffer(group, MAX_TOKENS, HIDDEN, EXPERTS)
    moves, received, move = [], [], PreparedCall._move

    def note(self, addresses):
        moves.append(self)
        move(self, addresses)

    for call in range(4):
        rows, _, _, _, receive = buffer.low_latency_dispatch(
            x + call, idx, *SHAPE, use_fp8=False, return_recv_hook=True
        )
        with mock.patch.object(PreparedCall, "_move", note):
            receive()
        received.append(rows)
    buffer.destroy()
    return len(moves), [rows[0, 0, 0].item() for rows in received]


def test_the_addresses_of_a_hook_are_known_before_it_is_called(pool):
    assert pool.run(hooks_that_only_launch, num_ranks=1) == [(0, [1, 2, 3, 4])]


def pipeline(group, num_slots, num_calls):
    """What each rank receives whose calls are all sent num_slots ahead; rank 1 receives late."""
    num_tokens, device = 3, cases.device()
    buffer = low_latency.make_buffer(group, num_tokens, 8, EXPERTS, num_slots)
    low_latency.poison(buffer)
    torch.distributed.barrier(group)
    x = torch.arange(num_tokens * 8, device=device).view(num_tokens, 8).bfloat16()
    idx = torch.tensor([[0, 11]] * num_tokens, device=device)
    sent, received = deque(), []

    def receive():
        if group.rank() == 1:
            torch.cuda._sleep(10_000_000) if x.is_cuda else time.sleep(0.1)
        rows, *_, hook = sent.popleft()
        hook()
        received.append(rows)

    for call in range(num_calls):
        if len(sent) == num_slots:
            receive()
        sent.append(
            buffer.low_latency_dispatch(
                x + call, idx, num_tokens, EXPERTS, use_fp8=False, return_recv_hook=True
            )
        )
    while sent:
        receive()
    buffer.check()
    torch.distributed.barrier(group)
    buffer.destroy()
    expert = 0 if group.rank() == 0 else -1
    return [rows[expert].cpu() for rows in received]


@pytest.mark.parametrize("num_slots", [2, 3])
def test_a_slot_is_not_overwritten_before_it_is_received(pool, num_slots):
    for received in pool.run(pipeline, num_slots, 6, num_ranks=2):
        for call, rows in enumerate(received):
            want = torch.arange(24).view(3, 8).repeat(2, 1).bfloat16() + call
            assert torch.equal(rows, want)


def too_many_in_flight(group, num_slots):
    """Calls beyond num_slots between send and receive are refused, and leave no trace."""
    x, idx = to_device(torch.ones(3, HIDDEN).bfloat16(), torch.tensor([[0], [5], [7]]))
    weights = torch.ones_like(idx, dtype=torch.float32)
    buffer = low_latency.make_buffer(group, MAX_TOKENS, HIDDEN, EXPERTS, num_slots)

    def send(factor):
        return buffer.low_latency_dispatch(
            x * factor, idx, *SHAPE, use_fp8=False, return_recv_hook=True
        )

    sent = [send(factor) for factor in range(num_slots)]
    with pytest.raises(CapacityError, match=f"num_slots.*{num_slots}|{num_slots}.*num_slots"):
        send(num_slots)
    sent[0][4]()
    recv_x, _, handle, _, _ = sent[0]
    sums = buffer.low_latency_combine(recv_x, idx, weights, handle, return_recv_hook=True)
    with pytest.raises(CapacityError, match="num_slots"):
        buffer.low_latency_combine(recv_x, idx, weights, handle)
    sums[2]()
    for _, _, _, _, receive in sent[1:]:
        receive()
    outs = [combine(buffer, recv_x, idx, weights, handle) for recv_x, _, handle, _, _ in sent]
    torch.distributed.barrier(group)
    buffer.destroy()
    assert torch.equal(sums[0], outs[0])
    return [out.float().mean().item() for out in outs]


@pytest.mark.parametrize("num_slots", [2, 3])
def test_too_many_calls_in_flight(pool, num_slots):
    results = pool.run(too_many_in_flight, num_slots, num_ranks=2)
    assert results == [list(map(float, range(num_slots)))] * 2


# --- Arguments that change before the hook -------------------------------------------------------

CHANGES = {
    "other values": lambda one: one.fill_(-1),
    "a larger one": lambda one: one.resize_(64 * len(one), *one.shape[1:]).fill_(-1),
    "a smaller one": lambda one: one.resize_(1, *one.shape[1:]).fill_(-1),
    "other memory": lambda one: one.set_(torch.full_like(one[:1], -1)),
    "data": lambda one: setattr(one, "data", torch.full_like(one[:1], -1)),
}


def change_before_hooks(group, ways):
    """What two calls of each kind give when their arguments change before their hooks, and what
    lies behind `out`; the first calls of a kind and prepared ones."""
    generator, rank = torch.Generator().manual_seed(3 + group.rank()), group.rank()
    x = torch.randn(3, 128, generator=generator).bfloat16().to(cases.device())
    idx = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in x]).to(x.device)
    weights = torch.rand(3, 2, generator=generator).to(x.device)
    buffer = low_latency.make_buffer(group, 8, 128, 4, 2)
    rows, counts, handle, *_ = buffer.low_latency_dispatch(x, idx, 8, 4, use_fp8=False)
    y = run_experts(rows, rank).bfloat16()
    expected, found = buffer.low_latency_combine(y, idx, weights, handle)[0], []
    for way in ways:
        for _ in range(2):
            given = x.clone(), idx.clone()
            got, num, to, _, hook = buffer.low_latency_dispatch(
                *given, 8, 4, use_fp8=False, return_recv_hook=True
            )
            for one in given[buffer.num_nodes - 1 :]:  # of several nodes not x
                CHANGES[way](one)
            hook()
            same = [torch.equal(num, counts)]
            same += [torch.equal(got[e, :n], rows[e, :n]) for e, n in enumerate(counts.tolist())]
            guard = torch.full((16, 128), 77.0, dtype=torch.bfloat16, device=x.device)
            given = y.clone(), idx.clone(), weights.clone()
            out, _, hook = buffer.low_latency_combine(
                *given, to, return_recv_hook=True, out=guard[:3]
            )
            for one in given:
                CHANGES[way](one)
            hook()
            same += [torch.equal(out, expected), bool((guard[3:] == 77).all())]
            found.append((way, all(same)))
    buffer.check()
    torch.distributed.barrier(group)
    buffer.destroy()
    return found


@pytest.mark.parametrize("nodes", [1, 2])
def test_arguments_that_change_before_hooks(pool, nodes):
    """A call reads the sizes of its arguments once, and its hook only what is the call's own."""
    ways = [*CHANGES]
    where = pool if nodes == 1 else NodePool(pool, nodes, 2 // nodes)
    for found in where.run(change_before_hooks, ways, num_ranks=2):
        assert found == [(way, True) for way in ways for _ in range(2)]


def grow_out(group):
    """Whether `out`, and the results of a dispatch, may grow before hooks; a refusal of memory that
    was freed, after which the hook can be called again."""
    buffer = low_latency.make_buffer(group, 8, 128, 4, 2)
    x = torch.randn(3, 128, device=cases.device()).bfloat16()
    idx, weights = torch.tensor([[0], [1], [2]], device=x.device), torch.ones(3, 1, device=x.device)
    same = []
    for _ in range(2):
        rows, _, handle, _, hook = buffer.low_latency_dispatch(
            x, idx, 8, 4, use_fp8=False, return_recv_hook=True
        )
        shape = rows.shape
        rows.resize_(99, *shape[1:])
        hook()
        rows.resize_(shape)
        out, _, hook = buffer.low_latency_combine(rows, idx, weights, handle, return_recv_hook=True)
        out.untyped_storage().resize_(0)
        with pytest.raises(
            ShapeError, match=r"a tensor of 768 bytes has less memory.*call the hook again"
        ):
            hook()
        out.untyped_storage().resize_(2 * out.numel())
        out.resize_(999, 128)
        hook()
        same.append(torch.equal(out[:3], x))
    buffer.check()
    buffer.destroy()
    return same


def test_results_that_grow_before_hooks(pool):
    assert pool.run(grow_out, num_ranks=1) == [[True, True]]
