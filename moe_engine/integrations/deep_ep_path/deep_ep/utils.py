"""Where DeepEP's callers look for its events."""

from moe_engine import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
