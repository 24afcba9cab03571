"""Stand-ins for torchtitan's `RoutedExperts`, `GroupedExperts` and `BaseEPTokenDispatcher`, with
the adapters among their bases. They make the calls of the source of 21 August 2026 (b5bcd76), in
their order and with their arguments."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from ops_cases import experts as grouped_experts
from torch import nn

from moe_engine.integrations import torchtitan
from moe_engine.sharded_weights import local


class BaseDispatcher:
    """`BaseEPTokenDispatcher`."""

    def __init__(self, config):
        self.num_experts, self.top_k, self.ep_mesh = config.num_experts, config.top_k, None

    def wire_meshes(self, *, ep_mesh):
        self.ep_mesh = ep_mesh
        self.init_buffer()


class Dispatcher(torchtitan.EngineDispatcher, BaseDispatcher):
    """The class that `torchtitan_overrides` makes."""


class GroupedExperts(nn.Module):
    """`GroupedExperts`."""

    def __init__(self, config):
        super().__init__()
        shape = config.num_experts, config.hidden_dim, config.dim
        self.w1_EFD, self.w3_EFD = (nn.Parameter(torch.empty(shape)) for _ in range(2))
        self.w2_EDF = nn.Parameter(torch.empty(shape).transpose(1, 2).contiguous())

    def forward(self, x_RD, num_tokens_per_expert_E):
        ends = F.pad(torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32), (1, 0))
        up = torch.cat([local(self.w1_EFD), local(self.w3_EFD)], 1)
        return grouped_experts(x_RD, ends, up, local(self.w2_EDF))


class FusedGroupedExperts(nn.Module):
    """`FusedGroupedExperts`, whose weights alone are needed."""

    def __init__(self, config):
        super().__init__()
        self.w13 = nn.Parameter(torch.empty(config.num_experts, config.hidden_dim, 2, config.dim))
        self.w2_EDF = nn.Parameter(torch.empty(config.num_experts, config.dim, config.hidden_dim))


class RoutedExperts(nn.Module):
    """`RoutedExperts`."""

    def __init__(self, config):
        super().__init__()
        self.inner_experts = config.inner_experts
        self.token_dispatcher = config.token_dispatcher

    def forward(self, x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E):
        rows, counts, metadata = self.token_dispatcher.dispatch(
            x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E
        )
        rows = self.inner_experts(rows, counts)
        return self.token_dispatcher.combine(rows, metadata, x_TD)


class FusedRoutedExperts(torchtitan.EngineRoutedExperts, RoutedExperts):
    """The class that `torchtitan_overrides` makes."""


# --- Making them ---------------------------------------------------------------------------------


WAYS = "dispatcher", "w13", "w1 and w3"


def sizes_of(parts, num_ranks):
    x, idx, _, up, down, _ = parts
    inner = SimpleNamespace(dim=x.shape[1], hidden_dim=down.shape[2], num_experts=len(up))
    return inner, num_ranks * len(up), idx.shape[1]


def stand_in(way, parts, num_ranks):
    return make_stand_in(way, *sizes_of(parts, num_ranks), parts[0].dtype)


def make_stand_in(way, inner, num_experts, top_k, dtype):
    dispatcher = SimpleNamespace(
        num_experts=num_experts, top_k=top_k, num_max_tokens_per_rank=16, hidden_dim=inner.dim,
        dtype=dtype, alignment=1,
    )  # fmt: skip
    experts = (FusedGroupedExperts if way == "w13" else GroupedExperts)(inner)
    config = SimpleNamespace(inner_experts=experts, token_dispatcher=Dispatcher(dispatcher))
    return (RoutedExperts if way == "dispatcher" else FusedRoutedExperts)(config)


def load(experts, up, down):
    """The weights of the oracle."""
    with torch.no_grad():
        for half, name in zip(up.chunk(2, 1), ("w1_EFD", "w3_EFD"), strict=True):
            if hasattr(experts, name):
                getattr(experts, name).copy_(half)
        if hasattr(experts, "w13"):
            experts.w13.copy_(torch.stack(up.chunk(2, 1), 2))
        experts.w2_EDF.copy_(down)


def grads_of(experts):
    if hasattr(experts, "w13"):
        up = torch.cat(experts.w13.grad.unbind(2), 1)
    else:
        up = torch.cat([experts.w1_EFD.grad, experts.w3_EFD.grad], 1)
    return up, experts.w2_EDF.grad
