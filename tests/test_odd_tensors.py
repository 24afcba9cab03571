"""Tensors that are legal in torch and rare: views of no rows at an odd offset, torch's negative
bit, and sinks whose rows are no multiple of 16 bytes where those of the weights are."""

from __future__ import annotations

import cases
import pytest
import torch

from moe_engine import (
    Buffer,
    DelayedWgrad,
    DtypeError,
    ElasticBuffer,
    Options,
    ShapeError,
    WgradSink,
    moe_ffn,
)
from moe_engine.grouped_gemm import grouped_gemm
from moe_engine.ops import combine, dispatch

HIDDEN, COLUMNS, EXPERTS, MAX_TOKENS = 16, 8, 2, 8


def inputs(num_tokens, num_local, dtype=torch.bfloat16):
    """(x, topk_idx, topk_weights, w_gate_up, w_down), one expert for each token."""
    generator = torch.Generator().manual_seed(num_tokens)

    def new(*shape):
        return torch.randn(*shape, generator=generator).to(dtype).to(cases.device())

    idx = torch.arange(num_tokens, device=cases.device())[:, None] % EXPERTS
    weights = torch.full((num_tokens, 1), 0.5, device=cases.device())
    up, down = new(num_local, 2 * COLUMNS, HIDDEN), new(num_local, HIDDEN, COLUMNS)
    return new(num_tokens, HIDDEN), idx, weights, up, down


def new_buffer(group, dtype=torch.bfloat16, decode_tokens=512, backend="auto"):
    options = Options(decode_tokens=decode_tokens)
    sizes = MAX_TOKENS, HIDDEN, EXPERTS, 1, dtype
    return Buffer.for_tokens(group, *sizes, backend=backend, options=options)


def odd_view(x):
    """The same values as a view that begins one item after its storage."""
    wide = torch.zeros(len(x), x.shape[1] + 4, dtype=x.dtype, device=x.device)
    wide[:, 1:-3] = x
    return wide[:, 1:-3]


# --- Views of no rows ----------------------------------------------------------------------------


def layer(group, x, idx, weights, up, down, decode_tokens=512):
    buffer = new_buffer(group, decode_tokens=decode_tokens)
    return buffer, [moe_ffn(x, idx, weights, up, down, buffer)]


def normal_layer(group, *args):
    return layer(group, *args, decode_tokens=0)


def trained_layer(group, x, idx, weights, up, down):
    buffer, down = new_buffer(group), down.clone().requires_grad_()
    y = moe_ffn(x, idx, weights, up, down, buffer)
    y.backward(odd_view(torch.ones_like(y)))
    return buffer, [y.detach(), down.grad]


def normal_calls(group, x, idx, weights, up, down):
    buffer = new_buffer(group)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS)
    layout = per_rank, None, in_rank, per_expert
    rows, _, of_rows, _, handle, _ = buffer.dispatch(x, None, *layout, idx, weights)
    again, *_ = buffer.dispatch(x, handle)
    out, back, _ = buffer.combine(odd_view(rows), handle, odd_view(of_rows), odd_view(x))
    return buffer, [rows, again, out, back]


def low_latency_calls(group, x, idx, weights, up, down):
    buffer = new_buffer(group)
    sent = x, idx, MAX_TOKENS, EXPERTS
    rows, _, handle, _, _ = buffer.low_latency_dispatch(*sent, use_fp8=False)
    out = odd_view(torch.empty_like(x)) if len(x) == 0 else None
    return buffer, [buffer.low_latency_combine(rows, idx, weights, handle, out=out)[0]]


def elastic_calls(group, x, idx, weights, up, down):
    sizes = dict(num_max_tokens_per_rank=MAX_TOKENS, hidden=HIDDEN, num_topk=1)
    buffer = ElasticBuffer(group, **sizes)
    rows, _, _, handle, _ = buffer.dispatch(x, idx, weights, num_experts=EXPERTS)
    return buffer, [rows, buffer.combine(odd_view(rows), handle)[0]]


def operator_calls(group, x, idx, weights, up, down):
    buffer, x = new_buffer(group), x.clone().requires_grad_() if len(x) else x
    got = dispatch(x, idx, weights, EXPERTS, buffer)
    y = combine(odd_view(got.rows), got.plan, buffer)
    return buffer, [got.rows.detach(), y.detach()]


CALLS = [
    *(layer, normal_layer, trained_layer, normal_calls),
    *(low_latency_calls, elastic_calls, operator_calls),
]


def run_empty(group, call):
    """Whether a call gives the same for x as it is, on rank 0 of no tokens, and for odd views."""
    x, idx, weights, up, down = inputs(2 * group.rank(), EXPERTS // group.size())
    found = []
    for rows in x, odd_view(x):
        buffer, results = call(group, rows, idx, odd_view(weights), up, down)
        buffer.check()
        found.append([one.clone() for one in results])
        buffer.destroy()
    return [torch.equal(one, other) for one, other in zip(*found, strict=True)]


@pytest.mark.parametrize("call", CALLS)
def test_views_of_no_rows(pool, call):
    assert all(map(all, pool.run(run_empty, call, num_ranks=2)))


def run_after_usual(group):
    """A layer of no tokens, and one more whose x is a view at an odd offset."""
    x, *rest = inputs(0, EXPERTS)
    buffer = new_buffer(group, decode_tokens=0)
    for rows in x, x, odd_view(x), odd_view(x):
        moe_ffn(rows, *rest, buffer)
    buffer.check()


def test_an_empty_view_after_an_empty_tensor(pool):
    """They are calls of different kinds."""
    pool.run(run_after_usual, num_ranks=1)


# --- Sinks ---------------------------------------------------------------------------------------

LAYOUTS = "concatenated", "interleaved", "two tensors"


def run_sink(group, is_delayed, layout):
    """The refusal of a bf16 sink of rows of 24 bytes, and whether the Buffer goes on with one in
    float32."""
    hidden, columns, device = 12, 4, cases.device()
    buffer = Buffer.for_tokens(group, 8, hidden, 2, 1, torch.float32)
    w = torch.randn(2, 2, columns, hidden, device=device)  # gate and up of both experts, in turn
    pair = layout == "two tensors"
    up = tuple(w.requires_grad_().unbind()) if pair else w.flatten(1, 2).requires_grad_()
    down = torch.randn(2, hidden, columns, device=device, requires_grad=True)
    x, idx = torch.randn(3, hidden, device=device), torch.zeros(3, 1, dtype=torch.long).to(device)

    def call(dtype):
        of_up = torch.zeros(w.shape, dtype=dtype, device=device)
        of_up = tuple(of_up.unbind()) if pair else of_up.flatten(1, 2)
        sink = WgradSink(of_up, torch.zeros(down.shape, dtype=dtype, device=device))
        wgrad = DelayedWgrad(sink) if is_delayed else sink
        how = dict(wgrad=wgrad, layout="interleaved" if layout == "interleaved" else "concatenated")
        y = moe_ffn(x, idx, torch.ones(3, 1, device=device), up, down, buffer, **how)
        y.sum().backward()
        if is_delayed:
            wgrad.backward_dw()
        return sink.down

    try:
        call(torch.bfloat16)
        refusal = None
    except ShapeError as error:
        refusal = str(error)
    found = call(torch.float32)
    buffer.check()
    return refusal, bool(found.abs().sum() > 0)


@pytest.mark.parametrize("is_delayed", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sinks_of_rows_that_kernels_cannot_write(pool, layout, is_delayed):
    [(refusal, goes_on)] = pool.run(run_sink, is_delayed, layout, num_ranks=1)
    assert "wgrad.gate_up has K = 12, and rows of 24 bytes" in refusal
    if layout != "two tensors":
        assert "float32" in refusal
    assert goes_on


# --- Negative bits -------------------------------------------------------------------------------


def negated(tensor):
    """The negated values, by torch's negative bit alone, which parts of complex tensors have."""
    assert tensor.dtype is torch.float32
    return torch._neg_view(tensor)


def run_negated(group, backend):
    """What refuses each tensor of a layer that has a negative bit, after calls with usual ones; and
    the difference of gradients for dy with and without the bit."""
    args = inputs(3, EXPERTS // group.size(), torch.float32)
    buffer = new_buffer(group, torch.float32, backend=backend)
    refused = []
    for number in (0, 2, 3, 4):
        moe_ffn(*args, buffer)
        given = [negated(one) if place == number else one for place, one in enumerate(args)]
        with pytest.raises(DtypeError, match=r"negative bit.*resolve_neg") as refusal:
            moe_ffn(*given, buffer)
        refused.append(str(refusal.value).split()[0])
    _, *more = args
    dy, found = torch.ones_like(args[0]), []
    for grad in -dy, negated(dy):
        x = args[0].clone().requires_grad_()
        moe_ffn(x, *more, buffer).backward(grad)
        found.append(x.grad)
    buffer.check()
    return refused, (found[0] - found[1]).abs().max().item()


@pytest.mark.parametrize("backend", ["auto", "collective"])
def test_negative_bits_of_a_layer(pool, backend):
    for refused, difference in pool.run(run_negated, backend, num_ranks=2):
        assert refused == ["x", "topk_weights", "w_gate_up", "w_down"]
        assert difference == 0


def run_negated_calls(group):
    """The other verbs refuse it in each tensor that a kernel would read or write."""
    x, idx, weights, *_ = inputs(3, EXPERTS, torch.float32)
    buffer = new_buffer(group, torch.float32)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS)
    routing = per_rank, None, in_rank, per_expert, idx, weights
    rows, _, _, _, handle, _ = buffer.dispatch(x, None, *routing)
    sent = x.bfloat16(), idx, MAX_TOKENS, EXPERTS
    packed, _, to, _, _ = buffer.low_latency_dispatch(*sent, use_fp8=False)
    calls = [
        lambda: buffer.dispatch(negated(x), None, *routing),
        lambda: buffer.dispatch(negated(x), handle),
        lambda: buffer.combine(negated(rows), handle),
        lambda: buffer.combine(rows, handle, bias=negated(x)),
        lambda: buffer.low_latency_combine(packed, idx, negated(weights), to),
    ]
    for call in calls:
        with pytest.raises(DtypeError, match="negative bit"):
            call()
    buffer.check()


def test_negative_bits_of_the_verbs(pool):
    pool.run(run_negated_calls, num_ranks=1)


def run_operators(group):
    """Operators of torch.library get tensors whose bits torch has resolved."""
    x, idx, weights, *_ = inputs(3, EXPERTS // group.size(), torch.float32)
    buffer = new_buffer(group, torch.float32)
    got = dispatch(negated(-x), idx, weights, EXPERTS, buffer)
    return (combine(negated(-got.rows), got.plan, buffer) - x).abs().max().item()


def test_negative_bits_of_operators(pool):
    assert pool.run(run_operators, num_ranks=2) == [0, 0]


def run_gemm(group):
    """The refusal of a grouped GEMM, and the difference of its gradients."""
    x, *_, down = inputs(4, EXPERTS, torch.float32)
    offsets, found = torch.tensor([0, 1, 4], device=x.device), []
    x = x[:, :COLUMNS].contiguous()
    for w in down, negated(down):
        if w is not down:
            with pytest.raises(DtypeError, match="negative bit"):
                grouped_gemm(x, w, offsets)
    for bit in False, True:
        rows = x.clone().requires_grad_()
        dy = torch.ones(4, HIDDEN, device=x.device)
        grouped_gemm(rows, down, offsets).backward(negated(dy) if bit else -dy)
        found.append(rows.grad)
    return (found[0] - found[1]).abs().max().item()


def test_negative_bits_of_a_grouped_gemm(pool):
    assert pool.run(run_gemm, num_ranks=1) == [0]
