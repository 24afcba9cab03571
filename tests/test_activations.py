"""Activations of grouped GEMMs and their gradients, against torch in fp64."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import cases
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from moe_engine.emulation import RankPool
from moe_engine.errors import ShapeError
from moe_engine.grouped_gemm import (
    Activation,
    gemm_config,
    grouped_gemm,
    grouped_mlp,
    tile_schedule,
)
from moe_engine.grouped_gemm.activations import AnyActivation
from moe_engine.grouped_gemm.launch import multiply
from moe_engine.grouped_gemm.operands import Epilogue, Rows, Weights
from moe_engine.weight_layouts import GateUp

GPT_OSS = Activation("swiglu", limit=0.6, alpha=1.702, shift=1.0)
"""gpt-oss's, with a limit that random rows reach."""
ACTIVATIONS = [
    "swiglu",
    "geglu_tanh",
    GPT_OSS,
    Activation("swiglu", limit=0.5),
    Activation("geglu", limit=0.75, shift=-0.5),
]


# --- By torch --------------------------------------------------------------------------------


def test_they_are_those_of_the_models() -> None:
    x = torch.randn(5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 4
    gate, up = x.chunk(2, -1)
    assert torch.equal(Activation("none")(x), x)
    torch.testing.assert_close(Activation("silu")(x), F.silu(x))
    torch.testing.assert_close(Activation("gelu")(x), F.gelu(x))
    torch.testing.assert_close(Activation("gelu_tanh")(x), F.gelu(x, approximate="tanh"))
    torch.testing.assert_close(Activation("relu2")(x), F.relu(x) ** 2)
    torch.testing.assert_close(Activation("swiglu")(x), F.silu(gate) * up)
    torch.testing.assert_close(Activation("geglu")(x), F.gelu(gate) * up)
    torch.testing.assert_close(Activation("geglu_tanh")(x), F.gelu(gate, approximate="tanh") * up)
    low, between = gate.clamp(max=3.0), up.clamp(-3.0, 3.0)
    of_gpt_oss = Activation("swiglu", limit=3.0, alpha=1.702, shift=1.0)
    torch.testing.assert_close(of_gpt_oss(x), (between + 1) * low * torch.sigmoid(low * 1.702))
    of_deepseek_v4 = Activation("swiglu", limit=3.0)
    torch.testing.assert_close(of_deepseek_v4(x), F.silu(low) * between)


@pytest.mark.parametrize(
    ("activation", "text"),
    [
        ("relu", "it must be one of"),
        (None, "it must be one of"),
        (["swiglu"], "it must be one of"),
        (Activation("relu"), "it must be one of"),
        (Activation("silu", limit=7.0), "limit, alpha and shift are for"),
        (Activation("geglu", alpha=2.0), "alpha is for swiglu"),
        (Activation("swiglu", limit=0.0), "limit above 0"),
        (Activation("swiglu", limit=float("nan")), "must be finite"),
        (Activation("swiglu", shift=float("inf")), "must be finite"),
        (Activation("swiglu", alpha="2"), "must be finite"),  # type: ignore[arg-type]
        (Activation("swiglu", limit=[7.0]), "it must be one of"),  # type: ignore[arg-type]
    ],
)
def test_what_is_none_is_refused(activation: Any, text: str) -> None:
    with pytest.raises(ShapeError, match=text):
        gemm_config(torch.empty(2, 16, 16), 8, activation)


def test_a_number_may_be_an_int() -> None:
    assert Activation.of(Activation("swiglu", 7, 1, 1)) == Activation("swiglu", 7.0, 1.0, 1.0)


def test_the_gradient_at_a_limit() -> None:
    """It is 1 at the limit itself, whatever `clamp` of the installed torch has there."""
    product = torch.tensor([-3.0, 0.5, 0.75, 1.0, 1.0, 0.75, -0.75, -1.0], requires_grad=True)
    activation = Activation("geglu", limit=0.75)
    out = activation(product)
    inside = torch.tensor([1.0, 1, 1, 0, 0, 1, 1, 0])
    [found] = torch.autograd.grad(out.sum(), product)
    assert torch.equal(found != 0, inside != 0)


# --- By kernels ------------------------------------------------------------------------------


def make(
    dtype: torch.dtype, counts: tuple[int, ...] = (5, 0, 19, 1), hidden: int = 24, columns: int = 40
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """x, w_up, w_down, b_up, b_down, row_weight; offsets."""
    generator = torch.Generator().manual_seed(sum(counts))

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(cases.device())

    experts, rows = len(counts), sum(counts)
    up, down = draw(experts, 2 * columns, hidden), draw(experts, hidden, columns)
    parts = [draw(rows, hidden), up * hidden**-0.5, down * columns**-0.5]
    parts += [draw(experts, 2 * columns), draw(experts, hidden)]
    offsets = F.pad(torch.tensor(counts).cumsum(0), (1, 0)).int().to(cases.device())
    return [*parts, draw(rows).float()], offsets


def by_expert(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, offsets: torch.Tensor
) -> torch.Tensor:
    """The product of each expert's rows, by torch."""
    parts = enumerate(pairwise(offsets.tolist()))
    added = torch.zeros_like(w[:, :, 0]) if bias is None else bias
    return torch.cat([x[begin:end] @ w[at].T + added[at] for at, (begin, end) in parts])


def errors(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> list[float]:
    return [
        cases.relative_error(one.detach(), other.detach())
        for one, other in zip(found, wanted, strict=True)
    ]


def run_mlp(_: Any, activation: Any, dtype: torch.dtype) -> list[float]:
    """How far the result and all gradients are from those in fp64."""
    parts, offsets = make(dtype)
    leaves = [part.clone().requires_grad_() for part in parts]
    x, up, down, b_up, b_down, row_weight = leaves
    more: dict[str, Any] = dict(b_up=b_up, b_down=b_down, row_weight=row_weight)
    y = grouped_mlp(x, up, down, offsets, activation=activation, **more)
    doubles = [part.double().requires_grad_() for part in parts]
    pre = by_expert(doubles[0], doubles[1], doubles[3], offsets)
    # Rounded as what is saved: which values are beyond a limit must not differ.
    pre = pre + (pre.to(dtype).double() - pre).detach()
    act = Activation.of(activation)(pre)
    want = by_expert(act, doubles[2], doubles[4], offsets) * doubles[5][:, None]
    dy = torch.randn_like(parts[0])
    found = [y, *torch.autograd.grad(y, leaves, dy)]
    return errors(found, [want, *torch.autograd.grad(want, doubles, dy.double())])


def check_mlp(pool: RankPool, activation: Any, dtype: torch.dtype) -> None:
    [found] = pool.run(run_mlp, activation, dtype, num_ranks=1)
    assert max(found) < {torch.float32: 2e-5, torch.bfloat16: 2e-2}[dtype], found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_feed_forwards(pool: RankPool, activation: Any, dtype: torch.dtype) -> None:
    check_mlp(pool, activation, dtype)


@given(
    st.sampled_from(["swiglu", "geglu", "geglu_tanh"]),
    st.none() | st.floats(0.01, 4.0),
    st.floats(0.25, 3.0),
    st.floats(-2.0, 2.0),
)
def test_any_numbers(
    pool: RankPool, name: str, limit: float | None, alpha: float, shift: float
) -> None:
    alpha = alpha if name == "swiglu" else 1.0
    check_mlp(pool, Activation(name, limit, alpha, shift), torch.float32)


def run_one_value(_: Any, activation: AnyActivation) -> list[float]:
    (x, up, *_more), offsets = make(torch.float32)
    leaves = x.requires_grad_(), up.requires_grad_()
    y = grouped_gemm(x, up, offsets, activation=activation)
    doubles = [one.detach().double().requires_grad_() for one in leaves]
    want = Activation.of(activation)(by_expert(doubles[0], doubles[1], None, offsets))
    dy = torch.randn_like(y)
    found = [y, *torch.autograd.grad(y, leaves, dy)]
    return errors(found, [want, *torch.autograd.grad(want, doubles, dy.double())])


@pytest.mark.parametrize(
    "activation", ["gelu_tanh", "gelu", "silu", "relu2", "none", Activation("none")], ids=str
)
def test_of_one_value(pool: RankPool, activation: AnyActivation) -> None:
    [found] = pool.run(run_one_value, activation, num_ranks=1)
    assert max(found) < 1e-5, found


def run_nan(_: Any, activation: Any) -> list[bool]:
    """Which rows are NaN, of which the fourth has one NaN in x."""
    (x, up, *_more), offsets = make(torch.float32)
    x[3, 2] = float("nan")
    y = grouped_gemm(x, up, offsets, activation=activation)
    assert torch.equal(y.isnan().any(1), y.isnan().all(1))
    return y.isnan().all(1).tolist()


@pytest.mark.parametrize("activation", [GPT_OSS, "swiglu", "relu2"], ids=str)
def test_a_nan_is_not_limited_away(pool: RankPool, activation: Any) -> None:
    [found] = pool.run(run_nan, activation, num_ranks=1)
    assert [at for at, is_nan in enumerate(found) if is_nan] == [3]


def run_splits(_: Any, num_splits: int, layout: str) -> list[float]:
    """Errors of the up-projection, and of the product with transposed weights."""
    (x, up, _down, b_up, *_more), offsets = make(torch.float32, hidden=96)
    w = up
    if layout != "concatenated":
        gate_and_up = up.unflatten(1, (2, -1))
        w = gate_and_up.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "two tensors":
            w = GateUp.of([*gate_and_up.transpose(0, 1).contiguous()], "concatenated").by_parts()
    dy = torch.randn(len(x), up.shape[1], device=x.device)

    def product(rows: torch.Tensor, weights: Weights, activation: Any = "none") -> torch.Tensor:
        how = dict(activation=activation, transposed=weights.transposed)
        config = replace(gemm_config(w, len(x), **how), num_splits=num_splits)
        schedule = tile_schedule(offsets, len(x), config.block_m)
        of = Rows(rows), weights, Epilogue(activation), schedule, len(x), None, config
        return multiply(*of)

    found = [product(x, Weights(w, bias=b_up), GPT_OSS), product(dy, Weights(w, transposed=True))]
    x, up, b_up, dy = (one.double() for one in (x, up, b_up, dy))
    want = GPT_OSS(by_expert(x, up, b_up, offsets)), by_expert(dy, up.mT, None, offsets)
    return errors(found, [*want])


@pytest.mark.parametrize("num_splits", [1, 2, 3])
@pytest.mark.parametrize("layout", ["concatenated", "interleaved", "two tensors"])
def test_shares_of_the_depth(pool: RankPool, num_splits: int, layout: str) -> None:
    [found] = pool.run(run_splits, num_splits, layout, num_ranks=1)
    assert max(found) < 1e-5, found
