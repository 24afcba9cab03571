"""The operators of torch.library that `ops.py` calls: their schemas, what they do, and gradients.

Operators are functional: what they return is new, and no part of symmetric memory. An operator
finds its Buffer by `Buffer.id`, since a schema has no place for objects. Those named `*_start` send
on the Buffer's own stream, and `*_wait` lets the current stream wait. The backward of `*_wait`
starts, and that of `*_start` waits. So each `*_start` also returns tickets: tensors of one item in
the shapes of the gradients that will be on their way then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .device.context import SIGNATURE_WORDS
from .dispatch import Tokens
from .errors import BackendError
from .expert_row_calls import (
    DispatchPlan,
    InternodePlan,
    Plan,
    Sent,
    await_tensor,
    plan_of,
    return_sums,
    send,
    send_again,
    set_out,
    take_received,
)
from .kinds import results_apart
from .lifecycle import live_buffer
from .utils import saved_tensors

library = torch.library.Library("moe_engine", "DEF")
operators: Any = torch.ops.moe_engine

RESULT = "Tensor row_weights, Tensor offsets, Tensor counts, Tensor overflow"
PLANS = {"": DispatchPlan, "internode_": InternodePlan}
"""What a dispatch returns, by the beginning of its operators' names: a schema has one number of
tensors, and plans of several nodes have more."""
ARGS = (
    "Tensor x, Tensor topk_idx, Tensor topk_weights, int num_experts, int buffer_id, "
    "SymInt? max_rows=None, int alignment=1, str? tag=None"
)


def plan_schema(kind: Any) -> str:
    return ", ".join(f"Tensor {name}" for name in kind._fields)


def operator(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Define an operator `moe_engine::name`, of which the function is what it does on tensors of
    any device, and `fake` what it returns for tensors without memory."""

    def define(function: Callable[..., Any]) -> Callable[..., Any]:
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        name = schema.partition("(")[0]
        library.impl(name, results_apart()(function), "CompositeExplicitAutograd")
        torch.library.register_fake(f"moe_engine::{name}", fake, lib=library)
        return function

    return define


def gradient(
    name: str,
    save: Callable[..., None],
    backward: Callable[..., Any],
    of: str = "dispatch and combine have",
) -> None:
    """The backward of `moe_engine::name`, from what `save(ctx, inputs, output)` has kept. of: what
    has no second-order gradients, for the error."""

    def first_order(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise BackendError(
                f"{of} no second-order gradients; call backward without create_graph."
            )
        return backward(ctx, *grads)

    qualified = f"moe_engine::{name}"
    torch.library.register_autograd(qualified, first_order, setup_context=save, lib=library)


def _ticket(like: Tensor, shape: Any) -> Tensor:
    """A tensor of a shape, of one item."""
    return like.new_zeros(()).expand(shape)


def _fake_sent(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    buffer_id: int,
    max_rows: int | None = None,
    alignment: int = 1,
) -> Sent:
    buffer, num_topk = live_buffer(buffer_id), topk_idx.shape[1]
    num_rows: Any = max_rows
    num_received: Any = max_rows
    if max_rows is None:
        new_size = torch.library.get_ctx().new_dynamic_size
        num_rows, num_received = new_size(), new_size()

    def new(*shape: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return topk_idx.new_empty(shape, dtype=dtype)

    places = new(num_rows), new(num_received, num_topk)
    tokens = Tokens(x, topk_idx, topk_weights)
    return Sent(
        received=x.new_empty((num_received, x.shape[1])),
        row_weights=new(num_rows, dtype=torch.float32),
        offsets=new(num_experts // buffer.group_size + 1),
        counts=new(num_experts),
        overflow=new(1),
        plan=_fake_plan(buffer, tokens, num_experts, places, new),
    )


def _fake_plan(
    buffer: Any,
    tokens: Tokens,
    num_experts: int,
    places: tuple[Tensor, Tensor],
    new: Callable[..., Tensor],
) -> Plan:
    num_ranks, num_nodes, num_tokens = buffer.group_size, buffer.num_nodes, tokens.x.shape[0]
    shared = dict(
        rank_prefix_matrix=new(num_ranks, num_ranks),
        signature=new(SIGNATURE_WORDS.value),
        recv_src_idx=new(places[1].shape[0]),
        is_token_in_rank=new(num_tokens, num_ranks, dtype=torch.bool),
        send_head=new(num_tokens, num_nodes if num_nodes > 1 else num_ranks),
    )
    if num_nodes == 1:
        return DispatchPlan(*places, send_token_idx=new(num_ranks, num_tokens), **shared)
    near = num_ranks // num_nodes
    most: Any = buffer._engine.most_rows(tokens, num_experts)
    if most is None:
        most = torch.library.get_ctx().new_dynamic_size()
    return InternodePlan(
        *places,
        sent_token_idx=new(num_nodes + near, num_tokens),
        row_idx=new(num_nodes, near, most),
        node_rows=new(2, num_nodes),
        recv_gbl_rank_prefix_sum=new(num_ranks),
        rank_head=new(num_nodes, most, near),
        **shared,
    )


def _fake_dispatch(x: Tensor, *args: Any) -> tuple[Tensor, ...]:
    sent = _fake_sent(x, *args)
    return x.new_empty((sent.plan.slots.shape[0], x.shape[1])), *sent[1:-1], *sent.plan


def _fake_sums(rows: Tensor, row_weights: Tensor | None, plan: list[Tensor]) -> tuple[Tensor, ...]:
    of = plan_of(plan)
    num_tokens, num_topk = of.send_head.shape[0], of.dst_rows.shape[1]
    shape = (0,) if row_weights is None else (num_tokens, num_topk)
    y = rows.new_empty((num_tokens, rows.shape[1]))
    return y, rows.new_empty(shape, dtype=torch.float32)


def _fake_combine(
    rows: Tensor, row_weights: Tensor | None, plan: list[Tensor], buffer_id: int
) -> tuple[Tensor, ...]:
    return _fake_sums(rows, row_weights, plan)


def _fake_rows(x: Tensor, plan: list[Tensor], buffer_id: int) -> Tensor:
    return x.new_empty((plan[0].shape[0], x.shape[1]))


def _dispatch(x: Tensor, topk_idx: Tensor, topk_weights: Tensor, *args: Any) -> tuple[Tensor, ...]:
    sent, _ = send(*_arguments(x, topk_idx, topk_weights, *args), is_async=False)
    return take_received(sent.received, sent.plan), *sent[1:-1], *sent.plan


for _name, _kind in PLANS.items():
    _schema = f"{_name}dispatch({ARGS}) -> (Tensor rows, {RESULT}, {plan_schema(_kind)})"
    operator(_schema, _fake_dispatch)(_dispatch)


def _arguments(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    buffer_id: int,
    max_rows: int | None = None,
    alignment: int = 1,
    tag: str | None = None,
) -> tuple[Any, ...]:
    routed = x, topk_idx, topk_weights, num_experts
    return live_buffer(buffer_id), *routed, max_rows, alignment, tag


@operator(
    "combine(Tensor rows, Tensor? row_weights, Tensor[] plan, int buffer_id) "
    "-> (Tensor y, Tensor topk_weights)",
    _fake_combine,
)
def _combine(
    rows: Tensor, row_weights: Tensor | None, plan: list[Tensor], buffer_id: int
) -> tuple[Tensor, Tensor]:
    return return_sums(live_buffer(buffer_id), rows, row_weights, plan_of(plan), False)[:2]


@operator("cached_dispatch(Tensor x, Tensor[] plan, int buffer_id) -> Tensor rows", _fake_rows)
def _cached_dispatch(x: Tensor, plan: list[Tensor], buffer_id: int) -> Tensor:
    of = plan_of(plan)
    received, _ = send_again(live_buffer(buffer_id), x, of, False)
    return take_received(received, of)


# --- Gradients -----------------------------------------------------------------------------------


def _save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    ctx.save_for_backward(*output[5:])
    ctx.buffer_id = inputs[4]


def _dispatch_backward(ctx: Any, rows: Tensor, weights: Tensor, *_: Any) -> tuple[Any, ...]:
    # Always with weights, by which ranks tell it from a forward's combine by the same plan.
    dx, dw = operators.combine(rows, weights, list(saved_tensors(ctx)), ctx.buffer_id)
    return dx, None, dw if ctx.needs_input_grad[2] else None, *(None,) * 5


def _save_plan(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save the plan for the backward. Only the first tensor that is returned has a gradient."""
    *_, plan, ctx.buffer_id = inputs
    ctx.save_for_backward(*plan)
    if isinstance(output, tuple):
        ctx.mark_non_differentiable(*output[1:])


def _combine_backward(ctx: Any, y: Tensor, *_: Any) -> tuple[Any, ...]:
    plan = list(saved_tensors(ctx))
    return operators.cached_dispatch(y, plan, ctx.buffer_id), None, [None] * len(plan), None


def _cached_dispatch_backward(ctx: Any, rows: Tensor) -> tuple[Any, ...]:
    plan = list(saved_tensors(ctx))
    return operators.combine(rows, None, plan, ctx.buffer_id)[0], [None] * len(plan), None


for _name in PLANS:
    gradient(f"{_name}dispatch", _save_dispatch, _dispatch_backward)
gradient("combine", _save_plan, _combine_backward)
gradient("cached_dispatch", _save_plan, _cached_dispatch_backward)


# --- In two parts --------------------------------------------------------------------------------


def _fake_dispatch_start(x: Tensor, topk_idx: Tensor, weights: Tensor, *args: Any) -> Any:
    sent = _fake_sent(x, topk_idx, weights, *args)
    return _ticket(x, x.shape), _ticket(weights, weights.shape), *sent[:-1], *sent.plan


def _fake_dispatch_wait(
    ticket: Tensor, weights_ticket: Tensor, sent: list[Tensor], plan: list[Tensor], buffer_id: int
) -> tuple[Tensor, ...]:
    received, *others = sent
    rows = received.new_empty((plan[0].shape[0], received.shape[1]))
    return rows, *(torch.empty_like(one) for one in others)


def _fake_combine_start(
    rows: Tensor, row_weights: Tensor | None, plan: list[Tensor], buffer_id: int
) -> tuple[Tensor, ...]:
    ticket = _ticket(rows, (plan[1].shape[0], rows.shape[1]))
    return ticket, *_fake_sums(rows, row_weights, plan)


def _fake_combine_wait(
    ticket: Tensor, y: Tensor, topk_weights: Tensor, plan: list[Tensor], buffer_id: int
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(y), torch.empty_like(topk_weights)


def _fake_received(x: Tensor, plan: list[Tensor], buffer_id: int) -> Tensor:
    return x.new_empty((plan[1].shape[0], x.shape[1]))


def _dispatch_start(x: Tensor, topk_idx: Tensor, weights: Tensor, *args: Any) -> Any:
    # A copy of x: a compiler may use its memory again before the wait.
    buffer, _, *others = _arguments(x, topk_idx, weights, *args)
    sent, event = send(buffer, x.clone(), *others, is_async=True)
    set_out(buffer, sent.received, event)
    return _ticket(x, x.shape), _ticket(weights, weights.shape), *sent[:-1], *sent.plan


for _name, _kind in PLANS.items():
    _schema = (
        f"{_name}dispatch_start({ARGS}) -> (Tensor ticket, Tensor weights_ticket, "
        f"Tensor received, {RESULT}, {plan_schema(_kind)})"
    )
    operator(_schema, _fake_dispatch_start)(_dispatch_start)


@operator(
    "dispatch_wait(Tensor ticket, Tensor weights_ticket, Tensor[] sent, Tensor[] plan, "
    f"int buffer_id) -> (Tensor rows, {RESULT})",
    _fake_dispatch_wait,
)
def _dispatch_wait(
    ticket: Tensor, weights_ticket: Tensor, sent: list[Tensor], plan: list[Tensor], buffer_id: int
) -> tuple[Tensor, ...]:
    received, *others = sent
    rows = _cached_dispatch_wait(received, plan, buffer_id)
    return rows, *(one.clone() for one in others)


@operator(
    "combine_start(Tensor rows, Tensor? row_weights, Tensor[] plan, int buffer_id) "
    "-> (Tensor ticket, Tensor y, Tensor topk_weights)",
    _fake_combine_start,
)
def _combine_start(
    rows: Tensor, row_weights: Tensor | None, plan: list[Tensor], buffer_id: int
) -> tuple[Tensor, ...]:
    buffer, of = live_buffer(buffer_id), plan_of(plan)
    y, topk_weights, event = return_sums(buffer, rows, row_weights, of, True)
    set_out(buffer, y, event)
    return _ticket(rows, (len(of.dst_rows), rows.shape[1])), y, topk_weights


@operator(
    "combine_wait(Tensor ticket, Tensor y, Tensor topk_weights, Tensor[] plan, int buffer_id) "
    "-> (Tensor sums, Tensor weights)",
    _fake_combine_wait,
)
def _combine_wait(
    ticket: Tensor, y: Tensor, topk_weights: Tensor, plan: list[Tensor], buffer_id: int
) -> tuple[Tensor, Tensor]:
    await_tensor(live_buffer(buffer_id), y)
    return y.clone(), topk_weights.clone()


@operator(
    "cached_dispatch_start(Tensor x, Tensor[] plan, int buffer_id) -> Tensor received",
    _fake_received,
)
def _cached_dispatch_start(x: Tensor, plan: list[Tensor], buffer_id: int) -> Tensor:
    buffer = live_buffer(buffer_id)
    received, event = send_again(buffer, x.clone(), plan_of(plan), True)
    set_out(buffer, received, event)
    return received


@operator(
    "cached_dispatch_wait(Tensor received, Tensor[] plan, int buffer_id) -> Tensor rows",
    _fake_rows,
)
def _cached_dispatch_wait(received: Tensor, plan: list[Tensor], buffer_id: int) -> Tensor:
    of = plan_of(plan)
    await_tensor(live_buffer(buffer_id), received)
    return take_received(received, of)


def _save_dispatch_start(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    ctx.save_for_backward(*output[7:])
    ctx.buffer_id = inputs[4]
    ctx.mark_non_differentiable(*output[2:])


def _dispatch_start_backward(ctx: Any, y: Tensor, weights: Tensor, *_: Any) -> tuple[Any, ...]:
    args = y, y, weights, list(saved_tensors(ctx)), ctx.buffer_id
    dx, dw = operators.combine_wait(*args)
    return dx, None, dw if ctx.needs_input_grad[2] else None, *(None,) * 5


def _save_dispatch_wait(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
    *_, sent, plan, ctx.buffer_id = inputs
    ctx.num_sent = len(sent)
    ctx.save_for_backward(*plan)


def _dispatch_wait_backward(ctx: Any, rows: Tensor, weights: Tensor, *_: Any) -> tuple[Any, ...]:
    plan = list(saved_tensors(ctx))
    _, y, topk_weights = operators.combine_start(rows, weights, plan, ctx.buffer_id)
    return y, topk_weights, [None] * ctx.num_sent, [None] * len(plan), None


def _combine_start_backward(ctx: Any, received: Tensor, *_: Any) -> tuple[Any, ...]:
    plan = list(saved_tensors(ctx))
    rows = operators.cached_dispatch_wait(received, plan, ctx.buffer_id)
    return rows, None, [None] * len(plan), None


def _combine_wait_backward(ctx: Any, y: Tensor, *_: Any) -> tuple[Any, ...]:
    plan = list(saved_tensors(ctx))
    received = operators.cached_dispatch_start(y, plan, ctx.buffer_id)
    return received, None, None, [None] * len(plan), None


for _name in PLANS:
    gradient(f"{_name}dispatch_start", _save_dispatch_start, _dispatch_start_backward)
gradient("dispatch_wait", _save_dispatch_wait, _dispatch_wait_backward)
gradient("combine_start", _save_plan, _combine_start_backward)
gradient("combine_wait", _save_plan, _combine_wait_backward)
