"""Rows that are received while others are pushed, and the pace of a push."""

from __future__ import annotations

import cases
import pytest
import torch
import triton
import triton.language as tl
from device_cases import make_context
from dispatch_cases import make_buffer, make_inputs

from moe_engine import Buffer, CapacityError, reference
from moe_engine.device import lang
from moe_engine.device.context import ContextField
from moe_engine.dispatch import Tokens
from moe_engine.emulation import PerRank

NUM_EXPERTS = 16
NUM_SMS = 24  # some of them push, some collect


def receive_rounds(group, rounds, late):
    """Eager dispatches of every round, with and without counts and cached, and on GPUs one captured
    dispatch replayed with each: (rows, ids) received, by form."""
    rounds = [[part.to(cases.device()) for part in inputs] for inputs in rounds]
    x, topk_idx, topk_weights = (part.clone() for part in rounds[0])
    buffer = make_buffer(group, x, NUM_EXPERTS, topk_idx.shape[1], len(x))
    num_sms, Buffer.num_sms = Buffer.num_sms, NUM_SMS
    worst = len(x) * group.size()

    def dispatch(num_worst_tokens=0):
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, NUM_EXPERTS)
        return buffer.dispatch(
            x, None, per_rank, None, in_rank, per_expert, topk_idx, topk_weights,
            num_worst_tokens=num_worst_tokens,
        )  # fmt: skip

    graph = None
    results = []
    for number, inputs in enumerate(rounds):
        for mine, new in zip((x, topk_idx, topk_weights), inputs, strict=True):
            mine.copy_(new)
        if x.is_cuda and number % group.size() == (group.rank() + late) % group.size():
            torch.cuda._sleep(2_000_000)
        rows, ids, *_, handle, _ = dispatch()
        num_rows = len(rows)
        again, *_ = buffer.dispatch(x, handle)
        more, more_ids, *_ = dispatch(worst)
        found = [(rows, ids), (again, ids), (more[:num_rows], more_ids[:num_rows])]
        assert (more_ids[num_rows:] == -1).all()
        if x.is_cuda:
            if graph is None:
                graph = torch.cuda.CUDAGraph()
                torch.cuda.synchronize()
                with torch.cuda.graph(graph):
                    captured = dispatch(worst)
            graph.replay()
            found.append((captured[0][:num_rows], captured[1][:num_rows]))
        results.append([(rows.cpu(), ids.cpu()) for rows, ids in found])
    buffer.check()
    torch.distributed.barrier(group)
    buffer.destroy()
    Buffer.num_sms = num_sms
    return results


def test_rows_are_copied_while_others_are_pushed(pool):
    num_ranks, num_tokens, hidden = (4, 3000, 1024) if pool.device == "cuda" else (2, 40, 16)
    kinds = ["uniform", "skewed", "holes", "one_hot"] * (3 if pool.device == "cuda" else 1)
    rounds = [
        make_inputs(num_ranks, [num_tokens], hidden, NUM_EXPERTS, 4, kind, "bf16", 100 * number)
        for number, kind in enumerate(kinds)
    ]
    by_rank = [[[part[rank] for part in inputs] for inputs in rounds] for rank in range(num_ranks)]
    results = pool.run(receive_rounds, PerRank(by_rank), 1, num_ranks=num_ranks)
    for number, inputs in enumerate(rounds):
        for result, want in zip(results, reference.dispatch(*inputs, NUM_EXPERTS), strict=True):
            for rows, ids in result[number]:
                assert torch.equal(rows, want.x)
                assert torch.equal(ids, want.topk_idx)


def lose_rows(group, x, topk_idx, topk_weights):
    """Ids and rows of a dispatch with too little room, and ids of one after a failure that the host
    has not seen yet. What is not written stays as `filled_memory` made it."""
    x, topk_idx, topk_weights = (t.to(cases.device()) for t in (x, topk_idx, topk_weights))
    buffer = make_buffer(group, x, NUM_EXPERTS, topk_idx.shape[1], len(x))
    engine = buffer._engine
    engine._check_emulated = lambda: None
    with cases.filled_memory():
        inputs = Tokens(x, topk_idx, topk_weights), engine.layout(topk_idx, NUM_EXPERTS)
        few, *_ = engine.dispatch(*inputs, len(x) - 1)
        with pytest.raises(CapacityError, match="num_worst_tokens"):
            buffer.check()
        none, *_ = engine.dispatch(*inputs, len(x))
    buffer.destroy()
    return few.x.cpu(), few.topk_idx.cpu(), none.topk_idx.cpu()


def test_rows_without_room_leave_no_wild_ids(pool):
    inputs = make_inputs(1, [20], 16, NUM_EXPERTS, 2, "uniform", "bf16")
    [(rows, ids, after)] = pool.run(lose_rows, *(part[0] for part in inputs), num_ranks=1)
    [want] = reference.dispatch(*inputs, NUM_EXPERTS)
    assert torch.equal(rows, want.x[:19])
    assert torch.equal(ids, want.topk_idx[:19])
    assert (after == -1).all()


@triton.jit
def store_times(context, out, num_bytes):
    tl.store(out, lang.pacing_interval(num_bytes, 1, 1, context))
    tl.store(out + 1, lang.pacing_interval(num_bytes, 2, 8, context))
    tl.store(out + 2, lang.pacing_interval(num_bytes, 1, tl.program_id(0), context))


def times(group, ps_per_kb, num_bytes):
    _block, context, _report = make_context(group)
    context[ContextField.PACE] = ps_per_kb
    out = torch.zeros(3, dtype=torch.int32, device=context.device)
    store_times[(1,)](context, out, num_bytes)
    return out.tolist()


def test_time_to_send(pool):
    """1 MB at 331 GB/s is 3.2 us; a quarter of what leaves is to take four times as long."""
    assert pool.run(times, 3094, 1 << 20, num_ranks=1) == [[3168, 12673, 0]]
    assert pool.run(times, 0, 1 << 20, num_ranks=1) == [[0, 0, 0]]
