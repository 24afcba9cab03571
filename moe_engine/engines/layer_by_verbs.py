"""A layer made of the verbs: dispatch, the experts of the rows that came, combine; the backward
from the same ones. So engines without fused layers run theirs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from ..dispatch import DispatchLayout, Received, Tokens
from ..prepared import Described
from .base import (
    NUM_SMS,
    Arrived,
    BiasGradients,
    Gradients,
    LayerInputs,
    LayerResult,
    Saved,
    WeightGradients,
)


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
    def expert_sums(self, rows: LayerInputs) -> torch.Tensor:
        """What this rank's experts give for the rows [N, H] that a dispatch brought: of each one
        sum over its top-k, weighted. With gradients where autograd wants them."""

    def moe_ffn(
        self,
        inputs: LayerInputs,
        return_counts: bool = False,
        described: Described | None = None,
    ) -> LayerResult:
        """See `base.Engine`. The host waits for the counts."""
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
        layout = self.layout(inputs.topk_idx, len(inputs.w_gate_up) * self.num_ranks)
        received, _, handle, counts = self.dispatch(Tokens(*inputs[:3]), layout, 0)
        routing = received.topk_idx, received.topk_weights
        y = self.expert_sums(_rows_of(inputs, received.x, *routing))
        out, _ = self.combine(y, handle, None, ())
        kept = received.x if save in ("rows", "all") else None
        return out, Saved(save, (kept, *routing, *handle)), counts

    def moe_ffn_backward(
        self, dy: torch.Tensor, inputs: LayerInputs, saved: Saved, into: WeightGradients | None
    ) -> Gradients:
        """See `base.Engine`: dy to where x went, the gradients of what happens there, and those of
        rows and weights back by `combine`."""
        kept, topk_idx, topk_weights, *parts = saved.tensors
        handle = self.handle_type(*parts)
        if kept is None:
            kept = self.dispatch_cached(inputs.x, None, handle).x
        grad = self.dispatch_cached(dy, None, handle).x
        experts = _rows_of(inputs, kept, topk_idx, topk_weights)
        of_biases = dict(gate_up=inputs.b_gate_up, down=inputs.b_down)
        wanted = [name for name, b in of_biases.items() if b is not None and b.requires_grad]
        names = "x", "topk_weights", *(f"b_{name}" for name in wanted)
        rows, weights, *found = self._gradients(experts, grad, *names, into=into)
        biases = BiasGradients(**dict(zip(wanted, found, strict=True)))
        dx, topk_grads = self.combine(rows, handle, weights, ())
        assert topk_grads is not None

        def later(into: WeightGradients) -> None:
            if into != WeightGradients(None, None):
                self._gradients(experts, grad, into=into)

        return dx, topk_grads, later if into is None else None, biases

    def _gradients(
        self,
        rows: LayerInputs,
        grad: torch.Tensor,
        *names: str,
        into: WeightGradients | None = None,
    ) -> list[torch.Tensor]:
        """Those of the named tensors of `expert_sums`, given that of the sums; those of the weights
        go `into` this memory, rounded once."""
        into = into or WeightGradients(None, None)
        both = ("w_gate_up", into.gate_up), ("w_down", into.down)
        outs = {name: out for name, out in both if out is not None}
        leaves = {name: getattr(rows, name).detach().requires_grad_() for name in names}
        leaves |= {name: self.weight_leaf(getattr(rows, name)) for name in outs}
        with torch.enable_grad():
            sums = self.expert_sums(rows._replace(**leaves))
            found = tuple(torch.zeros_like(leaf) for leaf in leaves.values())
            if sums.requires_grad:  # not where no row depends on a leaf
                found = torch.autograd.grad(sums, [*leaves.values()], grad, materialize_grads=True)
        for out, one in zip(outs.values(), found[len(names) :], strict=True):
            out.copy_(one + out if into.accumulate else one)
        return list(found[: len(names)])

    def weight_leaf(self, w: torch.Tensor) -> torch.Tensor:
        """A weight whose gradient is wanted, as `expert_sums` gets it."""
        return w.detach().requires_grad_()


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
