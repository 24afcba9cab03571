"""Making the engines with kernels, on memory that all ranks of a Buffer allocate together."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch

from ..agreement import Group, Settings
from ..errors import BackendError, CapacityError
from ..layer_config import LayerChoices
from ..streams import CallStreams
from ..symm import allocate
from ..symm.base import SymmetricTensor
from ..symm.device_context import COMPILE_S
from ..symm.lanes import LaneLayout, new_lanes
from ..symm.meeting import exchange
from ..symm.nodes import Nodes, find_nodes
from ..symm.ring import Ring, RingLayout
from ..symm.slots import SlotLayout, Slots
from .hooked_calls import HookedCalls
from .internode import InternodeEngine
from .internode_low_latency import InternodeLowLatency
from .kernel import KernelEngine
from .low_latency import LowLatency


@dataclass(frozen=True)
class Allocator:
    """Allocates the symmetric memory of one Buffer, and declares it to the Buffer's streams.

    Engines keep it, as memory may grow. It does not know the Buffer, which they would keep alive.
    Memory is made outside torch's inference mode, since tensors that are made in it cannot be
    stored to outside it, and a Buffer serves calls of both.
    """

    group: Group
    settings: Settings
    backend: str
    device: torch.device
    streams: CallStreams

    @functools.cached_property
    def nodes(self) -> Nodes:
        """The nodes of the ranks. Collective at first."""
        return find_nodes(self.group.process_group, self.settings.timeout_s)

    def new_engines(self) -> tuple[KernelEngine | InternodeEngine, HookedCalls | None]:
        """The engines with kernels, on memory of all ranks. Collective."""
        settings, options = self.settings, self.settings.options
        low_latency: HookedCalls | None = None
        num_ranks, num_slots = self.group.size, options.num_slots
        num_nodes = self.nodes.num_nodes
        layout = SlotLayout.fit(settings.num_bytes, num_ranks, num_slots, num_nodes)
        if settings.enable_shrink and num_nodes > 1:
            raise BackendError(
                f"enable_shrink is set, and the ranks are on {num_nodes} nodes: there calls cannot "
                "go on without a silent rank, as ranks forward for each other. Leave it out."
            )
        if settings.ring_bytes:
            ring_layout = RingLayout.fit(settings.ring_bytes, num_ranks, num_slots)
            if num_nodes == 1:
                low_latency = LowLatency(self.new_ring(ring_layout), settings.enable_shrink)
            else:
                low_latency = self.new_lanes(LaneLayout.of_ring(ring_layout, num_nodes), num_slots)
        memory = layout, self.new_slots, options.max_tokens
        if num_nodes == 1:
            layers = LayerChoices(options.layer, settings.measured, settings.hbm_gbs)
            return KernelEngine(*memory, layers), low_latency
        engine = InternodeEngine(*memory)
        # In a meeting, as a rank may have to compile what another one has cached.
        group, seconds = self.group.process_group, settings.timeout_s + COMPILE_S
        exchange(group, engine.context.notices.load, "compiling", seconds)
        return engine, low_latency

    @torch.inference_mode(False)
    def new_ring(self, layout: RingLayout) -> Ring:
        """Low-latency memory of `layout` on all ranks. Collective."""
        more = self.group.rank, self.settings.timeout_s, self.streams.callers
        ring = Ring(self._new_block, layout, *more)
        self.streams.uses("ring", ring.block.local, ring.context.fields)
        return ring

    @torch.inference_mode(False)
    def new_lanes(self, layout: LaneLayout, num_lanes: int) -> InternodeLowLatency:
        """The low-latency engine of several nodes, with lanes of `layout`. Collective."""
        settings, rank = self.settings, self.group.rank
        more = num_lanes, rank, settings.timeout_s, settings.number, self.streams.callers
        lanes = new_lanes(self._new_block, layout, *more)
        memory = [(lane.block.local, lane.context.fields) for lane in lanes]
        self.streams.uses("ring", *itertools.chain(*memory))
        return InternodeLowLatency(lanes, layout)

    @torch.inference_mode(False)
    def new_slots(self, layout: SlotLayout, was_captured: bool, epoch: int) -> Slots:
        """Memory of `layout` on all ranks, whose calls go on after `epoch`. Collective.

        `was_captured`: this rank has captured the memory that this replaces in a CUDA graph.
        CapacityError, on all ranks, where any rank has.
        """
        settings, rank = self.settings, self.group.rank
        more = was_captured, settings.number, epoch
        about = settings.options.capacity(self.group.size), self.streams.callers
        slots = Slots(self._replace_block, layout, rank, settings.timeout_s, *more, *about)
        self.streams.uses("slots", slots.block.local, slots.context.fields)
        return slots

    @torch.inference_mode(False)
    def _new_block(self, num_bytes: int) -> SymmetricTensor:
        timeout_s = self.settings.timeout_s
        return allocate(self.group.process_group, num_bytes, self.backend, self.device, timeout_s)

    def _replace_block(self, num_bytes: int, was_captured: bool) -> SymmetricTensor:
        """A new block, once all ranks have said that they did not capture the one before."""
        group, timeout_s = self.group.process_group, self.settings.timeout_s
        captured = exchange(group, lambda: was_captured, "replacing memory", timeout_s)
        if any(captured):
            ranks = ", ".join(str(rank) for rank, one in enumerate(captured) if one)
            raise CapacityError(
                f"this call needs {num_bytes} bytes, more than this Buffer has, and it cannot "
                f"grow: CUDA graphs captured on ranks {ranks} use its memory. Make a new Buffer "
                "with the bytes of Buffer.size_hint(...), or for as many tokens."
            )
        return self._new_block(num_bytes)
