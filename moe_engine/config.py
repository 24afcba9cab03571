"""Choices that decide what is compiled. Made from dimensions alone, so that all ranks agree."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """Tile shape of a grouped GEMM.

    A program computes block_m rows times block_n rows of the weights (with SwiGLU: block_n / 2
    of gate and as many of up) in steps of block_k, `num_stages` of which are in flight. `group_m`
    tiles of rows are walked together before the next columns.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8

    @classmethod
    def choose(
        cls,
        dtype: torch.dtype,
        num_columns: int,
        rows_per_expert: int,
        capability: tuple[int, int] | None,
    ) -> GemmConfig:
        """Tiles that do not spill registers; `tests/test_compile.py` holds them to it.

        num_columns is that of the output, rows_per_expert an expectation, capability that of the
        GPU or None in the interpreter. Only block_m depends on the rows.
        """
        if capability is None:
            return cls(64, 64, 64, num_warps=4, num_stages=1)
        if dtype == torch.float32:  # no tensor cores: IEEE products
            return cls(64, 64, 16, num_warps=4, num_stages=2)
        block_m = 128 if rows_per_expert >= 256 else 64
        if capability[0] not in (9, 10):
            return cls(block_m, 128, 32, num_warps=8, num_stages=3)
        # Rows that do not start at multiples of 16 bytes are stored element by element, which
        # takes the registers of a wide tile.
        aligned = num_columns * dtype.itemsize % 16 == 0
        return cls(block_m, 256 if aligned else 128, 64, num_warps=8, num_stages=3)
