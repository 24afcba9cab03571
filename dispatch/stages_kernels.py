"""The kernel that cuts expert rows into tiles, and the stages in which their sums return."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device.lang import device_function
from ..device.programs import pdl_launch_dependents, pdl_wait
from ..device.tiles import stage_begin, stage_of_row, stage_unit
from ..grouped_gemm.schedule_kernels import pack_tile, tile_coordinates, unpack_tile

# --- A tile as one word --------------------------------------------------------------------------


@device_function
def pack_staged_tile(expert, row, num_rows, counter):
    """`pack_tile` with, from bit 56 on, the number of the counter in `StageCounters.copied` that
    says that all rows of the tile have arrived."""
    return pack_tile(expert, row, num_rows) | counter.to(tl.int64) << 56


@device_function
def unpack_staged_tile(packed):
    """(expert, first row, end of the rows, counter) of a tile; see `pack_staged_tile`."""
    expert, row, end = unpack_tile(packed)
    return expert, row, end, packed >> 56


# --- The schedule --------------------------------------------------------------------------------


class StagedTiles(NamedTuple):
    """What `staged_schedule_kernel` makes."""

    tiles: tl.tensor  # int64 [max_tiles]
    num_own: tl.tensor  # int32 [1]: tiles apart, of this rank's first own rows alone
    first_tile: tl.tensor  # int32 [RETURN_STAGES + 2]: tile that begins each return stage
    last_counter: tl.tensor  # int32 [L]: that of each expert's last tile, see `arrival_counter`


class ScheduleSizes(NamedTuple):
    """Compile-time constants of `staged_schedule_kernel`."""

    BLOCK_M: Any
    RETURN_STAGES: Any
    EXPERTS_PAD: Any
    COUNTERS_PAD: Any
    STEP: Any


@device_function
def return_begin(stage, num_rows, RETURN_STAGES: tl.constexpr):
    """The expert row that begins a return stage. Stages become shorter, as a token's sum returns
    when the last of its few rows has been computed, and so most return late.

    16 rows, 4 stages: 0, 7, 12, 15, and 16 for stage 4.
    """
    rest = (RETURN_STAGES - stage).to(tl.int64)
    return num_rows - (num_rows * rest * rest // (RETURN_STAGES * RETURN_STAGES)).to(tl.int32)


class RowsOfExpert(NamedTuple):
    """The rows of an expert: first `num_own` of this rank, then those of others."""

    num_own: tl.tensor
    own_begin: tl.tensor  # among all own rows
    remote_begin: tl.tensor  # among all rows of others
    own_unit: tl.tensor  # of own rows, see `tiles.stage_unit`
    remote_unit: tl.tensor  # of rows of others


@device_function
def arrival_counter(last, rows, stage_count, own_first):
    """The number of the counter in `StageCounters.copied` which says that rows up to number `last`
    of an expert have arrived: own rows come in `stage_count` stages, by `tiles.stage_of_row`, and
    those of others in as many, see `copy_rows_kernel`. Rows of the first `own_first` own stages
    arrive before all others, those of a later one before the same stage of others. Each program
    arrives at the counters in this order, so what one counter says is true of all before it. rows:
    RowsOfExpert."""
    is_own = last < rows.num_own
    last_own = tl.minimum(last, rows.num_own - 1)
    own_stage = stage_of_row(rows.own_begin + last_own, rows.own_unit, stage_count)
    last_remote = rows.remote_begin + last - rows.num_own
    remote_stage = stage_of_row(last_remote, rows.remote_unit, stage_count)
    is_early = own_stage < own_first
    own_turn = tl.where(is_early | (rows.num_own == 0), 0, own_stage)
    turn = tl.maximum(own_turn, tl.where(is_own, 0, remote_stage))
    return tl.where(is_own & is_early, own_stage, stage_count + turn)


@triton.jit(
    do_not_specialize=[
        *("num_local_experts", "stage_count", "own_first", "num_counters", "max_tiles")
    ]
)
def staged_schedule_kernel(
    expert_offsets,  # int32 [L + 1]
    remote_offsets,  # int32 [L + 1], see `exchange_fused_kernel`
    schedule,  # StagedTiles, out
    counters,  # int64 [num_counters], out: 0
    num_counters,
    num_local_experts,
    stage_count,
    own_first,
    max_tiles,
    SIZES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Cut each expert's rows into tiles of BLOCK_M; program e writes those of expert e.

    An expert's rows are first this rank's own, then those of others. Full tiles of own rows that
    arrive in the first `own_first` own stages go apart: they come first, by expert, then the
    others, by expert. So there is work before rows of others arrive; and combine, which begins with
    the others, ends with the tiles apart, while sums are on their way. With own_first 0 all are in
    the order of their experts.

    Each tile has the number of the counter that says that all its rows have arrived, see
    `arrival_counter`. An expert without rows has counter 0.

    first_tile counts from the first tile that is not apart. A tile that holds rows of several
    return stages belongs to the first of them, whose rows wait for it; the last stage is the tiles
    apart.

    A PDL launch after `place_rows_kernel`: it waits for that kernel, which has waited for the
    exchange, before it reads the offsets, and before later launches may begin. (Or after the
    exchange, where rows go where those of an earlier call have gone.)

    Two stages of dispatch and two of combine, BLOCK_M 2, own_first 2, expert_offsets [0, 4, 8],
    remote_offsets [0, 2, 5]: rows 0, 1 and 4 are own, so tiles (expert, row, number of rows)
    (0, 0, 2) | (0, 2, 2) (1, 4, 2) (1, 6, 2), num_own [1], first_tile [0, 3, 3, 4]: 4 of 5 rows of
    others are of the first return stage, which leaves no tile that begins with one of the second.
    """
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    expert = tl.program_id(0)
    experts = tl.arange(0, SIZES.EXPERTS_PAD)
    real = experts < num_local_experts
    begins = tl.load(expert_offsets + experts, mask=real, other=0)
    rows = tl.load(expert_offsets + 1 + experts, mask=real, other=0) - begins
    remote_begins = tl.load(remote_offsets + experts, mask=real, other=0)
    remote_rows = tl.load(remote_offsets + 1 + experts, mask=real, other=0) - remote_begins
    own_rows = rows - remote_rows
    num_remote = tl.load(remote_offsets + num_local_experts)
    own_unit = stage_unit(tl.load(expert_offsets + num_local_experts) - num_remote, stage_count)
    early_end = stage_begin(own_first, own_unit, stage_count)
    early_rows = tl.maximum(early_end - (begins - remote_begins), 0)
    own_tiles = tl.minimum(early_rows, own_rows) // SIZES.BLOCK_M
    other_tiles = tl.cdiv(rows, SIZES.BLOCK_M) - own_tiles
    num_own_tiles = tl.sum(own_tiles, 0)
    first_own = tl.sum(tl.where(experts < expert, own_tiles, 0), 0)
    first_other = num_own_tiles + tl.sum(tl.where(experts < expert, other_tiles, 0), 0)
    own_count = tl.sum(tl.where(experts == expert, own_tiles, 0), 0)
    count = own_count + tl.sum(tl.where(experts == expert, other_tiles, 0), 0)
    begin = tl.load(expert_offsets + expert)
    end = tl.load(expert_offsets + expert + 1)
    remote_begin = tl.load(remote_offsets + expert)
    num_here = end - begin - (tl.load(remote_offsets + expert + 1) - remote_begin)
    remote_unit = stage_unit(num_remote, stage_count)
    rows_here = RowsOfExpert(num_here, begin - remote_begin, remote_begin, own_unit, remote_unit)
    last_counter = arrival_counter(end - begin - 1, rows_here, stage_count, own_first)
    tl.store(schedule.last_counter + expert, tl.where(begin < end, last_counter, 0))
    for start in range(0, count, SIZES.STEP):
        tile = start + tl.arange(0, SIZES.STEP)
        row = begin + tile * SIZES.BLOCK_M
        number = tl.minimum(end - row, SIZES.BLOCK_M)
        last = tile * SIZES.BLOCK_M + number - 1  # among the expert's rows
        counter = arrival_counter(last, rows_here, stage_count, own_first)
        packed = pack_staged_tile(expert, row, number, counter)
        is_own = tile < own_count
        to = tl.where(is_own, first_own + tile, first_other + tile - own_count)
        tl.store(schedule.tiles + to, packed, mask=(tile < count) & (to < max_tiles))
    if expert == 0:
        num_others = tl.sum(other_tiles, 0)
        RETURN_STAGES: tl.constexpr = SIZES.RETURN_STAGES
        stages = tl.arange(0, triton.next_power_of_2(RETURN_STAGES))
        ends = return_begin(stages + 1, num_remote, RETURN_STAGES)
        before = tl.minimum(ends[:, None] - remote_begins[None, :], remote_rows[None, :])
        num = tl.cdiv(own_rows[None, :] + before, SIZES.BLOCK_M) - own_tiles[None, :]
        up_to = tl.sum(tl.where(ends[:, None] > remote_begins[None, :], num, 0), 1)
        up_to = tl.where(stages == RETURN_STAGES - 1, num_others, up_to)
        tl.store(schedule.num_own, num_own_tiles)
        tl.store(schedule.first_tile, 0)
        tl.store(schedule.first_tile + 1 + stages, up_to, mask=stages < RETURN_STAGES)
        tl.store(schedule.first_tile + 1 + RETURN_STAGES, num_others + num_own_tiles)
        zeros = tl.arange(0, SIZES.COUNTERS_PAD)
        tl.store(counters + zeros, zeros.to(tl.int64) * 0, mask=zeros < num_counters)


# --- How a GEMM goes through it ------------------------------------------------------------------


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
    `tile_coordinates`. The first stage begins after the `num_own` tiles, which are the last
    stage."""
    stage = stage_of(tile, first_m, num_n)
    stages = tl.arange(0, first_m.shape[0])
    begin = tl.sum(tl.where(stages == stage, first_m, 0), 0)
    end = tl.sum(tl.where(stages == stage + 1, first_m, 0), 0)
    m, block = tile_coordinates(tile - begin * num_n, end - begin, num_n, GROUP_M)
    at = num_own + begin + m
    return tl.load(tiles + tl.where(at < num_m, at, at - num_m)), block
