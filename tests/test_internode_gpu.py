"""Calls over several nodes through NVSHMEM, on GPUs of one host whose ranks stand for nodes.

NVSHMEM runs over the same ranks for as long as a process lives, so these tests have a pool of their
own: two nodes of two ranks, on one GPU where there is no more.
"""

from __future__ import annotations

import gc
import itertools
from functools import partial

import internode_cases as calls
import low_latency_cases as low_latency
import nvshmem_cases
import pytest
import test_elastic as elastic
import test_ops as operators
import test_quantized_layer as quantized
import torch
from dispatch_cases import check_round_trip, make_buffer, make_inputs, run_round_trips
from elastic_cases import EXPERTS, HIDDEN, TOPK
from layer_cases import check_layer
from node_cases import InParts, NodePool
from test_decode_layer import check_replays
from training_cases import (
    check_gradients,
    check_training,
    end,
    gradients,
    make_case,
    new_buffer,
)

from moe_engine import moe_ffn, reference
from moe_engine.emulation import PerRank, RankPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(nvshmem_cases.MISSING is not None, reason=str(nvshmem_cases.MISSING)),
]
NODES, LONE = calls.Nodes(2, 2), calls.Nodes(4, 1)
BOTH = pytest.mark.parametrize("nodes", [NODES, LONE], ids=["2x2", "4x1"])
NUM_EXPERTS, NUM_TOPK, MAX_TOKENS = 16, 4, 200
WIDTH = 256
"""Values of a row in most tests, so that these share kernels: each links NVSHMEM for seconds."""


@pytest.fixture(scope="module")
def pool():
    with RankPool(NODES.num_ranks, "cuda", nodes=NODES.num_nodes, timeout_s=240) as ranks:
        yield ranks


@BOTH
@pytest.mark.parametrize(("kind", "dtype"), [("holes", "bf16"), ("skewed", "fp32")])
def test_round_trips(pool, nodes, kind, dtype):
    """20 of them, each with another rank late: the same bits, those of the oracle."""
    num_tokens = [MAX_TOKENS, 0, 37, 128]
    inputs = make_inputs(4, num_tokens, WIDTH, NUM_EXPERTS, NUM_TOPK, kind, dtype)
    bias = [[part * 0.5, part * 0.25] for part in inputs[0]]
    parts = [PerRank(part) for part in (*inputs, bias)]
    results = nodes.run(pool, run_round_trips, "auto", NUM_EXPERTS, MAX_TOKENS, *parts)
    check_round_trip(results, *inputs, NUM_EXPERTS, bias, nodes.ranks_per_node)


def replay(group, num_nodes, num_replays, rounds):
    """A round trip captured once, replayed with the inputs of each round."""
    x, topk_idx, topk_weights = (part.cuda() for part in rounds[0])
    buffer = make_buffer(group, x, NUM_EXPERTS, NUM_TOPK, MAX_TOKENS)
    assert (buffer.backend, buffer.num_nodes) == ("nvshmem", num_nodes)

    def round_trip():
        room = group.size() * MAX_TOKENS
        rows, ids, weights, _, handle, _ = calls.dispatch(
            buffer, x, topk_idx, topk_weights, NUM_EXPERTS, num_worst_tokens=room
        )
        cached, *_ = buffer.dispatch(x, handle)
        out, out_w, _ = buffer.combine(rows, handle, topk_weights=weights)
        return rows, ids, cached, out, out_w

    round_trip()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = round_trip()
    outputs = []
    for number, inputs in enumerate(rounds * num_replays):
        for to, new in zip((x, topk_idx, topk_weights), inputs, strict=True):
            to.copy_(new)
        if number % group.size() == group.rank():
            torch.cuda._sleep(1_000_000)
        graph.replay()
        outputs.append([part.cpu() for part in results])
    buffer.check()
    torch.distributed.barrier(group)
    buffer.destroy()
    return outputs


@BOTH
def test_a_graph_is_replayed_with_other_routing(pool, nodes):
    kinds, num_tokens = ["uniform", "one_hot", "nothing", "empty_rank"], [MAX_TOKENS] * 4
    sizes = num_tokens, WIDTH, NUM_EXPERTS, NUM_TOPK
    drawn = [make_inputs(4, *sizes, kind, "bf16", seed) for seed, kind in enumerate(kinds)]
    rounds = [[tuple(part[rank] for part in one) for one in drawn] for rank in range(4)]
    results = nodes.run(pool, replay, nodes.num_nodes, 3, PerRank(rounds))
    for number in range(3 * len(drawn)):
        inputs = drawn[number % len(drawn)]
        received = reference.dispatch(*inputs, NUM_EXPERTS)
        rows, near = [one.x for one in received], nodes.ranks_per_node
        out = reference.combine(rows, received, inputs[1], num_tokens, NUM_EXPERTS, None, near)
        for rank, want in enumerate(received):
            rows, ids, cached, y, weights = results[rank][number]
            count = len(want.x)
            assert torch.equal(rows[:count], want.x)
            assert torch.equal(cached[:count], want.x)
            assert torch.equal(ids[:count], want.topk_idx)
            assert (ids[count:] == -1).all()
            assert torch.equal(y, out[rank])
            valid = inputs[1][rank] >= 0
            assert torch.equal(weights, torch.where(valid, inputs[2][rank], 0.0))


@pytest.mark.parametrize(("nodes", "dtype"), [(NODES, "bf16"), (NODES, "fp32"), (LONE, "bf16")])
def test_layers(pool, nodes, dtype):
    check_layer(
        NodePool(pool, *nodes),
        4,
        [MAX_TOKENS, 0, 37, 128],
        WIDTH,
        128,
        4,
        NUM_TOPK,
        "uniform",
        dtype,
    )


@BOTH
def test_decode_layers(pool, nodes):
    check_layer(
        NodePool(pool, *nodes), 4, [16, 0, 5, 9], WIDTH, 128, 4, NUM_TOPK, "holes", "bf16", "decode"
    )


@pytest.mark.parametrize("decode_tokens", [128, 0])
def test_layers_in_graphs(pool, decode_tokens):
    check_replays(pool, decode_tokens=decode_tokens)


@pytest.mark.parametrize(("nodes", "which"), [(NODES, "all"), (NODES, "some"), (LONE, "some")])
def test_layers_in_two_parts(pool, nodes, which):
    sizes = [MAX_TOKENS, 0, 37, 128], WIDTH, 128, 4, NUM_TOPK
    check_layer(InParts(NodePool(pool, *nodes), which), 4, *sizes, "holes", "bf16")


def test_layers_in_two_parts_in_graphs(pool):
    check_replays(InParts(pool), decode_tokens=0)


@pytest.mark.parametrize(("nodes", "save"), [(NODES, "none"), (NODES, "rows"), (LONE, "none")])
def test_training_steps(pool, nodes, save):
    """20 of them, each with another rank late, and captured where nothing saved depends on how many
    rows come: the same bits."""
    sizes = dict(hidden=WIDTH, intermediate=128, dtype="bf16")
    parts = make_case(4, [MAX_TOKENS, 37, 0, 128], **sizes)
    for same in nodes.run(pool, training_steps, save, *map(PerRank, parts)):
        assert all(same), same


def training_steps(group, save, *parts):
    """Of 20 steps, and of as many replays, whether they give the bits of the first."""
    x, idx, weights, up, down, dy = (part.cuda() for part in parts)
    num_experts, num_topk = group.size() * len(up), idx.shape[1]
    buffer = new_buffer(group, x, num_experts, num_topk, MAX_TOKENS, decode_tokens=0)

    def step():
        return gradients(partial(moe_ffn, buffer=buffer, save=save), x, idx, weights, up, down, dy)

    def is_same(make):
        if next(number) % group.size() == group.rank():
            torch.cuda._sleep(1_000_000)
        return all(torch.equal(*pair) for pair in zip(make(), expected, strict=True))

    def replay():
        for one in captured:
            one.fill_(torch.nan)
        graph.replay()
        return captured

    number, expected = itertools.count(), step()
    same = [is_same(step) for _ in range(20)]
    if save == "none":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        same += [is_same(replay) for _ in range(20)]
    end(buffer)
    return same


def test_gradients(pool):
    sizes = dict(hidden=WIDTH, intermediate=128, policies=("none", "rows"))
    check_training(pool, [MAX_TOKENS, 37, 0, 128], "bf16", **sizes)


@pytest.mark.parametrize("way", ["one part", "two parts", "decode"])
def test_layers_with_weights_in_e4m3(pool, way):
    parts = quantized.make([9, 4, 0, 12], has_bias=True)
    on = InParts(pool) if way == "two parts" else pool
    quantized.check(on, parts, decode=way == "decode")


@pytest.mark.parametrize(("nodes", "form"), [(NODES, "bf16"), (NODES, "fp8"), (LONE, "fp8")])
def test_low_latency(pool, nodes, form):
    """20 round trips, each with another rank late."""
    sizes, near = ([16, 0, 5, 9], 16, WIDTH, 16, 4), nodes.ranks_per_node
    on = NodePool(pool, *nodes)
    low_latency.check_case(on, 4, *sizes, "holes", [form], node_ranks=near if near > 1 else None)


def test_operators(pool):
    parts = make_case(4, [9, 4, 0, 5], kind="duplicates")
    found = pool.run(operators.run_layers, "auto", {"alignment": 16}, *map(PerRank, parts))
    check_gradients([one for one, _, _ in found], parts)
    for rank, (_, same, values) in enumerate(found):
        assert same
        operators.check_rows(parts, rank, values, 16)


def test_a_layer_of_operators_is_one_graph(pool):
    parts = make_case(4, [6, 5, 4, 7], num_local=2, num_topk=2, intermediate=16, dtype="bf16")
    router = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    for same in pool.run(operators.run_compiled, 96, router, *map(PerRank, parts)):
        assert same == [[True] * 5] * 2


@pytest.mark.parametrize(("nodes", "do_cpu_sync"), [(NODES, True), (NODES, False), (LONE, False)])
def test_the_contract_of_v2(pool, nodes, do_cpu_sync):
    inputs = make_inputs(4, [20, 0, 13, 5], HIDDEN, EXPERTS, TOPK, "holes", "bf16")
    modes = [elastic.MODES[at] for at, waits in elastic.FEW if waits is do_cpu_sync]
    NodePool(pool, *nodes).run(elastic.run_modes, modes, do_cpu_sync, *inputs)


def test_a_call_that_breaks_off_ends_those_of_all_nodes(pool):
    """By a kernel of its own, which sends while the others' kernels wait."""
    inputs = make_inputs(4, [13], 64, NUM_EXPERTS, NUM_TOPK, "uniform", "bf16")
    found = pool.run(calls.bring_too_many, NUM_EXPERTS, *map(PerRank, inputs))
    calls.check_too_many(found)


def free_memory(group, num_buffers):
    """Free bytes of the GPU after each of so many Buffers was made, used and destroyed."""
    free = []
    for _ in range(num_buffers):
        x = torch.ones(64, WIDTH, dtype=torch.bfloat16, device="cuda")
        idx = torch.full((64, NUM_TOPK), -1, device="cuda")
        idx[:, 0] = 0
        buffer = make_buffer(group, x, NUM_EXPERTS, NUM_TOPK, 1 << 14)
        rows, *_, handle, _ = calls.dispatch(buffer, x, idx, idx.float() + 1, NUM_EXPERTS)
        assert torch.equal(buffer.combine(rows, handle)[0], x)
        torch.distributed.barrier(group)
        buffer.destroy()
        del buffer, rows, handle
        gc.collect()
        torch.cuda.empty_cache()  # torch keeps 2 MB for each stream
        torch.distributed.barrier(group)
        free.append(torch.cuda.mem_get_info()[0])
    return free


def test_memory_is_given_back(pool):
    """Each Buffer takes 100 MB and more of each rank."""
    for free in pool.run(free_memory, 24):
        assert min(free[4:]) > free[3] - (32 << 20), free
