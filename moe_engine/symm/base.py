"""What all backends of symmetric memory share: their protocol, this host's name, its variables."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch


class SymmetricTensor(Protocol):
    """This rank's block, and the addresses of all ranks' blocks as mapped here."""

    local: torch.Tensor
    """uint8 [num_bytes] on the device, zeroed; empty after `free`."""
    peer_addresses: torch.Tensor
    """int64 [R] on the device, the own address included; 0 for ranks of other nodes, which are not
    mapped, and after `free`."""
    network: int
    """What the field NETWORK of a device context holds, see `device.context`; 0 where all ranks are
    of one node, and after `free`."""

    def peer(self, rank: int) -> torch.Tensor:
        """The block of `rank`, as mapped here; not after `free`. BackendError for a rank of another
        node."""

    def free(self) -> None:
        """Give the memory back; the second call does nothing. No rank may use the block any more.
        What this rank has sent to other nodes is delivered before.

        Views of `local` stay valid and keep this rank's own block alive.
        """


def this_host() -> str:
    """A name that two ranks share only on one host: containers may share or change hostnames."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return boot_id.read_text() if boot_id.exists() else socket.gethostname()


@contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Change the environment of this process for a while."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
