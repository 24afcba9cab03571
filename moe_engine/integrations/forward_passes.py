"""What ranks agree on for each forward pass of a model: the most tokens that any of them brings."""

from __future__ import annotations

import copy
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

from ..deadline import timeout_seconds
from ..errors import BackendError, CapacityError, OutOfStep
from ..streams import is_captured
from ..symm import exchange
from ..symm.device_context import COMPILE_S
from ..torch_privates import store_of
from ..utils import is_in_backward, untraced

_names = itertools.count()


class ForwardPasses:
    """What the ranks agree on for each pass of a model: the most tokens that any of them brings.

    A pass begins with a call of the model, or with a layer that does not follow the one called
    last. There each host asks the others, once for each pass, and the first layer waits for the
    answer. Layers may bring fewer tokens than their model was called with; if they bring more than
    any rank announced, all ranks get TooManyTokens. `fixed` replaces the agreement; `limit` is what
    the Buffer was made for; `counts` takes what layers return, where it is a list; `num_joins` is
    how many blocks of `join` this rank is in. A copy asks the same hosts.

    In a backward, where checkpoints compute layers again in falling order, nobody asks: the largest
    answer so far, which all ranks have, bounds the tokens of every earlier pass.
    """

    def __init__(self, group: dist.ProcessGroup | None, limit: int):
        self.fixed: int | None = None
        self.counts: list[Tensor] | None = None
        self.num_joins = 0
        self.group = group
        self.hook: Any = None
        self._limit, self._timeout_s = limit, timeout_seconds() + COMPILE_S
        self._hosts: Any = None
        if group is not None and group.size() > 1:
            self._hosts = _connect_hosts(group, self._timeout_s)
        self._asked: tuple[Tensor, Any] | None = None
        self._last_layer = math.inf
        self._agreed = self._most = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardPasses:
        memo[id(self)] = copied = copy.copy(self)
        copied.hook = copy.deepcopy(self.hook, memo)  # removes the copied model's
        return copied

    def begin_with(self, model: nn.Module) -> None:
        """Begin a pass at each call of `model`, until `hook.remove()`."""
        self.hook = model.register_forward_pre_hook(self._begin_call, with_kwargs=True)

    @untraced
    def _begin_call(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_in_backward():
            return
        self.begin()
        ids = args[0] if args else kwargs.get("input_ids")
        tokens = kwargs.get("inputs_embeds") if ids is None else ids
        if isinstance(tokens, Tensor) and not is_captured(tokens):
            self._ask(tokens.shape[:2].numel())  # of [B, length], or of [B, length, H]

    def begin(self) -> None:
        """Begin a pass, also if an error ended the one before between its question and its first
        layer."""
        self._asked, self._last_layer = None, math.inf

    def agree(self, num_tokens: int) -> int:
        """Begin a pass to which this rank brings `num_tokens`: the most that any rank brings. The
        pass is then made within `fixing` it, since its layers are not to ask again.

        It is 0, on all ranks, where nobody makes one more pass.
        """
        if self.fixed is not None:
            return self.fixed
        if self._hosts is None:
            return num_tokens
        self.begin()
        self._ask(num_tokens)
        return self._answer()

    @contextmanager
    def fixing(self, max_tokens: int) -> Iterator[None]:
        """Within the block no rank brings more than `max_tokens` to any pass, so none asks."""
        before, self.fixed = self.fixed, max_tokens
        try:
            yield
        finally:
            self.fixed = before

    @contextmanager
    def counting(self) -> Iterator[list[Tensor]]:
        """Within the block layers return their counts, into this list."""
        before, self.counts = self.counts, []
        try:
            yield self.counts
        finally:
            self.counts = before

    def max_tokens(self, layer: int, x: Tensor) -> int:
        """The hint of `moe_ffn` for layer number `layer` and x [T, H]."""
        if is_in_backward():
            return self._most
        if self.fixed is None:
            if self._asked is not None or layer <= self._last_layer:
                self._agreed = self._agree(x)
            self._last_layer = layer
        agreed = self._agreed if self.fixed is None else self.fixed
        self._most = max(self._most, agreed)
        return agreed

    def _agree(self, x: Tensor) -> int:
        """The most tokens of a pass that begins, or has begun, on all ranks."""
        if self._hosts is None:
            return len(x)
        if self._asked is None:
            if is_captured(x):
                raise BackendError(
                    "ranks cannot agree on the tokens of a pass while a CUDA graph is captured: "
                    "capture it in `with fix_max_tokens(model, max_tokens)`."
                )
            self._ask(len(x))
        return self._answer()

    def _ask(self, num_tokens: int) -> None:
        """Send this rank's number of tokens to the other hosts, and do not wait for theirs."""
        if self._hosts is not None and self.fixed is None:
            most = torch.tensor(num_tokens, device="cpu")  # whatever the default device is
            with self._out_of_step():
                self._asked = most, self._hosts.allreduce([most], dist.ReduceOp.MAX)

    def _answer(self) -> int:
        """Wait for the largest of the numbers."""
        assert self._asked is not None
        (largest, exchange), self._asked = self._asked, None
        with self._out_of_step():
            exchange.wait()
        most = int(largest)
        if most > self._limit:
            raise CapacityError(
                f"a rank has {most} tokens for this pass, and the Buffer was made for "
                f"{self._limit}: give shard_experts, or register, max_tokens of the largest batch "
                "x length."
            )
        return most

    @contextmanager
    def _out_of_step(self) -> Iterator[None]:
        """Raise OutOfStep for what gloo raises."""
        try:
            yield
        except RuntimeError as error:
            raise OutOfStep(
                f"rank {self._hosts.rank()} waited up to {self._timeout_s:g} s for the other ranks "
                "to begin a pass of the model. Every rank must make equally many, with "
                "join_empty(model) where it has no tokens, or all within `with join(model):`. "
                f"{error}"
            ) from error


def _connect_hosts(group: dist.ProcessGroup, timeout_s: float) -> Any:
    """Connect the hosts of `group`, which may know GPUs alone, with a deadline of their own."""
    # Not dist.new_group: it numbers the groups of a process, and ranks may have made others.
    name = exchange(
        group, lambda: f"moe_engine/hosts/{os.getpid()}/{next(_names)}", "connecting hosts"
    )[0]
    store = dist.PrefixStore(name, store_of(group))
    timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupGloo(store, group.rank(), group.size(), timeout)
