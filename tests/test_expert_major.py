"""Where the rows of experts are placed, against a plain loop."""

from __future__ import annotations

import itertools

import cases
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

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
    """Places, weights, rows and sums of ids [N, K]."""
    topk_idx = torch.tensor(ids, dtype=torch.int64).view(len(ids), num_topk)
    offsets, slots, dst_rows, overflow = placed(topk_idx.flatten().tolist(), *sizes)
    weights, x = torch.rand(topk_idx.shape), torch.randn(len(ids), 12)
    on_device = [one.to(cases.device()) for one in (topk_idx, weights, x)]
    places = place(*on_device[:2], *sizes)
    assert place(on_device[0], None, *sizes).row_weights is None
    of_rows = torch.zeros(len(slots))
    for row, slot in enumerate(slots):
        if slot >= 0:
            of_rows[row] = weights.flatten()[slot]
    found = [one.flatten().tolist() for one in places]
    assert found == [offsets, slots, dst_rows, [overflow], of_rows.tolist()]
    if not ids:
        return
    rows = take_rows(on_device[2], places.slots, num_topk)
    whole = torch.zeros(len(slots), 12)
    for row, slot in enumerate(slots):
        if slot >= 0:
            whole[row] = x[slot // num_topk]
    assert torch.equal(rows.cpu(), whole)
    end = offsets[-1]
    few = take_rows(on_device[2], places.slots, num_topk, places.offsets[-1:])
    assert torch.equal(few[:end].cpu(), whole[:end])
    sums, values = sum_rows(rows, places.dst_rows, places.row_weights)
    has_row = torch.tensor(dst_rows).view(len(ids), num_topk) >= 0
    torch.testing.assert_close(sums.cpu(), x * has_row.sum(1, keepdim=True))
    assert values is not None
    assert torch.equal(values.cpu(), torch.where(has_row, weights, 0))


@given(data=st.data())
def test_places(pool, data):
    cases.skip_where_shapes_compile(pool)
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
