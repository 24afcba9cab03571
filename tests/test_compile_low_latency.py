"""The low-latency kernels compiled for GPUs that need not be there: no spills, wide stores, and two
programs on an SM."""

from __future__ import annotations

import re
from functools import cache

import cases
import launches
import pytest
from compile_helper import Compiled

FORMATS = ["bf16", "fp8", "rounded", "ue8m0"]
PHASES = ["both", "send", "receive"]
FEW = ("fp8", "both"), ("bf16", "send"), ("ue8m0", "receive")


@cache
def recorded(row_format: str, phases: str, shrink: bool, arch: int, stats: bool):
    return launches.low_latency(arch, row_format, phases, shrink, stats)


def dispatch(
    row_format: str, phases: str, shrink: bool = False, arch: int = 90, stats: bool = False
) -> Compiled:
    made = recorded(row_format, phases, shrink, arch, stats)
    return made["low_latency_dispatch"].compile(arch)


def combine(phases: str, shrink: bool = False, arch: int = 90, stats: bool = False) -> Compiled:
    return recorded("bf16", phases, shrink, arch, stats)["low_latency_combine"].compile(arch)


def stores(ptx: str) -> list[str]:
    """The shapes of the stores to global memory."""
    return re.findall(r"st\.global\.(?:L1::\w+\.)?(v\d\.b\d+|b\d+)", ptx)


@pytest.mark.parametrize(("row_format", "phases"), cases.slow_unless(FEW, FORMATS, PHASES))
def test_dispatch(row_format, phases):
    built = dispatch(row_format, phases)
    assert not built.spills
    assert built.registers <= 128  # two programs of 256 threads on an SM
    wide = [store for store in stores(built.ptx) if store in ("v2.b32", "v4.b32")]
    assert len(wide) >= 3  # e4m3 goes out 8 bytes at a time, as much as a thread reads of bf16


@pytest.mark.parametrize("phases", PHASES)
def test_combine(phases):
    built = combine(phases)
    assert not built.spills
    assert built.registers <= 128
    assert stores(built.ptx).count("v4.b32") >= 4


@pytest.mark.parametrize("row_format", ["bf16", "ue8m0"])
def test_kernels_of_several_nodes(row_format):
    made = launches.internode_low_latency(row_format, hooked=True, stats=True)
    names = "pack_plan", "pack_rows", "sum_expert_rows"
    built = {one.name: one.compile() for one in made if one.name in names}
    assert set(built) == set(names)
    assert not any(one.spills for one in built.values())
    assert "v4.b32" in stores(built["pack_rows"].ptx) and "v4.b32" in stores(
        built["sum_expert_rows"].ptx
    )


@pytest.mark.slow
def test_masks_and_statistics_cost_no_spills():
    more = {"shrink": True, "stats": True}
    assert not dispatch("fp8", "both", **more).spills
    assert not combine("both", **more).spills


@pytest.mark.slow
def test_other_architectures():
    """bf16 from Ampere on; e4m3 where the GPU can cast to it."""
    assert not dispatch("bf16", "both", arch=80).spills
    assert not combine("both", arch=80).spills
    assert not dispatch("fp8", "both", arch=89).spills
    assert not dispatch("fp8", "both", arch=100).spills
    assert not combine("both", arch=100).spills
