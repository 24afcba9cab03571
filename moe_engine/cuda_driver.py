"""The CUDA driver, as far as launches need it: kernels that Triton has compiled are loaded, their
arguments are packed, and they are launched, without Triton's launcher.

That launcher is C code which Triton generates for each kernel and compiles at its first launch, and
it reads all arguments anew at each launch (11 to 20 us). Here the arguments of a launch stay
packed, so that another launch changes those that differ and costs what the driver takes (about 5
us; bench/notes/host.md), and `launch_graph.py` makes one launch of several. Nothing here needs
Triton or a compiler, and Triton's hooks of loaded modules are not called. The driver is called
through cuda.bindings: structures and numbers are its own, and each function returns (CUresult,
*values).
"""

from __future__ import annotations

import functools
import itertools
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from cuda.bindings import driver
from triton.runtime.errors import OutOfResources

from . import nvshmem_library

WARP = 32
INTEGERS = {f"{sign}{bits}": max(1, bits // 8) for sign in "iu" for bits in (1, 8, 16, 32, 64)}
SIZES = {**INTEGERS, "fp32": 4, "map": 128}
"""Bytes of parameters by their kind; others are addresses."""
WORD = 8
SHARED_BYTES_OF_ANY = 48 * 1024  # more needs an attribute
LEGACY_STREAM = driver.CU_STREAM_LEGACY
"""What torch's stream 0 is. The driver would take 0 for another stream, the thread's own, where
CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM is set."""
TENSOR_MAP_TYPES = {8: 10, 9: 8, 10: 9}
"""CUtensorMapDataType of the numbers in Triton's metadata that differ from it."""
INVALID_CONTEXT = driver.CUresult.CUDA_ERROR_INVALID_CONTEXT
OUT_OF_MEMORY = driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY


def check(result: tuple[Any, ...], what: str) -> Any:
    """The value that a function of the driver returned. RuntimeError for an error;
    torch.OutOfMemoryError, which is one as well, where memory ran out."""
    code, *values = result
    if code:
        _, text = driver.cuGetErrorString(code)
        reason = text.decode() if text else f"error {code}"
        error = torch.OutOfMemoryError if code == OUT_OF_MEMORY else RuntimeError
        raise error(f"CUDA could not {what}: {reason}.")
    return values[0] if len(values) == 1 else values


def enter_context() -> None:
    """Let this thread use the primary context of its current device, as torch does."""
    retained = driver.cuDevicePrimaryCtxRetain(torch.cuda.current_device())
    context = check(retained, "find the context of the device")
    check(driver.cuCtxSetCurrent(context), "enter the context of the device")


def in_context(function: Callable[..., tuple[Any, ...]], *arguments: Any) -> tuple[Any, ...]:
    """What a function of the driver returns, called again in torch's context where it is the first
    thing that this thread does with CUDA."""
    result = function(*arguments)
    if result[0] == INVALID_CONTEXT:
        enter_context()
        result = function(*arguments)
    return result


def run(doing: str, name: str, function: Callable[..., tuple[Any, ...]], *arguments: Any) -> None:
    """Call a function of the driver that returns no value, as `in_context`. Errors are raised as by
    `check`, and say what it was doing, and to what."""
    (code,) = function(*arguments)
    if code:
        check(in_context(function, *arguments), f"{doing} {name}")


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
        self.num_threads = WARP * binary.num_warps
        properties: Any = torch.cuda.get_device_properties()
        most = properties.shared_memory_per_block_optin
        if self.shared_bytes > most:
            raise OutOfResources(self.shared_bytes, most, "shared memory")
        self.handle = _load(binary)
        most_threads = self._get("MAX_THREADS_PER_BLOCK")
        if self.num_threads > most_threads:
            raise OutOfResources(self.num_threads, most_threads, "threads")
        if self.shared_bytes > SHARED_BYTES_OF_ANY:
            prefer = driver.CUfunc_cache.CU_FUNC_CACHE_PREFER_SHARED
            divided = driver.cuFuncSetCacheConfig(self.handle, prefer)
            check(divided, f"divide the memory of an SM for {self.name}")
            most -= self._get("SHARED_SIZE_BYTES")
            self._set("MAX_DYNAMIC_SHARED_SIZE_BYTES", most)
        self.parameter_sizes = _parameter_sizes(self.handle)

    def prefer_shared_memory(self) -> None:
        """Let the driver divide an SM's memory so."""
        percent = 100
        self._set("PREFERRED_SHARED_MEMORY_CARVEOUT", percent)

    def _get(self, attribute: str) -> int:
        told = in_context(driver.cuFuncGetAttribute, _attribute(attribute), self.handle)
        return int(check(told, f"tell {attribute} of {self.name}"))

    def _set(self, attribute: str, value: int) -> None:
        done = in_context(driver.cuFuncSetAttribute, self.handle, _attribute(attribute), value)
        check(done, f"set {attribute} of {self.name}")


def _attribute(name: str) -> driver.CUfunction_attribute:
    """An attribute of a function, by its name without the prefix that all of them have."""
    return getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")


def _load(binary: Binary) -> Any:
    """The handle of a kernel, loaded in the context of the current device. It is never unloaded."""
    module = check(in_context(driver.cuModuleLoadData, binary.cubin), f"load {binary.name}")
    if nvshmem_library.STATE in binary.cubin:
        nvshmem_library.initialize_module(module, binary.name)
    found = driver.cuModuleGetFunction(module, binary.name.encode())
    return check(found, f"find {binary.name} in what was compiled")


def _parameter_sizes(handle: Any) -> list[int]:
    """The bytes of each parameter of a loaded kernel. The driver does not tell their number: it
    returns an error for the number after the last."""
    told = (driver.cuFuncGetParamInfo(handle, number) for number in itertools.count())
    return [int(size) for _, _, size in itertools.takewhile(lambda one: not one[0], told)]


class TensorMap:
    """A descriptor of a tensor in memory, for loads and stores of whole tiles, at `address`.

    Assigning to its only item moves it to another tensor of the same shape and strides.
    """

    def __init__(self, descriptor: Any, metadata: dict[str, Any]):
        shape, strides = list(descriptor.shape), list(descriptor.strides)
        if metadata["fp4_padded"]:
            shape[-1] *= 2
        kind = TENSOR_MAP_TYPES.get(metadata["elem_type"], metadata["elem_type"])
        made = in_context(
            driver.cuTensorMapEncodeTiled,
            driver.CUtensorMapDataType(kind),
            len(shape),
            descriptor.base.data_ptr(),
            [*map(driver.cuuint64_t, reversed(shape))],
            [driver.cuuint64_t(metadata["elem_size"] * one) for one in reversed(strides[:-1])],
            [*map(driver.cuuint32_t, reversed(metadata["block_size"]))],
            [driver.cuuint32_t(1)] * len(shape),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle(metadata["swizzle"]),
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill(int(descriptor.padding == "nan")),
        )
        self._map = check(made, f"describe a tensor of shape {shape} and strides {strides}")
        self.address: int = self._map.getPtr()

    def __setitem__(self, index: int, address: int) -> None:
        run("move", "a tensor map", driver.cuTensorMapReplaceAddress, self._map, address)


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
        self.is_dependent, self._function = function.pdl, function
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
        if function.parameter_sizes != self.sizes:
            raise RuntimeError(
                f"{function.name} takes parameters of {function.parameter_sizes} bytes, and "
                f"{self.sizes} were packed: this Triton passes arguments in another way."
            )
        self._cells = cells = array("q", bytes(WORD * len(leaves)))
        begin, _ = cells.buffer_info()
        self._places = array("Q", [begin + WORD * index for index in range(len(leaves))])
        self._maps: list[TensorMap] = []
        for index, (kind, value) in enumerate(leaves):
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
        self._arguments, _ = self._places.buffer_info()  # the address of the arguments' addresses
        self._grid = *grid, *[1] * (3 - len(grid))
        self._config = self._sized(driver.CUlaunchConfig())
        if function.pdl:
            self._config.attrs, self._config.numAttrs = [_programmatic()], 1
        self._stream: int | None = None
        fixed = self._config, function.handle, self._arguments, 0
        self._launch = functools.partial(driver.cuLaunchKernelEx, *fixed)

    def _sized(self, launch: Any) -> Any:
        """A structure of the driver that describes a launch, with the sizes of this one."""
        launch.gridDimX, launch.gridDimY, launch.gridDimZ = self._grid
        launch.blockDimX, launch.blockDimY, launch.blockDimZ = self._function.num_threads, 1, 1
        launch.sharedMemBytes = self._function.shared_bytes
        return launch

    def forget_tensors(self) -> None:
        """See `launch.Launch`."""
        self.pointers = []

    def __call__(self, stream: int) -> None:
        """Launch it on a stream, given by its handle."""
        if stream != self._stream:  # to write the field takes 0.1 us
            self._config.hStream, self._stream = stream or LEGACY_STREAM, stream
        run("launch", self.name, self._launch)

    def node(self) -> driver.CUDA_KERNEL_NODE_PARAMS:
        """What a graph launches in its place. It points to this launch's arguments, as they are
        when the graph is told of it."""
        node = self._sized(driver.CUDA_KERNEL_NODE_PARAMS())
        node.func, node.kernelParams = self._function.handle, self._arguments
        return node


def _programmatic() -> driver.CUlaunchAttribute:
    """The attribute of programmatic dependent launches."""
    made, names = driver.CUlaunchAttribute(), driver.CUlaunchAttributeID
    made.id = names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    made.value.programmaticStreamSerializationAllowed = 1
    return made


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
    """The argument as a signed number of 8 bytes, of which a kernel reads as many as it takes."""
    if kind[0] == "*":
        return 0 if value is None else int(value.data_ptr())
    if kind == "fp32":
        return int.from_bytes(struct.pack("<f", value), "little")
    bits = int(value) & (1 << 64) - 1
    return bits - (bits >> 63 << 64)


def _size(kind: str) -> int:
    """The bytes of a parameter of this kind."""
    if kind not in SIZES and kind[0] != "*":
        raise RuntimeError(f"an argument of the kind {kind} cannot be packed.")
    return SIZES.get(kind, 8)
