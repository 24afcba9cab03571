"""The kernel engine: a Buffer's calls on symmetric memory, each a short sequence of launches.

`kernel_verbs.py` has dispatch and combine, this file the layer. `collective.py` has the same calls
on torch.distributed; `buffer.py` checks arguments and calls either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..kinds import Described
from ..layer_config import LayerChoices, LayerConfig, LayerProblem
from ..symm.slots import ReturnRowLayout, SlotLayout, Slots, header_bytes
from . import trained_layer
from .base import Gradients, Into, LayerInputs, LayerResult, Saved, check_layer_weights
from .fused_layer import LayerRows, expert_rows_bytes, feed_forward
from .kernel_verbs import KernelVerbs


class KernelEngine(KernelVerbs):
    """Calls through the kernels of dispatch/, grouped_gemm/ and combine/.

    `max_tokens` bounds T of `moe_ffn`, whose work space is sized by it (equal on all ranks).
    `layers` says how layers run, on all ranks alike.
    """

    def __init__(
        self,
        layout: SlotLayout,
        new_slots: Callable[[SlotLayout, bool, int], Slots],
        max_tokens: int | None,
        layers: LayerChoices,
    ):
        super().__init__(layout, new_slots, max_tokens)
        self.layers = layers

    def run_layers_by(self, layers: LayerChoices) -> None:
        """Take these choices from now on, on all ranks alike."""
        self.layers = layers
        self.slots.calls.clear()  # they were prepared by the choices before

    def moe_ffn(
        self,
        inputs: LayerInputs,
        return_counts: bool = False,
        described: Described | None = None,
    ) -> LayerResult:
        """The experts of a layer, see `moe_engine.moe_ffn`; its steps are in `fused_layer.py`.

        No host synchronisation: work space is sized for R * max_tokens * K expert rows.
        """
        more: dict[str, Any] = dict(before=self.reserve_expert_rows, described=described)
        result: LayerResult = self.whole_call(KernelEngine._moe_ffn, inputs, return_counts, **more)
        return result

    def _moe_ffn(self, inputs: LayerInputs, return_counts: bool) -> LayerResult:
        rows = self.layer_rows(inputs)
        self.check_capacity(len(inputs.x), rows.row, rows.header)
        config = self.layer_config(inputs.w_gate_up, rows.row, inputs.parts)
        out, counts = feed_forward(inputs, rows.most, config, self.slots)
        return out, counts if return_counts else None

    def moe_ffn_forward(
        self,
        inputs: LayerInputs,
        save: str,
        is_captured: bool,
        described: Described | None = None,
    ) -> tuple[torch.Tensor, Saved, torch.Tensor]:
        """See `trained_layer.forward`."""
        return trained_layer.forward(self, inputs, save, is_captured, described)

    def moe_ffn_backward(
        self, dy: torch.Tensor, inputs: LayerInputs, saved: Saved, into: Into
    ) -> Gradients:
        """See `trained_layer.backward`."""
        return trained_layer.backward(self, dy, inputs, saved, into)

    def reserve_expert_rows(self, inputs: LayerInputs, *more: Any) -> None:
        """Before the first layer of a kind: memory for its expert rows. All ranks meet here."""
        # Before anything is sent: the other ranks could not know of a refusal afterwards.
        check_layer_weights(inputs)
        rows = self.layer_rows(inputs)
        num_bytes = expert_rows_bytes(rows.most, rows.row.payload_bytes)
        self.slots.reserve_expert_rows(num_bytes, self._was_captured)

    def layer_rows(self, inputs: LayerInputs) -> LayerRows:
        """Returns the layout of a layer's rows, for as many tokens as a rank may bring."""
        x, num_topk, num_ranks = inputs.x, inputs.topk_idx.shape[1], self.slots.num_ranks
        row = ReturnRowLayout(x.shape[1] * x.itemsize, num_topk)
        header = header_bytes(len(inputs.w_gate_up) * num_ranks, num_ranks)
        max_tokens = max(1, self.max_tokens(row, header))
        most = self.slots.room_for(max_tokens, num_topk)
        return LayerRows(row, header, most, max_tokens * num_topk)

    def layer_config(
        self,
        w_gate_up: torch.Tensor,
        row: ReturnRowLayout,
        parts: int = 2,
        is_backward: bool = False,
    ) -> LayerConfig:
        """How `moe_ffn` or its backward runs with experts w_gate_up [L, parts * I, H] and rows like
        these. Without a gate as with one: the prediction knows no other layers."""
        columns, hidden = w_gate_up.shape[1:-1].numel(), w_gate_up.shape[-1]
        num_ranks = self.slots.layout.num_ranks
        num_experts = len(w_gate_up) * num_ranks
        max_tokens = self.max_tokens(row, header_bytes(num_experts, num_ranks))
        sizes = max_tokens, num_experts, row.num_topk, hidden, columns // parts
        problem = LayerProblem(num_ranks, *sizes, w_gate_up.itemsize)
        return self.layers.choose(problem, is_backward)
