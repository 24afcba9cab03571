"""How rows are dealt to peers and programs, and how many of them make a stage."""

from __future__ import annotations

import cases
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from moe_engine import tiles


@triton.jit
def store_rows(out, num_peers, BATCH: tl.constexpr):
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    peers, rows = tiles.deal_rows(program, num_programs, num_peers, BATCH)
    at = out + (program * BATCH + tl.arange(0, BATCH)) * 2
    tl.store(at, peers)
    tl.store(at + 1, rows)


def deal(group, num_programs, num_peers, batch):
    """[[(peer, row), ...] of each program]"""
    out = torch.full((num_programs, batch, 2), -1, dtype=torch.int32, device=cases.device())
    store_rows[(num_programs,)](out, num_peers, BATCH=batch)
    return [[tuple(pair) for pair in pairs] for pairs in out.tolist()]


def test_rows_of_the_example(pool):
    [[pairs]] = pool.run(deal, 1, 3, 8, num_ranks=1)
    assert pairs[:7] == [(0, 0), (1, 0), (2, 0), (1, 1), (2, 1), (0, 1), (2, 2)]


@given(
    num_programs=st.integers(1, 20),
    num_peers=st.integers(1, 9),
    batch=st.sampled_from([1, 4, 32]),
)
def test_programs_take_each_row_once_in_even_rounds(pool, num_programs, num_peers, batch):
    cases.skip_where_shapes_compile(pool)
    [of_program] = pool.run(deal, num_programs, num_peers, batch, num_ranks=1)
    in_order = [pair for turn in zip(*of_program, strict=True) for pair in turn]
    for first in range(0, len(in_order), num_peers):
        peers, rows = zip(*in_order[first : first + num_peers], strict=True)
        assert set(rows) == {first // num_peers}
        assert len(set(peers)) == len(peers)
        assert set(peers) <= set(range(num_peers))


@triton.jit
def store_stage_rows(out, num_rows, stage_count):
    tl.store(out, tiles.rows_per_stage(tl.load(num_rows), stage_count))


def stage_rows(group, num_rows, stage_count):
    out = torch.zeros(1, dtype=torch.int32, device=cases.device())
    store_stage_rows[(1,)](out, torch.full_like(out, num_rows), stage_count)
    return int(out)


def test_stages_of_the_example(pool):
    [rows] = pool.run(stage_rows, 10, 4, num_ranks=1)
    assert [min(rows, 10 - begin) for begin in range(0, 10, rows)] == [3, 3, 3, 1]


@given(num_rows=st.integers(0, 70) | st.integers(0, 2**30), stage_count=st.integers(1, 16))
def test_stages_hold_all_rows_and_no_row_too_many(pool, num_rows, stage_count):
    cases.skip_where_shapes_compile(pool)
    [rows] = pool.run(stage_rows, num_rows, stage_count, num_ranks=1)
    assert rows >= 1
    assert rows * stage_count >= num_rows
    assert rows == 1 or (rows - 1) * stage_count < num_rows
