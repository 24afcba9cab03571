"""Dispatch and the up-projection in one launch."""

import triton
import triton.language as tl

from ..context import NUM_RANKS
from ..grouped_gemm.kernels import finish_tile, gemm_tile
from ..grouped_gemm.schedule_kernels import unpack_tile
from ..lang import as_pointer, consume_token, device_function, is_broken, own_block
from ..slots_kernels import raise_rows, wait_sources
from ..stages_kernels import first_distance, first_tiles, load_staged_tile, stage_of
from ..work import (
    agreed,
    begin_claim,
    end_claim,
    finish_call,
    is_last,
    is_last_program,
    let_next_start,
    wait_for_previous,
)
from .kernels import push_rows


@triton.jit(
    do_not_specialize=["num_push_programs", "stage_count", "num_tokens", "N"],
    do_not_specialize_on_alignment=["row_offset", "tiles", "first_tile", "pushed"],
)
def dispatch_gemm_kernel(
    x,  # words [T, num_words]
    num_tokens_per_rank,  # int32 [R]
    send_token_idx,  # int32 [R, T]
    row_offset,  # int64 [M]
    w,  # descriptor of the weights, see `gemm_tile`
    out,  # ragged descriptor of [1, M, N]
    tiles,  # int64 [max_tiles], sorted by stage
    first_tile,  # int32 [S + 1]: tile that begins each stage
    pushed,  # int64 [S]: programs that have pushed their share of each stage
    context,
    num_push_programs,
    stage_count,
    num_tokens,
    num_words,
    header_bytes,
    row_bytes,
    N,
    RANKS_PAD: tl.constexpr,
    STAGES_PAD: tl.constexpr,
    CHUNK_ROWS: tl.constexpr,
    SPAN: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    SUBTILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out [M, N] = silu(gate) * up of the received rows, while this rank's rows are on their way.

    Programs 0 .. num_push_programs - 1 push, stage by stage; the others compute. More programs than
    fit: when one has pushed, one that computes takes its place. These take tiles from one counter,
    in order of stage, and wait for a stage's rows where they come to it: for rows that this rank's
    peers push, never for one another. The last program releases the slot.
    An early launch behind the expert plan.
    """
    let_next_start(OVERLAP)
    if tl.program_id(0) < num_push_programs:
        if is_broken(context) == 0:
            for stage in range(0, stage_count):
                first = first_distance(stage, stage_count, context)
                end = first_distance(stage + 1, stage_count, context)
                if end > 1:
                    # fmt: off
                    push_rows(
                        x, num_tokens_per_rank, send_token_idx, context, tl.program_id(0),
                        num_push_programs, tl.maximum(first, 1), end, num_tokens, num_words,
                        header_bytes, row_bytes, False, True, RANKS_PAD, CHUNK_ROWS, SPAN, LANES,
                        BLOCK_WORDS, OVERLAP,
                    )
                    # fmt: on
                    if is_last(pushed + stage, num_push_programs):
                        if is_broken(context) == 0:  # else some program may have pushed nothing
                            raise_rows(tl.maximum(first, 1), end, context, RANKS_PAD)
        wait_for_previous(OVERLAP)
    else:
        wait_for_previous(OVERLAP)
        K = tl.cast(num_words * (32 // out.dtype.primitive_bitwidth), tl.int32)
        num_n = tl.cdiv(N, BLOCK_N // 2)
        first_m = first_tiles(first_tile, stage_count, num_n, STAGES_PAD)
        num_tiles = tl.load(first_tile + stage_count) * num_n
        num_programs = tl.num_programs(0) - num_push_programs
        num_ranks = tl.load(context + NUM_RANKS).to(tl.int32)
        block_address = own_block(context)
        there = tl.full((), 1, tl.int32)  # distance up to which all rows are there
        token = 1 - is_broken(context).to(tl.int32)
        tile = end_claim(begin_claim(context))
        # What tells of the next tile is asked for a tile ahead, as each answer takes a while.
        claimed = begin_claim(context)
        word, block = load_staged_tile(tiles, tile, first_m, num_tiles, num_n, GROUP_M)
        offsets = _row_offsets(row_offset, word, BLOCK_M)
        while agreed((tile < num_tiles) & (token == 1)):
            # In a `for`, as only there the store of a tile goes on beside the next one.
            for _ in range(0, tl.cdiv(num_tiles - tile, num_programs)):
                if agreed((tile < num_tiles) & (token == 1)):
                    if agreed(there < num_ranks):
                        stage = stage_of(tile, first_m, num_n)
                        end = first_distance(stage + 1, stage_count, context)
                        if agreed(there < end):
                            # Of all stages so far, also those of which this program had no tile.
                            token = wait_sources(there, end, context, RANKS_PAD)
                            there = end
                    base = as_pointer(consume_token(block_address, token), out.dtype)
                    expert, row, end_row = unpack_tile(word)
                    n = block * (BLOCK_N // 2)
                    rows = tl.multiple_of(base + offsets, 16)
                    tile = end_claim(claimed)
                    claimed = begin_claim(context)
                    word, block = load_staged_tile(tiles, tile, first_m, num_tiles, num_n, GROUP_M)
                    # fmt: off
                    acc = gemm_tile(
                        rows, w, row, end_row, expert, n, 0, K, K,
                        True, False, 2, BLOCK_M, BLOCK_N, BLOCK_K,
                    )
                    offsets = _row_offsets(row_offset, word, BLOCK_M)
                    finish_tile(
                        acc, out, None, None, None, 0, row, end_row, expert, n, N, "swiglu",
                        SUBTILES,
                    )
                    # fmt: on
    if is_broken(context) == 0:
        if is_last_program(context):
            finish_call(context)


@device_function
def _row_offsets(row_offset, word, BLOCK_M: tl.constexpr):
    """Where the rows of a packed tile lie; past its end the last one's."""
    _, row, end = unpack_tile(word)
    rows = tl.minimum(row + tl.arange(0, BLOCK_M), end - 1)
    return tl.load(row_offset + tl.maximum(rows, 0))
