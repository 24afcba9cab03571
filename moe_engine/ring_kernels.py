"""Device view of `ring.py`: where a call's flags and regions are, and how its programs begin."""

import triton.language as tl

from .context import (
    CHUNK_FLAGS,
    COUNT_FLAGS,
    DONE,
    EPOCH,
    MASKED,
    MAX_CHUNKS,
    NUM_RANKS,
    NUM_SLOTS,
    PEERS,
    PHASE_SLOT_FREE,
    RANK,
    REGION_BYTES,
    SLOTS,
    STARTED,
)
from .lang import as_pointer, device_function, is_alive, load_acquire, notify, own_block, poll, wait
from .ptx import pause


@device_function
def begin_send(call, context):
    """Epoch of a call that this launch sends; every program calls this once.

    The last program makes it the running epoch, and writes it to `call`, int64 [1], for later
    launches of the call. It waits until all programs have read the word before: each adds 1 to a
    counter behind its load. It is the last by its number, so it waits for earlier ones alone.
    """
    epoch = tl.load(context + EPOCH) + 1
    tl.debug_barrier()
    one = tl.full((), 1, tl.int64)
    tl.atomic_add(context + STARTED, one, sem="release", scope="gpu")
    if tl.program_id(0) == tl.num_programs(0) - 1:
        while load_acquire(context + STARTED) < tl.num_programs(0):
            pause()
        tl.debug_barrier()
        tl.store(context + STARTED, 0)
        tl.store(context + EPOCH, epoch)
        tl.store(call, epoch)
    return epoch


@device_function
def region_at(epoch, writer, context):
    """Address, in this rank's block, of the region of `writer` in the slot of a call."""
    slot = epoch % tl.load(context + NUM_SLOTS)
    index = slot * tl.load(context + NUM_RANKS) + writer
    return own_block(context) + tl.load(context + SLOTS) + index * tl.load(context + REGION_BYTES)


@device_function
def message_flag(epoch, writer, context):
    """Address of the flag that says: the message of `writer` (scalar or block) is there."""
    index = epoch % tl.load(context + NUM_SLOTS) * tl.load(context + NUM_RANKS) + writer
    return own_block(context) + tl.load(context + COUNT_FLAGS) + index * 8


@device_function
def row_flag(epoch, writer, row, context):
    """Address of the flag that says: row `row` of `writer` is there; blocks or scalars."""
    index = epoch % tl.load(context + NUM_SLOTS) * tl.load(context + NUM_RANKS) + writer
    index = index * tl.load(context + MAX_CHUNKS) + row
    return own_block(context) + tl.load(context + CHUNK_FLAGS) + index * 8


@device_function
def received(context):
    """Pointer to int64 [D]: the epoch of the last call that was received in each slot."""
    return context + PEERS + tl.load(context + NUM_RANKS)


@device_function
def tell_received(peer, context):
    """Tell `peer` which calls this rank has received: its `done[slot, me]`. Called by a program of
    each call's send, before it waits for anything.

    Proof that a slot is not written while it is read: the receiving launch of epoch e stores e to
    `received[slot]`, all of its loads come before its end, and this, in a later launch, after that.
    A writer of epoch e + D waits for `done[slot] >= e` (`wait_slot`), so it stores after those
    loads. That is the whole proof, whatever the order in which calls are received.
    """
    slots = tl.arange(0, 16)  # `ring.MAX_SLOTS`
    num_slots = tl.load(context + NUM_SLOTS)
    num_ranks = tl.load(context + NUM_RANKS)
    epochs = tl.load(received(context) + slots, mask=slots < num_slots, other=0)
    at = slots * num_ranks + tl.load(context + RANK)
    flags = own_block(context) + tl.load(context + DONE) + at * 8
    notify(flags, peer + slots * 0, slots < num_slots, epochs, context)


@device_function
def wait_slot(epoch, peers, mask, context, SHRINK: tl.constexpr):
    """Wait until `peers` (block) have received what the slot of this call held before. Returns
    which of `peers` under `mask` may be written to; see `tell_received`."""
    num_slots = tl.load(context + NUM_SLOTS)
    index = epoch % num_slots * tl.load(context + NUM_RANKS) + peers
    flags = own_block(context) + tl.load(context + DONE) + index * 8
    return wait_ranks(flags, mask, epoch - num_slots, peers, context, PHASE_SLOT_FREE, SHRINK)


@device_function
def wait_ranks(flags, mask, epoch, peers, context, PHASE: tl.constexpr, SHRINK: tl.constexpr):
    """`lang.wait` for flags of `peers`. Returns which flags under `mask` are raised, the same to
    all threads: all or, past the deadline, none.

    With SHRINK a rank that is late past the deadline is masked instead, for good, and what masked
    ranks have not raised is just left out; nothing is reported.
    """
    if SHRINK:
        # An atomic gives all threads one answer, while others may mask a rank.
        zero = tl.full((), 0, tl.int64)
        before = tl.atomic_or(context + MASKED, zero, sem="relaxed", scope="gpu")
        wanted = mask & is_alive(before, peers)
        late, token = poll(flags, wanted, epoch, peers, context, PHASE, True)
        if token == 0:
            bits = tl.where(late, tl.full((), 1, tl.int64) << peers.to(tl.int64), 0)
            lost = tl.sum(bits, 0)  # of different ranks: as good as an or
            tl.atomic_or(context + MASKED, lost, sem="relaxed", scope="gpu")
        after = tl.atomic_or(context + MASKED, zero, sem="relaxed", scope="gpu")
        there = wanted & is_alive(after, peers)
    else:
        there = mask & (wait(flags, mask, epoch, peers, context, PHASE) == 1)
    return there


@device_function
def row_at(address, columns, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointers to `columns` of a row at an address; ALIGNED: to a multiple of 16 bytes."""
    return pointers_at(as_pointer(address, dtype), columns, ALIGNED)


@device_function
def pointers_at(row, columns, ALIGNED: tl.constexpr):
    """Pointers to `columns` of a row; ALIGNED: it lies at a multiple of 16 bytes."""
    pointers = row + columns
    if ALIGNED:
        pointers = tl.multiple_of(pointers, 16)
    return pointers
