"""Host side of the products of a backward that multiply rows while they arrive."""

from __future__ import annotations

import torch
from triton.tools.ragged_tma import create_ragged_descriptor

from ..grouped_gemm import num_compute_programs
from ..grouped_gemm.activations import AnyActivation
from ..grouped_gemm.backward import ActivationGradients, gradient_rows, wgrad_launch
from ..grouped_gemm.config import GemmConfig
from ..grouped_gemm.launch import describe_weights
from ..grouped_gemm.operands import Weights
from ..grouped_gemm.schedule_kernels import Tiles
from ..hardware import leave_room
from ..symm.slots import Slots
from ..utils import next_power_of_2
from .backward_kernels import ArrivingExperts, dispatch_dgrad_kernel, dispatch_wgrad_kernel
from .fused import Dispatched, num_copy_programs
from .fused_kernels import copy_rows_kernel


def dispatch_dgrad(
    dispatched: Dispatched,
    w: torch.Tensor,
    pre: torch.Tensor,
    row_weight: torch.Tensor,
    out: ActivationGradients,
    activation: AnyActivation,
    tiles: GemmConfig,
    slots: Slots,
) -> None:
    """The gradient of the pre-activations pre [M, 2I] from expert rows of dy [M, H], while they
    arrive, and w [L, H, I]; see `grouped_gemm.backward.activation_dgrad`. out.pre may be `pre`."""
    schedule, config = dispatched.schedule, dispatched.config
    slots.context.launch(
        dispatch_dgrad_kernel,
        (num_compute_programs(pre.device, tiles),),
        create_ragged_descriptor(dispatched.rows, [tiles.block_m, tiles.block_k]),
        describe_weights(Weights(w, transposed=True), tiles),
        gradient_rows(pre, row_weight, out, tiles, activation),
        Tiles(schedule.tiles, schedule.num_tiles),
        len(pre),
        dispatched.counters.copied,
        slots.context.fields,
        num_copy_programs(config),
        config.num_stages,
        RANKS_PAD=next_power_of_2(slots.num_ranks),
        **tiles.launch_options(activation),
        **leave_room(),
        step="dispatch_dgrad",
        after=(copy_rows_kernel,),
        shares_sms=True,
    )


def dispatch_wgrad(
    grad: torch.Tensor, dispatched: Dispatched, out: torch.Tensor, accumulate: bool, slots: Slots
) -> None:
    """The gradient of weights, out [L, N, H], from rows grad [M, N] and expert rows [M, H], while
    these arrive; see `grouped_gemm.wgrad`."""
    config, schedule = dispatched.config, dispatched.schedule
    programs, operands, options = wgrad_launch(grad, dispatched.rows, out)
    offsets = dispatched.offsets.expert_offsets
    slots.context.launch(
        dispatch_wgrad_kernel,
        programs,
        *operands,
        ArrivingExperts(offsets, schedule.last_counter, dispatched.counters.copied),
        len(grad),
        slots.context.fields,
        num_copy_programs(config),
        config.num_stages,
        ACCUMULATE=accumulate,
        RANKS_PAD=next_power_of_2(slots.num_ranks),
        **options,
        **leave_room(),
        step="dispatch_wgrad",
        after=(copy_rows_kernel,),
        shares_sms=True,
    )
