"""Layers whose programs claim their tiles: the same bits, and each program tells each stage once,
while it computes many tiles, ranks are late, and a graph is replayed."""

from __future__ import annotations

import time
from functools import partial
from unittest import mock

import torch
from dispatch_cases import make_inputs
from layer_cases import make_weights
from training_cases import end, gradients, new_buffer, on_device

import moe_engine.combine.fused as combining
import moe_engine.dispatch.fused as dispatching
from moe_engine import LayerConfig, combine, moe_ffn
from moe_engine.emulation import PerRank

RANKS, LOCAL, TOPK = 2, 3, 2
STAGES, RETURN_STAGES = 3, 4


def be_late(group, turn):
    """One of the ranks, in turn."""
    if turn % group.size() != group.rank():
        return
    if torch.cuda.is_available():
        torch.cuda._sleep(2_000_000)
    else:
        time.sleep(0.1)


def run_claimed(group, programs, max_tokens, *parts):
    """(whether all calls give the bits of one without claims, for each product whose sums return
    the number of tiles that were claimed, and of programs that had computed each stage)"""
    x, idx, weights, up, down = on_device(parts)
    given = x, idx, weights, up, down, torch.ones_like(x)
    found, counters, same = [], [], True
    gemm_combine = combine.gemm_combine

    def noting(*args):
        counters.append(args[3].counters)
        return gemm_combine(*args)

    few = dict(num_compute_programs=lambda *_: programs)
    with (
        mock.patch.multiple(combining, **few),
        mock.patch.multiple(dispatching, **few),
        mock.patch.object(combine, "gemm_combine", noting),
    ):
        for claims in (False, True):
            layer = LayerConfig(STAGES, RETURN_STAGES, claims_tiles=claims)
            sizes = group.size() * len(up), idx.shape[1], max_tokens
            buffer = new_buffer(group, x, *sizes, layer=layer, decode_tokens=0)
            call = partial(moe_ffn, buffer=buffer, save="pre")
            found.append(gradients(call, *given))
            for turn in range(20 if x.is_cuda else 1):
                be_late(group, turn)
                same &= all(map(torch.equal, gradients(call, *given), found[0]))
            if x.is_cuda:
                forward = partial(moe_ffn, x, idx, weights, up, down, buffer)
                same &= replayed(group, forward, found[0][0])
            end(buffer)
    counted = [(int(one.claimed[1]), one.computed[:-1].tolist()) for one in counters]
    return same and all(map(torch.equal, *found)), counted


def replayed(group, forward, want):
    """Whether a graph of a forward gives `want` each time."""
    forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward()
    same = True
    for turn in range(20):
        be_late(group, turn)
        out.zero_()
        graph.replay()
        same &= torch.equal(out, want)
    return same


def test_claims_change_no_bit_and_tell_each_stage_once(pool):
    on_gpu = pool.device == "cuda"
    programs, most = (3, 5 * 128) if on_gpu else (2, 40)
    hidden, columns = (2048, 768) if on_gpu else (256, 32)
    sizes = [most, most // 2], hidden, RANKS * LOCAL, TOPK
    inputs = make_inputs(RANKS, *sizes, "skewed", "bf16", 3)
    weights = make_weights(RANKS, LOCAL, hidden, columns, "bf16")
    parts = (PerRank(part) for part in (*inputs, *weights))
    for same, counted in pool.run(run_claimed, programs, most, *parts, num_ranks=RANKS):
        assert same
        assert {tiles > 0 for tiles, _ in counted} == {False, True}
        for tiles, computed in counted:
            assert computed == [programs] * RETURN_STAGES
            assert tiles == 0 or tiles >= 5 * programs
