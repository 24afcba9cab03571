"""Rows as opaque vectors: how the host shows a payload of any type to the copy kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .device.lang import INTERPRETED
from .hardware import BYTES_IN_FLIGHT
from .utils import next_power_of_2

COPY_ROWS = 32
"""Rows that a program copies at a time."""


@dataclass(frozen=True, slots=True)
class RowVectors:
    """The type and the number of the vectors of a row, and whether rows begin at 16 bytes."""

    dtype: torch.dtype
    num_vecs: int
    aligned: bool

    @classmethod
    def of(cls, hidden: int, dtype: torch.dtype) -> RowVectors:
        """The widest vectors, up to 4 bytes, that `hidden` items of `dtype` split into."""
        row_bytes = hidden * dtype.itemsize
        size, vector = next(
            (size, vector)
            for size, vector in ((4, torch.int32), (2, torch.int16), (1, torch.int8))
            if row_bytes % size == 0
        )
        return cls(vector, row_bytes // size, row_bytes % 16 == 0)

    def view(self, rows: torch.Tensor) -> torch.Tensor:
        """A contiguous [N, H] tensor as [N, num_vecs] vectors of the same memory."""
        return rows.view(self.dtype)

    @property
    def block_vecs(self) -> int:
        """Vectors of a row that a program copies at a time."""
        limit = next_power_of_2(self.num_vecs)
        return limit if INTERPRETED else min(limit, BYTES_IN_FLIGHT // 4 // COPY_ROWS)
