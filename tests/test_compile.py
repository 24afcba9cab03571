"""Every shipped variant compiles for its GPU, without one: no spills, tensor cores, wide loads."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import Any

import cases
import pytest
import torch
from compile_helper import Compiled
from launches import Launch, recorded

from moe_engine.device.lang import INTERPRETED
from moe_engine.grouped_gemm import backward, tile_schedule, wgrad
from moe_engine.grouped_gemm.config import GemmConfig, GemmProblem, candidates
from moe_engine.grouped_gemm.launch import multiply
from moe_engine.grouped_gemm.operands import Epilogue, Rows, Weights, num_parts
from moe_engine.grouped_gemm.specialized import is_specialized

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
SHARED_BYTES = {80: 164 * 1024 - 1024, 90: 228 * 1024 - 1024, 100: 228 * 1024 - 1024}
ROWS, EXPERTS, COLUMNS, DEPTH = 4096, 2, 4096, 1024


def problem(dtype: torch.dtype, arch: int, **changes: Any) -> GemmProblem:
    fields = dict(num_rows=ROWS, num_experts=EXPERTS, num_columns=COLUMNS, depth=DEPTH)
    return GemmProblem(dtype, **fields | changes, capability=(arch // 10, arch % 10))


def offsets() -> torch.Tensor:
    return torch.tensor([0, ROWS // 2, ROWS], dtype=torch.int32)


def build(made: Iterable[Launch], name: str, programs_per_sm: int = 1, arch: int = 90) -> Compiled:
    """Compile the launch of this name: no spills, and all its programs fit an SM."""
    (launch,) = (launch for launch in made if launch.name == name)
    built, num_warps = launch.compile(arch), launch.options.num_warps
    print(f"{built.registers} registers, {built.shared_bytes} bytes shared, {num_warps} warps")
    assert not built.spills
    programs = programs_per_sm if arch >= 90 else 1
    assert (built.shared_bytes + 1024) * programs <= SHARED_BYTES[arch] + 1024
    assert built.registers * num_warps * 32 * programs <= 65536
    return built


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
    out_dtype, parts = BF16 if dtype == FP8 else dtype, num_parts(activation)
    scales = (None, None)
    if dtype == FP8:
        blocks = parts * COLUMNS // 128, DEPTH // 128
        scales = torch.empty(ROWS, blocks[1]), torch.empty(EXPERTS, *blocks)
    shape = (DEPTH, COLUMNS) if transposed else (parts * COLUMNS, DEPTH)
    w = torch.empty(EXPERTS, *shape, dtype=dtype)
    offset = torch.zeros(ROWS, dtype=torch.int64) if gathered else None
    bias = torch.empty(EXPERTS, parts * COLUMNS, dtype=out_dtype) if full else None
    pre = torch.empty(ROWS, parts * COLUMNS, dtype=out_dtype) if full else None
    rows = Rows(torch.empty(ROWS, DEPTH, dtype=dtype), offset, scales[0])
    weights = Weights(w, scales[1], bias, transposed)
    epilogue = Epilogue(activation, torch.empty(ROWS) if full else None, pre)
    with recorded(arch) as made:
        schedule = tile_schedule(offsets(), ROWS, config.block_m)
        multiply(rows, weights, epilogue, schedule, ROWS, None, config)
    name = "specialized_gemm" if is_specialized(config, weights, epilogue) else "grouped_gemm"
    return build(made, name, config.programs_per_sm, arch)


def shapes(dtype: torch.dtype = BF16, arch: int = 90, **changes: Any) -> list[GemmConfig]:
    """Every tile shape that may be chosen, but for the number of splits."""
    return [c for c in candidates(problem(dtype, arch, **changes)) if c.num_splits == 1]


def largest_and_smallest(configs: list[GemmConfig]) -> list[Any]:
    """As parameters; the others are slow."""
    return cases.slow_unless([(configs[0],), (configs[-1],)], configs)


COMPILED = "swiglu", "geglu", "geglu_tanh", "gelu", "relu2"
"""Activations of full products and of gradients."""
FEW_GEMMS = (("swiglu", True),)
"""(activation, gathered)"""
FEW_FULL_GEMMS = ("swiglu", False), ("geglu", True), ("geglu_tanh", False), ("relu2", False)
GEMMS = cases.slow_unless(FEW_GEMMS, ("none", "swiglu"), (False, True))
CASES = [
    pytest.param(config, *gemm.values, False, marks=gemm.marks)
    for gemm in GEMMS
    for config in shapes(gathered=gemm.values[1])
]
CASES += [  # by default only the largest tiles, which have the fewest registers to spare
    pytest.param(
        *(config, activation, gathered, True),
        marks=() if number == 0 and (activation, gathered) in FEW_FULL_GEMMS else pytest.mark.slow,
    )
    for activation, gathered in product(COMPILED, (False, True))
    for number, config in enumerate(shapes(gathered=gathered))
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


@pytest.mark.parametrize(("activation", "gathered"), GEMMS)
def test_fp8_gemm_on_hopper(activation: str, gathered: bool) -> None:
    how = dict(gated=activation == "swiglu", gathered=gathered)
    high = GemmConfig.predicted(problem(FP8, 90, **how), block_m=128)
    for config in (*shapes(FP8, **how), high):
        ptx = compile_gemm(config, FP8, activation, gathered).ptx
        assert "e4m3" in ptx if config.block_m >= 64 else "mma.sync" in ptx


@pytest.mark.parametrize(("activation", "gathered"), GEMMS)
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


@pytest.mark.parametrize("config", largest_and_smallest(shapes()), ids=str)
def test_dgrad_on_hopper(config: GemmConfig) -> None:
    compile_gemm(config, transposed=True)


FEW_DGRADS = (128, True, "swiglu"), (64, False, "geglu"), (16, True, "gelu")
FEW_DGRADS += (128, True, "geglu_tanh"), (128, True, "relu2")


@pytest.mark.parametrize(
    ("block_m", "weighted", "activation"),
    cases.slow_unless(FEW_DGRADS, (128, 64, 16), (False, True), COMPILED),
)
def test_activation_dgrad_on_hopper(block_m: int, weighted: bool, activation: str) -> None:
    grad, w = torch.empty(ROWS, DEPTH, dtype=BF16), torch.empty(EXPERTS, DEPTH, COLUMNS, dtype=BF16)
    pre = torch.empty(ROWS, num_parts(activation) * COLUMNS, dtype=BF16)
    weight = torch.empty(ROWS) if weighted else None
    with recorded() as made:
        schedule = tile_schedule(offsets(), ROWS, block_m)
        backward.activation_dgrad(grad, w, pre, schedule, activation, weight)
    build(made, "grouped_gemm")
    build(made, "activation_gradient")


DTYPES_OF_WGRAD = (BF16, BF16), (BF16, FP32), (FP32, FP32)
FEW_WGRADS = tuple(zip(DTYPES_OF_WGRAD, (False, True, False), strict=True))


@pytest.mark.parametrize(
    ("dtypes", "gathered"), cases.slow_unless(FEW_WGRADS, DTYPES_OF_WGRAD, (False, True)), ids=str
)
def test_wgrad_on_hopper(dtypes: tuple[torch.dtype, torch.dtype], gathered: bool) -> None:
    dtype, out = dtypes
    grad = torch.empty(ROWS, COLUMNS, dtype=dtype)
    x, made_w = torch.empty(ROWS, DEPTH, dtype=dtype), torch.empty(EXPERTS, COLUMNS, DEPTH)
    offset = torch.zeros(ROWS, dtype=torch.int64) if gathered else None
    for accumulate in (False, True):
        with recorded() as made:
            to = made_w.to(out)
            wgrad(grad, x, offsets(), row_offset=offset, out=to, accumulate=accumulate)
        build(made, "wgrad", 2 if dtype == FP32 else 1)


def test_small_kernels() -> None:
    grad, pre = torch.empty(ROWS, 64, dtype=BF16), torch.empty(ROWS, 128, dtype=BF16)
    with recorded() as made:
        backward.activation_gradient(grad, pre, offsets(), "geglu")
        backward.bias_gradient(grad, offsets(), torch.empty(ROWS))
        backward.clear_rest(grad, offsets())
        backward.gathered_sum(grad, torch.zeros(ROWS, dtype=torch.int32), offsets(), ROWS)
    small = "activation_gradient", "bias_gradient", "clear_rest", "gathered_sum"
    for name in small:
        build(made, name)
    config = GemmConfig(64, 128, 64, num_warps=8, num_stages=2, num_splits=2)
    rows, w = Rows(torch.empty(ROWS, DEPTH, dtype=BF16)), torch.empty(EXPERTS, 256, DEPTH)
    pre, bias = torch.empty(ROWS, 256, dtype=BF16), torch.empty(EXPERTS, 256, dtype=BF16)
    epilogue = Epilogue("swiglu", torch.empty(ROWS), pre)
    with recorded() as made:
        schedule = tile_schedule(offsets(), ROWS, 64)
        weights = Weights(w.to(BF16), bias=bias)
        multiply(rows, weights, epilogue, schedule, ROWS, None, config)
    build(made, "split_sum")


@pytest.mark.parametrize("config", largest_and_smallest(shapes(arch=80)), ids=str)
def test_bf16_gemm_on_ampere(config: GemmConfig) -> None:
    assert "mma.sync" in compile_gemm(config, BF16, "swiglu", True, arch=80).ptx


BLACKWELL = shapes(arch=100)[:2]


@pytest.mark.parametrize("config", cases.slow_unless([(BLACKWELL[0],)], BLACKWELL), ids=str)
def test_bf16_gemm_on_blackwell(config: GemmConfig) -> None:
    assert "tcgen05.mma" in compile_gemm(config, BF16, "swiglu", arch=100).ptx


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_tile_schedule(dtype: torch.dtype) -> None:
    with recorded() as made:
        tile_schedule(torch.arange(257, dtype=dtype), ROWS, 128)
    build(made, "tile_schedule")


def assert_wide_loads(ptx: str, gathered: bool) -> None:
    """Gathered rows come by asynchronous copies of 16 bytes, contiguous ones by TMA."""
    sizes = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (\w+)", ptx)
    assert {int(size, 0) for size in sizes} == ({16} if gathered else set())
    assert set(re.findall(r"cp\.async\.bulk\.tensor\.(\dd)\.shared", ptx)) == {"4d"}
