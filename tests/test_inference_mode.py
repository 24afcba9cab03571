"""A Buffer whose memory was made in torch's inference mode, and calls outside it."""

from __future__ import annotations

import cases
import torch

from moe_engine import Buffer, Options, moe_ffn, ops

HIDDEN, NUM_EXPERTS, NUM_TOPK = 128, 4, 2


def inputs(num_tokens):
    x = torch.ones(num_tokens, HIDDEN, device=cases.device())
    idx = torch.arange(num_tokens * NUM_TOPK, device=x.device).view(-1, NUM_TOPK) % NUM_EXPERTS
    return x, idx, torch.ones(num_tokens, NUM_TOPK, device=x.device)


def made_in_the_mode(group):
    """The calls that store to memory of a Buffer by torch: those which mask ranks, and those which
    note that there was no room."""
    with torch.inference_mode():
        sizes = 8, HIDDEN, NUM_EXPERTS, NUM_TOPK, torch.float32
        buffer = Buffer.for_tokens(group, *sizes, options=Options(decode_tokens=8))
        hint = Buffer.get_low_latency_rdma_size_hint(8, HIDDEN, group.size(), NUM_EXPERTS)
        more = dict(low_latency_mode=True, enable_shrink=True)
        shrinking = Buffer(group, 1 << 20, hint, **more)
    shrinking.low_latency_update_mask_buffer(0, False)
    x, idx, weights = inputs(8)
    ops.dispatch(x, idx, weights, NUM_EXPERTS, buffer, max_rows=32)
    w_gate_up = torch.ones(NUM_EXPERTS, 64, HIDDEN, device=x.device, requires_grad=True)
    w_down = torch.ones(NUM_EXPERTS, HIDDEN, 32, device=x.device)
    moe_ffn(x, idx, weights, w_gate_up, w_down, buffer).sum().backward()
    for one in (buffer, shrinking):
        one.check()
        assert not any(context.fields.is_inference() for context in contexts(one))
        one.destroy()


def contexts(buffer):
    return [context for engine in buffer._engines for context in engine.contexts()]


def test_a_buffer_that_was_made_in_inference_mode(pool):
    pool.run(made_in_the_mode, num_ranks=1)


def grown_in_the_mode(group):
    """Whether the memory of a Buffer that grows in the mode can be stored to outside it."""
    buffer, sizes = Buffer(group, 1 << 18), []
    for num_tokens in (4, 2000):
        with torch.inference_mode():
            x, idx, _ = inputs(num_tokens)
            per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, NUM_EXPERTS)
            buffer.dispatch(x, None, per_rank, None, in_rank, per_expert)
        sizes.append(buffer._engine.slots.layout.num_bytes)
    (context,) = contexts(buffer)
    fields, notice = context.fields, context.notices._memory
    buffer.destroy()
    return sizes[0] < sizes[1], fields.is_inference(), notice.is_inference()


def test_a_buffer_that_grows_in_inference_mode(pool):
    assert pool.run(grown_in_the_mode, num_ranks=1) == [(True, False, False)]
