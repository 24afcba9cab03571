"""The push of rows into this rank's region on other ranks, which dispatch and combine share."""

from typing import NamedTuple

import triton
import triton.language as tl

from .context import NUM_RANKS, PHASE_CAPACITY, RANK, REGION_BYTES
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
from .slots import chunk_flag, region, wait_slot_free
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


class Source(NamedTuple):
    """The rows that a push reads."""

    x: tl.tensor  # [num_rows, num_columns]
    weights: tl.tensor  # float32 [num_rows, NUM_TOPK], or None
    num_rows: tl.tensor
    num_columns: tl.tensor


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
    SIZES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write counts [RANKS_PAD] rows into this rank's region on each other rank, all at the same
    pace, as program `program` of `num_programs`. Rows to this rank itself are not written.

    The device function `source_row(plan, num_rows, peers, rows, end, context)` names the row of
    `source` that row `rows` (block) of the region on `peers` is, and whether there is one; from
    row `end` on there is none.

    A chunk's flags are raised after its rows, so that a reader waits for no more than it reads. In
    a PDL launch the stores of the launch before happen before the flags too: it is waited for
    before the first one is raised.
    """
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    rank = tl.load(context + RANK).to(tl.int32)
    own, most_rows = open_regions(counts, row, context)
    num_peers = num_ranks - 1
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
            peers = (rank + 1 + peers) % num_ranks
            src_row, has = source_row(plan, source.num_rows, peers, rows, end, context)
            to = symm_at(own + rows.to(tl.int64) * row.num_bytes, peers, context)
            num_bytes = tl.sum(has.to(tl.int32), 0) * row.num_bytes
            interval = pacing_interval(num_bytes, chunks_here, num_chunks, context)
            if SIZES.SLACK > 0:
                interval += interval // SIZES.SLACK
            due = put_rows(
                as_pointer(to, source.x.dtype.element_ty),
                source.x + src_row.to(tl.int64) * source.num_columns,
                source.num_columns,
                has,
                due,
                interval // num_blocks,
                SIZES.ALIGNED,
                SIZES.BLOCK_COLUMNS,
            )
            if source.weights is not None:
                k = tl.arange(0, triton.next_power_of_2(SIZES.NUM_TOPK))
                inside = has[:, None] & (k < SIZES.NUM_TOPK)[None, :]
                from_weights = source.weights + src_row[:, None] * SIZES.NUM_TOPK + k[None, :]
                weights = tl.load(from_weights, mask=inside, other=0.0)
                to_weights = as_pointer(to + row.weights, tl.float32)[:, None] + k[None, :]
                put(to_weights, weights, inside)
        pdl_wait(PDL)
        raise_chunks(first_chunk, end_chunk, counts, context, SIZES.CHUNK_ROWS, SIZES.SPAN)
    pdl_wait(PDL)
    end_push(context)


@device_function
def open_regions(counts, row, context):
    """Make sure that this rank may write counts [RANKS_PAD] rows into its region of the slot on
    each rank.

    Waits until the slot is free on each. Returns (own address of row 0, most rows to any rank): no
    rows when a wait expired, or when they would not fit, which is reported.
    """
    ranks = tl.arange(0, counts.shape[0])
    last_byte = row.header_bytes + counts.to(tl.int64) * row.num_bytes
    too_long = last_byte > tl.load(context + REGION_BYTES)
    ready = tl.full((), 0, tl.int32)
    if tl.max(too_long.to(tl.int32), 0) > 0:
        peer = tl.max(tl.where(too_long, ranks, 0), 0)
        report_failure(peer, current_epoch(context), context, PHASE_CAPACITY)
    else:
        ready = wait_slot_free(ranks, counts > 0, context)
    base = region(tl.load(context + RANK), context) + row.header_bytes
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
def raise_chunks(first, end, counts, context, CHUNK_ROWS: tl.constexpr, SPAN: tl.constexpr):
    """Tell each rank that chunks `first` .. `end` of its counts [RANKS_PAD] rows were written."""
    index = tl.arange(0, SPAN * counts.shape[0])
    ranks = index % counts.shape[0]
    chunks = first + index // counts.shape[0]
    has = (chunks < end) & (chunks * CHUNK_ROWS < tl.gather(counts, ranks, 0))
    flags = chunk_flag(tl.load(context + RANK), chunks, context)
    notify(flags, ranks, has, current_epoch(context), context)
