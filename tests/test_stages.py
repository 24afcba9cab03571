"""Tiles in the order of stages, against a plain list."""

from __future__ import annotations

import itertools

import cases
import torch
from hypothesis import given
from hypothesis import strategies as st


def tiles_on_rank(group, counts, rank, block_m, stages, mixed):
    """The tiles of each turn, there and back, by the kernel, as if this were `rank` of several."""
    from moe_engine.slots import SlotLayout, Slots
    from moe_engine.stages import staged_schedule
    from moe_engine.symm.single import SingleTensor

    num_ranks = len(counts)
    layout = SlotLayout(num_ranks, 1024)
    block = SingleTensor(layout.num_bytes, cases.device())
    block.peer_addresses = block.peer_addresses.expand(num_ranks).clone()
    slots = Slots(lambda *_: block, layout, rank, 1.0)
    counts = counts.to(cases.device())
    offsets = torch.nn.functional.pad(counts.sum(0).cumsum(0), (1, 0)).int()
    args = counts, offsets, int(counts.sum()), block_m, stages, mixed, slots
    schedule = staged_schedule(*args)
    assert not schedule.counters[0, : stages[0]].any()
    assert not schedule.counters[1:, : stages[1]].any()
    ways = []
    for way, num_stages in enumerate(stages):
        first = schedule.first_tile[way, : num_stages + 1].tolist()
        assert first[0] == 0
        tiles = schedule.tiles[way, : first[-1]].tolist()
        unpacked = [(tile >> 40, tile & 0x7FFFFFFF, tile >> 32 & 0xFF) for tile in tiles]
        ways.append([unpacked[a:b] for a, b in itertools.pairwise(first)])
    return ways


def check_tiles(pool, counts, rank, block_m, stages, mixed):
    from moe_engine import reference

    args = counts, rank, block_m, stages, mixed
    [ways] = pool.run(tiles_on_rank, *args, num_ranks=1)
    for way, num_stages in enumerate(stages):
        want = reference.staged_tiles(counts, rank, block_m, num_stages, way == 1, mixed)
        assert ways[way] == want
    return ways


def test_the_example(pool):
    counts = torch.tensor([[3, 1], [1, 2]], dtype=torch.int32)
    there, back = check_tiles(pool, counts, 0, 2, (2, 2), True)
    assert there == [[(0, 0, 2)], [(0, 2, 2), (1, 4, 2), (1, 6, 1)]]
    assert back == [[(0, 2, 2), (1, 4, 2), (1, 6, 1)], [(0, 0, 2)]]


@given(
    num_ranks=st.integers(1, 8),
    num_experts=st.integers(1, 5),
    most=st.sampled_from([0, 3, 40]),
    block_m=st.sampled_from([4, 16]),
    stages=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    mixed=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_counts(pool, num_ranks, num_experts, most, block_m, stages, mixed, seed):
    cases.skip_where_shapes_compile(pool)
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, most + 1, (num_ranks, num_experts), generator=generator).int()
    stages = tuple(min(count, num_ranks) for count in stages)
    check_tiles(pool, counts, seed % num_ranks, block_m, stages, mixed)
