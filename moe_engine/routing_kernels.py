"""Routing on the device: top-k ids to counts, send slots and expert lists, by prefix sums.

No atomics decide a place, so the same routing always gives the same plan.
"""

import triton
import triton.language as tl

from .context import BAD_IDS, NUM_RANKS, RANK, REPORT_BAD_IDS
from .lang import (
    as_pointer,
    consume_token,
    device_function,
    is_broken,
    own_block,
    report_words,
)
from .slots_kernels import payload_address, received_rows, region, wait_rows
from .work import let_next_start


@triton.jit(do_not_specialize=["num_tokens"])
def layout_kernel(
    topk_idx,  # int64 [T, K]
    block_counts,  # int32 [B, E + R], out: what each block of tokens sends to experts and ranks
    is_token_in_rank,  # uint8 [T, R], out
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
    lanes = tl.arange(0, TOPK_PAD)
    inside = (tokens < num_tokens)[:, None] & (lanes < NUM_TOPK)[None, :]
    ids = tl.load(topk_idx + tokens[:, None] * NUM_TOPK + lanes[None, :], mask=inside, other=-1)
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
    block_counts,  # int32 [B, E + R]
    num_tokens_per_expert,  # int32 [E], out
    num_tokens_per_rank,  # int32 [R], out
    context,
    num_blocks,
    num_experts,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Add up the blocks' counts, COLUMNS of them per program; program 0 reports bad ids."""
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.int32)
    for first in range(0, num_blocks, BLOCK):
        blocks = first + tl.arange(0, BLOCK)
        inside = (blocks < num_blocks)[:, None] & (columns < num_experts + num_ranks)[None, :]
        at = blocks[:, None] * (num_experts + num_ranks) + columns[None, :]
        total += tl.sum(tl.load(block_counts + at, mask=inside, other=0), 0)
    tl.store(num_tokens_per_expert + columns, total, mask=columns < num_experts)
    ranks = columns - num_experts
    tl.store(num_tokens_per_rank + ranks, total, mask=(ranks >= 0) & (ranks < num_ranks))
    if tl.program_id(0) == 0:
        tl.store(report_words(context) + REPORT_BAD_IDS, tl.load(context + BAD_IDS))


@triton.jit(do_not_specialize=["num_tokens"])
def send_plan_kernel(
    is_token_in_rank,  # uint8 [T, R]
    topk_idx,  # int64 [T, K], or anything without HAS_IDS
    send_token_idx,  # int32 [R, T], out: token of each row sent to each rank
    send_head,  # int32 [T, R], out: row * R + rank in the order of the final sum, then -1
    num_tokens,
    num_local_experts,
    HAS_IDS: tl.constexpr,
    NUM_TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    RANKS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    SCAN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program (c, d) gives rows to the tokens of block c that go to rank d, in token order.

    `send_head` lists a token's rows in the order in which the source will sum them: ranks by
    their right-most top-k lane, or by number where there are no ids. Example, 2 ranks of 2
    experts, topk_idx [[0, 3], [2, 1], [3, 2], [0, 1]]:

        rows to rank 0: tokens 0, 1, 3;  to rank 1: tokens 0, 1, 2
        send_head as (row, rank): token 0 (0, 0) (0, 1);  token 1 (1, 1) (1, 0);
                                  token 2 (2, 1);         token 3 (2, 0)
    """
    let_next_start(OVERLAP)
    rank = tl.program_id(1)
    num_ranks = tl.num_programs(1)
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
    lanes = tl.arange(0, TOPK_PAD)
    owner = tl.full([BLOCK, TOPK_PAD], -1, tl.int32)
    if HAS_IDS:
        id_inside = inside[:, None] & (lanes < NUM_TOPK)[None, :]
        ids = tl.load(
            topk_idx + tokens[:, None] * NUM_TOPK + lanes[None, :], mask=id_inside, other=-1
        )
        valid = (ids >= 0) & (ids < num_local_experts * num_ranks)
        owner = tl.where(valid, ids // num_local_experts, -1).to(tl.int32)
    last_lane = tl.max(tl.where(owner == rank, lanes[None, :], -1), 1)
    ranks = tl.arange(0, RANKS_PAD)
    is_sent = tl.load(
        is_token_in_rank + tokens[:, None] * num_ranks + ranks[None, :],
        mask=inside[:, None] & (ranks < num_ranks)[None, :],
        other=0,
    ).to(tl.int32)
    place = tl.zeros([BLOCK], tl.int32)
    for other in range(0, num_ranks):
        other_last = tl.max(tl.where(owner == other, lanes[None, :], -1), 1)
        other_sent = tl.sum(tl.where((ranks == other)[None, :], is_sent, 0), 1)
        is_earlier = (other_last < last_lane) | ((other_last == last_lane) & (other < rank))
        place += tl.where(is_earlier, other_sent, 0)
    # Where a token does not go to this rank, an empty place behind those of its rows.
    is_empty_before = (ranks < rank)[None, :] & (is_sent == 0)
    empty = tl.sum(is_sent, 1) + tl.sum(is_empty_before.to(tl.int32), 1)
    goes = inside & (sent > 0)
    tl.store(send_token_idx + rank * num_tokens + row, tokens, mask=goes)
    to = send_head + tokens * num_ranks + tl.where(sent > 0, place, empty)
    tl.store(to, tl.where(sent > 0, row * num_ranks + rank, -1), mask=inside)


@device_function
def _block_ids(
    source,
    block,
    num_rows,
    context,
    header_bytes,
    row_bytes,
    ids_offset,
    NUM_TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Local expert ids [ROWS * TOPK_PAD] (-1 where none) of a block of received rows, and the
    addresses [ROWS] of the rows in the slot."""
    rows = block * ROWS + tl.arange(0, ROWS)
    lanes = tl.arange(0, TOPK_PAD)
    address = region(source, context) + header_bytes + rows.to(tl.int64) * row_bytes
    pointers = as_pointer(address + ids_offset, tl.int32)
    inside = (rows < num_rows)[:, None] & (lanes < NUM_TOPK)[None, :]
    ids = tl.load(pointers[:, None] + lanes[None, :], mask=inside, other=-1)
    return tl.reshape(ids, [ROWS * TOPK_PAD]), address


@triton.jit
def expert_count_kernel(
    rank_prefix_matrix,  # int32 [R, R]
    block_counts,  # int32 [R, B, L], out: rows of each expert in each block of each source
    context,
    num_local_experts,
    header_bytes,
    row_bytes,
    ids_offset,
    NUM_TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK_ROWS: tl.constexpr,
):
    """Program (b, s) waits for block b of source s and counts its rows by expert."""
    if is_broken(context):
        return
    block = tl.program_id(0)
    source = tl.program_id(1)
    num_rows = received_rows(rank_prefix_matrix, source, context)
    if block * ROWS < num_rows:
        rows = block * ROWS + tl.arange(0, ROWS)
        token = wait_rows(source, rows, rows < num_rows, context, CHUNK_ROWS)
        if token == 1:
            ids, _ = _block_ids(
                source,
                block,
                num_rows,
                context,
                consume_token(header_bytes.to(tl.int64), token),
                row_bytes,
                ids_offset,
                NUM_TOPK,
                TOPK_PAD,
                ROWS,
            )
            experts = tl.arange(0, EXPERTS_PAD)
            counts = tl.histogram(tl.where(ids >= 0, ids, 0), EXPERTS_PAD, mask=ids >= 0)
            at = (source * tl.num_programs(0) + block) * num_local_experts + experts
            tl.store(block_counts + at, counts, mask=experts < num_local_experts)


@triton.jit(do_not_specialize=["max_rows"])
def expert_plan_kernel(
    x,  # [T, H], this rank's tokens: their rows are read there, not in the slot
    rank_prefix_matrix,  # int32 [R, R]
    recv_expert_counts,  # int32 [R, L]
    expert_offsets,  # int32 [L + 1]
    block_counts,  # int32 [R, B, L]
    row_offset,  # int64 [M], out: each expert row, in elements from the symmetric block's start
    expert_row,  # int32 [R, max_rows, K], out: place of each lane in row_offset, or -1
    lane_weight,  # float32 [R, max_rows, K], out
    context,
    max_rows,
    num_local_experts,
    header_bytes,
    row_bytes,
    ids_offset,
    weights_offset,
    token_offset,
    hidden,
    ITEM_BYTES: tl.constexpr,
    NUM_TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (b, s) places the rows of block b of source s in the lists of their experts.

    Within an expert rows stand in stage order (this rank's own first, then rank - 1, ...), then
    in order of arrival: row, lane. Example, rank 0 of 2, 2 local experts, K = 2, received ids
    [[0, 1], [1, -1]] from rank 0 and [[0, -1]] from rank 1 (max_rows 2):

        expert_offsets [0, 2, 4];  row_offset of (source, row) = (0,0) (1,0) | (0,0) (0,1)
        expert_row[0] = [[0, 2], [3, -1]];  expert_row[1] = [[1, -1], unwritten]
    """
    if is_broken(context):
        return
    block = tl.program_id(0)
    source = tl.program_id(1)
    num_rows = received_rows(rank_prefix_matrix, source, context)
    if block * ROWS >= num_rows:
        return
    ids, address = _block_ids(
        source,
        block,
        num_rows,
        context,
        header_bytes,
        row_bytes,
        ids_offset,
        NUM_TOPK,
        TOPK_PAD,
        ROWS,
    )
    experts = tl.arange(0, EXPERTS_PAD)
    real = experts < num_local_experts
    base = tl.load(expert_offsets + experts, mask=real, other=0)
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    rank = tl.load(context + RANK).to(tl.int32)
    for stage in range(0, (rank - source + num_ranks) % num_ranks):
        earlier = (rank - stage + num_ranks) % num_ranks
        base += tl.load(recv_expert_counts + earlier * num_local_experts + experts, real, 0)
    for earlier_block in range(0, block):
        at = (source * tl.num_programs(0) + earlier_block) * num_local_experts + experts
        base += tl.load(block_counts + at, mask=real, other=0)

    chosen = (ids[:, None] == experts[None, :]).to(tl.int32)
    earlier_items = tl.cumsum(chosen, 0) - chosen
    place = tl.sum(chosen * (earlier_items + base[None, :]), 1)
    place = tl.reshape(place, [ROWS, TOPK_PAD])
    is_local = tl.reshape(ids, [ROWS, TOPK_PAD]) >= 0

    rows = block * ROWS + tl.arange(0, ROWS)
    lanes = tl.arange(0, TOPK_PAD)
    token_pointers = as_pointer(address + token_offset, tl.int32)
    tokens = tl.load(token_pointers, mask=rows < num_rows, other=0)
    payload = payload_address(x, source, address, tokens, hidden, context)
    offset = (payload - own_block(context)) // ITEM_BYTES
    tl.store(row_offset + place, tl.broadcast_to(offset[:, None], [ROWS, TOPK_PAD]), mask=is_local)
    inside = (rows < num_rows)[:, None] & (lanes < NUM_TOPK)[None, :]
    weights = as_pointer(address + weights_offset, tl.float32)[:, None] + lanes[None, :]
    at = (source * max_rows + rows)[:, None] * NUM_TOPK + lanes[None, :]
    tl.store(expert_row + at, tl.where(is_local, place, -1), mask=inside)
    tl.store(lane_weight + at, tl.load(weights, mask=inside, other=0.0), mask=inside)
