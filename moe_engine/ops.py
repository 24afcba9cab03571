"""`dispatch` and `combine` for layers that compute their experts themselves: expert rows come,
sums of them go back, and the backward of each is the other.

The functions here name what the operators of torch.library take and return; see `operators.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .buffer import Buffer
from .callers import Tag
from .checks import shown
from .errors import DtypeError
from .expert_row_calls import Plan, plan_of
from .operators import operators


class DispatchedRows(NamedTuple):
    """What `dispatch` returns.

    rows [M, H]: the rows of this rank's experts, those of an expert by source rank, token and k,
    then its padding, 0; row_weights float32 [M]: their top-k weights; offsets int32 [L + 1]: where
    the rows of each expert begin, padding included; counts int32 [E]: rows of each expert of the
    group, from all ranks, without padding; overflow int32 [1]: rows, with their
    padding, for which max_rows had no room.
    """

    rows: Tensor
    row_weights: Tensor
    offsets: Tensor
    counts: Tensor
    overflow: Tensor
    plan: Plan


class DispatchInFlight(NamedTuple):
    """A dispatch that `dispatch_start` has begun, for `dispatch_wait`."""

    tickets: tuple[Tensor, Tensor]
    sent: tuple[Tensor, ...]
    plan: Plan
    buffer_id: int


class CombineInFlight(NamedTuple):
    """A combine that `combine_start` has begun, for `combine_wait`."""

    ticket: Tensor
    sums: Tensor
    topk_weights: Tensor
    buffer_id: int


# --- Functions -----------------------------------------------------------------------------------


def dispatch(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    buffer: Buffer,
    *,
    max_rows: int | None = None,
    alignment: int = 1,
    tag: Tag | None = None,
) -> DispatchedRows:
    """Send x [T, H], bf16 or fp32, to its experts on all ranks: rows sorted by expert, the rows of
    each expert padded to a multiple of `alignment`. Collective; T may differ per rank and be 0.

    topk_idx int64 [T, K], -1 = not routed; topk_weights float32 [T, K]. x and topk_weights have
    gradients: those of rows and row_weights return by a combine. num_experts of all ranks.

    max_rows None: M is what came, and the host waits for the exchange of counts. Else M is
    max_rows, a multiple of alignment, on all ranks or on none, and the host waits for nothing: so
    under capture. Rows for which there is no room are left out, as if their tokens were not routed
    to these experts; `overflow` counts them with their padding, and `buffer.check()` raises
    CapacityError. Where even the tokens that come, each counted once, are more than max_rows, that
    error ends the Buffer.

    tag: which layer of the model this is, equal on all ranks; see `moe_engine.moe_ffn`. Without one
    the call still differs from a `Buffer.dispatch` of the same sizes.

    Example, 2 ranks of 2 experts, alignment 2, topk_idx [[0, 3], [2, 3], [3, 0], [1, 1]] on rank 0
    and nothing on rank 1: rank 0 has rows of tokens 0 2 | 3 3, offsets [0, 2, 4], rank 1 rows of
    tokens 1 - | 0 1 2 -, offsets [0, 2, 6]; counts [2, 2, 1, 3] on both.

    Raises what `Buffer.dispatch` raises; BackendError under capture without max_rows.
    """
    routed = x, topk_idx, topk_weights, num_experts
    args = *routed, _id(buffer), max_rows, alignment, _tag(tag)
    has_nodes = buffer.num_nodes > 1
    parts = (operators.internode_dispatch if has_nodes else operators.dispatch)(*args)
    return DispatchedRows._make((*parts[:5], plan_of(parts[5:])))


def combine(rows: Tensor, plan: Plan, buffer: Buffer) -> Tensor:
    """Return rows [M, H], in the order of a dispatch, to the ranks of their tokens: [T, H], for
    each token the sum of its rows, which have no weights here: multiply rows by `row_weights`
    before. Each rank adds up in fp32, in the order of k, and rounds once; so does each of several
    nodes, and then the token's rank. A tuple of the plan's tensors serves as well.

    The gradient of the rows comes by a dispatch with the same plan. Collective.
    """
    y: Tensor = operators.combine(rows, None, _tensors(plan), _id(buffer))[0]
    return y


def dispatch_start(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    buffer: Buffer,
    *,
    max_rows: int | None = None,
    alignment: int = 1,
    tag: Tag | None = None,
) -> DispatchInFlight:
    """Begin `dispatch` on the Buffer's own stream; `dispatch_wait` gives its result. Any number
    may be in flight, and the calls of a Buffer run one after the other. In the backward the sums
    are on their way from where that of `dispatch_wait` runs until that of this runs."""
    routed = x, topk_idx, topk_weights, num_experts
    args = *routed, _id(buffer), max_rows, alignment, _tag(tag)
    has_nodes = buffer.num_nodes > 1
    parts = (operators.internode_dispatch_start if has_nodes else operators.dispatch_start)(*args)
    return DispatchInFlight(parts[:2], parts[2:7], plan_of(parts[7:]), buffer.id)


def dispatch_wait(in_flight: DispatchInFlight) -> DispatchedRows:
    """What `dispatch` returns; the current stream waits until it has come."""
    _check_in_flight(in_flight, DispatchInFlight)
    tickets, sent, plan, buffer_id = in_flight
    parts = operators.dispatch_wait(*tickets, list(sent), list(plan), buffer_id)
    return DispatchedRows._make((*parts, plan))


def combine_start(rows: Tensor, plan: Plan, buffer: Buffer) -> CombineInFlight:
    """Begin `combine` on the Buffer's own stream; `combine_wait` gives its result."""
    parts = operators.combine_start(rows, None, _tensors(plan), _id(buffer))
    return CombineInFlight._make((*parts, buffer.id))


def combine_wait(in_flight: CombineInFlight, plan: Plan) -> Tensor:
    """What `combine` returns; the current stream waits until it has come."""
    _check_in_flight(in_flight, CombineInFlight)
    *parts, buffer_id = in_flight
    y: Tensor = operators.combine_wait(*parts, _tensors(plan), buffer_id)[0]
    return y


def _id(buffer: Buffer) -> int:
    if not isinstance(buffer, Buffer):
        raise DtypeError(f"buffer is {shown(buffer)}; it must be a moe_engine.Buffer.")
    return buffer.id


def _tag(tag: Tag | None) -> str | None:
    """A tag as operators take it."""
    return None if tag is None else str(tag)


def _tensors(plan: Plan) -> list[Tensor]:
    if not isinstance(plan, tuple | list) or not all(isinstance(one, Tensor) for one in plan):
        raise DtypeError(f"plan is {shown(plan)}; it must be the `plan` of a dispatch.")
    return list(plan)


def _check_in_flight(in_flight: object, kind: type) -> None:
    if not isinstance(in_flight, kind):
        raise DtypeError(f"in_flight is {shown(in_flight)}; it must be a {kind.__name__}.")
