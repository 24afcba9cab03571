"""What the host knows of its GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from cuda.bindings import driver

from .device.lang import INTERPRETED, TRACING

BYTES_IN_FLIGHT = 64 * 1024
"""What one program holds in registers between load and store: NVLink needs it (measured)."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A kind of GPU, as far as choices depend on it. The figures were measured on an H200, and
    hbm_gbs and the link on an H100 (bench/notes/h100.md).

    capability: its compute capability; None for the interpreter, which runs on the CPU.
    link_gbs: GB/s at which it writes to others without queueing; offered more, the link carries
    less (298 to 316 GB/s unpaced against 322 to 332). None: pushes are not paced, as that was not
    measured, or gained nothing. shared_link_gbs: GB/s of programs that run concurrently with a
    GEMM. hbm_gbs: GB/s that it reads and writes, as in a large copy. sm_gbs: GB/s that one SM takes
    in by itself. gemm_tflops: of the grouped GEMM.
    """

    name: str
    capability: tuple[int, int] | None
    num_sms: int
    link_gbs: float | None
    shared_link_gbs: float
    hbm_gbs: float
    sm_gbs: float
    gemm_tflops: float


H200 = Gpu("NVIDIA H200", (9, 0), 132, 331.0, 300.0, 4300.0, 49.0, 650.0)
H100 = replace(H200, name="NVIDIA H100 80GB HBM3", link_gbs=None, hbm_gbs=3000.0)
MEASURED = {one.name: one for one in (H200, H100)}
INTERPRETER = replace(H200, name="cpu", capability=None, num_sms=1, link_gbs=None)
_stand_in: Gpu | None = None


def gpu(device: torch.device | None = None) -> Gpu:
    """The kind of a GPU (None: the current one). One that was not measured counts as an H200 with
    its own number of SMs, and is not paced; the CPU, and so the interpreter, counts as one SM."""
    return _stand_in or _gpu(device)


@functools.cache
def _gpu(device: torch.device | None) -> Gpu:
    on_cpu = device is not None and device.type == "cpu"
    if INTERPRETED or on_cpu or not torch.cuda.is_available():
        return INTERPRETER
    name = torch.cuda.get_device_name(device)
    if name in MEASURED:
        return MEASURED[name]
    capability = torch.cuda.get_device_capability(device)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return replace(H200, name=name, capability=capability, num_sms=num_sms, link_gbs=None)


def kinds_of(arch: int) -> list[Gpu]:
    """The kinds of GPUs of sm_`arch`: those that were measured, else an H200 but for its compute
    capability."""
    capability = divmod(arch, 10)
    known = [one for one in MEASURED.values() if one.capability == capability]
    return known or [replace(H200, capability=capability)]


@contextmanager
def stand_in(kind: Gpu) -> Iterator[None]:
    """Within the block CPU tensors stand for those of such a GPU, so that what is launched there
    can be compiled. Nothing may run."""
    global _stand_in
    _stand_in = kind
    try:
        yield
    finally:
        _stand_in = None


def runs_on_cpu() -> bool:
    """Whether tensors of the CPU are served: by the interpreter, or as those of a GPU that is not
    there."""
    return INTERPRETED or _stand_in is not None


def has_pdl() -> bool:
    """Whether the GPU has programmatic dependent launches (PDL), which may begin before the launch
    before them has ended: from Hopper on."""
    capability = gpu().capability
    return capability is not None and capability >= (9, 0)


def leave_room() -> dict[str, Any]:
    """Launch option of a GEMM with which others run concurrently: a traced one would take all
    registers."""
    return {"maxnreg": 176} if TRACING and not INTERPRETED else {}


def limit_registers(count: int) -> dict[str, Any]:
    """Launch option of a kernel: at most `count` registers before Hopper; from there on the
    compiler chooses well by itself."""
    return {} if INTERPRETED or has_pdl() else {"maxnreg": count}


@contextmanager
def outside_capture(device: torch.device) -> Iterator[Callable[[], None]]:
    """A stream of its own, for copies that neither wait for the current stream nor become a part of
    the CUDA graph that it captures. Yields a function that waits for them."""
    if device.type != "cuda":
        yield lambda: None
        return
    with relaxed_capture():
        stream = torch.cuda.Stream(device, priority=-1)
        with torch.cuda.stream(stream):
            yield stream.synchronize


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Within the block this thread may make calls that CUDA forbids while a stream is captured."""
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    _, before = driver.cuThreadExchangeStreamCaptureMode(relaxed)
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(before)


def pace_ps_per_kb() -> int:
    """Picoseconds that 1024 bytes to other ranks should take; 0 for as fast as it goes."""
    link_gbs = gpu().link_gbs
    return round(1024e3 / link_gbs) if link_gbs else 0
