"""The steps of ElasticBuffer's calls: those of a Buffer's dispatch and combine, and what rows by
expert need besides. The sender numbers expert rows, the receiver copies rows there as they arrive,
and a combine sums them as they return. A call is one prepared call, whatever the number of rows;
where the host waits for counts, each of its steps is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

import torch

from .. import routing
from ..combine import ReturnedRows
from ..combine.reduce_expanded_kernels import ExpertRows
from ..dispatch import (
    Counts,
    DispatchLayout,
    Partition,
    Received,
    Tokens,
    TotalsWanted,
    copy_ids,
)
from ..dispatch.expand import expand_rows, zero_rows
from ..dispatch.expand_kernels import ExpandedRows, ReceivedPlaces
from ..dispatch.place_tokens import num_early_programs, place_tokens
from ..kinds import Described
from ..prepared import with_size
from ..routing import RoutingLayout
from ..symm.slots import BARE_HEADER, header_bytes
from ..utils import round_up
from .base import Handle, PartsOfHandle
from .internode import InternodeEngine, InternodeHandle
from .kernel_verbs import KernelVerbs, num_comm_programs

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

    def wanted(self, by_expert: bool, stats: torch.Tensor | None) -> TotalsWanted:
        """What a dispatch is to count."""
        return TotalsWanted(self.alignment, self.max_tokens, by_expert, stats)


class Places(NamedTuple):
    """Where received rows come from, and where they go; see `reference.place`."""

    src_metadata: torch.Tensor  # int32 [N, 2 + K]
    psum_per_expert: torch.Tensor  # int32 [L]
    num_per_expert: torch.Tensor  # int32 [L]
    psum_per_rank: torch.Tensor  # int32 [R]


class HowSent(NamedTuple):
    """Whether the host waits for the counts; whether the ids that are sent are copied for the
    handle; programs that communicate."""

    waits: bool
    copies_ids: bool
    num_sms: int


class Dispatched(NamedTuple):
    """What a dispatch brings: rows as wanted, with scales and weights or None; the ids of rows by
    token, for the handle; these once more, for the caller, where rows are by token; a copy of those
    that were sent, if wanted; where rows come from and go; the handle; rows of each local expert
    with padding, where the host knows; the number of rows by expert."""

    rows: ExpandedRows
    topk_idx: torch.Tensor
    recv_idx: torch.Tensor | None
    sent_idx: torch.Tensor | None
    places: Places
    sent: Handle | InternodeHandle
    per_expert: list[int]
    num_expanded: int


def dispatch(
    engine: KernelVerbs,
    tokens: Tokens,
    num_experts: int,
    stats: torch.Tensor | None,
    numbers: Numbers,
    wanted: RowsWanted,
    how: HowSent,
    described: Described | None = None,
) -> Dispatched:
    """Send the tokens. Unless the host waits for the counts there is room for all that can come,
    and the whole is one prepared call. Scales of rows by expert are in one row, see `shaped`."""
    args = tokens, num_experts, stats, numbers, wanted, how
    if how.waits:
        return _dispatch(engine, *args)
    got: Dispatched = engine.whole_call(_dispatch, *args, described=described)
    return got


def _dispatch(
    engine: KernelVerbs,
    tokens: Tokens,
    num_experts: int,
    stats: torch.Tensor | None,
    numbers: Numbers,
    wanted: RowsWanted,
    how: HowSent,
) -> Dispatched:
    assert tokens.topk_idx is not None
    layout, sent_idx = layout_and_copy(engine, tokens.topk_idx, num_experts, how.copies_ids)
    args = engine, tokens, layout, stats, numbers, wanted, how
    got = _dispatch_by_expert(*args) if wanted.expand else _dispatch_by_token(*args)
    return got._replace(sent_idx=sent_idx)


def _dispatch_by_token(
    engine: KernelVerbs,
    tokens: Tokens,
    layout: RoutingLayout,
    stats: torch.Tensor | None,
    numbers: Numbers,
    wanted: RowsWanted,
    how: HowSent,
) -> Dispatched:
    where, most_rows = DispatchLayout(*layout[:3]), 0 if how.waits else numbers.most_rows()
    args = tokens, where, most_rows, how.num_sms
    got = engine.dispatch(*args, totals=numbers.wanted(False, stats))
    received, counts, sent, _, totals = got
    kept, metadata = received.kept_idx, received.src_metadata
    assert kept is not None and metadata is not None
    per_expert = [round_up(n, numbers.alignment) for n in counts]
    num_expanded = sum(per_expert) if how.waits else numbers.most_expanded(tokens.num_topk)
    rows, places = _by_token(received, wanted), Places(metadata, *totals)
    both = kept, received.topk_idx
    return Dispatched(rows, *both, None, places, sent, per_expert, num_expanded)


def _dispatch_by_expert(
    engine: KernelVerbs,
    tokens: Tokens,
    layout: RoutingLayout,
    stats: torch.Tensor | None,
    numbers: Numbers,
    wanted: RowsWanted,
    how: HowSent,
) -> Dispatched:
    """All memory is there before any row is sent, so that each call comes to its end."""
    where, most_rows = DispatchLayout(*layout[:3]), 0 if how.waits else numbers.most_rows()
    totals, num_early = numbers.wanted(True, stats), num_early_programs(layout)
    exchanged = _exchange(engine, tokens, where, totals, num_early, most_rows)
    counts, routes, num_rows, per_expert = exchanged
    per_expert = [round_up(n, numbers.alignment) for n in per_expert]
    num_expanded = sum(per_expert) if how.waits else numbers.most_expanded(tokens.num_topk)
    src_idx = tokens.x.new_empty(num_rows, dtype=torch.int32)
    ids = tokens.x.new_empty(num_rows, tokens.num_topk, dtype=torch.int64)
    metadata, rows = _new_metadata(src_idx, ids), new_rows(tokens, num_expanded, wanted)
    engine.call(
        _send_by_expert,
        tokens,
        layout,
        counts,
        routes,
        numbers,
        (wanted.zero_padding, how.num_sms),
        sized=(metadata, ids, src_idx, *rows),
        **sizes_of(num_rows, num_expanded, tokens.scales, wanted),
    )
    received = Received(rows.x, None, ids, None, src_idx)
    sent = engine.new_handle(counts, routes, received, where)
    places = Places(metadata, *counts.totals)
    return Dispatched(rows, ids, None, None, places, sent, per_expert, num_expanded)


def _exchange(
    engine: KernelVerbs,
    tokens: Tokens,
    layout: DispatchLayout,
    totals: TotalsWanted,
    num_early: int,
    most_rows: int,
) -> tuple[Counts, tuple[torch.Tensor, ...], int, Sequence[int]]:
    """(counts, routes, the rows that will come, those of each local expert). With most_rows the
    host waits for nothing, and knows no more than that."""
    grows = not most_rows and engine.make_room(tokens, layout)
    args = tokens, layout, grows, totals, num_early
    counts, routes = engine.call(type(engine)._exchange, *args, check=False)
    if most_rows:
        return counts, routes, most_rows, ()
    engine.concurrent_reads.mark()
    num_rows, *per_expert = engine.concurrent_reads.read(lambda: engine._received(counts))
    if grows and engine.has_grown(tokens, layout):
        return _exchange(engine, tokens, layout, totals, num_early, most_rows)
    engine.context.check()
    return counts, routes, num_rows, per_expert


def _send_by_expert(
    engine: KernelVerbs,
    tokens: Tokens,
    layout: RoutingLayout,
    counts: Counts,
    routes: tuple[torch.Tensor, ...],
    numbers: Numbers,
    how: tuple[bool, int],
    sized: tuple[torch.Tensor, ...],
    **sizes: int,
) -> None:
    """Send the tokens with the numbers of their expert rows, and copy what comes there."""
    (metadata, ids, src_idx), rows = sized[:3], ExpandedRows(*sized[3:])
    (zero_padding, num_sms), slots, prefix = how, engine.slots, counts.rank_prefix_matrix
    scale_rows = sizes["scale_rows"]
    assert tokens.topk_idx is not None and counts.psum_per_expert is not None
    row_numbers = place_tokens(tokens.topk_idx, layout, counts, numbers.alignment, slots)
    numbered = tokens._replace(topk_idx=row_numbers.of_tokens)
    partition, where = by_expert(engine, num_sms), DispatchLayout(*layout[:3])
    engine._send(numbered, where, counts, routes, partition)
    header = header_bytes(where.num_experts, slots.num_ranks)
    received = ReceivedPlaces(metadata, ids, src_idx, row_numbers.begins)
    of = prefix, header, partition, scale_rows, numbers.max_tokens
    expand_rows(rows, received, numbered, *of, slots)
    if zero_padding:
        zero_rows(rows, counts.psum_per_expert, tokens, numbers.alignment, scale_rows, slots)


def by_expert(engine: KernelVerbs, num_sms: int) -> Partition:
    """How the programs of a dispatch by expert are shared."""
    num_programs = num_comm_programs(num_sms)
    if isinstance(engine, InternodeEngine):
        return engine._partition(num_programs, owned=True)
    return Partition.by_expert(num_programs)


def layout_and_copy(
    engine: KernelVerbs, topk_idx: torch.Tensor, num_experts: int, copies_ids: bool
) -> tuple[RoutingLayout, torch.Tensor | None]:
    """Where tokens with these ids [T, K] go; and the ids, which the caller may change, in memory of
    their own, or None."""
    found: tuple[RoutingLayout, torch.Tensor | None]
    found = engine.call(_layout_and_copy, topk_idx, num_experts, copies_ids)
    return found


def _layout_and_copy(
    engine: KernelVerbs, topk_idx: torch.Tensor, num_experts: int, copies_ids: bool
) -> tuple[RoutingLayout, torch.Tensor | None]:
    copy = torch.empty_like(topk_idx) if copies_ids else None
    return routing.layout(topk_idx, num_experts, engine.slots, copy), copy


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
    """Returns the sizes of a dispatch with this many rows by token and by expert."""
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
    engine: KernelVerbs,
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
    args = tokens, sent.sent, num_experts, places.psum_per_expert, numbers, wanted, num_sms
    more: dict[str, Any] = dict(described=described, sized=(places.src_metadata, recv_topk_idx))
    got: tuple[ExpandedRows, torch.Tensor | None]
    got = engine.whole_call(_dispatch_again, *args, **more, **sizes)
    return got


def _dispatch_again(
    engine: KernelVerbs,
    tokens: Tokens,
    plan: PartsOfHandle,
    num_experts: int,
    psum_per_expert: torch.Tensor,
    numbers: Numbers,
    wanted: RowsWanted,
    num_sms: int,
    sized: tuple[torch.Tensor, torch.Tensor | None],
    **sizes: int,
) -> tuple[ExpandedRows, torch.Tensor | None]:
    metadata, ids = sized
    if ids is not None:
        received = with_size("max_rows", engine.new_rows(tokens, sizes["max_rows"], True))
        engine.send_again(tokens, plan, num_experts, received, num_sms)
        (copy,) = with_size("max_rows", [ids.new_empty(ids.shape)])
        copy_ids(ids, copy, engine.slots)
        return _by_token(received, wanted), copy
    rows = with_size("num_expanded", new_rows(tokens, sizes["num_expanded"], wanted))
    with_size("num_scales", [rows.scales])
    partition, scale_rows = by_expert(engine, num_sms), sizes["scale_rows"]
    engine.send_cached(tokens, plan, partition)
    how = plan[0], BARE_HEADER, partition, scale_rows, numbers.max_tokens
    expand_rows(rows, ReceivedPlaces(metadata), tokens, *how, engine.slots)
    if wanted.zero_padding:
        zero_rows(rows, psum_per_expert, tokens, numbers.alignment, scale_rows, engine.slots)
    return rows, None


def combine(
    engine: KernelVerbs,
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
    metadata = None if places is None else places.src_metadata
    if metadata is not None and bias and rounds_once:
        bias = [one.float() for one in bias]
        described = None  # which would have to describe these
    returned = ReturnedRows(*rows, metadata), sent.returned, tuple(bias), num_sms
    return engine.return_rows(*returned, described, rounds_once)


# --- Rows and places -----------------------------------------------------------------------------


def _new_metadata(src_idx: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Room for the `src_metadata` of received rows."""
    num_rows, num_topk = ids.shape
    return src_idx.new_empty(num_rows, 2 + num_topk)


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
