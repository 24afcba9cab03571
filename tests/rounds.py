"""Rounds: whole uses of a Buffer, small and exact, each rank of which knows what is right.

Tests that break calls off, mix them or draw them at random run rounds and ask of each: was it
right, or a typed error? Values are small integers, so that sums are exact in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import cases
import torch

from moe_engine import Buffer, MoeEngineError, Options, moe_ffn, reference
from moe_engine.call_memory import CallMemory
from moe_engine.cuda_driver import PackedLaunch
from moe_engine.launch import InterpretedLaunch
from moe_engine.launch_graph import LaunchGraph
from moe_engine.streams import ConcurrentReads

MOST, FEW = 24, 8
"""Tokens that a rank may bring to a round, and to one of low-latency calls."""
VERBS = ("normal", "cached", "layer", "low_latency", "decode", "layer_backward")


@dataclass(frozen=True)
class Round:
    """One use: one of VERBS; the seed of its values; what may differ from call to call."""

    verb: str
    seed: int = 0
    hidden: int = 16
    num_topk: int = 3
    with_weights: bool = False
    num_tokens: tuple[int, ...] = (3, 2, 4)
    kind: str = "uniform"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.verb == "low_latency" else torch.float32


def new_buffer(group, hidden=16, num_local=4, num_topk=3, **options):
    """A Buffer on which every round runs; `options` as in `Options`."""
    sizes = MOST, hidden, num_local * group.size(), num_topk
    options = Options(**{"decode_tokens": FEW, "timeout_s": 60.0, **options})
    return Buffer.for_tokens(group, *sizes, torch.float32, options=options)


def draw(one: Round, num_ranks: int, num_local: int):
    """Per-rank lists (x, topk_idx, topk_weights) of a round; all ranks draw the same."""
    x, idx, weights = [], [], []
    for rank in range(num_ranks):
        count = one.num_tokens[rank % len(one.num_tokens)]
        generator = torch.Generator().manual_seed(one.seed * 100 + rank)
        values = torch.randint(-4, 5, (count, one.hidden), generator=generator)
        x.append(values.to(one.dtype))
        experts = num_local * num_ranks
        idx.append(cases.route(one.kind, count, experts, one.num_topk, one.seed * 100 + rank))
        exponents = torch.randint(-1, 2, (count, one.num_topk), generator=generator)
        weights.append(torch.exp2(exponents.float()))
    return x, idx, weights


def expert_weights(one: Round, num_ranks: int, num_local: int):
    """Per-rank lists (w_gate_up, w_down)."""
    generator = torch.Generator().manual_seed(one.seed)
    up = [torch.randn(num_local, 16, one.hidden, generator=generator) for _ in range(num_ranks)]
    down = [torch.randn(num_local, one.hidden, 8, generator=generator) for _ in range(num_ranks)]
    return up, down


def run(one: Round, buffer, num_local: int = 4) -> bool:
    """Make the calls of a round on this rank; whether all results are right. Raises as they do."""
    num_ranks, rank = buffer.group_size, buffer.rank
    inputs = draw(one, num_ranks, num_local)
    device, num_experts = cases.device(), num_ranks * num_local
    x, idx, weights = (part[rank].to(device) for part in inputs)
    owners = torch.where(inputs[1][rank] >= 0, inputs[1][rank] // num_local, -1)
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    if one.verb in ("normal", "cached"):
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, num_experts)
        recv_x, _, recv_weights, counts, handle, _ = buffer.dispatch(
            x, None, per_rank, None, in_rank, per_expert, idx, weights
        )
        received = reference.dispatch(*inputs, num_experts)[rank]
        found.append((recv_x, received.x))
        found.append((torch.tensor(counts), torch.tensor(received.num_tokens_per_expert)))
        if one.verb == "cached":
            found.append((buffer.dispatch(3 * x, handle)[0], 3 * received.x))
        travelling = recv_weights if one.with_weights else None
        out, out_weights, _ = buffer.combine(recv_x * (rank + 2), handle, travelling)
        factors = torch.zeros(len(x))
        for owner in range(num_ranks):
            factors += (owners == owner).any(1) * (owner + 2.0)
        found.append((out, inputs[0][rank] * factors[:, None]))
        if out_weights is not None:
            found.append((out_weights, torch.where(owners >= 0, inputs[2][rank], 0.0)))
    elif one.verb == "low_latency":
        recv_x, counts, handle, _, hook = buffer.low_latency_dispatch(
            x, idx, FEW, num_experts, use_fp8=False, return_recv_hook=True
        )
        hook()
        y = torch.where(_written(recv_x, counts), recv_x, 0) * (rank + 2)
        out, _, hook = buffer.low_latency_combine(y, idx, weights, handle, return_recv_hook=True)
        hook()
        # A token that names an expert twice has one row, which has the weight of both k.
        factors = torch.where(owners >= 0, inputs[2][rank] * (owners + 2), 0.0).sum(1)
        found.append((out.float(), inputs[0][rank].float() * factors[:, None]))
    else:
        up, down = expert_weights(one, num_ranks, num_local)
        hint = FEW if one.verb == "decode" else None
        experts = up[rank].to(device), down[rank].to(device)
        if one.verb == "layer_backward":
            leaves = [part.detach().requires_grad_() for part in (x, weights, *experts)]
            out = moe_ffn(leaves[0], idx, *leaves[1:], buffer)
            have = torch.autograd.grad(out, leaves, x)
            oracle = reference.moe_ffn_gradients(*inputs, up, down, inputs[0])[rank]
            pairs = [pair for pair in zip(have, oracle, strict=True) if pair[1].any()]
            return all(cases.relative_error(own.cpu(), want) < 1e-5 for own, want in pairs)
        out = moe_ffn(x, idx, weights, *experts, buffer, hint)
        doubles = [[t.double() if t.is_floating_point() else t for t in part] for part in inputs]
        doubles += [[t.double() for t in part] for part in (up, down)]
        wanted = reference.moe_ffn(*doubles)[rank]
        return len(x) == 0 or cases.relative_error(out.cpu(), wanted) < 1e-5
    return all(torch.equal(have.cpu(), want.to(have.dtype)) for have, want in found)


def _written(recv_x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(recv_x.shape[1], device=recv_x.device)
    return (rows < counts[:, None])[..., None]


def outcome(one: Round, buffer, num_local: int = 4) -> str:
    """ "right", "wrong", or the name of the error, with its text where it is no typed one."""
    try:
        is_right = run(one, buffer, num_local)
        buffer.check()
    except MoeEngineError as error:
        return type(error).__name__
    except BaseException as error:
        return f"untyped {type(error).__name__}: {error}"
    return "right" if is_right else "wrong"


def again(one: Round, count: int) -> list[Round]:
    """The round `count` times, with other values and routing each time."""
    return [replace(one, seed=one.seed + 1 + number) for number in range(count)]


# --- Events at which a call can be broken off ---------------------------------------------------


class Injected(MemoryError):
    """What a broken allocation raises."""


class Faults:
    """Counts what a rank's host does in its calls, and does `strike` at event number `at`.

    Events: before and after each launch of a kernel or of a graph of them, each allocation
    outside of launches (the interpreter's own are none), and each time that the host waits for
    the device.
    """

    def __init__(self, at: int | None, strike: Callable[[str], None]):
        self.at, self.strike = at, strike
        self.names: list[str] = []
        self._is_within = False  # a launch or a read

    def event(self, name: str) -> None:
        self.names.append(name)
        if len(self.names) - 1 == self.at:
            self.strike(name)

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.event(f"before {name}")
            self._is_within = True
            try:
                result = function(*args, **kwargs)
            finally:
                self._is_within = False
            self.event(f"after {name}")
            return result

        return call

    @contextmanager
    def installed(self) -> Iterator[Faults]:
        """Count within the block."""
        new_empty, empty_like, read = torch.Tensor.new_empty, torch.empty_like, ConcurrentReads.read
        kinds = InterpretedLaunch, PackedLaunch, LaunchGraph
        launches = {kind: kind.__call__ for kind in kinds}
        allocate_all = CallMemory.allocate

        def launch(kind: Any) -> Callable[..., Any]:
            return lambda one, *args: self.around(one.name, launches[kind])(one, *args)

        def allocate(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if not self._is_within and kwargs.get("device") != "meta":
                    self.event("allocation")
                return function(*args, **kwargs)

            return call

        def each(memory: CallMemory, numbers: dict[str, int]) -> list[torch.Tensor]:
            for _ in range(memory.num_allocations):
                self.event("allocation")
            return allocate_all(memory, numbers)

        for kind in launches:
            kind.__call__ = launch(kind)
        CallMemory.allocate = each
        torch.Tensor.new_empty = allocate(new_empty)
        torch.empty_like = allocate(empty_like)
        ConcurrentReads.read = self.around("read", read)
        try:
            yield self
        finally:
            for kind, real in launches.items():
                kind.__call__ = real
            CallMemory.allocate = allocate_all
            torch.Tensor.new_empty = new_empty
            torch.empty_like = empty_like
            ConcurrentReads.read = read
