"""What Triton has no name for: clocks, acquiring loads, votes, fences and the spans of a trace, as
inline PTX. Each has a twin for the CPU interpreter (`TRITON_INTERPRET=1`)."""

import os
import time

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

INTERPRETED: bool = triton.knobs.runtime.interpret
"""True when kernels of this process run on the CPU through Triton's interpreter."""
if INTERPRETED:
    from .interpreter import speed_up

    speed_up()

TRACING: bool = os.environ.get("MOE_ENGINE_TRACE") == "1"
"""True when kernels of this process record the spans of their work, see `tools/trace.py`."""
MAX_SPANS = tl.constexpr(1 << 20)
"""Spans of a GPU that a trace has room for."""
TELL_25_BITS = tl.constexpr(
    "".join(
        f"bfe.u32 part, mine, {bit}, 5; setp.lt.u32 up, thread, part;"
        f"bar.red.popc.u32 part, 0, up; mad.lo.u32 $0, part, {1 << bit}, $0;"
        for bit in range(0, 25, 5)
    )
)
"""See `count_inline`."""

device_function = triton.jit
"""For what kernels call."""


@device_function
def as_pointer(address, dtype: tl.constexpr):
    """A typed pointer from an int64 address (scalar or block)."""
    return address.to(tl.pointer_type(dtype), bitcast=True)


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
        time.sleep(0.002)

    def pause_while(flags, values):
        """`pause` while the flags have these values, up to 10 ms: more than flags may end a wait.
        To look at them costs a tenth of a turn of the loop around it."""
        for _ in range(10):
            time.sleep(0.001)
            if (tl.load(flags).handle.data != values.handle.data).any():
                break

    @device_function
    def load_acquire(flags):
        """Read flags at system scope; what their writers did before raising them is visible."""
        return tl.atomic_add(flags, 0, sem="acquire", scope="sys")

    @device_function
    def store_ll(pointers, values, mask):
        """Store int64 values that others poll, each in one piece and in no order."""
        tl.store(pointers, values, mask=mask)

    @device_function
    def any_thread(flag):
        """1 where `flag`, an int32 that threads may see differently, is not 0 in any; a barrier."""
        return tl.minimum(flag, 1)

    @device_function
    def consume_token(value, token):
        """`value`, but not before `token` is known."""
        return value

    @device_function
    def in_order(x):
        """`x`, computed before what follows."""
        return x

    @device_function
    def known_here(x):
        """The int32 `x`, not before this place."""
        return x

    @device_function
    def drain_tma_stores(BARRIER: tl.constexpr = False):
        """Wait until this thread's TMA stores are in memory and order them before later signals."""

    @device_function
    def fence_tma_loads():
        """Order earlier acquires before later TMA loads."""

    @device_function
    def poll_inline(counter, value, is_known, deadline, broken, BEFORE_TMA: tl.constexpr):
        """Unless `is_known`, poll the int64 at an address until it is at least `value`; returns
        0."""
        counter = as_pointer(counter, tl.int64)
        broken = as_pointer(broken, tl.int64)
        if is_known == 0:
            while (load_acquire(counter) < value) & (tl.load(broken) == 0) & (now_ns() < deadline):
                pause()
        return tl.full((), 0, tl.int32)

    @device_function
    def count_inline(counter):
        """What the int64 at the address `counter` was before this program added 1 to it, as an
        int32."""
        return tl.atomic_add(as_pointer(counter, tl.int64), 1).to(tl.int32)

    @device_function
    def write_span(buffer, role, item, since):
        """Append a span that ends now to those at the address `buffer`, if it is not 0 and there is
        room. Returns the end.

        An int64 counts the spans, and from 16 bytes on each has int32 (role, item, program, place)
        and int64 (since, end) in ns. place is SM * 64 + the program's first warp there, which no
        two programs have at once; without SMs the program stands for one.
        """
        end = tl.full((), now_ns(), tl.int64)
        if buffer != 0:
            head = as_pointer(buffer, tl.int64)
            slot = tl.atomic_add(head, 1)
            if slot < MAX_SPANS:
                program = tl.program_id(0)
                words = as_pointer(buffer + 16 + slot * 32, tl.int32)
                tl.store(words, role)
                tl.store(words + 1, item)
                tl.store(words + 2, program)
                tl.store(words + 3, program * 64)
                tl.store(head + 4 + slot * 4, since)
                tl.store(head + 5 + slot * 4, end)
        return end

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
        """Leave the SM's issue slots for a moment to programs that multiply concurrently."""
        tl.inline_asm_elementwise(
            "nanosleep.u32 64; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )

    @device_function
    def pause_while(flags, values):
        """`pause`: the loop around it looks at the flags soon enough."""
        pause()

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
    def store_ll(pointers, values, mask):
        """Store int64 values that others poll, each in one piece and in no order."""
        tl.inline_asm_elementwise(
            """{
            .reg .pred here;
            setp.ne.s32 here, $3, 0;
            @here st.relaxed.sys.global.b64 [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,l,r",
            [pointers, values, mask.to(tl.int32)],
            dtype=tl.int32,
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
    def in_order(x):
        """fp32 `x`, computed before what follows that has effects, such as tensor cores' products:
        the compiler would move it past them, and both would take registers at once."""
        return tl.inline_asm_elementwise("", "=f,0", [x], dtype=tl.float32, is_pure=False, pack=1)

    @device_function
    def known_here(x):
        """The int32 `x`, not before this place: what a tile of a flattened loop hands to the next
        must be made where it ends. Triton 3.6 takes a value from where a tile begins for that of
        the tile which begins next, while the products of this one are in flight."""
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1; // known here", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1
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
    def poll_inline(counter, value, is_known, deadline, broken, BEFORE_TMA: tl.constexpr):
        """Unless the int32 `is_known` is 1, poll the int64 at an address until it is at least
        `value`, the deadline has passed or this rank is broken; returns 0.

        One instruction to the compiler, so that a loop around it can still be pipelined. Threads of
        a warp all acquire, then vote, so that they go on together.
        """
        return tl.inline_asm_elementwise(
            """{
            .reg .pred known, late, stop;
            .reg .b64 seen, now;
            setp.ne.s32 known, $3, 0;
            @known bra.uni end;
            again:
            ld.acquire.gpu.global.b64 seen, [$1];
            setp.lt.s64 late, seen, $2;
            vote.sync.any.pred late, late, 0xffffffff;
            @!late bra done;
            nanosleep.u32 200;
            mov.u64 now, %globaltimer;
            setp.gt.s64 stop, now, $4;
            ld.relaxed.gpu.global.b64 seen, [$5];
            setp.ne.or.s64 stop, seen, 0, stop;
            vote.sync.any.pred stop, stop, 0xffffffff;
            @!stop bra again;
            done:
            bar.warp.sync 0xffffffff;
            """
            + ("fence.proxy.async; " if BEFORE_TMA else "")
            + """
            end:
            mov.u32 $0, 0;
            }""",
            "=r,l,l,r,l,l",
            [counter, value, is_known, deadline, broken],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    @device_function
    def count_inline(counter):
        """What the int64 at the address `counter` was before this program added 1 to it, as an
        int32; it must be less than 2^25.

        One instruction to the compiler, as a loop with `tl.atomic_add` is not pipelined. A thread
        counts; its warp tells all others 5 bits of 25 at a time, by how many of its 32 threads
        raise their hand at a barrier. (Through memory it would take as long as the count.) The last
        shuffle changes nothing. But the assembler would take the result of a barrier for the same
        in all threads, compute tiles from it in another way, and use 30 registers more.
        """
        return tl.inline_asm_elementwise(
            """{
            .reg .pred first, up;
            .reg .b32 thread, mine, part;
            .reg .b64 before;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            mov.u64 before, 0;
            @first atom.relaxed.gpu.global.add.u64 before, [$1], 1;
            cvt.u32.u64 mine, before;
            shfl.sync.idx.b32 mine, mine, 0, 31, 0xffffffff;
            mov.u32 $0, 0;
            """
            + TELL_25_BITS
            + "shfl.sync.idx.b32 $0, $0, 0, 31, 0xffffffff; }",
            "=&r,l",
            [counter],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    @device_function
    def write_span(buffer, role, item, since):
        """Append a span that ends now to those at the address `buffer`, if it is not 0 and there is
        room. Returns the end. One instruction without branches, for loops that are pipelined.

        An int64 counts the spans, and from 16 bytes on each has int32 (role, item, program, place)
        and int64 (since, end) in ns. place is SM * 64 + the program's first warp there, which no
        two programs have at once.
        """
        return tl.inline_asm_elementwise(
            """{
            .reg .pred mine, fits;
            .reg .b64 now, slot, at;
            .reg .b32 thread, program, place, warp;
            mov.u64 now, %globaltimer;
            mov.u32 thread, %tid.x;
            setp.eq.u32 mine, thread, 0;
            setp.ne.and.s64 mine, $1, 0, mine;
            mov.b64 slot, 0;
            @mine atom.relaxed.gpu.global.add.u64 slot, [$1], 1;
            setp.lt.and.s64 fits, slot, $5, mine;
            mad.lo.s64 at, slot, 32, $1;
            mov.u32 program, %ctaid.x;
            mov.u32 place, %smid;
            mov.u32 warp, %warpid;
            mad.lo.u32 place, place, 64, warp;
            @fits st.global.v4.b32 [at + 16], {$2, $3, program, place};
            @fits st.global.v2.b64 [at + 32], {$4, now};
            mov.b64 $0, now;
            }""",
            "=l,l,r,r,l,l",
            [buffer, role, item, since, tl.cast(MAX_SPANS, tl.int64)],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
