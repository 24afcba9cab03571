"""What engines take and return: the contract of the kernel engine and the collective one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ..checks import (
    check_expert_biases,
    check_expert_weights,
    check_routing,
    check_tensor,
    has_parts,
    packed,
)
from ..device.lang import INTERPRETED
from ..dispatch import DispatchLayout, Received, Tokens
from ..errors import DtypeError, ShapeError
from ..grouped_gemm.activations import AnyActivation, num_parts
from ..grouped_gemm.operands import FP8, Weights, check_weight_scales, check_weights
from ..kinds import Described
from ..symm.device_context import DeviceContext

NUM_SMS = 20
"""Programs that communicate in a call unless it says otherwise; DeepEP's number."""


PartsOfHandle = tuple[torch.Tensor, ...]
"""Tensors of a handle, of which rank_prefix_matrix is the first."""


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

    @property
    def sent(self) -> PartsOfHandle:
        """What sending again takes."""
        return self.rank_prefix_matrix, self.send_token_idx, self.signature

    @property
    def returned(self) -> PartsOfHandle:
        """What returning rows takes."""
        return self.rank_prefix_matrix, self.signature, self.send_head


class Arrived(NamedTuple):
    """What a dispatch brings: rows, with what belongs to them; how many there are for each local
    expert, where the host knows; the handle; group_counts int32 [E], how many there are for each
    expert of the group; `Counts.totals`."""

    received: Received
    per_expert: Sequence[int]
    handle: Handle
    group_counts: torch.Tensor
    totals: tuple[torch.Tensor, ...] = ()


class LayerInputs(NamedTuple):
    """The tensors of a layer and its activation, see `moe_engine.moe_ffn`."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    w_gate_up: torch.Tensor
    w_down: torch.Tensor
    b_gate_up: torch.Tensor | None = None
    b_down: torch.Tensor | None = None
    activation: AnyActivation = "swiglu"
    s_gate_up: torch.Tensor | None = None
    s_down: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """All of them."""
        return *self[:7], *self[8:]

    @property
    def packed(self) -> LayerInputs:
        """These, with x, topk_idx and topk_weights as kernels take them, or itself where they are
        so; the weights are checked to be so."""
        x, topk_idx, topk_weights = packed(self.x), packed(self.topk_idx), packed(self.topk_weights)
        if x is self.x and topk_idx is self.topk_idx and topk_weights is self.topk_weights:
            return self
        return self._replace(x=x, topk_idx=topk_idx, topk_weights=topk_weights)

    @property
    def is_quantized(self) -> bool:
        """Whether the weights are e4m3, with scales; then the experts' rows are cast to it."""
        return self.s_gate_up is not None

    @property
    def operand_dtype(self) -> torch.dtype:
        """The dtype of weights, and of the rows that are multiplied by them."""
        return FP8 if self.is_quantized else self.x.dtype

    @property
    def parts(self) -> int:
        """The rows of w_gate_up for each column between the products: 2, gate and up, or 1."""
        return num_parts(self.activation)

    @property
    def up(self) -> Weights:
        """The weights of the first product."""
        return Weights(self.w_gate_up, self.s_gate_up, self.b_gate_up)

    @property
    def up_transposed(self) -> Weights:
        """The weights of the product that gives the gradient of x. They are taken by parts, so that
        the same steps of the depth are added up in any layout."""
        w = self.w_gate_up
        by_parts = w if has_parts(w) else w.unflatten(1, (self.parts, -1))
        return Weights(by_parts, transposed=True)

    @property
    def down(self) -> Weights:
        """The weights of the second product."""
        return Weights(self.w_down, self.s_down, self.b_down)


def check_scales(inputs: LayerInputs) -> None:
    """Raise unless both weights of a layer have scales or none, of a layer with rows in bf16."""
    both = {"w_gate_up": inputs.up, "w_down": inputs.down}
    missing = [name for name, weights in both.items() if weights.scale is None]
    if len(missing) == 2:
        return
    if missing:
        raise DtypeError(
            f"{missing[0]} has no scales, and the other weights have: pass both in e4m3 with their "
            "scales, as `quantize_weights` makes them, or none."
        )
    if inputs.x.dtype != torch.bfloat16:
        raise DtypeError(
            f"x is {str(inputs.x.dtype).removeprefix('torch.')} and the weights are e4m3, whose "
            "layers take and give bf16. Pass x.bfloat16()."
        )
    for name, (w, scale, *_) in both.items():
        assert scale is not None
        check_weight_scales(name, w, scale)


def check_layer_weights(inputs: LayerInputs) -> None:
    """Raise unless kernels can multiply by the weights, for rows as the layer multiplies them."""
    like = inputs.x.new_empty(0, dtype=inputs.operand_dtype)
    up, down, hidden = inputs.w_gate_up, inputs.w_down, inputs.x.shape[1]
    how: dict[str, Any] = dict(by_parts=True, name="w_gate_up")
    check_weights(like, up, hidden, inputs.activation, inputs.s_gate_up, **how)
    check_weights(like, down, down.shape[2], "none", inputs.s_down, name="w_down")


@torch.no_grad()  # what requires grad was checked in the forward
def check_backward(
    dy: torch.Tensor, inputs: LayerInputs, saved: Sequence[torch.Tensor | None]
) -> None:
    """Raise unless dy, the tensors of a layer as a backward finds them, and the pre-activations and
    rows that its forward saved, fit one another: autograd does not see that a tensor got other
    memory by its `data`."""
    x, topk_idx, topk_weights, w_gate_up, w_down = inputs[:5]
    check_tensor("x", x, dy.shape, [dy.dtype], dy.device)
    check_expert_weights(x, w_gate_up, w_down, inputs.parts, inputs.operand_dtype)
    check_expert_biases(x, w_gate_up, w_down, inputs.b_gate_up, inputs.b_down)
    check_routing(x, topk_idx, topk_weights)
    columns = inputs.parts * w_down.shape[2], x.shape[1]
    for name, one, num_columns in zip(("w_down", "x"), saved, columns, strict=False):
        if one is not None and one.shape[1] != num_columns:
            raise ShapeError(
                f"{name} has other sizes than in the forward, of which {one.shape[1]} columns were "
                f"saved, and not {num_columns}. Leave the arguments of a layer as they are until "
                "its backward."
            )


LayerResult = tuple[torch.Tensor, torch.Tensor | None]
"""What a layer returns: its result [T, H]; counts int32 [E], the rows of each expert from all
ranks."""


class Saved(NamedTuple):
    """What the forward of a layer saves for its backward, besides its arguments: by which of
    `SAVE_POLICIES`; tensors, none of them symmetric memory; how many expert rows came, or could
    come on one rank, -1 where the host does not know; whether another backward may read the
    tensors, so that this one may not overwrite them; how many rows had no room on the fullest rank,
    so that the call sent none, int32 [1] in a capture, None where all have room; the number of the
    forward, see `Callers.new_forward`."""

    save: str
    tensors: tuple[torch.Tensor | None, ...]
    num_rows: int = -1
    is_kept: bool = True
    overflow: int | torch.Tensor | None = 0
    forward: int = 0


class WeightGradients(NamedTuple):
    """Memory for the gradients of a layer's weights, of their shapes, bf16 or fp32; None: not
    wanted. With `accumulate` they are added to what it holds."""

    gate_up: torch.Tensor | None
    down: torch.Tensor | None
    accumulate: bool = False


class NewWeightGradients(NamedTuple):
    """Which gradients of a layer's weights are wanted, like the weights, in memory that the call
    allocates."""

    gate_up: bool
    down: bool

    def made(self, inputs: LayerInputs) -> WeightGradients:
        """The memory."""
        up = torch.empty_like(inputs.w_gate_up) if self.gate_up else None
        return WeightGradients(up, torch.empty_like(inputs.w_down) if self.down else None)


class WeightGradientRows(NamedTuple):
    """What the gradients of the weights are products of: expert rows of x [M, H], of the gradient
    of the pre-activations [M, 2I], of the weighted activations [M, I] and of the gradient of the
    result [M, H]; where those of each expert begin, int32 [L + 1]; about how many are in use, None:
    all of them."""

    x: torch.Tensor
    pre: torch.Tensor
    act: torch.Tensor
    dy: torch.Tensor
    offsets: torch.Tensor
    expected_rows: int | None = None


class BiasGradients(NamedTuple):
    """Sums [L, 2I] and [L, H] of this rank's rows, float32 from kernels; None: not wanted."""

    gate_up: torch.Tensor | None = None
    down: torch.Tensor | None = None


LaterWeightGradients = Callable[[WeightGradients], None]
"""Computes the gradients of the weights of one backward, at any time after it."""

Into = WeightGradients | NewWeightGradients | None
"""Where gradients of weights go; None: they are computed later."""


def memory_of(into: Into, inputs: LayerInputs) -> WeightGradients | None:
    """This memory, made where it is new."""
    return into.made(inputs) if isinstance(into, NewWeightGradients) else into


class Gradients(NamedTuple):
    """The gradients of a layer: of x and topk_weights; of the weights, or what computes them later;
    and of the biases that require grad."""

    x: torch.Tensor
    topk_weights: torch.Tensor
    later: LaterWeightGradients | None
    weights: WeightGradients | None
    biases: BiasGradients


class Engine(Protocol):
    """The calls of a Buffer, carried out. Arguments have been checked; `num_sms` programs
    communicate in the call that gets it. `described`: by what `describe` returned for arguments
    that decide those of the call, or None."""

    @property
    def handle_type(self) -> Any:
        """What `dispatch` returns for a handle."""

    @property
    def describe(self) -> Callable[..., Described]:
        """Tells the kind of a call; see `PreparedCalls.describe`."""

    def again(self, described: Described, **numbers: int) -> Any:
        """What one of the next five, or `moe_ffn`, returns for arguments that were described, as
        the last time with arguments of their kind, but for these numbers of rows. None where it
        must be called."""

    def layout(
        self, topk_idx: torch.Tensor, num_experts: int, described: Described | None = None
    ) -> DispatchLayout: ...

    def dispatch(
        self,
        tokens: Tokens,
        layout: DispatchLayout,
        num_worst_tokens: int,
        num_sms: int = NUM_SMS,
        owned: bool = True,
        described: Described | None = None,
    ) -> Arrived: ...

    def release(self) -> None: ...

    def dispatch_cached(
        self,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        handle: Handle,
        num_sms: int = NUM_SMS,
        described: Described | None = None,
    ) -> Received: ...

    def combine(
        self,
        x: torch.Tensor,
        handle: Handle,
        topk_weights: torch.Tensor | None,
        bias: Sequence[torch.Tensor],
        num_sms: int = NUM_SMS,
        described: Described | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...

    def moe_ffn(
        self,
        inputs: LayerInputs,
        return_counts: bool = False,
        described: Described | None = None,
    ) -> LayerResult: ...

    def moe_ffn_forward(
        self,
        inputs: LayerInputs,
        save: str,
        is_captured: bool,
        described: Described | None = None,
    ) -> tuple[torch.Tensor, Saved, torch.Tensor]:
        """The result of `moe_ffn`, what a policy saves of it for the backward, and the counts."""

    def moe_ffn_backward(
        self, dy: torch.Tensor, inputs: LayerInputs, saved: Saved, into: Into
    ) -> Gradients:
        """The gradients of a layer; those of the weights go `into` this memory, with None later. It
        gets dy and inputs as callers have them, not `packed`."""

    def contexts(self) -> list[DeviceContext]:
        """The device contexts that tell other ranks of a call which breaks off on this one."""

    @property
    def has_ended(self) -> bool:
        """Whether this rank's calls have ended."""

    @property
    def has_sent(self) -> bool:
        """Whether the running call, or the last one since `check`, has sent anything before an
        error came that ends no calls."""

    def check(self) -> bool:
        """Raise what ended this rank's calls, if anything has. Whether `check_ids` will raise, as
        ids were bad by now."""

    def check_ids(self, result: object = None) -> None:
        """Raise RoutingError, with the `result` of a call that just ended, if ids out of range were
        seen before the last `check`."""

    def free(self) -> None:
        """Give the memory back."""


class ContextEngine(ABC):
    """What engines with kernels share: their device contexts tell of failures and of bad ids."""

    has_sent = False
    """See `Engine`: here such errors come before the first launch."""

    @abstractmethod
    def contexts(self) -> list[DeviceContext]:
        """See `Engine`; an engine whose memory grows gets other ones."""

    @property
    def has_ended(self) -> bool:
        """See `Engine`."""
        return any(context.has_ended for context in self.contexts())

    def check(self) -> bool:
        """See `Engine`."""
        has_bad_ids = False
        for context in self.contexts():
            has_bad_ids |= context.begin_call()
        return has_bad_ids

    def check_ids(self, result: object = None) -> None:
        """See `Engine`."""
        for context in self.contexts():
            context.check_ids(result)

    def _check_emulated(self) -> None:
        """Raise what ended an interpreted call: it has ended when its launch returns."""
        if INTERPRETED:
            for context in self.contexts():
                context.check()
