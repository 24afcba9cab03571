"""Tile primitives at work, on emulated ranks: every rank sends its rows to all, stage by stage, and
adds up what comes, a stage at a time. python examples/09_tiles.py"""

import torch
import triton
import triton.language as tl

from moe_engine import symm
from moe_engine.device import tiles
from moe_engine.device.lang import as_pointer, consume_token, ticks
from moe_engine.emulation import RankPool
from moe_engine.symm.slots import SlotLayout, Slots

ROWS, WORDS, STAGE_ROWS, RANKS = 10, 16, 4, 2
STAGES = -(-ROWS // STAGE_ROWS)


@triton.jit
def push_kernel(x, blocks, written, context, rank, N, W, STAGE, COUNT, RANKS: tl.constexpr):
    """Copy rows of x [N, W] to all ranks, dealt to the programs as (peer, row)."""
    for stage in range(0, COUNT):
        for first in range(tl.program_id(0), STAGE * RANKS, tl.num_programs(0) * 4):
            places = first + tl.arange(0, 4) * tl.num_programs(0)
            peers, rows = tiles.deal(places, RANKS)
            inside = (rows < STAGE) & (stage * STAGE + rows < N)
            row = (stage * STAGE + rows).to(tl.int64)
            to = tl.where(inside, tl.load(blocks + peers) + (rank * N + row) * W * 4, 0)
            tiles.put_tile(to, x + row * W, 4, W, ticks(), 0, 4, False, 16)
        tiles.notify_stage(
            written + stage, tl.num_programs(0), tiles.DISPATCH, stage, context, RANKS
        )


@triton.jit
def sum_kernel(block, out, context, N, W: tl.constexpr, STAGE, COUNT, RANKS: tl.constexpr):
    """out [N, W]: the sum of all ranks' rows, each stage as soon as it is there."""
    for stage in range(0, COUNT):
        token = tiles.wait_stage(tiles.DISPATCH, stage, context, RANKS)
        rows = as_pointer(consume_token(block.to(tl.int64), token), tl.int32)
        for row in range(stage * STAGE, tl.minimum(stage * STAGE + STAGE, N)):
            total = tl.zeros([W], tl.int32)
            for source in range(0, RANKS):
                total += tl.load(rows + (source * N + row) * W + tl.arange(0, W))
            tl.store(out + row * W + tl.arange(0, W), total)


def run(group):
    rank = torch.distributed.get_rank(group)
    slots = Slots(lambda size, _: symm.allocate(group, size), SlotLayout(RANKS, 1024), rank, 10.0)
    rows = symm.allocate(group, RANKS * ROWS * WORDS * 4)
    x = torch.arange(ROWS * WORDS, dtype=torch.int32).view(ROWS, WORDS) * (rank + 1)
    out, written = torch.empty_like(x), torch.zeros(STAGES, dtype=torch.int64)
    sizes = ROWS, WORDS, STAGE_ROWS, STAGES, RANKS
    push_kernel[(3,)](x, rows.peer_addresses, written, slots.context.fields, rank, *sizes)
    sum_kernel[(1,)](rows.local, out, slots.context.fields, *sizes)
    torch.distributed.barrier(group)
    return out


if __name__ == "__main__":
    with RankPool(RANKS, "cpu") as pool:
        want = torch.arange(ROWS * WORDS, dtype=torch.int32).view(ROWS, WORDS) * 3
        assert all(torch.equal(out, want) for out in pool.run(run))
    print(f"{RANKS} ranks sent {ROWS} rows each in {STAGES} stages; all sums are right.")
