"""Gradients of a layer's weights into tensors of the caller, and later than the backward."""

from __future__ import annotations

import warnings
from dataclasses import replace

import cases
import pytest
import torch
from torch.utils.checkpoint import checkpoint
from training_cases import end, gradients, make_case, new_buffer, on_device

from moe_engine import (
    BackendError,
    DelayedWgrad,
    DtypeError,
    MoEFeedForward,
    ShapeError,
    WgradSink,
    moe_ffn,
    start_moe_ffn,
)
from moe_engine.emulation import PerRank

NUM_BATCHES, MAX_TOKENS = 4, 16
SIZES = dict(hidden=32, intermediate=24, num_local=3, num_topk=2)
WAYS = [
    *((2, "auto"), (2, "collective")),
    *(pytest.param(num_ranks, "auto", marks=pytest.mark.slow) for num_ranks in (1, 3)),
]
"""(number of ranks, backend)"""


def buffer_of(group, parts, backend="auto"):
    x, idx, _, up, _, _ = parts
    return new_buffer(group, x, group.size() * len(up), idx.shape[1], MAX_TOKENS, backend)


def nans_like(*weights, dtype=torch.float32):
    return [torch.full_like(one, float("nan"), dtype=dtype) for one in weights]


def leaves_of(parts):
    x, idx, weights, up, down, _ = parts
    leaves = [one.clone().requires_grad_() for one in (x, weights, up, down)]
    return leaves[0], idx, *leaves[1:]


# --- Into tensors --------------------------------------------------------------------------------


def run_sink(group, backend, *parts):
    """The gradients of weights over micro-batches, in a sink, and of all tokens at once: relative
    errors of the first; whether what autograd got and on_ready are as they should be."""
    parts = on_device(parts)
    x, idx, topk_weights, up, down, dy = parts
    buffer = buffer_of(group, parts, backend)
    *_, of_up, of_down = gradients(lambda *a: moe_ffn(*a, buffer), *parts)
    num_ready, dx = 0, []

    def ready():
        nonlocal num_ready
        num_ready += 1

    sink = WgradSink(*nans_like(up, down), accumulate=False, on_ready=ready)
    batches = [torch.tensor_split(one, NUM_BATCHES) for one in (x, idx, topk_weights, dy)]
    for *inputs, grad in zip(*batches, strict=True):
        args = leaves_of([*inputs, up, down, grad])
        moe_ffn(*args, buffer, wgrad=sink).backward(grad)
        assert args[3].grad is None
        assert args[4].grad is None
        dx.append(args[0].grad)
        sink.accumulate = True
    end(buffer)
    errors = [cases.relative_error(*pair) for pair in ((sink.gate_up, of_up), (sink.down, of_down))]
    return errors, num_ready


@pytest.mark.parametrize("num_ranks, backend", WAYS)
def test_micro_batches_add_up_in_a_sink(pool, num_ranks, backend):
    tokens = [12, 5, 0][-num_ranks:]
    parts = [PerRank(part) for part in make_case(num_ranks, tokens, **SIZES)]
    for errors, num_ready in pool.run(run_sink, backend, *parts, num_ranks=num_ranks):
        assert max(errors) < 1e-6
        assert num_ready == NUM_BATCHES


def run_wide(group, *parts):
    """Of bf16 weights: their gradients by autograd, and in fp32 by a sink."""
    parts = on_device(parts)
    *_, up, down, dy = parts
    buffer = buffer_of(group, parts)
    sink = WgradSink(*nans_like(up, down), accumulate=False)
    *_, of_up, of_down = gradients(lambda *a: moe_ffn(*a, buffer), *parts)
    moe_ffn(*leaves_of(parts), buffer, wgrad=sink).backward(dy)
    same = [torch.equal(sink.gate_up.bfloat16(), of_up), torch.equal(sink.down.bfloat16(), of_down)]
    end(buffer)
    return same, not torch.equal(sink.gate_up.bfloat16().float(), sink.gate_up)


def test_fp32_sinks_of_bf16_weights_are_not_rounded(pool):
    parts = [PerRank(part) for part in make_case(2, [16, 9], dtype="bf16", **SIZES)]
    assert pool.run(run_wide, *parts, num_ranks=2) == [([True, True], True)] * 2


def run_without_rows(group, *parts):
    """What experts without rows write, and what they add."""
    parts = on_device(parts)
    *_, up, down, dy = parts
    buffer = buffer_of(group, parts)
    sink = WgradSink(*nans_like(up, down), accumulate=False)
    moe_ffn(*leaves_of(parts), buffer, wgrad=sink).backward(dy)
    written = [sink.gate_up.clone(), sink.down.clone()]
    sink.gate_up.fill_(3), sink.down.fill_(3)
    sink.accumulate = True
    moe_ffn(*leaves_of(parts), buffer, wgrad=sink).backward(dy)
    end(buffer)
    return [one.cpu() for one in (*written, sink.gate_up, sink.down)]


def test_experts_without_rows_write_zeros_and_add_none(pool):
    parts = [PerRank(part) for part in make_case(2, [5, 4], kind="empty_rank", **SIZES)]
    found = pool.run(run_without_rows, *parts, num_ranks=2)
    assert found[0][0].any()
    *written, up, down = found[1]
    assert not any(one.any() for one in written)
    assert (up == 3).all()
    assert (down == 3).all()


def run_frozen(group, *parts):
    """A frozen weight's tensor is left alone; Megatron's attribute is set, and zeros are given."""
    parts = on_device(parts)
    x, idx, weights, up, down, dy = parts
    buffer = buffer_of(group, parts)
    *_, of_down = gradients(lambda *a: moe_ffn(*a, buffer), *parts)
    up_leaf, down_leaf = up.clone(), down.clone().requires_grad_()
    down_leaf.grad_added_to_main_grad = False
    sink = WgradSink(None, nans_like(down)[0], accumulate=False, dummy_grads=True)
    moe_ffn(x, idx, weights, up_leaf, down_leaf, buffer, wgrad=sink).backward(dy)
    found = (
        torch.equal(sink.down, of_down),
        down_leaf.grad_added_to_main_grad,
        down_leaf.grad is not None and not down_leaf.grad.any(),
    )
    end(buffer)
    return found


def test_frozen_weights_and_dummy_gradients(pool):
    parts = [PerRank(part) for part in make_case(1, [6], **SIZES)]
    assert pool.run(run_frozen, *parts, num_ranks=1) == [(True, True, True)]


# --- Later ---------------------------------------------------------------------------------------


def run_delayed(group, backend, *parts):
    """Whether gradients that come later have the bits of those that come at once: of two
    micro-batches, by a module, under a checkpoint, and into a sink."""
    parts = on_device(parts)
    x, idx, weights, up, down, dy = parts
    buffer = buffer_of(group, parts, backend)
    layer = MoEFeedForward(*up.shape[::2], down.shape[2], buffer, x.dtype, requires_grad=True)
    layer = layer.to(x.device)
    with torch.no_grad():
        layer.gate_up_proj.copy_(up)
        layer.down_proj.copy_(down)
    xs = [(x * scale).requires_grad_() for scale in (1, 2)]

    def backward(layer):
        for one in xs:
            layer(one, idx, weights).backward(dy)

    def collect():
        found = [one.grad for one in (*xs, *layer.parameters())]
        for one in (*xs, *layer.parameters()):
            one.grad = None
        return found

    backward(layer)
    at_once, same = collect(), []
    layer.wgrad = DelayedWgrad()
    for call in (layer, lambda *a: checkpoint(layer, *a, use_reentrant=False)):
        backward(call)
        assert layer.gate_up_proj.grad is None
        assert len(layer.wgrad) == 2
        with cases.filled_memory():
            layer.backward_dw(), layer.backward_dw()
        same.append(all(map(torch.equal, collect(), at_once)))
    sink = WgradSink(*nans_like(up, down, dtype=x.dtype), accumulate=False)
    layer.wgrad = DelayedWgrad(sink)
    backward(layer)
    for _ in xs:
        layer.backward_dw()
        sink.accumulate = True
    pairs = zip((sink.gate_up, sink.down), at_once[2:], strict=True)
    errors = [cases.relative_error(*pair) for pair in pairs]
    layer.wgrad, collected = None, collect()
    end(buffer)
    return same, max(errors), all(map(torch.equal, collected[:2], at_once[:2]))


@pytest.mark.parametrize("num_ranks, backend", WAYS)
def test_delayed_gradients_have_the_same_bits(pool, num_ranks, backend):
    parts = [PerRank(part) for part in make_case(num_ranks, [3, 7, 0][-num_ranks:], **SIZES)]
    for same, error, of_x in pool.run(run_delayed, backend, *parts, num_ranks=num_ranks):
        assert same == [True, True]
        assert error < 1e-6
        assert of_x


def run_steps(group, *parts):
    """How often optimizers warn: one of other parameters, one of the weights twice, and one after
    the gradients have come."""
    parts = on_device(parts)
    dy, buffer = parts[-1], buffer_of(group, parts)
    args, later = leaves_of(parts), DelayedWgrad()
    moe_ffn(*args, buffer, wgrad=later).backward(dy)
    own, other = torch.optim.SGD(args[3:], lr=0), torch.optim.SGD([args[0]], lr=0)
    counts = []
    for optimizer in (other, own, own):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            optimizer.step()
        counts.append(sum("backward_dw" in str(one.message) for one in seen))
    later.backward_dw()
    has_all = all(one.grad is not None for one in args[3:])
    try:
        later.backward_dw()
    except BackendError as error:
        text = str(error)
    end(buffer)
    return counts, has_all, text


def test_a_step_that_lacks_delayed_gradients_warns_once(pool):
    parts = [PerRank(part) for part in make_case(1, [4], **SIZES)]
    [(counts, has_all, text)] = pool.run(run_steps, *parts, num_ranks=1)
    assert counts == [0, 1, 0]
    assert has_all
    assert "no gradients of weights wait" in text


# --- What is refused -----------------------------------------------------------------------------


def run_refused(group, *parts):
    """The errors of sinks that are refused before a kernel runs, by name; then a call is right."""
    parts = on_device(parts)
    *_, up, down, _ = parts
    buffer = buffer_of(group, parts)
    want = gradients(lambda *a: moe_ffn(*a, buffer), *parts)
    right = WgradSink(*nans_like(up, down), accumulate=False)
    of_all = torch.zeros(up.numel() + down.numel(), device=up.device)
    ends = of_all[: up.numel()], of_all[-8 - down.numel() : -8]
    overlapping = [one.view(like.shape) for one, like in zip(ends, (up, down), strict=True)]
    args = leaves_of(parts)
    wrong = {
        "shape": replace(right, gate_up=right.gate_up[:, :-2]),
        "strides": replace(right, down=right.down.mT.contiguous().mT),
        "dtype": replace(right, down=right.down.half()),
        "device": replace(right, down=right.down.to("meta")),
        "none": replace(right, gate_up=None),
        "a weight": replace(right, gate_up=args[3].detach()),
        "each other": WgradSink(*overlapping),
        "two tensors": replace(right, gate_up=(right.down, right.down)),
        "accumulate": replace(right, accumulate="yes"),
        "on_ready": replace(right, on_ready=3),
        "no sink": "later",
    }
    errors = {}
    for name, wgrad in wrong.items():
        try:
            moe_ffn(*args, buffer, wgrad=wgrad)
        except (ShapeError, DtypeError) as error:
            errors[name] = str(error)
    try:
        moe_ffn(*args[:3], args[3] * 1, args[4], buffer, wgrad=DelayedWgrad())
    except BackendError as error:
        errors["no leaf"] = str(error)
    have = gradients(lambda *a: start_moe_ffn(*a, buffer).finish(), *parts)
    end(buffer)
    return errors, all(map(torch.equal, have, want))


def test_what_is_refused(pool):
    parts = [PerRank(part) for part in make_case(1, [4], **SIZES)]
    [(errors, goes_on)] = pool.run(run_refused, *parts, num_ranks=1)
    assert goes_on
    texts = {
        "shape": "wgrad.gate_up has shape [3, 46, 32]; it must be [3, 48, 32]",
        "strides": "wgrad.down has strides",
        "dtype": "wgrad.down is float16; it must be bfloat16 or float32",
        "device": "wgrad.down is on meta",
        "none": "wgrad.gate_up is None, and its weight requires grad",
        "a weight": "wgrad.gate_up overlaps w_gate_up in memory",
        "each other": "wgrad.down overlaps wgrad.gate_up in memory",
        "two tensors": "wgrad.gate_up has 2 tensors and w_gate_up has 1",
        "accumulate": "wgrad.accumulate is 'yes'; it must be True or False",
        "on_ready": "wgrad.on_ready is 3; it must be a function",
        "no sink": "wgrad is 'later'; it must be a WgradSink",
        "no leaf": "a weight was computed from other tensors",
    }
    assert errors.keys() == texts.keys()
    for name, text in texts.items():
        assert text in errors[name], name


# --- Counts per expert ---------------------------------------------------------------------------


def run_counts(group, backend, *parts):
    """The counts of layers with and without gradients, at once and in flight, for a Buffer whose
    layers run by low-latency calls otherwise."""
    parts = on_device(parts)
    dy, buffer = parts[-1], buffer_of(group, parts, backend)
    args = leaves_of(parts)
    y, counts = moe_ffn(*args, buffer, return_counts=True)
    y.backward(dy)
    found = [counts, moe_ffn(*parts[:5], buffer, return_counts=True)[1]]
    for tensors in (args, parts[:5]):
        found.append(start_moe_ffn(*tensors, buffer, return_counts=True).finish()[1])
    end(buffer)
    return [one.cpu() for one in found]


@pytest.mark.parametrize("num_ranks, backend", WAYS)
def test_counts_are_those_of_all_ranks(pool, num_ranks, backend):
    parts = make_case(num_ranks, [9, 0, 5][:num_ranks], kind="holes", **SIZES)
    ids = torch.cat(parts[1])
    wanted = torch.bincount(ids[ids >= 0], minlength=3 * num_ranks).int()
    ranks = [PerRank(part) for part in parts]
    for found in pool.run(run_counts, backend, *ranks, num_ranks=num_ranks):
        for counts in found:
            assert counts.dtype == torch.int32
            assert torch.equal(counts, wanted)
