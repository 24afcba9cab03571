"""Dispatch sends tokens to the ranks of their experts; combine returns the sums of the results.

python examples/01_dispatch_combine.py
"""

import torch

from moe_engine import Buffer
from moe_engine.emulation import RankPool

TOKENS, HIDDEN, NUM_EXPERTS, TOPK = 5, 16, 8, 2


def run_experts(x, topk_idx, topk_weights, first_expert):
    """Expert e multiplies by e + 1. topk_idx has local ids, and -1 for experts of other ranks."""
    factors = torch.where(topk_idx >= 0, topk_idx + first_expert + 1, 0)
    return x * (factors * topk_weights).sum(1, keepdim=True)


def run(group):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(group.rank())
    x = torch.randn(TOKENS, HIDDEN, generator=generator).to(device)
    logits = torch.rand(TOKENS, NUM_EXPERTS, generator=generator).to(device)
    topk_weights, topk_idx = logits.softmax(1).topk(TOPK)

    buffer = Buffer.for_tokens(group, TOKENS, HIDDEN, NUM_EXPERTS, TOPK, dtype=x.dtype)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, NUM_EXPERTS)
    recv_x, recv_idx, recv_weights, _, handle, _ = buffer.dispatch(
        x, None, per_rank, None, in_rank, per_expert, topk_idx, topk_weights
    )
    y = run_experts(recv_x, recv_idx, recv_weights, group.rank() * NUM_EXPERTS // group.size())
    out, _, _ = buffer.combine(y, handle)
    buffer.check()
    buffer.destroy()
    torch.testing.assert_close(out, run_experts(x, topk_idx, topk_weights, 0))
    return len(recv_x)


if __name__ == "__main__":
    with RankPool(2, "cuda" if torch.cuda.is_available() else "cpu") as pool:
        received = pool.run(run)
    print(f"The ranks received {received} rows of {2 * TOKENS} tokens; the sums are right.")
