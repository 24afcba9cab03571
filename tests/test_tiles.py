"""How rows are dealt to peers and programs, and how many of them make a stage."""

from __future__ import annotations

import itertools

import cases
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st
from layer_reference import stage_begins

from moe_engine.device import lang, tiles
from moe_engine.device.context import ContextField


@triton.jit
def store_rows(out, num_peers, BATCH: tl.constexpr):
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    peers, rows = tiles.deal(program + tl.arange(0, BATCH) * num_programs, num_peers)
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
def store_stages(begins, stages, sizes, stage_count, COUNT: tl.constexpr, ROWS: tl.constexpr):
    unit = tiles.stage_unit(tl.load(sizes), stage_count)
    stage = tl.arange(0, COUNT)
    begin = tiles.stage_begin(stage, unit, stage_count)
    tl.store(begins + stage, tl.minimum(begin, tl.load(sizes)))
    row = tl.arange(0, ROWS)
    tl.store(stages + row, tiles.stage_of_row(row, unit, stage_count))


def find_stages(group, num_rows, stage_count):
    """(begin of each stage, then the number of rows; stage of each row)"""
    new = torch.empty(64 + 256, dtype=torch.int32, device=cases.device())
    sizes = torch.full((1,), num_rows, dtype=torch.int32, device=cases.device())
    store_stages[(1,)](new, new[64:], sizes, stage_count, COUNT=64, ROWS=256)
    return new[: stage_count + 1].tolist(), new[64:][:num_rows].tolist()


def test_stages_of_the_example(pool):
    [(begins, stages)] = pool.run(find_stages, 32, 4, num_ranks=1)
    assert begins == stage_begins(32, 4) == [0, 5, 12, 21, 32]
    assert stages == [0] * 5 + [1] * 7 + [2] * 9 + [3] * 11


@given(num_rows=st.integers(0, 256), stage_count=st.integers(1, 16))
def test_rows_are_in_the_stage_that_holds_them(pool, num_rows, stage_count):
    cases.skip_where_shapes_compile(pool)
    [(begins, stages)] = pool.run(find_stages, num_rows, stage_count, num_ranks=1)
    assert begins == stage_begins(num_rows, stage_count)
    lengths = [end - begin for begin, end in itertools.pairwise(begins)]
    assert stages == [stage for stage, length in enumerate(lengths) for _ in range(length)]


@triton.jit
def wait_for_tiles(counters, wanted, waited_ns, context, COUNT: tl.constexpr):
    waited_for = tl.full((), -1, tl.int32)
    for tile in range(COUNT):
        begin, deadline = tl.cast(lang.now_ns(), tl.int64), tiles.deadline_from_now(context)
        counter = tl.load(wanted + tile)
        zero, waited_for = tiles.wait_tile(
            counters, counter, waited_for, 3, deadline, context, False
        )
        tl.store(waited_ns + tile + zero, tl.cast(lang.now_ns(), tl.int64) - begin)


TIMEOUT_NS = 300_000_000


def wait_times(group, counters, wanted):
    """The ns that each tile's wait takes, for 3 programs to arrive at its counter."""
    device = cases.device()
    fields = torch.zeros(ContextField.PEERS, dtype=torch.int64)
    fields[ContextField.TIMEOUT_NS] = TIMEOUT_NS
    counters = torch.tensor(counters, dtype=torch.int64, device=device)
    waited = torch.zeros(len(wanted), dtype=torch.int64, device=device)
    given = counters, torch.tensor(wanted, dtype=torch.int32, device=device), waited
    wait_for_tiles[(1,)](*given, fields.to(device), COUNT=len(wanted))
    return waited.tolist()


def test_a_tile_waits_for_its_stage_unless_the_last_one_did(pool):
    """Counter 1 never comes, so that a wait for it lasts until its deadline. The second tile that
    needs it does not ask again, but one does after another stage."""
    wanted = [0, 0, 1, 1, 0, 1]
    runs = [pool.run(wait_times, [3, 2], wanted, num_ranks=1)[0] for _ in range(3)]
    waited = map(min, zip(*runs, strict=True))  # of a machine that stands still now and then
    assert [ns >= TIMEOUT_NS for ns in waited] == [False, False, True, False, False, True]
