"""CUDA graphs: captured once, replayed with new tokens and routing in the same buffers."""

from __future__ import annotations

import cases
import low_latency_cases as low_latency
import pytest
import torch
from dispatch_cases import make_buffer, make_inputs
from layer_cases import TOLERANCE, make_weights
from rounds import Faults, Round, draw, expert_weights, new_buffer

from moe_engine import MoeEngineError, moe_ffn, reference
from moe_engine.emulation import PerRank

NUM_EXPERTS, MAX_TOKENS = 16, 48
KINDS = ["uniform", "holes", "one_hot", "nothing", "skewed", "empty_rank"]


def replay(group, rounds, up, down):
    """The layer, and a dispatch with its combine, of every round, from two captured graphs."""
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


def replay_once_broken(group, while_capturing):
    """(a replay was right, what a replay raises) where rank 0 breaks a call off in between: an
    eager one, or one that it captures."""
    one, num_ranks = Round("layer"), group.size()
    buffer = new_buffer(group)
    inputs = [part[group.rank()].cuda() for part in draw(one, num_ranks, 4)]
    up, down = (part[group.rank()].cuda() for part in expert_weights(one, num_ranks, 4))

    def layer():
        return moe_ffn(*inputs, up, down, buffer)

    expected = layer()  # compiles
    torch.cuda.synchronize()
    graph, cut_off = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    graph.replay()
    buffer.check()
    is_right = torch.equal(out, expected)
    torch.distributed.barrier(group)

    def strike(name):
        raise MemoryError(name)

    if group.rank() == 0:
        with Faults(9, strike).installed(), pytest.raises(MemoryError):
            if while_capturing:
                with torch.cuda.graph(cut_off):
                    layer()
            else:
                layer()
    torch.distributed.barrier(group)
    texts = []
    for _ in range(2):
        graph.replay()
        try:
            buffer.check()
        except MoeEngineError as error:
            texts.append(f"{type(error).__name__}: {error}")
    torch.distributed.barrier(group)
    buffer.destroy()
    return is_right, texts


@pytest.mark.multi_gpu
@pytest.mark.parametrize("while_capturing", [False, True])
def test_replays_end_with_a_call_that_broke_off(pool, while_capturing):
    for is_right, texts in pool.run(replay_once_broken, while_capturing):
        assert is_right
        assert len(texts) == 2
        for text in texts:
            assert text.startswith("CallAbandoned: rank 0 abandoned call")
            assert "because of MemoryError" in text


# --- Low-latency calls: many replays, each result told by its hash -----------------------------


def hash_of(found):
    """int64, on the device: that of all received rows, what says where they are, and the sums."""
    total = torch.zeros((), dtype=torch.int64, device=found["out"].device)
    for name in ("x", "scales", "counts", "src_info", "layout_range", "out"):
        data = found[name].flatten().view(torch.uint8).long()
        odd = 2 * torch.arange(data.numel(), device=data.device) + 1
        total = total * 1_000_003 + (data * odd).sum()
    return total


def replay_often(group, num_replays, order, table, flags):
    """The results of each input's first replay, and how many later ones had another hash.

    A replay's tokens and routing are copied in on its stream, and its hash stays on the device.
    """
    table = [part.to(cases.device()) for part in table]
    max_tokens, hidden = table[0].shape[1:]
    x, topk_idx, topk_weights = (part[0].clone() for part in table)
    buffer = low_latency.make_buffer(group, max_tokens, hidden, NUM_EXPERTS)

    def round_trip():
        found = low_latency.round_trip(
            buffer, x, topk_idx, topk_weights, max_tokens, NUM_EXPERTS, "fp8", flags
        )
        return found, hash_of(found)

    found, new_hash = round_trip()  # compiles
    graph = None
    if x.is_cuda:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found, new_hash = round_trip()
    firsts, hashes = [], torch.zeros(num_replays, dtype=torch.int64, device=x.device)
    pauses = torch.rand(num_replays, generator=torch.Generator().manual_seed(group.rank())) ** 8
    for replay, (number, pause) in enumerate(zip(order, pauses.tolist(), strict=True)):
        for mine, new in zip((x, topk_idx, topk_weights), table, strict=True):
            mine.copy_(new[number])
        if graph is None:
            found, new_hash = round_trip()
        else:
            torch.cuda._sleep(int(pause * 1e6))
            graph.replay()
        hashes[replay].copy_(new_hash)
        if replay < len(table[0]):
            firsts.append({name: tensor.clone() for name, tensor in found.items()})
    buffer.check()
    torch.distributed.barrier(group)
    buffer.destroy()
    first_hash = hashes[: len(table[0])]
    assert len(first_hash.unique()) == len(first_hash)
    wrong = hashes != first_hash[torch.tensor(order, device=x.device)]
    return [low_latency.to_cpu(first) for first in firsts], int(wrong.sum())


def check_replays(pool, num_ranks, num_replays, num_inputs, num_tokens, hidden, flags):
    kinds = [kind for kind in cases.ROUTINGS if kind != "nothing"]
    inputs = [
        low_latency.make_inputs(
            num_ranks, [num_tokens], hidden, NUM_EXPERTS, 4, kinds[n % len(kinds)], 10 * n
        )
        for n in range(num_inputs)
    ]
    tables = [
        [torch.stack([batch[part][rank] for batch in inputs]) for part in range(3)]
        for rank in range(num_ranks)
    ]
    generator = torch.Generator().manual_seed(0)
    order = list(range(num_inputs))
    order += torch.randint(num_inputs, (num_replays - num_inputs,), generator=generator).tolist()
    results = pool.run(
        replay_often, num_replays, order, PerRank(tables), flags, num_ranks=num_ranks
    )
    assert [wrong for _, wrong in results] == [0] * num_ranks
    for number, batch in enumerate(inputs):
        at_call = [firsts[number] for firsts, _ in results]
        low_latency.check(at_call, *batch, num_tokens, NUM_EXPERTS, "fp8")


@pytest.mark.multi_gpu
@pytest.mark.parametrize("return_recv_hook", [False, True])
def test_ten_thousand_low_latency_replays(pool, return_recv_hook):
    check_replays(pool, pool.num_ranks, 10_000, 64, 32, 512, {"return_recv_hook": return_recv_hook})


def test_low_latency_hashes_on_a_cpu(pool):
    """The loop of the replays without a graph."""
    if pool.device == "cuda":
        pytest.skip("emulated: the replays themselves run on this machine")
    check_replays(pool, 2, 6, 3, 4, 128, {})
