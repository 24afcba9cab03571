"""Low-latency dispatch: one kernel that sends a token's row to each of its ranks, and packs what
arrives by expert."""

import triton
import triton.language as tl

from ..device.call_fields import call_fields, is_cast, num_scales
from ..device.context import (
    BAD_IDS,
    KIND_LOW_LATENCY_DISPATCH,
    KIND_MOE_FFN_DISPATCH,
    REPORT_BAD_IDS,
    ROLE_COUNTS,
    ROLE_OPEN,
    ROLE_PACK,
    ROLE_SEND,
)
from ..device.lang import (
    as_pointer,
    begin_span,
    cast_e4m3,
    device_function,
    end_span,
    publish,
    put,
    put_ll,
    report_pointer,
    row_mask,
    row_pointers,
)
from ..device.programs import pdl_launch_dependents
from ..device.ring import (
    FIELDS,
    Rows,
    count_at,
    fixed,
    flag_level,
    open_slot,
    pick,
    publish_acks,
    region_at,
    row_at,
    row_flag,
    wait_slot,
)
from .low_latency_receive_kernels import receive

TOKENS = tl.constexpr(128)
"""Tokens whose lanes a program looks at together."""


@triton.jit(
    do_not_specialize=["num_tokens", "max_tokens"],
    do_not_specialize_on_alignment=["recv_stats", "wait_stats"],
)
def low_latency_dispatch_kernel(
    x,  # [T, H]: vectors [T, num_vecs], or bf16 to be cast
    topk_idx,  # int64 [T, K]
    topk_weights,  # float32 [T, K], or None: they do not travel along
    recv_x,  # vectors [L, R * M, num_vecs], or compact [N, num_vecs], out
    recv_scales,  # int32 [L, S, R * M], out, or None
    recv_count,  # int32 [L], out; compact: int32 [L + 1], where each expert's rows begin
    src_info,  # int32 [L, R * M], out: the token of each row
    layout_range,  # int64 [L, R], out; None: compact
    returns,  # int32 [R, M, 1 + 3 * K], out: what goes back, see below
    recv_stats,  # int32 [L], added to, or None
    wait_stats,  # int64 [R], ns added to, or None
    call,  # int64 [1 + R], out: epoch; tokens of each rank
    context,
    num_tokens,
    max_tokens,
    num_vecs,
    header_bytes,
    record_at,
    row_bytes,
    NUM_TOPK: tl.constexpr,
    FORMAT: tl.constexpr,
    ALIGNED: tl.constexpr,
    RANKS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PHASES: tl.constexpr,
    SHRINK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program 0 tells the ranks what this one has received before, programs 1 .. R send them the
    counts of what comes, the next T a token each; the others receive. PHASES "send" or "receive"
    launches only these.

    Rows stand by expert, then source rank, then token. A row's place among those of its source and
    expert is counted by its sender, while the row is on its way; what comes from the ranks before
    is added by the receiver, from the counts.

    returns has, for each token of each rank, how many of its lanes are here, then for each of these
    in order the place of its row in recv_x [K], its lane [K], its routing weight as bits [K].

    FORMAT: "bf16" and "fp32" travel as they are; "fp8", "rounded", "ue8m0": e4m3 with a scale per
    128 columns, see `_cast_row`. BLOCK holds a row: vectors of it, or columns to be cast.

    Example, 2 ranks of 2 experts, rank 0 has tokens with topk_idx [[0, 3], [1, 0], [3, 2], [0, -1]]
    and rank 1 one with [[0, 1]]. Rank 0 gets rows (source, token) of expert 0: (0, 0) (0, 1) (0, 3)
    (1, 0), of expert 1: (0, 1) (1, 0); layout_range counts [[3, 1], [1, 1]], beginning at
    [[0, 3], [0, 1]].
    """
    pdl_launch_dependents(PDL)
    since = begin_span()
    program = tl.program_id(0)
    slot = open_slot(call, context, RANKS, PHASES != "receive", PDL)
    since = end_span(ROLE_OPEN, 0, since, context)
    WORD: tl.constexpr = recv_x.dtype.element_ty
    KIND: tl.constexpr = (
        KIND_LOW_LATENCY_DISPATCH if topk_weights is None else KIND_MOE_FFN_DISPATCH
    )
    FIXED: tl.constexpr = fixed(
        NUM_TOPK, ALIGNED, RANKS, EXPERTS, BLOCK, SHRINK, FORMAT, WORD, KIND
    )
    rows = Rows(max_tokens, header_bytes, row_bytes, num_vecs, record_at)
    receiver = program
    if PHASES != "receive":
        receiver = program - 1 - RANKS - num_tokens
        token = program - 1 - RANKS
        if program == 0:
            publish_acks(slot, context, RANKS)
        elif token < 0:
            _send_counts(program - 1, slot, rows, topk_idx, context, num_tokens, FIXED)
            end_span(ROLE_COUNTS, program - 1, since, context)
        elif receiver < 0:
            _send_token(token, slot, rows, x, topk_idx, topk_weights, context, FIXED)
            end_span(ROLE_SEND, token, since, context)
    if PHASES != "send":
        if receiver >= 0:
            # fmt: off
            receive(
                receiver, tl.num_programs(0) - program + receiver, slot, rows,
                recv_x, recv_scales, recv_count, src_info, layout_range, returns, recv_stats,
                wait_stats, call, context, FIXED,
            )
            # fmt: on
            end_span(ROLE_PACK, receiver, since, context)


@device_function
def _load_lanes(topk_idx, tokens, inside, FIXED: tl.constexpr):
    """(the experts of tokens [B], a tuple of K_PAD blocks int32 [B] with -1 for those that are not
    valid or named before, int32 [B]: how many of a token's ids were neither valid nor -1).

    A token's lanes are in one thread, so that they can be compared without a move.
    """
    lanes = ()
    num_bad = tl.zeros_like(tokens)
    for lane in tl.static_range(FIXED.K_PAD):
        here = inside & (lane < FIXED.NUM_TOPK)
        given = tl.load(topk_idx + tokens * FIXED.NUM_TOPK + lane, mask=here, other=-1)
        valid = (given >= 0) & (given < FIXED.NUM_EXPERTS)
        num_bad += ((given != -1) & (valid == 0)).to(tl.int32)
        expert = tl.where(valid, given, -1).to(tl.int32)
        for before in tl.static_range(lane):
            expert = tl.where(lanes[before] == expert, -1, expert)
        lanes = lanes + (expert,)
    return lanes, num_bad


@device_function
def _stack(blocks, COUNT: tl.constexpr):
    """COUNT blocks of one shape along new last dimensions of 2 each, the first block first."""
    if COUNT == 1:
        stacked = blocks[0]
    else:
        pairs = ()
        for number in tl.static_range(COUNT // 2):
            pairs = pairs + (tl.join(blocks[number], blocks[number + COUNT // 2]),)
        stacked = _stack(pairs, COUNT // 2)
    return stacked


@device_function
def _send_counts(peer, slot, rows, topk_idx, context, num_tokens, FIXED: tl.constexpr):
    """Tell `peer` how many tokens this rank has, what it was called with, and how many tokens go to
    each of the peer's experts: words, which no row is in the way of."""
    BINS: tl.constexpr = max(32, triton.next_power_of_2(FIXED.EXPERTS))
    experts = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    bad = tl.zeros([TOKENS], tl.int32)
    lane = tl.arange(0, 1)
    for first in range(0, tl.maximum(num_tokens, 1), TOKENS):
        tokens = first + tl.arange(0, TOKENS)
        lanes, num_bad = _load_lanes(topk_idx, tokens, tokens < num_tokens, FIXED)
        bad += num_bad
        ids = tl.reshape(_stack(lanes, FIXED.K_PAD), [TOKENS * FIXED.K_PAD]) - peer * FIXED.EXPERTS
        here = (ids >= 0) & (ids < FIXED.EXPERTS)
        counts += tl.histogram(tl.where(here, ids, 0), BINS, mask=here)
    may = wait_slot(slot, peer + lane, lane == 0, context, FIXED.RANKS, FIXED.SHRINK)
    may = tl.max(may.to(tl.int32), 0) == 1
    shift, level = pick(slot.shift, peer), flag_level(slot)
    to = as_pointer(count_at(slot, slot.rank, 0) + shift, tl.int64)
    field = tl.arange(0, FIELDS)
    fields = call_fields(field, num_tokens, 0, rows, FIXED)
    put_ll(to + field, level + fields, (field >= 0) & may)
    put_ll(to + FIELDS + experts, level + counts, (experts < FIXED.EXPERTS) & may)
    total_bad = tl.sum(bad, 0).to(tl.int64)
    if (peer == 0) & (total_bad > 0):
        total_bad += tl.load(context + BAD_IDS)
        tl.store(context + BAD_IDS, total_bad)
        tl.store(report_pointer(context) + REPORT_BAD_IDS, total_bad)


@device_function
def _send_token(token, slot, rows, x, topk_idx, topk_weights, context, FIXED: tl.constexpr):
    """Write a token's row to each rank that has one of its experts, and raise its flag on all,
    which says whether there is a row.

    Behind the payload, while that is on its way, each lane's place: how many tokens before this one
    have its expert.
    """
    columns = tl.arange(0, FIXED.BLOCK)
    num_columns = rows.num_vecs * 4 if is_cast(FIXED.FORMAT) else rows.num_vecs
    inside = row_mask(columns, num_columns, x.dtype.element_ty, FIXED.ALIGNED)
    own_row = x + token.to(tl.int64) * num_columns
    # All that this reads is on its way before it waits.
    payload = tl.load(row_pointers(own_row, columns, FIXED.ALIGNED), mask=inside, other=0)
    lanes, ranks = tl.arange(0, FIXED.K_PAD), tl.arange(0, slot.shift.shape[0])
    real = lanes < FIXED.NUM_TOPK
    ids = tl.load(topk_idx + token * FIXED.NUM_TOPK + lanes, mask=real, other=-1)
    if topk_weights is not None:
        weights = tl.load(topk_weights + token * FIXED.NUM_TOPK + lanes, mask=real, other=0.0)
    may = wait_slot(slot, ranks, ranks < FIXED.RANKS, context, FIXED.RANKS, FIXED.SHRINK)
    ids = tl.where((ids >= 0) & (ids < FIXED.NUM_EXPERTS), ids, -1).to(tl.int32)
    owners = tl.where(ids >= 0, ids // FIXED.EXPERTS, -1)
    has_row = tl.max((owners[None, :] == ranks[:, None]).to(tl.int32), 1)
    to_rank = may & (has_row == 1)
    scales = columns
    if is_cast(FIXED.FORMAT):
        payload, scales = _cast_row(payload, FIXED.FORMAT)
    row = region_at(slot, slot.rank) + rows.header_bytes + token.to(tl.int64) * rows.row_bytes
    for distance in tl.static_range(FIXED.RANKS):
        peer = (slot.rank + 1 + distance) % FIXED.RANKS  # all ranks at once, and each to another
        if pick(to_rank.to(tl.int32), peer) == 1:
            to = row + pick(slot.shift, peer)
            put(row_at(to, columns, payload.dtype, FIXED.ALIGNED), payload, inside)
            if is_cast(FIXED.FORMAT):
                block = tl.arange(0, scales.shape[0])
                scales_to = to + tl.cdiv(num_columns, 16) * 16
                scales_to = row_at(scales_to, block, tl.int32, FIXED.ALIGNED)
                put(scales_to, scales, block < num_scales(rows.num_vecs, FIXED.FORMAT))
    places = tl.zeros([TOKENS, FIXED.K_PAD], tl.int32)
    for first in range(0, token, TOKENS):
        tokens = first + tl.arange(0, TOKENS)
        found = (tl.zeros([TOKENS], tl.int32),) * FIXED.K_PAD
        for other in tl.static_range(FIXED.NUM_TOPK):
            given = tl.load(
                topk_idx + tokens * FIXED.NUM_TOPK + other, mask=tokens < token, other=-1
            )
            # What is wider than 32 bits is no expert; `|` counts an expert named twice once.
            given = tl.where(given == given.to(tl.int32), given, -1).to(tl.int32)
            same = ()
            for lane in tl.static_range(FIXED.K_PAD):
                same = same + (found[lane] | (given == pick(ids, lane)).to(tl.int32),)
            found = same
        places += tl.reshape(_stack(found, FIXED.K_PAD), [TOKENS, FIXED.K_PAD])
    record = as_pointer(row + rows.record_at + slot.shift, tl.int32)[:, None] + lanes[None, :]
    is_written = to_rank[:, None] & real[None, :]
    there = tl.where(owners[None, :] == ranks[:, None], ids[None, :] % FIXED.EXPERTS, -1)
    put(record, there, is_written)
    put(record + FIXED.NUM_TOPK, tl.sum(places, 0)[None, :], is_written)
    if topk_weights is not None:
        put(record + 2 * FIXED.NUM_TOPK, weights.to(tl.int32, bitcast=True)[None, :], is_written)
    publish(row_flag(slot, slot.rank, token) + slot.shift, may, flag_level(slot) + has_row)


@device_function
def _cast_row(row, FORMAT: tl.constexpr):
    """(e4m3 bits [B], words of scales) of a bf16 row, per 128 columns: amax / 448, of at least
    1e-4, or for "rounded" and "ue8m0" the next power of 2. "ue8m0": four of them, exponents + 127,
    in a word."""
    values = row.to(tl.float32).reshape(row.shape[0] // 128, 128)
    amax = tl.maximum(tl.max(tl.abs(values), 1), 1e-4)
    scale = amax * (1.0 / 448.0)
    if FORMAT == "fp8":
        inverse = tl.div_rn(tl.full(amax.shape, 448.0, tl.float32), amax)
        words = scale.to(tl.int32, bitcast=True)
    else:
        bits = scale.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        words = exponent << 23
        if FORMAT == "ue8m0":
            byte = tl.arange(0, 4)[None, :] * 8
            words = tl.sum(exponent.reshape(amax.shape[0] // 4, 4) << byte, 1)
    return cast_e4m3(values * inverse[:, None]).reshape(row.shape[0]), words
