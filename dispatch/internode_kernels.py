"""Dispatch over several nodes: rows cross the network once for each node, and are forwarded there.

A rank sends each token that has an expert on another node once to its rail peer there, which writes
the row to the ranks of its node that want it, into the regions where these expect the rows of their
source. So what receives rows is as on one node. On nodes of one rank nothing is forwarded: rows are
read where they arrive. Before rows go headers, see `internode_header_kernels.py`.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ..device.context import (
    EPOCH,
    NODE_RANKS,
    NUM_RANKS,
    PHASE_ROWS,
)
from ..device.internode import (
    arrival_region,
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
    own_block,
    put_rows,
    ticks,
    wait,
)
from ..device.network import send
from ..device.nvshmem import uses_nvshmem
from ..device.programs import is_last_program, pdl_launch_dependents, pdl_wait
from ..device.push import Source, copy_block, push_rows
from ..device.slots import (
    chunk_flag,
    first_near_rank,
)
from ..device.tiles import deal
from .send_kernels import put_metadata


@uses_nvshmem
@triton.jit(do_not_specialize=["num_tokens", "scale_stride_token", "scale_stride"])
def send_rows_kernel(
    x,  # vectors [T, num_vecs]
    metadata,  # send_kernels.Metadata
    plan,  # NodePlan
    context,
    num_tokens,
    num_vecs,
    scale_stride_token,
    scale_stride,
    row,  # slots.Row
    METADATA: tl.constexpr,  # send_kernels.MetadataSizes
    SIZES: tl.constexpr,  # push.PushSizes
    PDL: tl.constexpr,
):
    """Send this rank's rows to the rail peers on the other nodes, chunk by chunk and to the nodes
    in turns: a program copies the rows of a chunk, with what goes with them, to staging, from where
    the network takes them. It raises the chunk's flag after them.

    A PDL launch, which waits for the launch before it first. The next one, `metadata_kernel`, may
    begin at once: it reads and writes nothing that this one writes."""
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    nodes = num_nodes(context)
    all_nodes = tl.arange(0, SIZES.RANKS_PAD)
    is_other = (all_nodes < nodes) & (all_nodes != own_node(context))
    sent = tl.load(plan.num_tokens + all_nodes, mask=is_other, other=0)
    num_chunks = tl.cdiv(tl.minimum(tl.max(sent, 0), num_tokens), SIZES.CHUNK_ROWS)
    if is_broken(context):
        return
    for work_idx in range(tl.program_id(0), num_chunks * (nodes - 1), tl.num_programs(0)):
        index, chunk = deal(work_idx, nodes - 1)
        node = (own_node(context) + 1 + index) % nodes
        begin = chunk * SIZES.CHUNK_ROWS
        count = min(tl.load(plan.num_tokens + node), num_tokens)
        end = min(begin + SIZES.CHUNK_ROWS, count)
        if begin < end:
            staging, ready = open_staging(node, count, row, context)
            for first in range(begin, end, SIZES.BLOCK_ROWS):
                rows = first + tl.arange(0, SIZES.BLOCK_ROWS)
                has = (rows < end) & (ready == 1)
                token_idx = tl.load(plan.token_idx + node * num_tokens + rows, mask=has, other=0)
                token_idx = tl.maximum(tl.minimum(token_idx, num_tokens - 1), 0)
                to = staging + rows.to(tl.int64) * row.num_bytes
                # fmt: off
                put_rows(
                    as_pointer(to, x.dtype.element_ty), x + token_idx.to(tl.int64) * num_vecs,
                    num_vecs, has, ticks(), 0, SIZES.ALIGNED, SIZES.BLOCK_COLUMNS,
                )
                put_metadata(
                    metadata, to, token_idx, has, scale_stride_token, scale_stride, row, METADATA
                )
                # fmt: on
            if ready == 1:
                send_chunk(node, begin, end, row, context, SIZES.CHUNK_ROWS)


@device_function
def send_chunk(node, begin, end, row, context, CHUNK_ROWS: tl.constexpr):
    """Send rows `begin` .. `end` of the staging for `node`, one chunk that this program has written
    there, to where the rail peer expects what arrives from this node. Its flag follows them."""
    offset = row.header_bytes + begin.to(tl.int64) * row.num_bytes
    source = staging_region(node, context) + offset
    to = arrival_region(own_node(context), context) + offset
    flag = chunk_flag(node_writer(own_node(context), context), begin // CHUNK_ROWS, context)
    peer, epoch = rail_peer(node, context), current_epoch(context)
    send(to, source, (end - begin).to(tl.int64) * row.num_bytes, flag, epoch, peer, context)


@uses_nvshmem
@triton.jit
def release_rails_kernel(context, PDL: tl.constexpr):
    """Tell the rail peers that this rank has read what arrived in the call that has just ended, on
    nodes of one rank, where what receives rows has read it; see `release_rails`. A PDL launch,
    which waits for the launch before it first."""
    pdl_wait(PDL)
    if is_broken(context):
        return
    release_rails(tl.load(context + EPOCH), context)


class ForwardPlan(NamedTuple):
    """Which arrived row is which row for which rank of this node."""

    row_idx: tl.tensor  # int32 [N, L, M]: of the rows of each node for each rank of this one
    rank_prefix_matrix: tl.tensor  # int32 [R, R]
    row: tl.tensor  # slots.Row
    most_rows: tl.tensor  # M
    chunk_rows: tl.tensor  # rows that share a flag


@uses_nvshmem
@triton.jit(do_not_specialize=["most_rows"])
def forward_kernel(
    row_idx,  # int32 [N, L, M], see `ForwardPlan`
    rank_prefix_matrix,  # int32 [R, R]
    context,
    most_rows,  # M
    row,  # slots.Row
    SIZES: tl.constexpr,  # push.PushSizes
):
    """Write the rows that arrive from other nodes, as they are, into their sources' regions on the
    ranks of this node; see `push.landing`. The last program tells the rail peers that all have been
    read."""
    if is_broken(context):
        return
    peers = tl.arange(0, SIZES.RANKS_PAD)
    node_ranks = tl.load(context + NODE_RANKS).to(tl.int32)
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    is_far = (peers < num_ranks) & (peers // node_ranks != own_node(context))
    plan = ForwardPlan(row_idx, rank_prefix_matrix, row, most_rows, SIZES.CHUNK_ROWS)
    counts = tl.where(is_far, _forwarded_rows(plan, peers, is_far, context), 0)
    counts = tl.minimum(counts, most_rows)
    arrived = as_pointer(own_block(context), tl.int32)
    source = Source(arrived, None, most_rows, row.num_bytes // 4, num_ranks - node_ranks)
    # fmt: off
    push_rows(
        source, plan, counts, tl.program_id(0), tl.num_programs(0), row, context, _arrived_row,
        copy_block, SIZES, False,
    )
    # fmt: on
    if is_last_program(context):
        release_rails(current_epoch(context), context)


@device_function
def _forwarded_rows(plan, peers, mask, context):
    """Rows that this rank forwards for `peers` (block): a peer stands for the rail peer on its
    node, whose rows they are, and for the rank with its place on this node, which gets them."""
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    node_ranks = tl.load(context + NODE_RANKS).to(tl.int32)
    source = rail_peer(peers // node_ranks, context)
    column = plan.rank_prefix_matrix + first_near_rank(context) + peers % node_ranks
    before = tl.load(column + (source - 1) * num_ranks, mask=mask & (source > 0), other=0)
    return tl.load(column + source * num_ranks, mask=mask, other=0) - before


@device_function
def _arrived_row(source, plan, peers, rows, end, context):
    """The rows of the arrivals that are `rows` (block) for `peers`, once they are there; see
    `push_rows`."""
    has = (rows < end) & (rows < _forwarded_rows(plan, peers, rows < end, context))
    at = plan.row_idx + peers.to(tl.int64) * plan.most_rows + rows
    row_idx = tl.load(at, mask=has & (rows < plan.most_rows), other=0)
    row_idx = tl.maximum(tl.minimum(row_idx, plan.most_rows - 1), 0)
    node = peers // tl.load(context + NODE_RANKS).to(tl.int32)
    flags = chunk_flag(node_writer(node, context), row_idx // plan.chunk_rows, context)
    blamed = rail_peer(node, context)
    ready = wait(flags, has, current_epoch(context), blamed, context, PHASE_ROWS)
    address = consume_token(arrival_region(node, context), ready) + plan.row.header_bytes
    address += row_idx.to(tl.int64) * plan.row.num_bytes
    return as_pointer(address, tl.int32), row_idx, has & (ready == 1)
