"""ElasticBuffer: what ranks say of a peer that does not come, that calls otherwise, or of rows for
which there is no room."""

from __future__ import annotations

import cases
import elastic_cases
import pytest
import torch
from elastic_cases import EXPERTS, MOST_TOKENS, elastic

import moe_engine
from moe_engine import ElasticBuffer, PeerTimeout


def stay_away(group, verb, x, idx, w):
    """What rank 1 says of a call by expert, made once before, that rank 0 does not make."""
    x, idx, w = (part.to(cases.device()) for part in (x, idx, w))
    # On GPUs ranks also wait for one another while they compile.
    buffer = elastic(group, num_gpu_timeout_secs=10 if x.is_cuda else 1)
    how = dict(do_expand=True, do_cpu_sync=False)
    rows, _, _, handle, _ = buffer.dispatch(x, idx, w, num_experts=EXPERTS, **how)
    calls = dict(
        dispatch=lambda: buffer.dispatch(x, idx, w, num_experts=EXPERTS, **how),
        dispatch_cached=lambda: buffer.dispatch(x, handle=handle, do_expand=True),
        combine=lambda: buffer.combine(rows, handle),
    )

    def call():
        calls[verb]()
        if x.is_cuda:
            torch.cuda.synchronize()
        buffer.check()

    call()
    torch.distributed.barrier(group)
    seen = None
    if torch.distributed.get_rank(group) == 1:
        try:
            call()
        except PeerTimeout as error:
            seen = error.peer
    torch.distributed.barrier(group)
    buffer.destroy()
    return seen


@pytest.mark.parametrize("verb", ["dispatch", "dispatch_cached", "combine"])
def test_a_rank_that_stays_away_is_named(pool, verb):
    results, _ = elastic_cases.run_client(pool, stay_away, verb)
    assert results == [None, 0]


def grow_for_sums(group, x, idx, w):
    """A dispatch for which memory grows, whose sums return in fp32: these take twice the bytes."""
    x, idx, w = (part.to(cases.device()) for part in (x, idx, w))
    buffer = ElasticBuffer(group, num_bytes=1 << 20, allow_multiple_reduction=False)
    how = dict(num_experts=EXPERTS, num_max_tokens_per_rank=MOST_TOKENS)
    rows, _, _, handle, _ = buffer.dispatch(x.repeat(1, 300), idx, w, do_expand=True, **how)
    out, _, _ = buffer.combine(rows, handle)
    buffer.check()
    buffer.destroy()
    return out.shape == (len(x), 300 * x.shape[1])


def test_memory_grows_for_sums_too(pool):
    sizes = dict(num_ranks=2, num_tokens=(20, 20))
    results, _ = elastic_cases.run_client(pool, grow_for_sums, kind="uniform", **sizes)
    assert all(results)


def wider_rows(group, x, idx, w):
    """A cached dispatch of rows that are wider than those for which memory grew: there is no room
    for all of them, and some get no address."""
    x, idx, w = (part.to(cases.device()) for part in (x, idx, w))
    buffer = ElasticBuffer(group, num_bytes=1 << 20)
    how = dict(num_experts=EXPERTS, num_max_tokens_per_rank=MOST_TOKENS, do_cpu_sync=False)
    *_, handle, _ = buffer.dispatch(x, idx, w, do_expand=True, **how)
    *_, small, _ = buffer.dispatch(x[:2], idx[:2], w[:2], do_expand=True, **how)
    wide = x.repeat(1, 200)
    with cases.filled_memory():
        buffer.dispatch(wide[:2], handle=small, do_expand=True)
        buffer.check()
        torch.distributed.barrier(group)
        with pytest.raises(moe_engine.CapacityError):
            buffer.dispatch(wide, handle=handle, do_expand=True)
            buffer.check()
    torch.distributed.barrier(group)
    buffer.destroy()


def test_rows_without_room_are_not_read(pool):
    sizes = dict(num_ranks=2, num_tokens=(2, 20))
    elastic_cases.run_client(pool, wider_rows, kind="uniform", **sizes)


def differ(group, hows, x, idx, w):
    """What ranks say whose dispatches want rows in other forms."""
    x, idx, w = (part.to(cases.device()) for part in (x, idx, w))
    buffer = elastic(group, num_gpu_timeout_secs=10)
    how = dict(num_experts=EXPERTS) | hows[torch.distributed.get_rank(group)]
    with pytest.raises(moe_engine.ShapeError) as seen:
        buffer.dispatch(x, idx, w, **how)
        if x.is_cuda:
            torch.cuda.synchronize()
        buffer.check()
    torch.distributed.barrier(group)
    buffer.destroy()
    return str(seen.value)


@pytest.mark.parametrize(
    "hows",
    [
        [dict(do_expand=True, expert_alignment=2), dict(do_expand=False, expert_alignment=2)],
        [dict(do_expand=True, expert_alignment=2), dict(do_expand=True, expert_alignment=8)],
    ],
    ids=["form", "alignment"],
)
@pytest.mark.parametrize("do_cpu_sync", [True, False])
def test_ranks_that_want_rows_in_other_forms_are_told(pool, hows, do_cpu_sync):
    hows = [one | dict(do_cpu_sync=do_cpu_sync) for one in hows]
    results, _ = elastic_cases.run_client(pool, differ, hows)
    other = 8 if hows[1]["do_expand"] else 0
    by_rank = f"2 on rank 0 and {other} on rank 1", f"{other} on rank 1 and 2 on rank 0"
    for one in results:  # where one rank was first to tell the other, both have the same text
        assert any(f"alignment of rows by expert {seen}" in one for seen in by_rank)


def write_over_the_places(group, x, idx, w):
    """Calls with a handle whose places a caller has written over."""
    x, idx, w = (part.to(cases.device()) for part in (x, idx, w))
    buffer = elastic(group)
    rows, _, _, handle, _ = buffer.dispatch(x, idx, w, num_experts=EXPERTS, do_expand=True)
    sums = []
    for place in (2**31 - 1, -(2**31)):
        handle.recv_src_metadata[:, 2:] = place
        buffer.dispatch(x, handle=handle, do_expand=True)
        sums.append(buffer.combine(rows, handle)[0])
    buffer.check()
    buffer.destroy()
    return elastic_cases.to_cpu(tuple(sums))


def test_places_beyond_the_rows_lead_to_no_memory(pool):
    results, _ = elastic_cases.run_client(pool, write_over_the_places)
    assert all((out == 0).all() for sums in results for out in sums)
