"""How inference servers, and DeepEP's own test, make low-latency calls, against the oracle."""

from __future__ import annotations

import low_latency_cases as low_latency
import pytest
import torch
from deep_ep_cases import deep_ep
from low_latency_cases import EXPERTS, HIDDEN, TOPK, make_inputs, run_experts, to_cpu, to_device

from moe_engine.emulation import PerRank

MAX_TOKENS = 3


def run_client(pool, client, *args, num_ranks=2, kind="holes", num_tokens=(MAX_TOKENS, 2, 0)):
    inputs = make_inputs(num_ranks, num_tokens, HIDDEN, EXPERTS, TOPK, kind)
    results = pool.run(client, *args, *map(PerRank, inputs), num_ranks=num_ranks)
    return results, inputs


# --- vLLM ------------------------------------------------------------------------------------


def vllm(group, use_fp8, use_ue8m0, graph, x, idx, w):
    """Its prepare and finalize, the tokens of two micro-batches; on GPUs also in a CUDA graph."""
    cpu_group = torch.distributed.new_group(list(range(group.size())), backend="gloo")
    x, idx, w = to_device(x, idx, w)
    cls = deep_ep().Buffer
    num_rdma_bytes = cls.get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank=MAX_TOKENS,
        hidden=HIDDEN,
        num_ranks=group.size(),
        num_experts=EXPERTS,
    )
    buffer = cls(
        group=cpu_group,
        num_nvl_bytes=1 << 20,
        num_rdma_bytes=num_rdma_bytes,
        low_latency_mode=True,
        num_qps_per_rank=EXPERTS // group.size(),
        allow_nvlink_for_low_latency_mode=True,
        allow_mnnvl=False,
        explicitly_destroy=True,
        enable_shrink=False,
    )

    def layer():
        handles = [None, None]
        outputs = [torch.empty_like(x) for _ in range(2)]
        prepared = []
        for number in range(2):
            expert_x, num_tokens, handles[number], _, hook = buffer.low_latency_dispatch(
                x,
                idx,
                MAX_TOKENS,
                EXPERTS,
                use_fp8=use_fp8,
                round_scale=use_ue8m0,
                use_ue8m0=use_ue8m0,
                async_finish=False,
                return_recv_hook=True,
            )
            prepared.append((hook, expert_x, num_tokens))
        found = []
        for number, (hook, expert_x, num_tokens) in enumerate(prepared):
            hook()
            y = run_experts(expert_x, group.rank())
            _, _, finish = buffer.low_latency_combine(
                y,
                idx,
                w,
                handles[number],
                async_finish=False,
                zero_copy=False,
                return_recv_hook=number == 1,
                out=outputs[number],
            )
            if finish is not None:
                finish()
            found.append(
                low_latency.result(expert_x, num_tokens, handles[number], y, outputs[number])
            )
        return found

    found = layer()
    if graph and x.is_cuda:
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            found = layer()
        captured.replay()
    buffer.check()
    torch.distributed.barrier(cpu_group)
    buffer.destroy()
    return [to_cpu(part) for part in found]


@pytest.mark.parametrize(
    ("use_fp8", "use_ue8m0", "form"),
    [(False, False, "bf16"), (True, False, "fp8"), (True, True, "ue8m0")],
)
def test_vllm(pool, use_fp8, use_ue8m0, form):
    for graph in (False, True) if pool.device == "cuda" else (False,):
        num_ranks = pool.num_ranks if pool.device == "cuda" else 2
        results, inputs = run_client(
            pool, vllm, use_fp8, use_ue8m0, graph, kind="duplicates", num_ranks=num_ranks
        )
        for number in range(2):
            at_batch = [found[number] for found in results]
            low_latency.check(at_batch, *inputs, MAX_TOKENS, EXPERTS, form)


# --- sglang and lmdeploy: one Buffer for both modes --------------------------------------------


def both_modes(group, hidden_bytes, **more):
    """A Buffer whose sizes are the hints of both modes, the low-latency one's positional."""
    cls = deep_ep().Buffer
    nvl = 0
    for config in (cls.get_dispatch_config(group.size()), cls.get_combine_config(group.size())):
        nvl = max(nvl, config.get_nvl_buffer_size_hint(hidden_bytes, group.size()))
    rdma = cls.get_low_latency_rdma_size_hint(MAX_TOKENS, HIDDEN, group.size(), EXPERTS)
    buffer = cls(group, nvl, rdma, low_latency_mode=True, **more)
    assert buffer.low_latency_mode
    assert (buffer.num_nvl_bytes, buffer.num_rdma_bytes) == (nvl, rdma)
    assert (buffer.group, buffer.group_size) == (group, group.size())
    return buffer


def prefill(buffer, x, idx, w):
    """A normal round trip whose sum is x times the ranks that each token went to."""
    flags = {"async_finish": True, "allocate_on_comm_stream": True}
    per_rank, per_rdma_rank, per_expert, in_rank, event = buffer.get_dispatch_layout(
        idx, EXPERTS, previous_event=type(buffer).capture(), **flags
    )
    recv_x, _, _, _, handle, event = buffer.dispatch(
        x,
        topk_idx=idx,
        topk_weights=w,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_rdma_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        previous_event=event,
        expert_alignment=128,
        config=None,
        **flags,
    )
    event.current_stream_wait()
    out, _, event = buffer.combine(recv_x, handle, previous_event=type(buffer).capture(), **flags)
    event.current_stream_wait()
    assert torch.equal(out, (x.float() * in_rank.sum(1, keepdim=True)).bfloat16())


def sglang(group, use_fp8, use_hook, x, idx, w):
    x, idx, w = to_device(x, idx, w)
    buffer = both_modes(group, 2 * HIDDEN, num_qps_per_rank=12, allow_mnnvl=True)
    found = []
    for _ in range(2):
        prefill(buffer, x, idx, w)
        buffer.clean_low_latency_buffer(MAX_TOKENS, HIDDEN, EXPERTS)
        recv_x, counts, handle, event, hook = buffer.low_latency_dispatch(
            x,
            idx,
            MAX_TOKENS,
            EXPERTS,
            use_fp8=use_fp8,
            async_finish=not use_hook,
            return_recv_hook=use_hook,
            round_scale=False,
            use_ue8m0=False,
        )
        hook() if use_hook else event.current_stream_wait()
        y = run_experts(recv_x, group.rank())
        out, event, hook = buffer.low_latency_combine(
            x=y,
            topk_idx=idx,
            topk_weights=w,
            handle=handle,
            async_finish=not use_hook,
            return_recv_hook=use_hook,
        )
        hook() if use_hook else event.current_stream_wait()
        found.append(to_cpu(low_latency.result(recv_x, counts, handle, y, out)))
    buffer.check()
    torch.distributed.barrier(group)
    return found


@pytest.mark.parametrize("use_fp8", [False, True])
@pytest.mark.parametrize("use_hook", [False, True])
def test_sglang(pool, use_fp8, use_hook):
    results, inputs = run_client(pool, sglang, use_fp8, use_hook)
    for number in range(2):
        at_call = [found[number] for found in results]
        low_latency.check(at_call, *inputs, MAX_TOKENS, EXPERTS, "fp8" if use_fp8 else "bf16")


def lmdeploy(group, x, idx, w):
    x, idx, w = to_device(x, idx, w)
    cls = deep_ep().Buffer
    cls.set_num_sms(cls.num_sms)
    buffer = both_modes(
        group, 2 * HIDDEN, num_qps_per_rank=6, allow_mnnvl=True, explicitly_destroy=True
    )
    prefill(buffer, x, idx, w.to(torch.float32))
    found = []
    for use_hook in (False, True):
        buffer.clean_low_latency_buffer(MAX_TOKENS, HIDDEN, EXPERTS)
        recv_x, counts, handle, event, hook = buffer.low_latency_dispatch(
            x,
            idx,
            MAX_TOKENS,
            EXPERTS,
            use_fp8=True,
            async_finish=not use_hook,
            return_recv_hook=use_hook,
        )
        hook() if use_hook else event.current_stream_wait()
        y = run_experts(recv_x, group.rank())
        out, event, hook = buffer.low_latency_combine(
            y, idx, w, handle, async_finish=not use_hook, return_recv_hook=use_hook
        )
        hook() if use_hook else event.current_stream_wait()
        found.append(to_cpu(low_latency.result(recv_x, counts, handle, y, out)))
    torch.distributed.barrier(group)
    buffer.destroy()
    return found


def test_lmdeploy(pool):
    results, inputs = run_client(pool, lmdeploy)
    for number in range(2):
        at_call = [found[number] for found in results]
        low_latency.check(at_call, *inputs, MAX_TOKENS, EXPERTS, "fp8")


# --- DeepEP's own test -------------------------------------------------------------------------

FORMS = "bf16", "fp8", "rounded", "ue8m0"
ALL_FLAGS = [(use_hook, form) for use_hook in (False, True) for form in FORMS]
FEW_FLAGS = list(zip((False, True, True, False), FORMS, strict=True))


def calc_difference(out, expected):
    """1 - 2 <a, b> / (<a, a> + <b, b>) of a = out + 1 and b = expected + 1, in fp64."""
    a, b = out.double() + 1, expected.double() + 1
    return float(1 - 2 * (a * b).sum() / (a * a + b * b).sum())


def own_test(group, flags, all_idx, w):
    """Constant rows that name their rank and token, the statistics, each handle combined twice, by
    copy and from the memory that it leaves from; its checks, in this order."""
    rank, num_ranks, num_local = group.rank(), group.size(), EXPERTS // group.size()
    idx, w = to_device(all_idx[rank], w)
    all_idx = torch.stack(all_idx).to(idx.device)
    num_tokens = len(idx)
    x = torch.full((num_tokens, HIDDEN), rank - 128.0, device=idx.device)
    x[:, -128:] = torch.arange(num_tokens, device=idx.device)[:, None]
    x = x.bfloat16()
    buffer = deep_ep().Buffer(
        group,
        num_rdma_bytes=deep_ep().Buffer.get_low_latency_rdma_size_hint(
            num_tokens, HIDDEN, num_ranks, EXPERTS
        ),
        low_latency_mode=True,
        num_qps_per_rank=num_local,
        allow_nvlink_for_low_latency_mode=True,
        explicitly_destroy=True,
        allow_mnnvl=False,
    )
    for number, (use_hook, form) in enumerate(flags):
        use_fp8 = form != "bf16"
        for _ in range(number % 2 + 1):
            seen = torch.zeros(num_local, dtype=torch.int, device=idx.device)
            recv_x, counts, handle, event, hook = buffer.low_latency_dispatch(
                x,
                idx,
                num_tokens,
                EXPERTS,
                cumulative_local_expert_recv_stats=seen,
                async_finish=not use_hook,
                return_recv_hook=use_hook,
                **({"use_fp8": True} | low_latency.FORMS[form]),
            )
            hook() if use_hook else event.current_stream_wait()
        back = low_latency.cast_back(*recv_x) if use_fp8 else recv_x.clone()
        for local in range(num_local):
            expert, count = rank * num_local + local, int(counts[local])
            src_info, layout_range = handle[0][local, :count], handle[1][local]
            assert int(seen[local]) == count == int((layout_range & 0xFFFFFFFF).sum())
            assert count == int((all_idx == expert).sum())
            rows = back[local, :count].float()
            assert torch.equal(rows[:, :-128].amin(1), rows[:, :-128].amax(1))
            rounded = form in ("rounded", "ue8m0")
            if not rounded:
                assert rows[:, -128:].eq(src_info[:, None]).all()
            elif count:
                assert calc_difference(rows[:, -1], src_info) < 0.007
            for source in range(num_ranks):
                begin, length = int(layout_range[source]) >> 32, int(layout_range[source]) % 2**32
                assert length == int((all_idx[source] == expert).sum())
                found = rows[begin : begin + length, :-128]
                want = torch.full_like(found, source - 128.0)
                assert torch.allclose(found, want, rtol=2**-4 if rounded else 0, atol=0)
        for zero_copy in (False, True):
            if zero_copy:
                buffer.get_next_low_latency_combine_buffer(handle)[:, :, :] = back
            out = torch.empty_like(x)
            combined, event, hook = buffer.low_latency_combine(
                back,
                idx,
                w,
                handle,
                use_logfmt=False,
                async_finish=not use_hook,
                zero_copy=zero_copy,
                return_recv_hook=use_hook,
                out=out,
            )
            hook() if use_hook else event.current_stream_wait()
            want = x.float() * torch.where(idx < 0, 0.0, w).sum(1, keepdim=True)
            assert not combined.isnan().any()
            assert combined.data_ptr() == out.data_ptr()
            assert calc_difference(combined, want) < (9e-4 if use_fp8 else 1e-5)
    buffer.check()
    torch.distributed.barrier(group)
    buffer.destroy()


@pytest.mark.parametrize(
    "flags", [FEW_FLAGS, pytest.param(ALL_FLAGS, marks=pytest.mark.slow)], ids=len
)
def test_deep_eps_own_checks(pool, flags):
    num_ranks = min(pool.num_ranks, 4 if pool.device == "cuda" else 2)
    generator = torch.Generator().manual_seed(0)
    _, idx, _ = make_inputs(num_ranks, [MAX_TOKENS], HIDDEN, EXPERTS, TOPK, "holes")
    w = PerRank(torch.randn(ids.shape, generator=generator).abs() for ids in idx)
    pool.run(own_test, flags, idx, w, num_ranks=num_ranks)
