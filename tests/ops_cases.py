"""What the tests of `moe_engine.ops` share: layers made of its functions, and their Buffers."""

from __future__ import annotations

import itertools

import cases
import torch
from training_cases import TOLERANCE, check_gradients, new_buffer

from moe_engine import reference
from moe_engine.ops import (
    combine,
    combine_start,
    combine_wait,
    dispatch,
    dispatch_start,
    dispatch_wait,
)


def experts(rows, offsets, up, down):
    """Expert by expert, in plain torch; rows of no expert give 0."""
    ends = offsets.tolist()
    parts = [
        torch.nn.functional.silu(gate) * gated @ down[expert].T
        for expert, (first, end_) in enumerate(itertools.pairwise(ends))
        for gate, gated in [(rows[first:end_] @ up[expert].T).chunk(2, 1)]
    ]
    return torch.cat([*parts, rows[ends[-1] :] * 0])


def layer(x, idx, weights, up, down, buffer, **how):
    """A layer of operators."""
    got = dispatch(x, idx, weights, buffer.group_size * len(up), buffer, **how)
    y = experts(got.rows, got.offsets, up, down) * got.row_weights[:, None]
    return combine(y.to(x.dtype), got.plan, buffer)


def layer_in_parts(x, idx, weights, up, down, buffer, **how):
    """The same, in four parts."""
    sent = dispatch_start(x, idx, weights, buffer.group_size * len(up), buffer, **how)
    got = dispatch_wait(sent)
    y = experts(got.rows, got.offsets, up, down) * got.row_weights[:, None]
    return combine_wait(combine_start(y.to(x.dtype), got.plan, buffer), got.plan)


def buffer_for(group, parts, backend="auto", max_tokens=16):
    x, idx, _, up, _, _ = parts
    return new_buffer(group, x, group.size() * len(up), idx.shape[1], max_tokens, backend)


def check_layer(found, parts, dtype="fp32"):
    """What ranks have found, as lists of the result and the gradients, against the oracle."""
    x, idx, *others, _ = parts
    x, *others = ([one.double() for one in each] for each in (x, *others))
    for have, want in zip(found, reference.moe_ffn(x, idx, *others), strict=True):
        assert cases.relative_error(have[0], want) < TOLERANCE[dtype]
    check_gradients(found, parts, dtype)
