"""Host side of low-latency dispatch: what it sends and returns, and its launch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..device.context import Kind
from ..device.ring import Rows
from ..grouped_gemm.schedule import TileSchedule
from ..hardware import gpu
from ..low_latency_handle import LowLatencyHandle, LowLatencySizes, num_items
from ..row_vectors import RowVectors
from ..symm.ring import LowLatencyRow, Ring, header_bytes
from ..utils import next_power_of_2
from .low_latency_kernels import low_latency_dispatch_kernel
from .low_latency_receive_kernels import Received
from .low_latency_send_kernels import SentTokens

NUM_WARPS = 8
SENT_AT_ONCE = 128
"""The most tokens whose sending programs leave room for receiving programs to run concurrently:
two programs fit on an SM."""


def num_receive_programs(num_tokens: int) -> int:
    """Programs that receive: one for nearly each SM if they run concurrently with the sending
    programs, else two, which begin as the sending programs end."""
    per_sm = 1 if num_tokens <= SENT_AT_ONCE else 2
    return max(3, per_sm * (gpu().num_sms - 1))


class ReceivedRows(NamedTuple):
    """What a low-latency dispatch returns, packed by expert."""

    x: torch.Tensor  # [L, R * M, H]
    scales: torch.Tensor | None  # [L, R * M, S], see `new_scales`
    counts: torch.Tensor  # int32 [L], a part of `memory`
    memory: torch.Tensor  # of a `LowLatencyHandle`

    @classmethod
    def empty(cls, tokens: LowLatencyTokens, num_ranks: int) -> ReceivedRows:
        """Room for what a rank receives."""
        sizes, most = tokens.sizes(num_ranks), num_ranks * tokens.max_tokens
        x = tokens.x.new_empty((sizes.num_local, most, sizes.hidden), dtype=tokens.sent_dtype)
        memory = tokens.x.new_empty(num_items(sizes), dtype=torch.int32)
        counts = LowLatencyHandle(memory, sizes).counts
        return cls(x, new_scales(tokens, sizes.num_local, most), counts, memory)


class LowLatencyTokens(NamedTuple):
    """What a low-latency dispatch sends: x [T, H] contiguous, bf16 or fp32; topk_idx int64 [T, K];
    topk_weights float32 [T, K], or None where combine brings them; the most tokens of a rank; the
    format of rows on the wire, see `low_latency_dispatch_kernel`."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor | None
    max_tokens: int
    num_experts: int
    row_format: str

    @property
    def num_topk(self) -> int:
        return self.topk_idx.shape[1]

    @property
    def is_cast(self) -> bool:
        return self.row_format not in ("bf16", "fp32")

    @property
    def sent_dtype(self) -> torch.dtype:
        """The dtype of rows on the wire."""
        return torch.float8_e4m3fn if self.is_cast else self.x.dtype

    @property
    def num_scales(self) -> int:
        """Scales of a row, 4 bytes each."""
        hidden = self.x.shape[1]
        return 0 if not self.is_cast else hidden // (512 if self.row_format == "ue8m0" else 128)

    @property
    def vectors(self) -> RowVectors:
        return RowVectors.of(self.x.shape[1], self.sent_dtype)

    @property
    def row(self) -> LowLatencyRow:
        hidden = self.x.shape[1]
        payload_bytes = hidden if self.is_cast else hidden * self.x.itemsize
        return LowLatencyRow(payload_bytes, self.num_topk, self.num_scales)

    def sizes(self, num_ranks: int) -> LowLatencySizes:
        """Returns the sizes of their dispatch."""
        sizes = self.max_tokens, self.x.shape[1], self.num_experts
        return LowLatencySizes(*sizes, num_ranks, self.num_topk)


def new_compact(tokens: LowLatencyTokens, num_ranks: int) -> Received:
    """Room for what a rank of a layer receives, one expert after the other."""
    num_local, num_topk = tokens.num_experts // num_ranks, tokens.num_topk
    num_rows = num_ranks * tokens.max_tokens * min(num_topk, num_local)
    new = tokens.topk_idx.new_empty
    x = new((num_rows, tokens.x.shape[1]), dtype=tokens.sent_dtype)
    counts = new(num_local + 1, dtype=torch.int32)
    scales = new((num_rows, tokens.num_scales), dtype=torch.float32) if tokens.is_cast else None
    returns = new((num_ranks, tokens.max_tokens, 1 + 3 * num_topk), dtype=torch.int32)
    return Received(x, scales, counts, None, None, returns, new(1 + num_ranks))


def new_scales(tokens: LowLatencyTokens, num_local: int, num_rows: int) -> torch.Tensor | None:
    """Room for the scales of received rows [L, num_rows, S], column-major: float32, or int32 with
    four of them. None where rows are not cast."""
    if not tokens.is_cast:
        return None
    num, dtype = tokens.num_scales, torch.int32 if tokens.row_format == "ue8m0" else torch.float32
    shape, strides = (num_local, num_rows, num), (num * num_rows, 1, num_rows)
    return tokens.x.new_empty_strided(shape, strides, dtype=dtype)


def scale_words(scales: torch.Tensor | None) -> torch.Tensor | None:
    """What kernels write for `new_scales`: int32 [L, S, num_rows]."""
    return None if scales is None else scales.transpose(1, 2).view(torch.int32)


def low_latency_dispatch(
    tokens: LowLatencyTokens,
    out: Received,
    recv_stats: torch.Tensor | None,
    wait_stats: torch.Tensor | None,
    phases: str,
    ring: Ring,
    schedule: TileSchedule | None = None,
) -> None:
    """Send the tokens, pack what arrives, or both: phases "send", "receive" or "both". recv_stats
    int32 [L] and wait_stats int64 [R] (ns) are added to. schedule: memory for that of a product of
    compact rows, which is launched next."""
    x, topk_weights, max_tokens = tokens.x, tokens.topk_weights, tokens.max_tokens
    vectors, row, num_topk = tokens.vectors, tokens.row, tokens.num_topk
    block = max(128, next_power_of_2(x.shape[1] if tokens.is_cast else vectors.num_vecs))
    scales = out.scales
    if scales is not None:
        scales = scales.view(torch.int32) if scales.dim() == 2 else scale_words(scales)
    kind = Kind.LOW_LATENCY_DISPATCH if topk_weights is None else Kind.MOE_FFN_DISPATCH
    sizes = row, num_topk, tokens.num_experts, vectors.dtype, block
    grid = 0 if phases == "receive" else 1 + ring.num_ranks + len(x)
    grid += 0 if phases == "send" else num_receive_programs(len(x))
    block_m = 0 if schedule is None else schedule.block_m
    tiles = None if schedule is None else schedule.for_kernels
    ring.context.launch(
        low_latency_dispatch_kernel,
        (grid,),
        SentTokens(x if tokens.is_cast else vectors.view(x), tokens.topk_idx, topk_weights),
        out._replace(x=vectors.view(out.x), scales=scales, tiles=tiles),
        recv_stats,
        wait_stats,
        ring.context.fields,
        len(x),
        max_tokens,
        ring.context.callers.running,
        Rows(vectors.num_vecs, header_bytes(max_tokens, num_topk), row.trailer, row.num_bytes),
        CONFIG=ring.config(kind, *sizes, tokens.row_format, block_m),
        PHASES=phases,
        step=f"low_latency_dispatch, {phases}",
        num_warps=NUM_WARPS,
    )
    ring.context.end_call()
