"""What the verbs take and give, and who offers them: the contract of the two engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

import torch

from ..dispatch import DispatchLayout, Received, Tokens
from ..symm.device_context import DeviceContext


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


class Engine(Protocol):
    """The verbs behind a Buffer. Arguments have been checked."""

    def layout(self, topk_idx: torch.Tensor, num_experts: int) -> DispatchLayout: ...

    def dispatch(
        self, tokens: Tokens, layout: DispatchLayout, num_worst_tokens: int
    ) -> tuple[Received, list[int], Handle]: ...

    def dispatch_in_place(
        self, tokens: Tokens, layout: DispatchLayout, num_worst_tokens: int
    ) -> tuple[Received, list[int], Handle]: ...

    def release(self) -> None: ...

    def dispatch_cached(
        self, x: torch.Tensor, scales: torch.Tensor | None, handle: Handle
    ) -> Received: ...

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
