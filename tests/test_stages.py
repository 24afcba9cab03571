"""Tiles of expert rows and the stages of their return, against a plain list."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import cases
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from layer_reference import return_begins, staged_tiles

from moe_engine import LayerConfig
from moe_engine.dispatch import stages_kernels

STAGES = st.integers(1, 16)


def tiles_on_rank(group, num_own, num_remote, spare_rows, block_m, config, num_ranks):
    """(tiles, counters that say that they have arrived, number of own ones, first tile of each
    stage) by the kernel."""
    from moe_engine.dispatch import staged_schedule
    from moe_engine.launch import launch

    def offsets(counts):
        sums = [0, *itertools.accumulate(counts)]
        return torch.tensor(sums, dtype=torch.int32, device=cases.device())

    def launch_any(*args, after, **options):
        launch(*args, **options)

    rows = offsets([own + remote for own, remote in zip(num_own, num_remote, strict=True)])
    slots = SimpleNamespace(num_ranks=num_ranks, context=SimpleNamespace(launch=launch_any))
    max_rows = int(rows[-1]) + spare_rows
    with cases.filled_memory():
        schedule, counters = staged_schedule(
            rows, offsets(num_remote), max_rows, block_m, config, slots
        )
    stages, returns = config.num_stages, config.num_return_stages
    lengths = {"pushed": stages, "copied": 2 * stages, "computed": returns + 1}
    lengths |= {"returned": returns, "num_to_sum": returns, "listed": num_ranks * returns}
    lengths["claimed"] = 2
    for name, length in lengths.items():
        assert getattr(counters, name).tolist() == [0] * length
    first = schedule.first_tile.tolist()
    tiles = schedule.tiles[: first[-1]].tolist()
    parts = [(tile >> 40 & 0xFFFF, tile & 0x7FFFFFFF, tile >> 32 & 0xFF) for tile in tiles]
    arrivals = [tile >> 56 for tile in tiles]
    last = {expert: at for (expert, *_), at in sorted(zip(parts, arrivals, strict=True))}
    assert schedule.last_counter.tolist() == [last.get(one, 0) for one in range(len(num_own))]
    return parts, arrivals, int(schedule.num_own), first


def check_tiles(pool, num_own, num_remote, block_m, config, spare_rows=0, num_ranks=1):
    [found] = pool.run(
        tiles_on_rank, num_own, num_remote, spare_rows, block_m, config, num_ranks, num_ranks=1
    )
    stages = config.num_stages, config.num_return_stages
    assert found == staged_tiles(num_own, num_remote, block_m, *stages, config.own_first)
    return found


def test_the_example(pool):
    tiles, arrivals, num_own, first = check_tiles(
        pool, [2, 1], [2, 3], 2, LayerConfig(2, 2, num_own_stages=2)
    )
    assert tiles == [(0, 0, 2), (0, 2, 2), (1, 4, 2), (1, 6, 2)]
    assert arrivals == [0, 2, 2, 3]
    assert (num_own, first) == (1, [0, 3, 3, 4])


COUNTS = st.sampled_from([0, 1, 7, 40, 700])


@given(
    counts=st.lists(st.tuples(COUNTS, COUNTS), min_size=1, max_size=9),
    block_m=st.sampled_from([4, 16, 128]),
    return_stages=STAGES,
    spare_rows=st.integers(0, 300),
    stages=STAGES,
    num_own=st.integers(0, 16),
    num_ranks=st.integers(1, 8),
)
def test_any_counts(pool, counts, block_m, return_stages, spare_rows, stages, num_own, num_ranks):
    cases.skip_where_shapes_compile(pool)
    own, remote = (list(part) for part in zip(*counts, strict=True))
    config = LayerConfig(stages, return_stages, num_own_stages=num_own)
    check_tiles(pool, own, remote, block_m, config, spare_rows, num_ranks)


@triton.jit
def store_begins(begins, num_rows, RETURN_STAGES: tl.constexpr):
    stages = tl.arange(0, 32)
    begin = stages_kernels.return_begin(stages, tl.load(num_rows), RETURN_STAGES)
    tl.store(begins + stages, begin, mask=stages <= RETURN_STAGES)


def begins_on_rank(group, num_rows, return_stages):
    begins = torch.zeros(return_stages + 1, dtype=torch.int32, device=cases.device())
    store_begins[(1,)](begins, begins.new_full((1,), num_rows), RETURN_STAGES=return_stages)
    return begins.tolist()


def test_stages_of_the_example(pool):
    assert pool.run(begins_on_rank, 16, 4, num_ranks=1) == [[0, 7, 12, 15, 16]]


@given(num_rows=st.integers(0, 100) | st.integers(0, 2**31 - 1), return_stages=STAGES)
def test_stages_part_all_rows(pool, num_rows, return_stages):
    cases.skip_where_shapes_compile(pool)
    [begins] = pool.run(begins_on_rank, num_rows, return_stages, num_ranks=1)
    assert begins == return_begins(num_rows, return_stages)
    assert (begins[0], begins[-1]) == (0, num_rows)
    assert begins == sorted(begins)
