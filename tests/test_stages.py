"""Tiles of expert rows and the stages of the way back, against a plain list."""

from __future__ import annotations

import itertools

import cases
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from moe_engine import reference, stages_kernels

STAGES = st.integers(1, 16)


def tiles_on_rank(group, expert_offsets, max_rows, block_m, stages, back_stages, num_ranks):
    """(tiles, first tile of each stage) by the kernel."""
    from moe_engine.stages import staged_schedule

    offsets = torch.tensor(expert_offsets, dtype=torch.int32, device=cases.device())
    with cases.filled_memory():
        schedule = staged_schedule(offsets, max_rows, block_m, stages, back_stages, num_ranks)
    counters = schedule.pushed, schedule.computed, schedule.returned, schedule.listed
    lengths = [stages, back_stages, back_stages, num_ranks * back_stages]
    assert [counter.numel() for counter in counters] == lengths
    assert not schedule.counters.any()
    first = schedule.first_tile.tolist()
    tiles = schedule.tiles[: first[-1]].tolist()
    return [(tile >> 40, tile & 0x7FFFFFFF, tile >> 32 & 0xFF) for tile in tiles], first


def check_tiles(pool, expert_offsets, block_m, back_stages, spare_rows=0, stages=1, num_ranks=1):
    max_rows = expert_offsets[-1] + spare_rows
    args = expert_offsets, max_rows, block_m, stages, back_stages, num_ranks
    [(tiles, first)] = pool.run(tiles_on_rank, *args, num_ranks=1)
    wanted_tiles, wanted_first = reference.staged_tiles(expert_offsets, block_m, back_stages)
    assert torch.equal(torch.tensor(tiles), torch.tensor(wanted_tiles))
    assert first == wanted_first
    return tiles, first


def test_the_example(pool):
    tiles, first = check_tiles(pool, [0, 4, 8], 2, 2)
    assert tiles == [(0, 0, 2), (0, 2, 2), (1, 4, 2), (1, 6, 2)]
    assert first == [0, 3, 4]


@given(
    counts=st.lists(st.sampled_from([0, 1, 7, 40, 700]), min_size=1, max_size=9),
    block_m=st.sampled_from([4, 16, 128]),
    back_stages=STAGES,
    spare_rows=st.integers(0, 300),
    stages=STAGES,
    num_ranks=st.integers(1, 8),
)
def test_any_counts(pool, counts, block_m, back_stages, spare_rows, stages, num_ranks):
    cases.skip_where_shapes_compile(pool)
    expert_offsets = [0, *itertools.accumulate(counts)]
    check_tiles(pool, expert_offsets, block_m, back_stages, spare_rows, stages, num_ranks)


@triton.jit
def store_begins(begins, num_rows, BACK_STAGES: tl.constexpr):
    stages = tl.arange(0, 32)
    begin = stages_kernels.return_begin(stages, tl.load(num_rows), BACK_STAGES)
    tl.store(begins + stages, begin, mask=stages <= BACK_STAGES)


def begins_on_rank(group, num_rows, back_stages):
    begins = torch.zeros(back_stages + 1, dtype=torch.int32, device=cases.device())
    store_begins[(1,)](begins, begins.new_full((1,), num_rows), BACK_STAGES=back_stages)
    return begins.tolist()


def test_stages_of_the_example(pool):
    assert pool.run(begins_on_rank, 16, 4, num_ranks=1) == [[0, 7, 12, 15, 16]]


@given(num_rows=st.integers(0, 100) | st.integers(0, 2**31 - 1), back_stages=STAGES)
def test_stages_part_all_rows(pool, num_rows, back_stages):
    cases.skip_where_shapes_compile(pool)
    [begins] = pool.run(begins_on_rank, num_rows, back_stages, num_ranks=1)
    assert begins == reference.return_begins(num_rows, back_stages)
    assert (begins[0], begins[-1]) == (0, num_rows)
    assert begins == sorted(begins)
