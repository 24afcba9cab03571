"""What the tests of dispatch, combine and layers share: inputs, Buffers, the comparison with the
oracle."""

from __future__ import annotations

import operator

import cases
import torch

from moe_engine import Buffer, Options, reference
from moe_engine.emulation import PerRank

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def make_inputs(num_ranks, num_tokens, hidden, num_experts, num_topk, kind, dtype, seed=0):
    """Per-rank lists (x, topk_idx, topk_weights); rank r has num_tokens[r % len] tokens."""
    counts = [num_tokens[r % len(num_tokens)] for r in range(num_ranks)]
    idx = [cases.route(kind, t, num_experts, num_topk, seed + r) for r, t in enumerate(counts)]
    pairs = [
        cases.tokens(t, hidden, num_topk, DTYPES[dtype], seed + r) for r, t in enumerate(counts)
    ]
    return [x for x, _ in pairs], idx, [w for _, w in pairs]


def make_buffer(group, x, num_experts, num_topk, max_tokens, backend="auto"):
    """A Buffer whose layers are fused ones, and never low-latency calls."""
    sizes = max_tokens, x.shape[1], num_experts, num_topk
    options = Options(decode_tokens=0)
    return Buffer.for_tokens(group, *sizes, x.dtype, backend, options)


def poison(buffer):
    """NaN everywhere a row can lie; rows must be written before they are read."""
    slots = getattr(buffer._engine, "slots", None)
    if slots is not None:
        slots.block.local[slots.layout.slots :].fill_(0xFF)
        if slots.block.local.is_cuda:
            torch.cuda.synchronize()  # the barrier that follows is one of the hosts alone


def round_trip(buffer, x, topk_idx, topk_weights, num_experts, bias=()):
    """One dispatch, a cached dispatch and combines; everything on the CPU in a dict."""
    device = cases.device()
    x, topk_idx, topk_weights = (t.to(device) for t in (x, topk_idx, topk_weights))
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
    recv_x, recv_idx, recv_w, counts, handle, _ = buffer.dispatch(
        x, None, per_rank, None, in_rank, per_expert, topk_idx, topk_weights
    )
    cached, *_ = buffer.dispatch(x, tuple(handle))
    # Another value on each rank, else the order of summing would not show.
    y = (recv_x.float() * 1.5 + 10.0**buffer.rank).to(x.dtype)
    out, out_w, _ = buffer.combine(y, tuple(handle), topk_weights=recv_w)
    biased, _, _ = buffer.combine(y, handle, bias=[b.to(device) for b in bias] or None)
    names = "x idx w counts src cached y out out_w biased".split()
    values = (
        recv_x,
        recv_idx,
        recv_w,
        counts,
        handle.recv_src_idx,
        cached,
        y,
        out,
        out_w,
        biased,
    )
    return {
        n: v.cpu() if isinstance(v, torch.Tensor) else v for n, v in zip(names, values, strict=True)
    }


def run_round_trips(group, backend, num_experts, max_tokens, x, topk_idx, topk_weights, bias):
    """A round trip on fresh memory; on GPUs 20, each with another rank late, all the same bits."""
    buffer = make_buffer(group, x, num_experts, topk_idx.shape[1], max_tokens, backend)
    rank, num_ranks = group.rank(), group.size()
    on_gpu = cases.device().type == "cuda"
    first = None
    for call in range(20 if on_gpu else 1):
        poison(buffer)
        torch.distributed.barrier(group)
        if on_gpu and rank == call % num_ranks:
            torch.cuda._sleep(1_000_000)
        result = round_trip(buffer, x, topk_idx, topk_weights, num_experts, bias)
        first = first or result
        for name, value in result.items():
            same = torch.equal if isinstance(value, torch.Tensor) else operator.eq
            assert same(value, first[name]), f"{name} of call {call} differs from that of call 0"
        torch.distributed.barrier(group)
    buffer.destroy()
    return first


def check_round_trip(results, x, topk_idx, topk_weights, num_experts, bias, ranks_per_node=None):
    """Bitwise: rows, ids, weights, counts and sums."""
    received = reference.dispatch(x, topk_idx, topk_weights, num_experts)
    for have, want in zip(results, received, strict=True):
        assert torch.equal(have["x"], want.x)
        assert torch.equal(have["idx"], want.topk_idx)
        assert torch.equal(have["w"], want.topk_weights)
        assert torch.equal(have["src"], want.src_idx)
        assert have["counts"] == want.num_tokens_per_expert
        assert torch.equal(have["cached"], want.x)
    y = [have["y"] for have in results]
    num_tokens = [len(part) for part in x]
    sent = y, received, topk_idx, num_tokens, num_experts
    plain = reference.combine(*sent, None, ranks_per_node)
    biased = reference.combine(*sent, bias, ranks_per_node)
    for rank, have in enumerate(results):
        assert torch.equal(have["out"], plain[rank])
        assert torch.equal(have["biased"], biased[rank])
        valid = (topk_idx[rank] >= 0) & (topk_idx[rank] < num_experts)
        assert torch.equal(have["out_w"], torch.where(valid, topk_weights[rank], 0.0))


def check_case(pool, num_ranks, num_tokens, hidden, num_experts, num_topk, kind, dtype, **options):
    inputs = make_inputs(
        num_ranks, num_tokens, hidden, num_experts, num_topk, kind, dtype, options.get("seed", 0)
    )
    bias = [[part * 0.5, part * 0.25] for part in inputs[0]]
    results = pool.run(
        run_round_trips,
        options.get("backend", "auto"),
        num_experts,
        max(num_tokens),
        *(PerRank(part) for part in (*inputs, bias)),
        num_ranks=num_ranks,
    )
    check_round_trip(results, *inputs, num_experts, bias)
