"""Routing on the device: top-k ids to counts and rows, by prefix sums.

No atomics decide on a row, so the same routing always gives the same plan.
"""

import triton
import triton.language as tl

from .device.context import BAD_IDS, NUM_RANKS, REPORT_BAD_IDS
from .device.lang import device_function, report_pointer
from .device.programs import pdl_launch_dependents, pdl_wait


@triton.jit(do_not_specialize=["num_tokens"])
def layout_kernel(
    topk_idx,  # int64 [T, K]
    block_counts,  # int32 [B, E + R], out: what each block of tokens sends to experts and ranks
    is_token_in_rank,  # uint8 [T, R], out
    copy,  # int64 [T, K], out: the ids as they are; or None
    context,
    num_tokens,
    num_local_experts,
    NUM_TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program b counts for block b. Ids out of range count as -1, and are reported."""
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    num_experts = num_local_experts * num_ranks
    counts = block_counts + tl.program_id(0) * (num_experts + num_ranks)
    tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, TOPK_PAD)
    inside = (tokens < num_tokens)[:, None] & (k < NUM_TOPK)[None, :]
    at = tokens[:, None] * NUM_TOPK + k[None, :]
    ids = tl.load(topk_idx + at, mask=inside, other=-1)
    if copy is not None:
        tl.store(copy + at, ids, mask=inside)
    valid = (ids >= 0) & (ids < num_experts)
    num_bad = tl.sum(tl.sum(((ids != -1) & ~valid).to(tl.int64), 1), 0)
    if num_bad > 0:
        tl.atomic_add(context + BAD_IDS, num_bad)
    for rank in range(0, num_ranks):
        mine = valid & (ids // num_local_experts == rank)
        in_rank = tl.max(mine.to(tl.int32), 1)
        to = is_token_in_rank + tokens * num_ranks + rank
        tl.store(to, in_rank.to(tl.uint8), mask=tokens < num_tokens)
        tl.store(counts + num_experts + rank, tl.sum(in_rank, 0))
    items = tl.reshape(tl.where(valid, ids, 0).to(tl.int32), [BLOCK * TOPK_PAD])
    histogram = tl.histogram(items, EXPERTS_PAD, mask=tl.reshape(valid, [BLOCK * TOPK_PAD]))
    experts = tl.arange(0, EXPERTS_PAD)
    tl.store(counts + experts, histogram, mask=experts < num_experts)


@triton.jit(do_not_specialize=["num_blocks"])
def layout_sum_kernel(
    block_counts,  # int32 [B, E + R]; out: of the blocks before each
    num_tokens_per_expert,  # int32 [E], out
    num_tokens_per_rank,  # int32 [R], out
    context,
    num_blocks,
    num_experts,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add up the blocks' counts, COLUMNS of them per program; program 0 reports bad ids.

    Counts of three blocks [2, 0], [1, 4], [5, 1]: sums [8, 5], and block_counts [0, 0], [2, 0],
    [3, 4] from then on.
    """
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.int32)
    for first in range(0, num_blocks, BLOCK):
        blocks = first + tl.arange(0, BLOCK)
        inside = (blocks < num_blocks)[:, None] & (columns < num_experts + num_ranks)[None, :]
        at = block_counts + blocks[:, None] * (num_experts + num_ranks) + columns[None, :]
        counts = tl.load(at, mask=inside, other=0)
        tl.store(at, total[None, :] + tl.cumsum(counts, 0) - counts, mask=inside)
        total += tl.sum(counts, 0)
    tl.store(num_tokens_per_expert + columns, total, mask=columns < num_experts)
    ranks = columns - num_experts
    tl.store(num_tokens_per_rank + ranks, total, mask=(ranks >= 0) & (ranks < num_ranks))
    if tl.program_id(0) == 0:
        tl.store(report_pointer(context) + REPORT_BAD_IDS, tl.load(context + BAD_IDS))


@triton.jit(do_not_specialize=["num_tokens"])
def send_plan_kernel(
    is_token_in_rank,  # uint8 [B, T, R]
    topk_idx,  # int64 [T, K], or None
    send_token_idx,  # int32 [B, R, T], out: token of each row sent to each rank
    send_head,  # int32 [B, T, R], out: row * R + rank in the order of the final sum, then -1
    num_tokens,
    num_local_experts,
    NUM_TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    RANKS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    SCAN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (c, d, b) gives rows to the tokens of block c that go to rank d, in token order, in
    each of B batches of tokens.

    `send_head` lists a token's rows in the order in which the source will sum them: ranks by
    their right-most top-k slot, or by number where there are no ids. Example, 2 ranks of 2
    experts, topk_idx [[0, 3], [2, 1], [3, 2], [0, 1]]:

        rows to rank 0: tokens 0, 1, 3;  to rank 1: tokens 0, 1, 2
        send_head as (row, rank): token 0 (0, 0) (0, 1);  token 1 (1, 1) (1, 0);
                                  token 2 (2, 1);         token 3 (2, 0)

    A PDL launch, which waits for the launch before it first: what that wrote, such as the counts of
    the layout, is complete when the next launch may begin.
    """
    pdl_wait(PDL)
    pdl_launch_dependents(PDL)
    rank = tl.program_id(1)
    num_ranks = tl.num_programs(1)
    before = tl.program_id(2).to(tl.int64) * num_tokens * num_ranks
    is_token_in_rank += before
    send_token_idx += before
    send_head += before
    first = tl.program_id(0) * BLOCK
    base = tl.full((), 0, tl.int32)
    for start in range(0, first, SCAN):
        earlier = start + tl.arange(0, SCAN)
        sent = tl.load(is_token_in_rank + earlier * num_ranks + rank, mask=earlier < first, other=0)
        base += tl.sum(sent.to(tl.int32), 0)

    tokens = first + tl.arange(0, BLOCK)
    inside = tokens < num_tokens
    sent = tl.load(is_token_in_rank + tokens * num_ranks + rank, mask=inside, other=0).to(tl.int32)
    row = base + tl.cumsum(sent, 0) - sent
    k = tl.arange(0, TOPK_PAD)
    owner = tl.full([BLOCK, TOPK_PAD], -1, tl.int32)
    if topk_idx is not None:
        id_inside = inside[:, None] & (k < NUM_TOPK)[None, :]
        ids = tl.load(topk_idx + tokens[:, None] * NUM_TOPK + k[None, :], mask=id_inside, other=-1)
        valid = (ids >= 0) & (ids < num_local_experts * num_ranks)
        owner = tl.where(valid, ids // num_local_experts, -1).to(tl.int32)
    ranks = tl.arange(0, RANKS_PAD)
    is_sent = tl.load(
        is_token_in_rank + tokens[:, None] * num_ranks + ranks[None, :],
        mask=inside[:, None] & (ranks < num_ranks)[None, :],
        other=0,
    ).to(tl.int32)
    order = sum_order(rank, owner, is_sent, num_ranks)
    tl.store(send_token_idx + rank * num_tokens + row, tokens, mask=inside & (sent > 0))
    to = send_head + tokens * num_ranks + order
    tl.store(to, tl.where(sent > 0, row * num_ranks + rank, -1), mask=inside)


@device_function
def sum_order(rank, owner, is_sent, num_ranks):
    """[B]: the position, in the order of the final sum, of the row that a token sends to `rank`:
    ranks come by their right-most top-k slot, or by number where no slot has an owner. Where the
    token sends none to `rank`, an empty position after all its rows.

    owner [B, TOPK_PAD]: rank of each top-k slot, -1 for none; is_sent int32 [B, RANKS_PAD].
    """
    k = tl.arange(0, owner.shape[1])
    ranks = tl.arange(0, is_sent.shape[1])
    last_k = tl.max(tl.where(owner == rank, k[None, :], -1), 1)
    order = tl.zeros_like(last_k)
    for other in range(0, num_ranks):
        other_last = tl.max(tl.where(owner == other, k[None, :], -1), 1)
        other_sent = tl.sum(tl.where((ranks == other)[None, :], is_sent, 0), 1)
        is_earlier = (other_last < last_k) | ((other_last == last_k) & (other < rank))
        order += tl.where(is_earlier, other_sent, 0)
    is_empty_before = (ranks < rank)[None, :] & (is_sent == 0)
    empty = tl.sum(is_sent, 1) + tl.sum(is_empty_before.to(tl.int32), 1)
    sent_here = tl.sum(tl.where((ranks == rank)[None, :], is_sent, 0), 1)
    return tl.where(sent_here > 0, order, empty)
