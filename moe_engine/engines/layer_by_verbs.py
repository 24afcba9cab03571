"""A layer made of the verbs: dispatch, the experts of the rows that came, combine. So engines
without fused layers run theirs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from ..dispatch import DispatchLayout, Received, Tokens
from ..kinds import Described
from ..streams import is_captured
from .base import NUM_SMS, Arrived, LayerInputs, LayerResult, Saved


class LayerByVerbs(ABC):
    """The layers of an `Engine`, from its verbs and from `expert_sums`."""

    num_ranks: int
    handle_type: ClassVar[Any]

    @abstractmethod
    def layout(
        self, topk_idx: torch.Tensor, num_experts: int, described: Described | None = None
    ) -> DispatchLayout:
        """See `base.Engine`, like the next three."""

    @abstractmethod
    def dispatch(
        self,
        tokens: Tokens,
        layout: DispatchLayout,
        num_worst_tokens: int,
        num_sms: int = NUM_SMS,
        owned: bool = True,
        described: Described | None = None,
    ) -> Arrived: ...

    @abstractmethod
    def dispatch_cached(
        self, x: torch.Tensor, scales: torch.Tensor | None, handle: Any, num_sms: int = NUM_SMS
    ) -> Received: ...

    @abstractmethod
    def combine(
        self,
        x: torch.Tensor,
        handle: Any,
        topk_weights: torch.Tensor | None,
        bias: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...

    @abstractmethod
    def tokens_of(self, inputs: LayerInputs) -> Tokens:
        """The tokens of a layer, with x as it travels."""

    @abstractmethod
    def most_received(self, tokens: Tokens, num_experts: int) -> int:
        """The most rows that a dispatch of a layer can bring, for one in the capture of a CUDA
        graph; BackendError where layers cannot be captured."""

    @abstractmethod
    def expert_sums(self, rows: LayerInputs, num_rows: int) -> torch.Tensor:
        """What this rank's experts give for the rows [N, ..] that a dispatch brought: of each one
        sum over its top-k, weighted. num_rows: rows of experts that these are, or at most are."""

    def moe_ffn(
        self,
        inputs: LayerInputs,
        return_counts: bool = False,
        described: Described | None = None,
    ) -> LayerResult:
        """See `base.Engine`. The host waits for the counts, except in the capture of a graph."""
        out, _, counts = self.moe_ffn_forward(inputs, "none", False)
        return out, counts if return_counts else None

    def moe_ffn_forward(
        self,
        inputs: LayerInputs,
        save: str,
        is_captured: bool,
        described: Described | None = None,
    ) -> tuple[torch.Tensor, Saved, torch.Tensor]:
        """See `base.Engine`. Rows are saved by "rows" and "all", pre-activations never."""
        rows, num_rows, handle, counts = self._bring(inputs)
        out, _ = self.combine(self.expert_sums(rows, num_rows), handle, None, ())
        kept = rows.x if save in ("rows", "all") else None
        saved = kept, rows.topk_idx, rows.topk_weights, *handle
        return out, Saved(save, saved, num_rows), counts

    def _bring(self, inputs: LayerInputs) -> tuple[LayerInputs, int, Any, torch.Tensor]:
        """Send the tokens to their experts: (the layer of the rows that came, how many rows of
        experts these are, or in a graph at most are, handle, counts)."""
        tokens, num_topk = self.tokens_of(inputs), inputs.topk_idx.shape[1]
        num_experts = len(inputs.w_gate_up) * self.num_ranks
        most = self.most_received(tokens, num_experts) if is_captured(inputs.x) else 0
        layout = self.layout(inputs.topk_idx, num_experts)
        received, per_expert, handle, counts, _ = self.dispatch(tokens, layout, most)
        rows = _rows_of(inputs, received.x, received.topk_idx, received.topk_weights)
        num_rows = most * num_topk if most else sum(per_expert)
        return rows, num_rows, handle, counts

    def bring_again(self, inputs: LayerInputs, saved: Saved) -> tuple[LayerInputs, int, Any]:
        """For a backward, the layer of the rows that came, of which those that were not saved are
        sent again; how many rows of experts these are, or at most are; the handle."""
        kept, *routing = saved.tensors
        if routing == [None]:  # see `layer_operators.py`
            return self._bring(inputs)[:3]
        handle = self.handle_type(*routing[2:])
        if kept is None:
            kept = self.dispatch_cached(inputs.x, None, handle).x
        return _rows_of(inputs, kept, *routing[:2]), saved.num_rows, handle


def _rows_of(
    inputs: LayerInputs,
    x: torch.Tensor,
    topk_idx: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
) -> LayerInputs:
    """A layer of rows that a dispatch brought."""
    assert topk_idx is not None
    assert topk_weights is not None
    return inputs._replace(x=x, topk_idx=topk_idx, topk_weights=topk_weights)
