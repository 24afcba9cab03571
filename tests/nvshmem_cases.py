"""What the tests of NVSHMEM share: whether it is installed, a tree that looks so, and a stand-in
for its host library."""

from __future__ import annotations

import ctypes
import time
from contextlib import contextmanager
from unittest import mock

from moe_engine import nvshmem_library
from moe_engine.errors import BackendError
from moe_engine.symm import nvshmem

try:
    nvshmem_library.installed()
    MISSING = None
except BackendError as error:
    MISSING = error


def install(folder, monkeypatch, version):
    """Make a tree of NVSHMEM without any code in it, and let it be found."""
    for name in ("lib", "include/non_abi"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    numbers = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
    lines = [f"#define NVSHMEM_VENDOR_{name}_VERSION {number}" for name, number in numbers]
    (folder / "include/non_abi/nvshmem_version.h").write_text("\n".join(lines))
    for name in (nvshmem_library.HOST_LIBRARY, nvshmem_library.BITCODE):
        (folder / "lib" / name).write_bytes(b"nothing")
    monkeypatch.setenv("NVSHMEM_HOME", str(folder))


class StandIn:
    """NVSHMEM's host library of one process on the CPU, whose PEs are numbered backwards.
    `silent`: what does not return; `apart`: the PEs that it cannot map."""

    def __init__(self, version=(3, 6, 5), silent=(), heap=1 << 20, apart=()):
        self.version, self.silent, self.heap, self.apart = version, silent, heap, apart
        self.status, self.pe, self.num_pes = 0, -1, 0
        self.made, self.freed, self.identifiers, self.modules = {}, [], [], []

    def _returns(self, name):
        if name in self.silent:
            time.sleep(60)

    def nvshmemx_init_status(self):
        return self.status

    def nvshmemx_vendor_get_version_info(self, *numbers):
        for number, value in zip(numbers, self.version, strict=True):
            number._obj.value = value

    def nvshmemx_get_uniqueid(self, memory):
        memory[4:8] = b"here"
        return 0

    def nvshmemx_set_attr_uniqueid_args(self, rank, size, identifier, attributes):
        assert [attributes.raw[at] for at in (0, 2, 16, 18, 24, 26)] == [144, 1, 128, 1, 24, 1]
        self.pe, self.num_pes = size - 1 - rank, size
        self.identifiers.append(identifier.raw)

    def nvshmemx_hostlib_init_attr(self, flags, attributes):
        assert flags == 8
        self._returns("start")
        self.status = 2
        return 0

    def nvshmem_my_pe(self):
        return self.pe

    def nvshmem_n_pes(self):
        return self.num_pes

    def nvshmem_malloc(self, num_bytes):
        self._returns("allocate")
        if num_bytes > self.heap:
            return None
        memory = ctypes.create_string_buffer(b"x" * num_bytes)
        self.made[ctypes.addressof(memory)] = memory
        return ctypes.addressof(memory)

    def nvshmem_ptr(self, address, pe):
        return None if pe in self.apart else address + 4096 * (pe - self.pe)

    def nvshmem_free(self, address):
        self._returns("free")
        self.freed.append(address)
        del self.made[address]

    def nvshmemx_cumodule_init(self, module):
        self.modules.append(module)
        return 0


@contextmanager
def stand_in(**how):
    """A process that has not used NVSHMEM, and has it installed."""
    library = StandIn(**how)
    with (
        mock.patch.object(nvshmem_library, "library", lambda: library),
        mock.patch.object(nvshmem, "library", lambda: library),
        mock.patch.multiple(nvshmem, _job=None, _has_failed=False),
        mock.patch.object(nvshmem.atexit, "register"),
    ):
        yield library
