"""How training frameworks call DeepEP: each one's sequence of calls, against the reference."""

from __future__ import annotations

import pytest
import torch
from deep_ep_cases import (
    EXPERTS,
    check_combined,
    check_received,
    deep_ep,
    run_client,
    sized_buffer,
    to_cpu,
    to_device,
)

# --- Megatron and Automodel: autograd functions, asynchronous or not -------------------------


def by_hand(asynchronous):
    utils = deep_ep("deep_ep.utils")
    return utils.EventOverlap(utils.EventHandle() if asynchronous else None)


class FusedDispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, idx, probs, buffer, asynchronous):
        flags = {"async_finish": asynchronous, "allocate_on_comm_stream": asynchronous}
        per_rank, per_rdma_rank, per_expert, in_rank, event = buffer.get_dispatch_layout(
            idx, EXPERTS, previous_event=by_hand(asynchronous), **flags
        )
        recv_x, recv_idx, recv_probs, counts, handle, event = buffer.dispatch(
            x,
            topk_idx=idx,
            topk_weights=probs,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            previous_event=event,
            **flags,
        )
        if asynchronous:
            event.current_stream_wait()
        ctx.known = buffer, handle, flags
        ctx.mark_non_differentiable(recv_idx)
        return recv_x, recv_idx, recv_probs, torch.tensor(counts), handle

    @staticmethod
    def backward(ctx, grad_x, _idx, grad_probs, _counts, _handle):
        buffer, handle, flags = ctx.known
        asynchronous = flags["async_finish"]
        grad_x, grad_probs, event = buffer.combine(
            grad_x.contiguous(),
            handle,
            topk_weights=grad_probs.float(),
            previous_event=by_hand(asynchronous),
            **flags,
        )
        if asynchronous:
            event.current_stream_wait()
        return grad_x, None, grad_probs, None, None


class FusedCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, buffer, handle, asynchronous):
        flags = {"async_finish": asynchronous, "allocate_on_comm_stream": asynchronous}
        out, _, event = buffer.combine(
            x, handle=handle, previous_event=by_hand(asynchronous), **flags
        )
        if asynchronous:
            event.current_stream_wait()
        ctx.known = buffer, handle, flags
        return out

    @staticmethod
    def backward(ctx, grad):
        buffer, handle, flags = ctx.known
        asynchronous = flags["async_finish"]
        grad_x, _, _, _, _, event = buffer.dispatch(
            grad.contiguous(), handle=handle, previous_event=by_hand(asynchronous), **flags
        )
        if asynchronous:
            event.current_stream_wait()
        return grad_x, None, None, None


def megatron(group, asynchronous, more, x, idx, probs):
    buffer_class = deep_ep().Buffer
    x, idx, probs = to_device(x, idx, probs)
    old = sized_buffer(group, 8, **more)
    buffer = sized_buffer(group, x.shape[1] * 4, **more)  # sizes grew: the old one is dropped
    assert old.num_nvl_bytes < buffer.num_nvl_bytes
    del old
    buffer_class.set_num_sms(20)
    x.requires_grad_()
    probs.requires_grad_()
    recv_x, recv_idx, recv_probs, counts, handle = FusedDispatch.apply(
        x, idx, probs, buffer, asynchronous
    )
    assert counts.dtype == torch.int64
    assert counts.sum().item() == int((recv_idx >= 0).sum())
    probs_here = torch.where(recv_idx >= 0, recv_probs, 0.0)
    out = FusedCombine.apply(recv_x * probs_here.sum(1, True), buffer, handle, asynchronous)
    (out * x.detach()).sum().backward()
    buffer.check()
    if more:
        buffer_class.is_sm90_compiled()
        torch.distributed.barrier(group)
        buffer.destroy()
    return to_cpu(
        x=recv_x.detach(),
        idx=recv_idx,
        w=recv_probs.detach(),
        counts=counts.tolist(),
        out=out.detach(),
        grad_x=x.grad,
        grad_probs=probs.grad,
    )


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("more", [{}, {"explicitly_destroy": True}], ids=["Megatron", "Automodel"])
def test_megatron_and_automodel(pool, asynchronous, more):
    results, inputs = run_client(pool, megatron, asynchronous, more)
    received = check_received(results, inputs)
    check_combined(results, inputs, received, lambda r: r.x * r.topk_weights.sum(1, True))
    for have, x, idx, probs in zip(results, *inputs, strict=True):
        x, probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
        out = x * torch.where(idx >= 0, probs, 0.0).sum(1, True)
        (out * x.detach()).sum().backward()
        torch.testing.assert_close(have["grad_x"], x.grad)
        torch.testing.assert_close(have["grad_probs"], probs.grad)


# --- prime-rl: operators with the handle kept by number, cached dispatch with every keyword ---

STATE = {}


@torch.library.custom_op("moe_engine_tests::dispatch", mutates_args=())
def dispatch_op(
    x: torch.Tensor,
    idx: torch.Tensor,
    w: torch.Tensor,
    per_rank: torch.Tensor,
    per_rdma_rank: torch.Tensor | None,
    in_rank: torch.Tensor,
    per_expert: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    recv_x, recv_idx, recv_w, counts, handle, event = STATE["buffer"].dispatch(
        x=x,
        topk_idx=idx,
        topk_weights=w,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_rdma_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        previous_event=by_hand(True),
        async_finish=True,
        allocate_on_comm_stream=True,
    )
    number = torch.tensor(len(STATE))
    STATE[number.item()] = handle, event
    return recv_x, recv_idx, recv_w, torch.tensor(counts), number


def prime_rl(group, x, idx, w):
    x, idx, w = to_device(x, idx, w)
    buffer = STATE["buffer"] = sized_buffer(group, x.shape[1] * 4)
    per_rank, per_rdma_rank, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS)
    recv_x, recv_idx, recv_w, counts, number = torch.ops.moe_engine_tests.dispatch(
        x, idx, w, per_rank, per_rdma_rank, in_rank, per_expert
    )
    handle, event = STATE.pop(number.item())
    event.current_stream_wait()
    again, none_idx, none_w, none_counts, none_handle, event = buffer.dispatch(
        x=x,
        topk_idx=None,
        topk_weights=None,
        num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        handle=handle,
        previous_event=by_hand(True),
        async_finish=True,
        allocate_on_comm_stream=True,
    )
    event.current_stream_wait()
    assert (none_idx, none_w, none_counts, none_handle) == (None,) * 4
    assert torch.equal(again, recv_x)
    out, no_weights, event = buffer.combine(
        recv_x,
        handle,
        previous_event=by_hand(True),
        async_finish=True,
        allocate_on_comm_stream=True,
    )
    event.current_stream_wait()
    assert no_weights is None
    STATE.clear()
    return to_cpu(x=recv_x, idx=recv_idx, w=recv_w, counts=counts.tolist(), out=out)


def test_prime_rl(pool):
    results, inputs = run_client(pool, prime_rl)
    received = check_received(results, inputs)
    check_combined(results, inputs, received, lambda r: r.x)


# --- xtuner: the handle among an autograd function's saved tensors ----------------------------


class SavedHandle(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, idx, w, buffer, event):
        flags = {"async_finish": True, "allocate_on_comm_stream": event is not None}
        per_rank, _, per_expert, in_rank, laid_out = buffer.get_dispatch_layout(
            idx, EXPERTS, previous_event=event, **flags
        )
        recv_x, recv_idx, recv_w, counts, handle, done = buffer.dispatch(
            x,
            topk_idx=idx,
            topk_weights=w,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=None,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            previous_event=laid_out,
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        assert type(handle[5]) is torch.Tensor
        assert len(handle) == 6
        ctx.save_for_backward(*handle)
        ctx.buffer, ctx.previous = buffer, deep_ep().EventOverlap(None)
        ctx.mark_non_differentiable(recv_idx)
        ctx.set_materialize_grads(False)
        return recv_x, recv_idx, recv_w, counts, done, ctx.previous

    @staticmethod
    def backward(ctx, grad_x, _idx, _w, *_rest):
        assert ctx.previous.event is not None
        out, _, event = ctx.buffer.combine(
            grad_x,
            ctx.saved_tensors,
            previous_event=ctx.previous,
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        event.current_stream_wait()
        return out, None, None, None, None


def xtuner(group, x, idx, w):
    x, idx, w = to_device(x, idx, w)
    buffer = sized_buffer(
        group, x.shape[1] * 4, low_latency_mode=True, num_qps_per_rank=EXPERTS // 2
    )
    x.requires_grad_()
    event = buffer.capture()
    recv_x, recv_idx, recv_w, counts, done, of_backward = SavedHandle.apply(
        x, idx, w, buffer, event
    )
    done.current_stream_wait()
    other = deep_ep().EventOverlap(deep_ep("deep_ep_cpp").EventHandle())
    of_backward.event = other.event
    (recv_x * recv_x.detach()).sum().backward()
    return to_cpu(x=recv_x.detach(), idx=recv_idx, w=recv_w, counts=counts, out=x.grad)


def test_xtuner(pool):
    results, inputs = run_client(pool, xtuner)
    received = check_received(results, inputs)
    check_combined(results, inputs, received, lambda r: r.x)
