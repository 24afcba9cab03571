"""What the host knows of its GPU, where that decides how kernels are launched."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .device.lang import INTERPRETED, TRACING

LINK_GBS = {"NVIDIA H200": 331.0}
"""GB/s at which a GPU writes to others without queueing. Offered more, the link carries less: 298
to 316 GB/s unpaced against 322 to 332 (bench/NOTES.md). Other GPUs are not paced."""


BYTES_IN_FLIGHT = 64 * 1024
"""What one program holds in registers between load and store: NVLink needs it (measured)."""


@functools.cache
def has_pdl() -> bool:
    """Whether a launch may begin while the one before it runs: CUDA's programmatic dependent
    launch, from Hopper on."""
    return not INTERPRETED and torch.cuda.get_device_capability() >= (9, 0)


def pdl_options() -> dict[str, Any]:
    """Launch option: begin when all programs of the launch before have called
    `programs.pdl_launch_dependents`."""
    return {"launch_pdl": True} if has_pdl() else {}


def leave_room() -> dict[str, Any]:
    """Launch option of a GEMM that others run beside: a traced one would take all registers."""
    return {"maxnreg": 176} if TRACING and not INTERPRETED else {}


def share_sms(compiled: Any) -> None:
    """Let the programs of a launch, which it returned, share SMs with a GEMM's that begin later.

    An SM divides its memory between cache and shared memory as the first program on it prefers, and
    not anew while one runs there. So all launches of a layer prefer shared memory: one that did not
    would keep the GEMM off its SM for as long as what begins there meanwhile runs.
    """
    if not INTERPRETED:
        _prefer_shared_memory(compiled.function)


@functools.cache
def _prefer_shared_memory(function: int) -> None:
    preferred_carveout, percent = 9, 100  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuFuncSetAttribute(ctypes.c_void_p(function), preferred_carveout, percent)


@contextmanager
def outside_capture(device: torch.device) -> Iterator[Callable[[], None]]:
    """A stream of its own, for copies that neither wait for the current stream nor become a part of
    the CUDA graph that it captures. Yields a function that waits for them."""
    if device.type != "cuda":
        yield lambda: None
        return
    exchange_mode = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    mode = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED; from then on, what it was before
    exchange_mode(ctypes.byref(mode))
    try:
        stream = torch.cuda.Stream(device, priority=-1)
        with torch.cuda.stream(stream):
            yield stream.synchronize
    finally:
        exchange_mode(ctypes.byref(mode))


def pace_ps_per_kb() -> int:
    """Picoseconds that 1024 bytes to other ranks should take; 0 for as fast as it goes."""
    if INTERPRETED or not torch.cuda.is_available():
        return 0
    link_gbs = LINK_GBS.get(torch.cuda.get_device_name())
    return round(1024e3 / link_gbs) if link_gbs else 0
