"""The layout of a dispatch: how many of a rank's four tokens go to each rank and each expert.

python examples/00_routing.py
"""

import torch

from moe_engine import Buffer
from moe_engine.emulation import RankPool

NUM_EXPERTS = 4  # 0 and 1 on rank 0, 2 and 3 on rank 1


def run(group):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    topk_idx = torch.tensor([[0, 3], [2, 3], [3, 0], [1, -1]], device=device)  # -1: not routed
    buffer = Buffer(group, num_nvl_bytes=1 << 20)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, NUM_EXPERTS)
    buffer.check()
    buffer.destroy()
    return per_rank.tolist(), per_expert.tolist(), in_rank.tolist()


if __name__ == "__main__":
    with RankPool(2, "cuda" if torch.cuda.is_available() else "cpu") as pool:
        (per_rank, per_expert, in_rank), _ = pool.run(run)
    print(f"tokens for each rank: {per_rank}, for each expert: {per_expert}")
    # Token 1 has two experts on rank 1, and is sent to it once.
    assert (per_rank, per_expert) == ([3, 3], [2, 1, 1, 3])
    assert in_rank == [[True, True], [False, True], [True, True], [True, False]]
    print("The counts are right.")
