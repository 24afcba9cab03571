"""deep_ep.utils: what DeepEP's own tests import, and that their oracle and ours agree."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from deep_ep_cases import deep_ep
from elastic_cases import EXPERTS, HIDDEN, MOST_TOKENS, TOPK, elastic, expected, run_client, to_cpu

import moe_engine

IMPORTS = {
    "envs": "init_dist init_seed get_local_seed get_global_seed dist_print get_rdma_gbs "
    "get_nvlink_gbs get_physical_domain_size get_logical_domain_size",
    "event": "EventHandle EventOverlap",
    "math": "calc_diff safe_div ceil_div align per_token_cast_to_fp8 per_token_cast_back "
    "inplace_unique create_grouped_scores hash_tensor hash_tensors count_bytes",
    "gate": "get_unbalanced_scores",
    "refs": "dispatch combine generate_pre_combine_data ordered_accumulate",
    "testing": "bench bench_kineto",
}


def utils(name):
    """A module of deep_ep.utils."""
    return deep_ep(f"deep_ep.utils.{name}")


@pytest.mark.parametrize("name", IMPORTS)
def test_what_deep_eps_tests_import_is_there(name):
    for function in IMPORTS[name].split():
        assert callable(getattr(utils(name), function))


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("buffer", "Buffer Config EventHandle EventOverlap"),
        ("buffers.legacy", "Buffer Config EventHandle EventOverlap"),
        ("buffers.elastic", "ElasticBuffer EPHandle EventHandle EventOverlap"),
        ("buffers.ep", "EPBuffer EPHandle EventHandle EventOverlap"),
        ("_C", "Config EventHandle"),
        ("utils", "EventHandle EventOverlap"),
        ("utils.event", "EventHandle EventOverlap"),
    ],
)
def test_names_are_where_deep_ep_defines_them(module, names):
    for name in names.split():
        assert getattr(deep_ep(f"deep_ep.{module}"), name) is getattr(moe_engine, name)


def test_speed_of_nvlink(monkeypatch):
    """nvidia-smi says what the links are; without it there are none."""
    links = "GPU 0: NVIDIA H200\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n"
    envs, report = utils("envs"), SimpleNamespace(stdout=links)
    monkeypatch.setattr(envs.subprocess, "run", lambda *args, **more: report)
    assert envs.get_nvlink_gbs() == pytest.approx(0.9 * 2 * 26.562)
    assert envs.get_nvlink_gbs(1.0) == pytest.approx(2 * 26.562)

    def missing(*args, **more):
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(envs.subprocess, "run", missing)
    assert envs.get_nvlink_gbs() == 0


def against_refs(group, rounds_once, x, idx, w):
    """Rows by token, and both combines, of an ElasticBuffer and of the oracle of its own tests."""
    refs, most = utils("refs"), MOST_TOKENS
    idx_and_weights = idx, w
    buffer = elastic(group, allow_multiple_reduction=not rounds_once)
    x = utils("math").per_token_cast_to_fp8(x)
    ref = refs.dispatch(x, *idx_and_weights, most, EXPERTS)
    got = buffer.dispatch(x, *idx_and_weights, num_experts=EXPERTS)
    handle = got[3]
    rows = (*got[0], got[1], got[2], handle.recv_src_metadata[:, 0])
    ref_rows = (*ref[0], ref[1], torch.where(ref[1] < 0, 0, ref[2]), ref[3])
    for one, other in zip(rows, ref_rows, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.float(), other.float())
    ends = handle.psum_num_recv_tokens_per_scaleup_rank.tolist()
    assert ends == ref[4].cumsum(0).tolist()

    y = refs.generate_pre_combine_data(
        group.rank() * most + torch.arange(len(idx)), most, TOPK, HIDDEN
    )
    y[idx < 0] = 0
    of = y, idx, *buffer.get_logical_domain_size(), EXPERTS
    bias = torch.randn(len(idx), HIDDEN).bfloat16()
    made = refs.generate_pre_combine_data(handle.recv_src_metadata[:, 0], most, TOPK, HIDDEN)
    made[got[1] < 0] = 0
    out = buffer.combine(refs.ordered_accumulate(made), handle, bias=(bias, bias))[0]
    assert torch.equal(out, refs.combine(*of, (bias, bias), True, False))

    expanded = buffer.dispatch(x, *idx_and_weights, num_experts=EXPERTS, do_expand=True)
    slots, rows = expanded[3].recv_src_metadata[:, 2:], expanded[0][0].bfloat16()
    rows[slots[slots >= 0].long()] = made[slots >= 0]
    reduced = buffer.combine(rows, expanded[3])[0]
    if not rounds_once:
        assert torch.equal(reduced, refs.combine(*of, None, True, False))
    else:
        exact = refs.combine(*of, None, False, False)
        assert len(idx) == 0 or utils("math").calc_diff(reduced, exact) < 1e-6
    return to_cpu((got[1], ref[3]))


@pytest.mark.parametrize("rounds_once", [False, True])
def test_their_oracle_and_ours_agree(pool, rounds_once):
    if pool.device == "cuda":
        pytest.skip("the tensors of this test are on the CPU")
    # The oracle takes all ranks there are.
    results, inputs = run_client(pool, against_refs, rounds_once, num_ranks=pool.num_ranks)
    received, places = expected(inputs)
    for (topk_idx, source), one, place in zip(results, received, places, strict=True):
        assert torch.equal(topk_idx, one.topk_idx)
        assert torch.equal(source, place.src_metadata[:, 0])


@pytest.mark.parametrize(("num_ranks", "num_local", "num_topk"), [(4, 8, 6), (8, 2, 4), (8, 8, 8)])
@pytest.mark.parametrize("precise", [True, False])
def test_scores_send_more_to_one_rank(num_ranks, num_local, num_topk, precise):
    torch.manual_seed(0)
    for ratio in (1.0, 2.0):
        shape = 4096, num_local * num_ranks, num_ranks, num_topk
        scores = utils("gate").get_unbalanced_scores(*shape, ratio, precise)
        assert scores.shape == shape[:2]
        owner = scores.topk(num_topk).indices // num_local
        counts = torch.zeros(shape[0], num_ranks).scatter_(1, owner, 1).sum(0)
        assert counts[0] / counts[1:].mean() == pytest.approx(ratio, rel=0.1)
        if precise:
            assert counts[1:].max() <= counts[1:].min() + 1


def test_scores_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="leave a token 4 ranks"):
        utils("gate").get_unbalanced_scores(16, 8, 8, 4, 4.0, True)


def test_math():
    math = utils("math")
    x = torch.randn(5, 200)
    rows, scales = math.per_token_cast_to_fp8(x)
    assert (rows.shape, scales.shape) == ((5, 200), (5, 2))
    assert math.calc_diff(math.per_token_cast_back(rows, scales), x) < 1e-3
    exponents = torch.full((5, 4), 127, dtype=torch.uint8).view(torch.int32)  # 2 ** 0
    assert torch.equal(math.per_token_cast_back(rows, exponents), rows.bfloat16())
    four = torch.cat([exponents] * 4)
    again = math.per_token_cast_back(torch.cat([rows] * 4), four.view(-1, 4 * exponents.shape[1]))
    assert torch.equal(again, torch.cat([rows] * 4).bfloat16())
    assert math.per_token_cast_back(rows[:0], scales[:0]).shape == (0, 200)
    ids = torch.tensor([[3, 1, 3, -1], [0, 0, 0, 0]])
    math.inplace_unique(ids, 4)
    assert ids.tolist() == [[3, 1, -1, -1], [0, -1, -1, -1]]
    scores = math.create_grouped_scores(torch.ones(1, 6), torch.tensor([[1]]), 3)
    assert scores.tolist() == [[0, 0, 1, 1, 0, 0]]
    assert math.calc_diff(x, x) == 0
    assert (math.safe_div(0, 0), math.ceil_div(7, 3), math.align(7, 4)) == (0, 3, 8)
    assert math.count_bytes(x, None, (x, [rows])) == 2 * x.numel() * 4 + rows.numel()
    assert math.hash_tensors(x, (x,), None) == 0
