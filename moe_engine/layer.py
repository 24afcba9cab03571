"""The MoE feed-forward as a function and as a module."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Self

import torch

from .buffer import Buffer
from .checks import PAYLOAD_DTYPES, check_at_least, check_dtype, shown
from .errors import BackendError, DtypeError, RoutingError
from .streams import EventOverlap


def moe_ffn(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    buffer: Buffer,
    max_tokens: int | None = None,
) -> torch.Tensor:
    """Route x [T, H] to its experts on all ranks and sum their results, weighted: [T, H].

    topk_idx int64 [T, K] (-1 = not routed) and topk_weights float32 [T, K] come from the router;
    w_gate_up [L, 2I, H] (gate rows, then up rows) and w_down [L, H, I] are this rank's experts
    rank * L .. rank * L + L - 1, as transformers stores them. Everything in bf16, or in fp32.
    out[t] = sum over k of topk_weights[t, k] * w_down[e] @ (silu(gate_e x) * (up_e x)).

    Collective over the Buffer's group; T may differ per rank and be 0. max_tokens, equal on all
    ranks, is the most that any of them brings to this call (None: what the Buffer was made for).
    Up to `Options.decode_tokens`, the layer runs by low-latency calls (`engines/low_latency.py`).
    There is no backward yet.
    Layers of two Buffers must not run at once on a GPU: each may hold what the other waits for.
    """
    _check_buffer(buffer)
    args = x, topk_idx, topk_weights, w_gate_up, w_down
    try:
        return buffer.moe_ffn(*args, max_tokens=max_tokens)[0]
    except RoutingError as error:
        error.result = error.result[0] if isinstance(error.result, tuple) else None
        raise


@dataclass(frozen=True, slots=True)
class LayerInFlight:
    """A layer that `start_moe_ffn` has begun."""

    _out: torch.Tensor
    _event: EventOverlap

    def finish(self) -> torch.Tensor:
        """The result [T, H]; the current stream waits until it is written."""
        self._event.current_stream_wait()
        return self._out


def start_moe_ffn(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    buffer: Buffer,
    max_tokens: int | None = None,
) -> LayerInFlight:
    """Begin `moe_ffn` on the Buffer's own stream, and run something else until `finish()`: the
    shared expert of Qwen2-MoE and DeepSeek-V3 fills SMs where the routed ones wait for rows.

        layer = start_moe_ffn(x, topk_idx, topk_weights, w_gate_up, w_down, buffer)
        y = shared_expert(x) + layer.finish()

    Collective, like `moe_ffn`. The layers of a Buffer run one after the other.
    """
    _check_buffer(buffer)
    args = x, topk_idx, topk_weights, w_gate_up, w_down
    try:
        return LayerInFlight(*buffer.moe_ffn(*args, async_finish=True, max_tokens=max_tokens))
    except RoutingError as error:
        error.result = LayerInFlight(*error.result) if isinstance(error.result, tuple) else None
        raise


def _check_buffer(buffer: object) -> None:
    if not isinstance(buffer, Buffer):
        raise DtypeError(f"buffer is {shown(buffer)}; it must be a moe_engine.Buffer.")


class MoEFeedForward(torch.nn.Module):
    """This rank's experts of one layer over a shared Buffer: `forward(x, topk_idx, topk_weights)`.

    Parameters: gate_up_proj [L, 2I, H], down_proj [L, H, I]. A copy shares the Buffer. A module
    that was pickled, as by torch.save, comes back without one: set `module.buffer = Buffer(...)`
    on each rank.
    """

    buffer: Buffer | None

    def __init__(
        self,
        num_local_experts: int,
        hidden: int,
        intermediate: int,
        buffer: Buffer,
        dtype: torch.dtype = torch.bfloat16,
    ):
        super().__init__()
        check_at_least(1, num_local_experts=num_local_experts, hidden=hidden)
        check_at_least(1, intermediate=intermediate)
        check_dtype("dtype", dtype, PAYLOAD_DTYPES)
        _check_buffer(buffer)
        new = torch.nn.Parameter
        up = torch.empty(num_local_experts, 2 * intermediate, hidden, dtype=dtype)
        down = torch.empty(num_local_experts, hidden, intermediate, dtype=dtype)
        self.gate_up_proj = new(torch.nn.init.normal_(up, std=hidden**-0.5), requires_grad=False)
        self.down_proj = new(torch.nn.init.normal_(down, std=intermediate**-0.5), False)
        self.buffer = buffer

    def forward(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """See `moe_ffn`."""
        if self.buffer is None:
            raise BackendError(
                "this module was loaded without its Buffer, which belonged to the process that "
                "saved it; set module.buffer = Buffer(...), on every rank."
            )
        return moe_ffn(x, topk_idx, topk_weights, self.gate_up_proj, self.down_proj, self.buffer)

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled."""
        return self.__dict__ | {"buffer": None}

    def __copy__(self) -> Self:
        copied = self.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self)] = copied = copy.copy(self)
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied
