"""Code that was written for DeepEP runs on this engine, imported under DeepEP's name.

python examples/08_deep_ep.py
"""

import subprocess
import sys

import torch

from moe_engine.emulation import RankPool


def run(group):
    import deep_ep  # moe_engine's, from the folder that is put on the path below

    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.ones(4, 16, device=device)
    topk_idx = torch.tensor([[0], [1], [1], [0]], device=device, dtype=deep_ep.topk_idx_t)
    config = deep_ep.Buffer.get_dispatch_config(group.size())
    num_bytes = config.get_nvl_buffer_size_hint(x.shape[1] * x.element_size(), group.size())
    buffer = deep_ep.Buffer(group, num_bytes)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk_idx, 2)
    recv_x, *_, handle, _ = buffer.dispatch(
        x,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=topk_idx,
        topk_weights=torch.ones(4, 1, device=device),
        config=config,
    )
    out, _, _ = buffer.combine(recv_x, handle)
    torch.testing.assert_close(out, x)
    return len(recv_x)


if __name__ == "__main__":
    command = [sys.executable, "-m", "moe_engine", "deep-ep-path"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    sys.path.insert(0, found.stdout.strip())  # in a shell: export PYTHONPATH=$(...):$PYTHONPATH
    with RankPool(2, "cuda" if torch.cuda.is_available() else "cpu") as pool:
        print(f"The ranks received {pool.run(run)} rows, and the combined sums are right.")
