"""Host side of low-latency dispatch: what it returns, and its launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..device.lang import INTERPRETED
from ..hardware import has_pdl, pdl_options
from ..row_vectors import RowVectors
from ..symm.ring import LowLatencyRow, Ring, message_bytes
from ..utils import next_power_of_2
from .low_latency_send_kernels import low_latency_dispatch_kernel

NUM_WARPS = 8
SENT_AT_ONCE = 128
"""Tokens whose programs leave room for others beside them, two on an SM."""


def num_receive_programs(num_tokens: int) -> int:
    """Those beside the sending programs, or as many as find room once these are through."""
    return 3 if INTERPRETED else 131 if num_tokens <= SENT_AT_ONCE else 262


class LowLatencyHandle(NamedTuple):
    """What `low_latency_combine` needs from a dispatch; the first five are DeepEP's."""

    src_info: torch.Tensor  # int32 [L, R * M]: each received row's token on its source
    layout_range: torch.Tensor  # int64 [L, R]: begin << 32 | count of each source's rows
    num_max_dispatch_tokens_per_rank: int
    hidden: int
    num_experts: int
    returns: torch.Tensor  # int32 [R, M, 1 + 3 * K]: see `low_latency_dispatch_kernel`
    call: torch.Tensor  # int64 [1 + R]: epoch of the dispatch, tokens of each rank


@dataclass(frozen=True, slots=True)
class Sending:
    """A low-latency dispatch: x [T, H] contiguous, bf16 or fp32; topk_idx int64 [T, K];
    topk_weights float32 [T, K], or None where they come with the combine; the most tokens of a
    rank; the format of rows on their way, see `low_latency_dispatch_kernel`."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor | None
    max_tokens: int
    num_experts: int
    row_format: str

    @property
    def is_cast(self) -> bool:
        return self.row_format not in ("bf16", "fp32")

    @property
    def num_scales(self) -> int:
        """4-byte words of scales of a row."""
        hidden = self.x.shape[1]
        return 0 if not self.is_cast else hidden // (512 if self.row_format == "ue8m0" else 128)

    @property
    def vectors(self) -> RowVectors:
        dtype = torch.float8_e4m3fn if self.is_cast else self.x.dtype
        return RowVectors.of(self.x.shape[1], dtype)

    @property
    def row(self) -> LowLatencyRow:
        hidden = self.x.shape[1]
        payload_bytes = hidden if self.is_cast else hidden * self.x.itemsize
        return LowLatencyRow(payload_bytes, self.topk_idx.shape[1], self.num_scales)


@dataclass(frozen=True, slots=True)
class Packed:
    """What a rank has received, by expert.

    x [L, R * M, H], scales int32 [L, S, R * M] or None, counts int32 [L], src_info and layout_range
    as in the handle; or compact: x [N, H], counts int32 [L + 1], where each expert's rows begin,
    without src_info and layout_range. returns and call: see `LowLatencyHandle`.
    """

    x: torch.Tensor
    scales: torch.Tensor | None
    counts: torch.Tensor
    src_info: torch.Tensor | None
    layout_range: torch.Tensor | None
    returns: torch.Tensor
    call: torch.Tensor


def new_packed(rows: Sending, num_ranks: int, compact: bool) -> Packed:
    """Room for what a rank receives."""
    num_local, num_topk = rows.num_experts // num_ranks, rows.topk_idx.shape[1]
    most, hidden = num_ranks * rows.max_tokens, rows.x.shape[1]
    new, dtype = rows.topk_idx.new_empty, rows.x.dtype
    returns = new((num_ranks, rows.max_tokens, 1 + 3 * num_topk), dtype=torch.int32)
    call = new(1 + num_ranks)
    if compact:
        num_rows = most * min(num_topk, num_local)
        x, counts = new((num_rows, hidden), dtype=dtype), new(num_local + 1, dtype=torch.int32)
        return Packed(x, None, counts, None, None, returns, call)
    x = new((num_local, most, hidden), dtype=torch.float8_e4m3fn if rows.is_cast else dtype)
    scales = None
    if rows.is_cast:
        scales = new((num_local, rows.num_scales, most), dtype=torch.int32)
    counts = new(num_local, dtype=torch.int32)
    src_info = new((num_local, most), dtype=torch.int32)
    return Packed(x, scales, counts, src_info, new((num_local, num_ranks)), returns, call)


def low_latency_dispatch(
    rows: Sending,
    out: Packed,
    recv_stats: torch.Tensor | None,
    wait_stats: torch.Tensor | None,
    phases: str,
    shrink: bool,
    ring: Ring,
) -> None:
    """Send the rows, pack what comes, or both: phases "send", "receive" or "both". recv_stats int32
    [L] and wait_stats int64 [R] (ns) are added to."""
    ring.context.step = f"low_latency_dispatch, {phases}"
    num_ranks, num_tokens = ring.num_ranks, len(rows.x)
    num_local, num_topk = rows.num_experts // num_ranks, rows.topk_idx.shape[1]
    vectors, row = rows.vectors, rows.row
    block = next_power_of_2(rows.x.shape[1] if rows.is_cast else vectors.num_vecs)
    grid = 0 if phases == "receive" else 1 + num_ranks + num_tokens
    grid += 0 if phases == "send" else num_receive_programs(num_tokens)
    low_latency_dispatch_kernel[(grid,)](
        rows.x if rows.is_cast else vectors.view(rows.x),
        rows.topk_idx,
        rows.topk_weights,
        vectors.view(out.x),
        out.scales,
        out.counts,
        out.src_info,
        out.layout_range,
        out.returns,
        recv_stats,
        wait_stats,
        out.call,
        ring.context.fields,
        num_tokens,
        rows.max_tokens,
        vectors.num_vecs,
        message_bytes(rows.max_tokens, num_topk),
        row.record,
        row.num_bytes,
        NUM_TOPK=num_topk,
        FORMAT=rows.row_format,
        ALIGNED=row.payload_bytes % 16 == 0,
        RANKS=num_ranks,
        EXPERTS=num_local,
        BLOCK=max(128, block),
        PHASES=phases,
        SHRINK=shrink,
        PDL=has_pdl(),
        num_warps=NUM_WARPS,
        **pdl_options(),
    )
    ring.context.step = None
