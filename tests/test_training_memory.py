"""The memory of layers that train, as torch counts it, against the formula."""

from __future__ import annotations

import gc
from functools import partial
from weakref import ref

import cases
import pytest
import torch
from torch.utils.checkpoint import checkpoint
from training_cases import POLICIES, end, make_case, new_buffer, on_device

from moe_engine import MoeEngineError, moe_ffn
from moe_engine.emulation import PerRank
from moe_engine.training import training_memory


def count_bytes(function):
    """(result, the most bytes of CPU tensors while it runs, those after it); less those before."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    gc.collect()  # else a graph of an earlier call, which was retained, may go meanwhile
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = function()
    events = profile.profiler.kineto_results.events()
    changes = [(one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]"]
    most = now = 0
    for _, change in sorted(changes, key=lambda one: one[0]):
        now += change
        most = max(most, now)
    return result, most, now


def run_counted(group, save, retain_graph, *parts):
    """Bytes that stay, and the most of forward and backward, less those of results; and the
    formula's. What the first call of a kind keeps goes in the second; the third one counts."""
    x, idx, weights, up, down, dy = parts
    buffer = new_buffer(group, x, len(up), idx.shape[1], len(x))
    for _ in range(3):
        leaves = [one.clone().requires_grad_() for one in (x, weights, up, down)]
        layer = partial(moe_ffn, leaves[0], idx, *leaves[1:], buffer, save=save)
        out, forward, stays = count_bytes(layer)
        differentiate = partial(torch.autograd.grad, out, leaves, dy, retain_graph=retain_graph)
        grads, backward, _ = count_bytes(differentiate)
        stays -= out.nbytes
        have = stays, forward - out.nbytes, stays + backward - sum(one.nbytes for one in grads)
        del out, grads, differentiate
    end(buffer)
    return have, training_memory(up, down, idx.numel(), save, retain_graph)


@pytest.mark.parametrize(
    ("save", "retain_graph"), cases.slow_unless([("pre", False)], POLICIES, [False, True])
)
def test_peaks_are_those_of_the_formula(pool, save, retain_graph):
    """But for the plans of up to three calls, of some KB."""
    if pool.device != "cpu":
        pytest.skip("the sizes are those of tensors on the CPU")
    sizes = dict(hidden=128, intermediate=96, num_local=2, num_topk=2)
    parts = [part[0] for part in make_case(1, [32], **sizes)]
    [(have, formula)] = pool.run(run_counted, save, retain_graph, *parts, num_ranks=1)
    for one, wanted in zip(have, formula, strict=True):
        assert wanted <= one <= wanted + 12 * 1024, (have, formula)


def weights_that_are_kept(group, backend, *parts):
    """How many weights live between a forward that is to be computed again, which made them, and
    its backward; and whether gradients have the bits of those without that."""
    parts = on_device(parts)
    x, idx, weights, up, down, dy = parts
    sizes = group.size() * len(up), idx.shape[1], 6
    buffer = new_buffer(group, x, *sizes, backend)
    leaves = [one.double().requires_grad_() for one in (up, down)]
    made, grads = [], []

    def layer(x):
        cast = [one.to(x.dtype) for one in leaves]
        made.extend(map(ref, cast))
        return moe_ffn(x, idx, weights, *cast, buffer)

    for run in (layer, partial(checkpoint, layer, use_reentrant=False)):
        made.clear()
        y = run(x)
        gc.collect()
        alive = sum(one() is not None for one in made)
        y.backward(dy)
        grads.append([one.grad for one in leaves])
        for one in leaves:
            one.grad = None
    end(buffer)
    return alive, all(map(torch.equal, *grads))


@pytest.mark.parametrize("backend", ["auto", "collective"])
def test_checkpointing_drops_weights_that_the_forward_made(pool, backend):
    """As a cast does, or a concatenation of gate and up."""
    parts = make_case(2, [6, 4])
    found = pool.run(weights_that_are_kept, backend, *map(PerRank, parts), num_ranks=2)
    assert found == [(0, True)] * 2


@pytest.mark.parametrize("num_rows", ["3", -12, 2.5])
def test_numbers_of_rows_that_are_none(num_rows):
    up, down = torch.zeros(2, 32, 16), torch.zeros(2, 16, 16)
    with pytest.raises(MoeEngineError, match="num_rows is "):
        training_memory(up, down, num_rows)
