"""Combine over several nodes: each node sums a token's rows and returns one over the network.

A rank writes the rows of a token to the rank of its node that has forwarded the token, its rail
peer's one; this adds them up and sends the sum back over the network, and the token's rank adds up
one sum for each node. Each sum is made in fp32 and rounded once, or travels in fp32 so that only
the last one is rounded. On nodes of one rank the row is the sum, and is sent at once.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..device.context import MAX_CHUNKS, NODE_RANKS, NUM_RANKS, PHASE_RETURNED_ROWS
from ..device.internode import (
    arrival_region,
    is_on_side,
    node_writer,
    num_nodes,
    open_staging,
    own_node,
    rail_peer,
    release_rails,
    staging_region,
)
from ..device.lang import (
    as_pointer,
    consume_token,
    current_epoch,
    device_function,
    is_broken,
    report_abandoned,
    ticks,
    wait,
)
from ..device.nvshmem import uses_nvshmem
from ..device.programs import finish_call, is_last_program
from ..device.push import Source, copy_block, push_rows
from ..device.slots import chunk_flag, first_near_rank, received_rows, region
from ..device.tiles import deal
from ..dispatch.internode_kernels import send_chunk
from .kernels import add_rows, add_weights, received_row


class SumFormat(NamedTuple):
    """The sums that go over the network."""

    DTYPE: tl.dtype
    CHUNK_ROWS: int  # rows that share a flag


class ReturnPlan(NamedTuple):
    """Which received rows return."""

    rank_prefix_matrix: tl.tensor  # int32 [R, R]
    sides: tl.tensor  # of the sources, see `internode.is_on_side`


class Heads(NamedTuple):
    """Which rows are summed."""

    rows: tl.tensor  # int32 [.., PARTS]: row * PARTS + part in the order of the sum, then -1
    region_rows: tl.tensor  # rows that a region holds: no head leads beyond them


@triton.jit(do_not_specialize=["num_rows", "sides"])
def return_to_rails_kernel(
    own,  # launch.ReturnedRows, in receive order
    rank_prefix_matrix,  # int32 [R, R]
    context,
    num_rows,
    hidden,
    sides,  # of the sources whose rows return, see `internode.is_on_side`
    row,  # slots.Row
    SIZES: tl.constexpr,  # push.PushSizes
):
    """Write each received row to the rank of this node that sums the rows of its token; see
    `push.landing`. Rows of NEAR and of FAR sources go to regions of their own, with flags of their
    own: so they may return in launches of their own."""
    if is_broken(context):
        report_abandoned(context)
        return
    ranks = tl.arange(0, SIZES.RANKS_PAD)
    counts = received_rows(rank_prefix_matrix, ranks, context)
    counts = tl.where(is_on_side(ranks, sides, context), counts, 0)
    num_peers = tl.load(context + NUM_RANKS).to(tl.int32)
    source = Source(own.x, own.weights, num_rows, hidden, num_peers)
    # fmt: off
    push_rows(
        source, ReturnPlan(rank_prefix_matrix, sides), counts, tl.program_id(0),
        tl.num_programs(0), row, context, _returned_row, copy_block, SIZES, False,
    )
    # fmt: on


@uses_nvshmem
@triton.jit(do_not_specialize=["num_rows", "sides"])
def return_to_nodes_kernel(
    own,  # launch.ReturnedRows, in receive order
    rank_prefix_matrix,  # int32 [R, R]
    context,
    num_rows,
    hidden,
    sides,  # of the sources whose rows return, see `internode.is_on_side`
    row,  # slots.Row
    SIZES: tl.constexpr,  # push.PushSizes
):
    """On nodes of one rank: send each received row to its source, chunk by chunk, as
    `node_sum_kernel` sends sums; those of this rank's own tokens stay in staging."""
    if is_broken(context):
        report_abandoned(context)
        return
    nodes, own_rank = num_nodes(context), own_node(context)
    ranks = tl.arange(0, SIZES.RANKS_PAD)
    counts = received_rows(rank_prefix_matrix, ranks, context)
    # As many as there are flags for; `open_staging` reports those that would not fit.
    most = tl.minimum(tl.load(context + MAX_CHUNKS).to(tl.int32) * SIZES.CHUNK_ROWS, num_rows)
    num_chunks = tl.cdiv(tl.minimum(tl.max(counts, 0), most), SIZES.CHUNK_ROWS)
    source = Source(own.x, own.weights, num_rows, hidden, nodes)
    for work_idx in range(tl.program_id(0), num_chunks * nodes, tl.num_programs(0)):
        index, chunk = deal(work_idx, nodes)
        peer = (own_rank + 1 + index) % nodes  # this rank itself comes last
        count = tl.minimum(received_rows(rank_prefix_matrix, peer, context), most)
        begin = chunk * SIZES.CHUNK_ROWS
        end = min(begin + SIZES.CHUNK_ROWS, count)
        if (begin < end) & is_on_side(peer, sides, context):
            staging, ready = open_staging(peer, count, row, context)
            for first in range(begin, end, SIZES.BLOCK_ROWS):
                rows = first + tl.arange(0, SIZES.BLOCK_ROWS)
                # fmt: off
                from_rows, src_row, has = received_row(
                    source, rank_prefix_matrix, rows * 0 + peer, rows, end, context
                )
                to = staging + rows.to(tl.int64) * row.num_bytes
                copy_block(
                    source, None, from_rows, src_row, has & (ready == 1), to, ticks(), 0, row, SIZES
                )
                # fmt: on
            if (ready == 1) & (peer != own_rank):
                send_chunk(peer, begin, end, row, context, SIZES.CHUNK_ROWS)


@device_function
def _returned_row(source, plan, peers, rows, end, context):
    """`received_row`, of the plan's sides alone."""
    # fmt: off
    from_rows, src_row, has = received_row(
        source, plan.rank_prefix_matrix, peers, rows, end, context
    )
    # fmt: on
    return from_rows, src_row, has & is_on_side(peers, plan.sides, context)


@uses_nvshmem
@triton.jit(do_not_specialize=["most_rows", "sides"])
def node_sum_kernel(
    own,  # launch.ReturnedRows
    sums,  # launch.Sums, without biases
    num_rows_per_node,  # int32 [N]: rows that this rank forwarded, by their node
    heads,  # int32 [N, M, L]: row * L + rank of the node for each of them
    context,
    most_rows,  # M
    hidden,
    sides,  # of the nodes whose tokens are summed, see `internode.is_on_side`
    row,  # slots.Row, of what the ranks return
    sum_row,  # slots.Row, of what goes over the network
    SUM: tl.constexpr,  # kernels.SumSizes, of the ranks of a node
    SENT: tl.constexpr,  # SumFormat
):
    """Sum the rows of each token that this rank has forwarded, and send the sums of each other node
    to its rail peer there, chunk by chunk; those of its own tokens stay in staging."""
    if is_broken(context):
        return
    nodes = num_nodes(context)
    most = tl.full((), 0, tl.int32)
    for node in range(0, nodes):
        most = max(most, tl.load(num_rows_per_node + node))
    num_chunks = tl.cdiv(min(most, most_rows), SENT.CHUNK_ROWS)
    parts = Heads(heads, most_rows)
    for work_idx in range(tl.program_id(0), num_chunks * nodes, tl.num_programs(0)):
        index, chunk = deal(work_idx, nodes)
        node = (own_node(context) + 1 + index) % nodes  # this rank's own node comes last
        count = min(tl.load(num_rows_per_node + node), most_rows)
        begin = chunk * SENT.CHUNK_ROWS
        end = min(begin + SENT.CHUNK_ROWS, count)
        if (begin < end) & is_on_side(rail_peer(node, context), sides, context):
            staging, ready = open_staging(node, count, sum_row, context)
            for first in range(begin, end, SUM.BLOCK_TOKENS):
                rows = first + tl.arange(0, SUM.BLOCK_TOKENS)
                inside = (rows < end) & (ready == 1)
                at = node.to(tl.int64) * most_rows + rows
                # fmt: off
                addresses, weight_addresses, arrived = _parts(
                    parts, at, inside, node, row, context, _near_part, SUM
                )
                # fmt: on
                ready = tl.minimum(ready, arrived)
                to = staging + rows.to(tl.int64) * sum_row.num_bytes
                inside = inside & (ready == 1)
                dtype: tl.constexpr = own.x.dtype.element_ty
                to_row = as_pointer(to, SENT.DTYPE)
                add_rows(addresses, None, to_row, sums, at, inside, hidden, dtype, SUM)
                if own.weights is not None:
                    to_weights = as_pointer(to + sum_row.weights, tl.float32)
                    add_weights(weight_addresses, None, to_weights, inside, SUM)
            if (ready == 1) & (node != own_node(context)):
                send_chunk(node, begin, end, sum_row, context, SENT.CHUNK_ROWS)


@uses_nvshmem
@triton.jit(do_not_specialize=["num_tokens", "region_rows"])
def internode_sum_kernel(
    sums,  # launch.Sums
    heads,  # int32 [T, N]: row * N + node of the sums of each token
    context,
    num_tokens,
    region_rows,
    hidden,
    sum_row,  # slots.Row, of what came over the network
    SUM: tl.constexpr,  # kernels.SumSizes, of the nodes
    SENT: tl.constexpr,  # SumFormat
):
    """Add up the sums that the nodes return for each token; the last program ends the call."""
    parts = Heads(heads, region_rows)
    num_blocks = tl.cdiv(num_tokens, SUM.BLOCK_TOKENS)
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        token_idx = block * SUM.BLOCK_TOKENS + tl.arange(0, SUM.BLOCK_TOKENS)
        inside = token_idx < num_tokens
        # fmt: off
        addresses, weight_addresses, ready = _parts(
            parts, token_idx.to(tl.int64), inside, 0, sum_row, context, _node_part, SUM
        )
        # fmt: on
        inside = inside & (ready == 1)
        at = token_idx.to(tl.int64) * hidden
        add_rows(addresses, None, sums.out + at, sums, at, inside, hidden, SENT.DTYPE, SUM)
        if sums.weights is not None:
            to_weights = sums.weights + token_idx * SUM.NUM_TOPK
            add_weights(weight_addresses, None, to_weights, inside, SUM)
    if is_broken(context):
        report_abandoned(context)
    elif is_last_program(context):
        release_rails(current_epoch(context), context)
        finish_call(context)


@device_function
def _parts(heads, at, inside, node, row, context, place: tl.constexpr, SUM: tl.constexpr):
    """Wait for the rows that are summed for `at` [B]: (addresses of the rows, SUM.RANKS blocks of
    them; of their weights; 1, or 0 where the wait expired).

    The device function `place(part, node, context)` gives the region of `part` (block), the number
    of its flags' writer, the rank to blame where they are late, and whether to wait for them.
    """
    numbers = tl.arange(0, SUM.RANKS_PAD)
    has = inside[:, None] & (numbers < SUM.RANKS)[None, :]
    every = tl.load(heads.rows + at[:, None] * SUM.RANKS + numbers[None, :], mask=has, other=-1)
    every = tl.reshape(every, [SUM.BLOCK_TOKENS * SUM.RANKS_PAD])
    has = (every >= 0) & (every // SUM.RANKS < heads.region_rows)
    _, writer, blamed, is_sent = place(tl.where(has, every % SUM.RANKS, 0), node, context)
    chunk = tl.where(has, every // SUM.RANKS // SUM.CHUNK_ROWS, 0)
    flags, epoch = chunk_flag(writer, chunk, context), current_epoch(context)
    ready = wait(flags, has & is_sent, epoch, blamed, context, PHASE_RETURNED_ROWS)
    addresses = ()
    weight_addresses = ()
    for number in tl.static_range(SUM.RANKS):
        head = tl.load(heads.rows + at * SUM.RANKS + number, mask=inside, other=-1)
        rows = head // SUM.RANKS
        has_row = (head >= 0) & (rows < heads.region_rows) & (ready == 1)
        begin, _, _, _ = place(tl.where(has_row, head % SUM.RANKS, 0), node, context)
        address = consume_token(begin, ready) + row.header_bytes
        address += rows.to(tl.int64) * row.num_bytes
        addresses = addresses + (tl.where(has_row, address, 0),)
        weight_addresses = weight_addresses + (tl.where(has_row, address + row.weights, 0),)
    return addresses, weight_addresses, ready


@device_function
def _near_part(part, node, context):
    """A part of the sum that this rank makes for a token of its rail peer on `node`: rows that a
    rank of this node has written into the region of a rank of that node; see `push.landing`."""
    writer = node * tl.load(context + NODE_RANKS).to(tl.int32) + part
    return region(writer, context), writer, first_near_rank(context) + part, part >= 0


@device_function
def _node_part(part, node, context):
    """A part of the last sum: what arrives from another node, or this rank's sums in staging."""
    is_own = part == own_node(context)
    arrival, staging = arrival_region(part, context), staging_region(part, context)
    writer = node_writer(part, context)
    return (
        tl.where(is_own, staging, arrival),
        writer,
        rail_peer(part, context),
        part != own_node(context),
    )
