"""`moe_ffn` as a node of torch's autograd: one for the whole layer.

It is a torch.autograd.Function, and no operator of torch.library: the outputs of an operator are
tensors, so that the event of `start_moe_ffn` would have no place, and its arguments have types, so
that a WgradSink would have none. Compiled code, and modes of torch, have the operators of
`layer_operators.py`.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, NamedTuple

import torch

from . import checks
from .buffer import Buffer
from .callers import Tag
from .device.context import SAVE_POLICIES
from .engines.base import Into, LayerInputs, NewWeightGradients, Saved
from .errors import BackendError, DtypeError, RoutingError, ShapeError
from .grouped_gemm.activations import AnyActivation, num_parts
from .lifecycle import verb
from .passes import PassGradients, SubBatch, Trained, backward_in_passes, forward_in_passes
from .sharded_weights import arrived
from .streams import EventOverlap, is_captured
from .torch_privates import keeps_graph
from .utils import ROUTED_ANEW, saved_tensors
from .weight_gradients import DelayedWgrad, Grads, LayerWeights, Wgrad, WgradSink, new_memory
from .weight_layouts import GateUp

POLICIES = "auto", *SAVE_POLICIES[1:]


class LayerTensors(NamedTuple):
    """The tensors of a layer as the caller has them, and its activation."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    weights: LayerWeights
    b_gate_up: torch.Tensor | None = None
    b_down: torch.Tensor | None = None
    activation: AnyActivation = "swiglu"
    s_gate_up: torch.Tensor | None = None
    s_down: torch.Tensor | None = None

    @property
    def inputs(self) -> LayerInputs:
        """As engines take them."""
        x, ids, weights, (gate_up, down), b_up, b_down, activation, s_up, s_down = self
        w_gate_up = gate_up.by_parts()
        return LayerInputs(x, ids, weights, w_gate_up, down, b_up, b_down, activation, s_up, s_down)

    @property
    def flat(self) -> tuple[torch.Tensor | None, ...]:
        """As autograd takes them, without scales, as e4m3 has no gradients."""
        return *self[:3], *self.weights.tensors, self.b_gate_up, self.b_down

    @property
    def routed(self) -> dict[str, torch.Tensor]:
        """What the router gives, by name."""
        return {"x": self.x, "topk_idx": self.topk_idx, "topk_weights": self.topk_weights}


class LayerOptions(NamedTuple):
    """How a layer is called, see `moe_engine.moe_ffn`; is_trained: whether it has gradients."""

    max_tokens: int | None = None
    save: str = "auto"
    wgrad: Wgrad = None
    return_counts: bool = False
    async_finish: bool = False
    is_trained: bool = True
    tag: Tag | None = None

    def check(self) -> None:
        """Raise for what is no option."""
        check_save(self.save)
        if self.wgrad is not None and not isinstance(self.wgrad, WgradSink | DelayedWgrad):
            raise DtypeError(
                f"wgrad is {checks.shown(self.wgrad)}; it must be a WgradSink, a DelayedWgrad, or "
                "None."
            )
        checks.check_flag("return_counts", self.return_counts)


class TrainingMemory(NamedTuple):
    """Bytes of a rank for the rows of one layer that trains: what stays from forward to backward,
    and the most that there is while its forward and its backward run, with what stays."""

    saved: int
    forward: int
    backward: int


def training_memory(
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    num_rows: int,
    save: str = "auto",
    retain_graph: bool = False,
    activation: AnyActivation = "swiglu",
) -> TrainingMemory:
    """The memory that a layer with experts w_gate_up [L, 2I, H] and w_down [L, H, I] takes for
    num_rows rows of experts: tokens times top-k, if routing is balanced; see docs/training.md.

    Not a part of it: the Buffer's memory, what grows with tokens alone (the result and the gradient
    of x [T, H], and the plans of a call), the gradients of weights, and rows for those that are
    delayed. retain_graph: as in `torch.autograd.backward`; then saved pre-activations are not
    overwritten. A non-gated activation has w_gate_up [L, I, H], and pre-activations [M, I].
    """
    check_save(save)
    checks.check_int("num_rows", num_rows, 0)
    hidden, columns = w_down.shape[1:]
    save = chosen_policy(save, hidden, columns)
    pre, x, act = num_parts(activation) * columns, hidden, columns
    saved = pre * (save in ("pre", "all")) + x * (save in ("rows", "all"))
    working = act + hidden + pre * (save not in ("pre", "all") or retain_graph)
    size, row_weight = num_rows * w_down.itemsize, 4 * num_rows
    return TrainingMemory(size * saved, size * (saved + act), size * (saved + working) + row_weight)


def check_save(save: object) -> None:
    """`save` is a policy's name."""
    if not isinstance(save, str) or save not in POLICIES:
        raise ShapeError(f"save is {checks.shown(save)}; it must be one of {POLICIES}.")


def chosen_policy(save: str, hidden: int, columns: int, is_fused: bool = True) -> str:
    """The policy that `save` means: auto saves what is smaller; in layers that are not fused, which
    save no pre-activations, the rows, one for each token and rank."""
    if save != "auto":
        return save
    return "pre" if is_fused and columns < hidden else "rows"


def wants_gradients(*tensors: Any) -> bool:
    """Whether autograd would ask for a gradient of one of these."""
    return torch.is_grad_enabled() and any(getattr(one, "requires_grad", False) for one in tensors)


def trained_layer(tensors: LayerTensors, buffer: Buffer, options: LayerOptions) -> Trained:
    """The layer as a node of autograd."""
    return Trained(*_MoeFfn.apply(tensors, buffer, options, *tensors.flat))


class _MoeFfn(torch.autograd.Function):
    """The node of autograd that a layer is. `flat` holds the tensors of `LayerTensors`."""

    @staticmethod
    def forward(
        ctx: Any,
        tensors: LayerTensors,
        buffer: Buffer,
        options: LayerOptions,
        *flat: torch.Tensor | None,
    ) -> tuple[torch.Tensor, EventOverlap, torch.Tensor | None, RoutingError | None]:
        batches, done = forward_in_passes(buffer, tensors, options, _forward)
        passes = itertools.chain(*batches)
        ctx.save_for_backward(*flat, *itertools.chain(*(one.tensors for one in passes)))
        ctx.topk_idx = tensors.topk_idx.clone() if buffer.options.debug else None
        ctx.buffer, ctx.wgrad, of = buffer, options.wgrad, tensors.weights.gate_up
        # Without wgrad no weights: what saves tensors elsewhere, or drops them, must have the last.
        ctx.weights = None if options.wgrad is None else tensors.weights
        ctx.gate_up = len(of.tensors), of.layout, of.name
        ctx.activation = tensors.activation
        ctx.batches = [[(len(one.tensors), one.having([None])) for one in each] for each in batches]
        if done.counts is not None:
            ctx.mark_non_differentiable(done.counts)
        return done.out, done.event, done.counts, done.error

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor, *_: None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise BackendError(
                "a layer has no second-order gradients; call backward without create_graph."
            )
        _, _, _, of_x, _, of_topk, *of_gate_up, of_down, _, _ = ctx.needs_input_grad
        wanted, weights, wgrad = (any(of_gate_up), of_down), ctx.weights, ctx.wgrad
        tensors, batches = _saved_tensors(ctx)
        if ctx.topk_idx is not None and not torch.equal(ctx.topk_idx, tensors.topk_idx):
            raise BackendError(ROUTED_ANEW)
        run = partial(_backward, ctx.buffer, wgrad, wanted)
        found, grads = backward_in_passes(arrived(dy), tensors, batches, run)
        dx, dw = found.x if of_x else None, found.topk_weights
        if wgrad is not None:
            grads = wgrad.launched(found.later, weights, wanted)
        biases = (None if one is None else one.to(dy.dtype) for one in found.biases)
        return None, None, None, dx, None, dw if of_topk else None, *grads, *biases


def _saved_tensors(ctx: Any) -> tuple[LayerTensors, list[SubBatch]]:
    """The tensors of a forward, and its sub-batches. BackendError for what was changed since."""
    try:
        x, topk_idx, topk_weights, *tensors = saved_tensors(ctx)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise BackendError(
            "an argument of moe_ffn, or what it saved, was changed in place between the forward "
            f"and the backward, whose gradients would be wrong: {error} Step the optimizer after "
            "the backward, and pass clones of what changes before."
        ) from error
    # Not those of ctx.weights: torch.utils.checkpoint saves others, and computes them again.
    num_gate_up, *form = ctx.gate_up
    gate_up = GateUp(tuple(tensors[:num_gate_up]), *form).in_one_memory()
    down, b_gate_up, b_down = tensors[num_gate_up:][:3]
    weights = LayerWeights(gate_up, down)
    is_kept = keeps_graph()  # retain_graph=True
    rest = iter(tensors[num_gate_up + 3 :])
    batches = [
        [one.having([*itertools.islice(rest, size)], is_kept) for size, one in passes]
        for passes in ctx.batches
    ]
    return LayerTensors(
        x, topk_idx, topk_weights, weights, b_gate_up, b_down, ctx.activation
    ), batches


@verb
def _forward(
    buffer: Buffer, tensors: LayerTensors, options: LayerOptions
) -> tuple[torch.Tensor, Saved, torch.Tensor | None, EventOverlap]:
    """(result, what is saved, counts per expert, event)."""
    engine, inputs, save = buffer._ready(), tensors.inputs, options.save
    x, max_tokens = inputs.x, options.max_tokens
    described = engine.describe(*inputs, max_tokens, save, weights=inputs.w_down)
    kind = described.kind
    if not kind.is_checked:
        buffer._check_layer(inputs)
        checks.check_max_tokens(len(x), max_tokens)
    if options.wgrad is not None:
        options.wgrad.check(tensors.weights, **tensors.routed)
    in_graph = is_captured(x)
    knows_rows = buffer.group_size == 1 and buffer.has_fused_layers
    if in_graph and save != "none" and not knows_rows:
        raise BackendError(
            f'save is "{save}" in a CUDA graph\'s capture, where the host cannot read how many '
            'rows come from other ranks. Pass save="none", on all ranks.'
        )
    hidden, columns = inputs.w_down.shape[1:]
    save = chosen_policy(save, hidden, columns, buffer.has_fused_layers)
    caller = buffer._caller_of_layer(inputs, kind, options.tag)
    with buffer._streams.call(None, options.async_finish, caller=caller) as call:
        if call.is_async:
            call.reads(*inputs.tensors)
        packed = inputs if kind.is_packed else inputs.packed
        kind.is_packed = packed is inputs
        how = packed, save, in_graph, described.if_packed
        out, saved, counts = engine.moe_ffn_forward(*how)
        saved = saved._replace(forward=buffer._streams.callers.new_forward())
        if call.is_async:
            call.returns(out, counts, *saved.tensors)
    kind.is_checked = True
    return out, saved, counts if options.return_counts else None, call.event


@verb
def _backward(
    buffer: Buffer,
    wgrad: Wgrad,
    wanted: tuple[bool, bool],
    dy: torch.Tensor,
    tensors: LayerTensors,
    saved: Saved,
    earlier: PassGradients | None = None,
) -> PassGradients:
    """The gradients of a pass, those of the weights added to what an earlier pass has found."""
    engine = buffer._ready()
    into: Into
    grads: Grads = ()
    callers = buffer._streams.callers
    with buffer._streams.call(caller=callers.backward_of(saved.forward)):
        if not saved.is_kept:
            callers.end_forward(saved.forward)
        if earlier is not None:
            grads, memory = earlier.grads, earlier.found.weights
            into = None if memory is None else memory._replace(accumulate=True)
        elif wgrad is not None:
            into = wgrad.memory(tensors.weights, wanted, **tensors.routed)
        elif tensors.weights.gate_up.is_one:
            into = NewWeightGradients(*wanted)
        else:
            into, grads = new_memory(tensors.weights, wanted)
        found = engine.moe_ffn_backward(dy, tensors.inputs, saved, into)
    if isinstance(into, NewWeightGradients):
        assert found.weights is not None
        grads = found.weights[:2]
    return PassGradients(found, grads)
