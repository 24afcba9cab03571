"""Every shipped variant compiles for its GPU, without one: no spills, tensor cores, wide loads."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from compile_helper import Compiled, compile_kernel

from moe_engine.device.lang import INTERPRETED
from moe_engine.grouped_gemm.backward_kernels import (
    _activation_dgrad_kernel,
    _activation_gradient_kernel,
    _bias_gradient_kernel,
    _clear_rest_kernel,
    _gathered_sum_kernel,
    _wgrad_kernel,
)
from moe_engine.grouped_gemm.config import GemmConfig, GemmProblem, candidates
from moe_engine.grouped_gemm.kernels import (
    _grouped_gemm_kernel,
    _split_sum_kernel,
)
from moe_engine.grouped_gemm.schedule_kernels import _tile_schedule_kernel

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
TRITON_NAMES = {BF16: "bf16", FP32: "fp32", FP8: "fp8e4nv"}
SHARED_BYTES = {80: 164 * 1024 - 1024, 90: 228 * 1024 - 1024, 100: 228 * 1024 - 1024}
SCHEDULE = {"tiles": "*i64", "num_tiles": "*i32"}


def problem(dtype: torch.dtype, arch: int, **changes: Any) -> GemmProblem:
    fields = dict(num_rows=4096, num_experts=2, num_columns=4096, depth=1024)
    return GemmProblem(dtype, **fields | changes, capability=(arch // 10, arch % 10))


def build(
    kernel: Any,
    arguments: dict[str, str | None],
    constants: dict[str, Any],
    config: GemmConfig,
    arch: int = 90,
) -> Compiled:
    """Compile for this tile shape: no spills, and all its programs fit an SM."""
    built = compile_kernel(
        kernel,
        {name: kind for name, kind in arguments.items() if kind},
        {name: None for name, kind in arguments.items() if not kind} | constants,
        arch,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    print(f"{built.registers} registers, {built.shared_bytes} bytes shared, {config}")
    assert built.spill_bytes == 0
    programs = config.programs_per_sm if arch >= 90 else 1
    assert (built.shared_bytes + 1024) * programs <= SHARED_BYTES[arch] + 1024
    assert built.registers * config.num_warps * 32 * programs <= 65536
    return built


def constants(config: GemmConfig) -> dict[str, int]:
    """Those of the launch options that kernels take as arguments."""
    return {name: size for name, size in config.launch_options().items() if name.isupper()}


def stored(name: str, config: GemmConfig, width: int) -> str:
    return f"tensordesc<{name}[1, 1, 1, {config.block_m}, {width}]>"


def compile_gemm(
    config: GemmConfig,
    dtype: torch.dtype = BF16,
    activation: str = "none",
    gathered: bool = False,
    full: bool = False,
    transposed: bool = False,
    arch: int = 90,
) -> Compiled:
    """`full`: with bias, row weights and kept pre-activations."""
    name, out = TRITON_NAMES[dtype], TRITON_NAMES[BF16 if dtype == FP8 else dtype]
    parts = 2 if activation in ("swiglu", "geglu") else 1
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    to = stored(out, config, block_n // parts // config.subtiles)
    scale = "*fp32" if dtype == FP8 else None
    in_blocks = [1, block_k, block_n] if transposed else [parts, block_n // parts, block_k]
    return build(
        _grouped_gemm_kernel,
        {
            "a": f"*{name}" if gathered else f"tensordesc<{name}[1, 1, {block_m}, {block_k}]>",
            "row_offset": "*i64" if gathered else None,
            "a_scale": scale,
            "w": f"tensordesc<{name}{in_blocks}>",
            "w_scale": scale,
            "out": to,
            "pre": to if full else None,
            "bias": f"*{out}" if full else None,
            "row_weight": "*fp32" if full else None,
            **SCHEDULE,
            **dict.fromkeys(["N", "K"], "i32"),
        },
        {
            "SPLITS": config.num_splits,
            "ACTIVATION": activation,
            "TRANSPOSED": transposed,
            "PDL": arch >= 90,
            **constants(config),
        },
        config,
        arch,
    )


def shapes(dtype: torch.dtype = BF16, arch: int = 90, **changes: Any) -> list[GemmConfig]:
    """Every tile shape that may be chosen, but for the number of splits."""
    return [c for c in candidates(problem(dtype, arch, **changes)) if c.num_splits == 1]


CASES = [
    (config, activation, gathered, False)
    for activation, gathered in product(("none", "swiglu"), (False, True))
    for config in shapes(gathered=gathered)
]
CASES += [
    (config, activation, gathered, True)
    for activation, gathered in product(("swiglu", "geglu", "gelu"), (False, True))
    for config in shapes(gathered=gathered)
    if config.block_m >= 64
]


@pytest.mark.parametrize("config, activation, gathered, full", CASES, ids=str)
def test_bf16_gemm_on_hopper(
    config: GemmConfig, activation: str, gathered: bool, full: bool
) -> None:
    ptx = compile_gemm(config, BF16, activation, gathered, full).ptx
    assert ("wgmma.mma_async" if config.block_m >= 64 else "mma.sync") in ptx
    assert "cp.async.bulk.tensor.5d.global.shared" in ptx, "results leave by TMA"
    assert_wide_loads(ptx, gathered)


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("activation", ["none", "swiglu"])
def test_fp8_gemm_on_hopper(activation: str, gathered: bool) -> None:
    high = GemmConfig.choose(problem(FP8, 90, gated=activation == "swiglu"), block_m=128)
    for config in (*shapes(FP8), high):
        ptx = compile_gemm(config, FP8, activation, gathered).ptx
        assert "e4m3" in ptx if config.block_m >= 64 else "mma.sync" in ptx


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("activation", ["none", "swiglu"])
def test_fp32_gemm_on_hopper(activation: str, gathered: bool) -> None:
    """IEEE products: no tensor cores."""
    for config in shapes(FP32):
        ptx = compile_gemm(config, FP32, activation, gathered, full=True).ptx
        assert "mma" not in ptx
        assert_wide_loads(ptx, gathered)


def test_splits_of_the_depth_on_hopper() -> None:
    for config in shapes():
        if config.block_m <= 64:
            compile_gemm(replace(config, num_splits=2))


@pytest.mark.parametrize("config", shapes(), ids=str)
def test_dgrad_on_hopper(config: GemmConfig) -> None:
    compile_gemm(config, transposed=True)


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "gelu"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("block_m", [128, 64, 16])
def test_activation_dgrad_on_hopper(block_m: int, weighted: bool, activation: str) -> None:
    config = GemmConfig.for_gradient(problem(BF16, 90), weighted, block_m)
    to = stored("bf16", config, config.block_n // config.subtiles)
    weight = "*fp32" if weighted else None
    build(
        _activation_dgrad_kernel,
        {
            "grad": f"tensordesc<bf16[1, 1, {config.block_m}, {config.block_k}]>",
            "w": f"tensordesc<bf16[1, {config.block_k}, {config.block_n}]>",
            "pre": "*bf16",
            "row_weight": weight,
            "pre_grad": to,
            "act": to,
            "weight_grad": weight,
            **SCHEDULE,
            **dict.fromkeys(["max_rows", "N", "K"], "i32"),
        },
        {"ACTIVATION": activation, **constants(config)},
        config,
    )


@pytest.mark.parametrize("dtype, out", [(BF16, BF16), (BF16, FP32), (FP32, FP32)], ids=str)
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("num_rows", [2048, 65536])
def test_wgrad_on_hopper(
    num_rows: int, gathered: bool, dtype: torch.dtype, out: torch.dtype
) -> None:
    config = GemmConfig.for_weights(
        problem(dtype, 90, num_rows=num_rows, gathered=gathered), out.itemsize
    )
    name, block_m, block_n, block_k = (
        TRITON_NAMES[dtype],
        config.block_m,
        config.block_n,
        config.block_k,
    )
    rows = f"tensordesc<{name}[1, 1, {block_k}, {block_n}]>"
    to = f"tensordesc<{TRITON_NAMES[out]}[1, {block_m}, {block_n // config.subtiles}]>"
    for accumulate in (False, True):
        build(
            _wgrad_kernel,
            {
                "grad": f"tensordesc<{name}[1, 1, {block_k}, {block_m}]>",
                "x": f"*{name}" if gathered else rows,
                "row_offset": "*i64" if gathered else None,
                "out": to,
                "offsets": "*i64",
                **dict.fromkeys(["num_experts", "max_rows", "N", "K"], "i32"),
            },
            {"ACCUMULATE": accumulate, **constants(config)},
            config,
        )


def test_small_kernels() -> None:
    config = GemmConfig(16, 64, 1, num_warps=4, num_stages=2)
    rows = {"max_rows": "i32", "N": "i32"}
    sizes = {"BLOCK_M": 16, "BLOCK_N": 64}
    grads = dict.fromkeys(["grad", "pre", "pre_grad"], "*bf16")
    build(
        _activation_gradient_kernel,
        grads | {"offsets": "*i64", "num_experts": "i32"} | rows,
        {"ACTIVATION": "geglu"} | sizes,
        config,
    )
    build(
        _bias_gradient_kernel,
        {"grad": "*bf16", "row_weight": "*fp32", "out": "*fp32", "offsets": "*i64"} | rows,
        sizes,
        config,
    )
    rest = {"x": "*bf16", "offsets": "*i64", "num_experts": "i32"} | rows
    build(_clear_rest_kernel, rest, sizes, config)
    gathered = {"grad": "*bf16", "order": "*i64", "first": "*i64", "out": "*bf16", "K": "i32"}
    build(_gathered_sum_kernel, gathered, {"BLOCK_K": 1024}, config)
    config = GemmConfig(64, 128, 1, num_warps=8, num_stages=2)
    to = stored("bf16", config, 64)
    build(
        _split_sum_kernel,
        {"partial": "*fp32", "out": to, "pre": to, "bias": "*bf16", "row_weight": "*fp32"}
        | SCHEDULE
        | rows
        | {"num_splits": "i32"},
        {"ACTIVATION": "swiglu", "BLOCK_M": 64, "BLOCK_N": 128},
        config,
    )


@pytest.mark.parametrize("config", shapes(arch=80), ids=str)
def test_bf16_gemm_on_ampere(config: GemmConfig) -> None:
    assert "mma.sync" in compile_gemm(config, BF16, "swiglu", True, arch=80).ptx


def test_bf16_gemm_on_blackwell() -> None:
    for config in shapes(arch=100)[:2]:
        assert "tcgen05.mma" in compile_gemm(config, BF16, "swiglu", arch=100).ptx


@pytest.mark.parametrize("offsets", ["*i32", "*i64"])
def test_tile_schedule(offsets: str) -> None:
    built = compile_kernel(
        _tile_schedule_kernel,
        {
            "offsets": offsets,
            **SCHEDULE,
            **dict.fromkeys(["num_experts", "max_rows", "max_tiles"], "i32"),
        },
        {"BLOCK_M": 128, "MAX_EXPERTS": 256, "STEP": 128, "PDL": True},
    )
    assert built.spill_bytes == 0


def assert_wide_loads(ptx: str, gathered: bool) -> None:
    """Gathered rows come by asynchronous copies of 16 bytes, contiguous ones by TMA."""
    sizes = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", ptx)
    assert {int(size, 0) for size in sizes} == ({16} if gathered else set())
    tma_rank = {f"{rank}d" for rank in ((3,) if gathered else (3, 4))}
    assert set(re.findall(r"cp\.async\.bulk\.tensor\.(\dd)\.shared", ptx)) == tma_rank
