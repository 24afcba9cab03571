"""The device context of a rank: the fields that its kernels read, and how it learns of failures.

It stands at the head of the symmetric block, with a notice from each rank after it:

    fields, int64: see `context.ContextField` | notice of rank 0 | notice of rank 1 | ...
    refusal of rank 0 | refusal of rank 1 | ...

A rank whose call breaks off (`DeviceContext.abandon`) writes a notice to every other rank and then
sets a bit of the field `BROKEN` there, so that kernels that wait for it return at once; see
`notices.py`. A rank that refuses a call writes to them what it refused, and why.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch

from ..callers import Callers
from ..device.context import (
    REFUSED_CALLS,
    SIGNATURE_WORDS,
    ContextField,
    Kind,
    Phase,
    Report,
    Role,
    TracedRole,
)
from ..device.lang import INTERPRETED, TRACING
from ..device.ring import COUNT_BITS, COUNT_MASK, FIELDS, MAX_COUNTS
from ..errors import (
    CapacityError,
    MoeEngineError,
    OutOfStep,
    PeerTimeout,
    RoutingError,
    ShapeError,
    bad_ids,
)
from ..hardware import outside_capture, pace_ps_per_kb
from ..kernel_bundle import bundle
from ..launch import Grid, launch
from ..utils import LINE_BYTES, round_up
from .base import SymmetricTensor
from .mismatch import low_latency_fields, mismatch, out_of_step_by_refusal, signature_fields
from .notices import NOTICE_BYTES, Notices, told_error

if TYPE_CHECKING:
    from .layout import BlockLayout

VALID, BAD_IDS = int(Report.VALID), int(Report.BAD_IDS)  # which each call reads
COMPILE_S = 300.0
"""Added to the deadline while kernels may still be compiling on some rank."""


def num_fields(num_ranks: int, num_slots: int) -> int:
    """Fields of a context: after the peers stands what low-latency calls keep for each slot, see
    `device/ring.py`."""
    return ContextField.PEERS + num_ranks + 3 * num_slots


def notices_offset(num_ranks: int, num_slots: int) -> int:
    """Where the notices begin in a symmetric block, in bytes."""
    return round_up(8 * num_fields(num_ranks, num_slots), LINE_BYTES)


def head_bytes(num_ranks: int, num_slots: int) -> int:
    """Bytes of the context, the notices and the refusals at the head of a symmetric block."""
    return notices_offset(num_ranks, num_slots) + 2 * num_ranks * NOTICE_BYTES


class DeviceContext:
    """The context of one rank at the head of `block`, and its report in host memory, which the
    device can write: so the host learns of a failure without a synchronisation.

    buffer: the number of the Buffer that this belongs to; epoch: the last finished one, which
    memory that grows takes over; callers: those of the Buffer. `step` names the launch that a call
    is at, from the first one that other ranks see to the last, else it is None: a call that breaks
    off in between has half happened, and its epoch must never be used again. `launched`: the last
    kernel. `shrinks`: the others mask a rank that falls silent, and are told nothing.
    `epoch_is_running`: a call advances the epoch as it begins.
    """

    def __init__(
        self,
        layout: BlockLayout,
        rank: int,
        block: SymmetricTensor,
        timeout_s: float,
        buffer: int = 0,
        epoch: int = 0,
        callers: Callers | None = None,
    ):
        device = block.local.device
        self.rank, self.layout, self.timeout_s = rank, layout, timeout_s
        self.callers = Callers() if callers is None else callers
        self.step: str | None = None
        self.launched: Any = None
        self.shrinks = self.epoch_is_running = False
        self.spans: torch.Tensor | None = None
        self._block = block
        self.ended: MoeEngineError | None = None
        self.has_told = False
        self._known_bad_ids = self._seen_bad_ids = 0
        self._used: set[tuple[object, ...]] = set()
        pinned, num_ranks = device.type == "cuda", layout.num_ranks
        report = torch.zeros(Report.BAD_IDS + 1, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self._report_memory = report
        self.report = (ctypes.c_int64 * len(report)).from_address(report.data_ptr())
        last_peer, count = ContextField.PEERS + num_ranks, num_fields(num_ranks, layout.num_slots)
        fields = torch.zeros(count, dtype=torch.int64, device="cpu")
        fields[ContextField.EPOCH] = epoch
        fields[ContextField.TIMEOUT_NS] = int(timeout_s * 1e9)
        fields[ContextField.REPORT] = report.data_ptr()
        fields[ContextField.RANK] = rank
        fields[ContextField.NUM_RANKS] = num_ranks
        fields[ContextField.NUM_SLOTS] = layout.num_slots
        fields[ContextField.REGION_BYTES] = layout.region_bytes
        for field, value in layout.fields().items():
            fields[field] = value
        fields[ContextField.PACE] = pace_ps_per_kb()
        fields[ContextField.BUFFER] = buffer
        fields[ContextField.REFUSED] = self.callers.num_refused
        fields[ContextField.NETWORK] = block.network
        fields[ContextField.PEERS : last_peer] = block.peer_addresses.cpu()
        fields[ContextField.OWN] = fields[ContextField.PEERS + rank]
        near = fields[ContextField.PEERS : last_peer].nonzero().flatten().tolist()
        offset = notices_offset(num_ranks, layout.num_slots)
        self.notices = Notices(block, offset, rank, num_ranks, near)
        self.fields = block.local[: 8 * count].view(torch.int64)
        # Not BROKEN: `allocate` has zeroed it on all ranks before any of them returned, and from
        # then on a peer may break off and set its bit here, before this rank comes to this line.
        for part in (slice(0, ContextField.BROKEN), slice(ContextField.BROKEN + 1, count)):
            self.fields[part].copy_(fields[part])

    @contextmanager
    def first_use(self, *key: object) -> Iterator[None]:
        """The first call of a kind waits longer, so that a peer that still compiles is not lost;
        with a bundle of compiled kernels none does. Nor does one that captures a call: its kernels
        are those of a call before it."""
        knows = INTERPRETED or key in self._used or bundle() is not None
        if knows or (self.fields.is_cuda and torch.cuda.is_current_stream_capturing()):
            yield
            return
        self.fields[ContextField.TIMEOUT_NS] = int((self.timeout_s + COMPILE_S) * 1e9)
        try:
            yield
            self._used.add(key)
        finally:
            self.fields[ContextField.TIMEOUT_NS] = int(self.timeout_s * 1e9)

    # --- Launches ----------------------------------------------------------------------------

    def launch(
        self,
        kernel: Any,
        grid: Grid,
        *arguments: Any,
        step: str | None = None,
        after: Sequence[Any] = (),
        shares_sms: bool = False,
        **options: Any,
    ) -> None:
        """Launch a kernel of a call, see `launch.launch`.

        step: what the call has come to, from the first launch that other ranks see on. after: the
        kernels of which one must be the launch before, as a programmatic dependent launch relies on
        what has ended by then; any, where there are none.
        """
        if after and self.launched not in after:
            raise AssertionError(f"{_name(kernel)} was launched after {_name(self.launched)}.")
        self.step = step or self.step
        launch(kernel, grid, *arguments, shares_sms=shares_sms, **options)
        self.launched = kernel

    def traced(self, role: Role) -> TracedRole | None:
        """What a kernel that takes no device context records its spans by; None: it records
        none."""
        return TracedRole(self.fields, int(role)) if TRACING else None

    def end_call(self) -> None:
        """The last launch of a call was made."""
        self.step = None

    # --- What ended this rank's calls --------------------------------------------------------

    def check(self) -> None:
        """Raise what ended the calls of this rank, if anything has. Costs no synchronisation.

        PeerTimeout: a wait expired. ShapeError, OutOfStep: a peer made another call. CapacityError:
        more rows came than num_worst_tokens, or than a region holds. What a peer has told, or this
        rank has told its peers: see `abandon`.
        """
        if self.has_ended:
            self.ended = self.ended or self._reported()
            raise self.ended.with_traceback(None)

    def end_out_of_step(self, peer: int, ours: int, theirs: int) -> MoeEngineError:
        """Let the calls of this rank have ended because a peer began another call: the `Kind` of
        both."""
        self.ended = mismatch(self.rank, peer, {"verb": (ours, theirs)}, self.callers)
        return self.ended

    @property
    def has_ended(self) -> bool:
        """Whether `check` raises."""
        return self.ended is not None or self.report[VALID] != 0

    def begin_call(self) -> bool:
        """`check`, and let the next `check_ids` tell of ids that were bad by now; whether there
        are."""
        if self.ended is not None or self.report[VALID]:
            self.check()
        self._seen_bad_ids = seen = self.report[BAD_IDS]
        return seen != self._known_bad_ids

    @property
    def was_told(self) -> bool:
        """Whether another rank ended this rank's calls."""
        return self.report[Report.VALID] != 0 and self.report[Report.PHASE] == Phase.ABANDONED

    def _reported(self) -> MoeEngineError:
        """The error of what a kernel has reported."""
        peer, epoch = self.report[Report.PEER], self.report[Report.EPOCH]
        phase = Phase(self.report[Report.PHASE])
        if phase == Phase.ABANDONED:
            return self.notices.read()
        if phase in (Phase.SIGNATURE, Phase.FIELDS):
            size = SIGNATURE_WORDS.value
            ours = self.report[Report.OURS : Report.OURS + size]
            theirs = self.report[Report.THEIRS : Report.THEIRS + size]
            named = signature_fields if phase == Phase.SIGNATURE else low_latency_fields
            return self._mismatch(named, ours, theirs, peer)
        if phase == Phase.HANDLE:
            return ShapeError(
                f"rank {self.rank}: the handle of call {epoch} is not what dispatch of this Buffer "
                "returned. Pass that, unchanged; make a new Buffer."
            )
        if phase == Phase.OVERFLOW:
            return CapacityError(
                f"rank {self.rank} received more rows than num_worst_tokens, or max_rows of "
                "`moe_engine.ops.dispatch`; the rest was not written. Use the number of ranks "
                "times the largest number of tokens on a rank, and make a new Buffer."
            )
        if phase == Phase.CAPACITY:
            return CapacityError(
                f"rank {self.rank} has more rows for rank {peer} than this Buffer's memory "
                f"({self.layout.num_bytes} bytes) takes in one call. Make a new Buffer with "
                "the bytes of Buffer.size_hint(...) for this payload."
            )
        slot = epoch % self.layout.num_slots
        for call in range(epoch - self.layout.num_slots + 1, epoch + 1):
            ours, theirs = self._told(self.rank, call), self._told(peer, call)
            if ours and theirs and ours != theirs:
                return self._mismatch(low_latency_fields, ours, theirs, peer)
        if phase == Phase.ROUTING:
            return ShapeError(
                f"rank {self.rank} got another number of rows in a layer's backward than in its "
                "forward: some rank has changed topk_idx since. Pass tensors that stay as they are "
                "until the backward, and make a new Buffer."
            )
        name = phase.name.lower().replace("_", " ")
        name += " of the backward" if self._is_backward(slot) else ""
        node_ranks = self.layout.ranks_per_node if self.layout.num_nodes > 1 else None
        return PeerTimeout(self.rank, peer, name, epoch, slot, self.timeout_s, node_ranks)

    def _is_backward(self, slot: int) -> bool:
        """Whether this rank's last call in a slot was a layer's backward, as its signature says."""
        layout = self.layout
        if self._is_low_latency:
            return False
        at = layout.slots + (slot * layout.num_regions + self.rank) * layout.region_bytes
        with suppress(RuntimeError), outside_capture(self.fields.device):
            kind = self._block.local[at : at + 4].view(torch.int32).cpu()
            return int(kind) == Kind.MOE_FFN_BACKWARD
        return False

    @property
    def _is_low_latency(self) -> bool:
        return ContextField.STAGE_FLAGS not in self.layout.fields()

    def _told(self, rank: int, epoch: int) -> list[int]:
        """What a rank has told this one of its low-latency call of this epoch, see `call_fields`;
        [] where it has told nothing yet. Calls that differ may wait for each other before they
        compare that: a hooked combine for weights, and a dispatch for counts."""
        layout = self.layout
        if not self._is_low_latency:
            return []
        writer = epoch % layout.num_slots * layout.num_ranks + rank
        at = layout.fields()[ContextField.COUNT_FLAGS] + writer * MAX_COUNTS.value * 8
        with suppress(RuntimeError), outside_capture(self.fields.device):
            words = self._block.local[at : at + 8 * FIELDS.value].view(torch.int64).cpu()
            words[0] = epoch << COUNT_BITS.value  # the number of tokens, or a flag
            if bool((words >> COUNT_BITS.value == epoch).all()):
                return [word & COUNT_MASK.value for word in words.tolist()]
        return []

    def begun_by(self, rank: int, epoch: int | None = None) -> int | None:
        """The `Kind` of a call of this memory that a rank has begun, as it has told this one: of
        this epoch, or of the first one that this rank itself has not begun; None if there is none.
        Ranks of other nodes tell it through others, and are left out."""
        layout = self.layout
        if layout.num_nodes > 1:
            return None
        with suppress(RuntimeError), outside_capture(self.fields.device):
            epoch = int(self.fields[ContextField.EPOCH]) + 1 if epoch is None else epoch
            if self._is_low_latency:
                told = self._told(rank, epoch)
                return low_latency_fields(told)["verb"] if told else None
            flag = layout.fields()[ContextField.COUNT_FLAGS] + 8 * rank
            slot = epoch % layout.num_slots * layout.num_regions + rank
            at = layout.slots + slot * layout.region_bytes
            if int(self._block.local[flag : flag + 8].view(torch.int64)) >= epoch:
                return int(self._block.local[at : at + 4].view(torch.int32))
        return None

    def _mismatch(
        self,
        named: Callable[[Sequence[int]], dict[str, int]],
        ours: Sequence[int],
        theirs: Sequence[int],
        peer: int,
    ) -> MoeEngineError:
        """The error of two ranks that began calls which do not match. named: the fields of what
        both told."""
        mine = named(ours)
        found = {
            name: (mine[name], other)
            for name, other in named(theirs).items()
            if name in mine and mine[name] != other
        }
        if REFUSED_CALLS in found:
            return self._refused_elsewhere(peer, *found[REFUSED_CALLS])
        return mismatch(self.rank, peer, found, self.callers)

    def _refused_elsewhere(self, peer: int, ours: int, theirs: int) -> OutOfStep:
        """The error of two ranks of which one has refused more calls."""
        refused, last = self.rank, self.callers.last_refused
        if theirs > ours:
            refused, last = peer, self.notices.refusal(peer)
        return out_of_step_by_refusal(self.rank, peer, refused, abs(theirs - ours), last)

    def rows_wanted(self) -> int:
        """Most rows from one rank to another, if the counts of a dispatch ended it as too many for
        a region, on all ranks alike; else 0."""
        ended = self.report[Report.VALID] and self.report[Report.PHASE] == Phase.CAPACITY
        return self.report[Report.ROWS] if ended else 0

    # --- Telling the other ranks -------------------------------------------------------------

    def notice(self, error: BaseException) -> tuple[str, str]:
        """(type, text) of what the other ranks are told of an error that broke a call off."""
        kind, call = type(error).__name__, "a call"
        with suppress(RuntimeError), outside_capture(self.fields.device):
            epoch = int(self.fields[ContextField.EPOCH].cpu())
            call = f"call {epoch if self.epoch_is_running else epoch + 1}"
        step, why = self.step or "argument checks", f"{kind}: {error}".rstrip(": ")
        if self.report[Report.VALID]:
            step = Phase(self.report[Report.PHASE]).name.lower().replace("_", " ")
        return kind, f"rank {self.rank} abandoned {call} in phase '{step}' because of {why}"

    def abandon(
        self, kind: str, text: str, tell_peers: bool = True, cause: MoeEngineError | None = None
    ) -> None:
        """End this rank's calls for good, and with tell_peers those of the other ranks: these raise
        an error with the text of a `notice` in the call that they are in, or in the next one. This
        rank goes on to raise `cause`, if there is one.

        Those of other nodes hear of it over the network. `Notices.send` says what happens before
        what, and what bounds it; whom it does not reach ends by the deadline.
        """
        if self.has_told:
            return
        self.has_told = True
        self.ended = self.ended or cause or told_error(kind, text)
        self.notices.send(kind, text, tell_peers)

    # --- Refused calls -----------------------------------------------------------------------

    def refuse(self) -> None:
        """Let the signatures of later calls say how many calls were refused on this rank, and tell
        the other ranks of the last one. The text is there before any signature that counts it: the
        host stores it now, and the number on the current stream, after the calls before it."""
        callers = self.callers
        self.notices.send_refusal(callers.last_refused)
        number = self.fields[ContextField.REFUSED]
        if self.fields.is_cuda and torch.cuda.is_current_stream_capturing():
            with outside_capture(self.fields.device) as synchronise:
                number.fill_(callers.num_refused)
                synchronise()
        else:
            number.fill_(callers.num_refused)

    # --- Ids out of range --------------------------------------------------------------------

    def check_ids(self, result: object = None) -> None:
        """Raise RoutingError, with the `result` of the call that just ended, if ids out of range
        had been seen by the last `begin_call`; the calls went on without them."""
        num_bad = self._seen_bad_ids - self._known_bad_ids
        if num_bad:
            self._known_bad_ids += num_bad
            raise RoutingError(bad_ids(self.rank, num_bad), result)

    def take_bad_ids(self, other: DeviceContext) -> None:
        """Go on with the bad ids that `other` has seen, some of them not told yet."""
        self._known_bad_ids = other._known_bad_ids
        self._seen_bad_ids = other._seen_bad_ids
        self.fields[ContextField.BAD_IDS] = self.report[Report.BAD_IDS] = other.report[
            Report.BAD_IDS
        ]


def _name(kernel: Any) -> str:
    return "nothing" if kernel is None else str(kernel.__name__)
