"""A layer's dispatch up to its GEMM: where rows go, what is told of them, what is pushed."""

from __future__ import annotations

import itertools

import cases
import pytest
import torch
from dispatch_cases import make_buffer, make_inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_reference import return_begins, stage_begins

from moe_engine import reference
from moe_engine.symm.slots import header_bytes

BLOCK_M = 16
HIDDEN = 40
STAGES = 3, 4
UNUSED = 0x7F
"""What bytes hold before they are written: a word of -1 would mean something."""


def told_by(slots, writer, num_experts, row, num_stages):
    """What rank `writer` has told this one: (dst_rows [N, K] and weights [N, K] of each row, how
    many rows each return stage has, and which, [N, stages])."""
    from moe_engine.device.context import SIGNATURE_WORDS, ContextField

    layout = slots.layout
    slot = (int(slots.context.fields[ContextField.EPOCH]) + 1) % layout.num_slots
    start = layout.slots + (slot * layout.num_ranks + writer) * layout.region_bytes
    region = slots.block.local[start : start + layout.region_bytes].cpu().view(torch.int32)
    counts = region[SIGNATURE_WORDS.value + num_experts :][:num_stages]
    header = header_bytes(num_experts, layout.num_ranks)
    num_rows = layout.max_rows(row.num_bytes, header)
    rows = region[header // 4 :][: num_rows * row.num_bytes // 4].view(num_rows, -1)
    lists = rows[:, row.list_offset // 4 :][:, :num_stages]
    dst_rows = rows[:, row.dst_rows_offset // 4 :][:, : row.num_topk]
    weights = rows[:, row.weights_offset // 4 :][:, : row.num_topk].view(torch.float32)
    return dst_rows.clone(), weights.clone(), counts.clone(), lists.clone()


def steps_on_rank(group, num_experts, max_tokens, stages, x, topk_idx, topk_weights):
    """The kernels of a layer in their order, without its GEMMs: all that they have found, told
    and pushed, by name."""
    from moe_engine import LayerConfig, combine, dispatch, routing
    from moe_engine.device.context import MAX_STAGES, ContextField
    from moe_engine.dispatch.fused import num_copy_programs
    from moe_engine.dispatch.fused_kernels import CopyLists
    from moe_engine.engines.fused_layer import ExpertRows, expert_rows_bytes

    num_ranks, device = torch.distributed.get_world_size(group), cases.device()
    num_topk, row_bytes = topk_idx.shape[1], x.shape[1] * x.itemsize
    buffer = make_buffer(group, x, num_experts, num_topk, max_tokens)
    slots = buffer._engine.slots
    max_rows = num_ranks * max(1, max_tokens) * num_topk
    slots.reserve_expert_rows(expert_rows_bytes(max_rows, row_bytes), False)
    slots.expert_rows.local.fill_(UNUSED)
    slots.block.local[slots.layout.slots :].fill_(UNUSED)
    if device.type == "cuda":
        torch.cuda.synchronize()
    torch.distributed.barrier(group)
    args = [t.to(device) for t in (x, topk_idx, topk_weights)]
    config = LayerConfig(*stages, num_own_stages=16, num_push_programs=7, num_copy_programs=5)
    with cases.filled_memory():
        layout = routing.layout(args[1], num_experts, slots)
        tokens = dispatch.LayerTokens(*args, layout)
        memory = ExpertRows.of(args[0], max_rows, slots)
        rows, copies = memory.rows, memory.copies
        offsets = dispatch.exchange_fused(tokens, max_rows, config, slots)
        plan = dispatch.place_rows(tokens, offsets, memory.parts, slots)
        begins = offsets.expert_offsets, offsets.remote_offsets
        schedule, counters = dispatch.staged_schedule(*begins, max_rows, BLOCK_M, config, slots)
        dispatch.push_fused(args[0], plan, counters, config, slots)
        lists = CopyLists(plan.own_order, copies)
        dispatch.copy_rows(args[0], rows, lists, offsets, counters, config, slots)
        steps = tokens, rows, offsets, plan, schedule, counters, config
        metadata = combine.send_return_metadata(dispatch.Dispatched(*steps), slots)
    if device.type == "cuda":
        torch.cuda.synchronize()
    torch.distributed.barrier(group)
    slots.context.check()
    of_block = slots.layout.offsets()
    begin, end = of_block[ContextField.STAGE_FLAGS], of_block[ContextField.CHUNK_FLAGS]
    flags = slots.block.local[begin:end]
    raised = flags.view(torch.int64).view(2, MAX_STAGES.value, num_ranks)
    found = offsets._asdict() | {
        "to_push": split(plan.to_push),
        "own_order": split(plan.own_order),
        "dst_row": plan.dst_row,
        "remote_idx": plan.remote_idx,
        "copies": split(copies),
        "is_copied": counters.copied == num_copy_programs(config),
        "send_head": metadata.send_head,
        "to_sum": metadata.to_sum,
        "num_to_sum": counters.num_to_sum,
        "expert_rows": slots.expert_rows.local[: max_rows * row_bytes].view(max_rows, -1),
        "raised": raised == slots.context.fields[ContextField.EPOCH] + 1,
    }
    found = {name: one.cpu().clone() for name, one in found.items() if one is not None}
    told = [
        told_by(slots, writer, num_experts, tokens.row, config.num_return_stages)
        for writer in range(num_ranks)
    ]
    torch.distributed.barrier(group)
    buffer.destroy()
    return found, told


def split(packed):
    """The two numbers in words: [..., 2]."""
    return torch.stack([packed >> 32, packed & 0xFFFFFFFF], dim=-1)


def run_steps(pool, num_experts, stages, x, topk_idx, topk_weights):
    from moe_engine.emulation import PerRank

    inputs = (PerRank(part) for part in (x, topk_idx, topk_weights))
    args = num_experts, max(map(len, x)), stages
    return pool.run(steps_on_rank, *args, *inputs, num_ranks=len(x))


def owner_of(ids, num_experts, num_ranks):
    """The rank of each k's expert, -1 for a bad id."""
    is_valid = (ids >= 0) & (ids < num_experts)
    return torch.where(is_valid, ids // (num_experts // num_ranks), -1)


def check_places(results, topk_idx, num_experts, stages):
    num_ranks = len(topk_idx)
    expected = reference.placed_rows(topk_idx, num_experts)
    of_others = {
        "num_remote": torch.stack([want.remote_offsets[-1] for want in expected]),
        "expert_begin": torch.cat([want.expert_offsets[:-1] for want in expected]),
        "remote_begin": torch.cat([want.remote_offsets[:-1] for want in expected]),
    }
    for (found, _), want in zip(results, expected, strict=True):
        assert torch.equal(found["expert_offsets"], want.expert_offsets)
        assert torch.equal(found["remote_offsets"], want.remote_offsets)
        assert torch.equal(found["dst_row"], want.dst_row)
        for name, value in of_others.items():
            assert torch.equal(found[name], value)
    for rank, (found, _) in enumerate(results):
        check_rows_of_others(rank, results, expected, topk_idx, num_experts, stages)
        own = owner_of(topk_idx[rank], num_experts, num_ranks) == rank
        order = torch.stack([expected[rank].dst_row[own], own.nonzero()[:, 0].int()], dim=1)
        assert found["own_order"][: len(order)].tolist() == sorted(order.tolist())


def check_rows_of_others(rank, results, expected, topk_idx, num_experts, stages):
    """What others push to a rank, in which stage, and which of its rows are copies."""
    num_ranks = len(results)
    rows = []  # (dst_row, source, token, first row)
    for source, (ids, want) in enumerate(zip(topk_idx, expected, strict=True)):
        here = owner_of(ids, num_experts, num_ranks) == rank
        if source != rank:
            tokens, dst_rows = here.nonzero()[:, 0], want.dst_row[here]
            columns = dst_rows, torch.full_like(dst_rows, source), tokens, want.first_row[here]
            rows += zip(*(column.tolist() for column in columns), strict=True)
    rows.sort()
    for index, (dst_row, source, _, _) in enumerate(rows):
        here = results[source][0]["dst_row"] == dst_row
        here &= owner_of(topk_idx[source], num_experts, num_ranks) == rank
        assert results[source][0]["remote_idx"][here].tolist() == [index]
    copies = [[row, first] if row != first else [-1, 2**32 - 1] for row, _, _, first in rows]
    assert results[rank][0]["copies"][: len(rows)].tolist() == copies
    begins = stage_begins(len(rows), stages)
    for source, (found, _) in enumerate(results):
        for stage, (begin, end) in enumerate(itertools.pairwise(begins)):
            pushed = found["to_push"][rank, stage, : found["num_to_push"][rank, stage]]
            firsts = [
                (row, token)
                for row, sender, token, first in rows[begin:end]
                if sender == source and row == first
            ]
            assert sorted(map(tuple, pushed.tolist())) == firsts


def check_return_metadata(results, topk_idx, topk_weights, num_experts, return_stages):
    num_ranks = len(topk_idx)
    placed = reference.placed_rows(topk_idx, num_experts)
    for source, (ids, weights) in enumerate(zip(topk_idx, topk_weights, strict=True)):
        found, dst_row = results[source][0], placed[source].dst_row
        _, _, in_rank = reference.layout(ids, num_experts, num_ranks)
        _, send_head = reference.send_plan(in_rank, ids, num_experts)
        assert torch.equal(found["send_head"], send_head)
        owner = owner_of(ids, num_experts, num_ranks)
        last_stage = [0] * len(ids)
        for rank in range(num_ranks):
            total = int(placed[rank].remote_offsets[-1])
            remote_idx = results[source][0]["remote_idx"]
            begins = torch.tensor(return_begins(total, return_stages)[1:])
            have_rows, have_weights, have_counts, have_lists = results[rank][1][source]
            rows_of_stage = [[] for _ in range(return_stages)]
            for row, token in enumerate(in_rank[:, rank].nonzero().flatten().tolist()):
                here = owner[token] == rank
                count = int(here.sum())
                assert torch.equal(have_rows[row][:count], dst_row[token][here])
                assert (have_rows[row][count:] == -1).all()
                assert torch.equal(have_weights[row][:count], weights[token][here])
                if rank != source:
                    stage = int((begins <= remote_idx[token][here].max()).sum())
                    last_stage[token] = max(last_stage[token], stage)
                    rows_of_stage[stage].append(row)
            for stage, rows in enumerate(rows_of_stage):
                assert have_counts[stage] == len(rows)
                assert sorted(have_lists[: len(rows), stage].tolist()) == rows
        for stage in range(return_stages):
            tokens = found["to_sum"][stage, : found["num_to_sum"][stage]]
            expected = [token for token, last in enumerate(last_stage) if last == stage]
            assert sorted(tokens.tolist()) == expected


def check_rows(results, x, topk_idx, num_experts, stages):
    """Each rank's expert rows, bit for bit, the unused ones as they were; all of the stages told,
    and no other."""
    num_ranks = len(x)
    placed = reference.placed_rows(topk_idx, num_experts)
    for rank, (found, _) in enumerate(results):
        expected = torch.full_like(found["expert_rows"], UNUSED)
        for source, ids in enumerate(topk_idx):
            here = owner_of(ids, num_experts, num_ranks) == rank
            tokens = here.nonzero()[:, 0]
            expected[placed[source].dst_row[here].long()] = x[source].view(torch.uint8)[tokens]
        assert torch.equal(found["expert_rows"], expected)
        assert found["is_copied"].all()
        of_dispatch, of_combine = found["raised"]
        assert of_dispatch[:stages].all()
        assert not of_dispatch[stages:].any()
        assert not of_combine.any()


@pytest.fixture(
    scope="module",
    params=[pytest.param(case.values, marks=case.marks) for case in cases.routings(1, 2, 3, 4)],
    ids=str,
)
def routed(pool, request):
    """(inputs, what the ranks found) of 24 experts, with several blocks of tokens on rank 0."""
    kind, num_ranks = request.param
    inputs = make_inputs(num_ranks, [66, 0, 9, 5], HIDDEN, 24, 3, kind, "bf16")
    return inputs, run_steps(pool, 24, STAGES, *inputs)


def test_places(routed):
    (_, topk_idx, _), results = routed
    check_places(results, topk_idx, 24, STAGES[0])


def test_return_metadata(routed):
    (_, topk_idx, topk_weights), results = routed
    check_return_metadata(results, topk_idx, topk_weights, 24, STAGES[1])


def test_rows(routed):
    (x, topk_idx, _), results = routed
    check_rows(results, x, topk_idx, 24, STAGES[0])


@settings(max_examples=cases.few_examples())
@given(
    num_ranks=st.integers(1, 4),
    num_tokens=st.lists(st.integers(0, 90), min_size=4, max_size=4),
    num_local=st.integers(1, 5),
    num_topk=st.integers(1, 5),
    stages=st.integers(1, 16),
    return_stages=st.integers(1, 16),
    seed=st.integers(0, 99),
)
def test_any_shape(pool, num_ranks, num_tokens, num_local, num_topk, stages, return_stages, seed):
    """Bad ids among them, and experts that a token has twice."""
    cases.skip_where_shapes_compile(pool)
    num_experts = num_ranks * num_local
    sizes = num_ranks, num_tokens, 8, num_experts, num_topk, "duplicates", "fp32", seed
    x, topk_idx, weights = make_inputs(*sizes)
    generator = torch.Generator().manual_seed(seed)
    for ids in topk_idx:
        ids.random_(-2, num_experts + 2, generator=generator)
    results = run_steps(pool, num_experts, (stages, return_stages), x, topk_idx, weights)
    check_places(results, topk_idx, num_experts, stages)
    check_return_metadata(results, topk_idx, weights, num_experts, return_stages)
    check_rows(results, x, topk_idx, num_experts, stages)


def run_example(pool, topk_idx):
    """What ranks of 2 experts find of these ids, in 2 stages of dispatch and of combine."""
    topk_idx = [torch.tensor(ids, dtype=torch.int64) for ids in topk_idx]
    num_topk = topk_idx[0].shape[1]
    topk_idx = [ids.view(-1, num_topk) for ids in topk_idx]
    x = [torch.zeros(len(ids), 8) for ids in topk_idx]
    weights = [torch.zeros(ids.shape) for ids in topk_idx]
    return topk_idx, run_steps(pool, 2 * len(topk_idx), (2, 2), x, topk_idx, weights)


def test_a_batch_of_one_row(pool):
    """65 rows in the first of two stages, 32 at a time by each of two programs."""
    topk_idx, results = run_example(pool, [[[0]] * 129])
    check_rows(results, [torch.zeros(129, 8)], topk_idx, 2, 2)


# --- Examples of docstrings --------------------------------------------------------------------


def test_the_example_of_the_oracle():
    topk_idx = torch.tensor([[0, 3], [2, 0]]), torch.tensor([[3, 2], [0, 1]])
    first, second = reference.placed_rows(list(topk_idx), 4)
    assert first.expert_offsets.tolist() == [0, 3, 4]
    assert second.expert_offsets.tolist() == [0, 2, 4]
    assert first.remote_offsets.tolist() == second.remote_offsets.tolist() == [0, 1, 2]
    assert first.dst_row.tolist() == [[0, 3], [1, 1]]
    assert second.dst_row.tolist() == [[2, 0], [2, 3]]
    assert first.first_row.tolist() == [[0, 3], [1, 1]]
    assert second.first_row.tolist() == [[0, 0], [2, 2]]


def test_the_example_of_the_exchange(pool):
    ids = [[[0], [0], [1], [2], [3], [3], [3]], [[0], [2], [2], [3], [3]]]
    topk_idx, results = run_example(pool, ids)
    check_places(results, topk_idx, 4, 2)
    (found, _), (other, _) = results
    assert found["expert_offsets"].tolist() == [0, 3, 4]
    assert found["remote_offsets"].tolist() == [0, 1, 1]
    assert other["expert_offsets"].tolist() == [0, 3, 8]
    assert found["num_remote"].tolist() == [1, 4]
    assert found["expert_begin"].tolist() == [0, 3, 0, 3]
    assert found["remote_begin"].tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("counts", "rows"),
    [((3, 1, 2), [[0, 1, 2], [3], [4, 5]]), ((2, 3, 2), [[0, 1], [2, 4, 6], [3, 5]])],
)
def test_the_examples_of_the_deal(pool, counts, rows):
    """Rows for expert 0, of the ranks at distances 0, 1 and 2 before its own."""
    own, before, two_before = ([[0]] * count for count in counts)
    _, results = run_example(pool, [own, two_before, before])
    found = [found["dst_row"].flatten().tolist() for found, _ in results]
    assert [found[0], found[2], found[1]] == rows


FOUR_TOKENS = [[0, 3], [2, 0], [3, 2], [0, 1]]


def test_the_example_of_the_places(pool):
    ids = [[[0, 3], [2, 3], [3, 0], [1, 1]], [[2, 3], [0, 1]]]
    _, results = run_example(pool, ids)
    (found, _), (other, _) = results
    assert found["dst_row"].tolist() == [[0, 3], [1, 4], [5, 1], [3, 4]]
    assert found["own_order"][:4, 1].tolist() == [0, 2, 3, 3]
    assert found["num_to_push"][1].sum() == 3
    assert other["copies"][:4].tolist() == [[-1, 2**32 - 1]] * 2 + [[4, 1], [-1, 2**32 - 1]]


def test_the_example_of_the_return_metadata(pool):
    _, results = run_example(pool, [FOUR_TOKENS, []])
    assert [found["expert_offsets"].tolist() for found, _ in results] == [[0, 3, 4], [0, 2, 4]]
    metadata = [told[0][0] for _, told in results]
    assert metadata[0][:3].tolist() == [[0, -1], [1, -1], [2, 3]]
    assert metadata[1][:3].tolist() == [[2, -1], [0, -1], [3, 1]]
