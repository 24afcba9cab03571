"""A layer's kernels, which run concurrently with its GEMMs, compiled for sm_90 without a GPU."""

from __future__ import annotations

from functools import cache

import cases
import launches
import pytest
import torch
import triton
from compile_helper import compile_kernel

from moe_engine.device.lang import TRACING
from moe_engine.engines.fused_layer import leave_room_for_sums
from moe_engine.grouped_gemm.config import GemmConfig, GemmProblem, candidates
from moe_engine.tools.trace_kernels import ping_kernel
from moe_engine.utils import round_up

of_this_triton = pytest.mark.skipif(
    not triton.__version__.startswith("3.6."), reason="registers are those of Triton 3.6"
)
PROBLEM = dict(num_rows=65536, num_experts=32, num_columns=768, depth=2048)
CONCURRENT = "push_fused", "copy_rows", "return_sums"


@cache
def recorded(**changes):
    return launches.layer(**changes)


def configs(block_m: int, gated: bool = False) -> list[GemmConfig]:
    """The tiles of this height for bf16 on sm_90."""
    problem = GemmProblem(torch.bfloat16, **PROBLEM, gated=gated)  # type: ignore[arg-type]
    return [config for config in candidates(problem, block_m) if config.num_splits == 1]


def gemms(up: GemmConfig, down: GemmConfig):
    """Both GEMMs of a layer with such tiles, compiled."""
    made = launches.layer(tiles=(up, down))
    return made["dispatch_gemm"].compile(), made["staged_gemm"].compile()


@of_this_triton
@pytest.mark.parametrize("block_m", cases.slow_unless([(128,), (16,)], [128, 64, 32, 16]))
def test_gemms_do_not_spill(block_m):
    ups, downs = configs(block_m, gated=True), configs(block_m)
    for index in range(max(len(ups), len(downs))):
        pair = ups[index % len(ups)], downs[index % len(downs)]
        for built in gemms(*pair):
            assert built.spill_bytes == 0, pair
            assert "wgmma" in built.ptx or block_m < 64


@of_this_triton
def test_what_runs_concurrently_with_a_gemm_finds_room():
    """On an SM: 65,536 registers, 228 KiB of shared memory, 1 KiB of it for each program."""
    up, down = gemms(configs(128, gated=True)[0], leave_room_for_sums(configs(128)[0]))
    made = recorded()
    pushes = [made["push_fused"], made["copy_rows"]]
    for gemm, others in (up, pushes), (down, [made["return_sums"]] * 2):
        registers = 256 * round_up(gemm.registers, 8)
        shared = gemm.shared_bytes + 1024
        for launch in others:
            built = launch.compile()
            assert built.spill_bytes == 0
            registers += launch.options.num_warps * 32 * round_up(built.registers, 8)
            shared += built.shared_bytes + 1024
        assert registers <= 65536
        assert shared <= 228 * 1024
    assert made["fused_sum"].compile().spill_bytes == 0


def test_kernels_record_where_they_are_told_to():
    """By one instruction to the compiler, so that GEMMs stay pipelined: products are in flight
    while the next rows are waited for."""
    both = gemms(configs(128, gated=True)[0], configs(128)[0])
    others = [recorded()[name].compile() for name in (*CONCURRENT, "fused_sum")]
    for built in (*both, *others):
        assert ("%smid" in built.ptx) == TRACING
    for built in both:
        assert "wgmma.wait_group.sync.aligned 1;" in built.ptx


@pytest.mark.parametrize("arch", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_all_compile(arch):
    for launch in recorded(arch=arch).values():
        launch.compile(arch)
    compile_kernel(ping_kernel, {"times": "*i64", "context": "*i64"}, {"ROUNDS": 200}, arch)


@pytest.mark.parametrize("num_topk", cases.slow_unless([(3,), (16,)], [1, 2, 3, 16]))
def test_sums_compile_for_any_topk(num_topk):
    made = recorded(num_topk=num_topk)
    for name in ("return_sums", "fused_sum"):
        made[name].compile()


def test_stages_are_announced_after_their_stores():
    """Before programs are counted their TMA stores are drained and fenced, and all threads meet;
    the count releases."""
    _, down = gemms(configs(128, gated=True)[0], configs(128)[0])
    ptx, last = down.ptx, 0
    for _ in range(ptx.count("cp.async.bulk.wait_group 0; fence.proxy.async; bar.sync 0;")):
        last = ptx.index("cp.async.bulk.wait_group 0; fence.proxy.async; bar.sync 0;", last + 1)
        release = ptx.index("atom.global.gpu.release.add.u64", last)
        assert "cp.async.bulk.tensor" not in ptx[last:release]
    assert last


def test_rows_are_read_after_their_flags():
    """In the pipelined loop each tile's counter is acquired, and fenced, before its loads."""
    up, _ = gemms(configs(128, gated=True)[0], configs(128)[0])
    loop = up.ptx[up.ptx.index("wgmma.mma_async") - 6000 :]
    wait = loop.index("ld.acquire.gpu.global.b64 seen, [")
    assert wait < loop.index("fence.proxy.async", wait) < loop.index("cp.async.bulk.tensor", wait)
