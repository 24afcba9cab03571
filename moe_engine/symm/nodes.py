"""Which ranks are of one node, and so map one another's memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist

from ..errors import BackendError
from . import base
from .meeting import exchange, ranks_text

Node = tuple[str, int]
"""What identifies a node: its host, and its number there."""


class Nodes(NamedTuple):
    """The nodes of a group. Rank r is rank r % ranks_per_node of node r // ranks_per_node."""

    num_nodes: int
    ranks_per_node: int


def find_nodes(group: dist.ProcessGroup | None, timeout_s: float | None = None) -> Nodes:
    """The nodes of a group; of one rank, or without a group, one node.

    Collective. A node is a host, or where MOE_ENGINE_NODE_SIZE is set so many ranks of a host that
    follow one another. BackendError, on all ranks, where that is no positive integer, where nodes
    have different numbers of ranks, or where the ranks of a node do not follow one another;
    OutOfStep as in `exchange`.
    """
    if group is None or group.size() == 1:
        return Nodes(1, 1)
    return nodes_of(exchange(group, this_node, "finding nodes", timeout_s))


def this_node() -> Node:
    """The node of this rank. BackendError where MOE_ENGINE_NODE_SIZE is no positive integer."""
    size = os.environ.get("MOE_ENGINE_NODE_SIZE")
    if size is None:
        return base.this_host(), 0
    if not size.isdecimal() or int(size) == 0:
        raise BackendError(
            f"MOE_ENGINE_NODE_SIZE is {size!r}; it must be a positive integer, the ranks of a host "
            "that are treated as one node. Unset it where a host is a node."
        )
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return base.this_host(), rank // int(size)


def nodes_of(nodes: Sequence[Node]) -> Nodes:
    """What the nodes of the ranks 0, 1 .. of a group are together; BackendError as in
    `find_nodes`."""
    ranks: dict[Node, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks.setdefault(node, []).append(rank)
    size = len(ranks[nodes[0]])
    in_order = [node for node in ranks for _ in range(size)]
    if list(nodes) != in_order:
        each = "; ".join(f"{ranks_text(members)}" for members in ranks.values())
        raise BackendError(
            f"the ranks of a group must come node by node, with as many on each; the nodes of this "
            f"one have {each}. Start as many ranks on every node, number them node by node, as "
            "torchrun does, and make groups of whole nodes, or of the same number of ranks of each."
        )
    return Nodes(len(ranks), size)
