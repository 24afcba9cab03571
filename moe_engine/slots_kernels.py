"""Device view of `slots.py`: the address of a flag or region from ranks, chunks and the epoch."""

import triton.language as tl

from .context import (
    CHUNK_FLAGS,
    COUNT_FLAGS,
    DONE,
    MAX_CHUNKS,
    NUM_RANKS,
    NUM_SLOTS,
    PHASE_CAPACITY,
    PHASE_ROWS,
    PHASE_SLOT_FREE,
    RANK,
    REGION_BYTES,
    SLOTS,
)
from .lang import (
    as_pointer,
    consume_token,
    current_epoch,
    device_function,
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
def wait_slot_free(peer, context):
    """Wait until `peer` has read what this slot held one turn of the ring ago. Returns a token.

    After it, stores into this rank's region of the slot on `peer` cannot overtake loads of
    epoch e - D there: see `lang.finish_call`.
    """
    epoch = current_epoch(context) - tl.load(context + NUM_SLOTS)
    lane = tl.arange(0, 1)
    flags = own_block(context) + tl.load(context + DONE) + (peer + lane) * 8
    return wait(flags, lane == 0, epoch, peer + lane, context, PHASE_SLOT_FREE)


@device_function
def open_region(peer, num_rows, header_bytes, row_bytes, context):
    """Make sure that this rank may write `num_rows` rows into its region of the slot on `peer`.

    Waits until the slot is free there. Returns (own address of row 0, rows to write): no rows
    when the wait expired, or when they would not fit, which is reported.
    """
    last_byte = header_bytes + num_rows.to(tl.int64) * row_bytes
    token = tl.full((), 0, tl.int32)
    if last_byte > tl.load(context + REGION_BYTES):
        report_failure(peer, current_epoch(context), context, PHASE_CAPACITY)
    elif num_rows > 0:
        token = wait_slot_free(peer, context)
    base = region(tl.load(context + RANK), context) + header_bytes
    return consume_token(base, token), tl.where(token == 1, num_rows, 0)


@device_function
def wait_chunk(writer, chunk, context, PHASE: tl.constexpr = PHASE_ROWS):
    """Wait until `writer` has written the rows of `chunk`. Returns a token."""
    lane = tl.arange(0, 1)
    flags = chunk_flag(writer, chunk + lane, context)
    return wait(flags, lane == 0, current_epoch(context), writer + lane, context, PHASE)


@device_function
def first_chunk(num_before):
    """This program's first chunk for a destination, after `num_before` chunks for earlier ones.

    The chunks of all destinations are dealt to the programs in one round: with 4 programs and 6
    chunks for each of 2 destinations, program 1 takes chunks 1, 5 of the first and 3 of the second.
    """
    num_programs = tl.num_programs(0)
    return (tl.program_id(0) + num_programs - num_before % num_programs) % num_programs


@device_function
def received_rows(rank_prefix_matrix, source, context):
    """Rows that `source` sends to this rank (int32)."""
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    column = rank_prefix_matrix + tl.load(context + RANK)
    before = tl.load(column + (source - 1) * num_ranks, mask=source > 0, other=0)
    return tl.load(column + source * num_ranks) - before


@device_function
def staged_peer(stage, context):
    """The rank this one writes to in `stage` 0 .. R-1: the next one first, itself last, so that
    no two ranks write to the same one at a time."""
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    return (tl.load(context + RANK).to(tl.int32) + 1 + stage) % num_ranks


@device_function
def staged_source(stage, context):
    """The rank whose rows are taken in `stage` 0 .. R-1: its own first, then rank - 1, ..."""
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    return (tl.load(context + RANK).to(tl.int32) - stage + num_ranks) % num_ranks


@device_function
def payload_address(x, source, address, token_offset, row_length, inside, context):
    """Where the payload of received rows lies, given the rows' addresses [B] in the slot.

    Rows from other ranks carry it. A rank's rows to itself are metadata alone: their payload is
    the token's row of `x` [T, row_length], which saves copying it.
    """
    token = tl.load(as_pointer(address + token_offset, tl.int32), mask=inside, other=0)
    own = x.to(tl.int64) + token.to(tl.int64) * row_length * (
        x.dtype.element_ty.primitive_bitwidth // 8
    )
    return tl.where(source == tl.load(context + RANK), own, address)
