"""The steps of a layer, in the order in which they are launched: route, dispatch, GEMM, combine."""

from __future__ import annotations

from dataclasses import replace

import torch

from . import combine, dispatch, routing
from .config import GemmConfig
from .grouped_gemm import gemm_config
from .layer_config import LayerConfig
from .slots import Slots, header_bytes
from .stages import staged_schedule


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
    num_ranks, hidden = slots.layout.num_ranks, x.shape[1]
    num_experts = len(w_gate_up) * num_ranks
    header = header_bytes(num_experts, num_ranks)
    num_bytes = max_expert_rows * hidden * x.itemsize
    rows = slots.expert_rows.local[:num_bytes].view(x.dtype).view(max_expert_rows, hidden)
    copies = slots.expert_rows.local[num_bytes:][: 8 * max_expert_rows].view(torch.int64)
    # Balanced routing brings about as many rows as this rank sends out.
    expected_rows = max_expert_rows // num_ranks
    options = {"group_m": config.group_m, "num_splits": 1}
    up_tiles = replace(gemm_config(w_gate_up, expected_rows, "swiglu"), **options)
    down_tiles = gemm_config(w_down, expected_rows, block_m=up_tiles.block_m)

    layout = routing.layout(topk_idx, num_experts, slots)
    lanes = dispatch.Lanes(x, topk_idx, topk_weights, layout)
    places = dispatch.exchange_lanes(lanes, config.num_stages, slots)
    lane_places = routing.place_lanes(topk_idx, layout, places, num_bytes, slots)
    order = config.num_stages, config.num_return_stages, config.own_apart
    schedule = staged_schedule(places, max_expert_rows, up_tiles.block_m, *order, num_ranks)
    to_push, own_order = lane_places.to_push, lane_places.own_order
    dispatch.push_lanes(x, to_push, places, schedule, config.num_push_programs, slots)
    num_programs = dispatch.copy_rows(
        x, rows, copies, own_order, places, schedule, config.num_copy_programs, slots
    )
    act = dispatch.dispatch_gemm(rows, w_gate_up, schedule, num_programs, up_tiles, slots)
    records = dispatch.send_records(lanes, lane_places, places, schedule, header, slots)
    returns = combine.Returns(lanes, records, schedule, header)
    tiles = beside_sums(replace(down_tiles, **options))
    return combine.gemm_combine(
        act, w_down, rows, returns, config.num_return_programs, tiles, slots
    )


def expert_rows_bytes(max_expert_rows: int, row_bytes: int) -> int:
    """Bytes of `slots.expert_rows` for a layer: rows, and for each of them which one it copies."""
    return max_expert_rows * (row_bytes + 8)


def beside_sums(tiles: GemmConfig) -> GemmConfig:
    """Tiles that leave shared memory to the programs that sum beside them: three steps in flight
    and a store in parts are as fast."""
    if tiles.block_m < 128:
        return tiles
    return replace(tiles, num_stages=3, subtiles=max(tiles.subtiles, 4))
