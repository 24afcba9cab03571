"""What a GEMM gains that leaves SMs to communication: python bench/concurrent_gemm.py

A layer over several nodes in two parts (moe_engine/engines/internode_layer.py) multiplies the rows
of its own node while few programs on a stream of their own forward, receive and return the others.
Here a kernel stands for them that only waits: as many programs, none of which fits on an SM
together with one of the GEMM. Verb `up` is the first product of DeepSeek-V3's experts on 16 ranks
of two nodes, for 4096 tokens of each: half of the rows of a rank. `ratio` is over the GEMM on all
SMs with nothing else.
"""

from __future__ import annotations

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
from moe_engine.grouped_gemm.launch import multiply
from moe_engine.grouped_gemm.operands import Epilogue, Rows, Weights
from moe_engine.layer_config import MODELS

MODEL, RANKS, NODES, TOKENS = "deepseek-v3", 16, 2, 4096
ROUNDS = 25
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
    num_experts, hidden, columns, num_topk = MODELS[MODEL]
    num_local, num_rows = num_experts // RANKS, TOKENS * num_topk // NODES
    x = torch.randn(num_rows, hidden, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(num_local, 2 * columns, hidden, device="cuda", dtype=torch.bfloat16)
    out, config = x.new_empty(num_rows, columns), gemm_config(w, num_rows, "swiglu")
    ends = torch.arange(num_local + 1, device="cuda") * (num_rows // num_local)
    schedule = tile_schedule(ends.int(), num_rows, config.block_m)
    side = torch.cuda.Stream()

    def run(num_free_sms: int, is_busy: bool) -> float:
        """Microseconds of the GEMM."""
        times = []
        for _ in range(ROUNDS):
            torch.cuda.synchronize()
            if is_busy:
                with torch.cuda.stream(side):
                    busy_kernel[(NUM_CONCURRENT,)](BUSY_US * 1000, num_warps=NUM_WARPS)
            torch.cuda._sleep(200_000)  # until the other programs run
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            how = schedule, num_rows, out, config, num_free_sms
            multiply(Rows(x), Weights(w), Epilogue("swiglu"), *how)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        return median(times[5:])

    alone = run(0, False)
    for free, is_busy in (0, False), (NUM_CONCURRENT, False), (0, True), (NUM_CONCURRENT, True):
        us, impl = run(free, is_busy), f"{free} SMs free" + ", others busy" * is_busy
        line: dict[str, Any] = dict(
            verb="up", model=MODEL, tokens=TOKENS, ranks=RANKS, dtype="bf16"
        )
        line |= dict(impl=impl, us=round(us, 1), ratio_to="0 SMs free", ratio=round(us / alone, 3))
        flops = 4 * num_rows * hidden * columns
        print(save("concurrent_gemm", path, **line, tflops=round(flops / us / 1e6)), flush=True)


if __name__ == "__main__":
    typer.run(main)
