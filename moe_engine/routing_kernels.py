"""Routing on the device: top-k ids to counts, send slots and expert lists, by prefix sums.

No atomics decide a place, so the same routing always gives the same plan.
"""

import triton
import triton.language as tl

from .context import BAD_IDS, NUM_RANKS, REPORT_BAD_IDS
from .lang import (
    as_pointer,
    consume_token,
    own_block,
    report_words,
)
from .slots_kernels import (
    payload_address,
    received_rows,
    region,
    source_at,
    wait_metadata,
    wait_rows,
)
from .work import let_next_start, wait_for_previous


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
        tl.store(report_words(context) + REPORT_BAD_IDS, tl.load(context + BAD_IDS))


@triton.jit(do_not_specialize=["num_tokens", "num_experts"])
def lane_index_kernel(
    topk_idx,  # int64 [T, K]
    earlier_counts,  # int32 [B, E + R], `block_counts` of `layout_sum_kernel`
    lane_index,  # int32 [T, K], out: how many earlier lanes of this rank have the same expert
    num_tokens,
    num_experts,
    row_length,  # E + R
    NUM_TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program b numbers the lanes of block b, token by token, lane by lane; the blocks are those of
    `layout_kernel`. An early launch behind the send plan, of which it reads nothing.

    topk_idx [[0, 3], [2, 0], [3, 2], [0, 1]]: lane_index [[0, 0], [0, 1], [1, 1], [2, 0]].
    """
    let_next_start(OVERLAP)
    first = tl.program_id(0) * BLOCK
    items = tl.arange(0, BLOCK * TOPK_PAD)
    tokens = first + items // TOPK_PAD
    lanes = items % TOPK_PAD
    inside = (tokens < num_tokens) & (lanes < NUM_TOPK)
    ids = tl.load(topk_idx + tokens * NUM_TOPK + lanes, mask=inside, other=-1).to(tl.int32)
    valid = (ids >= 0) & (ids < num_experts)
    at = earlier_counts + tl.program_id(0) * row_length + ids
    index = tl.load(at, mask=valid, other=0)
    for start in tl.static_range(0, BLOCK * TOPK_PAD, STEP):  # unrolled: all reads at once
        others = start + tl.arange(0, STEP)
        other_tokens = first + others // TOPK_PAD
        real = (other_tokens < num_tokens) & (others % TOPK_PAD < NUM_TOPK)
        from_lane = topk_idx + other_tokens * NUM_TOPK + others % TOPK_PAD
        theirs = tl.load(from_lane, mask=real, other=-1).to(tl.int32)
        is_earlier = (theirs[None, :] == ids[:, None]) & (others[None, :] < items[:, None])
        index += tl.sum(is_earlier.to(tl.int32), 1)
    index = tl.where(valid, index, 0)
    tl.store(lane_index + tokens * NUM_TOPK + lanes, index, mask=inside)
    wait_for_previous(OVERLAP)


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


@triton.jit(do_not_specialize=["max_rows"])
def expert_plan_kernel(
    x,  # [T, H], this rank's tokens: their rows are read there, not in the slot
    rank_prefix_matrix,  # int32 [R, R]
    row_offset,  # int64 [M], out: each expert row, in elements from the symmetric block's start
    expert_row,  # int32 [R, max_rows, K], out: places of each row's lanes in row_offset, then -1
    lane_weight,  # float32 [R, max_rows, K], out
    first_tile,  # int32 [num_turns]: set to 0, no tiles, if rows do not come
    context,
    max_rows,
    num_turns,
    header_bytes,
    row_bytes,
    places_offset,
    weights_offset,
    token_offset,
    hidden,
    ITEM_BYTES: tl.constexpr,
    NUM_TOPK: tl.constexpr,
    TOPK_PAD: tl.constexpr,
    TURNS_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK_ROWS: tl.constexpr,
    WAIT_PAYLOAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """List the received rows by expert, at the places that their senders gave them.

    Waits for the rows' metadata, or with WAIT_PAYLOAD for whole rows. Within an expert rows stand
    by distance of their source (this rank's own first, then those of rank - 1, ...), then in order
    of arrival: row, lane. Example, rank 0 of 2, 2 local experts, K = 2, rows for experts
    [[0, 1], [1, -1]] from rank 0 and [[0, -1]] from rank 1 (max_rows 2):

        places [[0, 2], [3, -1]] and [[1, -1]];  expert_offsets [0, 2, 4]
        row_offset of (source, row) = (0,0) (1,0) | (0,0) (0,1)
        expert_row[0] = [[0, 2], [3, -1]];  expert_row[1] = [[1, -1], unwritten]

    In expert_row the lanes with a place come first, in their order, and -1 behind them.

    An early launch behind the metadata's, and one behind it may begin at once.
    """
    let_next_start(OVERLAP)
    num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
    lanes = tl.arange(0, TOPK_PAD)
    num_blocks = tl.cdiv(max_rows, ROWS)
    for block in range(tl.program_id(0), num_blocks * num_ranks, tl.num_programs(0)):
        source = source_at(block, context)
        rows = block // num_ranks * ROWS + tl.arange(0, ROWS)
        is_row = rows < received_rows(rank_prefix_matrix, source, context)
        if WAIT_PAYLOAD:
            token = wait_rows(source, rows, is_row, context, CHUNK_ROWS)
        else:
            token = wait_metadata(source, is_row, context)
        if token == 0:  # a GEMM would read through places that nobody wrote
            turns = tl.arange(0, TURNS_PAD)
            tl.store(first_tile + turns, turns * 0, mask=turns < num_turns)
        is_row = is_row & (token == 1)
        slot = consume_token(region(source, context) + header_bytes, token)
        address = slot + rows.to(tl.int64) * row_bytes
        inside = is_row[:, None] & (lanes < NUM_TOPK)[None, :]
        places = as_pointer(address + places_offset, tl.int32)[:, None] + lanes[None, :]
        place = tl.load(places, mask=inside, other=-1)
        weights = as_pointer(address + weights_offset, tl.float32)[:, None] + lanes[None, :]
        weight = tl.load(weights, mask=inside, other=0.0)
        tokens = tl.load(as_pointer(address + token_offset, tl.int32), mask=is_row, other=0)
        payload = payload_address(x, source, address, tokens, hidden, context)
        offset = (payload - own_block(context)) // ITEM_BYTES
        offsets = tl.broadcast_to(offset[:, None], [ROWS, TOPK_PAD])
        tl.store(row_offset + place, offsets, mask=place >= 0)
        is_local = place >= 0
        at = (source * max_rows + rows)[:, None] * NUM_TOPK
        to = at + tl.cumsum(is_local.to(tl.int32), 1) - 1
        tl.store(expert_row + to, place, mask=is_local)
        tl.store(lane_weight + to, weight, mask=is_local)
        num_local = tl.sum(is_local.to(tl.int32), 1)
        is_rest = inside & (lanes[None, :] >= num_local[:, None])
        tl.store(expert_row + at + lanes[None, :], -1, mask=is_rest)
    wait_for_previous(OVERLAP)
