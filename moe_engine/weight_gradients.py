"""Where the gradients of a layer's weights go: to autograd, into tensors of the caller, or there
later."""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .checks import PAYLOAD_DTYPES, check_apart, check_flag, check_tensor, shown
from .engines.base import LaterWeightGradients, WeightGradients
from .errors import BackendError, DtypeError, ShapeError
from .grouped_gemm.operands import check_out
from .streams import EventHandle
from .weight_layouts import GateUp, Operand

Grads = tuple[torch.Tensor | None, ...]
"""What autograd gets for the weights."""


class LayerWeights(NamedTuple):
    """The weights of a layer, or memory for their gradients, as the caller has them."""

    gate_up: GateUp
    down: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of them."""
        return *self.gate_up.tensors, self.down

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        """Theirs."""
        return tuple([one.shape for one in self.tensors])


@dataclass(slots=True)
class WgradSink:
    """Tensors that take the gradients of a layer's weights in place of `.grad`, such as Megatron's
    `main_grad`.

    gate_up and down have the shapes and the layout of w_gate_up (or are two tensors, as it is) and
    w_down, in bf16 or fp32; None: that weight requires no grad. The kernels sum in fp32 and add to
    what the tensors hold, or with accumulate=False write over it, which saves the first micro-batch
    of a step a pass over memory. An expert without rows adds, or writes, zeros.

    on_ready() is called once the kernels are launched, in the backward's thread, with its stream
    current. Autograd gets None for the weights, or with dummy_grads zeros, which cost memory, for
    hooks that wait for a gradient of each parameter. A weight that has `grad_added_to_main_grad`,
    Megatron's attribute, gets it set to True.

    The fields are read in the backward, so they may change until then.
    """

    gate_up: Operand | None
    down: torch.Tensor | None
    accumulate: bool = True
    on_ready: Callable[[], object] | None = None
    dummy_grads: bool = False

    def check(self, weights: LayerWeights, **others: torch.Tensor) -> None:
        """Raise unless the tensors can take the gradients of these weights; they must not overlap
        others."""
        check_flag("wgrad.accumulate", self.accumulate)
        check_flag("wgrad.dummy_grads", self.dummy_grads)
        if self.on_ready is not None and not callable(self.on_ready):
            raise DtypeError(f"wgrad.on_ready is {shown(self.on_ready)}; it must be a function.")
        self.memory(weights, (weights.gate_up.requires_grad, weights.down.requires_grad), **others)

    def memory(
        self, weights: LayerWeights, wanted: tuple[bool, bool], **others: torch.Tensor
    ) -> WeightGradients:
        """The memory of the gradients that are wanted, checked."""
        up = down = None
        if wanted[0]:
            up = self._gate_up(weights.gate_up)
        if wanted[1]:
            down = _given("down", self.down)
            shape = tuple(weights.down.shape)
            check_out(weights.down, down, shape, PAYLOAD_DTYPES, "wgrad.down")
        others |= dict(w_gate_up=weights.gate_up.by_parts(), w_down=weights.down)
        for name, out in (("wgrad.gate_up", up), ("wgrad.down", down)):
            if out is not None:
                check_apart(out, name, **others)
                others[name] = out
        return WeightGradients(up, down, bool(self.accumulate))

    def _gate_up(self, like: GateUp) -> torch.Tensor:
        """The memory for the gradient of these weights, as kernels take it."""
        into = GateUp.of(_given("gate_up", self.gate_up), like.layout, "wgrad.gate_up")
        if len(into.tensors) != len(like.tensors):
            raise ShapeError(
                f"wgrad.gate_up has {len(into.tensors)} tensors and w_gate_up has "
                f"{len(like.tensors)}; they must be as many."
            )
        for one, weight in zip(into.tensors, like.tensors, strict=True):
            check_tensor(into.name, one, weight.shape, PAYLOAD_DTYPES, weight.device)
        if len(into.tensors) == 1:
            shape = tuple(like.tensors[0].shape)
            check_out(like.tensors[0], into.tensors[0], shape, PAYLOAD_DTYPES, into.name)
        return into.by_parts()

    def launched(
        self, later: LaterWeightGradients | None, weights: LayerWeights, wanted: tuple[bool, bool]
    ) -> Grads:
        """What autograd gets, once the kernels are launched."""
        for weight in weights.tensors:
            if weight.requires_grad and hasattr(weight, "grad_added_to_main_grad"):
                weight.grad_added_to_main_grad = True
        if self.on_ready is not None:
            self.on_ready()
        return dummy_grads(weights, wanted) if self.dummy_grads else (None,) * len(weights.tensors)


def _sizes(shapes: tuple[torch.Size, ...]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)


def _given(name: str, out: Any) -> Any:
    if out is None:
        raise ShapeError(
            f"wgrad.{name} is None, and its weight requires grad; pass a tensor of the weight's "
            "shape, or a weight that does not require grad."
        )
    return out


class _Delayed(NamedTuple):
    """The gradients of the weights of one backward, which are still to be computed."""

    compute: LaterWeightGradients | None
    weights: LayerWeights
    shapes: tuple[torch.Size, ...]
    wanted: tuple[bool, bool]
    event: EventHandle


class DelayedWgrad:
    """The gradients of a layer's weights are computed when `backward_dw()` is called, and no longer
    in the backward, as schedules of pipelines ask for: what other ranks wait for goes first.

        later = DelayedWgrad()
        y = moe_ffn(x, topk_idx, topk_weights, w_gate_up, w_down, buffer, wgrad=later)
        y.backward(dy)        # the gradients of x and topk_weights
        later.backward_dw()   # those of the weights, with the same bits as without delay

    With a `WgradSink` they go there, else into `.grad` of the weights, which must be leaves. Until
    then a backward keeps rows of its own: 2 M (H + I) + M I values for M expert rows. A step of a
    torch.optim.Optimizer that finds gradients missing warns once.
    """

    def __init__(self, sink: WgradSink | None = None):
        if sink is not None and not isinstance(sink, WgradSink):
            raise DtypeError(f"sink is {shown(sink)}; it must be a WgradSink, or None.")
        self.sink, self.has_warned = sink, False
        self._queue: deque[_Delayed] = deque()

    def __len__(self) -> int:
        """How many backwards wait for `backward_dw()`."""
        return len(self._queue)

    def backward_dw(self) -> None:
        """Compute the gradients of the weights of the oldest backward that waits, on the current
        stream. BackendError where none does. No other rank takes part."""
        if not self._queue:
            raise BackendError(
                "backward_dw() was called, and no gradients of weights wait for it: their layer's "
                "backward comes first, and each takes one call."
            )
        compute, weights, shapes, wanted, event = self._queue[0]
        if weights.shapes != shapes:
            raise ShapeError(
                f"the weights have shapes {_sizes(weights.shapes)}, and had {_sizes(shapes)} in "
                "the backward. Give them the shapes that they had, and call backward_dw() again."
            )
        grads: Grads = (None,) * len(weights.tensors)
        if self.sink is not None:
            into = self.sink.memory(weights, wanted)  # raises before anything is lost
        else:
            into, grads = new_memory(weights, wanted)
        self._queue.popleft()
        event.current_stream_wait()
        if compute is not None:
            compute(into)
        if self.sink is not None:
            self.sink.launched(None, weights, wanted)
        for weight, grad in zip(weights.tensors, grads, strict=True):
            if grad is not None and weight.requires_grad:
                weight.grad = grad if weight.grad is None else weight.grad.add_(grad)

    def check(self, weights: LayerWeights, **others: torch.Tensor) -> None:
        """Raise unless the gradients of these weights can be delayed."""
        if self.sink is not None:
            self.sink.check(weights, **others)
            return
        if any(one.requires_grad and not one.is_leaf for one in weights.tensors):
            raise BackendError(
                "a weight was computed from other tensors, which get no gradient once the backward "
                "has ended. Delay the gradients of leaves, or pass DelayedWgrad(sink)."
            )

    def memory(
        self, weights: LayerWeights, wanted: tuple[bool, bool], **others: torch.Tensor
    ) -> WeightGradients | None:
        """None: later. Where no weight requires grad, there is nothing to compute."""
        return None if any(wanted) else WeightGradients(None, None)

    def launched(
        self, later: LaterWeightGradients | None, weights: LayerWeights, wanted: tuple[bool, bool]
    ) -> Grads:
        """Keep what one backward leaves for later. Autograd gets nothing before."""
        delayed = later, weights, weights.shapes, wanted
        self._queue.append(_Delayed(*delayed, EventHandle()))
        _watch(self)
        return (None,) * len(weights.tensors)

    def misses(self, parameters: set[int]) -> bool:
        """Whether a gradient of one of these is still to be computed; with a sink, nobody knows
        whose gradients it takes."""
        weights = (one for delayed in self._queue for one in delayed.weights.tensors)
        return any(self.sink is not None or id(one) in parameters for one in weights)


Wgrad = WgradSink | DelayedWgrad | None


def new_memory(weights: LayerWeights, wanted: tuple[bool, bool]) -> tuple[WeightGradients, Grads]:
    """New memory for the gradients that are wanted: as engines take it, and as the weights are."""
    down = torch.empty_like(weights.down) if wanted[1] else None
    if not wanted[0]:
        return WeightGradients(None, down), (*(None,) * len(weights.gate_up.tensors), down)
    up = weights.gate_up.empty_like()
    return WeightGradients(up.by_parts(), down), (*up.tensors, down)


def dummy_grads(weights: LayerWeights, wanted: tuple[bool, bool]) -> Grads:
    """Zeros for the weights whose gradients are wanted, of one value in memory."""
    needs = (*(wanted[0],) * len(weights.gate_up.tensors), wanted[1])
    zeros = [one.new_zeros(()).expand(one.shape) for one in weights.tensors]
    return tuple(zero if need else None for zero, need in zip(zeros, needs, strict=True))


# --- Optimizers ----------------------------------------------------------------------------------

_watched: weakref.WeakSet[DelayedWgrad] = weakref.WeakSet()
_hooks: list[Any] = []


def _watch(delayed: DelayedWgrad) -> None:
    """From now on, an optimizer's step warns while these gradients are missing."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_warn_of_missing))
    _watched.add(delayed)


def _warn_of_missing(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Warn, once for each `DelayedWgrad`, of gradients that are missing in a step."""
    waiting = [one for one in _watched if len(one) and not one.has_warned]
    if not waiting:
        return
    parameters = {id(one) for group in optimizer.param_groups for one in group["params"]}
    for one in waiting:
        if one.misses(parameters):
            one.has_warned = True
            warnings.warn(
                f"an optimizer steps, and the gradients of weights of {len(one)} backward(s) of a "
                "layer are still delayed, so the step lacks them. Call backward_dw() once for each "
                "backward, before the step.",
                stacklevel=4,
            )
