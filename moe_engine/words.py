"""Rows as opaque words: how the host shows a payload of any type to the copy kernels."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton

from .lang import INTERPRETED

COPY_ROWS = 32
"""Rows that a program copies at a time."""


@functools.cache
def bytes_in_flight() -> int:
    """What one program holds in registers between load and store: NVLink needs it (measured).
    Before Hopper the compiler finds registers for half of it."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    return 64 * 1024 if capability >= (9, 0) else 32 * 1024


@dataclass(frozen=True, slots=True)
class Words:
    """Type and number of the words of a row, and how many of them a kernel copies at a time."""

    dtype: torch.dtype
    num_words: int
    aligned: bool

    @classmethod
    def of(cls, hidden: int, dtype: torch.dtype) -> Words:
        """The widest words, up to 4 bytes, that `hidden` items of `dtype` split into."""
        row_bytes = hidden * dtype.itemsize
        size, word = next(
            (size, word)
            for size, word in ((4, torch.int32), (2, torch.int16), (1, torch.int8))
            if row_bytes % size == 0
        )
        return cls(word, row_bytes // size, row_bytes % 16 == 0)

    def view(self, rows: torch.Tensor) -> torch.Tensor:
        """A contiguous [N, H] tensor as [N, num_words] words of the same memory."""
        return rows.view(self.dtype)

    @property
    def block_words(self) -> int:
        """Words of a row that a program copies at a time."""
        limit = triton.next_power_of_2(self.num_words)
        return limit if INTERPRETED else min(limit, bytes_in_flight() // 4 // COPY_ROWS)
