"""Layers whose first weights lie in other ways: the same bits, in tensors of the same layout.

Where the columns of a matrix have other places in their tiles, matrix products of the interpreter
round otherwise, on some CPUs (`OPENBLAS_CORETYPE=Haswell`); so those are only near there.
"""

from __future__ import annotations

from functools import partial

import cases
import pytest
import torch
from einops import rearrange
from training_cases import (
    NAMES,
    POLICIES,
    check_gradients,
    end,
    gradients,
    make_case,
    new_buffer,
    on_device,
)

from moe_engine import (
    DelayedWgrad,
    DtypeError,
    MoEFeedForward,
    ShapeError,
    WgradSink,
    moe_ffn,
)
from moe_engine.emulation import PerRank
from moe_engine.grouped_gemm import wgrad

MAX_TOKENS = 16
SIZES = dict(hidden=32, num_local=2, num_topk=2)


def interleaved(up):
    """The rows of gate and up in turn."""
    return rearrange(up, "l (part rows) h -> l (rows part) h", part=2)


def concatenated(up):
    """The opposite of `interleaved`."""
    return rearrange(up, "l (rows part) h -> l (part rows) h", part=2)


def as_two(up):
    """Gate and up in one memory."""
    return torch.stack(up.chunk(2, 1)).unbind()


def call_with(form, buffer, **how):
    """`moe_ffn` of weights [L, 2I, H], which are passed in another form, by torch's operators."""

    def call(x, idx, weights, up, down):
        if form == "interleaved":
            return moe_ffn(
                x, idx, weights, interleaved(up), down, buffer, layout="interleaved", **how
            )
        if form == "stacked":
            return moe_ffn(x, idx, weights, as_two(up), down, buffer, **how)
        if form == "halves":
            return moe_ffn(x, idx, weights, up.chunk(2, 1), down, buffer, **how)
        return moe_ffn(x, idx, weights, up, down, buffer, **how)

    return call


FORMS = "interleaved", "stacked", "halves"


def run_forms(group, backend, save, forms, *parts):
    """The result and the gradients by each form, and whether their results are the same without
    gradients, for a layer and for a low-latency one."""
    parts = on_device(parts)
    x, idx, _, up, _, _ = parts
    sizes = group.size() * len(up), idx.shape[1], MAX_TOKENS
    buffer = new_buffer(group, x, *sizes, backend)
    found = {f: gradients(call_with(f, buffer, save=save), *parts) for f in ("", *forms)}
    plain = [
        torch.equal(call_with(form, buffer, return_counts=True)(*parts[:5])[0], found[""][0])
        for form in forms
    ]
    decoded = moe_ffn(*parts[:5], buffer)
    plain += [torch.equal(call_with(form, buffer)(*parts[:5]), decoded) for form in forms]
    end(buffer)
    return {form: [one.cpu() for one in made] for form, made in found.items()}, plain


CASES = {
    "columns in whole tiles": (2, 64, "auto", "pre", FORMS),
    "columns that are not": (3, 72, "auto", "none", ("interleaved", "halves")),
    "collectives": (2, 24, "collective", "rows", FORMS),
}


@pytest.mark.parametrize("name", cases.slow_unless([("collectives",)], CASES))
def test_layouts_give_the_same_bits(pool, name):
    num_ranks, intermediate, backend, save, forms = CASES[name]
    parts = make_case(num_ranks, [9, 0, 4][:num_ranks], intermediate=intermediate, **SIZES)
    ranks = [PerRank(part) for part in parts]
    found = pool.run(run_forms, backend, save, forms, *ranks, num_ranks=num_ranks)
    check_gradients([have[""] for have, _ in found], parts)
    moves = name == "columns that are not" and not torch.cuda.is_available()
    for have, plain in found:
        assert all(plain)
        for form in forms:
            for what, one, other in zip(("y", *NAMES), have[form], have[""], strict=True):
                if moves:
                    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
                else:
                    assert torch.equal(one, other), f"{what} of {form}"


def run_moved(group, *parts):
    """Whether gradients are the same where hooks have moved what was saved, each by itself."""
    parts = on_device(parts)
    x, idx, _, up, _, _ = parts
    buffer = new_buffer(group, x, group.size() * len(up), idx.shape[1], MAX_TOKENS)

    def moved(form, *tensors):
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda one: one):
            return call_with(form, buffer)(*tensors)

    same = []
    for form in ("stacked", "halves"):
        kept = gradients(call_with(form, buffer), *parts)
        same += map(torch.equal, gradients(partial(moved, form), *parts), kept)
    end(buffer)
    return all(same)


def test_gate_and_up_that_saved_tensor_hooks_move(pool):
    ranks = [PerRank(part) for part in make_case(1, [9], intermediate=24, **SIZES)]
    assert pool.run(run_moved, *ranks, num_ranks=1) == [True]


def run_sinks(group, *parts):
    """Whether sinks, new gradients and delayed ones of each layout hold the same bits."""
    parts = on_device(parts)
    x, idx, weights, up, down, dy = parts
    buffer = new_buffer(group, x, group.size() * len(up), idx.shape[1], MAX_TOKENS)
    *_, of_up, of_down = gradients(lambda *a: moe_ffn(*a, buffer), *parts)
    same = []

    def nans(*like):
        return [torch.full_like(one, float("nan")) for one in like]

    def leaf(tensor):
        return tensor.detach().requires_grad_()

    # One tensor.
    layer = MoEFeedForward(
        *up.shape[::2], down.shape[2], buffer, x.dtype, requires_grad=True, layout="interleaved"
    ).to(x.device)
    with torch.no_grad():
        layer.gate_up_proj.copy_(interleaved(up))
        layer.down_proj.copy_(down)
    layer(x, idx, weights).backward(dy)
    same.append(torch.equal(concatenated(layer.gate_up_proj.grad), of_up))
    layer.wgrad = WgradSink(*nans(up, down), accumulate=False)
    layer(x, idx, weights).backward(dy)
    same.append(torch.equal(concatenated(layer.wgrad.gate_up), of_up))
    # Two tensors: gradients of leaves, a sink, and delayed.
    pair, down_leaf = [leaf(one) for one in as_two(up)], leaf(down)
    args = x, idx, weights, pair, down_leaf, buffer
    moe_ffn(*args).backward(dy)
    at_once = [one.grad for one in (*pair, down_leaf)]
    same.append(torch.equal(torch.cat(at_once[:2], 1), of_up))
    into = nans(torch.stack(tuple(pair)))[0].detach().unbind()
    sink = WgradSink(into, nans(down)[0], accumulate=False)
    moe_ffn(*args, wgrad=sink).backward(dy)
    same.append(torch.equal(torch.cat(into, 1), of_up) and torch.equal(sink.down, of_down))
    for one in (*pair, down_leaf):
        one.grad = None
    later = DelayedWgrad()
    moe_ffn(*args, wgrad=later).backward(dy)
    later.backward_dw()
    same.append(all(map(torch.equal, at_once, [one.grad for one in (*pair, down_leaf)])))
    end(buffer)
    return same


def test_gradients_have_the_layout_of_the_weights(pool):
    parts = [PerRank(part) for part in make_case(2, [7, 3], intermediate=24, **SIZES)]
    assert pool.run(run_sinks, *parts, num_ranks=2) == [[True] * 5] * 2


def run_policy(group, save, *parts):
    """Whether a sink of interleaved weights that is added to, and delayed gradients, hold the bits
    of gradients of concatenated ones."""
    parts = on_device(parts)
    x, idx, weights, up, down, dy = parts
    buffer = new_buffer(group, x, group.size() * len(up), idx.shape[1], MAX_TOKENS)
    *_, of_up, of_down = gradients(call_with("", buffer, save=save), *parts)
    want = interleaved(of_up), of_down
    leaves = [one.clone().requires_grad_() for one in (interleaved(up), down)]
    layer = partial(moe_ffn, x, idx, weights, *leaves, buffer, layout="interleaved", save=save)
    sink, later = WgradSink(*map(torch.ones_like, want)), DelayedWgrad()
    layer(wgrad=sink).backward(dy)
    layer(wgrad=later).backward(dy)
    later.backward_dw()
    end(buffer)
    added = map(torch.equal, (sink.gate_up, sink.down), [one + 1 for one in want])
    return [*added, *map(torch.equal, [one.grad for one in leaves], want)]


@pytest.mark.parametrize("save", cases.slow_unless([("none",)], POLICIES))
def test_sinks_and_delayed_gradients_by_policy(pool, save):
    """The gradient of w_gate_up is computed while rows arrive, or while sums return."""
    parts = [PerRank(part) for part in make_case(2, [5, 3], intermediate=24, **SIZES)]
    assert pool.run(run_policy, save, *parts, num_ranks=2) == [[True] * 4] * 2


def run_refused(group, *parts):
    """The errors of weights that are refused, by name; then a call is right."""
    parts = on_device(parts)
    x, idx, weights, up, down, _ = parts
    buffer = new_buffer(group, x, group.size() * len(up), idx.shape[1], MAX_TOKENS)
    want = moe_ffn(*parts[:5], buffer)
    gate, second = (one.clone() for one in up.chunk(2, 1))
    stack = torch.stack((gate, second))
    wrong = {
        "layout": (up, "columns"),
        "no layout": (up, None),
        "three": ((gate, second, second), "concatenated"),
        "both": (stack.unbind(), "interleaved"),
        "apart": ((gate, second), "concatenated"),
        "in turn": (stack.flip(0).unbind()[::-1], "concatenated"),
        "the same": ((gate, gate), "concatenated"),
        "rows": ((stack[0], stack[1, :, :-1]), "concatenated"),
        "dtype": ((gate, second.bfloat16()), "concatenated"),
        "strides": (up.mT.contiguous().mT, "interleaved"),
        "unequal": (up[:, :-1].contiguous(), "interleaved"),
        "no tensor": (((1, 2)), "concatenated"),
    }
    errors = {}
    for name, (w, layout) in wrong.items():
        try:
            moe_ffn(x, idx, weights, w, down, buffer, layout=layout)
        except (ShapeError, DtypeError) as error:
            errors[name] = str(error)
    goes_on = torch.equal(moe_ffn(*parts[:5], buffer), want)
    end(buffer)
    return errors, goes_on


def test_what_is_refused(pool):
    parts = [PerRank(part) for part in make_case(1, [4], intermediate=24, **SIZES)]
    [(errors, goes_on)] = pool.run(run_refused, *parts, num_ranks=1)
    assert goes_on
    one_memory = "Allocate them together, once: w_gate, w_up = torch.empty(2, L, I, H, ...)"
    texts = {
        "layout": "layout is 'columns'; it must be one of ('concatenated', 'interleaved')",
        "no layout": "layout is a NoneType; it must be one of",
        "three": "w_gate_up has 3 tensors; it must be one, or (w_gate, w_up)",
        "both": 'layout is "interleaved" and w_gate_up has two tensors',
        "apart": one_memory,
        "in turn": one_memory,
        "the same": one_memory,
        "rows": "gate and up must be alike",
        "dtype": "gate and up must be alike",
        "strides": "interleaved weights are contiguous [L, 2I, H]",
        "unequal": "interleaved weights are contiguous [L, 2I, H]",
        "no tensor": "w_gate_up[0] is a int; it must be a torch.Tensor",
    }
    assert errors.keys() == texts.keys()
    for name, text in texts.items():
        assert text in errors[name], name


def run_wgrad(group):
    """Errors of `wgrad` into parts that do not fit."""
    zeros, errors = partial(torch.zeros, device=cases.device()), []
    grad, x, offsets = zeros(4, 16), zeros(4, 8), zeros(2, dtype=torch.int32)
    outs = zeros(1, 2, 4, 8), zeros(1, 2, 8, 9)[..., :8], zeros(2, 2, 8, 8)
    for out in outs:
        try:
            wgrad(grad, x, offsets, out=out)
        except ShapeError as error:
            errors.append(str(error))
    return errors


def test_parts_that_do_not_fit_are_refused(pool):
    [errors] = pool.run(run_wgrad, num_ranks=1)
    assert "out has shape [1, 2, 4, 8]" in errors[0]
    assert "contiguous and start at multiples of 16 bytes" in errors[1]
    assert "out has shape [2, 2, 8, 8]; it must be [1, P, N / P, 8]" in errors[2]
