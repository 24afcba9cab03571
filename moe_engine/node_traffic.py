"""Rows between nodes: how many cross each link, how long that takes, and which way is the faster.

Ranks of a node reach each other over NVLink (near), those of other nodes over their NICs (far). A
token's rows go one of two ways, and the sums of combine return the same way:

- direct: one row for each rank that has experts of the token, straight to that rank;
- two-level: one far row for each node, to the rank of the sender's own local index there, which
  forwards it to the ranks of its node; that is how DeepEP's internode kernels send.

All of this is a model, and no part of it was measured here between nodes: its constants are fitted
to what other libraries publish (`tools/published.py`), and link_gbs is that of an H200.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import comb
from typing import NamedTuple

from .errors import ShapeError
from .hardware import H200

NIC_GBS = 43.6
"""GB/s of payload that a NIC of 400 Gb/s carries in each direction: fitted."""
LATENCY_US = 25.1
"""What each dispatch or combine takes besides the rows on the busiest link: fitted."""
COPY_GBS = 33.4
"""GB/s that one SM copies for others, into memory that the NIC reads or over NVLink: fitted."""
HOP_US = 8.0
"""What the second level adds, the last chunk's way through the forwarding rank: assumed."""


class Way(StrEnum):
    """How rows go to other nodes."""

    DIRECT = "direct"
    TWO_LEVEL = "two-level"


class RowType(StrEnum):
    """What the rows of a dispatch are; those of combine are bf16."""

    FP8 = "fp8"
    BF16 = "bf16"

    def num_bytes(self, hidden: int) -> int:
        """Bytes of a row: bf16, or fp8 with a scale of 4 bytes for each 128 values."""
        return 2 * hidden if self is RowType.BF16 else hidden + 4 * -(-hidden // 128)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Ranks on nodes of equal size, and the speed of their links.

    nic_gbs, link_gbs: GB/s of a rank's NIC and of its NVLink in each direction. copy_gbs: GB/s that
    one SM copies. num_sms: how many of a rank's SMs copy rows. latency_us, hop_us: microseconds of
    each dispatch or combine besides its rows, and what the second level adds.
    """

    num_ranks: int
    ranks_per_node: int
    nic_gbs: float = NIC_GBS
    link_gbs: float = H200.shared_link_gbs
    copy_gbs: float = COPY_GBS
    num_sms: int = H200.num_sms
    latency_us: float = LATENCY_US
    hop_us: float = HOP_US

    @property
    def num_nodes(self) -> int:
        """Nodes, R / ranks_per_node."""
        return self.num_ranks // self.ranks_per_node

    def check(self) -> None:
        """Raise ShapeError for nodes that are not full, and for links without speed."""
        ranks, per_node = self.num_ranks, self.ranks_per_node
        if ranks < 1 or per_node < 1 or ranks % per_node:
            raise ShapeError(f"{ranks} ranks do not fill nodes of {per_node} ranks each")
        for name in ("nic_gbs", "link_gbs", "copy_gbs", "num_sms"):
            if not getattr(self, name) > 0:
                raise ShapeError(f"{name} is {getattr(self, name)}; it must be larger than 0")
        for name in ("latency_us", "hop_us"):
            if not getattr(self, name) >= 0:
                raise ShapeError(f"{name} is {getattr(self, name)}; it must be 0 or larger")


# --- Where tokens go -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shares:
    """Where tokens go, the same for the tokens of every rank.

    ranks [R], nodes: the share of tokens that are routed to a rank, and to a node. rows [R]: expert
    rows of a token on a rank; they sum to K.
    """

    ranks: Sequence[float]
    nodes: Sequence[float]
    rows: Sequence[float]

    @classmethod
    def uniform(
        cls, cluster: Cluster, num_experts: int, num_topk: int, node_limit: int | None = None
    ) -> Shares:
        """Those of tokens whose K experts are drawn evenly and without replacement, from all nodes
        or, as DeepSeek-V3's router does, from `node_limit` nodes that are drawn before. ShapeError
        for experts that do not divide among the ranks, or are too few for K."""
        check_experts(cluster, num_experts, num_topk, node_limit)
        num_ranks, num_nodes = cluster.num_ranks, cluster.num_nodes
        chosen = min(node_limit or num_nodes, num_nodes)
        experts = num_experts // num_nodes * chosen
        nodes = chosen * _hit(experts, experts // chosen, num_topk)
        ranks = chosen * cluster.ranks_per_node * _hit(experts, num_experts // num_ranks, num_topk)
        return cls(
            (ranks / num_ranks,) * num_ranks,
            (nodes / num_nodes,) * num_nodes,
            (num_topk / num_ranks,) * num_ranks,
        )

    @property
    def imbalance(self) -> float:
        """Expert rows of the busiest rank over the mean."""
        return max(self.rows) * len(self.rows) / sum(self.rows)


def _hit(num_experts: int, some: int, num_topk: int) -> float:
    """The chance that K of E experts have at least one of `some` of them."""
    return 1 - comb(num_experts - some, num_topk) / comb(num_experts, num_topk)


def check_experts(
    cluster: Cluster, num_experts: int, num_topk: int, node_limit: int | None = None
) -> None:
    """Raise ShapeError for experts that do not divide among the ranks, and for more experts of a
    token than the nodes have that it may choose."""
    if num_experts % cluster.num_ranks:
        raise ShapeError(f"{num_experts} experts do not divide among {cluster.num_ranks} ranks")
    reached = min(node_limit or cluster.num_nodes, cluster.num_nodes)
    if num_topk > num_experts // cluster.num_nodes * reached:
        raise ShapeError(
            f"top-{num_topk} of the {num_experts // cluster.num_nodes * reached} experts on "
            f"{reached} of {cluster.num_nodes} nodes"
        )


# --- What crosses the links ----------------------------------------------------------------------


class Load(NamedTuple):
    """Rows on the busiest link of each kind, and rows that the SMs of the busiest rank copy, all in
    rows of a dispatch for each token of a rank. Those of combine go the other way."""

    far_send: float
    far_receive: float
    near_send: float
    near_receive: float
    copied: float

    def reversed(self) -> Load:
        """The load of combine."""
        far, near = (self.far_receive, self.far_send), (self.near_receive, self.near_send)
        return Load(*far, *near, self.copied)


def load_of(way: Way, cluster: Cluster, shares: Shares) -> Load:
    """The load of one way."""
    if way is Way.TWO_LEVEL:
        return two_level_load(cluster, shares)
    return direct_load(cluster, shares.ranks)


def direct_load(cluster: Cluster, ranks: Sequence[float]) -> Load:
    """The load of rows that go straight to their ranks, of which rank r gets `ranks[r]` for each
    token: `Shares.ranks` for one row per rank, `Shares.rows` for one per expert."""
    per_node, total = cluster.ranks_per_node, sum(ranks)
    of_node = _node_sums(ranks, per_node)
    near = [of_node[rank // per_node] - share for rank, share in enumerate(ranks)]
    far = [total - of_node[rank // per_node] for rank in range(cluster.num_ranks)]
    return Load(
        far_send=_clear(max(far), total),
        far_receive=(cluster.num_ranks - per_node) * max(ranks),
        near_send=_clear(max(near), total),
        near_receive=(per_node - 1) * max(ranks),
        copied=max(map(sum, zip(far, near, strict=True))),
    )


def two_level_load(cluster: Cluster, shares: Shares) -> Load:
    """The load of rows that go to nodes, and from the rank that forwards them to others there. A
    rank forwards the rows of its local index on all nodes, its own rows included."""
    per_node, num_nodes, total = cluster.ranks_per_node, cluster.num_nodes, sum(shares.nodes)
    of_node = _node_sums(shares.ranks, per_node)
    near = [
        num_nodes * (of_node[rank // per_node] - share) for rank, share in enumerate(shares.ranks)
    ]
    far = [total - shares.nodes[rank // per_node] for rank in range(cluster.num_ranks)]
    return Load(
        far_send=_clear(max(far), total),
        far_receive=(num_nodes - 1) * max(shares.nodes),
        near_send=_clear(max(near), total),
        near_receive=(cluster.num_ranks - num_nodes) * max(shares.ranks),
        copied=max(map(sum, zip(far, near, strict=True))),
    )


def _node_sums(ranks: Sequence[float], per_node: int) -> list[float]:
    return [sum(ranks[begin : begin + per_node]) for begin in range(0, len(ranks), per_node)]


def _clear(rows: float, total: float) -> float:
    """0 for what differs from it by rounding alone."""
    return rows if rows > 1e-9 * total else 0.0


# --- How long it takes ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Exchange:
    """A dispatch or combine one way, of `num_bytes` bytes for each row of the load: tokens of a
    rank times bytes of a row."""

    cluster: Cluster
    load: Load
    num_bytes: float
    hops: int

    @property
    def bytes_on(self) -> dict[str, float]:
        """Bytes on the busiest link of each kind, and bytes that SMs copy, by name."""
        names = "far send", "far receive", "near send", "near receive", "copied"
        return {name: rows * self.num_bytes for name, rows in zip(names, self.load, strict=True)}

    @property
    def us_of(self) -> dict[str, float]:
        """Microseconds in which each kind of link carries its bytes, if the others do not bound."""
        one = self.cluster
        gbs = {"far": one.nic_gbs, "near": one.link_gbs, "copied": one.copy_gbs * one.num_sms}
        return {name: size / gbs[name.split()[0]] / 1e3 for name, size in self.bytes_on.items()}

    @property
    def fixed_us(self) -> float:
        """Microseconds that do not depend on the rows."""
        return self.cluster.latency_us + self.hops * self.cluster.hop_us

    @property
    def us(self) -> float:
        """Microseconds: the busiest of the links, whose transfers overlap, and what is fixed."""
        return self.fixed_us + max(self.us_of.values())

    @property
    def limit(self) -> str:
        """What takes the longest: a kind of link, the SMs' copies, or the latency."""
        us_of = self.us_of | {"latency": self.fixed_us}
        most = (1 - 1e-9) * max(us_of.values())
        return next(name for name, us in us_of.items() if us >= most)


def exchange(
    way: Way, cluster: Cluster, shares: Shares, num_bytes: float, back: bool = False
) -> Exchange:
    """A dispatch one way, or with `back` the combine. num_bytes: tokens of a rank times bytes of a
    row."""
    load = load_of(way, cluster, shares)
    has_levels = way is Way.TWO_LEVEL and 1 < cluster.ranks_per_node < cluster.num_ranks
    return Exchange(cluster, load.reversed() if back else load, num_bytes, int(has_levels))


def faster_way(
    cluster: Cluster, shares: Shares, dispatch_bytes: float, combine_bytes: float
) -> Way:
    """The way by which dispatch and combine together take the shorter time, direct if both take the
    same: two levels save bytes on NICs and add a hop. Bytes are as in `exchange`. Ranks must agree
    on the way, so the arguments must be equal on all of them."""

    def us(way: Way) -> float:
        there = exchange(way, cluster, shares, dispatch_bytes)
        return there.us + exchange(way, cluster, shares, combine_bytes, back=True).us

    return min(Way, key=us)
