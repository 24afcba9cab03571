"""Symmetric memory through NVSHMEM, for GPUs of which some cannot map each other's memory.

NVSHMEM runs over one set of processes, each of which is a processing element (PE). The first block
of a process starts it over the ranks of that block's group, and all later blocks must belong to
the same ranks: memory is allocated and freed by all PEs together. So expert-parallel groups of one
job that share no rank run side by side, each with an NVSHMEM of its own, but a rank cannot be in
two of them. Where something else has started NVSHMEM before, as torch's own backend does over all
ranks of a job, the group must have as many ranks.

NVSHMEM waits for other ranks without a deadline. Its calls therefore run on a thread each, which is
given up after the deadline; from then on this process calls NVSHMEM no more.
"""

from __future__ import annotations

import atexit
import os
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist

from ..cuda_driver import enter_context
from ..deadline import timeout_seconds
from ..errors import BackendError, MoeEngineError, OutOfStep
from ..nvshmem_library import api, is_initialized, waiting_calls
from ..torch_privates import storage_at
from .base import environment
from .meeting import exchange, per_rank, ranks_text
from .nodes import this_node

EXIT_S = 10.0
"""How long a process that ends may wait for the others to end NVSHMEM with it."""

_job: str | None = None  # names the ranks over which this process has started NVSHMEM
_has_failed = False  # a call did not end, so the state of NVSHMEM is not known


class NvshmemTensor:
    """A `SymmetricTensor` on CUDA. The group may be CPU-only: ranks meet at its store.

    pes: int32 [R] on the device, the PE of each rank of the group, whose address is `network`. The
    addresses of ranks of other nodes are 0 (`this_node`); BackendError where NVSHMEM cannot map
    those of the same node. Freeing is collective: a block that is dropped without `free` stays
    allocated until the process ends, and views of `local` must not be read after `free`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int,
        device: torch.device,
        timeout_s: float | None = None,
    ):
        self._group, self._device = group, device
        self._seconds = timeout_seconds() if timeout_s is None else timeout_s
        pes, own = start(group, device, self._seconds), group.rank()

        def create() -> int:
            address = self._call("allocate", lambda: waiting_calls().nvshmem_malloc(num_bytes))
            if address is None:
                raise BackendError(
                    f"NVSHMEM could not allocate {num_bytes} bytes: its heap is too small, or the "
                    "GPU's memory is in use. NVSHMEM_SYMMETRIC_SIZE sets the heap's bytes."
                )
            self.local = tensor_at(address, num_bytes, device)
            self.local.zero_()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return int(address)

        def map_all() -> list[int]:
            """The addresses of all ranks; 0 in other nodes."""
            address_of = api().bindings.ptr
            found = [
                (address_of(self._address, pe) or None) if node == nodes[own] else 0
                for pe, node in zip(pes, nodes, strict=True)
            ]
            if apart := [rank for rank, address in enumerate(found) if address is None]:
                raise BackendError(
                    f"NVSHMEM cannot map the memory of {ranks_text(apart)} on rank {own}, of the "
                    "same node. See `moe-engine doctor`, or let MOE_ENGINE_NODE_SIZE say how many "
                    "ranks of a host are a node."
                )
            return [address or 0 for address in found]

        nodes = exchange(group, this_node, "finding nodes", timeout_s)
        self._address: int | None = exchange(group, create, "allocating memory", timeout_s)[own]
        self._addresses = exchange(group, map_all, "mapping memory", timeout_s)[own]
        self.peer_addresses = torch.tensor(self._addresses, dtype=torch.int64, device=device)
        self.pes = torch.tensor(pes, dtype=torch.int32, device=device)
        self.network = self.pes.data_ptr()

    def peer(self, rank: int) -> torch.Tensor:
        if not self._addresses[rank]:
            raise BackendError(
                f"the memory of rank {rank} is not mapped here: it is in another node. Kernels "
                "send to it by device/nvshmem.py."
            )
        return tensor_at(self._addresses[rank], self.local.numel(), self._device)

    def free(self) -> None:
        """Give the memory back, on all ranks together. Where another rank does not come within the
        deadline it stays allocated, with a warning."""
        address, self._address = self._address, None
        if address is None:
            return
        self.local = self.local.new_empty(0)
        self.peer_addresses = torch.zeros_like(self.peer_addresses)
        self.network = 0
        try:
            exchange(self._group, lambda: None, "freeing memory", self._seconds)
            self._call("free memory", lambda: waiting_calls().nvshmem_free(address))
        except MoeEngineError as error:
            warnings.warn(
                f"memory of NVSHMEM stays allocated until this process ends: {error}",
                RuntimeWarning,
                stacklevel=2,
            )

    def _call(self, what: str, call: Callable[[], Any]) -> Any:
        return bounded(call, what, self._device, self._seconds)


def start(group: dist.ProcessGroup, device: torch.device, timeout_s: float) -> list[int]:
    """Start NVSHMEM over the ranks of `group`, unless it runs there; the PE of each rank.

    Collective, by the group's store alone. BackendError, on all ranks, where NVSHMEM is missing or
    too old (`nvshmem_library`), cannot start, or runs over other ranks in any of these processes.
    """

    def look() -> tuple[str, tuple[str, Any] | None]:
        """(what runs in this process, what rank 0 will start: its name and its identifier)."""
        if _has_failed:
            raise BackendError(
                "an earlier call of NVSHMEM did not end in this process. Start all ranks again."
            )
        running = _job or ("started outside moe_engine" if is_initialized() else "")
        return running, (uuid4().hex, unique_id()) if group.rank() == 0 and not running else None

    def begin() -> tuple[int, int]:
        global _job
        if not running[0]:
            name, identifier = jobs[0]
            _initialize(group, identifier, device, timeout_s)
            _job = name
        return api().core.my_pe(), api().core.n_pes()

    running, jobs = zip(*exchange(group, look, "looking for NVSHMEM", timeout_s), strict=True)
    if len(set(running)) > 1:
        raise BackendError(
            "NVSHMEM runs over other ranks than these in some processes, and a process can be in "
            f"one such set of ranks only: {per_rank(running)}. Make all Buffers with backend "
            "'nvshmem' over the same ranks."
        )
    pes, counts = zip(*exchange(group, begin, "starting NVSHMEM", timeout_s), strict=True)
    if set(counts) != {group.size()} or len(set(pes)) < group.size():
        raise BackendError(
            f"NVSHMEM runs over {counts[0]} processes, and this group has {group.size()} ranks, "
            f"which are its PEs {sorted(pes)}. All of its processes allocate together: use the "
            "group over which it was started."
        )
    return list(pes)


def unique_id() -> Any:
    """An identifier by which ranks find each other: it holds an address of this process."""
    core = api().core
    try:
        with environment(_defaults()):
            return core.get_unique_id()
    except Exception as error:  # NVSHMEM's errors are of classes of its own
        raise BackendError(
            f"NVSHMEM found no network interface to start by ({error}): name one in "
            "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME."
        ) from error


def _initialize(
    group: dist.ProcessGroup, identifier: Any, device: torch.device, timeout_s: float
) -> None:
    init = partial(
        api().core.init,
        device=_cuda_device(device),
        uid=identifier,
        rank=group.rank(),
        nranks=group.size(),
        initializer_method="uid",
    )
    why = "it found no GPU"  # NVSHMEM 3.4 raises nothing there
    try:
        with environment(_defaults()):
            bounded(init, "start", device, timeout_s)
    except MoeEngineError:
        raise
    except Exception as error:
        why = str(error)
    if not is_initialized():
        raise BackendError(
            f"NVSHMEM could not start ({why}). NVSHMEM_DEBUG=INFO shows more, `moe-engine doctor` "
            "what this host has: a network adapter for RDMA where ranks are on several hosts, and "
            "the right interface in NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME."
        )
    atexit.register(_finish, device)


def _cuda_device(device: torch.device) -> Any:
    from cuda.core import Device  # imports numpy, which nothing else here needs

    return Device(device.index)


def _defaults() -> dict[str, str]:
    """Variables that NVSHMEM reads as it starts, where they are not set: the interface that torch
    uses, and no multicast memory, which nothing here needs."""
    given = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME")
    defaults = {"NVSHMEM_DISABLE_NVLS": "1"}
    if given:
        defaults["NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"] = given
    return {name: value for name, value in defaults.items() if name not in os.environ}


def _finish(device: torch.device) -> None:
    """End NVSHMEM with the process, if all its calls have ended."""
    if not _has_failed:
        try:
            bounded(waiting_calls().nvshmemx_hostlib_finalize, "end", device, EXIT_S)
        except MoeEngineError as error:
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)


def bounded(call: Callable[[], Any], what: str, device: torch.device, seconds: float) -> Any:
    """`call()` of NVSHMEM, on a thread of its own. OutOfStep where it takes longer than `seconds`,
    after which NVSHMEM is used no more."""
    global _has_failed
    if _has_failed:
        raise BackendError("an earlier call of NVSHMEM did not end. Start all ranks again.")
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
                enter_context()
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name=f"NVSHMEM: {what}", daemon=True)
    thread.start()
    try:
        thread.join(seconds)
    except BaseException:  # an interrupt: the call goes on
        _has_failed = not (results or errors)
        raise
    if errors:
        raise errors[0]
    if not results:
        _has_failed = True
        raise OutOfStep(
            f"NVSHMEM did not {what} within {seconds:g} s: a rank is gone or stuck, or cannot be "
            "reached over the network. Start all ranks again; MOE_ENGINE_TIMEOUT_S sets the "
            "deadline."
        )
    return results[0]


def tensor_at(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Memory of NVSHMEM as uint8 [num_bytes], which the tensor does not own. By DLPack, memory of
    another GPU would be a tensor of that GPU, whose copies run on a stream there."""
    storage: Any = storage_at(address, num_bytes, device)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (num_bytes,), (1,))
