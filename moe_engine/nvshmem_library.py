"""NVSHMEM as it is installed: its host side, through nvshmem4py, and the bitcode that kernels link.

The extra `nvshmem` of this package brings both. Nothing is searched, imported or loaded before it
is asked for. cuda.pathfinder finds both in this environment, in that of conda, or in CUDA_HOME.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import re
from pathlib import Path
from typing import Any, NamedTuple

from cuda.pathfinder import BitcodeLibNotFoundError, find_bitcode_lib, load_nvidia_dynamic_lib

from .errors import BackendError

HEADER = "include/non_abi/nvshmem_version.h"
PACKAGE = "nvidia-nvshmem-cu13"
TESTED = "3.6.5"
INSTALL = "pip install 'moe_engine[nvshmem]'"
INSTALL_TESTED = f"pip install --no-deps {PACKAGE}=={TESTED}"
"""torch pins an older one of its own, so a dependency on this one could not be resolved."""
OLDEST, NEWEST = (3, 4), (3, 7)
"""Triton 3.6 cannot read the bitcode of later ones (3.8), or takes 40 s for each kernel (3.7)."""
STATE = b"nvshmemi_device_state_d"
"""The symbol that kernels have which NVSHMEM was linked into."""

Version = tuple[int, ...]


def shown(version: Version) -> str:
    """ "3.6.5"."""
    return ".".join(map(str, version))


class Installed(NamedTuple):
    """The bitcode that kernels link, and its version."""

    bitcode: Path
    version: Version

    def has_ibgda(self) -> bool:
        """Whether kernels can hand requests to the network adapter themselves (IBGDA). Without that
        a thread of the CPU, the proxy, does it for them: right, but slow for small requests."""
        with open(self.bitcode, "rb") as file:
            return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ).find(b"ibgda") >= 0


def network_adapters(system: Path = Path("/sys")) -> list[str]:
    """The names of this host's network adapters for RDMA, as InfiniBand, RoCE or EFA."""
    folder = system / "class/infiniband"
    return sorted(one.name for one in folder.iterdir()) if folder.is_dir() else []


def installed() -> Installed:
    """The NVSHMEM that is installed. BackendError where there is none, or one of a version that
    Triton cannot link."""
    try:
        return _at(Path(find_bitcode_lib("nvshmem_device")))
    except BitcodeLibNotFoundError as error:
        raise BackendError(f"NVSHMEM is not installed: {INSTALL}") from error


@functools.cache
def _at(bitcode: Path) -> Installed:
    """What the header beside a bitcode says of it."""
    folder = bitcode.parents[1]
    header = folder / HEADER
    if not header.exists():
        raise BackendError(f"NVSHMEM in {folder} has no {HEADER}: {INSTALL_TESTED}")
    numbers = re.findall(r"VENDOR_(?:MAJOR|MINOR|PATCH)_VERSION (\d+)", header.read_text())
    found = Installed(bitcode, tuple(map(int, numbers)))
    if not OLDEST <= found.version < NEWEST:
        raise BackendError(
            f"NVSHMEM {shown(found.version)} in {folder} cannot be linked into kernels; "
            f"versions from {shown(OLDEST)} to before {shown(NEWEST)} can: {INSTALL_TESTED}"
        )
    return found


def linked(kernel: Any) -> dict[str, Any]:
    """The option with which a kernel is compiled that `device.nvshmem.uses_nvshmem` has marked; of
    others none. BackendError as `installed`."""
    if not getattr(kernel, "uses_nvshmem", False):
        return {}
    return {"extern_libs": {"libnvshmem_device": str(installed().bitcode)}}


@functools.cache
def api() -> Any:
    """nvshmem4py, the package `nvshmem` with `core` and `bindings` in it, whose host library is
    loaded: the one that this process has loaded, as torch may have, else the installed one.
    BackendError where one of them is missing, or where the library is older than the bitcode."""
    here = installed()
    try:
        import nvshmem.core
    except ImportError as error:
        raise BackendError(f"nvshmem4py cannot be imported ({error}): {INSTALL}") from error
    try:
        host = host_version(nvshmem)
    except Exception as error:  # of several packages
        raise BackendError(f"NVSHMEM cannot be loaded ({error}): {INSTALL}") from error
    if host < here.version or host[0] != here.version[0]:
        raise BackendError(
            f"NVSHMEM's host library is {shown(host)}, and the bitcode {here.bitcode} is of "
            f"{shown(here.version)}, which needs a library at least as new, and of the same major "
            "version. This process has loaded another NVSHMEM, perhaps by LD_LIBRARY_PATH: remove "
            "it there."
        )
    return nvshmem


def host_version(package: Any) -> Version:
    """The version of the host library that nvshmem4py loads."""
    return tuple(map(int, package.core.get_version().libnvshmem_version.split(".")))


@functools.cache
def waiting_calls() -> ctypes.CDLL:
    """The host library once more, by ctypes, for three calls that wait for other ranks: nvshmem4py
    0.4 holds Python's lock (GIL) in them, so that no other thread could give them up at a deadline.
    tests/test_nvshmem_lock.py fails as soon as that is over."""
    found = ctypes.CDLL(load_nvidia_dynamic_lib("nvshmem_host").abs_path)
    found.nvshmem_malloc.argtypes, found.nvshmem_malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    found.nvshmem_free.argtypes, found.nvshmem_free.restype = [ctypes.c_void_p], None
    return found


def is_initialized() -> bool:
    """Whether NVSHMEM runs in this process, by whoever started it."""
    core = api().core
    return bool(core.init_status() >= core.InitStatus.STATUS_IS_INITIALIZED)


def initialize_module(module: Any, kernel: str) -> None:
    """Give a module of the driver, into which NVSHMEM was linked, the state of this process: where
    the heap lies, and how its kernels reach the others. Each such module needs that before its
    first launch. BackendError where NVSHMEM does not run, or refuses."""
    if not is_initialized():
        raise BackendError(
            f"{kernel} uses NVSHMEM, which is not initialised in this process: allocate memory by "
            "backend 'nvshmem' first."
        )
    # Not core.module_init, which prints a line at each call.
    if code := api().bindings.cumodule_init(int(module)):
        raise BackendError(
            f"NVSHMEM could not initialise {kernel} (status {code}). Set NVSHMEM_DEBUG=INFO to see "
            "why."
        )
