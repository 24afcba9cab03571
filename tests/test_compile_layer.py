"""The kernels that communicate beside a GEMM, compiled for sm_90 without a GPU."""

from __future__ import annotations

import pytest
import triton
from compile_helper import compile_kernel

from moe_engine.combine import fused as combine_host
from moe_engine.combine import fused_kernels as combine_kernels
from moe_engine.combine import fused_sum_kernels
from moe_engine.device.lang import TRACING
from moe_engine.dispatch import exchange_kernels, fused, fused_kernels
from moe_engine.dispatch.stages_kernels import staged_schedule_kernel
from moe_engine.engines.fused_layer import leave_room_for_sums
from moe_engine.grouped_gemm.config import GemmConfig, GemmProblem, candidates
from moe_engine.hardware import leave_room
from moe_engine.routing_kernels import place_rows_kernel
from moe_engine.tools.trace_kernels import ping_kernel
from moe_engine.utils import round_up

of_this_triton = pytest.mark.skipif(
    not triton.__version__.startswith("3.6."), reason="registers are those of Triton 3.6"
)
PROBLEM = dict(num_rows=65536, num_experts=32, num_columns=768, depth=2048)
TYPES = {
    **dict.fromkeys(("x", "lane_place", "expert_begin", "remote_begin"), "*i32"),
    **dict.fromkeys(
        ("to_sum", "num_rows", "num_remote", "num_own", "lane_position", "remote_offsets"), "*i32"
    ),
    **dict.fromkeys(("earlier_counts", "send_head", "share_rows", "expert_offsets"), "*i32"),
    **dict.fromkeys(("num_tokens_per_expert", "num_tokens_per_rank", "rows"), "*i32"),
    **dict.fromkeys(("first_tile", "num_tiles", "num_rows"), "*i32"),
    **dict.fromkeys(("topk_idx", "pushed", "computed", "returned", "listed"), "*i64"),
    **dict.fromkeys(
        (
            "tiles",
            "context",
            "to_push",
            "num_to_push",
            "num_to_sum",
            "copied",
            "copies",
            "own_order",
            "expert_rows",
        ),
        "*i64",
    ),
    **{"counters": "*i64", "topk_weights": "*fp32", "y": "*bf16", "out": "*bf16"},
}
SHAPE = {"NUM_TOPK": 8, "RANKS": 4, "RANKS_PAD": 4, "PDL": True}


def compile_layer(kernel, constexprs, arch=90, num_warps=4, num_stages=3, more=None, **types):
    names = kernel.arg_names
    constexprs = {name: value for name, value in (SHAPE | constexprs).items() if name in names}
    constexprs["PDL"] = arch >= 90
    types = TYPES | types
    signature = {name: types.get(name, "i32") for name in names if name not in constexprs}
    options = {"num_warps": num_warps, "num_stages": num_stages, **(more or {})}
    return compile_kernel(kernel, signature, constexprs, arch, **options)


def configs(block_m: int, **changes: object) -> list[GemmConfig]:
    """The tiles of this height for bf16 on sm_90, as `engines/fused_layer.py` launches them."""
    import torch

    problem = GemmProblem(torch.bfloat16, **PROBLEM, **changes)  # type: ignore[arg-type]
    return [config for config in candidates(problem, block_m) if config.num_splits == 1]


def gemm(kernel, config: GemmConfig, parts: int, arch: int = 90):
    width = config.block_n // parts
    descriptors = {
        "a": f"tensordesc<bf16[1, 1, {config.block_m}, {config.block_k}]>",
        "w": f"tensordesc<bf16[{parts}, {width}, {config.block_k}]>",
        "out": f"tensordesc<bf16[1, 1, 1, {config.block_m}, {width // config.subtiles}]>",
    }
    options = config.launch_options()
    launch = {name: options.pop(name) for name in ("num_warps", "num_stages")}
    constexprs = {"STAGES": 8, **options}
    return compile_layer(kernel, constexprs, arch, more=leave_room(), **launch, **descriptors)


def push(arch: int = 90):
    sizes = {"LANES": fused.PUSH_ROWS, "BLOCK_VECS": fused.PUSH_VECS, "BATCH": fused.PUSH_BATCH}
    kernel = fused_kernels.push_fused_kernel
    return compile_layer(kernel, {**sizes, "ALIGNED": True}, arch, 1)


def copy(arch: int = 90):
    sizes = {"LANES": fused.PUSH_ROWS, "BLOCK_VECS": fused.PUSH_VECS}
    kernel = fused_kernels.copy_rows_kernel
    sizes |= {"ALIGNED": True, "BATCH": fused.COPY_BATCH}
    return compile_layer(kernel, sizes, arch, 1)


def returns(arch: int = 90, num_warps: int = combine_host.RETURN_WARPS, **changes: int):
    sizes = {"BLOCK_H": combine_host.RETURN_BYTES // 2}
    kernel = combine_kernels.return_sums_kernel
    constexprs = {"STAGES": 8, **sizes} | changes
    registers = combine_host.RETURN_REGISTERS
    return compile_layer(kernel, constexprs, arch, num_warps, more={"maxnreg": registers})


def sums(arch: int = 90, num_warps: int = combine_host.SUM_WARPS, **changes: int):
    sizes = {"STAGES": 8, "BLOCK_H": combine_host.SUM_BYTES // 2}
    more = {} if "RANKS" in changes else {"maxnreg": combine_host.SUM_REGISTERS}
    return compile_layer(
        fused_sum_kernels.fused_sum_kernel, sizes | changes, arch, num_warps, more=more
    )


@of_this_triton
@pytest.mark.parametrize("block_m", [128, 64, 32, 16])
def test_gemms_do_not_spill(block_m):
    kernels = fused_kernels.dispatch_gemm_kernel, combine_kernels.staged_gemm_kernel
    for kernel, parts in zip(kernels, (2, 1), strict=True):
        for config in configs(block_m, gated=parts == 2):
            built = gemm(kernel, config, parts)
            assert built.spill_bytes == 0, config
            assert "wgmma" in built.ptx or block_m < 64


@of_this_triton
def test_what_runs_beside_a_gemm_finds_room():
    """On an SM: 65,536 registers, 228 KiB of shared memory, 1 KiB of it for each program."""
    up = gemm(fused_kernels.dispatch_gemm_kernel, configs(128, gated=True)[0], 2)
    down = gemm(combine_kernels.staged_gemm_kernel, leave_room_for_sums(configs(128)[0]), 1)
    twice = [(returns(), combine_host.RETURN_WARPS)] * 2
    for multiplies, beside in (up, [(push(), 1), (copy(), 1)]), (down, twice):
        registers = 256 * round_up(multiplies.registers, 8)
        shared = multiplies.shared_bytes + 1024
        for built, num_warps in beside:
            assert built.spill_bytes == 0
            registers += num_warps * 32 * round_up(built.registers, 8)
            shared += built.shared_bytes + 1024
        assert registers <= 65536
        assert shared <= 228 * 1024
    assert sums().spill_bytes == 0


def test_kernels_record_where_they_are_told_to():
    """By one instruction to the compiler, so that GEMMs stay pipelined: products are in flight
    while the next rows are waited for."""
    up = gemm(fused_kernels.dispatch_gemm_kernel, configs(128, gated=True)[0], 2)
    down = gemm(combine_kernels.staged_gemm_kernel, configs(128)[0], 1)
    for built in (up, down, push(), returns(), sums()):
        assert ("%smid" in built.ptx) == TRACING
    for built in (up, down):
        assert "wgmma.wait_group.sync.aligned 1;" in built.ptx


@pytest.mark.parametrize("arch", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_all_compile(arch):
    compile_layer(
        exchange_kernels.exchange_fused_kernel,
        {"EXPERTS_PAD": 64, "ALL_EXPERTS_PAD": 256, "STAGES_PAD": 32},
        arch,
    )
    compile_layer(
        staged_schedule_kernel,
        {"BACK_STAGES": 8, "EXPERTS_PAD": 64, "COUNTERS_PAD": 64, "STEP": 128, "BLOCK_M": 128},
        arch,
    )
    sizes = {"TOPK_PAD": 8, "BLOCK": 32}
    compile_layer(place_rows_kernel, {**sizes, "STEP": 32}, arch, 8)
    compile_layer(fused_kernels.send_return_metadata_kernel, {**sizes, "BACK_STAGES": 8}, arch)
    compile_kernel(ping_kernel, {"times": "*i64", "context": "*i64"}, {"ROUNDS": 200}, arch)
    for kernel in (push, copy, returns, sums):
        kernel(arch)
    for num_topk in (1, 2, 3, 16):
        for kernel in (returns, sums):
            kernel(arch, NUM_TOPK=num_topk)


def test_stages_are_announced_after_their_stores():
    """Before programs are counted their TMA stores are drained and fenced, and all threads meet;
    the count releases."""
    ptx = gemm(combine_kernels.staged_gemm_kernel, configs(128)[0], 1).ptx
    last = 0
    for _ in range(ptx.count("cp.async.bulk.wait_group 0; fence.proxy.async; bar.sync 0;")):
        last = ptx.index("cp.async.bulk.wait_group 0; fence.proxy.async; bar.sync 0;", last + 1)
        release = ptx.index("atom.global.gpu.release.add.u64", last)
        assert "cp.async.bulk.tensor" not in ptx[last:release]
    assert last


def test_rows_are_read_after_their_flags():
    """In the pipelined loop each tile's counter is acquired, and fenced, before its loads."""
    ptx = gemm(fused_kernels.dispatch_gemm_kernel, configs(128, gated=True)[0], 2).ptx
    loop = ptx[ptx.index("wgmma.mma_async") - 6000 :]
    wait = loop.index("ld.acquire.gpu.global.b64 seen, [")
    assert wait < loop.index("fence.proxy.async", wait) < loop.index("cp.async.bulk.tensor", wait)
