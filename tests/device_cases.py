"""What the tests of the device code share: a symmetric block with its device context."""

from __future__ import annotations

import torch
import torch.distributed as dist

from moe_engine import symm
from moe_engine.device.context import ContextField

NUM_BYTES = 4096
FLAGS = 3072  # offsets into the block
DONE = 3584
POISON = 0xAB


def make_context(group, timeout_s=60.0):
    """A block filled with POISON up to its flags, its device context, and the report."""
    block = symm.allocate(group, NUM_BYTES)
    block.local[:FLAGS] = POISON
    report = torch.zeros(32, dtype=torch.int64)
    if block.local.is_cuda:
        report = report.pin_memory()
    fields = [0] * ContextField.PEERS + block.peer_addresses.tolist()
    fields[ContextField.TIMEOUT_NS] = int(timeout_s * 1e9)
    fields[ContextField.REPORT] = report.data_ptr()
    fields[ContextField.RANK] = group.rank()
    fields[ContextField.NUM_RANKS] = fields[ContextField.NODE_RANKS] = group.size()
    fields[ContextField.DONE] = DONE
    dist.barrier(group)
    return block, torch.tensor(fields, device=block.local.device), report
