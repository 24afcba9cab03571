"""`moe-engine simulate`: a layer on many nodes, by formula: time and bytes of dispatch and combine,
the layer, a training step, and memory. It is a model: see `node_traffic`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from ..errors import ShapeError
from ..hardware import H200
from ..layer_config import LayerConfig, LayerProblem, combine_us, dispatch_us
from ..node_traffic import (
    Cluster,
    Exchange,
    RowType,
    Shares,
    Way,
    check_experts,
    exchange,
    faster_way,
)
from .drawn_routing import Routing, draw_routing, ranks_reached, shares_of
from .simulate_events import Order, Outcome, chunks_of, play

MOST_RANKS = 2048
"""The largest cluster of a sweep."""
EVENT_TOKENS, EVENT_RANKS = 256, 128
"""Tokens of a rank, and the most ranks, of which each chunk is followed."""
BACKWARD_STAGES = 8
"""In how many parts the backward's products are assumed to overlap with its rows."""


@dataclass(frozen=True, slots=True)
class LayerOnNodes(LayerProblem):
    """A layer whose rows take `rows_us` microseconds to other ranks, on the rank whose experts have
    the most rows: `imbalance` times the mean. Its GEMMs read the weights of all its experts."""

    rows_us: float = 0.0
    imbalance: float = 1.0

    @property
    def link_us(self) -> float:
        """The time of the rows, as given."""
        return self.rows_us

    def gemm_us(self, columns: int) -> float:
        """The time of a GEMM of the busiest rank, of its products or of its weights."""
        weights = self.num_experts / self.num_ranks * self.hidden * columns * self.itemsize
        products_us = self.imbalance * LayerProblem.gemm_us(self, columns)
        return max(products_us, weights / H200.hbm_gbs / 1e3)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A layer on a cluster. layer: its sizes, where max_tokens are the tokens of each rank."""

    cluster: Cluster
    layer: LayerProblem
    row_type: RowType = RowType.FP8
    routing: Routing = Routing.UNIFORM
    node_limit: int | None = None

    def answer(self) -> Answer:
        """What the model says. ShapeError for ranks that do not fill their nodes, or experts that
        do not fit."""
        self.cluster.check()
        sizes = self.layer.num_experts, self.layer.num_topk, self.node_limit
        return Answer(self, shares_of(self.routing, self.cluster, *sizes))

    def sweep(self) -> Iterator[Scenario]:
        """The same on 1, 2, 4 nodes and so on, up to MOST_RANKS ranks or as many as it has; where
        there are more ranks than experts, with one expert on each. What does not fit is left
        out."""
        num_ranks = self.cluster.ranks_per_node
        while num_ranks <= max(MOST_RANKS, self.cluster.num_ranks):
            experts = max(self.layer.num_experts, num_ranks)
            cluster = replace(self.cluster, num_ranks=num_ranks)
            layer = replace(self.layer, num_ranks=num_ranks, num_experts=experts)
            with suppress(ShapeError):
                check_experts(cluster, experts, layer.num_topk, self.node_limit)
                yield replace(self, cluster=cluster, layer=layer)
            num_ranks *= 2


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model says of a scenario. All times are microseconds of the busiest rank."""

    scenario: Scenario
    shares: Shares

    def exchange_of(self, verb: str, way: Way, row_type: RowType | None = None) -> Exchange:
        """The "dispatch" or "combine" one way; row_type: if not that of the scenario."""
        is_back = verb == "combine"
        row_type = row_type or (RowType.BF16 if is_back else self.scenario.row_type)
        num_bytes = self._bytes(row_type)
        return exchange(way, self.scenario.cluster, self.shares, num_bytes, is_back)

    def _bytes(self, row_type: RowType) -> float:
        layer = self.scenario.layer
        return layer.max_tokens * row_type.num_bytes(layer.hidden)

    @property
    def way(self) -> Way:
        """The way that both go, as the formula chooses it."""
        num_bytes = self._bytes(self.scenario.row_type), self._bytes(RowType.BF16)
        return faster_way(self.scenario.cluster, self.shares, *num_bytes)

    @property
    def both(self) -> tuple[Exchange, Exchange]:
        """Dispatch and combine by this way."""
        return self.exchange_of("dispatch", self.way), self.exchange_of("combine", self.way)

    # --- The layer -------------------------------------------------------------------------------

    def _on(self, one: Exchange) -> LayerOnNodes:
        """The layer with the rows of an exchange."""
        layer = self.scenario.layer
        sizes = layer.num_ranks, layer.max_tokens, layer.num_experts, layer.num_topk
        widths = layer.hidden, layer.num_columns, layer.itemsize
        rows_us, imbalance = one.us - one.fixed_us, self.shares.imbalance
        return LayerOnNodes(*sizes, *widths, rows_us=rows_us, imbalance=imbalance)

    @property
    def gemms_us(self) -> float:
        """The GEMMs of a forward."""
        return self._on(self.both[0]).gemm_us(3 * self.scenario.layer.num_columns)

    @property
    def serial_us(self) -> float:
        """Dispatch, GEMMs and combine, one after the other."""
        return self.gemms_us + sum(one.us for one in self.both)

    @property
    def layer_us(self) -> float:
        """The layer with its rows in stages, as `layer_config` predicts them within a node."""
        to, back = self.both
        stages = LayerConfig.predicted(self._on(to)).num_stages
        return_stages = LayerConfig.predicted(self._on(back)).num_return_stages
        up, down = dispatch_us(self._on(to), stages), combine_us(self._on(back), return_stages)
        return to.fixed_us + up + back.fixed_us + down

    @property
    def backward_us(self) -> float:
        """The backward: gradients of y arrive in bf16 during the products with the weights, those
        of x return during the weights' gradients."""
        total = 0.0
        for verb in ("dispatch", "combine"):
            one = self.exchange_of(verb, self.way, RowType.BF16)
            times = one.us - one.fixed_us, self.gemms_us
            total += one.fixed_us + max(times) + min(times) / BACKWARD_STAGES
        return total

    @property
    def limit(self) -> str:
        """What takes the most of the layer's time: its products, the reads of its weights, or what
        limits the slower of dispatch and combine."""
        if self.gemms_us < sum(one.us for one in self.both):
            return max(self.both, key=lambda one: one.us).limit
        layer = self.scenario.layer
        products_us = self.shares.imbalance * layer.gemm_us(3 * layer.num_columns)
        return "GEMMs" if self.gemms_us == products_us else "weights"

    # --- Memory ----------------------------------------------------------------------------------

    @property
    def memory(self) -> dict[str, float]:
        """Bytes of a rank by what they hold. Regions are those of a dispatch and a combine that
        have room for all rows of a node's ranks with the same local index."""
        layer, cluster = self.scenario.layer, self.scenario.cluster
        num_local = layer.num_experts // layer.num_ranks
        row = RowType.BF16.num_bytes(layer.hidden)
        tokens = layer.max_tokens
        two_rows = row + self.scenario.row_type.num_bytes(layer.hidden)
        regions = cluster.num_nodes * tokens * two_rows if self.way is Way.TWO_LEVEL else 0
        return {
            "expert weights, bf16": 3 * num_local * layer.num_columns * row,
            "expert rows, busiest rank": self.shares.imbalance * tokens * layer.num_topk * row,
            "expert rows, all tokens to one rank": (
                layer.num_ranks * tokens * min(layer.num_topk, num_local) * row
            ),
            "regions of two levels": regions,
        }

    # --- Events ----------------------------------------------------------------------------------

    def events(self) -> dict[tuple[Way, Order], tuple[float, Outcome]]:
        """For each way and order of a dispatch of EVENT_TOKENS tokens at most: microseconds of the
        rows by formula, and what following each chunk gives. Empty for more than EVENT_RANKS."""
        cluster, layer = self.scenario.cluster, self.scenario.layer
        if cluster.num_ranks > EVENT_RANKS:
            return {}
        tokens = min(layer.max_tokens, EVENT_TOKENS)
        sizes = tokens, layer.num_experts, layer.num_topk, self.scenario.node_limit
        drawn = [
            draw_routing(self.scenario.routing, cluster, *sizes, seed=1 + rank)
            for rank in range(cluster.num_ranks)
        ]
        reached = [ranks_reached(one, layer.num_experts, cluster.num_ranks) for one in drawn]
        row_bytes = self.scenario.row_type.num_bytes(layer.hidden)
        found = {}
        for way in Way:
            one = exchange(way, cluster, self.shares, tokens * row_bytes)
            for order in Order:
                outcome = play(cluster, chunks_of(way, cluster, reached, order), row_bytes)
                found[way, order] = one.us - one.fixed_us, outcome
        return found
