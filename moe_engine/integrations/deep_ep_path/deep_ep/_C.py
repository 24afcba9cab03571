"""What DeepEP's callers import from its compiled module, by the name that it has since V2. Nothing
is compiled here."""

import torch

from moe_engine import Config, EventHandle

topk_idx_t = torch.int64

__all__ = ["Config", "EventHandle", "topk_idx_t"]
