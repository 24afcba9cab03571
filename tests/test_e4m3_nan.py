"""What is not a number stays so at each cast to e4m3, and what e4m3 cannot hold is refused."""

from __future__ import annotations

import math
import warnings
from typing import Any

import cases
import low_latency_cases as low_latency
import pytest
import test_quantized_layer as layers
import torch
import torch.distributed as dist
from training_cases import new_buffer

from moe_engine import DtypeError, moe_ffn, reference
from moe_engine.emulation import PerRank, RankPool
from moe_engine.grouped_gemm import gemm_config, tile_schedule
from moe_engine.grouped_gemm.config import OFFERS_SPECIALIZED
from moe_engine.grouped_gemm.launch import multiply
from moe_engine.grouped_gemm.operands import FP8, Epilogue, Rows, Weights
from moe_engine.grouped_gemm.quantization import (
    QuantizedOut,
    QuantizedRows,
    cast,
    quantize_launch,
    quantize_rows,
    quantize_weights,
)
from moe_engine.grouped_gemm.quantization_kernels import quantize_rows_kernel
from moe_engine.grouped_gemm.specialized import TileCounters, launch_specialized
from moe_engine.launch import launch

NAN, INF = math.nan, math.inf
OTHER_NAN = torch.tensor([-1], dtype=torch.int16).view(torch.bfloat16)
"""A negative NaN with all bits set."""


def special_rows() -> torch.Tensor:
    """bf16 [10, 512]: a NaN, an infinity, both, and next to the largest number; nothing else; and
    an ordinary row."""
    x = torch.randn(10, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[0, 3], x[1, 200], x[2, 511] = NAN, INF, -INF
    x[3, 130], x[3, 140], x[4, 5] = OTHER_NAN[0], INF, OTHER_NAN[0]
    x[4, 6] = torch.finfo(torch.bfloat16).max
    x[5], x[6], x[7] = NAN, INF, 0
    x[8, :128], x[8, 0] = torch.finfo(torch.bfloat16).max, -INF
    return x


# --- Casts ---------------------------------------------------------------------------------------


def run_casts(_: Any, x: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The bits of rows and scales by the kernel, in each format of scales."""
    x, found = x.to(cases.device()), []
    for row_format, step in (("fp8", 128), ("rounded", 128), ("ue8m0", 512)):
        values = x.new_zeros(x.shape, dtype=torch.int8)
        scales = x.new_zeros(len(x), x.shape[1] // step, dtype=torch.int32)
        out = QuantizedOut(values, scales, values.stride(0), scales.stride(0))
        grid, arguments, options = quantize_launch(x, out, row_format=row_format)
        launch(quantize_rows_kernel, grid, *arguments, **options)
        found.append((values.cpu(), scales.cpu()))
    return found


def check_casts(found: list[tuple[torch.Tensor, torch.Tensor]], x: torch.Tensor) -> None:
    """The bits are those of the oracle, but for those of a NaN."""
    for (values, scales), options in zip(found, [(), (True,), (True, True)], strict=True):
        want, want_scales = cast(x, *options)
        have = values.view(FP8).float()
        assert torch.equal(have.isnan(), want.float().isnan())
        assert torch.equal(have.nan_to_num(), want.float().nan_to_num())
        assert torch.equal(scales, want_scales.view(torch.int32))
        assert have[x.isnan()].isnan().all() and have[x.isinf()].isnan().all()
        assert have[9].isfinite().all() and have[7].isfinite().all()


def test_casts(pool: RankPool) -> None:
    x = special_rows()
    check_casts(pool.run(run_casts, x, num_ranks=1)[0], x)


def run_dispatch(group: dist.ProcessGroup, forms: list[str], x: Any, idx: Any, weights: Any) -> Any:
    x, idx = x.to(cases.device()), idx.to(cases.device())
    buffer = low_latency.make_buffer(group, len(x), x.shape[1], 4)
    found = []
    for form in forms:
        (rows, scales), counts, _ = low_latency.dispatch(buffer, x, idx, len(x), 4, form)
        is_row = torch.arange(rows.shape[1], device=rows.device) < counts[:, None]
        found.append((rows.float()[is_row].cpu(), scales.view(torch.int32)[is_row].cpu()))
    buffer.destroy()
    return found


def test_low_latency_dispatch(pool: RankPool) -> None:
    forms = ["fp8", "rounded", "ue8m0"]
    x, idx = special_rows(), cases.route("uniform", 10, 4, 2, 0)
    inputs = [x, x.flip(0)], [idx, idx.flip(1)], [torch.ones(10, 2)] * 2
    results = pool.run(run_dispatch, forms, *map(PerRank, inputs), num_ranks=2)
    for at, form in enumerate(forms):
        received = low_latency.reference.low_latency_dispatch(
            *inputs[:2], 10, 4, **low_latency.FORMS[form]
        )
        for want, found in zip(received, results, strict=True):
            is_row = torch.arange(20) < want.counts[:, None]
            rows, scales = found[at]
            assert want.scales is not None
            assert torch.equal(rows.isnan(), want.x.float()[is_row].isnan())
            assert torch.equal(rows.nan_to_num(), want.x.float()[is_row].nan_to_num())
            assert torch.equal(scales, want.scales.view(torch.int32)[is_row])


# --- Weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_that_are_not_finite_are_refused(dtype: torch.dtype, value: float) -> None:
    w = torch.randn(3, 130, 144).to(dtype)
    w[1, 129, 140] = value
    with pytest.raises(DtypeError, match=r"^w is NaN or infinite in 1 of its 3 experts, .* is 1,"):
        quantize_weights(w)


@pytest.mark.parametrize(("scale", "outlier"), [(0.02, 3e38), (1.0, -1e6), (1e-12, None)])
def test_weights_that_vanish_warn(scale: float, outlier: float | None) -> None:
    w = torch.randn(2, 256, 128) * scale
    w[0] = 0
    w[1, 128:] = torch.randn(128, 128)
    if outlier is not None:
        w[1, 5, 5] = outlier
    with pytest.warns(UserWarning, match="^w: in 1 of 4 blocks of 128 x 128, more than half"):
        quantize_weights(w.bfloat16())


def test_other_weights_do_not_warn() -> None:
    largest = torch.finfo(torch.bfloat16).max
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantize_weights(torch.zeros(1, 128, 128))
        quantize_weights(torch.randn(2, 130, 144).bfloat16())
        quantize_weights(torch.full((1, 128, 16), largest, dtype=torch.bfloat16))
        quantize_weights(torch.randn(0, 16, 16))
        spread = torch.randn(2, 128, 128) * torch.rand(2, 128, 1) ** 3
        quantize_weights(spread)


# --- Layers --------------------------------------------------------------------------------------

PLACES = (
    "x NaN",
    "x inf",
    "up NaN",
    "up scale inf",
    "bias NaN",
    "bias inf",
    "down NaN",
    "bias 2 NaN",
)


def place(parts: layers.Parts, where: str) -> layers.Parts:
    """A copy of a layer's arguments in which one number of rank 0 is none."""
    parts = [[one.clone() for one in part] for part in parts]
    name, number = where.rsplit(" ", 1)
    at = {"x": 0, "up": 3, "down": 4, "up scale": 5, "bias": 7, "bias 2": 8}[name]
    parts[at][0].view(-1)[2] = float(number)
    return parts


def run_layers(group: dist.ProcessGroup, how: dict[str, Any], *layers_of: Any) -> Any:
    """The results of a rank, one for each tuple of arguments."""
    buffer, found = None, []
    for parts in layers_of:
        x, idx, weights, up, down, s_up, s_down, *biases = layers.got(parts)
        if buffer is None:
            sizes = group.size() * len(up), idx.shape[1], how["max_tokens"], how["backend"]
            buffer = new_buffer(group, x, *sizes, **how["options"])
        given: dict[str, Any] = dict(max_tokens=how["hint"], biases=tuple(biases))
        found.append(moe_ffn(x, idx, weights, (up, s_up), (down, s_down), buffer, **given).cpu())
    assert buffer is not None
    buffer.check()
    dist.barrier(group)
    buffer.destroy()
    return found


def run_wide_layers(group: dist.ProcessGroup, how: dict[str, Any], *layers_of: Any) -> Any:
    with layers.wide_tiles(how["options"].pop("block_m")):
        return run_layers(group, how, *layers_of)


WAYS = {name: dict(way) for name, way in layers.WAYS.items()}
WAYS |= {f"wide {rows}": dict(block_m=rows) for rows in layers.WIDE}


@pytest.mark.parametrize("way", WAYS)
def test_layers(pool: RankPool, way: str) -> None:
    """Rows are finite exactly where those of plain torch are, and right there."""
    options = dict(WAYS[way])
    decode, backend = options.pop("decode", False), options.pop("backend", "auto")
    how = dict(max_tokens=5, backend=backend, hint=5 if decode else None)
    how["options"] = options if decode else options | dict(decode_tokens=0)
    sizes: Any = dict(hidden=256, intermediate=256, num_local=2, num_topk=1)
    whole = layers.make([5, 3], has_bias=True, **sizes)
    whole[1] = [torch.tensor([[0], [1], [2], [3], [0]]), torch.tensor([[3], [2], [0]])]
    cases_of = [place(whole, where) for where in PLACES]
    args = [
        PerRank([list(one) for one in zip(*layers.sent(parts), strict=True)]) for parts in cases_of
    ]
    function = run_wide_layers if "block_m" in options else run_layers
    found = pool.run(function, how, *args, num_ranks=2)
    for at, parts in enumerate(cases_of):
        *inputs, s_up, s_down, b_up, b_down = parts
        wanted = reference.moe_ffn(*inputs, biases=(b_up, b_down), scales=(s_up, s_down))
        assert any(not want.isfinite().all() for want in wanted)
        for have, want in zip((one[at] for one in found), wanted, strict=True):
            assert torch.equal(have.isfinite(), want.isfinite()), PLACES[at]
            have, want = (one.nan_to_num(0, 0, 0) for one in (have, want))
            assert cases.relative_error(have, want) < layers.TOLERANCE, PLACES[at]


# --- On GPUs -------------------------------------------------------------------------------------


def products_on_gpu(_: Any, x: torch.Tensor) -> None:
    """Casts of the hardware, and products of each kind of tile, of rows and weights with NaN: which
    results are NaN, and stay so when they are cast."""
    on = cases.device()
    assert on.type == "cuda"
    check_casts(run_casts(None, x), x)
    generator = torch.Generator().manual_seed(1)
    w = torch.randn(2, 512, 512, generator=generator)
    w, scale = quantize_weights(w)
    w.view(torch.int8)[1, 7, 9] = 0x7F
    rows = quantize_rows(x)
    offsets = torch.tensor([0, 6, len(x)], dtype=torch.int32, device=on)
    wanted = torch.cat([
        rows[0][begin:end].float() * rows[1][begin:end].repeat_interleave(128, 1)
        @ (w[e].float() * scale[e].repeat_interleave(128, 0).repeat_interleave(128, 1)).T
        for e, (begin, end) in enumerate([(0, 6), (6, len(x))])
    ])  # fmt: skip
    assert wanted.isfinite().any() and wanted[6:, 7].isnan().all()
    a, weights = Rows(rows[0].to(on), scale=rows[1].to(on)), Weights(w.to(on), scale.to(on))
    special = layers.WIDE[128]
    configs = [gemm_config(weights.w, len(x)), layers.WIDE[64], special.unspecialized()]
    for config in configs + [special] * OFFERS_SPECIALIZED:
        schedule = tile_schedule(offsets, len(x), config.block_m)
        out = torch.zeros(len(x), 512, dtype=torch.bfloat16, device=on)
        multiply(a, weights, Epilogue("none"), schedule, len(x), out, config)
        assert torch.equal(out.cpu().isfinite(), wanted.isfinite())
        rows_of = run_casts(None, out)
        assert torch.equal(rows_of[0][0].view(FP8).float().isnan(), out.cpu().isnan())
    if OFFERS_SPECIALIZED:  # these tiles cast their results themselves
        into = QuantizedRows.like(out)
        given = a, weights, Epilogue("none"), into, schedule.for_kernels, special
        launch_specialized(launch, 20, *given, TileCounters(None))
        assert torch.equal(into.operand.x.float().isnan(), out.isnan())


@pytest.mark.gpu
def test_on_gpus(pool: RankPool) -> None:
    pool.run(products_on_gpu, special_rows(), num_ranks=1)
