"""The experts between dispatch and combine, on rows read in place."""

from __future__ import annotations

import torch

from .dispatch import release
from .grouped_gemm import gathered_gemm, gemm_config, grouped_gemm, tile_schedule
from .routing import ExpertPlan
from .slots import Slots


def expert_ffn(
    plan: ExpertPlan, w_gate_up: torch.Tensor, w_down: torch.Tensor, slots: Slots
) -> torch.Tensor:
    """y [M, H]: each expert row through its expert, in the plan's order; M is a worst case.

    The up-projection with SwiGLU reads the slot, which is released behind it: what follows works
    on memory of this rank alone.
    """
    max_expert_rows = plan.row_offset.numel()
    _, max_rows, num_topk = plan.expert_row.shape
    # Balanced routing brings about as many rows as this rank sends out.
    config = gemm_config(w_gate_up, max_rows * num_topk, "swiglu", gathered=True)
    schedule = tile_schedule(plan.expert_offsets, max_expert_rows, config.block_m)
    block = slots.block.local.view(w_gate_up.dtype)
    act = gathered_gemm(
        block, plan.row_offset, w_gate_up, schedule, activation="swiglu", config=config
    )
    release(slots)
    return grouped_gemm(act, w_down, plan.expert_offsets, schedule=schedule)
