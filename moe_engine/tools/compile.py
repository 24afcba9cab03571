"""`moe-engine compile`: the kernels that a model needs, as a bundle; see `kernel_bundle.py`.

One rank of the model makes every call of `model_calls.py`. Each launch tells which variant of its
kernel it needs, and each variant is compiled once.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import triton
from rich.console import Console
from rich.progress import track
from rich.table import Table
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from ..cuda_driver import Binary
from ..hardware import kinds_of, stand_in
from ..kernel_bundle import MANIFEST, PACKAGE, Variant, backend, entry, from_entry, made_with
from ..launch import Grid, collecting
from ..nvshmem_library import linked
from .model_calls import CALLS, CALLS_OF_NODES, CHOOSING
from .model_shape import ModelShape


def variants(shape: ModelShape, arch: int) -> dict[str, Variant]:
    """The variants of kernels that a model needs on sm_`arch`, by key. BackendError for several
    nodes where no NVSHMEM is installed that can be linked."""
    found: dict[str, Variant] = {}
    seen = set[Any]()

    def collect(kernel: Any, grid: Grid, arguments: tuple[Any, ...], options: Any) -> None:
        one = Variant.of(kernel, arch, arguments, options)
        if (identity := one.identity) not in seen:  # a key takes as long as all the rest of it
            seen.add(identity)
            found.setdefault(one.key, one)

    calls = CALLS if shape.num_nodes == 1 else CALLS_OF_NODES
    # Each operation of torch goes through a mode of Python under a default device.
    is_default = torch.get_default_device().type == "cpu"
    on_cpu = nullcontext() if is_default else torch.device("cpu")
    for number, kind in enumerate(kinds_of(arch)):
        with stand_in(kind), collecting(collect), on_cpu:
            for name, call in calls.items():
                if number == 0:
                    call(shape)
                elif name in CHOOSING:
                    CHOOSING[name](shape)
    return found


# --- Compilation -----------------------------------------------------------------------------


def compile_variant(variant: Variant) -> Binary:
    """Compile a variant, or take it from Triton's cache."""
    return compile_source(*variant.source(), variant.arch)


def compile_source(source: ASTSource, options: Any, arch: int) -> Binary:
    """`compile_variant` of what `Variant.source` gives."""
    return Binary.of(triton.compile(source, backend(arch).target, options.__dict__))


def default_jobs() -> int:
    """One for each core that this machine shows, which a container may not have: up to 16."""
    return min(os.cpu_count() or 1, 16)


def compile_all(needed: Iterable[Variant], jobs: int) -> Iterator[Binary]:
    """Compile variants in their order, by so many processes: the compiler holds Python's lock."""
    if jobs <= 1:
        yield from map(compile_variant, needed)
        return
    ForkingPickler.register(JITFunction, lambda kernel: (_kernel, _names(kernel)))
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        sources = ((*variant.source(), variant.arch) for variant in needed)
        yield from pool.map(compile_source, *zip(*sources, strict=True))


def _names(kernel: Any) -> tuple[str, str]:
    return kernel.__module__, kernel.__name__


def _kernel(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _manifest(path: Path, arch: int, is_linked: bool) -> dict[str, Any]:
    """The manifest of a bundle that is made here and now, with the kernels of the one at `path`, if
    that was made with the same; NVSHMEM is among it where kernels are linked, here or there."""
    try:
        old = json.loads(path.read_text())
        before, kernels = {"cuda": old["cuda"], **old["made_with"]}, dict(old["kernels"])
    except (OSError, ValueError, LookupError, TypeError):
        before, kernels = {}, {}
    made = made_with(arch, is_linked or "nvshmem" in before)
    now = {"cuda": get_ptxas(arch).version, **made}
    if now | before != now:
        kernels = {}
    return {"made_with": made, "cuda": now["cuda"], "kernels": kernels}


def write(
    folder: Path, needed: dict[str, Variant], arch: int, jobs: int
) -> Iterator[tuple[Variant, Binary]]:
    """Compile variants and write a bundle of them to `folder`, a project that pip can install.
    Yields each when it is compiled. What the folder has that was made with the same versions stays
    in it; the rest goes before anything is written, as an older kernel may have the same name."""
    inner = folder / PACKAGE
    inner.mkdir(parents=True, exist_ok=True)
    path, is_linked = inner / MANIFEST, any(linked(one.kernel) for one in needed.values())
    kernels = _manifest(path, arch, is_linked)["kernels"]
    if path.exists() and not kernels:
        path.unlink()
        for cubin in inner.glob("*.cubin"):
            cubin.unlink()
    there = {key for key in kernels if (inner / f"{key}.cubin").exists()}
    missing = {key: variant for key, variant in needed.items() if key not in there}
    compiled = compile_all(missing.values(), min(jobs, len(missing)))
    for key, variant in needed.items():
        cubin = inner / f"{key}.cubin"
        if key in missing:
            binary = next(compiled)
            new = cubin.with_suffix(f".{os.getpid()}")  # another command may have listed it
            new.write_bytes(binary.cubin)
            new.replace(cubin)
            kernels[key] = entry(binary)
        else:
            binary = from_entry(kernels[key], cubin.read_bytes())
        yield variant, binary
    manifest = _manifest(path, arch, is_linked)  # another command may have ended since
    kernels = manifest["kernels"] | kernels
    manifest["kernels"] = {
        key: kernels[key] for key in kernels if (inner / f"{key}.cubin").exists()
    }
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps(manifest, indent=1))
    new.replace(path)
    (inner / "__init__.py").write_text('"""Compiled kernels of moe_engine."""\n')
    (folder / "pyproject.toml").write_text(
        f"""[project]
name = "{PACKAGE}"
version = "0"
description = "Compiled kernels of moe_engine, for sm_{arch}"

[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[tool.setuptools]
packages = ["{PACKAGE}"]
package-data = {{ "{PACKAGE}" = ["*.cubin", "{MANIFEST}"] }}
"""
    )


def run(
    shape: ModelShape, arch: int, folder: Path, jobs: int, console: Console
) -> list[tuple[Variant, Binary]]:
    """Write the bundle of a model to a folder, and show how far it has come."""
    with console.status("listing what the model calls"):
        needed = variants(shape, arch)
    compiled = write(folder, needed, arch, jobs)
    steps = track(compiled, "compiling", total=len(needed), console=console)
    return list(steps)


def report(compiled: list[tuple[Variant, Binary]], console: Console) -> None:
    """How many variants of each kernel there are, and their size."""
    table = Table("kernel", "variants", "KiB")
    for column in table.columns[1:]:
        column.justify = "right"
    by_kernel: dict[str, list[int]] = {}
    for variant, binary in compiled:
        name = variant.name.removeprefix("moe_engine.").replace("_kernels.", ".")
        by_kernel.setdefault(name, []).append(len(binary.cubin))
    for name, sizes in sorted(by_kernel.items()):
        table.add_row(name, str(len(sizes)), f"{sum(sizes) / 1024:.0f}")
    total = sum(len(binary.cubin) for _, binary in compiled)
    table.add_row("all", str(len(compiled)), f"{total / 1024:.0f}")
    console.print(table)
