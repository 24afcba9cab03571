"""The launches of a rank as its launchers make them, recorded and compiled without a GPU.

`recorded()` stands in for the driver and the chip: a launch is specialised by Triton as on an H200,
and kept instead of being run. So what a test compiles is what users run, whatever the order of a
kernel's arguments.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from compile_helper import Compiled, compile_source
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, create_function_from_signature

from moe_engine import checks, cuda_driver, hardware, launch, prepared
from moe_engine.combine.low_latency_kernels import ExpertRows
from moe_engine.cuda_driver import PackedLaunch
from moe_engine.dispatch import Tokens
from moe_engine.dispatch.low_latency import LowLatencyTokens
from moe_engine.engines import fused_layer
from moe_engine.engines.kernel import KernelEngine
from moe_engine.engines.low_latency import LowLatency
from moe_engine.grouped_gemm import backward as gemm_backward
from moe_engine.grouped_gemm import launch as gemm_launch
from moe_engine.grouped_gemm.config import GemmConfig, GemmProblem
from moe_engine.layer_config import LayerChoices
from moe_engine.symm.ring import Ring, RingLayout
from moe_engine.symm.single import SingleTensor
from moe_engine.symm.slots import SlotLayout, Slots

NUM_SMS = 132
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

    kernel: JITFunction
    grid: tuple[int, ...]
    signature: dict[str, Any]
    constexprs: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: Any
    packed: PackedLaunch

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__.strip("_").removesuffix("_kernel")

    def compile(self, arch: int = 90) -> Compiled:
        """Compile for sm_`arch`, once for launches of the same kind."""
        kind = self.signature, self.constexprs, self.attributes, self.options
        key = self.kernel.fn, arch, str(kind)
        if key not in _compiled:
            source = ASTSource(self.kernel, self.signature, self.constexprs, self.attributes)
            _compiled[key] = compile_source(source, arch, self.options.__dict__)
            sizes = parameter_sizes(_compiled[key].ptx)
            assert self.packed.sizes == sizes, f"{self.name} takes {sizes}"
        return _compiled[key]


@contextmanager
def recorded(arch: int = 90) -> Iterator[list[Launch]]:
    """The launches made in the block, in their order, as on a GPU of sm_`arch`."""
    launches: list[Launch] = []
    target = GPUTarget("cuda", arch, 32)
    backend = triton.compiler.make_backend(target)

    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kwargs["debug"] = False
        binder = create_function_from_signature(kernel.signature, kernel.params, backend)
        bound, specialization, _ = binder(*args, **kwargs)
        options, *kinds = kernel._pack_args(backend, kwargs, bound, specialization, None)
        return SimpleNamespace(launched=(kernel, tuple(grid), *kinds, options))

    def load(compiled: Any) -> Any:
        signature = tuple(compiled.launched[2].values())
        maps = [TENSOR_MAP] * str(signature).count("tensordesc") if arch >= 90 else []
        return SimpleNamespace(compiled=compiled, signature=signature, tensor_maps=maps, **FUNCTION)

    def pack(function: Any, *args: Any) -> PackedLaunch:
        packed = PackedLaunch(function, *args)
        launches.append(Launch(*function.compiled.launched, packed))
        return packed

    properties = SimpleNamespace(multi_processor_count=NUM_SMS)
    stand_ins = {
        "get_device_capability": lambda device=None: divmod(arch, 10),
        "get_device_properties": lambda device=None: properties,
        "is_available": lambda: True,
        "get_device_name": lambda device=None: "NVIDIA H200",
    }
    driver = mock.Mock(cuLaunchKernelEx=lambda *args: 0, cuTensorMapEncodeTiled=lambda *args: 0)
    forget_gpu()
    gemm_problem = gemm_launch.gemm_problem

    def problem_on_gpu(*args: Any, **kwargs: Any) -> GemmProblem:
        on_cpu = gemm_problem(*args, **kwargs)
        return replace(on_cpu, capability=divmod(arch, 10), num_sms=NUM_SMS)

    with (
        mock.patch.object(checks, "INTERPRETED", True),  # CPU tensors stand for those of a GPU
        mock.patch.object(gemm_launch, "gemm_problem", problem_on_gpu),
        mock.patch.object(gemm_backward, "gemm_problem", problem_on_gpu),
        mock.patch.multiple(torch.cuda, **stand_ins),
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(cuda_driver, "libcuda", mock.Mock(return_value=driver)),
        mock.patch.object(cuda_driver, "load", load),
        mock.patch.object(cuda_driver, "PackedLaunch", pack),
        mock.patch.object(launch, "current_stream", lambda: 0),
        mock.patch.object(prepared, "current_stream", lambda: 0),
    ):
        yield launches
    forget_gpu()


def forget_gpu() -> None:
    hardware.has_pdl.cache_clear()
    hardware.gpu.cache_clear()


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


class LoneBlock(SingleTensor):
    """The block of one of `num_ranks` ranks, in place of all of them."""

    def __init__(self, num_bytes: int, num_ranks: int):
        super().__init__(num_bytes, torch.device("cpu"))
        self.peer_addresses = self.peer_addresses.expand(num_ranks)


def kernel_engine(num_ranks: int = RANKS, max_tokens: int = TOKENS) -> KernelEngine:
    """The engine of rank 1 of `num_ranks`."""

    def new_slots(layout: SlotLayout, refused: bool, epoch: int) -> Slots:
        return Slots(lambda size, _: LoneBlock(size, num_ranks), layout, 1, 1.0)

    layout = SlotLayout.fit(64 << 20, num_ranks)
    return KernelEngine(layout, new_slots, max_tokens, LayerChoices())


def low_latency_engine(num_ranks: int = RANKS, shrink: bool = False) -> LowLatency:
    """The low-latency engine of rank 1 of `num_ranks`."""
    layout = RingLayout.fit(64 << 20, num_ranks)
    return LowLatency(Ring(lambda size: LoneBlock(size, num_ranks), layout, 1, 1.0), shrink)


def routing(num_topk: int = TOPK) -> tuple[torch.Tensor, torch.Tensor]:
    """topk_idx [T, K] and topk_weights of tokens; launches do not depend on what they hold."""
    return torch.zeros(TOKENS, num_topk, dtype=torch.int64), torch.zeros(TOKENS, num_topk)


def normal(
    arch: int = 90, dtype: torch.dtype = BF16, hidden: int = HIDDEN, scales: int = 0
) -> list[Launch]:
    """Dispatch, copied and in place, cached dispatch, and combine with weights and two biases."""
    engine, x = kernel_engine(), torch.empty(TOKENS, hidden, dtype=dtype)
    topk_idx, topk_weights = routing()
    with recorded(arch) as launches:
        sent = torch.empty(TOKENS, scales) if scales else None
        tokens = Tokens(x, topk_idx, topk_weights, sent), engine.layout(topk_idx, EXPERTS)
        got, _, handle = engine.dispatch(*tokens, RANKS * TOKENS)
        engine.dispatch_cached(x, sent, handle)
        y = torch.empty(len(got.x), hidden, dtype=BF16 if dtype == FP8 else dtype)
        engine.combine(y, handle, got.topk_weights, [y[:TOKENS], y[:TOKENS]])
        engine.dispatch(*tokens, RANKS * TOKENS, owned=False)
        engine.release()
    return launches


def layer(
    arch: int = 90,
    num_ranks: int = RANKS,
    num_topk: int = TOPK,
    tiles: tuple[GemmConfig, GemmConfig] | None = None,
) -> dict[str, Launch]:
    """The launches of a fused layer, by name. tiles: of both GEMMs, in place of the chosen ones."""
    engine, x = kernel_engine(num_ranks), torch.empty(TOKENS, HIDDEN, dtype=BF16)
    shape = EXPERTS // num_ranks, 2 * COLUMNS, HIDDEN
    up, down = torch.empty(shape, dtype=BF16), torch.empty(shape[0], HIDDEN, COLUMNS, dtype=BF16)
    chosen = {} if tiles is None else {"side_effect": tiles}
    with recorded(arch) as launches:
        choose = mock.Mock(wraps=fused_layer.gemm_config, **chosen)
        with mock.patch.object(fused_layer, "gemm_config", choose):
            engine.moe_ffn(x, *routing(num_topk), up, down)
    return {launch.name: launch for launch in launches}


def low_latency(
    arch: int = 90,
    row_format: str = "bf16",
    phases: str = "both",
    shrink: bool = False,
    stats: bool = False,
) -> dict[str, Launch]:
    """Low-latency dispatch and combine by name, of `phases` "both", "send" or "receive"."""
    engine, x = low_latency_engine(shrink=shrink), torch.empty(TOKENS, HIDDEN, dtype=BF16)
    topk_idx, topk_weights = routing()
    num_local, hooked = EXPERTS // RANKS, phases != "both"
    received = torch.zeros(num_local, dtype=torch.int32) if stats else None
    waited = torch.zeros(RANKS, dtype=torch.int64) if stats else None
    with recorded(arch) as launches:
        tokens = LowLatencyTokens(x, topk_idx, None, TOKENS, EXPERTS, row_format)
        got, receive = engine.dispatch(tokens, received, waited, hooked=hooked)
        y = torch.empty(num_local, RANKS * TOKENS, HIDDEN, dtype=BF16)
        rows = ExpertRows(y, topk_idx, topk_weights, got.returns, got.call, x)
        *_, add_up = engine.combine(rows, EXPERTS, waited, hooked)
        if hooked and phases == "receive":
            launches.clear()
            receive()
            add_up()
    return {launch.name: launch for launch in launches}
