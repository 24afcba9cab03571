"""The grouped GEMM against fp64, on ragged experts, with NaN wherever nothing may be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from einops import repeat
from hypothesis import given
from hypothesis import strategies as st

from moe_engine.device.lang import INTERPRETED
from moe_engine.emulation import RankPool
from moe_engine.errors import ShapeError
from moe_engine.grouped_gemm import config, gemm_config, grouped_gemm, tile_schedule
from moe_engine.grouped_gemm.config import WIDE_E4M3, GemmConfig
from moe_engine.grouped_gemm.launch import multiply
from moe_engine.grouped_gemm.operands import Epilogue, Rows, Weights

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
TOLERANCE = {BF16: 4e-3, FP32: 1e-5, FP8: 4e-3}
DEVICE = "cpu" if INTERPRETED else "cuda"
NAN, INF = float("nan"), float("inf")
GATED = ("swiglu", "geglu")
ACTIVATIONS = ("none", "silu", "gelu", *GATED)


def reference_activation(y: torch.Tensor, activation: str) -> torch.Tensor:
    if activation in GATED:
        gate, up = y.chunk(2, dim=1)
        return reference_activation(gate, {"swiglu": "silu", "geglu": "gelu"}[activation]) * up
    return y if activation == "none" else getattr(F, activation)(y)


def reference_grouped_gemm(
    rows: torch.Tensor,
    w: torch.Tensor,
    counts: tuple[int, ...],
    activation: str = "none",
    bias: torch.Tensor | None = None,
    row_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """fp64: rows [sum(counts), K] in expert order, w [L, N, K], bias [L, N]."""
    parts = []
    for expert, x in enumerate(rows.double().split(counts)):
        y = x @ w[expert].double().T
        parts.append(y if bias is None else y + bias[expert].double())
    y = reference_activation(torch.cat(parts), activation)
    return y if row_weight is None else y * row_weight.double()[: len(y), None]


@dataclass(frozen=True)
class Case:
    """`columns` is that of the output; rows: how A is found, see `run_case`."""

    counts: tuple[int, ...]
    K: int = 72
    columns: int = 72
    dtype: torch.dtype = BF16
    activation: str = "none"
    rows: str = "contiguous"
    bias: bool = False
    weighted: bool = False
    num_spare_rows: int = 3
    block_m: int | None = None
    num_splits: int = 1
    offsets_dtype: torch.dtype = torch.int32


def run_case(group: Any, case: Case) -> tuple[float, bool]:
    """Relative error, and whether the rows past the last expert's were left alone."""
    torch.manual_seed(sum(case.counts) + case.K)
    num_experts, num_rows = len(case.counts), sum(case.counts)
    max_rows = num_rows + case.num_spare_rows
    columns = case.columns * (2 if case.activation in GATED else 1)
    w = torch.randn(num_experts, columns, case.K) * case.K**-0.5
    w = w.to(DEVICE, case.dtype)
    rows = torch.randn(num_rows, case.K).to(DEVICE, case.dtype)
    offsets = torch.tensor([0, *case.counts]).cumsum(0).to(DEVICE, case.offsets_dtype)
    bias = torch.randn(num_experts, columns).to(DEVICE, case.dtype) if case.bias else None
    row_weight = torch.rand(max_rows, device=DEVICE) if case.weighted else None
    # Not NaN, which a product with the NaN around the rows would be.
    out = torch.full((max_rows, case.columns), INF, dtype=case.dtype, device=DEVICE)
    schedule = None if case.block_m is None else tile_schedule(offsets, max_rows, case.block_m)
    options: dict[str, Any] = dict(
        activation=case.activation, bias=bias, row_weight=row_weight, out=out
    )

    if case.rows == "contiguous":
        x = torch.full((max_rows, case.K), NAN, dtype=case.dtype, device=DEVICE)
        x[:num_rows] = rows
        got = grouped_gemm(x, w, offsets, schedule=schedule, **options)
    elif case.rows == "index":  # rows of a wider, shuffled tensor
        order = torch.randperm(max_rows, device=DEVICE)
        memory = torch.full((max_rows, case.K + 16), NAN, dtype=case.dtype, device=DEVICE)
        memory[order[:num_rows], : case.K] = rows
        x = memory[:, : case.K]
        got = grouped_gemm(x, w, offsets, row_index=order, schedule=schedule, **options)
    else:  # "offset": rows anywhere in memory, with gaps between them
        index = torch.randperm(2 * max_rows, device=DEVICE)[:max_rows]
        memory = torch.full((2 * max_rows + 1, case.K + 8), NAN, dtype=case.dtype, device=DEVICE)
        memory[index[:num_rows], : case.K] = rows
        row_offset = index * (case.K + 8)
        row_offset[num_rows:] = 2**40  # never read
        x = memory[-1:, : case.K]  # rows lie before it, and after it where it is the first one
        row_offset[:num_rows] -= x.storage_offset()
        got = grouped_gemm(x, w, offsets, row_offset=row_offset, schedule=schedule, **options)

    if case.num_splits > 1:
        assert case.rows == "offset"
        config = gemm_config(w, max_rows, case.activation, gathered=True, block_m=case.block_m)
        config = replace(config, num_splits=case.num_splits)
        schedule = schedule or tile_schedule(offsets, max_rows, config.block_m)
        pre = torch.full((max_rows, columns), INF, dtype=case.dtype, device=DEVICE)
        epilogue = Epilogue(case.activation, row_weight, pre)
        out.fill_(INF)
        multiply(
            Rows(x, row_offset), Weights(w, bias=bias), epilogue, schedule, max_rows, out, config
        )
        expected = reference_grouped_gemm(rows, w, case.counts, bias=bias)
        assert relative_error(pre[:num_rows], expected) < TOLERANCE[case.dtype]
        assert pre[num_rows:].isinf().all()

    assert got is out
    expected = reference_grouped_gemm(rows, w, case.counts, case.activation, bias, row_weight)
    return relative_error(out[:num_rows], expected), bool(out[num_rows:].isinf().all())


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    return ((got.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def check(pool: RankPool, case: Case) -> None:
    assert_right(case, *pool.run(run_case, case, num_ranks=1)[0])


def assert_right(case: Case, error: float, untouched: bool) -> None:
    assert error < TOLERANCE[case.dtype], error
    assert untouched, "rows past the last expert's were written"


VARIANTS = [
    Case((5, 0, 70, 1), dtype=dtype, activation=activation, rows=rows)
    for dtype, activation, rows in product(
        (BF16, FP32), ("none", "swiglu"), ("contiguous", "index", "offset")
    )
]
EPILOGUES = [
    Case((5, 0, 70, 1), columns=136, activation=activation, rows=rows, bias=bias, weighted=weighted)
    for activation, rows in product(ACTIVATIONS, ("contiguous", "offset"))
    for bias, weighted in ((True, False), (False, True), (True, True))
]
SHAPES = [
    Case((0, 0, 150, 0)),  # all rows to one expert, no rows to the first and last
    Case((63, 64, 65, 1, 128)),  # around the edges of a tile
    Case((64, 64), num_spare_rows=0),
    Case((7,), num_spare_rows=200),
    Case((0, 0, 0)),
    Case((1, 2, 3), K=8, columns=8, activation="swiglu", rows="index"),
    Case((9, 130), K=200, columns=136, rows="offset"),
    Case((9, 130), K=64, columns=128, activation="swiglu"),
    Case((9, 30), K=136, columns=76, activation="swiglu", rows="offset", dtype=FP32),
    Case((70, 20), block_m=16, rows="offset", offsets_dtype=torch.int64),
    Case((70, 200), block_m=128, offsets_dtype=torch.int64),
    Case((3, 0, 17), K=512, block_m=16, activation="swiglu"),
    Case((3, 0, 17), K=264, rows="offset", num_splits=2, bias=True),
    Case((33, 0, 2), K=264, rows="offset", num_splits=3, activation="swiglu", weighted=True),
    Case((33, 70), K=72, rows="offset", num_splits=4, activation="gelu"),  # a share is empty
]


@pytest.mark.parametrize("case", [*VARIANTS, *EPILOGUES, *SHAPES], ids=str)
def test_grouped_gemm(pool: RankPool, case: Case) -> None:
    check(pool, case)


def every_row_count(group: Any, counts: Sequence[int], columns: int) -> list[int]:
    """The numbers of rows that go wrong, for one expert between two others."""
    torch.manual_seed(0)
    wrong = []
    w = torch.randn(3, 2 * columns, 32).to(DEVICE, BF16)
    memory = torch.randn(max(counts) + 13, 32).to(DEVICE, BF16)
    for count in counts:
        sizes = (5, count, 7)
        rows = memory[: sum(sizes)]
        offsets = torch.tensor([0, *sizes], device=DEVICE).cumsum(0)
        out = torch.full((len(rows) + 1, columns), INF, dtype=BF16, device=DEVICE)
        x = memory[: len(out)]
        grouped_gemm(x, w, offsets, activation="swiglu", out=out)
        expected = reference_grouped_gemm(rows, w, sizes, "swiglu")
        error = relative_error(out[: len(rows)], expected)
        if not error < TOLERANCE[BF16] or not out[len(rows) :].isinf().all():
            wrong.append(count)
    return wrong


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_every_row_count(pool: RankPool, step: int) -> None:
    counts = [*range(18), *range(18, 301, step)]
    assert pool.run(every_row_count, counts, 16, num_ranks=1) == [[]]


@pytest.mark.gpu
def test_every_row_count_on_one_gpu() -> None:
    assert every_row_count(None, range(301), 256) == []


def run_fp8(
    group: Any, counts: tuple[int, ...], activation: str, gathered: bool, width: int = 144
) -> float:
    """Relative error of e4m3 operands against their fp64 values."""
    torch.manual_seed(0)
    K, columns = 304, width * (2 if activation in GATED else 1)
    num_rows = sum(counts)
    x8 = torch.randn(num_rows, K).to(FP8)
    w8 = torch.randn(len(counts), columns, K).to(FP8)
    x_scale = torch.rand(num_rows, 3) + 0.5
    w_scale = torch.rand(len(counts), -(-columns // 128), 3) + 0.5
    x = x8.double() * repeat(x_scale.double(), "m j -> m (j c)", c=128)[:, :K]
    blocks = repeat(w_scale.double(), "l i j -> l (i r) (j c)", r=128, c=128)
    w = w8.double() * blocks[:, :columns, :K]
    bias = torch.randn(len(counts), columns).to(BF16)
    offsets = torch.tensor([0, *counts]).cumsum(0)
    index = torch.randint(0, num_rows, (num_rows,)) if gathered else None
    schedule = tile_schedule(offsets.to(DEVICE), num_rows, 128) if gathered else None
    got = grouped_gemm(
        (x8.to(DEVICE), x_scale.to(DEVICE)),
        (w8.to(DEVICE), w_scale.to(DEVICE)),
        offsets.to(DEVICE),
        row_index=None if index is None else index.to(DEVICE),
        activation=activation,
        bias=bias.to(DEVICE),
        schedule=schedule,
    )
    assert got.dtype == BF16
    rows = x if index is None else x[index]
    return relative_error(got.cpu(), reference_grouped_gemm(rows, w, counts, activation, bias))


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("activation", ["none", "swiglu"])
def test_fp8(pool: RankPool, activation: str, gathered: bool) -> None:
    errors = pool.run(run_fp8, (5, 0, 70, 1), activation, gathered, num_ranks=1)
    assert errors[0] < TOLERANCE[FP8]


def run_wide_fp8(group: Any, block_m: int, *args: Any) -> tuple[float, float]:
    """`run_fp8` with tiles of 256 columns, and with those that are chosen."""
    how = dict(num_warps=4, num_stages=1) if INTERPRETED else WIDE_E4M3[block_m]
    wide = GemmConfig(block_m, 256, 128, subtiles=2, **how)
    with patch.object(GemmConfig, "predicted", lambda *_: wide):
        config._choose.cache_clear()
        error = run_fp8(group, *args)
    config._choose.cache_clear()
    return error, run_fp8(group, *args)


@pytest.mark.parametrize(
    ("activation", "width"),
    # The last half of columns is full, holds 16 columns, and lies past the end.
    [("swiglu", 128), ("swiglu", 256), ("none", 256), ("none", 400), ("none", 112)],
)
@pytest.mark.parametrize("block_m", WIDE_E4M3)
def test_wide_tiles_of_fp8(pool: RankPool, block_m: int, activation: str, width: int) -> None:
    args = block_m, (5, 0, 130, 1), activation, False, width
    ((wide, chosen),) = pool.run(run_wide_fp8, *args, num_ranks=1)
    assert max(wide, chosen) < TOLERANCE[FP8]


@pytest.mark.gpu
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("activation", ["none", "swiglu"])
@pytest.mark.parametrize("counts", [(300, 0, 70, 1), (1, 2, 0, 3)])
def test_fp8_on_one_gpu(counts: tuple[int, ...], activation: str, gathered: bool) -> None:
    # The tensor cores round sums of 128 products to 14 bits or so.
    assert run_fp8(None, counts, activation, gathered) < TOLERANCE[FP8]


@given(
    st.builds(
        Case,
        counts=st.lists(st.integers(0, 40), min_size=1, max_size=9).map(tuple),
        K=st.integers(1, 20).map(lambda n: 8 * n),
        columns=st.integers(1, 20).map(lambda n: 8 * n),
        dtype=st.sampled_from([BF16, FP32]),
        activation=st.sampled_from(ACTIVATIONS),
        rows=st.sampled_from(["contiguous", "index", "offset"]),
        bias=st.booleans(),
        weighted=st.booleans(),
        num_spare_rows=st.integers(0, 70),
    )
)
def test_any_shape(pool: RankPool, case: Case) -> None:
    check(pool, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*VARIANTS, *EPILOGUES, *SHAPES], ids=str)
def test_on_one_gpu(case: Case) -> None:
    assert_right(case, *run_case(None, case))


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["none", "swiglu"])
@pytest.mark.parametrize("rows", ["contiguous", "index", "offset"])
@pytest.mark.parametrize("counts", [(3000, 0, 1, 700), (100, 20, 0, 300)])
def test_large_tiles_on_one_gpu(counts: tuple[int, ...], rows: str, activation: str) -> None:
    case = Case(counts, K=1096, columns=1000, activation=activation, rows=rows)
    assert_right(case, *run_case(None, case))


def schedule_of(
    group: Any, offsets: list[int], max_rows: int, block_m: int
) -> list[tuple[int, int, int]]:
    return tile_schedule(torch.tensor(offsets, device=DEVICE), max_rows, block_m).tolist()


def test_tile_schedule(pool: RankPool) -> None:
    def run(*args: Any) -> list[tuple[int, int, int]]:
        return pool.run(schedule_of, *args, num_ranks=1)[0]

    assert run([0, 3, 3, 4], 4, 2) == [(0, 0, 2), (0, 2, 1), (2, 3, 1)]
    assert run([0, 0, 0], 8, 2) == []
    assert run([0, 300], 300, 1) == [(0, row, 1) for row in range(300)]
    assert run([0, 3, 9], 4, 2) == [(0, 0, 2), (0, 2, 1), (1, 3, 1)], "no rows past max_rows"


def rows_past_the_output(group: Any) -> bool:
    """Offsets that promise more rows than the output has."""
    x, w = torch.ones(8, 16, device=DEVICE), torch.ones(2, 8, 16, device=DEVICE)
    memory = torch.full((12, 8), NAN, device=DEVICE)
    offsets = torch.tensor([0, 5, 12], device=DEVICE)
    grouped_gemm(x, w, offsets, out=memory[:8])
    with pytest.raises(ShapeError, match="schedule was made for 12 rows, and there are 8"):
        grouped_gemm(x, w, offsets, out=memory[:8], schedule=tile_schedule(offsets, 12, 64))
    falling = torch.tensor([0, 100, 0, 100, 0, 100], device=DEVICE)
    tile_schedule(falling, 100, 1)  # would make 300 tiles, with room for 105
    return bool((memory[:8] == 16).all()) and bool(memory[8:].isnan().all())


def test_rows_past_the_output_are_never_written(pool: RankPool) -> None:
    assert pool.run(rows_past_the_output, num_ranks=1) == [True]


def rounded(group: Any) -> bool:
    """Sums of small integers are exact in fp32, and many take more than the 8 bits of bf16."""
    torch.manual_seed(0)
    x, w = torch.randint(-99, 99, (9, 64)), torch.randint(-99, 99, (2, 40, 64))
    offsets = torch.tensor([0, 5, 9], device=DEVICE)
    out = grouped_gemm(x.to(DEVICE, BF16), w.to(DEVICE, BF16), offsets)
    return torch.equal(out.cpu(), reference_grouped_gemm(x, w, (5, 4), "none").to(BF16))


def test_sums_are_rounded_once_to_nearest(pool: RankPool) -> None:
    assert pool.run(rounded, num_ranks=1) == [True]


def repeated(group: Any) -> bool:
    x, w = torch.randn(90, 136, device=DEVICE), torch.randn(3, 40, 136, device=DEVICE)
    offsets = torch.tensor([0, 7, 80, 90], device=DEVICE)
    first, second = (grouped_gemm(x, w, offsets) for _ in range(2))
    return torch.equal(first, second)


def test_same_input_same_bits(pool: RankPool) -> None:
    assert pool.run(repeated, num_ranks=1) == [True]
