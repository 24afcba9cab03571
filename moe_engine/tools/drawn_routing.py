"""Routings that are drawn, where no formula gives the shares of ranks and nodes."""

from __future__ import annotations

from enum import StrEnum

import torch
from einops import rearrange, reduce

from ..node_traffic import Cluster, Shares, check_experts

SHARE_TOKENS = 4096
"""Tokens that are drawn for the shares of ranks and nodes."""


class Routing(StrEnum):
    """Which experts tokens take."""

    UNIFORM = "uniform"
    ZIPF = "zipf"


def draw_routing(
    routing: Routing,
    cluster: Cluster,
    num_tokens: int,
    num_experts: int,
    num_topk: int,
    node_limit: int | None = None,
    seed: int = 0,
) -> torch.Tensor:
    """topk_idx int64 [T, K], distinct experts of each token. uniform: each expert as likely; zipf:
    one with weight 1, one with 1/2, 1/3 and so on, spread over the ranks at random, the same ones
    in every draw. node_limit: a token chooses from as many nodes, those of its first experts, if
    more are drawn than it may reach. ShapeError for experts that do not fit."""
    check_experts(cluster, num_experts, num_topk, node_limit)
    weights = torch.ones(num_experts)
    if routing is Routing.ZIPF:
        order = torch.randperm(num_experts, generator=torch.Generator().manual_seed(0))
        weights = 1.0 / (order + 1)
    generator = torch.Generator().manual_seed(seed)
    # The experts whose exponential clocks ring first are drawn without replacement.
    clocks = torch.empty(num_tokens, num_experts).exponential_(generator=generator) / weights
    if node_limit is not None and node_limit < cluster.num_nodes:
        by_node = rearrange(clocks, "t (node e) -> t node e", node=cluster.num_nodes)
        first = by_node.amin(2).topk(node_limit, largest=False).indices
        reached = torch.zeros(by_node.shape[:2], dtype=torch.bool).scatter_(1, first, True)
        clocks = by_node.masked_fill(~reached[:, :, None], torch.inf)
        clocks = rearrange(clocks, "t node e -> t (node e)")
    return clocks.topk(num_topk, largest=False).indices


def ranks_reached(topk_idx: torch.Tensor, num_experts: int, num_ranks: int) -> torch.Tensor:
    """bool [T, R]: whether a token has an expert on a rank."""
    ranks = topk_idx // (num_experts // num_ranks)
    return torch.zeros(len(topk_idx), num_ranks, dtype=torch.bool).scatter_(1, ranks, True)


def drawn_shares(topk_idx: torch.Tensor, cluster: Cluster, num_experts: int) -> Shares:
    """The shares of tokens that were drawn."""
    reached = ranks_reached(topk_idx, num_experts, cluster.num_ranks)
    nodes = reduce(reached, "t (node rank) -> t node", "any", node=cluster.num_nodes)
    rows = topk_idx.flatten() // (num_experts // cluster.num_ranks)
    counts = rows.bincount(minlength=cluster.num_ranks) / len(topk_idx)
    parts = reached.double().mean(0), nodes.double().mean(0), counts.double()
    return Shares(*(part.tolist() for part in parts))


def shares_of(
    routing: Routing,
    cluster: Cluster,
    num_experts: int,
    num_topk: int,
    node_limit: int | None = None,
) -> Shares:
    """The shares of a routing: by formula where it is uniform, else those of tokens drawn."""
    if routing is Routing.UNIFORM:
        return Shares.uniform(cluster, num_experts, num_topk, node_limit)
    sizes = num_experts, num_topk, node_limit
    topk_idx = draw_routing(routing, cluster, SHARE_TOKENS, *sizes)
    return drawn_shares(topk_idx, cluster, num_experts)
