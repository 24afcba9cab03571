"""The emulated network of a rank: what it posts to ranks of other nodes, and its checks.

Each rank has a process of its own in place of a network card (`nic_process.py`). It alone maps the
blocks of ranks of other nodes.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from ..deadline import MOST_S, timeout_seconds
from ..device import network
from ..errors import BackendError
from . import nic_process
from .nic_process import (
    MAX_REQUEST,
    NOTHING_WRONG,
    QUEUE_BYTES,
    WAKE,
    Command,
    Header,
    OpenFile,
    Queue,
    Verb,
)

PAUSE_S = 0.0005
"""Between two looks at a queue."""

_nic: Nic | None = None  # of this process


class Settings(NamedTuple):
    """How the network behaves. Each block that is allocated sets it anew."""

    seed: str  # of all random choices
    hold_s: float  # the longest time that a message with a flag is held
    stall_s: float  # how long nothing is delivered once, from the next command on

    @classmethod
    def of_environment(cls, rank: int) -> Settings:
        """MOE_ENGINE_NIC_SEED (0), _HOLD_S (0.003) and _STALL_S (0). BackendError where a time is
        no number of seconds."""
        seed = os.environ.get("MOE_ENGINE_NIC_SEED", "0")
        return cls(
            f"{seed}, rank {rank}",
            _seconds("MOE_ENGINE_NIC_HOLD_S", 0.003),
            _seconds("MOE_ENGINE_NIC_STALL_S", 0.0),
        )


class _Block(NamedTuple):
    """A symmetric block of this rank. `far`: the ranks of other nodes in its group."""

    address: int
    num_bytes: int
    far: frozenset[int]

    def holds(self, address: int, num_bytes: int) -> bool:
        return self.address <= address and address + num_bytes <= self.address + self.num_bytes


class Nic:
    """The network card of this process. `network` is the address of its queue.

    What a kernel posts is checked here, so that a BackendError is raised where the kernel is wrong.
    `own` is the address of this rank's block whose group ranks are numbered in, the first argument
    of all verbs; then comes the deadline in ns of a wait for room in the queue, or for delivery.
    """

    def __init__(self) -> None:
        self.num_messages, self.num_bytes = Counter[int](), Counter[int]()
        self._blocks: dict[int, _Block] = {}
        self._dropped: list[int] = []
        self._lock = threading.RLock()
        self._pid = os.getpid()
        descriptor = os.memfd_create("moe_engine_nic")
        self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            os.ftruncate(descriptor, QUEUE_BYTES)
            self._queue = Queue(descriptor)
            numbers = descriptor, control.fileno(), self._pid
            self._process = subprocess.Popen(
                # Without the environment's paths and site-packages, which it does not need.
                [sys.executable, "-I", "-S", nic_process.__file__, *map(str, numbers)],
                pass_fds=(descriptor, control.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        finally:
            os.close(descriptor)
            control.close()
        self.network = self._queue.address
        network.nics[self.network] = self

    @classmethod
    def of_process(cls) -> Nic:
        """The one of this process, started where there is none."""
        global _nic
        if _nic is None or _nic._pid != os.getpid() or _nic._process.poll() is not None:
            _nic = cls()
        return _nic

    @property
    def pid(self) -> int:
        """The process of the card."""
        return self._process.pid

    # --- Blocks ------------------------------------------------------------------------------

    def map(
        self,
        address: int,
        num_bytes: int,
        rank: int,
        own: OpenFile,
        far: Mapping[int, OpenFile],
    ) -> None:
        """Map the block at `address` on this rank, and those of its ranks of other nodes, whose
        files are open until this returns. BackendError where one cannot be mapped."""
        settings = Settings.of_environment(rank)._asdict()
        request = {"num_bytes": num_bytes, "own": own, "far": far, "settings": settings}
        with self._lock:
            while self._dropped:
                self._request(what="free", address=self._dropped.pop())
            self._request(what="map", address=address, **request)
            self._blocks[address] = _Block(address, num_bytes, frozenset(far))

    def free(self, address: int) -> None:
        """Deliver what this rank has posted, then unmap a block and its like on other ranks."""
        with self._lock, suppress(BackendError):  # the process is gone, and with it its mappings
            if self._blocks.pop(address, None) is not None:
                self._request(what="free", address=address)

    def drop(self, address: int) -> None:
        """Free a block that was collected, before the next one is mapped. Waits for nothing, as it
        may be called at any time."""
        if self._blocks.pop(address, None) is not None:
            self._dropped.append(address)

    def _request(self, **request: object) -> None:
        seconds = timeout_seconds()
        self._control.settimeout(seconds)
        try:
            self._control.send(json.dumps(request).encode())
            answer = self._control.recv(MAX_REQUEST)
        except TimeoutError as error:
            self._process.kill()  # a late answer would be taken for that of the next request
            raise BackendError(
                f"the process {self.pid} of the emulated network did not {request['what']} a block "
                f"within {seconds:g} s. MOE_ENGINE_TIMEOUT_S sets the deadline."
            ) from error
        except OSError:
            answer = b""
        except BaseException:  # an interrupt
            self._process.kill()
            raise
        if not answer:
            raise self._gone()
        if answer != NOTHING_WRONG:
            raise BackendError(
                f"the emulated network cannot map the memory of ranks of other nodes: "
                f"{answer.decode()}. Emulated ranks must be processes of one user that see each "
                "other in /proc."
            )

    # --- Verbs -------------------------------------------------------------------------------

    def send(
        self,
        own: int,
        timeout_ns: int,
        to: int,
        source: int,
        num_bytes: int,
        flag: int,
        value: int,
        rank: int,
    ) -> None:
        """See `device/network.py`, as for the other verbs."""
        what = f"send({to=:#x}, {source=:#x}, {num_bytes=}, {flag=:#x}, {rank=})"
        self._check_rank(own, rank, what)
        self._check_bytes(to, source, num_bytes, rank, what)
        self._check_flag(flag, rank, what)
        command = Command(Verb.SEND, own, rank, to, source, num_bytes, flag, value)
        self._post(command, timeout_ns)

    def send_bytes(
        self, own: int, timeout_ns: int, to: int, source: int, num_bytes: int, rank: int
    ) -> None:
        what = f"send_bytes({to=:#x}, {source=:#x}, {num_bytes=}, {rank=})"
        self._check_rank(own, rank, what)
        self._check_bytes(to, source, num_bytes, rank, what)
        self._post(Command(Verb.BYTES, own, rank, to, source, num_bytes), timeout_ns)

    def send_word(self, own: int, timeout_ns: int, to: int, value: int, rank: int) -> None:
        what = f"send_word({to=:#x}, {value=}, {rank=})"
        self._check_rank(own, rank, what)
        self._check_flag(to, rank, what)
        self._post(Command(Verb.WORD, own, rank, flag=to, value=value), timeout_ns)

    def fence(self, own: int, timeout_ns: int, rank: int) -> None:
        self._check_rank(own, rank, f"fence({rank=})")
        self._post(Command(Verb.FENCE, own, rank), timeout_ns)

    def quiet(self, own: int, timeout_ns: int) -> None:
        words = self._queue.words
        self._post(Command(Verb.QUIET, own), timeout_ns)
        deadline = time.monotonic_ns() + timeout_ns
        while words[Header.DONE] < words[Header.POSTED]:
            self._pause(deadline, timeout_ns)

    def _post(self, command: Command, timeout_ns: int) -> None:
        with self._lock:
            if self._process.poll() is not None:
                raise self._gone()
            deadline = time.monotonic_ns() + timeout_ns
            while self._queue.is_full:
                self._pause(deadline, timeout_ns)
            self.num_messages[command.rank] += command.num_bytes > 0
            self.num_bytes[command.rank] += command.num_bytes
            if self._queue.post(command):
                with suppress(OSError):  # it has other messages to wake from, or is gone
                    self._control.send(WAKE, socket.MSG_DONTWAIT)

    def _pause(self, deadline: int, timeout_ns: int) -> None:
        """Wait a moment for the process. BackendError where it is gone or the deadline has
        passed."""
        if self._process.poll() is not None:
            raise self._gone()
        if time.monotonic_ns() > deadline:
            posted, done = (self._queue.words[word] for word in (Header.POSTED, Header.DONE))
            raise BackendError(
                f"the emulated network has delivered {done} of {posted} commands, and no more "
                f"within {timeout_ns / 1e9:g} s. Its process {self.pid} is stuck; make a new "
                "Buffer. MOE_ENGINE_TIMEOUT_S sets the deadline."
            )
        time.sleep(PAUSE_S)

    def _gone(self) -> BackendError:
        return BackendError(
            f"the process {self.pid} of the emulated network is gone, exit code "
            f"{self._process.poll()}: see what it wrote to stderr. Make a new Buffer."
        )

    # --- Checks ------------------------------------------------------------------------------

    def _check_rank(self, own: int, rank: int, what: str) -> None:
        if own not in self._blocks:
            raise BackendError(
                f"{what}: the context is of no block on several nodes that is allocated now. Pass "
                "that of a Buffer, before it is destroyed."
            )
        far = self._blocks[own].far
        if rank not in far:
            raise BackendError(
                f"{what}: rank {rank} is not of another node; those are {sorted(far)}. Reach the "
                "ranks of this node by stores through `symm_at`."
            )

    def _check_bytes(self, to: int, source: int, num_bytes: int, rank: int, what: str) -> None:
        if num_bytes <= 0:
            raise BackendError(f"{what}: num_bytes must be positive; `send_word` sets a flag alone")
        self._check_place("source", source, num_bytes, None, what)
        self._check_place("to", to, num_bytes, rank, what)

    def _check_flag(self, flag: int, rank: int, what: str) -> None:
        self._check_place("the flag", flag, 8, rank, what)
        if flag % 8:
            raise BackendError(f"{what}: the flag must lie at a multiple of 8 bytes")

    def _check_place(
        self, name: str, address: int, num_bytes: int, rank: int | None, what: str
    ) -> None:
        """Bytes must lie inside a symmetric block, which `rank` has too."""
        blocks = [block for block in self._blocks.values() if rank is None or rank in block.far]
        if not any(block.holds(address, num_bytes) for block in blocks):
            places = ", ".join(
                f"{block.address:#x} to {block.address + block.num_bytes:#x}" for block in blocks
            )
            raise BackendError(
                f"{what}: {name} lies outside the symmetric blocks of this rank, which are "
                f"{places}. Pass this rank's own address of something in one of them."
            )


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name, str(default))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= MOST_S:  # NaN is not
        raise BackendError(f"{name} is {text!r}; it must be a number of seconds, 0 or more.")
    return seconds
