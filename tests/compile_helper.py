"""Compile a kernel for a GPU that need not be there, and read what came out."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

FEW_BYTES = 16
"""ptxas sets so many bytes of a thread aside now and then, even where it has registers left."""


@dataclass(frozen=True)
class Compiled:
    ptx: str
    cubin: bytes
    registers: int
    spill_bytes: int  # stack and local memory of one thread; kernels here use none on purpose
    shared_bytes: int

    @property
    def spills(self) -> bool:
        """Whether it spills more than a few bytes, as where registers do not suffice."""
        return self.spill_bytes > FEW_BYTES


def compile_kernel(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    arch: int = 90,
    *,
    num_warps: int = 4,
    num_stages: int = 3,
    unaligned: Iterable[str] = (),
    **options: Any,
) -> Compiled:
    """Compile `kernel` (under @triton.jit) for sm_`arch`.

    signature: the type of each argument, as in {"x": "*bf16", "n": "i32", "a": "tensordesc<bf16[
    128, 64]>"}. constexprs: the values of the others, None for an absent tensor. Pointers are taken
    as multiples of 16 bytes, as torch allocates them, except those in `unaligned` and those under
    the kernel's do_not_specialize and do_not_specialize_on_alignment. options: others of a launch.
    """
    types = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    unaligned = {*unaligned, *(p.name for p in kernel.params if p.do_not_specialize)}
    unaligned |= {p.name for p in kernel.params if p.do_not_specialize_on_alignment}
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(types.items())
        if kind.startswith("*") and name not in unaligned
    }
    source = ASTSource(kernel, types, dict(constexprs), attributes)
    return compile_source(source, arch, dict(num_warps=num_warps, num_stages=num_stages, **options))


def compile_source(source: ASTSource, arch: int, options: Mapping[str, Any]) -> Compiled:
    """Compile what Triton has specialised for sm_`arch`."""
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(options))
    ptx, cubin = built.asm["ptx"], built.asm["cubin"]
    registers, stack, local = _resources(cubin)
    return Compiled(ptx, cubin, registers, stack + local, built.metadata.shared)


def _resources(cubin: bytes) -> tuple[int, ...]:
    """Registers, bytes of stack and of local memory, by the tool that the Triton wheel ships."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        done = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        )
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", done.stdout)
    assert found, done.stdout
    return tuple(map(int, found.groups()))
