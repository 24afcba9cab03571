"""`moe-engine doctor`: what this host has for communication, and which backend a Buffer takes here.

It reads files, loads libraries, and starts no communication: what it finds may still fail between
hosts, for which `NVSHMEM_DEBUG=INFO` is the next thing to read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from ctypes.util import find_library
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch
from cuda.bindings import driver as cuda_driver
from cuda.pathfinder import DynamicLibNotFoundError
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .. import nvshmem_library
from ..cuda_driver import check
from ..errors import BackendError
from ..symm import check_emulation_packages, no_network

ROOT = Path("/")
NEEDED = {
    "torch": "torch",
    "triton": "triton",
    "einops": "einops",
    "cuda-bindings": "cuda.bindings.driver",
    "cuda-pathfinder": "cuda.pathfinder",
}
"""The module by which a package is imported that each host needs, by the package's name."""
OF_NODES = {"numpy": "numpy", "cuda-core": "cuda.core", "nvshmem4py-cu13": "nvshmem.core"}
"""The same for packages that ranks on several nodes need."""
OLDEST_CUDA = 13000  # as the driver tells it: 13.0

VARIABLES = {
    "MOE_ENGINE_NODE_SIZE": "ranks that count as one node",
    "NVSHMEM_IB_ENABLE_IBGDA": "1: kernels hand requests to the adapter themselves",
    "NVSHMEM_IBGDA_NUM_RC_PER_PE": "connections to each rank; 4 to 8 for several programs",
    "NVSHMEM_REMOTE_TRANSPORT": "ibrc; on AWS libfabric",
    "NVSHMEM_LIBFABRIC_PROVIDER": "on AWS efa",
    "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "the interface by which ranks find each other",
    "NVSHMEM_HCA_LIST": "the adapters that are used",
    "NVSHMEM_HCA_PE_MAPPING": "which rank uses which adapter",
    "NVSHMEM_IB_GID_INDEX": "of RoCE",
    "NVSHMEM_IB_TRAFFIC_CLASS": "of RoCE",
    "NVSHMEM_DISABLE_GDRCOPY": "1: a flag is an RDMA write behind its rows",
    "NVSHMEM_DISABLE_NVLS": "1 by default here: no multicast memory",
    "NVSHMEM_SYMMETRIC_SIZE": "bytes of the heap",
    "NVSHMEM_DEBUG": "INFO shows how NVSHMEM starts",
}
"""Environment variables that matter, and what for."""


class Finding(NamedTuple):
    """One line of the report. is_good: None where it is neither good nor bad by itself."""

    what: str
    found: str
    is_good: bool | None = None


def gpus(root: Path = ROOT) -> Iterator[Finding]:
    """The driver, the GPUs that torch sees, and whether they map each other's memory."""
    text = _read(root / "proc/driver/nvidia/version")
    driver = re.search(r"\d+\.\d+(\.\d+)?", text)
    kind = " (open kernel modules)" if "Open Kernel Module" in text else ""
    yield Finding("driver", driver[0] + kind if driver else "none", driver is not None)
    yield _cuda_of_driver()
    count = torch.cuda.device_count()
    names = {torch.cuda.get_device_name(index) for index in range(count)}
    yield Finding("GPUs", f"{count} x {', '.join(sorted(names))}" if count else "none", count > 0)
    if count > 1:
        pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
        apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
        found = f"all but {apart}" if apart else "all pairs"
        yield Finding("GPUs that map each other's memory", found, not apart)


def _cuda_of_driver() -> Finding:
    """The latest CUDA that the driver knows, asked through cuda.bindings."""
    try:
        cuda = check(cuda_driver.cuDriverGetVersion(), "tell the version of the driver")
    except DynamicLibNotFoundError:
        return Finding("CUDA of the driver", "none: libcuda.so.1 is not found", False)
    except RuntimeError as error:
        return Finding("CUDA of the driver", str(error), False)
    shown = f"{cuda // 1000}.{cuda % 1000 // 10}"
    if cuda < OLDEST_CUDA:
        return Finding("CUDA of the driver", f"{shown}; needs CUDA 13, driver 580 or later", False)
    return Finding("CUDA of the driver", shown, True)


def software() -> Iterator[Finding]:
    """Versions of what is installed and whether it can be imported, and the NVSHMEM that would be
    used."""
    yield from (_package(name, module, "pip install moe_engine") for name, module in NEEDED.items())
    install = nvshmem_library.INSTALL
    for name, module in OF_NODES.items():
        yield _package(name, module, f"several nodes need it: {install}")
    try:
        found = nvshmem_library.installed()
        host = nvshmem_library.host_version(nvshmem_library.api())
    except BackendError as error:
        yield Finding("NVSHMEM", str(error), False)
        return
    shown = nvshmem_library.shown
    yield Finding("NVSHMEM's bitcode", f"{shown(found.version)}, {found.bitcode}", True)
    yield Finding("NVSHMEM's host library", shown(host), True)
    has_ibgda = found.has_ibgda()
    answer = "yes"
    if not has_ibgda:
        answer = f"no: a thread of the CPU sends for them. {nvshmem_library.INSTALL_TESTED}"
    yield Finding("kernels can reach the adapter (IBGDA)", answer, has_ibgda)


def network(root: Path = ROOT) -> Iterator[Finding]:
    """The adapters for RDMA, and what lets them read and write a GPU's memory."""
    names = nvshmem_library.network_adapters(root / "sys")
    for name in names:
        ports = root / "sys/class/infiniband" / name / "ports"
        for port in sorted(ports.iterdir()) if ports.is_dir() else ():
            parts = [_read(port / part).strip() for part in ("state", "rate", "link_layer")]
            found = ", ".join(part for part in parts if part)
            yield Finding(f"adapter {name}, port {port.name}", found, "ACTIVE" in parts[0])
    if not names:
        yield Finding("adapters for RDMA", "none in /sys/class/infiniband", False)
    has_peermem = (root / "sys/module/nvidia_peermem").exists()
    has_dma_buf = "Open Kernel Module" in _read(root / "proc/driver/nvidia/version")
    found = "none: modprobe nvidia_peermem, or open kernel modules"
    if has_peermem or has_dma_buf:
        found = "nvidia_peermem" if has_peermem else "DMA-BUF"
    yield Finding("adapters reach GPU memory by", found, has_peermem or has_dma_buf)
    has_gdrcopy = (root / "sys/module/gdrdrv").exists()
    yield Finding("GDRCopy", "loaded" if has_gdrcopy else "not loaded")
    maps_peers = "PeerMappingOverride=1" in _read(root / "proc/driver/nvidia/params")
    yield Finding("driver key PeerMappingOverride (for IBGDA)", "1" if maps_peers else "not set")
    for library in ("ibverbs", "mlx5"):
        path = find_library(library)
        yield Finding(f"lib{library}", path or "none: install rdma-core", path is not None)


def variables() -> Iterator[Finding]:
    """The environment variables that matter, and what for."""
    for name, meaning in VARIABLES.items():
        yield Finding(name, f"{os.environ.get(name, 'not set')}  ({meaning})")


def obstacles(root: Path = ROOT) -> dict[str, str | None]:
    """Why each backend cannot serve several ranks from this host; None where it can."""
    has_gpus = torch.cuda.is_available()
    emulation = None
    try:
        check_emulation_packages()
    except (BackendError, ImportError) as error:
        emulation = str(error)
    device = torch.device("cuda" if has_gpus else "cpu")
    has_groups = torch.distributed.is_available()
    return {
        "torch": None if has_gpus else "torch finds no GPU.",
        "emulated": emulation,
        "nvshmem": no_network(device, root / "sys"),
        "collective": None if has_groups else "torch has no distributed part.",
    }


def choices(found: dict[str, str | None]) -> Iterator[Finding]:
    """Which backend a Buffer takes with "auto", and why."""
    yield Finding("one rank", "single")
    why = "GPUs that map each other's memory" if found["torch"] is None else found["torch"]
    local = "torch" if found["torch"] is None else "emulated"
    yield Finding("ranks of this host", f"{local}: {why}", found[local] is None)
    obstacle = found["nvshmem"]
    far = f"collective, as nvshmem cannot: {obstacle}" if obstacle else "nvshmem"
    yield Finding("ranks of several hosts", far, obstacle is None)


def report(console: Console, root: Path = ROOT) -> dict[str, str | None]:
    """Print all of it; the obstacles to each backend."""
    found = obstacles(root)
    parts = {
        "GPUs": gpus(root),
        "Software": software(),
        "Network": network(root),
        "Environment variables": variables(),
        'A Buffer with backend "auto" takes': choices(found),
    }
    marks = {True: "[green]+[/]", False: "[red]-[/]", None: ""}
    for title, findings in parts.items():
        table = Table(title=f"\n{title}", title_justify="left", title_style="bold", box=box.SIMPLE)
        table.show_header, table.show_edge = False, False
        for one in findings:
            table.add_row(marks[one.is_good], one.what, escape(one.found))
        console.print(table)
    return found


def _package(name: str, module: str, remedy: str) -> Finding:
    """The version of a package. It is good if its module can be imported; where it is missing the
    remedy says what to do."""
    try:
        found = version(name)
    except PackageNotFoundError:
        return Finding(name, f"not installed; {remedy}", False)
    try:
        import_module(module)
    except Exception as error:
        return Finding(name, f"{found}, whose module {module} cannot be imported: {error}", False)
    return Finding(name, found, True)


def _read(path: Path) -> str:
    """A file's text; empty where it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
