"""The events, where DeepEP V2 defines them."""

from moe_engine import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
