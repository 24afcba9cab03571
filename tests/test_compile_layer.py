"""The kernels that communicate beside a GEMM, compiled for sm_90 without a GPU."""

from __future__ import annotations

import pytest
import triton
from compile_helper import compile_kernel

from moe_engine.combine.layer_kernels import staged_gemm_kernel
from moe_engine.config import GemmConfig, GemmProblem, candidates
from moe_engine.dispatch.fused import push_words
from moe_engine.dispatch.fused_kernels import dispatch_gemm_kernel
from moe_engine.words import COPY_ROWS

of_this_triton = pytest.mark.skipif(
    not triton.__version__.startswith("3.6."), reason="registers are those of Triton 3.6"
)
PROBLEM = dict(num_rows=65536, num_experts=32, num_columns=768, depth=2048)


def configs(block_m: int, **changes: object) -> list[GemmConfig]:
    """The tiles of this height for bf16 on sm_90, as `experts.py` launches them."""
    import torch

    problem = GemmProblem(torch.bfloat16, **PROBLEM, **changes)  # type: ignore[arg-type]
    return [config for config in candidates(problem, block_m) if config.num_splits == 1]


def dispatch_gemm(config: GemmConfig, arch: int = 90):
    block_n = config.block_n // 2
    signature = {
        **dict.fromkeys(("num_tokens_per_rank", "send_token_idx", "first_tile", "x"), "*i32"),
        **dict.fromkeys(("row_offset", "tiles", "pushed", "context"), "*i64"),
        "w": f"tensordesc<bf16[2, {block_n}, {config.block_k}]>",
        "out": f"tensordesc<bf16[1, 1, 1, {config.block_m}, {block_n // config.subtiles}]>",
    }
    constexprs = {
        **{"RANKS_PAD": 4, "STAGES_PAD": 4, "CHUNK_ROWS": 8, "SPAN": 4, "LANES": COPY_ROWS},
        **{"BLOCK_WORDS": push_words(config), "OVERLAP": arch >= 90},
    }
    return compile_staged(dispatch_gemm_kernel, signature, constexprs, config, arch)


def staged_gemm(config: GemmConfig, arch: int = 90):
    width = config.block_n // config.subtiles
    signature = {
        **{"first_tile": "*i32", "tiles": "*i64", "computed": "*i64"},
        "a": f"tensordesc<bf16[1, 1, {config.block_m}, {config.block_k}]>",
        "w": f"tensordesc<bf16[1, {config.block_n}, {config.block_k}]>",
        "out": f"tensordesc<bf16[1, 1, 1, {config.block_m}, {width}]>",
    }
    constexprs = {"STAGES_PAD": 8, "OVERLAP": arch >= 90}
    return compile_staged(staged_gemm_kernel, signature, constexprs, config, arch)


def compile_staged(kernel, signature, constexprs, config, arch):
    options = config.launch_options()
    launch = {name: options.pop(name) for name in ("num_warps", "num_stages")}
    constexprs = {**constexprs, **options}
    types = {arg: signature.get(arg, "i32") for arg in kernel.arg_names if arg not in constexprs}
    return compile_kernel(kernel, types, constexprs, arch, **launch)


@of_this_triton
@pytest.mark.parametrize("block_m", [128, 64, 32, 16])
def test_no_spills(block_m):
    config = configs(block_m, gated=True, gathered=True)[0]  # as `dispatch_gemm_config` takes them
    built = dispatch_gemm(config)
    assert built.spill_bytes == 0, config
    assert "wgmma" in built.ptx or block_m < 64
    for config in configs(block_m):
        built = staged_gemm(config)
        assert built.spill_bytes == 0, config
        assert "wgmma" in built.ptx or block_m < 64


def test_stages_are_announced_after_their_stores():
    """Before programs are counted their TMA stores are drained and fenced, and all threads meet;
    the count releases."""
    ptx = staged_gemm(configs(128)[0]).ptx
    last = 0
    for _ in range(ptx.count("cp.async.bulk.wait_group 0; fence.proxy.async; bar.sync 0;")):
        last = ptx.index("cp.async.bulk.wait_group 0; fence.proxy.async; bar.sync 0;", last + 1)
        release = ptx.index("atom.global.gpu.release.add.u64", last)
        assert "cp.async.bulk.tensor" not in ptx[last:release]
    assert last
