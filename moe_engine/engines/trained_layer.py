"""The steps of a layer that trains: a forward that saves, and its backward.

The backward sends dy where the forward sent x, by the forward's launches, multiplies by the weights
transposed, and returns the gradient of x as the forward returned its result. With G = dy @ w_down
of an expert row, a its activations and w its weight, the gradient of w is <G, a>, and that of a is
w G (as in SonicMoE): so the down-projection's result is neither saved nor made again.

Nothing that is saved lies in symmetric memory. Rows stand at the same places in the backward, since
the same routing always gives the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .. import combine, dispatch, routing
from ..call_memory import leaves
from ..combine.fused_sum_kernels import LayerSums, fused_sum_kernel
from ..combine.return_metadata_kernels import send_return_metadata_kernel
from ..device.context import Kind, Role, saved_number
from ..dispatch.fused_kernels import copy_rows_kernel
from ..dispatch.place_rows_kernels import RowPlan
from ..dispatch.stages import StageCounters, StagedSchedule
from ..grouped_gemm.backward import (
    bias_gradient,
    launch_activation_gradient,
    launch_bias_weight_gradient,
    launch_wgrad,
)
from ..grouped_gemm.backward_kernels import ActivationRows
from ..grouped_gemm.launch import launch_product
from ..grouped_gemm.operands import Epilogue, Rows, Weights
from ..grouped_gemm.quantization import QuantizedRows
from ..kinds import Described
from ..prepared import PreparedCalls, with_size
from ..streams import record
from .base import (
    BiasGradients,
    Gradients,
    Into,
    LayerInputs,
    Saved,
    WeightGradientRows,
    WeightGradients,
    check_backward,
    memory_of,
)
from .fused_layer import combine_experts, down_rows, up_projection
from .training_step import Step

if TYPE_CHECKING:
    from .kernel import KernelEngine


# --- The forward ---------------------------------------------------------------------------------


class Exchanged(NamedTuple):
    """What a rank knows after the exchange: of its own tokens, and where rows begin on all."""

    layout: routing.RoutingLayout
    offsets: dispatch.ExpertOffsets


class Sent(NamedTuple):
    """Where rows are on their way to, and the words of `StageCounters`."""

    plan: RowPlan
    schedule: StagedSchedule
    words: torch.Tensor


KeptRows = tuple[torch.Tensor | None, torch.Tensor | None]
"""What is saved: pre-activations [M, 2I] and rows [M, H]."""


class ForwardRows(NamedTuple):
    """What a forward makes of its expert rows: activations [M, I], and what it saves of the
    pre-activations [M, 2I] and of the rows [M, H]; memory for activations in e4m3, see
    `QuantizedRows`, where the weights are."""

    act: torch.Tensor
    pre: torch.Tensor | None
    x: torch.Tensor | None
    cast: torch.Tensor | None

    @classmethod
    def empty(cls, inputs: LayerInputs, save: str, max_rows: int) -> ForwardRows:
        """Room for max_rows."""
        x, columns = inputs.x, inputs.w_down.shape[2]
        act = x.new_empty(max_rows, columns)
        pre = x.new_empty(max_rows, inputs.parts * columns) if save in ("pre", "all") else None
        kept = x.new_empty(max_rows, x.shape[1]) if save in ("rows", "all") else None
        cast = QuantizedRows.like(act).memory if inputs.is_quantized else None
        return cls(act, pre, kept, cast)

    @property
    def kept(self) -> KeptRows:
        """What is saved."""
        return self.pre, self.x


def forward(
    engine: KernelEngine,
    inputs: LayerInputs,
    save: str,
    is_captured: bool,
    described: Described | None = None,
) -> tuple[torch.Tensor, Saved, torch.Tensor]:
    """The result of a layer, what is saved for its backward, and counts int32 [E].

    The host reads the number of rows that come while they are on their way, and allocates as many;
    it waits for the exchange of counts alone. On one rank, and in a capture, it allocates as many
    as can come, and waits for nothing.
    """
    number = saved_number(save)
    described = described or engine.describe(*inputs, save, weights=inputs.w_down)
    first: dict[str, Any] = dict(before=engine.reserve_expert_rows, described=described)
    if is_captured or gets_own_rows(engine):
        num_rows = most_rows(engine, inputs)
        first |= dict(max_rows=max(1, num_rows))
        out, kept, counts, overflow = engine.call(_forward, inputs, save, number, **first)
        known = num_rows if gets_own_rows(engine) else -1
        return out, Saved(save, kept, known, overflow=overflow), counts
    exchanged = engine.call(_exchange, inputs, number, **first)
    engine.concurrent_reads.mark()
    described = described.more(leaves(exchanged))
    # The products run while rows arrive, so these two parts overlap.
    sent = engine.call(_send, inputs, exchanged, described=described, as_one=False)
    described, overflow = described.more(leaves(sent)), 0
    found = exchanged.offsets.expert_offsets[-1:]
    if exchanged.offsets.overflow is None:
        (num_rows,) = engine.concurrent_reads.read(lambda: found)
    else:
        both = found, exchanged.offsets.overflow
        num_rows, overflow = engine.concurrent_reads.read(lambda: torch.cat(both))
    engine.context.check()
    last: dict[str, Any] = dict(described=described, max_rows=max(1, num_rows), as_one=False)
    out, kept = engine.call(_finish, inputs, exchanged, sent, save, **last)
    return out, Saved(save, kept, num_rows, overflow=overflow), exchanged.offsets.counts


def gets_own_rows(engine: KernelEngine) -> bool:
    """Whether all rows that come are of this rank's own tokens."""
    return engine.slots.num_ranks == 1


def most_rows(engine: KernelEngine, inputs: LayerInputs) -> int:
    """How many expert rows can come. On one rank so many come, unless ids are -1."""
    if gets_own_rows(engine):
        return inputs.topk_idx.numel()
    return engine.layer_rows(inputs).most


def _forward(
    engine: KernelEngine, inputs: LayerInputs, save: str, number: int, max_rows: int
) -> tuple[torch.Tensor, KeptRows, torch.Tensor, torch.Tensor | None]:
    """(the result, what is saved, counts, overflow: see `Saved`)"""
    rows = ForwardRows.empty(inputs, save, max_rows)  # as many in each call of a kind
    exchanged = _exchange(engine, inputs, number)
    sent = _send(engine, inputs, exchanged, rows.x if gets_own_rows(engine) else None)
    out = _multiply(engine, inputs, exchanged, sent, rows)
    return out, rows.kept, exchanged.offsets.counts, exchanged.offsets.overflow


def _exchange(engine: KernelEngine, inputs: LayerInputs, number: int) -> Exchanged:
    step = Step.of(engine, inputs)
    tokens = step.tokens(inputs.x)
    call = dispatch.LayerCall(Kind.MOE_FFN, number)
    of = tokens, len(step.memory.rows), step.config, step.slots, call
    return Exchanged(tokens.layout, dispatch.exchange_fused(*of))


def _send(
    engine: KernelEngine,
    inputs: LayerInputs,
    exchanged: Exchanged,
    kept: torch.Tensor | None = None,
) -> Sent:
    """kept: see `send_rows`."""
    step = Step.of(engine, inputs)
    tokens = step.tokens(inputs.x, exchanged.layout)
    dispatched = step.send(tokens, exchanged.offsets, kept=kept)
    return Sent(dispatched.plan, dispatched.schedule, dispatched.counters.words)


def _finish(
    engine: KernelEngine,
    inputs: LayerInputs,
    exchanged: Exchanged,
    sent: Sent,
    save: str,
    max_rows: int,
) -> tuple[torch.Tensor, KeptRows]:
    """(the result, what is saved), once the host knows how many rows there are."""
    rows = with_size("max_rows", ForwardRows.empty(inputs, save, max_rows))
    return _multiply(engine, inputs, exchanged, sent, rows), rows.kept


def _multiply(
    engine: KernelEngine,
    inputs: LayerInputs,
    exchanged: Exchanged,
    sent: Sent,
    made: ForwardRows,
) -> torch.Tensor:
    """The products, while rows arrive and sums return."""
    step = Step.of(engine, inputs)
    slots, out = step.slots, torch.empty_like(inputs.x)
    own = made.x if gets_own_rows(engine) else None
    rows = step.memory.rows if own is None else own
    dispatched = dispatch.Dispatched(
        step.tokens(inputs.x, exchanged.layout),
        rows,
        exchanged.offsets,
        sent.plan,
        sent.schedule,
        StageCounters.of(sent.words, step.config, slots.num_ranks),
        step.config,
    )
    outputs = made.act, made.pre
    up_projection(rows, inputs, outputs, dispatched, step.tiles, slots)
    metadata = combine.send_return_metadata(dispatched, slots)
    if made.x is not None and own is None:
        num_rows = exchanged.offsets.expert_offsets[-1:]
        kept = made.x, num_rows, send_return_metadata_kernel
        dispatch.keep_rows(rows, *kept, slots)
    a = down_rows(made.act, inputs, dispatched, slots, made.cast)
    sums = LayerSums(out, step.memory.rows)
    how = dispatched, metadata, step.expected.balanced, slots
    combine_experts(a, inputs.down, sums, *how)
    return out


# --- The backward --------------------------------------------------------------------------------


class BackwardRows(NamedTuple):
    """Expert rows of a backward, in memory of this rank alone: rows of x [M, H], None where x is
    sent again; pre-activations [M, parts * I] and their gradient, which may be the same memory; the
    gradient of the activations [M, I], and then they themselves times their weights; the gradients
    of these weights [M]; rows of the gradient of x [M, H]. For gradients of weights that are
    computed later, memory for rows of x, where these are sent again, and of dy.
    """

    x: torch.Tensor | None
    pre: torch.Tensor
    pre_grad: torch.Tensor
    act: torch.Tensor
    weight_grad: torch.Tensor
    dx: torch.Tensor
    kept_x: torch.Tensor | None = None
    kept_dy: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        inputs: LayerInputs,
        saved: KeptRows,
        keeps_pre: bool,
        is_later: bool,
        max_rows: int,
        varies: bool,
    ) -> BackwardRows:
        """What was saved, and room for max_rows of the others, a number of the call where it
        `varies` from call to call of a kind. keeps_pre: the saved pre-activations stay."""
        (pre, rows), hidden, columns = saved, inputs.x.shape[1], inputs.w_down.shape[2]

        def new(*sizes: int, **options: Any) -> torch.Tensor:
            made = inputs.x.new_empty(max_rows, *sizes, **options)
            return with_size("max_rows", [made])[0] if varies else made

        pre = new(inputs.parts * columns) if pre is None else pre
        return cls(
            rows,
            pre,
            new(inputs.parts * columns) if keeps_pre else pre,
            new(columns),
            new(dtype=torch.float32),
            new(hidden),
            new(hidden) if is_later and rows is None else None,
            new(hidden) if is_later else None,
        )


def backward(
    engine: KernelEngine,
    dy: torch.Tensor,
    inputs: LayerInputs,
    saved: Saved,
    into: Into,
) -> Gradients:
    """The gradients of a layer. Where those of the weights are computed later, the rows that they
    are made of are kept."""
    room = max(1, most_rows(engine, inputs) if saved.num_rows < 0 else saved.num_rows)
    expected = -1 if gets_own_rows(engine) else saved.num_rows
    numbers: dict[str, Any] = dict(max_rows=room, expected_rows=expected)
    keeps_pre = saved.tensors[0] is not None and saved.is_kept
    memory = into or WeightGradients(None, None)
    of_call = *inputs, dy, saved.save, keeps_pre, into is None, *memory
    described = engine.describe(*of_call, weights=inputs.w_down)
    if not described.kind.is_checked:
        check_backward(dy, inputs, saved.tensors)
    x, topk_idx, topk_weights, *_ = inputs
    x, topk_idx, topk_weights, dy = described.packed(x, topk_idx, topk_weights, dy)
    if not described.kind.is_packed:
        inputs = inputs._replace(x=x, topk_idx=topk_idx, topk_weights=topk_weights)
    args = inputs, dy, saved.save, keeps_pre, into
    more: dict[str, Any] = dict(sized=saved.tensors, described=described.if_packed)
    before = engine.reserve_expert_rows
    results = engine.call(_backward, *args, before=before, **more, **numbers)
    described.kind.is_checked = True
    dx, topk_grads, made, biases, kept = results
    if kept is None:
        return Gradients(dx, topk_grads, None, made, biases)
    later = kept._replace(expected_rows=engine.layer_rows(inputs).balanced)
    return Gradients(dx, topk_grads, partial(later_weight_gradients, later), None, biases)


def _backward(
    engine: KernelEngine,
    inputs: LayerInputs,
    dy: torch.Tensor,
    save: str,
    keeps_pre: bool,
    into: Into,
    sized: KeptRows,
    max_rows: int,
    expected_rows: int,
) -> tuple[
    torch.Tensor,
    torch.Tensor,
    WeightGradients | None,
    BiasGradients,
    WeightGradientRows | None,
]:
    """Up to three calls of the same tokens. With `none` the first one sends x, for the
    pre-activations. The next one sends dy and returns dx. With `none` and `pre` the last one sends
    x, for the gradient of w_gate_up, which is computed from the rows where they arrive.

    So every product runs while rows come or sums return, and no rows of x are copied, but for
    gradients of weights that are computed later. Each call begins with an exchange, which says that
    this rank has read what came in the one before. Returns `Gradients`, at its end what those of
    the weights need that are computed later.
    """
    step, x = Step.of(engine, inputs, is_backward=True), inputs.x
    varies = not gets_own_rows(engine)
    rows = BackwardRows.of(inputs, sized, keeps_pre, into is None, max_rows, varies)
    slots, memory, act, pre_grad = step.slots, step.memory, rows.act, rows.pre_grad
    dx, topk_grads = torch.empty_like(dy), torch.empty_like(inputs.topk_weights)
    memory_of_weights = memory_of(into, inputs)
    of_gate_up, of_down, accumulate = memory_of_weights or WeightGradients(None, None)
    needs_x = into is None or of_gate_up is not None
    number = saved_number(save, needs_x or rows.x is not None)
    call = dispatch.LayerCall(Kind.MOE_FFN_BACKWARD, number), expected_rows
    up_outputs = act, rows.pre
    sent = None
    if save == "none":
        sent = step.begin(x, call)
        up_projection(sent.rows, inputs, up_outputs, sent, step.tiles, slots)
        dispatch.release(slots)
    # dy to the experts: the gradient of the activations, then of the pre-activations.
    sent = step.for_dy.begin(dy, call, sent)
    product = Rows(memory.rows), Weights(inputs.w_down, transposed=True), Epilogue()
    tiles, offsets = step.gradient_tiles, sent.offsets.expert_offsets
    if save == "rows" and rows.x is not None:  # dy arrives during the up-projection
        up_projection(rows.x, inputs, up_outputs, sent, step.tiles, slots)
        metadata = combine.send_return_metadata(sent, slots)
        slots.context.step = "activation_dgrad"
        trace = slots.context.traced(Role.DGRAD_DOWN)
        where = step.schedule(sent), act[None]
        launch_product(*product, *where, tiles, trace=trace, shares_sms=True)
    else:
        dispatch.dispatch_gemm(*product, act, sent, tiles, slots)
        metadata = combine.send_return_metadata(sent, slots)
    # All of dy has arrived when the launches above have ended, as a product there waited for every
    # row; so have the weights of rows, which their ranks stored before they raised any flag of dy.
    # Peers overwrite both in their next call alone, whose exchange this rank makes after its reads.
    trace = slots.context.traced(Role.ACTIVATION_GRADIENT)
    work = ActivationRows(act, rows.pre, memory.weights, pre_grad, act, rows.weight_grad)
    launch_activation_gradient(work, offsets, inputs.activation, trace)
    dy_rows = memory.rows[:max_rows]
    if inputs.b_down is not None:
        launch_bias_weight_gradient(dy_rows, inputs.b_down, rows.weight_grad, offsets)
    biases = bias_gradients(inputs, pre_grad, dy_rows, memory.weights, offsets)
    # dx, whose sums return as those of a forward, while the gradients of weights are computed.
    gradients, how = [], (accumulate, step.expected.balanced)
    if of_down is not None:
        of = dy_rows, act, of_down, *how
        gradients.append(combine.WeightGradient(*of, Role.WGRAD_DOWN))
    if of_gate_up is not None and rows.x is not None:
        of = pre_grad, rows.x, of_gate_up, *how
        gradients.append(combine.WeightGradient(*of, Role.WGRAD_UP))
    sums = LayerSums(dx, rows.dx, topk_grads, rows.weight_grad)
    returned = sums, sent, metadata, step.expected.balanced, slots
    combine_experts(Rows(pre_grad), inputs.up_transposed, *returned, gradients)
    if rows.kept_dy is not None:
        num_rows = sent.offsets.expert_offsets[-1:]
        dispatch.keep_rows(memory.rows, rows.kept_dy, num_rows, fused_sum_kernel, slots)
        slots.context.end_call()
    if needs_x and rows.x is None:
        sent = step.begin(x, call, sent)
        if of_gate_up is not None:
            dispatch.dispatch_wgrad(pre_grad, sent, of_gate_up, *how, slots)
        elif rows.kept_x is not None:
            num_rows = sent.offsets.expert_offsets[-1:]
            dispatch.keep_rows(memory.rows, rows.kept_x, num_rows, copy_rows_kernel, slots)
        dispatch.release(slots)
    if rows.kept_dy is None:
        return dx, topk_grads, memory_of_weights, biases, None
    x_rows = rows.kept_x if rows.x is None else rows.x
    assert x_rows is not None
    kept = WeightGradientRows(x_rows, pre_grad, act, rows.kept_dy, sent.offsets.expert_offsets)
    return dx, topk_grads, None, biases, kept


def bias_gradients(
    inputs: LayerInputs,
    pre: torch.Tensor,
    dy: torch.Tensor,
    row_weight: torch.Tensor,
    offsets: torch.Tensor,
) -> BiasGradients:
    """Sums of expert rows: of the gradient of the pre-activations, and of dy by its weights."""
    b_gate_up, b_down, found = inputs.b_gate_up, inputs.b_down, BiasGradients()
    if b_gate_up is not None and b_gate_up.requires_grad:
        found = found._replace(gate_up=bias_gradient(pre, offsets))
    if b_down is not None and b_down.requires_grad:
        found = found._replace(down=bias_gradient(dy, offsets, row_weight))
    return found


def later_weight_gradients(
    rows: WeightGradientRows, into: WeightGradients, num_free_sms: int = 0
) -> None:
    """The products, that of the down-projection first, by a call of their own, which needs no
    Buffer; an expert without rows has zeros. num_free_sms: see `launch.multiply`."""
    if rows.x.is_cuda:
        record(leaves(rows), torch.cuda.current_stream())
    *sized, offsets, expected_rows = rows
    args = _later_weight_gradients, None, offsets, into, num_free_sms, expected_rows
    _later(*args, sized=sized, max_rows=len(rows.x))


def _later_weight_gradients(
    owner: None,
    offsets: torch.Tensor,
    into: WeightGradients,
    num_free_sms: int,
    expected_rows: int | None,
    sized: Sequence[torch.Tensor],
    max_rows: int,
) -> None:
    x, pre, act, dy = sized
    how = into.accumulate, num_free_sms, expected_rows
    if into.down is not None:
        launch_wgrad(dy, act, offsets, None, into.down, *how)
    if into.gate_up is not None:
        launch_wgrad(pre, x, offsets, None, into.gate_up, *how)


_later = PreparedCalls()
