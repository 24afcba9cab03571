"""Every shipped variant compiles for its GPU, without one: no spills, tensor cores, wide loads."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import pytest
import torch
from compile_helper import Compiled, compile_kernel

from moe_engine.config import GemmConfig
from moe_engine.grouped_gemm.kernels import _grouped_gemm_kernel, _tile_schedule_kernel
from moe_engine.lang import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

BF16, FP32 = torch.bfloat16, torch.float32
MANY, FEW = 4096, 16  # rows per expert
WIDE, ODD = 4096, 4097  # columns of the output; odd rows do not start at multiples of 16 bytes
TRITON_NAMES = {BF16: "bf16", FP32: "fp32"}
SHARED_BYTES = {80: 164 * 1024 - 1024, 90: 228 * 1024 - 1024, 100: 228 * 1024 - 1024}


def compile_gemm(
    dtype: torch.dtype, activation: str, gathered: bool, rows: int, columns: int, arch: int = 90
) -> Compiled:
    config = GemmConfig.choose(dtype, columns, rows, (arch // 10, arch % 10))
    name, parts = TRITON_NAMES[dtype], 2 if activation == "swiglu" else 1
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    built = compile_kernel(
        _grouped_gemm_kernel,
        {
            "a": f"*{name}" if gathered else f"tensordesc<{name}[{block_m}, {block_k}]>",
            **({"row_offset": "*i64"} if gathered else {}),
            "w": f"tensordesc<{name}[{parts}, {block_n // parts}, {block_k}]>",
            "out": f"*{name}",
            **dict.fromkeys(["tile_expert", "tile_row", "num_tiles"], "*i32"),
            "offsets": "*i64",
            **dict.fromkeys(["max_rows", "N", "K"], "i32"),
        },
        {
            **({} if gathered else {"row_offset": None}),
            "ACTIVATION": activation,
            "ALIGNED": columns == WIDE,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "BLOCK_K": block_k,
            "GROUP_M": config.group_m,
        },
        arch,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    print(f"{built.registers} registers, {built.shared_bytes} bytes shared, {config}")
    assert built.spill_bytes == 0
    assert built.shared_bytes <= SHARED_BYTES[arch]
    return built


@pytest.mark.parametrize("columns", [WIDE, ODD])
@pytest.mark.parametrize("rows", [MANY, FEW])
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("activation", ["none", "swiglu"])
def test_bf16_gemm_on_hopper(activation: str, gathered: bool, rows: int, columns: int) -> None:
    ptx = compile_gemm(BF16, activation, gathered, rows, columns).ptx
    assert "wgmma.mma_async" in ptx
    assert_wide_loads(ptx, gathered)
    assert ("st.global.v4" in ptx) == (columns == WIDE)


@pytest.mark.parametrize("columns", [WIDE, ODD])
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("activation", ["none", "swiglu"])
def test_fp32_gemm_on_hopper(activation: str, gathered: bool, columns: int) -> None:
    """IEEE products: no tensor cores."""
    ptx = compile_gemm(FP32, activation, gathered, MANY, columns).ptx
    assert "mma" not in ptx
    assert_wide_loads(ptx, gathered)


@pytest.mark.parametrize("rows", [MANY, FEW])
def test_bf16_gemm_on_ampere(rows: int) -> None:
    assert "mma.sync" in compile_gemm(BF16, "swiglu", True, rows, WIDE, arch=80).ptx


def test_bf16_gemm_on_blackwell() -> None:
    assert "tcgen05.mma" in compile_gemm(BF16, "swiglu", True, MANY, WIDE, arch=100).ptx


def test_only_block_m_depends_on_the_rows() -> None:
    """So a schedule made for few rows fits tiles chosen for many, and the other way round."""
    for dtype, columns, arch in product((BF16, FP32), (WIDE, ODD), ((8, 0), (9, 0), (10, 0))):
        many = GemmConfig.choose(dtype, columns, MANY, arch)
        few = GemmConfig.choose(dtype, columns, FEW, arch)
        assert replace(many, block_m=few.block_m) == few


@pytest.mark.parametrize("offsets", ["*i32", "*i64"])
def test_tile_schedule(offsets: str) -> None:
    built = compile_kernel(
        _tile_schedule_kernel,
        {
            "offsets": offsets,
            **dict.fromkeys(["tile_expert", "tile_row", "num_tiles"], "*i32"),
            **dict.fromkeys(["num_experts", "max_rows"], "i32"),
        },
        {"BLOCK_M": 128, "MAX_EXPERTS": 256, "STEP": 128},
    )
    assert built.spill_bytes == 0


def assert_wide_loads(ptx: str, gathered: bool) -> None:
    """Gathered rows come by asynchronous copies of 16 bytes, contiguous ones by TMA."""
    sizes = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", ptx)
    assert {int(size, 0) for size in sizes} == ({16} if gathered else set())
    tma_rank = {f"{rank}d" for rank in ((3,) if gathered else (2, 3))}
    assert set(re.findall(r"cp\.async\.bulk\.tensor\.(\dd)", ptx)) == tma_rank
