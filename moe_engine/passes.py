"""A layer in sub-batches, and in passes: in more calls than one.

A call takes up to `SlotLayout.most_rows` tokens of a rank. A layer of a Buffer that was made for
more goes in as many calls as the most that any rank may bring need: `max_tokens` of the layer, or
of the Buffer. All ranks know this number, so they make equally many calls without asking. Each rank
cuts its own tokens into as many sub-batches of nearly the same size.

Example, calls of up to 8 tokens and max_tokens 20, so 3 sub-batches: a rank with 20 tokens sends
8, 8 and 4, one with 7 sends 4, 3 and 0, and one with none takes part in 3 calls.

With `Options.capacity_factor` a rank has room for a part of the rows of experts that can come: for
those of any slice, where the tokens of each rank are cut into `Options.num_passes` slices.

A layer, or a sub-batch, first sends all its tokens. The exchange of counts tells every rank alike
whether the rows of each rank have room: then they go, and it is done. If not, that call sends
nothing, and the slices follow, each in a call of its own. In a CUDA graph they always follow: where
the first call was enough, their ids are -1, and they send nothing.

Example, 2 ranks of 2 experts, capacity_factor 1, so 2 passes, and 8 tokens with one expert each:
there is room for 2 * 4 * 1 rows on a rank. Experts 0 0 1 1 2 2 3 3 on both ranks bring 8 rows to
each, and take one call. 0 0 0 1 1 1 3 3 on both ranks bring 12 rows to rank 0: after a call that
sends nothing, tokens 0 to 3 of both ranks bring it 8 rows, then tokens 4 to 7 bring it 4.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .buffer import Buffer
from .checks import check_int
from .engines.base import (
    BiasGradients,
    Gradients,
    LayerInputs,
    Saved,
    WeightGradients,
)
from .errors import RoutingError
from .streams import EventOverlap
from .symm.slots import SlotLayout, slice_size
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
        of = self.saved  # `_replace` takes three times as long
        saved = Saved(of.save, tuple(tensors[1:]), of.num_rows, is_kept, of.overflow, of.forward)
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


SubBatch = list[Pass]
"""The passes of a sub-batch: of the tokens of a rank that one call can take."""


def num_sub_batches(buffer: Buffer, max_tokens: int | None = None) -> int:
    """In how many sub-batches a layer goes to which no rank brings more than max_tokens tokens, or
    more than the Buffer was made for. It is equal on all ranks, as both are."""
    if not buffer.takes_sub_batches:
        return 1
    return max(1, -(-_most_tokens(buffer, max_tokens) // SlotLayout.most_rows))


def _most_tokens(buffer: Buffer, max_tokens: int | None) -> int:
    """The most tokens that a rank may bring to such a layer."""
    most = buffer.options.max_tokens
    assert most is not None
    return most if max_tokens is None else min(most, check_int("max_tokens", max_tokens, 0))


def sub_batches_of(num_tokens: int, number: int) -> list[Pass]:
    """A pass for each of so many sub-batches of a rank's tokens, which has saved nothing yet."""
    if number == 1:
        return [Pass(None, NOTHING)]
    return [Pass(tokens, NOTHING) for tokens in _slices(0, num_tokens, number)]


def _slices(begin: int, end: int, number: int) -> list[slice]:
    """So many slices of these tokens, of nearly the same size."""
    size = slice_size(end - begin, number)
    edges = [min(begin + n * size, end) for n in range(number + 1)]
    return [slice(*pair) for pair in itertools.pairwise(edges)]


def may_take_passes(inputs: LayerInputs, buffer: Buffer, options: LayerOptions) -> bool:
    """Whether a layer without gradients may take more calls than one: it goes in sub-batches, or
    rows of experts may have no room; by low-latency calls they have."""
    if buffer.takes_sub_batches and num_sub_batches(buffer, options.max_tokens) > 1:
        return True
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
) -> tuple[list[SubBatch], Trained]:
    """The layer, by one call of `forward` or more."""
    made = [
        _forward_sub_batch(buffer, tensors, options, forward, one)
        for one in _sub_batches(buffer, tensors, options)
    ]
    batches, done = zip(*made, strict=True)
    if len(batches) == 1:
        return list(batches), done[0]
    for one in done:
        one.event.current_stream_wait()
    return list(batches), _sum_up(done, torch.cat([one.out for one in done]))


def _sub_batches(buffer: Buffer, tensors: LayerTensors, options: LayerOptions) -> list[Pass]:
    """The sub-batches of a layer, of arguments that are checked before they are cut. A layer that
    trains goes in as many as the Buffer's max_tokens needs: the forward that a checkpoint repeats
    may be called with another number, and must save as many tensors. More tokens than the layer may
    have go in one call, which refuses them."""
    if not buffer.takes_sub_batches:
        return sub_batches_of(0, 1)
    max_tokens = options.max_tokens
    number = num_sub_batches(buffer, None if options.is_trained else max_tokens)
    if number > 1:
        buffer._check_layer(tensors.inputs)
        number = number if len(tensors.x) <= _most_tokens(buffer, max_tokens) else 1
    return sub_batches_of(len(tensors.x), number)


def _forward_sub_batch(
    buffer: Buffer, tensors: LayerTensors, options: LayerOptions, forward: Forward, whole: Pass
) -> tuple[SubBatch, Trained]:
    """A sub-batch of the layer, by one call or more."""
    first, all_tokens = _forward_pass(buffer, tensors, options, forward, whole)
    overflow = first.saved.overflow
    if not isinstance(overflow, Tensor) and not overflow:
        return [first], all_tokens
    all_tokens.event.current_stream_wait()  # in a graph the slices read its overflow
    slices = passes_of_slices(buffer, tensors.topk_idx, whole, overflow)
    made = [_forward_pass(buffer, tensors, options, forward, one) for one in slices]
    every = [(first, all_tokens), *made]
    for _, one in made:
        one.event.current_stream_wait()
    passes, done = zip(*(every if isinstance(overflow, Tensor) else made), strict=True)
    out = _joined(overflow, [one.out for one in done])
    return list(passes), _sum_up([one for _, one in every], out)


def _sum_up(done: Sequence[Trained], out: Tensor) -> Trained:
    """What several calls have found, but for their results, which have been joined."""
    error = next((one.error for one in done if one.error is not None), None)
    counts = [one.counts for one in done if one.counts is not None]
    total = torch.stack(counts).sum(0, dtype=torch.int32) if counts else None
    return Trained(out, EventOverlap(), total, error)


def passes_of_slices(
    buffer: Buffer, topk_idx: Tensor, whole: Pass, overflow: Tensor | int
) -> list[Pass]:
    """A pass for each slice of the tokens of a `whole` sub-batch, which has saved nothing yet.
    overflow: see `Saved`."""
    begin, end, _ = (whole.tokens or slice(None)).indices(len(topk_idx))
    made = []
    for tokens in _slices(begin, end, buffer.options.num_passes(buffer.group_size)):
        ids = None
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
    batches: Sequence[SubBatch],
    backward: Callable[..., PassGradients],
) -> PassGradients:
    """The gradients of a layer, by a call of `backward` for each pass, in the forward's order."""
    done: list[PassGradients] = []
    for one in itertools.chain(*batches):
        part = dy if one.tokens is None else dy[one.tokens]
        earlier = done[-1] if done else None
        done.append(backward(part, one.part_of(tensors), one.saved, earlier))
    if len(done) == 1:
        return done[0]
    made = [one.found for one in done]
    dx = _of_all_tokens(batches, [one.x for one in made])
    topk_grads = _of_all_tokens(batches, [one.topk_weights for one in made])
    computes = [one.later for one in made if one.later is not None]

    def later(into: WeightGradients) -> None:
        for number, compute in enumerate(computes):
            compute(into._replace(accumulate=into.accumulate or number > 0))

    of_passes = zip(*(one.biases for one in made), strict=True)
    biases = BiasGradients(*(None if one[0] is None else sum(one) for one in of_passes))
    found = Gradients(dx, topk_grads, later if computes else None, made[0].weights, biases)
    return PassGradients(found, done[0].grads)


def _of_all_tokens(batches: Sequence[SubBatch], found: Sequence[Tensor]) -> Tensor:
    """What the passes of all sub-batches have found, of all tokens."""
    rest = iter(found)
    joined = [
        _joined(passes[0].saved.overflow, [*itertools.islice(rest, len(passes))])
        for passes in batches
    ]
    return joined[0] if len(joined) == 1 else torch.cat(joined)


def _joined(overflow: Tensor | int | None, found: list[Tensor]) -> Tensor:
    """What the passes of a sub-batch have found, of all its tokens; in a graph, where the first is
    the call with all of them, what that one has found if it was enough."""
    if isinstance(overflow, Tensor):
        return torch.where(overflow > 0, torch.cat(found[1:]), found[0])
    return found[0] if len(found) == 1 else torch.cat(found)
