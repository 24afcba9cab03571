"""A backward's products of rows that still arrive: with the gradient of the activation in their
epilogue, or as the gradient of weights."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..device.context import ROLE_DGRAD_DOWN, ROLE_WGRAD_UP
from ..device.lang import begin_span, end_span
from ..device.programs import pdl_launch_dependents, pdl_wait
from ..device.tiles import deadline_from_now, end_wait_tile, wait_tile
from ..grouped_gemm.backward_kernels import (
    expert_rows,
    finish_gradient,
    num_wgrad_blocks,
    store_weight_gradient,
    wgrad_block,
    wgrad_tile,
)
from ..grouped_gemm.kernels import gemm_tile, product_size
from .fused_kernels import load_arriving_tile


@triton.jit(
    do_not_specialize=["max_rows", "num_copy_programs", "stage_count"],
    do_not_specialize_on_alignment=["copied"],
)
def dispatch_dgrad_kernel(
    grad,  # ragged descriptor of the expert rows [M, K], dy
    w,  # descriptor of the weights [L, 1, K, N], see `gemm_tile`
    rows,  # GradientRows
    tiles,  # `Tiles`, in the order of `staged_schedule_kernel`
    max_rows,
    copied,  # int64 [2 * S], see `StageCounters`
    context,
    num_copy_programs,
    stage_count,
    RANKS_PAD: tl.constexpr,
    SHAPE: tl.constexpr,  # TileShape
    PDL: tl.constexpr,
):
    """The gradient of pre-activations from expert rows of dy, each tile once its rows have arrived:
    `_activation_dgrad_kernel`, but for the wait at each tile.

    The weights of a tile's rows have arrived with them. `place_rows_kernel` of a row's rank has
    stored its weight, and has ended, before that rank raises the flag of any stage; so the weight
    happens before a program of `copy_rows_kernel` sees that flag and arrives at `copied`, and
    before the wait for the tile ends. Those of own rows were stored before `push_fused_kernel`
    began. Their addresses depend on the wait, so no load moves ahead of it.

    A PDL launch after `copy_rows_kernel`, as `dispatch_gemm_kernel` is: of what came before that
    one, it reads only what `push_fused_kernel` has waited for, and what earlier calls have stored.
    """
    pdl_launch_dependents(PDL)
    N, K = product_size(w, SHAPE, TRANSPOSED=True)
    num_m = tl.load(tiles.count)
    num_n = tl.cdiv(N, SHAPE.BLOCK_N)
    deadline = deadline_from_now(context)
    since = begin_span()
    for index in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=True):
        # fmt: off
        tile = load_arriving_tile(
            tiles, index, num_m, num_n, SHAPE.BLOCK_N, SHAPE.GROUP_M, copied, num_copy_programs,
            deadline, context, PDL,
        )
        # fmt: on
        acc = gemm_tile(grad, w, tile, K, SHAPE, TRANSPOSED=True)
        finish_gradient(acc, tile, rows, max_rows, N, SHAPE.ACTIVATION, SHAPE.SUBTILES)
        since = end_span(ROLE_DGRAD_DOWN, index, since, context)
    end_wait_tile(stage_count, deadline, context, RANKS_PAD)
    pdl_wait(PDL)


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
    since = begin_span()
    for index in tl.range(
        tl.program_id(0), num_wgrad_blocks(out, SHAPE), tl.num_programs(0), flatten=True
    ):
        expert, part, m, n = wgrad_block(index, out, SHAPE)
        begin, end = expert_rows(expert, experts.offsets, max_rows)
        counter = experts.copied + tl.load(experts.last_counter + expert)
        begin += wait_tile(counter, num_copy_programs, deadline, context, PDL)
        acc = wgrad_tile(grad, x, begin, end, part * out.shape[2] + m, n, out.shape[3], SHAPE)
        store_weight_gradient(acc, out, expert, part, m, n, ACCUMULATE, SHAPE.SUBTILES)
        since = end_span(ROLE_WGRAD_UP, index, since, context)
    end_wait_tile(stage_count, deadline, context, RANKS_PAD)
    pdl_wait(PDL)
