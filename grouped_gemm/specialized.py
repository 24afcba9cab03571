"""Launches of the product by warps that each have one task; see `specialized_kernels.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ..device.context import TracedRole
from ..device.lang import INTERPRETED
from .config import OFFERS_SPECIALIZED, GemmConfig
from .descriptors import expert_weights, ragged, rows_of
from .operands import Epilogue, Rows, Weights
from .product_kernels import Gathered
from .quantization import QuantizedRows
from .schedule_kernels import Tiles

KERNELS: tuple[Any, ...] = ()
"""What `launch_specialized` launches."""
if OFFERS_SPECIALIZED:
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia import hopper

    from .specialized_kernels import HALF_WARPS, HALVES, CastScales, specialized_gemm_kernel

    KERNELS = (specialized_gemm_kernel,)
Launcher = Callable[..., None]
"""`launch`, or that of a call."""
SWIZZLE_BYTES = 128


class TileCounters(NamedTuple):
    """What the programs of a launch count, int64, 0 before it: in `claimed` [1] the tiles that they
    have begun, which they take one by one (without it each takes every n-th tile), and in each of
    `computed` the programs that have ended."""

    claimed: torch.Tensor | None = None
    computed: torch.Tensor | None = None


NO_COUNTERS = TileCounters()


def is_specialized(config: GemmConfig, weights: Weights, epilogue: Epilogue) -> bool:
    """Whether a product of such tiles is made by `launch_specialized`: where it stores nothing but
    the activations of what it multiplies, on a GPU, by a Triton that offers it."""
    has_more = weights.bias is not None or epilogue.pre is not None
    has_more = has_more or epilogue.row_weight is not None
    return config.specialized and not has_more and OFFERS_SPECIALIZED and not INTERPRETED


def launch_specialized(
    launch: Launcher,
    num_programs: int,
    rows: Rows,
    weights: Weights,
    epilogue: Epilogue,
    out: torch.Tensor | QuantizedRows,
    tiles: Tiles,
    config: GemmConfig,
    counters: TileCounters = NO_COUNTERS,
    trace: TracedRole | None = None,
    **options: Any,
) -> None:
    """out [M, N], in bf16 or cast: the activation of e4m3 rows [M, K] times weights, for the rows
    of `tiles`. options: of `launch`.
    """
    assert rows.offset is None and weights.scale is not None and not weights.transposed
    described = expert_weights(rows, weights, config, epilogue.parts)
    block_m, half, cast = config.block_m, config.block_m // HALVES.value, None
    if isinstance(out, QuantizedRows):
        out, _, scale = out.operand
        assert scale is not None
        cast = CastScales(scale, scale.stride(0))
    launch(
        specialized_gemm_kernel,
        (num_programs,),
        in_shared_memory(rows_of(rows.x, None, [block_m, config.block_k])),
        described._replace(w=in_shared_memory(described.w)),
        in_shared_memory(ragged(out[None], half, config.block_n // 2)),
        cast,
        tiles,
        counters.claimed,
        counters.computed,
        trace,
        NUM_COUNTERS=0 if counters.computed is None else len(counters.computed),
        STAGES=config.num_stages,
        SHAPE=config.launch_options(epilogue.activation)["SHAPE"],
        num_warps=HALF_WARPS.value,
        **options,
    )


def in_shared_memory(one: TensorDescriptor | Gathered) -> hopper.TensorDescriptor:
    """A descriptor as Gluon takes it, which says how a block lies in shared memory."""
    assert isinstance(one, TensorDescriptor)
    layout = NVMMASharedLayout(SWIZZLE_BYTES, 8 * one.base.itemsize, len(one.block_shape))
    parts = one.shape, one.strides, one.block_shape
    return hopper.TensorDescriptor(one.base, *map(list, parts), layout)
