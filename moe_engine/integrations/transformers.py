"""Run the experts of a transformers model (5.17 and later) on the ranks of a group.

    register()
    shard_experts(model, group)
    logits = model(input_ids).logits

Each rank keeps E / R experts of every layer and calls the model with a batch of its own. Every
rank must call it equally often: one without tokens calls `join_empty(model)` instead, and ranks
that `generate` do so for the same number of steps (`min_new_tokens` equal to `max_new_tokens`).
Once per pass the hosts agree on the most tokens that any rank has, so that decode takes the
low-latency way; where they cannot, in a CUDA graph, `fix_max_tokens` says it.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..buffer import Buffer
from ..checks import check_at_least
from ..deadline import timeout_seconds
from ..device_context import COMPILE_S
from ..errors import BackendError, CapacityError, DtypeError, OutOfStep, ShapeError
from ..layer import moe_ffn
from ..symm import default_group, exchange

NAME = "moe_engine"
_names = itertools.count()
Routing = tuple[Tensor, Tensor]
"""topk_idx [T, K] and topk_weights [T, K], as a router hands them to its experts."""


def register() -> None:
    """Add "moe_engine" to the experts implementations that transformers offers."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


@torch.compiler.disable  # a graph break: what is compiled goes on behind it
def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The experts of all ranks, for this rank's tokens: [T, H], [T, K], [T, K] -> [T, H]."""
    if not hasattr(self, "moe_buffer"):
        raise BackendError(
            f"{type(self).__name__} has no Buffer: call shard_experts(model, group) on every rank "
            'before a model runs with experts_implementation="moe_engine".'
        )
    return moe_ffn(
        hidden_states,
        top_k_index,
        top_k_weights.float(),
        self.gate_up_proj,
        self.down_proj,
        self.moe_buffer,
        self.moe_passes.max_tokens(self.moe_layer, hidden_states),
    )


def shard_experts(
    model: Any,
    group: dist.ProcessGroup | None = None,
    *,
    max_tokens: int = 4096,
    backend: str = "auto",
) -> Buffer:
    """Keep this rank's experts of every layer, in place, and run them through one new Buffer.

    Collective over `group` (None: all ranks), with the same model on each. `max_tokens`, equal on
    all ranks, bounds the tokens (batch x length) of one rank in one pass and sizes the Buffer; more
    raise CapacityError, on all ranks. A model on the meta device may be sharded, too.
    gate_up_proj [E, 2I, H] -> [E / R, 2I, H] and down_proj [E, H, I] -> [E / R, H, I].
    Raises BackendError for experts of another layout, ShapeError if R does not divide E or the
    experts are sharded already, DtypeError for weights other than bf16 and fp32.
    """
    group = group or default_group()
    rank, num_ranks = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
    layers = experts_layers(model)
    for experts in layers:
        _check(experts, num_ranks)
    if len(shapes := {_shape(experts) for experts in layers}) > 1:
        raise ShapeError(
            f"rank {rank}: the experts layers share one Buffer but differ in "
            f"(num_experts, hidden, top-k, dtype): {sorted(shapes, key=str)}."
        )
    num_experts, hidden, topk, dtype = shapes.pop()

    buffer = Buffer.for_tokens(group, max_tokens, hidden, num_experts, topk, dtype, backend=backend)
    num_local = num_experts // num_ranks
    mine = slice(rank * num_local, (rank + 1) * num_local)
    passes = Passes(group, max_tokens)
    for number, experts in enumerate(layers):
        for name in ("gate_up_proj", "down_proj"):
            whole = getattr(experts, name)
            # A clone, so that the storage of all experts is freed.
            local = nn.Parameter(whole.detach()[mine].clone(), requires_grad=whole.requires_grad)
            setattr(experts, name, local)
        experts.moe_buffer, experts.moe_passes, experts.moe_layer = buffer, passes, number
    register()
    model.set_experts_implementation(NAME)
    return buffer


@torch.no_grad()
def join_empty(model: Any, calls: int = 1) -> None:
    """Take part, without tokens, in `calls` forward passes that the other ranks make.

    transformers itself cannot run an empty batch. A `generate` of n tokens is n passes.
    """
    layers = experts_layers(model)
    for experts in layers * calls:
        weight = experts.gate_up_proj
        _, hidden, topk, dtype = _shape(experts)
        experts(
            torch.empty(0, hidden, dtype=dtype, device=weight.device),
            torch.empty(0, topk, dtype=torch.int64, device=weight.device),
            torch.empty(0, topk, dtype=torch.float32, device=weight.device),
        )


@contextmanager
def fix_max_tokens(model: Any, max_tokens: int) -> Iterator[None]:
    """No rank brings more than `max_tokens` to any pass within the block, so none asks the others.

    All ranks must do so alike. A CUDA graph is captured within it, replayed anywhere:

        with fix_max_tokens(model, 64), torch.cuda.graph(graph):
            logits = model(ids, past_key_values=cache).logits
    """
    check_at_least(1, max_tokens=max_tokens)
    experts = experts_layers(model)[0]
    if not hasattr(experts, "moe_passes"):
        raise BackendError("the model has no Buffer: call shard_experts(model, group) first.")
    before = experts.moe_passes.fixed
    experts.moe_passes.fixed = max_tokens
    try:
        yield
    finally:
        experts.moe_passes.fixed = before


class Passes:
    """What the ranks agree on for each pass of a model: the most tokens that any of them brings.

    A layer that does not come behind the one called last begins a pass. `fixed` takes the place of
    an agreement; `limit` is what the Buffer was made for.
    """

    def __init__(self, group: dist.ProcessGroup | None, limit: int):
        self.fixed: int | None = None
        self._limit, self._timeout_s = limit, timeout_seconds() + COMPILE_S
        self._hosts = None
        if group is not None and group.size() > 1:
            self._hosts = _connect_hosts(group, self._timeout_s)
        self._last_layer = math.inf
        self._agreed = 0

    def max_tokens(self, layer: int, x: Tensor) -> int:
        """The hint of `moe_ffn` for layer number `layer` and x [T, H]; one exchange per pass."""
        if self.fixed is not None:
            return self.fixed
        if layer <= self._last_layer:
            self._agreed = self._agree(x)
        self._last_layer = layer
        return self._agreed

    def _agree(self, x: Tensor) -> int:
        if self._hosts is None:
            return len(x)
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise BackendError(
                "ranks cannot agree on the tokens of a pass while a CUDA graph is captured: "
                "capture it in `with fix_max_tokens(model, max_tokens)`."
            )
        most = torch.tensor(len(x), device="cpu")  # whatever the default device is
        try:
            self._hosts.allreduce([most], dist.ReduceOp.MAX).wait()
        except RuntimeError as error:
            raise OutOfStep(
                f"rank {self._hosts.rank()} waited up to {self._timeout_s:g} s for the other ranks "
                "to begin a pass of the model. Every rank must make equally many, with "
                f"join_empty(model) where it has no tokens. {error}"
            ) from error
        if most > self._limit:
            raise CapacityError(
                f"a rank has {most} tokens for this pass, and the Buffer was made for "
                f"{self._limit}: give shard_experts max_tokens of the largest batch x length."
            )
        return int(most)


def _connect_hosts(group: dist.ProcessGroup, timeout_s: float) -> Any:
    """Connect the hosts of `group`, which may know GPUs alone, with a deadline of their own."""
    # Not dist.new_group: it numbers the groups of a process, and ranks may have made others.
    name = exchange(
        group, lambda: f"moe_engine/hosts/{os.getpid()}/{next(_names)}", "connecting hosts"
    )[0]
    store = dist.PrefixStore(name, dist.distributed_c10d._get_process_group_store(group))
    timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout)


@contextmanager
def record_routing(model: Any) -> Iterator[list[Routing]]:
    """Collect what the routers choose, layer by layer in the order of their calls."""
    calls: list[Routing] = []

    def note(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        calls.append((args[1].detach().clone(), args[2].detach().clone()))

    with _before_experts(model, note):
        yield calls


@contextmanager
def replay_routing(model: Any, routing: list[Routing]) -> Iterator[None]:
    """Let the recorded choices of one pass take the place of the routers' own, pass after pass."""
    calls = itertools.cycle(routing)

    def replace(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0], *next(calls))

    with _before_experts(model, replace):
        yield


def experts_layers(model: Any) -> list[Any]:
    """The experts modules of a model, in layer order; BackendError if there are none."""
    # The decorator `use_experts_implementation` of transformers sets these on each of them.
    layers = [m for m in model.modules() if hasattr(m, "has_gate") and hasattr(m, "is_transposed")]
    if not layers:
        raise BackendError(
            f"{type(model).__name__} has no experts that transformers can run by another "
            "implementation; a mixture-of-experts model of transformers 5.17 or later is needed."
        )
    return layers


@contextmanager
def _before_experts(model: Any, hook: Any) -> Iterator[None]:
    handles = [experts.register_forward_pre_hook(hook) for experts in experts_layers(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _shape(experts: Any) -> tuple[int, int, int, torch.dtype]:
    """(num_experts, hidden, top-k, dtype) of one layer, sharded or not."""
    weight = experts.gate_up_proj
    return experts.num_experts, weight.shape[2], experts.config.num_experts_per_tok, weight.dtype


def _check(experts: Any, num_ranks: int) -> None:
    """Raise unless the experts are what `moe_ffn` computes, whole, and divisible by the ranks."""
    from transformers.integrations.moe import _default_apply_gate

    name = type(experts).__name__
    activation = type(getattr(experts, "act_fn", None)).__name__
    found = {
        "no gate": not experts.has_gate,
        "biases": experts.has_bias,
        "transposed weights": experts.is_transposed,
        "interleaved gate and up rows": not experts.is_concatenated,
        f"the activation {activation}": not activation.lower().startswith("silu"),
        "a gate function of its own": type(experts)._apply_gate is not _default_apply_gate,
    }
    if unfit := [what for what, present in found.items() if present]:
        raise BackendError(
            f"{name} has {', '.join(unfit)}. moe_engine runs experts with gate_up_proj [E, 2I, H] "
            "(gate rows, then up rows), down_proj [E, H, I], SiLU and no biases."
        )
    for weight in (experts.gate_up_proj, experts.down_proj):
        if weight.dtype not in (torch.bfloat16, torch.float32):
            raise DtypeError(
                f"{name} has {weight.dtype} weights; bfloat16 and float32 are allowed."
            )
    if (found_experts := experts.gate_up_proj.shape[0]) != experts.num_experts:
        raise ShapeError(
            f"{name} holds {found_experts} of its {experts.num_experts} experts: it is sharded "
            "already. Give shard_experts a whole model."
        )
    if experts.num_experts % num_ranks:
        raise ShapeError(
            f"{name} has {experts.num_experts} experts, which {num_ranks} ranks cannot share "
            "equally. Choose a number of ranks that divides it."
        )
