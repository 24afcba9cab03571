"""Arguments of a layer that get other memory, by their `data`, between its forward and what comes
later: autograd does not see it, and sizes that no longer fit are refused before a launch."""

from __future__ import annotations

import cases
import pytest
import torch

from moe_engine import Buffer, DelayedWgrad, ShapeError, WgradSink, moe_ffn

HIDDEN, COLUMNS, EXPERTS, TOPK, TOKENS = 16, 8, 2, 2, 3


def new_layer(group, backend="auto"):
    """A Buffer of one rank, and the arguments of a layer that trains."""
    generator = torch.Generator().manual_seed(0)

    def new(*shape):
        return torch.randn(*shape, generator=generator).to(cases.device()).requires_grad_()

    sizes = 8, HIDDEN, EXPERTS, TOPK, torch.float32
    idx = torch.tensor([[0, 1], [1, 0], [1, -1]], device=cases.device())
    weights = new(EXPERTS, 2 * COLUMNS, HIDDEN), new(EXPERTS, HIDDEN, COLUMNS)
    args = new(TOKENS, HIDDEN), idx, new(TOKENS, TOPK), *weights
    return Buffer.for_tokens(group, *sizes, backend=backend), args


def set_shape(tensor, shape):
    """What a tensor had before it got memory of this shape."""
    old, tensor.data = tensor.data, tensor.data.new_zeros(shape)
    return old


CHANGES = {
    "fewer tokens": (0, (1, HIDDEN), "x"),
    "more tokens": (0, (9, HIDDEN), "x"),
    "narrow x": (0, (TOKENS, 4), "x"),
    "fewer ids": (1, (1, TOPK), "topk_idx"),
    "other top-k": (1, (TOKENS, 1), "topk_weights"),
    "fewer weights": (2, (1, TOPK), "topk_weights"),
    "narrow w_gate_up": (3, (EXPERTS, 2 * COLUMNS, 4), "w_gate_up"),
    "fewer experts": (3, (1, 2 * COLUMNS, HIDDEN), "w_down"),
    "narrow w_down": (4, (EXPERTS, HIDDEN, 4), "w_down"),
}


def run_backwards(group, backend, save):
    """The arguments that backwards refuse by name; the last one passes."""
    buffer, args = new_layer(group, backend)
    refused = []
    for number, shape, _ in CHANGES.values():
        y = moe_ffn(*args, buffer, save=save)
        kept = set_shape(args[number], shape)
        with pytest.raises(ShapeError) as error:
            y.sum().backward()
        refused.append(str(error.value).split()[0])
        args[number].data = kept
    moe_ffn(*args, buffer, save=save).sum().backward()
    buffer.check()
    return refused


@pytest.mark.parametrize("save", ["pre", "rows"])
@pytest.mark.parametrize("backend", ["auto", "collective"])
def test_sizes_that_changed_before_a_backward(pool, backend, save):
    (refused,) = pool.run(run_backwards, backend, save, num_ranks=1)
    assert refused == [name for _, _, name in CHANGES.values()]


def run_delayed(group, has_sink):
    """Whether gradients of weights that changed are refused, and come once the weights are back."""
    buffer, args = new_layer(group)
    up, down = args[3:]
    sink = WgradSink(torch.zeros_like(up.data), torch.zeros_like(down.data)) if has_sink else None
    moe_ffn(*args, buffer).sum().backward()
    expected = up.grad, down.grad
    up.grad = down.grad = None
    later = DelayedWgrad(sink)
    moe_ffn(*args, buffer, wgrad=later).sum().backward()
    for weight, shape in (up, (EXPERTS, 2 * COLUMNS, 4)), (down, (1, HIDDEN, COLUMNS)):
        kept = set_shape(weight, shape)
        with pytest.raises(ShapeError, match=r"weights have shapes .* call backward_dw\(\) again"):
            later.backward_dw()
        weight.data = kept
    later.backward_dw()
    found = (up.grad, down.grad) if sink is None else (sink.gate_up, sink.down)
    return [torch.equal(*pair) for pair in zip(found, expected, strict=True)]


@pytest.mark.parametrize("has_sink", [False, True])
def test_weights_that_changed_before_delayed_gradients(pool, has_sink):
    assert pool.run(run_delayed, has_sink, num_ranks=1) == [[True, True]]
