"""What does not change a bit of a layer's gradients: stages, ranks that are late, a graph that is
kept."""

from __future__ import annotations

import time
from functools import partial

import cases
import pytest
import torch
from training_cases import POLICIES, end, gradients, make_case, new_buffer, on_device

from moe_engine import LayerConfig, moe_ffn
from moe_engine.emulation import PerRank

FEW, MANY = LayerConfig(3, 2, num_own_stages=2, claims_tiles=True), LayerConfig(16, 8)


def run_stages(group, save, config, *parts):
    """Whether gradients are the same by a config as in one stage."""
    parts = on_device(parts)
    x, idx, _, up, _, _ = parts
    found = []
    for layer in (LayerConfig(1, 1), config):
        sizes = group.size() * len(up), idx.shape[1], 16
        buffer = new_buffer(group, x, *sizes, layer=layer)
        found.append(gradients(partial(moe_ffn, buffer=buffer, save=save), *parts))
        end(buffer)
    return all(map(torch.equal, *found))


@pytest.mark.parametrize(
    ("save", "config"), cases.slow_unless([("none", FEW)], POLICIES, [FEW, MANY])
)
def test_stages_change_nothing(pool, save, config):
    """With `none` all products of rows that arrive wait for their stages."""
    parts = [PerRank(part) for part in make_case(2, [9, 5], kind="duplicates")]
    assert all(pool.run(run_stages, save, config, *parts, num_ranks=2))


def run_late(group, save, *parts):
    """Whether gradients are the same where this rank begins forward and backward late."""
    parts = on_device(parts)
    x, idx, _, up, _, dy = parts
    buffer = new_buffer(group, x, group.size() * len(up), idx.shape[1], 16)
    want = gradients(lambda *a: moe_ffn(*a, buffer, save=save), *parts)

    def wait():
        if x.is_cuda:
            torch.cuda._sleep(3_000_000 * group.rank())
        else:
            time.sleep(0.3 * group.rank())

    same = True
    for _ in range(20 if x.is_cuda else 1):
        leaves = [one.clone().requires_grad_() for one in (x, *parts[2:5])]
        wait()
        out = moe_ffn(leaves[0], idx, *leaves[1:], buffer, save=save)
        wait()
        same &= all(map(torch.equal, torch.autograd.grad(out, leaves, dy), want[1:]))
    end(buffer)
    return same


@pytest.mark.parametrize("save", cases.slow_unless([("pre",)], POLICIES))
def test_late_ranks_change_nothing(pool, save):
    parts = [PerRank(part) for part in make_case(2, [7, 3])]
    assert all(pool.run(run_late, save, *parts, num_ranks=2))


def run_kept(group, *parts):
    """Whether the gradients of a graph that is kept are the same twice, by policy."""
    parts = on_device(parts)
    x, idx, _, up, _, dy = parts
    buffer = new_buffer(group, x, group.size() * len(up), idx.shape[1], 16)
    found = {}
    for save in ("pre", "all"):
        leaves = [one.clone().requires_grad_() for one in (x, *parts[2:5])]
        out = moe_ffn(leaves[0], idx, *leaves[1:], buffer, save=save)
        once = torch.autograd.grad(out, leaves, dy, retain_graph=True)
        again = torch.autograd.grad(out, leaves, dy)
        found[save] = all(map(torch.equal, once, again))
    end(buffer)
    return found


def test_a_graph_that_is_kept(pool):
    """Then the gradient of saved pre-activations does not overwrite them."""
    parts = [PerRank(part) for part in make_case(2, [5, 3])]
    assert pool.run(run_kept, *parts, num_ranks=2) == [{"pre": True, "all": True}] * 2
