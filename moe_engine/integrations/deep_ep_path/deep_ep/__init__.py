"""moe_engine under DeepEP's name: its V1 `Buffer` and what belongs to it.

Not on the import path unless asked for: put the folder that `python -m moe_engine deep-ep-path`
prints on PYTHONPATH. HybridEPBuffer and ElasticBuffer are absent, so that callers that probe for
them with `except ImportError` take another way.
"""

import torch

import moe_engine
from moe_engine import Buffer, Config, EventHandle, EventOverlap

topk_idx_t = torch.int64
# The DeepEP release whose interface this is, then who stands behind it.
__version__ = f"1.2.1+moe.engine.{moe_engine.__version__}"

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "topk_idx_t"]
