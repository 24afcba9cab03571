"""The low-latency engine: dispatch and combine in one launch each, or two around a hook, and the
layer at decode sizes that is made of them."""

from __future__ import annotations

from typing import Any

import torch

from ..combine.low_latency import LowLatencyRows, kept_ids, low_latency_combine, new_call
from ..combine.low_latency_kernels import ExpertRows
from ..device.context import ContextField
from ..device.lang import INTERPRETED
from ..device.ring import COUNT_MASK
from ..dispatch.low_latency import (
    LowLatencyTokens,
    ReceivedRows,
    low_latency_dispatch,
    new_compact,
)
from ..dispatch.low_latency_receive_kernels import Received
from ..errors import CapacityError
from ..grouped_gemm.operands import Rows
from ..grouped_gemm.schedule import TileSchedule
from ..kinds import Described
from ..low_latency_handle import LowLatencyHandle, LowLatencySizes
from ..symm.ring import MAX_ROWS, LowLatencyRow, Ring, header_bytes
from .base import LayerInputs, check_layer_weights
from .expert_products import ExpertMemory, expert_tiles, multiply_down, multiply_up
from .hooked_calls import HookedCalls, Receive

Stats = tuple[torch.Tensor | None, torch.Tensor | None]
Made = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]
"""What a dispatch allocates: rows, scales, the memory of the handle."""


class LowLatency(HookedCalls):
    """Low-latency verbs on a ring. With `shrink` a rank that stays silent is masked, and the others
    go on without it. The caller has checked all arguments, except whether they fit the memory."""

    def __init__(self, ring: Ring, shrink: bool):
        super().__init__([ring], ring.layout.num_slots)
        self.ring = ring
        ring.context.shrinks = shrink

    @property
    def next_memory(self) -> Ring:
        return self.ring

    @property
    def num_ranks(self) -> int:
        return self.ring.num_ranks

    def check(self) -> bool:
        """See `base.Engine`."""
        return self.ring.context.begin_call()

    def again(self, described: Described, num_calls: int = 1) -> Any:
        """See `HookedCalls`."""
        if self._calls:
            self._check_hooks(num_calls)
        result = self.ring.calls.again(described, {})
        if result is not None and (self._calls or INTERPRETED):
            self._note_calls(self.ring, num_calls)
        return result

    # --- Verbs -------------------------------------------------------------------------------

    def dispatch(
        self,
        tokens: LowLatencyTokens,
        recv_stats: torch.Tensor | None = None,
        wait_stats: torch.Tensor | None = None,
        hooked: bool = False,
        described: Described | None = None,
    ) -> tuple[ReceivedRows, Receive | None]:
        """See `HookedCalls`."""
        args = tokens, (recv_stats, wait_stats)
        got: ReceivedRows = self._call(
            LowLatency._dispatch, *args, hooked=hooked, described=described
        )
        if not hooked:
            return got, None
        made = got.x, got.scales, got.memory  # counts are a part of the memory
        decided = described and described.more(made)
        more: dict[str, Any] = dict(uses=(*made, recv_stats, wait_stats), described=decided)
        return got, self._hook(LowLatency._receive_dispatched, *args, made, **more)

    def _dispatch(self, tokens: LowLatencyTokens, stats: Stats, phases: str) -> ReceivedRows:
        self._check_capacity(tokens)
        got = ReceivedRows.empty(tokens, self.num_ranks)
        self._launch_dispatch(tokens, stats, (got.x, got.scales, got.memory), phases)
        return got

    def _receive_dispatched(self, tokens: LowLatencyTokens, stats: Stats, made: Made) -> None:
        self._launch_dispatch(tokens, stats, made, "receive")

    def _launch_dispatch(
        self, tokens: LowLatencyTokens, stats: Stats, made: Made, phases: str
    ) -> None:
        x, scales, memory = made
        handle = LowLatencyHandle(memory, tokens.sizes(self.num_ranks))
        packed = x, scales, handle.counts, handle.src_info, handle.layout_range
        received = Received(*packed, handle.returns, handle.call)
        low_latency_dispatch(tokens, received, *stats, phases, self.ring)

    def new_handle(self, got: ReceivedRows, sizes: LowLatencySizes) -> LowLatencyHandle:
        """The handle of the last dispatch."""
        self._note_handle(got.memory)
        return LowLatencyHandle(got.memory, sizes)

    def expert_rows(
        self,
        y: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: LowLatencyHandle,
        out: torch.Tensor | None,
    ) -> LowLatencyRows:
        """What `combine` takes."""
        return LowLatencyRows(y, topk_idx, topk_weights, handle.memory, handle.sizes, out)

    def combine(
        self,
        rows: LowLatencyRows,
        num_experts: int,
        wait_stats: torch.Tensor | None = None,
        hooked: bool = False,
        described: Described | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, Receive | None]:
        """See `HookedCalls`; with `hooked` there stands what the first launch leaves for the second
        one, see `new_call`, in the middle."""
        args = num_experts, wait_stats
        out, call = self._call(LowLatency._combine, rows, *args, hooked=hooked, described=described)
        if not hooked:
            return out, call, None
        decided = described and described.more((out, call))
        rows = rows._replace(out=out)
        more: dict[str, Any] = dict(uses=(out, rows.memory, wait_stats), described=decided)
        return out, call, self._hook(LowLatency._add_up, rows, *args, call, **more)

    def _combine(
        self,
        rows: LowLatencyRows,
        num_experts: int,
        wait_stats: torch.Tensor | None,
        phases: str,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        out, call = rows.out, None
        if out is None:
            out = rows.x.new_empty(len(rows.topk_idx), rows.x.shape[2])
        if phases == "send":
            call = new_call(rows.topk_idx)
        arguments = rows.arguments(out)
        self._check_handle(arguments)
        low_latency_combine(arguments, call, num_experts, wait_stats, phases, self.ring)
        return out, call

    def _add_up(
        self,
        rows: LowLatencyRows,
        num_experts: int,
        wait_stats: torch.Tensor | None,
        call: torch.Tensor,
    ) -> None:
        assert rows.out is not None
        own = rows._replace(topk_idx=kept_ids(call, rows.sizes.num_topk))
        arguments = own.arguments(rows.out)
        low_latency_combine(arguments, call, num_experts, wait_stats, "receive", self.ring)

    def moe_ffn(
        self, inputs: LayerInputs, max_tokens: int, described: Described | None = None
    ) -> torch.Tensor:
        """The experts of a layer for up to `max_tokens` tokens of each rank: dispatch, two GEMMs
        bound by the weights' bytes, combine."""
        more: dict[str, Any] = dict(num_calls=2, described=described)
        out: torch.Tensor = self._call(LowLatency._moe_ffn, inputs, max_tokens, **more)
        return out

    def _moe_ffn(self, inputs: LayerInputs, max_tokens: int, phases: str) -> torch.Tensor:
        x, topk_idx, topk_weights, w_gate_up, *_ = inputs
        # Before anything is sent: the other ranks could not know of a refusal afterwards.
        check_layer_weights(inputs)
        num_experts = len(w_gate_up) * self.num_ranks
        row_format = "bf16" if x.dtype == torch.bfloat16 else "fp32"
        if inputs.is_quantized:
            row_format = "fp8"
        tokens = x, topk_idx, topk_weights
        sent = LowLatencyTokens(*tokens, max_tokens, num_experts, row_format)
        self._check_capacity(sent)
        most_rows = self.num_ranks * max_tokens * min(topk_idx.shape[1], len(w_gate_up))
        # Before the first launch: what is large enough to be refused.
        out = torch.empty_like(x)
        memory = ExpertMemory.empty(inputs, most_rows)
        received = new_compact(sent, self.num_ranks)
        assert len(received.x) == most_rows
        # Balanced routing brings as many rows as this rank sends out.
        up, down = expert_tiles(inputs, max_tokens * topk_idx.shape[1])
        schedule = TileSchedule.empty(received.counts, most_rows, up.block_m)
        low_latency_dispatch(sent, received, None, None, phases, self.ring, schedule)
        self.ring.context.step = "multiply"
        rows = Rows(received.x, scale=received.scales)
        multiply_up(rows, inputs, schedule, up, memory)
        y = multiply_down(inputs, schedule, down, memory)
        returned = ExpertRows(y, topk_idx, None, received.returns, received.call, out)
        low_latency_combine(returned, None, num_experts, None, phases, self.ring)
        return out

    # --- Masked ranks ------------------------------------------------------------------------

    def mask(self, rank: int, masked: bool) -> None:
        """Leave a rank out of the calls from now on, or no longer."""
        bits = self.ring.context.fields[ContextField.MASKED]
        bits.bitwise_or_(1 << rank) if masked else bits.bitwise_and_(~(1 << rank))

    def masked(self) -> torch.Tensor:
        """int64 [R]: 1 for ranks that are left out."""
        ranks = torch.arange(self.num_ranks, device=self.ring.context.fields.device)
        return (self.ring.context.fields[ContextField.MASKED] >> ranks) & 1

    # --- Checks ------------------------------------------------------------------------------

    def fits(self, max_tokens: int, num_topk: int, row_bytes: int) -> bool:
        """Whether calls of this size have room in the ring."""
        room = self.ring.layout.region_bytes - header_bytes(max_tokens, num_topk)
        return max_tokens <= MAX_ROWS and max_tokens * row_bytes <= room

    def fits_layer(self, max_tokens: int, num_topk: int, row_bytes: int) -> bool:
        """See `HookedCalls`."""
        return self.fits(max_tokens, num_topk, LowLatencyRow(row_bytes, num_topk).num_bytes)

    def _check_capacity(self, tokens: LowLatencyTokens) -> None:
        self._check_local_experts(tokens.num_experts)
        if tokens.num_experts > COUNT_MASK.value:
            raise CapacityError(
                f"num_experts is {tokens.num_experts}; low-latency calls take at most "
                f"{COUNT_MASK.value}. Use dispatch."
            )
        row, num_topk = tokens.row, tokens.num_topk
        back = LowLatencyRow(tokens.x.shape[1] * tokens.x.itemsize)  # a combine does not cast
        if not self.fits(tokens.max_tokens, num_topk, max(row.num_bytes, back.num_bytes)):
            sizes = tokens.max_tokens, row.payload_bytes, num_topk, tokens.num_experts
            raise self._too_large(*sizes)

    def _check_handle(self, rows: ExpertRows) -> None:
        num_ranks, max_tokens = rows.returns.shape[:2]
        row = LowLatencyRow(rows.out.shape[1] * rows.out.itemsize)
        fits = self.fits(max_tokens, rows.topk_idx.shape[1], row.num_bytes)
        if num_ranks != self.num_ranks or not fits:
            raise CapacityError(
                f"the handle is of {num_ranks} ranks and {max_tokens} tokens per rank; this Buffer "
                f"is of {self.num_ranks} and has {self.ring.layout.num_bytes} bytes. Pass what "
                "low_latency_dispatch of the same Buffer returned."
            )
