"""The kernel that casts rows to e4m3."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..device.cast import cast_row
from ..device.programs import pdl_launch_dependents, pdl_wait


class QuantizedOut(NamedTuple):
    """Where rows in e4m3 go: rows int8 and scales int32, which are the bits of float32, with the
    distances between their rows."""

    rows: tl.tensor
    scales: tl.tensor
    row_stride: tl.tensor
    scale_stride: tl.tensor


class QuantizedTile(NamedTuple):
    """Rows and columns that a program casts at a time."""

    ROWS: Any
    COLUMNS: Any
    FORMAT: Any = "fp8"  # of the scales, see `cast.cast_row`


@triton.jit(do_not_specialize=["max_rows"], do_not_specialize_on_alignment=["num_rows"])
def quantize_rows_kernel(
    x,  # [M, K]
    num_rows,  # int32 [1]: how many of them; None: max_rows
    out,  # QuantizedOut
    max_rows,
    K,  # a multiple of 16
    TILE: tl.constexpr,  # QuantizedTile
    PDL: tl.constexpr,
):
    """out = x in e4m3, with a scale for each 128 columns, in ue8m0 four to an int32; see
    `cast.cast_row`.

    A PDL launch, which waits for all launches before, and only then lets the next one begin: so
    that may read at once what those have stored, and what this kernel stores after its own wait.
    """
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    end = max_rows
    if num_rows is not None:
        end = tl.load(num_rows)
    ROWS: tl.constexpr = TILE.ROWS
    COLUMNS: tl.constexpr = TILE.COLUMNS
    SCALE_COLUMNS: tl.constexpr = 512 if TILE.FORMAT == "ue8m0" else 128
    BLOCKS: tl.constexpr = COLUMNS // SCALE_COLUMNS
    num_chunks = tl.cdiv(K, COLUMNS)
    num_work = tl.cdiv(end, ROWS) * num_chunks
    for work_idx in range(tl.program_id(0), num_work, tl.num_programs(0)):
        row = (work_idx // num_chunks * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        column = work_idx % num_chunks * COLUMNS + tl.arange(0, COLUMNS)
        inside = (row < end)[:, None] & tl.max_constancy(column < K, 16)[None, :]
        at = row[:, None] * K + column[None, :]
        values = tl.load(x + at, mask=inside, other=0.0)
        bits, scales = cast_row(values.reshape(ROWS * COLUMNS), TILE.FORMAT)
        at = row[:, None] * out.row_stride + column[None, :]
        tl.store(out.rows + at, bits.reshape(ROWS, COLUMNS), mask=inside)
        block = work_idx % num_chunks * BLOCKS + tl.arange(0, BLOCKS)
        inside = (row < end)[:, None] & (block < tl.cdiv(K, SCALE_COLUMNS))[None, :]
        at = row[:, None] * out.scale_stride + block[None, :]
        tl.store(out.scales + at, scales.reshape(ROWS, BLOCKS), mask=inside)
