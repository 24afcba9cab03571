"""What programs did and when: spans that kernels record, on the clock of rank 0, as a Chrome trace
and as sums.

A process that imports the package with MOE_ENGINE_TRACE=1 gets kernels that record; in other
processes nothing of it is compiled. `moe-engine trace` does all of this:

    recorder = Recorder(context)
    clocks = align_clocks(group)
    ...                                          # a layer, whose kernels record
    spans = recorder.read(clocks[rank])          # to be gathered from all ranks
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..deadline import timeout_seconds
from ..device.context import ContextField, Phase, Role
from ..device.lang import INTERPRETED, TRACING
from ..device.ptx import MAX_SPANS
from ..errors import BackendError, CapacityError
from ..symm import allocate, exchange
from ..symm.device_context import COMPILE_S, DeviceContext
from ..symm.slots import SlotLayout, Slots
from .trace_kernels import ping_kernel

ROUNDS = 16 if INTERPRETED else 200
"""How often clocks are compared; the quickest answer counts."""
WARPS_PER_SM = 64
COMPUTING = (
    *(Role.UP, Role.DOWN),
    *(Role.DGRAD_DOWN, Role.DGRAD_UP, Role.WGRAD_DOWN, Role.WGRAD_UP),
    Role.ACTIVATION_GRADIENT,
)
"""The products of a layer, and of its backward with the pass between them."""


def role_name(role: Role | Phase) -> str:
    """As reports name it."""
    return role.name.lower().replace("_", " ")


class Span(NamedTuple):
    """What a program did from `begin` to `end`, in ns.

    role: a Role, or the Phase of a wait. item: the number of the tile (among the program's, where
    its warps are specialised), of the stage, or of the part in return metadata, sum and exchange;
    the program's own for kept rows and the gradient of the activation, of which it has one span; 0
    for most waits. track: SM * 64 + the first of the program's warps on that SM; two spans of a
    track are disjoint, or one is a wait inside the other.
    """

    rank: int
    track: int
    program: int
    role: int
    item: int
    begin: int
    end: int

    @property
    def is_wait(self) -> bool:
        return self.role < Role.EXCHANGE

    @property
    def name(self) -> str:
        if self.is_wait:
            return f"wait for {role_name(Phase(self.role))}"
        return role_name(Role(self.role))

    @property
    def sm(self) -> int:
        return self.track // WARPS_PER_SM


# --- From the GPU ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Clock:
    """How many ns a rank's clock is ahead of rank 0's, and the largest error of that."""

    ahead_ns: int
    error_ns: int


class Recorder:
    """Records spans of all kernels that use a device context, from now on. BackendError in a
    process without MOE_ENGINE_TRACE=1."""

    def __init__(self, context: DeviceContext):
        if not TRACING:
            raise BackendError(
                "kernels of this process record nothing: set MOE_ENGINE_TRACE=1 before moe_engine "
                "is imported"
            )
        self._rank = context.rank
        self._buffer = torch.zeros(
            2 + 4 * MAX_SPANS.value, dtype=torch.int64, device=context.fields.device
        )
        context.fields[ContextField.TRACE] = self._buffer.data_ptr()
        context.spans = self._buffer  # kernels write to it as long as the context exists

    def clear(self) -> None:
        """Forget what was recorded, in the order of the current stream."""
        self._buffer[0].zero_()

    def read(self, clock: Clock) -> list[Span]:
        """All spans since the last `clear`, on rank 0's clock. CapacityError if they were more than
        fit. Synchronises the current stream."""
        count, room = int(self._buffer[0]), MAX_SPANS.value
        if count > room:
            raise CapacityError(f"{count} spans were recorded; a trace has room for {room}.")
        records = self._buffer[2:].view(-1, 4)[:count].cpu()
        fields = records.view(torch.int32).view(-1, 8)[:, :4].tolist()
        times = (records[:, 2:] - clock.ahead_ns).tolist()
        return [
            Span(self._rank, track, program, role, item, begin, end)
            for (role, item, program, track), (begin, end) in zip(fields, times, strict=True)
        ]


def align_clocks(group: dist.ProcessGroup | None) -> list[Clock]:
    """The clock of each rank against that of rank 0, the same list on all ranks.

    As in NTP, rank 0 asks at time a, the rank answers with its time t, and rank 0 knows it at time
    b. The rank is t - (a + b) / 2 ahead, and this is wrong by at most (b - a) / 2; the round with
    the smallest b - a counts. Collective. PeerTimeout, on all ranks, if a rank does not answer in
    time.
    """
    if group is None or group.size() == 1:
        return [Clock(0, 0)]
    rank, num_ranks = group.rank(), group.size()
    layout = SlotLayout(num_ranks, 128)
    slots = Slots(lambda size, _: allocate(group, size), layout, rank, timeout_seconds())
    times = slots.context.fields.new_zeros(num_ranks, ROUNDS, 3)

    def compare() -> list[Clock]:
        ping_kernel[(1,)](times, slots.context.fields, ROUNDS=ROUNDS, num_warps=1)
        rounds = times.tolist()
        slots.context.check()
        return [Clock(0, 0), *map(best_clock, rounds[1:])]

    clocks = exchange(group, compare, "aligning clocks", slots.context.timeout_s + COMPILE_S)[0]
    slots.free()
    return clocks


def best_clock(rounds: Sequence[Sequence[int]]) -> Clock:
    """The clock by the quickest of rounds (asked, answered, known), see `align_clocks`.

    Of (100, 5060, 120) and (200, 5170, 300) the first counts: 4950 ahead, with an error of 10.
    """
    asked, answered, known = min(rounds, key=lambda times: times[2] - times[0])
    return Clock(answered - (asked + known) // 2, (known - asked + 1) // 2)


# --- To a file ---------------------------------------------------------------------------------


def chrome_trace(spans: Sequence[Span]) -> dict[str, Any]:
    """Spans in Chrome's trace format, which Perfetto reads: a process for each rank, a thread for
    each track, times in us since the first begin."""
    zero = min((span.begin for span in spans), default=0)
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        for rank in sorted({span.rank for span in spans})
    ]
    for rank, track in sorted({(span.rank, span.track) for span in spans}):
        of_thread = {"ph": "M", "pid": rank, "tid": track}
        name = f"SM {track // WARPS_PER_SM}, warp {track % WARPS_PER_SM}"
        events.append({**of_thread, "name": "thread_name", "args": {"name": name}})
        events.append({**of_thread, "name": "thread_sort_index", "args": {"sort_index": track}})
    events += [
        {
            "ph": "X",
            "name": span.name,
            "pid": span.rank,
            "tid": span.track,
            "ts": (span.begin - zero) / 1e3,
            "dur": (span.end - span.begin) / 1e3,
            "args": {"program": span.program, "item": span.item},
        }
        for span in spans
    ]
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def save(spans: Sequence[Span], path: Path) -> None:
    """Write `chrome_trace` as JSON; https://ui.perfetto.dev opens it."""
    path.write_text(json.dumps(chrome_trace(spans)))


# --- As sums -----------------------------------------------------------------------------------


@dataclass(slots=True)
class RoleTime:
    """The spans of a role on a rank, and their time summed over programs: outside of waits, and
    in waits."""

    num_spans: int = 0
    busy_ns: int = 0
    idle_ns: int = 0


@dataclass(slots=True)
class Summary:
    """What a rank did in a layer, or in its backward.

    layer_ns: from the first begin to the last end of its spans. computing_ns: the time that an SM
    spends in tiles of `COMPUTING`, without waits for rows, and counted once where two of its
    programs do so concurrently; the mean of all SMs that have any span. exposed_ns: the rest of the
    layer, in which nothing hides the communication, or the GEMMs start. roles: by `Span.name`; a
    wait that is in no other span has a role of its own.
    """

    rank: int
    layer_ns: int = 0
    computing_ns: float = 0.0
    roles: dict[str, RoleTime] = field(default_factory=lambda: defaultdict(RoleTime))

    @property
    def exposed_ns(self) -> float:
        return self.layer_ns - self.computing_ns


def summarize(spans: Sequence[Span]) -> list[Summary]:
    """The summary of each rank that has spans, in order."""
    by_rank: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        by_rank[span.rank].append(span)
    return [_summary(rank, by_rank[rank]) for rank in sorted(by_rank)]


def _summary(rank: int, spans: Sequence[Span]) -> Summary:
    first, last = min(span.begin for span in spans), max(span.end for span in spans)
    summary = Summary(rank, last - first)
    computing: dict[int, list[tuple[int, int]]] = {span.sm: [] for span in spans}
    for span, waits in sorted(with_waits(spans), key=lambda pair: (pair[0].is_wait, pair[0].role)):
        idle = span.end - span.begin if span.is_wait else sum(w.end - w.begin for w in waits)
        role = summary.roles[span.name]
        role.num_spans += 1
        role.idle_ns += idle
        role.busy_ns += span.end - span.begin - idle
        if span.role in COMPUTING:
            computing[span.sm] += between(span, waits)
    summary.computing_ns = sum(map(covered, computing.values())) / len(computing)
    return summary


def with_waits(spans: Iterable[Span]) -> Iterator[tuple[Span, list[Span]]]:
    """Each span that is in no other, with the waits inside it, in order."""
    by_track: dict[tuple[int, int], list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: (span.begin, span.end)):
        by_track[span.rank, span.track].append(span)
    for on_track in by_track.values():
        outer = [span for span in on_track if not span.is_wait]
        begins = [span.begin for span in outer]
        inside: list[list[Span]] = [[] for _ in outer]
        for wait in (span for span in on_track if span.is_wait):
            index = bisect_right(begins, wait.begin) - 1
            if index >= 0 and wait.end <= outer[index].end:
                inside[index].append(wait)
            else:
                yield wait, []
        yield from zip(outer, inside, strict=True)


def between(span: Span, waits: Iterable[Span]) -> Iterator[tuple[int, int]]:
    """The parts (begin, end) of a span between its waits."""
    begin = span.begin
    for wait in waits:
        yield begin, wait.begin
        begin = wait.end
    yield begin, span.end


def covered(parts: Iterable[tuple[int, int]]) -> int:
    """How much time parts (begin, end) cover: 6 for (0, 4) (2, 5) (7, 8)."""
    total, until = 0, 0
    for begin, end in sorted(parts):
        total += max(0, end - max(begin, until))
        until = max(until, end)
    return total
