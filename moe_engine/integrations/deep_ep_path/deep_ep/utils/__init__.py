"""What DeepEP's callers import besides its Buffers: the events from here, and from the modules of
this folder what DeepEP's own tests import. All of it is plain PyTorch, on any device."""

from moe_engine import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
