"""A layer whose weights are e4m3 against the same layer in bf16: python bench/quantized_layer.py

Verb `layer` is a prefill, `decode` a layer that makes low-latency calls, `grouped_mlp` the two
GEMMs on rows that have arrived, `quantize` the cast of x and that of activations between the
products. The weights of dtype fp8 are what `quantize_weights` made of those of dtype bf16. `ratio`
is that of the times, fp8 over bf16, slowest ranks both; us is that of a call in a CUDA graph.
`error` is the relative difference of the fp8 layer's result from that in bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from _common import save, time_eager, timed_pool
from _layer import Experts, Tokens, relative_error

from moe_engine import Buffer, Options, moe_ffn
from moe_engine.emulation import send_message
from moe_engine.grouped_gemm import grouped_gemm
from moe_engine.grouped_gemm.quantization import (
    QuantizedRows,
    quantize_launch,
    quantize_rows,
    quantize_weights,
)
from moe_engine.grouped_gemm.quantization_kernels import quantize_rows_kernel
from moe_engine.launch import launch
from moe_engine.timing import time_graph

MODELS = "qwen3-30b", "deepseek-v3"
PREFILLS, DECODES = (1024, 4096, 8192), (1, 8, 64)
ERROR = 8e-2
"""The largest relative difference of a layer in fp8 from one in bf16."""


def main(
    ranks: Annotated[int, typer.Option(help="GPUs to use.")] = 1,
    only: Annotated[str, typer.Option(help="Only models whose name begins so.")] = "",
    path: Annotated[Path | None, typer.Option(help="Result file.")] = None,
) -> None:
    """Run the bench on `ranks` GPUs."""
    with timed_pool(ranks, timeout_s=540) as pool:

        def show(rank: int, line: dict[str, Any]) -> None:
            print(save("quantized_layer", path, **line), flush=True)

        chosen = [model for model in MODELS if model.startswith(only)]
        pool.run(run_rank, chosen, PREFILLS, DECODES, on_message=show)


def run_rank(
    group: dist.ProcessGroup, models: list[str], prefills: list[int], decodes: list[int]
) -> None:
    """All models on one rank; rank 0 reports."""
    for model in models:
        bench = Bench(group, model)
        for num_tokens in decodes:
            bench.compare("decode", num_tokens)
        for num_tokens in prefills:
            bench.compare("layer", num_tokens)
            bench.compare_parts(num_tokens)


class Bench:
    """A model's experts on one rank, in both types."""

    def __init__(self, group: dist.ProcessGroup, model: str):
        self.group, self.model = group, model
        self.experts = experts = Experts.of(group, model)
        self.up, self.down = quantize_weights(experts.up), quantize_weights(experts.down)

    def tokens(self, num_tokens: int) -> Tokens:
        return Tokens(self.group, self.model, num_tokens, "uniform", dist.get_rank(self.group))

    def compare(self, verb: str, num_tokens: int) -> None:
        """A layer in bf16, then in fp8."""
        experts, tokens = self.experts, self.tokens(num_tokens)
        sizes = experts.hidden, experts.num_experts, experts.num_topk
        options = Options(timeout_s=20.0, decode_tokens=num_tokens if verb == "decode" else 0)
        buffer = Buffer.for_tokens(self.group, num_tokens, *sizes, options=options)
        args = tokens.x, tokens.idx, tokens.weights
        bf16 = partial(moe_ffn, *args, experts.up, experts.down, buffer, num_tokens)
        fp8 = partial(moe_ffn, *args, self.up, self.down, buffer, num_tokens)
        error = relative_error(fp8(), bf16())
        assert error < ERROR, error
        self.pair(verb, num_tokens, bf16, fp8, error)
        buffer.check()
        buffer.destroy()

    def compare_parts(self, num_tokens: int) -> None:
        """The GEMMs on as many rows as this rank's experts receive, and the casts."""
        experts, (rows, ends) = self.experts, self.tokens(num_tokens).received()
        bf16 = experts.scheduled(rows, ends)
        offsets, cast = torch.cat([ends.new_zeros(1), ends]), quantize_rows(rows)
        act = rows.new_empty(len(rows), experts.columns)
        cast_act = quantize_rows(act.normal_())

        def fp8() -> None:
            grouped_gemm(cast, self.up, offsets, activation="swiglu")
            grouped_gemm(cast_act, self.down, offsets)

        self.pair("grouped_mlp", num_tokens, bf16, fp8)
        for x in (self.tokens(num_tokens).x, act):
            out = QuantizedRows.like(x)
            grid, arguments, options = quantize_launch(x, out)
            us = self.time(partial(launch, quantize_rows_kernel, grid, *arguments, **options))
            self.send("quantize", len(x), dtype="fp8", us=us)

    def pair(
        self,
        verb: str,
        num_tokens: int,
        bf16: Callable[[], Any],
        fp8: Callable[[], Any],
        error: float | None = None,
    ) -> None:
        """Two result lines."""
        before_us = self.time(bf16)
        us = self.time(fp8)
        self.send(verb, num_tokens, dtype="bf16", us=before_us)
        fields = dict(ratio_to="moe_engine bf16", ratio=round(us / before_us, 3))
        if error is not None:
            fields |= dict(error=round(error, 5), **time_eager([fp8], self.group, us))
        self.send(verb, num_tokens, dtype="fp8", us=us, **fields)

    def time(self, call: Callable[[], Any]) -> float:
        """Microseconds in a CUDA graph."""
        return time_graph(call, 5, 9, self.group)

    def send(self, verb: str, num_tokens: int, us: float, **line: Any) -> None:
        """One result line from rank 0."""
        if dist.get_rank(self.group) == 0:
            fields = dict(verb=verb, model=self.model, tokens=num_tokens, routing="uniform")
            fields |= dict(ranks=dist.get_world_size(self.group), impl="moe_engine")
            send_message(fields | dict(us=round(us, 1)) | line)


if __name__ == "__main__":
    typer.run(main)
