"""The two products of a layer's experts, on rows whose number the host does not know; and how these
rows travel: those of e4m3 weights are cast before they are sent."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..grouped_gemm import gemm_config
from ..grouped_gemm.config import GemmConfig
from ..grouped_gemm.launch import multiply
from ..grouped_gemm.operands import Epilogue, Rows
from ..grouped_gemm.quantization import QuantizedRows, quantize_launch, quantized_bytes
from ..grouped_gemm.quantization_kernels import quantize_rows_kernel
from ..grouped_gemm.schedule import TileSchedule
from ..launch import launch
from .base import LayerInputs


class ExpertMemory(NamedTuple):
    """What the products write: the activations [M, I]; for e4m3 weights these cast; y [M, H]."""

    act: torch.Tensor
    cast: QuantizedRows | None
    y: torch.Tensor

    @classmethod
    def empty(cls, inputs: LayerInputs, num_rows: int) -> ExpertMemory:
        """For up to so many rows of this rank's experts."""
        _, hidden, columns = inputs.w_down.shape
        act = inputs.x.new_empty(num_rows, columns)
        cast = QuantizedRows.like(act) if inputs.is_quantized else None
        return cls(act, cast, inputs.x.new_empty(num_rows, hidden))


def rows_to_send(inputs: LayerInputs) -> torch.Tensor:
    """x [T, H] as it travels, or for e4m3 weights `QuantizedRows` of it, in the dtype of x."""
    if not inputs.is_quantized:
        return inputs.x
    cast = QuantizedRows.like(inputs.x)
    grid, arguments, options = quantize_launch(inputs.x, cast)
    launch(quantize_rows_kernel, grid, *arguments, **options)
    return cast.memory.view(inputs.x.dtype)


def sent_columns(inputs: LayerInputs) -> int:
    """The columns of `rows_to_send`."""
    hidden, itemsize = inputs.x.shape[1], inputs.x.itemsize
    return quantized_bytes(hidden) // itemsize if inputs.is_quantized else hidden


def received_operand(rows: torch.Tensor, inputs: LayerInputs) -> Rows:
    """Rows that were sent, as the first product takes them."""
    if not inputs.is_quantized:
        return Rows(rows)
    return QuantizedRows(rows.view(torch.uint8), inputs.w_gate_up.shape[-1]).operand


def expert_tiles(inputs: LayerInputs, num_rows: int) -> tuple[GemmConfig, GemmConfig]:
    """Returns the tiles of both products, for about num_rows rows."""
    up = gemm_config(inputs.w_gate_up, num_rows, inputs.activation)
    return up, gemm_config(inputs.w_down, num_rows, block_m=up.block_m)


def multiply_up(
    rows: Rows,
    inputs: LayerInputs,
    schedule: TileSchedule,
    tiles: GemmConfig,
    memory: ExpertMemory,
    num_free_sms: int = 0,
) -> None:
    """The first product and its activation, of rows [M, H], see `received_operand`. num_free_sms:
    see `launch.multiply`."""
    how = schedule, len(memory.act), memory.act, tiles, num_free_sms
    multiply(rows, inputs.up, Epilogue(inputs.activation), *how)


def multiply_down(
    inputs: LayerInputs,
    schedule: TileSchedule,
    tiles: GemmConfig,
    memory: ExpertMemory,
    row_weight: torch.Tensor | None = None,
    num_free_sms: int = 0,
) -> torch.Tensor:
    """y [M, H]: the second product, times row_weight float32 [M]."""
    act, cast, y = memory
    rows = Rows(act) if cast is None else cast_rows(act, cast, schedule.offsets[-1:])
    how = schedule, len(y), y, tiles, num_free_sms
    return multiply(rows, inputs.down, Epilogue("none", row_weight), *how)


def cast_rows(x: torch.Tensor, out: QuantizedRows, num_rows: torch.Tensor) -> Rows:
    """The first rows of x [M, K] in e4m3, as many as num_rows int32 [1] says."""
    grid, arguments, options = quantize_launch(x, out, num_rows)
    launch(quantize_rows_kernel, grid, *arguments, **options)
    return out.operand
