"""torchtitan: a token dispatcher, and routed experts that are one fused layer.

`torchtitan_overrides` makes torchtitan's own classes of these, under the names that
`--override.imports` takes. Nothing here imports torchtitan. What is restated of its interfaces is
that of torchtitan at b5bcd76 (21 August 2026).
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..buffer import Buffer
from ..errors import BackendError, ShapeError
from ..layer import moe_ffn
from ..ops import Plan, combine, dispatch
from ..sharded_weights import local

_buffers: dict[tuple, Buffer] = {}


class DispatchMetadata(NamedTuple):
    """What `combine` needs from a `dispatch`."""

    plan: Plan
    row_weights: Tensor


class EngineDispatcher:
    """The methods of a `BaseEPTokenDispatcher`, before which it goes among the bases of a class:
    `class TokenDispatcher(EngineDispatcher, BaseEPTokenDispatcher)`.

    Its config has num_experts, top_k, num_max_tokens_per_rank, hidden_dim and dtype, and
    `alignment`, to a multiple of which the rows of each expert are padded. Dispatchers with equal
    numbers share a Buffer, which stays until the process ends.
    """

    num_experts: int
    top_k: int
    ep_mesh: Any
    buffer: Buffer | None = None
    tag: str | None = None

    def __init__(self, config: Any):
        for name in ("num_max_tokens_per_rank", "hidden_dim"):
            if getattr(config, name) is None:
                raise ShapeError(
                    f"{name} of the token dispatcher is None; pass it to the override, or choose "
                    'comm_backend="deepep" in the model\'s config, where torchtitan sets it.'
                )
        super().__init__(config)  # type: ignore[call-arg]
        self.sizes = config.num_max_tokens_per_rank, config.hidden_dim
        self.dtype, self.alignment = config.dtype, config.alignment

    def init_buffer(self) -> None:
        """Make the Buffer, over the ranks of `ep_mesh`; collective. Without a mesh each rank has
        all experts, or under tensor parallelism a part of each, and the Buffer is its own."""
        group = _alone() if self.ep_mesh is None else self.ep_mesh.get_group()
        self.buffer = _shared_buffer(group, *self.sizes, self.num_experts, self.top_k, self.dtype)
        self.tag = self.buffer.new_tag("RoutedExperts")

    def dispatch(
        self,
        x_TD: Tensor,
        topk_scores_TK: Tensor,
        topk_expert_ids_TK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> tuple[Tensor, Tensor, DispatchMetadata]:
        """(Rows [R, D] of this rank's experts in their order, how many there are of each, int32
        with padding, on the device, what `combine` needs). The last argument is not needed."""
        args = x_TD, topk_expert_ids_TK, topk_scores_TK.float(), self.num_experts, wired(self)
        got = dispatch(*args, alignment=self.alignment, tag=self.tag)
        return got.rows, got.offsets.diff(), DispatchMetadata(got.plan, got.row_weights)

    def combine(self, routed_output_RD: Tensor, metadata: DispatchMetadata, x_TD: Tensor) -> Tensor:
        """The sum of each token's rows, times its scores, [T, D]."""
        rows = routed_output_RD.float() * metadata.row_weights[:, None]
        return combine(rows.to(routed_output_RD.dtype), metadata.plan, wired(self))


class EngineRoutedExperts:
    """The forward of `RoutedExperts`, before which it goes among the bases of a class: `moe_ffn`
    with the weights of its inner experts, in the Buffer of its token dispatcher.

    The inner experts have `w13` [E, F, 2, D], gate and up in turn, which is read where it lies, or
    `w1_EFD` (gate) and `w3_EFD` (up), which each forward copies together; and `w2_EDF`.
    """

    inner_experts: Any
    token_dispatcher: EngineDispatcher
    save: str = "auto"

    def forward(
        self,
        x_TD: Tensor,
        topk_scores_TK: Tensor,
        topk_expert_ids_TK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> Tensor:
        """[T, D]; the last argument is not needed. Weights are cast to the dtype of the tokens."""
        gate_up, layout = _gate_up(self.inner_experts)
        weights = gate_up.to(x_TD.dtype), local(self.inner_experts.w2_EDF).to(x_TD.dtype)
        routing = topk_expert_ids_TK, topk_scores_TK.float()
        buffer = wired(self.token_dispatcher)
        _check_share(self.inner_experts, len(gate_up), self.token_dispatcher.num_experts, buffer)
        tag = self.token_dispatcher.tag
        return moe_ffn(x_TD, *routing, *weights, buffer, layout=layout, save=self.save, tag=tag)


def wired(dispatcher: EngineDispatcher) -> Buffer:
    """The Buffer of a dispatcher. BackendError before `wire_meshes`."""
    if dispatcher.buffer is None:
        raise BackendError(
            "the token dispatcher has no Buffer yet: call parallelize of the model, or "
            "wire_meshes(ep_mesh=...), on all ranks."
        )
    return dispatcher.buffer


def _check_share(experts: Any, num_local: int, num_experts: int, buffer: Buffer) -> None:
    """ShapeError unless these are the experts of one rank."""
    if num_local * buffer.group_size != num_experts:
        raise ShapeError(
            f"{type(experts).__name__} has {num_local} experts on this rank, where "
            f"{buffer.group_size} ranks share {num_experts}. Call parallelize of the model, which "
            "shards them over the mesh of the token dispatcher. With FSDP2 shard RoutedExperts or "
            "a block around it: it gathers the weights of modules whose forward is called."
        )


def _gate_up(experts: Any) -> tuple[Tensor, str]:
    """[L, 2F, D] and its layout."""
    if hasattr(experts, "w13"):
        return local(experts.w13).flatten(1, 2), "interleaved"
    if hasattr(experts, "w1_EFD"):
        return torch.cat([local(experts.w1_EFD), local(experts.w3_EFD)], 1), "concatenated"
    raise BackendError(
        f"{type(experts).__name__} has no w13, and no w1_EFD and w3_EFD: one fused layer computes "
        "the experts of GroupedExperts and FusedGroupedExperts. Override the token dispatcher."
    )


def _alone() -> dist.ProcessGroup | None:
    """A group of this rank; None where there are no others."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return _group_of_this_rank(dist.group.WORLD)


@cache
def _group_of_this_rank(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """One for each default group, as a job may make another after it has destroyed the first."""
    return dist.new_group([dist.get_rank(world)], use_local_synchronization=True)


def _shared_buffer(group: dist.ProcessGroup | None, *sizes: Any) -> Buffer:
    """One Buffer for all layers whose sizes are the same. It is kept: if ranks freed theirs at
    different times, some of them would make another, and the others would not."""
    buffer = _buffers.get((group, *sizes))
    if buffer is None or buffer.is_destroyed:
        _buffers[group, *sizes] = buffer = Buffer.for_tokens(group, *sizes)
    return buffer
