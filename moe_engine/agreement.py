"""What ranks want of a Buffer. Each checks its own wishes inside the meeting at which all learn
them: all raise what is wrong on any of them, and none waits for one that has left."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from .checks import check_flag, check_int, check_runnable, check_shrink, shown
from .errors import BackendError, DtypeError, MoeEngineError, ShapeError
from .layer_config import LayerConfig, kept_layers
from .options import Options, check_options
from .symm import BACKENDS, default_group, exchange
from .symm.slots import SlotLayout
from .utils import LINE_BYTES

MAX_BYTES = 2**48
"""More than any rank has."""


@dataclass(frozen=True, slots=True)
class Group:
    """Who makes a Buffer: `ranks` is where they meet, None for one rank; `problem`: what is wrong
    with the group that this rank was given, for the meeting."""

    ranks: dist.ProcessGroup | None
    rank: int
    size: int
    problem: MoeEngineError | None = None

    @classmethod
    def of(cls, group: Any) -> Group:
        """From the argument of a Buffer. Who gives what is no group meets the default group: the
        others, most likely, gave that. BackendError where there is nobody to meet."""
        ranks, problem = default_group() if group is None else group, None
        is_there = dist.is_available()
        if ranks is not None and not (is_there and isinstance(ranks, dist.ProcessGroup)):
            outside = dist.GroupMember.NON_GROUP_MEMBER if is_there else None
            if type(group) is type(outside) and group == outside:
                raise BackendError(
                    "this rank is not in the group, so it can have no Buffer there; make the "
                    "Buffer on the group's ranks alone."
                )
            problem = DtypeError(
                f"group is {shown(group)}; it must be a torch.distributed process group, or None "
                "for the default one."
            )
            ranks = default_group()
        if ranks is None:
            return cls(None, 0, 1, problem)
        try:
            return cls(ranks, dist.get_rank(ranks), dist.get_world_size(ranks), problem)
        except (RuntimeError, ValueError) as error:
            raise BackendError(
                f"group cannot be used: {error}. It was destroyed, or is of other processes; make "
                "a new one."
            ) from error


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a rank wants. ring_bytes: of low-latency memory, 0 for none; measured: what `moe-engine
    tune` has kept, and a number for the Buffer, both of rank 0 alone."""

    backend: str
    num_bytes: int
    ring_bytes: int
    enable_shrink: bool
    options: Options
    measured: Mapping[str, LayerConfig]
    number: int

    @property
    def timeout_s(self) -> float:
        """The deadline of every wait."""
        assert self.options.timeout_s is not None
        return self.options.timeout_s

    def shared(self) -> dict[str, object]:
        """What must be equal on all ranks."""
        if self.backend == "collective":
            return {"backend": "collective"}
        options = self.options
        return {
            "backend": "one with kernels",
            "bytes": (self.num_bytes, self.ring_bytes),
            "num_slots": options.num_slots,
            "max_tokens": options.max_tokens,
            "decode_tokens": options.decode_tokens,
            "layer": options.layer and options.layer.shared(),
            "enable_shrink": self.enable_shrink,
        }


def wishes(
    group: Group,
    device: torch.device,
    comm: Any,
    backend: str,
    num_nvl_bytes: int,
    num_rdma_bytes: int,
    low_latency_mode: bool,
    enable_shrink: bool,
    options: Options | MoeEngineError,
) -> Wishes:
    """From the arguments of a Buffer, checked as far as one rank can. `options` may be what was
    wrong with them, which is raised here."""
    if group.problem is not None:
        raise group.problem
    if isinstance(options, MoeEngineError):
        raise options
    if comm is not None:
        raise BackendError("comm= (mpi4py) is not taken; pass group=, any torch process group.")
    if not isinstance(backend, str) or backend not in ("auto", "collective", *BACKENDS):
        raise BackendError(
            f"backend is {shown(backend)}; it must be one of {('auto', *BACKENDS, 'collective')}."
        )
    options = check_options(options)
    num_bytes = check_int("num_nvl_bytes", num_nvl_bytes, 0, MAX_BYTES)
    ring_bytes = check_int("num_rdma_bytes", num_rdma_bytes, 0, MAX_BYTES)
    check_flag("low_latency_mode", low_latency_mode)
    check_flag("enable_shrink", enable_shrink)
    if backend != "collective":
        check_runnable(device)
        check_shrink(enable_shrink, group.size)
    if low_latency_mode:
        smallest = SlotLayout(group.size, LINE_BYTES, options.num_slots).num_bytes
        num_bytes = max(num_bytes, smallest)
    else:
        num_bytes, ring_bytes = max(num_bytes, ring_bytes), 0
    measured = {} if group.rank or backend == "collective" else kept_layers()
    number = 0 if group.rank else secrets.randbits(31)
    return Wishes(backend, num_bytes, ring_bytes, bool(enable_shrink), options, measured, number)


def agree(group: Group, make: Callable[[], Wishes]) -> Wishes:
    """This rank's wishes, with what rank 0 has measured and drawn. Collective: all ranks raise what
    `make()` raised on any, and ShapeError where they want different things."""
    everyone = exchange(group.ranks, make, "making a Buffer", begins=True)
    shared = [wishes.shared() for wishes in everyone]
    for name in shared[0]:
        values = [wishes.get(name) for wishes in shared]
        if any(value != values[0] for value in values):
            found = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
            raise ShapeError(f"{name} differs between ranks: {found}. Give all the same.")
    first = everyone[0]
    return replace(everyone[group.rank], measured=first.measured, number=first.number)
