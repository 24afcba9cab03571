"""A rank that makes no call: the others raise PeerTimeout after the deadline, which names it.

python examples/05_lost_rank.py
"""

import torch

from moe_engine import Buffer, PeerTimeout
from moe_engine.emulation import RankPool


def run(group):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.ones(4, 16, device=device)
    topk_idx = torch.zeros(4, 1, dtype=torch.int64, device=device)
    buffer = Buffer(group, num_nvl_bytes=1 << 20)
    buffer.warmup(hidden=16, num_experts=2, num_topk=1, dtype=x.dtype)
    if group.rank() == 1:
        return None  # it does something else
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, 2)
    try:
        buffer.dispatch(x, None, per_rank, None, in_rank, per_expert, topk_idx, topk_idx.float())
        buffer.check()
    except PeerTimeout as error:
        return str(error)
    return None


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with RankPool(2, device, env={"MOE_ENGINE_TIMEOUT_S": "10"}) as pool:
        text, _ = pool.run(run)
    print(text)
    assert "waited 10 s for rank 1" in text
    print("The right rank is named.")
