"""What sequences of mixed calls are made of: one rank's Buffers, tokens and comparisons, and what
is drawn for a call, the same on all ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import cases
import fuzz_values
import torch
from rounds import FEW, MOST, Round, draw

from moe_engine import Buffer, ElasticBuffer, Options

NUM_LOCAL, TOPK = 2, 2
SAME = [odd for odd in fuzz_values.TENSORS if odd.outcome == fuzz_values.EQUAL]
"""Other ways in which a tensor of the same values may lie."""


class Wrong(AssertionError):
    """A result is not right."""


class Drawn(NamedTuple):
    """The tokens of all ranks."""

    x: list[torch.Tensor]
    idx: list[torch.Tensor]
    weights: list[torch.Tensor]


@dataclass
class Later:
    """What an earlier call has left to do on `buffer`; often: it may be done many times; began: for
    a hook, how many low-latency calls had begun with its own."""

    name: str
    run: Callable[[], None]
    buffer: str
    often: bool = False
    began: int = 0


@dataclass
class Rank:
    """One rank's part of a sequence, which follows from its seed: the Buffers, what is left to do,
    and what was called."""

    group: Any
    seed: int
    later: list[Later] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    num_low_latency: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.rank, self.num_ranks = self.group.rank(), self.group.size()
        self.num_experts = NUM_LOCAL * self.num_ranks
        self.hidden = self.rng.choice((16, 16, 128))
        self.backend = self.rng.choice(("auto", "auto", "auto", "collective"))
        self.options: dict[str, Any] = dict(
            num_slots=self.rng.choice((2, 4)),
            decode_tokens=self.rng.choice((0, FEW, FEW)),
            debug=self.rng.random() < 0.2,
            capacity_factor=self.rng.choice((None, None, 1.0)),
        )
        self.log.append(f"{self.backend}, hidden {self.hidden}, {self.options}")
        self.buffers: dict[str, Any] = {"normal": self._new_buffer()}

    def _new_buffer(self) -> Buffer:
        sizes = MOST, self.hidden, self.num_experts, TOPK, torch.float32
        options = Options(timeout_s=60.0, max_experts=self.num_experts, **self.options)
        return Buffer.for_tokens(self.group, *sizes, self.backend, options)

    @property
    def buffer(self) -> Buffer:
        return self.buffers["normal"]

    @property
    def has_low_latency(self) -> bool:
        return self.backend != "collective" and self.options["decode_tokens"] > 0

    @property
    def elastic(self) -> ElasticBuffer:
        if "elastic" not in self.buffers:
            sizes = dict(num_max_tokens_per_rank=FEW, hidden=self.hidden, num_topk=TOPK)
            self.buffers["elastic"] = ElasticBuffer(self.group, num_gpu_timeout_secs=60, **sizes)
        return self.buffers["elastic"]

    # --- Values ------------------------------------------------------------------------------

    def choose(self, name: str, *values: Any) -> Any:
        """One of the values, the same on all ranks, noted."""
        value = self.rng.choice(values)
        if not isinstance(value, torch.Tensor):
            self.log[-1] += f" {name}={value}"
        return value

    def chance(self, name: str, probability: float = 0.3) -> bool:
        is_so = self.rng.random() < probability
        if is_so:
            self.log[-1] += f" {name}"
        return is_so

    def tokens(self, dtype: torch.dtype = torch.float32, least: int = 0) -> Drawn:
        """From `least` to 3 tokens of each rank."""
        kind = self.choose("routing", *cases.ROUTINGS)
        counts = tuple(self.rng.randint(least, 3) for _ in range(self.num_ranks))
        self.log[-1] += f" tokens={counts}"
        verb = "low_latency" if dtype == torch.bfloat16 else "normal"
        seed = self.rng.randrange(10**6)
        return Drawn(*draw(Round(verb, seed, self.hidden, TOPK, False, counts, kind), *self.sizes))

    @property
    def sizes(self) -> tuple[int, int]:
        return self.num_ranks, NUM_LOCAL

    def mine(self, drawn: Drawn) -> tuple[torch.Tensor, ...]:
        """Own copies of this rank's tokens, each lying anyhow."""
        return tuple(self.lying(part[self.rank].clone()) for part in drawn)

    def lying(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values, lying in another way now and then."""
        odd = self.rng.choice(SAME)
        if self.rng.random() < 0.2:
            self.log[-1] += f" {odd.name}"
            tensor = odd.make(tensor)
        return tensor

    def spoil(self, *tensors: torch.Tensor) -> None:
        """What a caller may do with its tensors after a call: write to them, or free them."""
        how = self.rng.choice(("keep", "write", "free"))
        self.log[-1] += f" then {how}"
        for tensor in tensors:
            if how == "write":
                tensor.fill_(-7)
            elif how == "free":
                tensor.untyped_storage().resize_(0)

    def check(self, *pairs: tuple[Any, Any], tolerance: float = 0.0) -> None:
        """Raise Wrong unless what came is right."""
        for number, (have, want) in enumerate(pairs):
            if isinstance(want, torch.Tensor):
                have = have.detach().cpu()
                if tuple(have.shape) != tuple(want.shape):
                    raise Wrong(f"part {number}: {tuple(have.shape)}, not {tuple(want.shape)}")
                if tolerance == 0.0:
                    is_right = torch.equal(have, want.to(have.dtype))
                else:
                    scale = float(want.double().norm().clamp_min(1.0))
                    is_right = float((have.double() - want.double()).norm()) <= tolerance * scale
                if not is_right:
                    raise Wrong(f"part {number}: {have.tolist()}, not {want.tolist()}")
            elif have != want:
                raise Wrong(f"part {number}: {have}, not {want}")

    def leave(self, name: str, run: Callable[[], None], buffer: str, often: bool = False) -> None:
        self.later.append(Later(name, run, buffer, often, self.num_low_latency))

    def factors(self, idx: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """[T, 1]: the sum, over the ranks that a token is sent to, of the rank + 2; or with weights
        [T, K] over its experts, of their weight times that of their rank."""
        owners = torch.where(idx >= 0, idx // NUM_LOCAL, -1)
        if weights is not None:
            return torch.where(owners >= 0, weights * (owners + 2), 0.0).sum(1, keepdim=True)
        ranks = range(self.num_ranks)
        parts = [(owners == rank).any(1, keepdim=True) * (rank + 2.0) for rank in ranks]
        return torch.stack(parts).sum(0)
