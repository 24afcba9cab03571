"""How the programs of a call share its work, overlap with the next launch, and end the call."""

import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .context import CLAIMED, DONE, EPOCH, FINISHED, NODE_RANKS, PUSHED, RANK
from .lang import (
    current_epoch,
    device_function,
    drain_tma_stores,
    is_broken,
    notify,
    own_block,
    report_abandoned,
)

# --- Sharing a call's work ---------------------------------------------------------------------


@device_function
def claim(context):
    """The index of the next piece of work of this call: 0, 1, ..., each given out once."""
    one = tl.full((), 1, tl.int64)
    return tl.atomic_add(context + CLAIMED, one, sem="relaxed", scope="gpu").to(tl.int32)


@device_function
def claim_next(num_push_programs, context):
    """`claim` for a program that works while `num_push_programs` others push: MAX_INT once all of
    them have ended. With num_push_programs 0 it is `claim`."""
    work_idx = tl.full((), 0x7FFFFFFF, tl.int32)
    if num_push_programs == 0:
        work_idx = claim(context)
    elif is_pushing(num_push_programs, context):
        work_idx = claim(context)
    return work_idx


@device_function
def end_push(context):
    """Say that this program has pushed its share; see `is_pushing`."""
    tl.debug_barrier()
    one = tl.full((), 1, tl.int64)
    tl.atomic_add(context + PUSHED, one, sem="relaxed", scope="gpu")


@device_function
def is_pushing(num_programs, context):
    """Whether any of the `num_programs` that push still does; all threads get one answer."""
    zero = tl.full((), 0, tl.int64)
    pushed = tl.atomic_add(context + PUSHED, zero, sem="relaxed", scope="gpu")
    return (pushed < num_programs) & (is_broken(context) == 0)


@device_function
def arrive(counter):
    """Add 1 to an int64 counter of this GPU. All that this program has stored, or seen by a wait,
    happens before that is seen: a barrier gathers its threads, then the add releases."""
    tl.debug_barrier()
    one = tl.cast(1, tl.int64)
    tl.atomic_add(counter, one, sem="release", scope="gpu")


@device_function
def arrive_after_tma(counters, mask, TMA: tl.constexpr):
    """Add 1 to int64 counters (a block of pointers on this GPU) under `mask`. Every store of this
    program happens before that is seen by a `lang.wait` for a counter: TMA stores, where the GPU
    has them, are drained and fenced, then the barrier gathers all threads, and the add releases."""
    if TMA:
        drain_tma_stores(BARRIER=True)
    else:
        tl.debug_barrier()
    tl.atomic_add(counters, mask.to(tl.int64), mask=mask, sem="release", scope="gpu")


# --- Overlapping launches ----------------------------------------------------------------------


@device_function
def pdl_launch_dependents(PDL: tl.constexpr):
    """Let a PDL launch after this one begin once all programs of this one have called this.

    All of them are then resident on the chip, so the next launch may wait for them. Until its
    `pdl_wait` the next launch may read what was complete before this launch, or what all programs
    of this one have waited for before they called this; of what this one writes, only what flags
    guard.
    """
    if PDL:
        gdc_launch_dependents()


@device_function
def pdl_wait(PDL: tl.constexpr):
    """In a PDL launch: wait until the launch before it has ended and its stores are visible. Some
    program does so before it ends, so that what runs after this launch runs after that one too."""
    if PDL:
        gdc_wait()


# --- End of a call ---------------------------------------------------------------------------


@device_function
def is_last(counter, num_programs):
    """True in the one of `num_programs` programs that arrives here last, each of them once; the
    int64 counter, on this GPU, began at 0.

    What the others did before arriving happens before what the last one does next: each program
    passes a barrier and then one acquire-release add on the counter.
    """
    tl.debug_barrier()
    one = tl.full((), 1, tl.int64)
    return tl.atomic_add(counter, one, sem="acq_rel", scope="gpu") == num_programs - 1


@device_function
def is_last_program(context):
    """`is_last` of all programs of a launch, each of which must arrive once."""
    last = is_last(context + FINISHED, tl.num_programs(0))
    if last:
        tl.store(context + FINISHED, 0)
    return last


@device_function
def end_call(context):
    """The end of each program of a call's last launch: the last one to arrive finishes the call.
    Where this rank's calls have ended, the host is told, if nothing has told it."""
    if is_broken(context):
        report_abandoned(context)
    elif is_last_program(context):
        finish_call(context)


@device_function
def finish_call(context):
    """Release the call's slot to its writers and make its epoch the last finished one.

    Raises `done[me]` to the epoch on every rank of the node. A writer of epoch e waits for
    `done >= e - D` from its destination (`device.slots.wait_slot_free`), and flags only grow: so
    the loads of epoch e - D, which come before this call's `is_last_program`, happen before the
    stores of epoch e. That is the whole proof that a slot is never overwritten while it is read.
    Ranks of other nodes are told by `internode.release_rails`.

    One program calls this, after `is_last_program` or alone in its launch.
    """
    epoch = current_epoch(context)
    done = own_block(context) + tl.load(context + DONE) + tl.load(context + RANK) * 8
    node_ranks = tl.load(context + NODE_RANKS).to(tl.int32)
    first_near = tl.load(context + RANK).to(tl.int32) // node_ranks * node_ranks
    for first in range(0, node_ranks, 8):
        place = first + tl.arange(0, 8)
        notify(done, first_near + place, place < node_ranks, epoch, context)
    tl.store(context + CLAIMED, 0)
    tl.store(context + PUSHED, 0)
    tl.store(context + EPOCH, epoch)
