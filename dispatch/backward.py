"""Host side of the gradient of weights from rows that still arrive."""

from __future__ import annotations

from typing import Any

import torch

from ..grouped_gemm.backward import wgrad_launch
from ..hardware import leave_room
from ..symm.slots import Slots
from ..utils import next_power_of_2
from .backward_kernels import ArrivingExperts, dispatch_wgrad_kernel
from .fused import Dispatched, num_copy_programs


def dispatch_wgrad(
    grad: torch.Tensor,
    dispatched: Dispatched,
    out: torch.Tensor,
    accumulate: bool,
    after: Any,
    slots: Slots,
) -> None:
    """The gradient of weights, out [L, N, H], from rows grad [M, N] and expert rows [M, H], while
    these arrive, after the launch of a kernel; see `grouped_gemm.wgrad`."""
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
        **(leave_room() | options),
        step="dispatch_wgrad",
        after=(after,),
        shares_sms=True,
    )
