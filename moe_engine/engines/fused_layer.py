"""The steps of a layer, in the order in which they are launched: route, dispatch, GEMM, combine."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .. import combine, dispatch, routing
from ..dispatch.stages import StagedSchedule, staged_schedule
from ..grouped_gemm import gemm_config
from ..grouped_gemm.config import GemmConfig
from ..layer_config import LayerConfig
from ..symm.slots import Slots, header_bytes


def feed_forward(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    max_expert_rows: int,
    config: LayerConfig,
    slots: Slots,
) -> torch.Tensor:
    """out [T, H]: the routed experts of a layer, see `moe_engine.moe_ffn`.

    Arguments have been checked. `max_expert_rows` is the most that this rank can receive;
    `slots.expert_rows` hold that many rows of x's, first what the experts read, then what they
    give, and behind them an int64 for each (`expert_rows_bytes`).
    """
    lanes = dispatch.Lanes(
        x, topk_idx, topk_weights, routing.layout(topk_idx, len(w_gate_up) * slots.num_ranks, slots)
    )
    # Before the first launch that other ranks see: what is large enough to be refused.
    out, act = torch.empty_like(x), x.new_empty(max_expert_rows, w_down.shape[2])
    there = dispatch_experts(lanes, w_gate_up, act, config, slots)
    header = header_bytes(lanes.num_experts, slots.num_ranks)
    metadata = dispatch.send_return_metadata(
        lanes, there.lane_places, there.places, there.schedule, header, slots
    )
    returns = combine.Returns(lanes, metadata, there.schedule, header)
    tiles = gemm_config(w_down, max_expert_rows // slots.num_ranks, block_m=there.tiles.block_m)
    tiles = leave_room_for_sums(replace(tiles, group_m=config.group_m, num_splits=1))
    combine.gemm_combine(
        act, w_down, there.rows, out, returns, config.num_return_programs, tiles, slots
    )
    return out


@dataclass(frozen=True, slots=True)
class Dispatched:
    """The way there, launched: rows [M, H] of the experts, and what the way back needs to know of
    them."""

    rows: torch.Tensor
    places: routing.Places
    lane_places: routing.LanePlaces
    schedule: StagedSchedule
    tiles: GemmConfig


def dispatch_experts(
    lanes: dispatch.Lanes,
    w_gate_up: torch.Tensor,
    act: torch.Tensor,
    config: LayerConfig,
    slots: Slots,
) -> Dispatched:
    """The first half of `feed_forward`, after the layout: rows to the experts, and the
    up-projection into act [M, I]."""
    x, num_ranks, max_expert_rows = lanes.x, slots.num_ranks, len(act)
    num_bytes = max_expert_rows * x.shape[1] * x.itemsize
    rows = slots.expert_rows.local[:num_bytes].view(x.dtype).view(max_expert_rows, x.shape[1])
    copies = slots.expert_rows.local[num_bytes:][: 8 * max_expert_rows].view(torch.int64)
    # Balanced routing brings about as many rows as this rank sends out.
    tiles = gemm_config(w_gate_up, max_expert_rows // num_ranks, "swiglu")
    tiles = replace(tiles, group_m=config.group_m, num_splits=1)

    places = dispatch.exchange_fused(lanes, config.num_stages, config.num_return_stages, slots)
    lane_places = routing.place_rows(lanes.topk_idx, lanes.layout, places, num_bytes, slots)
    order = config.num_stages, config.num_return_stages, config.own_apart
    schedule = staged_schedule(places, max_expert_rows, tiles.block_m, *order, num_ranks)
    to_push, own_order = lane_places.to_push, lane_places.own_order
    dispatch.push_fused(x, to_push, places, schedule, config.num_push_programs, slots)
    num_programs = dispatch.copy_rows(
        x, rows, copies, own_order, places, schedule, config.num_copy_programs, slots
    )
    dispatch.dispatch_gemm(rows, w_gate_up, act, schedule, num_programs, tiles, slots)
    return Dispatched(rows, places, lane_places, schedule, tiles)


def expert_rows_bytes(max_expert_rows: int, row_bytes: int) -> int:
    """Bytes of `slots.expert_rows` for a layer: rows, and for each of them which one it copies."""
    return max_expert_rows * (row_bytes + 8)


def leave_room_for_sums(tiles: GemmConfig) -> GemmConfig:
    """Tiles that leave shared memory to the programs that sum beside them: three steps in flight
    and a store in parts are as fast."""
    if tiles.block_m < 128:
        return tiles
    return replace(tiles, num_stages=3, subtiles=max(tiles.subtiles, 4))
