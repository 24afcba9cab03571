"""The operands of a grouped GEMM, which are checked before any kernel runs."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from ..checks import (
    PAYLOAD_DTYPES,
    check_contiguous,
    check_runnable,
    check_tensor,
    has_parts,
)
from ..errors import DtypeError, ShapeError
from .activations import AnyActivation, num_parts
from .schedule import MAX_EXPERTS, MAX_ROWS

FP8 = torch.float8_e4m3fn

Operand = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""A tensor, or e4m3 values and their float32 scales."""


class Rows(NamedTuple):
    """A: row r is row r of x [M, K]; or, with `offset` int64 [rows], it begins offset[r] elements
    after x. scale: float32 [rows, K / 128 rounded up] of e4m3 rows, in the order of the output, in
    rows of any stride."""

    x: torch.Tensor
    offset: torch.Tensor | None = None
    scale: torch.Tensor | None = None


class Weights(NamedTuple):
    """B: w [L, N, K], output = A @ w[e].T + bias[e]; transposed, w [L, K, N], output = A @ w[e].
    Gate and up may be apart: w [L, 2, N / 2, K], transposed [L, 2, K / 2, N], of other strides.
    scale: float32 [L, N / 128, K / 128], rounded up, of e4m3 weights. bias [L, N]."""

    w: torch.Tensor
    scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    transposed: bool = False

    @property
    def num_columns(self) -> int:
        """The columns of the product, before an activation halves them."""
        return self.w.shape[-1] if self.transposed else self.w.shape[1:-1].numel()


class Epilogue(NamedTuple):
    """What a GEMM does with its product: it applies the activation and multiplies by row_weight
    float32 [rows]. `pre` [rows, N] gets the pre-activations."""

    activation: AnyActivation = "none"
    row_weight: torch.Tensor | None = None
    pre: torch.Tensor | None = None

    @property
    def parts(self) -> int:
        """The number of columns of the product that make one of the output."""
        return num_parts(self.activation)


def split_scales(name: str, operand: Operand) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(values, scales or None) of a tensor or a pair."""
    if isinstance(operand, tuple) and len(operand) == 2:
        return operand
    if not isinstance(operand, torch.Tensor):
        raise DtypeError(
            f"{name} is a {type(operand).__name__}; it must be a torch.Tensor, or a tuple of e4m3 "
            "values and their scales."
        )
    return operand, None


def check_rows(x: torch.Tensor, scale: torch.Tensor | None, name: str = "x") -> None:
    """Raise unless rows x [M, K] can be read 16 bytes at a time; e4m3 rows have scales."""
    check_tensor(name, x, ("M", "K"), PAYLOAD_DTYPES if scale is None else (FP8,))
    check_row_bytes(name, x)
    rows_start_at_16 = len(x) == 1 or x.stride(0) * x.itemsize % 16 == 0
    if len(x) and (x.stride(1) != 1 or not rows_start_at_16 or x.data_ptr() % 16):
        raise ShapeError(
            f"{name} has strides {tuple(x.stride())} and starts at address {x.data_ptr():#x}; its "
            "rows must be contiguous and start at multiples of 16 bytes. Pass "
            f"{name}.contiguous() or a clone."
        )
    if x.shape[0] > MAX_ROWS:
        raise ShapeError(f"{name} has {x.shape[0]} rows; a call takes up to {MAX_ROWS}. Split it.")
    if scale is not None:
        num_scales = triton.cdiv(x.shape[1], 128)
        check_tensor(f"{name}[1]", scale, (x.shape[0], num_scales), (torch.float32,))
        check_devices(x, **{f"{name}[1]": scale})
        check_contiguous(f"{name}[1]", scale)


def check_weights(
    a: torch.Tensor,
    w: torch.Tensor,
    depth: int | str,
    activation: AnyActivation = "none",
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    by_parts: bool = False,
    name: str = "w",
) -> None:
    """Raise unless w [L, N, K] can multiply rows of `a`'s dtype and device of length `depth`; or
    by_parts, where it has four dimensions, w [L, parts, N / parts, K]."""
    parts, apart = num_parts(activation), by_parts and has_parts(w)
    check_tensor(name, w, ("L", *((parts, "I") if apart else ("N",)), depth), (a.dtype,))
    check_row_bytes(name, w)
    granule = parts * 16 // output_dtype(a).itemsize
    if 0 in w.shape or w.shape[1:-1].numel() % granule:
        raise ShapeError(
            f"{name} has shape {list(w.shape)}; L and K must be at least 1, and N a multiple of "
            f"{granule}, so that rows of the output are multiples of 16 bytes"
            + (" (rows of gate, then as many of up)." if parts == 2 else ".")
            + f" Pad {name} with rows of zeros."
        )
    if len(w) > MAX_EXPERTS:
        raise ShapeError(
            f"{name} has {len(w)} experts; a call takes at most {MAX_EXPERTS}. Call once for each "
            "part."
        )
    if not (apart or w.is_contiguous()) or w.data_ptr() % 16:
        raise ShapeError(
            f"{name} has strides {tuple(w.stride())} and starts at address {w.data_ptr():#x}; it "
            "must be contiguous [L, N, K] and start at a multiple of 16 bytes. Pass "
            f"{name}.contiguous() or a clone, once."
        )
    check_devices(a, **{name: w})
    if scale is not None:
        check_weight_scales(name, w, scale)
    if (scale is None) == (w.dtype == FP8):
        raise DtypeError(
            f"{name} is {str(w.dtype).removeprefix('torch.')} "
            f"{'without' if scale is None else 'with'} scales; e4m3 weights and rows come as "
            "tuples with their scales, others without."
        )
    if bias is not None:
        check_tensor("bias", bias, w.shape[:2], (w.dtype if scale is None else torch.bfloat16,))
        check_devices(a, bias=bias)
        check_contiguous("bias", bias)
    check_runnable(a.device)


def check_weight_scales(name: str, w: torch.Tensor, scale: torch.Tensor) -> None:
    """Raise unless `scale` is that of e4m3 weights w [L, N, K], one for each 128 x 128."""
    blocks = [triton.cdiv(size, 128) for size in w.shape[1:]]
    check_tensor(f"{name}[1]", scale, (w.shape[0], *blocks), (torch.float32,))
    check_devices(w, **{f"{name}[1]": scale})
    check_contiguous(f"{name}[1]", scale)


def check_taken(name: str, x: torch.Tensor, num_rows: int) -> None:
    """Raise where an index takes rows from a tensor that has none."""
    if num_rows and x.numel() == 0:
        raise ShapeError(
            f"{name} takes {num_rows} rows of a tensor of shape {list(x.shape)}, which has none."
        )


def check_row_weight(a: torch.Tensor, row_weight: torch.Tensor | None, num_rows: int) -> None:
    """Raise unless row_weight is None, or float32 [num_rows], contiguous, on the device of `a`."""
    if row_weight is not None:
        check_tensor("row_weight", row_weight, (num_rows,), (torch.float32,))
        check_devices(a, row_weight=row_weight)
        check_contiguous("row_weight", row_weight)


def check_out(
    a: torch.Tensor,
    out: torch.Tensor,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...] | None = None,
    name: str = "out",
) -> None:
    """Raise unless `out` may take the result of rows like `a`; by default it has their dtype."""
    check_tensor(name, out, shape, dtypes or (output_dtype(a),))
    check_devices(a, **{name: out})
    check_row_bytes(name, out, ", or pass it in float32" * (out.dtype != torch.float32))
    if not out.is_contiguous() or out.data_ptr() % 16:
        raise ShapeError(
            f"{name} has strides {tuple(out.stride())} and starts at address {out.data_ptr():#x}; "
            "it must be contiguous and start at a multiple of 16 bytes."
        )


def output_dtype(a: torch.Tensor) -> torch.dtype:
    """The dtype of the output for rows like `a`: bf16 for e4m3 rows, else their own."""
    return torch.bfloat16 if a.dtype == FP8 else a.dtype


def canonical(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory with the usual strides. Where a size is 1, its stride can be anything."""
    return tensor.view(-1).view(tensor.shape) if tensor.is_contiguous() else tensor


def check_row_bytes(name: str, tensor: torch.Tensor, or_else: str = "") -> None:
    """Raise unless rows [.., K] are multiples of 16 bytes. or_else: the end of the error's text,
    another remedy than to pad."""
    depth, itemsize = tensor.shape[-1], tensor.itemsize
    if depth * itemsize % 16:
        raise ShapeError(
            f"{name} has K = {depth}, and rows of {depth * itemsize} bytes; they must be multiples "
            "of 16 bytes. Pad K of rows and of weights with zeros to "
            f"{-depth % (16 // itemsize) + depth}{or_else}."
        )


def check_devices(a: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Raise unless all tensors are on the device of the rows."""
    for name, tensor in others.items():
        if tensor is not None and tensor.device != a.device:
            raise ShapeError(
                f"{name} is on {tensor.device} and the rows are on {a.device}; "
                f"move it with .to('{a.device}')."
            )
