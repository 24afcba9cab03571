"""The kernel that cuts expert rows into tiles, and the stages in which these go back."""

import triton
import triton.language as tl

from .grouped_gemm.schedule_kernels import pack_tile, tile_coordinates
from .lang import device_function
from .work import let_next_start, wait_for_previous


@device_function
def return_begin(stage, num_rows, BACK_STAGES: tl.constexpr):
    """The expert row that begins a stage of the way back. Stages become shorter, as a token goes
    back when the last of its few rows has been computed, and so most do late.

    16 rows, 4 stages: 0, 7, 12, 15, and 16 for stage 4.
    """
    rest = (BACK_STAGES - stage).to(tl.int64)
    return num_rows - (num_rows * rest * rest // (BACK_STAGES * BACK_STAGES)).to(tl.int32)


@triton.jit(do_not_specialize=["num_local_experts", "num_counters", "max_tiles"])
def staged_schedule_kernel(
    expert_offsets,  # int32 [L + 1]
    tiles,  # int64 [max_tiles], out
    first_tile,  # int32 [BACK_STAGES + 1], out: tile that begins each stage of the way back
    counters,  # int64 [num_counters], out: 0
    num_counters,
    num_local_experts,
    max_tiles,
    BLOCK_M: tl.constexpr,
    BACK_STAGES: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    COUNTERS_PAD: tl.constexpr,
    STEP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Cut each expert's rows into tiles of BLOCK_M, in order of rows; program e writes those of
    expert e. An early launch behind the places, and the one behind it may be early too.

    A tile that holds rows of several stages belongs to the first of them, whose rows wait for it.
    Two stages, BLOCK_M 2, expert_offsets [0, 4, 8]: tiles (expert, row, number of rows) (0, 0, 2)
    (0, 2, 2) (1, 4, 2) | (1, 6, 2), first_tile [0, 3, 4]; rows 0 to 5 are of the first stage.
    """
    wait_for_previous(OVERLAP)
    let_next_start(OVERLAP)
    expert = tl.program_id(0)
    experts = tl.arange(0, EXPERTS_PAD)
    real = experts < num_local_experts
    begins = tl.load(expert_offsets + experts, mask=real, other=0)
    rows = tl.load(expert_offsets + 1 + experts, mask=real, other=0) - begins
    num = tl.cdiv(rows, BLOCK_M)
    first = tl.sum(tl.where(experts < expert, num, 0), 0)
    count = tl.sum(tl.where(experts == expert, num, 0), 0)
    begin = tl.load(expert_offsets + expert)
    end = tl.load(expert_offsets + expert + 1)
    for start in range(0, count, STEP):
        tile = start + tl.arange(0, STEP)
        row = begin + tile * BLOCK_M
        packed = pack_tile(expert, row, tl.minimum(end - row, BLOCK_M))
        tl.store(tiles + first + tile, packed, mask=(tile < count) & (first + tile < max_tiles))
    if expert == 0:
        num_rows = tl.sum(rows, 0)
        stages = tl.arange(0, triton.next_power_of_2(BACK_STAGES))
        ends = return_begin(stages + 1, num_rows, BACK_STAGES)
        before = tl.cdiv(tl.maximum(ends[:, None] - begins[None, :], 0), BLOCK_M)
        up_to = tl.sum(tl.minimum(before, num[None, :]), 1)
        tl.store(first_tile, 0)
        tl.store(first_tile + 1 + stages, up_to, mask=stages < BACK_STAGES)
        zeros = tl.arange(0, COUNTERS_PAD)
        tl.store(counters + zeros, zeros.to(tl.int64) * 0, mask=zeros < num_counters)


@device_function
def first_tiles(first_tile, num_n, STAGES: tl.constexpr, STAGES_PAD: tl.constexpr):
    """[STAGES_PAD]: the tile of rows that begins each stage, then their number, then very many."""
    stages = tl.arange(0, STAGES_PAD)
    return tl.load(first_tile + stages, mask=stages <= STAGES, other=0x7FFFFFFF // num_n)


@device_function
def stage_of(tile, first_m, num_n):
    """The stage of a tile of the output; the number of stages for one past the last."""
    return tl.sum((first_m * num_n <= tile).to(tl.int32), 0) - 1


@device_function
def load_staged_tile(tiles, tile, first_m, num_n, GROUP_M: tl.constexpr):
    """(packed tile of rows, block of columns) of a tile of the output, in its stage's order; see
    `tile_coordinates`."""
    stage = stage_of(tile, first_m, num_n)
    stages = tl.arange(0, first_m.shape[0])
    begin = tl.sum(tl.where(stages == stage, first_m, 0), 0)
    end = tl.sum(tl.where(stages == stage + 1, first_m, 0), 0)
    m, block = tile_coordinates(tile - begin * num_n, end - begin, num_n, GROUP_M)
    return tl.load(tiles + begin + m), block
