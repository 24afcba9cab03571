"""`moe_ffn` in compiled code: one graph, with the bits of a call that is not compiled."""

from __future__ import annotations

import pytest
import torch
from training_cases import end, make_case, new_buffer, on_device

from moe_engine import MoEFeedForward, moe_ffn
from moe_engine.emulation import PerRank


def run_compiled(group, how, options, *parts):
    """Whether a compiled layer, its gradients and its counts are those of one that is not; for two
    numbers of tokens."""
    torch._dynamo.reset()
    x, idx, weights, up, down, dy = on_device(parts)
    sizes = group.size() * len(up), idx.shape[1], 16
    buffer = new_buffer(group, x, *sizes, **options)
    module = MoEFeedForward(*up.shape[::2], down.shape[2], buffer, x.dtype, requires_grad=True)
    module = module.to(x.device)

    def layer(x, weights, up, down, idx):
        y, counts = moe_ffn(2 * x, idx, weights, up, down, buffer, return_counts=True, **how)
        return y + module(x, idx, weights), counts

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    same = []
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for num_tokens in (len(x), len(x) - 2):
            found = []
            for function in (layer, compiled):
                leaves = x[:num_tokens], weights[:num_tokens], up, down
                leaves = [one.clone().requires_grad_() for one in leaves]
                y, counts = function(*leaves, idx[:num_tokens])
                leaves += module.parameters()
                grads = torch.autograd.grad(y, leaves, dy[:num_tokens])
                with torch.no_grad():
                    again, _ = function(*leaves[:4], idx[:num_tokens])
                found.append([y, counts, *grads, again])
            same += map(torch.equal, *found)
    torch._dynamo.reset()
    end(buffer)
    return same


INTERLEAVED = {"save": "all", "layout": "interleaved"}
WAYS = {}, {"save": "none"}


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(INTERLEAVED, marks=pytest.mark.slow),
        *(pytest.param(way, marks=pytest.mark.soak) for way in WAYS),
    ],
)
def test_a_compiled_layer_is_a_plain_layer(pool, how):
    parts = [PerRank(part) for part in make_case(2, [6, 5], num_local=2, num_topk=2)]
    for same in pool.run(run_compiled, how, {}, *parts, num_ranks=2):
        assert same == [True] * 18


@pytest.mark.slow
def test_a_compiled_layer_runs_in_passes(pool):
    """Of 16 tokens, all of rank 0's experts; and of 14, whose slices are as large."""
    parts = make_case(2, [16, 16], num_local=2, num_topk=2, kind="empty_rank")
    options = {"capacity_factor": 1.0, "decode_tokens": 0}
    per_rank = map(PerRank, parts)
    for same in pool.run(run_compiled, {"save": "pre"}, options, *per_rank, num_ranks=2):
        assert same == [True] * 18
