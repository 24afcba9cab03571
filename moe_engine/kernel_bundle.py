"""Kernels that were compiled before they are needed: `moe-engine compile` writes a bundle of them,
and a process that finds one starts no compiler at its first calls.

A bundle is a folder with `kernels.json`, which says what it was compiled with and lists the
variants, and a cubin for each; into some of those of several nodes NVSHMEM is linked. It is found
by MOE_ENGINE_KERNELS, or as the installed package `moe_engine_kernels`. One that was compiled or
linked with something else is refused with a warning; kernels are then compiled at their first
launch, as without any.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from cuda.bindings import driver
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from .cuda_driver import WARP, Binary, Function, check
from .device.lang import TRACING
from .errors import BackendError
from .hardware import gpu
from .nvshmem_library import installed, linked, shown

PACKAGE = "moe_engine_kernels"
MANIFEST = "kernels.json"
_binders: dict[tuple[Any, int], Any] = {}
SOURCES = "moe_engine", "moe_engine.dispatch", "moe_engine.combine", "moe_engine.grouped_gemm"


class Variant(NamedTuple):
    """What a kernel is compiled for: `specialization` is Triton's of its arguments, `options` are
    those of the launch that are no arguments, `values` the arguments by name."""

    kernel: Any
    arch: int
    specialization: list[Any]
    options: dict[str, Any]
    values: dict[str, Any]

    @classmethod
    def of(cls, kernel: Any, arch: int, arguments: Sequence[Any], options: dict[str, Any]) -> Any:
        """The variant of a launch with these arguments and options on sm_`arch`."""
        values, specialization, rest = _binder(kernel, arch)(*arguments, **options)
        return cls(kernel, arch, specialization, rest, values)

    @property
    def name(self) -> str:
        return f"{self.kernel.__module__}.{self.kernel.__name__}"

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal in one process for launches that have one key, if not for all of them, and soon
        made. The types are in it as True is 1."""
        parts, options = self.specialization, self.options
        types = [type(value) for _, value in (*parts, *options.items())]
        return self.kernel.fn, *parts, *options.items(), *types

    @property
    def key(self) -> str:
        """Equal for launches that run the same code."""
        text = f"{self.name} {self.specialization} {sorted(self.options.items())}"
        if linked(self.kernel):  # to which version, not in which folder
            text += f" {installed().version}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def source(self) -> tuple[ASTSource, Any]:
        """What Triton compiles, and the options for it."""
        given = dict(self.options, debug=False, **linked(self.kernel))
        target = backend(self.arch)
        options, *parts = self.kernel._pack_args(
            target, given, self.values, self.specialization, None
        )
        if self.kernel.is_gluon():
            from triton.experimental.gluon._runtime import GluonASTSource

            return GluonASTSource(self.kernel, *parts), options
        return ASTSource(self.kernel, *parts), options


@functools.cache
def backend(arch: int) -> Any:
    """Triton's backend for sm_`arch`; making it starts nothing."""
    return make_backend(GPUTarget("cuda", arch, WARP))


def _binder(kernel: Any, arch: int) -> Any:
    """What Triton specialises arguments by. To hash a kernel takes Triton longer than this."""
    key = kernel.fn, arch
    if key not in _binders:
        make = create_function_from_signature
        _binders[key] = make(kernel.signature, kernel.params, backend(arch))
    return _binders[key]


def made_with(arch: int, is_linked: bool = False) -> dict[str, Any]:
    """What compiled kernels depend on besides their arguments. is_linked: NVSHMEM is linked into
    some of them."""
    return _made_with(arch) | ({"nvshmem": _nvshmem()} if is_linked else {})


def _nvshmem() -> str | None:
    """The version of the NVSHMEM that kernels are linked with here; None where there is none."""
    try:
        return shown(installed().version)
    except BackendError:
        return None


@functools.cache
def _made_with(arch: int) -> dict[str, Any]:
    digest = hashlib.sha256()
    for name, path in sorted(_kernel_files().items()):
        digest.update(name.encode() + path.read_bytes())
    return {
        "moe_engine": f"{version('moe_engine')} ({digest.hexdigest()[:12]})",
        "triton": version("triton"),
        "arch": f"sm_{arch}",
        "tracing": bool(TRACING),
    }


def _kernel_files() -> dict[str, Path]:
    """The files of this package that kernels are made of, by name."""
    found = {}
    for package in SOURCES:
        spec = find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        folder = Path(spec.origin).parent
        for path in folder.rglob("*.py"):
            if path.name.endswith("kernels.py") or path.parent.name == "device":
                found[f"{package}/{path.relative_to(folder)}".replace(".", "/")] = path
    return found


class Bundle:
    """The kernels of a folder. `find` returns those that it has, loaded on the current device."""

    def __init__(self, folder: Path, arch: int, kernels: dict[str, Any]):
        self.folder, self._arch, self._kernels = folder, arch, kernels
        self._functions: dict[tuple[str, int], Function] = {}

    @classmethod
    def read(cls, folder: Path, arch: int) -> Bundle:
        """The bundle of a folder. ValueError, which says why, if it cannot be used on sm_`arch`."""
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
            found, cuda, kernels = manifest["made_with"], manifest["cuda"], manifest["kernels"]
            kinds = type(found), type(cuda), type(kernels)
            if kinds != (dict, str, dict):
                raise TypeError(f"made_with, cuda and kernels are {kinds}")
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise ValueError(
                f"{MANIFEST} cannot be read ({type(error).__name__}: {error})"
            ) from None
        for name, wanted in made_with(arch, "nvshmem" in found).items():
            if found.get(name) != wanted:
                raise ValueError(f"it was made with {name} {found.get(name)}; this is {wanted}")
        if (driver := _driver_version()) // 1000 < int(cuda.partition(".")[0]):
            raise ValueError(f"it was made with CUDA {cuda}, and the driver is of CUDA {driver}")
        return cls(folder, arch, kernels)

    def find(
        self, kernel: Any, arguments: Sequence[Any], options: dict[str, Any]
    ) -> Function | None:
        """The kernel that a launch needs, or None."""
        variant = Variant.of(kernel, self._arch, arguments, options)
        key = variant.key, torch.cuda.current_device()
        if key not in self._functions:
            try:
                said = self._kernels[variant.key]
                cubin = (self.folder / f"{variant.key}.cubin").read_bytes()
            except (KeyError, OSError) as error:
                missing = "variant" if isinstance(error, KeyError) else "readable file"
                warnings.warn(
                    f"{variant.name} is compiled at this launch: {self.folder} has no {missing} "
                    "for it. Let moe-engine compile know the model, the ranks and the tokens that "
                    "are used here.",
                    RuntimeWarning,
                    stacklevel=2,
                )
                return None
            self._functions[key] = Function(from_entry(said, cubin))
        return self._functions[key]


def entry(binary: Binary) -> dict[str, Any]:
    """What the manifest says of a kernel."""
    return {key: value for key, value in binary._asdict().items() if key != "cubin"}


def from_entry(said: dict[str, Any], cubin: bytes) -> Binary:
    """The kernel of which the manifest says this."""
    signature, tensor_maps = _tuples(said["signature"]), tuple(said["tensor_maps"])
    return Binary(**said | dict(cubin=cubin, signature=signature, tensor_maps=tensor_maps))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _driver_version() -> int:
    """The latest CUDA that the driver knows: 12080 is 12.8."""
    return int(check(driver.cuDriverGetVersion(), "tell its version"))


def bundle() -> Bundle | None:
    """The bundle that this process uses on the current GPU, if there is one."""
    capability = gpu().capability
    return None if capability is None else _bundle(10 * capability[0] + capability[1])


@functools.cache
def _bundle(arch: int) -> Bundle | None:
    """The bundle for sm_`arch`. Warns of one that is refused."""
    if folder := os.environ.get("MOE_ENGINE_KERNELS"):
        path = Path(folder)
        path = path if (path / MANIFEST).exists() else path / PACKAGE
    elif (spec := find_spec(PACKAGE)) is not None and spec.origin is not None:
        path = Path(spec.origin).parent
    else:
        return None
    try:
        return Bundle.read(path, arch)
    except ValueError as error:
        warnings.warn(
            f"the kernels in {path} are not used: {error}. Each is compiled at its first launch. "
            "`moe-engine compile` makes a bundle for this installation.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
