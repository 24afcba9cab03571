"""Where things lie in a Buffer's symmetric block.

The block holds the device context, flags and a ring of D slots. A call with epoch e uses slot e mod
D. A slot has one region per writing rank, so that a sender knows where its rows go without asking:

    device context | notices
    done[R] | count_flags[R] | metadata_flags[R] | stage_flags[2, MAX_STAGES, R]
    chunk_flags[R, MAX_CHUNKS]
    slot 0 | slot 1 | ... | network headers
    slot   = region of rank 0 | region of rank 1 | ... | regions of the network
    region = signature, int32 [16] | counts, int32 [E + R] | row 0 | row 1 | ...  (dispatch)
             signature | row 0 | row 1 | ...                    (cached dispatch and combine)
             signature | counts, int32 [E] | rows by stage, int32 [S] | row 0 | ... (layer)

On several nodes the region of a rank of another node is written by its rail peer, the rank of this
node that forwards its rows. Two more regions for each node hold rows that arrive from it over the
network, and rows that are sent to it; as many headers precede them (`internode_rows_offset`). Flags
have more writers then, see `SlotLayout.num_writers`. On nodes of one rank rows stay in the region
in which they arrive.

Example, R = 2, 4 tokens of rank 1 routed to ranks [0], [1], [0, 1], [0]: rank 1 writes tokens
0, 2, 3 as rows 0, 1, 2 of region 1 of rank 0's slot, and tokens 1, 2 as rows 0, 1 of region 1 of
its own. The rows to itself are metadata alone: their payload stays where it is, in x.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..callers import Callers
from ..checks import MAX_EXPERTS
from ..device.context import MAX_STAGES, SIGNATURE_WORDS, ContextField
from ..device.slots import Row
from ..errors import BackendError
from ..utils import FLAG_BYTES, LINE_BYTES, round_up
from .base import SymmetricTensor
from .layout import BlockLayout, RankMemory, WireRow

BLOCK_ROWS = 32
"""Rows whose destinations a program computes at a time."""
MAX_CHUNKS = 2048
"""Flags per writing rank: at most BLOCK_ROWS * MAX_CHUNKS rows between two ranks in one call."""
CHUNK_BYTES = 128 * 1024
"""Bytes to each rank that one flag announces."""
SPAN_BYTES = 768 * 1024
"""Bytes that a program writes to each rank before it raises their flags, which waits until they
have arrived: some microseconds."""


@dataclass(frozen=True, slots=True)
class RowLayout(WireRow):
    """One row on the wire, whose trailer is its metadata, opaque to the kernels that move it:
    expert ids int32 [K] | weights float32 [K] | source token int32, each part starting at a
    multiple of 16 bytes, the next row at one of LINE_BYTES. Ids, weights and token are written as
    one run.
    """

    @property
    def ids(self) -> int:
        return self.trailer

    @property
    def weights(self) -> int:
        return self.ids + round_up(4 * self.num_topk, 16)

    @property
    def token(self) -> int:
        return self.weights + round_up(4 * self.num_topk, 16)

    @property
    def num_bytes(self) -> int:
        return round_up(self.token + 16, LINE_BYTES)


@functools.cache
def row_in_region(row: RowLayout, header_bytes: int) -> Row:
    """What kernels are told of rows that follow `header_bytes` of a region."""
    return Row(header_bytes, row.num_bytes, row.scales, row.ids, row.weights, row.token)


def num_passes(num_ranks: int, capacity: float) -> int:
    """In how many passes a layer runs whose rows have no room otherwise; 1: all have room."""
    return math.ceil(num_ranks / capacity)


def slice_size(num_tokens: int, num_passes: int) -> int:
    """Tokens of a slice of a layer in passes, all tokens for 1. Others are multiples of 4: so ids
    and weights of each begin at a multiple of 16 bytes, as those of all tokens do, and need no
    other kernels."""
    return num_tokens if num_passes == 1 else round_up(-(-num_tokens // num_passes), 4)


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


SIGNATURE_BYTES = 4 * SIGNATURE_WORDS.value
BARE_HEADER = round_up(SIGNATURE_BYTES, LINE_BYTES)
"""Bytes that precede the rows of a region where the call has a signature alone."""


def header_bytes(num_experts: int, num_ranks: int) -> int:
    """Bytes of the signature and counts that precede the rows of a region, a layer's included."""
    return round_up(SIGNATURE_BYTES + 4 * (num_experts + num_ranks + MAX_STAGES.value), LINE_BYTES)


def internode_rows_offset(num_experts: int, num_ranks: int) -> int:
    """Where the header that a rank sends to another node says where each row goes, in bytes, after
    the signature, int32 [16], and counts, int32 [E + R + 2]: rows for each expert and rank, most
    rows for any node, rows for this node. Each of these has a byte for each rank of the node."""
    return round_up(SIGNATURE_BYTES + 4 * (num_experts + num_ranks + 2), 16)


@dataclass(frozen=True, slots=True)
class SlotLayout(BlockLayout):
    """Offsets and sizes of the block of normal calls."""

    flags_per_rank = MAX_CHUNKS
    too_small = (
        "a Buffer for {num_ranks} ranks got {num_bytes} bytes; its flags alone take {flags}. Ask "
        "Buffer.size_hint(...) for the bytes a shape needs."
    )

    def num_flags(self) -> dict[ContextField, int]:
        num_writers = self.num_writers
        return {
            ContextField.DONE: num_writers,
            ContextField.COUNT_FLAGS: num_writers,
            ContextField.METADATA_FLAGS: self.num_ranks,
            ContextField.STAGE_FLAGS: 2 * MAX_STAGES.value * self.num_ranks,
            ContextField.CHUNK_FLAGS: num_writers * MAX_CHUNKS,
        }

    @property
    def rows_stay(self) -> bool:
        """Whether rows that arrive over the network are read where they arrive: on nodes of one
        rank, which has nothing to forward."""
        return self.num_nodes > 1 and self.ranks_per_node == 1

    @property
    def network_headers(self) -> int:
        """Where the headers begin that go over the network before rows do, in bytes: after the
        slots. Each slot has two for each node, as it has regions."""
        return self.slots + self.num_slots * self.num_regions * self.region_bytes

    @property
    def network_header_bytes(self) -> int:
        """The bytes of one network header, with the most experts and rows: see
        `internode_rows_offset`."""
        if self.num_nodes == 1:
            return 0
        rows_at = internode_rows_offset(MAX_EXPERTS, self.num_ranks)
        return round_up(rows_at + self.max_rows(LINE_BYTES) * self.ranks_per_node, LINE_BYTES)

    @property
    def num_bytes(self) -> int:
        num_headers = self.num_slots * 2 * self.num_nodes
        return self.network_headers + num_headers * self.network_header_bytes

    def fields(self) -> dict[ContextField, int]:
        return super(SlotLayout, self).fields() | {
            ContextField.HEADERS: self.network_headers,
            ContextField.HEADER_BYTES: self.network_header_bytes,
        }

    @property
    def num_writers(self) -> int:
        """Writers of flags: the ranks, and in each slot one for each other node. Two sets of one
        flag may arrive in any order over the network, so calls in flight do not share one."""
        return self.num_ranks + (self.num_slots * self.num_nodes if self.num_nodes > 1 else 0)

    most_rows = BLOCK_ROWS * MAX_CHUNKS
    """Rows one rank can send to another in one call, however large the memory: there are flags for
    so many."""

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


class Slots(RankMemory[SlotLayout]):
    """A Buffer's symmetric block with its layout and device context. Making one is collective:
    `new_block(num_bytes, was_captured)` allocates, or raises on all ranks where one of them has
    captured the memory that this replaces. buffer, epoch, callers: see `DeviceContext`.

    `expert_rows` is a second symmetric block, for the rows of a layer's experts, and which of them
    are copies (`fused_layer.expert_rows_bytes`); it has no slots, as all ranks are done with a
    layer before any sends rows of the next. There is room for `capacity` times the rows of balanced
    routing, and for those of a slice of the tokens (`slice_size`), whichever experts they choose.
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
        capacity: float | None = None,
        callers: Callers | None = None,
    ) -> None:
        self.capacity = capacity or layout.num_ranks
        self.num_passes = num_passes(layout.num_ranks, self.capacity)
        block = new_block(layout.num_bytes, was_captured)
        # Memory that replaces other memory begins after its last epoch: all calls so far are done.
        done = layout.offsets()[ContextField.DONE]
        flags = block.local[done : done + FLAG_BYTES * layout.num_writers]
        flags.view(torch.int64).fill_(epoch)
        super().__init__(layout, rank, block, timeout_s, buffer, epoch, callers)
        self._new_block = new_block
        self._expert_rows: SymmetricTensor | None = None

    def room_for(self, max_tokens: int, num_topk: int) -> int:
        """For how many rows of a rank's experts there is room in a layer of so many tokens."""
        of_slices = self.num_ranks * slice_size(max_tokens, self.num_passes)
        return num_topk * max(of_slices, math.ceil(self.capacity * max_tokens))

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
        self._expert_rows = new = self._new_block(num_bytes, was_captured and rows is not None)
        self.held[2:] = [new.local, new.peer_addresses]
        self.calls.clear()
        if rows is not None:
            rows.free()

    def free(self) -> None:
        super().free()
        if self._expert_rows is not None:
            self._expert_rows.free()
