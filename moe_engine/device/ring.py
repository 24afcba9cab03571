"""A call's slot as laid out by `symm/ring.py`: its flags and regions, and how programs begin."""

from typing import Any, NamedTuple

import triton
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
    OWN,
    PEERS,
    PHASE_SLOT_FREE,
    RANK,
    REFUSED,
    REGION_BYTES,
    SLOTS,
    STARTED,
)
from .lang import (
    as_pointer,
    consume_token,
    device_function,
    is_alive,
    load_acquire,
    poll,
    publish,
    report_failure,
    row_pointers,
    wait,
)
from .programs import pdl_wait
from .ptx import pause

COUNT_BITS = tl.constexpr(16)
"""A flag has so many bits below the epoch, for data that arrives with it, such as a count."""
COUNT_MASK = tl.constexpr(0xFFFF)
MAX_COUNTS = tl.constexpr(1024)
"""Values with flags (as NCCL's LL: 8 bytes hold both) that a rank sends another one in a call:
FIELDS of the call, then a count for each expert of the other rank."""
FIELDS = tl.constexpr(16)
"""Values that say what a call was begun with; see `call_fields`."""
EPOCH_BITS = tl.constexpr(48)
EPOCH_MASK = tl.constexpr((1 << 48) - 1)
"""The low bits of `call`, see `open_slot`, which hold its epoch."""
MAX_SLOTS = tl.constexpr(16)
"""Slots of a ring."""


class CallConfig(NamedTuple):
    """What a low-latency kernel is compiled for; `constants` of these are its argument CONFIG."""

    NUM_TOPK: Any
    ALIGNED: Any  # whether rows have a multiple of 16 bytes
    RANKS: Any
    EXPERTS: Any  # of each rank
    BLOCK: Any  # columns, padded
    SHRINK: Any  # whether ranks that are late are masked
    FORMAT: Any  # of a dispatch's rows, see `low_latency_dispatch_kernel`; None in a combine
    VEC: Any  # the type in which rows are moved
    KIND: Any  # `context.Kind`
    NUM_EXPERTS: Any  # of all ranks
    K_PAD: Any  # NUM_TOPK, padded
    ENTRY: Any  # int32 values that `returns` has for a token
    BLOCK_M: Any = 0  # rows of a tile of the product that a dispatch cuts them for; 0: none


class Rows(NamedTuple):
    """How the rows of a call lie in a region: after header_bytes, row_bytes apart. A row has
    num_vecs of `CallConfig.VEC` and, trailer bytes from its beginning, its trailer, which is empty
    in a combine."""

    num_vecs: tl.tensor
    header_bytes: tl.tensor
    trailer: tl.tensor
    row_bytes: tl.tensor


class Slot(NamedTuple):
    """What a program knows of its call and of the call's slot, read at once: after each wait,
    memory would have to be asked anew. Addresses are this rank's; adding `shift` gives the same
    address on other ranks."""

    context: tl.tensor
    max_tokens: tl.tensor  # of each rank in this call, so most rows of a region
    caller: tl.tensor  # see `callers.Callers`; 0 in a combine
    refused: tl.tensor  # `ContextField.REFUSED` when the call was sent
    rows: tl.tensor  # `Rows`
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


@device_function
def open_slot(
    call,
    context,
    max_tokens,
    caller,
    rows,
    CONFIG: tl.constexpr,
    SENDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The slot of a call: of one that this launch SENDS, see `_begin_send`, or of the one that
    `call`, int64 [1], holds: its epoch and, above it, what `Slot.refused` was then, as more may
    have been refused since. A call that is one launch may have none.

    Before `programs.pdl_wait` it reads only what the host wrote once into the context; no kernel
    changes that, so it does not matter which launch came before.
    """
    ranks = tl.arange(0, triton.next_power_of_2(CONFIG.RANKS))
    rank = tl.load(context + RANK).to(tl.int32)
    num_slots = tl.load(context + NUM_SLOTS)
    own = tl.load(context + OWN)
    shift = tl.load(context + PEERS + ranks, mask=ranks < CONFIG.RANKS, other=0) - own
    done = own + tl.load(context + DONE)
    counts = own + tl.load(context + COUNT_FLAGS)
    row_flags = own + tl.load(context + CHUNK_FLAGS)
    flags_per_rank = tl.load(context + MAX_CHUNKS)
    regions = own + tl.load(context + SLOTS)
    region_bytes = tl.load(context + REGION_BYTES)
    pdl_wait(PDL)
    if SENDS:
        refused = tl.load(context + REFUSED)
        epoch = _begin_send(call, refused, context)
    else:
        sent = tl.load(call)
        epoch, refused = sent & EPOCH_MASK, sent >> EPOCH_BITS
    number = epoch % num_slots
    first = number * CONFIG.RANKS
    return Slot(
        context=context,
        max_tokens=max_tokens,
        caller=caller,
        refused=refused.to(tl.int32),
        rows=rows,
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
def _begin_send(call, refused, context):
    """Epoch of a call that this launch sends; every program calls this once.

    The last program makes it the running epoch, and writes it and `refused` to `call`, if there is
    one, for later launches of the call. Before, it waits until all programs have read the old
    epoch: each adds 1 to a counter after its load. It is the last by its number, so it waits only
    for programs that began earlier. These have a place on the chip and wait for nothing before they
    add: so the loop, unlike that of `lang.poll`, needs no deadline and no report.
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
        if call is not None:
            tl.store(call, epoch | (refused << EPOCH_BITS))
    return epoch


# --- Addresses -----------------------------------------------------------------------------------


@device_function
def region_at(slot, writer):
    """Address of the region of `writer` (scalar or block) in the slot."""
    return slot.regions + writer * slot.region_bytes


@device_function
def row_at(slot, writer, token_idx):
    """Address of the row of a token in the region of its `writer`; scalars or blocks."""
    first = region_at(slot, writer) + slot.rows.header_bytes
    return first + tl.cast(token_idx, tl.int64) * slot.rows.row_bytes


@device_function
def count_at(slot, writer, index):
    """Address of value number `index` of the MAX_COUNTS that `writer` sends; blocks or scalars."""
    return slot.counts + (tl.cast(writer, tl.int64) * MAX_COUNTS + index) * 8


@device_function
def header_flag(slot, writer):
    """Address of the flag that says: the header of `writer` (scalar or block) has arrived. A
    combine uses the first of the values for it, in which a dispatch sends its number of tokens."""
    return count_at(slot, writer, 0)


@device_function
def row_flag(slot, writer, token_idx):
    """Address of the flag that says: the row of a token of `writer` has arrived; blocks or
    scalars."""
    return slot.row_flags + (writer * slot.flags_per_rank + token_idx) * 8


@device_function
def flag_level(slot):
    """What a flag of the slot is at least, once it is raised."""
    return slot.epoch << COUNT_BITS


@device_function
def pick(values, index):
    """values[index] of a short block [B] of which index (scalar) is one."""
    positions = tl.arange(0, values.shape[0])
    return tl.sum(tl.where(positions == index, values, 0), 0)


@device_function
def columns_at(address, columns, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointers to `columns` of a row at an address; ALIGNED: to a multiple of 16 bytes."""
    return row_pointers(as_pointer(address, dtype), columns, ALIGNED)


# --- Waits ---------------------------------------------------------------------------------------


@device_function
def note_received(slot):
    """Note that this launch receives the call; see `publish_acks`."""
    context = slot.context
    tl.store(context + PEERS + tl.load(context + NUM_RANKS) + slot.number, slot.epoch)


@device_function
def publish_acks(slot, CONFIG: tl.constexpr):
    """Tell all ranks which calls this one has received, in `done[slot, me]` on each of them. This
    is a role of its own in each call's send, before all roles that wait.

    Proof that a slot is not written while it is read: the launch that receives epoch e notes it
    (`note_received`). All of its loads come before its end, and this, in a later launch, comes
    after its end: what the running launch notes of its own call is not published. A writer of epoch
    e + D waits for `done[slot] >= e` (`wait_slot`), so it stores after those loads. That is the
    whole proof, whatever the order in which calls are received.
    """
    context = slot.context
    numbers = tl.arange(0, MAX_SLOTS)
    real = numbers < tl.load(context + NUM_SLOTS)
    epochs = tl.load(context + PEERS + CONFIG.RANKS + numbers, mask=real, other=0)
    epochs = tl.minimum(epochs, slot.epoch - 1)
    flags = slot.done + (numbers * CONFIG.RANKS + slot.rank) * 8
    ranks = tl.arange(0, slot.shift.shape[0])
    to = flags[:, None] + slot.shift[None, :]
    alive = is_alive(tl.load(context + MASKED), ranks) & (ranks < CONFIG.RANKS)
    publish(to, real[:, None] & alive[None, :], epochs[:, None] << COUNT_BITS)


@device_function
def _active_ranks(slot, CONFIG: tl.constexpr):
    """(pointer to the flag of the slot's active ranks, pointer to these, as bits)"""
    num_slots = tl.load(slot.context + NUM_SLOTS)
    flag = slot.context + PEERS + CONFIG.RANKS + num_slots + slot.number
    return flag, flag + num_slots


@device_function
def publish_active_ranks(slot, ranks, CONFIG: tl.constexpr):
    """Tell all programs of this launch which ranks, as bits, take part in the call; these get them
    from `wait_active_ranks`. The bits are stored before the epoch is released; the next call in
    this slot stores its own in a later launch, so after all reads of these."""
    flag, bits = _active_ranks(slot, CONFIG)
    tl.store(bits, ranks)
    tl.debug_barrier()
    tl.atomic_xchg(flag, slot.epoch, sem="release", scope="gpu")


@device_function
def wait_active_ranks(slot, CONFIG: tl.constexpr, PHASE: tl.constexpr):
    """The ranks that `publish_active_ranks` named. Waits for up to two deadlines, as the program
    that publishes them may wait for one itself."""
    flag, bits = _active_ranks(slot, CONFIG)
    one = tl.arange(0, 1)
    at, peers = flag.to(tl.int64) + one, one + slot.rank
    _, ready, _ = poll(at, one == 0, slot.epoch, peers, slot.context, PHASE, False)
    if ready == 0:
        ready = wait(at, one == 0, slot.epoch, peers, slot.context, PHASE)
    bits = as_pointer(consume_token(bits.to(tl.int64), ready), tl.int64)
    return tl.load(bits, mask=ready == 1, other=0)


@device_function
def masked_ranks(context):
    """The masked ranks as bits; an atomic gives all threads one answer."""
    zero = tl.full((), 0, tl.int64)
    return tl.atomic_or(context + MASKED, zero, sem="relaxed", scope="gpu")


@device_function
def wait_slot(slot, peers, mask, CONFIG: tl.constexpr):
    """Wait until `peers` (block) have received what the slot held before. Returns which of `peers`
    under `mask` may be written to; see `publish_acks`."""
    flags = slot.done + (slot.number * CONFIG.RANKS + peers) * 8
    before = slot.epoch - tl.load(slot.context + NUM_SLOTS) << COUNT_BITS
    may, _ = wait_ranks(flags, mask, before, peers, slot, PHASE_SLOT_FREE, CONFIG)
    return may


@device_function
def wait_ranks(flags, mask, level, peers, slot, PHASE: tl.constexpr, CONFIG: tl.constexpr):
    """`lang.wait` for flags of `peers`: (which of those under `mask` are raised, the same to all
    threads: all or, past the deadline, none; their values).

    With SHRINK a rank that is late past the deadline is masked instead, for good, and what masked
    ranks have not raised is just left out; nothing is reported.
    """
    context = slot.context
    if CONFIG.SHRINK:
        wanted = mask & is_alive(masked_ranks(context), peers)
        values, ready, _ = poll(flags, wanted, level, peers, context, PHASE, True)
        if ready == 0:
            late = wanted & (values < level)
            bits = tl.where(late, tl.full((), 1, tl.int64) << peers.to(tl.int64), 0)
            lost = tl.reduce(bits, 0, _or)
            tl.atomic_or(context + MASKED, lost, sem="relaxed", scope="gpu")
        raised = wanted & is_alive(masked_ranks(context), peers)
    else:
        values, ready, _ = poll(flags, mask, level, peers, context, PHASE, False)
        if ready == 0:
            late = mask & (values < level)
            lost = tl.max(tl.where(late, peers, 0), 0)
            report_failure(lost, level >> COUNT_BITS, context, PHASE)
        raised = mask & (ready == 1)
    return raised, values


@triton.jit  # the interpreter looks for its `fn`
def _or(a, b):
    return a | b


@device_function
def load_flags(flags, mask, slot):
    """The values of flags (block of addresses) under `mask`, once more after a wait for them."""
    return load_acquire(as_pointer(tl.where(mask, flags, slot.done), tl.int64))


@device_function
def time_ranks(flags, mask, peers, slot, PHASE: tl.constexpr):
    """int64 ns: how long each flag (of a block) under `mask` lets this program wait, no longer than
    the deadline, for masked `peers` 0. Reports nothing: `wait_ranks` comes next."""
    mask = mask & is_alive(tl.load(slot.context + MASKED), peers)
    level = flag_level(slot)
    _, _, times = poll(flags, mask, level, peers, slot.context, PHASE, False, TIMED=True)
    return times
