"""Kernels of the gradients of weights, activation and bias. That of rows is the forward kernel's,
with the weights transposed."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..device.lang import begin_span, device_function, dot, end_span, round_to
from ..device.programs import pdl_launch_dependents, pdl_wait
from ..device.tiles import wait_tile
from .kernels import (
    INV_SQRT_2PI,
    SQRT_8_BY_PI,
    TANH_CUBIC,
    activate,
    gaussian_cdf,
    halves,
    limited,
    relu,
    swish,
    tanh_cdf,
)
from .product_kernels import is_gated, load_rows
from .schedule_kernels import tile_coordinates


@device_function
def activation_gradient(grad, gate, up, ACTIVATION: tl.constexpr):
    """(gradient of gate, of up) from that of the activation; `up` is used by gated ones alone."""
    NAME: tl.constexpr = ACTIVATION.name
    given_gate, given_up = gate, up
    if is_gated(NAME):
        gate, up = limited(gate, up, ACTIVATION)
    if NAME == "swiglu" or NAME == "silu":
        value, sigmoid = swish(gate, ACTIVATION)
        if ACTIVATION.alpha == 1.0:
            slope = sigmoid * (1.0 + gate - value)
        else:
            slope = sigmoid * (1.0 + (gate - value) * ACTIVATION.alpha)
    elif NAME == "geglu_tanh" or NAME == "gelu_tanh":
        cdf = tanh_cdf(gate)
        value = gate * cdf
        inner = SQRT_8_BY_PI * (1.0 + 3.0 * TANH_CUBIC * gate * gate)
        slope = cdf + value * (1.0 - cdf) * inner
    elif NAME == "relu2":
        slope = 2.0 * relu(gate)
        value = gate  # of no use without a gate
    else:  # geglu, gelu
        cdf = gaussian_cdf(gate)
        value = gate * cdf
        slope = cdf + gate * tl.exp(-0.5 * gate * gate) * INV_SQRT_2PI
    of_gate, of_up = grad * slope, grad * value
    if is_gated(NAME):
        of_gate = of_gate * up
        if ACTIVATION.limit is not None:
            of_gate = tl.where(given_gate <= ACTIVATION.limit, of_gate, 0.0)
            of_up = tl.where(tl.abs(given_up) <= ACTIVATION.limit, of_up, 0.0)
    return of_gate, of_up


@device_function
def expert_rows(expert, offsets, max_rows):
    """(first row of an expert, end of its rows), without rows from `max_rows` on."""
    begin = tl.load(offsets + expert).to(tl.int32)
    return begin, tl.minimum(tl.load(offsets + expert + 1), max_rows).to(tl.int32)


@device_function
def load_columns(x, part, rows, end, columns, N, PARTS: tl.constexpr):
    """fp32 tile of x [rows, PARTS, N]; 0 outside."""
    at = x + rows.to(tl.int64)[:, None] * (N * PARTS) + (part * N + columns)[None, :]
    inside = tl.max_constancy(columns < N, 128 // x.dtype.element_ty.primitive_bitwidth)
    mask = (rows < end)[:, None] & inside[None, :]
    return tl.load(tl.multiple_of(at, (1, 16)), mask=mask, other=0.0).to(tl.float32)


@device_function
def store_columns(out, values, part, rows, end, columns, N, PARTS: tl.constexpr):
    """Round `values` and store them where `load_columns` reads."""
    at = out + rows.to(tl.int64)[:, None] * (N * PARTS) + (part * N + columns)[None, :]
    inside = tl.max_constancy(columns < N, 128 // out.dtype.element_ty.primitive_bitwidth)
    mask = (rows < end)[:, None] & inside[None, :]
    tl.store(tl.multiple_of(at, (1, 16)), round_to(values, out.dtype.element_ty), mask=mask)


class ActivationRows(NamedTuple):
    """What the gradient of an activation is made of, and into: see `_activation_gradient_kernel`.
    row_weight, act and weight_grad may be None."""

    grad: tl.tensor  # [rows, N]: the gradient of the activations, before they are weighted
    pre: tl.tensor  # [rows, PARTS * N], the pre-activations
    row_weight: tl.tensor  # float32 [rows]
    pre_grad: tl.tensor  # out, like pre
    act: tl.tensor  # out, like grad: the activations times row_weight
    weight_grad: tl.tensor  # float32 [rows], out: the gradient of row_weight, 0 without an expert


@triton.jit(
    do_not_specialize=["max_rows", "num_experts", "N"],
    do_not_specialize_on_alignment=["offsets"],
)
def _activation_gradient_kernel(
    rows,  # ActivationRows
    offsets,
    max_rows,
    num_experts,
    N,
    trace,  # TracedRole, or None
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """From the gradient of activations to that of what they were computed from. `act` is what the
    second GEMM multiplied: the gradient of its weights needs it.

    act may be the memory of grad, and pre_grad that of pre: a program reads the elements that it
    overwrites, and no others, before it stores there. A PDL launch, which waits before it reads
    anything.
    """
    pdl_wait(PDL)
    GATED: tl.constexpr = is_gated(ACTIVATION.name)
    PARTS: tl.constexpr = 2 if GATED else 1
    end = tl.minimum(tl.load(offsets + num_experts), max_rows).to(tl.int32)
    last = end if rows.weight_grad is None else max_rows
    since = begin_span()
    for first in range(tl.program_id(0) * BLOCK_M, last, tl.num_programs(0) * BLOCK_M):
        index = first + tl.arange(0, BLOCK_M)
        if rows.row_weight is not None:
            weight = tl.load(rows.row_weight + index, mask=index < end, other=0.0)[:, None]
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for column in range(0, tl.where(first < end, N, 0), BLOCK_N):
            columns = column + tl.arange(0, BLOCK_N)
            grad = load_columns(rows.grad, 0, index, end, columns, N, 1)
            gate = load_columns(rows.pre, 0, index, end, columns, N, PARTS)
            up = gate
            if GATED:
                up = load_columns(rows.pre, 1, index, end, columns, N, PARTS)
            value = activate(gate, up, ACTIVATION)
            if rows.row_weight is not None:
                total += grad * value
                value *= weight
                grad *= weight
            if rows.act is not None:
                store_columns(rows.act, value, 0, index, end, columns, N, 1)
            of_gate, of_up = activation_gradient(grad, gate, up, ACTIVATION)
            store_columns(rows.pre_grad, of_gate, 0, index, end, columns, N, PARTS)
            if GATED:
                store_columns(rows.pre_grad, of_up, 1, index, end, columns, N, PARTS)
        if rows.weight_grad is not None:
            tl.store(rows.weight_grad + index, tl.sum(total, 1), mask=index < max_rows)
    if trace is not None:
        end_span(trace.role, tl.program_id(0), since, trace.context)


@device_function
def store_weight_gradient(
    acc, out, expert, part, m, n, ACCUMULATE: tl.constexpr, SUBTILES: tl.constexpr
):
    """Round and store a tile of an expert's gradient; with ACCUMULATE, add it to what `out` has."""
    if SUBTILES > 1:
        left, right = halves(acc)
        half: tl.constexpr = acc.shape[1] // 2
        rest: tl.constexpr = SUBTILES // 2
        store_weight_gradient(left, out, expert, part, m, n, ACCUMULATE, rest)
        store_weight_gradient(right, out, expert, part, m, n + half, ACCUMULATE, rest)
    else:
        if ACCUMULATE:
            before = out.load([expert, part, m, n])
            acc += before.reshape(acc.shape[0], acc.shape[1]).to(tl.float32)
        tile = round_to(acc, out.dtype).reshape(1, 1, acc.shape[0], acc.shape[1])
        out.store([expert, part, m, n], tile)


@device_function
def load_wgrad_rows(x, row, end, n, K, SHAPE: tl.constexpr):
    """[BLOCK_K, BLOCK_N]: columns n .. of K of rows row .. of x, see `_wgrad_kernel`; zeros from
    row `end` on."""
    if isinstance(x, tl.tensor_descriptor):
        tile = load_rows(x, row, end, n)
    else:
        rows = row + tl.arange(0, SHAPE.BLOCK_K)
        has = rows < end
        at = x.base + tl.load(x.row_offset + rows, mask=has, other=0)
        columns = n + tl.arange(0, SHAPE.BLOCK_N)
        inside = tl.max_constancy(columns < K, 128 // x.base.dtype.element_ty.primitive_bitwidth)
        at = tl.multiple_of(at, 16)[:, None] + columns[None, :]
        tile = tl.load(at, mask=has[:, None] & inside[None, :], other=0.0)
    return tile


@device_function
def wgrad_block(index, out, SHAPE: tl.constexpr):
    """(expert, part, first row of it, first column) of block number `index` of the gradients `out`,
    a descriptor of [L, PARTS, N, K]: expert by expert."""
    num_m = tl.cdiv(out.shape[2], SHAPE.BLOCK_M)
    num_n = tl.cdiv(out.shape[3], SHAPE.BLOCK_N)
    num_blocks = out.shape[1] * num_m * num_n
    m, n = tile_coordinates(index % num_blocks, out.shape[1] * num_m, num_n, SHAPE.GROUP_M)
    return index // num_blocks, m // num_m, m % num_m * SHAPE.BLOCK_M, n * SHAPE.BLOCK_N


@device_function
def num_wgrad_steps(out, offsets, max_rows, EXPERTS_PAD: tl.constexpr, SHAPE: tl.constexpr):
    """How many steps of BLOCK_K rows this program takes through its blocks, numbers program_id,
    program_id + num_programs, ... of `wgrad_block`; one for a block without rows."""
    num_m = out.shape[1] * tl.cdiv(out.shape[2], SHAPE.BLOCK_M)
    num_blocks = num_m * tl.cdiv(out.shape[3], SHAPE.BLOCK_N)
    experts = tl.arange(0, EXPERTS_PAD)
    real = experts < out.shape[0]
    begin = tl.load(offsets + experts, mask=real, other=0)
    end = tl.minimum(tl.load(offsets + experts + 1, mask=real, other=0), max_rows)
    steps = tl.maximum(tl.cdiv(end - begin, SHAPE.BLOCK_K), 1).to(tl.int32)
    before = num_blocks_before(experts * num_blocks)
    blocks = num_blocks_before((experts + 1) * num_blocks) - before
    return tl.sum(tl.where(real, blocks * steps, 0), 0)


@device_function
def num_blocks_before(index):
    """How many of this program's blocks have smaller numbers."""
    return tl.maximum(index - tl.program_id(0) + tl.num_programs(0) - 1, 0) // tl.num_programs(0)


class Arrival(NamedTuple):
    """When the rows of experts have arrived, see `tiles.wait_tile`."""

    last_counter: tl.tensor  # int32 [L]: of each expert's last rows
    copied: tl.tensor  # int64 counters
    num_programs: tl.tensor
    deadline: tl.tensor
    context: tl.tensor


@device_function
def multiply_wgrad(
    grad,
    x,
    out,
    offsets,
    max_rows,
    arrival,
    trace,
    ACCUMULATE: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    SHAPE: tl.constexpr,
    BEFORE_TMA: tl.constexpr,
):
    """All blocks of this program, see `_wgrad_kernel`; with an `Arrival` each once the rows of its
    expert have arrived. trace: TracedRole, or None.

    One loop of steps through all blocks, since blocks have few steps: so the next block's rows are
    loaded while this one is multiplied and stored. (The compiler flattens nested loops only if the
    inner one is as long each time.)
    """
    num_steps = num_wgrad_steps(out, offsets, max_rows, EXPERTS_PAD, SHAPE)
    since, waited_for = begin_span(), tl.full((), -1, tl.int32)
    index, row = tl.program_id(0), 0
    expert, part, m, n, begin, end = 0, 0, 0, 0, 0, 0
    acc = tl.zeros((SHAPE.BLOCK_M, SHAPE.BLOCK_N), tl.float32)
    for _ in tl.range(num_steps):
        if row == 0:
            expert, part, m, n = wgrad_block(index, out, SHAPE)
            begin, end = expert_rows(expert, offsets, max_rows)
            if arrival is not None:
                # fmt: off
                zero, waited_for = wait_tile(
                    arrival.copied, tl.load(arrival.last_counter + expert), waited_for,
                    arrival.num_programs, arrival.deadline, arrival.context, BEFORE_TMA,
                )
                # fmt: on
                begin += zero
        grad_tile = load_rows(grad, begin + row, end, part * out.shape[2] + m)
        x_tile = load_wgrad_rows(x, begin + row, end, n, out.shape[3], SHAPE)
        acc = dot(grad_tile.T, x_tile, acc)
        row += SHAPE.BLOCK_K
        is_last = begin + row >= end
        if is_last:
            store_weight_gradient(acc, out, expert, part, m, n, ACCUMULATE, SHAPE.SUBTILES)
            acc = tl.zeros((SHAPE.BLOCK_M, SHAPE.BLOCK_N), tl.float32)
            if trace is not None:
                since = end_span(trace.role, index, since, trace.context)
        # Not in the branch, so that the next loads do not depend on it.
        index = tl.where(is_last, index + tl.num_programs(0), index)
        row = tl.where(is_last, 0, row)


@triton.jit(do_not_specialize=["max_rows"], do_not_specialize_on_alignment=["offsets"])
def _wgrad_kernel(
    grad,  # a ragged descriptor of [rows, PARTS * N]
    x,  # a ragged descriptor of [rows, K], or `Gathered`
    out,  # a descriptor of [L, PARTS, N, K]
    offsets,
    max_rows,
    trace,  # TracedRole, or None
    ACCUMULATE: tl.constexpr,
    EARLY: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    SHAPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = grad.T @ x over the rows of each expert. An expert without rows gets zeros.

    A PDL launch, which waits before it reads anything. With EARLY it waits only before it ends, and
    lets the next launch begin at once: where the launch before has waited, before it let this one
    begin, for all that this one reads.
    """
    if EARLY:
        pdl_launch_dependents(PDL)
    else:
        pdl_wait(PDL)
    # fmt: off
    multiply_wgrad(
        grad, x, out, offsets, max_rows, None, trace, ACCUMULATE, EXPERTS_PAD, SHAPE, PDL
    )
    # fmt: on
    if EARLY:
        pdl_wait(PDL)


@triton.jit(do_not_specialize=["max_rows", "N"])
def _bias_gradient_kernel(
    grad, row_weight, out, offsets, max_rows, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """out [L, N] float32: the sum of each expert's rows of grad [rows, N], times their weights."""
    expert = tl.program_id(0)
    begin, end = expert_rows(expert, offsets, max_rows)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for row in range(begin, end, BLOCK_M):
        rows = row + tl.arange(0, BLOCK_M)
        tile = load_columns(grad, 0, rows, end, columns, N, 1)
        if row_weight is not None:
            tile *= tl.load(row_weight + rows, mask=rows < end, other=0.0)[:, None]
        acc += tile
    tl.store(out + expert.to(tl.int64) * N + columns, tl.sum(acc, 0), mask=columns < N)


@triton.jit(
    do_not_specialize=["max_rows", "N"],
    do_not_specialize_on_alignment=["grad", "bias", "weight_grad", "offsets"],
)
def _bias_weight_gradient_kernel(
    grad,  # [rows, N]
    bias,  # [L, N]
    weight_grad,  # float32 [rows]
    offsets,
    max_rows,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add to `weight_grad` each row of grad times the bias of its expert, which is weighted as the
    product is. An ordinary launch, which begins when the launches before have ended."""
    expert = tl.program_id(0)
    begin, end = expert_rows(expert, offsets, max_rows)
    for row in range(begin + tl.program_id(1) * BLOCK_M, end, tl.num_programs(1) * BLOCK_M):
        rows = row + tl.arange(0, BLOCK_M)
        total = tl.load(weight_grad + rows, mask=rows < end, other=0.0)
        for column in range(0, N, BLOCK_N):
            columns = column + tl.arange(0, BLOCK_N)
            at = bias + expert.to(tl.int64) * N + columns
            added = tl.load(at, mask=columns < N, other=0.0).to(tl.float32)
            total += tl.sum(load_columns(grad, 0, rows, end, columns, N, 1) * added[None, :], 1)
        tl.store(weight_grad + rows, total, mask=rows < end)


@triton.jit(do_not_specialize=["num_experts", "max_rows", "N"])
def _clear_rest_kernel(
    x, offsets, num_experts, max_rows, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Set the rows of x [max_rows, N] that no expert owns to 0. Often every row has an expert."""
    first = tl.load(offsets + num_experts).to(tl.int32) + tl.program_id(0) * BLOCK_M
    for row in range(first, max_rows, tl.num_programs(0) * BLOCK_M):
        rows = row + tl.arange(0, BLOCK_M)
        for column in range(0, N, BLOCK_N):
            columns = column + tl.arange(0, BLOCK_N)
            at = x + rows.to(tl.int64)[:, None] * N + columns[None, :]
            tl.store(at, 0.0, mask=(rows < max_rows)[:, None] & (columns < N)[None, :])


@triton.jit(do_not_specialize=["K"])
def _gathered_sum_kernel(
    grad,  # [rows, K]
    order,  # int64 [rows]: rows of grad by the row of x that they were made of
    first,  # int64 [M + 1]: where those of each row of x begin in it
    out,  # [M, K]
    K,
    BLOCK_K: tl.constexpr,
):
    """out[m] = the sum of the rows of grad that come from row m of x, in their order.

    Rows 0 .. 3 from rows 2, 0, 2, 1 of x: order [1, 3, 0, 2], first [0, 1, 2, 4].
    """
    m = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_K,), tl.float32)
    for index in range(tl.load(first + m).to(tl.int32), tl.load(first + m + 1).to(tl.int32)):
        row = tl.load(order + index)
        acc += tl.load(grad + row * K + columns, mask=columns < K, other=0.0).to(tl.float32)
    tl.store(out + m * K + columns, round_to(acc, out.dtype.element_ty), mask=columns < K)
