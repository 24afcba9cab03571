"""The grouped GEMM against fp64, on ragged experts, with NaN wherever nothing may be read."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_engine.emulation import RankPool
from moe_engine.errors import BackendError, DtypeError, MoeEngineError, ShapeError
from moe_engine.grouped_gemm import gathered_gemm, gemm_config, grouped_gemm, tile_schedule
from moe_engine.lang import INTERPRETED

BF16, FP32 = torch.bfloat16, torch.float32
TOLERANCE = {BF16: 4e-3, FP32: 1e-5}
DEVICE = "cpu" if INTERPRETED else "cuda"
NAN, INF = float("nan"), float("inf")


def reference_grouped_gemm(
    rows: torch.Tensor, w: torch.Tensor, counts: tuple[int, ...], activation: str
) -> torch.Tensor:
    """fp64: rows [sum(counts), K] in expert order, w [L, N, K]."""
    parts = []
    for x, weights in zip(rows.double().split(counts), w.double(), strict=True):
        y = x @ weights.T
        if activation == "swiglu":
            gate, up = y.chunk(2, dim=1)
            y = gate * gate.sigmoid() * up
        parts.append(y)
    return torch.cat(parts)


@dataclass(frozen=True)
class Case:
    """`columns` is that of the output; rows: how A is found, see `run_case`."""

    counts: tuple[int, ...]
    K: int = 72
    columns: int = 72
    dtype: torch.dtype = BF16
    activation: str = "none"
    rows: str = "contiguous"
    num_spare_rows: int = 3
    block_m: int | None = None
    offsets_dtype: torch.dtype = torch.int32


def run_case(group: Any, case: Case) -> tuple[float, bool]:
    """Relative error, and whether the rows past the last expert's were left alone."""
    torch.manual_seed(sum(case.counts) + case.K)
    num_experts, num_rows = len(case.counts), sum(case.counts)
    max_rows = num_rows + case.num_spare_rows
    parts = 2 if case.activation == "swiglu" else 1
    w = torch.randn(num_experts, case.columns * parts, case.K) * case.K**-0.5
    w = w.to(DEVICE, case.dtype)
    rows = torch.randn(num_rows, case.K).to(DEVICE, case.dtype)
    offsets = torch.tensor([0, *case.counts]).cumsum(0).to(DEVICE, case.offsets_dtype)
    # Not NaN, which a product with the NaN around the rows would be.
    out = torch.full((max_rows, case.columns), INF, dtype=case.dtype, device=DEVICE)
    schedule = None if case.block_m is None else tile_schedule(offsets, max_rows, case.block_m)
    options: dict[str, Any] = {"activation": case.activation, "out": out}

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
        places = torch.randperm(2 * max_rows, device=DEVICE)[:max_rows]
        memory = torch.full((2 * max_rows + 1, case.K + 8), NAN, dtype=case.dtype, device=DEVICE)
        memory[places[:num_rows], : case.K] = rows
        row_offset = places * (case.K + 8)
        row_offset[num_rows:] = 2**40  # never read
        config = gemm_config(w, max_rows, case.activation)
        if schedule is None:
            schedule = tile_schedule(offsets, max_rows, config.block_m)
        else:
            config = replace(config, block_m=schedule.block_m)
        got = gathered_gemm(memory, row_offset, w, schedule, config=config, **options)

    assert got is out
    expected = reference_grouped_gemm(rows, w, case.counts, case.activation)
    error = (out[:num_rows].double() - expected).norm() / expected.norm().clamp_min(1e-30)
    return error.item(), bool(out[num_rows:].isinf().all())


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
SHAPES = [
    Case((0, 0, 150, 0)),  # all rows to one expert, no rows to the first and last
    Case((63, 64, 65, 1, 128)),  # around the edges of a tile
    Case((64, 64), num_spare_rows=0),
    Case((7,), num_spare_rows=200),
    Case((0, 0, 0)),
    Case((1, 2, 3), K=8, columns=1, activation="swiglu", rows="index"),
    Case((9, 130), K=200, columns=136, rows="offset"),
    Case((9, 130), K=64, columns=128, activation="swiglu"),
    Case((9, 30), K=136, columns=77, activation="swiglu", rows="offset", dtype=FP32),
    Case((70, 20), block_m=16, rows="offset", offsets_dtype=torch.int64),
    Case((70, 200), block_m=128, offsets_dtype=torch.int64),
]


@pytest.mark.parametrize("case", [*VARIANTS, *SHAPES], ids=str)
def test_grouped_gemm(pool: RankPool, case: Case) -> None:
    check(pool, case)


@given(
    st.builds(
        Case,
        counts=st.lists(st.integers(0, 40), min_size=1, max_size=9).map(tuple),
        K=st.integers(1, 20).map(lambda n: 8 * n),
        columns=st.integers(1, 150),
        dtype=st.sampled_from([BF16, FP32]),
        activation=st.sampled_from(["none", "swiglu"]),
        rows=st.sampled_from(["contiguous", "index", "offset"]),
        num_spare_rows=st.integers(0, 70),
    )
)
def test_any_shape(pool: RankPool, case: Case) -> None:
    check(pool, case)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*VARIANTS, *SHAPES], ids=str)
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
) -> tuple[list[int], list[int]]:
    """(expert, row) of the tiles."""
    schedule = tile_schedule(torch.tensor(offsets, device=DEVICE), max_rows, block_m)
    num_tiles = int(schedule.num_tiles)
    return schedule.expert[:num_tiles].tolist(), schedule.row[:num_tiles].tolist()


def test_tile_schedule(pool: RankPool) -> None:
    def run(*args: Any) -> tuple[list[int], list[int]]:
        return pool.run(schedule_of, *args, num_ranks=1)[0]

    assert run([0, 3, 3, 4], 4, 2) == ([0, 0, 2], [0, 2, 3])
    assert run([0, 0, 0], 8, 2) == ([], [])
    assert run([0, 300], 300, 1) == ([0] * 300, list(range(300)))
    assert run([0, 3, 9], 4, 2) == ([0, 0, 1], [0, 2, 3]), "rows past max_rows get no tile"


def rows_past_the_output(group: Any) -> bool:
    """Offsets that promise more rows than the output has."""
    x, w = torch.ones(8, 16, device=DEVICE), torch.ones(2, 8, 16, device=DEVICE)
    memory = torch.full((12, 8), NAN, device=DEVICE)
    offsets = torch.tensor([0, 5, 12], device=DEVICE)
    grouped_gemm(x, w, offsets, out=memory[:8])
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


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def good_arguments() -> dict[str, Any]:
    offsets = torch.tensor([0, 2, 6], device=DEVICE)
    return {"x": zeros(6, 16), "w": zeros(2, 8, 16), "offsets": offsets}


def gathered(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, **changes: Any) -> None:
    """`gathered_gemm` on the same arguments."""
    arguments = {"row_offset": torch.arange(6, device=DEVICE) * 16}
    arguments["schedule"] = tile_schedule(offsets, 6, 64)
    gathered_gemm(x, w=w, **arguments | changes)


def wrong_answers_to_bad_arguments(group: Any) -> list[str]:
    """One line for each bad call that raises nothing, or something else."""
    small = tile_schedule(torch.tensor([0, 2, 6], device=DEVICE), 6, 2)
    other = replace(gemm_config(zeros(2, 8, 16), 6), block_m=32)
    grad = {"requires_grad": True, "dtype": BF16, "device": DEVICE}
    calls: list[tuple[Callable, dict[str, Any], type, str]] = [
        (grouped_gemm, {"x": zeros(16)}, ShapeError, r"x has shape \[16\]"),
        (grouped_gemm, {"x": [1]}, DtypeError, "x is a list"),
        (grouped_gemm, {"x": zeros(6, 16).half()}, DtypeError, "x is float16.*bfloat16 or float32"),
        (grouped_gemm, {"x": zeros(16, 6).T}, ShapeError, r"x has strides.*x\.contiguous"),
        (grouped_gemm, {"x": zeros(97)[1:].view(6, 16)}, ShapeError, "x .*multiples of 16 bytes"),
        (grouped_gemm, {"x": zeros(6, 12), "w": zeros(2, 8, 12)}, ShapeError, "K = 12.*to 16"),
        (grouped_gemm, {"w": zeros(2, 8, 24)}, ShapeError, r"w has .*must be \[L, N, 16\]"),
        (grouped_gemm, {"w": zeros(2, 8, 16, dtype=FP32)}, DtypeError, "w is float32"),
        (grouped_gemm, {"w": zeros(2, 16, 8).mT}, ShapeError, r"w has strides.*w\.contiguous"),
        (grouped_gemm, {"w": zeros(0, 8, 16)}, ShapeError, "at least 1"),
        (grouped_gemm, {"w": zeros(2, 7, 16), "activation": "swiglu"}, ShapeError, "N even"),
        (grouped_gemm, {"activation": "gelu"}, ShapeError, "activation is 'gelu'.*'swiglu'"),
        (grouped_gemm, {"offsets": zeros(2).int()}, ShapeError, r"offsets .*must be \[3\]"),
        (grouped_gemm, {"offsets": zeros(3)}, DtypeError, "offsets is bfloat16.*int32 or int64"),
        (grouped_gemm, {"offsets": zeros(3).int().to("meta")}, ShapeError, "offsets is on meta"),
        (grouped_gemm, {"row_index": zeros(6)}, DtypeError, "row_index is bfloat16"),
        (grouped_gemm, {"out": zeros(5, 8)}, ShapeError, r"out .*must be \[6, 8\]"),
        (grouped_gemm, {"out": zeros(8, 6).T}, ShapeError, "out has strides"),
        (grouped_gemm, {"out": zeros(6, 8, dtype=FP32)}, DtypeError, "out is float32"),
        (grouped_gemm, {"x": zeros(9, 16), "schedule": small}, ShapeError, "max_rows=9"),
        (grouped_gemm, {"x": torch.zeros(6, 16, **grad)}, BackendError, "x requires.*no_grad"),
        (gathered, {"w": torch.zeros(2, 8, 16, **grad)}, BackendError, "w requires.*no_grad"),
        (gathered, {"row_offset": zeros(6).int()}, DtypeError, "row_offset is int32.*int64"),
        (gathered, {"x": zeros(97)[1:]}, ShapeError, "base starts at address"),
        (gathered, {"config": other}, ShapeError, "config has block_m 32 and schedule has 64"),
        (gathered, {"offsets": zeros(1).int()}, ShapeError, "offsets has 1 elements"),
    ]
    wrong = []
    for function, changes, kind, text in calls:
        name = f"{function.__name__}({', '.join(changes)}), {text}"
        try:
            function(**good_arguments() | changes)
            wrong.append(f"{name}: no error")
        except (MoeEngineError, AssertionError) as error:
            if type(error) is not kind or not re.search(text, str(error)):
                wrong.append(f"{name}: {error!r}")
    return wrong


def test_bad_arguments(pool: RankPool) -> None:
    assert pool.run(wrong_answers_to_bad_arguments, num_ranks=1) == [[]]


@pytest.mark.skipif(INTERPRETED, reason="CPU tensors do run here")
def test_cpu_tensors_need_the_interpreter() -> None:
    x, w, offsets = torch.zeros(6, 16), torch.zeros(2, 8, 16), torch.tensor([0, 2, 6])
    with pytest.raises(BackendError, match="TRITON_INTERPRET=1"):
        grouped_gemm(x, w, offsets)
