"""Low-latency dispatch, the sending half: counts of what comes, and a token's row to each of its
ranks."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..device.call_fields import call_fields, is_cast, num_scales
from ..device.cast import cast_row
from ..device.context import BAD_IDS, REPORT_BAD_IDS
from ..device.lang import (
    as_pointer,
    device_function,
    publish,
    put,
    put_ll,
    report_pointer,
    row_mask,
    row_pointers,
)
from ..device.ring import (
    FIELDS,
    columns_at,
    count_at,
    flag_level,
    pick,
    row_at,
    row_flag,
    wait_slot,
)

BLOCK_TOKENS = tl.constexpr(128)
"""Tokens whose ids a program looks at together."""


class SentTokens(NamedTuple):
    """What a rank sends."""

    x: tl.tensor  # [T, H]: vectors [T, num_vecs], or bf16 to be cast
    topk_idx: tl.tensor  # int64 [T, K]
    topk_weights: tl.tensor  # float32 [T, K], or None: rows are sent without weights


@device_function
def _load_experts(topk_idx, token_idx, inside, CONFIG: tl.constexpr):
    """(the experts of tokens [B], a tuple of K_PAD blocks int32 [B] with -1 for ids that are not
    valid or named before, int32 [B]: how many of a token's ids were neither valid nor -1).

    A token's ids are in one thread, so that they can be compared without a move.
    """
    experts = ()
    num_bad = tl.zeros_like(token_idx)
    for k in tl.static_range(CONFIG.K_PAD):
        real = inside & (k < CONFIG.NUM_TOPK)
        given = tl.load(topk_idx + token_idx * CONFIG.NUM_TOPK + k, mask=real, other=-1)
        valid = (given >= 0) & (given < CONFIG.NUM_EXPERTS)
        num_bad += ((given != -1) & (valid == 0)).to(tl.int32)
        expert = tl.where(valid, given, -1).to(tl.int32)
        for before in tl.static_range(k):
            expert = tl.where(experts[before] == expert, -1, expert)
        experts = experts + (expert,)
    return experts, num_bad


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
def send_counts(peer, slot, topk_idx, num_tokens, CONFIG: tl.constexpr):
    """Tell `peer` how many tokens this rank has, what it was called with, and how many tokens go to
    each of the peer's experts. Each value travels with its flag, so it never waits for rows."""
    BINS: tl.constexpr = max(32, triton.next_power_of_2(CONFIG.EXPERTS))
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    bad = tl.zeros([BLOCK_TOKENS], tl.int32)
    one = tl.arange(0, 1)
    for first in range(0, tl.maximum(num_tokens, 1), BLOCK_TOKENS):
        token_idx = first + tl.arange(0, BLOCK_TOKENS)
        experts, num_bad = _load_experts(topk_idx, token_idx, token_idx < num_tokens, CONFIG)
        bad += num_bad
        ids = tl.reshape(_stack(experts, CONFIG.K_PAD), [BLOCK_TOKENS * CONFIG.K_PAD])
        ids = ids - peer * CONFIG.EXPERTS
        is_there = (ids >= 0) & (ids < CONFIG.EXPERTS)
        counts += tl.histogram(tl.where(is_there, ids, 0), BINS, mask=is_there)
    may = wait_slot(slot, peer + one, one == 0, CONFIG)
    may = tl.max(may.to(tl.int32), 0) == 1
    shift, level = pick(slot.shift, peer), flag_level(slot)
    to = as_pointer(count_at(slot, slot.rank, 0) + shift, tl.int64)
    field = tl.arange(0, FIELDS)
    fields = call_fields(field, num_tokens, 0, slot, CONFIG)
    put_ll(to + field, level + fields, (field >= 0) & may)
    put_ll(to + FIELDS + bins, level + counts, (bins < CONFIG.EXPERTS) & may)
    total_bad = tl.sum(bad, 0).to(tl.int64)
    if (peer == 0) & (total_bad > 0):
        context = slot.context
        total_bad += tl.load(context + BAD_IDS)
        tl.store(context + BAD_IDS, total_bad)
        tl.store(report_pointer(context) + REPORT_BAD_IDS, total_bad)


@device_function
def send_token(token_idx, slot, tokens, CONFIG: tl.constexpr):
    """Write a token's row to each rank that has one of its experts, and raise its flag on all
    ranks. The flag says whether there is a row.

    The trailer follows while the payload travels: for each slot k of the top-k, how many tokens
    before this one have its expert.
    """
    rows = slot.rows
    columns = tl.arange(0, CONFIG.BLOCK)
    num_columns = rows.num_vecs * 4 if is_cast(CONFIG.FORMAT) else rows.num_vecs
    inside = row_mask(columns, num_columns, tokens.x.dtype.element_ty, CONFIG.ALIGNED)
    own_row = tokens.x + token_idx.to(tl.int64) * num_columns
    # All loads are issued before the wait.
    payload = tl.load(row_pointers(own_row, columns, CONFIG.ALIGNED), mask=inside, other=0)
    k, ranks = tl.arange(0, CONFIG.K_PAD), tl.arange(0, slot.shift.shape[0])
    real = k < CONFIG.NUM_TOPK
    ids = tl.load(tokens.topk_idx + token_idx * CONFIG.NUM_TOPK + k, mask=real, other=-1)
    if tokens.topk_weights is not None:
        weights = tl.load(
            tokens.topk_weights + token_idx * CONFIG.NUM_TOPK + k, mask=real, other=0.0
        )
    may = wait_slot(slot, ranks, ranks < CONFIG.RANKS, CONFIG)
    ids = tl.where((ids >= 0) & (ids < CONFIG.NUM_EXPERTS), ids, -1).to(tl.int32)
    owners = tl.where(ids >= 0, ids // CONFIG.EXPERTS, -1)
    has_row = tl.max((owners[None, :] == ranks[:, None]).to(tl.int32), 1)
    to_rank = may & (has_row == 1)
    scales = columns
    if is_cast(CONFIG.FORMAT):
        payload, scales = cast_row(payload, CONFIG.FORMAT)
    row = row_at(slot, slot.rank, token_idx)
    for distance in tl.static_range(CONFIG.RANKS):
        peer = (slot.rank + 1 + distance) % CONFIG.RANKS  # all ranks at once, and each to another
        if pick(to_rank.to(tl.int32), peer) == 1:
            to = row + pick(slot.shift, peer)
            put(columns_at(to, columns, payload.dtype, CONFIG.ALIGNED), payload, inside)
            if is_cast(CONFIG.FORMAT):
                block = tl.arange(0, scales.shape[0])
                scales_to = to + tl.cdiv(num_columns, 16) * 16
                scales_to = columns_at(scales_to, block, tl.int32, CONFIG.ALIGNED)
                put(scales_to, scales, block < num_scales(rows.num_vecs, CONFIG.FORMAT))
    counts = _count_before(token_idx, ids, tokens.topk_idx, CONFIG)
    trailer = as_pointer(row + rows.trailer + slot.shift, tl.int32)[:, None] + k[None, :]
    is_written = to_rank[:, None] & real[None, :]
    local_expert = tl.where(owners[None, :] == ranks[:, None], ids[None, :] % CONFIG.EXPERTS, -1)
    put(trailer, local_expert, is_written)
    put(trailer + CONFIG.NUM_TOPK, tl.sum(counts, 0)[None, :], is_written)
    if tokens.topk_weights is not None:
        to = trailer + 2 * CONFIG.NUM_TOPK
        put(to, weights.to(tl.int32, bitcast=True)[None, :], is_written)
    publish(row_flag(slot, slot.rank, token_idx) + slot.shift, may, flag_level(slot) + has_row)


@device_function
def _count_before(token_idx, ids, topk_idx, CONFIG: tl.constexpr):
    """int32 [BLOCK_TOKENS, K_PAD], to be summed over the first dimension: how many tokens before
    this one have each of its experts `ids`."""
    counts = tl.zeros([BLOCK_TOKENS, CONFIG.K_PAD], tl.int32)
    for first in range(0, token_idx, BLOCK_TOKENS):
        others = first + tl.arange(0, BLOCK_TOKENS)
        found = (tl.zeros([BLOCK_TOKENS], tl.int32),) * CONFIG.K_PAD
        for other_k in tl.static_range(CONFIG.NUM_TOPK):
            given = tl.load(
                topk_idx + others * CONFIG.NUM_TOPK + other_k, mask=others < token_idx, other=-1
            )
            # What is wider than 32 bits is no expert; `|` counts an expert named twice once.
            given = tl.where(given == given.to(tl.int32), given, -1).to(tl.int32)
            same = ()
            for k in tl.static_range(CONFIG.K_PAD):
                same = same + (found[k] | (given == pick(ids, k)).to(tl.int32),)
            found = same
        counts += tl.reshape(_stack(found, CONFIG.K_PAD), [BLOCK_TOKENS, CONFIG.K_PAD])
    return counts
