"""torch.compile around calls: it breaks its graph there, and they do what they do without it."""

from __future__ import annotations

import cases
import pytest
import torch
from layer_cases import make_weights

from moe_engine import Buffer, Options, moe_ffn
from moe_engine.grouped_gemm import grouped_mlp

TOKENS, HIDDEN, EXPERTS, TOPK, COLUMNS = 5, 128, 8, 2, 64


class Calls:
    """Functions of x [T, H], topk_idx and topk_weights [T, K], each around calls of one kind."""

    def __init__(self, group):
        sizes = TOKENS, HIDDEN, EXPERTS, TOPK
        self.buffer = Buffer.for_tokens(group, *sizes)
        self.staged = Buffer.for_tokens(group, *sizes, options=Options(decode_tokens=0))
        num_local = EXPERTS // group.size()
        up, down = make_weights(group.size(), num_local, HIDDEN, COLUMNS, "bf16")
        self.up, self.down = (part[group.rank()].to(cases.device()) for part in (up, down))

    def layer(self, x, idx, weights):
        return moe_ffn(2 * x, idx, weights, self.up, self.down, self.staged) + 1

    def decode_layer(self, x, idx, weights):
        return moe_ffn(2 * x, idx, weights, self.up, self.down, self.buffer, TOKENS) + 1

    def dispatch_combine(self, x, idx, weights):
        per_rank, _, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(idx, EXPERTS)
        layout = None, per_rank, None, in_rank, per_expert
        rows, _, _, _, handle, _ = self.buffer.dispatch(2 * x, *layout, idx, weights)
        again = self.buffer.dispatch(3 * x, handle)[0]
        return self.buffer.combine(rows + again, handle)[0] + 1

    def low_latency(self, x, idx, weights):
        sizes = TOKENS, EXPERTS
        rows, _, handle, _, hook = self.buffer.low_latency_dispatch(
            2 * x, idx, *sizes, use_fp8=False, return_recv_hook=True
        )
        hook()
        return self.buffer.low_latency_combine(rows + 1, idx, weights, handle)[0] + 1

    def experts(self, x, idx, weights):
        """With gradients of x and the weights of the experts."""
        offsets = torch.arange(len(self.up) + 1, dtype=torch.int32, device=x.device)
        offsets = offsets.clamp(max=len(x))
        leaves = [one.detach().requires_grad_() for one in (x, self.up, self.down)]
        y = grouped_mlp(2 * leaves[0], *leaves[1:], offsets)[: int(offsets[-1])] + 1
        y.float().sum().backward()
        return torch.cat([y.flatten(), *(leaf.grad.flatten() for leaf in leaves[1:])])


def compile_calls(group, name):
    """Whether a compiled function gives what it gives uncompiled, call by call: the first call of
    their kind, later ones, and those of fewer tokens."""
    torch._dynamo.reset()
    calls, same = Calls(group), []
    function = getattr(calls, name)
    compiled = torch.compile(function, backend="eager")
    for num_tokens in (TOKENS, TOKENS, 3):
        x, weights = cases.tokens(num_tokens, HIDDEN, TOPK, torch.bfloat16, num_tokens)
        idx = cases.route("uniform", num_tokens, EXPERTS, TOPK, group.rank())
        args = [one.to(cases.device()) for one in (x, idx, weights)]
        got = compiled(*args)
        same.append(torch.equal(got, function(*args)))
    calls.buffer.check()
    calls.staged.check()
    for buffer in (calls.buffer, calls.staged):
        buffer.destroy()
    return same


@pytest.mark.parametrize(
    "name",
    [
        *("layer", "decode_layer", "dispatch_combine", "low_latency"),
        pytest.param("experts", marks=pytest.mark.slow),
    ],
)
def test_compiled_calls_are_plain_calls(pool, name):
    for same in pool.run(compile_calls, name, num_ranks=1):
        assert same == [True] * 3
