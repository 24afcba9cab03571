"""What the tests of failures and of memory share: Buffers of 12 experts, and dispatches on them."""

from __future__ import annotations

import cases
import torch

from moe_engine import Buffer, Options
from moe_engine.symm.device_context import ContextField

EXPERTS = 12


def new_buffer(group, hidden=16, max_tokens=20, **options):
    return Buffer.for_tokens(
        group, max_tokens, hidden, EXPERTS, 2, torch.float32, options=Options(**options)
    )


def dispatch(buffer, x, topk_idx, topk_weights, **more):
    args = [t.to(cases.device()) for t in (x, topk_idx, topk_weights)]
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(args[1], EXPERTS)
    return buffer.dispatch(
        args[0], None, per_rank, None, in_rank, per_expert, args[1], args[2], **more
    )


def first_use(buffer, *tokens):
    """A dispatch and its combine, which compile; until then the deadline is longer."""
    recv_x, _, _, _, handle, _ = dispatch(buffer, *tokens)
    buffer.combine(recv_x, handle)
    buffer.check()


def tokens(num_tokens, hidden, num_topk, idx):
    """(x [T, H], idx, topk_weights) of one rank."""
    x, w = cases.tokens(num_tokens, hidden, num_topk, torch.float32, 0)
    return x, idx, w


def fields_of_calls(context):
    """A copy of the fields that a call changes, by which tests see that none ran: those of a device
    context, but for the number of refused calls."""
    fields = context.fields.clone()
    fields[ContextField.REFUSED] = 0
    return fields
