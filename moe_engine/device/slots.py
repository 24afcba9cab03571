"""The address of a flag or region of `symm/slots.py`, from ranks, chunks and the epoch."""

import triton.language as tl

from .context import (
    CHUNK_FLAGS,
    COUNT_FLAGS,
    DONE,
    MAX_CHUNKS,
    MAX_STAGES,
    METADATA_FLAGS,
    NUM_RANKS,
    NUM_SLOTS,
    PHASE_CAPACITY,
    PHASE_ROWS,
    PHASE_SLOT_FREE,
    RANK,
    REGION_BYTES,
    SIGNATURE_WORDS,
    SLOTS,
    STAGE_FLAGS,
)
from .lang import (
    consume_token,
    current_epoch,
    device_function,
    notify,
    own_block,
    report_failure,
    wait,
)


@device_function
def region(writer, context):
    """Address, in this rank's block, of the region of rank `writer` in the running call's slot."""
    slot = current_epoch(context) % tl.load(context + NUM_SLOTS)
    index = slot * tl.load(context + NUM_RANKS) + writer
    return own_block(context) + tl.load(context + SLOTS) + index * tl.load(context + REGION_BYTES)


@device_function
def chunk_flag(writer, chunk, context):
    """Address of the flag that says: `writer` has written the rows of `chunk` (scalar or block)."""
    index = writer * tl.load(context + MAX_CHUNKS) + chunk
    return own_block(context) + tl.load(context + CHUNK_FLAGS) + index * 8


@device_function
def count_flag(writer, context):
    """Address of the flag that says: `writer` has written its count row."""
    return own_block(context) + tl.load(context + COUNT_FLAGS) + writer * 8


@device_function
def metadata_flag(writer, context):
    """Address of the flag that says: `writer` has written the metadata of all its rows."""
    return own_block(context) + tl.load(context + METADATA_FLAGS) + writer * 8


@device_function
def stage_flag(way, stage, writer, context):
    """Address of the flag that says: `writer` has written its rows of a layer up to this stage, on
    the way there (0) or back (1). The flags of all writers lie side by side."""
    index = (way * MAX_STAGES + stage) * tl.load(context + NUM_RANKS) + writer
    return own_block(context) + tl.load(context + STAGE_FLAGS) + index * 8


COUNTS_AT = SIGNATURE_WORDS
"""Words of a signature, behind which a region has its writer's counts."""


@device_function
def stage_counts_offset(num_experts):
    """Where a layer's region says how many rows each stage of the way back has, in bytes: behind
    the signature and the counts."""
    return (COUNTS_AT + num_experts) * 4


@device_function
def wait_slot_free(peers, mask, context):
    """Wait until `peers` (block) have read what this slot held one turn of the ring ago. Returns a
    token.

    After it, stores into this rank's region of the slot on them cannot overtake loads of
    epoch e - D there: see `programs.finish_call`.
    """
    epoch = current_epoch(context) - tl.load(context + NUM_SLOTS)
    flags = own_block(context) + tl.load(context + DONE) + peers * 8
    return wait(flags, mask, epoch, peers, context, PHASE_SLOT_FREE)


@device_function
def open_regions(num_rows, header_bytes, row_bytes, context):
    """Make sure that this rank may write `num_rows` [RANKS_PAD] rows into its region of the slot
    on each rank.

    Waits until the slot is free there. Returns (own address of row 0, most rows to any rank): no
    rows when a wait expired, or when they would not fit, which is reported.
    """
    ranks = tl.arange(0, num_rows.shape[0])
    last_byte = header_bytes + num_rows.to(tl.int64) * row_bytes
    too_long = last_byte > tl.load(context + REGION_BYTES)
    token = tl.full((), 0, tl.int32)
    if tl.max(too_long.to(tl.int32), 0) > 0:
        peer = tl.max(tl.where(too_long, ranks, 0), 0)
        report_failure(peer, current_epoch(context), context, PHASE_CAPACITY)
    else:
        token = wait_slot_free(ranks, num_rows > 0, context)
    base = region(tl.load(context + RANK), context) + header_bytes
    return consume_token(base, token), tl.where(token == 1, tl.max(num_rows, 0), 0)


@device_function
def deal(first, first_peer, num_peers, context, LANES: tl.constexpr):
    """(ranks, rows) of the LANES rows that a tile writes, from place `first` on in the sequence:
    row 0 to each of `num_peers` ranks from `first_peer` on, row 1 to each of them, ...

    Every tile thus writes to all of them, and the traffic to each stays even. Three ranks,
    first_peer 2, num_peers 2, first 3, 4 lanes: ranks 0 2 0 2, rows 1 2 2 3.
    """
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    places = first + tl.arange(0, LANES)
    return (first_peer + places % num_peers) % num_ranks, places // num_peers


@device_function
def num_spans(num_chunks, num_programs, SPAN: tl.constexpr):
    """How many spans of chunks each of `num_programs` pushes; see `span`."""
    rest = num_chunks % (num_programs * SPAN)
    return num_chunks // (num_programs * SPAN) + tl.cdiv(rest, num_programs)


@device_function
def span(turn, num_chunks, program, num_programs, SPAN: tl.constexpr):
    """(first chunk, end) of a program's span number `turn`.

    Spans of SPAN chunks are dealt in rounds, and what is left for no full round one by one, so that
    raising flags costs little and all programs end together. 2 programs, 7 chunks, SPAN 2: program
    0 pushes chunks 0 1, then 4, then 6; program 1 chunks 2 3, then 5.
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
def raise_chunks(first, end, num_rows, context, CHUNK_ROWS: tl.constexpr, SPAN: tl.constexpr):
    """Tell each rank that chunks `first` .. `end` of its `num_rows` [RANKS_PAD] are there."""
    lanes = tl.arange(0, SPAN * num_rows.shape[0])
    ranks = lanes % num_rows.shape[0]
    chunks = first + lanes // num_rows.shape[0]
    has = (chunks < end) & (chunks * CHUNK_ROWS < tl.gather(num_rows, ranks, 0))
    flags = chunk_flag(tl.load(context + RANK), chunks, context)
    notify(flags, ranks, has, current_epoch(context), context)


@device_function
def wait_rows(writer, rows, mask, context, CHUNK_ROWS: tl.constexpr):
    """Wait until `writer` has written `rows` (block) into its region. Returns a token."""
    flags = chunk_flag(writer, rows // CHUNK_ROWS, context)
    return wait(flags, mask, current_epoch(context), rows * 0 + writer, context, PHASE_ROWS)


@device_function
def received_rows(rank_prefix_matrix, source, context):
    """Rows that `source` (a rank or a block of them; past the last, 0) sends to this rank."""
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    column = rank_prefix_matrix + tl.load(context + RANK)
    real = source < num_ranks
    before = tl.load(column + (source - 1) * num_ranks, mask=real & (source > 0), other=0)
    return tl.load(column + source * num_ranks, mask=real, other=0) - before


@device_function
def source_at(distance, context):
    """The rank that sends to this one from a distance: itself from 0, R, ..., rank - 1 from 1."""
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    return (tl.load(context + RANK).to(tl.int32) + num_ranks - distance % num_ranks) % num_ranks


@device_function
def payload_address(x, source, address, tokens, row_length, context):
    """Where the payload of received rows lies, given their addresses [B] in the slot and tokens.

    Rows from other ranks carry it. A rank's rows to itself are metadata alone: their payload is
    the token's row of `x` [T, row_length], which saves copying it.
    """
    own = x.to(tl.int64) + tokens.to(tl.int64) * row_length * (
        x.dtype.element_ty.primitive_bitwidth // 8
    )
    return tl.where(source == tl.load(context + RANK), own, address)
