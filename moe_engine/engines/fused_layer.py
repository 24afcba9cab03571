"""The steps of a layer, in the order in which they are launched: route, dispatch, GEMM, combine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from .. import combine, dispatch, routing
from ..combine.fused_sum_kernels import LayerSums
from ..combine.return_metadata_kernels import send_return_metadata_kernel
from ..dispatch.exchange_kernels import exchange_fused_kernel
from ..dispatch.fused_kernels import CopyLists
from ..dispatch.place_rows_kernels import ExpertRowParts
from ..grouped_gemm import gemm_config
from ..grouped_gemm.activations import AnyActivation
from ..grouped_gemm.config import ROOMY_REGISTERS, GemmConfig
from ..grouped_gemm.operands import FP8, Epilogue, Rows, Weights
from ..grouped_gemm.quantization import QuantizedRows
from ..grouped_gemm.specialized import is_specialized
from ..layer_config import LayerConfig
from ..symm.slots import ReturnRowLayout, Slots
from ..utils import round_up
from .base import LayerInputs

HALF_TILE = 64
"""Rows of the highest tiles of which two programs share an SM."""


class LayerRows(NamedTuple):
    """What a rank knows of a layer's rows before it begins: how sums return, and after how many
    bytes of a region; for how many rows of its experts there is room; and how many of them balanced
    routing brings at most, by which tiles are chosen."""

    row: ReturnRowLayout
    header: int
    most: int
    balanced: int


def feed_forward(
    inputs: LayerInputs, max_expert_rows: int, config: LayerConfig, slots: Slots
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [T, H]: the routed experts of a layer, see `moe_engine.moe_ffn`; counts int32 [E].

    Arguments have been checked. `max_expert_rows` is the most that this rank can receive, all rows
    of all ranks; see `expert_rows_bytes`.
    """
    x, topk_idx, topk_weights, w_gate_up, *_ = inputs
    layout = routing.layout(topk_idx, len(w_gate_up) * slots.num_ranks, slots)
    tokens = dispatch.LayerTokens(x, topk_idx, topk_weights, layout, inputs.is_quantized)
    num_rows = max_expert_rows // slots.num_ranks
    tiles = up_tiles(inputs, num_rows, config)
    # Before the first launch that other ranks see: what is large enough to be refused.
    out, act = torch.empty_like(x), new_activations(inputs, max_expert_rows, tiles)
    dispatched = dispatch_experts(tokens, inputs, act, tiles, config, slots)
    metadata = combine.send_return_metadata(dispatched, slots)
    a, sums = down_rows(act, inputs, dispatched, slots), LayerSums(out, dispatched.rows)
    combine_experts(a, inputs.down, sums, dispatched, metadata, num_rows, slots)
    return out, dispatched.offsets.counts


def dispatch_experts(
    tokens: dispatch.LayerTokens,
    inputs: LayerInputs,
    act: torch.Tensor | QuantizedRows,
    tiles: GemmConfig,
    config: LayerConfig,
    slots: Slots,
) -> dispatch.Dispatched:
    """The first half of `feed_forward`, after the layout: rows to the experts, and the
    up-projection into act [M, I], M the most rows that this rank can receive."""
    most_rows = len(act.memory if isinstance(act, QuantizedRows) else act)
    offsets = dispatch.exchange_fused(tokens, most_rows, config, slots)
    memory = ExpertRows.of(tokens.x, most_rows, slots)
    dispatched = send_rows(tokens, offsets, memory, tiles.block_m, config, slots)
    up_projection(dispatched.rows, inputs, (act, None), dispatched, tiles, slots)
    return dispatched


def new_activations(
    inputs: LayerInputs, num_rows: int, tiles: GemmConfig
) -> torch.Tensor | QuantizedRows:
    """Memory for the activations [num_rows, I] of these tiles of the up-projection: cast where the
    tiles do so for a down-projection in e4m3."""
    size = num_rows, inputs.w_down.shape[2]
    if is_specialized(tiles, inputs.up, Epilogue(inputs.activation)):
        return QuantizedRows.empty(*size, inputs.x)
    return inputs.x.new_empty(size)


def send_rows(
    tokens: dispatch.LayerTokens,
    offsets: dispatch.ExpertOffsets,
    memory: ExpertRows,
    block_m: int,
    config: LayerConfig,
    slots: Slots,
    with_weights: bool = False,
    plan: dispatch.RowPlan | None = None,
    kept: torch.Tensor | None = None,
) -> dispatch.Dispatched:
    """Rows to the experts, after the exchange, and with_weights their weights; or rows where a plan
    has put those of an earlier call of the same tokens, whose weights and copies still lie there.
    kept: on one rank, memory for the rows other than `memory.rows`. An earlier launch may still use
    it when it is allocated; `copy_rows` writes there after `push_fused` has begun, which has waited
    for the end of all launches before."""
    x, arriving = tokens.x, memory.rows if kept is None else kept
    rows = arriving
    if tokens.is_cast:
        cast, rows = QuantizedRows.like(x), QuantizedRows.within(rows).memory
        dispatch.quantize(x, cast, exchange_fused_kernel, slots)
        x = cast.memory
    if plan is None:
        plan = dispatch.place_rows(tokens, offsets, memory.parts, slots, with_weights)
    begins = offsets.expert_offsets, offsets.remote_offsets
    schedule, counters = dispatch.staged_schedule(*begins, len(rows), block_m, config, slots)
    dispatch.push_fused(x, plan, counters, config, slots)
    lists = CopyLists(plan.own_order, memory.copies)
    dispatch.copy_rows(x, rows, lists, offsets, counters, config, slots)
    return dispatch.Dispatched(tokens, arriving, offsets, plan, schedule, counters, config)


def up_tiles(inputs: LayerInputs, num_rows: int, config: LayerConfig) -> GemmConfig:
    """The tiles of the up-projection, whose height is that of all tiles of the layer. num_rows:
    `LayerRows.balanced`."""
    has_bias = inputs.b_gate_up is not None
    tiles = chosen_up_tiles(inputs.w_gate_up, num_rows, inputs.activation, has_bias)
    return in_groups(tiles, config)


def chosen_up_tiles(
    w_gate_up: torch.Tensor, num_rows: int, activation: AnyActivation, has_bias: bool
) -> GemmConfig:
    """`up_tiles` but for their groups. In e4m3, whose loops do not begin a tile before they end the
    last unless warps are specialised, which add no bias, two programs share an SM, so that one
    multiplies while the other waits for rows."""
    tiles = gemm_config(w_gate_up, num_rows, activation)
    if w_gate_up.dtype == FP8 and tiles.block_m > HALF_TILE and (has_bias or not tiles.specialized):
        tiles = gemm_config(w_gate_up, num_rows, activation, block_m=HALF_TILE)
    return tiles


def up_projection(
    rows: torch.Tensor,
    inputs: LayerInputs,
    outputs: tuple[torch.Tensor | QuantizedRows, torch.Tensor | None],
    dispatched: dispatch.Dispatched,
    tiles: GemmConfig,
    slots: Slots,
) -> None:
    """outputs: the activations, and the pre-activations or None; see `dispatch_gemm`. Other rows
    than those that were dispatched have arrived already."""
    act, pre = outputs
    epilogue, has_arrived = Epilogue(inputs.activation, pre=pre), rows is not dispatched.rows
    a = QuantizedRows.within(rows).operand if inputs.is_quantized else Rows(rows)
    dispatch.dispatch_gemm(a, inputs.up, epilogue, act, dispatched, tiles, slots, has_arrived)


def down_rows(
    act: torch.Tensor | QuantizedRows,
    inputs: LayerInputs,
    dispatched: dispatch.Dispatched,
    slots: Slots,
    cast: torch.Tensor | None = None,
) -> Rows:
    """The rows of the down-projection, after the return metadata was sent: act [M, I], or these
    cast to e4m3 for weights that are, unless they were stored so, into `cast` uint8 [M, B] of
    `QuantizedRows`, where it is given."""
    if isinstance(act, QuantizedRows):
        return act.operand
    if not inputs.is_quantized:
        return Rows(act)
    out = QuantizedRows.like(act) if cast is None else QuantizedRows(cast, act.shape[1])
    num_rows = dispatched.offsets.expert_offsets[-1:]
    dispatch.quantize(act, out, send_return_metadata_kernel, slots, num_rows)
    return out.operand


def combine_experts(
    a: Rows,
    weights: Weights,
    sums: LayerSums,
    dispatched: dispatch.Dispatched,
    metadata: combine.ReturnMetadata,
    num_rows: int,
    slots: Slots,
    gradients: Sequence[combine.WeightGradient] = (),
) -> None:
    """The product whose rows return, their sums, and gradients meanwhile; see `gemm_combine`.
    num_rows: `LayerRows.balanced`."""
    block_m = dispatched.schedule.block_m
    tiles = gemm_config(weights.w, num_rows, transposed=weights.transposed, block_m=block_m)
    tiles = in_groups(tiles, dispatched.config)
    how = dispatched, metadata, leave_room_for_sums(tiles), slots, gradients
    combine.gemm_combine(a, weights, sums, *how)


def expert_rows_bytes(max_expert_rows: int, row_bytes: int) -> int:
    """Bytes of `slots.expert_rows` for a layer, see `ExpertRows`."""
    return max_expert_rows * (row_bytes + 4) + round_up(8 * max_expert_rows, 16)


class ExpertRows(NamedTuple):
    """`slots.expert_rows`: rows [M, H] like x, what the experts read and later what they give;
    copies int64 [M], which of them are copies of which; weights float32 [M], those of the rows in a
    backward. Rows in e4m3 lie in the memory of `rows` (`QuantizedRows.within`) until the
    down-projection, which begins when all have been multiplied, writes over them."""

    rows: torch.Tensor
    copies: torch.Tensor
    weights: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor, max_expert_rows: int, slots: Slots) -> ExpertRows:
        """Rows like those of x [T, H]."""
        memory, num_bytes = slots.expert_rows.local, max_expert_rows * x.shape[1] * x.itemsize
        weights = num_bytes + round_up(8 * max_expert_rows, 16)
        return cls(
            memory[:num_bytes].view(x.dtype).view(max_expert_rows, x.shape[1]),
            memory[num_bytes:][: 8 * max_expert_rows].view(torch.int64),
            memory[weights:][: 4 * max_expert_rows].view(torch.float32),
        )

    @property
    def parts(self) -> ExpertRowParts:
        """Where the copies and the weights begin."""
        num_bytes = self.rows.nbytes
        return ExpertRowParts(num_bytes, num_bytes + round_up(self.copies.nbytes, 16))


def in_groups(tiles: GemmConfig, config: LayerConfig) -> GemmConfig:
    """Tiles as a layer walks them: in its groups, or in the larger ones of small tiles; 1 keeps its
    meaning, one by one."""
    group_m = max(config.group_m, tiles.group_m) if config.group_m > 1 else 1
    return replace(tiles, group_m=group_m, num_splits=1)


def leave_room_for_sums(tiles: GemmConfig) -> GemmConfig:
    """Tiles that leave room to the programs that sum concurrently: shared memory, as three steps in
    flight are as fast, and registers. Specialised ones leave them no registers."""
    if tiles.block_m < 128 or tiles.specialized:
        return tiles
    return replace(tiles.stored_in_parts(), num_stages=3, num_registers=ROOMY_REGISTERS)
