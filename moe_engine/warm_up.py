"""What `Buffer.warmup` calls: each verb, and layers of few tokens, that train or run in passes."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from .checks import BIAS_PAIR, PAYLOAD_DTYPES, check_at_least, check_dtype, check_pair
from .device.context import SAVE_POLICIES
from .engines import internode_layer
from .engines.base import LayerInputs, NewWeightGradients
from .engines.internode import InternodeEngine
from .engines.layer_by_verbs import LayerByVerbs
from .errors import CapacityError, DtypeError, ShapeError
from .grouped_gemm.activations import AnyActivation
from .grouped_gemm.operands import Operand, split_scales
from .lifecycle import BufferLifecycle, verb
from .options import Options

if TYPE_CHECKING:
    from .buffer import Buffer

STEPS = 3
"""Sizes that a warm-up tries up to the next power of two; fewer choices of tiles lie there."""


def warm_up(
    buffer: Buffer,
    hidden: int,
    num_experts: int,
    num_topk: int,
    dtype: torch.dtype | None,
    weights: tuple[Operand, Operand] | None,
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    activation: AnyActivation,
) -> None:
    """See `Buffer.warmup`."""
    check_at_least(1, hidden=hidden, num_topk=num_topk)
    if dtype is not None:
        check_dtype("dtype", dtype, PAYLOAD_DTYPES)
    check_pair("biases", biases, BIAS_PAIR)
    if weights is not None:
        check_pair("weights", weights, "(w_gate_up, w_down)")
        check_num_local(weights, num_experts, buffer.group_size)
        dtype = dtype_of_rows(weights, dtype)
    dtype = dtype or torch.bfloat16
    x = torch.empty(0, hidden, dtype=dtype, device=buffer.device)
    idx = torch.empty(0, num_topk, dtype=torch.int64, device=buffer.device)
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, num_experts)
    layout = per_rank, per_node, in_rank, per_expert, idx, idx.float()
    rows, _, topk_weights, _, handle, _ = buffer.dispatch(x, None, *layout)
    assert isinstance(rows, torch.Tensor)
    assert handle is not None
    buffer.dispatch(x, None, *layout, num_worst_tokens=1)
    buffer.dispatch(x, handle)
    for returned in (None, topk_weights):
        buffer.combine(rows, handle, returned)
    if buffer._low_latency is not None and dtype == torch.bfloat16:
        with suppress(CapacityError):  # it has memory for other calls, of layers
            buffer._warm_low_latency(x, idx, num_experts)
    if weights is not None:
        warm_layers(buffer, layer_of_no_tokens(x, idx, weights, biases, activation))
    buffer.check()


def check_num_local(weights: tuple[Operand, Operand], num_experts: int, num_ranks: int) -> None:
    """The weights are those of as many experts as a rank has."""
    for number, weight in enumerate(weights):
        w, _ = split_scales(f"weights[{number}]", weight)
        if len(w) * num_ranks != num_experts:
            raise ShapeError(
                f"weights[{number}] has {len(w)} experts, which on {num_ranks} ranks are "
                f"{len(w) * num_ranks}, and num_experts is {num_experts}. Pass this rank's experts."
            )


def dtype_of_rows(weights: tuple[Operand, Operand], dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of the rows of a layer with these weights: theirs, or bf16 where they are e4m3.
    DtypeError where another one is given."""
    w, scales = split_scales("weights[0]", weights[0])
    if scales is None:
        check_dtype("weights[0].dtype", w.dtype, PAYLOAD_DTYPES)
    wanted = w.dtype if scales is None else torch.bfloat16
    if dtype not in (None, wanted):
        raise DtypeError(
            f"dtype is {dtype}, and rows of a layer whose weights[0] is {w.dtype} are {wanted}. "
            "Leave dtype out."
        )
    return wanted


def layer_of_no_tokens(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    weights: tuple[Operand, Operand],
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    activation: AnyActivation,
) -> LayerInputs:
    """A layer with these weights, x [0, H] and topk_idx [0, K]."""
    both = zip(("weights[0]", "weights[1]"), weights, strict=True)
    (up, s_up), (down, s_down) = (split_scales(*one) for one in both)
    routed = x, topk_idx, topk_idx.float()
    return LayerInputs(*routed, up, down, *biases, activation, s_up, s_down)


def warm_layers(buffer: Buffer, inputs: LayerInputs) -> None:
    """All layers of no tokens with these weights, x [0, H]. Collective."""
    with torch.no_grad():
        for max_tokens in layer_sizes(buffer.options):
            buffer.moe_ffn(inputs, max_tokens=max_tokens)
        if buffer.num_nodes > 1:
            warm_layer_of_nodes(buffer, inputs)
        warm_trained_layer(buffer, inputs)


def layer_sizes(options: Options) -> list[int | None]:
    """The max_tokens of layers that may need kernels of their own, the same on all ranks: None, as
    many as the Buffer was made for; then, of layers that run by low-latency calls, so many that
    each choice of tiles is among them, whichever a rank makes."""
    most = options.decode_tokens
    if options.max_tokens is not None:
        most = min(most, options.max_tokens)
    steps = 1 + STEPS * most.bit_length()
    few = sorted({round(2 ** (step / STEPS)) for step in range(steps)} | {most})
    return [None, *(size for size in few if 1 <= size <= most)]  # the first call checks the inputs


@verb
def warm_layer_of_nodes(buffer: BufferLifecycle, inputs: LayerInputs) -> None:
    """A layer of a token for experts of all nodes, in one part and in two: ranks choose by
    themselves, and another one would wait for the first that compiles. Products of more rows may
    need other tiles. Collective."""
    engine = buffer._ready()
    if not isinstance(engine, InternodeEngine):
        return
    num_experts, num_topk = len(inputs.w_gate_up) * buffer.group_size, inputs.topk_idx.shape[1]
    places = torch.arange(num_topk, dtype=torch.int64, device=inputs.x.device)
    topk_idx = (places * num_experts // num_topk)[None]
    x = inputs.x.new_zeros(1, inputs.x.shape[1])
    one = inputs._replace(x=x, topk_idx=topk_idx, topk_weights=topk_idx.float())
    with buffer._streams.call():
        for save in ("none", "rows"):
            LayerByVerbs.moe_ffn_forward(engine, one, save, is_captured=False)
            if engine.may_have_parts:
                internode_layer.forward(engine, one, save)


@verb
def warm_trained_layer(buffer: BufferLifecycle, inputs: LayerInputs) -> None:
    """Where a weight requires grad, a layer's forward and backward by each policy; else, where it
    may run in sub-batches or passes (`passes.py`), its forward. Collective."""
    engine, weights = buffer._ready(), (inputs.w_gate_up, inputs.w_down)
    wanted = [one.requires_grad for one in weights]
    is_trained = any(wanted)
    in_passes = buffer.takes_sub_batches or buffer.options.num_passes(buffer.group_size) > 1
    policies = SAVE_POLICIES[1:] if is_trained else ("none",) * in_passes
    with buffer._streams.call():
        for save in policies:
            _, saved, _ = engine.moe_ffn_forward(inputs, save, is_captured=False)
            if is_trained:
                engine.moe_ffn_backward(inputs.x, inputs, saved, NewWeightGradients(*wanted))
