"""The steps of ElasticBuffer's calls: those of a Buffer's dispatch and combine, and in between what
happens to received rows on their rank. They get places in the order of experts, are copied there,
and are summed before they return. A call is one prepared call, whatever the number of rows; where
the host waits for counts, each of its steps is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..combine import ReturnedRows
from ..combine.reduce_expanded import reduce_expanded
from ..combine.reduce_expanded_kernels import ExpertRows, ReducedRows
from ..dispatch import Received, Tokens
from ..dispatch.expand import expand_rows, place_received
from ..dispatch.expand_kernels import (
    ExpandedRows,
    Places,
    ReceivedIds,
    ReceivedRows,
)
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


class Dispatched(NamedTuple):
    """What a dispatch brings: rows as wanted, with scales and weights or None; the ids of rows by
    token; where rows come from and go; the handle; rows of each local expert with padding, where
    the host knows; the number of rows by expert."""

    rows: ExpandedRows
    topk_idx: torch.Tensor
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
    waits: bool,
    num_sms: int,
) -> Dispatched:
    """Send the tokens. Unless the host `waits` for the counts there is room for all that can come,
    and the whole is one prepared call. Rows by expert are copied from where they arrive."""
    args = tokens, num_experts, stats, numbers, wanted, waits, num_sms
    got: Dispatched = _dispatch(engine, *args) if waits else engine.call(_dispatch, *args)
    rows = _shaped(got.rows, tokens.scales, got.num_expanded, wanted)
    return got._replace(rows=rows, per_expert=[*got.per_expert])  # a list of the caller's own


def _dispatch(
    engine: KernelEngine,
    tokens: Tokens,
    num_experts: int,
    stats: torch.Tensor | None,
    numbers: Numbers,
    wanted: RowsWanted,
    waits: bool,
    num_sms: int,
) -> Dispatched:
    assert tokens.topk_idx is not None
    layout = engine.layout(tokens.topk_idx, num_experts)
    most_rows, in_place = 0 if waits else numbers.most_rows(), wanted.expand
    received, counts, sent = engine.dispatch(tokens, layout, most_rows, num_sms, not in_place)[:3]
    try:
        topk_idx, per_expert = received.topk_idx, [round_up(n, numbers.alignment) for n in counts]
        assert topk_idx is not None
        num_expanded = sum(per_expert) if waits else numbers.most_expanded(tokens.num_topk)
        ids, prefix = ReceivedIds(topk_idx, received.src_idx), sent.rank_prefix_matrix
        places = find_places(engine, ids, prefix, stats, numbers, wanted.expand, num_expanded)
        rows = _by_token(received, wanted)
        if wanted.expand:
            rows, received_rows = new_rows(tokens, num_expanded, wanted), ReceivedRows(*rows)
            expand(engine, received_rows, places, prefix, rows, numbers, wanted)
    finally:
        if in_place:
            engine.release()
    return Dispatched(rows, topk_idx, places, sent, per_expert, num_expanded)


def dispatch_again(
    engine: KernelEngine,
    tokens: Tokens,
    num_experts: int,
    sent: Handle | InternodeHandle,
    places: Places,
    num_expanded: int,
    numbers: Numbers,
    wanted: RowsWanted,
    num_sms: int,
) -> ExpandedRows:
    """Send tokens where those of an earlier dispatch went; ids and weights go along where there are
    some."""
    goes_along = tokens.topk_idx is not None and tokens.topk_weights is not None
    num_experts = num_experts if goes_along else numbers.num_ranks
    plan = sent.sent
    num_rows, (metadata, *sums) = sent.recv_src_idx.numel(), places
    received = Received.empty(tokens.x.new_empty(num_rows, tokens.x.shape[1]), tokens)
    if not wanted.expand:
        engine.send_again(tokens, plan, num_experts, received, num_sms)
        return _shaped(_by_token(received, wanted), tokens.scales, num_expanded, wanted)
    rows = new_rows(tokens, num_expanded, wanted)
    engine.call(
        _dispatch_again,
        tokens,
        plan,
        num_experts,
        tuple(sums),
        numbers,
        wanted,
        num_sms,
        sized=(*received, metadata, *rows),
        max_rows=num_rows,
        num_rows=num_rows,
        num_expanded=num_expanded,
        scale_rows=_scale_rows(rows, wanted),
    )
    return _shaped(rows, tokens.scales, num_expanded, wanted)


def _dispatch_again(
    engine: KernelEngine,
    tokens: Tokens,
    plan: PartsOfHandle,
    num_experts: int,
    sums: tuple[torch.Tensor, ...],
    numbers: Numbers,
    wanted: RowsWanted,
    num_sms: int,
    sized: tuple[torch.Tensor, ...],
    **more: int,
) -> None:
    received, metadata, rows = Received(*sized[:5]), sized[5], ExpandedRows(*sized[6:])
    engine.send_again(tokens, plan, num_experts, received, num_sms)
    expand(
        engine,
        ReceivedRows(*_by_token(received, wanted)),
        Places(metadata, *sums),
        plan[0],
        rows,
        numbers,
        wanted,
    )


def combine(
    engine: KernelEngine,
    rows: ExpertRows,
    places: Places | None,
    sent: Handle | InternodeHandle,
    bias: Sequence[torch.Tensor],
    rounds_once: bool,
    num_sms: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return rows to their tokens: rows by token, or with `places` sums of rows by expert. These,
    and the sums of several nodes, are fp32 until the end if a result `rounds_once`."""
    plan, dtype = sent.returned, torch.float32 if rounds_once else rows.x.dtype
    if places is None:
        returned = ReturnedRows(*rows), plan, tuple(bias), num_sms
        return engine.return_rows(*returned, round_once=rounds_once)
    reduced, metadata = _new_sums(rows, places, dtype), places.src_metadata
    out, weights = engine.call(
        _combine,
        plan,
        tuple(one.to(dtype) for one in bias),
        num_sms,
        sized=(*rows, metadata, *reduced),
        num_rows=len(metadata),
        num_expanded=len(rows.x),
    )
    return out.bfloat16() if rounds_once else out, weights


def _combine(
    engine: KernelEngine,
    plan: PartsOfHandle,
    bias: tuple[torch.Tensor, ...],
    num_sms: int,
    sized: tuple[torch.Tensor, ...],
    **numbers: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    _reduce(engine, plan[0], sized, **numbers)
    return engine.return_rows(ReturnedRows(*sized[3:]), plan, bias, num_sms)


# --- Steps ---------------------------------------------------------------------------------------


def find_places(
    engine: KernelEngine,
    received: ReceivedIds,
    rank_prefix_matrix: torch.Tensor,
    stats: torch.Tensor | None,
    numbers: Numbers,
    by_expert: bool,
    num_expanded: int,
) -> Places:
    """The places of received rows, see `reference.place`. Unless they are placed `by_expert`, all
    places are -1, and psum_per_expert counts padding. There is room for num_expanded rows: the host
    is told where there are more. stats int32 [L], unless None: the rows of each expert are added
    to it."""
    num_rows, num_topk = received.topk_idx.shape
    metadata = received.src_idx.new_empty(num_rows, 2 + num_topk)
    sums: tuple[torch.Tensor, ...] = engine.call(
        _find_places,
        rank_prefix_matrix,
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
    place_received(
        ReceivedIds(topk_idx, src_idx),
        rank_prefix_matrix,
        places,
        stats,
        numbers.alignment,
        numbers.max_tokens,
        num_expanded if by_expert else None,
        engine.slots,
    )
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
    """Copy received rows, or those at the addresses received.x int64 [N], to their places."""
    metadata, *sums = places
    scale_rows = _scale_rows(rows, wanted)
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
        columns = round_up(num_rows, SCALE_ROWS) if wanted.by_column else num_rows
        scales = scales.new_empty(columns * scales.shape[1])
    weights = x.new_empty(num_rows, dtype=torch.float32) if wanted.weights else None
    return ExpandedRows(x.new_empty(num_rows, x.shape[1]), scales, weights)


def _scale_rows(rows: ExpandedRows, wanted: RowsWanted) -> int:
    """How far apart the columns of scales are, 0 for scales by row."""
    is_by_column = rows.scales is not None and wanted.by_column
    return round_up(len(rows.x), SCALE_ROWS) if is_by_column else 0


def _shaped(
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
    columns = round_up(num_rows, SCALE_ROWS)
    memory = scales if wanted.expand else scales.new_empty(num_scales * columns)
    by_column = memory.view(num_scales, columns)[:, :num_rows].T
    if not wanted.expand:
        by_column.copy_(scales)
    return rows._replace(scales=by_column)


def _new_sums(rows: ExpertRows, places: Places, dtype: torch.dtype) -> ReducedRows:
    """Room for the sums of rows by expert, of `dtype`, and for their weights."""
    num_rows, columns = places.src_metadata.shape
    weights = None if rows.weights is None else rows.weights.new_empty(num_rows, columns - 2)
    return ReducedRows(rows.x.new_empty(num_rows, rows.x.shape[1], dtype=dtype), weights)


def _reduce(
    engine: KernelEngine,
    rank_prefix_matrix: torch.Tensor,
    sized: tuple[torch.Tensor, ...],
    num_rows: int,
    num_expanded: int,
) -> None:
    """Sum expert rows [M, H] to received rows [N, H], see `reference.reduce_expanded`; weights
    float32 [M], unless None, become [N, K]."""
    rows, metadata, out = ExpertRows(*sized[:2]), sized[2], ReducedRows(*sized[3:])
    reduce_expanded(rows, metadata, rank_prefix_matrix, out, engine.slots)
