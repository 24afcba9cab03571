"""Where the rows of experts are placed, against a plain loop."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from moe_engine.expert_major import place, sum_rows, take_rows

Expected = tuple[list[int], list[int], list[int], int]


def placed(flat: list[int], num_local: int, alignment: int, num_rows: int) -> Expected:
    """(offsets, slots, dst_rows, overflow) of top-k slots with these experts."""
    offsets, slots, dst_rows = [0], [-1] * num_rows, [-1] * len(flat)
    for expert in range(num_local):
        own = [slot for slot, one in enumerate(flat) if one == expert]
        for row, slot in enumerate(own, offsets[-1]):
            if row < num_rows:
                slots[row], dst_rows[slot] = slot, row
        offsets.append(offsets[-1] + -(-len(own) // alignment) * alignment)
    return [min(one, num_rows) for one in offsets], slots, dst_rows, max(0, offsets[-1] - num_rows)


def check_places(group: dist.ProcessGroup, ids: list[list[int]], num_topk: int, *sizes: int):
    """Places, weights and rows of ids [N, K]."""
    topk_idx = torch.tensor(ids, dtype=torch.int64).view(len(ids), num_topk)
    weights = torch.rand(topk_idx.shape)
    places = place(topk_idx, weights, *sizes)
    offsets, slots, dst_rows, overflow = placed(topk_idx.flatten().tolist(), *sizes)
    assert_array_equal(places.offsets, offsets)
    assert_array_equal(places.slots, slots)
    assert_array_equal(places.dst_rows.flatten(), dst_rows)
    assert places.overflow.item() == overflow
    taken, is_row = torch.tensor(slots, dtype=torch.int64), torch.tensor(slots) >= 0
    expected = torch.where(is_row, weights.flatten()[taken.clamp(min=0)], 0) if ids else taken
    if is_row.any() or not ids:
        assert_array_equal(places.row_weights, expected if ids else torch.zeros(len(slots)))
    assert place(topk_idx, None, *sizes).row_weights is None
    if not ids:
        return
    x = torch.randn(len(ids), 12)
    rows = take_rows(x, places.slots, num_topk)
    whole = torch.where(is_row[:, None], x[taken.clamp(min=0) // num_topk], 0)
    assert_array_equal(rows, whole)
    end = places.offsets[-1:]
    few = take_rows(x, places.slots, num_topk, end)
    assert_array_equal(few[: int(end)], whole[: int(end)])
    sums, values = sum_rows(rows, places.dst_rows, places.row_weights)
    is_placed = (places.dst_rows >= 0).sum(1, keepdim=True)
    torch.testing.assert_close(sums, x * is_placed)
    assert_array_equal(values, torch.where(places.dst_rows >= 0, weights, 0))
    assert sum_rows(rows, places.dst_rows)[1] is None


@given(data=st.data())
def test_places(pool, data):
    num_local, num_topk = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 4))
    alignment, expert = data.draw(st.sampled_from([1, 4, 16])), st.integers(-1, num_local - 1)
    ids = data.draw(st.lists(st.lists(expert, min_size=num_topk, max_size=num_topk), max_size=20))
    num_rows = alignment * data.draw(st.integers(0, 20))
    pool.run(check_places, ids, num_topk, num_local, alignment, num_rows, num_ranks=1)


def test_many_blocks(pool):
    """More top-k slots than a program places, and more blocks than are added up at a time."""
    ids = torch.randint(-1, 5, (1500, 3)).tolist()
    for num_rows in (4500, 2000):
        pool.run(check_places, ids, 3, 5, 1, num_rows, num_ranks=1)


def test_the_documented_example(pool):
    ids, sizes = [[0, -1], [1, 0], [-1, -1], [0, -1]], (2, 2, 6)
    expected = [0, 4, 6], [0, 3, 6, -1, 2, -1], [0, -1, 4, 1, -1, -1, 2, -1], 0
    assert placed([*itertools.chain(*ids)], *sizes) == expected
    pool.run(check_places, ids, 2, *sizes, num_ranks=1)
