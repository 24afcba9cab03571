"""Layers in passes: with less room than all rows need, the same bits as with room for all."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import cases
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from training_cases import NAMES, check_gradients, end, gradients, make_case, on_device

from moe_engine import (
    Buffer,
    DtypeError,
    Options,
    RoutingError,
    ShapeError,
    WgradSink,
    moe_ffn,
    start_moe_ffn,
)
from moe_engine import passes as layer_passes
from moe_engine.emulation import PerRank
from moe_engine.engines.base import Saved
from moe_engine.engines.kernel import KernelEngine
from moe_engine.training import LayerOptions
from moe_engine.weight_gradients import DelayedWgrad

# Tokens of each rank, the routing, top-k, capacity_factor.
CASES = {
    "all to one rank": ([7, 5], "one_hot", 1, 1),
    "uniform": ([6, 6], "uniform", 3, 1.9),
    "two of four": ([5, 0, 7, 8], "one_hot", 1, 2),
    "skewed": ([9, 8, 7, 9], "skewed", 2, 1),
    "fewer tokens than passes": ([1, 0, 1, 0], "one_hot", 1, 1),
    "nothing": ([4, 2], "nothing", 2, 1),
}


def buffer_for(group, parts, max_tokens, factor):
    x, idx, _, up, *_ = parts
    options = Options(capacity_factor=factor, decode_tokens=0)
    sizes = max_tokens, x.shape[1], group.size() * len(up), idx.shape[1], x.dtype
    return Buffer.for_tokens(group, *sizes, options=options)


def as_in_a_graph():
    """Rows and passes as in a capture: the host reads nothing."""
    forward = KernelEngine.moe_ffn_forward

    def captured(self, inputs, save, is_captured, described=None):
        return forward(self, inputs, save, True)

    return mock.patch.object(KernelEngine, "moe_ffn_forward", captured)


def compare(group, max_tokens, factor, in_graph, *parts):
    """(calls of a layer, its result and its gradients); but for gradients of weights, whose sums
    have another order, they have the bits of a Buffer with room for all."""
    parts = on_device(parts)
    x, idx, *_ = parts
    roomy, small = (buffer_for(group, parts, max_tokens, one) for one in (None, factor))
    number = mock.Mock(wraps=layer_passes._forward_pass)
    with cases.filled_memory():
        want = gradients(lambda *a: moe_ffn(*a, roomy, save="pre"), *parts)
        _, counts = moe_ffn(*parts[:5], roomy, return_counts=True)
        with mock.patch.object(layer_passes, "_forward_pass", number):
            if in_graph:
                with as_in_a_graph():
                    have = gradients(lambda *a: moe_ffn(*a, small, save="none"), *parts)
                    outs = [moe_ffn(*parts[:5], small)]
            else:
                have = gradients(lambda *a: moe_ffn(*a, small, save="pre"), *parts)
                outs = [moe_ffn(*parts[:5], small), start_moe_ffn(*parts[:5], small).finish()]
        out, found_counts = moe_ffn(*parts[:5], small, return_counts=True)
    assert torch.equal(found_counts, counts)
    # The interpreter's products round a row by its place in a tile.
    near = partial(torch.testing.assert_close, rtol=0, atol=0 if x.is_cuda else 1e-5)
    for name, one, other in zip(("y", *NAMES[:2]), have, want, strict=False):
        near(one, other, msg=lambda text, name=name: f"{name}: {text}")
    for one in (*outs, out):
        near(one, want[0])
    slots = small._engine.slots
    room = room_for(small.options, group.size(), max_tokens, idx.shape[1])
    assert slots.expert_rows.local.numel() < room * (x.shape[1] * x.itemsize + 12) + 32
    for buffer in (roomy, small):
        end(buffer)
    return number.call_count, [one.cpu() for one in have]


def room_for(options, num_ranks, max_tokens, num_topk):
    """Rows of experts for which a rank has room."""
    num_passes = options.num_passes(num_ranks)
    size = max_tokens if num_passes == 1 else 4 * math.ceil(max_tokens / num_passes / 4)
    of_slices = num_ranks * size
    return num_topk * max(of_slices, math.ceil(options.capacity(num_ranks) * max_tokens))


FEW = [("skewed", False), ("all to one rank", True), ("fewer tokens than passes", True)]


@pytest.mark.parametrize(("name", "in_graph"), cases.slow_unless(FEW, CASES, [False, True]))
def test_the_same_result(pool, name, in_graph):
    num_tokens, kind, num_topk, factor = CASES[name]
    num_ranks, options = len(num_tokens), Options(capacity_factor=factor)
    parts = make_case(num_ranks, num_tokens, num_topk=num_topk, kind=kind)
    how = max(num_tokens), factor, in_graph
    found = pool.run(compare, *how, *map(PerRank, parts), num_ranks=num_ranks)
    owners = torch.cat([ids[ids >= 0] // len(parts[3][0]) for ids in parts[1]])
    most = int(owners.bincount(minlength=1).max())
    has_room = most <= room_for(options, num_ranks, max(num_tokens), num_topk)
    num_calls = 1 + options.num_passes(num_ranks) * (in_graph or not has_room)
    assert {calls for calls, _ in found} == {num_calls * (2 if in_graph else 3)}
    check_gradients([have for _, have in found], parts)


class Routed(NamedTuple):
    """As much of `LayerTensors` as passes read."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor


class LateEvent:
    """The end of a call whose result `fill` writes when the event is waited for, and no sooner."""

    def __init__(self, fill):
        self.current_stream_wait = fill


def test_slices_of_a_graph_begin_when_all_tokens_have_ended():
    """Slices read how many rows had no room."""
    overflow, ids_of_calls = torch.zeros(1, dtype=torch.int32), []

    def forward(buffer, tensors, options):
        _, ids, _ = tensors
        ids_of_calls.append(ids.flatten().tolist())
        is_first = len(ids_of_calls) == 1
        saved = Saved("none", (None, None), overflow=overflow if is_first else 0)
        fill = partial(overflow.fill_, 1) if is_first else mock.Mock()
        return torch.ones_like(ids), saved, None, LateEvent(fill)

    options = SimpleNamespace(num_passes=lambda _: 2)
    buffer = SimpleNamespace(options=options, group_size=2, takes_sub_batches=False)
    ids = torch.arange(8)[:, None]
    tensors = Routed(torch.ones(8, 2), ids, torch.ones(8, 1))
    _, done = layer_passes.forward_in_passes(buffer, tensors, LayerOptions(), forward)
    assert ids_of_calls == [[*range(8)], [*range(4)], [*range(4, 8)]]
    assert done.out.shape == ids.shape


class Operators(TorchDispatchMode):
    """Notes which operators of layers are called within it."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "moe_engine":
            self.names.append(function._opname)
        return function(*args, **(kwargs or {}))


def compare_operators(group, max_tokens, factor, *parts):
    """The operators that a layer in passes was called as, and which results and gradients have
    other bits than without."""
    parts, changed = on_device(parts), []
    buffer = buffer_for(group, parts, max_tokens, factor)

    def layer(save, *args):
        y, counts = moe_ffn(*args, buffer, save=save, return_counts=True)
        return y + counts.sum()

    with cases.filled_memory():
        for in_graph, save in ((False, "pre"), (False, "all"), (False, "none"), (True, "none")):
            with as_in_a_graph() if in_graph else nullcontext():
                want = gradients(partial(layer, save), *parts)
                want.append(moe_ffn(*parts[:5], buffer))
                with Operators() as called:
                    have = gradients(partial(layer, save), *parts)
                    have.append(moe_ffn(*parts[:5], buffer))
            names = "y", *NAMES, "inference"
            pairs = zip(names, have, want, strict=True)
            changed += [(save, name) for name, *pair in pairs if not torch.equal(*pair)]
    end(buffer)
    return called.names, changed


@pytest.mark.parametrize(
    "name",
    ["all to one rank"]
    + [
        pytest.param(one, marks=pytest.mark.slow) for one in ("uniform", "fewer tokens than passes")
    ],
)
def test_operators_make_the_same_passes(pool, name):
    """In compiled code, and under modes of torch."""
    num_tokens, kind, num_topk, factor = CASES[name]
    parts = make_case(len(num_tokens), num_tokens, num_topk=num_topk, kind=kind)
    how = max(num_tokens), factor, *map(PerRank, parts)
    for called, changed in pool.run(compare_operators, *how, num_ranks=len(num_tokens)):
        assert called == ["moe_ffn_forward", "moe_ffn_backward", "moe_ffn"]
        assert changed == []


def train_into_sinks(group, max_tokens, *parts):
    """The gradients of the weights by autograd, and in sinks: written over, added, delayed."""
    parts = on_device(parts)
    x, idx, weights, up, down, dy = parts
    buffer = buffer_for(group, parts, max_tokens, 1)
    *_, up_grad, down_grad = gradients(lambda *a: moe_ffn(*a, buffer), *parts)
    leaves = [one.clone().requires_grad_() for one in (up, down)]
    calls = []
    for is_delayed, accumulate in ((False, False), (False, True), (True, False), (True, True)):
        memory = [torch.full_like(one, 2.0) for one in (up, down)]
        sink = WgradSink(*memory, accumulate, on_ready=lambda: calls.append(1))
        wgrad = DelayedWgrad(sink) if is_delayed else sink
        moe_ffn(x, idx, weights, *leaves, buffer, wgrad=wgrad).backward(dy)
        if is_delayed:
            wgrad.backward_dw()
            assert len(wgrad) == 0
        for one, want in zip(memory, (up_grad, down_grad), strict=True):
            torch.testing.assert_close(one - 2.0 * accumulate, want, rtol=1e-5, atol=1e-5)
    end(buffer)
    return len(calls)


def test_gradients_of_weights_go_where_they_are_wanted(pool):
    parts = make_case(2, [7, 5], num_topk=1, kind="one_hot")
    found = pool.run(train_into_sinks, 7, *map(PerRank, parts), num_ranks=2)
    assert found == [4, 4]


def attempt(call, *args):
    """What a call returns, and whether it raises RoutingError, with that, once it has ended."""
    try:
        return call(*args), False
    except RoutingError as error:
        return error.result, True


def go_on_after_a_bad_id(group, max_tokens, *parts):
    """How many calls raise RoutingError on this rank."""
    x, idx, *more, dy = on_device(parts)
    buffer, num_raised, bad = buffer_for(group, parts, max_tokens, 1), 0, idx.clone()
    if group.rank() == 0:
        bad[-1, 0] = 1000  # in the last pass
    for ids in (bad, idx):
        out, in_forward = attempt(moe_ffn, x.requires_grad_(), ids, *more, buffer)
        _, in_backward = attempt(out.backward, dy)
        num_raised += in_forward + in_backward
    num_raised += attempt(buffer.check)[1]
    end(buffer)
    return num_raised


def test_a_backward_makes_all_its_passes_after_a_bad_id(pool):
    parts = make_case(2, [7, 7], num_topk=1, kind="one_hot")
    first, second = pool.run(go_on_after_a_bad_id, 7, *map(PerRank, parts), num_ranks=2)
    assert first > 0
    assert second == 0


def replay(group, max_tokens, routings, *parts):
    """Forward and backward in a graph, with other ids at each replay, and eagerly."""
    x, _, weights, up, down, dy = parts = on_device(parts)
    buffer = buffer_for(group, parts, max_tokens, 1)
    idx = routings[0].cuda()

    def call():
        leaves = [one.detach().requires_grad_() for one in (x, weights)]
        out = moe_ffn(leaves[0], idx, leaves[1], up, down, buffer, save="none")
        return [out.detach(), *torch.autograd.grad(out, leaves, dy)]

    call()
    torch.distributed.barrier(group)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        have = call()
    same = []
    for one in routings * 3:
        idx.copy_(one)
        graph.replay()
        torch.cuda.synchronize()
        torch.distributed.barrier(group)
        same += map(torch.equal, have, call())
    del graph
    end(buffer)
    return all(same)


@pytest.mark.gpu
def test_in_a_graph(pool):
    num_ranks = pool.num_ranks
    cases_of = [
        make_case(num_ranks, [40] * num_ranks, num_topk=1, kind=kind, dtype="bf16")
        for kind in ("uniform", "one_hot", "nothing")
    ]
    routings = PerRank([list(ids) for ids in zip(*(one[1] for one in cases_of), strict=True)])
    parts = map(PerRank, cases_of[0])
    assert all(pool.run(replay, 40, routings, *parts, num_ranks=num_ranks))


def test_what_is_refused():
    for factor, error in ((0.5, ShapeError), (float("nan"), ShapeError), ("2", DtypeError)):
        with pytest.raises(error, match="capacity_factor is"):
            Buffer(options=Options(capacity_factor=factor))
    options = Options(capacity_factor=2)
    assert [options.num_passes(ranks) for ranks in (1, 2, 3, 4, 8)] == [1, 1, 2, 2, 4]
    assert Options().num_passes(64) == 1
