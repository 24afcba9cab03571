"""NVSHMEM as it is installed: its host library, by ctypes, and the bitcode that kernels link.

Both come with the package nvidia-nvshmem-cu13 (or -cu12), or are in the folder NVSHMEM_HOME.
Nothing is searched or loaded before it is asked for. No other package is needed: the functions that
are called here have had the same C interface since NVSHMEM 3.4.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from .errors import BackendError

HOST_LIBRARY, BITCODE = "libnvshmem_host.so.3", "libnvshmem_device.bc"
HEADER = "include/non_abi/nvshmem_version.h"
PACKAGE = "nvidia-nvshmem-cu13"
TESTED = "3.6.5"
INSTALL = f"pip install --no-deps {PACKAGE}=={TESTED}"
"""torch pins an older one of its own, so a dependency on this one could not be resolved."""
OLDEST, NEWEST = (3, 4), (3, 7)
"""Triton 3.6 cannot read the bitcode of later ones (3.8), or takes 40 s for each kernel (3.7)."""
INITIALIZED = 2  # of nvshmemi_init_status; what follows it is initialised, too
STATE = b"nvshmemi_device_state_d"
"""The symbol that kernels have which NVSHMEM was linked into."""

Version = tuple[int, ...]


def shown(version: Version) -> str:
    """ "3.6.5"."""
    return ".".join(map(str, version))


class Installed(NamedTuple):
    """What a folder has, with `lib` and `include` in it: `version` is that of the bitcode."""

    folder: Path
    version: Version

    @property
    def bitcode(self) -> Path:
        return self.folder / "lib" / BITCODE

    @property
    def host_library(self) -> Path:
        return self.folder / "lib" / HOST_LIBRARY

    def has_ibgda(self) -> bool:
        """Whether kernels can hand requests to the network adapter themselves (IBGDA). Without that
        a thread of the CPU, the proxy, does it for them: right, but slow for small requests."""
        with open(self.bitcode, "rb") as file:
            return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ).find(b"ibgda") >= 0


def _folders(home: str | None) -> Iterator[Path]:
    if home:
        yield Path(home)
        return
    try:
        spec = find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:
        return
    if spec is not None:
        yield from map(Path, spec.submodule_search_locations or ())


def network_adapters(system: Path = Path("/sys")) -> list[str]:
    """The names of this host's network adapters for RDMA, as InfiniBand, RoCE or EFA."""
    folder = system / "class/infiniband"
    return sorted(one.name for one in folder.iterdir()) if folder.is_dir() else []


def installed() -> Installed:
    """The NVSHMEM that is installed. BackendError where there is none, or one of a version that
    Triton cannot link."""
    home = os.environ.get("NVSHMEM_HOME")
    changed = None
    if home is not None:
        with suppress(OSError):
            changed = os.stat(Path(home) / HEADER).st_mtime_ns
    return _installed(home, changed)


@functools.lru_cache(8)
def _installed(home: str | None, changed: int | None) -> Installed:
    """`installed`, for the folder NVSHMEM_HOME whose version was `changed` then: each launch that
    is listed asks, and to search the environment takes 0.4 ms."""
    for folder in _folders(home):
        header = folder / HEADER
        found = Installed(folder, ())
        if found.bitcode.exists() and found.host_library.exists() and header.exists():
            numbers = re.findall(r"VENDOR_(?:MAJOR|MINOR|PATCH)_VERSION (\d+)", header.read_text())
            found = Installed(folder, tuple(map(int, numbers)))
            if not OLDEST <= found.version < NEWEST:
                raise BackendError(
                    f"NVSHMEM {shown(found.version)} in {folder} cannot be linked into kernels; "
                    f"versions from {shown(OLDEST)} to before {shown(NEWEST)} can: {INSTALL}"
                )
            return found
    where = os.environ.get("NVSHMEM_HOME", "this environment")
    raise BackendError(
        f"NVSHMEM is not installed: {where} has no {HOST_LIBRARY}, {BITCODE} and headers: {INSTALL}"
    )


def linked(kernel: Any) -> dict[str, Any]:
    """The option with which a kernel is compiled that `device.nvshmem.uses_nvshmem` has marked; of
    others none. BackendError as `installed`."""
    if not getattr(kernel, "uses_nvshmem", False):
        return {}
    return {"extern_libs": {"libnvshmem_device": str(installed().bitcode)}}


@functools.cache
def library() -> ctypes.CDLL:
    """The host library: the one that this process has loaded, as torch may have, else the installed
    one. BackendError where there is none, or where it is older than the bitcode."""
    here = installed()
    try:
        found = ctypes.CDLL(HOST_LIBRARY, os.RTLD_NOLOAD)
    except OSError:
        try:
            found = ctypes.CDLL(str(here.host_library))
        except OSError as error:
            raise BackendError(f"NVSHMEM cannot be loaded: {error}. Try {INSTALL}") from error
    found.nvshmem_malloc.argtypes = [ctypes.c_size_t]
    found.nvshmem_ptr.argtypes = [ctypes.c_void_p, ctypes.c_int]
    found.nvshmem_free.argtypes = found.nvshmemx_cumodule_init.argtypes = [ctypes.c_void_p]
    found.nvshmem_malloc.restype = found.nvshmem_ptr.restype = ctypes.c_void_p
    if (version := host_version(found)) < here.version or version[0] != here.version[0]:
        raise BackendError(
            f"NVSHMEM's host library is {shown(version)}, and the bitcode in {here.folder} is "
            f"{shown(here.version)}, which needs a library at least as new, and of the same major "
            f"version. This process has loaded another NVSHMEM, perhaps by LD_LIBRARY_PATH: remove "
            f"it, or name its folder in NVSHMEM_HOME."
        )
    return found


def host_version(found: ctypes.CDLL) -> Version:
    """The version of a host library."""
    numbers = [ctypes.c_int() for _ in range(3)]
    found.nvshmemx_vendor_get_version_info(*map(ctypes.byref, numbers))
    return tuple(number.value for number in numbers)


def is_initialized() -> bool:
    """Whether NVSHMEM runs in this process, by whoever started it."""
    return bool(library().nvshmemx_init_status() >= INITIALIZED)


def initialize_module(module: ctypes.c_void_p, kernel: str) -> None:
    """Give a module of the driver, into which NVSHMEM was linked, the state of this process: where
    the heap lies, and how its kernels reach the others. Each such module needs that before its
    first launch. BackendError where NVSHMEM does not run, or refuses."""
    if not is_initialized():
        raise BackendError(
            f"{kernel} uses NVSHMEM, which is not initialised in this process: allocate memory by "
            "backend 'nvshmem' first."
        )
    if code := library().nvshmemx_cumodule_init(module):
        raise BackendError(
            f"NVSHMEM could not initialise {kernel} (status {code}). Set NVSHMEM_DEBUG=INFO to see "
            "why."
        )
