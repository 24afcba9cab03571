"""Low-latency calls in halves, several at once, in memory that is given, with statistics."""

from __future__ import annotations

import time

import low_latency_cases as low_latency
import pytest
import torch
from low_latency_cases import combine, dispatch, make_inputs, run_experts, to_cpu, to_device

from moe_engine import BackendError, Buffer, CapacityError
from moe_engine.emulation import PerRank

EXPERTS, TOPK, HIDDEN, MAX_TOKENS = 12, 2, 256, 4
SHAPE = MAX_TOKENS, EXPERTS


def batches(num_ranks, count, num_tokens=(MAX_TOKENS, 3, 0)):
    """`count` inputs, each with lists of all ranks, and PerRank lists of each rank's batches."""
    kinds = ["holes", "uniform", "duplicates"]
    inputs = [
        make_inputs(num_ranks, num_tokens, HIDDEN, EXPERTS, TOPK, kinds[seed % 3], 10 * seed)
        for seed in range(count)
    ]
    return inputs, PerRank(
        [tuple(part[rank] for part in batch) for batch in inputs] for rank in range(num_ranks)
    )


def check_batches(results, inputs, forms):
    for number, (batch, form) in enumerate(zip(inputs, forms, strict=True)):
        low_latency.check([found[number] for found in results], *batch, *SHAPE, form)


# --- In halves -------------------------------------------------------------------------------

FORMS_IN_TURN = ["fp8", "bf16", "rounded", "fp8"]


def in_halves(group, order, num_slots, own):
    """Sends of all batches, then all receives in `order`, once there and once back."""
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
    """A rank's sends end although no other rank has called; how long they took."""
    x = torch.ones(2, HIDDEN).bfloat16()
    idx, weights = torch.tensor([[0, 7], [3, 4]]), torch.ones(2, 2)
    x, idx, weights = to_device(x, idx, weights)
    buffer = low_latency.make_buffer(group, MAX_TOKENS, HIDDEN, EXPERTS)
    low_latency.round_trip(buffer, x, idx, weights, *SHAPE, "bf16", {"return_recv_hook": True})
    torch.distributed.barrier(group)
    if group.rank() == 1:
        time.sleep(1.0)
    start = time.monotonic()
    recv_x, _, _, _, receive = buffer.low_latency_dispatch(
        x, idx, *SHAPE, use_fp8=False, return_recv_hook=True
    )
    if x.is_cuda:
        torch.cuda.current_stream().synchronize()
    sent = time.monotonic() - start
    receive()
    if x.is_cuda:
        torch.cuda.current_stream().synchronize()
    received = time.monotonic() - start
    torch.distributed.barrier(group)
    buffer.destroy()
    return sent, received, recv_x[0, :2].cpu()


def test_a_send_waits_for_nobody_and_its_hook_does(pool):
    (sent, received, rows), _ = pool.run(nothing_before_the_hook, num_ranks=2)
    assert sent < 0.8 < received
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


# --- Several at once -------------------------------------------------------------------------


def two_handles(group, own):
    """Two dispatches, then their combines, the second's first; the first's twice."""
    (x0, idx0, w0), (x1, idx1, w1) = (to_device(*batch) for batch in own)
    buffer = low_latency.make_buffer(group, MAX_TOKENS, HIDDEN, EXPERTS)
    recv0, counts0, handle0 = dispatch(buffer, x0, idx0, *SHAPE, "fp8")
    recv1, counts1, handle1 = dispatch(buffer, x1, idx1, *SHAPE, "bf16")
    dispatch(buffer, x1, idx1, *SHAPE)  # which nobody combines
    y0, y1 = run_experts(recv0, group.rank()), run_experts(recv1, group.rank())
    out1 = combine(buffer, y1, idx1, w1, handle1)
    out0 = combine(buffer, y0, idx0, w0, handle0)
    again = combine(buffer, y0, idx0, w0, tuple(handle0), {"async_finish": True})
    assert torch.equal(again, out0)
    torch.distributed.barrier(group)
    buffer.destroy()
    found = (recv0, counts0, handle0, y0, out0), (recv1, counts1, handle1, y1, out1)
    return [to_cpu(low_latency.result(*part)) for part in found]


def test_two_handles(pool):
    inputs, own = batches(3, 2)
    results = pool.run(two_handles, own, num_ranks=3)
    check_batches(results, inputs, ["fp8", "bf16"])


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


# --- Memory that the caller gives ------------------------------------------------------------


def given_memory(group, own):
    """Sums into `out`, from rows that were written where they leave from."""
    [(x, idx, weights)] = (to_device(*batch) for batch in own)
    buffer = low_latency.make_buffer(group, MAX_TOKENS, HIDDEN, EXPERTS)
    recv_x, counts, handle = dispatch(buffer, x, idx, *SHAPE, "fp8")
    y = run_experts(recv_x, group.rank())
    plain = combine(buffer, y, idx, weights, handle)
    for flags in ({}, {"return_recv_hook": True}, {"async_finish": True}):
        out = torch.full_like(x, 7.0)
        found = combine(buffer, y, idx, weights, handle, flags, out=out)
        assert found.data_ptr() == out.data_ptr()
        assert torch.equal(out, plain)
        rows = buffer.get_next_low_latency_combine_buffer(handle)
        assert (rows.dtype, rows.shape) == (y.dtype, y.shape)
        rows[:, :, :] = y
        assert torch.equal(combine(buffer, y, idx, weights, handle, flags, zero_copy=True), plain)
        rows = buffer.get_next_low_latency_combine_buffer(handle)
        rows.copy_(y)
        rows *= 2
        twice = combine(buffer, rows, idx, weights, handle, flags, zero_copy=True, out=out)
        assert torch.equal(twice, plain * 2)
    buffer.check()
    torch.distributed.barrier(group)
    buffer.destroy()
    return [to_cpu(low_latency.result(recv_x, counts, handle, y, plain))]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_out_and_zero_copy(pool, num_ranks):
    inputs, own = batches(num_ranks, 1)
    results = pool.run(given_memory, own, num_ranks=num_ranks)
    check_batches(results, inputs, ["fp8"])


def strided(group, own):
    """Arguments with gaps between their rows, or refused where these are not taken."""
    [(x, idx, weights)] = (to_device(*batch) for batch in own)
    buffer = low_latency.make_buffer(group, MAX_TOKENS, HIDDEN, EXPERTS)
    wide = torch.cat([x, x * 0 + 5], 1)[:, :HIDDEN]
    lanes = torch.stack([idx, idx * 0], 2)[:, :, 0]
    recv_x, counts, handle = dispatch(buffer, wide, lanes, *SHAPE)
    y = run_experts(recv_x, group.rank())
    apart = torch.cat([y, y * 0], 2)[:, :, :HIDDEN]
    out = combine(buffer, apart, lanes, weights.T.contiguous().T, handle)
    torch.distributed.barrier(group)
    buffer.destroy()
    return [to_cpu(low_latency.result(recv_x, counts, handle, y, out))]


def test_arguments_of_any_strides(pool):
    inputs, own = batches(2, 1)
    check_batches(pool.run(strided, own, num_ranks=2), inputs, ["bf16"])


# --- Statistics ------------------------------------------------------------------------------

SLEEP_S = 0.4


def count_and_wait(group, flags):
    """(received rows per expert, their statistics and nanoseconds waited, of two round trips of
    which rank 1 is late for the second's halves). No other rank gets its tokens, so these wait for
    its rows alone."""
    x, idx, weights = to_device(
        torch.ones(2, HIDDEN).bfloat16(), torch.tensor([[0, 4, 8], [9, 5, 1]]), torch.ones(2, 3)
    )
    if group.rank() == 1:
        idx = idx % 4 + 4
    buffer = low_latency.make_buffer(group, MAX_TOKENS, HIDDEN, EXPERTS)
    num_local, device = EXPERTS // group.size(), x.device
    seen = torch.full((num_local,), 100, dtype=torch.int32, device=device)
    there, back = torch.full((2, group.size()), 5, dtype=torch.int64, device=device)

    def late(call):
        torch.distributed.barrier(group)
        if call and group.rank() == 1:
            time.sleep(SLEEP_S)

    waited = []
    for call in range(2):
        late(call)
        recv_x, counts, handle = dispatch(
            buffer, x, idx, *SHAPE, "bf16", flags,
            cumulative_local_expert_recv_stats=seen, dispatch_wait_recv_cost_stats=there,
        )  # fmt: skip
        if x.is_cuda:
            torch.cuda.synchronize()
        late(call)
        combine(buffer, recv_x, idx, weights, handle, flags, combine_wait_recv_cost_stats=back)
        if x.is_cuda:
            torch.cuda.synchronize()
        waited.append(torch.stack([there, back]).cpu())
    torch.distributed.barrier(group)
    buffer.destroy()
    return counts.cpu(), seen.cpu(), waited


@pytest.mark.parametrize("flags", [{}, {"return_recv_hook": True}])
def test_statistics(pool, flags):
    results = pool.run(count_and_wait, flags, num_ranks=3)
    for rank, (counts, seen, (first, second)) in enumerate(results):
        assert torch.equal(seen, 100 + 2 * counts)
        assert (first >= 5).all()
        grown = (second - first) * 1e-9
        assert (grown >= 0).all()
        assert (grown < 30).all()
        if rank != 1:
            assert (grown[:, 1] > SLEEP_S / 2).all()
        assert (grown[:, rank] < SLEEP_S / 2).all()


# --- Beside the other calls ------------------------------------------------------------------


def both_kinds(group, own):
    """Normal and low-latency calls of one Buffer in turns, and its memory cleaned in between."""
    batches_of_rank = [to_device(*batch) for batch in own]
    hint = Buffer.get_low_latency_rdma_size_hint(MAX_TOKENS, HIDDEN, group.size(), EXPERTS)
    buffer = Buffer(group, 1 << 20, hint, low_latency_mode=True)
    found = []
    for x, idx, weights in batches_of_rank:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS)
        rows, _, _, _, handle, _ = buffer.dispatch(
            x, None, per_rank, None, in_rank, per_expert, idx, weights
        )
        low = low_latency.round_trip(buffer, x, idx, weights, *SHAPE, "fp8")
        out, _, _ = buffer.combine(rows, handle)
        assert torch.equal(out, x * in_rank.sum(1, keepdim=True))
        buffer.clean_low_latency_buffer(MAX_TOKENS, HIDDEN, EXPERTS)
        found.append(to_cpu(low))
    buffer.check()
    torch.distributed.barrier(group)
    buffer.destroy()
    return found


def test_normal_calls_in_between(pool):
    inputs, own = batches(2, 3)
    check_batches(pool.run(both_kinds, own, num_ranks=2), inputs, ["fp8"] * 3)


def shapes_in_turn(group, shapes):
    """Calls of several shapes and numbers of lanes on one Buffer, for the largest."""
    buffer = low_latency.make_buffer(group, 12, 512, 16)
    results = []
    for max_tokens, num_experts, inputs in shapes:
        args = to_device(*(part[group.rank()] for part in inputs))
        found = low_latency.round_trip(buffer, *args, max_tokens, num_experts, "fp8")
        results.append(to_cpu(found))
    torch.distributed.barrier(group)
    buffer.destroy()
    return results


def test_other_shapes_on_one_buffer(pool):
    shapes = [
        (max_tokens, num_experts, make_inputs(2, [max_tokens, 3], hidden, num_experts, k, "holes"))
        for max_tokens, hidden, num_experts, k in [
            (12, 512, 16, 4), (5, 128, 4, 1), (12, 256, 2, 2), (4, 512, 16, 7), (12, 512, 16, 4),
        ]
    ]  # fmt: skip
    results = pool.run(shapes_in_turn, shapes, num_ranks=2)
    for number, (max_tokens, num_experts, inputs) in enumerate(shapes):
        at_call = [found[number] for found in results]
        low_latency.check(at_call, *inputs, max_tokens, num_experts, "fp8")
