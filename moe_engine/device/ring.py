"""A call's slot as laid out by `symm/ring.py`, its flags and regions, and how programs begin."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from .context import (
    BROKEN,
    CHUNK_FLAGS,
    COUNT_FLAGS,
    DONE,
    EPOCH,
    MASKED,
    MAX_CHUNKS,
    NUM_RANKS,
    NUM_SLOTS,
    OWN,
    PEERS,
    PHASE_SLOT_FREE,
    RANK,
    REGION_BYTES,
    SLOTS,
    STARTED,
    TIMEOUT_NS,
)
from .lang import (
    as_pointer,
    consume_token,
    device_function,
    is_alive,
    load_acquire,
    now_ns,
    poll,
    publish,
    report_failure,
    row_pointers,
    wait,
)
from .programs import pdl_wait
from .ptx import INTERPRETED, pause

COUNT_BITS = tl.constexpr(16)
"""Of a flag below the epoch, for what it says beside: a count, or that a row has come with it."""
COUNT_MASK = tl.constexpr(0xFFFF)
MAX_COUNTS = tl.constexpr(1024)
"""Words that a rank sends another beside rows: FIELDS of the call, one for each expert there."""
FIELDS = tl.constexpr(8)
"""Words that say what a call was begun with; see `call_fields`."""
MAX_SLOTS = tl.constexpr(16)
"""Slots of a ring."""


class Slot(NamedTuple):
    """What a program knows of its call, read at once: behind each wait, memory would have to be
    asked anew. Addresses are this rank's; `shift` leads to the same place on other ranks."""

    epoch: tl.tensor
    rank: tl.tensor
    number: tl.tensor  # which slot of the ring
    done: tl.tensor  # address of done[0, 0]
    counts: tl.tensor  # address of the slot's first
    row_flags: tl.tensor  # address of the slot's first
    flags_per_rank: tl.tensor
    regions: tl.tensor  # address of rank 0's region
    region_bytes: tl.tensor
    shift: tl.tensor  # int64 [R_PAD]: the address of rank r's block less that of this rank's


@dataclass(frozen=True)
class Fixed:
    """What a low-latency kernel is compiled for, most of it by the names of its arguments; frozen,
    as constexprs are hashed."""

    NUM_TOPK: Any
    ALIGNED: Any
    RANKS: Any
    EXPERTS: Any
    BLOCK: Any
    SHRINK: Any
    FORMAT: Any  # None in a combine
    WORD: Any  # the type that a row is moved in
    KIND: Any  # `context.Kind`
    NUM_EXPERTS: Any  # of all ranks
    K_PAD: Any  # lanes of a token, padded
    ENTRY: Any  # int32 words that `returns` has for a token


@triton.constexpr_function
def fixed(NUM_TOPK, ALIGNED, RANKS, EXPERTS, BLOCK, SHRINK, FORMAT, WORD, KIND):
    """A `Fixed` of values that kernels can compute with."""
    values = NUM_TOPK, ALIGNED, RANKS, EXPERTS, BLOCK, SHRINK, FORMAT, WORD, KIND
    values += RANKS * EXPERTS, triton.next_power_of_2(NUM_TOPK), 1 + 3 * NUM_TOPK
    return Fixed(*(values if INTERPRETED else map(tl.constexpr, values)))


class Rows(NamedTuple):
    """How the rows of a call lie in a region: up to max_tokens, behind header_bytes, row_bytes
    apart. A row has num_vecs of `Fixed.WORD` and, record_at bytes from its beginning, a record."""

    max_tokens: tl.tensor
    header_bytes: tl.tensor
    row_bytes: tl.tensor
    num_vecs: tl.tensor
    record_at: tl.tensor


@device_function
def open_slot(call, context, RANKS: tl.constexpr, SENDS: tl.constexpr, PDL: tl.constexpr):
    """The slot of a call, after `programs.pdl_wait`: of one that this launch SENDS, see
    `_begin_send`, or of the one whose epoch `call`, int64 [1], holds."""
    ranks = tl.arange(0, triton.next_power_of_2(RANKS))
    rank = tl.load(context + RANK).to(tl.int32)
    num_slots = tl.load(context + NUM_SLOTS)
    own = tl.load(context + OWN)
    shift = tl.load(context + PEERS + ranks, mask=ranks < RANKS, other=0) - own
    done = own + tl.load(context + DONE)
    counts = own + tl.load(context + COUNT_FLAGS)
    row_flags = own + tl.load(context + CHUNK_FLAGS)
    flags_per_rank = tl.load(context + MAX_CHUNKS)
    regions = own + tl.load(context + SLOTS)
    region_bytes = tl.load(context + REGION_BYTES)
    pdl_wait(PDL)
    if SENDS:
        epoch = _begin_send(call, context)
    else:
        epoch = tl.load(call)
    number = epoch % num_slots
    first = number * RANKS
    return Slot(
        epoch=epoch,
        rank=rank,
        number=number,
        done=done,
        counts=counts + first * MAX_COUNTS * 8,
        row_flags=row_flags + first * flags_per_rank * 8,
        flags_per_rank=flags_per_rank,
        regions=regions + first * region_bytes,
        region_bytes=region_bytes,
        shift=shift,
    )


@device_function
def _begin_send(call, context):
    """Epoch of a call that this launch sends; every program calls this once.

    The last program makes it the running epoch, and writes it to `call` for later launches of the
    call. It waits until all programs have read the word before: each adds 1 to a counter behind its
    load. It is the last by its number, so it waits for earlier ones alone.
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


# --- Addresses -----------------------------------------------------------------------------------


@device_function
def region_at(slot, writer):
    """Address of the region of `writer` (scalar or block) in the slot."""
    return slot.regions + writer * slot.region_bytes


@device_function
def count_at(slot, writer, word):
    """Address of word `word` that `writer` sends beside its rows; blocks or scalars."""
    return slot.counts + (tl.cast(writer, tl.int64) * MAX_COUNTS + word) * 8


@device_function
def message_flag(slot, writer):
    """Address of the flag that says: the message of `writer` (scalar or block) is there. A combine
    uses the first of the words for it, in which a dispatch tells its tokens."""
    return count_at(slot, writer, 0)


@device_function
def row_flag(slot, writer, row):
    """Address of the flag that says: row `row` of `writer` is there; blocks or scalars."""
    return slot.row_flags + (writer * slot.flags_per_rank + row) * 8


@device_function
def flag_level(slot):
    """What a flag of the slot is at least, once it is raised."""
    return slot.epoch << COUNT_BITS


@device_function
def pick(values, index):
    """values[index] of a short block [B] of which index (scalar) is one."""
    lanes = tl.arange(0, values.shape[0])
    return tl.sum(tl.where(lanes == index, values, 0), 0)


@device_function
def row_at(address, columns, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointers to `columns` of a row at an address; ALIGNED: to a multiple of 16 bytes."""
    return row_pointers(as_pointer(address, dtype), columns, ALIGNED)


# --- Waits ---------------------------------------------------------------------------------------


@device_function
def note_received(slot, context):
    """Say that this launch receives the call; see `publish_acks`."""
    tl.store(context + PEERS + tl.load(context + NUM_RANKS) + slot.number, slot.epoch)


@device_function
def publish_acks(slot, context, RANKS: tl.constexpr):
    """Tell all ranks which calls this one has received: `done[slot, me]` there. A role of its own
    in each call's send, before all that wait.

    Proof that a slot is not written while it is read: the launch that receives epoch e notes it
    (`note_received`), all of its loads come before its end, and this, in a later launch, after
    that: what the running launch notes of its own call is not told. A writer of epoch e + D waits
    for `done[slot] >= e` (`wait_slot`), so it stores after those loads. That is the whole proof,
    whatever the order in which calls are received.
    """
    numbers = tl.arange(0, MAX_SLOTS)
    real = numbers < tl.load(context + NUM_SLOTS)
    epochs = tl.load(context + PEERS + RANKS + numbers, mask=real, other=0)
    epochs = tl.minimum(epochs, slot.epoch - 1)
    flags = slot.done + (numbers * RANKS + slot.rank) * 8
    ranks = tl.arange(0, slot.shift.shape[0])
    to = flags[:, None] + slot.shift[None, :]
    alive = is_alive(tl.load(context + MASKED), ranks) & (ranks < RANKS)
    publish(to, real[:, None] & alive[None, :], epochs[:, None] << COUNT_BITS)


@device_function
def publish_active_ranks(slot, ranks, context, RANKS: tl.constexpr):
    """Say which ranks, as bits, take part in the call, to all programs of this launch: what
    `wait_active_ranks` returns. The bits are stored before the epoch is released; the next call in
    this slot stores its own in a later launch, so after all reads of these."""
    num_slots = tl.load(context + NUM_SLOTS)
    flag = context + PEERS + RANKS + num_slots + slot.number
    tl.store(flag + num_slots, ranks)
    tl.debug_barrier()
    tl.atomic_xchg(flag, slot.epoch, sem="release", scope="gpu")


@device_function
def wait_active_ranks(slot, context, RANKS: tl.constexpr, PHASE: tl.constexpr):
    """The ranks that `publish_active_ranks` named. Waits for up to two deadlines, as the program
    that publishes them may wait for one itself."""
    num_slots = tl.load(context + NUM_SLOTS)
    flag = context + PEERS + RANKS + num_slots + slot.number
    one = tl.arange(0, 1)
    at, peers = flag.to(tl.int64) + one, one + slot.rank
    _, token = poll(at, one == 0, slot.epoch, peers, context, PHASE, False)
    if token == 0:
        token = wait(at, one == 0, slot.epoch, peers, context, PHASE)
    bits = as_pointer(consume_token((flag + num_slots).to(tl.int64), token), tl.int64)
    return tl.load(bits, mask=token == 1, other=0)


@device_function
def masked_ranks(context):
    """The masked ranks as bits; an atomic gives all threads one answer."""
    zero = tl.full((), 0, tl.int64)
    return tl.atomic_or(context + MASKED, zero, sem="relaxed", scope="gpu")


@device_function
def wait_slot(slot, peers, mask, context, RANKS: tl.constexpr, SHRINK: tl.constexpr):
    """Wait until `peers` (block) have received what the slot held before. Returns which of `peers`
    under `mask` may be written to; see `publish_acks`."""
    flags = slot.done + (slot.number * RANKS + peers) * 8
    before = slot.epoch - tl.load(context + NUM_SLOTS) << COUNT_BITS
    may, _ = wait_ranks(flags, mask, before, peers, context, PHASE_SLOT_FREE, SHRINK)
    return may


@device_function
def wait_ranks(flags, mask, level, peers, context, PHASE: tl.constexpr, SHRINK: tl.constexpr):
    """`lang.wait` for flags of `peers`: (which of those under `mask` are raised, the same to all
    threads: all or, past the deadline, none; their values).

    With SHRINK a rank that is late past the deadline is masked instead, for good, and what masked
    ranks have not raised is just left out; nothing is reported.
    """
    if SHRINK:
        wanted = mask & is_alive(masked_ranks(context), peers)
        values, token = poll(flags, wanted, level, peers, context, PHASE, True)
        if token == 0:
            late = wanted & (values < level)
            bits = tl.where(late, tl.full((), 1, tl.int64) << peers.to(tl.int64), 0)
            lost = tl.reduce(bits, 0, _or)
            tl.atomic_or(context + MASKED, lost, sem="relaxed", scope="gpu")
        there = wanted & is_alive(masked_ranks(context), peers)
    else:
        values, token = poll(flags, mask, level, peers, context, PHASE, False)
        if token == 0:
            late = mask & (values < level)
            lost = tl.max(tl.where(late, peers, 0), 0)
            report_failure(lost, level >> COUNT_BITS, context, PHASE)
        there = mask & (token == 1)
    return there, values


@triton.jit  # the interpreter looks for its `fn`
def _or(a, b):
    return a | b


@device_function
def waiting_times(flags, mask, level, peers, slot, context):
    """int64 ns: how long each flag (of a block) under `mask` lets this program wait, no longer than
    the deadline, for masked `peers` 0. Orders nothing: `wait_ranks` comes behind."""
    pointers = as_pointer(tl.where(mask, flags, slot.done), tl.int64)
    times = tl.zeros_like(flags)
    since = tl.cast(now_ns(), tl.int64)
    timeout = tl.load(context + TIMEOUT_NS)
    late = mask & is_alive(tl.load(context + MASKED), peers)
    late = late & (load_acquire(pointers) < level)
    state = tl.max(late.to(tl.int32), 0)
    while state == 1:
        pause()
        passed = tl.cast(now_ns(), tl.int64) - since
        times = tl.where(late, passed, times)
        late = late & (load_acquire(pointers) < level)
        is_over = (tl.load(context + BROKEN, volatile=True) != 0) | (passed > timeout)
        state = tl.max(tl.where(is_over, 0, late.to(tl.int32)), 0)
    return times
