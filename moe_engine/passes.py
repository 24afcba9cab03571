"""A layer in passes. With `Options.capacity_factor` a rank has room for a part of the rows of
experts that can come: for those of any slice, where the tokens of each rank are cut into
`Options.num_passes` slices.

A layer first sends all tokens. The exchange of counts tells every rank alike whether the rows of
each rank have room: then they go, and the layer is done. If not, that call sends nothing, and the
slices follow, each in a call of its own. In a CUDA graph they always follow: where the first call
was enough, their ids are -1, and they send nothing.

Example, 2 ranks of 2 experts, capacity_factor 1, so 2 passes, and 8 tokens with one expert each:
there is room for 2 * 4 * 1 rows on a rank. Experts 0 0 1 1 2 2 3 3 on both ranks bring 8 rows to
each, and take one call. 0 0 0 1 1 1 3 3 on both ranks bring 12 rows to rank 0: after a call that
sends nothing, tokens 0 to 3 of both ranks bring it 8 rows, then tokens 4 to 7 bring it 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .buffer import Buffer
from .engines.base import (
    BiasGradients,
    Gradients,
    LayerInputs,
    Saved,
    WeightGradients,
)
from .errors import RoutingError
from .streams import EventOverlap
from .symm.slots import slice_size
from .weight_gradients import Grads

if TYPE_CHECKING:
    from .training import LayerOptions, LayerTensors

Forward = Callable[..., tuple[Tensor, Saved, Tensor | None, EventOverlap]]
"""(result, what is saved, counts, event) of a layer in one call, of (buffer, tensors, options)."""


class Pass(NamedTuple):
    """What a pass leaves for the backward: its tokens, None for all, what it saved, and in a graph
    its ids."""

    tokens: slice | None
    saved: Saved
    topk_idx: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Those that autograd is to save."""
        return self.topk_idx, *self.saved.tensors

    def having(self, tensors: Sequence[Tensor | None], is_kept: bool = True) -> Pass:
        """This pass with other tensors; is_kept: see `Saved`."""
        saved = self.saved._replace(tensors=tuple(tensors[1:]), is_kept=is_kept)
        return Pass(self.tokens, saved, tensors[0])

    def part_of(self, tensors: LayerTensors) -> LayerTensors:
        """The tensors of its tokens."""
        if self.tokens is None:  # not checked yet
            return tensors
        x, topk_idx, topk_weights, *_ = tensors
        ids = topk_idx[self.tokens] if self.topk_idx is None else self.topk_idx
        x, topk_weights = x[self.tokens], topk_weights[self.tokens]
        return tensors._replace(x=x, topk_idx=ids, topk_weights=topk_weights)


NOTHING = Saved("none", (None, None))


class Trained(NamedTuple):
    """A layer's result [T, H], whose gradient runs its backward; the event that ends the call; the
    counts per expert, where they are asked for; the RoutingError that it found, if any."""

    out: Tensor
    event: EventOverlap
    counts: Tensor | None
    error: RoutingError | None


class PassGradients(NamedTuple):
    """The gradients of a pass, or of all; and what autograd gets for the weights."""

    found: Gradients
    grads: Grads


def may_take_passes(inputs: LayerInputs, buffer: Buffer, options: LayerOptions) -> bool:
    """Whether rows of experts may have no room; by low-latency calls they have."""
    if buffer.options.capacity_factor is None or not buffer.has_fused_layers:
        return False
    if buffer.options.num_passes(buffer.group_size) == 1:
        return False
    buffer._check_layer(inputs)
    x, topk_idx, _, w_gate_up, *_ = inputs
    most_tokens = buffer._most_tokens(x, topk_idx, w_gate_up, options.max_tokens)
    return bool(options.return_counts) or not most_tokens


def forward_in_passes(
    buffer: Buffer, tensors: LayerTensors, options: LayerOptions, forward: Forward
) -> tuple[list[Pass], Trained]:
    """The layer, by one call of `forward` or more."""
    first, all_tokens = _forward_pass(buffer, tensors, options, forward, Pass(None, NOTHING))
    overflow = first.saved.overflow
    if not isinstance(overflow, Tensor) and not overflow:
        return [first], all_tokens
    all_tokens.event.current_stream_wait()  # in a graph the slices read its overflow
    slices = passes_of_slices(buffer, tensors.topk_idx, overflow)
    made = [_forward_pass(buffer, tensors, options, forward, one) for one in slices]
    for _, done in made:
        done.event.current_stream_wait()
    every = [(first, all_tokens), *made]
    error = next((done.error for _, done in every if done.error is not None), None)
    counts = [done.counts for _, done in every if done.counts is not None]
    total = torch.stack(counts).sum(0, dtype=torch.int32) if counts else None
    passes, parts = zip(*(every if isinstance(overflow, Tensor) else made), strict=True)
    out = _joined(overflow, [done.out for done in parts])
    return list(passes), Trained(out, EventOverlap(), total, error)


def passes_of_slices(buffer: Buffer, topk_idx: Tensor, overflow: Tensor | int) -> list[Pass]:
    """A pass for each slice of the tokens, which has saved nothing yet. overflow: see `Saved`."""
    num_passes, num_tokens = buffer.options.num_passes(buffer.group_size), len(topk_idx)
    size, made = slice_size(num_tokens, num_passes), []
    for number in range(num_passes):
        begin, end = (min(n * size, num_tokens) for n in (number, number + 1))
        tokens, ids = slice(begin, end), None
        if isinstance(overflow, Tensor):
            ids = torch.where(overflow > 0, topk_idx[tokens], -1)
        made.append(Pass(tokens, NOTHING, ids))
    return made


def _forward_pass(
    buffer: Buffer, tensors: LayerTensors, options: LayerOptions, forward: Forward, one: Pass
) -> tuple[Pass, Trained]:
    error = None
    try:
        out, saved, counts, event = forward(buffer, one.part_of(tensors), options)
    except RoutingError as problem:  # the call was made, and may go backward
        if not isinstance(problem.result, tuple):
            raise
        error, (out, saved, counts, event) = problem, problem.result
    return Pass(one.tokens, saved, one.topk_idx), Trained(out, event, counts, error)


def backward_in_passes(
    dy: Tensor,
    tensors: LayerTensors,
    passes: Sequence[Pass],
    backward: Callable[..., PassGradients],
) -> PassGradients:
    """The gradients of a layer, by a call of `backward` for each pass, in the forward's order."""
    done: list[PassGradients] = []
    for one in passes:
        part = dy if one.tokens is None else dy[one.tokens]
        earlier = done[-1] if done else None
        done.append(backward(part, one.part_of(tensors), one.saved, earlier))
    if len(done) == 1:
        return done[0]
    overflow, made = passes[0].saved.overflow, [one.found for one in done]
    dx = _joined(overflow, [one.x for one in made])
    topk_grads = _joined(overflow, [one.topk_weights for one in made])
    computes = [one.later for one in made if one.later is not None]

    def later(into: WeightGradients) -> None:
        for number, compute in enumerate(computes):
            compute(into._replace(accumulate=into.accumulate or number > 0))

    of_passes = zip(*(one.biases for one in made), strict=True)
    biases = BiasGradients(*(None if one[0] is None else sum(one) for one in of_passes))
    found = Gradients(dx, topk_grads, later if computes else None, made[0].weights, biases)
    return PassGradients(found, done[0].grads)


def _joined(overflow: Tensor | int | None, parts: list[Tensor]) -> Tensor:
    """What slices have found, of all tokens; in a graph, where the first part is what the call with
    all tokens has found, that one if it was enough."""
    if isinstance(overflow, Tensor):
        return torch.where(overflow > 0, torch.cat(parts[1:]), parts[0])
    return torch.cat(parts)
