"""Host side of low-latency dispatch: what it sends and returns, and its launch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..device.context import Kind
from ..device.ring import Rows
from ..hardware import gpu
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


class LowLatencyHandle(NamedTuple):
    """What `low_latency_combine` needs from a dispatch; the first five are DeepEP's."""

    src_info: torch.Tensor  # int32 [L, R * M]: each received row's token on its source
    layout_range: torch.Tensor  # int64 [L, R]: begin << 32 | count of each source's rows
    num_max_dispatch_tokens_per_rank: int
    hidden: int
    num_experts: int
    returns: torch.Tensor  # int32 [R, M, 1 + 3 * K]: see `Received`
    call: torch.Tensor  # int64 [1 + R]: epoch of the dispatch, tokens of each rank

    @property
    def num_topk(self) -> int:
        return (self.returns.shape[2] - 1) // 3


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
    def num_scales(self) -> int:
        """Scales of a row, 4 bytes each."""
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
        return LowLatencyRow(payload_bytes, self.num_topk, self.num_scales)


def new_received(tokens: LowLatencyTokens, num_ranks: int, compact: bool) -> Received:
    """Room for what a rank receives, as `Received` describes it."""
    num_local, num_topk = tokens.num_experts // num_ranks, tokens.num_topk
    most, hidden = num_ranks * tokens.max_tokens, tokens.x.shape[1]
    new = tokens.topk_idx.new_empty
    dtype = torch.float8_e4m3fn if tokens.is_cast else tokens.x.dtype
    returns = new((num_ranks, tokens.max_tokens, 1 + 3 * num_topk), dtype=torch.int32)
    call = new(1 + num_ranks)
    if compact:
        num_rows = most * min(num_topk, num_local)
        x, counts = new((num_rows, hidden), dtype=dtype), new(num_local + 1, dtype=torch.int32)
        scales = new((num_rows, tokens.num_scales), dtype=torch.float32) if tokens.is_cast else None
        return Received(x, scales, counts, None, None, returns, call)
    x = new((num_local, most, hidden), dtype=dtype)
    scales = new_scales(tokens, num_local, most)
    counts = new(num_local, dtype=torch.int32)
    src_info = new((num_local, most), dtype=torch.int32)
    return Received(x, scales, counts, src_info, new((num_local, num_ranks)), returns, call)


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
) -> None:
    """Send the tokens, pack what arrives, or both: phases "send", "receive" or "both". recv_stats
    int32 [L] and wait_stats int64 [R] (ns) are added to."""
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
    ring.context.launch(
        low_latency_dispatch_kernel,
        (grid,),
        SentTokens(x if tokens.is_cast else vectors.view(x), tokens.topk_idx, topk_weights),
        out._replace(x=vectors.view(out.x), scales=scales),
        recv_stats,
        wait_stats,
        ring.context.fields,
        len(x),
        max_tokens,
        Rows(vectors.num_vecs, header_bytes(max_tokens, num_topk), row.trailer, row.num_bytes),
        CONFIG=ring.config(kind, *sizes, tokens.row_format),
        PHASES=phases,
        step=f"low_latency_dispatch, {phases}",
        num_warps=NUM_WARPS,
    )
    ring.context.end_call()
