"""The product of e4m3 operands by warps that each have one task, in Gluon, Triton's language of
layouts and barriers.

Where every warp loads, multiplies and scales, the tensor cores wait for the sums, for scales, and
for memory at both ends of a tile. Here one warp loads, another one reads scales, and two times four
warps, each with half of a tile's rows, multiply: while one half adds up, the other one multiplies,
and the next tile's operands come while this one is stored (as in DeepGEMM and CUTLASS's
warp-specialized kernels). Results have the bits of `wide_scaled_gemm_tile`.

A step of 128 columns goes through one of STAGES stages in shared memory. Its `full` barrier passes
when the operands and the scales of the rows have arrived, its `empty` one when both halves have
multiplied by them. An arrival is one thread's, before which Gluon puts a barrier of the warps that
share the task: so what all of them have read and stored happens before what the barrier lets on.
The warp that loads also tells the others each tile, which it may claim, see `begin_turn`. All waits
are for warps of the same program, so none lasts.
"""

from typing import NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..device.cast import e4m3_scale
from ..device.lang import begin_span, drain_tma_stores, end_span, in_order
from ..device.programs import arrive, pdl_launch_dependents, pdl_wait
from .kernels import activate
from .product_kernels import RAGGED, WIDE, is_gated, weight_scales
from .schedule_kernels import Tile, tile_coordinates, unpack_tile

HALVES = gl.constexpr(2)
"""Parts of a tile's rows, each of which has warps of its own."""
HALF_WARPS = gl.constexpr(4)
TURNS = gl.constexpr(4)
"""Tiles by which the warp that loads may be ahead."""
LOADER_REGISTERS = gl.constexpr(40)
HALF_REGISTERS = gl.constexpr(224)
"""The registers of a thread of the second half; the first half takes the rest of an SM's, 240."""


class CastScales(NamedTuple):
    """Where the scales of results in e4m3 go, one for each 128 columns."""

    base: gl.tensor  # float32 [M, N / 128]
    stride: gl.tensor  # between rows


class Work(NamedTuple):
    """The tiles of a launch and their product."""

    claimed: gl.tensor  # int64 [1]: tiles that programs have begun, or None
    packed: gl.tensor  # `Tiles`
    num_m: gl.tensor
    num_n: gl.tensor
    num_columns: gl.tensor  # N
    num_parts: gl.tensor
    num_steps: gl.tensor


class Turns(NamedTuple):
    """Shared memory in which the warp that loads tells the other ones what it loads, TURNS tiles of
    a program at a time."""

    packed: gl.shared_memory_descriptor  # int64 [TURNS, 1]: rows of a tile, see `begin_turn`
    block: gl.shared_memory_descriptor  # int32 [TURNS, 1]: of columns, -1 after the last tile
    given: gl.shared_memory_descriptor  # [TURNS, 1]: barriers that pass when they are known
    taken: gl.shared_memory_descriptor  # [TURNS, 1]: and when all warps know them


class Stages(NamedTuple):
    """Shared memory: of each stage rows of A, two blocks of weights and scales of the rows, with
    their barriers; of each half of a tile, what it stores."""

    rows: gl.shared_memory_descriptor  # [STAGES, 1, 1, BLOCK_M, 128]
    left: gl.shared_memory_descriptor  # [STAGES, 1, 1, 128, 128]
    right: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor  # [STAGES, BLOCK_M]
    full: gl.shared_memory_descriptor  # [STAGES, 1]
    empty: gl.shared_memory_descriptor
    stored: gl.shared_memory_descriptor  # [HALVES, 1, 1, 1, BLOCK_M / HALVES, 128]


@gluon.jit
def tile_of(packed, block, SHAPE: gl.constexpr):
    """A tile of 256 rows of weights: 128 columns of gate and as many of up, or 256."""
    WIDTH: gl.constexpr = WIDE if is_gated(SHAPE.ACTIVATION.name) else 2 * WIDE
    expert, row, end = unpack_tile(packed)
    return Tile(expert, row, end, block * WIDTH)


@gluon.jit
def right_block(tile, GATED: gl.constexpr):
    """(part, column) of the second 128 rows of weights of a tile."""
    if GATED:
        part, column = 1, tile.n
    else:
        part, column = 0, tile.n + WIDE
    return part, column


@gluon.jit
def begin_turn(turn, work, turns, SHAPE: gl.constexpr):
    """(packed rows, block of columns) of a program's next tile, block -1 when there is none, to the
    warp that loads, which tells the others.

    Programs claim tiles in their order where `work.claimed` counts them: so those in flight are
    neighbours, which share rows and weights in L2, however unequal the SMs are. Else each program
    takes every n-th tile.

    What it stores happens before its arrival at `given`, and so before the others read it; what
    these read happens before theirs at `taken`, for which it waits before it stores there again.
    """
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slot = turn % TURNS
    mbarrier.wait(turns.taken.index(slot), (turn // TURNS & 1) ^ 1)
    index = gl.program_id(0) + turn * gl.num_programs(0)
    if work.claimed is not None:
        one = gl.to_tensor(1).to(gl.int64)
        index = gl.atomic_add(work.claimed, one, sem="relaxed", scope="gpu").to(gl.int32)
    packed, block = gl.to_tensor(0).to(gl.int64), gl.to_tensor(-1)
    if index < work.num_m * work.num_n:
        m, block = tile_coordinates(index, work.num_m, work.num_n, SHAPE.GROUP_M)
        packed = gl.load(work.packed + m)
    turns.packed.index(slot).store(gl.full([1], packed, gl.int64, ONE))
    turns.block.index(slot).store(gl.full([1], block, gl.int32, ONE))
    mbarrier.arrive(turns.given.index(slot), count=1)
    return packed, block


@gluon.jit
def next_turn(turn, turns, NUM_WARPS: gl.constexpr):
    """The next tile of a program, to the other warps."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
    slot = turn % TURNS
    mbarrier.wait(turns.given.index(slot), turn // TURNS & 1)
    packed = gl.max(turns.packed.index(slot).load(ONE), axis=0)
    block = gl.max(turns.block.index(slot).load(ONE), axis=0)
    mbarrier.arrive(turns.taken.index(slot), count=1)
    return packed, block


@gluon.jit
def load_operands(a, w, work, turns, stages, SHAPE: gl.constexpr, STAGES: gl.constexpr):
    """What the warp does that loads."""
    GATED: gl.constexpr = is_gated(SHAPE.ACTIVATION.name)
    step, turn = 0, 0
    packed, block = begin_turn(0, work, turns, SHAPE)
    while block >= 0:
        tile = tile_of(packed, block, SHAPE)
        part, column = right_block(tile, GATED)
        for step_idx in range(work.num_steps):
            stage = step % STAGES
            mbarrier.wait(stages.empty.index(stage), (step // STAGES & 1) ^ 1)
            full, k = stages.full.index(stage), step_idx * 128
            mbarrier.expect(full, (SHAPE.BLOCK_M + 2 * WIDE) * 128)
            row = [RAGGED, tile.end, RAGGED - (tile.end - tile.row), k]
            tma.async_copy_global_to_shared(a, row, full, stages.rows.index(stage))
            left = [tile.expert, 0, tile.n, k]
            tma.async_copy_global_to_shared(w, left, full, stages.left.index(stage))
            right = [tile.expert, part, column, k]
            tma.async_copy_global_to_shared(w, right, full, stages.right.index(stage))
            step += 1
        turn += 1
        packed, block = begin_turn(turn, work, turns, SHAPE)


@gluon.jit
def load_scales(scales, work, turns, stages, SHAPE: gl.constexpr, STAGES: gl.constexpr):
    """What the warp does that reads scales of rows, a step ahead."""
    ROWS: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    step, turn = 0, 0
    packed, block = next_turn(0, turns, 1)
    while block >= 0:
        tile = tile_of(packed, block, SHAPE)
        rows = gl.minimum(tile.row + gl.arange(0, SHAPE.BLOCK_M, layout=ROWS), tile.end - 1)
        first = scales.a + rows.to(gl.int64) * scales.a_stride
        following = gl.load(first)
        for step_idx in range(work.num_steps):
            now = following
            following = gl.load(first + gl.minimum(step_idx + 1, work.num_steps - 1))
            stage = step % STAGES
            mbarrier.wait(stages.empty.index(stage), (step // STAGES & 1) ^ 1)
            stages.scales.index(stage).store(now)
            mbarrier.arrive(stages.full.index(stage), count=1)
            step += 1
        turn += 1
        packed, block = next_turn(turn, turns, 1)


@gluon.jit
def store_columns(value, out, cast, tile, work, column, stored, HALF: gl.constexpr):
    """Store 128 columns of a half tile, fp32, from `column` on, in bf16 or as e4m3 with scales.

    They are rounded to bf16 before they are cast, as rows are that another launch casts. The memory
    `stored` is written anew after the thread that issued the last store from it has waited until
    that store has read it, and after a barrier of the half's warps, which Gluon puts between.
    """
    NUM_ROWS: gl.constexpr = value.shape[0]
    value = value.to(gl.bfloat16)
    if cast is not None:
        value = value.to(gl.float32)
        scale, inverse = e4m3_scale(gl.max(gl.abs(value), axis=1))
        row = tile.row + HALF * NUM_ROWS + gl.arange(0, NUM_ROWS, layout=scale.type.layout)
        at = cast.base + row.to(gl.int64) * cast.stride + column // 128
        gl.store(at, scale, mask=(row < tile.end) & (column < work.num_columns))
        value = (value * gl.expand_dims(inverse, 1)).to(out.dtype)
    BLOCK: gl.constexpr = gl.NVMMASharedLayout(128, out.dtype.primitive_bitwidth, 2)
    tma.store_wait(0)
    stored._reinterpret(out.dtype, [NUM_ROWS, WIDE], BLOCK).store(value)
    fence_async_shared()
    row = RAGGED - (tile.end - tile.row - HALF * NUM_ROWS)
    tma.async_copy_shared_to_global(out, [RAGGED, tile.end, 0, row, column], stored)


@gluon.jit
def multiply_half(
    out,
    cast,
    scales,
    work,
    turns,
    stages,
    trace,
    HALF: gl.constexpr,
    SHAPE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """What the warps do that multiply a half of each tile's rows."""
    GATED: gl.constexpr = is_gated(SHAPE.ACTIVATION.name)
    NUM_ROWS: gl.constexpr = SHAPE.BLOCK_M // HALVES
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[HALF_WARPS, 1], instr_shape=[16, WIDE, 32]
    )
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    stored = stages.stored.index(HALF)
    # Both products of a step have these registers, so that one is added up before the next begins.
    product = gl.zeros([NUM_ROWS, WIDE], gl.float32, PRODUCT)
    num_weight_rows = work.num_columns * work.num_parts
    step, turn, since = 0, 0, begin_span()
    packed, block = next_turn(0, turns, HALF_WARPS)
    while block >= 0:
        tile = tile_of(packed, block, SHAPE)
        part, column = right_block(tile, GATED)
        right_row = part * work.num_columns + column
        # fmt: off
        left_scale = weight_scales(scales, tile, tile.n, num_weight_rows, work.num_steps)
        right_scale = weight_scales(scales, tile, right_row, num_weight_rows, work.num_steps)
        # fmt: on
        left_next, right_next = gl.load(left_scale), gl.load(right_scale)
        left = gl.zeros([NUM_ROWS, WIDE], gl.float32, PRODUCT)
        right = gl.zeros([NUM_ROWS, WIDE], gl.float32, PRODUCT)
        for step_idx in range(work.num_steps):
            stage = step % STAGES
            mbarrier.wait(stages.full.index(stage), step // STAGES & 1)
            rows = stages.rows.index(stage)._reinterpret(
                gl.float8e4nv, [SHAPE.BLOCK_M, 128], OPERAND
            )
            rows = rows.slice(HALF * NUM_ROWS, NUM_ROWS)
            left_w = stages.left.index(stage)._reinterpret(gl.float8e4nv, [WIDE, 128], OPERAND)
            right_w = stages.right.index(stage)._reinterpret(gl.float8e4nv, [WIDE, 128], OPERAND)
            # fmt: off
            product = warpgroup_mma(
                rows, left_w.permute((1, 0)), product, use_acc=False, is_async=True
            )
            row_scale = stages.scales.index(stage).slice(HALF * NUM_ROWS, NUM_ROWS).load(
                gl.SliceLayout(1, PRODUCT)
            )
            # fmt: on
            left_factor, right_factor = row_scale * left_next, row_scale * right_next
            ahead = gl.minimum(step_idx + 1, work.num_steps - 1)
            left_next, right_next = gl.load(left_scale + ahead), gl.load(right_scale + ahead)
            product = warpgroup_mma_wait(0, deps=(product,))
            left = in_order(left + product * gl.expand_dims(left_factor, 1))
            # fmt: off
            product = warpgroup_mma(
                rows, right_w.permute((1, 0)), product, use_acc=False, is_async=True
            )
            # fmt: on
            product = warpgroup_mma_wait(0, deps=(product,))
            mbarrier.arrive(stages.empty.index(stage), count=1)
            right = in_order(right + product * gl.expand_dims(right_factor, 1))
            step += 1
        if GATED:
            left = activate(left, right, SHAPE.ACTIVATION)
            store_columns(left, out, cast, tile, work, tile.n, stored, HALF)
        else:
            left = activate(left, left, SHAPE.ACTIVATION)
            store_columns(left, out, cast, tile, work, tile.n, stored, HALF)
            right = activate(right, right, SHAPE.ACTIVATION)
            store_columns(right, out, cast, tile, work, column, stored, HALF)
        if trace is not None and HALF == 0:
            since = end_span(trace.role, turn, since, trace.context)
        turn += 1
        packed, block = next_turn(turn, turns, HALF_WARPS)
    drain_tma_stores()


@gluon.jit(do_not_specialize_on_alignment=["claimed", "computed"])
def specialized_gemm_kernel(
    a,  # ragged descriptor of e4m3 [M, K]
    weights,  # ExpertWeights, without bias
    out,  # ragged descriptor of bf16 or e4m3 [1, M, N], in blocks of a half tile
    cast,  # CastScales of `out` in e4m3, or None
    tiles,  # `Tiles`
    claimed,  # int64 [1]: 0, to count the tiles that programs have begun; or None, see `begin_turn`
    computed,  # int64 [NUM_COUNTERS], or None
    trace,  # TracedRole, or None
    NUM_COUNTERS: gl.constexpr,
    STAGES: gl.constexpr,
    SHAPE: gl.constexpr,  # TileShape
    PDL: gl.constexpr,
):
    """out [M, N] = activation(A @ w[expert].T) for the rows of a tile schedule.

    Each program arrives once at every counter, when all of its stores are in memory: its halves
    have drained them, and the end of their work is a barrier, after which one add releases. A PDL
    launch, which waits for all launches before; so what they have stored, those that begin after it
    may read at once.
    """
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    BLOCK_M: gl.constexpr = SHAPE.BLOCK_M
    GATED: gl.constexpr = is_gated(SHAPE.ACTIVATION.name)
    w, scales = weights.w, weights.scales
    num_columns, depth = w.shape[2], w.shape[3]
    num_n = tl.cdiv(num_columns, WIDE if GATED else 2 * WIDE)
    num_parts, num_steps = 2 if GATED else 1, tl.cdiv(depth, 128)
    num_m = gl.load(tiles.count)
    work = Work(claimed, tiles.packed, num_m, num_n, num_columns, num_parts, num_steps)
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    stages = Stages(
        gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 1, 1, BLOCK_M, 128], a.layout),
        gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 1, 1, WIDE, 128], w.layout),
        gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 1, 1, WIDE, 128], w.layout),
        gl.allocate_shared_memory(
            gl.float32, [STAGES, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0])
        ),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers),
        gl.allocate_shared_memory(
            out.dtype, [HALVES, 1, 1, 1, BLOCK_M // HALVES, WIDE], out.layout
        ),
    )
    turns = Turns(
        gl.allocate_shared_memory(gl.int64, [TURNS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(gl.int32, [TURNS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        gl.allocate_shared_memory(gl.int64, [TURNS, 1], barriers),
        gl.allocate_shared_memory(gl.int64, [TURNS, 1], barriers),
    )
    for slot in gl.static_range(TURNS):
        mbarrier.init(turns.given.index(slot), count=1)
        mbarrier.init(turns.taken.index(slot), count=1 + HALVES)  # by the scales' warp, and halves
    for stage in gl.static_range(STAGES):
        mbarrier.init(stages.full.index(stage), count=2)  # by the loads, and by the scales
        mbarrier.init(stages.empty.index(stage), count=HALVES)
    gl.warp_specialize(
        [
            (multiply_half, (out, cast, scales, work, turns, stages, trace, 0, SHAPE, STAGES)),
            (multiply_half, (out, cast, scales, work, turns, stages, trace, 1, SHAPE, STAGES)),
            (load_operands, (a, w, work, turns, stages, SHAPE, STAGES)),
            (load_scales, (scales, work, turns, stages, SHAPE, STAGES)),
        ],
        [HALF_WARPS, 1, 1],
        [HALF_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS],
    )
    if computed is not None:
        for counter in gl.static_range(NUM_COUNTERS):
            arrive(computed + counter)
