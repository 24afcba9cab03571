"""The low-latency kernels compiled for GPUs that need not be there: no spills, wide stores, and two
programs on an SM."""

from __future__ import annotations

import re
from functools import cache

import pytest
from compile_helper import Compiled, compile_kernel

from moe_engine.combine.low_latency import REGISTERS
from moe_engine.combine.low_latency_kernels import low_latency_combine_kernel
from moe_engine.dispatch.low_latency_send_kernels import low_latency_dispatch_kernel

# What the launchers pass for H 7168, K 8, 256 experts on 4 ranks.
SHARED = {
    "NUM_TOPK": 8, "ALIGNED": True, "RANKS": 4, "EXPERTS": 64, "SHRINK": False, "PDL": True,
    "wait_stats": None,
}  # fmt: skip
FORMATS = ["bf16", "fp8", "rounded", "ue8m0"]
PHASES = ["both", "send", "receive"]
FEW = ("fp8", "both"), ("bf16", "both"), ("ue8m0", "send"), ("rounded", "receive")
INT32 = "recv_scales recv_count src_info returns recv_stats".split()
INT64 = "topk_idx layout_range call dispatched wait_stats context".split()


def types(kernel, constexprs, **others: str) -> dict[str, str]:
    """The type of each argument that is no constexpr."""
    known = dict.fromkeys(INT32, "*i32") | dict.fromkeys(INT64, "*i64")
    known |= {"topk_weights": "*fp32", **others}
    names = [name for name in kernel.arg_names if name not in constexprs]
    return {name: known.get(name, "i32") for name in names}


@cache
def dispatch(
    row_format: str, phases: str, shrink: bool = False, arch: int = 90, stats: bool = False
) -> Compiled:
    block = 4096 if row_format == "bf16" else 8192
    constexprs = SHARED | {
        "FORMAT": row_format,
        "PHASES": phases,
        "BLOCK": block,
        "SHRINK": shrink,
        "PDL": arch >= 90,
    }
    constexprs |= {"topk_weights": None, "recv_stats": None}
    if stats:
        del constexprs["wait_stats"], constexprs["recv_stats"]
    if row_format == "bf16":
        constexprs["recv_scales"] = None
    x = "*i32" if row_format == "bf16" else "*bf16"
    signature = types(low_latency_dispatch_kernel, constexprs, x=x, recv_x="*i32")
    return compile_kernel(low_latency_dispatch_kernel, signature, constexprs, arch, num_warps=8)


@cache
def combine(phases: str, shrink: bool = False, arch: int = 90, stats: bool = False) -> Compiled:
    constexprs = SHARED | {"PHASES": phases, "BLOCK": 8192, "SHRINK": shrink, "PDL": arch >= 90}
    if stats:
        del constexprs["wait_stats"]
    signature = types(low_latency_combine_kernel, constexprs, x="*bf16", out="*bf16")
    options = {} if arch >= 90 else {"maxnreg": REGISTERS}
    return compile_kernel(
        low_latency_combine_kernel, signature, constexprs, arch, num_warps=8, **options
    )


def stores(ptx: str) -> list[str]:
    """The shapes of the stores to global memory."""
    return re.findall(r"st\.global\.(?:L1::\w+\.)?(v\d\.b\d+|b\d+)", ptx)


@pytest.mark.parametrize(
    ("row_format", "phases"),
    [
        pytest.param(one, phases, marks=() if (one, phases) in FEW else pytest.mark.slow)
        for one in FORMATS
        for phases in PHASES
    ],
)
def test_dispatch(row_format, phases):
    built = dispatch(row_format, phases)
    assert built.spill_bytes == 0
    assert built.registers <= 128  # two programs of 256 threads on an SM
    wide = [store for store in stores(built.ptx) if store in ("v2.b32", "v4.b32")]
    assert len(wide) >= 3  # e4m3 goes out 8 bytes at a time, as much as a thread reads of bf16


@pytest.mark.parametrize("phases", PHASES)
def test_combine(phases):
    built = combine(phases)
    assert built.spill_bytes == 0
    assert built.registers <= 128
    assert stores(built.ptx).count("v4.b32") >= 4


def test_statistics_cost_no_spills():
    assert dispatch("fp8", "both", stats=True).spill_bytes == 0
    assert combine("both", stats=True).spill_bytes == 0


def test_masking_ranks_costs_no_spills():
    assert dispatch("fp8", "both", shrink=True).spill_bytes == 0
    assert combine("both", shrink=True).spill_bytes == 0


@pytest.mark.slow
def test_other_architectures():
    """bf16 from Ampere on; e4m3 where the GPU can cast to it."""
    assert dispatch("bf16", "both", arch=80).spill_bytes == 0
    assert combine("both", arch=80).spill_bytes == 0
    assert dispatch("fp8", "both", arch=89).spill_bytes == 0
    assert dispatch("fp8", "both", arch=100).spill_bytes == 0
    assert combine("both", arch=100).spill_bytes == 0
