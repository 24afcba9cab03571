"""Layers with all options in sequences of mixed calls, their backwards and delayed gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from einops import rearrange
from rounds import FEW
from sequence_values import NUM_LOCAL, Drawn, Rank

from moe_engine import (
    DelayedWgrad,
    LayerInFlight,
    RoutingError,
    WgradSink,
    moe_ffn,
    reference,
    start_moe_ffn,
)
from moe_engine.grouped_gemm import quantize_weights

GATED = "swiglu", "geglu", "geglu_tanh"
ACTIVATIONS = *GATED, "swiglu", "silu", "relu2"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}
COLUMNS = 16


@dataclass
class Layer:
    """What a layer is called with. up, down and biases are those of all ranks; parts are this
    rank's weights as they lie in `layout`: gate and up in one tensor or in two, then down."""

    drawn: Drawn
    dtype: torch.dtype
    activation: str
    layout: str
    up: list[torch.Tensor]
    down: list[torch.Tensor]
    biases: tuple[list[torch.Tensor], ...]
    parts: list[torch.Tensor] = field(default_factory=list)

    def laid_out(self, up: torch.Tensor, down: torch.Tensor) -> list[torch.Tensor]:
        """Weights [L, 2I, H] and [L, H, I], or their gradients, in this layout."""
        if self.layout == "pair":
            gate, up = rearrange(up, "l (part rows) h -> part l rows h", part=2).contiguous()
            return [gate, up, down]
        if self.layout == "interleaved":
            up = rearrange(up, "l (part rows) h -> l (rows part) h", part=2).contiguous()
        return [up, down]

    def with_pair(self, tensors: list[Any]) -> tuple[Any, Any]:
        """(gate and up, down) as `moe_ffn` takes them."""
        return (tuple(tensors[:2]) if len(tensors) == 3 else tensors[0]), tensors[-1]

    @property
    def of_reference(self) -> tuple[Any, ...]:
        """The arguments of the references."""
        x, idx, weights = self.drawn
        return x, idx, weights, self.up, self.down

    @property
    def counts(self) -> torch.Tensor:
        """int32 [E]"""
        ids = torch.cat(self.drawn.idx)
        num_experts = NUM_LOCAL * len(self.up)
        return torch.bincount(ids[ids >= 0], minlength=num_experts).int()


class Layers(Rank):
    """Layers, and what those that train leave for later."""

    def layer(self) -> None:
        """A layer with any options, or the forward of one that trains."""
        layer = self._draw_layer()
        more: dict[str, Any] = dict(activation=layer.activation)
        more["max_tokens"] = self.choose("max_tokens", None, FEW)
        more["return_counts"] = self.chance("return_counts", 0.2)
        if layer.layout == "interleaved":
            more["layout"] = layer.layout
        if layer.biases:
            more["biases"] = tuple(part[self.rank].clone() for part in layer.biases)
        if self.chance("tag", 0.5):
            more["tag"] = self.rng.randrange(10)
        call: Callable[..., Any] = moe_ffn
        if self.chance("started"):
            call = _start_and_finish
        if self.chance("trains", 0.5):
            self._train(call, layer, more)
        else:
            self._infer(call, layer, more)

    def _draw_layer(self) -> Layer:
        dtype = self.choose("dtype", torch.float32, torch.float32, torch.bfloat16)
        drawn = self.tokens(dtype)
        activation = self.choose("activation", *ACTIVATIONS)
        layouts = ["concatenated", "interleaved", "pair"] if activation in GATED else [""]
        layout = self.choose("layout", *layouts)
        up, down = self.weights(dtype, activation)
        biases: tuple[list[torch.Tensor], ...] = ()
        if self.chance("biases"):
            biases = tuple(
                [torch.full(sizes, value, dtype=dtype)] * self.num_ranks
                for value, sizes in ((0.5, up[0].shape[:2]), (0.25, down[0].shape[:2]))
            )
        layer = Layer(drawn, dtype, activation, layout, up, down, biases)
        layer.parts = layer.laid_out(up[self.rank].clone(), down[self.rank].clone())
        return layer

    def weights(self, dtype: torch.dtype, activation: str = "swiglu") -> tuple[list[Any], ...]:
        """The weights of all ranks: w_gate_up and w_down."""
        generator = torch.Generator().manual_seed(self.rng.randrange(10**6))
        rows = COLUMNS * (2 if activation in GATED else 1)
        experts = self.num_experts

        def draw(*sizes: int) -> list[torch.Tensor]:
            values = torch.randn(experts, *sizes, generator=generator) * sizes[-1] ** -0.5
            return list(values.to(dtype).split(NUM_LOCAL))

        return draw(rows, self.hidden), draw(self.hidden, COLUMNS)

    def check_layer(self, layer: Layer, found: Any, counted: bool, scales: Any = ()) -> Any:
        """The result of a layer, once it is found right."""
        y = found[0] if counted else found
        if counted:
            self.check((found[1], layer.counts))
        x, idx, *floats = layer.of_reference
        if not scales:
            x, *floats = ([one.double() for one in parts] for parts in (x, *floats))
        biases = [[one.double() for one in parts] for parts in layer.biases]
        want = reference.moe_ffn(x, idx, *floats, biases, layer.activation, scales)[self.rank]
        self.check((y, want), tolerance=TOLERANCE[torch.bfloat16 if scales else layer.dtype])
        return y

    # --- Inference ---------------------------------------------------------------------------

    def _infer(self, call: Callable[..., Any], layer: Layer, more: dict[str, Any]) -> None:
        x, idx, weights = self.mine(layer.drawn)
        ids, bad = idx.clone(), self.chance("bad ids", 0.1)
        if bad:
            ids[:1, 0] = self.num_experts + 5
            for known in layer.drawn.idx:
                known[:1, 0] = -1
        w, scales = layer.with_pair(layer.parts), ()
        if layer.dtype == torch.bfloat16 and layer.layout == "concatenated" and not bad:
            if self.chance("e4m3", 0.5):
                w, scales = self._quantize(layer)
        found = self._told_of_bad_ids(
            partial(call, x, ids, weights, *w, self.buffer, **more), bad and len(ids) > 0
        )
        self.check_layer(layer, found, more["return_counts"], scales)
        self.spoil(x, ids, weights)

    def _quantize(self, layer: Layer) -> tuple[Any, Any]:
        """(this rank's weights in e4m3, scales of all ranks); layer's weights become e4m3."""
        pairs = [[quantize_weights(one) for one in parts] for parts in (layer.up, layer.down)]
        layer.up, layer.down = ([values for values, _ in parts] for parts in pairs)
        own = tuple(parts[self.rank] for parts in pairs)
        return own, [[scales for _, scales in parts] for parts in pairs]

    def _told_of_bad_ids(self, call: Callable[[], Any], has_bad_ids: bool) -> Any:
        """The result of a call of which this rank's ids may be bad; it is told of them once."""
        try:
            result = call()
        except RoutingError as error:
            if not has_bad_ids:
                raise
            result: Any = error.result
            return result.finish() if isinstance(result, LayerInFlight) else result
        if has_bad_ids:
            with pytest.raises(RoutingError):
                self.buffer.check()
        return result

    # --- Training ----------------------------------------------------------------------------

    def _train(self, call: Callable[..., Any], layer: Layer, more: dict[str, Any]) -> None:
        x, idx, weights = self.mine(layer.drawn)
        x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
        policies = ["auto", "none", "rows"]
        if self.backend != "collective":
            policies += ["pre", "all"]
        more["save"] = self.choose("save", *policies)
        for part in layer.parts:
            part.requires_grad_()
        into, first = self._wgrad(layer, more)
        args = x, idx, weights, *layer.with_pair(layer.parts), self.buffer
        y = self.check_layer(layer, call(*args, **more), more["return_counts"])
        tolerance = 4 * TOLERANCE[layer.dtype]

        def check_weights(want: list[torch.Tensor]) -> None:
            have = into or [part.grad for part in layer.parts]
            pairs = zip(have, want, strict=True)
            self.check(*((one, other + first) for one, other in pairs), tolerance=tolerance)

        def backward() -> None:
            self._move(layer)
            dy = [part.to(layer.dtype) for part in layer.drawn.x]
            y.backward(dy[self.rank].clone())
            dx, dw, up, down, *_ = reference.moe_ffn_gradients(
                *layer.of_reference, dy, layer.biases, layer.activation
            )[self.rank]
            self.check((x.grad, dx), (weights.grad, dw), tolerance=tolerance)
            want, wgrad = layer.laid_out(up, down), more["wgrad"]
            if not isinstance(wgrad, DelayedWgrad):
                check_weights(want)
                return

            def compute() -> None:
                self._move(layer)
                wgrad.backward_dw()
                check_weights(want)

            self.leave("delayed gradients", compute, "normal")

        self.leave("backward", backward, "normal")

    def _wgrad(self, layer: Layer, more: dict[str, Any]) -> tuple[list[torch.Tensor], float]:
        """(the tensors of a sink, if there is one; what they hold that gradients are added to)"""
        way = self.choose("wgrad", "autograd", "sink", "delayed", "delayed sink")
        more["wgrad"] = DelayedWgrad() if way == "delayed" else None
        if "sink" not in way:
            return [], 0.0
        kind, accumulates = (
            self.choose("sink", layer.dtype, torch.float32),
            self.chance("adds", 0.6),
        )
        whole = [
            torch.full(one[self.rank].shape, 3.0, dtype=kind) for one in (layer.up, layer.down)
        ]
        into = layer.laid_out(*whole)
        sink = WgradSink(*layer.with_pair(into), accumulate=accumulates)
        more["wgrad"] = DelayedWgrad(sink) if way == "delayed sink" else sink
        return into, 3.0 if accumulates else 0.0

    def _move(self, layer: Layer) -> None:
        """Give weights other memory, as FSDP does between a forward and its backward. A pair is of
        one memory, and stays."""
        if len(layer.parts) == 2 and self.chance("moved weights"):
            for part in layer.parts:
                part.data = part.data.clone()


def _start_and_finish(*args: Any, **more: Any) -> Any:
    return start_moe_ffn(*args, **more).finish()
