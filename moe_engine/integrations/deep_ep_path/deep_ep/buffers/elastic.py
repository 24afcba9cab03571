"""ElasticBuffer and its handle, where DeepEP V2 defines them."""

from moe_engine import ElasticBuffer, EPHandle, EventHandle, EventOverlap

__all__ = ["EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap"]
