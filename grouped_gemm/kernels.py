"""Kernels of the grouped GEMM, and how tiles are finished and stored, by the fused kernels too.

Past an expert's last row a tile stores nothing. Compile-time sizes come as one constant SHAPE, a
`config.TileShape`.
"""

import triton
import triton.language as tl

from ..device.lang import begin_span, device_function, end_span, round_to
from ..device.programs import pdl_wait
from .product_kernels import RAGGED, gathered_rows, is_gated, product_size, product_tile
from .schedule_kernels import Tile, load_tile, unpack_tile

INV_SQRT_2 = tl.constexpr(0.7071067811865476)
INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
SQRT_8_BY_PI = tl.constexpr(1.5957691216057308)
TANH_CUBIC = tl.constexpr(0.044715)


@device_function
def halves(tile):
    """(left, right) columns of a tile, without a move between threads."""
    parts = tile.reshape(tile.shape[0], 2, tile.shape[1] // 2)
    return parts.permute(0, 2, 1).split()


@device_function
def gaussian_cdf(x):
    return 0.5 + 0.5 * tl.erf(x * INV_SQRT_2)


@device_function
def tanh_cdf(x):
    """The approximation of `gaussian_cdf` by tanh: (1 + tanh(y)) / 2 is sigmoid(2 y)."""
    return tl.sigmoid(SQRT_8_BY_PI * (x + TANH_CUBIC * x * x * x))


@device_function
def relu(x):
    """The maximum of x and 0; NaN of NaN."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@device_function
def limited(gate, up, ACTIVATION: tl.constexpr):
    """(gate, up) within the limits of a gated activation, `up` shifted."""
    if ACTIVATION.limit is not None:
        gate = tl.minimum(gate, ACTIVATION.limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, ACTIVATION.limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -ACTIVATION.limit, propagate_nan=tl.PropagateNan.ALL)
    if ACTIVATION.shift != 0.0:
        up = up + ACTIVATION.shift
    return gate, up


@device_function
def swish(x, ACTIVATION: tl.constexpr):
    """(x * sigmoid(alpha * x), the sigmoid)."""
    scaled = x
    if ACTIVATION.alpha != 1.0:
        scaled = x * ACTIVATION.alpha
    sigmoid = tl.sigmoid(scaled)
    return x * sigmoid, sigmoid


@device_function
def activate(gate, up, ACTIVATION: tl.constexpr):
    """The activation of fp32 tiles, see `activations.Activation`; `up` is used by gated ones."""
    NAME: tl.constexpr = ACTIVATION.name
    if is_gated(NAME):
        gate, up = limited(gate, up, ACTIVATION)
    value = gate
    if NAME == "swiglu" or NAME == "silu":
        value, _ = swish(gate, ACTIVATION)
    elif NAME == "geglu" or NAME == "gelu":
        value = gate * gaussian_cdf(gate)
    elif NAME == "geglu_tanh" or NAME == "gelu_tanh":
        value = gate * tanh_cdf(gate)
    elif NAME == "relu2":
        value = relu(gate)
        value = value * value
    if is_gated(NAME):
        value = value * up
    return value


@device_function
def store_rows(out, values, part, row, end, n):
    """Round `values` and store them at (part, row, n) of `out`; rows before `end` only.

    out: ragged descriptor of [parts, rows, N] (`descriptors.ragged`): the hardware bounds rows
    row .. end and the columns. The coordinates are those of triton.tools.ragged_tma.
    """
    block = round_to(values, out.dtype).reshape(1, 1, 1, values.shape[0], values.shape[1])
    out.store([RAGGED, end, part, RAGGED - (end - row), n], block)


@device_function
def store_pre(pre, gate, up, row, end, n, GATED: tl.constexpr):
    """`store_rows` of gate and, where the activation is gated, of up: both at once, as each store
    waits until the one before has left shared memory."""
    if GATED:
        both = tl.join(round_to(gate, pre.dtype), round_to(up, pre.dtype)).permute(2, 0, 1)
        block = both.reshape(1, 1, 2, gate.shape[0], gate.shape[1])
        pre.store([RAGGED, end, 0, RAGGED - (end - row), n], block)
    else:
        store_rows(pre, gate, 0, row, end, n)


@device_function
def finish_tile(
    acc,
    out,
    tile,
    N,
    ACTIVATION: tl.constexpr,
    SUBTILES: tl.constexpr,
    pre=None,
    bias=None,
    row_weight=None,
    part=0,
):
    """out = activation(acc + bias) * row_weight, for columns tile.n .. of N; pre = acc + bias.

    out: see `store_rows`, `part` is that of out; pre: see `store_pre`. bias [L, PARTS * N];
    row_weight float32 [rows]. SUBTILES: the columns are finished and stored in as many pieces,
    which takes as much less shared memory and fewer registers.
    """
    gate, up = acc, acc
    if is_gated(ACTIVATION.name):
        gate, up = halves(acc)
    # fmt: off
    finish_columns(
        gate, up, out, tile, N, ACTIVATION, SUBTILES, pre, bias, row_weight, part
    )
    # fmt: on


@device_function
def finish_columns(
    gate,
    up,
    out,
    tile,
    N,
    ACTIVATION: tl.constexpr,
    SUBTILES: tl.constexpr,
    pre,
    bias,
    row_weight,
    part,
):
    """`finish_tile` for columns tile.n .. of gate and, where the activation is gated, of up."""
    row, end, n = tile.row, tile.end, tile.n
    if SUBTILES > 1:
        left_gate, right_gate = halves(gate)
        left_up, right_up = halves(up)
        right_tile = Tile(tile.expert, row, end, n + gate.shape[1] // 2)
        REST: tl.constexpr = SUBTILES // 2
        # fmt: off
        finish_columns(
            left_gate, left_up, out, tile, N, ACTIVATION, REST, pre, bias, row_weight, part
        )
        finish_columns(
            right_gate, right_up, out, right_tile, N, ACTIVATION, REST, pre, bias, row_weight,
            part,
        )
        # fmt: on
    else:
        GATED: tl.constexpr = is_gated(ACTIVATION.name)
        PARTS: tl.constexpr = 2 if GATED else 1
        if bias is not None:
            columns = n + tl.arange(0, gate.shape[1])
            at = bias + tile.expert.to(tl.int64) * N * PARTS + columns
            gate += tl.load(at, mask=columns < N, other=0.0).to(tl.float32)[None, :]
            if GATED:
                up += tl.load(at + N, mask=columns < N, other=0.0).to(tl.float32)[None, :]
        if pre is not None:
            store_pre(pre, gate, up, row, end, n, GATED)
        value = activate(gate, up, ACTIVATION)
        if row_weight is not None:
            rows = row + tl.arange(0, gate.shape[0])
            value *= tl.load(row_weight + rows, mask=rows < end, other=0.0)[:, None]
        store_rows(out, value, part, row, end, n)


@triton.jit(do_not_specialize_on_alignment=["bias", "row_weight"])
def _grouped_gemm_kernel(
    a,  # a ragged descriptor of [M, K], or `Gathered`
    w,  # a descriptor, see `product_kernels.gemm_tile`
    scales,  # `Scales`, or None
    out,
    pre,
    bias,
    row_weight,
    tiles,  # `Tiles`
    trace,  # TracedRole, or None
    TRANSPOSED: tl.constexpr,
    SHAPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [SPLITS, rows, N] = activation(A @ w[expert].T) for the rows of a tile schedule.

    out, pre, bias and row_weight: see `finish_tile`. With SPLITS above 1, each part of `out` gets
    the sum over its share of K. Any number of programs stride over the tiles. A PDL launch: before
    the launch before it has ended, it reads nothing that it writes, such as the tiles.
    """
    GATHERED: tl.constexpr = not isinstance(a, tl.tensor_descriptor)
    ACTIVATION: tl.constexpr = SHAPE.ACTIVATION
    WIDTH: tl.constexpr = SHAPE.BLOCK_N // 2 if is_gated(ACTIVATION.name) else SHAPE.BLOCK_N
    SPLITS: tl.constexpr = SHAPE.SPLITS
    N, K = product_size(w, SHAPE, TRANSPOSED)
    pdl_wait(PDL)
    num_m = tl.load(tiles.count)
    num_n = tl.cdiv(N, WIDTH)
    num_work = num_m * num_n * SPLITS
    since = begin_span()
    # Flattened, the next tile's loads start before this one's epilogue. Gathered loads would then
    # no longer be asynchronous, and scaled products are slower.
    FLATTEN: tl.constexpr = not GATHERED and scales is None
    for work_idx in tl.range(tl.program_id(0), num_work, tl.num_programs(0), flatten=FLATTEN):
        tile = load_tile(tiles, work_idx // SPLITS, num_m, num_n, WIDTH, SHAPE.GROUP_M)
        source = a
        if GATHERED:
            source = gathered_rows(a, tile, SHAPE.BLOCK_M)
        # Bounds that vary from tile to tile would slow the flattened loop by 4 to 10%.
        begin_k, end_k = 0, K
        if SPLITS > 1:
            share = tl.cdiv(tl.cdiv(K, SHAPE.BLOCK_K), SPLITS) * SHAPE.BLOCK_K
            begin_k = work_idx % SPLITS * share
            end_k = tl.minimum(begin_k + share, K)
        # fmt: off
        acc = product_tile(
            source, w, scales, tile, K, SHAPE, TRANSPOSED, begin_k, end_k
        )
        # fmt: on
        part = work_idx % SPLITS
        # fmt: off
        finish_tile(
            acc, out, tile, N, ACTIVATION, SHAPE.SUBTILES, pre, bias, row_weight, part
        )
        # fmt: on
        if trace is not None:
            since = end_span(trace.role, work_idx, since, trace.context)


@triton.jit(do_not_specialize=["max_rows", "N", "num_splits"])
def _split_sum_kernel(
    partial,  # float32 [num_splits, max_rows, PARTS * N]
    out,
    pre,
    bias,
    row_weight,
    tiles,
    max_rows,
    N,
    num_splits,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add up the shares of K, in order, and finish the tiles as `_grouped_gemm_kernel` does."""
    PARTS: tl.constexpr = 2 if is_gated(ACTIVATION.name) else 1
    WIDTH: tl.constexpr = BLOCK_N // PARTS
    num_n = tl.cdiv(N, WIDTH)
    for work_idx in range(tl.program_id(0), tl.load(tiles.count) * num_n, tl.num_programs(0)):
        expert, row, end = unpack_tile(tl.load(tiles.packed + work_idx // num_n))
        tile = Tile(expert, row, end, work_idx % num_n * WIDTH)
        rows = row + tl.arange(0, BLOCK_M)
        columns = tl.arange(0, BLOCK_N)
        inside = tile.n + columns % WIDTH < N
        columns = columns // WIDTH * N + tile.n + columns % WIDTH
        at = partial + rows.to(tl.int64)[:, None] * N * PARTS + columns[None, :]
        mask = (rows < end)[:, None] & inside[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for split in range(0, num_splits):
            acc += tl.load(at + max_rows.to(tl.int64) * N * PARTS * split, mask=mask, other=0.0)
        finish_tile(acc, out, tile, N, ACTIVATION, 1, pre, bias, row_weight)
