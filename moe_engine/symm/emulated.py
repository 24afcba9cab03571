"""Symmetric memory of processes on one host, for kernels in Triton's interpreter.

Each rank makes an anonymous file in memory, and its peers map it through /proc. It has no name
anywhere, so the operating system frees it when the processes end, however they end.
"""

from __future__ import annotations

import mmap
import os
from contextlib import ExitStack
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..errors import BackendError
from .meeting import exchange


class File(NamedTuple):
    """An open file of a process: its descriptor, and what identifies the file."""

    pid: int
    descriptor: int
    device: int
    inode: int
    rank: int


class EmulatedTensor:
    """A `SymmetricTensor` on the CPU; `group=None` is one rank."""

    def __init__(
        self, group: dist.ProcessGroup | None, num_bytes: int, timeout_s: float | None = None
    ):
        rank = 0 if group is None else group.rank()
        self._blocks: list[torch.Tensor] = []
        with ExitStack() as until_mapped:

            def create() -> File:
                descriptor = os.memfd_create("moe_engine")
                until_mapped.callback(os.close, descriptor)
                os.fchmod(descriptor, 0o600)
                os.ftruncate(descriptor, num_bytes)
                status = os.fstat(descriptor)
                return File(os.getpid(), descriptor, status.st_dev, status.st_ino, rank)

            def map_all() -> None:
                self._blocks.extend(_map(file, num_bytes) for file in files)

            files = exchange(group, create, "allocating memory", timeout_s)
            exchange(group, map_all, "mapping memory", timeout_s)
        self.local = self._blocks[rank]
        self.peer_addresses = torch.tensor([block.data_ptr() for block in self._blocks])

    def peer(self, rank: int) -> torch.Tensor:
        return self._blocks[rank]

    def free(self) -> None:
        # A mapping ends with the last tensor on it: closing it sooner would crash a view's reader.
        self._blocks.clear()
        self.local = self.local.new_empty(0)
        self.peer_addresses = torch.zeros_like(self.peer_addresses)


def _map(file: File, num_bytes: int) -> torch.Tensor:
    """The file of a rank as a uint8 tensor. BackendError if it is gone or another one."""
    try:
        opened = os.open(f"/proc/{file.pid}/fd/{file.descriptor}", os.O_RDWR | os.O_NONBLOCK)
        try:
            status = os.fstat(opened)
            found = status.st_dev, status.st_ino, status.st_uid
            if found != (file.device, file.inode, os.geteuid()):
                raise OSError("it is another file, or one of another user")
            return torch.frombuffer(mmap.mmap(opened, num_bytes), dtype=torch.uint8)
        finally:
            os.close(opened)
    except OSError as error:
        raise BackendError(
            f"the memory of rank {file.rank}, process {file.pid}, cannot be mapped: {error}. "
            "Emulated ranks must be processes of one user that see each other in /proc: run them "
            "in one container, or in containers that share a PID namespace (docker run --pid=...)."
        ) from error
