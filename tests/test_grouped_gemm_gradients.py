"""Gradients of the grouped GEMM against fp64 autograd of plain torch, with NaN where no row is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Any

import cases
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_grouped_gemm import (
    ACTIVATIONS,
    BF16,
    DEVICE,
    FP32,
    GATED,
    NAN,
    TOLERANCE,
    reference_grouped_gemm,
    relative_error,
)

from moe_engine.emulation import RankPool
from moe_engine.errors import BackendError
from moe_engine.grouped_gemm import dgrad, grouped_gemm, grouped_mlp, wgrad


@dataclass(frozen=True)
class Case:
    """Tensors with gradients: x, w and, where the case has them, biases and row weights."""

    counts: tuple[int, ...]
    K: int = 72
    intermediate: int = 40
    activation: str = "swiglu"
    dtype: torch.dtype = BF16
    indexed: bool = False
    bias: bool = False
    weighted: bool = False
    num_spare_rows: int = 3


class Inputs:
    """Leaves in `dtype` on the device, and their fp64 twins."""

    def __init__(self, case: Case):
        torch.manual_seed(sum(case.counts))
        self.case, self.num_rows = case, sum(case.counts)
        self.max_rows = self.num_rows + case.num_spare_rows
        self.leaves: dict[str, torch.Tensor] = {}
        self.twins: dict[str, torch.Tensor] = {}
        num_experts, parts = len(case.counts), 2 if case.activation in GATED else 1
        self.columns = case.intermediate * parts
        x = torch.randn(self.max_rows, case.K)
        self.index = torch.randint(0, max(1, self.num_rows), (self.max_rows,))
        if not case.indexed:
            x[self.num_rows :] = NAN
        self.add("x", x)
        self.add("w", torch.randn(num_experts, self.columns, case.K) * case.K**-0.5)
        self.add("w_down", torch.randn(num_experts, 48, case.intermediate) * 0.1)
        if case.bias:
            self.add("bias", torch.randn(num_experts, self.columns))
            self.add("b_down", torch.randn(num_experts, 48))
        if case.weighted:
            self.add("row_weight", torch.rand(self.max_rows), FP32)
        self.offsets = torch.tensor([0, *case.counts]).cumsum(0).to(DEVICE)

    def add(self, name: str, values: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        self.leaves[name] = values.to(DEVICE, dtype or self.case.dtype).requires_grad_()
        self.twins[name] = self.leaves[name].detach().cpu().double().requires_grad_()

    def rows(self) -> torch.Tensor:
        """The fp64 rows, in the order of the output."""
        x = self.twins["x"]
        return (x[self.index] if self.case.indexed else x)[: self.num_rows]

    def options(self) -> dict[str, Any]:
        return dict(
            row_index=self.index.to(DEVICE) if self.case.indexed else None,
            row_weight=self.leaves.get("row_weight"),
            activation=self.case.activation,
        )

    def errors(self, y: torch.Tensor, reference: torch.Tensor) -> dict[str, float]:
        """Relative errors of y and of all gradients, for a random gradient of y."""
        grad = torch.randn(y.shape).to(DEVICE, y.dtype)
        grad[self.num_rows :] = NAN  # of rows that are none
        errors = {"y": relative_error(y[: self.num_rows].cpu(), reference)}
        y.backward(grad)
        reference.backward(grad[: self.num_rows].cpu().double())
        for name, twin in self.twins.items():
            got = self.leaves[name].grad
            if twin.grad is None:
                continue
            assert got is not None and got.dtype == self.leaves[name].dtype
            rows = slice(None)
            if name == "row_weight" or (name == "x" and not self.case.indexed):
                rows = slice(self.num_rows)
            errors[name] = relative_error(got[rows].cpu(), twin.grad[rows])
            if rows != slice(None) and name == "x":
                assert (got[self.num_rows :] == 0).all(), "rows that are none have a gradient"
        return errors


def run_gemm(group: Any, case: Case) -> dict[str, float]:
    """Relative errors of `grouped_gemm`."""
    inputs = Inputs(case)
    leaves, twins = inputs.leaves, inputs.twins
    bias, options = leaves.get("bias"), inputs.options()
    y = grouped_gemm(leaves["x"], leaves["w"], inputs.offsets, bias=bias, **options)
    reference = reference_grouped_gemm(
        inputs.rows(),
        twins["w"],
        case.counts,
        case.activation,
        twins.get("bias"),
        twins.get("row_weight"),
    )
    return inputs.errors(y, reference)


def run_mlp(group: Any, case: Case) -> dict[str, float]:
    """Relative errors of `grouped_mlp`."""
    inputs = Inputs(case)
    leaves, twins = inputs.leaves, inputs.twins
    y = grouped_mlp(
        leaves["x"],
        leaves["w"],
        leaves["w_down"],
        inputs.offsets,
        b_up=leaves.get("bias"),
        b_down=leaves.get("b_down"),
        **inputs.options(),
    )
    counts, bias = case.counts, twins.get("bias")
    act = reference_grouped_gemm(inputs.rows(), twins["w"], counts, case.activation, bias)
    reference = reference_grouped_gemm(
        act, twins["w_down"], counts, "none", twins.get("b_down"), twins.get("row_weight")
    )
    return inputs.errors(y, reference)


def assert_small(case: Case, errors: dict[str, float]) -> None:
    wrong = {name: error for name, error in errors.items() if not error < TOLERANCE[case.dtype]}
    assert not wrong, wrong


GRID = [
    Case((5, 0, 70, 1), activation=activation, dtype=dtype, indexed=indexed, bias=full)
    for activation, dtype, (indexed, full) in product(
        ACTIVATIONS, (BF16, FP32), ((False, False), (True, True))
    )
]
MORE = [Case((5, 0, 70, 1), dtype=dtype, weighted=True, bias=True) for dtype in (BF16, FP32)]
MORE += [Case((64, 63, 65)), Case((0, 30), K=8, intermediate=8, dtype=FP32, indexed=True)]
CASES = GRID + MORE
FEW = [(case,) for case in CASES if case in MORE or case.indexed == (case.dtype == BF16)]
"""By default each activation in both types, in one of which rows are indexed."""


@pytest.mark.parametrize("case", cases.slow_unless(FEW, CASES), ids=str)
def test_grouped_gemm(pool: RankPool, case: Case) -> None:
    assert_small(case, pool.run(run_gemm, case, num_ranks=1)[0])


@pytest.mark.parametrize(
    "case",
    cases.slow_unless(FEW, [case for case in CASES if case.activation != "none"]),
    ids=str,
)
def test_grouped_mlp(pool: RankPool, case: Case) -> None:
    assert_small(case, pool.run(run_mlp, case, num_ranks=1)[0])


@given(
    st.builds(
        Case,
        counts=st.lists(st.integers(0, 40), min_size=1, max_size=5).map(tuple),
        K=st.integers(1, 12).map(lambda n: 8 * n),
        intermediate=st.integers(1, 12).map(lambda n: 8 * n),
        activation=st.sampled_from(["swiglu", "gelu"]),
        dtype=st.just(FP32),
        indexed=st.booleans(),
        bias=st.booleans(),
        weighted=st.booleans(),
    )
)
def test_any_shape(pool: RankPool, case: Case) -> None:
    assert_small(case, pool.run(run_mlp, case, num_ranks=1)[0])


LARGE = [
    Case((900, 0, 1, 300), K=1096, intermediate=520, activation=activation, indexed=indexed)
    for activation in ("swiglu", "gelu")
    for indexed in (False, True)
]
LARGE += [Case((9, 0, 1, 30), K=520, intermediate=264), Case((3000, 77), weighted=True, bias=True)]


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=str)
def test_on_one_gpu(case: Case) -> None:
    assert_small(case, run_gemm(None, case))
    if case.activation != "none":
        assert_small(case, run_mlp(None, case))


def run_gradients(group: Any, out_dtype: torch.dtype, gathered: bool) -> dict[str, Any]:
    """Errors of wgrad with accumulate, of dgrad, and whether a second run gives the same bits."""
    torch.manual_seed(0)
    counts = (5, 0, 70, 1)
    num_rows, offsets = sum(counts), torch.tensor([0, *counts]).cumsum(0)
    grad, x = torch.randn(num_rows, 72), torch.randn(num_rows, 136)
    grad, x = grad.to(DEVICE, BF16), x.to(DEVICE, BF16)
    before = torch.randn(4, 72, 136).to(DEVICE, out_dtype)
    rows, index = x, torch.randperm(num_rows)
    options: dict[str, Any] = {"accumulate": True}
    if gathered:
        rows = x[index.to(DEVICE)]
        options["row_offset"] = index.to(DEVICE) * x.stride(0)
    parts = zip(grad.cpu().double().split(counts), rows.cpu().double().split(counts), strict=True)
    change = torch.stack([g.T @ r for g, r in parts])
    runs = [wgrad(grad, x, offsets.to(DEVICE), out=before.clone(), **options) for _ in range(2)]
    w = torch.randn(4, 72, 136).to(DEVICE, BF16)
    dx = dgrad(grad, w, offsets.to(DEVICE))
    expected = reference_grouped_gemm(grad.cpu(), w.mT.cpu(), counts)
    return {
        "accumulated": relative_error(runs[0].cpu(), before.cpu().double() + change),
        "empty": torch.equal(runs[0][1], before[1]),
        "same bits": torch.equal(*runs),
        "dgrad": relative_error(dx.cpu(), expected),
    }


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("out_dtype", [BF16, FP32])
def test_wgrad_adds(pool: RankPool, out_dtype: torch.dtype, gathered: bool) -> None:
    assert_gradients(pool.run(run_gradients, out_dtype, gathered, num_ranks=1)[0], out_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("out_dtype", [BF16, FP32])
def test_wgrad_adds_on_one_gpu(out_dtype: torch.dtype, gathered: bool) -> None:
    assert_gradients(run_gradients(None, out_dtype, gathered), out_dtype)


def assert_gradients(result: dict[str, Any], out_dtype: torch.dtype) -> None:
    assert result["accumulated"] < TOLERANCE[out_dtype] and result["dgrad"] < TOLERANCE[BF16]
    assert result["empty"] and result["same bits"]


def rows_of_no_expert(group: Any, product: str) -> torch.Tensor:
    """Gradients of the weights of 40 rows, of which experts have 19, in memory that held NaN, where
    those of the other rows are NaN."""
    with cases.filled_memory():
        x, w = torch.ones(40, 16, dtype=BF16), torch.ones(2, 32, 16, dtype=BF16)
        w_down, row_weight = torch.ones(2, 16, 16, dtype=BF16), torch.ones(40)
        operands = x, w, w_down, row_weight
        x, w, w_down, row_weight = (one.to(DEVICE).requires_grad_() for one in operands)
        offsets = torch.tensor([0, 5, 19], dtype=torch.int32, device=DEVICE)
        if product == "grouped_gemm":
            y = grouped_gemm(x, w, offsets, row_weight=row_weight)
        else:
            y = grouped_mlp(x, w, w_down, offsets, row_weight=row_weight)
        dy = torch.ones_like(y)
        dy[19:] = math.nan
        y.backward(dy)
    assert row_weight.grad is not None
    return row_weight.grad.cpu()


@pytest.mark.parametrize("product", ["grouped_gemm", "grouped_mlp"])
def test_weights_of_rows_of_no_expert_have_gradients_of_zero(pool: RankPool, product: str) -> None:
    (found,) = pool.run(rows_of_no_expert, product, num_ranks=1)
    assert (found[:19] > 0).all() and (found[19:] == 0).all()


def no_rows(group: Any) -> bool:
    """Without rows gradients are zeros, and accumulate leaves `out` as it is."""
    x, grad = (torch.zeros(0, 16, dtype=BF16, device=DEVICE) for _ in range(2))
    offsets = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    kept = wgrad(grad, x, offsets, out=torch.ones(2, 16, 16, device=DEVICE), accumulate=True)
    w = torch.ones(2, 32, 16, dtype=BF16, device=DEVICE, requires_grad=True)
    w_down = torch.ones(2, 16, 16, dtype=BF16, device=DEVICE, requires_grad=True)
    grouped_mlp(x, w, w_down, offsets).sum().backward()
    assert w.grad is not None and w_down.grad is not None
    return bool((kept == 1).all() and (w.grad == 0).all() and (w_down.grad == 0).all())


def test_no_rows(pool: RankPool) -> None:
    assert pool.run(no_rows, num_ranks=1) == [True]


def odd_gradients(group: Any) -> None:
    """A gradient that starts anywhere in memory; and graphs of gradients are refused."""
    x, w = (torch.randn(size, device=DEVICE, requires_grad=True) for size in ((3, 16), (1, 32, 16)))
    w_down = torch.randn(1, 16, 16, device=DEVICE, requires_grad=True)
    offsets = torch.tensor([0, 3], device=DEVICE)
    for y in (grouped_gemm(x, w, offsets), grouped_mlp(x, w, w_down, offsets)):
        torch.cat([torch.ones(1, device=DEVICE), y.flatten()]).square().sum().backward()
    y = grouped_gemm(x, w, offsets)
    with pytest.raises(BackendError, match="no second-order gradients"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_odd_gradients(pool: RankPool) -> None:
    pool.run(odd_gradients, num_ranks=1)


def run_changed_in_place(group: Any) -> None:
    x = torch.randn(6, 64, dtype=BF16, device=DEVICE, requires_grad=True)
    w_up, w_down = (
        torch.randn(2, *shape, dtype=BF16, device=DEVICE) for shape in ((32, 64), (64, 16))
    )
    for changed in range(2):
        offsets, index = (
            torch.tensor(one, device=DEVICE) for one in ([0, 3, 6], [5, 4, 3, 2, 1, 0])
        )
        layers = (
            grouped_gemm(x, w_up, offsets, row_index=index),
            grouped_mlp(x, w_up, w_down, offsets, row_index=index),
        )
        (offsets, index)[changed].zero_()
        for out in layers:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()


def test_where_rows_are_may_not_change_before_the_backward(pool: RankPool) -> None:
    pool.run(run_changed_in_place, num_ranks=1)
