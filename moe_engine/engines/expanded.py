"""The steps of ElasticBuffer's calls: those of a Buffer's dispatch and combine, and in between what
happens to received rows on their rank. They get places in the order of experts, are copied there,
and are summed before they return. A call is one prepared call, whatever the number of rows; where
the host waits for counts, each of its steps is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

import torch

from .. import routing
from ..combine import ReturnedRows
from ..combine.reduce_expanded import reduce_expanded
from ..combine.reduce_expanded_kernels import ExpertRows, ReducedRows
from ..dispatch import DispatchLayout, Received, Tokens
from ..dispatch.expand import copy_ids, describe_received, expand_rows, place_received
from ..dispatch.expand_kernels import (
    ExpandedRows,
    Places,
    ReceivedIds,
    ReceivedRows,
)
from ..kinds import Described
from ..prepared import with_size
from ..utils import round_up
from .base import Handle, PartsOfHandle
from .internode import InternodeHandle
from .kernel import KernelEngine

SCALE_ROWS = 4
"""Columns of scales for TMA begin at multiples of so many scales, 16 bytes."""


class RowsWanted(NamedTuple):
    """How a dispatch returns rows: in the order of experts; with zeros between these; with scales
    whose columns are contiguous; with weights."""

    expand: bool
    zero_padding: bool
    by_column: bool
    weights: bool


class Numbers(NamedTuple):
    """The numbers from which the places of received rows follow."""

    num_local_experts: int
    alignment: int
    max_tokens: int
    num_ranks: int

    def most_rows(self) -> int:
        """Rows that can come."""
        return self.num_ranks * self.max_tokens

    def most_expanded(self, num_topk: int) -> int:
        """Rows that they can become, of tokens that have no expert twice."""
        num_rows = self.most_rows() * min(num_topk, self.num_local_experts)
        num_rows += (self.alignment - 1) * self.num_local_experts
        return round_up(num_rows, self.alignment)


class HowSent(NamedTuple):
    """Whether the host waits for the counts; whether the ids that are sent are copied for the
    handle; programs that communicate."""

    waits: bool
    copies_ids: bool
    num_sms: int


class Dispatched(NamedTuple):
    """What a dispatch brings: rows as wanted, with scales and weights or None; the ids of rows by
    token; a copy of those that were sent, if wanted; where rows come from and go; the handle; rows
    of each local expert with padding, where the host knows; the number of rows by expert."""

    rows: ExpandedRows
    topk_idx: torch.Tensor
    sent_idx: torch.Tensor | None
    places: Places
    sent: Handle | InternodeHandle
    per_expert: list[int]
    num_expanded: int


def dispatch(
    engine: KernelEngine,
    tokens: Tokens,
    num_experts: int,
    stats: torch.Tensor | None,
    numbers: Numbers,
    wanted: RowsWanted,
    how: HowSent,
    described: Described | None = None,
) -> Dispatched:
    """Send the tokens. Unless the host waits for the counts there is room for all that can come,
    and the whole is one prepared call. Rows by expert are copied from where they arrive; their
    scales are in one row, see `shaped`."""
    args = tokens, num_experts, stats, numbers, wanted, how
    if how.waits:
        return _dispatch(engine, *args)
    got: Dispatched = engine.whole_call(_dispatch, *args, described=described)
    return got


def _dispatch(
    engine: KernelEngine,
    tokens: Tokens,
    num_experts: int,
    stats: torch.Tensor | None,
    numbers: Numbers,
    wanted: RowsWanted,
    how: HowSent,
) -> Dispatched:
    assert tokens.topk_idx is not None
    in_place, copies_ids = wanted.expand, how.copies_ids
    layout, sent_idx = layout_and_copy(engine, tokens.topk_idx, num_experts, copies_ids)
    most_rows = 0 if how.waits else numbers.most_rows()
    arrived = engine.dispatch(tokens, layout, most_rows, how.num_sms, not in_place)
    received, counts, sent = arrived[:3]
    try:
        topk_idx, per_expert = received.topk_idx, [round_up(n, numbers.alignment) for n in counts]
        assert topk_idx is not None
        num_expanded = sum(per_expert) if how.waits else numbers.most_expanded(tokens.num_topk)
        ids, prefix = ReceivedIds(topk_idx, received.src_idx), sent.rank_prefix_matrix
        of_ranks = prefix, arrived.group_counts
        places = find_places(engine, ids, *of_ranks, stats, numbers, wanted.expand, num_expanded)
        rows = _by_token(received, wanted)
        if wanted.expand:
            rows, received_rows = new_rows(tokens, num_expanded, wanted), ReceivedRows(*rows)
            expand(engine, received_rows, places, prefix, rows, numbers, wanted)
    finally:
        if in_place:
            engine.release()
    return Dispatched(rows, topk_idx, sent_idx, places, sent, per_expert, num_expanded)


def layout_and_copy(
    engine: KernelEngine, topk_idx: torch.Tensor, num_experts: int, copies_ids: bool
) -> tuple[DispatchLayout, torch.Tensor | None]:
    """Where tokens with these ids [T, K] go; and the ids, which the caller may change, in memory of
    their own, or None."""
    found: tuple[DispatchLayout, torch.Tensor | None]
    found = engine.call(_layout_and_copy, topk_idx, num_experts, copies_ids)
    return found


def _layout_and_copy(
    engine: KernelEngine, topk_idx: torch.Tensor, num_experts: int, copies_ids: bool
) -> tuple[DispatchLayout, torch.Tensor | None]:
    copy = torch.empty_like(topk_idx) if copies_ids else None
    layout = routing.layout(topk_idx, num_experts, engine.slots, copy)
    return DispatchLayout(*layout[:3]), copy


class Sizes(TypedDict):
    """The numbers of rows of a dispatch with a handle: by token, under both names that kernels use;
    by expert; between columns of scales, see `_scale_rows`; and of scales in all."""

    max_rows: int
    num_rows: int
    num_expanded: int
    scale_rows: int
    num_scales: int


def sizes_of(
    num_rows: int, num_expanded: int, scales: torch.Tensor | None, wanted: RowsWanted
) -> Sizes:
    """Of rows by token and by expert with such scales."""
    columns = 0 if scales is None else scales.shape[1]
    scale_rows = _scale_rows(num_expanded, scales, wanted)
    return Sizes(
        max_rows=num_rows,
        num_rows=num_rows,
        num_expanded=num_expanded,
        scale_rows=scale_rows,
        num_scales=(scale_rows or num_expanded) * columns,
    )


def dispatch_again(
    engine: KernelEngine,
    tokens: Tokens,
    sent: Handle | InternodeHandle,
    places: Places,
    numbers: Numbers,
    wanted: RowsWanted,
    num_sms: int,
    sizes: Sizes,
    recv_topk_idx: torch.Tensor | None,
    described: Described | None = None,
) -> tuple[ExpandedRows, torch.Tensor | None]:
    """Send tokens where those of an earlier dispatch went; ids and weights go along where there are
    some. Scales of rows by expert are in one row, see `shaped`. recv_topk_idx: the ids that came
    with rows by token, of which a copy is returned as well; None for rows by expert."""
    goes_along = tokens.topk_idx is not None and tokens.topk_weights is not None
    num_experts = numbers.num_ranks * (numbers.num_local_experts if goes_along else 1)
    metadata, *sums = places
    args = tokens, sent.sent, num_experts, tuple(sums), numbers, wanted, num_sms
    more: dict[str, Any] = dict(described=described, sized=(metadata, recv_topk_idx))
    got: tuple[ExpandedRows, torch.Tensor | None]
    got = engine.whole_call(_dispatch_again, *args, **more, **sizes)
    return got


def _dispatch_again(
    engine: KernelEngine,
    tokens: Tokens,
    plan: PartsOfHandle,
    num_experts: int,
    sums: tuple[torch.Tensor, ...],
    numbers: Numbers,
    wanted: RowsWanted,
    num_sms: int,
    sized: tuple[torch.Tensor, torch.Tensor | None],
    **sizes: int,
) -> tuple[ExpandedRows, torch.Tensor | None]:
    metadata, ids = sized
    # Rows by expert are copied from where they arrive.
    received = with_size("max_rows", engine.new_rows(tokens, sizes["max_rows"], ids is not None))
    engine.send_again(tokens, plan, num_experts, received, num_sms)
    if ids is not None:
        (copy,) = with_size("max_rows", [ids.new_empty(ids.shape)])
        copy_ids(ids, copy, engine.slots)
        return _by_token(received, wanted), copy
    try:
        rows = with_size("num_expanded", new_rows(tokens, sizes["num_expanded"], wanted))
        with_size("num_scales", [rows.scales])
        received_rows, places = ReceivedRows(*_by_token(received, wanted)), Places(metadata, *sums)
        expand(engine, received_rows, places, plan[0], rows, numbers, wanted)
    finally:
        engine.release()
    return rows, None


def combine(
    engine: KernelEngine,
    rows: ExpertRows,
    places: Places | None,
    sent: Handle | InternodeHandle,
    bias: Sequence[torch.Tensor],
    rounds_once: bool,
    num_sms: int,
    described: Described | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return rows to their tokens: rows by token, or with `places` sums of rows by expert. The
    sums of several nodes are fp32 until the end if a result `rounds_once`; so are those of rows by
    expert, and their result."""
    plan = sent.returned
    if places is None:
        returned = ReturnedRows(*rows), plan, tuple(bias), num_sms
        return engine.return_rows(*returned, described, rounds_once)
    dtype = torch.float32 if rounds_once else rows.x.dtype
    added = tuple(one.to(dtype) for one in bias)
    if added and rounds_once:
        described = None  # which would have to describe these
    more: dict[str, Any] = dict(sized=(*rows, places.src_metadata), described=described)
    more |= dict(num_rows=len(places.src_metadata), num_expanded=len(rows.x))
    got: tuple[torch.Tensor, torch.Tensor | None]
    got = engine.whole_call(_combine, plan, added, dtype, num_sms, **more)
    return got


def _combine(
    engine: KernelEngine,
    plan: PartsOfHandle,
    bias: tuple[torch.Tensor, ...],
    dtype: torch.dtype,
    num_sms: int,
    sized: tuple[torch.Tensor, ...],
    **numbers: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    rows, metadata = ExpertRows(*sized[:2]), sized[2]
    sums = with_size("num_rows", _new_sums(rows, metadata, dtype))
    reduce_expanded(rows, metadata, plan[0], sums, engine.slots)
    return engine.return_rows(ReturnedRows(*sums), plan, bias, num_sms)


# --- Steps ---------------------------------------------------------------------------------------


def find_places(
    engine: KernelEngine,
    received: ReceivedIds,
    rank_prefix_matrix: torch.Tensor,
    group_counts: torch.Tensor,
    stats: torch.Tensor | None,
    numbers: Numbers,
    by_expert: bool,
    num_expanded: int,
) -> Places:
    """The places of received rows, see `reference.place`. Unless they are placed `by_expert`, all
    places are -1, and psum_per_expert counts padding. There is room for num_expanded rows: the host
    is told where there are more. group_counts int32 [E]: rows of all ranks for each expert.
    stats int32 [L], unless None: the rows of each expert are added to it."""
    num_rows, num_topk = received.topk_idx.shape
    metadata = received.src_idx.new_empty(num_rows, 2 + num_topk)
    sums: tuple[torch.Tensor, ...] = engine.call(
        _find_places,
        rank_prefix_matrix,
        group_counts,
        stats,
        numbers,
        by_expert,
        sized=(*received, metadata),
        num_rows=num_rows,
        num_expanded=num_expanded,
    )
    return Places(metadata, *sums)


def _find_places(
    engine: KernelEngine,
    rank_prefix_matrix: torch.Tensor,
    group_counts: torch.Tensor,
    stats: torch.Tensor | None,
    numbers: Numbers,
    by_expert: bool,
    sized: tuple[torch.Tensor, ...],
    num_rows: int,
    num_expanded: int,
) -> tuple[torch.Tensor, ...]:
    topk_idx, src_idx, metadata = sized
    new, num_local = rank_prefix_matrix.new_empty, numbers.num_local_experts
    places = Places(metadata, new(num_local), new(num_local), new(len(rank_prefix_matrix)))
    ids = ReceivedIds(topk_idx, src_idx)
    sizes = numbers.alignment, numbers.max_tokens
    if by_expert:
        place_received(ids, rank_prefix_matrix, places, stats, *sizes, num_expanded, engine.slots)
    else:
        of_ranks = rank_prefix_matrix, group_counts
        describe_received(ids, *of_ranks, places, stats, *sizes, engine.slots)
    return tuple(places[1:])


def expand(
    engine: KernelEngine,
    received: ReceivedRows,
    places: Places,
    rank_prefix_matrix: torch.Tensor,
    rows: ExpandedRows,
    numbers: Numbers,
    wanted: RowsWanted,
) -> None:
    """Copy received rows, at the addresses received.x int64 [N], to their places."""
    metadata, *sums = places
    scale_rows = _scale_rows(len(rows.x), rows.scales, wanted)
    engine.call(
        _expand,
        tuple(sums),
        rank_prefix_matrix,
        numbers,
        (wanted.zero_padding, scale_rows > 0),
        sized=(*received, metadata, *rows),
        num_rows=len(metadata),
        num_expanded=len(rows.x),
        scale_rows=scale_rows,
    )


def _expand(
    engine: KernelEngine,
    sums: tuple[torch.Tensor, ...],
    rank_prefix_matrix: torch.Tensor,
    numbers: Numbers,
    how: tuple[bool, bool],
    sized: tuple[torch.Tensor, ...],
    num_rows: int,
    num_expanded: int,
    scale_rows: int,
) -> None:
    received, metadata, out = ReceivedRows(*sized[:3]), sized[3], ExpandedRows(*sized[4:])
    places, of = Places(metadata, *sums), (numbers.alignment, scale_rows, how[0])
    expand_rows(received, places, rank_prefix_matrix, out, *of, engine.slots)


def _by_token(received: Received, wanted: RowsWanted) -> ExpandedRows:
    """Received rows with the weights that are wanted."""
    weights = received.topk_weights if wanted.weights else None
    return ExpandedRows(received.x, received.scales, weights)


def new_rows(tokens: Tokens, num_rows: int, wanted: RowsWanted) -> ExpandedRows:
    """Room for rows by expert like these tokens, with scales [M * S] in the order of memory."""
    x, scales = tokens.x, tokens.scales
    if scales is not None:
        columns = scales.shape[1]
        scales = scales.new_empty((_scale_rows(num_rows, scales, wanted) or num_rows) * columns)
    weights = x.new_empty(num_rows, dtype=torch.float32) if wanted.weights else None
    return ExpandedRows(x.new_empty(num_rows, x.shape[1]), scales, weights)


def _scale_rows(num_rows: int, scales: torch.Tensor | None, wanted: RowsWanted) -> int:
    """How far apart the columns of scales of so many rows are, 0 for scales by row."""
    is_by_column = scales is not None and wanted.by_column
    return round_up(num_rows, SCALE_ROWS) if is_by_column else 0


def shaped(
    rows: ExpandedRows, like: torch.Tensor | None, num_expanded: int, wanted: RowsWanted
) -> ExpandedRows:
    """Rows with scales [M, S] of the order in memory that is wanted."""
    scales = rows.scales
    if like is None or scales is None:
        return rows
    num_scales = like.shape[1]
    if not wanted.by_column:
        return rows._replace(scales=scales.view(-1, num_scales))
    num_rows = num_expanded if wanted.expand else len(scales)
    columns = _scale_rows(num_rows, scales, wanted)
    memory = scales if wanted.expand else scales.new_empty(num_scales * columns)
    by_column = memory.view(num_scales, columns)[:, :num_rows].T
    if not wanted.expand:
        by_column.copy_(scales)
    return rows._replace(scales=by_column)


def _new_sums(rows: ExpertRows, metadata: torch.Tensor, dtype: torch.dtype) -> ReducedRows:
    """Room for the sums of rows by expert, of `dtype`, and for their weights."""
    num_rows, columns = metadata.shape
    weights = None if rows.weights is None else rows.weights.new_empty(num_rows, columns - 2)
    return ReducedRows(rows.x.new_empty(num_rows, rows.x.shape[1], dtype=dtype), weights)
