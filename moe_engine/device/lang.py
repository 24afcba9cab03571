"""The device language: addresses on other ranks, signals, bounded waits, and exact arithmetic.

Names and semantics follow Triton-distributed (`symm_at`, `notify`, `wait`, `consume_token`), in
stock Triton. A kernel gets one `context` pointer (int64 fields, see `ContextField`); from it
come the rank, the peers' addresses, the epoch and the deadline, so that nothing about a call is
frozen into a captured graph. Every write to another rank of this node goes through `put`,
`put_rows`, `put_ll`, `notify` or `publish`; ranks of other nodes are reached by `network.py`.

A flag is an int64 that only grows; it is raised to the epoch of a call (in low-latency calls: to
the epoch and some bits below it) and never reset.
What is inline PTX on the GPU stands in `ptx.py`, with twins for the CPU interpreter, whose bf16
arithmetic is wrong otherwise.
"""

import triton.language as tl

from .context import (
    BROKEN,
    EPOCH,
    MASKED,
    PACE,
    PEERS,
    PHASE_ABANDONED,
    RANK,
    REPORT,
    TIMEOUT_NS,
    TRACE,
)
from .ptx import INTERPRETED as INTERPRETED
from .ptx import TRACING as TRACING
from .ptx import (
    any_thread,
    fence_tma_loads,
    load_acquire,
    pause_while,
    poll_inline,
    store_ll,
    write_span,
)
from .ptx import as_pointer as as_pointer
from .ptx import consume_token as consume_token
from .ptx import count_inline as count_inline
from .ptx import device_function as device_function
from .ptx import drain_tma_stores as drain_tma_stores
from .ptx import in_order as in_order
from .ptx import known_here as known_here
from .ptx import now_ns as now_ns
from .ptx import ticks as ticks

# --- Context ---------------------------------------------------------------------------------


@device_function
def current_epoch(context):
    """Epoch of the running call. Every kernel of a call reads the same value, as only the last
    program of its last kernel advances the field (`finish_call`)."""
    return tl.load(context + EPOCH) + 1


@device_function
def is_broken(context):
    """Whether a wait of this rank has expired; a kernel that sees it returns at once.

    An atomic, as one thread makes it and all threads get its answer: loads could give warps
    different values.
    """
    zero = tl.full((), 0, tl.int64)
    return tl.atomic_add(context + BROKEN, zero, sem="relaxed", scope="gpu") != 0


@device_function
def symm_at(address, rank, context):
    """Address on `rank` of the thing at `address` in this rank's symmetric block.

    `address` is int64 (scalar or block) and so is the result: 4 ranks whose blocks lie at
    [0x1000, 0x5000, 0x9000, 0xd000], seen from rank 1: symm_at(0x5040, 3) = 0xd040.
    """
    own = tl.load(context + PEERS + tl.load(context + RANK))
    return address - own + tl.load(context + PEERS + rank)


@device_function
def own_block(context):
    """Address of this rank's symmetric block."""
    return tl.load(context + PEERS + tl.load(context + RANK))


# --- Spans of a trace ------------------------------------------------------------------------


if TRACING:

    @device_function
    def begin_span():
        """The time, int64 ns, for `end_span`; without tracing 0, and neither leaves any code."""
        return tl.cast(now_ns(), tl.int64)

    @device_function
    def end_span(role, item, since, context):
        """Record that this program spent the time since `since` on `item` of a role (`context.Role`
        or, for a wait, `context.Phase`). Returns the end, at which its next span may begin."""
        return write_span(tl.load(context + TRACE), role, item, since)

else:

    @device_function
    def begin_span():
        """The time, int64 ns, for `end_span`; without tracing 0, and neither leaves any code."""
        return tl.cast(0, tl.int64)

    @device_function
    def end_span(role, item, since, context):
        """Record that this program spent the time since `since` on `item` of a role (`context.Role`
        or, for a wait, `context.Phase`). Returns the end, at which its next span may begin."""
        return since


# --- Rows ------------------------------------------------------------------------------------


@device_function
def put(to, values, mask):
    """Store `values` through pointers to any rank. Nothing is published before a `notify`."""
    tl.store(to, values, mask=mask)


@device_function
def put_ll(to, values, mask):
    """Store int64 values through pointers to any rank, where they are polled. Each holds data with
    its flag (as NCCL's LL): it orders nothing else, and waits for nothing stored before."""
    store_ll(to, values, mask)


@device_function
def row_mask(columns, num_columns, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """`columns < num_columns`. ALIGNED promises rows of a multiple of 16 bytes: the mask then
    changes only at such multiples; without that, accesses would be as narrow as one item."""
    inside = columns < num_columns
    if ALIGNED:
        inside = tl.max_constancy(inside, 128 // dtype.primitive_bitwidth)
    return inside


@device_function
def row_pointers(rows, columns, ALIGNED: tl.constexpr):
    """Pointers to `columns` [C] of `rows`: [B, C] for a block [B] of pointers, [C] for one pointer.

    ALIGNED promises that rows start at multiples of 16 bytes. The hint must stand on this sum: on
    an argument of a function it would be lost.
    """
    if len(rows.shape) == 0:
        pointers = rows + columns
        if ALIGNED:
            pointers = tl.multiple_of(pointers, 16)
    else:
        pointers = rows[:, None] + columns[None, :]
        if ALIGNED:
            pointers = tl.multiple_of(pointers, [16, 16])
    return pointers


@device_function
def pacing_interval(num_bytes, num_parts, all_parts, context):
    """Time in `ticks` that a program should take to send `num_bytes`, if its share of what leaves
    this GPU is num_parts of all_parts. A link that is offered more than it carries loses some of
    it to queueing."""
    time = tl.cast(num_bytes, tl.int64) * all_parts * tl.load(context + PACE) // 1024000
    return (time // num_parts).to(tl.int32)


@device_function
def stagger(num_bytes, program, context):
    """When in `ticks` a program begins, each of them after the one before by the time that the
    link takes for `num_bytes`."""
    return ticks() + pacing_interval(num_bytes, 1, program, context)


FARTHEST_TURN = tl.constexpr(1 << 27)
"""In `ticks`, 134 ms: no turn is farther ahead."""


@device_function
def pace(due, step):
    """Wait until the time `due`, in `ticks`. Returns that of the next turn."""
    now = ticks()
    # Else the clock has gone halfway round since `due`, as a peer was late.
    due = tl.where(due - now > FARTHEST_TURN, now, due)
    while ticks() - due < 0:
        pass
    return due + step


@device_function
def put_rows(
    to,
    source,
    num_vecs,
    mask,
    due,
    step,
    ALIGNED: tl.constexpr,
    BLOCK_VECS: tl.constexpr,
    TAIL_VECS: tl.constexpr = 0,
):
    """Copy rows of `num_vecs` vectors from `source` to `to`, blocks of row pointers of one type.

    Rows are opaque vectors (int32, int16 or int8), so that a new number format needs no new kernel.
    `ALIGNED` promises that every row is a multiple of 16 bytes and starts at one, without which
    one vector is stored at a time. Plain stores: nothing is published before the next `notify`.
    The first BLOCK_VECS of the rows are not stored before the time `due`, in `ticks`, each further
    block `step` later, a part of a block in proportion. Returns when the next block is due.
    TAIL_VECS, at least as many as a last block has, is for few: these are loaded first, so that
    they take no time of their own, and are not paced.
    """
    end = num_vecs
    if TAIL_VECS > 0:
        end = num_vecs // BLOCK_VECS * BLOCK_VECS
        tail = end + tl.arange(0, TAIL_VECS)
        in_tail = mask[:, None] & row_mask(tail, num_vecs, to.dtype.element_ty, ALIGNED)[None, :]
        last = tl.load(row_pointers(source, tail, ALIGNED), mask=in_tail)
    for start in range(0, end, BLOCK_VECS):
        vecs = start + tl.arange(0, BLOCK_VECS)
        inside = mask[:, None] & row_mask(vecs, num_vecs, to.dtype.element_ty, ALIGNED)[None, :]
        values = tl.load(row_pointers(source, vecs, ALIGNED), mask=inside)
        due = pace(due, step * tl.minimum(num_vecs - start, BLOCK_VECS) // BLOCK_VECS)
        put(row_pointers(to, vecs, ALIGNED), values, inside)
    if TAIL_VECS > 0:
        put(row_pointers(to, tail, ALIGNED), last, in_tail)
    return due


# --- Signals ---------------------------------------------------------------------------------


@device_function
def notify(flags, ranks, mask, epoch, context, AFTER_TMA: tl.constexpr = False):
    """Raise `flags` (addresses in this rank's block) to `epoch` on `ranks`, where `mask` is set.

    `ranks` and `mask` are blocks; a thread raises one flag. Publish: every store of this program,
    to any rank, happens before a `wait` on that rank sees a flag raised: the threads' stores (and,
    with AFTER_TMA, their TMA stores, drained and fenced first) come before the CTA barrier, and
    each raising thread then releases at system scope.
    """
    if AFTER_TMA:
        drain_tma_stores()
    publish(symm_at(flags, tl.where(mask, ranks, 0), context), mask, epoch)


@device_function
def publish(flags, mask, epoch):
    """`notify` for flags whose addresses (a block) on other ranks are known."""
    tl.debug_barrier()
    epochs = tl.zeros_like(flags) + epoch
    tl.atomic_xchg(as_pointer(flags, tl.int64), epochs, mask=mask, sem="release", scope="sys")


@device_function
def wait(flags, mask, epoch, peers, context, PHASE: tl.constexpr, BEFORE_TMA: tl.constexpr = False):
    """Wait until every flag (block of own addresses) under `mask` is at least `epoch`.

    Returns a token, the same to all threads: 1, or 0 when flags were late and the deadline passed,
    here or in an earlier wait; what the flags guard must then not be touched. `peers` names, flag
    by flag, the rank to blame.

    Observe: all threads poll with acquire loads at system scope, then meet at a CTA barrier, so
    what each flag's writer did before its `notify` happens before every later load of the program
    (with BEFORE_TMA, before its TMA loads too). The compiler keeps loads after the wait when
    their address went through `consume_token`. `>=`, not `==`: a fast peer may be a call ahead.
    """
    values, token, _ = poll(flags, mask, epoch, peers, context, PHASE, False)
    if token == 0:
        late = mask & (values < epoch)
        report_failure(tl.max(tl.where(late, peers, 0), 0), epoch, context, PHASE)
    if BEFORE_TMA:
        fence_tma_loads()
    return token


@device_function
def poll(
    flags,
    mask,
    epoch,
    peers,
    context,
    PHASE: tl.constexpr,
    SHRINK: tl.constexpr,
    TIMED: tl.constexpr = False,
):
    """The loop of `wait`, which reports nothing: (the flags as this thread saw them last, token,
    with TIMED how many ns each flag was late, else zeros). With SHRINK nothing is expected of
    `peers` that are masked meanwhile.

    Where several warps hold a flag, one of them decides: others may have seen it late.

    All waits with a deadline share this loop but `wait_inline`, which must not branch.
    """
    since = begin_span()
    pointers = as_pointer(tl.where(mask, flags, own_block(context)), tl.int64)
    times = tl.zeros_like(flags)
    values = load_acquire(pointers)
    late = mask & (values < epoch)
    state = tl.max(late.to(tl.int32), 0)  # 0: none is late; 1: some are; 2: some are past waiting
    begin = now_ns()
    deadline = begin + tl.load(context + TIMEOUT_NS)
    while state == 1:
        pause_while(pointers, values)
        if TIMED:
            times = tl.where(late, tl.cast(now_ns(), tl.int64) - begin, times)
        values = load_acquire(pointers)
        late = mask & (values < epoch)
        if SHRINK:
            late = late & is_alive(tl.load(context + MASKED, volatile=True), peers)
        is_over = (tl.load(context + BROKEN, volatile=True) != 0) | (now_ns() > deadline)
        state = tl.max(tl.where(late, tl.where(is_over, 2, 1), 0), 0)
    # Warps poll on their own and leave the loop one by one; the barrier gives them one answer.
    token = 1 - any_thread(state)
    tl.debug_barrier()  # again, as the compiler does not see that one
    end_span(PHASE, 0, since, context)
    return values, token, times


@device_function
def is_alive(masked, ranks):
    """Whether `ranks` (block) are not among the bits `masked`."""
    return (masked >> ranks.to(tl.int64)) & 1 == 0


@device_function
def wait_inline(counter, value, is_known, deadline, context, BEFORE_TMA: tl.constexpr):
    """Wait until an int64 counter, a pointer, is at least `value`, or not at all if this program
    has waited for that already (`is_known`). Returns 0, which the compiler does not know: added to
    an address it keeps loads after the wait.

    It is for loops that are pipelined, which a branch would prevent; so it cannot share the loop of
    `poll`, and reports no failure: when `deadline` (ns) has passed or this rank is broken it ends
    as well, and rows that have not arrived are read as they are. The caller asks after the loop
    (`tiles.end_wait_tile`), and until then writes nothing that another rank reads. It acquires
    at the scope of this GPU, in each warp for itself: so for counters of this GPU alone.
    """
    broken = (context + BROKEN).to(tl.int64)
    value = tl.cast(value, tl.int64)
    is_known = tl.cast(is_known, tl.int32)
    return poll_inline(counter.to(tl.int64), value, is_known, deadline, broken, BEFORE_TMA)


@device_function
def report_failure(peer, epoch, context, PHASE: tl.constexpr):
    """Tell the host what failed first on this rank, and every later wait to give up. Where a peer
    has abandoned a call, that is what failed first."""
    one = tl.full((), 1, tl.int64)
    before = tl.atomic_or(context + BROKEN, one, sem="relaxed", scope="gpu")
    if before & 1 == 0:
        report = report_pointer(context)
        phase = tl.where(before == 0, PHASE, PHASE_ABANDONED)
        tl.store(report + 1, peer)
        tl.store(report + 2, phase.to(tl.int64))
        tl.store(report + 3, epoch)
        # A fence for the host, on memory of this GPU: atomics on host memory may not exist.
        zero = tl.full((), 0, tl.int64)
        tl.debug_barrier()
        tl.atomic_add(context + BROKEN, zero, sem="acq_rel", scope="sys")
        tl.store(report, 1)


@device_function
def report_abandoned(context):
    """Tell the host that this rank's calls have ended, if nothing has: only peers know why."""
    report_failure(0, current_epoch(context), context, PHASE_ABANDONED)


@device_function
def report_pointer(context):
    """Pointer to the report in host memory."""
    return as_pointer(tl.load(context + REPORT), tl.int64)


# --- Arithmetic ------------------------------------------------------------------------------


if INTERPRETED:

    @device_function
    def dot(a, b, acc):
        """acc + a @ b in fp32, IEEE products. The interpreter would multiply bf16 bit patterns."""
        return tl.dot(widen(a), widen(b), acc, input_precision="ieee")

    @device_function
    def widen(x):
        """x in fp32. The interpreter reads the NaN of e4m3 as 480, which e4m3 does not have."""
        wide = x.to(tl.float32)
        if x.dtype == tl.float8e4nv:
            wide = tl.where(tl.abs(wide) == 480.0, float("nan"), wide)
        return wide

    @device_function
    def cast_e4m3(x):
        """fp32 values up to 448 to the bits of e4m3, int8, nearest even. The interpreter's own
        differ."""
        size = tl.abs(x)
        exponent = tl.maximum((size.to(tl.int32, bitcast=True) >> 23) - 127, -6)
        # Adding and taking away 1.5 * 2^23 steps rounds to a multiple of the step, as fp32 does.
        step = ((exponent - 3 + 127) << 23).to(tl.float32, bitcast=True)
        magic = step * 12582912.0
        steps = (((size + magic) - magic) / step).to(tl.int32)  # 8 to 16, below 8 if subnormal
        bits = tl.where(steps < 8, steps, ((exponent + 6) << 3) + steps)
        bits = tl.where(x == x, bits, 0x7F)  # NaN
        return (bits | tl.where(x.to(tl.int32, bitcast=True) < 0, 0x80, 0)).to(tl.int8)

    @device_function
    def round_to(x, dtype: tl.constexpr):
        """fp32 to `dtype`, nearest even. The interpreter would truncate bf16."""
        if dtype == tl.bfloat16:
            bits = x.to(tl.int32, bitcast=True)
            nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            quiet_nan = (bits >> 16) | 0x40
            is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
            return tl.where(is_nan, quiet_nan, nearest).to(tl.int16).to(tl.bfloat16, bitcast=True)
        return x.to(dtype)

else:

    @device_function
    def dot(a, b, acc):
        """acc + a @ b in fp32; fp32 operands with IEEE products, never tf32."""
        return tl.dot(a, b, acc, input_precision="ieee")

    @device_function
    def round_to(x, dtype: tl.constexpr):
        """fp32 to `dtype`, nearest even."""
        return x.to(dtype)

    @device_function
    def cast_e4m3(x):
        """fp32 values up to 448 to the bits of e4m3, int8, nearest even."""
        return x.to(tl.float8e4nv).to(tl.int8, bitcast=True)
