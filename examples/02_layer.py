"""A mixture-of-experts layer in one call, compared with the same layer in plain torch.

python examples/02_layer.py
"""

import torch
import torch.nn.functional as F

from moe_engine import Buffer, moe_ffn
from moe_engine.emulation import RankPool

TOKENS, HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOPK = 6, 32, 16, 4, 2


def plain(x, topk_idx, topk_weights, w_gate_up, w_down):
    """The layer with all experts on one rank, one token and expert at a time."""
    out = torch.zeros_like(x)
    for token, (ids, weights) in enumerate(zip(topk_idx, topk_weights, strict=True)):
        for expert, weight in zip(ids.tolist(), weights, strict=True):
            gate, up = (w_gate_up[expert] @ x[token]).chunk(2)
            out[token] += weight * (w_down[expert] @ (F.silu(gate) * up))
    return out


def run(group):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)  # all ranks draw the same experts, and use their share of them
    w_gate_up = torch.randn(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN, device=device) / 8
    w_down = torch.randn(NUM_EXPERTS, HIDDEN, INTERMEDIATE, device=device) / 8
    torch.manual_seed(1 + group.rank())
    x = torch.randn(TOKENS, HIDDEN, device=device)
    topk_weights, topk_idx = torch.rand(TOKENS, NUM_EXPERTS, device=device).softmax(1).topk(TOPK)

    num_local = NUM_EXPERTS // group.size()
    own = slice(group.rank() * num_local, (group.rank() + 1) * num_local)
    buffer = Buffer.for_tokens(group, TOKENS, HIDDEN, NUM_EXPERTS, TOPK, dtype=x.dtype)
    y = moe_ffn(x, topk_idx, topk_weights, w_gate_up[own], w_down[own], buffer)
    buffer.check()
    buffer.destroy()
    want = plain(x, topk_idx, topk_weights, w_gate_up, w_down)
    return float((y - want).norm() / want.norm())


if __name__ == "__main__":
    with RankPool(2, "cuda" if torch.cuda.is_available() else "cpu") as pool:
        errors = pool.run(run)
    assert max(errors) < 1e-5
    print(f"The layer is right: relative error {max(errors):.1e}.")
