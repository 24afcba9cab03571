"""Where things lie in the memory of the low-latency calls: a ring of slots, one call each.

    device context | notices
    done[D, R] | counts[D, R, MAX_COUNTS] | row_flags[D, R, MAX_ROWS]
    slot 0 | slot 1 | ...
    slot   = region of rank 0 | region of rank 1 | ...       (written by that rank)
    region = header | row 0 | row 1 | ...

Row t is that of token t, see `LowLatencyRow`. Only a combine has something in the header: routing
weights, float32 [T, K]. A dispatch sends its counts in `counts`, each together with the epoch.

Unlike those of `slots.py`, the flags belong to a slot, not to the Buffer: calls may be received in
any order, as hooks are called. A flag is raised to the epoch of the call that uses the slot.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton.language as tl

from ..callers import Callers
from ..checks import MAX_LOW_LATENCY_TOKENS
from ..device.constants import constants
from ..device.context import ContextField, Kind
from ..device.ring import FIELDS, MAX_COUNTS, CallConfig
from ..utils import LINE_BYTES, next_power_of_2, round_up
from .base import SymmetricTensor
from .layout import BlockLayout, RankMemory, WireRow

MAX_ROWS = MAX_LOW_LATENCY_TOKENS
"""Rows from one rank to another in a call."""
MAX_LOCAL_EXPERTS = MAX_COUNTS.value - FIELDS.value
"""Experts of a rank."""
HINT_TOPK = 32
"""The top-k that a size hint makes room for, as it does not know the caller's."""


@dataclass(frozen=True, slots=True)
class LowLatencyRow(WireRow):
    """One row on the wire. A dispatch's has a trailer, int32: for each slot k of the top-k its
    expert's index on the receiver, -1 where another rank has the expert [K] | how many tokens
    before this one its rank sends to that expert [K] | routing weights, float32 [K]."""

    @property
    def num_bytes(self) -> int:
        return round_up(self.trailer + 12 * self.num_topk, LINE_BYTES)


def header_bytes(max_tokens: int, num_topk: int) -> int:
    """Bytes that precede the rows of a region: room for routing weights."""
    return round_up(4 * max_tokens * num_topk, LINE_BYTES)


def region_bytes(max_tokens: int, num_topk: int, hidden_bytes: int) -> int:
    """Bytes of a region for calls of up to `max_tokens` rows of `hidden_bytes` payload."""
    row = LowLatencyRow(hidden_bytes, num_topk)
    return header_bytes(max_tokens, num_topk) + max_tokens * row.num_bytes


@dataclass(frozen=True, slots=True)
class RingLayout(BlockLayout):
    """Offsets and sizes of the block of low-latency calls."""

    flags_per_rank = MAX_ROWS
    too_small = (
        "low-latency calls of {num_ranks} ranks got num_rdma_bytes = {num_bytes}; their flags "
        "alone take {flags}. Ask Buffer.get_low_latency_rdma_size_hint(...)."
    )

    def num_flags(self) -> dict[ContextField, int]:
        num_regions = self.num_slots * self.num_ranks
        return {
            ContextField.DONE: num_regions,
            ContextField.COUNT_FLAGS: num_regions * MAX_COUNTS.value,
            ContextField.CHUNK_FLAGS: num_regions * MAX_ROWS,
        }


class Ring(RankMemory[RingLayout]):
    """The memory of low-latency calls with its layout and device context. `new_block(num_bytes)`
    makes it, collectively."""

    def __init__(
        self,
        new_block: Callable[[int], SymmetricTensor],
        layout: RingLayout,
        rank: int,
        timeout_s: float,
        callers: Callers | None = None,
    ) -> None:
        block = new_block(layout.num_bytes)
        super().__init__(layout, rank, block, timeout_s, callers=callers)
        self.context.epoch_is_running = True

    def config(
        self,
        kind: Kind,
        row: LowLatencyRow,
        num_topk: int,
        num_experts: int,
        dtype: torch.dtype,
        block: int,
        row_format: str | None = None,
        block_m: int = 0,
    ) -> CallConfig:
        """What a kernel of a call is compiled for. dtype: in which type it moves rows; block, a
        power of two: the columns that hold a row; row_format: that of a dispatch; block_m: rows of
        the tiles that it cuts them into."""
        sizes = kind, row, num_topk, num_experts, dtype, block
        return _config(*sizes, row_format, block_m, self.num_ranks, self.context.shrinks)


@functools.cache
def _config(
    kind: Kind,
    row: LowLatencyRow,
    num_topk: int,
    num_experts: int,
    dtype: torch.dtype,
    block: int,
    row_format: str | None,
    block_m: int,
    num_ranks: int,
    shrinks: bool,
) -> CallConfig:
    config = CallConfig(
        NUM_TOPK=num_topk,
        ALIGNED=row.payload_bytes % 16 == 0,
        RANKS=num_ranks,
        EXPERTS=num_experts // num_ranks,
        BLOCK=block,
        SHRINK=shrinks,
        FORMAT=row_format,
        VEC=getattr(tl, str(dtype).removeprefix("torch.")),
        KIND=int(kind),
        NUM_EXPERTS=num_experts,
        K_PAD=next_power_of_2(num_topk),
        ENTRY=1 + 3 * num_topk,
        BLOCK_M=block_m,
    )
    return constants(config)
