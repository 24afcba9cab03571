"""Where things lie in a Buffer's symmetric block, and the device context that says so to kernels.

The block holds flags and a ring of D slots. A call with epoch e uses slot e mod D. A slot has one
region per writing rank, so that a row's place is known to its sender without asking:

    done[R] | count_flags[R] | metadata_flags[R] | stage_flags[2, MAX_STAGES, R]
    chunk_flags[R, MAX_CHUNKS]
    slot 0 | slot 1 | ...
    slot   = region of rank 0 | region of rank 1 | ...
    region = signature, int32 [8] | counts, int32 [E + R] | row 0 | row 1 | ...   (dispatch)
             row 0 | row 1 | ...                                                  (combine)
             signature | counts, int32 [E] | rows by stage, int32 [S] | row 0 | ... (layer)

Example, R = 2, 4 tokens of rank 1 routed to ranks [0], [1], [0, 1], [0]: rank 1 writes tokens
0, 2, 3 as rows 0, 1, 2 of region 1 of rank 0's slot, and tokens 1, 2 as rows 0, 1 of region 1 of
its own. The rows to itself are metadata alone: their payload stays where it is, in x.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from .context import MAX_STAGES, Phase, Report, Word
from .errors import (
    BackendError,
    CapacityError,
    PeerTimeout,
    RoutingError,
    ShapeError,
    bad_ids,
)
from .hardware import pace_ps_per_kb
from .lang import INTERPRETED

if TYPE_CHECKING:
    from .symm import SymmetricTensor

BLOCK_ROWS = 32
"""Rows that a program places at a time."""
MAX_CHUNKS = 2048
"""Flags per writing rank: at most BLOCK_ROWS * MAX_CHUNKS rows between two ranks in one call."""
CHUNK_BYTES = 128 * 1024
"""Bytes to each rank behind one flag."""
SPAN_BYTES = 768 * 1024
"""Bytes that a program writes to each rank before it raises their flags, which waits until they
have arrived: some microseconds."""
FLAG_BYTES = 8
LINE_BYTES = 128
"""Rows begin at multiples of this, as the memory's lines do: gathered elsewhere, a GEMM's rows take
two lines where one would do, and DeepSeek-V3's up-projection 40% longer."""
COMPILE_S = 300.0
"""Added to the deadline while kernels may still be compiling on some rank."""


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def next_power_of_2(value: int) -> int:
    """Smallest power of 2 that is at least `value`, 1 for 0. `triton.next_power_of_2` is made for
    kernels, and on the host takes microseconds, of which a call would need tens."""
    return 1 << max(0, value - 1).bit_length()


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


def layer_row(payload_bytes: int, num_topk: int) -> RowLayout:
    """A row of a layer on its way back. Behind it, written by the token's rank beforehand, is the
    record of row i: in place of scales, the i-th row of each stage of the way back; in place of
    ids, the places of its expert rows; their weights."""
    return RowLayout(payload_bytes, num_topk, MAX_STAGES.value)


def largest_region(num_bytes: int, num_regions: int) -> int:
    """Bytes of each of so many regions that `num_bytes` hold; not positive where none fit."""
    return num_bytes // num_regions // LINE_BYTES * LINE_BYTES


SIGNATURE_BYTES = 32


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
        return 0

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

    def words(self) -> dict[Word, int]:
        """What the device context says of it."""
        return {
            Word.DONE: self.done,
            Word.COUNT_FLAGS: self.count_flags,
            Word.METADATA_FLAGS: self.metadata_flags,
            Word.STAGE_FLAGS: self.stage_flags,
            Word.CHUNK_FLAGS: self.chunk_flags,
            Word.MAX_CHUNKS: MAX_CHUNKS,
            Word.SLOTS: self.slots,
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


class Layout(Protocol):
    """Where things lie in a block: `SlotLayout`, or `ring.RingLayout` of low-latency calls."""

    @property
    def num_ranks(self) -> int: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def region_bytes(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def words(self) -> dict[Word, int]: ...


class DeviceContext:
    """The int64 words that communication kernels read (`context.Word`), and their report.

    `words` lives on the device; `report` in host memory that the device can write, so that the
    host learns of an expired wait without a synchronisation.
    """

    def __init__(self, layout: Layout, rank: int, peers: torch.Tensor, timeout_s: float):
        device = peers.device
        self.rank, self.layout, self.timeout_s = rank, layout, timeout_s
        self.spans: torch.Tensor | None = None
        self._known_bad_ids = 0
        self._used: set[tuple[object, ...]] = set()
        self.report = torch.zeros(
            Report.BAD_IDS + 1, dtype=torch.int64, pin_memory=device.type == "cuda", device="cpu"
        )
        # Behind the peers, what low-latency calls keep for each slot, see `ring_kernels.py`.
        last_peer = Word.PEERS + layout.num_ranks
        words = torch.zeros(last_peer + 3 * layout.num_slots, dtype=torch.int64, device="cpu")
        words[Word.TIMEOUT_NS] = int(timeout_s * 1e9)
        words[Word.REPORT] = self.report.data_ptr()
        words[Word.RANK] = rank
        words[Word.NUM_RANKS] = layout.num_ranks
        words[Word.NUM_SLOTS] = layout.num_slots
        words[Word.REGION_BYTES] = layout.region_bytes
        for word, value in layout.words().items():
            words[word] = value
        words[Word.PACE] = pace_ps_per_kb()
        words[Word.PEERS : last_peer] = peers.cpu()
        words[Word.OWN] = words[Word.PEERS + rank]
        self.words = words.to(device)

    @contextmanager
    def first_use(self, *key: object) -> Iterator[None]:
        """The first call of a kind waits longer, so that a peer that still compiles is not lost."""
        if INTERPRETED or key in self._used:
            yield
            return
        self.words[Word.TIMEOUT_NS] = int((self.timeout_s + COMPILE_S) * 1e9)
        try:
            yield
            self._used.add(key)
        finally:
            self.words[Word.TIMEOUT_NS] = int(self.timeout_s * 1e9)

    def check(self) -> None:
        """Raise what ended the calls of this rank, if anything has. Costs no synchronisation.

        PeerTimeout: a wait expired. ShapeError: a peer called with another shape. CapacityError:
        more rows came than num_worst_tokens, or than a region holds.
        """
        if self.report[Report.VALID]:
            peer, epoch = int(self.report[Report.PEER]), int(self.report[Report.EPOCH])
            phase = Phase(int(self.report[Report.PHASE]))
            if phase == Phase.SIGNATURE:
                theirs = self.report[Report.SIGNATURE : Report.SIGNATURE + 7].tolist()
                raise ShapeError(
                    f"ranks {self.rank} and {peer} began calls of different shapes: rank "
                    f"{peer} has (bytes per token, top-k, experts, bytes per item, scales, stages "
                    f"of a layer there and back, 0 for a dispatch) = {theirs}. They must agree on "
                    "all ranks; make a new Buffer."
                )
            if phase == Phase.FIELDS:
                _, most, low, high, *theirs = self.report[
                    Report.SIGNATURE : Report.SIGNATURE + 8
                ].tolist()
                theirs = [most, low + (high << 16), *theirs]
                raise ShapeError(
                    f"ranks {self.rank} and {peer} began low-latency calls of different shapes: "
                    f"rank {peer} has (most tokens, bytes per token, top-k, experts, bytes per "
                    f"item, words of scales) = {theirs}. They must agree on all ranks; make a new "
                    "Buffer."
                )
            if phase == Phase.OVERFLOW:
                raise CapacityError(
                    f"rank {self.rank} received more rows than num_worst_tokens; the rest was not "
                    "written. Use the number of ranks times the largest number of tokens on a "
                    "rank, and make a new Buffer."
                )
            if phase == Phase.CAPACITY:
                raise CapacityError(
                    f"rank {self.rank} has more rows for rank {peer} than this Buffer's memory "
                    f"({self.layout.num_bytes} bytes) takes in one call. Make a new Buffer with "
                    "the bytes of Buffer.size_hint(...) for this payload."
                )
            slot = epoch % self.layout.num_slots
            name = phase.name.lower().replace("_", " ")
            raise PeerTimeout(self.rank, peer, name, epoch, slot, self.timeout_s)

    def rows_wanted(self) -> int:
        """Most rows from one rank to another, if the counts of a dispatch ended it as too many for
        a region, on all ranks alike; else 0."""
        ended = self.report[Report.VALID] and self.report[Report.PHASE] == Phase.CAPACITY
        return int(self.report[Report.ROWS]) if ended else 0

    def check_ids(self) -> None:
        """Raise RoutingError if ids out of range were seen; the calls went on without them, so this
        must not be asked in the middle of one. Costs no synchronisation."""
        num_bad = int(self.report[Report.BAD_IDS]) - self._known_bad_ids
        if num_bad:
            self._known_bad_ids += num_bad
            raise RoutingError(bad_ids(self.rank, num_bad))

    def take_bad_ids(self, other: DeviceContext) -> None:
        """Go on with the bad ids that `other` has seen, some of them not told yet."""
        self._known_bad_ids = other._known_bad_ids
        self.words[Word.BAD_IDS] = self.report[Report.BAD_IDS] = other.report[Report.BAD_IDS]


def timeout_seconds() -> float:
    """Deadline of a wait: MOE_ENGINE_TIMEOUT_S, 100 s by default."""
    text = os.environ.get("MOE_ENGINE_TIMEOUT_S", "100")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise BackendError(f"MOE_ENGINE_TIMEOUT_S is {text!r}; it must be a positive number.")
    return seconds


class Slots:
    """A Buffer's symmetric block with its layout and device context. Making one is collective:
    `new_block(num_bytes, was_captured)` allocates, or raises on all ranks where one of them has
    captured the memory that this replaces.

    `expert_rows` is a second symmetric block, for the rows of a layer's experts, and which of them
    are copies (`experts.expert_rows_bytes`); it has no slots, as all ranks are done with a layer
    before any sends rows of the next.
    """

    def __init__(
        self,
        new_block: Callable[[int, bool], SymmetricTensor],
        layout: SlotLayout,
        rank: int,
        timeout_s: float,
        was_captured: bool = False,
    ) -> None:
        self.layout, self._new_block = layout, new_block
        self.block = new_block(layout.num_bytes, was_captured)
        self._expert_rows: SymmetricTensor | None = None
        self.context = DeviceContext(layout, rank, self.block.peer_addresses, timeout_s)

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
        if self.context.words.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                raise BackendError(
                    f"a layer's first call with {num_bytes} bytes of expert rows allocates them, "
                    "which cannot be captured; call it once before the capture."
                )
            torch.cuda.synchronize(self.context.words.device)
        self._expert_rows = self._new_block(num_bytes, was_captured and rows is not None)
        if rows is not None:
            rows.free()

    def free(self) -> None:
        """Give the memory back. The caller has made sure that no kernel uses it any more."""
        self.block.free()
        if self._expert_rows is not None:
            self._expert_rows.free()
