"""The calls of a Buffer under the operators `dispatch` and `combine`: the normal calls, which send
one row for each token and rank, and a permutation here of what came.

So they run on every backend, a backward sends no ids and no counts again, and what it needs from
the forward is a few tensors of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import checks
from .buffer import Buffer
from .dispatch import Tokens
from .engines.base import Handle
from .engines.internode import InternodeHandle
from .errors import BackendError, ShapeError
from .expert_major import place, sum_rows, take_rows
from .handles import check_handle
from .lifecycle import verb
from .streams import EventOverlap, is_captured
from .symm.slots import SlotLayout
from .utils import round_up

UNTAGGED = "ops.dispatch"
"""The tag of dispatches without one: a `Buffer.dispatch` of equal sizes is another call."""


class DispatchPlan(NamedTuple):
    """What `combine` needs from a dispatch: tensors that may be saved; see `expert_major.Places`
    for the first two, and `Handle` for the others."""

    slots: Tensor
    dst_rows: Tensor
    rank_prefix_matrix: Tensor
    send_token_idx: Tensor
    signature: Tensor
    recv_src_idx: Tensor
    is_token_in_rank: Tensor
    send_head: Tensor

    @property
    def handle(self) -> Handle:
        """That of the Buffer's dispatch."""
        return Handle(*self[2:])


class InternodePlan(NamedTuple):
    """`DispatchPlan` of ranks on several nodes, with the tensors of an `InternodeHandle`."""

    slots: Tensor
    dst_rows: Tensor
    is_token_in_rank: Tensor
    sent_token_idx: Tensor
    rank_prefix_matrix: Tensor
    row_idx: Tensor
    node_rows: Tensor
    signature: Tensor
    recv_gbl_rank_prefix_sum: Tensor
    recv_src_idx: Tensor
    send_head: Tensor
    rank_head: Tensor

    @property
    def handle(self) -> InternodeHandle:
        """See `DispatchPlan`."""
        return InternodeHandle(*self[2:])


Plan = DispatchPlan | InternodePlan


def plan_of(tensors: Sequence[Tensor]) -> Plan:
    """The plan that has these tensors, in their order."""
    if len(tensors) == len(InternodePlan._fields):
        return InternodePlan(*tensors)
    if len(tensors) != len(DispatchPlan._fields):
        raise ShapeError(
            f"plan has {len(tensors)} tensors; it must be the {len(DispatchPlan._fields)} that "
            f"dispatch returned, or {len(InternodePlan._fields)} on several nodes."
        )
    return DispatchPlan(*tensors)


class Sent(NamedTuple):
    """A dispatch that was launched: received [N, H], and the others as in `DispatchedRows`."""

    received: Tensor
    row_weights: Tensor
    offsets: Tensor
    counts: Tensor
    overflow: Tensor
    plan: Plan


@verb
def send(
    buffer: Buffer,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    max_rows: int | None,
    alignment: int,
    tag: str | None,
    *,
    is_async: bool,
) -> tuple[Sent, EventOverlap]:
    """Send tokens, and find the places of what comes."""
    engine = buffer._ready()
    checks.check_rows("x", x, device=buffer._rows_device)
    checks.check_experts(num_experts, buffer.group_size)
    checks.check_routing(x, topk_idx, topk_weights)
    _check_room(x, max_rows, alignment, buffer.group_size)
    num_local = num_experts // buffer.group_size
    callers = buffer._streams.callers
    caller = callers.number(tag) if tag is not None else callers.of_block()
    with buffer._streams.call(None, is_async, caller=caller or callers.number(UNTAGGED)) as call:
        call.reads(x, topk_idx, topk_weights)
        packed = checks.packed
        tokens = Tokens(packed(x), packed(topk_idx), packed(topk_weights))
        assert tokens.topk_idx is not None
        layout = engine.layout(tokens.topk_idx, num_experts)
        arrived = engine.dispatch(tokens, layout, max_rows or 0, Buffer.num_sms)
        received, per_expert, handle, counts, _ = arrived
        assert received.topk_idx is not None
        assert received.topk_weights is not None
        num_rows = max_rows or sum(round_up(count, alignment) for count in per_expert)
        routing = received.topk_idx, received.topk_weights
        places = place(*routing, num_local, alignment, num_rows)
        if max_rows:
            buffer._note_overflow(places.overflow)
        assert places.row_weights is not None
        plan = plan_of((places.slots, places.dst_rows, *handle))
        weights, offsets, overflow = places.row_weights, places.offsets, places.overflow
        sent = Sent(received.x, weights, offsets, counts, overflow, plan)
        call.returns(*sent[:-1], *plan)
    return sent, call.event


def _check_room(x: Tensor, max_rows: int | None, alignment: int, num_ranks: int) -> None:
    """Refuse numbers of rows that cannot be meant."""
    checks.check_int("alignment", alignment, 1)
    if max_rows is not None:
        checks.check_int("max_rows", max_rows, 1, num_ranks * SlotLayout.most_rows)
        if max_rows % alignment:
            raise ShapeError(
                f"max_rows is {max_rows}; it must be a multiple of alignment, {alignment}."
            )
    elif is_captured(x):
        raise BackendError(
            "dispatch without max_rows in a CUDA graph's capture, where the host cannot read how "
            "many rows come. Pass max_rows, on all ranks."
        )


@verb
def send_again(
    buffer: Buffer, x: Tensor, plan: Plan, is_async: bool
) -> tuple[Tensor, EventOverlap]:
    """Send x [T, H] where the tokens of an earlier dispatch went: received rows [N, H]."""
    engine = buffer._ready()
    checks.check_rows("x", x, len(plan.send_head), buffer._rows_device)
    handle = _check_plan(plan, buffer, x.device)
    with buffer._streams.call(None, is_async) as call:
        call.reads(x, *plan)
        received = engine.dispatch_cached(checks.packed(x), None, handle, Buffer.num_sms).x
        call.returns(received)
    return received, call.event


@verb
def return_sums(
    buffer: Buffer, rows: Tensor, row_weights: Tensor | None, plan: Plan, is_async: bool
) -> tuple[Tensor, Tensor, EventOverlap]:
    """Return sums of rows [M, H] and values float32 [M] of rows: [T, H], [T, K], event."""
    engine = buffer._ready()
    checks.check_rows("rows", rows, len(plan.slots), buffer._rows_device)
    handle = _check_plan(plan, buffer, rows.device)
    if row_weights is not None:
        shape = [len(plan.slots)]
        checks.check_tensor("row_weights", row_weights, shape, [torch.float32], rows.device)
        row_weights = checks.packed(row_weights)
    sums, weights = sum_rows(checks.packed(rows), plan.dst_rows, row_weights)
    with buffer._streams.call(None, is_async) as call:
        call.reads(sums, weights, *plan)
        y, topk_weights = engine.combine(sums, handle, weights, (), Buffer.num_sms)
        topk_weights = sums.new_empty(0, dtype=torch.float32) if weights is None else topk_weights
        call.returns(y, topk_weights)
    assert topk_weights is not None
    return y, topk_weights, call.event


def _check_plan(plan: Plan, buffer: Buffer, device: torch.device) -> Any:
    """The handle of a plan, whose parts must fit one another."""
    handle = check_handle(plan.handle, buffer.group_size, device, buffer.num_nodes)
    num_received = len(handle.recv_src_idx)
    checks.check_tensor("plan.slots", plan.slots, ["M"], [torch.int32], device)
    checks.check_tensor("plan.dst_rows", plan.dst_rows, [num_received, "K"], [torch.int32], device)
    checks.check_contiguous("plan.slots", plan.slots)
    checks.check_contiguous("plan.dst_rows", plan.dst_rows)
    return handle


def take_received(received: Tensor, plan: Plan) -> Tensor:
    """Expert rows [M, H] of received rows [N, H]."""
    checks.check_rows("received", received, len(plan.dst_rows), plan.slots.device)
    return take_rows(checks.packed(received), plan.slots, plan.dst_rows.shape[1])


def set_out(buffer: Buffer, tensor: Tensor, event: EventOverlap) -> None:
    """The contents of a tensor are on their way until an event."""
    if tensor.numel():
        buffer._in_flight[tensor.data_ptr()] = event


def await_tensor(buffer: Buffer, tensor: Tensor) -> None:
    """Let the current stream wait until a tensor has its contents; for all of the Buffer's stream,
    where it is not known since when they are on their way."""
    event = buffer._in_flight.pop(tensor.data_ptr(), None)
    if event is not None:
        event.current_stream_wait()
    elif tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).wait_stream(buffer.get_comm_stream())
