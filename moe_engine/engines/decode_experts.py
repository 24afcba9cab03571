"""The experts of a layer of few tokens, whose number the host does not know: two products that are
bound by the weights' bytes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..grouped_gemm import gemm_config, tile_schedule
from ..grouped_gemm.launch import multiply
from ..grouped_gemm.operands import Epilogue, Rows
from ..grouped_gemm.quantization import QuantizedRows, quantize_launch
from ..grouped_gemm.quantization_kernels import quantize_rows_kernel
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
        x = inputs.x
        act = x.new_empty(num_rows, inputs.w_down.shape[2])
        cast = QuantizedRows.like(act) if inputs.is_quantized else None
        return cls(act, cast, x.new_empty(num_rows, x.shape[1]))


def multiply_experts(
    rows: Rows,
    inputs: LayerInputs,
    offsets: torch.Tensor,
    max_tokens: int,
    memory: ExpertMemory,
    row_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """y [M, H]: what the experts of a layer give for rows [M, H], in e4m3 if the weights are, those
    of each from its offset, int32 [L + 1], on; times row_weight float32 [M]. max_tokens: the most
    of a rank, by which tiles are chosen, as balanced routing brings as many rows as a rank sends
    out."""
    act, cast, y = memory
    num_rows, most = max_tokens * inputs.topk_idx.shape[1], len(y)
    up = gemm_config(inputs.w_gate_up, num_rows, inputs.activation)
    down = gemm_config(inputs.w_down, num_rows, block_m=up.block_m)
    schedule = tile_schedule(offsets, most, up.block_m)
    multiply(rows, inputs.up, Epilogue(inputs.activation), schedule, most, act, up)
    rows = Rows(act)
    if cast is not None:
        rows = cast_rows(act, cast, offsets[-1:])
    return multiply(rows, inputs.down, Epilogue("none", row_weight), schedule, most, y, down)


def cast_rows(x: torch.Tensor, out: QuantizedRows, num_rows: torch.Tensor) -> Rows:
    """The first rows of x [M, K] in e4m3, as many as num_rows int32 [1] says."""
    grid, arguments, options = quantize_launch(x, out, num_rows)
    launch(quantize_rows_kernel, grid, *arguments, **options)
    return out.operand
