"""A tile's product of rows and weights, which all kernels that multiply call.

Rows are in expert order: expert e owns rows offsets[e] .. offsets[e+1] of the output, and of A
unless A is gathered. Past an expert's last row a tile computes with zeros, or with that row again
where rows are gathered.

Compile-time sizes come as one constant SHAPE, a `config.TileShape`.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..device.lang import device_function, dot, in_order

RAGGED = tl.constexpr(0x40000000)
"""Rows that a ragged descriptor claims to have: 2**30, whatever the tensor has."""
WIDE = tl.constexpr(128)
"""Columns of a scaled product that are multiplied at a time."""


class Gathered(NamedTuple):
    """Rows of A anywhere in memory: row r begins row_offset[r] elements after `base`."""

    base: tl.tensor
    row_offset: tl.tensor  # int64 [rows]


class Scales(NamedTuple):
    """The scales of e4m3 operands, float32, S = K / 128 rounded up."""

    a: tl.tensor  # [rows, S], in the order of the output, in rows of a_stride
    w: tl.tensor  # [L, rows of an expert's weights / 128, S]
    a_stride: tl.tensor


class ExpertWeights(NamedTuple):
    """The weights of experts, what is added to their products, and the scales of both operands."""

    w: tl.tensor  # a descriptor, see `gemm_tile`
    bias: tl.tensor  # [L, PARTS * N], or None
    scales: Scales | None


@triton.constexpr_function
def is_gated(name):
    """Whether an activation of this name applies to a gate, and multiplies the result by `up`."""
    return name == "swiglu" or name == "geglu" or name == "geglu_tanh"


@device_function
def gathered_rows(a, tile, BLOCK_M: tl.constexpr):
    """Pointers [BLOCK_M] to the rows of A of a tile; a: `Gathered`.

    Rows from `tile.end` on repeat the last one, so that every pointer may be read.
    """
    rows = tl.minimum(tile.row + tl.arange(0, BLOCK_M), tile.end - 1)
    return tl.multiple_of(a.base + tl.load(a.row_offset + rows), 16)


@device_function
def gemm_tile(
    a, w, tile, K, SHAPE: tl.constexpr, TRANSPOSED: tl.constexpr = False, begin_k=0, end_k=None
):
    """fp32 [BLOCK_M, BLOCK_N]: columns begin_k .. end_k (None: K) of a tile's rows of A times those
    of its expert's weights.

    a: a ragged descriptor of A [M, K], or pointers to BLOCK_M gathered rows (`gathered_rows`).
    w: a descriptor of the weights [L, PARTS, N, K] in blocks [1, PARTS, BLOCK_N / PARTS, BLOCK_K].
    With PARTS 2 (gate and up) the tile holds columns n .. of gate, then the same of up. With
    TRANSPOSED, as in the gradient of A, the weights are [L, 1 or 2, K, N] in blocks [1, 1, BLOCK_K,
    BLOCK_N], and A has the columns of both parts, one after the other.
    K is that of `product_size`.
    """
    BLOCK_N: tl.constexpr = SHAPE.BLOCK_N
    BLOCK_K: tl.constexpr = SHAPE.BLOCK_K
    acc = tl.zeros((SHAPE.BLOCK_M, BLOCK_N), tl.float32)
    for k in range(begin_k, K if end_k is None else end_k, BLOCK_K):
        if TRANSPOSED:
            # A step that is not full reads on into the next part of A, times zeros.
            steps = tl.cdiv(w.shape[2], BLOCK_K) * BLOCK_K
            part = tl.where(k >= steps, 1, 0)
            at = k - part * steps
            a_tile = load_a(a, tile, part * w.shape[2] + at, K, BLOCK_K)
            w_tile = w.load([tile.expert, part, at, tile.n]).reshape(BLOCK_K, BLOCK_N)
        else:
            a_tile = load_a(a, tile, k, K, BLOCK_K)
            w_tile = load_w(w, tile, k, SHAPE)
        acc = dot(a_tile, w_tile, acc)
    return acc


@device_function
def product_size(w, SHAPE: tl.constexpr, TRANSPOSED: tl.constexpr = False):
    """(N, K) of a product, see `gemm_tile`; where the weights are transposed, K is counted in whole
    steps of each part."""
    N, K = w.shape[2], w.shape[3]
    if TRANSPOSED:
        N, K = K, w.shape[1] * tl.cdiv(N, SHAPE.BLOCK_K) * SHAPE.BLOCK_K
    return N, K


@device_function
def load_a(a, tile, k, K, BLOCK_K: tl.constexpr):
    """Columns k .. of a tile's rows of A, see `gemm_tile`; 0 from column K on."""
    if isinstance(a, tl.tensor_descriptor):
        a_tile = load_rows(a, tile.row, tile.end, k)
    else:
        columns = k + tl.arange(0, BLOCK_K)
        # K is a multiple of 16 bytes: without the hint, loads are as narrow as the mask.
        inside = tl.max_constancy(columns < K, 128 // a.dtype.element_ty.primitive_bitwidth)
        a_tile = tl.load(a[:, None] + columns[None, :], mask=inside[None, :], other=0.0)
    return a_tile


@device_function
def load_w(w, tile, k, SHAPE: tl.constexpr):
    """[BLOCK_K, BLOCK_N]: columns k .. of a tile's rows of the weights, see `gemm_tile`."""
    block = w.load([tile.expert, 0, tile.n, k])
    return block.reshape(SHAPE.BLOCK_N, SHAPE.BLOCK_K).T


@device_function
def load_rows(x, row, end, column):
    """Rows row .. of a ragged descriptor of [rows, N] from `column` on; those from `end` on are
    zeros, for which no memory is read. The coordinates are those of triton.tools.ragged_tma."""
    tile = x.load([RAGGED, end, RAGGED - (end - row), column])
    return tile.reshape(tile.shape[2], tile.shape[3])


@device_function
def scaled_gemm_tile(a, w, scales, tile, SHAPE: tl.constexpr, begin_k=0, end_k=None):
    """`gemm_tile` of e4m3 rows with a scale for each 128 columns, times e4m3 weights with a scale
    for each 128 x 128: products of 128 columns are scaled and summed in fp32 (as in DeepSeek-V3,
    section 3.3, which found the tensor cores' own sums too coarse).
    """
    PARTS: tl.constexpr = w.block_shape[1]
    BLOCK_N: tl.constexpr = SHAPE.BLOCK_N
    N, K = product_size(w, SHAPE)
    num_scales = tl.cdiv(K, 128)
    if PARTS == 1 and BLOCK_N == 128:  # then all columns of the tile have one scale
        weight_row = tile.n + tl.arange(0, 1)
    else:
        columns = tl.arange(0, BLOCK_N)
        weight_row = columns // (BLOCK_N // PARTS) * N + tile.n + columns % (BLOCK_N // PARTS)
    a_scale = row_scales(scales, tile, SHAPE)
    w_scale = weight_scales(scales, tile, weight_row, N * PARTS, num_scales)
    acc = tl.zeros((SHAPE.BLOCK_M, BLOCK_N), tl.float32)
    zero = tl.zeros((SHAPE.BLOCK_M, BLOCK_N), tl.float32)
    first = begin_k // 128
    at = tl.minimum(first, num_scales - 1)
    a_next, w_next = tl.load(a_scale + at), tl.load(w_scale + at)
    for block in range(first, num_scales if end_k is None else tl.cdiv(end_k, 128)):
        factor = a_next[:, None] * w_next[None, :]
        # Scales are read a step ahead: what waits for the product would wait for them as well.
        ahead = tl.minimum(block + 1, num_scales - 1)
        a_next, w_next = tl.load(a_scale + ahead), tl.load(w_scale + ahead)
        k = block * SHAPE.BLOCK_K
        a_tile = load_a(a, tile, k, K, SHAPE.BLOCK_K)
        acc += dot(a_tile, load_w(w, tile, k, SHAPE), zero) * factor
    return acc


@device_function
def wide_scaled_gemm_tile(a, w, scales, tile, SHAPE: tl.constexpr, begin_k=0, end_k=None):
    """`scaled_gemm_tile` of 2 * WIDE columns, one half after the other: all sums and the product of
    one half fit into the registers. w: a descriptor in blocks [1, 1, WIDE, BLOCK_K]. With gate and
    up, each is a half, and has a multiple of 128 columns, so that a half has one scale.
    """
    GATED: tl.constexpr = is_gated(SHAPE.ACTIVATION.name)
    HALF: tl.constexpr = WIDE.value
    N, K = product_size(w, SHAPE)
    num_scales = tl.cdiv(K, 128)
    part, right = 0, tile.n + HALF
    if GATED:
        part, right = 1, tile.n
    a_scale = row_scales(scales, tile, SHAPE)
    num_rows = N * w.shape[1]
    left_scale = weight_scales(scales, tile, tile.n, num_rows, num_scales)
    right_scale = weight_scales(scales, tile, part * N + right, num_rows, num_scales)
    left_acc = tl.zeros((SHAPE.BLOCK_M, HALF), tl.float32)
    right_acc = tl.zeros((SHAPE.BLOCK_M, HALF), tl.float32)
    zero = tl.zeros((SHAPE.BLOCK_M, HALF), tl.float32)
    first = begin_k // 128
    at = tl.minimum(first, num_scales - 1)
    a_next, left_next, right_next = (
        tl.load(a_scale + at),
        tl.load(left_scale + at),
        tl.load(right_scale + at),
    )
    for block in range(first, num_scales if end_k is None else tl.cdiv(end_k, 128)):
        left_factor, right_factor = a_next * left_next, a_next * right_next
        ahead = tl.minimum(block + 1, num_scales - 1)
        a_next, left_next, right_next = (
            tl.load(a_scale + ahead),
            tl.load(left_scale + ahead),
            tl.load(right_scale + ahead),
        )
        k = block * SHAPE.BLOCK_K
        a_tile = load_a(a, tile, k, K, SHAPE.BLOCK_K)
        left_w = w.load([tile.expert, 0, tile.n, k]).reshape(HALF, SHAPE.BLOCK_K).T
        right_w = w.load([tile.expert, part, right, k]).reshape(HALF, SHAPE.BLOCK_K).T
        left_acc = in_order(left_acc + dot(a_tile, left_w, zero) * left_factor[:, None])
        right_acc = in_order(right_acc + dot(a_tile, right_w, zero) * right_factor[:, None])
    both = tl.join(left_acc, right_acc).permute(0, 2, 1)
    return both.reshape(SHAPE.BLOCK_M, SHAPE.BLOCK_N)


@device_function
def row_scales(scales, tile, SHAPE: tl.constexpr):
    """Pointers [BLOCK_M] to the first scales of a tile's rows; past its end, of its last one."""
    rows = tl.minimum(tile.row + tl.arange(0, SHAPE.BLOCK_M), tile.end - 1)
    return scales.a + rows.to(tl.int64) * scales.a_stride


@device_function
def weight_scales(scales, tile, row, num_rows, num_scales):
    """Pointers to the first scales of rows `row` of its expert's weights, which have num_rows."""
    block = tile.expert * tl.cdiv(num_rows, 128) + tl.minimum(row, num_rows - 1) // 128
    return scales.w + block.to(tl.int64) * num_scales


@device_function
def product_tile(
    a,
    w,
    scales,
    tile,
    K,
    SHAPE: tl.constexpr,
    TRANSPOSED: tl.constexpr = False,
    begin_k=0,
    end_k=None,
):
    """`gemm_tile`, or where there are scales `scaled_gemm_tile`, or that of wide tiles."""
    if scales is not None:
        tl.static_assert(SHAPE.BLOCK_K == 128)
        if SHAPE.BLOCK_N > WIDE.value:
            acc = wide_scaled_gemm_tile(a, w, scales, tile, SHAPE, begin_k, end_k)
        else:
            acc = scaled_gemm_tile(a, w, scales, tile, SHAPE, begin_k, end_k)
    else:
        acc = gemm_tile(a, w, tile, K, SHAPE, TRANSPOSED, begin_k, end_k)
    return acc
