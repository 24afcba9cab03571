"""Low-latency dispatch: one kernel that sends a token's row to each of its ranks, and packs what
arrives by expert."""

import triton
import triton.language as tl

from ..device.context import ROLE_COUNTS, ROLE_OPEN, ROLE_PACK, ROLE_SEND
from ..device.lang import begin_span, end_span
from ..device.programs import pdl_launch_dependents
from ..device.ring import open_slot, publish_acks
from .low_latency_receive_kernels import receive
from .low_latency_send_kernels import send_counts, send_token


@triton.jit(
    do_not_specialize=["num_tokens", "max_tokens", "caller"],
    do_not_specialize_on_alignment=["recv_stats", "wait_stats"],
)
def low_latency_dispatch_kernel(
    tokens,  # `SentTokens`
    received,  # `Received`, x as vectors, out
    recv_stats,  # int32 [L], added to, or None
    wait_stats,  # int64 [R], ns added to, or None
    context,
    num_tokens,
    max_tokens,
    caller,  # see `callers.Callers`
    rows,  # `device.ring.Rows`
    CONFIG: tl.constexpr,  # `device.ring.CallConfig`
    PHASES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program 0 tells the ranks what this one has received before, programs 1 .. R send them the
    counts of what comes, the next T a token each; the others receive. PHASES "send" or "receive"
    launches only these.

    Rows are packed by expert, then source rank, then token. The sender counts, while it sends a
    row, which one it is among the rows of its source and expert; the receiver adds the rows of the
    ranks before, which it knows from the counts.

    FORMAT: "bf16" and "fp32" are sent as they are; "fp8", "rounded", "ue8m0": e4m3 with a scale per
    128 columns, see `low_latency_send_kernels`. BLOCK holds a row: vectors of it, or columns to be
    cast.

    Example, 2 ranks of 2 experts, rank 0 has tokens with topk_idx [[0, 3], [1, 0], [3, 2], [0, -1]]
    and rank 1 one with [[0, 1]]. Rank 0 gets rows (source, token) of expert 0: (0, 0) (0, 1) (0, 3)
    (1, 0), of expert 1: (0, 1) (1, 0); layout_range counts [[3, 1], [1, 1]], beginning at
    [[0, 3], [0, 1]].

    The next launch may begin at once; with BLOCK_M, where it is a product that fills the chip, when
    the counts of all ranks have come: so all are in the call.
    """
    if CONFIG.BLOCK_M == 0:
        pdl_launch_dependents(PDL)
    since = begin_span()
    program = tl.program_id(0)
    sends: tl.constexpr = PHASES != "receive"
    slot = open_slot(received.call, context, max_tokens, caller, rows, CONFIG, sends, PDL)
    since = end_span(ROLE_OPEN, 0, since, context)
    receiver = program
    if PHASES != "receive":
        receiver = program - 1 - CONFIG.RANKS - num_tokens
        token_idx = program - 1 - CONFIG.RANKS
        if program == 0:
            publish_acks(slot, CONFIG)
        elif token_idx < 0:
            send_counts(program - 1, slot, tokens.topk_idx, num_tokens, CONFIG)
            end_span(ROLE_COUNTS, program - 1, since, context)
        elif receiver < 0:
            send_token(token_idx, slot, tokens, CONFIG)
            end_span(ROLE_SEND, token_idx, since, context)
    if PHASES != "send":
        if receiver >= 0:
            num_receivers = tl.num_programs(0) - program + receiver
            receive(receiver, num_receivers, slot, received, recv_stats, wait_stats, CONFIG, PDL)
            end_span(ROLE_PACK, receiver, since, context)
