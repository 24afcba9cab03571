"""The steps of a layer, in the order in which they are launched: route, dispatch, GEMM, combine."""

from __future__ import annotations

from dataclasses import replace

import torch

from . import combine, dispatch, routing
from .config import GemmConfig
from .dispatch import NUM_METADATA_PROGRAMS, Counts, Outgoing, Partition
from .grouped_gemm import TileSchedule, gathered_gemm, gemm_config, grouped_gemm
from .layer_config import LayerConfig
from .slots import Slots, header_bytes
from .stages import staged_schedule


def feed_forward(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    max_tokens: int,
    config: LayerConfig,
    slots: Slots,
) -> torch.Tensor:
    """out [T, H]: the routed experts of a layer, see `moe_engine.moe_ffn`.

    Arguments have been checked. `max_tokens`, the most of any rank, sizes the work space: R *
    max_tokens * K expert rows.
    """
    num_ranks = slots.layout.num_ranks
    num_experts = len(w_gate_up) * num_ranks
    header = header_bytes(num_experts, num_ranks)
    max_rows = max(1, max_tokens)
    max_expert_rows = num_ranks * max_rows * topk_idx.shape[1]
    # Balanced routing brings about as many rows as this rank sends out.
    num_rows = max_rows * topk_idx.shape[1]
    if config.fused:
        tiles = dispatch.dispatch_gemm_config(w_gate_up, num_rows)
    else:
        tiles = gemm_config(w_gate_up, num_rows, "swiglu", gathered=True)

    layout = routing.layout(topk_idx, num_experts, slots)
    per_rank, per_expert, in_rank, _ = layout
    send_token_idx, send_head = routing.send_plan(in_rank, topk_idx, num_experts)
    lane_index = routing.lane_index(topk_idx, layout)
    counts = Counts.empty(per_rank, num_experts, with_places=True)
    rows = Outgoing(
        x,
        None,
        topk_idx,
        topk_weights,
        per_rank,
        send_token_idx,
        lane_index,
        counts.first_place,
    )
    region_rows = slots.layout.max_rows(rows.row.num_bytes, header)
    dispatch.exchange(counts, per_rank, per_expert, rows.row, x.itemsize, region_rows, slots)
    stages = (config.num_stages, config.num_return_stages) if config.fused else (1, 1)
    schedule = staged_schedule(
        counts.recv_expert_counts,
        counts.expert_offsets,
        max_expert_rows,
        tiles.block_m,
        stages,
        config.mixed,
        slots,
    )
    dispatch.send_metadata(rows, len(w_gate_up), header, NUM_METADATA_PROGRAMS, slots)
    if not config.fused:
        dispatch.push(rows, header, Partition(config.num_push_programs, 0), slots)
    plan = routing.expert_plan(
        x,
        counts.rank_prefix_matrix,
        counts.expert_offsets,
        schedule.first_tile,
        rows.row,
        header,
        max_rows,
        slots,
        wait_payload=not config.fused,
    )
    sums = combine.LayerSums(plan, schedule, counts.rank_prefix_matrix, send_head)
    if not config.fused:
        return _in_turn(w_gate_up, w_down, sums, tiles, slots)
    options = {"group_m": config.group_m, "num_splits": 1}
    act = dispatch.dispatch_gemm(
        rows,
        plan,
        schedule,
        w_gate_up,
        header,
        config.num_push_programs,
        replace(tiles, **options),
        slots,
    )
    tiles = gemm_config(w_down, num_rows, block_m=schedule.block_m)
    return combine.gemm_combine(
        act, w_down, sums, config.num_return_programs, replace(tiles, **options), slots
    )


def _in_turn(
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    sums: combine.LayerSums,
    tiles: GemmConfig,
    slots: Slots,
) -> torch.Tensor:
    """out [T, H] by steps that begin when the one before has ended, on rows that are all there.

    The up-projection reads the slot, which is released behind it: what follows works on memory of
    this rank alone.
    """
    plan, staged = sums.plan, sums.schedule
    schedule = TileSchedule(
        staged.tiles[0],
        staged.first_tile[0, -1:],
        plan.expert_offsets,
        plan.row_offset.numel(),
        tiles.block_m,
    )
    block = slots.block.local.view(w_gate_up.dtype)
    act = gathered_gemm(
        block, plan.row_offset, w_gate_up, schedule, activation="swiglu", config=tiles
    )
    dispatch.release(slots)
    y = grouped_gemm(act, w_down, plan.expert_offsets, schedule=schedule)
    return combine.sum_experts(y, sums, slots)
