"""The memory of low-latency calls of ranks on several nodes: a lane for each call in flight.

A lane is a Buffer's block as `slots.py` has it, with one slot. Call n takes lane n mod D, where D
is the number of calls that may be in flight: so calls may be received in any order, as hooks are
called, and each lane has flags and epochs of its own. A lane's calls are numbered from
`LANE_CALLS` times its own number on, so that a handle tells which call of which lane it is of.

A combine's routing weights follow its signature, in regions and in what goes over the network:

    region = signature, int32 [16] | routing weights, float32 [T, K] | row 0 | row 1 | ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..callers import Callers
from ..utils import LINE_BYTES, round_up
from .base import SymmetricTensor
from .ring import MAX_LOCAL_EXPERTS, MAX_ROWS, RingLayout
from .slots import SIGNATURE_BYTES, RowLayout, SlotLayout, Slots, header_bytes

LANE_CALLS = 1_000_000


def weights_header_bytes(max_tokens: int, num_topk: int) -> int:
    """Bytes of a combine's signature and weights, which precede the rows of a region."""
    return round_up(SIGNATURE_BYTES + 4 * max_tokens * num_topk, LINE_BYTES)


@dataclass(frozen=True, slots=True)
class LaneLayout(SlotLayout):
    """Offsets and sizes of the block of a lane."""

    @classmethod
    def of_ring(cls, ring: RingLayout, num_nodes: int) -> LaneLayout:
        """A lane for any call that a slot of this ring would hold: rows take no more than there,
        and counts, which the ring keeps elsewhere, are added."""
        counts = header_bytes(ring.num_ranks * MAX_LOCAL_EXPERTS, ring.num_ranks)
        return cls(ring.num_ranks, ring.region_bytes + counts, 1, num_nodes)

    @property
    def network_header_bytes(self) -> int:
        """At least what goes before a combine's rows: weights take less than a quarter of a region,
        as the row of a token takes at least 12 bytes for each of its weights."""
        weights = round_up(SIGNATURE_BYTES + self.region_bytes // 4, LINE_BYTES)
        return max(super(LaneLayout, self).network_header_bytes, weights)

    def fits(self, max_tokens: int, num_topk: int, num_experts: int, row: RowLayout) -> bool:
        """Whether a dispatch of up to so many such rows of a rank, and its combine, which takes
        bf16 ones, have room."""
        header = header_bytes(num_experts, self.num_ranks)
        weights = weights_header_bytes(max_tokens, num_topk)
        room = self.region_bytes - max(header, weights)
        fits_header = weights <= self.network_header_bytes
        return max_tokens <= MAX_ROWS and max_tokens * row.num_bytes <= room and fits_header


def new_lanes(
    new_block: Callable[[int], SymmetricTensor],
    layout: LaneLayout,
    num_lanes: int,
    rank: int,
    timeout_s: float,
    buffer: int,
    callers: Callers | None = None,
) -> list[Slots]:
    """Memory for `num_lanes` calls in flight. Collective; `new_block(num_bytes)` allocates. buffer,
    callers: see `DeviceContext`."""

    def allocate(num_bytes: int, was_captured: bool) -> SymmetricTensor:
        return new_block(num_bytes)

    return [
        Slots(allocate, layout, rank, timeout_s, False, buffer, lane * LANE_CALLS, callers=callers)
        for lane in range(num_lanes)
    ]
