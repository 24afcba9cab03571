"""What a GEMM gains that leaves SMs to communication: python bench/concurrent_gemm.py

A layer over several nodes (moe_engine/engines/internode_layer.py) multiplies while few programs on
a stream of their own forward, receive and return rows. Here a kernel stands for them that only
waits: as many programs, none of which fits on an SM together with one of the GEMM. Verbs are `up`,
the first product of DeepSeek-V3's experts on 16 ranks of two nodes, for 4096 tokens of each: half
of the rows of a rank, as in a layer of two parts; and `wgrad`, the gradient of its weights for as
many rows. `ratio` is over the GEMM on all SMs with nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import triton
import typer
from _common import save

from moe_engine.device.lang import ticks
from moe_engine.dispatch import NUM_CONCURRENT
from moe_engine.grouped_gemm import gemm_config, tile_schedule
from moe_engine.grouped_gemm.backward import launch_wgrad
from moe_engine.grouped_gemm.launch import multiply
from moe_engine.grouped_gemm.operands import Epilogue, Rows, Weights
from moe_engine.layer_config import MODELS

MODEL, RANKS, NODES, TOKENS = "deepseek-v3", 16, 2, 4096
EXPERTS, HIDDEN, COLUMNS, TOPK = MODELS[MODEL]
NUM_LOCAL, NUM_ROWS = EXPERTS // RANKS, TOKENS * TOPK // NODES
FLOPS = 4 * NUM_ROWS * HIDDEN * COLUMNS
ROUNDS, WARM_UP = 25, 5
BUSY_US = 5000
"""How long the other programs wait, longer than any GEMM here."""
NUM_WARPS = 32
"""Of a program that waits: it takes more registers than a GEMM leaves on an SM."""


@triton.jit
def busy_kernel(num_ns):
    """Wait."""
    end = ticks() + num_ns
    while ticks() < end:
        pass


def main(path: Annotated[Path | None, typer.Option(help="Result file.")] = None) -> None:
    """Run the bench on one GPU."""
    side, ways = torch.cuda.Stream(), [*product((0, NUM_CONCURRENT), (False, True))]
    for verb, launch in products().items():
        # In turns, as the clock of the GPU changes.
        rounds = [[run(launch, *way, side) for way in ways] for _ in range(ROUNDS)][WARM_UP:]
        medians = [median(times) for times in zip(*rounds, strict=True)]
        for us, (free, is_busy) in zip(medians, ways, strict=True):
            line: dict[str, Any] = dict(
                verb=verb, model=MODEL, tokens=TOKENS, ranks=RANKS, dtype="bf16", us=round(us, 1)
            )
            line["impl"] = f"{free} SMs free" + ", others busy" * is_busy
            line |= dict(ratio_to="0 SMs free", ratio=round(us / medians[0], 3))
            print(save("concurrent_gemm", path, **line, tflops=round(FLOPS / us / 1e6)), flush=True)


def products() -> dict[str, Callable[[int], object]]:
    """By verb, what launches the product that leaves so many SMs."""
    x = torch.randn(NUM_ROWS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(NUM_LOCAL, 2 * COLUMNS, HIDDEN, device="cuda", dtype=torch.bfloat16)
    out, config = x.new_empty(NUM_ROWS, COLUMNS), gemm_config(w, NUM_ROWS, "swiglu")
    ends = torch.arange(NUM_LOCAL + 1, device="cuda") * (NUM_ROWS // NUM_LOCAL)
    schedule = tile_schedule(ends.int(), NUM_ROWS, config.block_m)
    grad, of_w = x.new_ones(NUM_ROWS, 2 * COLUMNS), torch.empty_like(w)

    def up(num_free_sms: int) -> object:
        how = schedule, NUM_ROWS, out, config, num_free_sms
        return multiply(Rows(x), Weights(w), Epilogue("swiglu"), *how)

    def wgrad(num_free_sms: int) -> object:
        return launch_wgrad(grad, x, schedule.offsets, None, of_w, False, num_free_sms)

    return dict(up=up, wgrad=wgrad)


def run(
    launch: Callable[[int], object], num_free_sms: int, is_busy: bool, side: torch.cuda.Stream
) -> float:
    """Microseconds of a product."""
    torch.cuda.synchronize()
    if is_busy:
        with torch.cuda.stream(side):
            busy_kernel[(NUM_CONCURRENT,)](BUSY_US * 1000, num_warps=NUM_WARPS)
    torch.cuda._sleep(200_000)  # until the other programs run
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    launch(num_free_sms)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end) * 1e3)


if __name__ == "__main__":
    typer.run(main)
