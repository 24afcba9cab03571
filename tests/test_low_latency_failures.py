"""Ranks that stop calling in low-latency calls, with and without a mask, and bad ids."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

import cases
import low_latency_cases as low_latency
import pytest
import torch
from low_latency_cases import (
    EXPERTS,
    HIDDEN,
    TOPK,
    combine,
    dispatch,
    make_inputs,
    round_trip,
    to_cpu,
    to_device,
)

from moe_engine import BackendError, DtypeError, PeerTimeout, RoutingError, ShapeError
from moe_engine.emulation import PerRank

MAX_TOKENS = 3
SHAPE = MAX_TOKENS, EXPERTS
REST = (*SHAPE, "bf16")


def new_buffer(group, **more):
    return low_latency.make_buffer(group, MAX_TOKENS, HIDDEN, EXPERTS, **more)


def used_buffer(group, args, **more):
    """(Buffer, deadline in seconds) after a round trip."""

    def use(buffer):
        round_trip(buffer, *args, *REST)
        buffer.check()

    return cases.used_buffer(group, partial(new_buffer, group, **more), use)[:2]


def inputs_of(num_ranks):
    """Every token goes to every rank, so that all need the same and wait equally long for it."""
    x, _, weights = make_inputs(num_ranks, [2, 1, 1], HIDDEN, EXPERTS, TOPK, "uniform")
    num_local = EXPERTS // num_ranks
    first_ids = torch.arange(TOPK) % num_ranks * num_local
    return (
        x,
        [
            (torch.arange(len(part))[:, None] + rank) % num_local + first_ids
            for rank, part in enumerate(x)
        ],
        weights,
    )


def masked_ranks(buffer):
    found = torch.full((buffer.group_size,), 7, dtype=torch.int32, device=buffer.device)
    buffer.low_latency_query_mask_buffer(found)
    return found.tolist()


# --- Ranks that fall silent ------------------------------------------------------------------


def lose_rank_1(group, step, killed, x, topk_idx, topk_weights):
    """Rank 1 stops before `step` and calls no more: (result, mask, time in deadlines) of three
    round trips of each other rank."""
    args = to_device(x, topk_idx, topk_weights)
    buffer, timeout_s = used_buffer(group, args, enable_shrink=True)
    found = []
    if group.rank() == 1:
        if step == "combine":
            dispatch(buffer, *args[:2], *REST)
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        for _ in range(3):
            start = time.monotonic()
            result = to_cpu(round_trip(buffer, *args, *REST))
            buffer.check()
            deadlines = (time.monotonic() - start) / timeout_s
            found.append((result, masked_ranks(buffer), deadlines))
    if not killed:
        torch.distributed.barrier(group)
        buffer.destroy()
    return found


def check_the_others(results, inputs, step):
    for call in range(3):
        found = [None if rank == 1 else have[call] for rank, have in enumerate(results)]
        for _, mask, deadlines in filter(None, found):
            assert mask == [0, 1, 0]
            assert call > 0 or deadlines >= 1
        sent_rows = call == 0 and step != "dispatch"
        masked = [] if sent_rows else [1]
        outputs = [have and have[0] for have in found]
        low_latency.check(outputs, *inputs, *REST, gone=[1], gone_at_dispatch=masked)
    for rank in (0, 2):  # the quicker one, as this machine may be busy
        assert min(deadlines for _, _, deadlines in results[rank][1:]) < 1


@pytest.mark.slow
@pytest.mark.parametrize("step", ["dispatch", "combine"])
def test_the_others_go_on_without_a_silent_rank(pool, step):
    inputs = inputs_of(3)
    results = pool.run(lose_rank_1, step, False, *map(PerRank, inputs), num_ranks=3)
    check_the_others(results, inputs, step)


def test_the_others_go_on_without_a_killed_rank(pool):
    if pool.device == "cuda":
        pytest.skip("a killed process takes its part of the NCCL group along")
    inputs, before = inputs_of(3), cases.shared_files()
    results = pool.run(
        lose_rank_1, "dispatch", True, *map(PerRank, inputs), num_ranks=3, expect_death={1}
    )
    check_the_others(results, inputs, "dispatch")
    assert cases.shared_files() <= before


def stay_away(group, step, x, topk_idx, topk_weights):
    """(peer, phase) of the PeerTimeout where rank 0 stops before `step`, and that it is lasting."""
    args = to_device(x, topk_idx, topk_weights)
    buffer, _ = used_buffer(group, args)
    seen = None
    try:
        if group.rank():
            round_trip(buffer, *args, *REST)
        elif step == "combine":
            dispatch(buffer, *args[:2], *REST)
        buffer.check()
    except PeerTimeout as error:
        seen = error.peer, error.phase
        with pytest.raises(PeerTimeout):
            dispatch(buffer, *args[:2], *REST)
    torch.distributed.barrier(group)
    buffer.destroy()
    return seen


@pytest.mark.parametrize("step", cases.slow_unless([("dispatch",)], ["dispatch", "combine"]))
def test_without_a_mask_a_silent_rank_is_named(pool, step):
    results = pool.run(stay_away, step, *map(PerRank, inputs_of(2)), num_ranks=2)
    phases = {"dispatch": ["counts"], "combine": ["metadata", "returned rows"]}
    assert results[0] is None
    for peer, phase in results[1:]:
        assert peer == 0
        assert phase in phases[step]


# --- The mask --------------------------------------------------------------------------------


def mask_by_hand(group, x, topk_idx, topk_weights):
    """Results while ranks 0 and 1, then rank 2, leave each other out, and of all ranks again."""
    args = to_device(x, topk_idx, topk_weights)
    buffer = new_buffer(group, enable_shrink=True)
    results = [round_trip(buffer, *args, *REST)]
    assert masked_ranks(buffer) == [0, 0, 0]
    for others in ([0, 1], [2]):
        strangers = set(range(3)) - set(others) if group.rank() in others else set(others)
        for rank in strangers:
            buffer.low_latency_update_mask_buffer(rank, True)
        assert masked_ranks(buffer) == [int(rank in strangers) for rank in range(3)]
        results += [round_trip(buffer, *args, *REST), round_trip(buffer, *args, *REST)]
        torch.distributed.barrier(group)
        if others == [2]:
            buffer.low_latency_clean_mask_buffer()
        else:
            for rank in strangers:
                buffer.low_latency_update_mask_buffer(rank)
        assert masked_ranks(buffer) == [0, 0, 0]
        torch.distributed.barrier(group)
        results += [round_trip(buffer, *args, *REST) for _ in range(2)]
    buffer.check()
    torch.distributed.barrier(group)
    buffer.destroy()
    return [to_cpu(found) for found in results]


def test_ranks_are_masked_and_come_back(pool):
    inputs = inputs_of(3)
    results = pool.run(mask_by_hand, *map(PerRank, inputs), num_ranks=3)
    for call in range(9):
        found = [have[call] for have in results]
        if call in (1, 2, 5, 6):
            low_latency.check([*found[:2], None], *inputs, *REST, gone=[2])
            low_latency.check([None, None, found[2]], *inputs, *REST, gone=[0, 1])
        else:
            low_latency.check(found, *inputs, *REST)


def mask_without_shrink(group):
    buffer = new_buffer(group)
    found = torch.zeros(1, dtype=torch.int32, device=buffer.device)
    for call in (
        lambda: buffer.low_latency_update_mask_buffer(0, True),
        lambda: buffer.low_latency_query_mask_buffer(found),
        buffer.low_latency_clean_mask_buffer,
    ):
        with pytest.raises(BackendError, match="enable_shrink"):
            call()
    buffer.destroy()
    buffer = new_buffer(group, enable_shrink=True)
    for rank in (1, -1):
        with pytest.raises(ShapeError, match="rank"):
            buffer.low_latency_update_mask_buffer(rank, True)
    with pytest.raises(ShapeError, match="mask"):
        buffer.low_latency_query_mask_buffer(torch.zeros_like(found.expand(2)))
    with pytest.raises(DtypeError, match="mask"):
        buffer.low_latency_query_mask_buffer(found.long())
    buffer.destroy()


def test_a_mask_needs_enable_shrink(pool):
    pool.run(mask_without_shrink, num_ranks=1)


# --- Calls that do not match -----------------------------------------------------------------

SIZES = {"hidden": HIDDEN, "max_tokens": MAX_TOKENS, "num_experts": EXPERTS, "num_topk": TOPK,
         "form": "bf16"}  # fmt: skip


def call_with(group, sizes):
    """The error of a rank whose call has other sizes than that of the other rank."""
    x, _ = cases.tokens(2, sizes["hidden"], sizes["num_topk"], torch.bfloat16, 0)
    idx = cases.route("uniform", 2, sizes["num_experts"], sizes["num_topk"], 0)
    x, idx = to_device(x, idx)
    buffer = low_latency.make_buffer(group, 16, HIDDEN, EXPERTS)
    told = None
    try:
        dispatch(buffer, x, idx, sizes["max_tokens"], sizes["num_experts"], sizes["form"])
        buffer.check()
    except (PeerTimeout, ShapeError) as error:
        told = type(error), str(error)
    torch.distributed.barrier(group)
    buffer.destroy()
    return told


@pytest.mark.parametrize(
    "other", [{"hidden": 256}, {"max_tokens": 16}, {"num_topk": 2}, {"form": "fp8"}], ids=str
)
def test_ranks_that_disagree_are_told(pool, other):
    for kind, text in pool.run(call_with, PerRank([SIZES, SIZES | other]), num_ranks=2):
        assert kind is ShapeError
        assert "different shapes" in text


def test_a_rank_with_more_experts_is_told_by_the_other(pool):
    """It waits for the counts of experts that the other does not know of, which says so."""
    if pool.device == "cuda":
        pytest.skip("on a GPU the other rank says so at its next call")
    sizes = PerRank([SIZES, SIZES | {"num_experts": EXPERTS // 2}])
    (more, text), (fewer, other_text) = pool.run(call_with, sizes, num_ranks=2)
    assert (more, fewer) == (ShapeError, ShapeError)
    assert f"experts {EXPERTS // 2} on rank 1 and {EXPERTS} on rank 0" in other_text
    assert text.startswith("rank 1 abandoned call 1 in phase 'fields'") and other_text in text


# --- Bad ids ---------------------------------------------------------------------------------


def bad_ids(group, topk_idx):
    """Rank 0's bad ids: both ranks finish the call, and rank 0 raises at the next or at check()."""
    x, weights = cases.tokens(3, HIDDEN, 2, torch.bfloat16, 0)
    x, topk_idx, weights = to_device(x, topk_idx, weights)
    buffer = new_buffer(group)
    found, texts = [], []
    for when in ("check", "next call"):
        recv_x, counts, handle = dispatch(buffer, x, topk_idx, *REST)
        if x.is_cuda:
            torch.cuda.synchronize()  # or the next call might not know yet
        y, out = low_latency.run_experts(recv_x, group.rank()), None
        try:
            if when == "check":
                buffer.check()
            out = combine(buffer, y, topk_idx, weights, handle)
        except RoutingError as error:
            texts.append(str(error))
            if when == "next call":
                out, event, hook = error.result  # the call was made
                low_latency.finish(event, hook)
        if out is None:
            out = combine(buffer, y, topk_idx, weights, handle)
        found.append(to_cpu(low_latency.result(recv_x, counts, handle, y, out)))
        torch.distributed.barrier(group)
    buffer.destroy()
    return found, texts


def test_bad_ids_count_as_not_routed_and_are_reported(pool):
    good = torch.tensor([[0, 11], [-1, -1], [2, -1]])
    bad = torch.tensor([[0, 11], [2**32 + 2, EXPERTS], [2, -7]])
    (first, texts), (second, none) = pool.run(bad_ids, PerRank([bad, good]), num_ranks=2)
    x, weights = cases.tokens(3, HIDDEN, 2, torch.bfloat16, 0)
    for number in range(2):
        low_latency.check(
            [first[number], second[number]], [x, x], [good, good], [weights] * 2, *REST
        )
    assert none == []
    assert len(texts) == 2
    assert all("3 expert ids" in text and "rank 0" in text for text in texts)


def write_over_the_rows(group, topk_idx):
    """A combine by a handle in which a caller has written over what returns."""
    x, weights = cases.tokens(3, HIDDEN, 2, torch.bfloat16, 0)
    x, topk_idx, weights = to_device(x, topk_idx, weights)
    buffer = new_buffer(group)
    for number in (2**31 - 1, -(2**31)):
        recv_x, _, handle = dispatch(buffer, x, topk_idx, *REST)
        y = low_latency.run_experts(recv_x, group.rank())
        handle.returns[:, :, 1:] = number
        handle.returns[:, :, 0] *= 1000  # how many rows of each token
        combine(buffer, y, topk_idx, weights, handle)
    buffer.check()
    torch.distributed.barrier(group)
    buffer.destroy()


def test_rows_beyond_those_that_came_lead_to_no_memory(pool):
    idx = torch.tensor([[0, 1], [2, EXPERTS - 1], [2, 0]])
    pool.run(write_over_the_rows, idx, num_ranks=2)
