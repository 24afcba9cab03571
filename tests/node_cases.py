"""Pools of ranks on several emulated nodes, for what tests of one node run as well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

from moe_engine.emulation import PerRank, RankPool
from moe_engine.engines import internode_layer
from moe_engine.symm.base import environment

SHAPES = {
    **{"2x2": (2, 2), "4x1": (4, 1), "3x2": (3, 2), "2x1": (2, 1)},
    **{"1x2": (1, 2), "1x4": (1, 4), "1x6": (1, 6)},
}
"""(nodes, ranks of each) by the names that tests use."""


class NodePool:
    """The first ranks of a pool, as so many nodes of so many ranks: it takes the place of a pool.
    With 1 node these are ranks of one node."""

    def __init__(self, pool: RankPool, num_nodes: int, ranks_per_node: int):
        self.device = pool.device
        self.pool, self.num_nodes, self.ranks_per_node = pool, num_nodes, ranks_per_node
        self.num_ranks = num_nodes * ranks_per_node

    def run(self, function: Callable[..., Any], *args: Any, **more: Any) -> list[Any]:
        """See `RankPool.run`, on all ranks of these nodes."""
        size = str(self.ranks_per_node)
        more.setdefault("num_ranks", self.num_ranks)
        assert more["num_ranks"] == self.num_ranks, "a test of several nodes runs on all ranks"
        return self.pool.run(_on_nodes, PerRank([size] * self.num_ranks), function, *args, **more)


def _on_nodes(group: Any, node_size: str, function: Callable[..., Any], *args: Any) -> Any:
    with environment({"MOE_ENGINE_NODE_SIZE": node_size}):
        return function(group, *args)


@dataclass(frozen=True)
class InParts:
    """A pool of ranks whose layers have two parts, and backwards that overlap with the network,
    whatever is predicted: all, some, or none."""

    pool: Any
    which: str = "all"

    @property
    def num_ranks(self) -> int:
        return self.pool.num_ranks

    def run(self, call: Callable[..., Any], *args: Any, **more: Any) -> list[Any]:
        return self.pool.run(run_in_parts, call, self.which, *args, **more)


def run_in_parts(group: Any, call: Callable[..., Any], which: str, *args: Any) -> Any:
    has_two = {"all": True, "some": group.rank() % 3 != 1, "none": False}[which]
    with (
        mock.patch.object(internode_layer, "is_faster", lambda *_: has_two),
        mock.patch.object(internode_layer, "overlaps", lambda *_: (has_two, has_two)),
        mock.patch.object(internode_layer, "forward", wraps=internode_layer.forward) as forward,
    ):
        result = call(group, *args)
    assert forward.called == has_two
    return result
