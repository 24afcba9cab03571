"""A layer of two ranks on one GPU, of which one is a reflection: python bench/mirror.py

Ranks that share a GPU take turns, so their times mean nothing. Here one rank's peer is itself. Of
every two tokens the experts are the same ones of the other rank, so this rank is sent just what it
sends, and what it would write to its peer it writes to where the peer would write. All of a rank's
launches run as between two GPUs, at the pace of their link, and concurrently with one another; only
no row crosses a link, and what would come from the peer is written by this rank. Under "A rank
whose peer is itself" bench/notes/layer.md says how these times compare with those of two GPUs: take
them to compare choices, and measure between GPUs what is claimed.

Before it is timed each layer is compared with torch's. impl `torch` is two torch._grouped_mm and
one kernel for silu(gate) * up on the rows that arrive, `moe_engine` the layer, and `moe_engine, as
in a backward` the layer with the choices of a backward, in which none or all tiles of own rows come
first. us is that of a call in a CUDA graph, in turns; `ratio` is over torch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated
from unittest import mock

import torch
import triton.language as tl
import typer
from _common import draw_topk, save
from _layer import ERROR, Experts, relative_error
from einops import einsum, rearrange

from moe_engine import Options, timing
from moe_engine.device import lang
from moe_engine.device.context import RANK, REGION_BYTES, SLOTS
from moe_engine.device.lang import device_function, own_block
from moe_engine.engines.base import LayerInputs
from moe_engine.engines.kernel import KernelEngine
from moe_engine.hardware import gpu
from moe_engine.layer_config import MODELS, LayerChoices, LayerConfig, LayerProblem
from moe_engine.options import sizes_for_tokens
from moe_engine.symm.single import SingleTensor
from moe_engine.symm.slots import SlotLayout, Slots

RANKS, TIMEOUT_S = 2, 20.0
TOKENS = 2048, 4096, 8192
ROUNDS, WARM_UP, REPEATS = 25, 3, 4
PAUSE_S = 0.02
"""Before each replay, as a GPU that is always busy becomes hot and slow."""


@device_function
def reflected(address, rank, context):
    """`lang.symm_at` where the peer of rank 0 is itself: what rank 0 would write to its region, or
    to its flag, on rank 1 goes to where rank 1 would write on rank 0."""
    in_slots = address - own_block(context) >= tl.load(context + SLOTS)
    step = tl.where(in_slots, tl.load(context + REGION_BYTES), 8)
    return address + tl.where(rank == tl.load(context + RANK), 0, step)


@contextmanager
def own_peer() -> Iterator[None]:
    """Kernels that are compiled now write to the peer by `reflected`."""
    ours = (one for name, one in sys.modules.items() if name.startswith("moe_engine"))
    users = [one for one in ours if vars(one).get("symm_at") is lang.symm_at]
    with ExitStack() as stack:
        for one in users:
            stack.enter_context(mock.patch.object(one, "symm_at", reflected))
        yield


class Mirror(SingleTensor):
    """A `SymmetricTensor` of two ranks with one block."""

    def __init__(self, num_bytes: int, device: torch.device):
        super().__init__(num_bytes, device)
        self.peer_addresses = self.peer_addresses.repeat(RANKS)


class Tokens:
    """x bf16 [T, H], T even, idx int64 and weights float32 [T, K]: the experts of tokens 2 i and
    2 i + 1 are E / 2 apart, so that both ranks' experts have the same rows.

    4 experts, 4 tokens: [[0, 3], [2, 1], [1, 0], [3, 2]].
    """

    def __init__(self, model: str, num_tokens: int):
        num_experts, hidden, _, num_topk = MODELS[model]
        torch.manual_seed(0)
        self.x = torch.randn(num_tokens, hidden, device="cuda", dtype=torch.bfloat16)
        half = draw_topk("uniform", num_tokens // 2, num_experts, num_topk, 0)
        other = (half + num_experts // 2) % num_experts
        self.idx = rearrange([half, other], "half t k -> (t half) k")
        self.weights = torch.rand(num_tokens, num_topk, device="cuda").bfloat16().float()

    def rows(self, num_local: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(this rank's expert rows [T * K, H], int32 [L], their ends, int64 [T * K], the (token, k)
        of each): its own and those of its reflection."""
        local = self.idx.flatten() % num_local
        order = local.argsort(stable=True)
        ends = torch.bincount(local, minlength=num_local).cumsum(0).int()
        return self.x[order // self.idx.shape[1]], ends, order


def main(
    only: Annotated[str, typer.Option(help="Only models whose name begins so.")] = "",
    tokens: Annotated[list[int] | None, typer.Option(help="Tokens of a rank.")] = None,
    path: Annotated[Path | None, typer.Option(help="Result file.")] = None,
) -> None:
    """Run the bench on one GPU."""
    with own_peer():
        for model in (name for name in MODELS if name.startswith(only)):
            experts = Experts(model, RANKS)
            for num_tokens in tokens or TOKENS:
                for impl, us, ratio in measure(experts, num_tokens):
                    line = dict(model=model, tokens=num_tokens, routing="uniform", ranks=RANKS)
                    line |= dict(verb="layer", impl=impl, dtype="bf16", us=round(us, 1))
                    more = dict(ratio_to="torch", ratio=round(ratio, 3))
                    print(save("mirror", path, **line, **more), flush=True)


def measure(experts: Experts, num_tokens: int) -> Iterator[tuple[str, float, float]]:
    """(impl, microseconds, ratio to torch's) of all ways through the layer, in turns."""
    tokens = Tokens(experts.model, num_tokens)
    rows, ends, order = tokens.rows(experts.num_local)
    y = experts(rows, ends)
    by_token = torch.empty_like(y)
    by_token[order] = y
    y_TKH = rearrange(by_token, "(t k) h -> t k h", k=experts.num_topk)
    want = einsum(y_TKH, tokens.weights.to(y.dtype), "t k h, t k -> t h")
    sizes = experts.num_experts, experts.num_topk, experts.hidden, experts.columns
    problem, speed = LayerProblem(RANKS, num_tokens, *sizes), gpu().hbm_gbs
    ways: dict[str, Callable[[], torch.Tensor]] = {"torch": lambda: experts(rows, ends)}
    for impl, is_backward in (("moe_engine", False), ("moe_engine, as in a backward", True)):
        ways[impl] = layer(experts, tokens, LayerConfig.predicted(problem, speed, is_backward))
        error = relative_error(ways[impl](), want)
        assert error < ERROR, (impl, error)
    graphs = {impl: timing.capture(call, REPEATS) for impl, call in ways.items()}
    times: dict[str, list[float]] = {impl: [] for impl in graphs}
    for _ in range(ROUNDS):
        for impl, graph in graphs.items():
            time.sleep(PAUSE_S)
            times[impl].append(timing.replay_us(graph) / REPEATS)
    medians = {impl: median(one[WARM_UP:]) for impl, one in times.items()}
    return ((impl, us, us / medians["torch"]) for impl, us in medians.items())


def layer(experts: Experts, tokens: Tokens, config: LayerConfig) -> Callable[[], torch.Tensor]:
    """A layer of rank 0 and its reflection."""
    device, num_tokens = tokens.x.device, len(tokens.x)
    sizes = num_tokens, experts.hidden, experts.num_experts, experts.num_topk
    options = Options(timeout_s=TIMEOUT_S, decode_tokens=0)
    num_bytes, _, options = sizes_for_tokens(options, *sizes, tokens.x.dtype, RANKS)

    def new_slots(layout: SlotLayout, was_captured: bool, epoch: int) -> Slots:
        return Slots(lambda size, _: Mirror(size, device), layout, 0, TIMEOUT_S)

    slots = SlotLayout.fit(num_bytes, RANKS, options.num_slots)
    engine = KernelEngine(slots, new_slots, num_tokens, LayerChoices(config))
    inputs = LayerInputs(tokens.x, tokens.idx, tokens.weights, experts.up, experts.down)

    def call() -> torch.Tensor:
        out, _ = engine.moe_ffn(inputs)
        engine.context.check()
        return out

    return call


if __name__ == "__main__":
    typer.run(main)
