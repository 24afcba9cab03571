"""Host side of a layer's way back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..device.lang import INTERPRETED
from ..dispatch import Lanes, ReturnMetadata
from ..dispatch.stages import StagedSchedule
from ..grouped_gemm import num_compute_programs, ragged
from ..grouped_gemm.config import GemmConfig
from ..hardware import gpu, has_pdl, leave_room, pdl_options, share_sms
from ..symm.slots import Slots
from ..utils import next_power_of_2
from .fused_kernels import return_sums_kernel, staged_gemm_kernel
from .fused_sum_kernels import fused_sum_kernel

RETURN_BYTES, RETURN_WARPS, RETURN_REGISTERS = 4096, 2, 152
"""Bytes of a row that a program sums at a time, its warps, and the registers of a thread: two of
these programs find room beside one of the GEMM."""
SUM_BYTES, SUM_WARPS, SUM_REGISTERS, SUM_PROGRAMS = 4096, 2, 136, 7
"""The same for the sums of up to 4 ranks, and programs per SM, which fill it."""


@dataclass(frozen=True, slots=True)
class Returns:
    """What the way back needs of the way there: the lanes sent, the metadata of what comes back,
    the schedule of tiles, and where rows begin in a region."""

    lanes: Lanes
    metadata: ReturnMetadata
    schedule: StagedSchedule
    header_bytes: int


def gemm_combine(
    a: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    out: torch.Tensor,
    returns: Returns,
    num_return_programs: int,
    config: GemmConfig,
    slots: Slots,
) -> None:
    """out [T, H]: rows a [M, I] times w [L, H, I], into y [M, H], weighted and summed by token.

    A rank sums the rows that it has of a token and writes one to the token's rank, which adds up
    the ranks'. It all runs side by side: small programs sum on the SMs that multiply. Ends a call;
    the launch before it is `send_return_metadata`'.
    """
    slots.context.step = "gemm_combine"
    schedule, num_ranks = returns.schedule, slots.layout.num_ranks
    num_programs = num_compute_programs(y.device, config)
    launched = staged_gemm_kernel[(num_programs,)](
        create_ragged_descriptor(a, [config.block_m, config.block_k]),
        TensorDescriptor.from_tensor(w, [1, config.block_n, config.block_k]),
        ragged(y[None], config.block_m, config.block_n // config.subtiles),
        schedule.tiles,
        schedule.num_own,
        schedule.first_tile,
        schedule.computed,
        slots.context.fields,
        *w.shape[1:],
        STAGES=schedule.back_stages + 1,
        PDL=has_pdl(),
        **config.launch_options(),
        **leave_room(),
        **pdl_options(),
    )
    share_sms(launched)
    row, hidden = returns.lanes.row, y.shape[1]
    sizes = hidden, returns.header_bytes, row.num_bytes
    offsets = row.ids, row.weights - row.ids
    common = dict(
        NUM_TOPK=row.num_topk,
        STAGES=schedule.back_stages,
        RANKS=num_ranks,
        RANKS_PAD=next_power_of_2(num_ranks),
        PDL=has_pdl(),
        **pdl_options(),
    )
    launched = return_sums_kernel[(2 if INTERPRETED else num_return_programs,)](
        y,
        schedule.computed,
        schedule.returned,
        slots.context.fields,
        num_programs,
        returns.lanes.num_experts,
        *sizes,
        row.scales,
        *offsets,
        BLOCK_H=min(next_power_of_2(hidden), RETURN_BYTES // y.itemsize),
        num_warps=RETURN_WARPS,
        maxnreg=RETURN_REGISTERS,
        **common,
    )
    share_sms(launched)
    metadata = returns.metadata
    launched = fused_sum_kernel[(2 if INTERPRETED else SUM_PROGRAMS * gpu(y.device).num_sms,)](
        out,
        y,
        metadata.send_head,
        metadata.to_sum,
        schedule.num_to_sum,
        schedule.computed,
        slots.context.fields,
        num_programs,
        len(out),
        *sizes,
        *offsets,
        BLOCK_H=min(next_power_of_2(hidden), SUM_BYTES // y.itemsize),
        num_warps=SUM_WARPS,
        maxnreg=SUM_REGISTERS if num_ranks <= 4 else None,
        **common,
    )
    share_sms(launched)
    slots.context.step = None
