"""Host side of the gradient of weights from rows that still arrive."""

from __future__ import annotations

import torch

from ..grouped_gemm.backward import wgrad_launch
from ..hardware import leave_room
from ..symm.slots import Slots
from ..utils import next_power_of_2
from .backward_kernels import ArrivingExperts, dispatch_wgrad_kernel
from .fused import Dispatched, num_copy_programs
from .fused_kernels import copy_rows_kernel


def dispatch_wgrad(
    grad: torch.Tensor,
    dispatched: Dispatched,
    out: torch.Tensor,
    accumulate: bool,
    num_rows: int,
    slots: Slots,
) -> None:
    """The gradient of weights, out [L, N, H], from rows grad [M, N] and expert rows [M, H], while
    these arrive; see `grouped_gemm.wgrad`. num_rows: `LayerRows.balanced`."""
    config, schedule = dispatched.config, dispatched.schedule
    # In one stage its first tile waits for all rows: what copies them has ended when it multiplies.
    is_alone = config.num_stages == 1 and not accumulate
    of = grad, dispatched.rows, out, num_rows
    programs, operands, options = wgrad_launch(*of, is_alone=is_alone)
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
        after=(copy_rows_kernel,),
        shares_sms=True,
    )
