"""Low-latency dispatch and combine, and a layer at decode sizes: python bench/low_latency.py --core

Everything is checked before it is timed. `us` and `p99` are those of `time_replays`: one call in a
chain of calls that follow each other on all ranks, so that each also waits for the ranks that are
late. eager_us is that of a loop of calls from Python. Verb `round_trip` is a dispatch in bf16 and
the combine of its rows. `layer` is moe_ffn with the most tokens of any rank as its hint.

floor_us, means over ranks: what crosses to other ranks, one row per (token, rank), at 350 GB/s, a
launch, and a signal (combine: two); for a layer that of both in bf16, and the weights of the
experts that have rows at 4.3 TB/s.

impl `nccl` is one copy per (token, expert): sort, all-to-all, sort, and back to a weighted sum. Its
hosts wait for the counts, so it runs without a graph. `deep_ep` is DeepEP, where it is installed.
For layers, `torch` and `grouped_gemm` are the GEMMs alone on as many rows, by torch and by ours
with the tiles scheduled before, and `moe_engine_staged` is moe_ffn in stages, as for prefill.
`ratio` of a layer is its time over that of the faster GEMMs, of other impls their time over that of
moe_engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from _common import save, time_calls, time_eager, time_replays, timed_pool
from _deep_ep import deep_ep, low_latency_buffer
from _layer import Experts, Tokens, relative_error

from moe_engine import Buffer, moe_ffn
from moe_engine.emulation import send_message
from moe_engine.grouped_gemm.quantization import dequantize
from moe_engine.hardware import gpu
from moe_engine.layer_config import MODELS

VERBS = "dispatch", "combine", "round_trip", "layer"
NUM_INPUTS = 4
"""Inputs that calls take in turns."""
MIN_CAPACITY = 128
"""num_max_dispatch_tokens_per_rank, where no more tokens come."""
PREFILL_TOKENS = 4096
"""Capacity of the Buffer of layers."""
FLOOR_LINK_GBS, SIGNAL_US, LAUNCH_US = 350.0, 1.33, 2.0
"""Of the floors. The link counts as faster than `hardware.H200.link_gbs`, the pace of pushes, so
that no time is below its floor."""
ERROR, FP8_ERROR = 8e-3, 4e-2
"""Largest relative errors; what a single token rounds to is off by more than many on average."""
NCCL_ROUNDS = 51


@dataclass(frozen=True)
class Shape:
    """A model, tokens per rank and routing."""

    model: str
    tokens: int
    routing: str = "uniform"

    @property
    def capacity(self) -> int:
        return max(MIN_CAPACITY, self.tokens)


CORE_MODELS = "deepseek-v3", "qwen3-30b", "mixtral-8x7b"
CORE = [Shape(model, tokens) for model in CORE_MODELS for tokens in (1, 8, 32, 128, 512)]
FULL = [
    Shape(model, 2**n, routing)
    for model in (*CORE_MODELS, "qwen2-57b")
    for n in range(10)
    for routing in ("uniform", "zipf")
]


def main(
    ranks: Annotated[int, typer.Option(help="GPUs to use.")] = 4,
    core: Annotated[bool, typer.Option(help="Only the points of the summary.")] = False,
    only: Annotated[str, typer.Option(help="Only models whose name begins so.")] = "",
    verbs: Annotated[str, typer.Option(help="Which ones.")] = ",".join(VERBS),
    replays: Annotated[int, typer.Option(help="Most replays of a graph.")] = 1000,
    path: Annotated[Path | None, typer.Option(help="Result file.")] = None,
) -> None:
    """Run the bench on `ranks` GPUs."""
    chosen = verbs.split(",")
    if not set(chosen) <= set(VERBS):
        raise typer.BadParameter(f"--verbs is {verbs}; it may name {', '.join(VERBS)}.")
    shapes = [shape for shape in (CORE if core else FULL) if shape.model.startswith(only)]

    def show(rank: int, line: dict[str, Any]) -> None:
        print(save("low_latency", path, **line), flush=True)

    with timed_pool(ranks, timeout_s=540, env={"MOE_ENGINE_TIMEOUT_S": "20"}) as pool:
        # One model after the other: each has its own kernels, Buffers and experts.
        for _, same in groupby(shapes, lambda shape: shape.model):
            pool.run(run_rank, list(same), chosen, replays, on_message=show)


def run_rank(group: dist.ProcessGroup, shapes: list[Shape], verbs: list[str], replays: int) -> None:
    """All shapes of a model on one rank; rank 0 reports."""
    torch.cuda.empty_cache()  # Buffers need what torch has kept of the model before
    exchange = Exchange(group, shapes, verbs, replays) if verbs != ["layer"] else None
    layer = Layer(group, shapes[0].model, replays) if "layer" in verbs else None
    for shape in shapes:
        point = Point(group, shape)
        if exchange is not None:
            exchange.compare(point)
        if layer is not None:
            layer.compare(point)
    if exchange is not None:
        exchange.close()
    if layer is not None:
        layer.buffer.destroy()


class Point:
    """A shape on one rank: its inputs, and the floors of its verbs."""

    def __init__(self, group: dist.ProcessGroup, shape: Shape):
        self.group, self.shape = group, shape
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.num_experts, self.hidden, self.columns, _ = MODELS[shape.model]
        self.inputs = [
            Tokens(group, shape.model, shape.tokens, shape.routing, n * self.num_ranks + self.rank)
            for n in range(NUM_INPUTS)
        ]
        self.floors = self._floors()

    def send(self, **line: Any) -> None:
        """One result line from rank 0, rounded."""
        if self.rank == 0:
            shape = self.shape
            fields = dict(model=shape.model, tokens=shape.tokens, routing=shape.routing)
            fields |= dict(ranks=self.num_ranks, dtype="bf16")
            digits = {"us": 2, "p99": 2, "floor_us": 2, "ratio": 3, "error": 6}
            for name, number in digits.items():
                if line.get(name) is not None:
                    line[name] = round(line[name], number)
            send_message(fields | line)

    def _floors(self) -> dict[tuple[str, str], float]:
        """Microseconds by verb and dtype."""
        num_local = self.num_experts // self.num_ranks
        totals = torch.zeros(2, device="cuda")  # rows to other ranks, experts with rows
        for tokens in self.inputs:
            ranks = torch.arange(self.num_ranks, device="cuda")
            goes = (tokens.idx[..., None] // num_local == ranks).any(1)
            goes[:, self.rank] = False
            totals += torch.stack([goes.sum(), tokens.received_counts().count_nonzero()])
        dist.all_reduce(totals, group=self.group)
        num_rows, num_busy = (totals / (NUM_INPUTS * self.num_ranks)).tolist()

        def exchange_us(row_bytes: float, num_signals: int) -> float:
            wire_us = num_rows * row_bytes / FLOOR_LINK_GBS / 1e3
            return wire_us + num_signals * SIGNAL_US + LAUNCH_US

        dispatch, combine = exchange_us(2 * self.hidden, 1), exchange_us(2 * self.hidden, 2)
        weights_us = num_busy * 6 * self.hidden * self.columns / gpu().hbm_gbs / 1e3
        return {
            ("dispatch", "fp8"): exchange_us(self.hidden + self.hidden / 128 * 4, 1),
            ("dispatch", "bf16"): dispatch,
            ("combine", "bf16"): combine,
            ("round_trip", "bf16"): dispatch + combine,
            ("layer", "bf16"): dispatch + combine + weights_us,
        }


class Exchange:
    """The low-latency verbs of a model on one rank."""

    def __init__(
        self, group: dist.ProcessGroup, shapes: list[Shape], verbs: list[str], replays: int
    ):
        self.verbs, self.replays = verbs, replays
        num_experts, hidden, *_ = MODELS[shapes[0].model]
        capacity = max(shape.capacity for shape in shapes)
        kinds: dict[str, Any] = {"moe_engine": Buffer}
        if package := deep_ep(group.size()):
            kinds["deep_ep"] = package.Buffer
        sizes = capacity, hidden, num_experts
        self.buffers = {
            impl: low_latency_buffer(kind, group, *sizes) for impl, kind in kinds.items()
        }

    def close(self) -> None:
        for buffer in self.buffers.values():
            buffer.destroy()

    def compare(self, point: Point) -> None:
        """Ours, DeepEP, and NCCL's all-to-all."""
        ours: dict[tuple[str, str], float] = {}
        for impl, buffer in self.buffers.items():
            verbs = Verbs(buffer, point)
            errors = {dtype: verbs.check(dtype == "fp8") for dtype in ("fp8", "bf16")}
            for verb, dtype in point.floors:
                if verb == "layer" or verb not in self.verbs:
                    continue
                calls = verbs.calls(verb, dtype == "fp8")
                us, p99 = time_replays(calls, point.group, self.replays)
                line = dict(verb=verb, impl=impl, dtype=dtype, us=us, p99=p99, error=errors[dtype])
                if impl == "moe_engine":
                    buffer.check()
                    ours[verb, dtype] = us
                    line |= dict(floor_us=point.floors[verb, dtype])
                else:
                    line |= dict(ratio_to="moe_engine", ratio=us / ours[verb, dtype])
                point.send(**line, **time_eager(calls, point.group, us))
        for verb, call in nccl_calls(point).items():
            if verb in self.verbs:
                us = time_calls(call, point.group, NCCL_ROUNDS)
                line = dict(ratio_to="moe_engine", ratio=us / ours[verb, "bf16"])
                point.send(verb=verb, impl="nccl", us=us, **line, **time_eager([call], point.group))


class Verbs:
    """The verbs of one Buffer, ours or DeepEP's, at one point."""

    def __init__(self, buffer: Any, point: Point):
        self.buffer, self.point = buffer, point

    def dispatch(self, tokens: Tokens, fp8: bool) -> tuple[Any, ...]:
        """(rows, counts, handle, ...)"""
        args = tokens.x, tokens.idx, self.point.shape.capacity, self.point.num_experts
        return self.buffer.low_latency_dispatch(*args, use_fp8=fp8)

    def combine(self, tokens: Tokens, rows: torch.Tensor, handle: Any) -> torch.Tensor:
        return self.buffer.low_latency_combine(rows, tokens.idx, tokens.weights, handle)[0]

    def round_trip(self, tokens: Tokens) -> torch.Tensor:
        rows, _, handle, *_ = self.dispatch(tokens, fp8=False)
        return self.combine(tokens, rows, handle)

    def calls(self, verb: str, fp8: bool) -> list[Callable[[], Any]]:
        """A call of the verb for each input."""
        inputs = self.point.inputs
        if verb == "dispatch":
            return [partial(self.dispatch, tokens, fp8) for tokens in inputs]
        if verb == "round_trip":
            return [partial(self.round_trip, tokens) for tokens in inputs]
        sent = [self.dispatch(tokens, fp8) for tokens in inputs]
        return [
            partial(self.combine, tokens, rows, handle)
            for tokens, (rows, _, handle, *_) in zip(inputs, sent, strict=True)
        ]

    def check(self, fp8: bool) -> float:
        """The largest relative error of a dispatch and its combine, between which expert e
        multiplies by 1 + e / E. Asserts that it is small, and that the counts of rows are right."""
        point = self.point
        factor = 1 + torch.arange(point.num_experts, device="cuda") / point.num_experts
        mine = factor.view(point.num_ranks, -1)[point.rank, :, None, None]
        errors = []
        for tokens in point.inputs:
            rows, counts, handle, *_ = self.dispatch(tokens, fp8)
            assert torch.equal(counts.long(), tokens.received_counts())
            if fp8:
                rows = dequantize(*rows, 1)
            out = self.combine(tokens, rows.mul_(mine).bfloat16(), handle)
            want = tokens.x * (tokens.weights * factor[tokens.idx]).sum(1, keepdim=True)
            errors.append(relative_error(out, want))
        assert max(errors) < (FP8_ERROR if fp8 else ERROR), errors
        return max(errors)


def nccl_calls(point: Point) -> dict[str, Callable[[], Any]]:
    """NCCL's way by verb, checked."""
    tokens = point.inputs[0]
    sent = tokens.send_copies()

    def round_trip() -> torch.Tensor:
        copies = tokens.send_copies()
        return tokens.return_copies(copies.rows, copies)

    error = relative_error(round_trip(), tokens.x * tokens.weights.sum(1, keepdim=True))
    assert error < ERROR, error
    return {
        "dispatch": tokens.send_copies,
        "combine": partial(tokens.return_copies, sent.rows, sent),
        "round_trip": round_trip,
    }


class Layer:
    """A layer of a model on one rank, with a Buffer that also takes prefills."""

    def __init__(self, group: dist.ProcessGroup, model: str, replays: int):
        self.replays = replays
        self.experts = experts = Experts.of(group, model)
        sizes = experts.hidden, experts.num_experts, experts.num_topk
        self.buffer = Buffer.for_tokens(group, PREFILL_TOKENS, *sizes)

    def ours(self, tokens: Tokens, max_tokens: int | None) -> torch.Tensor:
        experts = self.experts
        args = tokens.x, tokens.idx, tokens.weights, experts.up, experts.down, self.buffer
        return moe_ffn(*args, max_tokens=max_tokens)

    def layers(self, point: Point, max_tokens: int | None) -> list[Callable[[], Any]]:
        """Ours for each input."""
        return [partial(self.ours, tokens, max_tokens) for tokens in point.inputs]

    def nccl(self, tokens: Tokens) -> torch.Tensor:
        copies = tokens.send_copies()
        return tokens.return_copies(self.experts(copies.rows, copies.ends), copies)

    def compare(self, point: Point) -> None:
        """Ours, the GEMMs alone, ours in stages, and NCCL's all-to-all."""

        def time(calls: list[Callable[[], Any]]) -> tuple[float, float]:
            return time_replays(calls, point.group, self.replays)

        error, _ = (self.check(point, most) for most in (point.shape.tokens, None))
        alone = {impl: time(calls) for impl, calls in self.gemms(point).items()}
        ways = {
            impl: time(self.layers(point, most))
            for impl, most in (("moe_engine", point.shape.tokens), ("moe_engine_staged", None))
        }
        self.buffer.check()
        us, p99 = ways.pop("moe_engine")
        base = min(alone, key=lambda impl: alone[impl])
        line = dict(floor_us=point.floors["layer", "bf16"], error=error)
        line |= dict(ratio_to=base, ratio=us / alone[base][0])
        line |= time_eager(self.layers(point, point.shape.tokens), point.group, us)
        point.send(verb="layer", impl="moe_engine", us=us, p99=p99, **line)
        nccl_us = time_calls(partial(self.nccl, point.inputs[0]), point.group, NCCL_ROUNDS)
        for impl, (other_us, other_p99) in (alone | ways | {"nccl": (nccl_us, None)}).items():
            line = dict(ratio_to="moe_engine", ratio=other_us / us)
            point.send(verb="layer", impl=impl, us=other_us, p99=other_p99, **line)

    def check(self, point: Point, max_tokens: int | None) -> float:
        """The largest relative difference to NCCL's way, which is small."""
        errors = [
            relative_error(self.ours(tokens, max_tokens), self.nccl(tokens))
            for tokens in point.inputs
        ]
        assert max(errors) < ERROR, errors
        return max(errors)

    def gemms(self, point: Point) -> dict[str, list[Callable[[], torch.Tensor]]]:
        """The GEMMs alone, torch's and ours, for each input, checked against each other."""
        calls: dict[str, list[Callable[[], torch.Tensor]]] = {"torch": [], "grouped_gemm": []}
        for tokens in point.inputs:
            rows, ends = tokens.received()
            theirs, ours = partial(self.experts, rows, ends), self.experts.scheduled(rows, ends)
            assert len(rows) == 0 or relative_error(ours(), theirs()) < ERROR
            calls["torch"].append(theirs)
            calls["grouped_gemm"].append(ours)
        return calls


if __name__ == "__main__":
    typer.run(main)
