"""Layers that train: what is refused, and ranks that are out of step."""

from __future__ import annotations

import re

import cases
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from training_cases import POLICIES, end, gradients, make_case, new_buffer, on_device

from moe_engine import BackendError, MoeEngineError, OutOfStep, PeerTimeout, ShapeError, moe_ffn
from moe_engine.emulation import PerRank


class AnyMode(TorchDispatchMode):
    """Changes nothing, but layers within it are called as operators."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def leaves_of(parts):
    x, idx, weights, up, down, _ = parts
    leaves = [one.clone().requires_grad_() for one in (x, weights, up, down)]
    return leaves[0], idx.clone(), *leaves[1:]


def run_refused(group, *parts):
    """The errors of calls that are refused before a kernel runs, by name; then a call is right."""
    parts = on_device(parts)
    x, idx, _, up, _, dy = parts
    buffer = new_buffer(group, x, group.size() * len(up), idx.shape[1], len(x))
    want = gradients(lambda *a: moe_ffn(*a, buffer), *parts)

    def second_order():
        args = leaves_of(parts)
        torch.autograd.grad(moe_ffn(*args, buffer).sum(), args[0], create_graph=True)

    def operator():
        args = leaves_of(parts)
        with AnyMode():
            out = moe_ffn(*args, buffer)
        torch.autograd.grad(out.sum(), args[0], create_graph=True)

    def changed(number):
        args = leaves_of(parts)
        out = moe_ffn(*args, buffer)
        with torch.no_grad():
            args[number].mul_(2)
        out.backward(dy)

    calls = {
        "second order": second_order,
        "second order, as an operator": operator,
        "weights changed": lambda: changed(3),
        "ids changed": lambda: changed(1),
        "policy": lambda: moe_ffn(*leaves_of(parts), buffer, save="some"),
        "no policy": lambda: moe_ffn(*parts[:5], buffer, save=None),
    }
    errors = {}
    for name, call in calls.items():
        try:
            call()
        except MoeEngineError as error:
            errors[name] = type(error).__name__, str(error)
    have = gradients(lambda *a: moe_ffn(*a, buffer), *parts)
    end(buffer)
    return errors, all(map(torch.equal, have, want))


def test_what_is_refused(pool):
    parts = [PerRank(part) for part in make_case(2, [4], num_topk=1)]
    for errors, goes_on in pool.run(run_refused, *parts, num_ranks=2):
        assert goes_on
        for name in ("second order", "second order, as an operator"):
            assert errors[name][0] == "BackendError"
            assert "a layer has no second-order gradients" in errors[name][1]
        for name in ("weights changed", "ids changed"):
            assert errors[name][0] == "BackendError"
            assert "changed in place" in errors[name][1]
        for name in ("policy", "no policy"):
            assert errors[name][0] == "ShapeError"
            assert "('auto', 'none', 'pre', 'rows', 'all')" in errors[name][1]


def run_apart(group, how, *parts):
    """The error of a rank whose calls do not match those of the others."""
    parts = on_device(parts)
    x, idx, _, up, _, dy = parts
    sizes = group.size() * len(up), idx.shape[1], len(x)
    rank, args = group.rank(), leaves_of(parts)

    def make(timeout_s):
        return new_buffer(group, x, *sizes, timeout_s=timeout_s, decode_tokens=0)

    def use(buffer):
        return gradients(lambda *a: moe_ffn(*a, buffer), *parts)

    if how == "skipped":  # the only one that is waited for in vain
        buffer, _, _ = cases.used_buffer(group, make, use)
    else:
        buffer = make(None)
    error = None
    try:
        if how == "policies":
            moe_ffn(*args, buffer, save=("pre", "none")[rank])
        elif how == "one has gradients":
            moe_ffn(*(args if rank else parts[:5]), buffer)
        else:
            args[3].requires_grad_(how != "frozen" or rank == 0)
            out = moe_ffn(*args, buffer)
            if how == "routing" and rank == 1:
                args[1].data.fill_(0)
            if how == "forward" and rank == 1:
                moe_ffn(*args, buffer)
            elif how != "skipped" or rank != 1:
                out.backward(dy)
        buffer.check()
    except (BackendError, OutOfStep, PeerTimeout, ShapeError) as problem:
        error = type(problem).__name__, str(problem)
    torch.distributed.barrier(group)
    buffer.destroy()
    return error


APART = {
    "policies": ("ShapeError", "save (pre|none) on rank . and (none|pre) on rank ."),
    "one has gradients": ("ShapeError", "save .* no gradients on rank|no gradients .* on rank"),
    "forward": ("OutOfStep", "rank 0 began moe_ffn_backward"),
    "routing": ("ShapeError", "another number of rows in a layer's backward than in its forward"),
    "frozen": ("ShapeError", "pre, without the gradient of w_gate_up on rank 1"),
    "skipped": ("PeerTimeout", "in phase 'counts of the backward'"),
}


@pytest.mark.parametrize(
    "how", cases.slow_unless([(how,) for how in APART if how != "routing"], APART)
)
def test_ranks_out_of_step(pool, how):
    parts = [PerRank(part) for part in make_case(2, [4], num_local=2, num_topk=1, seed=1)]
    first, second = pool.run(run_apart, how, *parts, num_ranks=2)
    kind, text = APART[how]
    assert first is not None
    assert first[0] == kind
    assert re.search(text, first[1])
    assert (second is None) == (how == "skipped")


def run_captured(group, save, *parts):
    """Gradients by a graph of forward and backward, and without one; None: capture is refused."""
    parts = on_device(parts)
    x, idx, _, up, _, _ = parts
    buffer = new_buffer(group, x, group.size() * len(up), idx.shape[1], 40)

    def call():
        return gradients(lambda *a: moe_ffn(*a, buffer, save=save), *parts)

    want = call()
    graph = torch.cuda.CUDAGraph()
    torch.distributed.barrier(group)
    try:
        with torch.cuda.graph(graph):
            have = call()
    except BackendError as error:
        assert 'Pass save="none"' in str(error)
        return None
    for _ in range(3):
        for one in have:
            one.fill_(float("nan"))
        graph.replay()
    torch.cuda.synchronize()
    same = all(map(torch.equal, have, want))
    del graph
    end(buffer)
    return same


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("save", "num_ranks"), [("none", None), ("pre", None), *((save, 1) for save in POLICIES)]
)
def test_captured(pool, save, num_ranks):
    num_ranks = num_ranks or pool.num_ranks
    parts = [PerRank(part) for part in make_case(num_ranks, [40, 9], dtype="bf16")]
    wanted = True if save == "none" or num_ranks == 1 else None
    assert pool.run(run_captured, save, *parts, num_ranks=num_ranks) == [wanted] * num_ranks
