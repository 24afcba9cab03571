"""How ranks agree on a new Buffer. Each rank checks its own settings within the meeting at which
all exchange them: all raise what is wrong on any rank, and none waits for one that has left."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from .checks import check_flag, check_int, check_runnable, check_shrink, shown
from .errors import BackendError, DtypeError, MoeEngineError, ShapeError
from .hardware import gpu
from .layer_config import LayerConfig, kept_layers
from .options import Options, check_options
from .symm import BACKENDS, default_group, exchange
from .symm.slots import SlotLayout
from .utils import LINE_BYTES

MAX_BYTES = 2**48
"""More than any rank has."""


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of a Buffer. They meet in `process_group`, None for one rank. `problem` is what is
    wrong with the group that this rank was given; it is raised at the meeting."""

    process_group: dist.ProcessGroup | None
    rank: int
    size: int
    problem: MoeEngineError | None = None

    @classmethod
    def of(cls, group: Any) -> Group:
        """From the argument of a Buffer. A rank that gives something else than a group meets the
        default group, which the other ranks have most likely given. BackendError where there is no
        rank to meet."""
        found, problem = default_group() if group is None else group, None
        has_groups = dist.is_available()
        if found is not None and not (has_groups and isinstance(found, dist.ProcessGroup)):
            outside = dist.GroupMember.NON_GROUP_MEMBER if has_groups else None
            if type(group) is type(outside) and group == outside:
                raise BackendError(
                    "this rank is not in the group, so it can have no Buffer there; make the "
                    "Buffer on the group's ranks alone."
                )
            problem = DtypeError(
                f"group is {shown(group)}; it must be a torch.distributed process group, or None "
                "for the default one."
            )
            found = default_group()
        if found is None:
            return cls(None, 0, 1, problem)
        try:
            return cls(found, dist.get_rank(found), dist.get_world_size(found), problem)
        except (RuntimeError, ValueError) as error:
            raise BackendError(
                f"group cannot be used: {error}. It was destroyed, or is of other processes; make "
                "a new one."
            ) from error


BYTES = "memory (num_nvl_bytes and num_rdma_bytes, or of hidden, num_topk and dtype)"
"""What errors call the bytes of a Buffer: as arguments, or as what `for_tokens` makes them of."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a rank asks of a Buffer.

    num_bytes: of the normal calls' memory; ring_bytes: of the low-latency calls', 0 for none;
    measured: the layers that `moe-engine tune` has measured; number: identifies the Buffer;
    hbm_gbs: of the GPU. All ranks take these three of rank 0.
    """

    backend: str
    num_bytes: int
    ring_bytes: int
    enable_shrink: bool
    options: Options
    measured: Mapping[str, LayerConfig]
    number: int
    hbm_gbs: float

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
            "num_slots": options.num_slots,
            "max_tokens": options.max_tokens,
            "max_experts": options.max_experts,
            "decode_tokens": options.decode_tokens,
            "capacity_factor": options.capacity_factor,
            "layer": options.layer and options.layer.shared(),
            "enable_shrink": self.enable_shrink,
            # After those of which they are made.
            BYTES: (self.num_bytes, self.ring_bytes),
        }


def check_settings(
    group: Group,
    device: torch.device,
    comm: Any,
    backend: str,
    num_nvl_bytes: int,
    num_rdma_bytes: int,
    low_latency_mode: bool,
    enable_shrink: bool,
    options: Options | MoeEngineError,
) -> Settings:
    """The settings by the arguments of a Buffer, checked as far as one rank can. `options` may be
    an error that making them has raised; it is raised here."""
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
    drawn = measured, number, gpu(device).hbm_gbs
    return Settings(backend, num_bytes, ring_bytes, bool(enable_shrink), options, *drawn)


def agree(group: Group, make: Callable[[], Settings]) -> Settings:
    """This rank's settings, `make()`, with what rank 0 has measured and drawn. Collective: all
    ranks raise what `make()` raised on any, and ShapeError where settings differ that must not."""
    everyone = exchange(group.process_group, make, "making a Buffer", begins=True)
    shared = [settings.shared() for settings in everyone]
    for name in shared[0]:
        values = [settings.get(name) for settings in shared]
        if any(value != values[0] for value in values):
            found = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
            raise ShapeError(f"{name} differs between ranks: {found}. Give all the same.")
    first = everyone[0]
    # fmt: off
    return replace(
        everyone[group.rank],
        measured=first.measured, number=first.number, hbm_gbs=first.hbm_gbs,
    )
    # fmt: on
