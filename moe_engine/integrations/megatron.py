"""Megatron-Core: dispatch and combine for its MoE layers, and experts that are one fused layer.

    model = gpt_builder(...)                # with any moe_token_dispatcher_type
    use_moe_engine(model, buffer)           # before DistributedDataParallel wraps it

`use_moe_engine` gives each MoELayer a `MoEFlexTokenDispatcher` over `moe_engine.ops`, and leaves
its experts as they are; where these are `megatron_experts.Experts`, the layer runs as `moe_ffn`.

Nothing here imports Megatron before it is needed. What is restated of its interfaces is that of
Megatron-Core at d98e8a6 (22 August 2026).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..buffer import Buffer
from ..checks import shown
from ..errors import BackendError, DtypeError, ShapeError
from ..ops import combine, dispatch
from .megatron_experts import Experts

CUDAGRAPH_ATTRS = ["_comm_manager.token_probs", "_comm_manager.token_indices"]


class DispatchManager:
    """Megatron's `_DispatchManager`, for `MoEFlexTokenDispatcher`, over `moe_engine.ops`.

    `dispatch` brings the rows of this rank's experts in the order of the experts, so nothing is
    permuted here. `token_probs` [T, K] and `dispatched_probs` float32 [M] have gradients, and are
    read when they are used, because the 1F1B schedule puts detached ones in their place. Backwards
    take what autograd saved: any number of micro-batches may be in flight, of which one at a time
    is between `setup_metadata` and `combine`, as in Megatron's own managers.

    num_experts and num_topk count those of all tensor-parallel ranks of an expert, as the flex
    dispatcher does. alignment: the rows of each expert are padded to a multiple. max_rows: see
    `moe_engine.ops.dispatch`; `over_budget` tells Megatron then of rows that had no room.
    """

    def __init__(
        self,
        buffer: Buffer,
        num_experts: int,
        num_topk: int,
        *,
        alignment: int = 1,
        max_rows: int | None = None,
        probs_dtype: torch.dtype = torch.float32,
    ):
        self.buffer, self.num_experts, self.num_topk = buffer, num_experts, num_topk
        self.alignment, self.max_rows, self.probs_dtype = alignment, max_rows, probs_dtype
        self.tag = buffer.new_tag("MoELayer")
        self.token_probs: Any = None
        self.token_indices: Any = None
        self.dispatched_probs: Any = None
        self.tokens_per_expert: Any = None
        self._plan: Any = None
        if max_rows is not None:  # Megatron asks for it by hasattr
            self.over_budget = torch.zeros(1, dtype=torch.bool, device=buffer._rows_device)

    def setup_metadata(self, routing_map: Tensor, probs: Tensor) -> None:
        """Keep the routing of routing_map bool and probs, [T, E] in any shape: ids int64 [T, K], -1
        where a token has fewer than K experts, and their probabilities."""
        routing_map = routing_map.reshape(-1, self.num_experts)
        probs = probs.reshape(-1, self.num_experts)
        scores = probs.detach().masked_fill(~routing_map, -torch.inf)
        indices = scores.topk(self.num_topk, dim=-1).indices
        self.token_probs = probs.gather(1, indices)
        self.token_indices = indices.masked_fill(~routing_map.gather(1, indices), -1)

    def dispatch(
        self,
        hidden_states: Tensor,
        async_finish: bool = True,
        allocate_on_comm_stream: bool = True,
    ) -> Tensor:
        """The rows [M, H] of this rank's experts, on the current stream; the flags change
        nothing."""
        args = hidden_states, self.token_indices, self.token_probs.float(), self.num_experts
        sizes: dict[str, Any] = dict(max_rows=self.max_rows, alignment=self.alignment)
        got = dispatch(*args, self.buffer, tag=self.tag, **sizes)
        self.dispatched_probs, self._plan = got.row_weights, got.plan
        self.tokens_per_expert = got.offsets.diff().long()
        if self.max_rows is not None:
            self.over_budget |= got.overflow > 0
        return got.rows

    def get_permuted_hidden_states_by_experts(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """The rows as they are, and their probabilities."""
        return hidden_states, self.dispatched_probs.to(self.probs_dtype)

    def get_number_of_tokens_per_expert(self) -> Tensor:
        """int64 [L], padding included, on the device."""
        return self.tokens_per_expert

    def get_restored_hidden_states_by_experts(self, hidden_states: Tensor) -> Tensor:
        """The rows as they are."""
        return hidden_states

    def combine(
        self,
        hidden_states: Tensor,
        async_finish: bool = True,
        allocate_on_comm_stream: bool = True,
    ) -> Tensor:
        """The sum of each token's rows, [T, H]; the experts have applied the probabilities."""
        out = combine(hidden_states, self._plan, self.buffer)
        self._plan = self.dispatched_probs = None
        return out


class FusedManager(DispatchManager):
    """For layers whose experts are `Experts`, which send and sum rows themselves: tokens pass
    through, and in place of the numbers of tokens the experts get the routing."""

    def dispatch(
        self,
        hidden_states: Tensor,
        async_finish: bool = True,
        allocate_on_comm_stream: bool = True,
    ) -> Tensor:
        """The tokens [T, H] as they are."""
        self.dispatched_probs = self.token_probs.float()
        return hidden_states

    def get_permuted_hidden_states_by_experts(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens as they are, and float32 [T, K]."""
        return hidden_states, self.dispatched_probs

    def get_number_of_tokens_per_expert(self) -> Tensor:
        """The ids of the experts, int64 [T, K]."""
        return self.token_indices

    def combine(
        self,
        hidden_states: Tensor,
        async_finish: bool = True,
        allocate_on_comm_stream: bool = True,
    ) -> Tensor:
        """What the experts returned, [T, H]."""
        self.dispatched_probs = None
        return hidden_states


def use_moe_engine(
    model: nn.Module,
    buffer: Buffer,
    *,
    max_rows: int | None = None,
    alignment: int | None = None,
) -> int:
    """Let each MoELayer of a Megatron model dispatch and combine over `buffer`; how many it has.

    Call it on all ranks, before the first step. The Buffer is one for all layers, over the ranks of
    `tp_ep`. A layer may have been built with any dispatcher. From then on its config names the flex
    dispatcher with the backend "hybridep", as rows come in the order of the experts and padded:
    Megatron's schedules and experts ask for these names. alignment None is what the config's
    precision needs. max_rows needs experts that take fewer rows than there are, as Megatron's
    op fuser.

    With moe_shared_expert_overlap, shared experts run on their own stream while tokens travel; with
    `Experts`, while the whole layer runs.

    Raises BackendError if the model has no such layer, its tokens are padded to a capacity, its
    shared experts cannot overlap, or `Experts` have another Buffer; ShapeError for a Buffer of
    other ranks; ImportError without megatron-core.
    """
    if not isinstance(buffer, Buffer):
        raise DtypeError(f"buffer is {shown(buffer)}; it must be a moe_engine.Buffer.")
    layers: list[Any] = [one for one in model.modules() if hasattr(one, "token_dispatcher")]
    if not layers:
        raise BackendError(
            f"{type(model).__name__} has no module with a token_dispatcher; pass a model, or a "
            "layer, of Megatron-Core whose feed-forward is a MoELayer."
        )
    for layer in layers:
        _check_layer(layer, buffer, max_rows)
    for layer in layers:
        old: Any = layer.token_dispatcher
        config, tp_size = old.config, old.tp_size
        sizes = tp_size * config.num_moe_experts, tp_size * config.moe_router_topk
        is_fused = isinstance(layer.experts, Experts)
        kind = FusedManager if is_fused else DispatchManager
        new = old if hasattr(old, "_comm_manager") else _flex_dispatcher(old)
        new._comm_manager = kind(
            buffer,
            *sizes,
            alignment=_alignment(config) if alignment is None else alignment,
            max_rows=max_rows,
            probs_dtype=torch.float64 if config.moe_router_dtype == "fp64" else torch.float32,
        )
        new.cudagraph_attrs = list(CUDAGRAPH_ATTRS)
        new.shared_experts = None
        shared = layer.shared_experts if _overlaps_shared(layer) else None
        if is_fused:
            layer.experts.overlap(shared)
        elif shared is not None:
            new.set_shared_experts(shared)
        layer.token_dispatcher = new
        if hasattr(layer, "_training_token_dispatcher"):
            layer._training_token_dispatcher = new
        config.moe_token_dispatcher_type = "flex"
        config.moe_flex_dispatcher_backend = "hybridep"
    return len(layers)


def _overlaps_shared(layer: Any) -> bool:
    """Whether the layer's shared experts are to run on their stream, while tokens travel."""
    has_any = getattr(layer, "shared_experts", None) is not None
    return has_any and layer.shared_expert_overlap


def _check_layer(layer: Any, buffer: Buffer, max_rows: int | None) -> None:
    old, is_fused = layer.token_dispatcher, isinstance(layer.experts, Experts)
    if is_fused and (layer.experts.buffer is not buffer or max_rows is not None):
        raise BackendError(
            "the layer's Experts send rows by the Buffer that they were made with, and as many as "
            "come. Pass that Buffer, without max_rows."
        )
    if old.config.moe_pad_expert_input_to_capacity:
        raise BackendError(
            "the config has moe_pad_expert_input_to_capacity, and rows are not padded to a "
            "capacity here; unset it."
        )
    excludes = "overlap_moe_expert_parallel_comm", "moe_latent_size"
    found = [name for name in excludes if getattr(old.config, name, None)]
    if found and _overlaps_shared(layer):
        raise BackendError(
            f"the config has moe_shared_expert_overlap and {found[0]}, which exclude each other, "
            "here as in Megatron: shared experts run concurrently with the layer that gets the "
            "same tokens. Unset moe_shared_expert_overlap."
        )
    if old.tp_size * old.ep_size != buffer.group_size:
        raise ShapeError(
            f"buffer has {buffer.group_size} ranks, and the layer's experts are on {old.tp_size} x "
            f"{old.ep_size} tensor- and expert-parallel ranks. Make the Buffer with the group "
            "tp_ep."
        )


def _flex_dispatcher(old: Any) -> Any:
    """A `MoEFlexTokenDispatcher` with the groups of another dispatcher, and no manager yet."""
    try:
        from megatron.core.transformer.moe import token_dispatcher
    except ImportError as error:
        raise ImportError(
            "use_moe_engine puts a token dispatcher of Megatron-Core into the layer, and "
            "megatron.core cannot be imported: pip install megatron-core."
        ) from error
    new: Any = token_dispatcher.MoEFlexTokenDispatcher.__new__(
        token_dispatcher.MoEFlexTokenDispatcher
    )
    groups: Any = SimpleNamespace(ep=old.ep_group, expt_tp=old.tp_group, tp_ep=old.tp_ep_group)
    token_dispatcher.MoETokenDispatcher.__init__(new, old.config, groups)
    new.num_local_experts = old.num_local_experts
    new.local_expert_indices = old.local_expert_indices
    return new


def _alignment(config: Any) -> int:
    """To a multiple of how many rows the experts of this config need theirs padded."""
    from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization

    return max(1, get_align_size_for_quantization(config))
