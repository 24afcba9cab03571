"""Host time of each entry point: python bench/host.py --ranks 1

Microseconds that a call keeps Python and the driver busy, while the GPU is busy with earlier work:
the median of 100 calls in a row on rank 0 (20 of long ones). All threads of the process, autograd's
among them, are on the one of its cores where that is least. Cores may work for others as well; a
thread that moves between them takes up to twice as long, and the first call after a wait four
times. Ranks may share a GPU here, as its time does not count.

The torch lines are what a layer's experts cost by `torch._grouped_mm`; those of deep_ep are
DeepEP's, where it is installed and each of 2, 4 or 8 ranks has a GPU. hook is the second half of a
dispatch alone. forward_backward is a layer that trains, on one rank, with the change to autograd's
thread and back; in_one_thread: its backward runs in the thread that calls, as
torch.autograd.set_multithreading_enabled(False) has it. Verbs with of_stack are eight layers, one
after the other, and their time is divided by eight. Those named async run on the Buffer's own
stream, between an event and a wait, as DeepEP's callers mostly call them. With --nodes the ranks
stand for nodes, which NVSHMEM connects, and the verbs alone are timed.

Verb transformers_decode is a step of decode of a whole model, divided by its layers, and
transformers_experts a call of one module of experts. impl moe_engine runs the experts on all ranks;
"transformers, grouped_mm" and "transformers, batched_mm" hold all of them on each rank.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import chain, cycle, islice
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from _common import draw_topk, save
from _deep_ep import deep_ep, low_latency_buffer, normal_buffer

from moe_engine import Buffer, ElasticBuffer, Options, moe_ffn
from moe_engine.emulation import RankPool, send_message
from moe_engine.grouped_gemm import grouped_gemm, grouped_mlp
from moe_engine.layer_config import MODELS
from moe_engine.tools.models import Kind, build_config, build_model

BATCHES, CALLS, LONG_CALLS = 16, 100, 20
"""Batches, each on the next core; calls of a batch, and how many where one takes long: a GPU that
is slower than its host queues 1024 launches, and then lets the host wait."""
SLEEP_CYCLES = 10_000_000
"""About 5 ms, in which the GPU only queues what is launched."""
TOKENS, FEW, STACKED = 1024, 128, 8
"""Tokens of a call, and where there are few; layers that train one after the other."""
HOST_MODEL = "qwen3-30b"
DECODED, CACHE_LENGTH, LAYERS = 8, 512, 4
"""Of models: tokens of a step, most steps, layers."""
Call = Callable[[], Any]
Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""x bf16 [T, H], topk_idx int64 and topk_weights float32 [T, K]."""


@dataclass(frozen=True)
class Point:
    """A call to be timed; `layers`: of how many its time is the sum; `before`: makes each call that
    is timed in its place, and is not timed itself; `num_calls` of a batch, None: CALLS."""

    verb: str
    impl: str
    tokens: int
    call: Call
    layers: int | None = None
    before: Callable[[], Call] | None = None
    num_calls: int | None = None


def main(
    ranks: Annotated[int, typer.Option(help="Ranks, which may share a GPU.")] = 1,
    nodes: Annotated[int, typer.Option(help="Nodes that they stand for.")] = 1,
    path: Annotated[Path | None, typer.Option(help="Result file.")] = None,
) -> None:
    """Run the bench on `ranks` ranks."""

    def show(rank: int, line: dict[str, Any]) -> None:
        save("host", path, **line)
        print(f"{line['ranks']} ranks  {line['impl']:26}  {line['verb']:22} {line['host_us']:7.1f}")

    env = {"MOE_ENGINE_TIMEOUT_S": "20"}
    with RankPool(ranks, "cuda", timeout_s=400, env=env, nodes=nodes) as pool:
        kinds = (verb_points, expert_points, transformers_points) if nodes == 1 else (node_points,)
        pool.run(run_rank, kinds, on_message=show)


def host_us(point: Point) -> float:
    """The median of calls in a row, on the core where it is least."""
    cores = os.sched_getaffinity(0)
    try:
        turns = islice(cycle(sorted(cores)), BATCHES)
        return min(median(batch_us(point, core)) for core in turns)
    finally:
        bind_threads(cores)


def batch_us(point: Point, core: int) -> list[float]:
    """The times of the calls in a row, on this core, the first ones with the GPU asleep."""
    bind_threads({core})
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    times = []
    for _ in range(point.num_calls or CALLS):
        call = point.call if point.before is None else point.before()
        since = time.perf_counter()
        call()
        times.append((time.perf_counter() - since) * 1e6)
    torch.cuda.synchronize()
    return times


def bind_threads(cores: Collection[int]) -> None:
    """Let the threads of this process run on these cores alone."""
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread.name), cores)


def run_rank(group: dist.ProcessGroup, kinds: Sequence[Callable[..., Iterator[Point]]]) -> None:
    """All entry points of these kinds on one rank; rank 0 reports."""
    for points in kinds:
        for point in points(group):
            for _ in range(3):
                point.call()
            torch.cuda.synchronize()
            dist.barrier(group)
            us = host_us(point) / (point.layers or 1)
            dist.barrier(group)
            if group.rank() == 0:
                line = dict(verb=point.verb, impl=point.impl, tokens=point.tokens, host_us=us)
                line |= dict(model=HOST_MODEL, ranks=group.size(), layers=point.layers)
                send_message(line | dict(dtype="bf16", routing="uniform"))


def draw(*shape: int) -> torch.Tensor:
    """Random rows, or weights that keep their scale."""
    return (torch.randn(*shape, device="cuda") * shape[-1] ** -0.5).bfloat16()


def route(group: dist.ProcessGroup, tokens: int) -> Routed:
    """Tokens of one rank, and where they go."""
    num_experts, hidden, _, num_topk = MODELS[HOST_MODEL]
    idx = draw_topk("uniform", tokens, num_experts, num_topk, group.rank())
    return draw(tokens, hidden), idx, torch.rand(tokens, num_topk, device="cuda")


def verb_points(group: dist.ProcessGroup) -> Iterator[Point]:
    """The verbs of a Buffer, ours and DeepEP's."""
    num_experts, hidden, _, num_topk = MODELS[HOST_MODEL]
    many, few = route(group, TOKENS), route(group, FEW)
    options = Options(decode_tokens=FEW)
    buffers = Buffer.for_tokens(group, TOKENS, hidden, num_experts, num_topk, options=options)
    yield from points_of("moe_engine", buffers, buffers, many, few)
    buffers.destroy()
    yield from elastic_points(group, many)
    package = deep_ep(group.size())
    if package is None or torch.cuda.device_count() < group.size():
        return
    normal = normal_buffer(package, group, many[0][0].nbytes)
    low_latency = low_latency_buffer(package.Buffer, group, FEW, hidden, num_experts)
    yield from points_of("deep_ep", normal, low_latency, many, few)
    normal.destroy()
    low_latency.destroy()


def node_points(group: dist.ProcessGroup) -> Iterator[Point]:
    """The verbs of a Buffer of several nodes, and a layer of few tokens."""
    num_experts, hidden, columns, num_topk = MODELS[HOST_MODEL]
    many, few = route(group, TOKENS), route(group, FEW)
    options = Options(decode_tokens=FEW)
    buffer = Buffer.for_tokens(group, TOKENS, hidden, num_experts, num_topk, options=options)
    impl, num_local = f"moe_engine, {buffer.num_nodes} nodes", num_experts // group.size()
    yield from points_of(impl, buffer, buffer, many, few)
    up, down = draw(num_local, 2 * columns, hidden), draw(num_local, hidden, columns)
    decode = partial(moe_ffn, *few, up, down, buffer, FEW)
    yield Point("moe_ffn_decode", impl, FEW, decode)
    buffer.destroy()


def elastic_points(group: dist.ProcessGroup, many: Routed) -> Iterator[Point]:
    """DeepEP V2's calls on this engine, without counts on the host, by token and by expert."""
    num_experts, hidden, _, num_topk = MODELS[HOST_MODEL]
    sizes = dict(num_max_tokens_per_rank=TOKENS, hidden=hidden, num_topk=num_topk)
    buffer, x = ElasticBuffer(group, **sizes, num_gpu_timeout_secs=20), many[0]
    for impl, do_expand in (("ElasticBuffer", False), ("ElasticBuffer, by expert", True)):
        how: dict[str, Any] = dict(num_experts=num_experts, do_expand=do_expand, do_cpu_sync=False)
        dispatch = partial(buffer.dispatch, *many, **how)
        rows, _, weights, handle, _ = dispatch()
        yield Point("dispatch", impl, TOKENS, dispatch)
        cached = partial(buffer.dispatch, x, handle=handle, do_expand=do_expand)
        yield Point("dispatch_cached", impl, TOKENS, cached)
        yield Point("combine", impl, TOKENS, partial(buffer.combine, rows, handle, weights))
    buffer.destroy()


def points_of(
    impl: str, normal: Any, low_latency: Any, many: Routed, few: Routed
) -> Iterator[Point]:
    """Each verb of Buffers of either kind."""
    num_experts = MODELS[HOST_MODEL][0]
    x, idx, weights = many
    per_rank, _, per_expert, in_rank, _ = normal.get_dispatch_layout(idx, num_experts)
    layout = None, per_rank, None, in_rank, per_expert
    most = 1, TOKENS * normal.group_size  # expert_alignment, num_worst_tokens
    dispatch = partial(normal.dispatch, x, *layout, idx, weights, *most)
    recv_x, _, recv_weights, _, handle, _ = dispatch()
    low = partial(low_latency.low_latency_dispatch, *few[:2], FEW, num_experts)
    rows, _, low_handle, _, _ = low(use_fp8=False)
    y = torch.zeros_like(rows)

    combine = partial(normal.combine, recv_x, handle, recv_weights)
    low_combine = partial(low_latency.low_latency_combine, y, *few[1:], low_handle)

    def asynchronous(call: Callable[..., Any]) -> None:
        call(previous_event=normal.capture(), async_finish=True)[-1].current_stream_wait()

    def send() -> Call:
        hook: Call = low(return_recv_hook=True)[-1]
        return hook

    def send_and_receive() -> None:
        send()()

    for verb, call in {
        "layout": partial(normal.get_dispatch_layout, idx, num_experts),
        "dispatch": dispatch,
        "dispatch_cached": partial(normal.dispatch, x, handle),
        "combine": combine,
    }.items():
        yield Point(verb, impl, TOKENS, call)
    yield Point("low_latency_dispatch", impl, FEW, low)
    yield Point("low_latency_combine", impl, FEW, low_combine)
    yield Point("dispatch_and_hook", impl, FEW, send_and_receive)
    yield Point("hook", impl, FEW, send_and_receive, before=send)
    # Last, as other calls of a Buffer take longer once there is a stream of its own.
    yield Point("dispatch_async", impl, TOKENS, partial(asynchronous, dispatch))
    yield Point("combine_async", impl, TOKENS, partial(asynchronous, combine))


def expert_points(group: dist.ProcessGroup) -> Iterator[Point]:
    """Layers, and what the experts of a layer cost alone."""
    num_experts, hidden, columns, num_topk = MODELS[HOST_MODEL]
    num_local = num_experts // group.size()
    many, few = route(group, TOKENS), route(group, FEW)
    options = Options(decode_tokens=FEW)
    buffer = Buffer.for_tokens(group, TOKENS, hidden, num_experts, num_topk, options=options)
    ends = torch.linspace(0, TOKENS, num_local + 1, device="cuda").int()
    weights = [
        (draw(num_local, 2 * columns, hidden), draw(num_local, hidden, columns))
        for _ in range(STACKED)
    ]
    x, (up, down) = many[0], weights[0]

    def experts_by_torch(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        h = torch._grouped_mm(x, up.transpose(1, 2), ends[1:])
        gate, value = h.chunk(2, dim=-1)
        act = torch.nn.functional.silu(gate) * value
        return torch._grouped_mm(act, down.transpose(1, 2), ends[1:])

    def layer(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return moe_ffn(x, *many[1:], up, down, buffer)

    def decode(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return moe_ffn(x, *few[1:], up, down, buffer, FEW)

    layers = {"moe_ffn": (layer, many[0]), "moe_ffn_decode": (decode, few[0])}
    for verb, (run, rows) in layers.items():
        yield Point(verb, "moe_engine", len(rows), partial(run, rows, up, down))
        stack = partial(in_turn, run, rows, weights)
        of_stack: dict[str, Any] = dict(layers=STACKED, num_calls=-(-CALLS // STACKED))
        yield Point(f"{verb}_of_stack", "moe_engine", len(rows), stack, **of_stack)
    yield Point("grouped_gemm", "moe_engine", TOKENS, partial(grouped_gemm, x, up, ends))
    yield Point("grouped_mlp", "moe_engine", TOKENS, partial(grouped_mlp, x, up, down, ends))
    yield Point("grouped_mlp", "torch", TOKENS, partial(experts_by_torch, x, up, down))
    if group.size() == 1:  # on several ranks the host waits for the number of rows
        for one in (x, *chain(*weights)):
            one.requires_grad_()
        for impl, run in (("moe_engine", layer), ("torch", experts_by_torch)):
            step = partial(train, run, x, weights[:1], torch.randn_like(x))
            steps = partial(train, run, x, weights, torch.randn_like(x))
            long, of_stack = LONG_CALLS, dict(layers=STACKED, num_calls=-(-LONG_CALLS // STACKED))
            for name, how in {"": lambda call: call, "_in_one_thread": one_thread}.items():
                verb = f"forward_backward{name}"
                yield Point(verb, impl, TOKENS, how(step), num_calls=long)
                yield Point(f"{verb}_of_stack", impl, TOKENS, how(steps), **of_stack)
    buffer.destroy()


def in_turn(
    run: Callable[..., torch.Tensor],
    x: torch.Tensor,
    weights: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """Layers with these weights, one after the other."""
    for up, down in weights:
        x = run(x, up, down)
    return x


def train(
    run: Callable[..., torch.Tensor],
    x: torch.Tensor,
    weights: Sequence[tuple[torch.Tensor, torch.Tensor]],
    dy: torch.Tensor,
) -> None:
    """Forward and backward of `in_turn`."""
    torch.autograd.grad(in_turn(run, x, weights), (x, *chain(*weights)), dy)


def one_thread(step: Call) -> Call:
    """The step of training with a backward that runs in the thread that calls."""

    def run() -> None:
        with torch.autograd.set_multithreading_enabled(False):
            step()

    return run


def transformers_points(group: dist.ProcessGroup) -> Iterator[Point]:
    """Decode of a model of transformers, whose experts it runs itself, then ours; nothing where it
    is not installed."""
    if find_spec("transformers") is None:
        return
    from moe_engine.integrations.transformers import fix_max_tokens, shard_experts

    num_experts, _, _, num_topk = MODELS[HOST_MODEL]
    sizes = dict(num_hidden_layers=LAYERS, num_experts=num_experts, num_experts_per_tok=num_topk)
    model = build_model(build_config(Kind.QWEN3_MOE, large=True, **sizes), "cuda", torch.bfloat16)
    model.requires_grad_(False)
    for name in "grouped_mm", "batched_mm":
        model.set_experts_implementation(name)
        yield from model_points(group, model, f"transformers, {name}")
    buffer = shard_experts(model, group, max_tokens=DECODED)
    decode, experts = model_points(group, model, "moe_engine")
    yield decode
    with fix_max_tokens(model, DECODED):
        yield experts
    buffer.destroy()


def model_points(group: dist.ProcessGroup, model: Any, impl: str) -> Iterator[Point]:
    """A step of decode with the next place in a cache, and the experts of its first layer."""
    from transformers import StaticCache

    ids = torch.zeros(DECODED, 1, dtype=torch.int64, device="cuda")
    cache = StaticCache(config=model.config, max_cache_len=CACHE_LENGTH)
    step = partial(model, ids, past_key_values=cache)
    yield Point("transformers_decode", impl, DECODED, step, LAYERS, num_calls=LONG_CALLS)
    x, idx, weights = route(group, DECODED)
    experts = partial(model.model.layers[0].mlp.experts, x, idx, weights.bfloat16())
    yield Point("transformers_experts", impl, DECODED, experts)


if __name__ == "__main__":
    typer.run(main)
