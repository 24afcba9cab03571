"""Tile primitives in two kernels: ranks, emulated here, send their rows to all ranks in stages, and
add up each stage as soon as it has arrived. python examples/09_tiles.py"""

import torch
import triton
import triton.language as tl

from moe_engine import symm
from moe_engine.device import tiles
from moe_engine.device.lang import as_pointer, consume_token, ticks
from moe_engine.emulation import RankPool
from moe_engine.symm.slots import SlotLayout, Slots

ROWS, COLUMNS, STAGE_ROWS, STAGES, RANKS = 10, 16, 4, 3, 2


@triton.jit
def push_kernel(x, blocks, written, context, rank, N, H, ROWS, STAGES, RANKS: tl.constexpr):
    """Copy x [N, H] to all ranks in stages of ROWS rows, 4 rows of a program at a time."""
    for stage in range(0, STAGES):
        for first in range(tl.program_id(0), ROWS * RANKS, tl.num_programs(0) * 4):
            peers, rows = tiles.deal(first + tl.arange(0, 4) * tl.num_programs(0), RANKS)
            row = (stage * ROWS + rows).to(tl.int64)
            to = tl.load(blocks + peers) + (rank * N + row) * H * 4
            to = tl.where((rows < ROWS) & (row < N), to, 0)
            tiles.put_tile(to, x + row * H, 4, H, ticks(), 0, 4, False, 16)
        counter = written + stage
        tiles.notify_stage(counter, tl.num_programs(0), tiles.DISPATCH, stage, context, RANKS)


@triton.jit
def sum_kernel(block, out, context, N, H: tl.constexpr, ROWS, STAGES, RANKS: tl.constexpr):
    """out [N, H]: the sum of all ranks' rows."""
    for stage in range(0, STAGES):
        ready = tiles.wait_stage(tiles.DISPATCH, stage, context, RANKS)
        rows = as_pointer(consume_token(block.to(tl.int64), ready), tl.int32) + tl.arange(0, H)
        for row in range(stage * ROWS, tl.minimum(stage * ROWS + ROWS, N)):
            total = tl.zeros([H], tl.int32)
            for source in range(0, RANKS):
                total += tl.load(rows + (source * N + row) * H)
            tl.store(out + row * H + tl.arange(0, H), total)


def run(group):
    slots = Slots(lambda n, _: symm.allocate(group, n), SlotLayout(RANKS, 1024), group.rank(), 10.0)
    block, context = symm.allocate(group, RANKS * ROWS * COLUMNS * 4), slots.context.fields
    x = torch.arange(ROWS * COLUMNS, dtype=torch.int32).view(ROWS, COLUMNS) * (group.rank() + 1)
    out, written = torch.empty_like(x), torch.zeros(STAGES, dtype=torch.int64)
    sizes = ROWS, COLUMNS, STAGE_ROWS, STAGES, RANKS
    push_kernel[(3,)](x, block.peer_addresses, written, context, group.rank(), *sizes)
    sum_kernel[(1,)](block.local, out, context, *sizes)
    torch.distributed.barrier(group)
    return torch.equal(out, x // (group.rank() + 1) * 3)


if __name__ == "__main__":
    with RankPool(RANKS, "cpu") as pool:
        assert all(pool.run(run))
    print(f"{RANKS} ranks sent {ROWS} rows each in {STAGES} stages; all sums are right.")
