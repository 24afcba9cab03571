"""Layers with e4m3 weights on every engine, against plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import cases
import pytest
import torch
import torch.distributed as dist
from cases import relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from training_cases import end, make_case, new_buffer, on_device, poison_all

from moe_engine import Activation, BackendError, DtypeError, ShapeError, moe_ffn, reference
from moe_engine.emulation import PerRank, RankError, RankPool
from moe_engine.grouped_gemm import config, gemm_config, tile_schedule
from moe_engine.grouped_gemm.config import SPECIALIZED, SPECIALIZED_BLOCK, WIDE_E4M3, GemmConfig
from moe_engine.grouped_gemm.launch import multiply
from moe_engine.grouped_gemm.operands import FP8, Epilogue, Rows, Weights
from moe_engine.grouped_gemm.quantization import (
    dequantize,
    dequantize_weights,
    quantize_rows,
    quantize_weights,
)

Parts = list[list[torch.Tensor]]
TOLERANCE = 1e-2
"""Sums in another order, rounded to bf16 and to e4m3 in between."""


def make(num_tokens: list[int], has_bias: bool = False, **sizes: Any) -> Parts:
    """Per-rank lists: x, ids, weights, w_gate_up and w_down in e4m3, their scales, biases (or
    empty)."""
    sizes = dict(hidden=256, intermediate=144, dtype="bf16") | sizes
    *routed, ups, downs, _ = make_case(len(num_tokens), num_tokens, **sizes)
    up, down = (zip(*map(quantize_weights, one), strict=True) for one in (ups, downs))
    (up, s_up), (down, s_down) = map(list, up), map(list, down)
    generator = torch.Generator().manual_seed(3)
    biases = []
    for like in (up, down):
        size = like[0].shape[:2] if has_bias else (0,)
        added = torch.randn(len(num_tokens), *size, generator=generator).bfloat16()
        biases.append(list(added.unbind()))
    return [*routed, up, down, s_up, s_down, *biases]


def sent(parts: Parts) -> list[PerRank]:
    """As ranks get them: torch does not pickle e4m3."""
    e4m3 = torch.float8_e4m3fn
    bits = [[p.view(torch.int8) if p.dtype == e4m3 else p for p in part] for part in parts]
    return [PerRank(part) for part in bits]


def got(parts: Any) -> list[torch.Tensor]:
    """What was sent, on this rank's device."""
    e4m3 = torch.float8_e4m3fn
    return [p.view(e4m3) if p.dtype == torch.int8 else p for p in on_device(parts)]


def run(
    group: dist.ProcessGroup, activation: Any, how: dict[str, Any], *parts: Any
) -> tuple[torch.Tensor, bool]:
    """The result of a rank; whether a second call, on memory full of NaN, has the same bits."""
    x, idx, weights, up, down, s_up, s_down, *biases = got(parts)
    sizes = group.size() * len(up), idx.shape[1], how["max_tokens"], how["backend"]
    buffer = new_buffer(group, x, *sizes, **how["options"])
    given: dict[str, Any] = dict(activation=activation, max_tokens=how["hint"])
    if biases[0].numel():
        given["biases"] = tuple(biases)
    args = x, idx, weights, (up, s_up), (down, s_down), buffer
    with cases.filled_memory():
        out = moe_ffn(*args, **given)
        poison_all(buffer)
        again = moe_ffn(*args, **given)
    end(buffer)
    return out.cpu(), torch.equal(out, again)


def check(
    pool: RankPool, parts: Parts, activation: Any = "swiglu", backend: str = "auto",
    decode: bool = False, function: Any = run, **options: Any,
) -> list[torch.Tensor]:  # fmt: skip
    """The results of all ranks."""
    most = max(len(x) for x in parts[0])
    how = dict(max_tokens=max(1, most), backend=backend, hint=most if decode else None)
    how["options"] = options if decode else options | dict(decode_tokens=0)
    found = pool.run(function, activation, how, *sent(parts), num_ranks=len(parts[0]))
    x, idx, weights, up, down, s_up, s_down, *biases = parts
    more: Any = dict(biases=biases if biases[0][0].numel() else (), scales=(s_up, s_down))
    wanted = reference.moe_ffn(x, idx, weights, up, down, activation=activation, **more)
    for (have, is_same), want in zip(found, wanted, strict=True):
        assert is_same
        assert have.dtype == torch.bfloat16
        error = relative_error(have, want)
        assert error < TOLERANCE or not (have.any() or want.any()), error
    return [have for have, _ in found]


WAYS: dict[str, dict[str, Any]] = {
    "fused": {},
    "decode": dict(decode=True),
    "collective": dict(backend="collective"),
    "passes": dict(capacity_factor=1.0),
}
"""How layers run."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_tokens", [[9], [6, 1], [5, 0, 8]])
def test_ways(pool: RankPool, way: str, num_tokens: list[int]) -> None:
    check(pool, make(num_tokens), **WAYS[way])


@pytest.mark.parametrize(("kind", "num_ranks"), cases.routings(1, 2, 4))
def test_routings(pool: RankPool, kind: str, num_ranks: int) -> None:
    check(pool, make([4, 7, 1, 5][:num_ranks], kind=kind))


@pytest.mark.parametrize("way", ["fused", "decode", "collective"])
def test_biases_and_another_activation(pool: RankPool, way: str) -> None:
    gpt_oss = Activation("swiglu", limit=0.6, alpha=1.702, shift=1.0)
    check(pool, make([6, 3], has_bias=True), gpt_oss, **WAYS[way])


WIDE = {
    64: GemmConfig(64, 256, 128, subtiles=2, **WIDE_E4M3[64]),
    128: GemmConfig(*SPECIALIZED_BLOCK, **SPECIALIZED),
}
"""Tiles of 256 columns, by their rows."""


def run_wide(
    group: dist.ProcessGroup, activation: Any, how: dict[str, Any], *parts: Any
) -> tuple[torch.Tensor, bool]:
    """`run` with such tiles."""
    with wide_tiles(how["options"].pop("block_m")):
        return run(group, activation, how, *parts)


@contextmanager
def wide_tiles(block_m: int) -> Iterator[None]:
    """Products choose tiles of 256 columns and so many rows."""
    with patch.object(GemmConfig, "predicted", lambda *_: WIDE[block_m]):
        config._choose.cache_clear()
        yield
    config._choose.cache_clear()


@pytest.mark.parametrize("num_tokens", [[6, 3], [6, 0, 3], [170, 9]])
@pytest.mark.parametrize("block_m", WIDE)
def test_wide_tiles(pool: RankPool, block_m: int, num_tokens: list[int]) -> None:
    """Two of them hold a row's columns of gate and up; the last columns of x fill no step, and
    those of the result no tile."""
    sizes: dict[str, Any] = dict(hidden=272, intermediate=256, num_local=2)
    check(pool, make(num_tokens, **sizes), function=run_wide, block_m=block_m)


@pytest.mark.parametrize(("kind", "num_ranks"), cases.routings(1, 2, 4))
def test_routings_of_specialized_tiles(pool: RankPool, kind: str, num_ranks: int) -> None:
    parts = make([4, 7, 1, 5][:num_ranks], kind=kind, intermediate=256)
    check(pool, parts, function=run_wide, block_m=128)


def test_ways_agree(pool: RankPool) -> None:
    """The rows of a layer are cast in the same way, whatever brings them."""
    parts = make([6, 3])
    first, second = (check(pool, parts, **WAYS[way]) for way in ("fused", "decode"))
    for one, other in zip(first, second, strict=True):
        assert relative_error(one, other) < 4e-3


@settings(max_examples=cases.few_examples())
@given(
    num_tokens=st.lists(st.integers(0, 12), min_size=1, max_size=4).filter(any),
    hidden=st.integers(1, 20),
    columns=st.integers(1, 18),
    num_local=st.integers(1, 4),
    num_topk=st.integers(1, 4),
    way=st.sampled_from(list(WAYS)),
    seed=st.integers(0, 99),
)
def test_any_shape(
    pool: RankPool, num_tokens: list[int], hidden: int, columns: int, num_local: int,
    num_topk: int, way: str, seed: int,
) -> None:  # fmt: skip
    cases.skip_where_shapes_compile(pool)
    num_topk = min(num_topk, len(num_tokens) * num_local)
    sizes: Any = dict(hidden=16 * hidden, intermediate=16 * columns, num_local=num_local)
    check(pool, make(num_tokens, num_topk=num_topk, seed=seed, **sizes), **WAYS[way])


# --- The casts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 128, 256), (3, 144, 208), (1, 16, 16)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    w = torch.randn(shape, dtype=dtype)
    w[0, :16, :16] = 0
    values, scales = quantize_weights(w)
    assert values.dtype == torch.float8_e4m3fn
    assert list(scales.shape) == [shape[0], *(-(-size // 128) for size in shape[1:])]
    found = dequantize(values, scales)
    assert found.shape == w.shape
    assert not found[0, :16, :16].any()
    size = w.float().abs()
    smallest = scales.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, : shape[1], : shape[2]]
    assert ((found - w.float()).abs() <= torch.maximum(size / 16, smallest * 2**-10) * 1.001).all()


def test_weights_that_are_e4m3_already() -> None:
    """Bits are kept: what a checkpoint's weights become in bf16 is quantized back to them."""
    values, scales = quantize_weights(torch.randn(2, 256, 384))
    again, found = quantize_weights(dequantize(values, scales).bfloat16())
    assert torch.equal(values.view(torch.int8), again.view(torch.int8))
    assert ((found / scales - 1).abs() < 2**-8).all()


def test_rows() -> None:
    x = torch.randn(5, 208).bfloat16()
    values, scales = quantize_rows(x)
    assert values.shape == x.shape
    assert scales.shape == (5, 2)
    assert relative_error(dequantize(values, scales, 1), x) < 0.04


# --- Bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: quantize_rows(torch.randn(8)), ShapeError, "x has shape"),
        (lambda: quantize_rows(torch.ones(2, 8).long()), DtypeError, "x is int64"),
        (lambda: quantize_rows([1.0]), DtypeError, "x is a list"),
        (lambda: dequantize_weights(*quantized(scales=(2, 3, 3))), ShapeError, "scales has shape"),
        (lambda: dequantize_weights(*quantized(scales=(1, 2, 1))), ShapeError, "scales has shape"),
        (lambda: dequantize_weights(*quantized()[::-1]), DtypeError, "values is float32"),
    ],
)
def test_casts_that_are_refused(call: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def quantized(scales: tuple[int, ...] = (2, 2, 1)) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(2, 130, 96).to(FP8), torch.ones(scales)


def test_weights_of_few_experts() -> None:
    values, scales = quantized()
    assert dequantize_weights(values, scales).dtype == torch.bfloat16
    assert dequantize_weights(values[:0], scales[:0]).shape == (0, 130, 96)


def refused(group: dist.ProcessGroup, change: str, *parts: Any) -> None:
    x, idx, weights, up, down, s_up, s_down, *_ = got(parts)
    buffer = new_buffer(group, x, group.size() * len(up), idx.shape[1], len(x))
    w_gate_up: Any = (up, s_up)
    w_down: Any = (down, s_down)
    more: dict[str, Any] = {}
    if change == "one":
        w_down = dequantize(down, s_down).bfloat16()
    elif change == "fp32":
        x = x.float()
    elif change == "scales":
        w_gate_up = up, s_up[:, :1]
    elif change == "scales' dtype":
        w_down = down, s_down.bfloat16()
    elif change == "no scales":
        w_gate_up, w_down = up, down
    elif change == "layout":
        more["layout"] = "interleaved"
    elif change == "gradient":
        x.requires_grad_()
    moe_ffn(x, idx, weights, w_gate_up, w_down, buffer, **more)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ("one", DtypeError, "w_down has no scales"),
        ("fp32", DtypeError, "x is float32 and the weights are e4m3"),
        ("scales", ShapeError, r"w_gate_up\[1\]"),
        ("scales' dtype", DtypeError, r"w_down\[1\]"),
        ("no scales", DtypeError, "w_gate_up"),
        ("layout", ShapeError, "layout is"),
        ("gradient", BackendError, "no gradients through e4m3"),
    ],
)
def test_what_is_refused(pool: RankPool, change: str, error: type, words: str) -> None:
    parts = make([3], num_topk=2)
    with pytest.raises(RankError, match=words) as info:
        pool.run(refused, change, *sent(parts), num_ranks=1)
    assert error.__name__ in str(info.value)


def differ(group: dist.ProcessGroup, *parts: Any) -> None:
    x, idx, weights, up, down, s_up, s_down, *_ = got(parts)
    buffer = new_buffer(group, x, group.size() * len(up), idx.shape[1], len(x), decode_tokens=0)
    both: Any = (up, s_up), (down, s_down)
    if group.rank() == 1:
        both = dequantize(up, s_up).bfloat16(), dequantize(down, s_down).bfloat16()
    moe_ffn(x, idx, weights, *both, buffer)
    if x.is_cuda:
        torch.cuda.synchronize()
    buffer.check()


def test_ranks_that_differ(pool: RankPool) -> None:
    with pytest.raises(RankError, match="ShapeError"):
        pool.run(differ, *sent(make([3, 3])), num_ranks=2)


# --- Calls one after another ---------------------------------------------------------------------


def run_other_rows(
    group: dist.ProcessGroup, how: dict[str, Any], *rounds: Any
) -> list[torch.Tensor]:
    """Of one Buffer, by turns: calls with other routings, and so with other numbers of rows."""
    given = [got(parts) for parts in rounds]
    x, idx, _, up, *_ = given[0]
    sizes = group.size() * len(up), idx.shape[1], how["max_tokens"]
    buffer = new_buffer(group, x, *sizes, **how["options"])
    outs = []
    for x, idx, weights, up, down, s_up, s_down, *_ in 2 * given:
        args = x, idx, weights, (up, s_up), (down, s_down), buffer
        outs.append(moe_ffn(*args, max_tokens=how["hint"]).cpu())
    end(buffer)
    return outs


@pytest.mark.parametrize("way", ["fused", "decode", "passes"])
def test_other_rows_in_each_call(pool: RankPool, way: str) -> None:
    """What was prepared for one number of rows serves any other, also none on a rank, and more than
    have room in a pass."""
    rounds = [make([6, 3], seed=seed) for seed in range(4)]
    for parts, expert in zip(rounds, (-1, 0, 5, None), strict=True):
        if expert is not None:
            parts[1] = [torch.full_like(idx, -1) for idx in parts[1]]
            for idx in parts[1]:
                idx[:, 0] = expert
    options = WAYS[way] if way != "decode" else {}
    how = dict(max_tokens=6, hint=6 if way == "decode" else None, options=options)
    if way != "decode":
        how["options"] = options | dict(decode_tokens=0)
    per_rank = [PerRank([list(one) for one in zip(*sent(parts), strict=True)]) for parts in rounds]
    found = pool.run(run_other_rows, how, *per_rank, num_ranks=2)
    for number, parts in enumerate(2 * rounds):
        *inputs, s_up, s_down, _, _ = parts
        wanted = reference.moe_ffn(*inputs, scales=(s_up, s_down))
        for have, want in zip(found, wanted, strict=True):
            one = have[number]
            assert relative_error(one, want) < TOLERANCE or not (one.any() or want.any())


def run_splits(_: Any, num_splits: int) -> list[float]:
    """How far the products of both activations are from whole ones, where their depth is shared."""
    x, w = quantize_rows(torch.randn(9, 400)), quantize_weights(torch.randn(3, 32, 400))
    on = cases.device()
    x, w = (x[0].to(on), x[1].to(on)), (w[0].to(on), w[1].to(on))
    offsets = torch.tensor([0, 4, 4, 9], device=on)
    found = []
    for activation in ("none", "swiglu"):
        config = replace(gemm_config(w[0], 9, activation), num_splits=num_splits)
        schedule = tile_schedule(offsets, 9, config.block_m)
        args = Rows(x[0], scale=x[1]), Weights(*w), Epilogue(activation), schedule, 9, None
        have, want = multiply(*args, config), multiply(*args, replace(config, num_splits=1))
        found.append(relative_error(have, want))
    return found


@pytest.mark.parametrize("num_splits", [2, 3, 8])
def test_shares_of_the_depth(pool: RankPool, num_splits: int) -> None:
    """Also more shares than there are blocks of it."""
    [found] = pool.run(run_splits, num_splits, num_ranks=1)
    assert max(found) < 4e-3
