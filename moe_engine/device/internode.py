"""Where what goes over the network lies, and when its memory is free; see `symm/slots.py`.

Ranks are numbered node by node, L to a node. In a call a rank sends over the network to its rail
peers alone, the ranks of the other nodes with its own place in the node: these forward to their
node. Rank 5 of 4 nodes of 2 ranks is the second one of node 2; its rail peers are ranks 1, 3 and 7.
On nodes of one rank all that arrives is for that rank, which reads it where it arrives.
"""

import triton.language as tl

from .context import (
    HEADER_BYTES,
    HEADERS,
    NODE_RANKS,
    NUM_RANKS,
    NUM_SLOTS,
    PHASE_CAPACITY,
    PHASE_SLOT_FREE,
    RANK,
    REGION_BYTES,
)
from .lang import (
    consume_token,
    current_epoch,
    device_function,
    own_block,
    report_failure,
    wait,
)
from .network import send_word
from .slots import done_flag, region


@device_function
def num_nodes(context):
    """How many nodes the ranks are on."""
    return (tl.load(context + NUM_RANKS) // tl.load(context + NODE_RANKS)).to(tl.int32)


@device_function
def own_node(context):
    """The node of this rank."""
    return (tl.load(context + RANK) // tl.load(context + NODE_RANKS)).to(tl.int32)


NEAR, FAR, BOTH = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""Ranks of this node, those of others, all: whose rows a launch takes part with."""


@device_function
def is_on_side(rank, sides, context):
    """Whether ranks (scalar or block) are among the `sides` NEAR, FAR or BOTH."""
    is_near = rank // tl.load(context + NODE_RANKS).to(tl.int32) == own_node(context)
    return (tl.where(is_near, NEAR, FAR) & sides) != 0


@device_function
def rail_peer(node, context):
    """The rank of `node` (scalar or block) with which this rank talks over the network."""
    node_ranks = tl.load(context + NODE_RANKS).to(tl.int32)
    return node * node_ranks + tl.load(context + RANK).to(tl.int32) % node_ranks


@device_function
def node_writer(node, context):
    """The number of `node` (scalar or block) among the writers of flags. Each slot has its own, as
    sets of one flag that are in flight concurrently could arrive in any order: the rail peer sets
    it again only in a call for which this rank has said that it is done with the one before."""
    return _writer_in(current_epoch(context), node, context)


@device_function
def _writer_in(epoch, node, context):
    slot = (epoch % tl.load(context + NUM_SLOTS)).to(tl.int32)
    return tl.load(context + NUM_RANKS).to(tl.int32) + slot * num_nodes(context) + node


@device_function
def row_writer(source, context):
    """(address of the region, writer of flags) of the rows that this rank receives from `source`.
    On nodes of one rank those of other nodes stay where they arrive; else ranks of this node have
    written all rows into the region of their source."""
    node_ranks = tl.load(context + NODE_RANKS).to(tl.int32)
    stays = (node_ranks == 1) & (source != tl.load(context + RANK).to(tl.int32))
    index = tl.where(stays, tl.load(context + NUM_RANKS) + source, source)
    return region(index, context), tl.where(stays, node_writer(source, context), source)


@device_function
def arrival_region(node, context):
    """Address, in this rank's block, of the region of rows that arrive from `node`."""
    return region(tl.load(context + NUM_RANKS) + node, context)


@device_function
def staging_region(node, context):
    """Address of the region of rows that this rank sends to `node`."""
    return region(tl.load(context + NUM_RANKS) + num_nodes(context) + node, context)


@device_function
def arrival_header(node, context):
    """Address of the header that arrives from `node`."""
    return _header(node, context)


@device_function
def staging_header(node, context):
    """Address of the header that this rank sends to `node`."""
    return _header(num_nodes(context) + node, context)


@device_function
def _header(index, context):
    slot = current_epoch(context) % tl.load(context + NUM_SLOTS)
    index = slot * 2 * num_nodes(context) + index
    headers = own_block(context) + tl.load(context + HEADERS)
    return headers + index * tl.load(context + HEADER_BYTES)


@device_function
def wait_node_free(node, context):
    """Wait until the rail peer on `node` is done with the call that used this slot one turn of the
    ring ago. Returns 1, or 0 where the wait expired, see `lang.wait`.

    After it this rank may write its staging of this slot for `node`: all that it sent from there
    has arrived, so the network has read it. And what it sends cannot overtake the rail peer's loads
    of the arrivals of epoch e - D, see `release_rails`.
    """
    epoch = current_epoch(context) - tl.load(context + NUM_SLOTS)
    nodes = node + tl.arange(0, 1)
    flags = done_flag(node_writer(nodes, context), context)
    peers = rail_peer(nodes, context)
    return wait(flags, nodes >= 0, epoch, peers, context, PHASE_SLOT_FREE)


@device_function
def open_staging(node, count, row, context):
    """Make sure that this rank may write `count` rows to its staging for `node`, and send them.
    Returns (address of row 0, 1), or 0 where a wait expired or they would not fit, which is
    reported."""
    ready = tl.full((), 0, tl.int32)
    if row.header_bytes + count.to(tl.int64) * row.num_bytes > tl.load(context + REGION_BYTES):
        report_failure(rail_peer(node, context), current_epoch(context), context, PHASE_CAPACITY)
    elif node == own_node(context):
        ready = tl.full((), 1, tl.int32)  # only this rank reads it, in launches before this one
    else:
        ready = wait_node_free(node, context)
    return consume_token(staging_region(node, context), ready) + row.header_bytes, ready


@device_function
def release_rails(epoch, context):
    """Tell the rail peers that this rank is done with what arrived from their nodes in the call
    `epoch`. One program calls this, once the loads of all programs of all launches have been
    issued: after `is_last_program` of the last launch that reads arrivals, or in a launch after it.
    Each peer has sent something in each call, its header at least, and it arrived after the word of
    the call before in this slot: so no older word can follow this one."""
    done = done_flag(_writer_in(epoch, own_node(context), context), context)
    for distance in range(1, num_nodes(context)):
        node = (own_node(context) + distance) % num_nodes(context)
        send_word(done, epoch, rail_peer(node, context), context)
