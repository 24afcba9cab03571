"""Meetings of the hosts of a group: each rank brings a value, and all ranks get all values.

Ranks meet at the store of their group. So a meeting has the engine's deadline, uses no
communicator, and leaves the group usable when it fails. Each rank counts its meetings in that
store, and writes its message of meeting n under the key n/rank: the store may outlive the group, as
torchrun's does, and another group of the same name must not find old messages. Messages are
pickled: whoever can write to that store can run code on the ranks, as with torch.distributed's own
collectives of objects.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist

from .. import errors
from ..deadline import DEFAULT_S, timeout_seconds
from ..errors import BackendError, MoeEngineError, OutOfStep
from ..torch_privates import store_of

FIRST_PAUSE_S, LAST_PAUSE_S = 1e-4, 0.02
"""The pauses between two looks at the store; each is twice as long as the one before."""
T = TypeVar("T")


def exchange(
    group: dist.ProcessGroup | None,
    make: Callable[[], T],
    what: str,
    timeout_s: float | None = None,
    begins: bool = False,
) -> list[T]:
    """Return what `make()` returned on each rank, as copies. It is also a barrier. `what` names the
    meeting.

    If `make` raised on any rank, every rank raises, so that none is left waiting: the error of the
    first such rank if it is one of this package, else BackendError. What ends a process, like
    KeyboardInterrupt, remains what it is on its own rank. OutOfStep is raised where ranks are at
    different meetings, or where one does not arrive within `timeout_s` of when this rank begins to
    wait (None: MOE_ENGINE_TIMEOUT_S, 100 s); a rank that arrives later raises OutOfStep too.

    With `begins` the meeting is the first of something new: this rank skips meetings that others
    have left, because they gave up waiting or because they were at another meeting. It does not
    skip one at which `make` raised, or which a rank left for another reason. If the meeting before
    broke off on this rank, it also skips those at which others still are, for whom that one did
    not: they find it absent, or at another meeting, and begin anew as well.

    Where torch.distributed knows no store of the group, its all_gather_object is used instead, with
    the deadline of the group.
    """
    table = _Table.of(group)
    seconds, mine, absent = DEFAULT_S, None, ""
    try:
        try:
            seconds = timeout_seconds() if timeout_s is None else timeout_s
            data = pickle.dumps(_Message(what, make()))
        except Exception as error:
            mine, data = error, _Message.of_failed(what, error)
        if table is None:
            messages = _gather(group, data)
        else:
            messages, absent = table.meet(what, data, seconds)
        if absent:
            _check(messages, absent, mine)
    except BaseException as error:
        if table is not None:
            in_vain = bool(absent) and mine is None and isinstance(error, OutOfStep)
            table.leave(_Message.of_failed(what, error if mine is None else mine, in_vain))
            table.note_break()
        raise
    are_ahead = begins and table is not None and table.follows_break
    here = {rank: m for rank, m in messages.items() if not m.was_left(what, are_ahead)}
    if begins and len(here) < len(messages):
        messages = here
        if all(m.failure is None for m in messages.values()):
            if table is not None:
                table.note_break()
            return exchange(group, make, what, timeout_s, begins)
    try:
        _check(messages, cause=mine)
    except BaseException:
        if table is not None:
            table.note_break()
        raise
    return [message.value for message in messages.values()]


def absent_keys(store: dist.Store, keys: Sequence[str], seconds: float) -> list[str]:
    """Wait at most `seconds` for keys in a store; return those that are missing after it.

    A wait of the store itself would block its other users, and Ctrl-C.
    """
    end, pause = time.monotonic() + seconds, FIRST_PAUSE_S
    while not store.check(list(keys)):
        left = end - time.monotonic()
        if left <= 0:
            return [key for key in keys if not store.check([key])]
        time.sleep(min(pause, left))
        pause = min(2 * pause, LAST_PAUSE_S)
    return []


def per_rank(values: Iterable[object]) -> str:
    """ "1 on rank 0, 2 on rank 1"."""
    return ", ".join(f"{value!r} on rank {rank}" for rank, value in enumerate(values))


def ranks_text(ranks: Iterable[int]) -> str:
    """ "rank 1", or "ranks 1, 2"."""
    numbers = [str(rank) for rank in ranks]
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(numbers)}"


@dataclass(frozen=True, slots=True)
class _Failure:
    """An exception that other ranks get: its class in errors.py, text and plain attributes."""

    kind: str
    text: str
    attributes: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, error: BaseException) -> _Failure:
        for kind in type(error).__mro__:
            if vars(errors).get(kind.__name__) is kind:
                plain = {k: v for k, v in vars(error).items() if isinstance(v, int | float | str)}
                return cls(kind.__name__, str(error), plain)
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
        return cls(BackendError.__name__, text)

    def as_error(self, text: str) -> MoeEngineError:
        """Rebuild the exception without its `__init__`, which may not take a text."""
        kind = getattr(errors, self.kind)
        error: MoeEngineError = kind.__new__(kind)
        error.args = (text,)
        vars(error).update(self.attributes)
        return error


@dataclass(frozen=True, slots=True)
class _Message:
    """What a rank brings to the meeting `what`. in_vain: it left as other ranks did not arrive."""

    what: str
    value: Any = None
    failure: _Failure | None = None
    in_vain: bool = False

    def was_left(self, what: str, or_will_be: bool = False) -> bool:
        """Whether its rank left another meeting than `what`, or waited in vain at this one;
        or_will_be: also whether it is still at another one."""
        return self.in_vain or ((or_will_be or self.failure is not None) and self.what != what)

    @classmethod
    def of_failed(cls, what: str, error: BaseException, in_vain: bool = False) -> bytes:
        return pickle.dumps(cls(what, failure=_Failure.of(error), in_vain=in_vain))


class _Table:
    """The messages of one meeting, in the store."""

    def __init__(self, group: dist.ProcessGroup, store: dist.Store):
        self._rank, self._num_ranks = group.rank(), group.size()
        # Any: its type says that values are str, and they may be bytes.
        self._store: Any = dist.PrefixStore(f"moe_engine/meetings/{self._num_ranks}", store)
        self._number = -1
        with suppress(RuntimeError):  # the store is gone, as `meet` tells
            self._number = self._store.add(f"count/{self._rank}", 1) - 1

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> _Table | None:
        """The table of the next meeting of a group; None for one rank or without a store."""
        if group is None or group.size() == 1:
            return None
        try:
            store = store_of(group)
        except KeyError:
            return None
        return None if store is None else cls(group, store)

    def leave(self, data: bytes) -> None:
        """Replace this rank's message, for ranks that have not read it yet."""
        with suppress(RuntimeError):  # the store is gone
            self._store.set(f"{self._number}/{self._rank}", data)

    @property
    def follows_break(self) -> bool:
        """Whether the meeting before broke off on this rank."""
        key = f"broke_off/{self._rank}"
        with suppress(RuntimeError):  # the store is gone
            return bool(self._store.check([key])) and int(self._store.get(key)) == self._number - 1
        return False

    def note_break(self) -> None:
        """This meeting has broken off on this rank."""
        with suppress(RuntimeError):  # the store is gone
            self._store.set(f"broke_off/{self._rank}", str(self._number))

    def meet(self, what: str, data: bytes, seconds: float) -> tuple[dict[int, _Message], str]:
        """The messages of the ranks that arrive in time, and a text that names the others, empty if
        there are none."""
        keys = [f"{self._number}/{rank}" for rank in range(self._num_ranks)]
        try:
            self._store.set(keys[self._rank], data)
            absent = absent_keys(self._store, keys, seconds)
            came = {r: self._store.get(key) for r, key in enumerate(keys) if key not in absent}
        except RuntimeError as error:
            raise OutOfStep(
                f"rank {self._rank} lost the store of its group at the meeting '{what}': "
                f"{str(error).partition(chr(10))[0]} The process that holds the store, often rank "
                "0, is gone: see how it ended, and start all ranks again."
            ) from error
        messages = {rank: pickle.loads(message) for rank, message in came.items()}
        if absent:
            late = ranks_text(rank for rank, key in enumerate(keys) if key in absent)
            return messages, (
                f"rank {self._rank} waited {seconds:g} s for {late} at the meeting '{what}'. A "
                "rank that does not arrive is gone, stuck, or made other calls, or the same with "
                "another max_tokens or requires_grad: see what it did last, and make new Buffers "
                "when all ranks are back. MOE_ENGINE_TIMEOUT_S sets the deadline."
            )
        # All ranks are here, so all have read the messages of the meeting before.
        with suppress(RuntimeError):  # some stores cannot delete
            self._store.delete_key(f"{self._number - 1}/{self._rank}")
        return messages, ""


def _gather(group: dist.ProcessGroup | None, data: bytes) -> dict[int, _Message]:
    """The messages of all ranks, without a store."""
    everyone = [data]
    if group is not None and group.size() > 1:
        everyone *= group.size()
        dist.all_gather_object(everyone, data, group=group)
    return dict(enumerate(map(pickle.loads, everyone)))


def _check(
    messages: Mapping[int, _Message], absent: str = "", cause: Exception | None = None
) -> None:
    """Raise the error of a meeting with these messages, if there is one. absent: the text that
    names ranks that did not arrive; cause: what this rank's `make` raised."""
    whats: dict[str, list[int]] = {}
    for rank, message in messages.items():
        whats.setdefault(message.what, []).append(rank)
    failures = {
        rank: m.failure
        for rank, m in messages.items()
        if m.failure is not None and not (absent and m.in_vain)  # which says nothing new
    }
    ranks: dict[str, list[int]] = {}
    for rank, failure in failures.items():
        ranks.setdefault(failure.text, []).append(rank)
    texts = "; ".join(f"{text} ({ranks_text(ranks[text])})" for text in ranks)
    if len(whats) > 1:
        meetings = ", ".join(f"'{what}' on {ranks_text(whats[what])}" for what in whats)
        different = (
            f"ranks are at different meetings: {meetings}. All must make the same Buffers and "
            "calls in the same order: find the rank that did not, and make new Buffers."
        )
        raise OutOfStep(" ".join(filter(None, (absent, different, texts)))) from cause
    if absent:
        raise OutOfStep(f"{absent} {texts}".strip()) from cause
    if failures:
        raise failures[min(failures)].as_error(texts) from cause
