"""What the tests of layers share: experts' weights, Buffers, the comparison with the oracle."""

from __future__ import annotations

import cases
import low_latency_cases as low_latency
import torch
from dispatch_cases import DTYPES, make_buffer, make_inputs, poison

from moe_engine import Buffer, Options, moe_ffn, reference
from moe_engine.emulation import PerRank

# bf16 rounds four times on the way, each by up to 2^-9; few values may all be rounded alike.
TOLERANCE = {"bf16": 4 * 2**-9, "fp32": 1e-5}


def make_weights(num_ranks, num_local, hidden, intermediate, dtype, seed=0):
    """Per-rank lists (w_gate_up [L, 2I, H], w_down [L, H, I])."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(DTYPES[dtype])

    up = [draw(num_local, 2 * intermediate, hidden) for _ in range(num_ranks)]
    return up, [draw(num_local, hidden, intermediate) for _ in range(num_ranks)]


def decode_buffer(group, x, num_experts, num_topk, max_tokens, **options):
    """A Buffer whose layers are low-latency calls, unless the options say otherwise."""
    sizes = max_tokens, x.shape[1], num_experts, num_topk
    return Buffer.for_tokens(group, *sizes, x.dtype, options=Options(**options))


def run_layer(group, engine, max_tokens, num_calls, x, topk_idx, topk_weights, up, down):
    """moe_ffn a number of times on one Buffer; the last result, after all were the same bits.
    engine: "fused", "collective" or "decode"."""
    args = [part.to(cases.device()) for part in (x, topk_idx, topk_weights, up, down)]
    sizes = group.size() * len(up), topk_idx.shape[1], max_tokens
    if engine == "decode":
        buffer = decode_buffer(group, x, *sizes)
        low_latency.poison(buffer)
    else:
        buffer = make_buffer(group, x, *sizes, "auto" if engine == "fused" else engine)
        poison(buffer)
    torch.distributed.barrier(group)
    outs = []
    for call in range(20 if args[0].is_cuda else num_calls):
        if args[0].is_cuda and call % group.size() == group.rank():
            torch.cuda._sleep(1_000_000)
        outs.append(moe_ffn(*args, buffer))
    buffer.check()
    made = cases.num_low_latency_calls(buffer)
    assert engine != "decode" or made, "no low-latency call was made"
    torch.distributed.barrier(group)
    buffer.destroy()
    assert all(torch.equal(out, outs[0]) for out in outs)
    return outs[0].cpu()


def check_layer(
    pool, num_ranks, num_tokens, hidden, intermediate, num_local, num_topk, kind, dtype,
    engine="fused", num_calls=1, seed=0,
):  # fmt: skip
    """The layer of all ranks against the oracle in fp64."""
    num_experts = num_ranks * num_local
    inputs = make_inputs(num_ranks, num_tokens, hidden, num_experts, num_topk, kind, dtype, seed)
    weights = make_weights(num_ranks, num_local, hidden, intermediate, dtype, seed)
    parts = [PerRank(part) for part in (*inputs, *weights)]
    results = pool.run(run_layer, engine, max(num_tokens), num_calls, *parts, num_ranks=num_ranks)
    for have, want in zip(results, layer_in_fp64(*inputs, *weights), strict=True):
        assert have.shape == want.shape
        assert cases.relative_error(have, want) < TOLERANCE[dtype]


def layer_in_fp64(*parts):
    """What `moe_ffn` is to give on all ranks, given per-rank lists of its arguments."""
    return reference.moe_ffn(
        *([t.double() if t.is_floating_point() else t for t in part] for part in parts)
    )
