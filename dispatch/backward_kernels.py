"""The gradient of weights from rows that still arrive."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..device.context import ROLE_WGRAD_UP, TracedRole
from ..device.programs import pdl_launch_dependents, pdl_wait
from ..device.tiles import deadline_from_now, end_wait_tile
from ..grouped_gemm.backward_kernels import Arrival, multiply_wgrad


class ArrivingExperts(NamedTuple):
    """The rows of experts, and when they have arrived."""

    offsets: tl.tensor  # int32 [L + 1]
    last_counter: tl.tensor  # int32 [L], see `staged_schedule_kernel`
    copied: tl.tensor  # int64 [2 * S], see `StageCounters`


@triton.jit(do_not_specialize=["max_rows", "num_copy_programs", "stage_count"])
def dispatch_wgrad_kernel(
    grad,  # ragged descriptor of [M, PARTS * N]
    x,  # ragged descriptor of the expert rows [M, K]
    out,  # descriptor of [L, PARTS, N, K]
    experts,  # ArrivingExperts
    max_rows,
    context,
    num_copy_programs,
    stage_count,
    ACCUMULATE: tl.constexpr,
    RANKS_PAD: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    SHAPE: tl.constexpr,  # TileShape
    PDL: tl.constexpr,
):
    """out = grad.T @ x over the rows of each expert, once they have arrived: `_wgrad_kernel`, but
    for the waits. Rows arrive by expert, and blocks are computed by expert.

    A PDL launch after `copy_rows_kernel`, as `dispatch_gemm_kernel` is: of what came before that
    one, it reads only what `push_fused_kernel` has waited for, and what earlier calls have stored.
    """
    pdl_launch_dependents(PDL)
    deadline = deadline_from_now(context)
    arrival = Arrival(experts.last_counter, experts.copied, num_copy_programs, deadline, context)
    trace = TracedRole(context, ROLE_WGRAD_UP)
    # fmt: off
    multiply_wgrad(
        grad, x, out, experts.offsets, max_rows, arrival, trace, ACCUMULATE, EXPERTS_PAD, SHAPE, PDL
    )
    # fmt: on
    end_wait_tile(stage_count, deadline, context, RANKS_PAD)
    pdl_wait(PDL)
