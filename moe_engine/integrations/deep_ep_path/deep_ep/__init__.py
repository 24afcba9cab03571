"""moe_engine under DeepEP's name: `Buffer` (V1), `ElasticBuffer` (V2), `EPBuffer` (V2.5), and what
belongs to them.

It is not on the import path by itself: put the folder that `python -m moe_engine deep-ep-path`
prints on PYTHONPATH. HybridEPBuffer is absent, so that callers that probe for it with `except
ImportError` take another Buffer; a module of this name raises an error that says so.
"""

from typing import NoReturn

import torch

import moe_engine
from moe_engine import (
    Buffer,
    Config,
    ElasticBuffer,
    EPBuffer,
    EPHandle,
    EventHandle,
    EventOverlap,
)

from .utils.envs import get_logical_domain_size, get_physical_domain_size

topk_idx_t = torch.int64
# The DeepEP release whose interface this is, then what implements it.
__version__ = f"2.1.0+moe.engine.{moe_engine.__version__}"

__all__ = [
    "Buffer",
    "Config",
    "EPBuffer",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "topk_idx_t",
]

ABSENT = {
    *("HybridEPBuffer", "BucketBuffer", "BucketSession", "EngramBuffer", "PPBuffer"),
    *("BufferAllocator", "BufferBase"),
}
"""Names of other versions of DeepEP that callers may look for."""


def absent(name: str) -> str:
    """The text of the errors for a Buffer that this package lacks."""
    return (
        f"deep_ep.{name} is absent: this deep_ep is moe_engine's, which has Buffer, the interface "
        "of DeepEP V1 (intranode and low latency), ElasticBuffer (V2) and EPBuffer (V2.5). Use "
        "these, or take the folder of `moe-engine deep-ep-path` off PYTHONPATH to import another "
        "deep_ep."
    )


def __getattr__(name: str) -> NoReturn:
    if name in ABSENT:
        raise AttributeError(absent(name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
