"""Ranks of other nodes: the transport verbs on an emulated network that is late and out of order.

Each fault that a kernel may have is planted once, and seen by its results; its twin is right."""

import time

import cases
import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from network_cases import LONG_S, Place, fence_once, send_many_words, send_once, wait_once
from triton.runtime.errors import InterpreterError

from moe_engine.device import lang, network
from moe_engine.device.context import PHASE_ROWS, ContextField, Report
from moe_engine.errors import BackendError
from moe_engine.launch import launch
from moe_engine.symm.nic_process import CAPACITY

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of emulated ranks")

NUM = tl.constexpr(12)  # messages between two ranks
SIZE = tl.constexpr(2600)  # bytes of a message: two whole pieces and a part of one
STRIDE = tl.constexpr(2624)
# A block: what is sent [R, NUM, STRIDE], what comes [R, NUM, STRIDE], flags int64 [R, NUM].


def block_bytes(num_ranks):
    return num_ranks * NUM.value * (2 * STRIDE.value + 8)


def part(place, index, num_ranks):
    """The messages [R, NUM, SIZE] of a block: those that are sent for 0, those that come for 1."""
    size = num_ranks * NUM.value * STRIDE.value
    messages = place.block.local[index * size : (index + 1) * size]
    return messages.view(num_ranks, NUM.value, STRIDE.value)[:, :, : SIZE.value]


def message(source, rank, epoch):
    """What a rank sends to another in a call, uint8 [NUM, SIZE]; no byte is 0."""
    generator = torch.Generator().manual_seed(1000 * source + 100 * rank + epoch)
    shape = NUM.value, SIZE.value
    return torch.randint(1, 256, shape, generator=generator, dtype=torch.uint8)


# --- Sends arrive ----------------------------------------------------------------------------


@triton.jit
def sent_to(rank, index, context):
    """Address of a message to a rank."""
    return lang.own_block(context) + (rank * NUM + index) * STRIDE


@triton.jit
def come_from(rank, index, num_ranks, context):
    """Address of a message from a rank."""
    return sent_to(num_ranks + rank, index, context)


@triton.jit
def flag_of(rank, index, num_ranks, context):
    """Address of the flag of a message from a rank."""
    return sent_to(2 * num_ranks, 0, context) + (rank * NUM + index) * 8


@triton.jit
def wait_for(rank, first, count: tl.constexpr, epoch, num_ranks, context):
    """Wait for the flags of `count` messages from a rank."""
    i = tl.arange(0, 16)
    flags = flag_of(rank, first, num_ranks, context) + i * 8
    return lang.wait(flags, i < count, epoch, i * 0 + rank, context, PHASE_ROWS)


@triton.jit
def copy_from(rank, out, num_ranks, context):
    """Copy the messages from a rank to `out` [R, NUM, SIZE], as they are now."""
    for index in range(0, NUM):
        i = tl.arange(0, 4096)
        came = lang.as_pointer(come_from(rank, index, num_ranks, context), tl.uint8) + i
        tl.store(out + (rank * NUM + index) * SIZE + i, tl.load(came, mask=i < SIZE), i < SIZE)


@triton.jit
def send_all(context, out, epoch, num_ranks, PER_NODE: tl.constexpr):
    me = tl.load(context + ContextField.RANK.value)
    for index in range(0, NUM):
        for rank in range(0, num_ranks):
            if rank // PER_NODE != me // PER_NODE:
                to = come_from(me, index, num_ranks, context)
                flag = flag_of(me, index, num_ranks, context)
                network.send(to, sent_to(rank, index, context), SIZE, flag, epoch, rank, context)
    for rank in range(0, num_ranks):
        if rank // PER_NODE != me // PER_NODE:
            token = wait_for(rank, 0, NUM, epoch, num_ranks, context)
            if token != 0:
                copy_from(rank, out, num_ranks, context)


def make_calls(group, per_node, seeds, stall_s=0):
    """For each seed: three calls, each with other messages. Returns the number of wrong messages,
    and which ranks are not mapped."""
    num_ranks, me, wrong = group.size(), group.rank(), []
    far = [rank for rank in range(num_ranks) if rank // per_node != me // per_node]
    for seed in seeds:
        place = Place(group, block_bytes(num_ranks), per_node, NIC_SEED=seed, NIC_STALL_S=stall_s)
        unmapped = place.block.peer_addresses.eq(0).nonzero().flatten().tolist()
        for epoch in (1, 2, 3):
            for rank in far:
                part(place, 0, num_ranks)[rank] = message(me, rank, epoch)
            out = torch.zeros(num_ranks, NUM.value, SIZE.value, dtype=torch.uint8)
            launch(send_all, (1,), place.context, out, epoch, num_ranks, PER_NODE=per_node)
            same = [out[rank].eq(message(rank, me, epoch)).all(1) for rank in far]
            wrong.append(int((~torch.stack(same)).sum()))
            dist.barrier(group)  # all have got what they were sent: sources may be reused
        place.block.free()
    return wrong, unmapped == far


@pytest.mark.parametrize(
    ("num_nodes", "per_node", "seeds"),
    [
        *[(2, 2, [0, 1, 2]), (4, 1, [3]), (3, 2, [4])],
        *cases.slow_unless([], [2, 3], [2], [range(20)]),
        *cases.slow_unless([], [4], [1], [range(20)]),
    ],
)
def test_what_is_sent_arrives_before_its_flag(ranks_of_nodes, num_nodes, per_node, seeds):
    results = ranks_of_nodes.run(make_calls, per_node, seeds, num_ranks=num_nodes * per_node)
    assert results == [([0] * 3 * len(seeds), True)] * num_nodes * per_node


def test_a_stall_shorter_than_the_deadline_changes_nothing(ranks_of_nodes):
    start = time.monotonic()
    results = ranks_of_nodes.run(make_calls, 2, [0], 0.5, num_ranks=4)
    assert results == [([0] * 3, True)] * 4
    assert time.monotonic() - start > 0.5


# --- Order: a fault and its twin -------------------------------------------------------------


@triton.jit
def send_one(context, out, peer, num_ranks, HOW: tl.constexpr):
    """Send all messages to a peer, and read those from it once the signal of HOW has come."""
    me = tl.load(context + ContextField.RANK.value)
    signal = flag_of(me, 0, num_ranks, context)
    if HOW == "the signal first":
        network.send_word(signal, 1, peer, context)
    for index in range(0, NUM):
        to, source = come_from(me, index, num_ranks, context), sent_to(peer, index, context)
        if HOW in ("flags", "the last flag"):
            flag = flag_of(me, index, num_ranks, context)
            network.send(to, source, SIZE, flag, 1, peer, context)
        else:
            network.send_bytes(to, source, SIZE, peer, context)
    if HOW == "fence":
        network.fence(peer, context)
    if HOW == "quiet":
        network.quiet(context)
    if HOW in ("fence", "quiet", "no fence"):
        network.send_word(signal, 1, peer, context)
    if HOW == "flags":
        token = wait_for(peer, 0, NUM, 1, num_ranks, context)
    elif HOW == "the last flag":
        token = wait_for(peer, NUM - 1, 1, 1, num_ranks, context)
    else:
        token = wait_for(peer, 0, 1, 1, num_ranks, context)
    if token != 0:
        copy_from(peer, out, num_ranks, context)


def send_how(group, how):
    """How many messages were not there when the signal came."""
    num_ranks, me = group.size(), group.rank()
    peer = (me + 2) % num_ranks
    place = Place(group, block_bytes(num_ranks), NIC_SEED=7, NIC_HOLD_S=0.4)
    part(place, 0, num_ranks)[peer] = message(me, peer, 0)
    out = torch.zeros(num_ranks, NUM.value, SIZE.value, dtype=torch.uint8)
    dist.barrier(group)
    launch(send_one, (1,), place.context, out, peer, num_ranks, HOW=how)
    dist.barrier(group)
    place.block.free()
    return int(out[peer].ne(message(peer, me, 0)).any(1).sum())


@pytest.mark.parametrize("how", ["flags", "fence", "quiet"])
def test_a_signal_that_is_ordered_comes_after_the_data(ranks_of_nodes, how):
    assert ranks_of_nodes.run(send_how, how, num_ranks=4) == [0] * 4


@pytest.mark.parametrize("how", ["no fence", "the signal first", "the last flag"])
def test_a_signal_without_order_is_seen_to_come_too_early(ranks_of_nodes, how):
    assert sum(ranks_of_nodes.run(send_how, how, num_ranks=4)) > 0


@triton.jit
def reuse_staging(context, peer, num_ranks, WAITS: tl.constexpr):
    """Send one message after the other from the same place: message n is all n + 1."""
    me = tl.load(context + ContextField.RANK.value)
    i = tl.arange(0, 4096)
    staging = sent_to(peer, 0, context)
    token = 1
    for index in range(0, NUM):
        pointers = lang.as_pointer(staging, tl.uint8) + i
        tl.store(pointers, tl.zeros_like(i).to(tl.uint8) + (index + 1), i < SIZE)
        flag = flag_of(me, index, num_ranks, context)
        to = come_from(me, index, num_ranks, context)
        network.send(to, staging, SIZE, flag, 1, peer, context)
        if WAITS:
            # The peer has it all, so this rank's network has read it.
            token = wait_for(peer, index, 1, 1, num_ranks, context)
            done = flag_of(num_ranks - 1, me, num_ranks, context)
            network.send_word(done, index + 1, peer, context)
            if token != 0:
                token = wait_for(num_ranks - 1, peer, 1, index + 1, num_ranks, context)
    if token != 0:
        wait_for(peer, 0, NUM, 1, num_ranks, context)


def send_from_one_place(group, waits):
    """The bytes of the messages that came, uint8 [NUM], where all bytes of each are the same."""
    num_ranks, me = group.size(), group.rank()
    place = Place(group, block_bytes(num_ranks + 1), 1, NIC_SEED=3, NIC_HOLD_S=0.1)
    peer = 1 - me
    launch(reuse_staging, (1,), place.context, peer, num_ranks + 1, WAITS=waits)
    came = part(place, 1, num_ranks + 1)[peer].clone()
    dist.barrier(group)
    place.block.free()
    return came.amin(1).tolist(), came.amax(1).tolist()


def test_staging_may_be_reused_once_the_destination_has_read_it(ranks_of_nodes):
    messages = list(range(1, NUM.value + 1))
    assert ranks_of_nodes.run(send_from_one_place, True, num_ranks=2) == [(messages, messages)] * 2


def test_staging_that_is_reused_early_is_seen(ranks_of_nodes):
    messages = list(range(1, NUM.value + 1))
    results = ranks_of_nodes.run(send_from_one_place, False, num_ranks=2)
    assert any(highest != messages for _, highest in results)


# --- Posts -----------------------------------------------------------------------------------


def test_a_full_queue_makes_the_poster_wait(ranks_of_nodes):
    count = 2 * CAPACITY
    for came, error, seconds in ranks_of_nodes.run(send_many_words, count, 0.3, 60.0, num_ranks=2):
        assert not error and seconds > 0.3
        assert came == list(range(1, count + 1))


@pytest.mark.parametrize("count", [8, 2 * CAPACITY])
def test_a_network_that_is_stuck_ends_the_wait_at_its_deadline(ranks_of_nodes, count):
    for came, error, seconds in ranks_of_nodes.run(send_many_words, count, 600.0, 0.3, num_ranks=2):
        assert "the emulated network has delivered" in error and "within 0.3 s" in error
        assert not any(came) and 0.3 <= seconds < LONG_S


def send_wrongly(group):
    """The errors of sends that are wrong in one argument each, by its name."""
    place, errors = Place(group, 4096), {}
    far = (group.rank() + 2) % 4
    own = place.block.local.data_ptr()
    right = {"to": own, "source": own + 1024, "num_bytes": 64, "flag": own + 2048, "rank": far}
    wrong = {
        "a near rank": {"rank": group.rank() ^ 1},
        "itself": {"rank": group.rank()},
        "no rank": {"rank": 4},
        "to": {"to": own + 4096 - 32},
        "source": {"source": place.context.data_ptr()},
        "no bytes": {"num_bytes": 0},
        "flag": {"flag": own + 4096},
        "part of a flag": {"flag": own + 2052},
    }
    for name, change in wrong.items():
        with pytest.raises(BackendError) as caught:
            launch(send_once, (1,), place.context, *(right | change).values())
        errors[name] = str(caught.value)
    with pytest.raises(BackendError) as caught:
        launch(fence_once, (1,), place.context, group.rank() ^ 1)
    errors["fence"] = str(caught.value)
    launch(send_once, (1,), place.context, *right.values())
    launch(wait_once, (1,), place.context, own + 2048, far)
    flag = place.block.local[2048:2056].tolist()
    dist.barrier(group)
    place.block.free()
    with pytest.raises(BackendError) as caught:
        launch(send_once, (1,), place.context, *right.values())
    errors["freed"] = str(caught.value)
    return errors, flag


def test_a_wrong_rank_or_address_is_an_error_of_the_poster(ranks_of_nodes):
    for rank, (errors, flag) in enumerate(ranks_of_nodes.run(send_wrongly, num_ranks=4)):
        far = [2, 3] if rank < 2 else [0, 1]
        for name, wrong in (("a near rank", rank ^ 1), ("itself", rank), ("no rank", 4)):
            assert f"rank {wrong} is not of another node; those are {far}" in errors[name]
        assert f"fence(rank={rank ^ 1}): rank {rank ^ 1} is not" in errors["fence"]
        for name in ("to", "source", "the flag"):
            assert f"{name} lies outside the symmetric blocks" in errors[name.split()[-1]]
        assert "num_bytes must be positive" in errors["no bytes"]
        assert "multiple of 8" in errors["part of a flag"]
        assert "no block on several nodes that is allocated now" in errors["freed"]
        assert flag == [1] + [0] * 7  # what is right after that still works


def send_within_a_node(group):
    """The text of the error of a rank that has no ranks of other nodes."""
    place = Place(group, 4096)
    assert place.block.network == 0
    with pytest.raises(InterpreterError) as caught:
        launch(fence_once, (1,), place.context, 1 - group.rank())
    return str(caught.value)


def test_without_other_nodes_there_is_no_network(ranks_of_nodes):
    for text in ranks_of_nodes.run(send_within_a_node, num_ranks=2):
        assert "fence: this rank has no ranks of other nodes" in text


def send_to_a_wrong_node(group):
    """Rank 0 sends to rank 2 what rank 1 waits for; each is a node."""
    place = Place(group, 4096, 1, timeout_s=0.3)
    own = place.block.local.data_ptr()
    dist.barrier(group)
    if group.rank() == 0:
        launch(send_once, (1,), place.context, own, own + 1024, 64, own + 2048, 2)
    if group.rank() == 1:
        launch(wait_once, (1,), place.context, own + 2048, 0)
    dist.barrier(group)
    place.block.free()
    return [place.report[field].item() for field in (Report.VALID, Report.PEER)]


def test_a_message_to_a_wrong_node_is_missed(ranks_of_nodes):
    _, missed, _ = ranks_of_nodes.run(send_to_a_wrong_node, num_ranks=3)
    assert missed == [1, 0]


@triton.jit
def store_directly(context, rank):
    to = lang.symm_at(lang.own_block(context) + 64, rank, context)
    tl.store(lang.as_pointer(to, tl.int64), 1)


def store_to(group, rank):
    """Rank 0 stores to a rank as if it were mapped."""
    place = Place(group, 4096)
    if group.rank() == 0:
        launch(store_directly, (1,), place.context, rank)
    dist.barrier(group) if rank == 1 else None
    return place.block.local[64].item()


def test_a_store_to_another_node_ends_the_process(ranks_of_nodes):
    assert ranks_of_nodes.run(store_to, 1, num_ranks=4) == [0, 1, 0, 0]
    assert ranks_of_nodes.run(store_to, 2, num_ranks=4, expect_death={0}) == [None, 0, 0, 0]
