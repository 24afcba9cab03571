"""Symmetric memory of one rank: a plain allocation."""

from __future__ import annotations

import torch


class SingleTensor:
    """A `SymmetricTensor` without peers, on any device."""

    network = 0

    def __init__(self, num_bytes: int, device: torch.device):
        self.local = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.peer_addresses = torch.tensor([self.local.data_ptr()], device=device)

    def peer(self, rank: int) -> torch.Tensor:
        return self.local

    def free(self) -> None:
        self.local = self.local.new_empty(0)
        self.peer_addresses = torch.zeros_like(self.peer_addresses)
