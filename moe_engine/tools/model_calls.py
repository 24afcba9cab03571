"""Every call that a rank of a model can make, for `moe-engine compile`.

They are made for the numbers of tokens at which other kernels are chosen, and those calls in which
ranks differ as each that does. Nothing runs: launches are collected, see `launch.collecting`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

from .. import grouped_gemm
from ..checks import MAX_LOW_LATENCY_TOKENS
from ..combine.reduce_expanded_kernels import ExpertRows
from ..device.context import SAVE_POLICIES
from ..dispatch import Tokens, copy_ids
from ..dispatch.internode import Routes
from ..dispatch.low_latency import LowLatencyTokens
from ..engines import expanded
from ..engines.base import NUM_SMS, WeightGradients
from ..engines.expert_products import rows_to_send
from ..engines.expert_sums import gradients_of_experts, recompute
from ..engines.fused_layer import chosen_up_tiles
from ..engines.hooked_calls import HookedCalls
from ..engines.internode import InternodeEngine
from ..engines.internode_layer import Sizes, receive_and_return
from ..engines.kernel_verbs import KernelVerbs
from ..engines.trained_layer import later_weight_gradients
from ..expert_major import place, sum_rows, take_rows
from ..grouped_gemm.config import GemmConfig
from ..grouped_gemm.launch import gemm_problem
from ..grouped_gemm.quantization import quantized_bytes
from ..options import DEFAULT_OPTIONS, HINT_TOPK_LOW_LATENCY, elastic_size_hint
from ..symm.lanes import LaneLayout
from ..symm.ring import RingLayout, region_bytes
from ..symm.slots import RowLayout, SlotLayout
from .lone_rank import (
    internode_low_latency_engine,
    kernel_engine,
    layer_choices,
    low_latency_engine,
)
from .model_shape import FP8, ModelShape

FORMATS = "bf16", "fp8", "rounded", "ue8m0"


def batches_of(most: int) -> list[int]:
    """Numbers of tokens up to `most` at which a launch can need another variant."""
    return sorted({1, min(most, 7), min(most, 16), most})


def steps(most: int) -> list[int]:
    """Numbers up to `most`, each a little larger than the one before."""
    count = 16 * max(1, most).bit_length()
    return sorted({min(most, round(2 ** (step / 16))) for step in range(count + 1)})


def sizes(shape: ModelShape, choice: Callable[[int], Any]) -> list[int]:
    """Returns a number of tokens, up to the most of a Buffer, for each result of `choice`."""
    return list({choice(count): count for count in steps(shape.max_tokens)}.values())


def forms_of_rows(shape: ModelShape) -> list[tuple[int, torch.dtype, int]]:
    """(columns, dtype, scales) of the rows that a dispatch takes; those of a layer with e4m3
    weights over nodes are `rows_to_send`."""
    forms = [(shape.hidden, shape.dtype, 0)]
    if shape.hidden % 128 == 0:
        forms.append((shape.hidden, FP8, shape.hidden // 128))
    if shape.is_quantized and shape.num_nodes > 1:
        forms.append((quantized_bytes(shape.hidden) // shape.dtype.itemsize, shape.dtype, 0))
    return forms


def chunks(shape: ModelShape, layout: SlotLayout, *forms: tuple[int, torch.dtype, int]) -> str:
    """How rows of any call are cut into chunks; forms: those of `forms_of_rows`, unless given."""
    rows = [
        RowLayout(columns * dtype.itemsize, num_scales=num_scales)
        for columns, dtype, num_scales in forms or forms_of_rows(shape)
    ]
    if forms or shape.num_nodes > 1:
        rows.append(RowLayout(4 * shape.hidden))  # sums that are rounded once
    both = [replace(row, num_topk=num) for row, num in product(rows, (0, shape.num_topk))]
    return str([(layout.chunk_rows(row.num_bytes), layout.span(row.num_bytes)) for row in both])


def unlike_ranks(shape: ModelShape) -> range:
    """Ranks whose cached dispatches differ: that of rank r gets rows r - 1, if there is one, and r
    of an int32 [R, R], and each of them begins at a multiple of 16 bytes, or does not."""
    return range(min(shape.num_ranks, 5))


def call_normal(shape: ModelShape) -> None:
    """Layout, dispatch in all its forms, and combine."""
    num_ranks, forms = shape.num_ranks, forms_of_rows(shape)

    def choice(count: int) -> str:
        return chunks(shape, SlotLayout(num_ranks, shape.region_bytes(count)))

    for most in sizes(shape, choice):
        for max_tokens, form, rank in product((most, None), forms, unlike_ranks(shape)):
            memory = max_tokens, shape.region_bytes(most), None, shape.num_nodes, rank
            engine = kernel_engine(num_ranks, *memory)
            for count in batches_of(min(most, 16)):
                send_and_return(shape, engine, count, *form)


def send_and_return(
    shape: ModelShape,
    engine: KernelVerbs,
    count: int,
    columns: int,
    dtype: torch.dtype,
    num_scales: int,
    is_elastic: bool = False,
) -> None:
    """Dispatch `count` tokens in one of `forms_of_rows`, and combine them; as an `ElasticBuffer`
    does, ids and weights go along again, and rows may return in fp32."""
    x, topk_idx, topk_weights = shape.tokens(count)
    layout = engine.layout(topk_idx, shape.num_experts)
    scales = torch.empty(count, num_scales) if num_scales else None
    routed = Tokens(torch.empty(count, columns, dtype=dtype), topk_idx, topk_weights, scales)
    num_rows = shape.num_ranks * count
    for tokens in (routed, routed._replace(topk_idx=None, topk_weights=None)):
        for may_grow in (False, True):
            engine._exchange(tokens, layout, may_grow)
        _, _, handle, *_ = engine.dispatch(tokens, layout, num_rows)
        engine.dispatch(tokens, layout, num_rows, owned=False)
        engine.release()
    engine.dispatch_cached(routed.x, scales, handle)
    y = torch.empty(num_rows, shape.hidden, dtype=x.dtype)
    weights = torch.empty(num_rows, shape.num_topk)
    for returned, num_bias, once in product((None, weights), (0, 1, 2), (False, True)):
        engine.combine(y, handle, returned, [x] * num_bias, round_once=once)
        if is_elastic and once:
            rounded_once, bias = (torch.empty_like(one, dtype=torch.float32) for one in (y, x))
            engine.combine(rounded_once, handle, returned, [bias] * num_bias)
    if is_elastic:
        topk = topk_idx, topk_weights, shape.num_experts
        engine.dispatch_cached(routed.x, scales, handle, topk=topk)
    if isinstance(engine, InternodeEngine):
        engine.tokens_per_node(layout)


def call_elastic(shape: ModelShape) -> None:
    """`ElasticBuffer`'s dispatches and combines, in memory of its own sizes, with scales that may
    be packed, and what happens to rows in between."""
    forms = forms_of_rows(shape)
    if shape.hidden % 512 == 0:
        forms.append((shape.hidden, FP8, shape.hidden // 512))
    found: dict[str, tuple[int, int]] = {}
    for most, fp8, once, num_topk in product(
        steps(shape.max_tokens), (False, True), (False, True), {0, shape.num_topk}
    ):
        num_bytes = elastic_size_hint(shape.num_ranks, most, shape.hidden, num_topk, fp8, not once)
        layout = SlotLayout.fit(num_bytes, shape.num_ranks)
        found[chunks(shape, layout, *forms)] = layout.region_bytes, most
    for (region, most), rank in product(found.values(), unlike_ranks(shape)):
        engine = kernel_engine(shape.num_ranks, most, region, None, shape.num_nodes, rank)
        for count, form in product(batches_of(min(most, 16)), forms):
            send_and_return(shape, engine, count, *form, is_elastic=True)
            send_by_token(shape, engine, count, form)
            send_by_expert(shape, engine, count, form)


def send_by_token(
    shape: ModelShape, engine: KernelVerbs, count: int, form: tuple[int, torch.dtype, int]
) -> None:
    """`ElasticBuffer`'s dispatches of `count` tokens by token, in one of `forms_of_rows`, and the
    copy of ids of one with a handle."""
    tokens = elastic_tokens(shape, count, form)
    assert tokens.topk_idx is not None
    numbers = expanded.Numbers(shape.num_local, 1, count, shape.num_ranks)
    for copies_ids in (False, True):
        wanted, how = expanded.RowsWanted(*[False] * 4), expanded.HowSent(False, copies_ids, 20)
        expanded.dispatch(engine, tokens, shape.num_experts, None, numbers, wanted, how)
    copy_ids(tokens.topk_idx, torch.empty_like(tokens.topk_idx), engine.slots)


def elastic_tokens(shape: ModelShape, count: int, form: tuple[int, torch.dtype, int]) -> Tokens:
    """`count` tokens in one of `forms_of_rows`."""
    (columns, dtype, num_scales), (_, topk_idx, topk_weights) = form, shape.tokens(count)
    scales = torch.empty(count, num_scales) if num_scales else None
    return Tokens(torch.empty(count, columns, dtype=dtype), topk_idx, topk_weights, scales)


def send_by_expert(
    shape: ModelShape, engine: KernelVerbs, count: int, form: tuple[int, torch.dtype, int]
) -> None:
    """`ElasticBuffer`'s dispatches of `count` tokens by expert, in one of `forms_of_rows`, and its
    combines."""
    tokens = elastic_tokens(shape, count, form)
    again = tokens._replace(topk_idx=None, topk_weights=None)
    numbers = expanded.Numbers(shape.num_local, 1, count, shape.num_ranks)
    how = expanded.HowSent(False, True, 20)
    for zero_padding, by_column, weights in product(*[(False, True)] * 3):
        wanted = expanded.RowsWanted(True, zero_padding, by_column, weights)
        got = expanded.dispatch(engine, tokens, shape.num_experts, None, numbers, wanted, how)
        sizes = expanded.sizes_of(
            len(got.places.src_metadata), got.num_expanded, tokens.scales, wanted
        )
        sent = got.sent, got.places, numbers, wanted, NUM_SMS, sizes, None
        expanded.dispatch_again(engine, tokens if weights else again, *sent)
        y = torch.empty(got.num_expanded, shape.hidden, dtype=shape.dtype)
        values = torch.empty(got.num_expanded) if weights else None
        for num_bias, once in product((0, 1, 2), (False, True)):
            bias = [torch.empty(count, shape.hidden, dtype=shape.dtype)] * num_bias
            returned = got.places, got.sent, bias, once, NUM_SMS
            expanded.combine(engine, ExpertRows(y, values), *returned)


def call_notices(shape: ModelShape) -> None:
    """What a rank tells those of other nodes when a call breaks off."""
    memory = shape.region_bytes(1), None, shape.num_nodes, 0
    kernel_engine(shape.num_ranks, 1, *memory).context.notices.load()


def call_expert_rows(shape: ModelShape) -> None:
    """What `moe_engine.ops` does to received rows besides: expert rows of them, and sums back."""
    for count in batches_of(shape.max_tokens):
        x, topk_idx, topk_weights = shape.tokens(count)
        for num_rows in (count * shape.num_topk, count):
            places = place(topk_idx, topk_weights, shape.num_local, 1, num_rows)
            rows = take_rows(x, places.slots, shape.num_topk)
            for values in (None, places.row_weights):
                sum_rows(rows, places.dst_rows, values)


def low_latency_engines(shape: ModelShape) -> Iterable[tuple[HookedCalls, int]]:
    """(an engine, the most tokens of its calls), of each kind that needs kernels of its own. On one
    node they do not depend on the memory; on several it has chunks, whose size does."""
    most, num_topk = min(shape.max_tokens, DEFAULT_OPTIONS.decode_tokens), shape.num_topk
    if shape.num_nodes == 1:
        region = region_bytes(most, num_topk, shape.row_bytes)
        return [(low_latency_engine(shape.num_ranks, region), most)]
    found = {}
    counts = steps(min(shape.max_tokens, MAX_LOW_LATENCY_TOKENS))
    for count, topk in product(counts, {num_topk, HINT_TOPK_LOW_LATENCY}):
        region = region_bytes(count, topk, shape.row_bytes)
        ring = RingLayout(shape.num_ranks, region)
        found[chunks(shape, LaneLayout.of_ring(ring, shape.num_nodes))] = region, min(count, most)
    return [
        (internode_low_latency_engine(shape.num_ranks, region, shape.num_nodes), count)
        for region, count in found.values()
    ]


def call_low_latency(shape: ModelShape) -> None:
    """Low-latency dispatch and combine, whole and around a hook."""
    for engine, most in low_latency_engines(shape):
        send_and_return_at_once(shape, engine, most)


def send_and_return_at_once(shape: ModelShape, engine: HookedCalls, most: int) -> None:
    """Low-latency calls of up to so many tokens of a rank."""
    received = torch.zeros(shape.num_local, dtype=torch.int32)
    waited = torch.zeros(shape.num_ranks, dtype=torch.int64)
    for count, row_format, hooked, counts in product(
        batches_of(most), FORMATS, (False, True), (False, True)
    ):
        if row_format != "bf16" and shape.hidden % (512 if row_format == "ue8m0" else 128):
            continue
        x, topk_idx, topk_weights = shape.tokens(count)
        stats = received if counts else None, waited if counts else None
        tokens = LowLatencyTokens(x, topk_idx, None, most, shape.num_experts, row_format)
        got, receive = engine.dispatch(tokens, *stats, hooked)
        y = torch.empty(shape.num_local, shape.num_ranks * most, shape.hidden, dtype=x.dtype)
        handle = engine.new_handle(got, tokens.sizes(shape.num_ranks))
        rows = engine.expert_rows(y, topk_idx, topk_weights, handle, None)
        *_, add_up = engine.combine(rows, shape.num_experts, stats[1], hooked)
        for hook in (receive, add_up):
            if hook is not None:
                hook()


def call_layers(shape: ModelShape) -> None:
    """The fused layer and its backward, for Buffers of any size."""
    up, down = shape.weights()

    def choice(most: int) -> Any:
        config, num_rows = layer_choices().choose(shape.layer(most)), most * shape.num_topk
        tiles = chosen_up_tiles(up, num_rows, shape.activation, shape.has_bias)
        of_down = grouped_gemm.gemm_config(down, num_rows, block_m=tiles.block_m)
        return config, tiles, of_down, tiles_of_weight_gradients(up, num_rows)

    # With room for all rows, and for those of balanced routing, so that layers run in passes.
    for most, capacity in product(sizes(shape, choice), (None, 1.0)):
        engine = kernel_engine(shape.num_ranks, most, shape.region_bytes(most), capacity)
        for count in batches_of(most):
            inputs = shape.inputs(count, up, down)
            if capacity is None:  # else `passes.py` makes calls that train
                engine.moe_ffn(inputs)
            elif shape.is_quantized:
                engine.moe_ffn_forward(inputs, "none", is_captured=True)
            for save in () if shape.is_quantized else SAVE_POLICIES[1:]:
                _, saved, _ = engine.moe_ffn_forward(inputs, save, is_captured=True)
                dy = torch.empty_like(inputs.x)
                later = engine.moe_ffn_backward(dy, inputs, saved, None).later
                assert later is not None
                for into in memory_for_gradients(shape):
                    engine.moe_ffn_backward(dy, inputs, saved, into)
                    later(into)


def call_decode_layers(shape: ModelShape) -> None:
    """Layers that run by low-latency calls, for each number of tokens."""
    call_decode_layers_of(shape, lambda max_tokens: {1, max_tokens // 2, max_tokens})


def call_decode_layers_once(shape: ModelShape) -> None:
    """One for each number of tokens that all ranks may bring: the GPU decides no more than what
    follows from that number."""
    call_decode_layers_of(shape, lambda max_tokens: {max_tokens})


def call_decode_layers_of(shape: ModelShape, counts: Callable[[int], set[int]]) -> None:
    """Those of `counts` tokens of this rank, where any rank brings up to so many."""
    weights = shape.weights()
    for engine, most in low_latency_engines(shape):
        for max_tokens in range(1, most + 1):
            for count in counts(max_tokens):
                engine.moe_ffn(shape.inputs(count, *weights), max_tokens)


def numbers_of_rows(shape: ModelShape) -> Iterable[int]:
    """Yields the numbers of rows of a rank's experts at which other tiles are chosen."""
    (up, down), num_ranks = shape.weights(), shape.num_ranks

    def choice(count: int) -> Any:
        tiles = grouped_gemm.gemm_config(up, count, shape.activation)
        of = partial(grouped_gemm.gemm_config, num_rows=count)
        return (
            *(tiles, of(down, block_m=tiles.block_m)),
            *(of(one, transposed=True, block_m=tiles.block_m) for one in (up, down)),
            tiles_of_weight_gradients(up, count),
        )

    most = num_ranks * shape.max_tokens * shape.num_topk
    return {choice(count): count for count in reversed(steps(most))}.values()


def tiles_of_weight_gradients(w: torch.Tensor, num_rows: int) -> GemmConfig:
    """The same for w_gate_up and w_down, and other ones for each dtype of the gradient."""
    return GemmConfig.for_weights(gemm_problem(w, num_rows), w.itemsize)


def call_layers_by_verbs(shape: ModelShape) -> None:
    """What layers of several nodes do besides dispatch and combine, forward and backward."""
    for count in numbers_of_rows(shape):
        run_experts(shape, count)


def run_experts(shape: ModelShape, count: int) -> None:
    """What the experts of a rank of several nodes do with so many rows, each of one expert."""
    engine = kernel_engine(shape.num_ranks, 1, shape.region_bytes(1), num_nodes=shape.num_nodes)
    assert isinstance(engine, InternodeEngine)
    rows = shape.inputs(count, *shape.weights())
    rows.topk_idx[:, 1:] = -1
    engine.expert_sums(rows._replace(x=rows_to_send(rows)), count)
    if shape.is_quantized:
        return
    found = gradients_of_experts(rows, recompute(rows, count), torch.empty_like(rows.x))
    for into in memory_for_gradients(shape):
        later_weight_gradients(found.of_weights, into)


def call_layers_in_parts(shape: ModelShape) -> None:
    """What layers of several nodes in two parts do after they have sent their rows."""
    inputs, memory = shape.inputs(1, *shape.weights()), (shape.region_bytes(1), None)
    engine = kernel_engine(shape.num_ranks, 1, *memory, shape.num_nodes)
    assert isinstance(engine, InternodeEngine)
    tokens = engine.tokens_of(inputs)
    layout = engine.layout(inputs.topk_idx, shape.num_experts)
    counts, routes = engine._exchange(tokens, layout, may_grow=False)
    made = engine, inputs, tokens, layout, counts, Routes(*routes)
    for count in numbers_of_rows(shape):
        for keeps_rows in (False, True):
            receive_and_return(*made, Sizes(count, count, count), keeps_rows)


def memory_for_gradients(shape: ModelShape) -> Iterator[WeightGradients]:
    """All that the gradients of weights may go into."""
    for dtype, accumulate in product({shape.dtype, torch.float32}, (False, True)):
        up, down = (torch.empty_like(one, dtype=dtype) for one in shape.weights())
        yield WeightGradients(up, down, accumulate)


def call_gemms(shape: ModelShape) -> None:
    """`grouped_mlp` of the experts' rows, forward and backward; none of e4m3."""
    if shape.is_quantized:
        return
    _, _, _, up, down, b_up, b_down, activation, *_ = shape.inputs(1, *shape.weights())
    offsets = torch.zeros(shape.num_local + 1, dtype=torch.int32)
    for most in sizes(shape, lambda most: most):
        x = torch.empty(most * shape.num_topk, shape.hidden, dtype=shape.dtype)
        for grad in (False, True):
            leaves = [one for one in (x, up, down, b_up, b_down) if one is not None]
            for leaf in leaves:
                leaf.requires_grad_(grad)
            more: dict[str, Any] = dict(b_up=b_up, b_down=b_down, activation=activation)
            y = grouped_gemm.grouped_mlp(x, up, down, offsets, **more)
            if grad:
                torch.autograd.grad(y, leaves, torch.empty_like(y))


CALLS: dict[str, Callable[[ModelShape], None]] = {
    "dispatch and combine": call_normal,
    "expert rows": call_expert_rows,
    "ElasticBuffer": call_elastic,
    "low latency": call_low_latency,
    "layer": call_layers,
    "decode layer": call_decode_layers,
    "grouped GEMM": call_gemms,
}
"""The calls of ranks on one node, by the name that is shown."""
CALLS_OF_NODES: dict[str, Callable[[ModelShape], None]] = {
    "dispatch and combine": call_normal,
    "expert rows": call_expert_rows,
    "ElasticBuffer": call_elastic,
    "low latency": call_low_latency,
    "layer by verbs": call_layers_by_verbs,
    "layer in parts": call_layers_in_parts,
    "notices": call_notices,
    "decode layer": call_decode_layers,
    "grouped GEMM": call_gemms,
}
"""The calls of ranks on several nodes, by the name that is shown."""
CHOOSING = {
    "layer": call_layers,
    "decode layer": call_decode_layers_once,
    "grouped GEMM": call_gemms,
}
"""What may launch other kernels on other kinds of GPUs of one compute capability."""
