"""A shared expert runs while the tokens of the routed experts travel.

python examples/03_shared_expert.py
"""

import torch

from moe_engine import Buffer, MoEFeedForward, start_moe_ffn
from moe_engine.emulation import RankPool

TOKENS, HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOPK = 6, 32, 16, 4, 2


def run(group):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(group.rank())
    x = torch.randn(TOKENS, HIDDEN, device=device)
    topk_weights, topk_idx = torch.rand(TOKENS, NUM_EXPERTS, device=device).softmax(1).topk(TOPK)
    buffer = Buffer.for_tokens(group, TOKENS, HIDDEN, NUM_EXPERTS, TOPK, dtype=x.dtype)
    num_local_experts = NUM_EXPERTS // group.size()
    routed = MoEFeedForward(num_local_experts, HIDDEN, INTERMEDIATE, buffer, x.dtype).to(device)
    shared = torch.nn.Linear(HIDDEN, HIDDEN, device=device)
    weights = routed.gate_up_proj, routed.down_proj

    with torch.no_grad():
        layer = start_moe_ffn(x, topk_idx, topk_weights, *weights, buffer)
        y = shared(x)  # on the current stream; the layer runs on the Buffer's stream
        y += layer.finish()
        want = shared(x) + routed(x, topk_idx, topk_weights)
    buffer.check()
    buffer.destroy()
    return torch.equal(y, want)


if __name__ == "__main__":
    with RankPool(2, "cuda" if torch.cuda.is_available() else "cpu") as pool:
        assert all(pool.run(run))
    print("The overlapped layer is right: it gives the same bits as one after the other.")
