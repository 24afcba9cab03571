"""What sglang's DeepEP backends call in a layer: a prefill and a decode step, and one of V2.

python examples/12_sglang_calls.py
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

    # deepep: one Buffer for both modes. In a prefill the experts weight and add up the rows.
    num_bytes = Buffer.get_low_latency_rdma_size_hint(T, H, group.size(), E)
    buffer = Buffer(group, 1 << 20, num_bytes, low_latency_mode=True)
    how = dict(async_finish=True, allocate_on_comm_stream=True, previous_event=Buffer.capture())
    per_rank, per_rdma, per_expert, in_rank, event = buffer.get_dispatch_layout(idx, E, **how)
    sent, how["previous_event"] = (per_rank, per_rdma, in_rank, per_expert, idx, w), event
    rows, ids, weights, _, handle, event = buffer.dispatch(x, None, *sent, 128, **how)
    event.current_stream_wait()
    y = (rows * (weights * (ids + first)).sum(1, keepdim=True)).bfloat16()
    prefill, _, event = buffer.combine(y, handle, **how | {"previous_event": Buffer.capture()})
    event.current_stream_wait()
    # Its decode step: rows by expert in fixed shapes; combine weights them.
    buffer.clean_low_latency_buffer(T, H, E)
    how = dict(use_fp8=False, return_recv_hook=True)
    rows, _, handle, _, hook = buffer.low_latency_dispatch(x, idx, T, E, **how)
    hook()
    y = rows * (first + torch.arange(len(rows), device=device))[:, None, None]
    decode, _, hook = buffer.low_latency_combine(y, idx, w, handle, return_recv_hook=True)
    hook()
    # deepep_v2 in decode: rows by expert, as many as there can be; in a prefill the host waits.
    buffer = ElasticBuffer(group, num_max_tokens_per_rank=T, hidden=H, num_topk=K)
    how = dict(num_experts=E, expert_alignment=128, do_expand=True, do_cpu_sync=False)
    rows, _, weights, handle, _ = buffer.dispatch(x, idx, w, **how)
    begins = -(-handle.psum_num_recv_tokens_per_expert[:-1] // 128) * 128
    local = (torch.arange(len(rows), device=device)[:, None] >= begins).sum(1)
    v2 = buffer.combine((rows * (weights * (first + local))[:, None]).bfloat16(), handle=handle)[0]
    want = x.float() * (w * (idx + 1)).sum(1, keepdim=True)
    for out in (prefill, decode, v2):
        torch.testing.assert_close(out.float(), want, rtol=0.03, atol=0.03)


if __name__ == "__main__":
    sys.path.insert(0, subprocess.getoutput(f"{sys.executable} -m moe_engine deep-ep-path"))
    with RankPool(2, "cuda" if torch.cuda.is_available() else "cpu") as pool:
        pool.run(run)
    print("The sums of sglang's prefill and of its two decode steps are right on both ranks.")
