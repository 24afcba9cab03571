"""EPBuffer and its handle, where DeepEP V2.5 defines them."""

from moe_engine import EPBuffer, EPHandle, EventHandle, EventOverlap

__all__ = ["EPBuffer", "EPHandle", "EventHandle", "EventOverlap"]
