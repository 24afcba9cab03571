"""Ids of a low-latency combine that its handle can refute, in debug mode: those of this rank's own
tokens at this rank's own experts."""

from __future__ import annotations

import low_latency_cases as low_latency
import pytest
import torch

from moe_engine import MoeEngineError

EXPERTS, TOPK, HIDDEN, MAX_TOKENS = 8, 3, 128, 5
IDS = [[0, 1, -1], [0, 0, 3], [-1, 7, 2], [4, -1, -1]]
"""Of all ranks. Rank 0 has the experts 0 to 3 of two ranks, 0 and 1 of four."""
CHANGES = {
    "another own expert": (0, 1, lambda _: 0),
    "an expert of another rank": (1, 0, lambda num_local: num_local),
    "an own expert in place of another rank's": (3, 0, lambda _: 0),
    "an own expert in place of none": (0, 2, lambda _: 1),
}


def refute(group):
    """What is said to each change on rank 0, and of more tokens. Other ranks refuse as many calls,
    so the ranks stay in step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOE_ENGINE_DEBUG", "1")
        buffer = low_latency.make_buffer(group, MAX_TOKENS, HIDDEN, EXPERTS)
    assert buffer.options.debug
    ids = torch.tensor(IDS)
    x, weights = torch.randn(len(ids), HIDDEN).bfloat16(), torch.rand(ids.shape)
    x, ids, weights = low_latency.to_device(x, ids, weights)
    y, _, handle = low_latency.dispatch(buffer, x, ids, MAX_TOKENS, EXPERTS)
    found = []
    if group.rank() == 0:
        for token, k, expert in CHANGES.values():
            other = ids.clone()
            other[token, k] = expert(EXPERTS // group.size())
            found.append(said_of(buffer, y, other, weights, handle))
        longer = (torch.cat([one, one[:1]]) for one in (ids, weights))
        found.append(said_of(buffer, y, *longer, handle))
    else:
        for _ in range(len(CHANGES) + 1):
            said_of(buffer, y.float(), ids, weights, handle)
    fewer = ids.clone()
    fewer[1, 1] = -1  # counts nothing
    for same in (ids, fewer):
        low_latency.combine(buffer, y, same, weights, handle)
    buffer.check()
    buffer.destroy()
    return found


def said_of(*call):
    try:
        low_latency.combine(*call)
    except MoeEngineError as error:
        return str(error)
    return ""


def check(pool, num_ranks):
    *texts, longer = pool.run(refute, num_ranks=num_ranks)[0]
    for (token, k, _), text in zip(CHANGES.values(), texts, strict=True):
        assert f"topk_idx[{token}, {k}] is " in text and "in the dispatch" in text
    assert "topk_idx" in longer


def test_on_one_node(pool):
    check(pool, 2)


def test_on_several_nodes(ranks_of_nodes):
    check(ranks_of_nodes, 4)
