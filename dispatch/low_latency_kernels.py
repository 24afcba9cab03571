"""Low-latency dispatch: one kernel that sends a token's row to each of its ranks, and packs what
arrives by expert."""

import triton
import triton.language as tl

from ..context import BAD_IDS, RANK, REPORT_BAD_IDS
from ..lang import (
    as_pointer,
    cast_e4m3,
    device_function,
    notify,
    put,
    report_words,
    row_mask,
    symm_at,
)
from ..ring_kernels import (
    begin_send,
    message_flag,
    pointers_at,
    region_at,
    row_at,
    row_flag,
    tell_received,
    wait_slot,
)
from ..work import let_next_start, wait_for_previous
from .low_latency_receive_kernels import (
    SIGNATURE_WORDS,
    is_cast,
    low_latency_signature,
    num_scales,
    receive,
)

COUNT_TOKENS = tl.constexpr(32)
"""Tokens whose lanes a program looks at together."""


@triton.jit(do_not_specialize=["num_tokens", "max_tokens"])
def low_latency_dispatch_kernel(
    x,  # [T, H]: words [T, num_words], or bf16 to be cast
    topk_idx,  # int64 [T, K]
    topk_weights,  # float32 [T, K], or None: they do not travel along
    recv_x,  # words [L, R * M, num_words], or COMPACT [N, num_words], out
    recv_scales,  # int32 [L, S, R * M], out, or None
    recv_count,  # int32 [L], out; COMPACT: int32 [L + 1], where each expert's rows begin
    src_info,  # int32 [L, R * M], out: the token of each row
    layout_range,  # int64 [L, R], out; None for COMPACT
    returns,  # int32 [R, M, 2 + 3 * K], out: what comes back, see `_pack_row`
    recv_stats,  # int32 [L], added to, or None
    wait_stats,  # int64 [R], ns added to, or None
    call,  # int64 [1 + R], out: epoch; rows that came from each rank
    context,
    num_tokens,
    max_tokens,
    num_words,
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
    OVERLAP: tl.constexpr,
):
    """Programs 0 .. R-1 send each rank the counts of what comes, the next T a token each; the
    others receive. PHASES "send" or "receive" launches only these.

    Rows stand by expert, then source rank, then token. A row's place among those of its source and
    expert is counted by its sender, meanwhile the row is being read; what comes from the ranks
    before is added by the receiver, from the counts.

    FORMAT: "bf16" and "fp32" travel as they are; "fp8", "rounded", "ue8m0": e4m3 with a scale per
    128 columns, see `_cast_row`. BLOCK holds a row: words of it, or columns to be cast.

    Example, 2 ranks of 2 experts, rank 0 has tokens with topk_idx [[0, 3], [1, 0], [3, 2], [0, -1]]
    and rank 1 one with [[0, 1]]. Rank 0 gets rows (source, token) of expert 0: (0, 0) (0, 1) (0, 3)
    (1, 0), of expert 1: (0, 1) (1, 0); layout_range counts [[3, 1], [1, 1]], beginning at
    [[0, 3], [0, 1]].
    """
    let_next_start(OVERLAP)
    wait_for_previous(OVERLAP)
    program = tl.program_id(0)
    receiver = program
    if PHASES != "receive":
        epoch = begin_send(call, context)
        receiver = program - RANKS - num_tokens
        if program < RANKS:
            # fmt: off
            _send_counts(
                program, topk_idx, epoch, context, num_tokens, max_tokens, num_words,
                recv_x.dtype.element_ty, NUM_TOPK, FORMAT, RANKS, EXPERTS, SHRINK,
            )
            # fmt: on
        elif receiver < 0:
            # fmt: off
            _send_token(
                program - RANKS, x, topk_idx, topk_weights, epoch, context, num_words,
                header_bytes, record_at, row_bytes,
                NUM_TOPK, FORMAT, ALIGNED, RANKS, EXPERTS, BLOCK, SHRINK,
            )
            # fmt: on
    else:
        epoch = tl.load(call)
    if PHASES != "send":
        if receiver >= 0:
            # fmt: off
            receive(
                receiver, tl.num_programs(0) - program + receiver,
                recv_x, recv_scales, recv_count, src_info, layout_range, returns, recv_stats,
                wait_stats, call, epoch, context, max_tokens, num_words, header_bytes, record_at,
                row_bytes, NUM_TOPK, FORMAT, ALIGNED, RANKS, EXPERTS, BLOCK, SHRINK,
            )
            # fmt: on


# --- Send ----------------------------------------------------------------------------------------


@device_function
def _lanes(topk_idx, tokens, inside, NUM_TOPK: tl.constexpr, NUM_EXPERTS: tl.constexpr):
    """(ids, which are valid) [B, K_PAD] of tokens [B], of those that are `inside`."""
    lanes = tl.arange(0, triton.next_power_of_2(NUM_TOPK))
    real = inside[:, None] & (lanes < NUM_TOPK)[None, :]
    ids = tl.load(topk_idx + tokens[:, None] * NUM_TOPK + lanes[None, :], mask=real, other=-1)
    return ids, (ids >= 0) & (ids < NUM_EXPERTS)


@device_function
def _has(ids, keys):
    """int32 [B, C]: whether any of ids [B, K] is keys [C]."""
    return tl.max((ids[:, None, :] == keys[None, :, None]).to(tl.int32), 2)


@device_function
def _send_counts(
    peer,
    topk_idx,
    epoch,
    context,
    num_tokens,
    max_tokens,
    num_words,
    word: tl.constexpr,
    NUM_TOPK: tl.constexpr,
    FORMAT: tl.constexpr,
    RANKS: tl.constexpr,
    EXPERTS: tl.constexpr,
    SHRINK: tl.constexpr,
):
    """Tell `peer` how many rows it gets: in all, and for each of its experts; after the signature
    of the call. `message_flags[me]` is raised behind it."""
    tell_received(peer, context)
    experts = tl.arange(0, triton.next_power_of_2(EXPERTS))
    counts = tl.zeros([COUNT_TOKENS, experts.shape[0]], tl.int32)
    rows = tl.zeros([COUNT_TOKENS], tl.int32)
    num_bad = tl.full((), 0, tl.int32)
    for first in range(0, num_tokens, COUNT_TOKENS):
        tokens = first + tl.arange(0, COUNT_TOKENS)
        ids, valid = _lanes(topk_idx, tokens, tokens < num_tokens, NUM_TOPK, RANKS * EXPERTS)
        num_bad += tl.sum(tl.sum(((ids != -1) & ~valid).to(tl.int32), 1), 0)
        here = valid & (ids // EXPERTS == peer)
        counts += _has(tl.where(here, ids % EXPERTS, -1), experts)
        rows += tl.max(here.to(tl.int32), 1)
    if (peer == 0) & (num_bad > 0):
        total_bad = tl.load(context + BAD_IDS) + num_bad
        tl.store(context + BAD_IDS, total_bad)
        tl.store(report_words(context) + REPORT_BAD_IDS, total_bad)
    lane = tl.arange(0, 1)
    may = wait_slot(epoch, peer + lane, lane == 0, context, SHRINK)
    if tl.max(may.to(tl.int32), 0) == 1:
        me = tl.load(context + RANK)
        head = as_pointer(symm_at(region_at(epoch, me, context), peer, context), tl.int32)
        field = tl.arange(0, SIGNATURE_WORDS)
        signature = low_latency_signature(
            num_words, max_tokens, word, NUM_TOPK, FORMAT, RANKS * EXPERTS
        )
        put(head + field, signature, field < SIGNATURE_WORDS)
        put(head + SIGNATURE_WORDS + lane, tl.sum(rows, 0) + lane, lane == 0)
        put(head + SIGNATURE_WORDS + 1 + experts, tl.sum(counts, 0), experts < EXPERTS)
        notify(message_flag(epoch, me, context), peer + lane, lane == 0, epoch, context)


@device_function
def _send_token(
    token,
    x,
    topk_idx,
    topk_weights,
    epoch,
    context,
    num_words,
    header_bytes,
    record_at,
    row_bytes,
    NUM_TOPK: tl.constexpr,
    FORMAT: tl.constexpr,
    ALIGNED: tl.constexpr,
    RANKS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHRINK: tl.constexpr,
):
    """Write a token's row to each rank that has one of its experts, behind those of the tokens
    before it there, and raise the row's flag."""
    columns = tl.arange(0, BLOCK)
    num_columns = num_words * 4 if is_cast(FORMAT) else num_words
    inside = row_mask(columns, num_columns, x.dtype.element_ty, ALIGNED)
    own_row = x + token.to(tl.int64) * num_columns
    payload = tl.load(pointers_at(own_row, columns, ALIGNED), mask=inside, other=0)
    scales = columns
    if is_cast(FORMAT):
        payload, scales = _cast_row(payload, FORMAT)

    lanes = tl.arange(0, triton.next_power_of_2(NUM_TOPK))
    ranks = tl.arange(0, triton.next_power_of_2(RANKS))
    one = tl.arange(0, 1)
    ids, valid = _lanes(topk_idx, token + one, one == 0, NUM_TOPK, RANKS * EXPERTS)
    owners = tl.where(valid, ids // EXPERTS, -1)
    in_rank = tl.max(_has(owners, ranks), 0)
    ids, owners = tl.max(tl.where(valid, ids, -1), 0), tl.max(owners, 0)
    same = tl.zeros([COUNT_TOKENS, lanes.shape[0]], tl.int32)
    to_rank = tl.zeros([COUNT_TOKENS, ranks.shape[0]], tl.int32)
    for first in range(0, token, COUNT_TOKENS):
        tokens = first + tl.arange(0, COUNT_TOKENS)
        before, real = _lanes(topk_idx, tokens, tokens < token, NUM_TOPK, RANKS * EXPERTS)
        same += _has(tl.where(real, before, -2), ids)
        to_rank += _has(tl.where(real, before // EXPERTS, -2), ranks)
    places, rows = tl.sum(same, 0), tl.sum(to_rank, 0)

    may = wait_slot(epoch, ranks, in_rank == 1, context, SHRINK)
    me = tl.load(context + RANK).to(tl.int32)
    own = region_at(epoch, me, context) + header_bytes
    for distance in tl.static_range(RANKS):
        peer = (me + 1 + distance) % RANKS  # all ranks at once, and each to another
        if tl.sum(tl.where(ranks == peer, may.to(tl.int32), 0), 0) == 1:
            row = tl.sum(tl.where(ranks == peer, rows, 0), 0)
            to = symm_at(own + row.to(tl.int64) * row_bytes, peer, context)
            put(row_at(to, columns, payload.dtype, ALIGNED), payload, inside)
            if is_cast(FORMAT):
                block = tl.arange(0, scales.shape[0])
                scales_to = row_at(to + tl.cdiv(num_columns, 16) * 16, block, tl.int32, ALIGNED)
                put(scales_to, scales, block < num_scales(num_words, FORMAT))
            record = as_pointer(to + record_at, tl.int32)
            real = lanes < NUM_TOPK
            put(record + one, token + one, one == 0)
            put(record + 1 + lanes, tl.where(owners == peer, ids % EXPERTS, -1).to(tl.int32), real)
            put(record + 1 + NUM_TOPK + lanes, places, real)
            if topk_weights is not None:
                weights = tl.load(topk_weights + token * NUM_TOPK + lanes, mask=real, other=0.0)
                put(record + 1 + 2 * NUM_TOPK + lanes, weights.to(tl.int32, bitcast=True), real)
    notify(row_flag(epoch, me, rows, context), ranks, may, epoch, context)


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
