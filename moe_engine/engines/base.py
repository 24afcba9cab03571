"""What engines take and return: the contract of the kernel engine and the collective one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from ..device.lang import INTERPRETED
from ..dispatch import Collected, row_layout
from ..symm.device_context import DeviceContext
from ..symm.slots import RowLayout

NUM_SMS = 20
"""Programs that communicate in a call unless it says otherwise; DeepEP's number."""


class Handle(NamedTuple):
    """What combine and a cached dispatch need from a dispatch: six tensors, nothing else.

    A plain tuple of the same tensors serves as well (autograd's save_for_backward makes one).
    """

    rank_prefix_matrix: torch.Tensor  # int32 [R, R]: rows of ranks 0..i to rank j
    send_token_idx: torch.Tensor  # int32 [R, T]: token of each row sent to each rank
    signature: torch.Tensor  # int32 [16]: of the dispatch, see `context.SIGNATURE`
    recv_src_idx: torch.Tensor  # int32 [N]: each received row's token on its source
    is_token_in_rank: torch.Tensor  # bool [T, R]
    send_head: torch.Tensor  # int32 [T, R]: row * R + rank in the order of the final sum, or -1


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a rank dispatches: x [T, H] contiguous; topk_idx int64 [T, K] and topk_weights float32
    [T, K], or None; its layout (see `reference.layout`); scales [T, S] of 4 bytes each, or None."""

    x: torch.Tensor
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    num_tokens_per_rank: torch.Tensor
    num_tokens_per_expert: torch.Tensor
    is_token_in_rank: torch.Tensor
    scales: torch.Tensor | None = None

    @property
    def row(self) -> RowLayout:
        return row_layout(self.x, self.scales, self.topk_idx)

    @property
    def num_experts(self) -> int:
        return self.num_tokens_per_expert.numel()

    @property
    def num_topk(self) -> int:
        return 0 if self.topk_idx is None else self.topk_idx.shape[1]


class Engine(Protocol):
    """The calls of a Buffer, carried out. Arguments have been checked; `num_sms` programs
    communicate in the call that gets it."""

    def layout(
        self, topk_idx: torch.Tensor, num_experts: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...

    def dispatch(
        self, tokens: Tokens, num_worst_tokens: int, num_sms: int = NUM_SMS
    ) -> tuple[Collected, list[int], Handle]: ...

    def dispatch_in_place(
        self, tokens: Tokens, num_worst_tokens: int, num_sms: int = NUM_SMS
    ) -> tuple[Collected, list[int], Handle]: ...

    def release(self) -> None: ...

    def dispatch_cached(
        self,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        handle: Handle,
        num_sms: int = NUM_SMS,
    ) -> Collected: ...

    def combine(
        self,
        x: torch.Tensor,
        handle: Handle,
        topk_weights: torch.Tensor | None,
        bias: Sequence[torch.Tensor],
        num_sms: int = NUM_SMS,
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...

    def moe_ffn(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        w_gate_up: torch.Tensor,
        w_down: torch.Tensor,
    ) -> torch.Tensor: ...

    def contexts(self) -> list[DeviceContext]:
        """The device contexts that tell other ranks of a call which breaks off on this one."""

    def check(self) -> None:
        """Raise what ended this rank's calls, if anything has; note how many bad ids there are."""

    def check_ids(self, result: object = None) -> None:
        """Raise RoutingError, with the `result` of a call that just ended, if ids out of range were
        seen before the last `check`."""

    def free(self) -> None:
        """Give the memory back."""


class ContextEngine(ABC):
    """What engines with kernels share: their device context tells of failures and of bad ids."""

    @property
    @abstractmethod
    def context(self) -> DeviceContext:
        """The context of this engine's kernels; an engine whose memory grows gets another one."""

    def contexts(self) -> list[DeviceContext]:
        """See `Engine`."""
        return [self.context]

    def check(self) -> None:
        """See `Engine`."""
        context = self.context
        context.check()
        context.note_ids()

    def check_ids(self, result: object = None) -> None:
        """See `Engine`."""
        self.context.check_ids(result)

    def _check_emulated(self) -> None:
        """Raise what ended an interpreted call: it has ended when its launch returns."""
        if INTERPRETED:
            self.context.check()
