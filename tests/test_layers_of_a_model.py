"""Layers of a model are calls of one kind: each gets launches of its own."""

from __future__ import annotations

import itertools
from unittest import mock

import cases
import pytest
import torch
from dispatch_cases import make_inputs
from layer_cases import make_weights
from prepared_cases import prepared_as_graphs

from moe_engine import Buffer, Options, kinds, moe_ffn
from moe_engine.emulation import PerRank
from moe_engine.prepared import OWN_AFTER, PreparedCalls

EXPERTS, TOPK, HIDDEN, COLUMNS, TOKENS = 4, 2, 64, 32, 6
NUM_LAYERS, ROUNDS = 3, OWN_AFTER + 4


def run_model(group, name, max_tokens, batches, layers):
    """Layers one after the other, for each batch, and the same by calls that are prepared anew. How
    the calls of each kind are kept: (whether for one layer, whether its weights are those)."""
    device = cases.device()
    layers = [[one.to(device) for one in part] for part in layers]
    sizes, options = (TOKENS, HIDDEN, EXPERTS, TOPK), Options(decode_tokens=max_tokens or 0)
    buffers = [Buffer.for_tokens(group, *sizes, options=options) for _ in range(2)]

    def results(buffer, x, idx, weights):
        trains = name == "training"
        leaves = [one.requires_grad_(trains) for one in (x, *itertools.chain(*layers))]
        y = x
        for number, (up, down) in enumerate(layers):
            y = moe_ffn(y, idx, weights, up, down, buffer, max_tokens)
            if number == 0:  # once more, in other memory
                y = moe_ffn(y + x, idx, weights, up, down, buffer, max_tokens)
        return [y, *(torch.autograd.grad(y, leaves, x.detach()) if trains else ())]

    with prepared_as_graphs(), cases.filled_memory():
        for inputs in batches:
            x, idx, weights = (one.to(device) for one in inputs)
            with mock.patch.object(kinds, "MOST_KINDS", 0):
                wanted = results(buffers[1], x, idx, weights)
            found = results(buffers[0], x, idx, weights)
            assert all(map(torch.equal, found, wanted))
    buffer = buffers[0]
    memories = [buffer._engine.slots, *getattr(buffer._low_latency, "memories", ())]
    kept = [
        [
            (one[1], call._addresses[kind.weights]) if isinstance(one, tuple) else None
            for one, call in kind.prepared.items()
        ]
        for memory in memories
        for kind in memory.calls._kinds.values()
        if kind.prepared
    ]
    for one in buffers:
        one.check()
        one.destroy()
    return kept


def run(pool, name, num_layers=NUM_LAYERS, num_ranks=2, body=run_model):
    """What `run_model` says on rank 0."""
    max_tokens = TOKENS if name == "decode" else None
    tokens = [TOKENS, 3][:num_ranks]
    sizes = num_ranks, tokens, HIDDEN, EXPERTS, TOPK
    batches = [make_inputs(*sizes, "holes", "bf16", seed) for seed in range(ROUNDS)]
    num_local = EXPERTS // num_ranks
    layers = [
        make_weights(num_ranks, num_local, HIDDEN, COLUMNS, "bf16", seed)
        for seed in range(num_layers)
    ]
    of_ranks = [
        PerRank([[tuple(part[r] for part in one) for one in parts] for r in range(num_ranks)])
        for parts in (batches, layers)
    ]
    return pool.run(body, name, max_tokens, *of_ranks, num_ranks=num_ranks)[0]


BODIES = {"layer": [1], "decode": [1], "training": [3, 1]}
"""Parts of the calls of each kind on two ranks: a forward that trains has three."""


@pytest.mark.parametrize("name", BODIES)
def test_each_layer_gets_launches_of_its_own(pool, name):
    kept = run(pool, name)
    assert len(kept) == len(BODIES[name])
    for num_bodies, calls in zip(BODIES[name], kept, strict=True):
        own = [one for one in calls if one is not None]
        assert len(calls) - len(own) == num_bodies
        assert len(own) == NUM_LAYERS * num_bodies
        assert all(address == of_weights for address, of_weights in own)


def test_layers_that_train_on_one_rank(pool):
    for calls in run(pool, "training", num_ranks=1):
        assert len(calls) == 1 + NUM_LAYERS


def test_one_layer_alone_needs_none(pool):
    for calls in run(pool, "layer", num_layers=1):
        assert calls == [None]


def without_room(group, *args):
    with mock.patch.object(kinds, "MOST_PREPARED", 2):
        return run_model(group, *args)


@pytest.mark.parametrize("name", ["layer", "decode"])
def test_layers_share_launches_where_there_are_many(pool, name):
    assert run(pool, name, body=without_room) == [[None]]


def test_weights_that_move_all_the_time_are_not_counted_for_ever():
    calls = PreparedCalls()
    kind, shared = kinds.Kind(calls), object()
    kind.weights, kind.prepared = 0, {None: shared}
    for address in range(kinds.MOST_PREPARED + 1):
        assert kind.weights == 0
        assert calls._find(kinds.Described(kind, (), [address]), None) is shared
    assert (kind.weights, kind.shared) == (None, {})
