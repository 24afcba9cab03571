"""CUDA graphs: captured once, replayed with new tokens and routing in the same buffers."""

from __future__ import annotations

import cases
import pytest
import torch
from test_dispatch_combine import make_buffer, make_inputs
from test_layer import TOLERANCE, make_weights

from moe_engine import reference
from moe_engine.emulation import PerRank

NUM_EXPERTS, MAX_TOKENS = 16, 48
KINDS = ["uniform", "holes", "one_hot", "nothing", "skewed", "empty_rank"]


def replay(group, rounds, up, down):
    """The layer, and a dispatch with its combine, of every round, from two captured graphs."""
    from moe_engine import moe_ffn

    num_ranks = torch.distributed.get_world_size(group)
    up, down = up.cuda(), down.cuda()
    x, topk_idx, topk_weights = (part.cuda() for part in rounds[0])
    buffer = make_buffer(group, x, NUM_EXPERTS, topk_idx.shape[1], MAX_TOKENS)

    def layer():
        return moe_ffn(x, topk_idx, topk_weights, up, down, buffer)

    def round_trip():
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, NUM_EXPERTS)
        recv_x, recv_idx, recv_w, _, handle, _ = buffer.dispatch(
            x, None, per_rank, None, in_rank, per_expert, topk_idx, topk_weights,
            num_worst_tokens=num_ranks * MAX_TOKENS,
        )  # fmt: skip
        out, out_w, _ = buffer.combine(recv_x, handle, topk_weights=recv_w)
        return recv_x, recv_idx, out, out_w

    graphs, results = [], []
    for call in (layer, round_trip):
        call()  # compiles
        torch.cuda.synchronize()
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            results.append(call())
    outputs = []
    for number, (new_x, new_idx, new_w) in enumerate(rounds * 4):
        x.copy_(new_x)
        topk_idx.copy_(new_idx)
        topk_weights.copy_(new_w)
        if number % num_ranks == torch.distributed.get_rank(group):
            torch.cuda._sleep(1_000_000)
        for graph in graphs:
            graph.replay()
        outputs.append([part.cpu() for part in (results[0], *results[1])])
    buffer.check()
    torch.distributed.barrier(group)
    buffer.destroy()
    return outputs


@pytest.mark.multi_gpu
def test_replays_follow_the_routing(pool):
    num_ranks = pool.num_ranks
    rounds = [
        make_inputs(num_ranks, [MAX_TOKENS], 64, NUM_EXPERTS, 3, kind, "bf16", seed)
        for seed, kind in enumerate(KINDS)
    ]
    weights = make_weights(num_ranks, NUM_EXPERTS // num_ranks, 64, 48, "bf16")
    by_rank = [
        [tuple(part[rank] for part in inputs) for inputs in rounds] for rank in range(num_ranks)
    ]
    results = pool.run(replay, PerRank(by_rank), *(PerRank(part) for part in weights))
    for number in range(4 * len(rounds)):
        x, idx, w = rounds[number % len(rounds)]
        received = reference.dispatch(x, idx, w, NUM_EXPERTS)
        sums = reference.combine(
            [r.x for r in received], received, idx, [MAX_TOKENS] * num_ranks, NUM_EXPERTS
        )
        wide = [[t.double() for t in part] for part in (x, w, *weights)]
        layer = reference.moe_ffn(wide[0], idx, *wide[1:])
        for rank in range(num_ranks):
            y, recv_x, recv_idx, out, out_w = results[rank][number]
            num_rows = len(received[rank].x)
            assert torch.equal(recv_x[:num_rows], received[rank].x)
            assert torch.equal(recv_idx[:num_rows], received[rank].topk_idx)
            assert (recv_idx[num_rows:] == -1).all()
            assert torch.equal(out, sums[rank])
            assert torch.equal(out_w, torch.where(idx[rank] >= 0, w[rank], 0.0))
            assert cases.relative_error(y, layer[rank]) < TOLERANCE["bf16"]
