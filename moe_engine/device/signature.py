"""A call's signature: what it was begun with, which each rank tells all others and compares.

Every call that uses slots begins so, and waits for the signatures of all ranks before its rows are
trusted. A signature, int32 [SIGNATURE_WORDS], stands at the head of its writer's region of the slot
and is published by `count_flags[writer]`, with counts after it where the verb has some. Its fields:
`context.SIGNATURE`. It stays until the slot is free, so a writer that is ahead by a call changes
nothing.
"""

from typing import NamedTuple

import triton.language as tl

from .context import (
    BUFFER,
    NUM_RANKS,
    PHASE_COUNTS,
    PHASE_HANDLE,
    PHASE_SIGNATURE,
    RANK,
    REFUSED,
    REPORT_OURS,
    REPORT_THEIRS,
    SIGNATURE_WORDS,
)
from .lang import (
    as_pointer,
    consume_token,
    current_epoch,
    device_function,
    notify,
    poll,
    put,
    report_failure,
    report_pointer,
    symm_at,
)
from .slots import count_flag, is_near, region, wait_slot_free


class RowShape(NamedTuple):
    """What ranks compare of the rows of a call."""

    payload_bytes: tl.tensor
    num_topk: tl.tensor
    item_bytes: tl.tensor
    num_scales: tl.tensor
    max_tokens: tl.tensor = 0  # of a rank in a low-latency call


@device_function
def with_max_tokens(shape, max_tokens):
    """The same rows, in a low-latency call of up to so many tokens of a rank. Kernels get that
    number by itself: as a part of a tuple it would be a constant where it is 1, and need another
    kernel where 16 divides it."""
    # fmt: off
    return RowShape(
        shape.payload_bytes, shape.num_topk, shape.item_bytes, shape.num_scales, max_tokens
    )
    # fmt: on


@device_function
def signature_of(
    kind,
    shape,
    num_experts,
    dispatch_stages,
    combine_stages,
    form,
    dispatched,
    saved,
    caller,
    context,
):
    """The signature of a call with rows of a `RowShape`. form: see `launch.form_of`; ranks compare
    the alignment of rows by expert alone. dispatched: the low half of the epoch of the dispatch
    whose handle the call has, or of the call itself. saved: see `SAVE_POLICIES`. caller: see
    `callers.Callers`."""
    buffer = tl.load(context + BUFFER).to(tl.int32)
    refused = tl.load(context + REFUSED).to(tl.int32)
    # fmt: off
    values = (
        kind, shape.payload_bytes, shape.num_topk, num_experts, shape.item_bytes, shape.num_scales,
        dispatch_stages, combine_stages, form & 1, dispatched, buffer, saved, shape.max_tokens,
        (form >> 2) * (form >> 1 & 1), caller, refused,
    )
    # fmt: on
    field = tl.arange(0, SIGNATURE_WORDS)
    signature = tl.zeros_like(field)
    for number in tl.static_range(len(values)):
        signature = tl.where(field == number, values[number], signature)
    return signature


@device_function
def sent_signature(context):
    """The signature that an earlier launch of this call has stored on this rank itself. Calls may
    have been refused since, so this launch could not make it anew."""
    own = region(tl.load(context + RANK), context)
    return tl.load(as_pointer(own, tl.int32) + tl.arange(0, SIGNATURE_WORDS))


@device_function
def own_call(context):
    """The low half of the running epoch, for a dispatch's signature."""
    return current_epoch(context).to(tl.int32)


@device_function
def put_signature(peers, mask, signature, context):
    """Store the signature on `peers` (block), once the slot is free on them: (the address of this
    rank's region of the slot on each [B]; 1, or 0 where the wait expired). `publish_signature`
    comes after."""
    ready = wait_slot_free(peers, mask, context)
    own = consume_token(region(tl.load(context + RANK), context), ready)
    regions = symm_at(own, tl.where(mask, peers, 0), context)
    field = tl.arange(0, SIGNATURE_WORDS)
    to = as_pointer(regions, tl.int32)[:, None] + field[None, :]
    put(to, signature[None, :], mask[:, None] & (ready == 1))
    return regions, ready


@device_function
def publish_signature(peers, mask, context):
    """Publish what this program has stored in its region of the slot on `peers`."""
    flag = count_flag(tl.load(context + RANK), context)
    notify(peers * 0 + flag, peers, mask, current_epoch(context), context)


@device_function
def wait_signatures(signature, context, RANKS_PAD: tl.constexpr):
    """Wait for the signatures of all ranks and compare them. Returns 1, or 0 where the wait expired
    or one differs, which is reported with both.

    Signatures of other nodes come through ranks of this one, node by node: of those that are late
    the first rank of this node is to blame, and where there is none the first one of all."""
    ranks = tl.arange(0, RANKS_PAD)
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    real = ranks < num_ranks
    flags, epoch = count_flag(ranks, context), current_epoch(context)
    values, ready, _ = poll(flags, real, epoch, ranks, context, PHASE_COUNTS, False)
    if ready == 0:
        order = tl.where(is_near(ranks, context), ranks, num_ranks + ranks)
        blamed = tl.min(tl.where(real & (values < epoch), order, 2 * num_ranks), 0) % num_ranks
        report_failure(blamed, epoch, context, PHASE_COUNTS)
    heads = as_pointer(consume_token(region(ranks, context), ready), tl.int32)
    field = tl.arange(0, SIGNATURE_WORDS)
    theirs = tl.load(heads[:, None] + field[None, :], mask=real[:, None] & (ready == 1), other=0)
    differs = tl.max((theirs != signature[None, :]).to(tl.int32), 1)
    other = tl.max(tl.where(real & (differs == 1) & (ready == 1), ranks, -1), 0)
    if other >= 0:
        found = tl.sum(tl.where((ranks == other)[:, None], theirs, 0), 0)
        report = report_pointer(context)
        tl.store(report + REPORT_THEIRS + field, found.to(tl.int64))
        tl.store(report + REPORT_OURS + field, signature.to(tl.int64))
        report_failure(other, current_epoch(context), context, PHASE_SIGNATURE)
    return tl.where(other >= 0, 0, ready)


@device_function
def time_signatures(wait_stats, context, RANKS_PAD: tl.constexpr):
    """Add to wait_stats int64 [R] how long each rank's signature lets this program wait, in ns, no
    longer than the deadline. Reports nothing: `wait_signatures` comes next."""
    ranks = tl.arange(0, RANKS_PAD)
    real = ranks < tl.load(context + NUM_RANKS)
    flags, epoch = count_flag(ranks, context), current_epoch(context)
    _, _, times = poll(flags, real, epoch, ranks, context, PHASE_COUNTS, False, TIMED=True)
    times += tl.load(wait_stats + ranks, mask=real, other=0)
    tl.store(wait_stats + ranks, times, mask=real)


@device_function
def open_call(kind, shape, dispatched, is_sound, context, RANKS_PAD: tl.constexpr):
    """Begin a call that has a handle: exchange signatures with all ranks. One program calls this.

    shape: the `RowShape`; dispatched: the signature in the handle, which must be of this Buffer;
    is_sound: whether the handle's counts can be true. A handle that is refused is reported after
    the others were told of a call that none of them makes, so that they do not wait for its rows.
    """
    ranks = tl.arange(0, RANKS_PAD)
    real = ranks < tl.load(context + NUM_RANKS)
    signature, is_ours = signature_of_handle(kind, shape, dispatched, is_sound, context)
    _, ready = put_signature(ranks, real, signature, context)
    publish_signature(ranks, real & (ready == 1), context)
    if is_ours:
        wait_signatures(signature, context, RANKS_PAD)
    else:
        refuse_handle(context)


@device_function
def signature_of_handle(kind, shape, dispatched, is_sound, context):
    """(the signature of a call with a handle, whether the handle is one of this Buffer); see
    `open_call`."""
    is_ours = is_sound & (tl.load(dispatched + 10) == tl.load(context + BUFFER).to(tl.int32))
    # fmt: off
    signature = signature_of(
        tl.where(is_ours, kind, 0), shape, tl.load(dispatched + 3), 0, 0, 0,
        tl.load(dispatched + 9), 0, tl.load(dispatched + 14), context,
    )
    # fmt: on
    return signature, is_ours


@device_function
def refuse_handle(context):
    """Report a handle that is not of this Buffer."""
    rank = tl.load(context + RANK).to(tl.int32)
    report_failure(rank, current_epoch(context), context, PHASE_HANDLE)
