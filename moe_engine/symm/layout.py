"""What the memory of normal calls (`slots.py`) and of low-latency calls (`ring.py`) has in common.

A symmetric block holds the device context, the notices of the ranks, flags, and a ring of D slots.
A slot has one region for each rank, which that rank writes:

    device context | notices | flags of one kind | flags of another kind | ...
    slot 0 | slot 1 | ...
    slot = region of rank 0 | region of rank 1 | ...
    region = header | row 0 | row 1 | ...
    row = payload | scales | trailer
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Generic, Self, TypeVar

from ..callers import Callers
from ..device.context import ContextField
from ..errors import CapacityError
from ..prepared import PreparedCalls
from ..utils import FLAG_BYTES, LINE_BYTES, round_up
from .base import SymmetricTensor
from .device_context import DeviceContext, head_bytes


@dataclass(frozen=True, slots=True)
class WireRow:
    """One row on the wire: payload | scales, 4 bytes each | trailer. Each part starts at a multiple
    of 16 bytes. `num_topk` is 0 where the trailer carries no routing, `num_scales` where the
    payload has no scales."""

    payload_bytes: int
    num_topk: int = 0
    num_scales: int = 0

    @property
    def scales(self) -> int:
        return round_up(self.payload_bytes, 16)

    @property
    def trailer(self) -> int:
        return self.scales + round_up(4 * self.num_scales, 16)


@dataclass(frozen=True, slots=True)
class BlockLayout(ABC):
    """Offsets and sizes of a symmetric block, in bytes; a subclass says which flags it has."""

    flags_per_rank: ClassVar[int]
    """Flags with which one rank announces rows in one call."""
    too_small: ClassVar[str]
    """The CapacityError where the flags leave no room: a format of num_ranks, num_bytes, flags."""

    num_ranks: int
    region_bytes: int
    num_slots: int = 2
    num_nodes: int = 1

    @abstractmethod
    def num_flags(self) -> dict[ContextField, int]:
        """How many flags of each kind the block has, in the order in which they lie."""

    @classmethod
    def fit(cls, num_bytes: int, num_ranks: int, num_slots: int = 2, num_nodes: int = 1) -> Self:
        """The layout with the largest regions that `num_bytes` hold. What several nodes need for
        the network comes on top: as many tokens fit as on one node."""
        flags = cls(num_ranks, 0, num_slots).slots
        region_bytes = (num_bytes - flags) // (num_slots * num_ranks) // LINE_BYTES * LINE_BYTES
        if region_bytes <= 0:
            raise CapacityError(
                cls.too_small.format(num_ranks=num_ranks, num_bytes=num_bytes, flags=flags)
            )
        return cls(num_ranks, region_bytes, num_slots, num_nodes)

    @property
    def ranks_per_node(self) -> int:
        return self.num_ranks // self.num_nodes

    @property
    def num_regions(self) -> int:
        """Regions of a slot: one for each rank; on several nodes two more for each node, for what
        arrives from it and for what is sent to it."""
        return self.num_ranks + (2 * self.num_nodes if self.num_nodes > 1 else 0)

    def offsets(self) -> dict[ContextField, int]:
        """Where the flags of each kind begin, and after them the slots."""
        offset, offsets = head_bytes(self.num_ranks, self.num_slots), {}
        for kind, count in self.num_flags().items():
            offsets[kind] = offset
            offset += count * FLAG_BYTES
        return offsets | {ContextField.SLOTS: round_up(offset, LINE_BYTES)}

    @property
    def slots(self) -> int:
        return self.offsets()[ContextField.SLOTS]

    @property
    def num_bytes(self) -> int:
        return self.slots + self.num_slots * self.num_regions * self.region_bytes

    def fields(self) -> dict[ContextField, int]:
        """The fields of the device context that describe the layout."""
        return self.offsets() | {
            ContextField.MAX_CHUNKS: self.flags_per_rank,
            ContextField.NODE_RANKS: self.ranks_per_node,
            ContextField.NUM_REGIONS: self.num_regions,
        }


L = TypeVar("L", bound=BlockLayout)


class RankMemory(Generic[L]):
    """This rank's symmetric block, its layout, the device context at its head, and the calls that
    were prepared for it. `held`: tensors on this memory, which prepared calls use besides their
    arguments. buffer, epoch, callers: see `DeviceContext`."""

    def __init__(
        self,
        layout: L,
        rank: int,
        block: SymmetricTensor,
        timeout_s: float,
        buffer: int = 0,
        epoch: int = 0,
        callers: Callers | None = None,
    ) -> None:
        self.layout, self.block = layout, block
        about = buffer, epoch, callers
        self.context = context = DeviceContext(layout, rank, block, timeout_s, *about)
        self.held = [block.local, block.peer_addresses]
        self.calls = PreparedCalls(self.held, context.first_use, context)

    @property
    def num_ranks(self) -> int:
        return self.layout.num_ranks

    def free(self) -> None:
        """Give the memory back. The caller has made sure that no kernel uses it any more."""
        self.calls.clear()
        self.block.free()
        # Views would keep the memory until this is collected.
        self.held.clear()
        self.context.fields = self.context.fields.new_empty(0)
