"""Memory that grows when a dispatch needs more, unless it was made for a number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ..device.context import ContextField
from ..dispatch import DispatchLayout, Tokens
from ..errors import CapacityError, TooManyTokens
from ..symm.slots import ReturnRowLayout, RowLayout, SlotLayout, Slots, header_bytes
from .memory import MemoryEngine


class GrowingEngine(MemoryEngine):
    """An engine whose memory has room for max_tokens tokens of a rank, or grows if that is None.

    `new_slots(layout, was_captured, epoch)`, collective, makes the memory, or raises on all ranks
    where one of them has captured the memory before it.
    """

    def __init__(
        self,
        layout: SlotLayout,
        new_slots: Callable[[SlotLayout, bool, int], Slots],
        max_tokens: int | None,
    ):
        super().__init__(new_slots(layout, False, 0))
        self._new_slots, self._max_tokens = new_slots, max_tokens

    @property
    def grows(self) -> bool:
        """Whether memory grows where a dispatch needs more."""
        return self._max_tokens is None

    def make_room(self, tokens: Tokens, layout: DispatchLayout) -> bool:
        """Whether memory grows where that is needed: then there is room for a row now, and
        `has_grown` is to be asked after the exchange."""
        row = self._largest_row(tokens)
        header = header_bytes(layout.num_experts, self.slots.num_ranks)
        if self.grows and self.slots.layout.max_rows(row.num_bytes, header) < 1:
            self._grow(1, row, header)
        return self.grows

    def has_grown(self, tokens: Tokens, layout: DispatchLayout) -> bool:
        """Whether there was too little memory, all ranks alike: then the call begins anew."""
        if most_rows := self.slots.context.rows_wanted():
            header = header_bytes(layout.num_experts, self.slots.num_ranks)
            self._grow(most_rows, self._largest_row(tokens), header)
        return most_rows > 0

    def _grow(self, num_rows: int, row: RowLayout, header: int) -> None:
        """Replace the memory by more of it, for `num_rows` rows between two ranks and a quarter
        beyond. Collective: all ranks have seen the same counts; they meet as when the Buffer was
        made, under the deadline of the Buffer, and the host waits for the device. Old contents are
        lost."""
        old, layout = self.slots, self.slots.layout
        if num_rows > layout.most_rows:
            raise CapacityError(
                f"a rank has {num_rows} rows for another one, more than {layout.most_rows}. Send "
                "larger batches in parts."
            )
        num_rows = min(num_rows + num_rows // 4, layout.most_rows)
        region_bytes = header + num_rows * row.num_bytes
        if old.context.fields.is_cuda:
            torch.cuda.synchronize(old.context.fields.device)
        layout = replace(layout, region_bytes=region_bytes)
        epoch = int(old.context.fields[ContextField.EPOCH])
        self.slots = self._new_slots(layout, self._was_captured, epoch)
        self.slots.context.take_bad_ids(old.context)
        old.free()

    def _largest_row(self, tokens: Tokens) -> RowLayout:
        """The row that a region must hold: the tokens', and also that of rows on their way back,
        if its bytes are given or the memory grows."""
        row, returned_bytes = tokens.row, tokens.returned_bytes or 2 * tokens.x.shape[1]
        if self._max_tokens is not None and not tokens.returned_bytes:
            return row
        return replace(row, payload_bytes=max(row.payload_bytes, returned_bytes))

    def max_tokens(self, row: RowLayout | ReturnRowLayout, header: int) -> int:
        """Most tokens a rank may bring: what the Buffer was made for, else what fits a region."""
        fits = self.slots.layout.max_rows(row.num_bytes, header)
        return fits if self._max_tokens is None else min(fits, self._max_tokens)

    def check_capacity(
        self, num_tokens: int, row: RowLayout | ReturnRowLayout, header: int
    ) -> None:
        limit = self.max_tokens(row, header)
        if num_tokens > limit:
            raise TooManyTokens(
                f"rank {self.slots.context.rank}: {num_tokens} tokens of {row.payload_bytes} bytes "
                f"and top-{row.num_topk} in one call; this Buffer's memory "
                f"({self.slots.layout.num_bytes} bytes) takes {limit}{self._in_sub_batches}. Other "
                "ranks may be in the call, so make a new Buffer, with Buffer.for_tokens(...) for "
                "the largest batch, hidden size and top-k, or with the bytes of "
                "Buffer.size_hint(...)."
            )

    @property
    def _in_sub_batches(self) -> str:
        """What errors say of a Buffer whose layers go in sub-batches (`passes.py`)."""
        most = self._max_tokens or 0
        return f", and a layer in sub-batches {most}" if most > self.slots.layout.most_rows else ""
