"""Every communication kernel compiled for sm_90 without a GPU: no spills, wide stores, and the
publish and observe sequences in the PTX."""

from __future__ import annotations

import re
from functools import cache

import cases
import launches
import pytest
import triton
import triton.language as tl
from compile_helper import compile_kernel

from moe_engine.device.context import PHASE_ROWS
from moe_engine.device.lang import notify, wait

NAMES = [
    *("layout", "layout_sum", "send_plan", "exchange", "metadata", "push", "collect"),
    *("return_rows", "final_sum", "locate", "release", "take_rows", "sum_rows"),
    *("exchange_fused", "place_rows", "staged_schedule", "push_fused", "copy_rows"),
    *("send_return_metadata", "return_sums", "fused_sum"),
]
of_this_triton = pytest.mark.skipif(
    not triton.__version__.startswith("3.6."), reason="registers are those of Triton 3.6"
)


@cache
def recorded(arch=90):
    """The launches of both paths by name; of those of one name, the first."""
    normal = {launch.name: launch for launch in reversed(launches.normal(arch))}
    return normal | launches.layer(arch)


def build(name, arch=90):
    return recorded(arch)[name].compile(arch)


def test_no_launch_is_left_out():
    gemms = {"dispatch_gemm", "staged_gemm"}
    assert set(NAMES) | gemms == recorded().keys()


@of_this_triton
@pytest.mark.parametrize("name", NAMES)
def test_no_spills(name):
    built = build(name)
    assert built.spill_bytes == 0
    assert built.shared_bytes <= 144 * 1024


@pytest.mark.slow
@of_this_triton
def test_no_spills_in_other_variants():
    """fp8 with scales, of which a cached dispatch is one, and 8 ranks. An odd number of columns
    spills, as rows are then copied 2 bytes at a time."""
    for launch in launches.normal(dtype=launches.FP8, scales=56):
        assert launch.compile().spill_bytes == 0, launch.name
    assert launches.layer(num_ranks=8)["fused_sum"].compile().spill_bytes == 0


@of_this_triton
@pytest.mark.parametrize(
    ("name", "arch"),
    cases.slow_unless([("push", 100), ("final_sum", 80)], ("push", "final_sum"), (80, 100)),
)
def test_other_architectures(name, arch):
    assert build(name, arch).spill_bytes == 0


def test_rows_are_stored_16_bytes_at_a_time():
    for name in ("push", "collect", "return_rows", "push_fused", "copy_rows", "return_sums"):
        ptx = build(name).ptx
        assert "st.global.v4.b32" in ptx
        assert re.search(r"ld\.global\.v4\.b32|cp\.async\.cg\.shared\.global .*, 0x10", ptx)
    odd = next(launch for launch in launches.normal(hidden=1001) if launch.name == "push")
    assert "st.global.v4.b32" not in odd.compile().ptx


RELEASE = re.compile(r"(@%p\d+ )?atom\.global\.sys\.release\.exch\.b64")


PUBLISHERS = [
    *("exchange", "push", "return_rows", "release"),
    *("exchange_fused", "push_fused", "send_return_metadata", "return_sums", "fused_sum"),
]


@pytest.mark.parametrize("name", PUBLISHERS)
def test_publish(name):
    """One thread releases at system scope, and no store lies between it and a CTA barrier."""
    ptx = build(name).ptx
    releases = list(RELEASE.finditer(ptx))
    assert releases
    for release in releases:
        assert release[1]  # under a predicate: one thread
        before = ptx[: release.start()]
        assert "st.global" not in before[before.rindex("bar.sync") :]


OBSERVERS = [
    *("exchange", "push", "collect", "final_sum"),
    *("exchange_fused", "copy_rows", "return_sums", "fused_sum"),
]


@pytest.mark.parametrize("name", OBSERVERS)
def test_observe(name):
    """Acquire polls at system scope, a CTA barrier, then what is read or written behind them."""
    ptx = build(name).ptx
    last_poll = ptx.rindex("ld.acquire.sys.global.b64", 0, ptx.rindex("// token"))
    token = ptx.index("// token", last_poll)
    assert "bar.sync" in ptx[last_poll:token]
    guarded = r"(ld|st)\.global\.(v4\.)?b32|cp\.async"
    assert not re.search(guarded, ptx[last_poll : ptx.index("bar.sync", last_poll)])
    assert re.search(guarded, ptx[token:])


@triton.jit
def _tma_signals_kernel(context):
    lane = tl.arange(0, 1)
    notify(tl.load(context), lane, lane == 0, tl.load(context + 1), context, AFTER_TMA=True)
    wait(tl.load(context) + lane, lane == 0, 1, lane, context, PHASE_ROWS, BEFORE_TMA=True)


def test_signals_around_tma():
    """Stores by TMA are drained and fenced before the release, loads by TMA fenced behind the
    barrier that follows the acquire."""
    ptx = compile_kernel(_tma_signals_kernel, {"context": "*i64"}, {}).ptx
    drain = ptx.index("cp.async.bulk.wait_group 0; fence.proxy.async;")
    release = RELEASE.search(ptx, drain)
    assert "bar.sync" in ptx[drain : release.start()]
    fence = ptx.index("\tfence.proxy.async")
    assert "ld." not in ptx[ptx.rindex("bar.sync", 0, fence) : fence]
