"""Kernels of the grouped GEMM, and the parts of it that the fused kernels call.

Rows are in expert order: expert e owns rows offsets[e] .. offsets[e+1] of the output, and of A
unless A is gathered. Past an expert's last row a tile computes with zeros, or with that row again
where rows are gathered, and stores nothing.
"""

import triton
import triton.language as tl

from ..device.lang import device_function, dot, round_to
from ..device.programs import pdl_wait
from .schedule_kernels import load_tile, unpack_tile

RAGGED = tl.constexpr(0x40000000)
"""Rows that a ragged descriptor claims to have: 2**30, whatever the tensor has."""
INV_SQRT_2 = tl.constexpr(0.7071067811865476)
INV_SQRT_2PI = tl.constexpr(0.3989422804014327)


@triton.constexpr_function
def is_gated(activation):
    """Whether an activation is of a gate, times the columns of up."""
    return activation == "swiglu" or activation == "geglu"


@device_function
def gathered_rows(base, row_offset, row, end, BLOCK_M: tl.constexpr):
    """Pointers [BLOCK_M] to rows `row` .. of A, each `row_offset[row]` elements after `base`.

    Rows from `end` on repeat the last one, so that every pointer may be read.
    """
    rows = tl.minimum(row + tl.arange(0, BLOCK_M), end - 1)
    return tl.multiple_of(base + tl.load(row_offset + rows), 16)


@device_function
def gemm_tile(
    a,
    w,
    row,
    end,
    expert,
    n,
    begin_k,
    end_k,
    K,
    GATHERED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """fp32 [BLOCK_M, BLOCK_N]: columns begin_k .. end_k of rows of A times those of one expert's
    weights.

    a: with GATHERED, pointers to BLOCK_M rows; else a ragged descriptor of A [M, K], of which rows
    `row` to `end` are read.
    w: descriptor of the weights [L * PARTS, N / PARTS, K] in blocks [PARTS, BLOCK_N / PARTS,
    BLOCK_K]. With PARTS 2 (gate and up) the tile holds columns n .. of gate, then the same of up.
    With TRANSPOSED the weights are [L, K, N], as in the gradient of A, in blocks [1, BLOCK_K,
    BLOCK_N].
    """
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(begin_k, end_k, BLOCK_K):
        a_tile = load_a(a, row, end, k, K, GATHERED, BLOCK_K)
        if TRANSPOSED:
            w_tile = w.load([expert, k, n]).reshape(BLOCK_K, BLOCK_N)
        else:
            w_tile = w.load([expert * PARTS, n, k]).reshape(BLOCK_N, BLOCK_K).T
        acc = dot(a_tile, w_tile, acc)
    return acc


@device_function
def load_a(a, row, end, k, K, GATHERED: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns k .. of a tile of A, see `gemm_tile`; 0 from column K on."""
    if GATHERED:
        columns = k + tl.arange(0, BLOCK_K)
        # K is a multiple of 16 bytes: without the hint, loads are as narrow as the mask.
        inside = tl.max_constancy(columns < K, 128 // a.dtype.element_ty.primitive_bitwidth)
        a_tile = tl.load(a[:, None] + columns[None, :], mask=inside[None, :], other=0.0)
    else:
        a_tile = load_rows(a, row, end, k)
    return a_tile


@device_function
def load_rows(x, row, end, column):
    """Rows row .. of a ragged descriptor of [rows, N] from `column` on; those from `end` on are
    zeros, for which no memory is read. The coordinates are those of triton.tools.ragged_tma."""
    tile = x.load([RAGGED, end, RAGGED - (end - row), column])
    return tile.reshape(tile.shape[2], tile.shape[3])


@device_function
def scaled_gemm_tile(
    a,
    a_scale,
    w,
    w_scale,
    row,
    end,
    expert,
    n,
    N,
    K,
    GATHERED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`gemm_tile` of e4m3 rows with a scale for each 128 columns, times e4m3 weights with a scale
    for each 128 x 128: products of 128 columns are scaled and summed in fp32 (as in DeepSeek-V3,
    section 3.3, which found the tensor cores' own sums too coarse).

    a_scale: float32 [rows, S], in the order of the output; w_scale: float32 [L, rows / 128, S], S =
    K / 128 rounded up.
    """
    tl.static_assert(BLOCK_K == 128)
    num_scales = tl.cdiv(K, 128)
    rows = tl.minimum(row + tl.arange(0, BLOCK_M), end - 1)
    a_scale += rows.to(tl.int64) * num_scales
    if PARTS == 1 and BLOCK_N == 128:  # then all columns of the tile have one scale
        weight_row = n + tl.arange(0, 1)
    else:
        columns = tl.arange(0, BLOCK_N)
        weight_row = columns // (BLOCK_N // PARTS) * N + n + columns % (BLOCK_N // PARTS)
        weight_row = tl.minimum(weight_row, N * PARTS - 1)
    w_scale += (expert * tl.cdiv(N * PARTS, 128) + weight_row // 128).to(tl.int64) * num_scales
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    zero = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    a_next, w_next = tl.load(a_scale), tl.load(w_scale)
    for block in range(0, num_scales):
        factor = a_next[:, None] * w_next[None, :]
        # Scales are read a step ahead: what waits for the product would wait for them as well.
        ahead = tl.minimum(block + 1, num_scales - 1)
        a_next, w_next = tl.load(a_scale + ahead), tl.load(w_scale + ahead)
        k = block * BLOCK_K
        a_tile = load_a(a, row, end, k, K, GATHERED, BLOCK_K)
        w_tile = w.load([expert * PARTS, n, k]).reshape(BLOCK_N, BLOCK_K).T
        acc += dot(a_tile, w_tile, zero) * factor
    return acc


@device_function
def halves(tile):
    """(left, right) columns of a tile, without a move between threads."""
    parts = tile.reshape(tile.shape[0], 2, tile.shape[1] // 2)
    return parts.permute(0, 2, 1).split()


@device_function
def gaussian_cdf(x):
    return 0.5 + 0.5 * tl.erf(x * INV_SQRT_2)


@device_function
def activate(gate, up, ACTIVATION: tl.constexpr):
    """The activation of fp32 tiles; `up` counts for those that are gated."""
    value = gate
    if ACTIVATION == "swiglu" or ACTIVATION == "silu":
        value = gate * tl.sigmoid(gate)
    elif ACTIVATION == "geglu" or ACTIVATION == "gelu":
        value = gate * gaussian_cdf(gate)
    if is_gated(ACTIVATION):
        value = value * up
    return value


@device_function
def store_rows(out, tile, part, row, end, n):
    """Round a tile and store it at (part, row, n) of `out`; rows before `end` only.

    out: ragged descriptor of [parts, rows, N] (`launch.ragged`): the hardware bounds rows row ..
    end and the columns. The coordinates are those of triton.tools.ragged_tma.
    """
    block = round_to(tile, out.dtype).reshape(1, 1, 1, tile.shape[0], tile.shape[1])
    out.store([RAGGED, end, part, RAGGED - (end - row), n], block)


@device_function
def finish_tile(
    acc,
    out,
    pre,
    bias,
    row_weight,
    part,
    row,
    end,
    expert,
    n,
    N,
    ACTIVATION: tl.constexpr,
    SUBTILES: tl.constexpr,
):
    """out = activation(acc + bias) * row_weight, for columns n .. of N; pre = acc + bias.

    bias [L, PARTS * N], row_weight float32 [rows] and pre may be None. SUBTILES: the columns are
    finished and stored in as many parts, through as much less shared memory and fewer registers.
    """
    gate, up = acc, acc
    if is_gated(ACTIVATION):
        gate, up = halves(acc)
    # fmt: off
    finish_columns(gate, up, out, pre, bias, row_weight, part, row, end, expert, n, N,
                   ACTIVATION, SUBTILES)
    # fmt: on


@device_function
def finish_columns(
    gate,
    up,
    out,
    pre,
    bias,
    row_weight,
    part,
    row,
    end,
    expert,
    n,
    N,
    ACTIVATION: tl.constexpr,
    SUBTILES: tl.constexpr,
):
    """`finish_tile` for columns n .. of gate and of up, which counts where it is gated."""
    if SUBTILES > 1:
        left_gate, right_gate = halves(gate)
        left_up, right_up = halves(up)
        middle = n + gate.shape[1] // 2
        rest: tl.constexpr = SUBTILES // 2
        # fmt: off
        finish_columns(left_gate, left_up, out, pre, bias, row_weight, part, row, end, expert,
                       n, N, ACTIVATION, rest)
        finish_columns(right_gate, right_up, out, pre, bias, row_weight, part, row, end, expert,
                       middle, N, ACTIVATION, rest)
        # fmt: on
    else:
        GATED: tl.constexpr = is_gated(ACTIVATION)
        PARTS: tl.constexpr = 2 if GATED else 1
        if bias is not None:
            columns = n + tl.arange(0, gate.shape[1])
            at = bias + expert.to(tl.int64) * N * PARTS + columns
            gate += tl.load(at, mask=columns < N, other=0.0).to(tl.float32)[None, :]
            if GATED:
                up += tl.load(at + N, mask=columns < N, other=0.0).to(tl.float32)[None, :]
        if pre is not None:
            store_rows(pre, gate, 0, row, end, n)
            if GATED:
                store_rows(pre, up, 1, row, end, n)
        value = activate(gate, up, ACTIVATION)
        if row_weight is not None:
            rows = row + tl.arange(0, gate.shape[0])
            value *= tl.load(row_weight + rows, mask=rows < end, other=0.0)[:, None]
        store_rows(out, value, part, row, end, n)


@triton.jit(
    do_not_specialize=["N", "K"],
    do_not_specialize_on_alignment=[
        "row_offset",
        "a_scale",
        "w_scale",
        "bias",
        "row_weight",
        "tiles",
        "num_tiles",
    ],
)
def _grouped_gemm_kernel(
    a,
    row_offset,
    a_scale,
    w,
    w_scale,
    out,
    pre,
    bias,
    row_weight,
    tiles,
    num_tiles,
    N,
    K,
    SPLITS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    SUBTILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [SPLITS, rows, N] = activation(A @ w[expert].T) for the rows of a tile schedule.

    a, w: see `gemm_tile`, and `scaled_gemm_tile` for the scales, None without; row_offset: None, or
    int64 [rows], see `gathered_rows`; the rest: see `finish_tile`. With SPLITS above 1, each
    part of `out` gets the sum over its share of K. Any number of programs stride over the tiles. An
    PDL launch: it reads nothing of what the launch before makes until that has ended.
    """
    GATHERED: tl.constexpr = row_offset is not None
    PARTS: tl.constexpr = 2 if is_gated(ACTIVATION) else 1
    pdl_wait(PDL)
    num_m = tl.load(num_tiles)
    num_n = tl.cdiv(N, BLOCK_N // PARTS)
    num_work = num_m * num_n * SPLITS
    # Flattened, the next tile's loads start before this one's epilogue. Gathered loads would then
    # no longer be asynchronous, and scaled products are slower.
    FLATTEN: tl.constexpr = not GATHERED and a_scale is None
    for work in tl.range(tl.program_id(0), num_work, tl.num_programs(0), flatten=FLATTEN):
        expert, row, end, block = load_tile(tiles, work // SPLITS, num_m, num_n, GROUP_M)
        n = block * (BLOCK_N // PARTS)
        source = a
        if GATHERED:
            source = gathered_rows(a, row_offset, row, end, BLOCK_M)
        # fmt: off
        if a_scale is not None:
            acc = scaled_gemm_tile(
                source, a_scale, w, w_scale, row, end, expert, n, N, K,
                GATHERED, PARTS, BLOCK_M, BLOCK_N, BLOCK_K,
            )
        else:
            # Bounds that vary from tile to tile would slow the flattened loop by 4 to 10%.
            begin_k, end_k = 0, K
            if SPLITS > 1:
                share = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS) * BLOCK_K
                begin_k = work % SPLITS * share
                end_k = tl.minimum(begin_k + share, K)
            acc = gemm_tile(
                source, w, row, end, expert, n, begin_k, end_k, K,
                GATHERED, TRANSPOSED, PARTS, BLOCK_M, BLOCK_N, BLOCK_K,
            )
        finish_tile(
            acc, out, pre, bias, row_weight, work % SPLITS, row, end, expert, n, N,
            ACTIVATION, SUBTILES,
        )
        # fmt: on


@triton.jit(do_not_specialize=["max_rows", "N", "num_splits"])
def _split_sum_kernel(
    partial,  # float32 [num_splits, max_rows, PARTS * N]
    out,
    pre,
    bias,
    row_weight,
    tiles,
    num_tiles,
    max_rows,
    N,
    num_splits,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add up the shares of K, in order, and finish the tiles as `_grouped_gemm_kernel` does."""
    PARTS: tl.constexpr = 2 if is_gated(ACTIVATION) else 1
    num_n = tl.cdiv(N, BLOCK_N // PARTS)
    for tile in range(tl.program_id(0), tl.load(num_tiles) * num_n, tl.num_programs(0)):
        expert, row, end = unpack_tile(tl.load(tiles + tile // num_n))
        n = tile % num_n * (BLOCK_N // PARTS)
        rows = row + tl.arange(0, BLOCK_M)
        columns = tl.arange(0, BLOCK_N)
        inside = n + columns % (BLOCK_N // PARTS) < N
        columns = columns // (BLOCK_N // PARTS) * N + n + columns % (BLOCK_N // PARTS)
        at = partial + rows.to(tl.int64)[:, None] * N * PARTS + columns[None, :]
        mask = (rows < end)[:, None] & inside[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for split in range(0, num_splits):
            acc += tl.load(at + max_rows.to(tl.int64) * N * PARTS * split, mask=mask, other=0.0)
        # fmt: off
        finish_tile(
            acc, out, pre, bias, row_weight, 0, row, end, expert, n, N, ACTIVATION, 1
        )
        # fmt: on
