"""The kernels of ElasticBuffer alone, compiled for sm_90 without a GPU."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import triton
from launches import BF16, EXPERTS, FP8, HIDDEN, RANKS, REGION_BYTES, TOKENS, recorded, routing

from moe_engine.combine.launch import combine_programs
from moe_engine.combine.reduce_expanded_kernels import ExpertRows
from moe_engine.dispatch import Partition, Tokens, copy_ids
from moe_engine.engines import expanded
from moe_engine.engines.expanded import HowSent, Numbers, RowsWanted
from moe_engine.hardware import H200, stand_in
from moe_engine.tools.lone_rank import kernel_engine

NAMES = [
    *("copy_ids", "collect", "place_tokens", "expand_rows", "zero_rows"),
    *("return_rows", "final_sum"),
]
pytestmark = pytest.mark.skipif(
    not triton.__version__.startswith("3.6."), reason="registers are those of Triton 3.6"
)


@cache
def launched(dtype=BF16, num_scales=0, hidden=HIDDEN, rounds_once=False):
    """The launches of dispatches by token and by expert, and of a combine, by name."""
    engine = kernel_engine(RANKS, TOKENS, REGION_BYTES)
    x, numbers = torch.empty(TOKENS, hidden, dtype=dtype), Numbers(EXPERTS // RANKS, 128, 64, RANKS)
    scales = torch.empty(TOKENS, num_scales) if num_scales else None
    with recorded() as launches:
        tokens, stats = Tokens(x, *routing(), scales), torch.zeros(EXPERTS // RANKS).int()
        wanted = RowsWanted(True, True, num_scales > 0, True)
        how = HowSent(waits=False, copies_ids=True, num_sms=20)
        of = tokens, EXPERTS, stats, numbers
        expanded.dispatch(engine, *of, wanted._replace(expand=False), how)
        got = expanded.dispatch(engine, *of, wanted, how)
        copy_ids(got.topk_idx, torch.empty_like(got.topk_idx), engine.slots)
        assert got.rows.weights is not None
        rows = ExpertRows(got.rows.x.view(BF16)[:, : hidden // 2], got.rows.weights)
        if dtype == BF16:
            rows = ExpertRows(got.rows.x, got.rows.weights)
        expanded.combine(engine, rows, got.places, got.sent, (), rounds_once, 20)
    return {launch.name: launch for launch in launches}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fp8", [False, True])
def test_no_spills(name, fp8):
    built = launched(*((FP8, 56) if fp8 else ()))[name].compile()
    assert built.spill_bytes == 0
    assert built.shared_bytes <= 144 * 1024


def test_rows_are_stored_16_bytes_at_a_time():
    for name in ("expand_rows", "return_rows", "final_sum"):
        ptx = launched()[name].compile().ptx
        assert "st.global.v4.b32" in ptx
        assert "ld.global.v4.b32" in ptx


@pytest.mark.parametrize("name", ["return_rows", "final_sum"])
def test_rows_that_begin_at_8_bytes_are_not_read_by_16(name):
    """Rows by expert in bf16, whose sums in fp32 begin at multiples of 16 bytes."""
    ptx = launched(hidden=2052, rounds_once=True)[name].compile().ptx
    assert "ld.global.v4.b32" not in ptx


@pytest.mark.parametrize("num_sms", [1, 8, 20, 24, 64])
def test_programs_that_wait_for_others_fit_on_the_chip(num_sms):
    """Those that push hold an SM each, with others on it or not, and begin first."""
    with stand_in(H200):
        partition = Partition.by_expert(num_sms)
        assert 1 <= partition.push <= num_sms
        assert partition.push + partition.early // 2 <= H200.num_sms
        assert partition.fills_chip
        num_push, num_sum = combine_programs(num_sms, by_expert=True)
        assert num_push + num_sum < H200.num_sms
        # SMs that no program waits on, however few of those that may push do.
        assert H200.num_sms - (num_sum + num_push - num_push * 3 // 5) > 32
        for owned in (False, True):
            assert not Partition.choose(num_sms, owned).fills_chip
        assert sum(combine_programs(num_sms, by_expert=False)) == num_sms
