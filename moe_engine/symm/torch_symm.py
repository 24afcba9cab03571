"""Symmetric memory of GPUs in one NVLink domain, by torch's own symmetric memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..errors import BackendError
from . import environment, exchange


class TorchTensor:
    """A `SymmetricTensor` on CUDA. The group may be CPU-only: ranks meet at its store."""

    def __init__(self, group: dist.ProcessGroup, num_bytes: int, device: torch.device):
        # Imported here: it needs a CUDA build of torch, and takes time.
        import torch.distributed._symmetric_memory as symm_mem

        def create() -> None:
            backend = symm_mem.get_backend(device)
            if backend != "CUDA":
                raise BackendError(
                    f"torch's symmetric memory is set to {backend}, and 'CUDA' is needed: unset "
                    "TORCH_SYMMMEM, or call torch's symm_mem.set_backend('CUDA') first"
                )
            # Not symm_mem.empty: its pool keeps memory and mappings after `free`.
            self.local = symm_mem._SymmetricMemory.empty_strided_p2p(
                (num_bytes,), (1,), torch.uint8, device
            )
            self.local.zero_()
            torch.cuda.synchronize(device)

        def meet() -> None:
            # torch makes a multicast object unless told not to: of no use here, and fragile.
            no_multicast = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
            with environment(no_multicast), torch.cuda.device(device):
                # The handle keeps the peers' blocks mapped.
                self._handle: Any = symm_mem.rendezvous(self.local, group)

        exchange(group, create)
        exchange(group, meet)
        self.peer_addresses = torch.tensor(
            self._handle.buffer_ptrs, dtype=torch.int64, device=device
        )

    def free(self) -> None:
        self._handle = None
        self.local = self.local.new_empty(0)
        self.peer_addresses = torch.zeros_like(self.peer_addresses)
