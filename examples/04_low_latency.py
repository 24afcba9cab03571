"""Few tokens, as in decode: low-latency calls with fixed shapes, and a hook that receives.

python examples/04_low_latency.py
"""

import torch

from moe_engine import Buffer
from moe_engine.emulation import RankPool

TOKENS, MAX_TOKENS, HIDDEN, NUM_EXPERTS, TOPK = 3, 4, 128, 4, 2


def run(group):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(group.rank())
    x = torch.randn(TOKENS, HIDDEN, device=device).bfloat16()
    topk_weights, topk_idx = torch.rand(TOKENS, NUM_EXPERTS, device=device).softmax(1).topk(TOPK)

    sizes = MAX_TOKENS, HIDDEN, group.size(), NUM_EXPERTS
    num_bytes = Buffer.get_low_latency_rdma_size_hint(*sizes)
    buffer = Buffer(group, num_rdma_bytes=num_bytes, low_latency_mode=True)
    rows, counts, handle, _, hook = buffer.low_latency_dispatch(
        x, topk_idx, MAX_TOKENS, NUM_EXPERTS, use_fp8=False, return_recv_hook=True
    )
    # Kernels that are launched here run while the rows travel.
    hook()
    # rows [E / R, R * MAX_TOKENS, H]: of expert e, the first counts[e] are tokens.
    y = rows * 2  # what the experts compute
    out, _, _ = buffer.low_latency_combine(y, topk_idx, topk_weights, handle)
    buffer.check()
    buffer.destroy()
    want = x.float() * 2 * topk_weights.sum(1, keepdim=True)
    torch.testing.assert_close(out.float(), want, rtol=1e-2, atol=1e-2)
    return counts.tolist()


if __name__ == "__main__":
    with RankPool(2, "cuda" if torch.cuda.is_available() else "cpu") as pool:
        counts = pool.run(run)
    print(f"Rows of each expert, by rank: {counts}; the combined sums are right.")
