"""DeepEP's V1 names on ranks of several emulated nodes."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from deep_ep_cases import EXPERTS, HIDDEN, TOPK
from dispatch_cases import make_inputs

from moe_engine import Buffer, DtypeError, Options, ShapeError, reference
from moe_engine.emulation import PerRank, RankError


def round_trips(group, x, idx, w):
    """Rounds by both names, with and without the counts of nodes; what there was to see."""
    buffer, node_size = Buffer(group, 1 << 20), group.size() // 2
    found, checks = [], mock.Mock(wraps=buffer._check_dispatch)
    buffer._check_dispatch = checks
    for number in range(3):
        topk_idx = idx.roll(number, 0)  # other values in calls of one kind
        layout = buffer.get_dispatch_layout(topk_idx, EXPERTS)
        per_rank, per_node, per_expert, in_rank, _ = layout
        by_node = in_rank.view(len(x), 2, node_size).any(2).sum(0)
        assert per_node.dtype == torch.int32
        assert per_node.tolist() == by_node.tolist()
        sent = x, None, per_rank, per_node, in_rank, per_expert, topk_idx, w
        rows, *_, handle, _ = buffer.internode_dispatch(*sent)
        out = buffer.internode_combine(rows, handle)[0]
        again, *_, without, _ = buffer.dispatch(*sent[:3], None, *sent[4:])
        assert torch.equal(again, rows)
        assert len(handle) == len(without) == 10
        assert int(handle[-4][-1]) == len(rows)
        found.append((rows, out))
    # Calls of a kind are known again, also where both counts are one tensor.
    assert checks.call_count == 2 - (node_size == 1)
    assert buffer.get_num_rdma_ranks() == buffer.runtime.get_num_rdma_ranks() == 2
    assert buffer.get_rdma_rank() == group.rank() // node_size
    assert buffer.get_root_rdma_rank(True) == group.rank() % node_size
    assert buffer.get_root_rdma_rank(False) == 0
    buffer.check()
    torch.distributed.barrier(group)
    buffer.destroy()
    assert buffer.runtime is None
    return found


@pytest.mark.parametrize("shape", ["2x2", "2x1"])
def test_calls_between_nodes(nodes, shape):
    on = nodes(shape)
    x, idx, w = make_inputs(on.num_ranks, [20, 0, 11, 7], HIDDEN, EXPERTS, TOPK, "holes", "bf16")
    results = on.run(round_trips, *map(PerRank, (x, idx, w)))
    for number in range(3):
        ids = [one.roll(number, 0) for one in idx]
        for have, want in zip(results, reference.dispatch(x, ids, w, EXPERTS), strict=True):
            assert torch.equal(have[number][0], want.x)


def give(group, change, debug, x, idx, w):
    """A dispatch with other counts of nodes than those of the layout."""
    buffer = Buffer(group, 1 << 20, options=Options(debug=debug))
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS)
    if change == "dtype":
        per_node = per_node.long()
    elif change == "shape":
        per_node = per_node[:1]
    elif change == "ranks":
        per_node = per_rank
    else:
        per_node = per_node + 1
    buffer.dispatch(x, None, per_rank, per_node, in_rank, per_expert, idx, w)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ("dtype", DtypeError, "num_tokens_per_rdma_rank is int64"),
        ("shape", ShapeError, "num_tokens_per_rdma_rank has shape"),
        ("ranks", ShapeError, "num_tokens_per_rdma_rank has shape"),
        ("values", ShapeError, "is_token_in_rank counts"),
    ],
)
def test_counts_that_are_refused(nodes, change, error, words):
    inputs = make_inputs(4, [4], HIDDEN, EXPERTS, TOPK, "uniform", "bf16")
    with pytest.raises(RankError, match=words) as info:
        nodes("2x2").run(give, change, change == "values", *map(PerRank, inputs))
    assert error.__name__ in str(info.value)
