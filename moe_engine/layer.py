"""The MoE feed-forward as a function and as a module."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Generic, Literal, Self, TypeVar, overload

import torch
from torch.distributed.device_mesh import DeviceMesh

from .buffer import Buffer
from .callers import Tag
from .checks import (
    BIAS_PAIR,
    PAYLOAD_DTYPES,
    check_at_least,
    check_dtype,
    check_flag,
    check_pair,
    shown,
)
from .errors import BackendError, DtypeError, RoutingError, ShapeError
from .grouped_gemm.activations import SWIGLU, AnyActivation, check_layer_activation, num_parts
from .passes import may_take_passes
from .sharded_weights import arrived, group_of, local, sharded
from .streams import EventOverlap
from .torch_privates import has_modes
from .training import LayerOptions, LayerTensors, trained_layer, wants_gradients
from .weight_gradients import DelayedWgrad, LayerWeights, Wgrad
from .weight_layouts import GateUp, Operand, check_layout

Biases = tuple[torch.Tensor | None, torch.Tensor | None]
"""(b_gate_up [L, 2I], b_down [L, H])."""
NO_BIASES: Biases = None, None

Down = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""w_down [L, H, I], or (e4m3 [L, H, I], float32 scales [L, H / 128, I / 128])."""

Result = TypeVar("Result")
"""What a layer returns: a tensor, or with return_counts two."""


# fmt: off
@overload
def moe_ffn(
    x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, w_gate_up: Operand,
    w_down: Down, buffer: Buffer, max_tokens: int | None = None, *, save: str = "auto",
    wgrad: Wgrad = None, layout: str = "concatenated", biases: Biases = NO_BIASES,
    activation: AnyActivation = "swiglu", return_counts: Literal[False] = False,
    tag: Tag | None = None,
) -> torch.Tensor: ...
@overload
def moe_ffn(
    x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, w_gate_up: Operand,
    w_down: Down, buffer: Buffer, max_tokens: int | None = None, *, save: str = "auto",
    wgrad: Wgrad = None, layout: str = "concatenated", biases: Biases = NO_BIASES,
    activation: AnyActivation = "swiglu", return_counts: Literal[True],
    tag: Tag | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def moe_ffn(
    x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, w_gate_up: Operand,
    w_down: Down, buffer: Buffer, max_tokens: int | None = None, *, save: str = "auto",
    wgrad: Wgrad = None, layout: str = "concatenated", biases: Biases = NO_BIASES,
    activation: AnyActivation = "swiglu", return_counts: bool,
    tag: Tag | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
# fmt: on
def moe_ffn(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    w_gate_up: Operand,
    w_down: Down,
    buffer: Buffer,
    max_tokens: int | None = None,
    *,
    save: str = "auto",
    wgrad: Wgrad = None,
    layout: str = "concatenated",
    biases: Biases = NO_BIASES,
    activation: AnyActivation = "swiglu",
    return_counts: bool = False,
    tag: Tag | None = None,
) -> Any:
    """Route x [T, H] to its experts on all ranks and sum their results, weighted: [T, H].

    topk_idx int64 [T, K] (-1 = not routed) and topk_weights float32 [T, K] come from the router;
    w_gate_up [L, 2I, H] (gate rows, then up rows) and w_down [L, H, I] are this rank's experts
    rank * L .. rank * L + L - 1, as transformers stores them. Everything in bf16, or in fp32.
    out[t] = sum over k of topk_weights[t, k] * w_down[e] @ (silu(gate_e x) * (up_e x)).
    activation: another one than this, by its name or as an `Activation`; with a non-gated one
    w_gate_up is [L, I, H]. biases: (b_gate_up [L, 2I], b_down [L, H]), each in
    the weights' dtype or None, added to the products; that of gate and up has gate's first in any
    layout.
    layout "interleaved": rows of gate and up in turn. w_gate_up may also be a pair (w_gate, w_up),
    each [L, I, H], of one memory: w_gate, w_up = torch.empty(2, L, I, H). Nothing is copied.

    Weights in e4m3, without gradients: w_gate_up and w_down are pairs (values, scales), float32
    [L, 2I / 128, H / 128] and [L, H / 128, I / 128], rounded up, as `quantize_weights` makes them;
    x and biases are bf16. Rows travel to the experts in e4m3, with a scale for each 128 columns (in
    bf16 with "collective"), and the activations are cast so between the products; rows return, and
    are summed, in bf16.

    Collective over the Buffer's group; T may differ per rank and be 0. max_tokens, equal on all
    ranks, is the most that any of them brings to this call (None: what the Buffer was made for).
    Where it is more than 65,536, the layer goes in sub-batches, each a call (`passes.py`).
    Up to `Options.decode_tokens`, the layer runs by low-latency calls (`engines/low_latency.py`).

    Where x, topk_weights, weights or biases require grad, on all ranks, so does the result, whose
    backward is collective as well. `save` is what stays for it, equal on all ranks: "pre", the
    pre-activations [M, 2I] of the M rows of this rank's experts; "rows", these rows [M, H]; "all",
    both; "none"; "auto": "pre" for I < H, else "rows", and "rows" on several nodes. What is not
    saved is made again, with the same bits. The host waits for the counts of rows. The gradients of
    the weights go to autograd,
    with a `WgradSink` into its tensors, with a `DelayedWgrad` there or into `.grad` later; those of
    biases always go to autograd.

    return_counts: (the result, counts int32 [E]), how many (token, k) all ranks together route to
    each expert, equal on all ranks; such a layer does not run by low-latency calls.

    tag: which layer of the model this is, equal on all ranks. Ranks pair their calls by order, and
    raise OutOfStep where the tags of their layers differ. Without tags they cannot tell layers of
    equal experts apart, which then pair in any order.

    Layers of two Buffers must not run at once on a GPU: each may hold what the other waits for.
    """
    tensors = arrived(x), arrived(topk_idx), arrived(topk_weights), w_gate_up, w_down
    options = LayerOptions(max_tokens, save, wgrad, return_counts, tag=tag)
    try:
        check_pair("biases", biases, BIAS_PAIR)
        if _is_operator(buffer, w_gate_up, wgrad) and _is_plain(biases, activation):
            from .layer_operators import layer_operator  # defines operators, which takes time

            out, counts = layer_operator(tensors, buffer, options, layout)
            return (out, counts) if return_counts else out
        return _begin(tensors, layout, biases, activation, buffer, options)._result
    except RoutingError as error:
        layer = error.result
        error.result = layer._result if isinstance(layer, LayerInFlight) else None
        raise
    except Exception as error:
        _note_refusal(buffer, "moe_ffn", error)
        raise


@dataclass(frozen=True, slots=True)
class LayerInFlight(Generic[Result]):
    """A layer that `start_moe_ffn` has begun."""

    _out: torch.Tensor
    _event: EventOverlap
    _counts: torch.Tensor | None = None

    def finish(self) -> Result:
        """What `moe_ffn` returns; the current stream waits until it is written."""
        self._event.current_stream_wait()
        return self._result

    @property
    def _result(self) -> Result:
        result: Any = self._out if self._counts is None else (self._out, self._counts)
        return result


# fmt: off
@overload
def start_moe_ffn(
    x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, w_gate_up: Operand,
    w_down: Down, buffer: Buffer, max_tokens: int | None = None, *, save: str = "auto",
    wgrad: Wgrad = None, layout: str = "concatenated", biases: Biases = NO_BIASES,
    activation: AnyActivation = "swiglu", return_counts: Literal[False] = False,
    tag: Tag | None = None,
) -> LayerInFlight[torch.Tensor]: ...
@overload
def start_moe_ffn(
    x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, w_gate_up: Operand,
    w_down: Down, buffer: Buffer, max_tokens: int | None = None, *, save: str = "auto",
    wgrad: Wgrad = None, layout: str = "concatenated", biases: Biases = NO_BIASES,
    activation: AnyActivation = "swiglu", return_counts: Literal[True],
    tag: Tag | None = None,
) -> LayerInFlight[tuple[torch.Tensor, torch.Tensor]]: ...
@overload
def start_moe_ffn(
    x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, w_gate_up: Operand,
    w_down: Down, buffer: Buffer, max_tokens: int | None = None, *, save: str = "auto",
    wgrad: Wgrad = None, layout: str = "concatenated", biases: Biases = NO_BIASES,
    activation: AnyActivation = "swiglu", return_counts: bool,
    tag: Tag | None = None,
) -> LayerInFlight[torch.Tensor | tuple[torch.Tensor, torch.Tensor]]: ...
# fmt: on
def start_moe_ffn(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    w_gate_up: Operand,
    w_down: Down,
    buffer: Buffer,
    max_tokens: int | None = None,
    *,
    save: str = "auto",
    wgrad: Wgrad = None,
    layout: str = "concatenated",
    biases: Biases = NO_BIASES,
    activation: AnyActivation = "swiglu",
    return_counts: bool = False,
    tag: Tag | None = None,
) -> LayerInFlight[Any]:
    """Begin `moe_ffn` on the Buffer's own stream, and run something else until `finish()`: the
    shared expert of Qwen2-MoE and DeepSeek-V3 fills SMs where the routed ones wait for rows.

        layer = start_moe_ffn(x, topk_idx, topk_weights, w_gate_up, w_down, buffer)
        y = shared_expert(x) + layer.finish()

    Collective, like `moe_ffn`. The layers of a Buffer run one after the other. The backward of the
    layer, if it has one, runs on the stream that is current here.
    """
    tensors = arrived(x), arrived(topk_idx), arrived(topk_weights), w_gate_up, w_down
    options = LayerOptions(max_tokens, save, wgrad, return_counts, async_finish=True, tag=tag)
    try:
        check_pair("biases", biases, BIAS_PAIR)
        return _begin(tensors, layout, biases, activation, buffer, options)
    except Exception as error:
        _note_refusal(buffer, "start_moe_ffn", error)
        raise


def _begin(
    tensors: tuple[Any, ...],
    layout: str,
    biases: Biases,
    activation: AnyActivation,
    buffer: Buffer,
    options: LayerOptions,
) -> LayerInFlight:
    _check_buffer(buffer)
    options.check()
    x, topk_idx, topk_weights, w_gate_up, w_down = tensors
    w_gate_up, s_gate_up = _split_scales(w_gate_up)
    w_down, s_down = _split_scales(w_down)
    weights = LayerWeights(GateUp.of(w_gate_up, layout), w_down)
    args = LayerTensors(x, topk_idx, topk_weights, weights, *biases, activation, s_gate_up, s_down)
    is_trained = wants_gradients(x, *args.flat[2:])
    if s_gate_up is not None:
        _check_quantized(layout, is_trained)
    if is_trained or may_take_passes(inputs := args.inputs, buffer, options):
        if not is_trained:
            options = options._replace(save="none", wgrad=None, is_trained=False)
        out, event, counts, error = trained_layer(args, buffer, options)
        if error is not None:
            error.result = LayerInFlight(out, event, counts)
            raise error
        return LayerInFlight(out, event, counts)
    how = options.async_finish, options.max_tokens, bool(options.return_counts)
    try:
        return LayerInFlight(*buffer.moe_ffn(inputs, *how, options.tag))
    except RoutingError as error:
        error.result = LayerInFlight(*error.result) if isinstance(error.result, tuple) else None
        raise


def _is_operator(buffer: Buffer, w_gate_up: Operand, wgrad: Wgrad) -> bool:
    """Whether a layer is called as an operator here, if it `_is_plain`. There is one for gate and
    up in one tensor, whose gradients go to autograd."""
    if not (torch.compiler.is_compiling() or has_modes()):
        return False
    has_operator = isinstance(buffer, Buffer) and isinstance(w_gate_up, torch.Tensor)
    return has_operator and wgrad is None


def _is_plain(biases: Biases, activation: AnyActivation) -> bool:
    """Whether a layer has SwiGLU and no biases."""
    return biases[0] is biases[1] is None and activation in ("swiglu", SWIGLU)


def _split_scales(w: Any) -> tuple[Any, torch.Tensor | None]:
    """(weights, their scales or None): a pair of two types is e4m3 with scales."""
    if not isinstance(w, tuple | list) or len(w) != 2:
        return w, None
    of_e4m3 = [getattr(one, "dtype", None) == torch.float8_e4m3fn for one in w]
    return (w[0], w[1]) if of_e4m3 == [True, False] else (w, None)


def _check_quantized(layout: str, is_trained: bool) -> None:
    """Raise for what layers with e4m3 weights do not have."""
    if is_trained:
        raise BackendError(
            "an argument requires grad, and there are no gradients through e4m3 weights. Call the "
            "layer under torch.no_grad(), or with weights in bf16."
        )
    if layout != "concatenated":
        raise ShapeError(
            f'layout is "{layout}" and the weights are e4m3, whose gate rows come before the up '
            'rows, as their scales do; pass layout="concatenated".'
        )


def _note_refusal(buffer: object, verb: str, error: Exception) -> None:
    if isinstance(buffer, Buffer):
        buffer.note_refusal(verb, error)


def _check_buffer(buffer: object) -> None:
    if not isinstance(buffer, Buffer):
        raise DtypeError(f"buffer is {shown(buffer)}; it must be a moe_engine.Buffer.")


class MoEFeedForward(torch.nn.Module):
    """This rank's experts of one layer over a shared Buffer: `forward(x, topk_idx, topk_weights)`.

    Parameters: gate_up_proj [L, 2I, H], [L, I, H] for a non-gated activation, down_proj
    [L, H, I], with `bias` also gate_up_bias [L, 2I]
    and down_bias [L, H], zeros; with gradients where `requires_grad` is set. `activation`, `save`,
    `wgrad` and `layout` as in `moe_ffn`, attributes that may change between calls, as may `tag`,
    which is the number of the module in the order in which those of the Buffer are made;
    wgrad="delayed" makes a `DelayedWgrad`, whose `backward_dw()` is the module's too. With a
    DeviceMesh of one dimension and the Buffer's ranks, they are DTensors [E, ...] of these parts,
    Shard(0) on it, as checkpoints and `integrations/data_parallel.py` take them. A copy shares
    the Buffer. A module that was pickled, as by torch.save, comes back without one, and without
    wgrad: set `module.buffer = Buffer(...)` on each rank.
    """

    buffer: Buffer | None
    wgrad: Wgrad
    save: str = "auto"
    gate_up_bias: torch.nn.Parameter | None
    down_bias: torch.nn.Parameter | None

    def __init__(
        self,
        num_local_experts: int,
        hidden: int,
        intermediate: int,
        buffer: Buffer,
        dtype: torch.dtype = torch.bfloat16,
        *,
        requires_grad: bool = False,
        save: str = "auto",
        wgrad: Wgrad | Literal["delayed"] = None,
        layout: str = "concatenated",
        bias: bool = False,
        activation: AnyActivation = "swiglu",
        mesh: DeviceMesh | None = None,
    ):
        super().__init__()
        check_at_least(1, num_local_experts=num_local_experts, hidden=hidden)
        check_at_least(1, intermediate=intermediate)
        check_dtype("dtype", dtype, PAYLOAD_DTYPES)
        _check_buffer(buffer)
        self.wgrad = DelayedWgrad() if wgrad == "delayed" else wgrad
        LayerOptions(save=save, wgrad=self.wgrad).check()
        check_layout(layout)
        check_flag("requires_grad", requires_grad)
        check_flag("bias", bias)
        check_layer_activation(activation)
        if mesh is not None:
            group_of(mesh, buffer.group)
        new = torch.nn.Parameter
        num_rows = num_parts(activation) * intermediate
        up = torch.empty(num_local_experts, num_rows, hidden, dtype=dtype)
        down = torch.empty(num_local_experts, hidden, intermediate, dtype=dtype)
        torch.nn.init.normal_(up, std=hidden**-0.5)
        torch.nn.init.normal_(down, std=intermediate**-0.5)
        self.gate_up_proj = new(sharded(up, mesh), requires_grad)
        self.down_proj = new(sharded(down, mesh), requires_grad)
        for name, weight in (("gate_up_bias", up), ("down_bias", down)):
            added = sharded(torch.zeros_like(weight[:, :, 0]), mesh) if bias else None
            self.register_parameter(name, None if added is None else new(added, requires_grad))
        self.buffer, self.save, self.layout = buffer, save, layout
        self.activation = activation
        self.tag: Tag | None = buffer.new_tag("MoEFeedForward")

    def forward(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        return_counts: bool = False,
    ) -> Any:
        """See `moe_ffn`."""
        args = x, topk_idx, topk_weights, *self._weights()
        return moe_ffn(*args, **self._options(), return_counts=return_counts)

    def start(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        return_counts: bool = False,
    ) -> LayerInFlight[Any]:
        """See `start_moe_ffn`."""
        args = x, topk_idx, topk_weights, *self._weights()
        return start_moe_ffn(*args, **self._options(), return_counts=return_counts)

    def _weights(self) -> tuple[torch.Tensor, torch.Tensor, Buffer]:
        if self.buffer is None:
            raise BackendError(
                "this module was loaded without its Buffer, which belonged to the process that "
                "saved it; set module.buffer = Buffer(...), on every rank."
            )
        return local(self.gate_up_proj), local(self.down_proj), self.buffer

    def _options(self) -> dict[str, Any]:
        return dict(
            save=self.save,
            wgrad=self.wgrad,
            layout=self.layout,
            biases=self._biases(),
            activation=self.activation,
            tag=self.tag,
        )

    def _biases(self) -> Biases:
        up, down = self.gate_up_bias, self.down_bias
        return None if up is None else local(up), None if down is None else local(down)

    def backward_dw(self) -> None:
        """See `DelayedWgrad.backward_dw`. BackendError where `wgrad` is none."""
        if not isinstance(self.wgrad, DelayedWgrad):
            raise BackendError(
                'backward_dw() is of modules with wgrad="delayed"; the backward of this one has '
                "computed the gradients of its weights."
            )
        self.wgrad.backward_dw()

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled."""
        return self.__dict__ | {"buffer": None, "wgrad": None}

    def __copy__(self) -> Self:
        copied = self.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self)] = copied = copy.copy(self)
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied
