"""Prefill and decode of whole models in transformers, with the experts on the GPUs of one host:
python bench/model.py

runs Mixtral-8x7B and Qwen3-30B-A3B, some of their layers, with random bf16 weights on 4 GPUs.
`--only qwen3 --layers 48 --batch 64 --prompt 1024` chooses; `--tiny --ranks 2` shows without a GPU
that all of it runs. Each way through a model does the same work, `batch` sequences for each rank:

- moe_engine: each rank reads its own sequences; the experts are spread over the ranks.
- moe_engine_cuda_graphs: likewise, with cuda_graphs=True, as `generate` runs it: the hosts agree on
  the tokens of each step, and replay it. GPUs alone.
- transformers_dp: likewise, but each rank holds all experts, and nothing is sent.
- transformers_ep: `enable_expert_parallel`. Each rank drops what its router gives to experts of
  other ranks, and an all-reduce adds up what their experts give. So all must see the same tokens:
  each reads the sequences of all ranks, and repeats attention and the output layer for them.
- transformers_tp: tp_plan="auto". Each rank reads the sequences of all ranks with its share of the
  heads and of the columns of each expert.

First each way reads a few tokens, a prefill and a step of decode, with the routing that the first
one chose, and its logits are compared with those. Then `prefill` is the time to the first token,
and `decode` that of a step with a static cache, which holds `prompt` tokens before; slowest rank.
"..., graph" is a CUDA graph of the step, "..., batched_mm" runs the experts as generate() of
transformers does in decode, if the copies of weights that it makes fit: one for each expert row.
tokens are those per rank, tokens_per_s those of all ranks. ratio is the time over that of impl
ratio_to, its fastest if there are two, eager over eager and graph over graph. gemm_us, comm_us,
dense_us and busy_us, of moe_engine's prefill and of its step in a graph: see `train_step.py`.
"""

from __future__ import annotations

import gc
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import transformers.distributed.utils
import typer
from _common import save, time_calls, timed_pool
from _kernel_classes import trace_classes
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM, StaticCache
from transformers.distributed import DistributedConfig

from moe_engine.emulation import RankError, send_message
from moe_engine.integrations.recorded_routing import Routing, record_routing, replay_routing
from moe_engine.integrations.transformers import experts_layers, fix_max_tokens, shard_experts
from moe_engine.timing import slowest
from moe_engine.tools import tune_layer
from moe_engine.tools.models import Kind, build_config

DP, OURS, GRAPHS, EP, TP = IMPLS = (
    "transformers_dp",
    "moe_engine",
    "moe_engine_cuda_graphs",
    "transformers_ep",
    "transformers_tp",
)
"""In the order in which they run."""
RATIO_TO = {OURS: DP, GRAPHS: OURS, EP: OURS, TP: OURS}
LAYERS = {"mixtral-8x7b": 8, "qwen3-30b": 16}
CHECK_TOKENS = 8
"""Tokens of each of the sequences, one per rank, whose logits are compared."""
ERROR = {torch.bfloat16: 5e-2, torch.float32: 1e-5}
"""Largest relative difference of the logits."""
TRACED = 4
"""Calls whose kernels are traced."""
BATCHED_BYTES = 4e9
"""Most that batched_mm may copy in a layer."""


@dataclass(frozen=True)
class Job:
    """A model and what to measure; batches are sequences per rank."""

    model: str
    layers: int
    batches: tuple[int, ...]
    prompt: int
    new_tokens: int
    device: str

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def config(self) -> Any:
        """A new one each time, as some ways through a model change it."""
        kind = Kind.MIXTRAL if self.model.startswith("mixtral") else Kind.QWEN3_MOE
        sizes: dict[str, Any] = dict(num_hidden_layers=self.layers)
        if self.device == "cuda" and kind is Kind.MIXTRAL:
            sizes |= dict(vocab_size=32000)
        elif self.device == "cuda":
            sizes |= dict(vocab_size=151936, num_experts=128, num_experts_per_tok=8)
        return build_config(kind, large=self.device == "cuda", **sizes)


def main(
    ranks: Annotated[int, typer.Option(help="GPUs to use.")] = 4,
    only: Annotated[str, typer.Option(help="Only models whose name begins so.")] = "",
    impl: Annotated[list[str] | None, typer.Option(help="Only these; the first always.")] = None,
    layers: Annotated[int | None, typer.Option(help="8 of Mixtral, 16 of Qwen3.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Per rank: 1, 8, 32.")] = None,
    prompt: Annotated[int | None, typer.Option(help="Tokens before decode: 512.")] = None,
    new_tokens: Annotated[int | None, typer.Option(help="Steps of decode: 8.")] = None,
    tiny: Annotated[bool, typer.Option(help="Tiny models on CPU ranks.")] = False,
    path: Annotated[Path | None, typer.Option(help="Result file.")] = None,
) -> None:
    """Run the bench on `ranks` GPUs."""

    def show(rank: int, line: dict[str, Any] | str) -> None:
        print(line if isinstance(line, str) else save("model", path, **line), flush=True)

    device = "cpu" if tiny else "cuda"
    batches = tuple(batch or ([2] if tiny else [1, 8, 32]))
    lengths = prompt or (4 if tiny else 512), new_tokens or (1 if tiny else 8)
    left_out = {GRAPHS} if tiny else set()
    if not shards_models():
        left_out |= {EP, TP}
    wanted = IMPLS if impl is None else (DP, *impl)
    chosen = [name for name in IMPLS if name in wanted and name not in left_out]
    failed = False
    with timed_pool(ranks, device, timeout_s=280, env={"MOE_ENGINE_TIMEOUT_S": "20"}) as pool:
        for model, default in LAYERS.items():
            if not model.startswith(only):
                continue
            depth = layers or (2 if tiny else default)
            job = Job(f"{model}, tiny" if tiny else model, depth, batches, *lengths, device)
            try:
                pool.run(run_rank, job, chosen, on_message=show)
            except RankError as error:
                print(error, flush=True)
                failed = True
    raise typer.Exit(int(failed))


def shards_models() -> bool:
    """Whether transformers can shard a model that was made on the meta device: later versions than
    those of DeviceMesh (5.17) do so only while they read weights from files."""
    return not hasattr(transformers.distributed.utils, "TransformersDeviceMesh")


@torch.no_grad()
def run_rank(group: dist.ProcessGroup, job: Job, impls: list[str]) -> None:
    """All ways through one model on one rank; rank 0 reports."""
    bench = Bench(group, job)
    for impl in impls:
        bench.run(impl)


class Bench:
    """One model on one rank, one way after the other."""

    def __init__(self, group: dist.ProcessGroup, job: Job):
        self.group, self.job = group, job
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.routing: list[Routing] = []  # of the first way
        self.times: dict[tuple[object, ...], float] = {}

    def run(self, impl: str) -> None:
        """Build the model, compare its logits, measure it, and give its memory back."""
        self.impl, self.is_ours = impl, impl in (OURS, GRAPHS)
        self.model, buffer = self.build()
        self.error = self.compare()
        for batch in self.job.batches:
            ids = self.mine(self.draw(batch, self.job.prompt))
            self.prefill(batch, ids)
            self.decode(batch, ids)
        if buffer is not None:
            dist.barrier(self.group)
            buffer.destroy()
        del self.model, buffer
        gc.collect()
        torch.cuda.empty_cache()

    # --- Models ------------------------------------------------------------------------------

    def build(self) -> tuple[Any, Any]:
        """The model, made on this device parameter by parameter, and our Buffer."""
        job, config, buffer = self.job, self.job.config(), None
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=job.dtype).eval()
        shapes = {name: p.shape for name, p in model.named_parameters()}
        if self.is_ours:
            max_tokens = max(CHECK_TOKENS, max(job.batches) * job.prompt)
            how: dict[str, Any] = dict(max_tokens=max_tokens, cuda_graphs=self.impl == GRAPHS)
            buffer = shard_experts(model, self.group, **how)
        else:
            model.set_experts_implementation("grouped_mm")
        if self.impl in (EP, TP) and self.num_ranks > 1:
            mesh = DeviceMesh.from_group(self.group, job.device)
            expert_parallel = self.impl == EP
            plan = DistributedConfig(self.num_ranks, "auto", enable_expert_parallel=expert_parallel)
            model = type(model).maybe_distribute_model(model, plan, mesh)
        for name, module in model.named_modules():
            for own, meta in list(module.named_parameters(recurse=False)):
                value = self.draw_weight(f"{name}.{own}", shapes[f"{name}.{own}"], meta)
                module.register_parameter(own, torch.nn.Parameter(value, requires_grad=False))
        with torch.device(job.device):  # its frequencies are no parameters
            model.model.rotary_emb = type(model.model.rotary_emb)(config)
        return model, buffer

    def draw_weight(self, name: str, shape: torch.Size, meta: torch.Tensor) -> torch.Tensor:
        """A parameter, the same for all ways, or this rank's part of it."""
        value = torch.ones(shape, dtype=meta.dtype, device=self.job.device)
        if len(shape) > 1:
            generator = torch.Generator(value.device).manual_seed(zlib.crc32(name.encode()))
            # Tokens that are unlike one another, as their experts are to differ.
            value.normal_(std=1 if "embed" in name else shape[-1] ** -0.5, generator=generator)
        if isinstance(meta, DTensor):
            where = meta.device_mesh, meta.placements
            return distribute_tensor(value, *where, src_data_rank=None).clone()
        if shape != meta.shape:  # our experts
            return value.view(self.num_ranks, *meta.shape)[self.rank].clone()
        return value

    # --- Inputs and the comparison -----------------------------------------------------------

    def draw(self, batch: int, length: int) -> torch.Tensor:
        """The tokens of all ranks, int64 [R, B, length]."""
        shape, vocab_size = (self.num_ranks, batch, length), self.job.config().vocab_size
        ids = torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(batch))
        return ids.to(self.job.device)

    def mine(self, x: torch.Tensor) -> torch.Tensor:
        """What this rank reads of x [R, B, ..]: its own [B, ..], or all as [R * B, ..]."""
        return x[self.rank] if self.is_ours or self.impl == DP else x.flatten(0, 1)

    def compare(self) -> float | None:
        """The relative difference of the logits to those of the first way, which reads the
        sequences of all ranks."""
        ids = self.draw(1, CHECK_TOKENS)
        if not self.routing:
            with record_routing(self.model) as self.routing:
                self.logits = self.read(ids.flatten(0, 1))
            return None
        with replay_routing(self.model, [self.seen(*chosen) for chosen in self.routing]):
            got = self.read(self.mine(ids))
        want = self.mine(self.logits[:, None])
        error = slowest(float((got - want).norm() / want.norm()), self.group)
        assert error < ERROR[self.job.dtype], (self.impl, error)
        return error

    def read(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits in fp32 [B, CHECK_TOKENS, V] of a prefill and one step of decode."""
        cache = StaticCache(config=self.model.config, max_cache_len=CHECK_TOKENS)
        parts = ids[:, :-1], ids[:, -1:]
        return torch.cat([self.model(x, past_key_values=cache).logits for x in parts], 1).float()

    def seen(self, idx: torch.Tensor, weights: torch.Tensor) -> Routing:
        """What the routers chose for all ranks' tokens [R * T, K], as this way's experts get it."""
        idx, weights = (self.mine(x.unflatten(0, (self.num_ranks, -1))) for x in (idx, weights))
        if self.impl == EP:
            num_local = self.job.config().num_experts // self.num_ranks
            elsewhere = idx // num_local != self.rank
            idx = (idx % num_local).masked_fill(elsewhere, num_local)
            weights = weights.masked_fill(elsewhere, 0)
        return idx, weights

    # --- Times -------------------------------------------------------------------------------

    def prefill(self, batch: int, ids: torch.Tensor) -> None:
        """The time to the first token."""

        def call() -> None:
            self.model(ids, logits_to_keep=1).logits[:, -1].argmax(-1)

        us = self.time(call)
        self.send("prefill", batch, batch * self.job.prompt, us, classes=self.trace(call))

    def decode(self, batch: int, ids: torch.Tensor) -> None:
        """The time of a step, launched by the host and as a CUDA graph."""
        job = self.job
        cache = StaticCache(config=self.model.config, max_cache_len=job.prompt + job.new_tokens)
        token = torch.empty_like(ids[:, :1])

        def step(x: torch.Tensor = token) -> None:
            logits = self.model(x, past_key_values=cache, logits_to_keep=1).logits
            token.copy_(logits[:, -1].argmax(-1, keepdim=True))

        def call_all(call: Callable[[], object]) -> None:
            for layer in cache.layers:
                layer.cumulative_length.fill_(job.prompt)
            for _ in range(job.new_tokens):
                call()

        def time_steps(call: Callable[[], object]) -> float:
            return self.time(partial(call_all, call)) / job.new_tokens

        step(ids)
        for suffix in self.experts_in_decode(len(ids)):
            self.send("decode", batch, batch, time_steps(step), suffix)
            if job.device == "cpu" or self.impl == GRAPHS:
                continue
            if graph := self.capture(step, batch):
                us = time_steps(graph.replay)
                classes = self.trace(partial(call_all, graph.replay), job.new_tokens)
                self.send("decode", batch, batch, us, suffix, ", graph", classes)

    def experts_in_decode(self, num_tokens: int) -> Any:
        """Let the experts run by grouped_mm, then by batched_mm where it fits; ours as they do."""
        yield ""
        experts = experts_layers(self.model)[0]
        weights = (
            self.model.config.num_experts_per_tok
            * num_tokens
            * sum(p[0].nbytes for p in map(_local, (experts.gate_up_proj, experts.down_proj)))
        )
        if not self.is_ours and weights <= BATCHED_BYTES:
            self.model.set_experts_implementation("batched_mm")
            yield ", batched_mm"
            self.model.set_experts_implementation("grouped_mm")

    def capture(self, step: Callable[[], None], batch: int) -> torch.cuda.CUDAGraph | None:
        """A CUDA graph of one step, which ran before; None where transformers makes none. Not that
        of `timing.capture`, in which a step of other impls would fail: NCCL watches its collectives
        in a thread of its own."""
        graph = torch.cuda.CUDAGraph()
        hint = fix_max_tokens(self.model, batch) if self.impl == OURS else nullcontext()
        try:
            with hint, torch.cuda.graph(graph, capture_error_mode="thread_local"):
                step()
        except RuntimeError as error:
            if self.impl == OURS:
                raise
            send_message(f"rank {self.rank}, {self.impl}: no CUDA graph: {error}")
            return None
        return graph

    def time(self, call: Callable[[], object]) -> float:
        """Microseconds of a call: the median of the slowest rank."""
        if self.job.device == "cuda":
            return time_calls(call, self.group, 3)
        return tune_layer.time_calls(call, self.group, 1)

    def trace(self, call: Callable[[], object], num_steps: int = 1) -> dict[str, float]:
        """Where the time of a call of our way, or of one of its steps, goes on the GPU; nothing for
        other ways."""
        if self.job.device == "cpu" or self.impl != OURS:
            return {}
        classes = trace_classes(call, TRACED, self.job.device)
        return {name: round(us / num_steps, 1) for name, us in classes.items() if us}

    def send(
        self,
        verb: str,
        batch: int,
        tokens: int,
        us: float,
        suffix: str = "",
        graph: str = "",
        classes: dict[str, float] | None = None,
    ) -> None:
        """One result line from rank 0."""
        key, other = (verb, batch, graph), RATIO_TO.get(self.impl)
        self.times[self.impl, *key] = min(us, self.times.get((self.impl, *key), us))
        other_us = self.times.get((other, *key))
        if self.rank == 0:
            job = self.job
            fields = dict(model=job.model, verb=verb, impl=self.impl + suffix + graph)
            fields |= dict(layers=job.layers, prompt=job.prompt, tokens=tokens)
            fields |= dict(ranks=self.num_ranks, ratio_to=other, us=round(us, 1))
            fields |= dict(dtype="bf16" if job.dtype == torch.bfloat16 else "fp32")
            fields |= dict(tokens_per_s=round(1e6 * tokens * self.num_ranks / us))
            fields |= dict(ratio=None if other_us is None else round(us / other_us, 3))
            fields |= dict(error=self.error and round(self.error, 8))
            send_message(fields | (classes or {}))


def _local(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


if __name__ == "__main__":
    typer.run(main)
