"""Where things lie in a Buffer's symmetric block.

The block holds the device context, flags and a ring of D slots. A call with epoch e uses slot e mod
D. A slot has one region per writing rank, so that a row's place is known to its sender without
asking:

    device context | notices
    done[R] | count_flags[R] | metadata_flags[R] | stage_flags[2, MAX_STAGES, R]
    chunk_flags[R, MAX_CHUNKS]
    slot 0 | slot 1 | ...
    slot   = region of rank 0 | region of rank 1 | ...
    region = signature, int32 [16] | counts, int32 [E + R] | row 0 | row 1 | ...  (dispatch)
             signature | row 0 | row 1 | ...                    (cached dispatch and combine)
             signature | counts, int32 [E] | rows by stage, int32 [S] | row 0 | ... (layer)

Example, R = 2, 4 tokens of rank 1 routed to ranks [0], [1], [0, 1], [0]: rank 1 writes tokens
0, 2, 3 as rows 0, 1, 2 of region 1 of rank 0's slot, and tokens 1, 2 as rows 0, 1 of region 1 of
its own. The rows to itself are metadata alone: their payload stays where it is, in x.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..device.context import MAX_STAGES, SIGNATURE_WORDS, ContextField
from ..errors import BackendError, CapacityError
from ..utils import FLAG_BYTES, LINE_BYTES, round_up
from .device_context import DeviceContext, head_bytes

if TYPE_CHECKING:
    from . import SymmetricTensor

BLOCK_ROWS = 32
"""Rows that a program places at a time."""
MAX_CHUNKS = 2048
"""Flags per writing rank: at most BLOCK_ROWS * MAX_CHUNKS rows between two ranks in one call."""
CHUNK_BYTES = 128 * 1024
"""Bytes to each rank behind one flag."""
SPAN_BYTES = 768 * 1024
"""Bytes that a program writes to each rank before it raises their flags, which waits until they
have arrived: some microseconds."""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """One row on the wire: payload, then metadata, opaque to the kernels that move it.

    payload | scales, 4 bytes each | expert ids int32 [K] | weights float32 [K] | source token
    int32, each part starting at a multiple of 16 bytes, the next row at one of LINE_BYTES;
    `num_topk` is 0 where rows carry no routing, `num_scales` where the payload has none. Ids,
    weights and token are written as one run.
    """

    payload_bytes: int
    num_topk: int = 0
    num_scales: int = 0

    @property
    def scales(self) -> int:
        return round_up(self.payload_bytes, 16)

    @property
    def ids(self) -> int:
        return self.scales + round_up(4 * self.num_scales, 16)

    @property
    def weights(self) -> int:
        return self.ids + round_up(4 * self.num_topk, 16)

    @property
    def token(self) -> int:
        return self.weights + round_up(4 * self.num_topk, 16)

    @property
    def num_bytes(self) -> int:
        return round_up(self.token + 16, LINE_BYTES)


@dataclass(frozen=True, slots=True)
class ReturnRowLayout:
    """One row of a layer's combine: payload, then its return metadata.

    payload | list int32 [MAX_STAGES] | dst_rows int32 [K] | weights float32 [K], each part starting
    at a multiple of 16 bytes, the next row at one of LINE_BYTES. The rank that returns row i writes
    its payload into the region of the token's rank; before that, the token's rank has written the
    metadata of row i into the same row of its own region of the returning rank: the rows and the
    weights of the experts' rows that row i sums. The list of row i holds the i-th row that returns
    in each stage.
    """

    payload_bytes: int
    num_topk: int

    @property
    def list_offset(self) -> int:
        return round_up(self.payload_bytes, 16)

    @property
    def dst_rows_offset(self) -> int:
        return self.list_offset + round_up(4 * MAX_STAGES.value, 16)

    @property
    def weights_offset(self) -> int:
        return self.dst_rows_offset + round_up(4 * self.num_topk, 16)

    @property
    def num_bytes(self) -> int:
        """No less than a `RowLayout` of this payload takes, with up to MAX_STAGES scales."""
        end = self.weights_offset + round_up(4 * self.num_topk, 16)
        return round_up(end + 16, LINE_BYTES)


def largest_region(num_bytes: int, num_regions: int) -> int:
    """Bytes of each of so many regions that `num_bytes` hold; not positive where none fit."""
    return num_bytes // num_regions // LINE_BYTES * LINE_BYTES


SIGNATURE_BYTES = 4 * SIGNATURE_WORDS.value
BARE_HEADER = round_up(SIGNATURE_BYTES, LINE_BYTES)
"""Bytes that precede the rows of a region where the call has a signature alone."""


def header_bytes(num_experts: int, num_ranks: int) -> int:
    """Bytes of the signature and counts that precede the rows of a region, a layer's included."""
    return round_up(SIGNATURE_BYTES + 4 * (num_experts + num_ranks + MAX_STAGES.value), LINE_BYTES)


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Offsets and sizes of the symmetric block: D * R * region_bytes and the flags."""

    num_ranks: int
    region_bytes: int
    num_slots: int = 2

    @classmethod
    def fit(cls, num_bytes: int, num_ranks: int, num_slots: int = 2) -> SlotLayout:
        """The largest regions that `num_bytes` hold."""
        flags = cls(num_ranks, 0, num_slots).slots
        region_bytes = largest_region(num_bytes - flags, num_slots * num_ranks)
        if region_bytes <= 0:
            raise CapacityError(
                f"a Buffer for {num_ranks} ranks got {num_bytes} bytes; its flags alone take "
                f"{flags}. Ask Buffer.size_hint(...) for the bytes a shape needs."
            )
        return cls(num_ranks, region_bytes, num_slots)

    @property
    def done(self) -> int:
        return head_bytes(self.num_ranks, self.num_slots)

    @property
    def count_flags(self) -> int:
        return self.done + self.num_ranks * FLAG_BYTES

    @property
    def metadata_flags(self) -> int:
        return self.count_flags + self.num_ranks * FLAG_BYTES

    @property
    def stage_flags(self) -> int:
        return self.metadata_flags + self.num_ranks * FLAG_BYTES

    @property
    def chunk_flags(self) -> int:
        return self.stage_flags + 2 * MAX_STAGES.value * self.num_ranks * FLAG_BYTES

    @property
    def slots(self) -> int:
        return round_up(self.chunk_flags + self.num_ranks * MAX_CHUNKS * FLAG_BYTES, 128)

    @property
    def num_bytes(self) -> int:
        return self.slots + self.num_slots * self.num_ranks * self.region_bytes

    def fields(self) -> dict[ContextField, int]:
        """What the device context says of it."""
        return {
            ContextField.DONE: self.done,
            ContextField.COUNT_FLAGS: self.count_flags,
            ContextField.METADATA_FLAGS: self.metadata_flags,
            ContextField.STAGE_FLAGS: self.stage_flags,
            ContextField.CHUNK_FLAGS: self.chunk_flags,
            ContextField.MAX_CHUNKS: MAX_CHUNKS,
            ContextField.SLOTS: self.slots,
        }

    most_rows = BLOCK_ROWS * MAX_CHUNKS
    """Rows one rank can send to another in one call, whatever the memory: there are flags for so
    many."""

    def max_rows(self, row_bytes: int, header_bytes: int = 0) -> int:
        """Rows one rank can send to another in one call."""
        return min((self.region_bytes - header_bytes) // row_bytes, self.most_rows)

    def chunk_rows(self, row_bytes: int) -> int:
        """Rows that share one arrival flag, equal on all ranks."""
        most = self.max_rows(row_bytes)
        rows = 8
        while rows * MAX_CHUNKS < most or (rows * row_bytes < CHUNK_BYTES and rows <= most // 128):
            rows *= 2
        return rows

    def span(self, row_bytes: int) -> int:
        """Chunks that a program writes before it raises their flags."""
        span = 1
        while span < 8 and span * self.chunk_rows(row_bytes) * row_bytes < SPAN_BYTES:
            span *= 2
        return span


class Slots:
    """A Buffer's symmetric block with its layout and device context. Making one is collective:
    `new_block(num_bytes, was_captured)` allocates, or raises on all ranks where one of them has
    captured the memory that this replaces. buffer, epoch: see `DeviceContext`.

    `expert_rows` is a second symmetric block, for the rows of a layer's experts, and which of them
    are copies (`fused_layer.expert_rows_bytes`); it has no slots, as all ranks are done with a
    layer before any sends rows of the next.
    """

    def __init__(
        self,
        new_block: Callable[[int, bool], SymmetricTensor],
        layout: SlotLayout,
        rank: int,
        timeout_s: float,
        was_captured: bool = False,
        buffer: int = 0,
        epoch: int = 0,
    ) -> None:
        self.layout, self._new_block = layout, new_block
        self.block = new_block(layout.num_bytes, was_captured)
        # Memory that takes the place of another goes on where that was: all calls so far are done.
        done = self.block.local[layout.done : layout.done + FLAG_BYTES * layout.num_ranks]
        done.view(torch.int64).fill_(epoch)
        self._expert_rows: SymmetricTensor | None = None
        self.context = DeviceContext(layout, rank, self.block, timeout_s, buffer, epoch)

    @property
    def num_ranks(self) -> int:
        return self.layout.num_ranks

    @property
    def expert_rows(self) -> SymmetricTensor:
        """See above; `reserve_expert_rows` has made them."""
        assert self._expert_rows is not None
        return self._expert_rows

    def reserve_expert_rows(self, num_bytes: int, was_captured: bool) -> None:
        """Make `expert_rows` at least that large. Collective where they are not: all ranks ask for
        the same. BackendError in a CUDA graph's capture; was_captured: see above."""
        rows = self._expert_rows
        if rows is not None and rows.local.numel() >= num_bytes:
            return
        if self.context.fields.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                raise BackendError(
                    f"a layer's first call with {num_bytes} bytes of expert rows allocates them, "
                    "which cannot be captured; call it once before the capture."
                )
            torch.cuda.synchronize(self.context.fields.device)
        self._expert_rows = self._new_block(num_bytes, was_captured and rows is not None)
        if rows is not None:
            rows.free()

    def free(self) -> None:
        """Give the memory back. The caller has made sure that no kernel uses it any more."""
        self.block.free()
        if self._expert_rows is not None:
            self._expert_rows.free()
