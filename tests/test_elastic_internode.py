"""ElasticBuffer on ranks of several emulated nodes: DeepEP V2's test contract, the domains, sums
that are rounded once, and the same calls on ranks of one node."""

from __future__ import annotations

import elastic_cases
import pytest
import test_elastic as on_one_node
import test_elastic_failures as failures
import torch
import torch.distributed as dist
from deep_ep_cases import deep_ep
from dispatch_cases import make_inputs
from elastic_cases import EXPERTS, HIDDEN, TOPK, elastic

from moe_engine import ElasticBuffer, ShapeError
from moe_engine.emulation import PerRank

MODES = {"2x2": on_one_node.FEW, "3x2": on_one_node.FEW[1:3], "4x1": on_one_node.FEW[1:3]}


@pytest.mark.parametrize("shape", MODES)
def test_the_contract_of_v2(nodes, shape):
    on = nodes(shape)
    inputs = make_inputs(on.num_ranks, [20, 0, 13, 5], HIDDEN, EXPERTS, TOPK, "holes", "bf16")
    for do_cpu_sync in (True, False):
        modes = [on_one_node.MODES[at] for at, waits in MODES[shape] if waits is do_cpu_sync]
        on.run(on_one_node.run_modes, modes, do_cpu_sync, *inputs)


def run_round_trips(group, x, idx, w):
    """Rows by token and by expert, and their sums, rounded once: of small integers, whose sums have
    the same bits in any order. All again by handles, with the same bits."""
    x = x.float().mul(3).round().bfloat16()
    buffer = elastic(group, allow_multiple_reduction=False)
    found = []
    for do_expand in (False, True):
        how = dict(num_experts=EXPERTS, do_expand=do_expand, expert_alignment=4)
        rows, ids, weights, handle, _ = buffer.dispatch(x, idx, w, do_zero_padding=do_expand, **how)
        again = buffer.dispatch(x, handle=handle, do_expand=do_expand, do_zero_padding=do_expand)[0]
        assert torch.equal(again, rows)
        y = (rows * (1 + group.rank())).bfloat16() + 256.0  # whose sums bf16 rounds
        weights = torch.zeros_like(weights) + weights
        sums = [buffer.combine(y, handle, weights, bias=x) for _ in range(2)]
        assert torch.equal(sums[0][0], sums[1][0])
        fields = elastic_cases.fields(handle)
        found.append((rows, ids, weights, fields, *sums[0][:2]))
    buffer.barrier(with_cpu_sync=True)
    buffer.check()
    buffer.destroy()
    return found


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize(
    ("shape", "kind"), [("2x2", "duplicates"), ("3x2", "holes"), ("4x1", "holes")]
)
def test_calls_are_those_of_one_node(nodes, shape, kind):
    on = nodes(shape)
    inputs = make_inputs(on.num_ranks, [20, 11, 0, 7], HIDDEN, EXPERTS, TOPK, kind, "bf16")
    parts = [PerRank(part) for part in inputs]
    found = on.run(run_round_trips, *parts)
    wanted = nodes(f"1x{on.num_ranks}").run(run_round_trips, *parts)
    for have, want in zip(found, wanted, strict=True):
        assert same(have, want)


def look_around(group):
    """Domains of nodes, and of a Buffer without hybrid mode."""
    size = dict(num_bytes=1 << 20)
    rank, hybrid, direct = group.rank(), ElasticBuffer(group, **size), None
    assert hybrid.get_physical_domain_size() == hybrid.get_logical_domain_size() == (3, 2)
    assert (hybrid.num_scaleout_ranks, hybrid.num_scaleup_ranks) == (3, 2)
    assert (hybrid.num_rdma_ranks, hybrid.num_nvlink_ranks) == (3, 2)
    assert (hybrid.scaleout_rank_idx, hybrid.scaleup_rank_idx) == divmod(rank, 2)
    assert hybrid.get_theoretical_num_sms(12, 3, 3) == 20
    with pytest.raises(ShapeError, match="num_scaleout_topk is 4"):
        hybrid.get_theoretical_num_sms(12, 3, 4)
    direct = ElasticBuffer(group, allow_hybrid_mode=False, **size)
    assert direct.get_physical_domain_size() == (3, 2)
    assert direct.get_logical_domain_size() == (1, 6)
    assert (direct.scaleout_rank_idx, direct.scaleup_rank_idx) == (0, rank)
    assert deep_ep().get_physical_domain_size(group) == (3, 2)
    assert deep_ep().get_logical_domain_size(group) == (3, 2)
    assert deep_ep().get_logical_domain_size(group, allow_hybrid_mode=False) == (1, 6)
    dist.barrier(group)
    hybrid.destroy()
    direct.destroy()


def test_domains(nodes):
    nodes("3x2").run(look_around)


def test_edges(nodes):
    """Memory that grows, weights that are not given."""
    inputs = make_inputs(4, [9, 0, 20, 4], HIDDEN, EXPERTS, TOPK, "duplicates", "bf16")
    results = nodes("2x2").run(on_one_node.edges, *map(PerRank, inputs))
    received, _ = elastic_cases.expected(inputs)
    for rank, (_, ids, out, _) in enumerate(results):
        assert torch.equal(ids, received[rank].topk_idx)
        x, idx = inputs[0][rank].float(), inputs[1][rank]
        torch.testing.assert_close(out.float(), x * (idx >= 0).sum(1, True), rtol=0.02, atol=0.02)


def test_ranks_that_want_rows_in_other_forms_are_told(nodes):
    on = nodes("2x2")
    how = dict(do_expand=True, do_cpu_sync=False, expert_alignment=2)
    hows = [how, how, how, how | dict(expert_alignment=8)]
    inputs = make_inputs(on.num_ranks, [5], HIDDEN, EXPERTS, TOPK, "uniform", "bf16")
    for seen in on.run(failures.differ, hows, *map(PerRank, inputs)):
        assert "alignment of rows by expert" in seen
