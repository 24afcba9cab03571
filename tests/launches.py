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

from moe_engine import checks, hardware
from moe_engine.engines.kernel import KernelEngine
from moe_engine.engines.low_latency import LowLatency
from moe_engine.grouped_gemm import backward as gemm_backward
from moe_engine.grouped_gemm import launch as gemm_launch
from moe_engine.grouped_gemm.config import GemmProblem
from moe_engine.layer_config import LayerChoices
from moe_engine.symm.ring import Ring, RingLayout
from moe_engine.symm.single import SingleTensor
from moe_engine.symm.slots import SlotLayout, Slots

NUM_SMS = 132


@dataclass(frozen=True)
class Launch:
    """A kernel, and what Triton makes of the arguments of one launch."""

    kernel: JITFunction
    grid: tuple[int, ...]
    signature: dict[str, Any]
    constexprs: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: Any

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__.strip("_").removesuffix("_kernel")

    def compile(self, arch: int = 90) -> Compiled:
        source = ASTSource(self.kernel, self.signature, self.constexprs, self.attributes)
        return compile_source(source, arch, self.options.__dict__)


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
        launches.append(Launch(kernel, tuple(grid), *kinds, options))
        return SimpleNamespace(function=0)

    properties = SimpleNamespace(multi_processor_count=NUM_SMS)
    stand_ins = {
        "get_device_capability": lambda device=None: divmod(arch, 10),
        "get_device_properties": lambda device=None: properties,
        "is_available": lambda: True,
        "get_device_name": lambda device=None: "NVIDIA H200",
    }
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
        mock.patch.object(hardware, "_prefer_shared_memory", lambda function: None),
    ):
        yield launches
    forget_gpu()


def forget_gpu() -> None:
    hardware.has_pdl.cache_clear()
    hardware.gpu.cache_clear()


def normalised(ptx: str, name: str) -> str:
    """PTX without names that a kernel's author chose."""
    ptx = ptx.partition("\t.section\t.debug")[0].replace(name, "kernel")
    return re.sub(r"^\s*(//|\.file|\.loc).*$", "", ptx, flags=re.MULTILINE)


# --- Engines of one rank of several, whose kernels never run ---------------------------------


class LoneBlock(SingleTensor):
    """The block of one of `num_ranks` ranks, in place of all of them."""

    def __init__(self, num_bytes: int, num_ranks: int):
        super().__init__(num_bytes, torch.device("cpu"))
        self.peer_addresses = self.peer_addresses.expand(num_ranks)


def kernel_engine(num_ranks: int, num_bytes: int = 64 << 20, max_tokens: int = 64) -> KernelEngine:
    """The engine of rank 1 of `num_ranks`."""

    def new_slots(layout: SlotLayout, refused: bool, epoch: int) -> Slots:
        return Slots(lambda size, _: LoneBlock(size, num_ranks), layout, 1, 1.0)

    layout = SlotLayout.fit(num_bytes, num_ranks)
    return KernelEngine(layout, new_slots, lambda: 20, max_tokens, LayerChoices())


def low_latency_engine(num_ranks: int, shrink: bool = False) -> LowLatency:
    """The low-latency engine of rank 1 of `num_ranks`."""
    layout = RingLayout.fit(64 << 20, num_ranks)
    ring = Ring(lambda size: LoneBlock(size, num_ranks), layout, 1, 1.0)
    return LowLatency(ring, shrink)
