"""Symmetric memory: one block of the same size on every rank, which the others write directly.

| backend    | where                        | how                                             |
|------------|------------------------------|-------------------------------------------------|
| `single`   | one rank                     | a plain allocation                              |
| `emulated` | CPU, ranks as processes      | shared memory, kernels in Triton's interpreter  |
| `torch`    | GPUs of one NVLink domain    | `torch.distributed._symmetric_memory`           |
| `nvshmem`  | GPUs, also of several hosts  | NVSHMEM; blocks of other hosts are not mapped   |
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import triton

from .. import nvshmem_library
from ..device import lang
from ..errors import BackendError, ShapeError
from .base import SymmetricTensor
from .emulated import EmulatedTensor
from .meeting import exchange, per_rank
from .nodes import this_node
from .nvshmem import NvshmemTensor
from .single import SingleTensor
from .torch_symm import TorchTensor

BACKENDS = ("single", "emulated", "torch", "nvshmem")


def allocate(
    group: dist.ProcessGroup | None,
    num_bytes: int,
    backend: str = "auto",
    device: torch.device | str | None = None,
    timeout_s: float | None = None,
) -> SymmetricTensor:
    """Allocate `num_bytes` on every rank of `group`, zeroed everywhere before any rank returns.

    Collective. `group=None` is the default group, or one rank where torch.distributed is not
    initialised; `device=None` is the current CUDA device, or the CPU where there is none or where
    kernels are interpreted. Raises, on every rank, ShapeError when `num_bytes` differs or is not
    positive, BackendError as `choose_backend` does or when memory cannot be mapped, and OutOfStep
    when a rank does not arrive within timeout_s (`exchange`).
    """
    group = group or default_group()
    device = resolve_device(device)
    backend = choose_backend(group, backend, device, timeout_s)
    _check_sizes(exchange(group, lambda: num_bytes, "bytes to allocate", timeout_s))
    if backend == "single":
        return SingleTensor(num_bytes, device)
    if backend == "emulated":
        return EmulatedTensor(group, num_bytes, timeout_s)
    assert group is not None
    if backend == "nvshmem":
        return NvshmemTensor(group, num_bytes, device, timeout_s)
    return TorchTensor(group, num_bytes, device, timeout_s)


def choose_backend(
    group: dist.ProcessGroup | None = None,
    backend: str = "auto",
    device: torch.device | str | None = None,
    timeout_s: float | None = None,
    or_collective: bool = False,
) -> str:
    """The name of the backend for these ranks: `backend` itself, or with "auto" the one that fits.

    Collective. A BackendError, on every rank, says what is missing and what to do. or_collective:
    where "auto" finds ranks on several hosts, and no NVSHMEM to serve them, it is "collective", the
    Buffer's mode without symmetric memory, and rank 0 warns.
    """
    group = group or default_group()
    device = resolve_device(device)
    choices = exchange(
        group,
        lambda: (_choose_here(group, backend, device), this_node(), backend),
        "choosing a backend",
        timeout_s,
    )
    names, places, asked = zip(*choices, strict=True)
    hosts = {host for host, _ in places}
    if len(set(names)) > 1:
        raise BackendError(f"ranks chose different backends: {per_rank(names)}. Give all the same")
    if len(hosts) == 1 and names[0] == "torch" and len(set(places)) > 1:
        if set(asked) != {"auto"}:
            raise BackendError(
                "backend 'torch' needs all ranks on one node, and MOE_ENGINE_NODE_SIZE makes "
                f"{len(set(places))} of this host. Unset it, or use backend 'nvshmem'"
            )
        exchange(group, lambda: bool(nvshmem_library.api()), "looking for NVSHMEM", timeout_s)
        return "nvshmem"
    if len(hosts) == 1 or names[0] == "nvshmem":
        return names[0]
    need = f"backend '{names[0]}' needs all ranks on one host, but they run on {len(hosts)}"
    if set(asked) == {"auto"}:
        reasons = exchange(group, lambda: no_network(device), "looking for a network", timeout_s)
        if not any(reasons):
            return "nvshmem"
        need += f", and NVSHMEM cannot serve them: {next(filter(None, reasons))}"
        if or_collective:
            if dist.get_rank(group) == 0:
                warnings.warn(f"{need} So this Buffer takes 'collective'.", stacklevel=4)
            return "collective"
    raise BackendError(f"{need}. Use a group within one host, or the Buffer's mode 'collective'")


def no_network(device: torch.device, system: Path = Path("/sys")) -> str | None:
    """Why NVSHMEM cannot serve ranks of several hosts from this one; None if it can."""
    if device.type != "cuda":
        return "it needs GPUs."
    if not nvshmem_library.network_adapters(system):
        return "this host has no network adapter for RDMA (/sys/class/infiniband)."
    try:
        nvshmem_library.api()
    except BackendError as error:
        return f"{error}."
    return None


def default_group() -> dist.ProcessGroup | None:
    """The default process group, or None where torch.distributed is not initialised."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def resolve_device(device: torch.device | str | None) -> torch.device:
    """`device` with its index; None is the CPU when kernels are interpreted or CUDA is missing."""
    if device is None:
        device = "cpu" if lang.INTERPRETED or not torch.cuda.is_available() else "cuda"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _choose_here(group: dist.ProcessGroup | None, backend: str, device: torch.device) -> str:
    """The choice, as far as this rank can see."""
    num_ranks = 1 if group is None else group.size()
    if backend not in ("auto", *BACKENDS):
        raise BackendError(f"backend {backend!r} is not one of {('auto', *BACKENDS)}")
    if device.type not in ("cpu", "cuda"):
        raise BackendError(f"device '{device}' is neither a CPU nor a CUDA device")
    if backend == "auto":
        backend = "single" if num_ranks == 1 else "emulated" if device.type == "cpu" else "torch"
    if backend == "single" and num_ranks > 1:
        raise BackendError(f"backend 'single' serves one rank, but the group has {num_ranks}")
    if (backend, device.type) in (("emulated", "cuda"), ("torch", "cpu"), ("nvshmem", "cpu")):
        raise BackendError(f"backend '{backend}' cannot serve device '{device}'. Use 'auto'")
    if device.type == "cpu":
        _check_emulation()
    else:
        _check_cuda(group, backend)
    return backend


def _check_emulation() -> None:
    if not lang.INTERPRETED:
        raise BackendError(
            "kernels run on the CPU only through Triton's interpreter: set TRITON_INTERPRET=1 "
            "before triton is imported, or start ranks with moe_engine.emulation.RankPool"
        )
    check_emulation_packages()


def check_emulation_packages() -> None:
    """BackendError where Triton's interpreter would fail with what is installed."""
    import numpy  # imported here: the interpreter needs it, and a GPU does not

    version = numpy.lib.NumpyVersion
    if version(triton.__version__) < "3.7.0" and version(numpy.__version__) >= "2.4.0":
        raise BackendError(
            f"the interpreter of Triton {triton.__version__} fails with numpy {numpy.__version__}: "
            "pip install 'moe_engine[emulation]' for numpy < 2.4, or install Triton 3.7 or later, "
            "which works with every numpy"
        )


def _check_cuda(group: dist.ProcessGroup | None, backend: str) -> None:
    if not torch.cuda.is_available():
        raise BackendError("no CUDA device is available: check the driver and torch.version.cuda")
    if lang.INTERPRETED:
        raise BackendError("TRITON_INTERPRET is set, but the device is a GPU: unset it")
    if backend in ("torch", "nvshmem") and group is None:
        raise BackendError(f"backend '{backend}' needs torch.distributed.init_process_group first")
    if backend == "nvshmem":
        nvshmem_library.api()


def _check_sizes(sizes: list[int]) -> None:
    if len(set(sizes)) > 1:
        raise ShapeError(f"num_bytes differs between ranks: {per_rank(sizes)}. Give all the same")
    if not isinstance(sizes[0], int) or sizes[0] <= 0:
        raise ShapeError(f"num_bytes is {sizes[0]!r}; it must be a positive int")
