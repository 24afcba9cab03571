"""Which layer a call of a Buffer is of, and how many calls were refused.

Ranks pair their calls by the order in which they make them. Layers of equal sizes would pair in any
order, with wrong results and without an error, and so would the calls of a rank that is one behind
because one was refused. So the signature that ranks compare as a call begins (see
`device/signature.py`) has two more numbers: the *caller*, and how many calls of this rank were
refused before they sent anything.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from heapq import heappop, heappush

from .errors import DtypeError

NO_CALLER = 0
MOST_NUMBER = 2**30 - 1
NUMBER = re.compile(r"0|[1-9][0-9]{0,9}")
"""Tags that are numbers, below MOST_NUMBER, have callers that tell the number."""
MOST_FORWARDS = 1024
"""The number of forwards that may be in flight; of more the oldest gives up its number."""

Tag = str | int
"""Which layer of a model a call is of, equal on all ranks."""

_tag_of_block: ContextVar[Tag | None] = ContextVar("tag_of_block", default=None)


@contextmanager
def calls_tagged(tag: Tag) -> Iterator[None]:
    """Within the block the calls of this thread say that they are of this layer, unless they have a
    `tag` of their own. It serves the verbs of DeepEP, which have no such argument:

        with calls_tagged("layers.3.mlp"):
            recv_x, *_ = buffer.dispatch(...)

    A combine and a cached dispatch name their dispatch by themselves. See `moe_engine.moe_ffn`.
    """
    token = _tag_of_block.set(tag)
    try:
        yield
    finally:
        _tag_of_block.reset(token)


class Callers:
    """The callers of one Buffer.

    A caller is an int32: 0 for a call without a tag, a positive one for a layer, which follows from
    its tag alone, and a negative one for the backward of a forward, which follows from the number
    of that forward: the least that no other forward in flight has. So it is the same on all ranks
    that call the same layers, and in each step of a training for the same layer, so that prepared
    launches stay as they are. Tags that are numbers, as ints or in decimal, have even callers, by
    which errors can tell the tag; others have odd ones, by which they can where this rank has used
    the tag.

    running: the caller of the running call, which `streams.Call` sets. num_refused: the calls that
    were refused on this rank; last_refused: which verb refused the last of them, and why.
    """

    def __init__(self) -> None:
        self.running = NO_CALLER
        self.num_refused, self.last_refused = 0, ""
        self._tags: dict[int, str] = {}
        self._numbers: dict[Tag, int] = {}
        self._num_named: dict[str, int] = {}
        self._in_flight: dict[int, None] = {}
        self._free_numbers: list[int] = []
        self._layers: dict[int, int] = {}

    def number(self, tag: Tag) -> int:
        """The caller that a tag stands for. DtypeError for what is no tag."""
        if type(tag) is not str and type(tag) is not int:
            raise DtypeError(f"tag is a {type(tag).__name__}; it must be a str, an int or None.")
        found = self._numbers.get(tag)
        if found is None:
            text = str(tag)
            found = zlib.crc32(text.encode()) >> 1 | 1
            if NUMBER.fullmatch(text) and int(text) < MOST_NUMBER:
                found = 2 * int(text) + 2
            self._numbers[tag], self._tags[found] = found, text
        return found

    def of_block(self) -> int:
        """The caller by the innermost `calls_tagged`."""
        tag = _tag_of_block.get()
        return NO_CALLER if tag is None else self.number(tag)

    def new_tag(self, name: str) -> str:
        """A tag of a new layer: its name, with a number where others had the name before."""
        count = self._num_named[name] = self._num_named.get(name, 0) + 1
        tag = name if count == 1 else f"{name} ({count})"
        self.number(tag)
        return tag

    def new_forward(self) -> int:
        """The number of the forward that runs, whose backward is to name it; see `backward_of`."""
        if len(self._in_flight) == MOST_FORWARDS:  # of some there may never be a backward
            self.end_forward(next(iter(self._in_flight)))
        number = heappop(self._free_numbers) if self._free_numbers else len(self._in_flight) + 1
        self._in_flight[number], self._layers[number] = None, self.running
        return number

    def end_forward(self, number: int) -> None:
        """Its last backward runs: another forward may have the number."""
        if number in self._in_flight:
            del self._in_flight[number]
            heappush(self._free_numbers, number)

    @staticmethod
    def backward_of(forward: int) -> int:
        """The caller of the backward of this forward."""
        return -1 - forward % 2**31

    def name(self, caller: int) -> str:
        """What errors call a caller."""
        if caller == NO_CALLER:
            return "no layer"
        if caller < 0:
            return self._name_of_backward(-1 - caller)
        if caller % 2 == 0:
            return f"layer {caller // 2 - 1}"
        tag = self._tags.get(caller)
        return "a layer that this rank has never called" if tag is None else f"layer {tag!r}"

    def _name_of_backward(self, forward: int) -> str:
        name, layer = f"the backward of forward {forward}", self._layers.get(forward)
        return name if layer is None else f"{name}, of {self.name(layer)}"

    def refuse(self, verb: str, error: BaseException) -> None:
        """Note that a verb refused a call."""
        self.num_refused += 1
        self.last_refused = f"{verb}, by {type(error).__name__}: {error}"
