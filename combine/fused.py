"""Host side of a layer's combine: the down-projection, and the sums that return."""

from __future__ import annotations

from typing import Any

import torch
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..device.constants import constants
from ..device.lang import INTERPRETED
from ..dispatch import Dispatched
from ..dispatch.stages_kernels import StagedTiles
from ..grouped_gemm import num_compute_programs, ragged
from ..grouped_gemm.config import GemmConfig
from ..hardware import gpu, leave_room
from ..symm.slots import Slots
from ..utils import next_power_of_2
from .fused_kernels import SumSizes, return_sums_kernel, staged_gemm_kernel
from .fused_sum_kernels import SumPlan, fused_sum_kernel
from .return_metadata import ReturnMetadata
from .return_metadata_kernels import send_return_metadata_kernel

RETURN_BYTES, RETURN_WARPS, RETURN_REGISTERS = 4096, 2, 152
"""Bytes of a row that a program sums at a time, its warps, and the registers of a thread: two of
these programs find room on an SM with one of the GEMM."""
SUM_BYTES, SUM_WARPS, SUM_REGISTERS, SUM_PROGRAMS = 4096, 2, 136, 7
"""The same for the sums of up to 4 ranks, and programs per SM, which fill it."""


def gemm_combine(
    a: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    dispatched: Dispatched,
    metadata: ReturnMetadata,
    tiles: GemmConfig,
    slots: Slots,
) -> None:
    """out [T, H]: rows a [M, I] times w [L, H, I], into the expert rows y [M, H] of `dispatched`,
    weighted and summed by token.

    A rank sums the rows that it has of a token and writes one to the token's rank, which adds up
    the ranks'. It all runs concurrently: small programs sum on the SMs that multiply. Ends a call.
    """
    y, schedule, counters = dispatched.rows, dispatched.schedule, dispatched.counters
    stages, hidden = dispatched.config.num_return_stages, dispatched.rows.shape[1]
    num_programs, launch = num_compute_programs(y.device, tiles), slots.context.launch
    launch(
        staged_gemm_kernel,
        (num_programs,),
        create_ragged_descriptor(a, [tiles.block_m, tiles.block_k]),
        TensorDescriptor.from_tensor(w, [1, tiles.block_n, tiles.block_k]),
        ragged(y[None], tiles.block_m, tiles.block_n // tiles.subtiles),
        StagedTiles(schedule.tiles, schedule.num_own, schedule.first_tile),
        counters.computed,
        slots.context.fields,
        STAGES=stages + 1,
        **tiles.launch_options(),
        **leave_room(),
        step="gemm_combine",
        after=(send_return_metadata_kernel,),
        shares_sms=True,
    )

    def sizes(num_bytes: int) -> Any:
        return constants(
            SumSizes(
                NUM_TOPK=dispatched.tokens.topk_idx.shape[1],
                STAGES=stages,
                RANKS=slots.num_ranks,
                RANKS_PAD=next_power_of_2(slots.num_ranks),
                BLOCK_H=min(next_power_of_2(hidden), num_bytes // y.itemsize),
            )
        )

    launch(
        return_sums_kernel,
        (2 if INTERPRETED else dispatched.config.num_return_programs,),
        y,
        counters.computed,
        counters.returned,
        slots.context.fields,
        num_programs,
        dispatched.tokens.num_experts,
        hidden,
        metadata.rows,
        SIZES=sizes(RETURN_BYTES),
        after=(staged_gemm_kernel,),
        shares_sms=True,
        num_warps=RETURN_WARPS,
        maxnreg=RETURN_REGISTERS,
    )
    launch(
        fused_sum_kernel,
        (2 if INTERPRETED else SUM_PROGRAMS * gpu(y.device).num_sms,),
        out,
        y,
        SumPlan(metadata.send_head, metadata.to_sum),
        counters.num_to_sum,
        counters.computed,
        slots.context.fields,
        num_programs,
        len(out),
        hidden,
        metadata.rows,
        SIZES=sizes(SUM_BYTES),
        after=(return_sums_kernel,),
        shares_sms=True,
        num_warps=SUM_WARPS,
        maxnreg=SUM_REGISTERS if slots.num_ranks <= 4 else None,
    )
    slots.context.end_call()
