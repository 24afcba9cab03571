"""moe_engine under DeepEP's name: `Buffer` (V1) and `ElasticBuffer` (V2), and what belongs to them.

It is not on the import path by itself: put the folder that `python -m moe_engine deep-ep-path`
prints on PYTHONPATH. HybridEPBuffer is absent, so that callers that probe for it with `except
ImportError` take another Buffer; a module of this name raises an error that says so.
"""

from typing import NoReturn

import torch
import torch.distributed as dist

import moe_engine
from moe_engine import Buffer, Config, ElasticBuffer, EPHandle, EventHandle, EventOverlap
from moe_engine.symm.nodes import find_nodes

topk_idx_t = torch.int64
# The DeepEP release whose interface this is, then what implements it.
__version__ = f"2.1.0+moe.engine.{moe_engine.__version__}"

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "topk_idx_t",
]


def get_physical_domain_size(group: dist.ProcessGroup) -> tuple[int, int]:
    """(nodes that a network connects, ranks of each). Collective."""
    return find_nodes(group)


def get_logical_domain_size(
    group: dist.ProcessGroup, allow_hybrid_mode: bool = True
) -> tuple[int, int]:
    """(scale-out ranks, scale-up ranks): nodes and ranks of each, (1, R) without hybrid mode.
    Collective with it."""
    return find_nodes(group) if allow_hybrid_mode else (1, dist.get_world_size(group))


def absent(name: str) -> str:
    """The text of the errors for a Buffer that this package lacks."""
    return (
        f"deep_ep.{name} is absent: this deep_ep is moe_engine's, which has Buffer, the interface "
        "of DeepEP V1 (intranode and low latency), and ElasticBuffer, that of V2. Use these, or "
        "take the folder of `moe-engine deep-ep-path` off PYTHONPATH to import another deep_ep."
    )


def __getattr__(name: str) -> NoReturn:
    if name == "HybridEPBuffer":
        raise AttributeError(absent(name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
