"""The Buffer of DeepEP V1, where V2 defines it."""

from moe_engine import Buffer, Config, EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]
