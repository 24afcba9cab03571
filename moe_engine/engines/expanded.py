"""The steps of ElasticBuffer's calls: those of a Buffer's dispatch and combine, and in between what
happens to received rows on their rank. They get places in the order of experts, are copied there,
and are summed before they return. Each step is a prepared call, whatever the number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..combine.reduce_expanded import reduce_expanded
from ..combine.reduce_expanded_kernels import ExpertRows, ReducedRows
from ..dispatch import Received, Tokens
from ..dispatch.expand import expand_rows, place_received
from ..dispatch.expand_kernels import (
    ExpandedRows,
    PlaceNumbers,
    Places,
    ReceivedIds,
    ReceivedRows,
)
from ..utils import round_up
from .base import Handle
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
    sent: Handle
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
    """Send the tokens. Unless the host `waits` for the counts there is room for all that can come.
    Rows by expert are copied from where they arrive."""
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
        of = places, prefix, num_expanded
        rows = return_rows(engine, received, tokens.x, *of, numbers, wanted)
    finally:
        if in_place:
            engine.release()
    return Dispatched(rows, topk_idx, places, sent, per_expert, num_expanded)


def dispatch_again(
    engine: KernelEngine,
    tokens: Tokens,
    num_experts: int,
    sent: Handle,
    places: Places,
    num_expanded: int,
    numbers: Numbers,
    wanted: RowsWanted,
    num_sms: int,
) -> ExpandedRows:
    """Send tokens where those of an earlier dispatch went; ids and weights go along where there are
    some."""
    topk = None
    if tokens.topk_idx is not None and tokens.topk_weights is not None:
        topk = tokens.topk_idx, tokens.topk_weights, num_experts
    received = engine.dispatch_cached(tokens.x, tokens.scales, sent, num_sms, topk=topk)
    of = places, sent.rank_prefix_matrix, num_expanded
    return return_rows(engine, received, tokens.x, *of, numbers, wanted)


def combine(
    engine: KernelEngine,
    rows: ExpertRows,
    places: Places | None,
    sent: Handle,
    bias: Sequence[torch.Tensor],
    rounds_once: bool,
    num_sms: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return rows to their tokens: rows by token, or with `places` sums of rows by expert. These
    are fp32 until the end if a result `rounds_once`."""
    dtype = rows.x.dtype
    if places is not None:
        dtype = torch.float32 if rounds_once else dtype
        rows = ExpertRows(*reduce(engine, rows, places, sent.rank_prefix_matrix, dtype))
    bias = [one.to(dtype) for one in bias]
    out, weights = engine.combine(rows.x, sent, rows.weights, bias, num_sms)
    return out if dtype == torch.bfloat16 else out.bfloat16(), weights


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
        PlaceNumbers(*numbers[:3]),
        num_expanded if by_expert else None,
        engine.slots,
    )
    return tuple(places[1:])


def return_rows(
    engine: KernelEngine,
    received: Received,
    sent_x: torch.Tensor,
    places: Places,
    rank_prefix_matrix: torch.Tensor,
    num_expanded: int,
    numbers: Numbers,
    wanted: RowsWanted,
) -> ExpandedRows:
    """Received rows as they are wanted. Those by expert are copied, with their scales and weights,
    also from their addresses received.x int64 [N]; they are like rows of `sent_x`."""
    scales = received.scales
    weights = received.topk_weights if wanted.weights else None
    if not wanted.expand:
        if scales is not None and wanted.by_column:
            scales = _by_column(scales, len(scales))[1].copy_(scales)
        return ExpandedRows(received.x, scales, weights)
    if scales is None:
        memory, scale_rows, result = None, 0, None
    elif wanted.by_column:
        memory, result = _by_column(scales, num_expanded)
        scale_rows = round_up(num_expanded, SCALE_ROWS)
    else:
        memory, scale_rows = scales.new_empty(num_expanded * scales.shape[1]), 0
        result = memory.view(num_expanded, scales.shape[1])
    out = ExpandedRows(
        sent_x.new_empty(num_expanded, sent_x.shape[1]),
        memory,
        None if weights is None else weights.new_empty(num_expanded),
    )
    metadata, *sums = places
    engine.call(
        _expand,
        tuple(sums),
        rank_prefix_matrix,
        numbers,
        (wanted.zero_padding, scale_rows > 0),
        sized=(received.x, scales, weights, metadata, *out),
        num_rows=len(metadata),
        num_expanded=num_expanded,
        scale_rows=scale_rows,
    )
    return out._replace(scales=result)


def _by_column(scales: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(memory, the same as [num_rows, S]) for scales like [N, S], in contiguous columns."""
    columns = round_up(num_rows, SCALE_ROWS)
    memory = scales.new_empty(scales.shape[1] * columns)
    return memory, memory.view(scales.shape[1], columns)[:, :num_rows].T


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
    places, of = Places(metadata, *sums), PlaceNumbers(*numbers[:3])
    expand_rows(received, places, rank_prefix_matrix, out, of, scale_rows, how[0], engine.slots)


def reduce(
    engine: KernelEngine,
    rows: ExpertRows,
    places: Places,
    rank_prefix_matrix: torch.Tensor,
    dtype: torch.dtype,
) -> ReducedRows:
    """Sum expert rows [M, H] to received rows [N, H] of `dtype`, see `reference.reduce_expanded`;
    weights float32 [M], unless None, become [N, K]."""
    metadata, weights = places.src_metadata, rows.weights
    num_rows, num_topk = len(metadata), metadata.shape[1] - 2
    out = ReducedRows(
        rows.x.new_empty(num_rows, rows.x.shape[1], dtype=dtype),
        None if weights is None else weights.new_empty(num_rows, num_topk),
    )
    engine.call(
        _reduce,
        rank_prefix_matrix,
        sized=(*rows, metadata, *out),
        num_rows=num_rows,
        num_expanded=len(rows.x),
    )
    return out


def _reduce(
    engine: KernelEngine,
    rank_prefix_matrix: torch.Tensor,
    sized: tuple[torch.Tensor, ...],
    num_rows: int,
    num_expanded: int,
) -> None:
    rows, metadata, out = ExpertRows(*sized[:2]), sized[2], ReducedRows(*sized[3:])
    reduce_expanded(rows, metadata, rank_prefix_matrix, out, engine.slots)
