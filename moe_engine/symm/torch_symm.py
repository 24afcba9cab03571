"""Symmetric memory of GPUs in one NVLink domain, by torch's own symmetric memory."""

from __future__ import annotations

import os
import weakref
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from ..deadline import timeout_seconds
from ..errors import BackendError, OutOfStep
from ..torch_privates import register_group, store_of, symmetric_memory, unregister_group
from .base import environment
from .meeting import absent_keys, exchange, ranks_text

_names = count()


class _MeetingStore(dist.Store):
    """The store of one rendezvous, on top of the group's.

    torch numbers the exchanges of all its rendezvous in one count per process, and ranks that took
    part in different numbers of them would wait for each other's keys in vain. Here the numbers
    start from 0 each time. A wait ends with the engine's deadline.
    """

    def __init__(self, store: dist.Store, timeout_s: float | None = None):
        super().__init__()
        self._store = store
        self._seconds = timeout_seconds() if timeout_s is None else timeout_s
        self._first: int | None = None

    def _key(self, key: str) -> str:
        name, number, rank = key.rsplit("/", 2)
        if self._first is None:
            self._first = int(number)
        return f"{name}/{int(number) - self._first}/{rank}"

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(self._key(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
        absent = absent_keys(self._store, [self._key(key) for key in keys], self._seconds)
        if absent:
            late = ranks_text(int(key.rpartition("/")[2]) for key in absent)
            raise OutOfStep(
                f"{late} did not arrive within {self._seconds:g} s to map memory: see what {late} "
                "did last, and make new Buffers once all ranks are back."
            )


class TorchTensor:
    """A `SymmetricTensor` on CUDA. The group may be CPU-only: ranks meet at its store."""

    network = 0

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int,
        device: torch.device,
        timeout_s: float | None = None,
    ):
        memory = symmetric_memory()

        def create() -> None:
            backend = memory.get_backend(device)
            if backend != "CUDA":
                raise BackendError(
                    f"torch's symmetric memory is set to {backend}, and 'CUDA' is needed: unset "
                    "TORCH_SYMMMEM, or call torch's symm_mem.set_backend('CUDA') first"
                )
            # Not symm_mem.empty: its pool keeps memory and mappings after `free`.
            self.local = memory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
            self._held.append(self.local)
            self.local.zero_()
            torch.cuda.synchronize(device)

        def meet(name: Any) -> None:
            # torch looks up a group by its name. This group exists for the meeting only.
            store = store_of(group)
            store = _MeetingStore(dist.PrefixStore(name, store), timeout_s)
            meeting = dist.ProcessGroup(store, dist.get_rank(group), dist.get_world_size(group))
            register_group(name, meeting)
            # torch would make a multicast object, which is of no use here, and fragile.
            no_multicast = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
            try:
                with environment(no_multicast), torch.cuda.device(device):
                    # The handle keeps the peers' blocks mapped.
                    self._handle: Any = memory.rendezvous(self.local, name)
            finally:
                unregister_group(name)
            self._held.append(self._handle)

        self._held: list[Any] = []
        weakref.finalize(self, _drop, self._held)
        exchange(group, create, "allocating memory", timeout_s)
        # All ranks take the name that the first one proposes, which is new to each of them.
        names = exchange(
            group,
            lambda: f"moe_engine/{os.getpid()}/{next(_names)}",
            "naming a rendezvous",
            timeout_s,
        )
        exchange(group, lambda: meet(names[0]), "mapping memory", timeout_s)
        self.peer_addresses = torch.tensor(
            self._handle.buffer_ptrs, dtype=torch.int64, device=device
        )

    def peer(self, rank: int) -> torch.Tensor:
        return self._handle.get_buffer(rank, (self.local.numel(),), torch.uint8)

    def free(self) -> None:
        self._held.clear()
        _kept.clear()
        self._handle = None
        self.local = self.local.new_empty(0)
        self.peer_addresses = torch.zeros_like(self.peer_addresses)


_kept: list[list[Any]] = []
"""What was collected during the capture of a graph, in which nothing can be unmapped: torch ends
the process then."""


def _drop(held: list[Any]) -> None:
    """Give back the memory of a tensor that was collected, or later what must stay now."""
    if torch.cuda.is_current_stream_capturing():
        _kept.append(held.copy())
    else:
        _kept.clear()
    held.clear()
