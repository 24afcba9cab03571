"""A layer's forward pass against its GEMMs alone, the all-to-all of NCCL, and itself unfused:
python bench/fused_layer.py --core

Checks each shape against the all-to-all path before timing it. impl `torch` is the layer without
communication: two torch._grouped_mm and one kernel for silu(gate) * up, on as many rows as this
rank's experts receive; `nccl` is sort, all-to-all of one copy per (token, expert), the same GEMMs,
and a weighted sum; `deep_ep` is DeepEP's dispatch and combine around these GEMMs, where it is
installed. `ratio` of impl moe_engine is its time over torch's, slowest ranks both; of other impls
their time over that of moe_engine.

us is that of a call in a CUDA graph, but of nccl and deep_ep that of a single call from Python, as
their hosts wait for counts. eager_us is that of a loop of calls from Python. With one rank a layer
sends nothing, and eager_ratio shows what the host costs.

Verb `dispatch_gemm` is a layer up to the end of the up-projection; its ratio is that time over the
up-projection alone, of rows that have arrived.

With --capacity-factor, impl `moe_engine, passes` is the layer on a Buffer with room for so many
times the rows of balanced routing: `passes` says in how many it runs, 1 where the rows have room. A
graph always holds the call with all tokens and those of all slices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from _common import save, time_calls, time_eager, timed_pool
from _deep_ep import NormalMode, deep_ep
from _layer import ERROR, Experts, Tokens, num_passes, relative_error

from moe_engine import Buffer, LayerConfig, Options, moe_ffn, routing
from moe_engine.dispatch import LayerTokens, release
from moe_engine.emulation import send_message
from moe_engine.engines.base import LayerInputs
from moe_engine.engines.fused_layer import dispatch_experts, up_tiles
from moe_engine.grouped_gemm import grouped_gemm
from moe_engine.hardware import gpu
from moe_engine.layer_config import LayerProblem
from moe_engine.timing import time_graph

UNFUSED = LayerConfig(num_stages=1, num_return_stages=1)


@dataclass(frozen=True)
class Shape:
    """A model, tokens per rank and routing."""

    model: str
    tokens: int
    routing: str = "uniform"


PREFILLED = "mixtral-8x7b", "qwen2-57b", "qwen3-30b", "deepseek-v3"
CORE = [Shape(model, tokens) for model in PREFILLED for tokens in (1024, 4096, 8192)]
SKEWED = [Shape(model, 4096, "zipf") for model in PREFILLED]
ABLATED = [Shape("qwen3-30b", 1024), Shape("qwen3-30b", 8192), Shape("deepseek-v3", 4096)]
LARGE = [shape for shape in CORE if shape.tokens >= 4096]
PARTS = {
    "core": CORE,
    "skewed": SKEWED,
    "dispatch_gemm": LARGE,
    "ablate": ABLATED,
    "sweep": ABLATED,
}
COMET_MODELS = "mixtral-8x7b", "qwen2-moe", "phi-3.5-moe"
COMET_TOKENS = 4096, 8192
"""Of all ranks together; the models and tokens of COMET's own measurements."""


def main(
    ranks: Annotated[int, typer.Option(help="GPUs to use.")] = 4,
    core: Annotated[bool, typer.Option(help="The points of the summary.")] = False,
    skewed: Annotated[bool, typer.Option(help="Zipf-skewed routing.")] = False,
    dispatch_gemm: Annotated[bool, typer.Option(help="Up to the up-projection's end.")] = False,
    ablate: Annotated[bool, typer.Option(help="Without one part of the engine at a time.")] = False,
    sweep: Annotated[bool, typer.Option(help="Times by the number of programs.")] = False,
    comet: Annotated[bool, typer.Option(help="COMET's own models and tokens.")] = False,
    only: Annotated[str, typer.Option(help="Only models whose name begins so.")] = "",
    capacity_factor: Annotated[
        float | None,
        typer.Option(help="Also with room for so many times the rows of balanced routing."),
    ] = None,
    path: Annotated[Path | None, typer.Option(help="Result file.")] = None,
) -> None:
    """Run the bench on `ranks` GPUs."""
    asked = {"core": core, "skewed": skewed, "dispatch_gemm": dispatch_gemm}
    asked |= {"ablate": ablate, "sweep": sweep, "comet": comet}
    if not any(asked.values()):
        raise typer.BadParameter(f"nothing is chosen; choose one or more of {', '.join(asked)}")
    of_comet = [Shape(model, total // ranks) for model in COMET_MODELS for total in COMET_TOKENS]
    of_comet = [shape for shape in of_comet if not (core and shape in CORE)]
    with timed_pool(ranks, timeout_s=540) as pool:

        def show(rank: int, line: dict[str, Any]) -> None:
            print(save("fused_layer", path, **line), flush=True)

        for part, shapes in (PARTS | {"comet": of_comet}).items():
            chosen = [shape for shape in shapes if asked[part] and shape.model.startswith(only)]
            pool.run(run_rank, part, chosen, capacity_factor, on_message=show)


def run_rank(
    group: dist.ProcessGroup,
    part: str,
    shapes: list[Shape],
    capacity_factor: float | None = None,
) -> None:
    """All shapes on one rank; rank 0 reports."""
    experts: Experts | None = None
    for shape in shapes:
        if experts is None or experts.model != shape.model:
            experts = None  # before the next ones are made
            experts = Experts.of(group, shape.model)
        bench = Bench(group, shape, experts)
        if part in ("core", "skewed", "comet"):
            bench.compare(capacity_factor)
        else:
            getattr(bench, part)()
        bench.close()


class Bench:
    """One shape on one rank: its inputs, and each way through the layer."""

    def __init__(self, group: dist.ProcessGroup, shape: Shape, experts: Experts):
        self.group, self.shape, self.experts = group, shape, experts
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.tokens = Tokens(group, shape.model, shape.tokens, shape.routing, self.rank)
        self.buffers: list[Buffer] = []

    def close(self) -> None:
        for buffer in self.buffers:
            buffer.destroy()
        self.buffers.clear()

    def layer(
        self, config: LayerConfig | None = None, capacity_factor: float | None = None
    ) -> Callable[[], torch.Tensor]:
        """moe_ffn with this choice, or its own, and with room for all rows, or for so many times
        those of balanced routing."""
        experts = self.experts
        sizes = self.shape.tokens, experts.hidden, experts.num_experts, experts.num_topk
        how: dict[str, Any] = dict(layer=config, capacity_factor=capacity_factor)
        options = Options(timeout_s=20.0, decode_tokens=0, **how)
        buffer = Buffer.for_tokens(self.group, *sizes, options=options)
        self.buffers.append(buffer)
        tokens = self.tokens
        args = tokens.x, tokens.idx, tokens.weights, experts.up, experts.down, buffer
        return lambda: moe_ffn(*args)

    def time(self, call: Callable[[], Any]) -> float:
        """Microseconds in a CUDA graph; more calls where they are short."""
        return time_graph(call, 4 if self.shape.tokens > 2048 else 10, 7, self.group)

    def send(self, **line: Any) -> None:
        """One result line from rank 0, rounded."""
        if self.rank == 0:
            shape = self.shape
            fields = dict(model=shape.model, tokens=shape.tokens, routing=shape.routing)
            fields |= dict(ranks=self.num_ranks, dtype="bf16")
            line.setdefault("verb", "layer")
            line["us"] = round(line["us"], 1)
            for name, digits in {"ratio": 3, "error": 6}.items():
                if line.get(name) is not None:
                    line[name] = round(line[name], digits)
            send_message(fields | line)

    def compare(self, capacity_factor: float | None) -> None:
        """Ours as it chooses, in passes, ours unfused, the GEMMs alone, and the all-to-all."""
        ours = self.layer()
        out, want = ours(), self.nccl()
        error = relative_error(out, want)
        assert error < ERROR, error
        del want
        choice = self.buffers[0].layer_config(self.experts.up, self.experts.num_topk)
        gemm_us = self.time(self.gemms())
        ours_us = self.time(ours)
        self.buffers[0].check()
        fields = dict(ratio_to="moe_engine", ratio=gemm_us / ours_us)
        eager = time_eager([self.gemms()], self.group, gemm_us)
        self.send(impl="torch", us=gemm_us, **fields, **eager)
        self.send(
            impl="moe_engine",
            us=ours_us,
            ratio_to="torch",
            ratio=ours_us / gemm_us,
            error=error,
            num_comm_sms=choice.num_push_programs,
            **time_eager([ours], self.group, ours_us),
        )
        if capacity_factor is not None:
            self.compare_passes(capacity_factor, out, ours_us)
        us = self.time(self.layer(UNFUSED))
        self.send(impl="moe_engine_unfused", us=us, ratio_to="moe_engine", ratio=us / ours_us)
        self.compare_eager("nccl", self.nccl, ours_us)
        if package := deep_ep(self.num_ranks):
            tokens = self.tokens
            sent = tokens.x, tokens.idx, tokens.weights, self.experts.num_experts
            theirs = NormalMode(package, self.group, *sent)
            layer = partial(theirs.layer, self.experts)
            error = relative_error(layer(), self.nccl())
            assert error < ERROR, error
            self.compare_eager("deep_ep", layer, ours_us)
            theirs.close()

    def compare_passes(self, capacity_factor: float, want: torch.Tensor, ours_us: float) -> None:
        """Ours with room for so many times the rows of balanced routing."""
        layer = self.layer(capacity_factor=capacity_factor)
        error = relative_error(layer(), want)
        assert error < ERROR, error
        self.tokens.x.requires_grad_()
        passes = num_passes(layer())
        self.tokens.x.requires_grad_(False)
        us = self.time(layer)
        self.buffers[-1].check()
        fields: dict[str, Any] = dict(ratio_to="moe_engine", ratio=us / ours_us, error=error)
        fields |= dict(capacity_factor=capacity_factor, passes=passes)
        eager = time_eager([layer], self.group, us)
        self.send(impl="moe_engine, passes", us=us, **fields, **eager)

    def compare_eager(self, impl: str, call: Callable[[], torch.Tensor], ours_us: float) -> None:
        """A layer that no graph can hold, against ours in a graph."""
        us = time_calls(call, self.group, 7)
        fields = dict(ratio_to="moe_engine", ratio=us / ours_us)
        self.send(impl=impl, us=us, **fields, **time_eager([call], self.group))

    def dispatch_gemm(self) -> None:
        """A layer up to the end of its up-projection, and the up-projection alone."""
        experts, tokens = self.experts, self.tokens
        self.layer()()  # reserves the memory of expert rows
        slots = self.buffers[0]._engine.slots
        max_rows = self.num_ranks * self.shape.tokens * experts.num_topk
        config = LayerConfig.predicted(self.problem(), gpu().hbm_gbs)
        act = tokens.x.new_empty(max_rows, experts.up.shape[1] // 2)

        def call() -> None:
            layout = routing.layout(tokens.idx, experts.num_experts, slots)
            routed = tokens.x, tokens.idx, tokens.weights
            inputs = LayerInputs(*routed, experts.up, experts.down)
            tiles = up_tiles(inputs, max_rows // slots.num_ranks, config)
            dispatch_experts(LayerTokens(*routed, layout), inputs, act, tiles, config, slots)
            release(slots)

        rows, ends = tokens.received()
        offsets = torch.cat([ends.new_zeros(1), ends])
        alone_us = self.time(lambda: grouped_gemm(rows, experts.up, offsets, activation="swiglu"))
        us = self.time(call)
        self.buffers[0].check()
        fields = dict(verb="dispatch_gemm", impl="moe_engine", ratio_to="grouped_gemm")
        self.send(**fields, us=us, ratio=us / alone_us, num_comm_sms=config.num_push_programs)

    def gemms(self) -> Callable[[], torch.Tensor]:
        """The GEMMs on as many rows as this rank's experts receive."""
        rows, ends = self.tokens.received()
        return lambda: self.experts(rows, ends)

    def nccl(self) -> torch.Tensor:
        """One copy per (token, expert): sort, all-to-all, sort, GEMMs, and back; synchronises the
        host with the counts."""
        copies = self.tokens.send_copies()
        return self.tokens.return_copies(self.experts(copies.rows, copies.ends), copies)

    def sweep(self) -> None:
        """Times by how many programs communicate: push, copy, return."""
        choice = LayerConfig.predicted(self.problem(), gpu().hbm_gbs)
        best = choice.num_push_programs, choice.num_copy_programs, choice.num_return_programs
        num_sms = gpu().num_sms
        half, twice = num_sms // 2, 2 * num_sms
        tried = [best, (half, *best[1:]), (twice, *best[1:])]
        tried += [(best[0], n, best[2]) for n in (half, twice)]
        for push, copy, back in (*tried, (*best[:2], num_sms), best):
            programs = dict(num_push_programs=push, num_copy_programs=copy)
            config = replace(choice, **programs, num_return_programs=back)
            us = self.time(self.layer(config))
            name = f"moe_engine, {push} push, {copy} copy, {back} return"
            self.send(impl=name, us=us, num_comm_sms=push)
            self.close()

    def ablate(self) -> None:
        """Times without one part at a time."""
        choice = LayerConfig.predicted(self.problem(), gpu().hbm_gbs)
        variants = {
            "as chosen": choice,
            "in turn": UNFUSED,
            "all rows before the first tile": replace(choice, num_stages=1),
            "all tiles before the first sum": replace(choice, num_return_stages=1),
            "own rows in turns": replace(choice, num_own_stages=0),
            "all own rows first": replace(choice, num_own_stages=choice.num_stages),
            "tiles claimed, the other way": replace(choice, claims_tiles=not choice.claims_tiles),
            "no groups of tiles": replace(choice, group_m=1),
        }
        for name, config in variants.items():
            us = self.time(self.layer(config))
            self.send(impl=f"moe_engine, {name}", us=us, num_comm_sms=config.num_push_programs)
            self.close()

    def problem(self) -> LayerProblem:
        """What `layer_config.py` chooses for."""
        experts, shape = self.experts, self.shape
        sizes = experts.num_experts, experts.num_topk, experts.hidden, experts.columns
        return LayerProblem(self.num_ranks, shape.tokens, *sizes)


if __name__ == "__main__":
    typer.run(main)
