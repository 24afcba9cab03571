"""Tensors of an EPHandle that its caller assigns: those that autograd saved, or recomputed."""

from __future__ import annotations

import cases
import elastic_cases
import pytest
import torch
from elastic_cases import EXPERTS, HIDDEN, MOST_TOKENS, elastic, expected, run_client, to_cpu
from test_elastic_clients import check_layer, weighted

from moe_engine import CapacityError, DtypeError, ShapeError

FIELDS = (
    *("topk_idx", "psum_num_recv_tokens_per_scaleup_rank", "psum_num_recv_tokens_per_expert"),
    *("recv_src_metadata", "dst_buffer_slot_idx", "token_metadata_at_forward"),
    *("channel_linked_list", "num_unaligned_recv_tokens_per_expert"),
)

# --- NeMo Automodel (deepep_v2) ------------------------------------------------------------------


def save(ctx, handle):
    ctx.handle = handle
    ctx.names = [name for name in FIELDS if getattr(handle, name, None) is not None]
    ctx.save_for_backward(*(getattr(handle, name) for name in ctx.names))


def restored(ctx):
    """The handle of the forward, with the tensors that were saved or, under a checkpoint,
    recomputed."""
    for name, tensor in zip(ctx.names, ctx.saved_tensors, strict=True):
        setattr(ctx.handle, name, tensor)
    return ctx.handle


class Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, buffer, x, idx, w):
        recv_x, recv_idx, recv_w, handle, _ = buffer.dispatch(
            x,
            topk_idx=idx,
            topk_weights=w,
            num_experts=EXPERTS,
            num_max_tokens_per_rank=MOST_TOKENS,
            num_sms=0,
            num_qps=0,
            async_with_compute_stream=False,
            allocate_on_comm_stream=False,
        )
        ctx.buffer = buffer
        save(ctx, handle)
        ctx.mark_non_differentiable(recv_idx)
        return recv_x, recv_idx, recv_w, handle

    @staticmethod
    def backward(ctx, grad_x, _, grad_w, __):
        more = dict(topk_weights=grad_w.float(), num_sms=0, num_qps=0)
        dx, dw, _ = ctx.buffer.combine(grad_x.contiguous(), restored(ctx), **more)
        return None, dx, None, dw


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, buffer, x, handle):
        ctx.buffer = buffer
        save(ctx, handle)
        return buffer.combine(x.contiguous(), handle=handle, num_sms=0, num_qps=0)[0]

    @staticmethod
    def backward(ctx, grad):
        handle = restored(ctx)
        more = dict(handle=handle, num_sms=handle.num_sms, num_qps=0)
        return None, ctx.buffer.dispatch(grad.contiguous(), **more)[0], None


def automodel(group, recomputes, x, idx, w):
    x, w, idx = (part.to(cases.device()) for part in (x, w, idx))
    x, w = x.requires_grad_(), w.requires_grad_()
    buffer = elastic(group, num_gpu_timeout_secs=300, explicitly_destroy=True)

    def layer(x, w):
        recv_x, recv_idx, recv_w, handle = Dispatch.apply(buffer, x, idx, w)
        sums = torch.where(recv_idx >= 0, recv_w, 0.0).sum(1)
        return Combine.apply(buffer, weighted(recv_x, sums), handle)

    if recomputes:
        out = torch.utils.checkpoint.checkpoint(layer, x, w, use_reentrant=False)
    else:
        out = layer(x, w)
    out.sum().backward()
    buffer.check()
    buffer.destroy()
    return to_cpu(dict(out=out.detach(), dx=x.grad, dw=w.grad))


@pytest.mark.parametrize("recomputes", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_automodel(pool, recomputes):
    results, inputs = run_client(pool, automodel, recomputes)
    check_layer(results, inputs, expected(inputs)[0])


# --- What is assigned, and what is refused -------------------------------------------------------


def assign(group, x, idx, w):
    """Each field anew, in a call by expert and by token; then calls see what was assigned."""
    x, idx, w = (part.to(cases.device()) for part in (x, idx, w))
    buffer, how = elastic(group), dict(num_experts=EXPERTS, do_cpu_sync=False)
    rows, _, row_w, handle, _ = buffer.dispatch(x, idx, w, do_expand=True, **how)
    y = weighted(rows, row_w)
    before = buffer.combine(y, handle)[0]
    for name in FIELDS:
        if getattr(handle, name) is not None:
            setattr(handle, name, getattr(handle, name).clone())
    after = buffer.combine(y, handle)[0]
    again = buffer.dispatch(x, topk_weights=w, handle=handle, do_expand=True)
    slots = handle.recv_src_metadata[:, 2:]
    assert torch.equal(again[0][slots[slots >= 0]], rows[slots[slots >= 0]])
    # Rows in another order: those of each expert, and where they lie, from the last to the first.
    moved = handle.recv_src_metadata.clone()
    moved[:, 2:] = torch.where(moved[:, 2:] < 0, -1, len(y) - 1 - moved[:, 2:])
    handle.recv_src_metadata = moved
    turned = buffer.combine(y.flip(0), handle)[0]

    # Without the rows that did not come, as DeepEP's own test cuts them off.
    by_token, _, _, handle, _ = buffer.dispatch(x, idx, w, **how)
    num_rows = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
    handle.recv_src_metadata = handle.recv_src_metadata[:num_rows]
    assert handle.num_recv_tokens == num_rows
    cut = buffer.dispatch(x, handle=handle)
    assert cut[0].shape == (num_rows, HIDDEN)
    assert torch.equal(cut[0], by_token[:num_rows])
    assert len(cut[1]) == num_rows
    sums = buffer.combine(by_token[:num_rows], handle)[0]

    metadata, ends = handle.recv_src_metadata, handle.psum_num_recv_tokens_per_expert
    for name, bad, error in (
        ("recv_src_metadata", metadata.long(), DtypeError),
        ("recv_src_metadata", metadata[:, 1:], ShapeError),
        ("recv_src_metadata", torch.cat([metadata, metadata[:1]]), ShapeError),
        ("recv_src_metadata", metadata.T.contiguous().T, ShapeError),
        ("recv_src_metadata", None, DtypeError),
        ("psum_num_recv_tokens_per_expert", ends[1:], ShapeError),
        ("num_unaligned_recv_tokens_per_expert", ends.to("meta"), ShapeError),
        ("psum_num_recv_tokens_per_scaleup_rank", [1, 2], DtypeError),
        ("topk_idx", idx[:, :1], ShapeError),
        ("topk_idx", idx.int(), DtypeError),
    ):
        with pytest.raises(error, match=name):
            setattr(handle, name, bad)
    buffer.check()
    buffer.destroy()
    return to_cpu((before, after, turned, sums))


def test_calls_see_what_was_assigned(pool):
    results, inputs = run_client(pool, assign)
    for (before, after, turned, sums), x, idx in zip(results, *inputs[:2], strict=True):
        assert torch.equal(before, after)
        assert torch.equal(before, turned)
        num_ranks = elastic_cases.reference.layout(idx, EXPERTS, 2)[2].sum(1, keepdim=True)
        assert torch.equal(sums, (x.float() * num_ranks).bfloat16())


def cut_off_too_much(group, expand, x, idx, w):
    """The errors of a combine, and of a dispatch, whose handle has lost rows that came."""
    x, idx, w = (part.to(cases.device()) for part in (x, idx, w))
    texts = []
    for again in (False, True):
        buffer = elastic(group)
        rows, _, _, handle, _ = buffer.dispatch(x, idx, w, num_experts=EXPERTS, do_expand=expand)
        handle.recv_src_metadata = handle.recv_src_metadata[:2]
        with pytest.raises(ShapeError if not again else CapacityError) as caught:
            if again:
                buffer.dispatch(x, handle=handle, do_expand=expand)
            else:
                buffer.combine(rows if expand else rows[:2], handle)
            buffer.check()
        texts.append(str(caught.value))
        torch.distributed.barrier(group)
    return texts


@pytest.mark.parametrize("expand", [True, False])
def test_rows_that_came_cannot_be_cut_off(pool, expand):
    results, _ = run_client(pool, cut_off_too_much, expand, num_tokens=(9, 7))
    for of_combine, of_dispatch in results:
        assert "is not what dispatch of this Buffer returned" in of_combine
        assert "received more rows" in of_dispatch
