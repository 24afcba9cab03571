"""Products of e4m3 whose warps each have one task: they compile without spills, and give the bits
of tiles whose warps do everything."""

from __future__ import annotations

from typing import Any

import cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from launches import recorded

from moe_engine import Activation
from moe_engine.device.lang import INTERPRETED
from moe_engine.grouped_gemm import tile_schedule
from moe_engine.grouped_gemm.config import (
    OFFERS_SPECIALIZED,
    SPECIALIZED,
    SPECIALIZED_BLOCK,
    GemmConfig,
)
from moe_engine.grouped_gemm.launch import multiply
from moe_engine.grouped_gemm.operands import Epilogue, Rows, Weights, num_parts
from moe_engine.grouped_gemm.quantization import QuantizedRows, quantize_rows, quantize_weights
from moe_engine.grouped_gemm.specialized import TileCounters, launch_specialized
from moe_engine.launch import launch

CONFIG = GemmConfig(*SPECIALIZED_BLOCK, **SPECIALIZED)
FP8 = torch.float8_e4m3fn
compiles = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
pytestmark = pytest.mark.skipif(not OFFERS_SPECIALIZED, reason="this Triton's Gluon is another one")


def launched(activation: str, has_counters: bool = False, casts: bool = False, **more: Any) -> Any:
    """The last launch of a product of empty operands with these parts of an epilogue."""
    rows, columns, depth, parts = 256, 512, 384, num_parts(activation)
    a = Rows(torch.empty(rows, depth, dtype=FP8), scale=torch.empty(rows, 3))
    w = torch.empty(2, parts * columns, depth, dtype=FP8)
    scale = torch.empty(2, parts * columns // 128, 3)
    weights = Weights(w, scale, more.pop("bias", None))
    epilogue, out = Epilogue(activation, **more), torch.empty(rows, columns, dtype=torch.bfloat16)
    with recorded() as made:
        schedule = tile_schedule(torch.tensor([0, 9, rows], dtype=torch.int32), rows, 128)
        if has_counters or casts:
            to = QuantizedRows.like(out) if casts else out
            args = a, weights, epilogue, to, schedule.for_kernels, CONFIG
            claimed, computed = torch.zeros(1, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)
            launch_specialized(launch, 8, *args, TileCounters(claimed, computed))
        else:
            multiply(a, weights, epilogue, schedule, rows, out, CONFIG)
    return made[-1]


@compiles
@pytest.mark.parametrize("casts", [False, True])
@pytest.mark.parametrize("has_counters", [False, True])
@pytest.mark.parametrize("activation", ["none", "swiglu", "silu"])
def test_nothing_is_spilled(activation: str, has_counters: bool, casts: bool) -> None:
    made = launched(activation, has_counters, casts)
    assert made.name == "specialized_gemm"
    built = made.compile()
    assert built.spill_bytes == 0
    assert built.shared_bytes <= 227 * 1024
    assert built.ptx.count("wgmma.mma_async") == 2 * 2 * 4  # halves, products of a step, quarters
    assert "setmaxnreg.inc.sync.aligned.u32 	224;" in built.ptx  # of the second half
    assert built.ptx.count("gpu.release.add") == 5 * (has_counters or casts)


@compiles
@pytest.mark.parametrize("part", ["bias", "row_weight", "pre"])
def test_other_epilogues_are_those_of_ordinary_tiles(part: str) -> None:
    of = dict(
        bias=torch.empty(2, 512, dtype=torch.bfloat16),
        row_weight=torch.empty(256),
        pre=torch.empty(256, 512, dtype=torch.bfloat16),
    )
    made = launched("none", **{part: of[part]})
    assert made.name == "grouped_gemm"
    assert made.options.num_warps == CONFIG.unspecialized().num_warps
    assert not made.compile().spills


def agree(_: Any, counts: list[int], sizes: tuple[int, int], activation: Any, seed: int) -> None:
    """Both kinds of tiles give the same bits, twice, and write no row that is not theirs."""
    on, (columns, depth) = cases.device(), sizes
    generator = torch.Generator(on).manual_seed(seed)
    parts, num_rows = num_parts(activation), sum(counts)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=on, generator=generator)

    x, w = quantize_rows(draw(num_rows + 3, depth)), draw(len(counts), parts * columns, depth)
    w, scale = quantize_weights(w)
    offsets = torch.tensor([0, *counts], device=on).cumsum(0).int()
    schedule = tile_schedule(offsets, num_rows + 3, 128)
    args = Rows(x[0], scale=x[1]), Weights(w, scale), Epilogue(activation), schedule, num_rows + 3
    found = []
    for config in (CONFIG, CONFIG, CONFIG.unspecialized()):
        out = torch.full((num_rows + 3, columns), 7.0, dtype=torch.bfloat16, device=on)
        multiply(*args, out, config)
        found.append(out)
    if sum(counts):
        rows, scales = quantize_rows(out[:num_rows])
        for claimed in (None, torch.zeros(1, dtype=torch.int64, device=on)):
            cast = QuantizedRows(torch.full_like(QuantizedRows.like(out).memory, 7), columns)
            given = *args[:3], cast, schedule.for_kernels, CONFIG
            launch_specialized(launch, 20, *given, TileCounters(claimed))
            assert torch.equal(cast.operand.x[:num_rows].view(torch.int8), rows.view(torch.int8))
            assert torch.equal(cast.operand.scale[:num_rows], scales)
            assert (cast.memory[num_rows:] == 7).all()
        # Each program claims its tiles, and one more number that tells it that there are none left.
        width = 128 if parts == 2 else 256
        assert claimed.item() == int(schedule.num_tiles) * -(-columns // width) + 20
    assert (found[0][num_rows:] == 7).all()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.gpu
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([0, 1, 63, 64, 65, 128, 129, 300]), min_size=1, max_size=5),
    st.sampled_from([128, 256, 384, 1024]),
    st.sampled_from([16, 128, 144, 640, 1040]),
    st.sampled_from(["none", "swiglu", "silu", "relu2"]),
    st.integers(0, 100),
)
def test_bits_are_those_of_ordinary_tiles(
    pool: Any, counts: list[int], columns: int, depth: int, activation: str, seed: int
) -> None:
    pool.run(agree, counts, (columns, depth), activation, seed, num_ranks=1)


@pytest.mark.gpu
def test_an_activation_with_numbers(pool: Any) -> None:
    gpt_oss = Activation("swiglu", limit=0.6, alpha=1.702, shift=1.0)
    pool.run(agree, [5, 0, 200], (256, 256), gpt_oss, 0, num_ranks=1)
