"""The push of rows into this rank's region on other ranks, which dispatch and combine share."""

from typing import NamedTuple

import triton
import triton.language as tl

from .context import NODE_RANKS, NUM_RANKS, PHASE_CAPACITY, RANK, REGION_BYTES
from .lang import (
    as_pointer,
    consume_token,
    current_epoch,
    device_function,
    notify,
    pacing_interval,
    put,
    put_rows,
    report_failure,
    stagger,
    symm_at,
)
from .programs import end_push, pdl_wait
from .slots import chunk_flag, first_near_rank, near_rank, region, wait_slot_free
from .tiles import deal


class PushSizes(NamedTuple):
    """What a push is compiled for."""

    ALIGNED: bool  # whether rows are a multiple of 16 bytes
    RANKS_PAD: int
    CHUNK_ROWS: int  # rows that share a flag
    SPAN: int  # chunks that a program writes before it raises their flags
    BLOCK_ROWS: int  # rows that a program copies at a time
    BLOCK_COLUMNS: int  # columns of each
    NUM_TOPK: int  # weights that follow a row
    SLACK: int  # 1/SLACK of the time that a row takes passes before the next one; 0: none
    RELAYS: bool = False  # whether rows are of other nodes, or for them; see `landing`
    NUM_SUMMED: int = 0  # expert rows that a row may be the sum of; 0: it is a row itself


class Source(NamedTuple):
    """The rows that a push reads."""

    x: tl.tensor  # [num_rows, num_columns]; what arrives over the network has a type alone
    weights: tl.tensor  # float32 [num_rows, NUM_TOPK], or None
    num_rows: tl.tensor
    num_columns: tl.tensor
    num_peers: tl.tensor  # how many ranks it sends to, see `peer_at`


@device_function
def push_rows(
    source,
    plan,
    counts,
    program,
    num_programs,
    row,
    context,
    source_row: tl.constexpr,
    put_block: tl.constexpr,
    SIZES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write counts [RANKS_PAD] rows where each of the source's peers expects them, to all at the
    same pace, as program `program` of `num_programs`. See `peer_at` and `landing` for who the peers
    are, and where their rows go.

    The device function `source_row(source, plan, peers, rows, end, context)` gives pointers to the
    rows of `source` that are rows `rows` (block) for `peers`, their numbers, and whether there is
    one; from row `end` on there is none. `put_block` writes these, see `copy_block`.

    A chunk's flags are raised after its rows, so that a reader waits for no more than it reads. In
    a PDL launch the stores of the launch before happen before the flags too: it is waited for
    before the first one is raised.
    """
    num_peers = source.num_peers
    first_row, most_rows = open_regions(counts, row, context, SIZES.RELAYS)
    num_chunks = tl.cdiv(most_rows, SIZES.CHUNK_ROWS)
    num_blocks = tl.cdiv(source.num_columns, SIZES.BLOCK_COLUMNS)
    chunks_here = num_chunks_here(num_chunks, program, num_programs, SIZES.SPAN)
    due = stagger(SIZES.BLOCK_ROWS * row.num_bytes // num_blocks, program, context)
    for turn in range(0, num_spans(num_chunks, num_programs, SIZES.SPAN)):
        first_chunk, end_chunk = span(turn, num_chunks, program, num_programs, SIZES.SPAN)
        end = min(end_chunk * SIZES.CHUNK_ROWS, most_rows)
        begin = first_chunk * SIZES.CHUNK_ROWS
        for first in range(begin * num_peers, end * num_peers, SIZES.BLOCK_ROWS):
            # A block holds rows for all peers, so that traffic to each stays even.
            peers, rows = deal(first + tl.arange(0, SIZES.BLOCK_ROWS), num_peers)
            peers = peer_at(peers, context, SIZES.RELAYS)
            from_rows, src_row, has = source_row(source, plan, peers, rows, end, context)
            writer, rank = landing(peers, context, SIZES.RELAYS)
            to = row_at(first_row, writer, rows, row, context)
            to = symm_at(to, rank, context)
            num_bytes = tl.sum(has.to(tl.int32), 0) * row.num_bytes
            interval = pacing_interval(num_bytes, chunks_here, num_chunks, context)
            if SIZES.SLACK > 0:
                interval += interval // SIZES.SLACK
            # fmt: off
            due = put_block(
                source, plan, from_rows, src_row, has, to, due, interval // num_blocks, row, SIZES
            )
            # fmt: on
        pdl_wait(PDL)
        raise_chunks(first_chunk, end_chunk, counts, context, SIZES)
    pdl_wait(PDL)
    end_push(context)


@device_function
def copy_block(
    source, plan, from_rows, src_row, has, to, due, step, row, SIZES: tl.constexpr
):  # fmt: skip
    """Copy rows, and their weights, to the addresses `to` (blocks), where there is one, paced as in
    `put_rows`. Returns when the next block is due."""
    # fmt: off
    due = put_rows(
        as_pointer(to, source.x.dtype.element_ty), from_rows, source.num_columns, has, due, step,
        SIZES.ALIGNED, SIZES.BLOCK_COLUMNS,
    )
    # fmt: on
    if source.weights is not None:
        k = tl.arange(0, triton.next_power_of_2(SIZES.NUM_TOPK))
        inside = has[:, None] & (k < SIZES.NUM_TOPK)[None, :]
        from_weights = source.weights + src_row[:, None] * SIZES.NUM_TOPK + k[None, :]
        weights = tl.load(from_weights, mask=inside, other=0.0)
        put(as_pointer(to + row.weights, tl.float32)[:, None] + k[None, :], weights, inside)
    return due


@device_function
def peer_at(index, context, RELAYS: tl.constexpr):
    """The peer number `index` (block) of a push: the ranks of this node, the one after this rank
    first and this rank itself last. With RELAYS all ranks, those of the next node first and those
    of this node last."""
    if RELAYS:
        first = first_near_rank(context) + tl.load(context + NODE_RANKS).to(tl.int32)
        return (first + index) % tl.load(context + NUM_RANKS).to(tl.int32)
    return near_rank(1 + index, context)


@device_function
def landing(peers, context, RELAYS: tl.constexpr):
    """(whose region, on which rank) rows for `peers` (block) go into: this rank's own, there.

    With RELAYS a peer stands for a pair of another node's rank and one of this node, in a dispatch
    for the source of the rows that is this rank's rail peer and a rank that they are for, in a
    combine for the rank that they return to, and its rail peer here. Rank 1 of 2 nodes of 2 ranks
    writes rows of peer 2 into region 3 on rank 0: of a dispatch, what rank 3 sends to rank 0; of a
    combine, what is for rank 2 to sum, after rank 0 has summed it, where region 3 stands for rank 1
    as the second one of a node.
    """
    rank = tl.load(context + RANK).to(tl.int32)
    if RELAYS:
        node_ranks = tl.load(context + NODE_RANKS).to(tl.int32)
        place = peers % node_ranks
        return peers - place + rank % node_ranks, first_near_rank(context) + place
    return peers * 0 + rank, peers


@device_function
def row_at(first_row, writer, rows, row, context):
    """Addresses of `rows` in the regions of `writer` (blocks), from that of row 0 of region 0."""
    at = first_row + writer.to(tl.int64) * tl.load(context + REGION_BYTES)
    return at + rows.to(tl.int64) * row.num_bytes


@device_function
def open_regions(counts, row, context, RELAYS: tl.constexpr = False):
    """Make sure that this rank may write counts [RANKS_PAD] rows where each peer expects them.

    Waits until the slot is free on each. Returns (address of row 0 of region 0 of the slot, most
    rows to any peer): no rows when a wait expired, or when they would not fit, which is reported.
    """
    ranks = tl.arange(0, counts.shape[0])
    last_byte = row.header_bytes + counts.to(tl.int64) * row.num_bytes
    too_long = last_byte > tl.load(context + REGION_BYTES)
    ready = tl.full((), 0, tl.int32)
    if tl.max(too_long.to(tl.int32), 0) > 0:
        peer = tl.max(tl.where(too_long, ranks, 0), 0)
        report_failure(peer, current_epoch(context), context, PHASE_CAPACITY)
    else:
        _, holder = landing(ranks, context, RELAYS)
        ready = wait_slot_free(holder, counts > 0, context)
    base = region(0, context) + row.header_bytes
    return consume_token(base, ready), tl.where(ready == 1, tl.max(counts, 0), 0)


# --- Sharing chunks among programs ---------------------------------------------------------------


@device_function
def num_spans(num_chunks, num_programs, SPAN: tl.constexpr):
    """How many spans of chunks each of `num_programs` pushes; see `span`."""
    rest = num_chunks % (num_programs * SPAN)
    return num_chunks // (num_programs * SPAN) + tl.cdiv(rest, num_programs)


@device_function
def span(turn, num_chunks, program, num_programs, SPAN: tl.constexpr):
    """(first chunk, end) of a program's span number `turn`.

    Spans of SPAN chunks are dealt in rounds, and the chunks left for no full round one by one, so
    that raising flags costs little and all programs end together. 2 programs, 7 chunks, SPAN 2:
    program 0 pushes chunks 0 1, then 4, then 6; program 1 chunks 2 3, then 5.
    """
    rounds = num_chunks // (num_programs * SPAN)
    single = rounds * num_programs * SPAN + (turn - rounds) * num_programs + program
    first = tl.where(turn < rounds, (turn * num_programs + program) * SPAN, single)
    return first, tl.minimum(tl.where(turn < rounds, first + SPAN, first + 1), num_chunks)


@device_function
def num_chunks_here(num_chunks, program, num_programs, SPAN: tl.constexpr):
    """How many chunks a program pushes; see `span`."""
    rounds = num_chunks // (num_programs * SPAN)
    rest = num_chunks - rounds * num_programs * SPAN
    return rounds * SPAN + (rest + num_programs - 1 - program) // num_programs


@device_function
def raise_chunks(first, end, counts, context, SIZES: tl.constexpr):
    """Say that chunks `first` .. `end` of counts [RANKS_PAD] rows for each peer were written."""
    index = tl.arange(0, SIZES.SPAN * counts.shape[0])
    peers = index % counts.shape[0]
    chunks = first + index // counts.shape[0]
    has = (chunks < end) & (chunks * SIZES.CHUNK_ROWS < tl.gather(counts, peers, 0))
    writer, rank = landing(peers, context, SIZES.RELAYS)
    flags = chunk_flag(writer, chunks, context)
    notify(flags, rank, has, current_epoch(context), context)
