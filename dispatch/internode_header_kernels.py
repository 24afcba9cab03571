"""The headers of calls over several nodes: before rows go counts, and which row is for which rank.

A rank sends a header to its rail peer on each other node, which forwards the counts in it to its
node, and learns from the rest which of the rows that will come is for which of its ranks.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..device.context import (
    NODE_RANKS,
    NUM_RANKS,
    PHASE_COUNTS,
    SIGNATURE_WORDS,
    Kind,
)
from ..device.internode import (
    arrival_header,
    node_writer,
    num_nodes,
    own_node,
    rail_peer,
    staging_header,
    wait_node_free,
)
from ..device.lang import (
    as_pointer,
    consume_token,
    current_epoch,
    device_function,
    is_broken,
    notify,
    put,
    report_abandoned,
    symm_at,
    wait,
)
from ..device.network import send
from ..device.nvshmem import uses_nvshmem
from ..device.signature import (
    own_call,
    publish_signature,
    put_signature,
    refuse_handle,
    sent_signature,
    signature_of,
    signature_of_handle,
    time_signatures,
    with_max_tokens,
)
from ..device.signature import wait_signatures as wait_all_signatures
from ..device.slots import (
    COUNTS_AT,
    count_flag,
    first_near_rank,
    region,
    wait_slot_free,
)
from .exchange_kernels import clear_counts, read_counts, send_counts


class NodePlan(NamedTuple):
    """Which tokens a rank sends to which node: to node n num_tokens[n] of them."""

    num_tokens: tl.tensor  # int32 [N]
    token_idx: tl.tensor  # int32 [N, T]: token of each row for each node


class Forwarding(NamedTuple):
    """What a rank forwards to the ranks of its node, and to itself: the rows of its rail peer on
    each node, its own where the node is its own."""

    num_rows: tl.tensor  # int32 [N]
    is_row_in_rank: tl.tensor  # uint8 [N, M, L]: which row is for which rank of this node
    wait_stats: tl.tensor  # int64 [R], ns waited for each rank's counts, added to, or None


class SentWeights(NamedTuple):
    """The routing weights that a low-latency combine sends to all ranks, after its signature."""

    topk_weights: tl.tensor  # float32 [T, K]
    topk_idx: tl.tensor  # int64 [T, K]


class InternodeSizes(NamedTuple):
    """What the kernels that send headers are compiled for."""

    HEADER_PAD: int  # signature and counts, int32
    NODE_RANKS_PAD: int
    NODES_PAD: int
    BLOCK_ROWS: int  # rows whose ranks a program writes at a time
    BLOCK_BYTES: int  # and bytes of these that it copies
    KIND: int = int(Kind.DISPATCH)  # of an exchange
    PHASES: str = "both"  # which programs of an exchange there are: "send", "receive" or "both"


# --- Routing -------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_tokens"])
def node_layout_kernel(
    is_token_in_rank,  # uint8 [T, R]
    is_token_in_node,  # uint8 [T, N], out
    is_token_near,  # uint8 [T, L], out: the columns of this rank's node
    num_tokens_per_node,  # int32 [N], out
    context,
    num_tokens,
    NODE_RANKS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program n finds which tokens go to node n."""
    node = tl.program_id(0)
    nodes = tl.num_programs(0)
    node_ranks = tl.load(context + NODE_RANKS).to(tl.int32)
    place = tl.arange(0, NODE_RANKS_PAD)
    is_own = node == own_node(context)
    count = tl.full((), 0, tl.int32)
    for first in range(0, num_tokens, BLOCK):
        tokens = first + tl.arange(0, BLOCK)
        inside = (tokens < num_tokens)[:, None] & (place < node_ranks)[None, :]
        at = tokens[:, None] * (nodes * node_ranks) + node * node_ranks + place[None, :]
        in_rank = tl.load(is_token_in_rank + at, mask=inside, other=0)
        to = is_token_near + tokens[:, None] * node_ranks + place[None, :]
        tl.store(to, in_rank, mask=inside & is_own)
        in_node = tl.max((in_rank != 0).to(tl.int32), 1)
        tl.store(
            is_token_in_node + tokens * nodes + node, in_node.to(tl.uint8), tokens < num_tokens
        )
        count += tl.sum(in_node, 0)
    tl.store(num_tokens_per_node + node, count)


# --- Headers -------------------------------------------------------------------------------------


@uses_nvshmem
@triton.jit(do_not_specialize=["num_tokens", "most_rows", "form", "caller"])
def exchange_internode_kernel(
    layout,  # launch.DispatchLayout, is_token_in_rank as uint8 [T, R]
    plan,  # NodePlan
    forwarding,  # Forwarding, out
    counts,  # launch.Counts, out
    context,
    num_tokens,
    most_rows,  # M; of a low-latency call the most tokens of a rank
    shape,  # signature.RowShape
    form,  # see `launch.form_of`
    caller,  # see `callers.Callers`
    SIZES: tl.constexpr,  # InternodeSizes
    COUNTS: tl.constexpr,  # exchange_kernels.ExchangeSizes
):
    """Tell all ranks this rank's counts and learn theirs, and which rows this rank will forward.

    Programs 0 .. N-2 send a header to the rail peer on each other node, the next L write counts to
    each rank of this node. Each of the next N waits for the header of one node, forwards its counts
    to this node and keeps the rest. The last reads the counts of all ranks, see `read_counts`: so
    each waits for earlier roles alone. Low-latency calls launch those that send, which wait for no
    other rank to begin the call, apart from the others; then numbers go on from one to the other.
    """
    program = tl.program_id(0)
    nodes, node_ranks = num_nodes(context), tl.load(context + NODE_RANKS).to(tl.int32)
    first_near = nodes - 1
    first_node = first_near + node_ranks
    if SIZES.PHASES == "receive":
        program += first_node
    node = program - first_node  # of programs that receive
    is_forwarder = (node >= 0) & (node < nodes)
    rows = forwarding.is_row_in_rank + node.to(tl.int64) * most_rows * node_ranks
    num_experts = COUNTS.EXPERTS * nodes * node_ranks
    if SIZES.PHASES != "send":
        if is_forwarder:
            tl.store(forwarding.num_rows + node, 0)
        elif node == nodes:
            clear_counts(counts, context, COUNTS)
    if is_broken(context):
        if is_forwarder:  # the launches that follow read them, whether this rank is broken or not
            _clear_ranks(rows, 0, most_rows, context, SIZES)
        elif node == nodes:  # the host, which waits for the counts, is to hear of it then
            report_abandoned(context)
        return
    if SIZES.PHASES == "receive":
        signature = sent_signature(context)
    else:
        call = own_call(context)
        if SIZES.PHASES == "send":  # a low-latency call
            shape = with_max_tokens(shape, most_rows)
        # fmt: off
        signature = signature_of(
            SIZES.KIND, shape, num_experts, 0, 0, form, call, 0, caller, context
        )
        # fmt: on
    if SIZES.PHASES != "receive":
        all_nodes = tl.arange(0, SIZES.NODES_PAD)
        most = tl.max(tl.load(plan.num_tokens + all_nodes, mask=all_nodes < nodes, other=0), 0)
        if program < first_near:
            # fmt: off
            _send_counts_to_node(
                (own_node(context) + 1 + program) % nodes, signature, layout, plan, num_tokens,
                most, most_rows, num_experts, context, SIZES, COUNTS,
            )
            # fmt: on
        elif program < first_node:
            # fmt: off
            send_counts(
                first_near_rank(context) + program - first_near, signature,
                layout.num_tokens_per_expert, layout.num_tokens_per_rank, num_experts, context,
                COUNTS, most,
            )
            # fmt: on
    if SIZES.PHASES != "send":
        if is_forwarder:
            if node == own_node(context):
                count = min(tl.load(plan.num_tokens + node), most_rows)
                _copy_ranks(layout, plan, node, rows, num_tokens, count, context, SIZES)
            else:
                count = _receive_header(node, rows, most_rows, num_experts, context, SIZES)
            tl.store(forwarding.num_rows + node, count)
            _clear_ranks(rows, count, most_rows, context, SIZES)
        elif node == nodes:
            if forwarding.wait_stats is not None:
                time_signatures(forwarding.wait_stats, context, COUNTS.RANKS_PAD)
            read_counts(counts, signature, most_rows, form, context, COUNTS)


@uses_nvshmem
@triton.jit(
    do_not_specialize=["num_tokens", "max_tokens"],
    do_not_specialize_on_alignment=["wait_stats"],
)
def open_internode_kernel(
    kind,
    dispatched,  # int32 [SIGNATURE_WORDS] of a handle
    weights,  # SentWeights, or None
    wait_stats,  # int64 [R], ns waited for each rank's signature, added to, or None
    context,
    shape,  # signature.RowShape
    num_tokens,  # T, where there are weights
    max_tokens,  # M, the most of any rank; 0 where there are no weights
    SIZES: tl.constexpr,  # InternodeSizes
    RANKS_PAD: tl.constexpr,
):
    """Begin a call that has a handle: exchange signatures with all ranks, as `open_call` does, and
    weights, which then follow the signatures in the ranks' regions. The roles of the programs are
    those of `exchange_internode_kernel`, without counts."""
    program = tl.program_id(0)
    nodes, node_ranks = num_nodes(context), tl.load(context + NODE_RANKS).to(tl.int32)
    first_node = nodes - 1 + node_ranks
    num_experts = tl.load(dispatched + 3)
    num_words = tl.full((), SIGNATURE_WORDS, tl.int32)
    if weights is not None:
        num_words += max_tokens * shape.num_topk
    if is_broken(context):
        return
    shape = with_max_tokens(shape, max_tokens)
    signature, is_ours = signature_of_handle(kind, shape, dispatched, True, context)
    num_weights = num_tokens * shape.num_topk
    if program < nodes - 1:
        node = (own_node(context) + 1 + program) % nodes
        ready = wait_node_free(node, context)
        header = consume_token(staging_header(node, context), ready)
        if ready == 1:
            put(as_pointer(header, tl.int32) + tl.arange(0, SIGNATURE_WORDS), signature, None)
            _put_weights(header, weights, num_weights, num_experts, SIZES)
            _send_header(node, header, num_words * 4, context)
    elif program < first_node:
        peer = first_near_rank(context) + program - (nodes - 1) + tl.arange(0, 1)
        to, ready = put_signature(peer, peer >= 0, signature, context)
        if ready == 1:
            _put_weights(tl.max(to, 0), weights, num_weights, num_experts, SIZES)
            publish_signature(peer, peer >= 0, context)
    elif program < first_node + nodes:
        node = program - first_node
        if node != own_node(context):
            _forward_header(node, num_words, context, SIZES)
    elif is_ours:
        if wait_stats is not None:
            time_signatures(wait_stats, context, RANKS_PAD)
        wait_all_signatures(signature, context, RANKS_PAD)
    else:
        refuse_handle(context)


@device_function
def rows_offset(num_experts, num_ranks):
    """See `symm.slots.internode_rows_offset`."""
    return (4 * (COUNTS_AT + num_experts + num_ranks + 2) + 15) // 16 * 16


@device_function
def _write_header(
    header, signature, layout, count, most, num_experts, context, COUNTS: tl.constexpr
):
    """Write the signature and the counts of a header."""
    to = as_pointer(header, tl.int32)
    put(to + tl.arange(0, SIGNATURE_WORDS), signature, None)
    experts = tl.arange(0, COUNTS.ALL_EXPERTS_PAD)
    real = experts < num_experts
    rows = tl.load(layout.num_tokens_per_expert + experts, mask=real, other=0)
    put(to + COUNTS_AT + experts, rows, real)
    ranks = tl.arange(0, COUNTS.RANKS_PAD)
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    real = ranks < num_ranks
    rows = tl.load(layout.num_tokens_per_rank + ranks, mask=real, other=0)
    put(to + COUNTS_AT + num_experts + ranks, rows, real)
    more = tl.arange(0, 2)
    last = to + COUNTS_AT + num_experts + num_ranks
    put(last + more, tl.where(more == 0, most, count), None)


@device_function
def _put_weights(header, weights, num_weights, num_experts, SIZES: tl.constexpr):
    """Write so many weights, if there are some, after a signature: 0 for ids that are not valid."""
    if weights is not None:
        to = as_pointer(header, tl.float32) + SIGNATURE_WORDS
        for first in range(0, num_weights, SIZES.HEADER_PAD):
            index = first + tl.arange(0, SIZES.HEADER_PAD)
            inside = index < num_weights
            ids = tl.load(weights.topk_idx + index, mask=inside, other=-1)
            valid = (ids >= 0) & (ids < num_experts)
            put(to + index, tl.load(weights.topk_weights + index, mask=valid, other=0.0), inside)


@device_function
def _send_counts_to_node(
    node,
    signature,
    layout,
    plan,
    num_tokens,
    most,
    most_rows,
    num_experts,
    context,
    SIZES: tl.constexpr,
    COUNTS: tl.constexpr,
):
    """Send the header for `node`: signature, counts and which rows are for which of its ranks."""
    node_ranks = tl.load(context + NODE_RANKS).to(tl.int32)
    rows_at = rows_offset(num_experts, tl.load(context + NUM_RANKS).to(tl.int32))
    ready = wait_node_free(node, context)
    header = consume_token(staging_header(node, context), ready)
    if ready == 1:
        count = tl.load(plan.num_tokens + node)
        _write_header(header, signature, layout, count, most, num_experts, context, COUNTS)
        rows = as_pointer(header + rows_at, tl.uint8)
        count = min(count, most_rows)
        _copy_ranks(layout, plan, node, rows, num_tokens, count, context, SIZES)
        _send_header(node, header, rows_at + count * node_ranks, context)


@device_function
def _receive_header(node, rows, most_rows, num_experts, context, SIZES: tl.constexpr):
    """Forward the counts of the header of another `node`, and copy which ranks its rows are for to
    `rows`. Returns how many rows come, 0 where a wait expired."""
    node_ranks = tl.load(context + NODE_RANKS).to(tl.int32)
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    num_words = COUNTS_AT + num_experts + num_ranks + 1
    ready = _forward_header(node, num_words, context, SIZES)
    header = consume_token(arrival_header(node, context), ready)
    count = tl.full((), 0, tl.int32)
    if ready == 1:
        # A rank that makes another call has sent anything: no more than fits is read.
        count = max(0, min(tl.load(as_pointer(header, tl.int32) + num_words), most_rows))
        arrived = as_pointer(header + rows_offset(num_experts, num_ranks), tl.uint8)
        for first in range(0, count * node_ranks, SIZES.BLOCK_BYTES):
            at = first + tl.arange(0, SIZES.BLOCK_BYTES)
            inside = at < count * node_ranks
            in_rank = (tl.load(arrived + at, mask=inside, other=0) != 0).to(tl.uint8)
            tl.store(rows + at, in_rank, mask=inside)
    return count


@device_function
def _send_header(node, header, num_bytes, context):
    """Send what this program has written to the header for `node`; its flag follows it."""
    flag = count_flag(node_writer(own_node(context), context), context)
    to = arrival_header(own_node(context), context)
    peer, epoch = rail_peer(node, context), current_epoch(context)
    send(to, header, num_bytes, flag, epoch, peer, context)


@device_function
def _forward_header(node, num_words, context, SIZES: tl.constexpr):
    """Wait for the header of another node's rail peer, and write its signature and counts into that
    rank's region on each rank of this node. Returns 1, or 0 where a wait expired."""
    source = rail_peer(node, context)
    one = tl.arange(0, 1)
    flags = count_flag(node_writer(node, context) + one, context)
    ready = wait(flags, one == 0, current_epoch(context), source + one, context, PHASE_COUNTS)
    place = tl.arange(0, SIZES.NODE_RANKS_PAD)
    near = place < tl.load(context + NODE_RANKS).to(tl.int32)
    peers = first_near_rank(context) + place
    if ready == 1:
        ready = wait_slot_free(peers, near, context)
    header = as_pointer(consume_token(arrival_header(node, context), ready), tl.int32)
    to = consume_token(region(source, context), ready)
    regions = as_pointer(symm_at(to, tl.where(near, peers, peers - place), context), tl.int32)
    if ready == 1:
        step: tl.constexpr = SIZES.HEADER_PAD
        for first in range(0, num_words, step):
            word = first + tl.arange(0, step)
            inside = word < num_words
            words = tl.load(header + word, mask=inside, other=0)
            put(regions[:, None] + word[None, :], words[None, :], near[:, None] & inside[None, :])
        flag = count_flag(source, context)
        notify(peers * 0 + flag, peers, near, current_epoch(context), context)
    return ready


@device_function
def _copy_ranks(layout, plan, node, rows, num_tokens, count, context, SIZES: tl.constexpr):
    """Write which ranks of `node` the first `count` rows for it are for, L bytes for each."""
    node_ranks = tl.load(context + NODE_RANKS).to(tl.int32)
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    place = tl.arange(0, SIZES.NODE_RANKS_PAD)
    for first in range(0, count, SIZES.BLOCK_ROWS):
        row = first + tl.arange(0, SIZES.BLOCK_ROWS)
        token_idx = tl.load(plan.token_idx + node * num_tokens + row, mask=row < count, other=0)
        inside = (row < count)[:, None] & (place < node_ranks)[None, :]
        at = token_idx[:, None] * num_ranks + node * node_ranks + place[None, :]
        in_rank = tl.load(layout.is_token_in_rank + at, mask=inside, other=0)
        tl.store(rows + row[:, None] * node_ranks + place[None, :], in_rank, mask=inside)


@device_function
def _clear_ranks(rows, count, most_rows, context, SIZES: tl.constexpr):
    """Let the rows after the first `count` be for no rank."""
    node_ranks = tl.load(context + NODE_RANKS).to(tl.int32)
    for first in range(count * node_ranks, most_rows * node_ranks, SIZES.BLOCK_BYTES):
        at = first + tl.arange(0, SIZES.BLOCK_BYTES)
        tl.store(rows + at, tl.zeros_like(at).to(tl.uint8), mask=at < most_rows * node_ranks)
