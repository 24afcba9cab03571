"""The launches of a rank as its launchers make them, recorded and compiled without a GPU.

`recorded()` stands in for the driver and the chip: a launch is specialised by Triton as on an H200,
and kept instead of being run. So what a test compiles is what users run, whatever the order of a
kernel's arguments.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from compile_helper import Compiled, compile_source
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from moe_engine import cuda_driver
from moe_engine.cuda_driver import PackedLaunch
from moe_engine.dispatch import Tokens
from moe_engine.dispatch.low_latency import LowLatencyTokens
from moe_engine.engines import fused_layer, training_step
from moe_engine.engines.base import LayerInputs, WeightGradients
from moe_engine.expert_major import sum_rows, take_rows
from moe_engine.grouped_gemm import Activation
from moe_engine.grouped_gemm.config import GemmConfig
from moe_engine.hardware import kinds_of, stand_in
from moe_engine.kernel_bundle import Variant
from moe_engine.launch import collecting
from moe_engine.tools.lone_rank import (
    internode_low_latency_engine,
    kernel_engine,
    low_latency_engine,
)

TENSOR_MAP = dict(swizzle=0, elem_size=2, elem_type=0, block_size=[1], fp4_padded=False)
FUNCTION = dict(
    name="kernel",
    handle=0,
    num_threads=128,
    shared_bytes=0,
    pdl=False,
    prefer_shared_memory=lambda: None,
    parameter_sizes=mock.ANY,
)
_compiled: dict[Any, Compiled] = {}


@dataclass(frozen=True)
class Launch:
    """A kernel, and what Triton makes of the arguments of one launch."""

    source: ASTSource
    grid: tuple[int, ...]
    options: Any
    packed: PackedLaunch

    @property
    def name(self) -> str:
        return self.source.name.strip("_").removesuffix("_kernel")

    def compile(self, arch: int = 90) -> Compiled:
        """Compile for sm_`arch`, once for launches of the same kind."""
        key = self.source.hash(), arch, str(self.options)
        if key not in _compiled:
            _compiled[key] = compile_source(self.source, arch, self.options.__dict__)
            sizes = parameter_sizes(_compiled[key].ptx)
            assert self.packed.sizes == sizes, f"{self.name} takes {sizes}"
        return _compiled[key]


@contextmanager
def recorded(arch: int = 90) -> Iterator[list[Launch]]:
    """The launches made in the block, in their order, as on a GPU of sm_`arch`."""
    launches: list[Launch] = []

    def collect(kernel: JITFunction, grid: Any, arguments: Any, options: Any) -> None:
        variant = Variant.of(kernel, arch, arguments, options)
        source, parsed = variant.source()
        signature = tuple(source.signature.values())
        maps = [TENSOR_MAP] * str(signature).count("tensordesc") if arch >= 90 else []
        function: Any = SimpleNamespace(signature=signature, tensor_maps=maps, **FUNCTION)
        values = [variant.values[name] for name in kernel.arg_names]
        packed = PackedLaunch(function, kernel.arg_names, grid, values)
        launches.append(Launch(source, tuple(grid), parsed, packed))

    encode = mock.Mock(return_value=(0, mock.Mock(getPtr=lambda: 64)))
    with (
        stand_in(kinds_of(arch)[0]),
        collecting(collect),
        mock.patch.object(cuda_driver.driver, "cuTensorMapEncodeTiled", encode),
    ):
        yield launches


def parameter_sizes(ptx: str) -> list[int]:
    """The bytes of each parameter of the kernel in PTX."""
    head = ptx.partition(".visible .entry")[2].partition("{")[0]
    sizes = {"b8": 1, "u8": 1, "u16": 2, "u32": 4, "u64": 8, "f32": 4}
    found = re.findall(r"\.param (?:\.align \d+ )?\.(\w+)[^,\[)]*(?:\[(\d+)\])?", head)
    return [sizes[kind] * int(count or 1) for kind, count in found]


def normalised(ptx: str, name: str) -> str:
    """PTX without names that a kernel's author chose."""
    ptx = ptx.partition("\t.section\t.debug")[0].replace(name, "kernel")
    return re.sub(r"^\s*(//|\.file|\.loc).*$", "", ptx, flags=re.MULTILINE)


# --- Calls of one rank of several, whose kernels never run ------------------------------------
#
# Unless told otherwise with DeepSeek-V3's sizes on 4 ranks.

RANKS, TOKENS, EXPERTS, TOPK, HIDDEN, COLUMNS = 4, 64, 256, 8, 7168, 2048
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
REGION_BYTES = 8 << 20


def routing(num_topk: int = TOPK) -> tuple[torch.Tensor, torch.Tensor]:
    """topk_idx [T, K] and topk_weights of tokens; launches do not depend on what they hold."""
    return torch.zeros(TOKENS, num_topk, dtype=torch.int64), torch.zeros(TOKENS, num_topk)


def normal(
    arch: int = 90, dtype: torch.dtype = BF16, hidden: int = HIDDEN, scales: int = 0
) -> list[Launch]:
    """Dispatch, copied and in place, cached dispatch, and combine with weights and two biases."""
    engine, x = kernel_engine(RANKS, TOKENS, REGION_BYTES), torch.empty(TOKENS, hidden, dtype=dtype)
    topk_idx, topk_weights = routing()
    with recorded(arch) as launches:
        sent = torch.empty(TOKENS, scales) if scales else None
        tokens = Tokens(x, topk_idx, topk_weights, sent), engine.layout(topk_idx, EXPERTS)
        got, _, handle, *_ = engine.dispatch(*tokens, RANKS * TOKENS)
        engine.dispatch_cached(x, sent, handle)
        y = torch.empty(len(got.x), hidden, dtype=BF16 if dtype == FP8 else dtype)
        engine.combine(y, handle, got.topk_weights, [y[:TOKENS], y[:TOKENS]])
        engine.dispatch(*tokens, RANKS * TOKENS, owned=False)
        engine.release()
        if dtype != FP8:
            slots, dst_rows = torch.zeros(TOKENS * TOPK).int(), torch.zeros(TOKENS, TOPK).int()
            sum_rows(take_rows(x, slots, TOPK), dst_rows)
    return launches


def internode(
    dtype: torch.dtype = BF16, hidden: int = HIDDEN, scales: int = 0, num_nodes: int = 2
) -> list[Launch]:
    """Dispatch and combine, with and without a handle, of ranks on several nodes."""
    engine = kernel_engine(RANKS, TOKENS, REGION_BYTES, num_nodes=num_nodes)
    x, (topk_idx, topk_weights) = torch.empty(TOKENS, hidden, dtype=dtype), routing()
    with recorded() as launches:
        sent = torch.empty(TOKENS, scales) if scales else None
        tokens = Tokens(x, topk_idx, topk_weights, sent), engine.layout(topk_idx, EXPERTS)
        got, _, handle, *_ = engine.dispatch(*tokens, RANKS * TOKENS)
        engine.dispatch_cached(x, sent, handle)
        y = torch.empty(len(got.x), hidden, dtype=BF16 if dtype == FP8 else dtype)
        engine.combine(y, handle, got.topk_weights, [y[:TOKENS], y[:TOKENS]])
    return launches


def internode_low_latency(
    row_format: str = "bf16", hooked: bool = False, stats: bool = False, num_nodes: int = 2
) -> list[Launch]:
    """Low-latency dispatch and combine of ranks on several nodes."""
    engine = internode_low_latency_engine(RANKS, REGION_BYTES, num_nodes)
    x, (topk_idx, topk_weights) = torch.empty(TOKENS, HIDDEN, dtype=BF16), routing()
    num_local = EXPERTS // RANKS
    received = torch.zeros(num_local, dtype=torch.int32) if stats else None
    waited = torch.zeros(RANKS, dtype=torch.int64) if stats else None
    with recorded() as launches:
        tokens = LowLatencyTokens(x, topk_idx, None, TOKENS, EXPERTS, row_format)
        got, receive = engine.dispatch(tokens, received, waited, hooked=hooked)
        handle = engine.new_handle(got, tokens.sizes(RANKS))
        y = torch.empty(num_local, RANKS * TOKENS, HIDDEN, dtype=BF16)
        rows = engine.expert_rows(y, topk_idx, topk_weights, handle, x)
        *_, add_up = engine.combine(rows, EXPERTS, waited, hooked)
        for hook in (receive, add_up):
            if hook is not None:
                hook()
    return launches


def layer(
    arch: int = 90,
    num_ranks: int = RANKS,
    num_topk: int = TOPK,
    tiles: tuple[GemmConfig, GemmConfig] | None = None,
    like_gpt_oss: bool = False,
    is_quantized: bool = False,
) -> dict[str, Launch]:
    """The launches of a fused layer, by name. tiles: of both GEMMs, in place of the chosen ones.
    like_gpt_oss: with biases and its activation. is_quantized: with e4m3 weights."""
    engine = kernel_engine(num_ranks, TOKENS, REGION_BYTES)
    x = torch.empty(TOKENS, HIDDEN, dtype=BF16)
    shape = EXPERTS // num_ranks, 2 * COLUMNS, HIDDEN
    up, down = torch.empty(shape, dtype=BF16), torch.empty(shape[0], HIDDEN, COLUMNS, dtype=BF16)
    chosen = {} if tiles is None else {"side_effect": tiles}
    with recorded(arch) as launches:
        choose = mock.Mock(wraps=fused_layer.gemm_config, **chosen)
        with mock.patch.object(fused_layer, "gemm_config", choose):
            inputs = LayerInputs(x, *routing(num_topk), up, down)
            inputs = with_scales(inputs) if is_quantized else inputs
            engine.moe_ffn(with_biases(inputs) if like_gpt_oss else inputs)
    return {launch.name: launch for launch in launches}


def with_scales(inputs: LayerInputs) -> LayerInputs:
    """The same layer with e4m3 weights."""
    up, down = (w.to(FP8) for w in (inputs.w_gate_up, inputs.w_down))
    scales = [torch.empty(len(w), *(-(-n // 128) for n in w.shape[1:])) for w in (up, down)]
    return LayerInputs(*inputs[:3], up, down)._replace(s_gate_up=scales[0], s_down=scales[1])


def with_biases(inputs: LayerInputs) -> LayerInputs:
    """The same layer with gpt-oss's activation, and biases that require grad."""
    num_local = len(inputs.w_down)
    b_gate_up, b_down = (torch.empty(num_local, size, dtype=BF16) for size in (2 * COLUMNS, HIDDEN))
    biases = dict(b_gate_up=b_gate_up.requires_grad_(), b_down=b_down.requires_grad_())
    activation = Activation("swiglu", limit=7.0, alpha=1.702, shift=1.0)
    return inputs._replace(**biases, activation=activation)


def trained_layer(
    save: str, tiles: tuple[GemmConfig, GemmConfig], **options: Any
) -> tuple[dict[str, Launch], dict[str, Launch]]:
    """`training_launches` by name."""
    forward, backward = training_launches(save, tiles, **options)
    return {one.name: one for one in forward}, {one.name: one for one in backward}


def training_launches(
    save: str,
    tiles: tuple[GemmConfig, GemmConfig],
    interleaved: bool = False,
    into: torch.dtype = BF16,
    accumulate: bool = False,
    is_delayed: bool = False,
    like_gpt_oss: bool = False,
) -> tuple[list[Launch], list[Launch]]:
    """The launches of a layer that saves, and of its backward. tiles: of the up-projection, and of
    the other products whose results return. interleaved: rows of gate and up lie in turn. The
    gradients of weights go into tensors of a type, or are added to them; or are delayed. The layer
    has biases and another activation if it is like_gpt_oss."""
    engine = kernel_engine(RANKS, TOKENS, REGION_BYTES)
    x = torch.empty(TOKENS, HIDDEN, dtype=BF16)
    shape = EXPERTS // RANKS, 2 * COLUMNS, HIDDEN
    up, down = torch.empty(shape, dtype=BF16), torch.empty(shape[0], HIDDEN, COLUMNS, dtype=BF16)
    if interleaved:
        up = up.unflatten(1, (-1, 2)).transpose(1, 2)
    inputs = LayerInputs(x, *routing(), up, down)
    inputs = with_biases(inputs) if like_gpt_oss else inputs

    def choose(w: torch.Tensor, num_rows: int, activation: str = "none", **_: Any) -> GemmConfig:
        return tiles[activation == "none"]

    with (
        recorded() as launches,
        mock.patch.object(fused_layer, "gemm_config", choose),
        mock.patch.object(training_step, "gemm_config", choose),
    ):
        _, saved, _ = engine.moe_ffn_forward(inputs, save, is_captured=True)
        num_forward = len(launches)
        outs = [torch.empty_like(one, dtype=into) for one in (up, down)]
        memory = None if is_delayed else WeightGradients(outs[0], outs[1], accumulate)
        engine.moe_ffn_backward(x.clone(), inputs, saved, memory)
    return launches[:num_forward], launches[num_forward:]


def low_latency(
    arch: int = 90,
    row_format: str = "bf16",
    phases: str = "both",
    shrink: bool = False,
    stats: bool = False,
) -> dict[str, Launch]:
    """Low-latency dispatch and combine by name, of `phases` "both", "send" or "receive"."""
    engine = low_latency_engine(RANKS, REGION_BYTES, shrink)
    x = torch.empty(TOKENS, HIDDEN, dtype=BF16)
    topk_idx, topk_weights = routing()
    num_local, hooked = EXPERTS // RANKS, phases != "both"
    received = torch.zeros(num_local, dtype=torch.int32) if stats else None
    waited = torch.zeros(RANKS, dtype=torch.int64) if stats else None
    with recorded(arch) as launches:
        tokens = LowLatencyTokens(x, topk_idx, None, TOKENS, EXPERTS, row_format)
        got, receive = engine.dispatch(tokens, received, waited, hooked=hooked)
        y = torch.empty(num_local, RANKS * TOKENS, HIDDEN, dtype=BF16)
        handle = engine.new_handle(got, tokens.sizes(RANKS))
        rows = engine.expert_rows(y, topk_idx, topk_weights, handle, x)
        *_, add_up = engine.combine(rows, EXPERTS, waited, hooked)
        if hooked and phases == "receive":
            launches.clear()
            receive()
            add_up()
    return {launch.name: launch for launch in launches}
