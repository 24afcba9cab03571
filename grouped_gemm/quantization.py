"""Weights and rows in e4m3, with a scale for each 128 x 128 of a weight and for each 128 columns of
a row, as in DeepSeek-V3 (section 3.3 of its report)."""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

import torch
import triton
from einops import rearrange, reduce, repeat

from ..checks import PAYLOAD_DTYPES, check_tensor
from ..device.constants import constants
from ..device.lang import INTERPRETED
from ..errors import DtypeError
from ..hardware import gpu
from ..launch import Grid
from ..utils import next_power_of_2, round_up
from .operands import FP8, Rows
from .quantization_kernels import QuantizedOut, QuantizedTile

BLOCK = 128
"""Rows and columns that share a scale."""
E4M3_MAX = 448.0
SMALLEST_AMAX = 1e-4
"""A block's largest magnitude counts as at least this, so that zeros have a scale."""
EXPONENT_BIAS, INFINITE_EXPONENT = 127, 128
TILE_ITEMS, TILE_WARPS = 4096, 4
"""What a program casts at a time."""


def cast(
    x: torch.Tensor, round_scale: bool = False, use_ue8m0: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., H] in e4m3 and its scales, one per 128 columns: float32 [..., H/128], or with
    use_ue8m0 int32 [..., H/512], four exponents + 127 each, the first in the lowest byte.

    A scale is amax / 448, with round_scale the next power of two from there. Products are fp32,
    e4m3 rounds to nearest even. Example, one block of zeros and a single 7.0: amax 7, scale
    0.015625 either way, whose exponent is -6 (121 in UE8M0); the 7 becomes 448. A NaN stays NaN,
    and does not count for amax; beside an infinity, whose scale is infinite, all become NaN when
    they are multiplied by it.
    """
    blocks = rearrange(x.float(), "... (b c) -> ... b c", c=BLOCK)
    size = blocks.abs().nan_to_num(0.0, math.inf)
    amax = reduce(size, "... b c -> ... b 1", "max").clamp_min(SMALLEST_AMAX)
    scale = amax * amax.new_tensor(1 / E4M3_MAX)
    factor = amax.new_tensor(E4M3_MAX) / amax
    if round_scale:
        exponent = ceil_log2(scale)
        scale = torch.exp2(exponent.float())
        factor = torch.where(scale.isinf(), 0, torch.exp2(-exponent.float()))
    rows = rearrange(blocks * factor, "... b c -> ... (b c)").to(FP8)
    scales = scale.squeeze(-1)
    if not use_ue8m0:
        return rows, scales
    assert round_scale, "only powers of two can be packed"
    packed = (exponent.squeeze(-1) + EXPONENT_BIAS).to(torch.uint8).contiguous()
    return rows, packed.view(torch.int32)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 [M, K], float32 scales [M, K / 128 rounded up]) of rows x [M, K], as the engine casts
    them: what `grouped_gemm` takes for x. A scale is the largest magnitude of 128 columns / 448."""
    check_tensor("x", x, ("M", "K"), PAYLOAD_DTYPES)
    num_columns = x.shape[1]
    padded = torch.nn.functional.pad(x, (0, -num_columns % BLOCK))
    rows, scales = cast(padded)
    return rows[:, :num_columns].contiguous(), scales


def quantize_weights(w: torch.Tensor, name: str = "w") -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 [L, N, K], float32 scales [L, N / 128, K / 128], rounded up) of the weights of experts
    w [L, N, K], bf16 or fp32: what `moe_ffn` and `grouped_gemm` take for them.

    A scale is the largest magnitude of 128 x 128 / 448, or the next power of two from there if e4m3
    then holds each of these weights as it is, as those of checkpoints with such scales. Else an
    element is off by at most 1/16 of itself, or 2**-10 of its scale. Works an expert at a time:
    beside the result it takes the memory of a few of them in fp32. `name` is that of w in messages.
    Raises DtypeError where a weight is NaN or infinite. Warns where more than half of the weights
    of 128 x 128 that are not 0 become 0, as next to 3e38, or if all are below 1e-10.
    """
    check_tensor(name, w, ("L", "N", "K"), (torch.bfloat16, torch.float32))
    check_finite(name, w)
    num_experts, rows, columns = w.shape
    blocks = triton.cdiv(rows, BLOCK), triton.cdiv(columns, BLOCK)
    values = torch.empty_like(w, dtype=FP8, memory_format=torch.contiguous_format)
    scales = w.new_empty((num_experts, *blocks), dtype=torch.float32)
    num_lost = torch.zeros((), dtype=torch.int64, device=w.device)
    for expert in range(num_experts):
        padded = w.new_zeros(blocks[0] * BLOCK, blocks[1] * BLOCK, dtype=torch.float32)
        padded[:rows, :columns] = w[expert]
        tiles = rearrange(padded, "(i r) (j c) -> i j r c", r=BLOCK, c=BLOCK)
        amax = reduce(tiles.abs(), "i j r c -> i j 1 1", "max").clamp_min(SMALLEST_AMAX)
        power = torch.exp2(ceil_log2(amax / E4M3_MAX).float())
        is_same = (tiles / power).to(FP8).float() * power == tiles
        is_exact = reduce(is_same, "i j r c -> i j 1 1", "all")
        scale = torch.where(is_exact, power, amax / E4M3_MAX)
        quantized = (tiles / scale).to(FP8)
        values[expert] = rearrange(quantized, "i j r c -> (i r) (j c)")[:rows, :columns]
        scales[expert] = scale[:, :, 0, 0]
        is_lost = (quantized.float() == 0) & (tiles != 0)
        num_lost += (2 * is_lost.sum((2, 3)) > (tiles != 0).sum((2, 3))).sum()
    if num_lost:
        warnings.warn(
            f"{name}: in {int(num_lost)} of {scales.numel()} blocks of 128 x 128, more than half "
            "of the weights that are not 0 become 0 in e4m3, as they are too small beside the "
            "largest of their block, or all of them are. Look for an outlier in the checkpoint, or "
            "leave these weights in bf16.",
            stacklevel=2,
        )
    return values, scales


def check_finite(name: str, w: torch.Tensor) -> None:
    """Raise DtypeError where weights of experts w [L, N, K] are NaN or infinite."""
    if w.numel() and not torch.stack(w.aminmax()).isfinite().all():
        experts = [expert for expert, one in enumerate(w) if not one.isfinite().all()]
        raise DtypeError(
            f"{name} is NaN or infinite in {len(experts)} of its {len(w)} experts, the first of "
            f"which is {experts[0]}, and e4m3 holds finite weights. Look at the checkpoint that "
            "they come from."
        )


def dequantize_weights(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """bf16 [L, N, K] nearest to e4m3 values times their scales float32 [L, N / 128, K / 128]."""
    check_tensor("values", values, ("L", "N", "K"), (FP8,))
    num_experts, *sizes = values.shape
    blocks = [triton.cdiv(size, BLOCK) for size in sizes]
    check_tensor("scales", scales, (num_experts, *blocks), (torch.float32,), values.device)
    w = torch.empty_like(values, dtype=torch.bfloat16, memory_format=torch.contiguous_format)
    for expert in range(num_experts):
        w[expert] = dequantize(values[expert], scales[expert])
    return w


def ceil_log2(x: torch.Tensor) -> torch.Tensor:
    """The exponents of the next powers of two from x > 0 on; 128 of infinity."""
    mantissa, exponent = torch.frexp(x)  # the mantissa lies in [0.5, 1)
    exponent = torch.where(x.isinf(), INFINITE_EXPONENT, exponent)
    return torch.where(mantissa > 0.5, exponent, exponent - 1)


def dequantize(values: torch.Tensor, scales: torch.Tensor, num_rows: int = BLOCK) -> torch.Tensor:
    """float32 [..., N, K]: e4m3 values times their scales, one for each num_rows (1 of rows, 128 of
    weights) and 128 columns."""
    rows, columns = values.shape[-2:]
    wide = repeat(scales, "... i j -> ... (i r) (j c)", r=num_rows, c=BLOCK)
    return values.float() * wide[..., :rows, :columns]


class QuantizedRows(NamedTuple):
    """Rows [M, K] in e4m3 as they travel between ranks: memory uint8 [M, B], of which each row
    holds K values, then its float32 scales."""

    memory: torch.Tensor
    depth: int

    @classmethod
    def within(cls, rows: torch.Tensor) -> QuantizedRows:
        """In the memory of rows [M, K] in bf16, which is larger."""
        num_rows, depth = rows.shape
        row_bytes = quantized_bytes(depth)
        memory = rows.view(-1).view(torch.uint8)[: num_rows * row_bytes]
        return cls(memory.view(num_rows, row_bytes), depth)

    @classmethod
    def like(cls, rows: torch.Tensor) -> QuantizedRows:
        """New memory for as many rows [M, K]."""
        num_rows, depth = rows.shape
        return cls.empty(num_rows, depth, rows)

    @classmethod
    def empty(cls, num_rows: int, depth: int, like: torch.Tensor) -> QuantizedRows:
        """New memory on the device of a tensor."""
        size = num_rows, quantized_bytes(depth)
        return cls(like.new_empty(size, dtype=torch.uint8), depth)

    @property
    def operand(self) -> Rows:
        """As a GEMM takes them."""
        begin = self.depth // 4
        scale = self.memory.view(torch.float32)[:, begin : begin + triton.cdiv(self.depth, BLOCK)]
        return Rows(self.memory[:, : self.depth].view(FP8), scale=scale)

    @property
    def views(self) -> QuantizedOut:
        """Where a cast writes them."""
        values, _, scale = self.operand
        assert scale is not None
        bits = values.view(torch.int8), scale.view(torch.int32)
        return QuantizedOut(*bits, values.stride(0), scale.stride(0))


def quantized_bytes(depth: int) -> int:
    """Bytes of a row of `QuantizedRows`, a multiple of 16; depth is one as well."""
    return round_up(depth + 4 * triton.cdiv(depth, BLOCK), 16)


def quantize_launch(
    x: torch.Tensor,
    out: QuantizedRows | QuantizedOut,
    num_rows: torch.Tensor | None = None,
    row_format: str = "fp8",
) -> tuple[Grid, tuple[Any, ...], dict[str, Any]]:
    """(grid, arguments, options) of `quantize_rows_kernel`, which casts rows x [M, K], the first
    num_rows int32 [1] of them, into `out`. It is launched for no rows, too, as when a Buffer warms
    up; with num_rows nothing but the pointers depends on M. row_format: see `cast.cast_row`."""
    most_rows, depth = x.shape
    columns = min(1024, max(BLOCK, next_power_of_2(depth)))
    rows = TILE_ITEMS // columns
    to = out.views if isinstance(out, QuantizedRows) else out
    num_programs = 2 if INTERPRETED else 8 * gpu(x.device).num_sms
    if num_rows is None:
        num_tiles = triton.cdiv(most_rows, rows) * triton.cdiv(depth, columns)
        num_programs = max(1, min(num_tiles, num_programs))
    tile = constants(QuantizedTile(rows, columns, row_format))
    options = dict(TILE=tile, num_warps=TILE_WARPS)
    return (num_programs,), (x, num_rows, to, most_rows, depth), options
