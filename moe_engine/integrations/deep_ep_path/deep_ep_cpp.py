"""What DeepEP's callers take from its compiled module. There is nothing compiled here."""

import torch

from moe_engine import Config, EventHandle

topk_idx_t = torch.int64

__all__ = ["Config", "EventHandle", "topk_idx_t"]
