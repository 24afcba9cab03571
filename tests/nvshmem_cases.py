"""What the tests of NVSHMEM share: whether it is installed, a tree that looks so, and a stand-in
for its host library."""

from __future__ import annotations

from moe_engine import nvshmem_library
from moe_engine.errors import BackendError

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
