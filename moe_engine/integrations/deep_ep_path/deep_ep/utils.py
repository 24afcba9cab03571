"""DeepEP's callers import its events from here."""

from moe_engine import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
