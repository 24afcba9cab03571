"""How a rank tells the others that its calls have ended, and why.

Each block has a notice from each rank: the error's type, a zero, the text, zeros; and after all of
them a refusal from each rank: which call it refused last, and why.
"""

from __future__ import annotations

import time
from contextlib import suppress

import torch

from ..device.context import TOLD_BIT, ContextField
from ..errors import (
    BackendError,
    CallAbandoned,
    CapacityError,
    DtypeError,
    MoeEngineError,
    OutOfStep,
    RoutingError,
    ShapeError,
    TooManyTokens,
)
from ..hardware import outside_capture
from ..launch import launch, load
from .base import SymmetricTensor
from .notice_kernels import tell_far_ranks_kernel

NOTICE_BYTES = 1024
"""The bytes of a notice. Longer texts are cut."""
TOLD_BYTE = 8 * ContextField.BROKEN + TOLD_BIT // 8
"""Where peers say that a notice has come: the offset in a block, in bytes."""
SENDING_S = 1.0
"""How long the host waits at most until its notices to other nodes are on their way."""
TOLD_AS_THEY_ARE = (
    ShapeError,
    DtypeError,
    CapacityError,
    TooManyTokens,
    RoutingError,
    BackendError,
    OutOfStep,
)
"""Errors that the other ranks raise as the same type; others become a CallAbandoned."""


class Notices:
    """The notices of `num_ranks` ranks from byte `offset` on in the block of `rank`, which begins
    with its device context. near: the ranks whose blocks are mapped here, this one among them."""

    def __init__(
        self, block: SymmetricTensor, offset: int, rank: int, num_ranks: int, near: list[int]
    ):
        self._block, self._offset, self._rank = block, offset, rank
        self._num_ranks, self._near = num_ranks, near
        self._device = block.local.device
        self._memory = torch.zeros(  # a notice, and the byte
            NOTICE_BYTES + 1, dtype=torch.uint8, device="cpu", pin_memory=block.local.is_cuda
        )

    def load(self) -> None:
        """Compile and load what `send` launches, if it has to: at the time of a failure that would
        come late, or have to wait for the kernels that wait for this rank."""
        if len(self._near) < self._num_ranks:
            load(tell_far_ranks_kernel, (1,), *self._far_arguments(self._rank, TOLD_BYTE))
            load(tell_far_ranks_kernel, (1,), *self._far_arguments(self._refusal, None))

    def send_refusal(self, text: str) -> None:
        """Store on all ranks what this rank has refused. Publish: the copies to ranks of this node
        end before this returns, and so before the host launches a call whose signature counts the
        refusal; what goes to other nodes is fenced, see `tell_far_ranks_kernel`."""
        data = text.encode()[: NOTICE_BYTES - 1]
        memory = torch.zeros(NOTICE_BYTES, dtype=torch.uint8, device="cpu")
        memory[: len(data)] = torch.tensor(list(data), dtype=torch.uint8, device="cpu")
        at = self._offset + self._refusal * NOTICE_BYTES
        with suppress(RuntimeError), outside_capture(self._device) as synchronise:
            for rank in self._near:
                self._block.peer(rank)[at : at + NOTICE_BYTES].copy_(memory)
            synchronise()
            if len(self._near) < self._num_ranks:
                launch(tell_far_ranks_kernel, (1,), *self._far_arguments(self._refusal, None))
                _wait_for_stream(self._device)

    def refusal(self, rank: int) -> str:
        """What another rank has refused last."""
        at = self._offset + (self._num_ranks + rank) * NOTICE_BYTES
        with suppress(RuntimeError), outside_capture(self._device):
            told = self._block.local[at : at + NOTICE_BYTES].cpu().tolist()
            return bytes(told).rstrip(b"\0").decode(errors="replace")
        return ""

    @property
    def _refusal(self) -> int:
        """The number of this rank's refusal among notices and refusals."""
        return self._num_ranks + self._rank

    def send(self, kind: str, text: str, to_peers: bool) -> None:
        """Store the type and the text of an error, and then the byte at TOLD_BYTE, on this rank,
        and with `to_peers` on all ranks; kernels there report the byte to their host, which reads
        the notice. Does what the device still takes, and raises no RuntimeError where it fails.

        Publish: each copy to a rank of this node ends before the next one begins, the byte last.
        This rank is among them, so that its own kernels end and leave room for the launch that
        follows all copies: it sends both from this rank's block to the ranks of other nodes, see
        `tell_far_ranks_kernel`.

        All have a stream of their own, since the current one may hold a kernel that waits. The host
        waits for the copies, and for the launch until SENDING_S at most. That launch waits for no
        other rank: NVSHMEM takes its requests at once, unless the queue is full; its fence waits,
        with IBGDA, until the adapter has delivered what this rank has sent, or has given up on a
        rank that is gone; by the proxy for nothing. In the emulation a full queue has a deadline.
        """
        data = f"{kind}\0{text}".encode()[: NOTICE_BYTES - 1]
        self._memory.zero_()
        self._memory[: len(data)] = torch.tensor(list(data), dtype=torch.uint8, device="cpu")
        self._memory[-1] = 1
        at = self._offset + self._rank * NOTICE_BYTES
        with suppress(RuntimeError), outside_capture(self._device) as synchronise:
            for rank in self._near if to_peers else (self._rank,):
                block = self._block.peer(rank)
                block[at : at + NOTICE_BYTES].copy_(self._memory[:-1], non_blocking=True)
                block[TOLD_BYTE : TOLD_BYTE + 1].copy_(self._memory[-1:], non_blocking=True)
            synchronise()
            if to_peers and len(self._near) < self._num_ranks:
                launch(tell_far_ranks_kernel, (1,), *self._far_arguments(self._rank, TOLD_BYTE))
                _wait_for_stream(self._device)

    def _far_arguments(self, number: int, told_byte: int | None) -> tuple[object, ...]:
        """The arguments of the launch that tells the ranks of other nodes, by the notice or
        refusal of this number."""
        context = self._block.local[: self._offset].view(torch.int64)
        return context, self._offset + number * NOTICE_BYTES, NOTICE_BYTES, told_byte

    def read(self) -> MoeEngineError:
        """The error that another rank has told; of several, that of the first rank."""
        end = self._offset + self._num_ranks * NOTICE_BYTES
        with suppress(RuntimeError), outside_capture(self._device):
            notices = self._block.local[self._offset : end].cpu()
            for notice in notices.view(-1, NOTICE_BYTES).tolist():
                kind, _, text = bytes(notice).rstrip(b"\0").decode(errors="replace").partition("\0")
                if text:
                    return told_error(kind, text)
        return CallAbandoned("another rank abandoned a call of this Buffer. Make a new Buffer.")


def told_error(kind: str, text: str) -> MoeEngineError:
    """The error that a rank raises which was told of one of this type."""
    text = f"{text} Make a new Buffer." if not text.endswith("new Buffer.") else text
    for known in TOLD_AS_THEY_ARE:
        if known.__name__ == kind:
            return known(text)
    return CallAbandoned(text)


def _wait_for_stream(device: torch.device) -> None:
    """Wait until the current stream has done all, SENDING_S at most."""
    if device.type == "cuda":
        deadline = time.monotonic() + SENDING_S
        while not torch.cuda.current_stream(device).query() and time.monotonic() < deadline:
            time.sleep(0.001)
