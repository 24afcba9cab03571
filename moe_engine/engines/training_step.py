"""What the forward and the backward of a layer that trains have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from .. import dispatch, routing
from ..grouped_gemm import TileSchedule, gemm_config
from ..grouped_gemm.config import GemmConfig
from ..layer_config import LayerConfig
from ..symm.slots import Slots
from .base import LayerInputs
from .fused_layer import ExpertRows, LayerRows, in_groups, send_rows, up_tiles

if TYPE_CHECKING:
    from .kernel import KernelEngine


class Step(NamedTuple):
    """What the bodies of a layer's calls share: its config, the rows that it may bring, its memory
    for them, and the tiles of its up-projection."""

    slots: Slots
    config: LayerConfig
    expected: LayerRows
    memory: ExpertRows
    tiles: GemmConfig
    inputs: LayerInputs

    @classmethod
    def of(cls, engine: KernelEngine, inputs: LayerInputs, is_backward: bool = False) -> Step:
        """Checks that the tokens fit."""
        x, slots, expected = inputs.x, engine.slots, engine.layer_rows(inputs)
        engine.check_capacity(len(x), expected.row, expected.header)
        config = engine.layer_config(inputs.w_gate_up, expected.row, inputs.parts, is_backward)
        tiles = up_tiles(inputs, expected.balanced, config)
        memory = ExpertRows.of(x, expected.most, slots)
        return cls(slots, config, expected, memory, tiles, inputs)

    @property
    def for_dy(self) -> Step:
        """The same with the config of the call that sends dy."""
        config = self.config.for_dy(self.inputs.w_down.shape[2], self.inputs.x.itemsize)
        return self._replace(config=config)

    @property
    def gradient_tiles(self) -> GemmConfig:
        """Those of the gradient of the activations, as high as those of the up-projection, with
        room for the programs that copy rows concurrently."""
        w, num_rows, block_m = self.inputs.w_down, self.expected.balanced, self.tiles.block_m
        tiles = gemm_config(w, num_rows, transposed=True, block_m=block_m)
        return in_groups(tiles, self.config).stored_in_parts()

    def tokens(
        self, x: torch.Tensor, layout: routing.RoutingLayout | None = None
    ) -> dispatch.LayerTokens:
        """x, or dy, on its way to the experts, by a layout or, without one, by a new one."""
        _, topk_idx, topk_weights, w_gate_up, *_ = self.inputs
        if layout is None:
            num_experts = len(w_gate_up) * self.slots.num_ranks
            layout = routing.layout(topk_idx, num_experts, self.slots)
        is_cast = self.inputs.is_quantized
        return dispatch.LayerTokens(x, topk_idx, topk_weights, layout, is_cast)

    def send(
        self,
        tokens: dispatch.LayerTokens,
        offsets: dispatch.ExpertOffsets,
        with_weights: bool = False,
        plan: dispatch.RowPlan | None = None,
        kept: torch.Tensor | None = None,
    ) -> dispatch.Dispatched:
        """See `send_rows`."""
        how = self.memory, self.tiles.block_m, self.config, self.slots, with_weights, plan, kept
        return send_rows(tokens, offsets, *how)

    def begin(
        self,
        x: torch.Tensor,
        call: tuple[dispatch.LayerCall, int],
        earlier: dispatch.Dispatched | None = None,
    ) -> dispatch.Dispatched:
        """Begin a call of a backward that sends x, or dy, and weights of rows; after an earlier one
        of the same tokens, rows go where those of that one went."""
        if earlier is not None:  # then other ranks wait for this call already
            self.slots.context.step = "exchange_fused"
        tokens = self.tokens(x, None if earlier is None else earlier.tokens.layout)
        of = tokens, len(self.memory.rows), self.config, self.slots
        offsets = dispatch.exchange_fused(*of, *call)
        return self.send(tokens, offsets, True, None if earlier is None else earlier.plan)

    def schedule(self, sent: dispatch.Dispatched) -> TileSchedule:
        """The tiles of a call, for a product that begins when all rows have arrived."""
        staged, rows = sent.schedule, len(sent.rows)
        offsets = sent.offsets.expert_offsets
        return TileSchedule(staged.tiles, staged.num_tiles, offsets, rows, staged.block_m)
