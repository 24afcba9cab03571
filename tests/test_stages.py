"""Tiles of expert rows and the stages of the way back, against a plain list."""

from __future__ import annotations

import itertools

import cases
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from moe_engine import reference
from moe_engine.dispatch import stages_kernels

STAGES = st.integers(1, 16)


def tiles_on_rank(
    group, num_own, num_remote, spare_rows, block_m, stages, back_stages, own_apart, num_ranks
):
    """(tiles, stages in which they arrive, number of own ones, first tile of each stage) by the
    kernel."""
    from moe_engine.dispatch.stages import staged_schedule
    from moe_engine.routing import Places

    def offsets(counts):
        sums = [0, *itertools.accumulate(counts)]
        return torch.tensor(sums, dtype=torch.int32, device=cases.device())

    rows = offsets([own + remote for own, remote in zip(num_own, num_remote, strict=True)])
    remote = offsets(num_remote)
    places = Places(rows, remote, remote, remote, remote, remote)
    max_rows = int(rows[-1]) + spare_rows
    with cases.filled_memory():
        schedule = staged_schedule(
            places, max_rows, block_m, stages, back_stages, own_apart, num_ranks
        )
    lengths = {"pushed": stages, "copied": 2 * stages, "computed": back_stages + 1}
    lengths |= {"returned": back_stages, "num_to_sum": back_stages}
    for name, length in (lengths | {"listed": num_ranks * back_stages}).items():
        assert getattr(schedule, name).tolist() == [0] * length
    first = schedule.first_tile.tolist()
    tiles = schedule.tiles[: first[-1]].tolist()
    parts = [(tile >> 40 & 0xFFFF, tile & 0x7FFFFFFF, tile >> 32 & 0xFF) for tile in tiles]
    return parts, [tile >> 56 for tile in tiles], int(schedule.num_own), first


def check_tiles(
    pool, num_own, num_remote, block_m, stages, back_stages, own_apart, spare_rows=0, num_ranks=1
):
    sizes = block_m, stages, back_stages, own_apart
    [found] = pool.run(
        tiles_on_rank, num_own, num_remote, spare_rows, *sizes, num_ranks, num_ranks=1
    )
    assert found == reference.staged_tiles(num_own, num_remote, *sizes)
    return found


def test_the_example(pool):
    tiles, arrivals, num_own, first = check_tiles(pool, [2, 1], [2, 3], 2, 2, 2, True)
    assert tiles == [(0, 0, 2), (0, 2, 2), (1, 4, 2), (1, 6, 2)]
    assert arrivals == [0, 2, 2, 3]
    assert (num_own, first) == (1, [0, 3, 3, 4])


COUNTS = st.sampled_from([0, 1, 7, 40, 700])


@given(
    counts=st.lists(st.tuples(COUNTS, COUNTS), min_size=1, max_size=9),
    block_m=st.sampled_from([4, 16, 128]),
    back_stages=STAGES,
    spare_rows=st.integers(0, 300),
    stages=STAGES,
    own_apart=st.booleans(),
    num_ranks=st.integers(1, 8),
)
def test_any_counts(pool, counts, block_m, back_stages, spare_rows, stages, own_apart, num_ranks):
    cases.skip_where_shapes_compile(pool)
    num_own, num_remote = (list(part) for part in zip(*counts, strict=True))
    sizes = block_m, stages, back_stages, own_apart
    check_tiles(pool, num_own, num_remote, *sizes, spare_rows, num_ranks)


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
