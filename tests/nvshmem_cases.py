"""What the tests of NVSHMEM share: why it is missing, a tree that looks as if it were installed,
and a stand-in for nvshmem4py."""

from __future__ import annotations

import ctypes
import time
from contextlib import contextmanager
from enum import IntEnum
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from cuda.pathfinder import BitcodeLibNotFoundError

from moe_engine import nvshmem_library
from moe_engine.errors import BackendError
from moe_engine.symm import nvshmem

FIND, AT = nvshmem_library.find_bitcode_lib, nvshmem_library._at
NO_BITCODE = MISSING = None
"""Why kernels cannot be linked with NVSHMEM here, and why it cannot run."""
try:
    nvshmem_library.installed()
    if not find_spec("nvshmem"):
        MISSING = "nvshmem4py is not installed"
except BackendError as error:
    NO_BITCODE = MISSING = str(error)


def install(folder, monkeypatch, version):
    """Make a tree of NVSHMEM without any code in it, and let it be found. Each version needs a
    folder of its own."""
    for name in ("lib", "include/non_abi"):
        (folder / name).mkdir(parents=True)
    numbers = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
    lines = [f"#define NVSHMEM_VENDOR_{name}_VERSION {number}" for name, number in numbers]
    (folder / nvshmem_library.HEADER).write_text("\n".join(lines))
    bitcode = folder / "lib/libnvshmem_device.bc"
    bitcode.write_bytes(b"nothing")
    find_installed(monkeypatch)
    monkeypatch.setattr(nvshmem_library, "find_bitcode_lib", lambda name: str(bitcode))


def find_installed(monkeypatch):
    """Let the NVSHMEM be found that is really installed."""
    monkeypatch.setattr(nvshmem_library, "find_bitcode_lib", FIND)
    monkeypatch.setattr(nvshmem_library, "_at", AT)


def uninstall(monkeypatch):
    """Let no NVSHMEM be found."""

    def find(name):
        raise BitcodeLibNotFoundError("no such file")

    monkeypatch.setattr(nvshmem_library, "find_bitcode_lib", find)
    nvshmem_library.api.cache_clear()


@contextmanager
def version_installed(*version):
    """A version of NVSHMEM is installed, of which no file is looked at."""
    found = nvshmem_library.Installed(Path("libnvshmem_device.bc"), version)
    with (
        mock.patch.object(nvshmem_library, "find_bitcode_lib", lambda name: str(found.bitcode)),
        mock.patch.object(nvshmem_library, "_at", lambda bitcode: found),
    ):
        yield


class StandIn:
    """nvshmem4py, and the calls beside it, of one process on the CPU, whose PEs are numbered
    backwards. `silent`: what does not return; `apart`: the PEs that it cannot map."""

    class InitStatus(IntEnum):
        STATUS_NOT_INITIALIZED, STATUS_IS_INITIALIZED = 0, 2

    def __init__(self, version=(3, 6, 5), silent=(), heap=1 << 20, apart=()):
        self.version, self.silent, self.heap, self.apart = version, silent, heap, apart
        self.status, self.pe, self.num_pes = self.InitStatus.STATUS_NOT_INITIALIZED, -1, 0
        self.made, self.freed, self.identifiers, self.modules = {}, [], [], []
        self.core = self.bindings = self

    def _returns(self, name):
        if name in self.silent:
            time.sleep(60)

    def init_status(self):
        return self.status

    def get_version(self):
        return SimpleNamespace(libnvshmem_version=".".join(map(str, self.version)))

    def get_unique_id(self):
        return b"here"

    def init(self, *, device, uid, rank, nranks, initializer_method):
        assert (device, initializer_method) == ("the GPU", "uid")
        self._returns("start")
        self.pe, self.num_pes = nranks - 1 - rank, nranks
        self.identifiers.append(uid)
        self.status = self.InitStatus.STATUS_IS_INITIALIZED

    def my_pe(self):
        return self.pe

    def n_pes(self):
        return self.num_pes

    def nvshmem_malloc(self, num_bytes):
        self._returns("allocate")
        if num_bytes > self.heap:
            return None
        memory = ctypes.create_string_buffer(b"x" * num_bytes)
        self.made[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def ptr(self, address, pe):
        return 0 if pe in self.apart else address + 4096 * (pe - self.pe)

    def nvshmem_free(self, address):
        self._returns("free")
        self.freed.append(address)
        del self.made[address]

    def cumodule_init(self, module):
        self.modules.append(module)
        return 0


@contextmanager
def stand_in(**how):
    """A process that has not used NVSHMEM, and has it installed."""
    library = StandIn(**how)
    with (
        mock.patch.object(nvshmem_library, "api", lambda: library),
        mock.patch.multiple(nvshmem, api=lambda: library, waiting_calls=lambda: library),
        mock.patch.object(nvshmem, "_cuda_device", lambda device: "the GPU"),
        mock.patch.multiple(nvshmem, _job=None, _has_failed=False),
        mock.patch.object(nvshmem.atexit, "register"),
    ):
        yield library
