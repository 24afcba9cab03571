"""Operands and outputs of a product as kernels take them: descriptors, pointers with strides."""

from __future__ import annotations

import torch
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from .config import GemmConfig
from .operands import Epilogue, Rows, Weights, canonical
from .product_kernels import WIDE, ExpertWeights, Gathered, Scales


def describe_weights(weights: Weights, config: GemmConfig, parts: int = 1) -> TensorDescriptor:
    """A descriptor of the weights in blocks of what a tile takes in a step, of `parts` rows for
    each column of the output. One part never runs into the next part or expert: loads past its
    end give zeros. See `product_kernels.gemm_tile`."""
    w, block_n, block_k = weights.w, config.block_n, config.block_k
    if w.dim() == 3:
        w = canonical(w).unflatten(1, (parts, -1))
    block = [1, block_k, block_n] if weights.transposed else [parts, block_n // parts, block_k]
    if weights.scale is not None and block_n > WIDE.value:
        block = [1, WIDE.value, block_k]
    return TensorDescriptor.from_tensor(w, [1, *block])


def expert_weights(
    rows: Rows, weights: Weights, config: GemmConfig, parts: int = 1
) -> ExpertWeights:
    """The weights by which kernels of a layer multiply these rows; see `describe_weights`."""
    described = describe_weights(weights, config, parts)
    return ExpertWeights(described, weights.bias, scales_of(rows, weights))


def rows_of(
    x: torch.Tensor, offset: torch.Tensor | None, block: list[int]
) -> TensorDescriptor | Gathered:
    """Rows x [M, K] as kernels take them: a ragged descriptor with blocks of this shape, or with
    `offset` the rows that begin so many elements after x."""
    if offset is not None:
        return Gathered(x, offset)
    return create_ragged_descriptor(canonical(x), block)


def scales_of(rows: Rows, weights: Weights) -> Scales | None:
    """The scales of e4m3 operands, as kernels take them."""
    if rows.scale is None or weights.scale is None:
        return None
    return Scales(rows.scale, weights.scale, rows.scale.stride(0))


def outputs(
    epilogue: Epilogue, out: torch.Tensor, block_m: int, width: int
) -> tuple[TensorDescriptor, TensorDescriptor | None]:
    """Descriptors of out [parts, rows, N] and of pre (or None), which a tile stores in blocks of
    `width` columns."""
    pre = epilogue.pre
    if pre is not None:  # gate and up of these columns in one block
        by_parts = pre.unflatten(1, (epilogue.parts, -1)).transpose(0, 1)
        pre = ragged(by_parts, block_m, width, epilogue.parts)
    return ragged(out, block_m, width), pre


def ragged(tensor: torch.Tensor, block_m: int, width: int, parts: int = 1) -> TensorDescriptor:
    """A descriptor of [parts, rows, N] in blocks [parts, block_m, width]. A kernel stores an
    expert's rows through it without a check for where the next expert's begin; see
    `kernels.store_rows`."""
    return create_ragged_descriptor(tensor, [parts, block_m, width], ragged_dim=1)
