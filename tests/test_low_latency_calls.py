"""Low-latency calls: several at once, in memory that is given, with statistics, among others."""

from __future__ import annotations

import time

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
    dispatch,
    make_inputs,
    run_experts,
    to_cpu,
    to_device,
)

from moe_engine import Buffer
from moe_engine.combine import low_latency_kernels

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
    again = combine(buffer, y0, idx0, w0, handle0, {"async_finish": True})
    assert torch.equal(again, out0)
    torch.distributed.barrier(group)
    buffer.destroy()
    found = (recv0, counts0, handle0, y0, out0), (recv1, counts1, handle1, y1, out1)
    return [to_cpu(low_latency.result(*part)) for part in found]


def test_two_handles(pool):
    inputs, own = batches(2, 2)
    results = pool.run(two_handles, own, num_ranks=2)
    check_batches(results, inputs, ["fp8", "bf16"])


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


@pytest.mark.parametrize("num_ranks", cases.slow_unless([(2,)], [1, 2, 3]))
def test_out_and_zero_copy(pool, num_ranks):
    inputs, own = batches(num_ranks, 1)
    results = pool.run(given_memory, own, num_ranks=num_ranks)
    check_batches(results, inputs, ["fp8"])


def strided(group, own):
    """Arguments with gaps between their rows, or refused where these are not taken."""
    [(x, idx, weights)] = (to_device(*batch) for batch in own)
    buffer = low_latency.make_buffer(group, MAX_TOKENS, HIDDEN, EXPERTS)
    wide = torch.cat([x, x * 0 + 5], 1)[:, :HIDDEN]
    ids = torch.stack([idx, idx * 0], 2)[:, :, 0]
    recv_x, counts, handle = dispatch(buffer, wide, ids, *SHAPE)
    y = run_experts(recv_x, group.rank())
    apart = torch.cat([y, y * 0], 2)[:, :, :HIDDEN]
    out = combine(buffer, apart, ids, weights.T.contiguous().T, handle)
    torch.distributed.barrier(group)
    buffer.destroy()
    return [to_cpu(low_latency.result(recv_x, counts, handle, y, out))]


def test_arguments_of_any_strides(pool):
    inputs, own = batches(2, 1)
    check_batches(pool.run(strided, own, num_ranks=2), inputs, ["bf16"])


# --- Statistics ------------------------------------------------------------------------------

SLEEP_S = 0.8
"""How late a rank is at least: three times what a call of the others takes."""


def delay_rows(seconds):
    """The next combine of this CPU rank returns its rows so much later. If the whole call came
    late, no program that sums would wait: emulated programs run one after another, and the one that
    compares what the ranks began the call with comes first."""
    real = low_latency_kernels._return_rows

    def wait(*args):
        low_latency_kernels._return_rows = real
        time.sleep(seconds)
        return real(*args)

    low_latency_kernels._return_rows = wait


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
    for_dispatch, for_combine = torch.full((2, group.size()), 5, dtype=torch.int64, device=device)

    pause = torch.zeros(1, dtype=torch.float64)

    def late(call):
        torch.distributed.barrier(group)
        if call and group.rank() == 1:
            time.sleep(float(pause))

    def late_rows(call):
        if x.is_cuda:
            late(call)
        elif call and group.rank() == 1:
            delay_rows(float(pause))

    waited = []
    for call in range(2):
        late(call)
        start = time.monotonic()
        recv_x, counts, handle = dispatch(
            buffer, x, idx, *SHAPE, "bf16", flags,
            cumulative_local_expert_recv_stats=seen, dispatch_wait_recv_cost_stats=for_dispatch,
        )  # fmt: skip
        if x.is_cuda:
            torch.cuda.synchronize()
        late_rows(call)
        combine(
            buffer, recv_x, idx, weights, handle, flags, combine_wait_recv_cost_stats=for_combine
        )
        if x.is_cuda:
            torch.cuda.synchronize()
        waited.append(torch.stack([for_dispatch, for_combine]).cpu())
        if call == 0:
            pause += max(SLEEP_S, 3 * (time.monotonic() - start))
            torch.distributed.all_reduce(pause, torch.distributed.ReduceOp.MAX, group)
    torch.distributed.barrier(group)
    buffer.destroy()
    return counts.cpu(), seen.cpu(), waited, float(pause)


@pytest.mark.parametrize(
    "flags", [pytest.param({}, marks=pytest.mark.slow), {"return_recv_hook": True}]
)
def test_statistics(pool, flags):
    results = pool.run(count_and_wait, flags, num_ranks=3)
    for rank, (counts, seen, (first, second), pause) in enumerate(results):
        assert torch.equal(seen, 100 + 2 * counts)
        assert (first >= 5).all()
        grown = (second - first) * 1e-9
        assert (grown >= 0).all()
        assert (grown < 30 + pause).all()
        if rank != 1:
            assert (grown[:, 1] > pause / 8).all()  # its own half may have taken long
        assert (grown[:, rank] < pause / 2).all()


# --- Among other calls -----------------------------------------------------------------------


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
    """Calls of several shapes and top-k on one Buffer, for the largest."""
    buffer = low_latency.make_buffer(group, 7, 512, 16)
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
            (7, 512, 16, 4), (5, 128, 4, 1), (7, 256, 2, 2), (4, 512, 16, 7), (7, 512, 16, 4),
        ]
    ]  # fmt: skip
    results = pool.run(shapes_in_turn, shapes, num_ranks=2)
    for number, (max_tokens, num_experts, inputs) in enumerate(shapes):
        at_call = [found[number] for found in results]
        low_latency.check(at_call, *inputs, max_tokens, num_experts, "fp8")
