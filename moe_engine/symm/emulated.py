"""Symmetric memory of processes on one host, for kernels in Triton's interpreter.

Each rank makes an anonymous file in memory, and its peers map it through /proc. It has no name
anywhere, so the operating system frees it when the processes end, however they end.
"""

from __future__ import annotations

import mmap
import os
from contextlib import ExitStack

import torch
import torch.distributed as dist

from . import exchange


class EmulatedTensor:
    """A `SymmetricTensor` on the CPU; `group=None` is one rank."""

    def __init__(self, group: dist.ProcessGroup | None, num_bytes: int):
        self._blocks: list[torch.Tensor] = []
        with ExitStack() as until_mapped:

            def create() -> tuple[int, int]:
                file = os.memfd_create("moe_engine")
                until_mapped.callback(os.close, file)
                os.ftruncate(file, num_bytes)
                return os.getpid(), file

            places = exchange(group, create)
            exchange(group, lambda: self._blocks.extend(_map(*p, num_bytes) for p in places))
        self.local = self._blocks[0 if group is None else group.rank()]
        self.peer_addresses = torch.tensor([block.data_ptr() for block in self._blocks])

    def peer(self, rank: int) -> torch.Tensor:
        return self._blocks[rank]

    def free(self) -> None:
        # A mapping ends with the last tensor on it: closing it sooner would crash a view's reader.
        self._blocks.clear()
        self.local = self.local.new_empty(0)
        self.peer_addresses = torch.zeros_like(self.peer_addresses)


def _map(pid: int, file: int, num_bytes: int) -> torch.Tensor:
    """The file open as number `file` in process `pid`, as a uint8 tensor."""
    opened = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR)
    try:
        return torch.frombuffer(mmap.mmap(opened, num_bytes), dtype=torch.uint8)
    finally:
        os.close(opened)
