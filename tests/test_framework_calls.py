"""What other frameworks do between router and combine, over `moe_engine.ops`.

Stand-ins make the calls of DeepSpeed's `AutoEPMoELayer.forward`, of prime-rl's
`TokenDispatcherBase._run_chunked` and of xtuner's `MoE._micro_batch_forward` with its six phases,
in their order, as read in their sources of 2026; results and gradients are compared with the
oracle."""

from __future__ import annotations

import pytest
import torch
from ops_cases import buffer_for, check_layer
from ops_cases import experts as grouped_experts
from training_cases import end, gradients, make_case, on_device

from moe_engine.emulation import PerRank
from moe_engine.ops import (
    combine,
    combine_start,
    combine_wait,
    dispatch,
    dispatch_start,
    dispatch_wait,
)


def scored(got, up, down):
    """Rows of experts, to which scores are applied afterwards."""
    rows = grouped_experts(got.rows, got.offsets, up, down)
    return (rows.float() * got.row_weights[:, None]).to(rows.dtype)


def autoep(x, idx, weights, up, down, num_experts, buffer):
    """Tokens [B, S, H]; the rows of an expert are padded to a multiple of 8, and its counts too."""
    batch = x[None]
    tokens = batch.reshape(-1, batch.shape[-1])
    got = dispatch(tokens, idx, weights.float(), num_experts, buffer, alignment=8)
    assert not (got.offsets.diff() % 8).any()
    return combine(scored(got, up, down), got.plan, buffer).reshape(batch.shape)[0]


def prime_rl(x, idx, weights, up, down, num_experts, buffer):
    """Chunks of tokens: each is sent before the experts of the one before it compute."""
    chunks = zip(*(one.tensor_split(3) for one in (x, idx, weights)), strict=True)
    pending = (dispatch_start(*one, num_experts, buffer, alignment=8) for one in chunks)

    def run_chunk(sent):
        got = dispatch_wait(sent)
        return combine(scored(got, up, down), got.plan, buffer)

    outs, sent = [], next(pending)
    for following in pending:
        outs.append(run_chunk(sent))
        sent = following
    return torch.cat([*outs, run_chunk(sent)])


def xtuner(x, idx, weights, up, down, num_experts, buffer):
    """Two micro-batches, each phase of both before the next one."""
    batches = zip(*(one.tensor_split(2) for one in (x, idx, weights)), strict=True)
    dispatched = [dispatch_start(*one, num_experts, buffer) for one in batches]
    computed, combined = [], []
    for one in dispatched:
        got = dispatch_wait(one)  # dispatch_postprocess
        computed.append((scored(got, up, down), got.plan))  # experts, combine_preprocess
    for rows, plan in computed:
        combined.append((combine_start(rows, plan, buffer), plan))
    return torch.cat([combine_wait(*one) for one in combined])


def run_calls(group, calls, *parts):
    parts = on_device(parts)
    buffer, num_experts = buffer_for(group, parts), group.size() * len(parts[3])
    found = gradients(lambda *args: calls(*args, num_experts, buffer), *parts)
    end(buffer)
    return [one.cpu() for one in found]


@pytest.mark.parametrize("calls", [autoep, prime_rl, xtuner], ids=lambda calls: calls.__name__)
def test_calls_of(pool, calls):
    parts = make_case(2, [6, 4], num_local=2, num_topk=2, intermediate=16)
    found = pool.run(run_calls, calls, *map(PerRank, parts), num_ranks=2)
    check_layer(found, parts)
