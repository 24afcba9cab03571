"""One rank of several, whose kernels never run: what its calls launch can be compiled, on a machine
without a GPU too."""

from __future__ import annotations

import mmap
from functools import partial

import torch

from ..engines.internode import InternodeEngine
from ..engines.internode_low_latency import InternodeLowLatency
from ..engines.kernel import KernelEngine
from ..engines.low_latency import LowLatency
from ..hardware import gpu
from ..layer_config import LayerChoices, kept_layers
from ..symm.lanes import LaneLayout, new_lanes
from ..symm.ring import Ring, RingLayout
from ..symm.single import SingleTensor
from ..symm.slots import SlotLayout, Slots

MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Linux's flag. Python has the name since 3.12."""
RANK = 1
"""A rank that has another one before it, where there are two."""


class LoneBlock(SingleTensor):
    """The block of one of `num_ranks` ranks, in place of all of the first node; those of others are
    not mapped. Of its memory only what is written takes any, the head and some flags: so it may be
    larger than this machine's."""

    def __init__(self, num_bytes: int, num_ranks: int, num_nodes: int = 1):
        memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        self.local = torch.frombuffer(memory, dtype=torch.uint8)
        self.peer_addresses = torch.full((num_ranks,), self.local.data_ptr())
        self.peer_addresses[num_ranks // num_nodes :] = 0


def kernel_engine(
    num_ranks: int,
    max_tokens: int | None,
    region_bytes: int,
    capacity: float | None = None,
    num_nodes: int = 1,
    rank: int | None = None,
) -> KernelEngine | InternodeEngine:
    """The engine of a rank, None: of the one that stands for all; its regions have so many bytes.
    capacity: see `Slots`."""
    rank = rank_of(num_ranks) if rank is None else rank

    def new_slots(layout: SlotLayout, refused: bool, epoch: int) -> Slots:
        def new_block(num_bytes: int, was_captured: bool) -> LoneBlock:
            return LoneBlock(num_bytes, num_ranks, num_nodes)

        return Slots(new_block, layout, rank, 1.0, capacity=capacity)

    layout = SlotLayout(num_ranks, region_bytes, num_nodes=num_nodes)
    if num_nodes > 1:
        return InternodeEngine(layout, new_slots, max_tokens)
    return KernelEngine(layout, new_slots, max_tokens, layer_choices())


def layer_choices() -> LayerChoices:
    """How layers run on the GPU that this machine has, or stands in for."""
    return LayerChoices(kept=kept_layers(), hbm_gbs=gpu().hbm_gbs)


def low_latency_engine(num_ranks: int, region_bytes: int, shrink: bool = False) -> LowLatency:
    """The low-latency engine of a rank."""
    layout = RingLayout(num_ranks, region_bytes)
    return LowLatency(
        Ring(lambda size: LoneBlock(size, num_ranks), layout, rank_of(num_ranks), 1.0), shrink
    )


def internode_low_latency_engine(
    num_ranks: int, region_bytes: int, num_nodes: int, num_lanes: int = 2
) -> InternodeLowLatency:
    """The low-latency engine of a rank of several nodes."""
    layout = LaneLayout.of_ring(RingLayout(num_ranks, region_bytes), num_nodes)
    block = partial(LoneBlock, num_ranks=num_ranks)
    lanes = new_lanes(block, layout, num_lanes, rank_of(num_ranks), 1.0, 0)
    return InternodeLowLatency(lanes, layout)


def rank_of(num_ranks: int) -> int:
    """The rank that stands for all."""
    return min(RANK, num_ranks - 1)
