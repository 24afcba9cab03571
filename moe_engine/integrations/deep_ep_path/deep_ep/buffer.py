"""The Buffer of DeepEP V1, where V1 defines it, and what V1's module imports besides."""

from moe_engine import Buffer, Config, EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap"]
