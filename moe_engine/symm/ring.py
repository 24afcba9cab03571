"""Where things lie in the memory of the low-latency calls: a ring of slots, one call each.

    device context | notices
    done[D, R] | counts[D, R, MAX_COUNTS] | row_flags[D, R, MAX_ROWS]
    slot 0 | slot 1 | ...
    slot   = region of rank 0 | region of rank 1 | ...       (written by that rank)
    region = message | row 0 | row 1 | ...

Row t is that of token t, see `LowLatencyRow`. The message is a combine's: routing weights, float32
[T, K]. What a dispatch tells beside its rows are words of `counts`, each with its epoch.

Unlike `slots.py`, flags belong to a slot, not to the Buffer: calls may be received in any order, as
hooks are called. A flag is raised to the epoch of the call that uses the slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..checks import MAX_LOW_LATENCY_TOKENS
from ..device.context import ContextField
from ..device.ring import FIELDS, MAX_COUNTS
from ..errors import CapacityError
from ..utils import FLAG_BYTES, LINE_BYTES, round_up
from .device_context import DeviceContext, head_bytes
from .slots import largest_region

if TYPE_CHECKING:
    from . import SymmetricTensor

MAX_ROWS = MAX_LOW_LATENCY_TOKENS
"""Rows from one rank to another in a call."""
MAX_LOCAL_EXPERTS = MAX_COUNTS.value - FIELDS.value
"""Experts of a rank."""
HINT_TOPK = 32
"""Lanes that a size hint makes room for, which is not told how many there are."""


@dataclass(frozen=True, slots=True)
class LowLatencyRow:
    """One row on its way: payload | scales, 4 bytes each | record, each at a multiple of 16 bytes.

    The record, int32: for each lane its expert at the receiver, -1 elsewhere [K] | how many tokens
    of its rank before this one have that expert [K] | routing weights, float32 [K].
    """

    payload_bytes: int
    num_topk: int = 0
    num_scales: int = 0

    @property
    def scales(self) -> int:
        return round_up(self.payload_bytes, 16)

    @property
    def record(self) -> int:
        return self.scales + round_up(4 * self.num_scales, 16)

    @property
    def num_bytes(self) -> int:
        return round_up(self.record + 12 * self.num_topk, LINE_BYTES)


def message_bytes(max_tokens: int, num_topk: int) -> int:
    """Bytes of the message of a combine."""
    return round_up(4 * max_tokens * num_topk, LINE_BYTES)


def region_bytes(max_tokens: int, num_topk: int, hidden_bytes: int) -> int:
    """Bytes of a region for calls of up to `max_tokens` rows of `hidden_bytes` payload."""
    row = LowLatencyRow(hidden_bytes, num_topk)
    return message_bytes(max_tokens, num_topk) + max_tokens * row.num_bytes


@dataclass(frozen=True, slots=True)
class RingLayout:
    """Offsets and sizes of the low-latency memory: num_slots * num_ranks * region_bytes, and
    flags."""

    num_ranks: int
    region_bytes: int
    num_slots: int = 2

    @classmethod
    def fit(cls, num_bytes: int, num_ranks: int, num_slots: int = 2) -> RingLayout:
        """The largest regions that `num_bytes` hold."""
        flags = cls(num_ranks, 0, num_slots).slots
        region_bytes = largest_region(num_bytes - flags, num_slots * num_ranks)
        if region_bytes <= 0:
            raise CapacityError(
                f"low-latency calls of {num_ranks} ranks got num_rdma_bytes = {num_bytes}; their "
                f"flags alone take {flags}. Ask Buffer.get_low_latency_rdma_size_hint(...)."
            )
        return cls(num_ranks, region_bytes, num_slots)

    @property
    def done(self) -> int:
        return head_bytes(self.num_ranks, self.num_slots)

    @property
    def counts(self) -> int:
        return self.done + self.num_slots * self.num_ranks * FLAG_BYTES

    @property
    def row_flags(self) -> int:
        return self.counts + self.num_slots * self.num_ranks * MAX_COUNTS.value * FLAG_BYTES

    @property
    def slots(self) -> int:
        flags = self.num_slots * self.num_ranks * MAX_ROWS * FLAG_BYTES
        return round_up(self.row_flags + flags, LINE_BYTES)

    @property
    def num_bytes(self) -> int:
        return self.slots + self.num_slots * self.num_ranks * self.region_bytes

    def fields(self) -> dict[ContextField, int]:
        """What the device context says of it."""
        return {
            ContextField.DONE: self.done,
            ContextField.COUNT_FLAGS: self.counts,
            ContextField.CHUNK_FLAGS: self.row_flags,
            ContextField.MAX_CHUNKS: MAX_ROWS,
            ContextField.SLOTS: self.slots,
        }


class Ring:
    """The memory of low-latency calls with its layout and device context. `new_block(num_bytes)`
    makes it, collectively."""

    def __init__(
        self,
        new_block: Callable[[int], SymmetricTensor],
        layout: RingLayout,
        rank: int,
        timeout_s: float,
    ) -> None:
        self.layout = layout
        self.block = new_block(layout.num_bytes)
        self.context = DeviceContext(layout, rank, self.block, timeout_s)
        self.context.epoch_is_running = True

    @property
    def num_ranks(self) -> int:
        return self.layout.num_ranks
