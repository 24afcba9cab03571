"""A tile of rows as the unit of communication: which rank and row it goes to, and when it has
arrived.

The second layer of primitives, on `lang` (addresses, flags, waits): kernels name a tile or a stage,
and these derive ranks, offsets and flags, as do the tile primitives of Triton-distributed
(`dl.wait`, `dl.notify`, with a tile's id). Rows of a layer travel in stages. In dispatch a stage is
a range of the rows that a receiver gets from others, in their order; in combine it is the tokens
whose last row lies in such a range. `examples/09_tiles.py` is a kernel made of these.
"""

import triton.language as tl

from .context import NUM_RANKS, PHASE_ROWS, RANK, TIMEOUT_NS
from .lang import (
    as_pointer,
    begin_span,
    current_epoch,
    device_function,
    end_span,
    is_broken,
    notify,
    now_ns,
    put_rows,
    report_failure,
    wait,
    wait_inline,
)
from .programs import is_last
from .ptx import any_thread
from .slots import stage_flag

DISPATCH = tl.constexpr(0)
COMBINE = tl.constexpr(1)
"""The directions of a row: to its experts, and to its token."""


@device_function
def deal(work_idx, num_peers):
    """(peer, row) of a work_idx, or a block of them, in the sequence row 0 to each of `num_peers`,
    row 1 to each of them, ...

    n programs that each take every n-th work_idx take all rows, and traffic to all peers stays
    even. Three peers: 0 1 2 3 4 5 6 are (peer, row) (0, 0) (1, 0) (2, 0) (1, 1) (2, 1) (0, 1)
    (2, 2): each round begins one further, so that with most steps a program comes to all peers.
    """
    row = work_idx // num_peers
    return (work_idx + row) % num_peers, row


@device_function
def put_tile(
    to,
    source,
    num_rows,
    num_vecs,
    due,
    step,
    BLOCK_ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_VECS: tl.constexpr,
    TAIL_VECS: tl.constexpr = 0,
):
    """Copy the first `num_rows` of a batch of rows, BLOCK_ROWS at a time, BLOCK_VECS of each every
    `step`: addresses `to` [BATCH], 0 for no row, and `source`, pointers to vectors. Returns
    when the next rows are due, see `lang.put_rows`."""
    for part in range(0, num_rows, BLOCK_ROWS):
        index = part + tl.arange(0, BLOCK_ROWS)
        address = tl.gather(to, index, 0)
        rows = tl.gather(source.to(tl.int64), index, 0)
        # fmt: off
        due = put_rows(
            as_pointer(address, source.dtype.element_ty), as_pointer(rows, source.dtype.element_ty),
            num_vecs, address != 0, due, step, ALIGNED, BLOCK_VECS, TAIL_VECS,
        )
        # fmt: on
    return due


@device_function
def notify_stage(written, num_programs, direction, stage, context, RANKS_PAD: tl.constexpr):
    """Say that this program, one of `num_programs`, has written its share of a stage; the last one
    tells all ranks.

    Every store of each program happens before a wait for the stage ends: programs arrive at the
    int64 counter `written`, from 0 on, as in `programs.is_last`, and the last one publishes, by
    `lang.notify`, all that happened before.
    """
    if is_last(written, num_programs):
        if is_broken(context) == 0:  # else some program may have written nothing
            ranks = tl.arange(0, RANKS_PAD)
            flags = stage_flag(direction, stage, tl.load(context + RANK) + ranks * 0, context)
            here = ranks < tl.load(context + NUM_RANKS)
            notify(flags, ranks, here, current_epoch(context), context)


@device_function
def wait_stage(
    direction, stage, context, RANKS_PAD: tl.constexpr, PHASE: tl.constexpr = PHASE_ROWS
):
    """Wait until all ranks have written their rows up to this stage. Returns whether they
    have, see `lang.wait`."""
    ranks = tl.arange(0, RANKS_PAD)
    real = ranks < tl.load(context + NUM_RANKS)
    flags = stage_flag(direction, stage, ranks, context)
    return wait(flags, real, current_epoch(context), ranks, context, PHASE)


@device_function
def stage_unit(num_rows, stage_count):
    """The number of rows of which the stages of dispatch are multiples, so that they hold all rows
    of a receiver; see `stage_begin`."""
    return tl.maximum(tl.cdiv(num_rows, 2 * stage_count * stage_count), 1)


@device_function
def stage_begin(stage, unit, stage_count):
    """The row that begins a stage of dispatch; unit: see `stage_unit`. Stages become longer: the
    first tiles begin soon, and later stages have fewer rows to push, as more of theirs are copies.
    32 rows in 4 stages, unit 1: 0, 5, 12, 21, and 32 for stage 4."""
    return unit * stage * (stage + stage_count)


@device_function
def stage_of_row(row, unit, stage_count):
    """The stage of dispatch that fills a row: the last one that does not begin after it. It is the
    root of a square, which 0.01 keeps from being rounded down."""
    half = stage_count * 0.5
    units = (row // unit).to(tl.float32)
    return (tl.sqrt(units + half * half) - half + 0.01).to(tl.int32)


@device_function
def wait_tile(
    copied, counter, waited_for, num_programs, deadline, context, BEFORE_TMA: tl.constexpr
):
    """Wait, inside a loop that is to be pipelined, until `num_programs` have arrived at number
    `counter` of the counters `copied` of this GPU (`programs.arrive`). Returns (0, counter). Add
    the first to what addresses the rows of a tile, so that no load moves ahead. Pass the second as
    `waited_for` for the program's next tile, and -1 for its first one.

    A tile of a layer names the counter of the last stage that its rows need, see
    `staged_schedule_kernel`, and `lang.wait_inline`. Most tiles need the same stage as the one
    before: each warp has acquired it then, and does not ask again. A caller ends with
    `end_wait_tile`.
    """
    since = begin_span()
    is_known = counter == waited_for
    zero = wait_inline(copied + counter, num_programs, is_known, deadline, context, BEFORE_TMA)
    end_span(PHASE_ROWS, 0, since, context)
    return zero, counter


@device_function
def deadline_from_now(context):
    """When a wait that begins now expires, in ns."""
    return now_ns() + tl.load(context + TIMEOUT_NS)


@device_function
def end_wait_tile(stage_count, deadline, context, RANKS_PAD: tl.constexpr):
    """Report what was late, after the loop of a program that called `wait_tile`. Such a wait may
    have given up once the deadline has passed, and a program that ends after it is taken for one
    whose wait has; if the rows have come since, this rank is named."""
    gave_up = any_thread((now_ns() > deadline).to(tl.int32)) != 0
    if gave_up | (tl.program_id(0) == 0):  # program 0 also for a rank that has no tiles
        ready = wait_stage(DISPATCH, stage_count - 1, context, RANKS_PAD)
        if gave_up & (ready == 1):
            rank = tl.load(context + RANK).to(tl.int32)
            report_failure(rank, current_epoch(context), context, PHASE_ROWS)
