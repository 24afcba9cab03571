"""CUDA graphs of layers that train, and captures right after `Buffer.warmup`."""

from __future__ import annotations

import copy
from unittest import mock

import cases
import pytest
import torch
from training_cases import end, make_case, new_buffer, on_device

from moe_engine import MoEFeedForward, Options, WgradSink, moe_ffn, start_moe_ffn
from moe_engine.device.context import SAVE_POLICIES
from moe_engine.emulation import PerRank
from moe_engine.engines.kernel import KernelEngine
from moe_engine.hardware import H200, stand_in
from moe_engine.symm.ring import region_bytes
from moe_engine.tools import compile
from moe_engine.tools.lone_rank import low_latency_engine
from moe_engine.tools.model_shape import ModelShape
from moe_engine.warm_up import layer_sizes

TOKENS, TOPK = 40, 2
KINDS = "uniform", "skewed", "holes"


def new_batches(num_ranks):
    """(a PerRank of each rank's batches (x, topk_idx, topk_weights, dy), PerRanks of w_gate_up and
    w_down)."""
    made = [
        make_case(num_ranks, [TOKENS] * num_ranks, 64, 48, 3, TOPK, kind, "bf16", seed)
        for seed, kind in enumerate(KINDS)
    ]
    parts = [(*case[:3], case[5]) for case in made]
    batches = [[[part[rank] for part in one] for one in parts] for rank in range(num_ranks)]
    return PerRank(batches), PerRank(made[0][3]), PerRank(made[0][4])


def captured(call):
    """(a graph of a call, what it gives)"""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


# --- A sink --------------------------------------------------------------------------------------


def accumulate(group, batches, up, down):
    """Whether the gradients of x, and what a sink holds in the end, are the same by replays of a
    graph and by eager calls."""
    up, down = (one.requires_grad_() for one in on_device((up, down)))
    batches = [on_device(batch) for batch in batches]
    x, idx, weights, dy = static = [one.clone() for one in batches[0]]
    buffer = new_buffer(group, x, group.size() * len(up), TOPK, TOKENS)
    sinks = [torch.zeros_like(one, dtype=torch.float32) for one in (up, down)]
    wgrad = WgradSink(*sinks, accumulate=True)

    def train():
        leaf = x.detach().requires_grad_()
        y = moe_ffn(leaf, idx, weights, up, down, buffer, save="none", wgrad=wgrad)
        (dx,) = torch.autograd.grad(y, leaf, dy)
        return dx

    def add_up(step):
        for one in sinks:
            one.zero_()
        found = []
        for batch in batches:
            for mine, new in zip(static, batch, strict=True):
                mine.copy_(new)
            found.append(step().clone())
        return [*found, *(one.clone() for one in sinks)]

    want = add_up(train)
    torch.distributed.barrier(group)
    graph, results = captured(train)

    def replay():
        graph.replay()
        return results

    have = add_up(replay)
    buffer.check()
    same = list(map(torch.equal, have, want))
    end(buffer)
    return same, all(bool(one.any()) for one in want)


@pytest.mark.gpu
def test_replays_add_to_a_sink(pool):
    for same, is_any in pool.run(accumulate, *new_batches(pool.num_ranks)):
        assert is_any
        assert same == [True] * (len(KINDS) + 2)


# --- torch.cuda.make_graphed_callables -----------------------------------------------------------


def train_graphed(group, batches, up, down):
    """Whether a module gives the same results and gradients from graphs as eagerly."""
    batches = [on_device(batch) for batch in batches]
    x, idx, weights, _ = batches[0]
    buffer = new_buffer(group, x, group.size() * len(up), TOPK, TOKENS)
    sizes = len(up), x.shape[1], down.shape[2]
    eager = MoEFeedForward(*sizes, buffer, x.dtype, requires_grad=True, save="none").to(x.device)
    with torch.no_grad():
        eager.gate_up_proj.copy_(up)
        eager.down_proj.copy_(down)
    graphed = copy.deepcopy(eager)  # it shares the Buffer
    sample = x.clone().requires_grad_(), idx.clone(), weights.clone().requires_grad_()
    graphed = torch.cuda.make_graphed_callables(graphed, sample)
    same = []
    for x, idx, weights, dy in batches:
        found = []
        for module in (eager, graphed):
            leaves = x.clone().requires_grad_(), weights.clone().requires_grad_()
            y = module(leaves[0], idx, leaves[1])
            grads = torch.autograd.grad(y, (*leaves, *module.parameters()), dy)
            found.append([one.detach().clone() for one in (y, *grads)])
        same += map(torch.equal, *found)
    end(buffer)
    return same


@pytest.mark.gpu
def test_a_module_as_a_graphed_callable(pool):
    for same in pool.run(train_graphed, *new_batches(pool.num_ranks)):
        assert same == [True] * (5 * len(KINDS))


# --- Captures after a warm-up --------------------------------------------------------------------


def capture_first(group, options, trains, batches, up, down):
    """Whether a graph that is captured right after `warmup` gives what later eager calls give."""
    up, down = (one.requires_grad_(trains) for one in on_device((up, down)))
    batches = [on_device(batch) for batch in batches]
    x, idx, weights, dy = static = [one.clone() for one in batches[0]]
    num_experts = group.size() * len(up)
    buffer = new_buffer(group, x, num_experts, TOPK, TOKENS, **options)
    buffer.warmup(x.shape[1], num_experts, TOPK, x.dtype, weights=(up, down))
    torch.ones(1, device=x.device, requires_grad=True).sum().backward()  # starts torch's threads

    def call():
        args = x, idx, weights, up, down, buffer
        y = moe_ffn(*args, save="none")
        if not trains:
            return [y, start_moe_ffn(*args).finish()]
        return [y.detach(), *torch.autograd.grad(y, (up, down), dy)]

    torch.cuda.synchronize()
    torch.distributed.barrier(group)
    graph, results = captured(call)
    same = []
    for batch in batches:
        for mine, new in zip(static, batch, strict=True):
            mine.copy_(new)
        graph.replay()
        have = [one.clone() for one in results]
        same += map(torch.equal, have, call())
    end(buffer)
    return same


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("options", "trains"),
    [
        ({}, False),  # by low-latency calls
        ({"decode_tokens": 0}, False),
        ({"decode_tokens": 0}, True),
        ({"decode_tokens": 0, "capacity_factor": 1.0}, False),
        ({"decode_tokens": 0, "capacity_factor": 1.0}, True),
    ],
)
def test_a_capture_right_after_the_warm_up(pool, options, trains):
    found = pool.run(capture_first, options, trains, *new_batches(pool.num_ranks))
    for same in found:
        assert same == [True] * ((3 if trains else 2) * len(KINDS))


def test_a_warm_up_has_the_tiles_of_any_decode_batch():
    """The kernels of a layer of few tokens depend on how many there may be."""
    shape = ModelShape(128, 2048, 768, 8, 4)
    weights = shape.weights()

    def kernels(max_tokens):
        def call(shape):
            region = region_bytes(512, shape.num_topk, shape.hidden * shape.dtype.itemsize)
            engine = low_latency_engine(shape.num_ranks, region)
            engine.moe_ffn(shape.inputs(0, *weights), max_tokens)

        with mock.patch.dict(compile.CALLS, {"decode": call}, clear=True):
            return compile.variants(shape, 90).keys()

    with stand_in(H200):
        whole, *sizes = layer_sizes(Options())
        assert layer_sizes(Options(max_tokens=1)) == [None, 1]
        assert layer_sizes(Options(max_tokens=5)) == [None, 1, 2, 3, 4, 5]
        assert layer_sizes(Options(decode_tokens=0)) == [None]
    assert whole is None and sizes[0] == 1 and sizes[-1] == Options().decode_tokens
    assert len(sizes) < 30
    warm = set().union(*map(kernels, sizes))
    for max_tokens in (1, 7, 64, 100, 128, 200, 333, 400, 512):
        assert kernels(max_tokens) <= warm


def warm_up(group, options, of_up, of_down):
    """What a warm-up saves, forward and backward, and the weights whose gradients it computes."""
    x, _, _, up, down, _ = (parts[0] for parts in make_case(1, [4]))
    up, down = (one.to(cases.device()) for one in (up, down))
    up.requires_grad_(of_up)
    down.requires_grad_(of_down)
    num_experts = group.size() * len(up)
    buffer = new_buffer(group, x, num_experts, TOPK, 16, **options)
    saved, forward, backward = [], KernelEngine.moe_ffn_forward, KernelEngine.moe_ffn_backward

    def run(self, inputs, save, *more, **options):
        saved.append(save)
        return forward(self, inputs, save, *more, **options)

    def run_backward(self, dy, inputs, kept, into):
        saved.append((kept.save, *into))
        return backward(self, dy, inputs, kept, into)

    patched = dict(moe_ffn_forward=run, moe_ffn_backward=run_backward)
    with mock.patch.multiple(KernelEngine, **patched):
        buffer.warmup(x.shape[1], num_experts, TOPK, x.dtype, weights=(up, down))
    end(buffer)
    return saved


def test_a_warm_up_trains_what_requires_grad(pool):
    for weights in ((True, True), (False, True)):
        each = [made for save in SAVE_POLICIES[1:] for made in (save, (save, *weights))]
        assert pool.run(warm_up, {}, *weights, num_ranks=2) == [each] * 2
    assert pool.run(warm_up, {}, False, False, num_ranks=2) == [[]] * 2
    in_passes = {"capacity_factor": 1.0}
    assert pool.run(warm_up, in_passes, False, False, num_ranks=2) == [["none"]] * 2
