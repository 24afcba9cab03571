"""The handle of a low-latency dispatch: one allocation, and the tensors that lie in it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from .utils import round_up

INT_BYTES, PART_BYTES = 4, 16
"""Bytes of an item of the memory; parts begin at multiples of PART_BYTES."""


class Part(NamedTuple):
    """A tensor that lies in the memory of a handle, from item `begin` on."""

    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_items(self) -> int:
        """int32 items of the memory that it takes."""
        return prod(self.shape) * self.dtype.itemsize // INT_BYTES

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor."""
        items = memory[self.begin : self.begin + self.num_items]
        return items.view(self.dtype).view(self.shape)


class LowLatencySizes(NamedTuple):
    """The sizes of a low-latency dispatch: the most tokens of a rank (M), the columns of a token
    (H), and the numbers of experts, of ranks (R) and of experts of a token (K)."""

    max_tokens: int
    hidden: int
    num_experts: int
    num_ranks: int
    num_topk: int

    @property
    def num_local(self) -> int:
        """Experts of a rank (L)."""
        return self.num_experts // self.num_ranks


@functools.cache
def parts(sizes: LowLatencySizes) -> dict[str, Part]:
    """The parts of a handle's memory by name, in their order; see `LowLatencyHandle`."""
    max_tokens, _, _, num_ranks, num_topk = sizes
    num_local, num_rows = sizes.num_local, num_ranks * max_tokens
    shapes = {
        "counts": ((num_local,), torch.int32),
        "src_info": ((num_local, num_rows), torch.int32),
        "layout_range": ((num_local, num_ranks), torch.int64),
        "returns": ((num_ranks, max_tokens, 1 + 3 * num_topk), torch.int32),
        "call": ((1 + num_ranks,), torch.int64),
    }
    found, begin = dict[str, Part](), 0
    for name, of in shapes.items():
        found[name] = Part(begin, *of)
        begin = round_up(begin + found[name].num_items, PART_BYTES // INT_BYTES)
    return found


def num_items(sizes: LowLatencySizes) -> int:
    """int32 items of a handle's memory."""
    *_, last = parts(sizes).values()
    return last.begin + last.num_items


@dataclass(slots=True, eq=False)
class LowLatencyHandle(Sequence[Any]):
    """What `low_latency_combine` needs from a dispatch.

    As a sequence it is DeepEP's five items: src_info int32 [L, R * M], each received row's token on
    its source; layout_range int64 [L, R], begin << 32 | count of each source's rows; M; H; the
    number of experts.

    Its tensors are views of `memory`, int32, made when they are asked for, as few callers ask.
    """

    memory: torch.Tensor
    sizes: LowLatencySizes

    @property
    def counts(self) -> torch.Tensor:
        """int32 [L]: the rows of each local expert."""
        return self._part("counts")

    @property
    def src_info(self) -> torch.Tensor:
        """See above."""
        return self._part("src_info")

    @property
    def layout_range(self) -> torch.Tensor:
        """See above."""
        return self._part("layout_range")

    @property
    def returns(self) -> torch.Tensor:
        """int32 [R, M, 1 + 3 * K]: see `Received`."""
        return self._part("returns")

    @property
    def call(self) -> torch.Tensor:
        """int64 [1 + R]: the dispatch, see `device.ring.open_slot`, and the tokens of each rank."""
        return self._part("call")

    def _part(self, name: str) -> torch.Tensor:
        return parts(self.sizes)[name].of(self.memory)

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]

    def __iter__(self) -> Iterator[Any]:
        return iter((self.src_info, self.layout_range, *self.sizes[:3]))
