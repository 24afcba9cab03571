"""The address of a flag, region or row of `symm/slots.py`, from ranks, chunks and the epoch."""

from typing import NamedTuple

import triton.language as tl

from .context import (
    CHUNK_FLAGS,
    COUNT_FLAGS,
    DONE,
    MAX_CHUNKS,
    MAX_STAGES,
    METADATA_FLAGS,
    NODE_RANKS,
    NUM_RANKS,
    NUM_REGIONS,
    NUM_SLOTS,
    PHASE_ROWS,
    PHASE_SLOT_FREE,
    RANK,
    REGION_BYTES,
    SIGNATURE_WORDS,
    SLOTS,
    STAGE_FLAGS,
)
from .lang import (
    current_epoch,
    device_function,
    own_block,
    wait,
)


class Row(NamedTuple):
    """Where the rows of a region lie, in bytes: row i begins at header_bytes + i * num_bytes, and
    its parts at these offsets from there. See `symm.slots.RowLayout`."""

    header_bytes: tl.tensor
    num_bytes: tl.tensor
    scales: tl.tensor
    ids: tl.tensor
    weights: tl.tensor
    token: tl.tensor


@device_function
def region(writer, context):
    """Address, in this rank's block, of the region of rank `writer` in the running call's slot."""
    slot = current_epoch(context) % tl.load(context + NUM_SLOTS)
    index = slot * tl.load(context + NUM_REGIONS) + writer
    return own_block(context) + tl.load(context + SLOTS) + index * tl.load(context + REGION_BYTES)


@device_function
def rows_in_region(row, context, CHUNK_ROWS: tl.constexpr):
    """Rows that a region has memory and flags for."""
    rows = (tl.load(context + REGION_BYTES) - row.header_bytes) // row.num_bytes
    return tl.minimum(rows, tl.load(context + MAX_CHUNKS) * CHUNK_ROWS).to(tl.int32)


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
def done_flag(writer, context):
    """Address of the word that says up to which epoch `writer` is done with this rank's rows."""
    return own_block(context) + tl.load(context + DONE) + writer * 8


@device_function
def metadata_flag(writer, context):
    """Address of the flag that says: `writer` has written the metadata of all its rows."""
    return own_block(context) + tl.load(context + METADATA_FLAGS) + writer * 8


@device_function
def stage_flag(way, stage, writer, context):
    """Address of the flag that says: `writer` has written its rows of a layer up to this stage, of
    the dispatch (way 0) or the combine (1). The flags of all writers are adjacent."""
    index = (way * MAX_STAGES + stage) * tl.load(context + NUM_RANKS) + writer
    return own_block(context) + tl.load(context + STAGE_FLAGS) + index * 8


COUNTS_AT = SIGNATURE_WORDS
"""Where a region has its writer's counts, as int32: after the signature."""


@device_function
def stage_counts_offset(num_experts):
    """Where a layer's region says how many rows each stage of the combine has, in bytes: after the
    signature and the counts."""
    return (COUNTS_AT + num_experts) * 4


@device_function
def wait_slot_free(peers, mask, context):
    """Wait until `peers` (block) have read what this slot held one turn of the ring ago. Returns 1,
    or 0 where the wait expired, see `lang.wait`.

    After it, stores into this rank's region of the slot on `peers` cannot overtake their loads of
    epoch e - D: see `programs.finish_call`.
    """
    epoch = current_epoch(context) - tl.load(context + NUM_SLOTS)
    flags = done_flag(peers, context)
    return wait(flags, mask, epoch, peers, context, PHASE_SLOT_FREE)


@device_function
def wait_rows(source, writer, rows, mask, context, CHUNK_ROWS: tl.constexpr):
    """Wait until `writer` has written `rows` (block) of the rank `source`. Returns 1, or 0 where
    the wait expired, for which that rank is blamed."""
    flags = chunk_flag(writer, rows // CHUNK_ROWS, context)
    return wait(flags, mask, current_epoch(context), rows * 0 + source, context, PHASE_ROWS)


@device_function
def first_near_rank(context):
    """The first rank of this rank's node: 0 on a single node."""
    node_ranks = tl.load(context + NODE_RANKS).to(tl.int32)
    return tl.load(context + RANK).to(tl.int32) // node_ranks * node_ranks


@device_function
def near_rank(distance, context):
    """The rank of this node that comes `distance` (scalar or block) after this one."""
    node_ranks = tl.load(context + NODE_RANKS).to(tl.int32)
    first = first_near_rank(context)
    return first + (tl.load(context + RANK).to(tl.int32) - first + distance) % node_ranks


@device_function
def is_near(ranks, context):
    """Which of `ranks` (block) are ranks of this node."""
    first = first_near_rank(context)
    return (ranks >= first) & (ranks < first + tl.load(context + NODE_RANKS).to(tl.int32))


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
    """The rank that sends to this one from a distance: this rank from 0, R, ..., rank - 1 from
    1."""
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    return (tl.load(context + RANK).to(tl.int32) + num_ranks - distance % num_ranks) % num_ranks


@device_function
def payload_address(x, source, address, token_idx, row_length, context):
    """Where the payload of received rows lies, given their addresses [B] in the slot and tokens.

    Rows from other ranks carry it. A rank's rows to itself are metadata alone: their payload is
    the token's row of `x` [T, row_length], which saves copying it.
    """
    own = x.to(tl.int64) + token_idx.to(tl.int64) * row_length * (
        x.dtype.element_ty.primitive_bitwidth // 8
    )
    return tl.where(source == tl.load(context + RANK), own, address)
