"""The process that stands for the network card of an emulated rank.

It is started by the path of this file and needs the standard library alone: importing the package
would take seconds. The rank posts commands into a `Queue` in shared memory; requests to map and to
free blocks come by a socket, and are answered. The process ends when its rank does.

It is as slow, and as much out of order, as a network may be. What is posted to a rank is cut into
pieces of PIECE_BYTES. All pieces that are on their way are delivered in random order, and a piece
is read from its source when it is delivered. Of each message some pieces may go at once, while the
rest is held for a time. Only this is promised:

- the flag of a SEND is set after all pieces of that message;
- what was posted to a rank after a FENCE is delivered after all that was posted to it before.

Bytes are copied and words stored in the order of this program: on x86 other processes see them in
that order, and an aligned word of 8 bytes at once.
"""

from __future__ import annotations

import ctypes
import heapq
import json
import mmap
import os
import random
import select
import signal
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from itertools import count
from typing import Any, NamedTuple

PIECE_BYTES = 1024
CAPACITY = 512
"""Commands that a queue holds."""
BURST = 64
"""Commands that are taken, and pieces that are delivered, in one turn."""
IDLE_S = 0.05
"""How long the process sleeps at most, unless it is woken. It then sees whether its rank lives."""
PUT_HOLD_S = 0.2
"""How long bytes without a flag are held at least that no fence, quiet or free hurries up."""
WAKE = b"wake"
"""The message that is no request."""
MAX_REQUEST = 1 << 20
"""Bytes of a request."""
NOTHING_WRONG = b"\0"
"""The answer to a request that was obeyed; another one says why it was not."""


class Header(IntEnum):
    """Index of each int64 at the head of a queue; each only grows, but ASLEEP."""

    POSTED = 0  # commands; written by the rank, after the words of the command
    TAKEN = 1  # commands whose words the process has read
    DONE = 2  # commands that are delivered
    ASLEEP = 3  # 1: the process waits for WAKE


class Verb(IntEnum):
    """What a command asks for."""

    SEND = 0  # bytes, then their flag
    BYTES = 1
    WORD = 2
    FENCE = 3
    QUIET = 4  # deliver all now; done when it is taken


class Command(NamedTuple):
    """The words of a command, int64. Addresses are those of the rank that posts it; what lies on
    `rank` has the same place in that rank's block."""

    verb: int
    own: int  # where the block begins whose group `rank` belongs to
    rank: int = 0
    to: int = 0
    source: int = 0
    num_bytes: int = 0
    flag: int = 0
    value: int = 0


WORDS = len(Command._fields)
HEADER_WORDS = 8
QUEUE_BYTES = 8 * (HEADER_WORDS + CAPACITY * WORDS)


class Queue:
    """A ring of commands in shared memory, with one writer and one reader."""

    def __init__(self, descriptor: int):
        memory = mmap.mmap(descriptor, QUEUE_BYTES)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.words = memoryview(memory).cast("q")

    @property
    def is_full(self) -> bool:
        return self.words[Header.POSTED] - self.words[Header.TAKEN] == CAPACITY

    @property
    def is_empty(self) -> bool:
        return self.words[Header.POSTED] == self.words[Header.TAKEN]

    def post(self, command: Command) -> bool:
        """Append a command to a queue that is not full. Returns whether the reader must be woken.

        The reader sees POSTED grow after the command's words. It sets ASLEEP before it looks at
        POSTED for the last time, and this reads ASLEEP after it has set POSTED.
        """
        posted = self.words[Header.POSTED]
        for word, value in enumerate(command, self._place(posted)):
            self.words[word] = value
        self.words[Header.POSTED] = posted + 1
        return self.words[Header.ASLEEP] != 0

    def take(self) -> Command:
        """The first command of a queue that is not empty."""
        taken = self.words[Header.TAKEN]
        place = self._place(taken)
        command = Command(*self.words[place : place + WORDS])
        self.words[Header.TAKEN] = taken + 1
        return command

    def _place(self, number: int) -> int:
        return HEADER_WORDS + number % CAPACITY * WORDS


class OpenFile(NamedTuple):
    """An open file of a process: its descriptor, and what identifies the file."""

    pid: int
    descriptor: int
    device: int
    inode: int


def map_file(file: OpenFile, num_bytes: int) -> mmap.mmap:
    """Map the open file of a process of this user. OSError if it is gone or another one."""
    opened = os.open(f"/proc/{file.pid}/fd/{file.descriptor}", os.O_RDWR | os.O_NONBLOCK)
    try:
        status = os.fstat(opened)
        found = status.st_dev, status.st_ino, status.st_uid
        if found != (file.device, file.inode, os.geteuid()):
            raise OSError("it is another file, or one of another user")
        return mmap.mmap(opened, num_bytes)
    finally:
        os.close(opened)


class Memory:
    """A rank's block as mapped here: as bytes, and as int64 words."""

    def __init__(self, file: OpenFile, num_bytes: int):
        self.bytes = memoryview(map_file(file, num_bytes))
        self.words = self.bytes[: num_bytes // 8 * 8].cast("q")


class Block(NamedTuple):
    """A symmetric block, which begins at `address` in the memory of the rank itself."""

    address: int
    num_bytes: int
    own: Memory
    far: dict[int, Memory]  # of ranks of other nodes


@dataclass(slots=True, eq=False)
class Message:
    """A SEND, BYTES or WORD on its way: `source` and `to` are views of its bytes on both ranks, and
    `pieces` says where the pieces begin that are not delivered yet, in random order. Of these
    `num_late` stay until the message is due."""

    lane: Lane
    source: memoryview
    to: memoryview
    pieces: list[int]
    words: memoryview
    flag: int | None  # index into words
    value: int
    num_late: int = 0


class Lane:
    """What was posted to one rank and is not delivered: `num_left` messages are on their way, and
    those after each fence wait for all before it."""

    def __init__(self) -> None:
        self.num_left = 0
        self.after_fences: deque[list[Message]] = deque()


class Network:
    """What the process does: it takes commands, and delivers them late and out of order."""

    def __init__(self, queue: Queue, control: socket.socket):
        self._queue, self._control = queue, control
        self._blocks: dict[int, Block] = {}
        self._lanes: dict[tuple[int, int], Lane] = {}  # by Command.own and rank
        self._moving: list[Message] = []  # what may be delivered now
        self._held: list[tuple[float, int, Message]] = []  # a heap by the time when it is due
        self._numbers = count()
        self._random = random.Random()
        self._hold_s = self._stall_s = self._stalled_until = 0.0

    def run(self, rank_pid: int) -> None:
        """Serve until the rank is gone."""
        while os.getppid() == rank_pid:
            is_busy = time.monotonic() >= self._stalled_until and self._deliver() + self._take() > 0
            if not self._serve(0.0 if is_busy else self._idle_s()):
                return

    # --- Requests ----------------------------------------------------------------------------

    def _idle_s(self) -> float:
        """How long there is nothing to do, as far as is known. The rank wakes this process after it
        has posted a command that was not seen here."""
        self._queue.words[Header.ASLEEP] = 1
        now = time.monotonic()
        if now < self._stalled_until:
            return min(IDLE_S, self._stalled_until - now)
        if not self._queue.is_empty:
            return 0.0
        return min(IDLE_S, max(0.0, self._held[0][0] - now)) if self._held else IDLE_S

    def _serve(self, seconds: float) -> bool:
        """Wait for a message of the rank, and answer it if it is a request. False: it is gone."""
        readable, _, _ = select.select([self._control], [], [], seconds)
        self._queue.words[Header.ASLEEP] = 0
        if not readable:
            return True
        try:
            data = self._control.recv(MAX_REQUEST)
            if data and data != WAKE:
                self._control.send(self._obey(**json.loads(data)).encode() or NOTHING_WRONG)
        except ConnectionError:
            return False
        return bool(data)

    def _obey(self, what: str, address: int, **more: Any) -> str:
        """Do what is requested; returns why it cannot be done, if so."""
        if what == "free":
            self._free(address)
            return ""
        try:
            self._map(address, **more)
        except OSError as error:
            return str(error)
        return ""

    def _map(
        self,
        address: int,
        num_bytes: int,
        own: list[int],
        far: dict[str, list[int]],
        settings: dict[str, Any],
    ) -> None:
        """Map a block on this rank and on the ranks of other nodes; see `Settings` of `nic.py`."""
        self._random = random.Random(settings["seed"])
        self._hold_s, self._stall_s = settings["hold_s"], settings["stall_s"]
        self._stalled_until = 0.0
        mapped = {int(rank): Memory(OpenFile(*file), num_bytes) for rank, file in far.items()}
        self._blocks[address] = Block(address, num_bytes, Memory(OpenFile(*own), num_bytes), mapped)

    def _free(self, address: int) -> None:
        """Deliver all, then unmap a block, with the last view on it."""
        while not self._queue.is_empty:
            self._take()
        self._deliver_all()
        self._blocks.pop(address, None)
        self._lanes = {key: lane for key, lane in self._lanes.items() if key[0] != address}

    # --- Commands ----------------------------------------------------------------------------

    def _take(self) -> int:
        """Take up to BURST commands, and return how many."""
        for number in range(BURST):
            if self._queue.is_empty:
                return number
            self._begin(self._queue.take())
            if self._stall_s:
                self._stalled_until = time.monotonic() + self._stall_s
                self._stall_s = 0.0
                return number + 1
        return BURST

    def _begin(self, command: Command) -> None:
        if command.verb == Verb.QUIET:
            self._deliver_all()
            self._count_done()
            return
        lane = self._lanes.setdefault((command.own, command.rank), Lane())
        if command.verb == Verb.FENCE:
            if lane.num_left and (not lane.after_fences or lane.after_fences[-1]):
                lane.after_fences.append([])
                self._hold_less(lane)
            self._count_done()
            return
        message = self._message(lane, command)
        if lane.after_fences:
            lane.after_fences[-1].append(message)
        else:
            lane.num_left += 1
            self._start(message)

    def _message(self, lane: Lane, command: Command) -> Message:
        """What a command sends. Its words were checked by the rank."""
        source = to = words = memoryview(b"")
        flag = None
        if command.verb != Verb.WORD:
            block, offset = self._find(command.source)
            source = block.own.bytes[offset : offset + command.num_bytes]
            block, offset = self._find(command.to)
            to = block.far[command.rank].bytes[offset : offset + command.num_bytes]
        if command.verb != Verb.BYTES:
            block, offset = self._find(command.flag)
            words, flag = block.far[command.rank].words, offset // 8
        pieces = list(range(0, command.num_bytes, PIECE_BYTES))
        self._random.shuffle(pieces)
        return Message(lane, source, to, pieces, words, flag, command.value)

    def _find(self, address: int) -> tuple[Block, int]:
        """The block that holds an address of the rank, and where in it."""
        for block in self._blocks.values():
            if 0 <= address - block.address < block.num_bytes:
                return block, address - block.address
        raise LookupError(f"no block holds the address {address:#x}")

    # --- Delivery ----------------------------------------------------------------------------

    def _start(self, message: Message) -> None:
        """A message is on its way: half of those with a flag may go at once. Of the others, and of
        all bytes without a flag, some pieces may go before the rest is held."""
        if message.flag is None or self._random.random() < 0.5:
            num_pieces = len(message.pieces)
            message.num_late = num_pieces - self._random.randrange(max(1, num_pieces))
            if message.num_late == num_pieces:
                self._hold(message)
                return
        self._moving.append(message)

    def _hold(self, message: Message) -> None:
        """Hold a message for a random time, and bytes that nothing follows for a long one besides:
        so they, too, overtake one another."""
        is_last = message.flag is None and not message.lane.after_fences
        seconds = self._hold_s * self._random.random()
        if is_last:
            seconds += max(PUT_HOLD_S, self._hold_s)
        heapq.heappush(self._held, (time.monotonic() + seconds, next(self._numbers), message))

    def _hold_less(self, lane: Lane) -> None:
        """A fence follows what is held of a lane."""
        held, self._held = self._held, []
        for due, number, message in held:
            if message.lane is lane and message.flag is None:
                self._hold(message)
            else:
                heapq.heappush(self._held, (due, number, message))

    def _deliver_all(self) -> None:
        """Deliver what was taken, at once."""
        while any(lane.num_left for lane in self._lanes.values()):
            self._moving.extend(message for _, _, message in self._held)
            self._held.clear()
            for message in self._moving:
                message.num_late = 0
            self._deliver()

    def _deliver(self) -> int:
        """Deliver up to BURST pieces, and return how many."""
        now = time.monotonic()
        while self._held and self._held[0][0] <= now:
            message = heapq.heappop(self._held)[2]
            message.num_late = 0
            self._moving.append(message)
        for number in range(BURST):
            if not self._moving:
                return number
            self._deliver_piece(self._random.randrange(len(self._moving)))
        return BURST

    def _deliver_piece(self, index: int) -> None:
        message = self._moving[index]
        if message.pieces:
            at = message.pieces.pop()
            message.to[at : at + PIECE_BYTES] = message.source[at : at + PIECE_BYTES]
        if len(message.pieces) > message.num_late:
            return
        self._moving[index] = self._moving[-1]
        self._moving.pop()
        if message.pieces:
            self._hold(message)
            return
        if message.flag is not None:
            message.words[message.flag] = message.value  # after all pieces; one store of 8 bytes
        self._count_done()
        lane = message.lane
        lane.num_left -= 1
        while not lane.num_left and lane.after_fences:
            following = lane.after_fences.popleft()
            lane.num_left = len(following)
            for one in following:
                self._start(one)

    def _count_done(self) -> None:
        self._queue.words[Header.DONE] += 1


def main() -> None:
    """The descriptors of the queue and of the socket, and the process of the rank, are the
    arguments."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the rank's to handle
    queue, control, rank_pid = map(int, sys.argv[1:])
    Network(Queue(queue), socket.socket(fileno=control)).run(rank_pid)


if __name__ == "__main__":
    main()
