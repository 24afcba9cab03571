"""Which calls of nvshmem4py hold Python's lock (GIL) while they wait for other ranks.

A thread that waits with the lock held stops the whole process, and no deadline can end that. So
these calls are made by `nvshmem_library.waiting_calls`. Where a test fails here, nvshmem4py lets go
of the lock, and that call may go through it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec

import pytest

NAME = "libnvshmem_host.so.3"
LIBRARY = """
#include <stddef.h>
#include <unistd.h>
volatile int limit_ms, has_begun, is_set, was_set;
static void wait_for_flag(void) {
    was_set = 0;
    has_begun = 1;
    for (int ms = 0; ms < limit_ms && !(was_set = is_set); ms += 10) usleep(10000);
}
void *nvshmem_malloc(size_t size) { wait_for_flag(); return (void *)64; }
void nvshmem_free(void *memory) { wait_for_flag(); }
int nvshmemx_hostlib_finalize(void) { wait_for_flag(); return 0; }
"""
"""A host library whose calls wait for a flag, and say whether it was set while they waited."""

CALL = """
import ctypes, sys, threading, time
library = ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
if sys.argv[3] == "nvshmem4py":
    from nvshmem import bindings
    call = getattr(bindings, sys.argv[2].removeprefix("nvshmem_").removeprefix("nvshmemx_"))
else:
    from unittest import mock
    from moe_engine import nvshmem_library
    found = mock.Mock(abs_path=sys.argv[1])
    with mock.patch.object(nvshmem_library, "load_nvidia_dynamic_lib", lambda name: found):
        call = getattr(nvshmem_library.waiting_calls(), sys.argv[2])
flag = {name: ctypes.c_int.in_dll(library, name)
        for name in ("limit_ms", "has_begun", "is_set", "was_set")}
flag["limit_ms"].value = int(sys.argv[4])
thread = threading.Thread(target=call, args=() if "finalize" in sys.argv[2] else (8,))
thread.start()
while not flag["has_begun"].value:
    time.sleep(0.001)
flag["is_set"].value = 1
thread.join()
print(flag["was_set"].value)
"""
"""The main thread sets the flag as soon as it runs again after a call has begun in another one."""

pytestmark = pytest.mark.skipif(
    not (find_spec("nvshmem") and shutil.which("cc")), reason="needs nvshmem4py and a C compiler"
)
CALLS = ("nvshmem_malloc", "nvshmem_free", "nvshmemx_hostlib_finalize")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("library")
    (folder / "library.c").write_text(LIBRARY)
    options = ["-shared", "-fPIC", f"-Wl,-soname,{NAME}", "-o", str(folder / NAME)]
    subprocess.run(["cc", *options, str(folder / "library.c")], check=True)
    return folder / NAME


def other_threads_run(library, name, through, limit_ms):
    """Whether the main thread ran while another one waited in this call."""
    done = subprocess.run(
        [sys.executable, "-c", CALL, str(library), name, through, str(limit_ms)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip() == "1"


@pytest.mark.parametrize("name", CALLS)
def test_nvshmem4py_still_holds_the_lock(library, name):
    assert not other_threads_run(library, name, "nvshmem4py", limit_ms=500), (
        f"this nvshmem4py lets go of Python's lock in {name}: take it out of "
        "nvshmem_library.waiting_calls, if the oldest nvshmem4py that pyproject.toml allows does so"
    )


@pytest.mark.parametrize("name", CALLS)
def test_calls_with_a_deadline_do_not(library, name):
    assert other_threads_run(library, name, "moe_engine", limit_ms=60_000)
