"""The operators `dispatch` and `combine` on ranks of several emulated nodes."""

from __future__ import annotations

import pytest
import test_ops as on_one_node
import torch
from ops_cases import buffer_for, layer
from training_cases import check_gradients, end, make_case, on_device

from moe_engine.emulation import PerRank
from moe_engine.expert_row_calls import InternodePlan
from moe_engine.ops import combine, dispatch

CASES = {
    "ragged": ("2x2", [9, 4, 0, 5], "duplicates", {"alignment": 16}),
    "room left": ("3x2", [4, 2, 3, 1, 0, 5], "empty_rank", {"max_rows": 128, "alignment": 16}),
    "nodes of one rank": ("4x1", [5, 0, 4, 2], "holes", {}),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_and_gradients(nodes, name):
    shape, num_tokens, kind, how = CASES[name]
    parts = make_case(len(num_tokens), num_tokens, kind=kind)
    found = nodes(shape).run(on_one_node.run_layers, "auto", how, *map(PerRank, parts))
    check_gradients([one for one, _, _ in found], parts)
    for rank, (_, same, values) in enumerate(found):
        assert same
        on_one_node.check_rows(parts, rank, values, how.get("alignment", 1))


def test_micro_batches_in_flight_and_checkpoints(nodes):
    parts = [PerRank(part) for part in make_case(4, [6, 5, 0, 3], num_topk=2)]
    for same in nodes("2x2").run(on_one_node.run_micro_batches, *parts):
        assert all(same), same
    for same, made in nodes("2x2").run(on_one_node.run_checkpoints, *parts):
        assert all(same)
        assert made[0] == made[2] == ["dispatch", "combine", "dispatch_cached", "combine"]


def test_a_layer_is_one_graph(nodes):
    parts = make_case(4, [6, 5, 4, 7], num_local=2, num_topk=2, intermediate=16, dtype="bf16")
    router = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    found = nodes("2x2").run(on_one_node.run_compiled, 96, router, *map(PerRank, parts))
    for same in found:
        assert same == [[True] * 5] * 2


def run_plans(group, *parts):
    """A plan is a tuple of tensors, which serve without its type; one of other ranks is refused."""
    parts = on_device(parts)
    x, idx, weights, up, _, _ = parts
    buffer, num_experts = buffer_for(group, parts), group.size() * len(up)
    got = dispatch(x, idx, weights, num_experts, buffer)
    assert isinstance(got.plan, InternodePlan)
    assert got.plan.handle.recv_gbl_rank_prefix_sum[-1] == len(got.plan.recv_src_idx)
    want = combine(got.rows, got.plan, buffer)
    assert torch.equal(combine(got.rows, tuple(got.plan), buffer), want)
    texts = {}
    for name, plan in {
        "too few": got.plan[:-1],
        "of one node": (*got.plan[:2], *got.plan[-6:]),
        "another shape": got.plan._replace(node_rows=got.plan.node_rows[:1]),
    }.items():
        try:
            combine(got.rows, plan, buffer)
        except Exception as error:
            texts[name] = f"{type(error).__name__}: {error}"
    assert torch.equal(combine(got.rows, got.plan, buffer), want)
    layer(*parts[:5], buffer)
    end(buffer)
    return texts


def test_plans(nodes):
    parts = [PerRank(part) for part in make_case(4, [3, 2, 0, 4], num_topk=2)]
    for texts in nodes("2x2").run(run_plans, *parts):
        assert texts["too few"].startswith("ShapeError: plan has 11 tensors")
        assert texts["of one node"].startswith("ShapeError: handle has 6 items")
        assert texts["another shape"].startswith("ShapeError: handle.node_rows has shape [1, 2]")


@pytest.mark.slow
def test_opcheck(nodes):
    parts = [PerRank(part) for part in make_case(2, [4, 3], num_local=2, num_topk=2)]
    for found in nodes("2x1").run(on_one_node.run_opcheck, *parts):
        for name, results in found.items():
            assert set(results.values()) == {"SUCCESS"}, (name, results)
