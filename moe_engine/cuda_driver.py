"""The CUDA driver, as far as launches need it: kernels that Triton has compiled are loaded, their
arguments are packed, and they are launched, without Triton's launcher.

That launcher is C code which Triton generates for each kernel and compiles at its first launch, and
it reads all arguments anew at each launch (11 to 20 us). Here the arguments of a launch stay
packed, so that another launch changes those that differ and costs what the driver takes (about 5
us; bench/NOTES.md), and `launch_graph.py` makes one launch of several. Nothing here needs Triton or
a compiler, and Triton's hooks of loaded modules are not called.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from triton.runtime.errors import OutOfResources

from . import nvshmem_library

WARP = 32
INTEGERS = {f"{sign}{bits}": max(1, bits // 8) for sign in "iu" for bits in (1, 8, 16, 32, 64)}
SIZES = {**INTEGERS, "fp32": 4, "map": 128}
"""Bytes of parameters by their kind; others are addresses."""
TENSOR_MAP_BYTES, TENSOR_MAP_ALIGNMENT = 128, 64
PROGRAMMATIC_STREAM_SERIALIZATION = 6  # of CUlaunchAttributeID
OUT_OF_MEMORY, INVALID_CONTEXT = 2, 201  # of CUresult
MAX_THREADS_PER_BLOCK, SHARED_SIZE_BYTES = 0, 1  # of CUfunction_attribute, and the next two
MAX_DYNAMIC_SHARED_SIZE_BYTES, PREFERRED_SHARED_MEMORY_CARVEOUT = 8, 9
FUNC_CACHE_PREFER_SHARED = 1  # of CUfunc_cache
MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97  # of CUdevice_attribute
SHARED_BYTES_OF_ANY = 48 * 1024  # more needs an attribute
L2_PROMOTION_128B = 2  # of CUtensorMapL2promotion
TENSOR_MAP_TYPES = {8: 10, 9: 8, 10: 9}
"""CUtensorMapDataType of the numbers in Triton's metadata that differ from it."""


@functools.cache
def libcuda() -> ctypes.CDLL:
    """The driver's library."""
    return ctypes.CDLL("libcuda.so.1")


def check(code: int, what: str) -> None:
    """Raise RuntimeError for an error that the driver returned; torch.OutOfMemoryError, which is
    one as well, where memory ran out."""
    if code:
        text = ctypes.c_char_p()
        libcuda().cuGetErrorString(code, ctypes.byref(text))
        reason = text.value.decode() if text.value else f"error {code}"
        error = torch.OutOfMemoryError if code == OUT_OF_MEMORY else RuntimeError
        raise error(f"CUDA could not {what}: {reason}.")


def enter_context() -> None:
    """Let this thread use the primary context of its current device, as torch does."""
    context = ctypes.c_void_p()
    code = libcuda().cuDevicePrimaryCtxRetain(ctypes.byref(context), torch.cuda.current_device())
    check(code or libcuda().cuCtxSetCurrent(context), "enter the context of the device")


def in_context(function: Callable[..., int], *arguments: Any) -> int:
    """What a function of the driver returns, called again in torch's context where it is the first
    thing that this thread does with CUDA."""
    code = function(*arguments)
    if code == INVALID_CONTEXT:
        enter_context()
        code = function(*arguments)
    return code


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


class KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS: what a kernel of a CUDA graph is launched with."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("arguments", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


PDL_ATTRIBUTE = _Attribute(PROGRAMMATIC_STREAM_SERIALIZATION, 0, (ctypes.c_uint * 16)(1))


class Binary(NamedTuple):
    """A kernel that Triton has compiled, as far as launches need it.

    signature: the kinds of its arguments, as Triton names them, in tuples as the arguments are;
    tensor_maps: Triton's metadata of those that go as tensor maps, in their order.
    """

    name: str
    cubin: bytes
    num_warps: int
    shared_bytes: int
    pdl: bool
    signature: tuple[Any, ...]
    tensor_maps: tuple[dict[str, Any], ...]

    @classmethod
    def of(cls, compiled: Any) -> Binary:
        """From Triton's `CompiledKernel`."""
        metadata = compiled.metadata
        scratch = metadata.global_scratch_size, metadata.profile_scratch_size
        if any(scratch) or metadata.launch_cooperative_grid or metadata.num_ctas != 1:
            raise RuntimeError(
                f"{compiled.name} needs scratch memory or clusters, which is not offered."
            )
        return cls(
            compiled.name,
            compiled.asm["cubin"],
            metadata.num_warps,
            metadata.shared,
            metadata.launch_pdl,
            tuple(compiled.src.signature.values()),
            tuple(getattr(metadata, "tensordesc_meta", None) or ()),
        )


class Function:
    """A kernel that was compiled, loaded on the current device."""

    def __init__(self, binary: Binary):
        self.name, self.shared_bytes, self.pdl = binary.name, binary.shared_bytes, binary.pdl
        self.signature, self.tensor_maps = binary.signature, binary.tensor_maps
        most = _device_attribute(MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
        if self.shared_bytes > most:
            raise OutOfResources(self.shared_bytes, most, "shared memory")
        self.handle = _load(binary)
        self.num_threads = WARP * binary.num_warps
        if self.num_threads > (most_threads := self._attribute(MAX_THREADS_PER_BLOCK)):
            raise OutOfResources(self.num_threads, most_threads, "threads")
        if self.shared_bytes > SHARED_BYTES_OF_ANY:
            function = ctypes.c_void_p(self.handle)
            code = libcuda().cuFuncSetCacheConfig(function, FUNC_CACHE_PREFER_SHARED)
            check(code, f"divide the memory of an SM for {self.name}")
            most -= self._attribute(SHARED_SIZE_BYTES)
            self._set_attribute(MAX_DYNAMIC_SHARED_SIZE_BYTES, most)
        self.parameter_sizes = _parameter_sizes(self.handle)

    def prefer_shared_memory(self) -> None:
        """Let the driver divide an SM's memory so."""
        percent = 100
        self._set_attribute(PREFERRED_SHARED_MEMORY_CARVEOUT, percent)

    def _attribute(self, number: int) -> int:
        value, function = ctypes.c_int(), ctypes.c_void_p(self.handle)
        code = libcuda().cuFuncGetAttribute(ctypes.byref(value), number, function)
        check(code, f"tell an attribute of {self.name}")
        return value.value

    def _set_attribute(self, number: int, value: int) -> None:
        code = libcuda().cuFuncSetAttribute(ctypes.c_void_p(self.handle), number, value)
        check(code, f"set an attribute of {self.name}")


def _device_attribute(number: int) -> int:
    """An attribute of the current device."""
    value, device = ctypes.c_int(), torch.cuda.current_device()
    code = libcuda().cuDeviceGetAttribute(ctypes.byref(value), number, device)
    check(code, "tell an attribute of the device")
    return value.value


def _load(binary: Binary) -> int:
    """The handle of a kernel, loaded in the context of the current device. It is never unloaded."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    code = in_context(libcuda().cuModuleLoadData, ctypes.byref(module), binary.cubin)
    check(code, f"load {binary.name}")
    if nvshmem_library.STATE in binary.cubin:
        nvshmem_library.initialize_module(module, binary.name)
    name = binary.name.encode()
    code = libcuda().cuModuleGetFunction(ctypes.byref(function), module, name)
    check(code, f"find {binary.name} in what was compiled")
    assert function.value is not None
    return function.value


def _parameter_sizes(function: int) -> list[int] | None:
    """The bytes of each parameter of a loaded kernel; None from drivers before CUDA 12.4."""
    offset, size, sizes = ctypes.c_size_t(), ctypes.c_size_t(), list[int]()
    info = getattr(libcuda(), "cuFuncGetParamInfo", None)
    if info is None:
        return None
    place = ctypes.byref(offset), ctypes.byref(size)
    while info(ctypes.c_void_p(function), ctypes.c_size_t(len(sizes)), *place) == 0:
        sizes.append(size.value)
    return sizes


class TensorMap:
    """A descriptor of a tensor in memory, for loads and stores of whole tiles, at `address`.

    Assigning to its only item moves it to another tensor of the same shape and strides.
    """

    def __init__(self, descriptor: Any, metadata: dict[str, Any]):
        self._memory = ctypes.create_string_buffer(TENSOR_MAP_BYTES + TENSOR_MAP_ALIGNMENT)
        begin = ctypes.addressof(self._memory)
        self.address = begin + -begin % TENSOR_MAP_ALIGNMENT
        self._replace = libcuda().cuTensorMapReplaceAddress
        shape, strides = list(descriptor.shape), list(descriptor.strides)
        item, rank = metadata["elem_size"], len(shape)
        if metadata["fp4_padded"]:
            shape[-1] *= 2
        kind = TENSOR_MAP_TYPES.get(metadata["elem_type"], metadata["elem_type"])
        code = libcuda().cuTensorMapEncodeTiled(
            ctypes.c_void_p(self.address),
            kind,
            rank,
            ctypes.c_void_p(descriptor.base.data_ptr()),
            (ctypes.c_uint64 * rank)(*reversed(shape)),
            (ctypes.c_uint64 * rank)(*(item * one for one in reversed(strides[:-1]))),
            (ctypes.c_uint32 * rank)(*reversed(metadata["block_size"])),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            0,
            metadata["swizzle"],
            L2_PROMOTION_128B,
            int(descriptor.padding == "nan"),
        )
        check(code, f"describe a tensor of shape {shape} and strides {strides}")

    def __setitem__(self, index: int, address: int) -> None:
        code = self._replace(ctypes.c_void_p(self.address), ctypes.c_void_p(address))
        check(code, "move the descriptor of a tensor")


class PackedLaunch:
    """A `launch.Launch` of a loaded kernel. arguments: in the order of the kernel's, by `names`.
    is_dependent: whether it is a programmatic dependent launch."""

    def __init__(
        self,
        function: Function,
        names: Sequence[str],
        grid: Sequence[int],
        arguments: Sequence[Any],
    ):
        self.name, maps = function.name, iter(function.tensor_maps)
        self._handle, self.is_dependent = function.handle, function.pdl
        self.pointers: list[tuple[Any, int, torch.Tensor]] = []
        self.numbers: dict[str, tuple[Any, int]] = {}
        leaves: list[tuple[str, Any]] = []
        of_number = dict[int, str]()
        for name, kind, argument in zip(names, function.signature, arguments, strict=True):
            if kind in INTEGERS:
                of_number[len(leaves)] = name
            leaves += _leaves(kind, argument, maps)
        leaves += [("*", None)] * 2  # scratch memory, of which it has none
        self.sizes = [_size(kind) for kind, _ in leaves]
        if function.parameter_sizes not in (None, self.sizes):
            raise RuntimeError(
                f"{function.name} takes parameters of {function.parameter_sizes} bytes, and "
                f"{self.sizes} were packed: this Triton passes arguments in another way."
            )
        cells = (ctypes.c_uint64 * len(leaves))()
        self._places = (ctypes.c_void_p * len(leaves))()
        self._maps: list[TensorMap] = []
        for index, (kind, value) in enumerate(leaves):
            self._places[index] = ctypes.addressof(cells) + 8 * index
            if kind == "map":
                self._maps.append(one := TensorMap(*value))
                self._places[index] = one.address
                self.pointers.append((one, 0, value[0].base))
            else:
                cells[index] = _bits(kind, value)
            if kind[0] == "*" and value is not None:
                self.pointers.append((cells, index, value))
            if index in of_number:
                self.numbers[of_number[index]] = cells, index
        self._cells = cells
        self._config = _Config(
            (ctypes.c_uint * 3)(*grid, *[1] * (3 - len(grid))),
            (ctypes.c_uint * 3)(function.num_threads, 1, 1),
            function.shared_bytes,
            None,
            ctypes.addressof(PDL_ATTRIBUTE),
            int(function.pdl),
        )
        fixed = ctypes.byref(self._config), ctypes.c_void_p(function.handle), self._places, None
        self._launch = functools.partial(libcuda().cuLaunchKernelEx, *fixed)

    def forget_tensors(self) -> None:
        """See `launch.Launch`."""
        self.pointers = []

    def __call__(self, stream: int) -> None:
        """Launch it on a stream, given by its handle."""
        self._config.stream = stream
        if self._launch():
            check(in_context(self._launch), f"launch {self.name}")

    def node(self) -> KernelNode:
        """What a graph launches in its place. It points to this launch's arguments, as they are
        when the graph is told of it."""
        config = self._config
        arguments = ctypes.addressof(self._places)
        sizes = config.grid, config.block, config.shared_bytes
        return KernelNode(self._handle, *sizes, arguments)


def _leaves(kind: Any, value: Any, maps: Iterator[dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    """(kind, value) of what the compiled kernel takes for an argument of this kind, in its order. A
    descriptor goes as a tensor map where the kernel has some, else as an address and its sizes."""
    if isinstance(kind, tuple):
        for one, item in zip(kind, value, strict=True):
            yield from _leaves(one, item, maps)
    elif kind.startswith("tensordesc"):
        metadata = next(maps, None)
        if metadata is None:
            yield "*", value.base
            yield from (("i64", size) for size in (*value.shape, *value.strides))
            yield "i1", value.padding == "nan"
            if hasattr(value, "round_f32_to_tf32"):  # since Triton 3.7
                yield "i1", value.round_f32_to_tf32
        else:
            yield "map", (value, metadata)
        yield from (("i32", size) for size in value.shape)
        yield from (("i64", stride) for stride in value.strides)
    elif kind != "constexpr":
        yield kind, value


def _bits(kind: str, value: Any) -> int:
    """The argument in 8 bytes, of which a kernel reads as many as it takes."""
    if kind[0] == "*":
        return 0 if value is None else int(value.data_ptr())
    if kind == "fp32":
        return int.from_bytes(struct.pack("<f", value), "little")
    return int(value) & (1 << 64) - 1


def _size(kind: str) -> int:
    """The bytes of a parameter of this kind."""
    if kind not in SIZES and kind[0] != "*":
        raise RuntimeError(f"an argument of the kind {kind} cannot be packed.")
    return SIZES.get(kind, 8)
