"""Several nodes with ranks that are lost, or that make other calls; handles; memory used again."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

import cases
import pytest
import torch
import torch.distributed as dist
from dispatch_cases import make_inputs
from internode_cases import (
    Nodes,
    bring_too_many,
    check_too_many,
    dispatch,
    return_wider_rows,
    small_buffer,
)

from moe_engine import (
    CapacityError,
    Handle,
    MoeEngineError,
    OutOfStep,
    PeerTimeout,
    ShapeError,
    reference,
)
from moe_engine.combine import ReturnedRows
from moe_engine.combine import internode as combine_launches
from moe_engine.combine import internode_kernels as combine_kernels
from moe_engine.debug_checks import check_handle_values
from moe_engine.device.context import TOLD_BIT, ContextField
from moe_engine.device.internode import FAR, NEAR
from moe_engine.dispatch import Tokens
from moe_engine.dispatch import internode as dispatch_launches
from moe_engine.dispatch import internode_kernels as dispatch_kernels
from moe_engine.emulation import PerRank, RankPool
from moe_engine.engines.internode import InternodeHandle
from moe_engine.symm.slots import BARE_HEADER

FEW, LONE = Nodes(2, 2), Nodes(4, 1)
EXPERTS = 8


@pytest.fixture(scope="module")
def pool():
    """2 nodes of 2 ranks."""
    cases.skip_without_interpreter()
    with RankPool(4, nodes=2, timeout_s=120) as ranks:
        yield ranks


def inputs(num_tokens=(12, 5), hidden=16):
    """x, topk_idx and topk_weights of 4 ranks, as arguments of a run."""
    drawn = make_inputs(4, num_tokens, hidden, EXPERTS, 2, "uniform", "fp32")
    return [PerRank(part) for part in drawn]


def call_both(buffer, *tokens):
    """A dispatch and its combine: the handle."""
    got, *_, handle, _ = dispatch(buffer, *tokens, EXPERTS)
    buffer.combine(got, handle)
    buffer.check()
    return handle


def used_buffer(group, x, *tokens, **options):
    """(Buffer, its deadline in s, the handle of a dispatch in it), as of `cases.used_buffer`."""
    make = partial(small_buffer, group, x, EXPERTS, 2, **options)
    return cases.used_buffer(group, make, lambda one: call_both(one, x, *tokens))


def roomy_buffer(group, x, *tokens):
    """(Buffer, the handle of a dispatch in it), whose calls do not wait in vain."""
    buffer = small_buffer(group, x, EXPERTS, 2)
    handle = call_both(buffer, x, *tokens)
    buffer._engine.slots.calls.clear()  # the next calls run functions that a test may replace
    dist.barrier(group)
    return buffer, handle


# --- Lost ranks ------------------------------------------------------------------------------


def lose_a_rank(group, lost, before, *tokens):
    """((peer, forwarder), phase, time in deadlines) of what ranks see when `lost` makes no
    further call, or is killed before the launch named `before`."""
    buffer, timeout_s, _ = used_buffer(group, *tokens)
    if before is not None and group.rank() == lost:
        module = combine_launches if hasattr(combine_launches, before) else dispatch_launches
        assert hasattr(module, before)
        setattr(module, before, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    start, found = time.monotonic(), None
    if before is not None or group.rank() != lost:
        with pytest.raises(PeerTimeout) as caught:
            call_both(buffer, *tokens)
        error, seconds = caught.value, time.monotonic() - start
        found = (error.peer, error.forwarder), error.phase, seconds / timeout_s
        with pytest.raises(PeerTimeout):  # and again at every later call
            call_both(buffer, *tokens)
    if before is None:
        dist.barrier(group)
        buffer.destroy()
    return found


@pytest.mark.parametrize("lost", cases.slow_unless([(1,)], range(4)))
def test_a_rank_that_never_calls_is_named_on_every_node(pool, lost):
    found = FEW.run(pool, lose_a_rank, lost, None, *inputs())
    for rank in {0, 1, 2, 3} - {lost}:
        (peer, _), phase, deadlines = found[rank]
        assert (peer, phase) == (lost, "counts")
        assert 1 <= deadlines < 5


@pytest.mark.parametrize(
    ("before", "phase"),
    [
        pytest.param("send_rows", "rows", marks=pytest.mark.slow),
        ("forward", "rows"),
        pytest.param("return_and_sum", "counts", marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_ends_the_calls_of_all(pool, before, phase):
    """The ranks that it forwards to name it, as that or as the one that they wait for, and the
    others who no longer call."""
    found = FEW.run(pool, lose_a_rank, 1, before, *inputs(), expect_death={1})
    assert found[1] is None
    assert 1 in found[0][0]
    assert found[0][1] == phase
    for rank in (0, 2, 3):
        assert 1 <= found[rank][2] < 5


@pytest.mark.parametrize(
    ("rank", "node_ranks", "who"),
    [
        (0, 2, "Rank 3, rank 1 that forwards what it sends, or the network between them is"),
        (1, 2, "Rank 3 or the network to it is gone or stuck, or that rank issued its calls"),
        (2, 2, "Rank 3 is gone, stuck, or issued its calls"),
        (2, 1, "Rank 3 or the network to it is gone or stuck, or that rank issued its calls"),
    ],
)
def test_what_may_have_kept_a_rank_waiting(rank, node_ranks, who):
    assert who in str(PeerTimeout(rank, 3, "rows", 7, 1, 30.0, node_ranks))


def test_a_killed_rank_is_named_where_nobody_forwards(pool):
    """By the ranks that read its rows where they would have arrived."""
    found = LONE.run(pool, lose_a_rank, 1, "send_rows", *inputs((30,)), expect_death={1})
    for rank in (0, 2, 3):
        assert found[rank][:2] == ((1, rank), "rows")
        assert 1 <= found[rank][2] < 5


# --- Calls that do not match -----------------------------------------------------------------


def call_unlike(group, odd, change, fill, *tokens):
    """What each rank raises where rank `odd` makes another call, on memory filled with such
    bytes."""
    buffer, handle = roomy_buffer(group, *tokens)
    buffer._engine.slots.block.local[buffer._engine.slots.layout.slots :].fill_(fill)
    dist.barrier(group)
    x, idx, weights = tokens
    is_odd = group.rank() == odd
    found = None
    try:
        if change == "columns" and is_odd:
            x = x[:, :12].contiguous()
        if change == "top-k" and is_odd:
            idx, weights = idx[:, :1].contiguous(), weights[:, :1].contiguous()
        if change == "verb" and is_odd:
            buffer.dispatch(x, handle)
        else:
            dispatch(buffer, x, idx, weights, EXPERTS)
        buffer.check()
    except MoeEngineError as error:
        found = type(error), str(error)
    dist.barrier(group)
    buffer.destroy()
    return found


@pytest.mark.parametrize(
    ("change", "odd", "fill"),
    cases.slow_unless(
        [("columns", 3, 0x80), ("verb", 2, 0x80), ("verb", 1, 0x7F)],
        ["columns", "top-k", "verb"],
        [1, 2, 3],
        [0x80, 0x7F],
    ),
)
def test_a_call_that_differs_is_told_on_every_node(pool, change, odd, fill):
    """Also where a header of another call lets a rank read what it takes for large numbers."""
    kind = OutOfStep if change == "verb" else ShapeError
    text = {"columns": "bytes per token", "top-k": "top-k", "verb": "began cached_dispatch"}[change]
    for found in FEW.run(pool, call_unlike, odd, change, fill, *inputs()):
        assert found[0] is kind
        assert text in found[1]
        assert f"rank {odd}" in found[1]


def test_a_rank_of_too_many_tokens_ends_the_calls_of_all(pool):
    check_too_many(FEW.run(pool, bring_too_many, EXPERTS, *inputs((13,))))


def overflow(group, *tokens):
    """What each rank raises where rank 0 gets more rows than num_worst_tokens."""
    buffer, found = small_buffer(group, tokens[0], EXPERTS, 2), None
    call_both(buffer, *tokens)
    try:
        got, *_, handle, _ = dispatch(buffer, *tokens, EXPERTS, num_worst_tokens=40)
        buffer.combine(got, handle)
        buffer.check()
    except MoeEngineError as error:
        found = type(error), str(error)
    dist.barrier(group)
    buffer.destroy()
    return found


def test_more_rows_than_worst_tokens(pool):
    x, _, w = inputs((12,))
    idx = PerRank([torch.arange(2).expand(12, 2).contiguous()] * 4)  # all to rank 0
    found = FEW.run(pool, overflow, x, idx, w)
    assert [kind for kind, _ in found] == [CapacityError] * 4
    assert "rank 0 received more rows than num_worst_tokens" in found[0][1]
    assert all(found[0][1] in text for _, text in found)


# --- Memory used again -------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [FEW, Nodes(2, 1), LONE, Nodes(1, 2)], ids=str)
def test_wider_rows_than_there_is_room_for(pool, nodes):
    """Each rank gets all tokens of the one before it."""
    x, idx, weights = make_inputs(nodes.num_ranks, [40], 256, EXPERTS, 1, "uniform", "bf16")
    for rank, one in enumerate(idx):
        one.fill_((rank + 1) % nodes.num_ranks * (EXPERTS // nodes.num_ranks))
    found = nodes.run(pool, return_wider_rows, EXPERTS, *map(PerRank, (x, idx, weights)))
    assert found == [CapacityError] * nodes.num_ranks


def withhold_done(group, *tokens):
    """How many calls each rank makes where rank 3 never says that it is done, and what it then
    waits for."""
    buffer, _, _ = used_buffer(group, *tokens)
    if group.rank() == 3:
        for kernels in (dispatch_kernels, combine_kernels):
            kernels.release_rails = lambda epoch, context: None
    num_calls, error = 0, None
    try:
        *_, handle, _ = dispatch(buffer, *tokens, EXPERTS)
        for _ in range(8):
            num_calls += 1
            buffer.dispatch(tokens[0], handle)
    except PeerTimeout as raised:
        error = raised
    dist.barrier(group)
    buffer.destroy()
    return num_calls, None if error is None else (error.peer, error.phase)


@pytest.mark.parametrize("nodes", [FEW, LONE], ids=["2x2", "4x1"])
def test_a_sender_waits_until_its_rail_peer_is_done(pool, nodes):
    """A rank uses a slot again two calls later: not before its rail peer has said that it is done
    with the first."""
    found = nodes.run(pool, withhold_done, *inputs())
    pool.close()  # the rank goes on without `release_rails` otherwise
    waits = (1,) if nodes is FEW else (0, 1, 2)  # its rail peers
    assert (2, (3, "slot free")) in [found[rank] for rank in waits]
    assert {num_calls for num_calls, _ in found} == {2}


def watch_done(group, kernels, sender, *tokens):
    """(epochs up to which the rail peer was done, at each chunk that is sent to it late, the epoch
    of the call)."""
    buffer, handle = roomy_buffer(group, *tokens)
    slots = buffer._engine.slots
    epoch = int(slots.context.fields[ContextField.EPOCH]) + 1
    seen, send_chunk = [], kernels.send_chunk
    num_nodes, num_slots = slots.layout.num_nodes, slots.layout.num_slots
    flag = group.size() + epoch % num_slots * num_nodes + 1  # of node 1, which the sender is not of
    at = slots.layout.offsets()[ContextField.DONE] + 8 * flag

    def send_late(*args):
        time.sleep(0.15)
        seen.append(int(slots.block.local[at : at + 8].view(torch.int64)))
        send_chunk(*args)

    if group.rank() == sender:
        kernels.send_chunk = send_late
    rows = torch.zeros(len(handle.recv_src_idx), tokens[0].shape[1])
    try:
        if kernels is dispatch_kernels:
            buffer.dispatch(tokens[0], handle)
        else:
            buffer.combine(rows, handle)
        buffer.check()
    finally:
        kernels.send_chunk = send_chunk
    dist.barrier(group)
    buffer.destroy()
    return seen, epoch


@pytest.mark.parametrize("nodes", [FEW, Nodes(2, 1)], ids=["2x2", "2x1"])
@pytest.mark.parametrize("is_combine", [False, True], ids=["dispatch", "combine"])
def test_a_rank_is_done_when_its_last_program_has_read(pool, nodes, is_combine):
    """Rank 0 sends its chunks late, and has not heard that its rail peer is done with them."""
    x, idx, w = make_inputs(nodes.num_ranks, [40], 16, EXPERTS, 2, "uniform", "fp32")
    tokens = [PerRank(part) for part in (x, idx, w)]
    seen, epoch = nodes.run(pool, watch, is_combine, *tokens)[0]
    assert len(seen) >= 3
    assert max(seen) < epoch


def watch(group, is_combine, *tokens):
    return watch_done(group, combine_kernels if is_combine else dispatch_kernels, 0, *tokens)


# --- Handles -----------------------------------------------------------------------------------


def take_handle(group, *tokens):
    """The handle of a dispatch, as a plain tuple."""
    buffer = small_buffer(group, tokens[0], EXPERTS, 2)
    handle = call_both(buffer, *tokens)
    dist.barrier(group)
    buffer.destroy()
    return tuple(handle)


def test_the_handle_has_deep_eps_parts(pool):
    x, idx, w = make_inputs(4, [12, 5, 0], 16, EXPERTS, 2, "holes", "fp32")
    handles = FEW.run(pool, take_handle, *(PerRank(part) for part in (x, idx, w)))
    received = reference.dispatch(x, idx, w, EXPERTS)
    for rank, handle in enumerate(handles):
        assert len(handle) == 10
        assert all(isinstance(part, torch.Tensor) for part in handle)
        _, _, in_rank = reference.layout(idx[rank], EXPERTS, 4)
        assert torch.equal(handle[0], in_rank)
        from_ranks = torch.bincount(received[rank].source, minlength=4).cumsum(0).int()
        assert torch.equal(handle[-4], from_ranks)
        assert handle[-4].dtype == torch.int32
        assert torch.equal(handle[-3], received[rank].src_idx)


def use_other_handles(group, *tokens):
    """What is raised for handles of another make, of one node and of another Buffer."""
    buffer, handle = roomy_buffer(group, *tokens)
    other = small_buffer(group, tokens[0], EXPERTS, 2)
    theirs = call_both(other, *tokens)
    dist.barrier(group)
    other.destroy()
    x, num_rows = tokens[0], len(handle.recv_src_idx)
    epoch = buffer._engine.slots.context.fields[ContextField.EPOCH].clone()
    one_node = Handle(*[handle.rank_prefix_matrix] * len(Handle._fields))
    bad = {
        "not of several nodes": tuple(one_node),
        "cut off": tuple(handle)[:9],
        "of another type": handle._replace(row_idx=handle.row_idx.long()),
        "of another shape": handle._replace(send_head=handle.send_head[:, :1]),
        "not tensors": (None,) * 10,
        "no handle": "handle",
    }
    texts = {}
    for name, one in bad.items():
        for call in (
            lambda one=one: buffer.dispatch(x, one),
            lambda one=one: buffer.combine(torch.zeros(num_rows, x.shape[1]), one),
        ):
            with pytest.raises(MoeEngineError) as caught:
                call()
            texts[name] = str(caught.value)
    assert int(buffer._engine.slots.context.fields[ContextField.EPOCH]) == int(epoch)
    dist.barrier(group)
    with pytest.raises(MoeEngineError) as caught:
        buffer.dispatch(x, theirs)
        buffer.check()
    texts["of another Buffer"] = str(caught.value)
    dist.barrier(group)
    buffer.destroy()
    return texts


def test_handles_of_another_make_are_refused(pool):
    for texts in FEW.run(pool, use_other_handles, *inputs()):
        assert "handle has 6 items; it must be the 10 tensors" in texts["not of several nodes"]
        assert "handle has 9 items" in texts["cut off"]
        assert "handle.row_idx" in texts["of another type"]
        assert "handle.send_head" in texts["of another shape"]
        assert "handle.is_token_in_rank is a NoneType" in texts["not tensors"]
        assert "handle is a str" in texts["no handle"]
        assert "handle of call" in texts["of another Buffer"]


def raised(tensor, *at):
    """A copy of a tensor, one item of which is larger by one."""
    copy = tensor.clone()
    copy[at] += 1
    return copy


WRONG = {
    "rank_prefix_matrix": (0, 0),
    "sent_token_idx": (0, 0),
    "node_rows": (1, 0),
    "row_idx": (0, 0, 0),
    "send_head": (0, 0),
    "rank_head": (0, 0, 0),
}


@pytest.mark.parametrize("name", WRONG)
def test_debug_mode_finds_wrong_values(pool, name):
    """Rank 0's own row 0, in what it sends and forwards, is changed."""
    handle = handles(pool)[0]
    check_handle_values(handle, 0)
    part = getattr(handle, name)
    with pytest.raises(ShapeError, match=f"rank 0: handle.{name}"):
        check_handle_values(handle._replace(**{name: raised(part, *WRONG[name])}), 0)


def handles(pool):
    """Those of all ranks, of 12 tokens each for all ranks."""
    x, _, w = make_inputs(4, [12], 16, EXPERTS, 4, "uniform", "fp32")
    idx = torch.arange(0, EXPERTS, 2).expand(12, 4).contiguous()
    run = FEW.run(pool, take_handle, PerRank(x), idx, PerRank(w))
    return [InternodeHandle(*parts) for parts in run]


# --- Half of a call ------------------------------------------------------------------------------

MARK = 12345.678
"""A number that no other memory holds."""


def return_one_side(group, x, topk_idx, topk_weights):
    """Whether this rank's memory has rows of near sources after those of far ones were returned,
    and after theirs were."""
    buffer = small_buffer(group, x, EXPERTS, topk_idx.shape[1])
    rows, *_, handle, _ = dispatch(buffer, x, topk_idx, topk_weights, EXPERTS)
    slots, prefix = buffer._engine.slots, handle.rank_prefix_matrix
    num_near = slots.layout.ranks_per_node
    first = group.rank() // num_near * num_near
    begin = int(prefix[first - 1, group.rank()]) if first else 0
    marked = torch.ones_like(rows)
    marked[begin : int(prefix[first + num_near - 1, group.rank()])] = MARK
    returned = ReturnedRows(marked, None)
    combine_launches.open_combine(returned, handle.signature, slots)
    found = []
    for side in FAR.value, NEAR.value:
        combine_launches.return_to_rails(returned, prefix, BARE_HEADER, 2, slots, side)
        dist.barrier(group)
        memory = slots.block.local.view(torch.float32)
        found.append(bool((memory == torch.tensor(MARK)).any()))
        dist.barrier(group)  # no rank returns its other side before all have looked
    buffer.destroy()
    return found


@pytest.mark.parametrize("nodes", [FEW, LONE], ids=["2x2", "4x1"])
def test_a_side_returns_its_rows_alone(pool, nodes):
    parts = make_inputs(4, [12, 9, 7, 11], 16, EXPERTS, 4, "uniform", "fp32")
    assert nodes.run(pool, return_one_side, *map(PerRank, parts)) == [[False, True]] * 4


def exchange_when_told(group, x, topk_idx, topk_weights):
    """What the host would read of a dispatch on a rank whose calls another one has ended, as a GPU
    lets it go on."""
    buffer = small_buffer(group, x, EXPERTS, topk_idx.shape[1])
    engine = buffer._engine
    layout = engine.layout(topk_idx, EXPERTS)
    dist.barrier(group)
    engine.context.fields[ContextField.BROKEN] = 1 << TOLD_BIT
    with cases.filled_memory():
        tokens = Tokens(x, topk_idx, topk_weights)
        counts, _ = engine.call(type(engine)._exchange, tokens, layout, False, check=False)
    result = engine._received(counts).tolist(), engine.context.was_told
    dist.barrier(group)
    buffer.destroy()
    return result


@pytest.mark.parametrize("nodes", [FEW, Nodes(1, 4)])
def test_counts_are_0_where_a_call_was_ended_before(pool, nodes):
    parts = make_inputs(4, [12, 9, 7, 11], 16, EXPERTS, 4, "uniform", "fp32")
    assert nodes.run(pool, exchange_when_told, *map(PerRank, parts)) == [([0, 0, 0], True)] * 4
