"""The steps of a layer, in the order in which they are launched: route, dispatch, GEMM, combine."""

from __future__ import annotations

from dataclasses import replace

import torch

from .. import combine, dispatch, routing
from ..dispatch.fused_kernels import CopyLists
from ..grouped_gemm import gemm_config
from ..grouped_gemm.config import GemmConfig
from ..layer_config import LayerConfig
from ..symm.slots import Slots


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

    Arguments have been checked. `max_expert_rows` is the most that this rank can receive; see
    `expert_rows_bytes`.
    """
    layout = routing.layout(topk_idx, len(w_gate_up) * slots.num_ranks, slots)
    tokens = dispatch.LayerTokens(x, topk_idx, topk_weights, layout)
    # Before the first launch that other ranks see: what is large enough to be refused.
    out, act = torch.empty_like(x), x.new_empty(max_expert_rows, w_down.shape[2])
    dispatched = dispatch_experts(tokens, w_gate_up, act, config, slots)
    metadata = combine.send_return_metadata(dispatched, slots)
    block_m = dispatched.schedule.block_m
    tiles = gemm_config(w_down, max_expert_rows // slots.num_ranks, block_m=block_m)
    tiles = leave_room_for_sums(replace(tiles, group_m=config.group_m, num_splits=1))
    combine.gemm_combine(act, w_down, out, dispatched, metadata, tiles, slots)
    return out


def dispatch_experts(
    tokens: dispatch.LayerTokens,
    w_gate_up: torch.Tensor,
    act: torch.Tensor,
    config: LayerConfig,
    slots: Slots,
) -> dispatch.Dispatched:
    """The first half of `feed_forward`, after the layout: rows to the experts, and the
    up-projection into act [M, I]."""
    x, max_expert_rows = tokens.x, len(act)
    rows, copies = expert_rows(x, max_expert_rows, slots)
    # Balanced routing brings about as many rows as this rank sends out.
    tiles = gemm_config(w_gate_up, max_expert_rows // slots.num_ranks, "swiglu")
    tiles = replace(tiles, group_m=config.group_m, num_splits=1)

    offsets = dispatch.exchange_fused(tokens, config, slots)
    plan = dispatch.place_rows(tokens, offsets, rows.nbytes, slots)
    begins = offsets.expert_offsets, offsets.remote_offsets
    schedule, counters = dispatch.staged_schedule(
        *begins, max_expert_rows, tiles.block_m, config, slots
    )
    dispatch.push_fused(x, plan, counters, config, slots)
    lists = CopyLists(plan.own_order, copies)
    dispatch.copy_rows(x, rows, lists, offsets, counters, config, slots)
    dispatch.dispatch_gemm(rows, w_gate_up, act, schedule, counters, tiles, config, slots)
    return dispatch.Dispatched(tokens, rows, offsets, plan, schedule, counters, config)


def expert_rows_bytes(max_expert_rows: int, row_bytes: int) -> int:
    """Bytes of `slots.expert_rows` for a layer: rows, and for each of them which one it copies."""
    return max_expert_rows * (row_bytes + 8)


def expert_rows(
    x: torch.Tensor, max_expert_rows: int, slots: Slots
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows [M, H] like x, copies int64 [M]) in `slots.expert_rows`: what the experts read and
    later what they give, and which rows are copies of which."""
    num_bytes = max_expert_rows * x.shape[1] * x.itemsize
    rows = slots.expert_rows.local[:num_bytes].view(x.dtype).view(max_expert_rows, x.shape[1])
    copies = slots.expert_rows.local[num_bytes:][: 8 * max_expert_rows].view(torch.int64)
    return rows, copies


def leave_room_for_sums(tiles: GemmConfig) -> GemmConfig:
    """Tiles that leave shared memory to the programs that sum concurrently: three steps in flight
    and a store in parts are as fast."""
    if tiles.block_m < 128:
        return tiles
    return replace(tiles, num_stages=3, subtiles=max(tiles.subtiles, 4))
