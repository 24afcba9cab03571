"""What routers choose, recorded and replayed: so that two runs of a model give tokens to the same
experts, and differ by rounding alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..utils import is_in_backward
from .transformers_experts import experts_layers

Routing = tuple[Tensor, Tensor]
"""topk_idx [T, K] and topk_weights [T, K], as a router hands them to its experts."""


@contextmanager
def record_routing(model: Any) -> Iterator[list[Routing]]:
    """Collect what the routers choose, in the order in which layers are called. What checkpoints
    compute again in a backward is not collected again."""
    calls: list[Routing] = []

    def note(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        if not is_in_backward():
            calls.append((args[1].detach().clone(), args[2].detach().clone()))

    with _before_experts(model, note):
        yield calls


@contextmanager
def replay_routing(model: Any, routing: list[Routing]) -> Iterator[None]:
    """Replace the choices of the routers by the recorded ones of one pass, pass after pass. Make
    the backward of a pass whose layers are checkpointed within the block as well."""
    calls, last = itertools.cycle(routing), dict[nn.Module, Routing]()

    def replace(experts: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not is_in_backward():
            last[experts] = next(calls)
        # A checkpoint computes layers again in falling order, each with the choices of its forward.
        return (args[0], *last.get(experts, args[1:]))

    with _before_experts(model, replace):
        yield


@contextmanager
def _before_experts(model: Any, hook: Any) -> Iterator[None]:
    handles = [experts.register_forward_pre_hook(hook) for experts in experts_layers(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
