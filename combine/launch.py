"""Host side of combine: return rows or sums of rows, then add them up at the source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..device.lang import INTERPRETED
from ..hardware import BYTES_IN_FLIGHT
from ..row_vectors import COPY_ROWS
from ..symm.slots import BARE_HEADER, RowLayout, Slots
from ..utils import next_power_of_2
from .kernels import final_sum_kernel, return_rows_kernel

NUM_SUM_PROGRAMS = 2 if INTERPRETED else 264
NUM_WARPS = 16
WAIT_TOKENS = 16
"""Tokens whose returned rows are waited for together."""


def num_push_programs(num_programs: int) -> int:
    """How many of a combine's programs push; the others sum. Nine nearly fill the link."""
    return 1 if INTERPRETED else min(num_programs, max(8, 9 * num_programs // 16))


def _sum_columns(hidden: int, items: int, rows: int) -> int:
    """Columns of the `items` fp32 sums that a program holds at a time, for so many rows."""
    return min(next_power_of_2(hidden), items // rows)


@dataclass(frozen=True, slots=True)
class Sums:
    """The sums that a combine makes: out [T, H] = biases + returned rows of each token, weights
    float32 [T, K] = the returned weights, or None; up to two biases [T, H]; send_head and
    rank_prefix_matrix of the dispatch; the number of rows that this rank returns."""

    out: torch.Tensor
    weights: torch.Tensor | None
    bias: Sequence[torch.Tensor]
    send_head: torch.Tensor
    rank_prefix_matrix: torch.Tensor
    num_rows: int

    @property
    def row(self) -> RowLayout:
        num_topk = 0 if self.weights is None else self.weights.shape[1]
        return RowLayout(self.out.shape[1] * self.out.itemsize, num_topk)

    def arguments(self, slots: Slots) -> dict[str, Any]:
        """What both kernels that sum are launched with."""
        num_tokens, hidden = self.out.shape
        row = self.row
        return dict(
            out=self.out,
            out_weights=self.weights,
            bias_0=self.bias[0] if self.bias else None,
            bias_1=self.bias[1] if len(self.bias) == 2 else None,
            send_head=self.send_head,
            rank_prefix_matrix=self.rank_prefix_matrix,
            context=slots.context.fields,
            num_tokens=num_tokens,
            num_rows=self.num_rows,
            region_rows=slots.layout.max_rows(row.num_bytes, BARE_HEADER),
            hidden=hidden,
            header_bytes=BARE_HEADER,
            row_bytes=row.num_bytes,
            weights_offset=row.weights,
            NUM_BIASES=len(self.bias),
            HAS_WEIGHTS=self.weights is not None,
            NUM_TOPK=row.num_topk,
            TOPK_PAD=next_power_of_2(max(1, row.num_topk)),
            ALIGNED=row.payload_bytes % 16 == 0,
            RANKS=slots.layout.num_ranks,
            RANKS_PAD=next_power_of_2(slots.layout.num_ranks),
            CHUNK_ROWS=slots.layout.chunk_rows(row.num_bytes),
            GROUP=WAIT_TOKENS,
            BLOCK_H=_sum_columns(hidden, 8192, WAIT_TOKENS),
            num_warps=NUM_WARPS,
        )


def return_rows(
    x: torch.Tensor,
    topk_weights: torch.Tensor | None,
    dispatched: torch.Tensor,
    sums: Sums,
    num_comm_sms: int,
    slots: Slots,
) -> None:
    """Write rows x [N, H], in receive order, back to their sources; topk_weights float32 [N, K]
    travel along. Some sums are made meanwhile. Begins a call, with the signature in the handle of
    the dispatch."""
    slots.context.step = "return_rows"
    columns = BYTES_IN_FLIGHT // x.itemsize // COPY_ROWS
    return_rows_kernel[(1 + num_comm_sms,)](
        x,
        topk_weights,
        dispatched,
        num_push_programs=num_push_programs(num_comm_sms),
        SPAN=slots.layout.span(sums.row.num_bytes),
        LANES=COPY_ROWS,
        COLUMNS=min(next_power_of_2(x.shape[1]), columns),
        **sums.arguments(slots),
    )


def final_sum(
    sums: Sums, own_rows: torch.Tensor, own_weights: torch.Tensor | None, slots: Slots
) -> None:
    """Make the sums that are left. Ends a call. own_rows, own_weights: what `return_rows` was
    given."""
    slots.context.step = "final_sum"
    final_sum_kernel[(NUM_SUM_PROGRAMS,)](
        own_rows=own_rows,
        own_weights=own_weights,
        **sums.arguments(slots),
    )
    slots.context.step = None
