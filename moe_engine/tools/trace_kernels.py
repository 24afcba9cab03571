"""The kernel that compares the clocks of ranks."""

import triton
import triton.language as tl

from ..device.context import NUM_RANKS, PHASE_CLOCKS, RANK
from ..device.lang import as_pointer, consume_token, notify, now_ns, wait
from ..device.slots import chunk_flag


@triton.jit
def ping_kernel(
    times,  # int64 [R, ROUNDS, 3], out on rank 0: when it asked, the rank answered, it knew it
    context,
    ROUNDS: tl.constexpr,
):
    """Rank 0 asks each other rank ROUNDS times for its clock (ns), and notes its own before and
    after. One program per rank, on slots that nothing else has used.

    Each round has flags of its own: rank 0 raises one to 1, and the other rank one to its time.
    """
    zero = tl.arange(0, 1)
    one = zero == 0
    rank = tl.load(context + RANK).to(tl.int32)
    if rank > 0:
        for number in range(0, ROUNDS):
            asked = chunk_flag(0, number, context) + zero
            wait(asked, one, 1, zero, context, PHASE_CLOCKS)
            notify(chunk_flag(rank, number, context) + zero, zero, one, now_ns(), context)
    else:
        for peer in range(1, tl.load(context + NUM_RANKS).to(tl.int32)):
            for number in range(0, ROUNDS):
                answer = chunk_flag(peer, number, context) + zero
                to = times + (peer * ROUNDS + number) * 3 + zero
                tl.store(to, now_ns())
                notify(chunk_flag(0, number, context) + zero, peer + zero, one, 1, context)
                token = wait(answer, one, 1, peer + zero, context, PHASE_CLOCKS)
                tl.store(to + 2, now_ns())
                tl.store(to + 1, tl.load(as_pointer(consume_token(answer, token), tl.int64)))
