"""Host side of combine: return rows or sums of rows, then add them up at the source."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from ..lang import INTERPRETED
from ..routing import ExpertPlan
from ..slots import BLOCK_ROWS, RowLayout, Slots
from ..words import Words
from .kernels import final_sum_kernel, return_rows_kernel, return_sums_kernel

NUM_COPY_WARPS = 8
NUM_SUM_PROGRAMS = 2 if INTERPRETED else 264
WAIT_TOKENS = 16
"""Tokens whose returned rows are waited for together."""


def _sum_blocks(hidden: int, items: int, most_columns: int) -> tuple[int, int]:
    """(rows, columns) of the `items` fp32 sums that one program holds at a time."""
    columns = min(triton.next_power_of_2(hidden), most_columns)
    return min(WAIT_TOKENS, items // columns), columns


def return_rows(
    x: torch.Tensor,
    topk_weights: torch.Tensor | None,
    rank_prefix_matrix: torch.Tensor,
    num_comm_sms: int,
    slots: Slots,
) -> None:
    """Write rows x [N, H], in receive order, back to their sources; topk_weights float32 [N, K]
    travel along. Begins a call."""
    hidden = x.shape[1]
    words = Words.of(hidden, x.dtype)
    num_topk = topk_weights.shape[1] if topk_weights is not None else 0
    row = RowLayout(hidden * x.itemsize, num_topk)
    return_rows_kernel[(num_comm_sms,)](
        words.view(x),
        topk_weights,
        rank_prefix_matrix,
        slots.context.words,
        words.num_words,
        row.num_bytes,
        row.weights,
        HAS_WEIGHTS=num_topk > 0,
        NUM_TOPK=num_topk,
        TOPK_PAD=triton.next_power_of_2(max(1, num_topk)),
        ALIGNED=words.aligned,
        CHUNK_ROWS=slots.layout.chunk_rows(row.num_bytes),
        ROWS=BLOCK_ROWS,
        BLOCK_WORDS=words.block_words,
        num_warps=NUM_COPY_WARPS,
    )


def return_sums(
    y: torch.Tensor,
    plan: ExpertPlan,
    rank_prefix_matrix: torch.Tensor,
    num_comm_sms: int,
    slots: Slots,
) -> None:
    """Write one weighted sum of expert rows y [M, H] per received token to its source. Begins a
    call."""
    hidden = y.shape[1]
    _, max_rows, num_topk = plan.expert_row.shape
    row = RowLayout(hidden * y.itemsize)
    # Many rows at a time: a row has but few lanes here, and each is a read that waits for memory.
    block, block_h = _sum_blocks(hidden, 16384, 2048)
    return_sums_kernel[(num_comm_sms,)](
        y,
        plan.expert_row,
        plan.lane_weight,
        rank_prefix_matrix,
        slots.context.words,
        max_rows,
        hidden,
        row.num_bytes,
        NUM_TOPK=num_topk,
        ALIGNED=hidden * y.itemsize % 16 == 0,
        CHUNK_ROWS=slots.layout.chunk_rows(row.num_bytes),
        BLOCK=block,
        BLOCK_H=block_h,
        num_warps=32,
    )


def final_sum(
    out: torch.Tensor,
    out_weights: torch.Tensor | None,
    own_rows: torch.Tensor | None,
    bias: Sequence[torch.Tensor],
    send_head: torch.Tensor,
    rank_prefix_matrix: torch.Tensor,
    slots: Slots,
) -> None:
    """out [T, H] = biases + returned rows of each token, out_weights float32 [T, K] = the
    returned weights. Ends a call. own_rows: what `return_rows` was given, None after
    `return_sums`."""
    num_tokens, hidden = out.shape
    num_topk = out_weights.shape[1] if out_weights is not None else 0
    row = RowLayout(hidden * out.itemsize, num_topk)
    block, block_h = _sum_blocks(hidden, 8192, 8192)
    final_sum_kernel[(NUM_SUM_PROGRAMS,)](
        out,
        out_weights,
        own_rows,
        bias[0] if bias else None,
        bias[1] if len(bias) == 2 else None,
        send_head,
        rank_prefix_matrix,
        slots.context.words,
        num_tokens,
        hidden,
        row.num_bytes,
        row.weights,
        NUM_BIASES=len(bias),
        OWN_IN_PLACE=own_rows is not None,
        HAS_WEIGHTS=num_topk > 0,
        NUM_TOPK=num_topk,
        TOPK_PAD=triton.next_power_of_2(max(1, num_topk)),
        ALIGNED=hidden * out.itemsize % 16 == 0,
        RANKS_PAD=triton.next_power_of_2(slots.layout.num_ranks),
        CHUNK_ROWS=slots.layout.chunk_rows(row.num_bytes),
        GROUP=WAIT_TOKENS,
        BLOCK=block,
        BLOCK_H=block_h,
        num_warps=16,
    )
