"""The gradient of weights from rows that still arrive."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..device.context import ROLE_WGRAD_UP
from ..device.lang import begin_span, end_span
from ..device.programs import pdl_launch_dependents, pdl_wait
from ..device.tiles import deadline_from_now, end_wait_tile, wait_tile
from ..grouped_gemm.backward_kernels import (
    expert_rows,
    num_wgrad_blocks,
    store_weight_gradient,
    wgrad_block,
    wgrad_tile,
)


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
    SHAPE: tl.constexpr,  # TileShape
    PDL: tl.constexpr,
):
    """out = grad.T @ x over the rows of each expert, once they have arrived: `_wgrad_kernel`, but
    for the wait at each block. Rows arrive by expert, and blocks are computed by expert.

    A PDL launch after `copy_rows_kernel`, as `dispatch_gemm_kernel` is: of what came before that
    one, it reads only what `push_fused_kernel` has waited for, and what earlier calls have stored.
    """
    pdl_launch_dependents(PDL)
    deadline = deadline_from_now(context)
    since, waited_for = begin_span(), tl.full((), -1, tl.int32)
    for index in tl.range(
        tl.program_id(0), num_wgrad_blocks(out, SHAPE), tl.num_programs(0), flatten=True
    ):
        expert, part, m, n = wgrad_block(index, out, SHAPE)
        begin, end = expert_rows(expert, experts.offsets, max_rows)
        counter = tl.load(experts.last_counter + expert)
        # fmt: off
        zero, waited_for = wait_tile(
            experts.copied, counter, waited_for, num_copy_programs, deadline, context, PDL
        )
        # fmt: on
        begin += zero
        acc = wgrad_tile(grad, x, begin, end, part * out.shape[2] + m, n, out.shape[3], SHAPE)
        store_weight_gradient(acc, out, expert, part, m, n, ACCUMULATE, SHAPE.SUBTILES)
        since = end_span(ROLE_WGRAD_UP, index, since, context)
    end_wait_tile(stage_count, deadline, context, RANKS_PAD)
    pdl_wait(PDL)
