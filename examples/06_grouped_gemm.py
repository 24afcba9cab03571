"""A grouped GEMM multiplies the rows of each expert by its weights, with gradients, on one rank.

python examples/06_grouped_gemm.py
"""

import torch

from moe_engine.emulation import RankPool
from moe_engine.grouped_gemm import grouped_gemm

COUNTS = 5, 0, 3  # rows of each expert


def run(_):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    offsets = torch.tensor([0, *COUNTS], device=device).cumsum(0).int()
    x = torch.randn(sum(COUNTS), 32, device=device, requires_grad=True)
    w = torch.randn(len(COUNTS), 2 * 16, 32, device=device, requires_grad=True)

    y = grouped_gemm(x, w, offsets, activation="swiglu")  # silu(gate) * up, [rows, 16]
    dx, dw = torch.autograd.grad(y.square().sum(), (x, w))

    gate, up = torch.cat([rows @ w[e].T for e, rows in enumerate(x.split(COUNTS))]).chunk(2, 1)
    want = torch.nn.functional.silu(gate) * up
    want_dx, want_dw = torch.autograd.grad(want.square().sum(), (x, w))
    for have, expected in ((y, want), (dx, want_dx), (dw, want_dw)):
        torch.testing.assert_close(have, expected, rtol=1e-3, atol=1e-3)


if __name__ == "__main__":
    # With a GPU no pool is needed. Without one, the rank of the pool interprets the kernels.
    with RankPool(1, "cuda" if torch.cuda.is_available() else "cpu") as pool:
        pool.run(run)
    print("The product and both gradients are right.")
