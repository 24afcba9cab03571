"""A layer over several nodes in two parts, so that the network works while the experts do.

Rows from the ranks of this node are multiplied by w_gate_up while those from other nodes cross the
network. These are multiplied by both weights then, so that their sums return while the rows of this
node are multiplied by w_down:

    side stream     forward rows from other nodes        return their sums
    current stream  up, rows of this node | up and down, the others | down, rows of this node

Each rank decides by itself whether its layer has two parts: what it sends is the same.

A backward has one part. What it makes of x alone, and for the weights alone, may hide the network:

    side stream     receive dy                         return the sums of dx
    current stream  up, rows of x | down and up of dy | gradients of the weights
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

from .. import dispatch as dispatch_verbs
from ..checks import packed
from ..combine import ReturnedRows, Sums
from ..combine.internode import add_node_sums, open_combine, return_to_rails, send_node_sums
from ..device.internode import FAR, NEAR
from ..dispatch import NUM_CONCURRENT, Counts, DispatchLayout, Received, Tokens
from ..dispatch import internode as dispatch_internode
from ..dispatch.internode import Routes
from ..dispatch.internode_low_latency import pack_rows
from ..hardware import H200
from ..layer_config import LayerProblem
from ..node_traffic import Cluster, Shares, Way, exchange
from ..streams import is_captured
from ..symm.slots import BARE_HEADER, header_bytes
from .base import (
    NUM_SMS,
    Gradients,
    Into,
    LayerInputs,
    Saved,
    WeightGradients,
    check_backward,
    memory_of,
)
from .expert_products import sent_columns
from .expert_sums import gradients_of_experts, recompute
from .received_part import Part
from .trained_layer import later_weight_gradients

if TYPE_CHECKING:
    from .internode import InternodeEngine, InternodeHandle

PART_US = 40.0
"""What a second part costs besides reading the weights again: more launches, shorter GEMMs. It is
assumed."""
SLOWER = H200.num_sms / (H200.num_sms - NUM_CONCURRENT)
"""How much longer products take that leave SMs to what communicates."""


class Times(NamedTuple):
    """What a layer of balanced routing is predicted to take, in us: its rows over the network, bf16
    ones, both products, and reading their weights."""

    sent: float
    returned: float
    up: float
    down: float
    weights: float


def is_faster(inputs: LayerInputs, num_ranks: int, num_nodes: int) -> bool:
    """Whether two parts are predicted to take less time than one: what they hide of the network's
    time is more than what they cost, the SMs that communicate, and weights that are read again."""
    found = _times_of(inputs, num_ranks, num_nodes)
    if found is None:
        return False
    up, down = SLOWER * found.up / num_nodes, SLOWER * found.down / num_nodes
    cost = (up + down) * (1 - 1 / SLOWER) + found.weights + PART_US
    return min(found.sent, up) + min(found.returned, down) > cost


def overlaps(inputs: LayerInputs, num_ranks: int, num_nodes: int) -> tuple[bool, bool]:
    """Whether dy, and the sums of dx, are predicted to be on the network for longer than products
    lose that leave SMs to them."""
    found = _times_of(inputs, num_ranks, num_nodes)
    if found is None:
        return False, False
    lost = SLOWER - 1
    return found.returned > lost * found.up, found.returned > lost * (found.up + found.down)


def _times_of(inputs: LayerInputs, num_ranks: int, num_nodes: int) -> Times | None:
    num_tokens, num_topk = inputs.topk_idx.shape
    num_experts, columns = len(inputs.w_gate_up) * num_ranks, inputs.w_down.shape[2]
    hidden, itemsize = inputs.x.shape[1], inputs.x.itemsize
    sizes = num_tokens, num_experts, num_topk, hidden, columns, itemsize
    problem, row_bytes = LayerProblem(num_ranks, *sizes), sent_columns(inputs) * itemsize
    return _times(problem, inputs.parts, inputs.w_down.itemsize, row_bytes, num_nodes)


@functools.lru_cache(maxsize=256)
def _times(
    problem: LayerProblem, parts: int, weight_bytes: int, row_bytes: int, num_nodes: int
) -> Times | None:
    """row_bytes: of rows that are sent. None without tokens, or where some name experts twice."""
    num_tokens, num_topk, hidden = problem.max_tokens, problem.num_topk, problem.hidden
    num_ranks, num_experts, columns = problem.num_ranks, problem.num_experts, problem.num_columns
    if not num_tokens or num_topk > num_experts:
        return None
    cluster = Cluster(num_ranks, num_ranks // num_nodes)
    shares = Shares.uniform(cluster, num_experts, num_topk)
    num_weights = num_experts // num_ranks * hidden * (parts + 1) * columns
    return Times(
        sent=_far_us(cluster, shares, num_tokens * row_bytes),
        returned=_far_us(cluster, shares, num_tokens * hidden * problem.itemsize),
        up=problem.gemm_us(parts * columns),
        down=problem.gemm_us(columns),
        weights=num_weights * weight_bytes / H200.hbm_gbs / 1e3,
    )


def _far_us(cluster: Cluster, shares: Shares, num_bytes: int) -> float:
    """How long so many bytes of each rank take over the network."""
    us_of = exchange(Way.TWO_LEVEL, cluster, shares, num_bytes).us_of
    return max(us_of["far send"], us_of["far receive"])


class Sizes(NamedTuple):
    """Rows that a rank receives, and expert rows of them: from this node, and from others. In the
    capture of a graph, the most that these can be."""

    received: int
    near: int
    far: int


def forward(
    engine: InternodeEngine, inputs: LayerInputs, save: str
) -> tuple[torch.Tensor, Saved, torch.Tensor]:
    """See `base.Engine.moe_ffn_forward`; pre-activations are not saved."""
    tokens, slots = engine.tokens_of(inputs), engine.slots
    layout = engine.layout(inputs.topk_idx, len(inputs.w_gate_up) * engine.num_ranks)
    counts, routes = engine.call(type(engine)._exchange, tokens, layout, False, check=False)
    engine.concurrent_reads.mark()
    engine.call(type(engine).send_rows, tokens, layout, counts, routes)
    sizes = _sizes(engine, tokens, layout.num_experts, counts)
    kinds = [(one.shape[1:], one.dtype) for one in inputs.tensors if one is not None]
    with slots.context.first_use("layer in parts", tuple(kinds), inputs.activation, save):
        sent = tokens, layout, counts, Routes(*routes)
        try:
            made = receive_and_return(engine, inputs, *sent, sizes, save in ("rows", "all"))
        except BaseException:
            engine.side_stream.join()  # what runs there uses memory that is given back here
            raise
    received, kept, out = made
    handle = engine.new_handle(counts, routes, received, layout)
    engine._check_emulated()
    saved = kept, received.topk_idx, received.topk_weights, *handle
    return out, Saved(save, saved, sizes.near + sizes.far), counts.group_counts


def _sizes(engine: InternodeEngine, tokens: Tokens, num_experts: int, counts: Counts) -> Sizes:
    """The host waits for the counts, except in the capture of a graph."""
    node_ranks = engine.slots.layout.ranks_per_node
    if is_captured(tokens.x):
        most = engine.most_received(tokens, num_experts)
        rows = most // engine.num_ranks * tokens.num_topk
        return Sizes(most, node_ranks * rows, (engine.num_ranks - node_ranks) * rows)
    rank = engine.slots.context.rank
    first = rank // node_ranks * node_ranks

    def read() -> torch.Tensor:
        of_sources = counts.recv_expert_counts.sum(1)
        near = of_sources[first : first + node_ranks].sum()
        received = counts.rank_prefix_matrix[-1, rank]
        return torch.stack([received, near, of_sources.sum() - near])

    sizes = Sizes(*engine.concurrent_reads.read(read))
    engine.slots.context.check()
    return sizes


def receive_and_return(
    engine: InternodeEngine,
    inputs: LayerInputs,
    tokens: Tokens,
    layout: DispatchLayout,
    counts: Counts,
    routes: Routes,
    sizes: Sizes,
    keeps_rows: bool,
) -> tuple[Received, torch.Tensor | None, torch.Tensor]:
    """What comes after the rows were sent: (what was received, without rows; these [N, H], if they
    are kept; the result [T, H]).

    The dispatch ends with the launch that copies the last rows, which begins after those of this
    node were copied: so no slot is written again while it is read, and no launch that waits for
    rows sees the epoch of the next call. What is launched concurrently has few programs, which
    leave SMs to the GEMMs.
    """
    slots, side, x = engine.slots, engine.side_stream, inputs.x
    prefix, header = counts.rank_prefix_matrix, header_bytes(layout.num_experts, slots.num_ranks)
    present = torch.zeros(2, sizes.received, dtype=torch.int64, device=x.device)
    received = Received.empty(present[0], tokens)
    near = Part.empty(NEAR.value, inputs, received, sizes.near)
    far = Part.empty(FAR.value, inputs, received._replace(x=present[1]), sizes.far)
    sums, out = x.new_empty(sizes.received, x.shape[1]), torch.empty_like(x)
    kept, in_order = None, present[0]
    if keeps_rows:
        kept = x.new_empty(sizes.received, tokens.x.shape[1])
        in_order = torch.arange(len(kept), dtype=torch.int32, device=x.device)[:, None]

    def locate(part: Part) -> None:
        how = tokens, prefix, len(inputs.w_gate_up), header, slots, part.sides
        dispatch_verbs.locate(part.arrived, *how)

    def pack(part: Part, num_programs: int | None, ends: bool) -> None:
        part.place()
        how = None, slots, num_programs
        if kept is not None:
            pack_rows(part.arrived, tokens, prefix, in_order, kept, *how, ends=False)
        pack_rows(part.arrived, tokens, prefix, part.places.dst_rows, part.rows, *how, ends=ends)

    with side.after_current():
        dispatch_internode.forward(
            tokens.row, routes.row_idx, prefix, header, NUM_CONCURRENT, slots
        )
        locate(far)
    locate(near)
    pack(near, None, ends=False)
    with side.after_current():
        pack(far, NUM_CONCURRENT, ends=True)
    of_near = near.up(inputs)
    side.join()
    far.down(inputs, far.up(inputs), sums)
    returned = ReturnedRows(sums, None)
    added = Sums(out, None, None, None, routes.node_head, prefix)

    def send_sums(part: Part, num_programs: int) -> None:
        return_to_rails(returned, prefix, BARE_HEADER, num_programs, slots, part.sides)
        sent = returned, added, routes.node_rows, routes.rank_head
        send_node_sums(*sent, num_programs, False, BARE_HEADER, slots, part.sides)

    with side.after_current():
        open_combine(returned, counts.signature, slots)
        send_sums(far, NUM_CONCURRENT)
    near.down(inputs, of_near, sums)
    side.join()
    send_sums(near, dispatch_verbs.programs_that_pace())
    add_node_sums(returned, added, False, BARE_HEADER, slots)
    return received, kept, out


def backward(
    engine: InternodeEngine,
    dy: torch.Tensor,
    inputs: LayerInputs,
    saved: Saved,
    into: Into,
) -> Gradients:
    """See `base.Engine.moe_ffn_backward`."""
    check_backward(dy, inputs, (None, saved.tensors[0]))
    inputs, dy = inputs.packed, packed(dy)
    hides = overlaps(inputs, engine.num_ranks, engine.slots.layout.num_nodes)
    rows, num_rows, handle = engine.bring_again(inputs, saved)
    try:
        memory = memory_of(into, inputs)
        return backward_of_rows(engine, dy, rows, num_rows, handle, memory, hides)
    except BaseException:
        engine.side_stream.join()  # what runs there uses memory that is given back here
        raise


def backward_of_rows(
    engine: InternodeEngine,
    dy: torch.Tensor,
    rows: LayerInputs,
    num_rows: int,
    handle: InternodeHandle,
    into: WeightGradients | None,
    hides: tuple[bool, bool],
) -> Gradients:
    """What comes after the rows of x were brought; hides: see `overlaps`. What is launched
    concurrently has few programs, as in a forward.

    Calls of this rank follow one another on two streams as on one: the dispatch of dy has ended at
    the first join, the combine begins after it, and what the caller launches after this runs after
    the last join. Products read and write memory of this rank alone.
    """
    side, engine_type, tokens = engine.side_stream, type(engine), Tokens(dy)
    hides_dy, hides_dx = hides
    grad = Received.empty(torch.empty_like(rows.x), tokens)
    if hides_dy:
        received = tokens, handle.sent, 1, NUM_CONCURRENT
        engine.call(engine_type.send_planned, tokens, handle.sent, check=False)
        with side.after_current():
            engine.call(engine_type.receive_again, *received, sized=grad, max_rows=len(grad.x))
        made = recompute(rows, num_rows, NUM_CONCURRENT)
        side.join()
    else:
        engine.send_again(tokens, handle.sent, engine.num_ranks, grad, NUM_SMS)
        made = recompute(rows, num_rows)
    found = gradients_of_experts(rows, made, grad.x)
    later = functools.partial(later_weight_gradients, found.of_weights)
    returned = ReturnedRows(found.x, found.topk_weights)
    if hides_dx and into is not None and (into.gate_up is not None or into.down is not None):
        dx = torch.empty_like(dy)
        topk_grads = found.topk_weights.new_empty(len(dy), rows.topk_idx.shape[1])
        combine = engine_type.combine_concurrently, handle.returned, (dx, topk_grads)
        with side.after_current():
            engine.call(*combine, sized=returned, num_rows=len(found.x))
        later(into, NUM_CONCURRENT)
        side.join()
        return Gradients(dx, topk_grads, None, into, found.biases)
    dx, sums = engine.return_rows(returned, handle.returned, (), NUM_SMS)
    assert sums is not None
    if into is not None:
        later(into)
    return Gradients(dx, sums, later if into is None else None, into, found.biases)
