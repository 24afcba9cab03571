"""The oracle of the low-latency verbs against other ways to compute the same."""

from __future__ import annotations

import math
from fractions import Fraction

import cases
import numpy
import pytest
import torch
from low_latency_cases import cast_back

from moe_engine import low_latency_reference as reference
from moe_engine.grouped_gemm.quantization import cast


def all_e4m3():
    """Every finite e4m3 number by its byte, as exact float64: sign, 4 bits of exponent, 3 more."""
    numbers = {}
    for byte in range(256):
        sign, exponent, rest = byte >> 7, byte >> 3 & 15, byte & 7
        if (exponent, rest) != (15, 7):
            number = (rest / 8 + (exponent > 0)) * 2.0 ** (max(exponent, 1) - 7)
            numbers[byte] = -number if sign else number
    return numbers


def nearest_e4m3(value):
    """The byte nearest to a float64, of two equally near ones the even."""
    return min(
        (abs(number - value), byte & 1, math.copysign(1, number) != math.copysign(1, value), byte)
        for byte, number in all_e4m3().items()
    )[-1]


def blocks_of_every_size():
    """[8, 256] bf16: normal, tiny, huge, zero, one number alone, a power of two as the largest."""
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(0))
    x[1] *= 1e-6
    x[2] *= 1e30
    x[3] = 0
    x[4, 1:] = 0
    x[5] = x[5].clamp(-0.5, 0.5)
    x[6] = 448.0 / 2 ** torch.arange(256).div(16, rounding_mode="floor")
    x[7, :128] = -torch.arange(128.0)
    return x.bfloat16()


@pytest.mark.parametrize("round_scale", [False, True])
def test_cast_number_by_number(round_scale):
    x = blocks_of_every_size()
    rows, scales = cast(x, round_scale)
    assert rows.dtype == torch.float8_e4m3fn
    assert (scales.dtype, tuple(scales.shape)) == (torch.float32, (8, 2))
    for row in range(8):
        for block in range(2):
            values = x[row, block * 128 :][:128].float().numpy()
            amax = max(numpy.abs(values).max(), numpy.float32(1e-4))
            scale, factor = amax * numpy.float32(1 / 448), numpy.float32(448) / amax
            if round_scale:
                exact = Fraction(float(scale))
                exponent = next(e for e in range(-40, 128) if Fraction(2) ** e >= exact)
                scale, factor = numpy.float32(2.0**exponent), numpy.float32(2.0**-exponent)
            assert float(scales[row, block]) == scale
            bytes_ = rows[row, block * 128 :][:128].view(torch.uint8).tolist()
            assert bytes_ == [nearest_e4m3(float(value * factor)) for value in values]


def test_packed_scales_are_the_exponents_of_rounded_ones():
    x = blocks_of_every_size().reshape(2, 1024)
    rows, scales = cast(x, round_scale=True)
    packed_rows, packed = cast(x, round_scale=True, use_ue8m0=True)
    assert (packed.dtype, tuple(packed.shape)) == (torch.int32, (2, 2))
    assert torch.equal(packed_rows.view(torch.uint8), rows.view(torch.uint8))
    for row in range(2):
        for block in range(8):
            byte = int(packed[row, block // 4]) >> 8 * (block % 4) & 255
            assert 2.0 ** (byte - 127) == float(scales[row, block])
    back = cast_back(rows, scales)
    assert torch.equal(cast_back(packed_rows, packed), back)
    assert cases.relative_error(back, x) < 2**-5


def test_cast_of_no_rows():
    for packed, columns in ((False, 4), (True, 1)):
        rows, scales = cast(torch.empty(0, 512).bfloat16(), True, packed)
        assert (tuple(rows.shape), tuple(scales.shape)) == ((0, 512), (0, columns))


IDX = [torch.tensor([[0, 3], [2, 0]]), torch.tensor([[3, 2], [0, 1]])]


def test_the_worked_example():
    """That of the docstrings: rows hold 10 * source + token, y those rows as they are."""
    x = [torch.tensor([[10.0 * rank], [10.0 * rank + 1]]).bfloat16() for rank in range(2)]
    received = reference.low_latency_dispatch(x, IDX, 2, 4, use_fp8=False)
    zero, one = received
    assert zero.x[..., 0].tolist() == [[0, 1, 11, 0], [11, 0, 0, 0]]
    assert one.x[..., 0].tolist() == [[1, 10, 0, 0], [0, 10, 0, 0]]
    assert (zero.counts.tolist(), one.counts.tolist()) == ([3, 1], [2, 2])
    assert zero.src_info.tolist() == [[0, 1, 1, -1], [1, -1, -1, -1]]
    assert one.src_info.tolist() == [[1, 0, -1, -1], [0, 0, -1, -1]]
    assert zero.layout_range.tolist() == [[2, 2 << 32 | 1], [0, 1]]
    assert one.layout_range.tolist() == [[1, 1 << 32 | 1]] * 2
    weights = [torch.tensor([[0.5, 2.0], [1.0, 3.0]])] * 2
    out = reference.low_latency_combine([r.x for r in received], received, IDX, weights)
    assert out[0].flatten().tolist() == [0, 4]  # 1 of rank 1 and 3 * 1 of rank 0
    assert out[1].flatten().tolist() == [25, 44]


def test_an_expert_named_twice_gets_one_row_that_counts_twice():
    idx, weights = [torch.tensor([[1, 1, -1]])], [torch.tensor([[0.5, 4.0, 100.0]])]
    received = reference.low_latency_dispatch([torch.ones(1, 3).bfloat16()], idx, 2, 2, False)
    assert received[0].counts.tolist() == [0, 1]
    [out] = reference.low_latency_combine([received[0].x * 2], received, idx, weights)
    assert out.tolist() == [[9.0] * 3]


LARGE = 2.0**24  # LARGE + 1 is LARGE in fp32, and 256 + 1 is 256 in bf16


@pytest.mark.parametrize(
    ("num_ranks", "rows", "want"),
    [
        (4, {0: LARGE, 1: -LARGE, 2: 1.0}, 1.0),
        (4, {0: LARGE, 2: 1.0, 1: -LARGE}, 0.0),
        (1, {0: 256.0, 1: 1.0, 2: 1.0}, 258.0),
        (2, {0: 256.0, 1: 1.0, 2: 1.0}, 256.0),
        (2, {0: 256.0, 2: 1.0, 1: 1.0}, 256.0),
        (4, {0: 256.0, 1: 1.0, 2: 1.0}, 258.0),
    ],
)
def test_sums_are_in_order_and_rounded_twice(num_ranks, rows, want):
    """One token, whose experts return `rows`: {expert: row}."""
    no_ids = torch.empty(0, len(rows), dtype=torch.int64)
    idx = [torch.tensor([list(rows)])] + [no_ids] * (num_ranks - 1)
    weights = [torch.ones_like(ids, dtype=torch.float32) for ids in idx]
    x = [torch.ones(len(ids), 1).bfloat16() for ids in idx]
    received = reference.low_latency_dispatch(x, idx, 1, 4, use_fp8=False)
    values = torch.tensor([rows.get(expert, math.nan) for expert in range(4)])
    y = values.view(4, 1, 1).expand(4, num_ranks, 1).bfloat16().chunk(num_ranks)
    out = reference.low_latency_combine(list(y), received, idx, weights)
    assert out[0].item() == want


@pytest.mark.parametrize("kind", cases.ROUTINGS)
def test_the_sums_are_those_of_dense_experts(kind):
    num_ranks, num_experts, max_tokens, hidden = 3, 6, 20, 128
    counts = [20, 0, 7]
    x = [cases.tokens(t, hidden, 3, torch.bfloat16, r)[0] for r, t in enumerate(counts)]
    idx = [cases.route(kind, t, num_experts, 3, r) for r, t in enumerate(counts)]
    weights = [torch.rand(t, 3) for t in counts]
    received = reference.low_latency_dispatch(x, idx, max_tokens, num_experts)
    numbers = torch.arange(1.0, num_experts + 1)
    y = [
        cast_back(part.x, part.scales) * own[:, None, None].bfloat16()
        for part, own in zip(received, numbers.chunk(num_ranks), strict=True)
    ]
    out = reference.low_latency_combine(y, received, idx, weights)
    for have, rows, ids, w in zip(out, x, idx, weights, strict=True):
        factor = (torch.where(ids >= 0, w * numbers[ids], 0.0)).sum(1, keepdim=True)
        want = rows.double() * factor
        if kind == "nothing" or len(rows) == 0:
            assert torch.equal(have, torch.zeros_like(rows))
        else:
            assert cases.relative_error(have, want) < 0.04  # of e4m3, which has 4 bits


def test_masked_ranks_send_and_get_nothing():
    gone = reference.without(IDX, [1], 4)
    assert [ids.tolist() for ids in gone] == [[[0, -1], [-1, 0]], [[-1, -1], [-1, -1]]]
    assert all(torch.equal(a, b) for a, b in zip(reference.without(IDX, [], 4), IDX, strict=True))
