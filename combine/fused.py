"""Host side of a layer's combine: the down-projection, and the sums that return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from triton.tools.ragged_tma import create_ragged_descriptor

from ..device.constants import constants
from ..device.context import Role
from ..device.lang import INTERPRETED
from ..dispatch import Dispatched
from ..dispatch.fused import claims_of
from ..dispatch.fused_kernels import keep_rows_kernel
from ..grouped_gemm import num_compute_programs, ragged
from ..grouped_gemm.backward import wgrad_launch
from ..grouped_gemm.backward_kernels import _wgrad_kernel
from ..grouped_gemm.config import GemmConfig
from ..grouped_gemm.descriptors import expert_weights
from ..grouped_gemm.operands import Epilogue, Rows, Weights
from ..grouped_gemm.quantization_kernels import quantize_rows_kernel
from ..grouped_gemm.schedule_kernels import Tiles
from ..grouped_gemm.specialized import KERNELS as SPECIALIZED_KERNELS
from ..grouped_gemm.specialized import TileCounters, is_specialized, launch_specialized
from ..hardware import gpu, leave_room
from ..symm.slots import Slots
from ..utils import next_power_of_2
from .fused_kernels import SumSizes, return_sums_kernel, staged_gemm_kernel
from .fused_sum_kernels import LayerSums, SumPlan, fused_sum_kernel
from .return_metadata import ReturnMetadata
from .return_metadata_kernels import send_return_metadata_kernel

RETURN_BYTES, RETURN_WARPS, RETURN_REGISTERS = 4096, 2, 160
"""Bytes of a row that a program sums at a time, its warps, and the registers of a thread: two of
these programs find room on an SM with one of the GEMM, see `ROOMY_REGISTERS`."""
SUM_BYTES, SUM_WARPS, SUM_REGISTERS, SUM_PROGRAMS = 4096, 2, 136, 7
"""The same for the sums of up to 4 ranks, and programs per SM, which fill it."""


class WeightGradient(NamedTuple):
    """The gradient of weights, out [L, N, K], from rows grad [M, N] and x [M, K], added to it or
    written, see `grouped_gemm.wgrad`; about how many rows are in use; its name in a trace."""

    grad: torch.Tensor
    x: torch.Tensor
    out: torch.Tensor
    accumulate: bool
    num_rows: int
    role: Role


def gemm_combine(
    a: Rows,
    weights: Weights,
    sums: LayerSums,
    dispatched: Dispatched,
    metadata: ReturnMetadata,
    tiles: GemmConfig,
    slots: Slots,
    gradients: Sequence[WeightGradient] = (),
) -> None:
    """sums.out [T, H]: rows a [M, I] times weights [L, H, I] (or transposed [L, I, H]), with their
    bias, into sums.y [M, H], weighted and summed by token. In a backward, with gradients of the
    weights of rows, sums are not weighted, and these gradients return to their tokens.

    A rank sums the rows that it has of a token and writes one to the token's rank, which adds up
    the ranks'. It all runs concurrently: small programs sum on the SMs that multiply, or, where
    specialised tiles leave them no registers, after that. The last sums
    return while `gradients` are computed, and are added up meanwhile. Ends a call.
    """
    y, schedule, counters = sums.y, dispatched.schedule, dispatched.counters
    stages, hidden = dispatched.config.num_return_stages, y.shape[1]
    tokens = dispatched.tokens
    num_programs, launch = num_compute_programs(y.device, tiles), slots.context.launch
    before = send_return_metadata_kernel, keep_rows_kernel, quantize_rows_kernel
    call: dict[str, Any] = dict(step="gemm_combine", after=before, shares_sms=True)
    if is_specialized(tiles, weights, Epilogue()):
        # Sums find no registers before these programs end, so the order of tiles is of no use.
        listed = Tiles(schedule.tiles, schedule.num_tiles)
        counted = TileCounters(counters.claimed[1:], counters.computed)
        of = a, weights, Epilogue(), y, listed, tiles, counted, slots.context.traced(Role.DOWN)
        launch_specialized(launch, num_programs, *of, **call)
    else:
        tiles = tiles.unspecialized()
        launch(
            staged_gemm_kernel,
            (num_programs,),
            create_ragged_descriptor(a.x, [tiles.block_m, tiles.block_k]),
            expert_weights(a, weights, tiles),
            ragged(y[None], tiles.block_m, tiles.block_n // tiles.subtiles),
            schedule.staged,
            counters.computed,
            claims_of(counters.claimed[1:], dispatched.config, weights),
            slots.context.fields,
            STAGES=stages + 1,
            TRANSPOSED=weights.transposed,
            **(leave_room() | tiles.launch_options()),
            **call,
        )

    def sizes(num_bytes: int) -> Any:
        return constants(
            SumSizes(
                NUM_TOPK=tokens.topk_idx.shape[1],
                STAGES=stages,
                RANKS=slots.num_ranks,
                RANKS_PAD=next_power_of_2(slots.num_ranks),
                BLOCK_H=min(next_power_of_2(hidden), num_bytes // y.itemsize),
                WEIGHTED=sums.weight_grads is None,
                LOCAL_EXPERTS=tokens.num_experts // slots.num_ranks,
            )
        )

    launch(
        return_sums_kernel,
        (2 if INTERPRETED else dispatched.config.num_return_programs,),
        y,
        sums.weight_grads,
        counters.computed,
        counters.returned,
        slots.context.fields,
        num_programs,
        tokens.num_experts,
        hidden,
        metadata.rows,
        SIZES=sizes(RETURN_BYTES),
        after=(staged_gemm_kernel, *SPECIALIZED_KERNELS),
        shares_sms=True,
        num_warps=RETURN_WARPS,
        maxnreg=RETURN_REGISTERS,
    )
    for one in gradients:
        programs, operands, options = wgrad_launch(one.grad, one.x, one.out, one.num_rows)
        launch(
            _wgrad_kernel,
            programs,
            *operands,
            dispatched.offsets.expert_offsets,
            len(one.x),
            slots.context.traced(one.role),
            ACCUMULATE=one.accumulate,
            EARLY=True,
            **(leave_room() | options),
            after=(return_sums_kernel, _wgrad_kernel),
            shares_sms=True,
        )
    launch(
        fused_sum_kernel,
        (2 if INTERPRETED else SUM_PROGRAMS * gpu(y.device).num_sms,),
        sums,
        SumPlan(metadata.send_head, metadata.to_sum, tokens.topk_idx, dispatched.plan.dst_row),
        counters.num_to_sum,
        counters.computed,
        slots.context.fields,
        num_programs,
        len(sums.out),
        hidden,
        metadata.rows,
        SIZES=sizes(SUM_BYTES),
        after=(return_sums_kernel, _wgrad_kernel),
        shares_sms=True,
        num_warps=SUM_WARPS,
        maxnreg=SUM_REGISTERS if slots.num_ranks <= 4 else None,
    )
    slots.context.end_call()
