"""How frameworks call DeepEP V2, each with its own keywords, against the oracle."""

from __future__ import annotations

import cases
import elastic_cases
import pytest
import torch
from deep_ep_cases import deep_ep
from elastic_cases import EXPERTS, HIDDEN, MOST_TOKENS, TOPK, expected, run_client, to_cpu

from moe_engine import reference

BOTH = pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])


def weighted(rows, weights):
    """What stands for experts: rows times their weights, and fp32 in between."""
    return (rows.float() * weights[:, None] * 2).to(rows.dtype)


def check_layer(results, inputs, received):
    """Each rank's `out`, `dx` and `dw` are those of rows weighted by expert, then summed; tolerance
    is a rounding to bf16 of each of K rows."""
    for rank, (x, idx, w) in enumerate(zip(*inputs, strict=True)):
        valid = torch.where(idx >= 0, w, 0.0)
        out = 2 * x.float() * valid.sum(1, keepdim=True)
        torch.testing.assert_close(results[rank]["out"].float(), out, rtol=0.03, atol=0.03)
        if "dx" in results[rank]:
            dx = 2 * valid.sum(1, keepdim=True).expand(x.shape)
            torch.testing.assert_close(results[rank]["dx"].float(), dx, rtol=0.03, atol=0.03)
            dw = torch.where(idx >= 0, 2 * x.float().sum(1, keepdim=True), 0.0)
            torch.testing.assert_close(results[rank]["dw"], dw, rtol=0.03, atol=0.3)


# --- torchtitan ----------------------------------------------------------------------------------


class TitanDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, buffer, x, idx, w, handles):
        recv_x, recv_idx, recv_w, ctx.handle, _ = buffer.dispatch(
            x,
            topk_idx=idx,
            topk_weights=w,
            num_experts=EXPERTS,
            num_max_tokens_per_rank=MOST_TOKENS,
            num_sms=24,
            do_expand=False,
            do_cpu_sync=True,
        )
        ctx.buffer = buffer
        handles.append(ctx.handle)
        ctx.mark_non_differentiable(recv_idx)
        return recv_x, recv_idx, recv_w

    @staticmethod
    def backward(ctx, grad_x, _, grad_w):
        dx, dw, _ = ctx.buffer.combine(grad_x, handle=ctx.handle, topk_weights=grad_w.float())
        return None, dx, None, dw, None


class TitanCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, buffer, x, handle):
        ctx.buffer, ctx.handle = buffer, handle
        out, _, event = buffer.combine(x, handle=handle, async_with_compute_stream=True)
        event.current_stream_wait()
        return out

    @staticmethod
    def backward(ctx, grad):  # not contiguous where it comes from a sum
        handle = ctx.handle
        rows, _, _, _, _ = ctx.buffer.dispatch(
            grad, handle=handle, num_sms=handle.num_sms, do_cpu_sync=False
        )
        return None, rows, None


def torchtitan(group, x, idx, w):
    cls = deep_ep().ElasticBuffer
    sizes = dict(num_topk=TOPK, use_fp8_dispatch=False)
    num_bytes = cls.get_buffer_size_hint(group, MOST_TOKENS, HIDDEN, **sizes)
    buffer = cls(
        group,
        num_bytes=num_bytes,
        num_max_tokens_per_rank=MOST_TOKENS,
        hidden=HIDDEN,
        deterministic=True,
        explicitly_destroy=True,
        **sizes,
    )
    assert (buffer.group, buffer.num_bytes) == (group, num_bytes)
    x, w, idx = (part.to(cases.device()) for part in (x, w, idx))
    x, w, handles = x.requires_grad_(), w.requires_grad_(), []
    recv_x, recv_idx, recv_w = TitanDispatch.apply(buffer, x, idx, w, handles)
    row_w = torch.where(recv_idx >= 0, recv_w, 0.0).sum(1)
    out = TitanCombine.apply(buffer, weighted(recv_x, row_w), handles[0])
    out.sum().backward()
    counts = handles[0].num_recv_tokens_per_expert_list
    with torch.inference_mode():
        rows, _, row_w, handle, _ = buffer.dispatch(
            x.detach(), topk_idx=idx, topk_weights=w, num_experts=EXPERTS,
            num_max_tokens_per_rank=MOST_TOKENS, do_expand=True, do_cpu_sync=False,
        )  # fmt: skip
        inferred, _, _ = buffer.combine(weighted(rows, row_w), handle=handle)
    buffer.check()
    buffer.destroy()
    result = dict(out=out.detach(), dx=x.grad, dw=w.grad, counts=counts, inferred=inferred)
    return to_cpu(result)


@BOTH
def test_torchtitan(pool, num_ranks):
    results, inputs = run_client(pool, torchtitan, num_ranks=num_ranks)
    received, places = expected(inputs)
    check_layer(results, inputs, received)
    check_layer([{"out": one["inferred"]} for one in results], inputs, received)
    for have, place in zip(results, places, strict=True):
        assert have["counts"] == place.num_per_expert.tolist()


# --- DeepSpeed AutoEP ----------------------------------------------------------------------------


class SpeedDispatch(torch.autograd.Function):
    """With a `handle`, as activation checkpointing recomputes the forward."""

    @staticmethod
    def forward(ctx, buffer, x, idx, w, handles):
        if handles:
            handle = handles[0]
            rows, _, row_w, again, _ = buffer.dispatch(
                x, topk_weights=w.float(), handle=handle, num_sms=12, do_expand=handle.do_expand
            )
            assert again is handle
        else:
            rows, _, row_w, handle, _ = buffer.dispatch(
                x,
                topk_idx=idx.to(deep_ep().topk_idx_t),
                topk_weights=w.float(),
                num_experts=EXPERTS,
                do_expand=True,
                expert_alignment=1,
                num_sms=12,
            )
            handles.append(handle)
        ctx.buffer, ctx.handle = buffer, handle
        return rows, row_w

    @staticmethod
    def backward(ctx, grad_rows, grad_w):
        more = dict(handle=ctx.handle, topk_weights=grad_w.contiguous(), num_sms=12)
        dx, dw, _ = ctx.buffer.combine(grad_rows.contiguous(), **more)
        return None, dx, None, dw, None


class SpeedCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, buffer, rows, handle):
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.combine(rows, handle=handle, num_sms=12)[0]

    @staticmethod
    def backward(ctx, grad):
        handle = ctx.handle
        rows, _, no_weights, _, _ = ctx.buffer.dispatch(
            grad.contiguous(), handle=handle, num_sms=12, do_expand=handle.do_expand
        )
        assert no_weights is None
        return None, rows, None


def deepspeed(group, replays, x, idx, w):
    buffer = deep_ep().ElasticBuffer(
        group,
        num_max_tokens_per_rank=MOST_TOKENS,
        hidden=HIDDEN,
        num_topk=TOPK,
        use_fp8_dispatch=False,
        num_allocated_qps=16,
        allow_hybrid_mode=True,
        explicitly_destroy=True,
    )
    assert buffer.get_theoretical_num_qps(12) == 16
    x, w, idx = (part.to(cases.device()) for part in (x, w, idx))
    x, w, handles = x.requires_grad_(), w.requires_grad_(), []

    def layer(x, w):
        rows, row_w = SpeedDispatch.apply(buffer, x, idx, w, handles)
        handle = handles[0]
        assert len(rows) == handle.num_expanded_tokens
        ends = handle.psum_num_recv_tokens_per_expert
        assert int(ends[-1]) == handle.num_expanded_tokens
        return SpeedCombine.apply(buffer, weighted(rows, row_w), handle)

    if replays:
        out = torch.utils.checkpoint.checkpoint(layer, x, w, use_reentrant=False)
    else:
        out = layer(x, w)
    out.sum().backward()
    handle = handles[0]
    assert handle.do_expand
    assert torch.equal(handle.topk_idx, idx)
    buffer.check()
    buffer.destroy()
    ends = handle.psum_num_recv_tokens_per_expert
    return to_cpu(dict(out=out.detach(), dx=x.grad, dw=w.grad, ends=ends))


@pytest.mark.parametrize(
    ("replays", "num_ranks"), cases.slow_unless([(True, 2)], [True, False], [2, 4])
)
def test_deepspeed(pool, replays, num_ranks):
    results, inputs = run_client(pool, deepspeed, replays, num_ranks=num_ranks)
    received, places = expected(inputs)
    check_layer(results, inputs, received)
    for have, place in zip(results, places, strict=True):
        assert torch.equal(have["ends"], place.psum_per_expert)


# --- vLLM (deepep_v2) ----------------------------------------------------------------------------


def vllm(group, reduces, x, idx, w):
    x, idx, w = (part.to(cases.device()) for part in (x, idx, w))
    buffer = deep_ep().ElasticBuffer(
        group=group,
        num_max_tokens_per_rank=MOST_TOKENS,
        hidden=HIDDEN,
        num_topk=TOPK,
        use_fp8_dispatch=False,
        allow_hybrid_mode=False,
        prefer_overlap_with_compute=False,
        allow_multiple_reduction=reduces,
        explicitly_destroy=True,
    )
    assert buffer.get_theoretical_num_sms(EXPERTS, TOPK) % 2 == 0
    # A prefill, rows by expert.
    rows, _, row_w, handle, _ = buffer.dispatch(
        x=x,
        topk_idx=idx,
        topk_weights=w,
        num_experts=EXPERTS,
        num_max_tokens_per_rank=None,
        do_expand=True,
        do_cpu_sync=True,
        async_with_compute_stream=False,
    )
    prefill, none, _ = buffer.combine(
        x=weighted(rows, row_w),
        handle=handle,
        topk_weights=None,
        async_with_compute_stream=False,
        allocate_on_comm_stream=False,
    )
    assert none is None
    counts = handle.num_recv_tokens_per_expert_list

    # A step of decode, as in a CUDA graph: 32 is a power of two that no rank exceeds.
    def decode():
        recv_x, recv_idx, recv_w, handle, _ = buffer.dispatch(
            x=x,
            topk_idx=idx,
            topk_weights=w,
            num_experts=EXPERTS,
            num_max_tokens_per_rank=32,
            do_expand=False,
            do_cpu_sync=False,
            async_with_compute_stream=False,
        )
        assert len(recv_x) == 32 * group.size()
        assert handle.num_recv_tokens_per_expert_list == []
        sums = weighted(recv_x, torch.where(recv_idx >= 0, recv_w, 0.0).sum(1))
        out, _, _ = buffer.combine(x=sums, handle=handle, topk_weights=None)
        return out, handle.psum_num_recv_tokens_per_scaleup_rank

    decoded, ends = decode()
    if x.is_cuda:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            decoded, ends = decode()
        for _ in range(2):
            graph.replay()
    buffer.check()
    torch.distributed.barrier(group)
    buffer.destroy()
    return to_cpu(dict(out=prefill, decoded=decoded, counts=counts, num_rows=ends[-1]))


@pytest.mark.parametrize(
    ("reduces", "num_ranks"), cases.slow_unless([(False, 2)], [True, False], [2, 4])
)
def test_vllm(pool, reduces, num_ranks):
    results, inputs = run_client(pool, vllm, reduces, num_ranks=num_ranks)
    received, places = expected(inputs)
    check_layer(results, inputs, received)
    check_layer([{"out": one["decoded"]} for one in results], inputs, received)
    for have, want, place in zip(results, received, places, strict=True):
        assert have["counts"] == place.num_per_expert.tolist()
        assert int(have["num_rows"]) == len(want.x)


# --- sglang (deepep_v2) --------------------------------------------------------------------------


def sglang(group, expand, x, idx, w):
    """fp8 rows with packed scales, by column as DeepGEMM wants them; no rank sends nothing: it
    gives a row that goes nowhere."""
    x, idx, w = (part.to(cases.device()) for part in (x, idx, w))
    if len(x) == 0:
        x, w = x.new_zeros(1, HIDDEN), w.new_zeros(1, TOPK)
        idx = idx.new_full((1, TOPK), -1)
    buffer = deep_ep().ElasticBuffer(
        group,
        num_max_tokens_per_rank=MOST_TOKENS,
        hidden=HIDDEN,
        num_topk=TOPK,
        use_fp8_dispatch=True,
        allow_hybrid_mode=False,
        sl_idx=0,
        prefer_overlap_with_compute=False,
    )
    scales = torch.arange(2 * len(x), dtype=torch.int32, device=x.device).view(-1, 2)
    (rows, row_scales), ids, row_w, handle, _ = buffer.dispatch(
        (x.to(torch.float8_e4m3fn), scales),
        topk_idx=idx,
        topk_weights=w,
        num_experts=EXPERTS,
        num_max_tokens_per_rank=MOST_TOKENS,
        expert_alignment=128,
        num_sms=buffer.get_theoretical_num_sms(EXPERTS, TOPK),
        use_tma_aligned_col_major_sf=True,
        do_cpu_sync=expand,
        do_expand=expand,
    )
    assert row_scales.stride(0) == 1
    assert (ids is None) is expand
    y = rows.to(torch.bfloat16)
    if not expand:
        row_w = torch.where(ids >= 0, row_w, 0.0).sum(1)
    assert row_w.shape == (len(rows),)
    out, _, _ = buffer.combine(weighted(y, row_w), handle=handle)
    buffer.check()
    torch.distributed.barrier(group)
    buffer.destroy()
    values = dict(out=out, scales=row_scales, fields=elastic_cases.fields(handle))
    return to_cpu(values)


@pytest.mark.parametrize(
    ("expand", "num_ranks"), cases.slow_unless([(True, 2), (False, 2)], [True, False], [2, 4])
)
def test_sglang(pool, expand, num_ranks):
    sizes = dict(num_ranks=num_ranks, num_tokens=(9, 0, 20, 4))
    results, inputs = run_client(pool, sglang, expand, **sizes)
    x, idx, w = inputs
    for rank in range(num_ranks):
        if len(x[rank]) == 0:
            x[rank], w[rank] = x[rank].new_zeros(1, HIDDEN), w[rank].new_zeros(1, TOPK)
            idx[rank] = torch.full((1, TOPK), -1)
        x[rank] = x[rank].to(torch.float8_e4m3fn).bfloat16()
    received, places = expected(inputs, alignment=128)
    check_layer(results, inputs, received)
    sent = [torch.arange(2 * len(one), dtype=torch.int32).view(-1, 2) for one in x]
    came = reference.dispatch(sent, idx, w, EXPERTS)
    for have, want, place, one in zip(results, received, places, came, strict=True):
        elastic_cases.check_fields(have["fields"], want, place, expand, waits=expand)
        slots = place.src_metadata[:, 2:].long()
        if expand:
            row, k = (slots >= 0).nonzero(as_tuple=True)
            assert torch.equal(have["scales"][slots[row, k]], one.x[row])
        else:
            assert torch.equal(have["scales"][: len(one.x)], one.x)
