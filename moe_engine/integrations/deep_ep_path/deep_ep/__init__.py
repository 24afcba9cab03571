"""moe_engine under DeepEP's name: its V1 `Buffer` and what belongs to it.

It is not on the import path by itself: put the folder that `python -m moe_engine deep-ep-path`
prints on PYTHONPATH. HybridEPBuffer and ElasticBuffer are absent, so that callers that probe for
them with `except ImportError` take Buffer; modules of these names raise an error that says so.
"""

from typing import NoReturn

import torch

import moe_engine
from moe_engine import Buffer, Config, EventHandle, EventOverlap

topk_idx_t = torch.int64
# The DeepEP release whose interface this is, then what implements it.
__version__ = f"1.2.1+moe.engine.{moe_engine.__version__}"

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "topk_idx_t"]


def absent(name: str) -> str:
    """The text of the errors for a Buffer that this package lacks."""
    return (
        f"deep_ep.{name} is absent: this deep_ep is moe_engine's, which has Buffer, the "
        "interface of DeepEP V1 (intranode and low latency). Use deep_ep.Buffer, or take the "
        "folder of `moe-engine deep-ep-path` off PYTHONPATH to import another deep_ep."
    )


def __getattr__(name: str) -> NoReturn:
    if name in ("ElasticBuffer", "HybridEPBuffer"):
        raise AttributeError(absent(name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
