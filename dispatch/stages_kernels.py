"""The kernel that cuts expert rows into tiles, and the stages in which these go back."""

import triton
import triton.language as tl

from ..device.lang import device_function
from ..device.programs import pdl_launch_dependents, pdl_wait
from ..device.tiles import stage_of_row, stage_unit
from ..grouped_gemm.schedule_kernels import pack_tile, tile_coordinates


@device_function
def return_begin(stage, num_rows, BACK_STAGES: tl.constexpr):
    """The expert row that begins a stage of the way back. Stages become shorter, as a token goes
    back when the last of its few rows has been computed, and so most do late.

    16 rows, 4 stages: 0, 7, 12, 15, and 16 for stage 4.
    """
    rest = (BACK_STAGES - stage).to(tl.int64)
    return num_rows - (num_rows * rest * rest // (BACK_STAGES * BACK_STAGES)).to(tl.int32)


@triton.jit(
    do_not_specialize=[
        *("num_local_experts", "stage_count", "own_apart", "num_counters", "max_tiles")
    ]
)
def staged_schedule_kernel(
    expert_offsets,  # int32 [L + 1]
    remote_offsets,  # int32 [L + 1], see `exchange_fused_kernel`
    tiles,  # int64 [max_tiles], out
    num_own,  # int32 [1], out: tiles of this rank's own rows alone
    first_tile,  # int32 [BACK_STAGES + 2], out: tile that begins each stage of the way back
    counters,  # int64 [num_counters], out: 0
    num_counters,
    num_local_experts,
    stage_count,
    own_apart,
    max_tiles,
    BLOCK_M: tl.constexpr,
    BACK_STAGES: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    COUNTERS_PAD: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Cut each expert's rows into tiles of BLOCK_M; program e writes those of expert e. An early
    launch behind the places, and the one behind it may be early too.

    An expert's rows are first this rank's own, then those of others. With own_apart 1, tiles that
    hold own rows alone come first, by expert, then the others, by expert. So there is work before
    rows arrive; and on the way back, which begins with the tiles of other ranks' rows, and ends
    with the own ones, while sums are on their way. With own_apart 0 all stand by expert.

    Behind its expert, from bit 56 on, a tile has the number of the counter that says that all its
    rows are there: own rows come in `stage_count` stages, by `tiles.stage_of_row`, and those of
    others in as many, see `copy_rows_kernel`.

    first_tile counts from the first tile that is not apart. One that holds rows of several stages
    belongs to the first of them, whose rows wait for it; the last stage is the tiles apart.

    Two stages each way, BLOCK_M 2, own_apart 1, expert_offsets [0, 4, 8], remote_offsets [0, 2, 5]:
    rows 0, 1 and 4 are own, so tiles (expert, row, number of rows) (0, 0, 2) | (0, 2, 2) (1, 4, 2)
    (1, 6, 2), num_own [1], first_tile [0, 3, 3, 4]: 4 of 5 rows of others are of the first stage,
    which leaves no tile that begins with one of the second.
    """
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    expert = tl.program_id(0)
    experts = tl.arange(0, EXPERTS_PAD)
    real = experts < num_local_experts
    begins = tl.load(expert_offsets + experts, mask=real, other=0)
    rows = tl.load(expert_offsets + 1 + experts, mask=real, other=0) - begins
    remote_begins = tl.load(remote_offsets + experts, mask=real, other=0)
    remote_rows = tl.load(remote_offsets + 1 + experts, mask=real, other=0) - remote_begins
    own_rows = rows - remote_rows
    own_tiles = own_rows // BLOCK_M * own_apart
    other_tiles = tl.cdiv(rows, BLOCK_M) - own_tiles
    num_own_tiles = tl.sum(own_tiles, 0)
    first_own = tl.sum(tl.where(experts < expert, own_tiles, 0), 0)
    first_other = num_own_tiles + tl.sum(tl.where(experts < expert, other_tiles, 0), 0)
    own_count = tl.sum(tl.where(experts == expert, own_tiles, 0), 0)
    count = own_count + tl.sum(tl.where(experts == expert, other_tiles, 0), 0)
    begin = tl.load(expert_offsets + expert)
    end = tl.load(expert_offsets + expert + 1)
    remote_begin = tl.load(remote_offsets + expert)
    num_here = end - begin - (tl.load(remote_offsets + expert + 1) - remote_begin)
    num_remote = tl.load(remote_offsets + num_local_experts)
    own_unit = stage_unit(tl.load(expert_offsets + num_local_experts) - num_remote, stage_count)
    remote_unit = stage_unit(num_remote, stage_count)
    for start in range(0, count, STEP):
        tile = start + tl.arange(0, STEP)
        row = begin + tile * BLOCK_M
        number = tl.minimum(end - row, BLOCK_M)
        last = tile * BLOCK_M + number - 1  # among the expert's rows
        last_own = tl.minimum(last, num_here - 1)
        own_stage = stage_of_row(begin - remote_begin + last_own, own_unit, stage_count)
        remote_stage = stage_of_row(remote_begin + last - num_here, remote_unit, stage_count)
        apart = tl.where(last < num_here, own_stage, stage_count + remote_stage)
        in_turns = tl.where(last < num_here, own_stage, remote_stage)
        in_turns = tl.where(num_here > 0, tl.maximum(in_turns, own_stage), in_turns)
        stage = tl.where(own_apart != 0, apart, stage_count + in_turns)
        packed = pack_tile(expert, row, number) | stage.to(tl.int64) << 56
        is_own = tile < own_count
        to = tl.where(is_own, first_own + tile, first_other + tile - own_count)
        tl.store(tiles + to, packed, mask=(tile < count) & (to < max_tiles))
    if expert == 0:
        num_others = tl.sum(other_tiles, 0)
        stages = tl.arange(0, triton.next_power_of_2(BACK_STAGES))
        ends = return_begin(stages + 1, num_remote, BACK_STAGES)
        before = tl.minimum(ends[:, None] - remote_begins[None, :], remote_rows[None, :])
        num = tl.cdiv(own_rows[None, :] + before, BLOCK_M) - own_tiles[None, :]
        up_to = tl.sum(tl.where(ends[:, None] > remote_begins[None, :], num, 0), 1)
        up_to = tl.where(stages == BACK_STAGES - 1, num_others, up_to)
        tl.store(num_own, num_own_tiles)
        tl.store(first_tile, 0)
        tl.store(first_tile + 1 + stages, up_to, mask=stages < BACK_STAGES)
        tl.store(first_tile + 1 + BACK_STAGES, num_others + num_own_tiles)
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
def load_staged_tile(tiles, tile, num_own, num_m, first_m, num_n, GROUP_M: tl.constexpr):
    """(packed tile of rows, block of columns) of a tile of the output, in its stage's order; see
    `tile_coordinates`. The first stage begins behind the `num_own` tiles, and the last has them."""
    stage = stage_of(tile, first_m, num_n)
    stages = tl.arange(0, first_m.shape[0])
    begin = tl.sum(tl.where(stages == stage, first_m, 0), 0)
    end = tl.sum(tl.where(stages == stage + 1, first_m, 0), 0)
    m, block = tile_coordinates(tile - begin * num_n, end - begin, num_n, GROUP_M)
    at = num_own + begin + m
    return tl.load(tiles + tl.where(at < num_m, at, at - num_m)), block
