"""A dispatch between nodes as discrete events: chunks of rows wait in the queues of NICs and of
NVLinks, in the order in which they come. It knows what the formulas of `node_traffic` leave out:
which chunk waits for which, incast, and how far a drawn routing is from its mean.

A chunk passes the sender's NIC, the network, the receiver's NIC and, with two levels, the NVLinks
from the rank that forwards it to those of its rows' experts. Each link serves one chunk at a time,
and a chunk goes on when the whole of it has passed. Receivers have room for all that comes, so no
sender ever waits for one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import heapify, heappop, heappush
from itertools import count

import torch

from ..node_traffic import Cluster, Way

CHUNK_ROWS = 32
"""Rows of a chunk, as many as the chunks of DeepEP's internode kernels hold at most."""
NETWORK_US = 2.0
"""What a chunk takes from NIC to NIC besides its bytes: assumed."""


class Order(StrEnum):
    """Where a rank sends its chunks first: to its own local index on the next node, so that no two
    ranks send to one at a time, or all to the first rank, so that they meet at one NIC."""

    STAGGERED = "staggered"
    INCAST = "incast"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows on their way from one rank. path: the links that they still pass, each with the rows
    that pass it. forward: what follows, to other ranks of the node, when the path ends."""

    path: tuple[tuple[str, int, int], ...]
    forward: tuple[Chunk, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """us: when the last row arrived. busiest_us: how long the busiest link was busy, less than
    which no order takes. waited: by kind of link, the longest time that a chunk waited for one."""

    us: float
    busiest_us: float
    waited: dict[str, float]


def chunks_of(
    way: Way, cluster: Cluster, reached: Sequence[torch.Tensor], order: Order = Order.STAGGERED
) -> Iterator[Chunk]:
    """The chunks of a dispatch in the order in which ranks send them. reached: for each source
    rank bool [T, R], whether a token has an expert on a rank."""
    num_ranks, per_node = cluster.num_ranks, cluster.ranks_per_node
    for source, tokens in enumerate(reached):
        node, index = divmod(source, per_node)
        turn = list(range(num_ranks))
        if order is Order.STAGGERED:
            turn.sort(key=lambda rank: _steps(source, rank, cluster))
        near = [rank for rank in turn if rank // per_node == node and rank != source]
        far = [rank for rank in turn if rank // per_node != node]
        yield from _pieces(source, near, tokens, cluster)
        if way is Way.DIRECT:
            for rank in far:
                for rows in _split(int(tokens[:, rank].sum())):
                    yield Chunk((("far send", source, rows), ("far receive", rank, rows)))
            continue
        for rank in (rank for rank in far if rank % per_node == index):
            begin = rank - index
            inside = tokens[:, begin : begin + per_node]
            inside = tokens[inside.any(1)]
            ranks = [begin + (index + step) % per_node for step in range(1, per_node)]
            for part in inside.split(CHUNK_ROWS):
                path = ("far send", source, len(part)), ("far receive", rank, len(part))
                yield Chunk(path, tuple(_pieces(rank, ranks, part, cluster)))


def _steps(source: int, rank: int, cluster: Cluster) -> tuple[int, int]:
    """How many nodes after that of `source` a rank's node comes, and likewise its local index."""
    (node, index), (from_node, from_index) = (
        divmod(one, cluster.ranks_per_node) for one in (rank, source)
    )
    return (node - from_node) % cluster.num_nodes, (index - from_index) % cluster.ranks_per_node


def _pieces(
    source: int, ranks: Sequence[int], tokens: torch.Tensor, cluster: Cluster
) -> Iterator[Chunk]:
    """Chunks over the NVLinks from one rank to others of its node."""
    counts = tokens.sum(0).tolist()
    for rank in ranks:
        for rows in _split(counts[rank]):
            yield Chunk((("near send", source, rows), ("near receive", rank, rows)))


def _split(num_rows: int) -> Iterator[int]:
    for begin in range(0, num_rows, CHUNK_ROWS):
        yield min(CHUNK_ROWS, num_rows - begin)


def play(cluster: Cluster, chunks: Iterator[Chunk], row_bytes: int) -> Outcome:
    """Send all chunks at once and let them pass their links, each link in the order of arrival."""
    us_of_row = {
        "far": row_bytes / cluster.nic_gbs / 1e3,
        "near": row_bytes / cluster.link_gbs / 1e3,
    }
    number = count()
    events = [(0.0, next(number), chunk, 0) for chunk in chunks]
    heapify(events)
    free: dict[tuple[str, int], float] = defaultdict(float)
    busy: dict[tuple[str, int], float] = defaultdict(float)
    waited: dict[str, float] = defaultdict(float)
    last = 0.0
    while events:
        now, _, chunk, step = heappop(events)
        if step == len(chunk.path):
            last = now
            for piece in chunk.forward:
                heappush(events, (now, next(number), piece, 0))
            continue
        kind, rank, rows = chunk.path[step]
        us = rows * us_of_row[kind.split()[0]]
        begin = max(now, free[kind, rank])
        if step or kind == "near send":
            waited[kind] = max(waited[kind], begin - now)
        free[kind, rank] = begin + us
        busy[kind, rank] += us
        network = NETWORK_US if kind == "far send" else 0.0
        heappush(events, (begin + us + network, next(number), chunk, step + 1))
    return Outcome(last, max(busy.values(), default=0.0), dict(waited))
