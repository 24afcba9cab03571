"""What the verbs take and give, and who offers them: the contract of the two engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

import torch

from ..dispatch import Collected, row_layout
from ..symm.device_context import DeviceContext
from ..symm.slots import RowLayout


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
    """The verbs behind a Buffer. Arguments have been checked."""

    def layout(
        self, topk_idx: torch.Tensor, num_experts: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...

    def dispatch(
        self, tokens: Tokens, num_worst_tokens: int
    ) -> tuple[Collected, list[int], Handle]: ...

    def dispatch_in_place(
        self, tokens: Tokens, num_worst_tokens: int
    ) -> tuple[Collected, list[int], Handle]: ...

    def release(self) -> None: ...

    def dispatch_cached(
        self, x: torch.Tensor, scales: torch.Tensor | None, handle: Handle
    ) -> Collected: ...

    def combine(
        self,
        x: torch.Tensor,
        handle: Handle,
        topk_weights: torch.Tensor | None,
        bias: Sequence[torch.Tensor],
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
        """What calls of this engine may break, on this rank and on others."""

    def check(self) -> None:
        """Raise what ended this rank's calls, if anything has; note the bad ids so far."""

    def check_ids(self, result: object = None) -> None:
        """Raise RoutingError, with the `result` of a call that just ended, if ids out of range were
        seen before the last `check`."""

    def free(self) -> None: ...


class BreaksOff(Protocol):
    """What has verbs."""

    def _break_off(self, error: BaseException) -> None: ...


P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound=BreaksOff)


def verb(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """A method that all ranks call: what breaks it off on this rank, the others are told."""

    @wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            trace = error.__traceback__
            if trace is not None and trace.tb_next is not None:  # else the arguments do not bind
                self._break_off(error)
            raise

    return call
