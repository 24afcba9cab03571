"""Dispatch and combine as operators: too little room, what is refused, captures."""

from __future__ import annotations

import gc

import pytest
import torch
from ops_cases import buffer_for, layer
from training_cases import check_gradients, end, gradients, make_case, on_device

from moe_engine import BackendError, CapacityError, MoeEngineError
from moe_engine.emulation import PerRank
from moe_engine.operators import operators
from moe_engine.ops import (
    combine,
    combine_start,
    combine_wait,
    dispatch,
    dispatch_start,
    dispatch_wait,
)

# --- Room, and what is refused -------------------------------------------------------------------


def run_overflow(group, max_rows, *parts):
    """What a dispatch with too little room leaves out, the error of `check`, and a later step."""
    x, idx, weights, up, down, dy = parts = on_device(parts)
    buffer, num_experts = buffer_for(group, parts), group.size() * len(up)
    got = dispatch(x, idx, weights, num_experts, buffer, max_rows=max_rows)
    y = combine(got.rows, got.plan, buffer)
    error = None
    try:
        buffer.check()
    except CapacityError as problem:
        error = str(problem)
    buffer.check()  # which tells once
    found = gradients(lambda *a: layer(*a, buffer), x, idx, weights, up, down, dy)
    end(buffer)
    return int(got.overflow), error, y.cpu(), [one.cpu() for one in found], got.offsets.tolist()


def test_overflow(pool):
    """Rank 0 gets all 10 tokens, each for both of its experts, and has room for 14 of 20 rows: the
    second expert's last six are left out."""
    parts = make_case(2, [6, 4], num_local=2, num_topk=2)
    parts[1] = [torch.tensor([[0, 1]] * len(one)) for one in parts[1]]
    found = pool.run(run_overflow, 14, *map(PerRank, parts), num_ranks=2)
    overflow, error, y, _, offsets = found[0]
    assert overflow == 6
    assert offsets == [0, 10, 14]
    assert error is not None
    assert "6 expert rows more than max_rows" in error
    torch.testing.assert_close(y[:4], 2 * parts[0][0][:4])
    torch.testing.assert_close(y[4:], parts[0][0][4:])
    assert found[1][0] == 0
    assert found[1][1] is None
    torch.testing.assert_close(found[1][2], parts[0][1])
    check_gradients([one[3] for one in found], parts)


def run_too_many(group, *parts):
    """The error of a dispatch that brings more tokens than max_rows."""
    x, idx, weights, up, _, _ = parts = on_device(parts)
    buffer = buffer_for(group, parts)
    try:
        got = dispatch(x, idx, weights, group.size() * len(up), buffer, max_rows=4)
        combine(got.rows, got.plan, buffer)
        buffer.check()
    except MoeEngineError as problem:
        return type(problem).__name__
    finally:
        torch.distributed.barrier(group)
        buffer.destroy()
    return None


def test_more_tokens_than_room(pool):
    parts = [PerRank(part) for part in make_case(1, [6], num_topk=1)]
    assert pool.run(run_too_many, *parts, num_ranks=1) == ["CapacityError"]


def run_refused(group, *parts):
    """Errors of calls that are refused before a kernel runs, by name; then a step is right."""
    x, idx, weights, up, down, dy = parts = on_device(parts)
    buffer, num_experts = buffer_for(group, parts), group.size() * len(up)
    got = dispatch(x, idx, weights, num_experts, buffer)
    gone = buffer_for(group, parts)
    gone_id = gone.id
    del gone
    gc.collect()

    def second_order():
        leaf = x.clone().requires_grad_()
        rows = dispatch(leaf, idx, weights, num_experts, buffer).rows
        torch.autograd.grad(rows.square().sum(), leaf, create_graph=True)

    calls = {
        "dead id": lambda: operators.combine(got.rows, None, list(got.plan), gone_id),
        "no buffer": lambda: dispatch(x, idx, weights, num_experts, None),
        "alignment": lambda: dispatch(x, idx, weights, num_experts, buffer, alignment=0),
        "max_rows": lambda: dispatch(
            x, idx, weights, num_experts, buffer, max_rows=40, alignment=16
        ),
        "experts": lambda: dispatch(x, idx, weights, num_experts + 1, buffer),
        "rows": lambda: combine(got.rows[1:], got.plan, buffer),
        "second order": second_order,
        "no plan": lambda: combine(got.rows, None, buffer),
        "all that came": lambda: combine_start(got.rows, got, buffer),
        "no dispatch": lambda: dispatch_wait(3),
        "no combine": lambda: combine_wait(None, got.plan),
    }
    errors = {}
    for name, call in calls.items():
        try:
            call()
        except MoeEngineError as error:
            errors[name] = type(error).__name__, str(error)
    found = gradients(lambda *a: layer(*a, buffer), x, idx, weights, up, down, dy)
    end(buffer)
    return errors, [one.cpu() for one in found]


def test_what_is_refused(pool):
    parts = make_case(2, [4, 3], num_topk=2)
    found = pool.run(run_refused, *map(PerRank, parts), num_ranks=2)
    for errors, _ in found:
        kinds = {name: kind for name, (kind, _) in errors.items()}
        assert kinds == {
            "dead id": "BackendError",
            "no buffer": "DtypeError",
            "alignment": "ShapeError",
            "max_rows": "ShapeError",
            "experts": "ShapeError",
            "rows": "ShapeError",
            "second order": "BackendError",
            "no plan": "DtypeError",
            "all that came": "DtypeError",
            "no dispatch": "DtypeError",
            "no combine": "DtypeError",
        }
        assert "no such Buffer" in errors["dead id"][1]
        assert "multiple of alignment" in errors["max_rows"][1]
    check_gradients([one for _, one in found], parts)


def run_captured(group, in_parts, *parts):
    """Whether a graph of forward and backward gives the gradients of a call outside of one, for
    other tokens as well; whether a capture without max_rows is refused."""
    x, idx, weights, up, _, dy = parts = on_device(parts)
    buffer, num_experts = buffer_for(group, parts, max_tokens=40), group.size() * len(up)

    def call(max_rows=512):
        leaves = [one.clone().requires_grad_() for one in (x, weights)]
        args = leaves[0], idx, leaves[1], num_experts, buffer
        if in_parts:
            got = dispatch_wait(dispatch_start(*args, max_rows=max_rows))
            y = got.rows * got.row_weights[:, None].to(x.dtype)
            out = combine_wait(combine_start(y, got.plan, buffer), got.plan)
        else:
            got = dispatch(*args, max_rows=max_rows)
            out = combine(got.rows * got.row_weights[:, None].to(x.dtype), got.plan, buffer)
        return [out, *torch.autograd.grad(out, leaves, dy)]

    call()
    refused = False
    graph = torch.cuda.CUDAGraph()
    torch.distributed.barrier(group)
    with torch.cuda.graph(graph):
        try:
            call(max_rows=None)
        except BackendError:
            refused = True
        have = call()
    same = []
    for _ in range(2):
        x.mul_(2)
        for one in have:
            one.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        torch.distributed.barrier(group)
        same += map(torch.equal, have, call())
    del graph
    end(buffer)
    return refused and all(same)


@pytest.mark.gpu
@pytest.mark.parametrize("in_parts", [False, True])
def test_captured(pool, in_parts):
    num_ranks = pool.num_ranks
    parts = [PerRank(part) for part in make_case(num_ranks, [40, 9], dtype="bf16")]
    assert pool.run(run_captured, in_parts, *parts, num_ranks=num_ranks) == [True] * num_ranks
