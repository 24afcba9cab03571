"""What vLLM's DeepEP backends call in a layer: high throughput, low latency, and a V2 decode step.

python examples/11_vllm_calls.py
"""

import subprocess
import sys

import torch

from moe_engine.emulation import RankPool

T, H, E, K = 4, 128, 4, 2  # tokens of a rank, hidden size, experts, top-k


def run(group):
    from deep_ep import Buffer, ElasticBuffer  # moe_engine's, from the folder put on the path below

    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(T, H, device=device).bfloat16()
    w, idx = torch.rand(T, E, device=device).softmax(1).topk(K)
    first = group.rank() * E // group.size() + 1  # expert e multiplies by e + 1
    gloo = torch.distributed.new_group(range(group.size()), backend="gloo")

    # deepep_high_throughput: rows by token, which the experts weight and add up themselves.
    buffer = Buffer(gloo, num_nvl_bytes=1 << 20, explicitly_destroy=True)
    per_rank, per_rdma, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, num_experts=E)
    sent = per_rank, per_rdma, in_rank, per_expert, idx, w
    rows, ids, weights, _, handle, event = buffer.dispatch(x, None, *sent, async_finish=True)
    event.current_stream_wait()
    y = rows * (weights * (ids + first)).sum(1, keepdim=True)
    prefill, _, event = buffer.combine(x=y.bfloat16(), handle=handle, async_finish=True)
    event.current_stream_wait()

    # deepep_low_latency: rows by expert in fixed shapes; combine weights them.
    num_bytes = Buffer.get_low_latency_rdma_size_hint(T, H, group.size(), E)
    buffer = Buffer(gloo, num_rdma_bytes=num_bytes, low_latency_mode=True, explicitly_destroy=True)
    how, decode = dict(use_fp8=False, return_recv_hook=True), torch.empty_like(x)
    rows, _, handle, _, hook = buffer.low_latency_dispatch(x, idx, T, E, **how)
    hook()
    y = rows * (first + torch.arange(len(rows), device=device))[:, None, None]
    buffer.low_latency_combine(y, idx, w, handle, out=decode)

    # deepep_v2 with CUDA graphs: rows by token, as many as there can be; the host does not wait.
    buffer = ElasticBuffer(gloo, num_max_tokens_per_rank=T, hidden=H, num_topk=K)
    rows, ids, weights, handle, _ = buffer.dispatch(x, idx, w, num_experts=E, do_cpu_sync=False)
    y = rows * torch.where(ids >= 0, weights * (ids + first), 0).sum(1, keepdim=True)
    v2, _, _ = buffer.combine(x=y.bfloat16(), handle=handle, topk_weights=None)

    want = x.float() * (w * (idx + 1)).sum(1, keepdim=True)
    for out in (prefill, decode, v2):
        torch.testing.assert_close(out.float(), want, rtol=0.03, atol=0.03)


if __name__ == "__main__":
    sys.path.insert(0, subprocess.getoutput(f"{sys.executable} -m moe_engine deep-ep-path"))
    with RankPool(2, "cuda" if torch.cuda.is_available() else "cpu") as pool:
        pool.run(run)
    print("The sums of vLLM's three DeepEP backends are right on both ranks.")
