"""The grouped GEMM family on one GPU against torch and cuBLAS: python bench/grouped_gemm.py

Every figure is the time of a whole call, with its tile schedule, in CUDA graphs and under sustained
load, see `time_sustained`. Results are checked first: forward against fp32 products of the first
and the last expert's rows, the others against torch. Measured tile shapes are not used. `cublas` is
a dense product of as many FLOPs; `floor` is the bytes of the weights at 4.3 TB/s. gather_swiglu is
compared with index_select, torch._grouped_mm and a kernel of its own for silu(gate) * up, or
torch's two. `ratio` is the time of `impl` over that of `ratio_to`.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import triton
import typer
from _common import save, silu_mul_kernel
from rich.console import Console
from rich.table import Table

from moe_engine.grouped_gemm import dgrad, grouped_gemm, wgrad
from moe_engine.hardware import H200
from moe_engine.layer_config import MODELS
from moe_engine.timing import Call, capture, replay_us

os.environ["MOE_ENGINE_CACHE"] = tempfile.mkdtemp()
EXPERTS = {"mixtral-8x7b": 2, "qwen2-57b": 16, "qwen3-30b": 32, "deepseek-v3": 64}
ROWS = {"mixtral-8x7b": 16384}
GRAPH_US = 5000.0


@dataclass(frozen=True)
class Shape:
    """One projection of a model: w [num_experts, columns, depth], rows in all, how they spread."""

    model: str
    projection: str
    num_experts: int
    columns: int
    depth: int
    rows: int
    routing: str = "uniform"

    @classmethod
    def of(cls, model: str, projection: str, **changes: Any) -> Shape:
        _, hidden, intermediate, _ = MODELS[model]
        columns, depth = (
            (2 * intermediate, hidden) if projection == "up" else (hidden, intermediate)
        )
        sizes = dict(num_experts=EXPERTS[model], rows=ROWS.get(model, 65536))
        return cls(model, projection, columns=columns, depth=depth, **sizes | changes)

    @property
    def flop(self) -> float:
        return 2.0 * self.rows * self.columns * self.depth

    def counts(self) -> torch.Tensor:
        """Rows of each expert."""
        if self.routing == "uniform":
            return torch.full((self.num_experts,), self.rows // self.num_experts)
        weights = 1.0 / torch.arange(1, self.num_experts + 1)
        generator = torch.Generator().manual_seed(0)
        drawn = torch.multinomial(weights, self.rows, replacement=True, generator=generator)
        counts = torch.bincount(drawn, minlength=self.num_experts)
        return counts[torch.randperm(self.num_experts, generator=generator)]


PREFILL = [Shape.of(model, projection) for model in EXPERTS for projection in ("up", "down")]
SKEWED = [
    Shape.of(model, projection, routing="zipf")
    for model in ("qwen3-30b", "deepseek-v3")
    for projection in ("up", "down")
]
DECODE = [
    Shape.of(model, projection, num_experts=64, rows=64 * rows)
    for model in ("qwen3-30b", "deepseek-v3")
    for projection in ("up", "down")
    for rows in (1, 4, 8, 16, 32)
]


class Bench:
    """Operands of one shape, and the calls to compare."""

    def __init__(self, shape: Shape):
        self.shape = shape
        torch.cuda.empty_cache()
        torch.manual_seed(0)
        counts = shape.counts()
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        self.offsets = self.offsets.to("cuda", torch.int32)
        self.ends = self.offsets[1:].contiguous()
        self.x = rand(shape.rows, shape.depth)
        self.w = rand(shape.num_experts, shape.columns, shape.depth).mul_(shape.depth**-0.5)

    def forward(self) -> dict[str, Call]:
        out = rand(self.shape.rows, self.shape.columns)
        dense = self.w.view(-1, self.shape.depth)[: self.shape.columns].T
        self.check(grouped_gemm(self.x, self.w, self.offsets))
        return {
            "moe_engine": lambda: grouped_gemm(self.x, self.w, self.offsets, out=out),
            "torch": lambda: torch._grouped_mm(self.x, self.w.mT, offs=self.ends),
            "cublas": lambda: torch.mm(self.x, dense, out=out),
        }

    def decode(self) -> dict[str, Call]:
        calls = self.forward()
        del calls["cublas"]
        return calls

    def skewed(self) -> dict[str, Call]:
        shape, out = self.shape, rand(self.shape.rows, self.shape.columns)
        even = torch.arange(shape.num_experts + 1, device="cuda", dtype=torch.int32)
        even *= shape.rows // shape.num_experts
        self.check(grouped_gemm(self.x, self.w, self.offsets))
        return {
            "moe_engine": lambda: grouped_gemm(self.x, self.w, self.offsets, out=out),
            "uniform": lambda: grouped_gemm(self.x, self.w, even, out=out),
            "torch": lambda: torch._grouped_mm(self.x, self.w.mT, offs=self.ends),
        }

    def gather_swiglu(self) -> dict[str, Call]:
        index = torch.randperm(self.shape.rows, device="cuda")
        width = self.shape.columns // 2
        out = rand(self.shape.rows, width)

        def three_passes() -> torch.Tensor:
            rows = self.x.index_select(0, index)
            h = torch._grouped_mm(rows, self.w.mT, offs=self.ends)
            silu_mul_kernel[(len(h), triton.cdiv(width, 1024))](h, out, width, BLOCK=1024)
            return out

        def eager() -> torch.Tensor:
            h = torch._grouped_mm(self.x.index_select(0, index), self.w.mT, offs=self.ends)
            gate, up = h.chunk(2, 1)
            return torch.nn.functional.silu(gate) * up

        def ours() -> torch.Tensor:
            return grouped_gemm(
                self.x, self.w, self.offsets, row_index=index, activation="swiglu", out=out
            )

        expected = three_passes().clone()
        assert relative_error(ours(), expected) < 6e-3
        return {"moe_engine": ours, "torch": three_passes, "torch eager": eager}

    def dgrad(self) -> dict[str, Call]:
        grad, out = rand(self.shape.rows, self.shape.columns), torch.empty_like(self.x)
        expected = torch._grouped_mm(grad, self.w, offs=self.ends)
        assert relative_error(dgrad(grad, self.w, self.offsets), expected) < 4e-3
        return {
            "moe_engine": lambda: dgrad(grad, self.w, self.offsets, out=out),
            "torch": lambda: torch._grouped_mm(grad, self.w, offs=self.ends),
        }

    def wgrad(self) -> dict[str, Call]:
        grad, out = rand(self.shape.rows, self.shape.columns), torch.empty_like(self.w)
        expected = torch._grouped_mm(grad.T, self.x, offs=self.ends)
        assert relative_error(wgrad(grad, self.x, self.offsets), expected) < 4e-3
        return {
            "moe_engine": lambda: wgrad(grad, self.x, self.offsets, out=out),
            "torch": lambda: torch._grouped_mm(grad.T, self.x, offs=self.ends),
        }

    def fp8(self) -> dict[str, Call]:
        calls = self.forward()
        shape, out = self.shape, rand(self.shape.rows, self.shape.columns)
        blocks = triton.cdiv(shape.columns, 128), triton.cdiv(shape.depth, 128)
        ones = torch.ones(shape.num_experts, *blocks, device="cuda")
        x8 = self.x.to(torch.float8_e4m3fn), torch.ones(shape.rows, blocks[1], device="cuda")
        w8 = (self.w * shape.depth**0.5).to(torch.float8_e4m3fn), ones * shape.depth**-0.5
        got, expected = grouped_gemm(x8, w8, self.offsets), calls["moe_engine"]()
        assert relative_error(got, expected) < 6e-2, "of e4m3 operands"
        return {
            "moe_engine": lambda: grouped_gemm(x8, w8, self.offsets, out=out),
            "moe_engine bf16": calls["moe_engine"],
        }

    def check(self, out: torch.Tensor) -> None:
        """Rows of the first and last expert against fp32 products."""
        for expert in (0, self.shape.num_experts - 1):
            begin, end = self.offsets[expert : expert + 2].tolist()
            rows = slice(begin, min(end, begin + 300))
            expected = self.x[rows].float() @ self.w[expert].float().T
            assert relative_error(out[rows], expected) < 4e-3


def rand(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, device="cuda", dtype=torch.bfloat16)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (got.float() - expected.float()).norm()
    return float(difference / expected.float().norm().clamp_min(1e-30))


def time_sustained(calls: dict[str, Call], settle_s: float, rounds: int) -> dict[str, float]:
    """Microseconds of each call: the median over rounds, of which every other one takes the calls
    in reverse order. A call runs alone for `settle_s` seconds, and is then timed for a third of it.

    At full load the GPU keeps to its 700 W by its clock, 1.3 to 1.5 GHz, and takes half a second to
    find it: in shorter turns a call runs at the clock that the others have left.
    """
    graphs, us = {}, {}

    def run(name: str, seconds: float) -> float:
        graph, repeats = graphs[name]
        replays = max(1, round(seconds * 1e6 / us[name] / repeats))
        return replay_us(graph, replays) / replays / repeats

    for name, call in calls.items():
        us[name] = replay_us(capture(call, 1))
        repeats = max(1, int(GRAPH_US / us[name]))
        graphs[name] = capture(call, repeats), repeats
        us[name] = run(name, 0.0)
    times: dict[str, list[float]] = defaultdict(list)
    for turn in range(rounds):
        for name in list(calls)[:: -1 if turn % 2 else 1]:
            run(name, settle_s)
            times[name].append(run(name, settle_s / 3))
    return {name: sorted(series)[rounds // 2] for name, series in times.items()}


SUITES: dict[str, tuple[list[Shape], Callable[[Bench], dict[str, Call]]]] = {
    "forward": (PREFILL, Bench.forward),
    "gather_swiglu": ([s for s in PREFILL if s.projection == "up"], Bench.gather_swiglu),
    "dgrad": (PREFILL, Bench.dgrad),
    "wgrad": (PREFILL, Bench.wgrad),
    "fp8": (PREFILL, Bench.fp8),
    "zipf": (SKEWED, Bench.skewed),
    "decode": (DECODE, Bench.decode),
}


def main(
    only: Annotated[str, typer.Option(help="One of the suites.")] = "",
    path: Annotated[Path | None, typer.Option(help="Result file.")] = None,
) -> None:
    """Run the bench, one result line per implementation and shape, and print the means."""
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    for verb, (shapes, operation) in SUITES.items():
        if only and verb != only:
            continue
        for shape in shapes:
            settle_s, rounds = (0.03, 9) if verb == "decode" else (0.4, 3)
            times = time_sustained(operation(Bench(shape)), settle_s, rounds)
            ours = times["moe_engine"]
            others = {name: us for name, us in times.items() if name != "moe_engine"}
            if verb == "decode":
                num_bytes = 2 * shape.num_experts * shape.columns * shape.depth
                others["floor"] = num_bytes / H200.hbm_gbs / 1e3
            fields = dict(
                verb="forward" if verb in ("fp8", "zipf", "decode") else verb,
                model=f"{shape.model} {shape.projection}",
                tokens=shape.rows,
                ranks=1,
                routing=shape.routing,
                dtype="fp8" if verb == "fp8" else "bf16",
            )
            for name, us in others.items():
                ratios[verb, name].append(us / ours)
                line = dict(impl="moe_engine", us=round(ours, 1), ratio_to=name, ratio=ours / us)
                line |= dict(ratio=round(line["ratio"], 4), tflops=round(shape.flop / ours / 1e6))
                print(save("grouped_gemm", path, **fields, **line), flush=True)
                if name not in ("floor", "uniform"):
                    if name == "moe_engine bf16":
                        fields["dtype"] = "bf16"
                    theirs = dict(impl=name, us=round(us, 1), tflops=round(shape.flop / us / 1e6))
                    print(save("grouped_gemm", path, **fields, **theirs), flush=True)
    table = Table("verb", "against", "geometric mean, theirs over ours", "least", "most")
    for (verb, name), values in ratios.items():
        mean = math.exp(sum(map(math.log, values)) / len(values))
        table.add_row(verb, name, *(f"{value:.3f}" for value in (mean, min(values), max(values))))
    Console(width=100).print(table)


if __name__ == "__main__":
    typer.run(main)
