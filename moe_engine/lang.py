"""The device language: addresses on other ranks, signals, bounded waits, and exact arithmetic.

Names and semantics follow Triton-distributed (`symm_at`, `notify`, `wait`, `consume_token`), in
stock Triton. A kernel gets one `context` pointer (int64 words, see `context.Word`); from it come
the rank, the peers' addresses, the epoch and the deadline, so that nothing about a call is frozen
into a captured graph. Every write to another rank goes through `put`, `put_rows` or `notify`.

A flag is an int64 that only grows; it is raised to the epoch of a call and never reset.
Each function that is inline PTX on the GPU has a twin for the CPU interpreter
(`TRITON_INTERPRET=1`), whose bf16 arithmetic is wrong otherwise.
"""

import time

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from .context import (
    BROKEN,
    EPOCH,
    PACE,
    PEERS,
    RANK,
    REPORT,
    TIMEOUT_NS,
)

INTERPRETED: bool = triton.knobs.runtime.interpret
"""True when kernels of this process run on the CPU through Triton's interpreter."""


def device_function(function):  # type: ignore[no-untyped-def]
    """`triton.jit` for what kernels call. In the interpreter it is rewritten once, as there
    `triton.jit` would patch Triton's whole language anew at every call: half of the time."""
    if not INTERPRETED:
        return triton.jit(function)
    from triton.runtime.interpreter import InterpretedFunction  # brings numpy

    return InterpretedFunction(function).rewrite()


# --- Context ---------------------------------------------------------------------------------


@device_function
def current_epoch(context):
    """Epoch of the running call. Every kernel of a call reads the same value, as only the last
    program of its last kernel advances the word (`finish_call`)."""
    return tl.load(context + EPOCH) + 1


@device_function
def is_broken(context):
    """Whether a wait of this rank has expired; a kernel that sees it returns at once.

    An atomic, as all threads get its answer from one: loads could tell warps different things.
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


@device_function
def as_pointer(address, dtype: tl.constexpr):
    """A typed pointer from an int64 address (scalar or block)."""
    return address.to(tl.pointer_type(dtype), bitcast=True)


# --- Rows ------------------------------------------------------------------------------------


@device_function
def put(to, values, mask):
    """Store `values` through pointers to any rank. Nothing is published before a `notify`."""
    tl.store(to, values, mask=mask)


@device_function
def row_mask(columns, num_columns, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """`columns < num_columns`. ALIGNED promises rows of a multiple of 16 bytes: the mask then
    changes only there, without which accesses would be as narrow as one item."""
    inside = columns < num_columns
    if ALIGNED:
        inside = tl.max_constancy(inside, 128 // dtype.primitive_bitwidth)
    return inside


@device_function
def row_pointers(rows, columns, ALIGNED: tl.constexpr):
    """Pointers [B, C] to `columns` [C] of `rows`, a block [B] of pointers.

    ALIGNED promises that rows start at multiples of 16 bytes. The hint must stand on this sum: on
    an argument of a function it would be lost.
    """
    pointers = rows[:, None] + columns[None, :]
    if ALIGNED:
        pointers = tl.multiple_of(pointers, [16, 16])
    return pointers


@device_function
def time_to_send(num_bytes, num_parts, all_parts, context):
    """Time in `ticks` that a program should take to send `num_bytes`, if its share of what leaves
    this GPU is num_parts of all_parts. A link that is offered more than it carries loses some of
    it to queueing."""
    time = tl.cast(num_bytes, tl.int64) * all_parts * tl.load(context + PACE) // 1024000
    return (time // num_parts).to(tl.int32)


@device_function
def take_turns(num_bytes, program, context):
    """When in `ticks` a program begins, each of them behind the one before by the time that the
    link takes for `num_bytes`."""
    return ticks() + time_to_send(num_bytes, 1, program, context)


@device_function
def put_rows(
    to, source, num_words, mask, due, step, ALIGNED: tl.constexpr, BLOCK_WORDS: tl.constexpr
):
    """Copy rows of `num_words` words from `source` to `to`, blocks of row pointers of one type.

    Rows are opaque words (int32, int16 or int8), so that a new number format needs no new kernel.
    `ALIGNED` promises that every row is a multiple of 16 bytes and starts at one, without which
    a word is stored at a time. Plain stores: nothing is published before the next `notify`.
    The first BLOCK_WORDS of the rows are not stored before the time `due`, in `ticks`, each further
    block `step` later. Returns when the next block is due.
    """
    for start in range(0, num_words, BLOCK_WORDS):
        words = start + tl.arange(0, BLOCK_WORDS)
        inside = mask[:, None] & row_mask(words, num_words, to.dtype.element_ty, ALIGNED)[None, :]
        values = tl.load(row_pointers(source, words, ALIGNED), mask=inside)
        while ticks() - due < 0:
            pass
        due = due + step
        put(row_pointers(to, words, ALIGNED), values, inside)
    return due


# --- Signals ---------------------------------------------------------------------------------


if INTERPRETED:

    def now_ns():
        """Nanoseconds of a clock that only grows."""
        return time.monotonic_ns()

    @device_function
    def ticks():
        """The clock (ns) as integers of which differences count."""
        return tl.full((), now_ns(), tl.int64)

    def pause():
        """Leave the processor to the ranks that this one waits for: they share few cores."""
        time.sleep(0.0005)

    @device_function
    def load_acquire(flags):
        """Read flags at system scope; what their writers did before raising them is visible."""
        return tl.atomic_add(flags, 0, sem="acquire", scope="sys")

    @device_function
    def any_thread(flag):
        """1 where `flag`, an int32 that threads may see differently, is not 0 in any; a barrier."""
        return tl.minimum(flag, 1)

    @device_function
    def consume_token(value, token):
        """`value`, but not before `token` is known."""
        return value

    @device_function
    def drain_tma_stores(BARRIER: tl.constexpr = False):
        """Wait until this thread's TMA stores are in memory and order them before later signals."""

    @device_function
    def fence_tma_loads():
        """Order earlier acquires before later TMA loads."""

    @device_function
    def poll_inline(flags, last, epoch, deadline, broken, BEFORE_TMA: tl.constexpr):
        """Poll flags 0 .. `last` until none is late; returns 0."""
        pointers = as_pointer(flags + tl.minimum(tl.arange(0, 32), last) * 8, tl.int64)
        broken = as_pointer(broken, tl.int64)
        is_late = tl.min(load_acquire(pointers), 0) < epoch
        while is_late & (tl.load(broken) == 0) & (now_ns() < deadline):
            pause()
            is_late = tl.min(load_acquire(pointers), 0) < epoch
        return tl.full((), 0, tl.int32)

else:

    @device_function
    def now_ns():
        """Nanoseconds of a clock that only grows."""
        return globaltimer()

    @device_function
    def ticks():
        """The clock's lower 32 bits (ns) as an int32, of which differences count."""
        return now_ns().to(tl.int32)

    @device_function
    def pause():
        """Leave the SM's issue slots to others for a moment: those that multiply beside this."""
        tl.inline_asm_elementwise(
            "nanosleep.u32 64; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )

    @device_function
    def load_acquire(flags):
        """Read flags at system scope; what their writers did before raising them is visible."""
        return tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b64 $0, [$1];",
            "=l,l",
            [flags],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )

    @device_function
    def any_thread(flag):
        """1 where `flag`, an int32 that threads may see differently, is not 0 in any; a barrier."""
        return tl.inline_asm_elementwise(
            """{
            .reg .pred one, any;
            setp.ne.s32 one, $1, 0;
            bar.red.or.pred any, 0, one;
            selp.s32 $0, 1, 0, any;
            }""",
            "=r,r",
            [flag],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    @device_function
    def consume_token(value, token):
        """`value` (int64), but not before `token` is known: the compiler sees a dependency."""
        return tl.inline_asm_elementwise(
            "mov.b64 $0, $1; // token $2",
            "=l,l,r",
            [value, token],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )

    @device_function
    def drain_tma_stores(BARRIER: tl.constexpr = False):
        """Wait until this thread's TMA stores are in memory and order them before later signals.

        Triton's own store wait is `.read`: it frees the shared memory, no more. With BARRIER all
        threads then wait for one another: `tl.debug_barrier` would keep a loop from being
        pipelined.
        """
        tl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0; fence.proxy.async; "
            + ("bar.sync 0; " if BARRIER else "")
            + "mov.u32 $0, 0;",
            "=r",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    @device_function
    def fence_tma_loads():
        """Order earlier acquires before later TMA loads, which go through another proxy."""
        tl.inline_asm_elementwise(
            "fence.proxy.async; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )

    @device_function
    def poll_inline(flags, last, epoch, deadline, broken, BEFORE_TMA: tl.constexpr):
        """Poll flags 0 .. `last` (at most 31), one by each thread of a warp, until none is late,
        the deadline has passed or this rank is broken; returns 0.

        One instruction to the compiler, so that a loop around it can still be pipelined. Threads of
        a warp acquire their flags, then vote, which orders all of them before what any does next.
        """
        return tl.inline_asm_elementwise(
            """{
            .reg .pred late, some, stop;
            .reg .b64 flag, at, now;
            .reg .u32 lane;
            mov.u32 lane, %laneid;
            min.u32 lane, lane, $2;
            mad.wide.u32 at, lane, 8, $1;
            again:
            ld.acquire.sys.global.b64 flag, [at];
            setp.lt.s64 late, flag, $3;
            vote.sync.any.pred some, late, 0xffffffff;
            @!some bra done;
            nanosleep.u32 200;
            mov.u64 now, %globaltimer;
            setp.gt.s64 stop, now, $4;
            ld.relaxed.gpu.global.b64 flag, [$5];
            setp.ne.or.s64 stop, flag, 0, stop;
            vote.sync.any.pred stop, stop, 0xffffffff;
            @!stop bra again;
            done:
            bar.warp.sync 0xffffffff;
            """
            + ("fence.proxy.async; " if BEFORE_TMA else "")
            + """
            mov.u32 $0, 0;
            }""",
            "=r,l,r,l,l,l",
            [flags, last, epoch, deadline, broken],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@device_function
def notify(flags, ranks, mask, epoch, context, AFTER_TMA: tl.constexpr = False):
    """Raise `flags` (addresses in this rank's block) to `epoch` on `ranks`, where `mask` is set.

    `ranks` and `mask` are blocks; a thread raises one flag. Publish: every store of this program,
    to any rank, happens before a flag is seen raised by a `wait` there: the threads' stores (and,
    with AFTER_TMA, their TMA stores, drained and fenced first) come before the CTA barrier, and
    each raising thread then releases at system scope.
    """
    if AFTER_TMA:
        drain_tma_stores()
    tl.debug_barrier()
    targets = as_pointer(symm_at(flags, tl.where(mask, ranks, 0), context), tl.int64)
    epochs = tl.zeros_like(ranks).to(tl.int64) + epoch
    tl.atomic_xchg(targets, epochs, mask=mask, sem="release", scope="sys")


@device_function
def wait(flags, mask, epoch, peers, context, PHASE: tl.constexpr, BEFORE_TMA: tl.constexpr = False):
    """Wait until every flag (block of own addresses) under `mask` is at least `epoch`.

    Returns a token, the same to all threads: 1, or 0 when flags were late and the deadline passed,
    here or in an earlier wait; what the flags guard must then not be touched. `peers` names, flag
    by flag, the rank to blame.

    Observe: all threads poll with acquire loads at system scope, then meet at a CTA barrier, so
    what each flag's writer did before its `notify` happens before every later load of the program
    (with BEFORE_TMA, before its TMA loads too). The compiler keeps loads behind the wait when
    their address went through `consume_token`. `>=`, not `==`: a fast peer may be a call ahead.
    """
    pointers = as_pointer(tl.where(mask, flags, own_block(context)), tl.int64)
    late = mask & (load_acquire(pointers) < epoch)
    state = tl.max(late.to(tl.int32), 0)  # 0: all are there; 1: some are late; 2: and past waiting
    deadline = now_ns() + tl.load(context + TIMEOUT_NS)
    while state == 1:
        pause()
        late = mask & (load_acquire(pointers) < epoch)
        is_over = (tl.load(context + BROKEN, volatile=True) != 0) | (now_ns() > deadline)
        state = tl.max(tl.where(late, tl.where(is_over, 2, 1), 0), 0)
    # Warps poll on their own and leave the loop one by one; the barrier gives them one answer.
    token = 1 - any_thread(state)
    tl.debug_barrier()  # again, as the compiler does not see that one
    if token == 0:
        report_failure(tl.max(tl.where(late, peers, 0), 0), epoch, context, PHASE)
    if BEFORE_TMA:
        fence_tma_loads()
    return token


@device_function
def wait_inline(flags, deadline, context, COUNT: tl.constexpr, BEFORE_TMA: tl.constexpr):
    """Wait until COUNT flags side by side, from the own address `flags` on, are at the running
    call's epoch. Returns 0, which the compiler does not know: added to an address it keeps loads
    behind the wait.

    For loops that are pipelined, which a branch would prevent; so it tells of no failure: when
    `deadline` (ns) has passed or this rank is broken it ends as well, and rows that are not there
    are read as they are. The caller asks with a `wait` behind the loop, and until then writes
    nothing that another rank reads. Orders memory as `wait` does, in each warp for itself.
    """
    zero = tl.full((), 0, tl.int32)
    broken = (context + BROKEN).to(tl.int64)
    for first in tl.static_range(0, COUNT, 32):
        last = tl.full((), min(COUNT - first, 32) - 1, tl.int32)
        epoch = current_epoch(context)
        zero += poll_inline(flags + first * 8, last, epoch, deadline, broken, BEFORE_TMA)
    return zero


@device_function
def report_failure(peer, epoch, context, PHASE: tl.constexpr):
    """Tell the host what failed first on this rank, and every later wait to give up."""
    if tl.atomic_cas(context + BROKEN, tl.full((), 0, tl.int64), tl.full((), 1, tl.int64)) == 0:
        report = report_words(context)
        tl.store(report + 1, peer)
        tl.store(report + 2, tl.full((), PHASE, tl.int64))
        tl.store(report + 3, epoch)
        # A fence for the host's eyes, on a word of ours: atomics on host memory may not exist.
        zero = tl.full((), 0, tl.int64)
        tl.debug_barrier()
        tl.atomic_add(context + BROKEN, zero, sem="acq_rel", scope="sys")
        tl.store(report, 1)


@device_function
def report_words(context):
    """Pointer to the report in host memory."""
    return as_pointer(tl.load(context + REPORT), tl.int64)


# --- Arithmetic ------------------------------------------------------------------------------


if INTERPRETED:

    @device_function
    def dot(a, b, acc):
        """acc + a @ b in fp32, IEEE products. The interpreter would multiply bf16 bit patterns."""
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")

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
