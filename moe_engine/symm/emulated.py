"""Symmetric memory of processes on one host, for kernels in Triton's interpreter.

Each rank makes an anonymous file in memory, and the ranks of its node map it through /proc. It has
no name anywhere, so the operating system frees it when the processes end, however they end. The
files of ranks of other nodes are mapped by this rank's emulated network alone (`nic.py`).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..errors import BackendError
from .meeting import exchange
from .nic import Nic
from .nic_process import OpenFile, map_file
from .nodes import Node, nodes_of, this_node


class File(NamedTuple):
    """The file of a rank's block: those of `OpenFile`, and whose it is."""

    pid: int
    descriptor: int
    device: int
    inode: int
    rank: int
    node: Node = ("", 0)

    @property
    def opened(self) -> OpenFile:
        return OpenFile(self.pid, self.descriptor, self.device, self.inode)


class EmulatedTensor:
    """A `SymmetricTensor` on the CPU; `group=None` is one rank."""

    def __init__(
        self, group: dist.ProcessGroup | None, num_bytes: int, timeout_s: float | None = None
    ):
        rank = 0 if group is None else group.rank()
        self._blocks: dict[int, torch.Tensor] = {}  # of the ranks of this node
        self._leave_network: Callable[[], None] = lambda: None
        self.network = 0
        with ExitStack() as until_mapped:

            def create() -> File:
                descriptor = os.memfd_create("moe_engine")
                until_mapped.callback(os.close, descriptor)
                os.fchmod(descriptor, 0o600)
                os.ftruncate(descriptor, num_bytes)
                status = os.fstat(descriptor)
                opened = os.getpid(), descriptor, status.st_dev, status.st_ino
                return File(*opened, rank, this_node())

            def map_all() -> None:
                nodes_of([file.node for file in files])
                for file in files:
                    if file.node == files[rank].node:
                        self._blocks[file.rank] = _map(file, num_bytes)
                far = {file.rank: file.opened for file in files if file.rank not in self._blocks}
                if far:
                    self._join_network(files[rank], far, num_bytes)

            files = exchange(group, create, "allocating memory", timeout_s)
            exchange(group, map_all, "mapping memory", timeout_s)
        self.local = self._blocks[rank]
        addresses = {rank: block.data_ptr() for rank, block in self._blocks.items()}
        found = [addresses.get(file.rank, 0) for file in files]
        self.peer_addresses = torch.tensor(found, device="cpu")

    def _join_network(self, own: File, far: dict[int, OpenFile], num_bytes: int) -> None:
        nic, address = Nic.of_process(), self._blocks[own.rank].data_ptr()
        nic.map(address, num_bytes, own.rank, own.opened, far)
        dropped = weakref.finalize(self, nic.drop, address)
        dropped.atexit = False

        def leave() -> None:
            dropped.detach()
            nic.free(address)

        self._leave_network, self.network = leave, nic.network

    def peer(self, rank: int) -> torch.Tensor:
        if rank not in self._blocks:
            raise BackendError(
                f"rank {rank} is of another node, whose memory is not mapped: kernels reach it by "
                "the verbs of moe_engine.device.network."
            )
        return self._blocks[rank]

    def free(self) -> None:
        self._leave_network()
        # A mapping ends with the last tensor on it: closing it sooner would crash a view's reader.
        self._blocks.clear()
        self.local = self.local.new_empty(0)
        self.peer_addresses = torch.zeros_like(self.peer_addresses)
        self.network = 0


def _map(file: File, num_bytes: int) -> torch.Tensor:
    """The file of a rank as a uint8 tensor. BackendError if it is gone or another one."""
    try:
        return torch.frombuffer(map_file(file.opened, num_bytes), dtype=torch.uint8)
    except OSError as error:
        raise BackendError(
            f"the memory of rank {file.rank}, process {file.pid}, cannot be mapped: {error}. "
            "Emulated ranks must be processes of one user that see each other in /proc: run them "
            "in one container, or in containers that share a PID namespace (docker run --pid=...)."
        ) from error
