"""Train a router and experts on two ranks: the loss falls, and the ranks agree with one.

python examples/10_training.py
"""

import torch
import torch.distributed as dist

from moe_engine import Buffer, MoEFeedForward
from moe_engine.emulation import RankPool

TOKENS, HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOPK, STEPS = 16, 16, 8, 4, 2, 4


def run(group):
    """The loss of all ranks at each step."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    num_ranks, rank = group.size(), group.rank()
    torch.manual_seed(0)  # all ranks draw the same, and use their share of it
    x, target = torch.randn(2, TOKENS, HIDDEN, device=device)[:, rank::num_ranks]
    up = torch.randn(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN, device=device) / 4
    down = torch.randn(NUM_EXPERTS, HIDDEN, INTERMEDIATE, device=device) / 4
    router = torch.nn.Linear(HIDDEN, NUM_EXPERTS, device=device)

    buffer = Buffer.for_tokens(group, TOKENS, HIDDEN, NUM_EXPERTS, TOPK, dtype=x.dtype)
    num_local = NUM_EXPERTS // num_ranks
    sizes = num_local, HIDDEN, INTERMEDIATE
    experts = MoEFeedForward(*sizes, buffer, x.dtype, requires_grad=True).to(device)
    with torch.no_grad():
        experts.gate_up_proj.copy_(up[rank * num_local :][:num_local])
        experts.down_proj.copy_(down[rank * num_local :][:num_local])
    optimizer = torch.optim.SGD([*router.parameters(), *experts.parameters()], lr=0.02)
    losses = []
    for _ in range(STEPS):
        weights, ids = router(x).softmax(-1).topk(TOPK)
        loss = (experts(x, ids, weights) - target).square().sum()
        loss.backward()
        for one in router.parameters():  # the experts' gradients are of all ranks' tokens already
            dist.all_reduce(one.grad, group=group)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total, group=group)
        losses.append(float(total))
    buffer.destroy()
    return losses


if __name__ == "__main__":
    with RankPool(2, "cuda" if torch.cuda.is_available() else "cpu") as pool:
        on_two, on_one = pool.run(run)[0], pool.run(run, num_ranks=1)[0]
    assert on_two[-1] < on_two[0]
    assert torch.allclose(torch.tensor(on_two), torch.tensor(on_one), rtol=1e-4)
    print(f"The gradients are right: the loss falls from {on_two[0]:.1f} to {on_two[-1]:.1f}.")
