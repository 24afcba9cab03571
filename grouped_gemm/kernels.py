"""Kernels of the grouped GEMM, and the parts of it that the fused kernels call.

Rows are in expert order: expert e owns rows offsets[e] .. offsets[e+1] of the output, and of A
unless A is gathered. Whatever lies past an expert's last row is computed and not stored.
"""

import triton
import triton.language as tl

from ..lang import dot, round_to


@triton.jit(do_not_specialize=["num_experts", "max_rows"])
def _tile_schedule_kernel(
    offsets,
    tile_expert,
    tile_row,
    num_tiles,
    num_experts,
    max_rows,
    BLOCK_M: tl.constexpr,
    MAX_EXPERTS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Cut the rows of each expert into tiles of BLOCK_M; program e writes the tiles of expert e.

    offsets [0, 3, 3, 4], BLOCK_M 2: tile_expert [0, 0, 2], tile_row [0, 2, 3], num_tiles [3].
    """
    expert = tl.program_id(0)
    experts = tl.arange(0, MAX_EXPERTS)
    exists = experts < num_experts
    begins = tl.load(offsets + experts, mask=exists, other=0)
    ends = tl.minimum(tl.load(offsets + experts + 1, mask=exists, other=0), max_rows)
    counts = tl.cdiv(tl.maximum(ends - begins, 0), BLOCK_M).to(tl.int32)
    first = tl.sum(tl.where(experts < expert, counts, 0), 0)
    count = tl.sum(tl.where(experts == expert, counts, 0), 0)
    begin = tl.load(offsets + expert).to(tl.int32)
    for start in range(0, count, STEP):
        tiles = start + tl.arange(0, STEP)
        tl.store(tile_expert + first + tiles, expert, mask=tiles < count)
        tl.store(tile_row + first + tiles, begin + tiles * BLOCK_M, mask=tiles < count)
    if expert == num_experts - 1:
        tl.store(num_tiles, first + count)


@triton.jit
def tile_coordinates(tile, num_m, num_n, GROUP_M: tl.constexpr):
    """(m, n) of a tile. Tiles in flight together share rows of A and of the weights in L2.

    num_m 3, num_n 2, GROUP_M 2: (0, 0) (1, 0) (0, 1) (1, 1) (2, 0) (2, 1).
    """
    first = tile // (GROUP_M * num_n) * GROUP_M
    height = tl.minimum(num_m - first, GROUP_M)
    inside = tile % (GROUP_M * num_n)
    return first + inside % height, inside // height


@triton.jit
def gathered_rows(base, row_offset, row, end, BLOCK_M: tl.constexpr):
    """Pointers [BLOCK_M] to rows `row` .. of A, each `row_offset[row]` elements after `base`.

    Rows from `end` on repeat the last one, so that every pointer may be read.
    """
    rows = tl.minimum(row + tl.arange(0, BLOCK_M), end - 1)
    return tl.multiple_of(base + tl.load(row_offset + rows), 16)


@triton.jit
def gemm_tile(
    a,
    row,
    w,
    expert,
    n,
    K,
    GATHERED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """fp32 [BLOCK_M, BLOCK_N]: rows of A times the weights of one expert, transposed.

    a: with GATHERED, pointers to BLOCK_M rows; else a descriptor of A [M, K], read from `row` on.
    w: descriptor of the weights [L * PARTS, N / PARTS, K] in blocks [PARTS, BLOCK_N / PARTS,
    BLOCK_K]. With PARTS 2 (gate and up) the tile holds columns n .. of gate, then the same of up.
    """
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        if GATHERED:
            columns = k + tl.arange(0, BLOCK_K)
            # K is a multiple of 16 bytes: without the hint, loads are as narrow as the mask.
            inside = tl.max_constancy(columns < K, 128 // a.dtype.element_ty.primitive_bitwidth)
            a_tile = tl.load(a[:, None] + columns[None, :], mask=inside[None, :], other=0.0)
        else:
            a_tile = a.load([row, k])
        w_tile = w.load([expert * PARTS, n, k]).reshape(BLOCK_N, BLOCK_K)
        acc = dot(a_tile, w_tile.T, acc)
    return acc


@triton.jit
def swiglu(acc):
    """silu(gate) * up of a tile whose left half is gate and whose right half is up."""
    gate, up = acc.reshape(acc.shape[0], 2, acc.shape[1] // 2).permute(0, 2, 1).split()
    return gate * tl.sigmoid(gate) * up


@triton.jit
def store_tile(out, acc, row, end, n, N, ALIGNED: tl.constexpr):
    """Round `acc` to the type of `out` [rows, N] and store it at (row, n), rows before `end` only.

    ALIGNED promises that N is a multiple of 16 bytes.
    """
    tile = round_to(acc, out.dtype.element_ty)
    rows = row + tl.arange(0, acc.shape[0])
    columns = n + tl.arange(0, acc.shape[1])
    to = out + rows.to(tl.int64) * N
    inside = columns < N
    if ALIGNED:
        to = tl.multiple_of(to, 16)
        inside = tl.max_constancy(inside, 128 // out.dtype.element_ty.primitive_bitwidth)
    tl.store(to[:, None] + columns[None, :], tile, mask=(rows < end)[:, None] & inside[None, :])


@triton.jit(
    do_not_specialize=["max_rows", "N", "K"],
    do_not_specialize_on_alignment=[
        "row_offset",
        "tile_expert",
        "tile_row",
        "num_tiles",
        "offsets",
    ],
)
def _grouped_gemm_kernel(
    a,
    row_offset,
    w,
    out,
    tile_expert,
    tile_row,
    num_tiles,
    offsets,
    max_rows,
    N,
    K,
    ACTIVATION: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """out [max_rows, N] = activation(A @ w[expert].T) for the rows of a tile schedule.

    a, w: see `gemm_tile`; row_offset: None, or int64 [max_rows], see `gathered_rows`.
    ACTIVATION: "none" or "swiglu". Any number of programs, each of which strides over the tiles.
    """
    GATHERED: tl.constexpr = row_offset is not None
    PARTS: tl.constexpr = 2 if ACTIVATION == "swiglu" else 1
    num_m = tl.load(num_tiles)
    num_n = tl.cdiv(N, BLOCK_N // PARTS)
    # Flattened, the next tile's loads start before this one's epilogue. Gathered loads would then
    # no longer be asynchronous.
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=not GATHERED):
        m, block = tile_coordinates(tile, num_m, num_n, GROUP_M)
        n = block * (BLOCK_N // PARTS)
        row = tl.load(tile_row + m)
        expert = tl.load(tile_expert + m)
        end = tl.minimum(tl.load(offsets + expert + 1), max_rows).to(tl.int32)
        if GATHERED:
            source = gathered_rows(a, row_offset, row, end, BLOCK_M)
        else:
            source = a
        acc = gemm_tile(source, row, w, expert, n, K, GATHERED, PARTS, BLOCK_M, BLOCK_N, BLOCK_K)
        if ACTIVATION == "swiglu":
            acc = swiglu(acc)
        store_tile(out, acc, row, end, n, N, ALIGNED)
