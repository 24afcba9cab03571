"""Ranks of other nodes: the transport verbs on an emulated network that is late and out of order.

Each fault that a kernel may have is planted once, and seen by its results; its twin is right."""

import gc
import os
import signal
import time
from pathlib import Path

import cases
import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from moe_engine import symm
from moe_engine.device import lang, network
from moe_engine.device.context import BROKEN, PHASE_ROWS, TOLD_BIT, ContextField, Report
from moe_engine.emulation import PerRank, RankError, RankPool
from moe_engine.errors import BackendError, ShapeError
from moe_engine.launch import launch
from moe_engine.symm.device_context import DeviceContext
from moe_engine.symm.nic import Nic
from moe_engine.symm.nic_process import CAPACITY
from moe_engine.symm.nodes import Nodes, find_nodes, nodes_of
from moe_engine.symm.slots import SlotLayout

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of emulated ranks")

NUM = tl.constexpr(12)  # messages between two ranks
SIZE = tl.constexpr(2600)  # bytes of a message: two whole pieces and a part of one
STRIDE = tl.constexpr(2624)
# A block: what is sent [R, NUM, STRIDE], what comes [R, NUM, STRIDE], flags int64 [R, NUM].
LONG_S = 30.0


@pytest.fixture(scope="module")
def ranks():
    """Six ranks on three nodes; the first four are on two."""
    cases.skip_without_interpreter()
    with RankPool(6, nodes=3, timeout_s=120) as pool:
        yield pool


def block_bytes(num_ranks):
    return num_ranks * NUM.value * (2 * STRIDE.value + 8)


class Place:
    """A rank's block with a device context and its report, on nodes of `per_node` ranks."""

    def __init__(self, group, num_bytes, per_node=2, timeout_s=60.0, **settings):
        variables = {f"MOE_ENGINE_{name}": str(value) for name, value in settings.items()}
        with symm.environment(variables | {"MOE_ENGINE_NODE_SIZE": str(per_node)}):
            self.block = symm.allocate(group, num_bytes)
        self.report = torch.zeros(64, dtype=torch.int64)
        fields = [0] * ContextField.PEERS + self.block.peer_addresses.tolist()
        fields[ContextField.TIMEOUT_NS] = int(timeout_s * 1e9)
        fields[ContextField.REPORT] = self.report.data_ptr()
        fields[ContextField.RANK] = group.rank()
        fields[ContextField.NUM_RANKS] = group.size()
        fields[ContextField.NETWORK] = self.block.network
        self.context = torch.tensor(fields)

    def part(self, index, num_ranks):
        """Messages [R, NUM, SIZE], those that are sent for 0 and those that come for 1."""
        size = num_ranks * NUM.value * STRIDE.value
        part = self.block.local[index * size : (index + 1) * size]
        return part.view(num_ranks, NUM.value, STRIDE.value)[:, :, : SIZE.value]


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
                place.part(0, num_ranks)[rank] = message(me, rank, epoch)
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
def test_what_is_sent_arrives_before_its_flag(ranks, num_nodes, per_node, seeds):
    results = ranks.run(make_calls, per_node, seeds, num_ranks=num_nodes * per_node)
    assert results == [([0] * 3 * len(seeds), True)] * num_nodes * per_node


def test_a_stall_shorter_than_the_deadline_changes_nothing(ranks):
    start = time.monotonic()
    results = ranks.run(make_calls, 2, [0], 0.5, num_ranks=4)
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
    place.part(0, num_ranks)[peer] = message(me, peer, 0)
    out = torch.zeros(num_ranks, NUM.value, SIZE.value, dtype=torch.uint8)
    dist.barrier(group)
    launch(send_one, (1,), place.context, out, peer, num_ranks, HOW=how)
    dist.barrier(group)
    place.block.free()
    return int(out[peer].ne(message(peer, me, 0)).any(1).sum())


@pytest.mark.parametrize("how", ["flags", "fence", "quiet"])
def test_a_signal_that_is_ordered_comes_after_the_data(ranks, how):
    assert ranks.run(send_how, how, num_ranks=4) == [0] * 4


@pytest.mark.parametrize("how", ["no fence", "the signal first", "the last flag"])
def test_a_signal_without_order_is_seen_to_come_too_early(ranks, how):
    assert sum(ranks.run(send_how, how, num_ranks=4)) > 0


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
    came = place.part(1, num_ranks + 1)[peer].clone()
    dist.barrier(group)
    place.block.free()
    return came.amin(1).tolist(), came.amax(1).tolist()


def test_staging_may_be_reused_once_the_destination_has_read_it(ranks):
    messages = list(range(1, NUM.value + 1))
    assert ranks.run(send_from_one_place, True, num_ranks=2) == [(messages, messages)] * 2


def test_staging_that_is_reused_early_is_seen(ranks):
    messages = list(range(1, NUM.value + 1))
    results = ranks.run(send_from_one_place, False, num_ranks=2)
    assert any(highest != messages for _, highest in results)


# --- Posts -----------------------------------------------------------------------------------


@triton.jit
def send_words(context, to, peer, count):
    for index in range(0, count):
        network.send_word(to + index * 8, index + 1, peer, context)
    network.quiet(context)


def send_many_words(group, count, stall_s, timeout_s):
    """The words that came from the other node, the error of this rank, and the seconds."""
    place, error, start = (
        Place(group, 8 * count, 1, timeout_s, NIC_STALL_S=stall_s),
        "",
        time.monotonic(),
    )
    to, peer = place.block.local.data_ptr(), 1 - group.rank()
    try:
        launch(send_words, (1,), place.context, to, peer, count)
    except BackendError as failure:
        error = str(failure)
    seconds = time.monotonic() - start
    dist.barrier(group)
    came = place.block.local.view(torch.int64).tolist()
    dist.barrier(group)  # as the peer's `free` delivers what it has sent
    place.block.free()
    return came, error, seconds


def test_a_full_queue_makes_the_poster_wait(ranks):
    count = 2 * CAPACITY
    for came, error, seconds in ranks.run(send_many_words, count, 0.3, 60.0, num_ranks=2):
        assert not error and seconds > 0.3
        assert came == list(range(1, count + 1))


@pytest.mark.parametrize("count", [8, 2 * CAPACITY])
def test_a_network_that_is_stuck_ends_the_wait_at_its_deadline(ranks, count):
    for came, error, seconds in ranks.run(send_many_words, count, 600.0, 0.3, num_ranks=2):
        assert "the emulated network has delivered" in error and "within 0.3 s" in error
        assert not any(came) and 0.3 <= seconds < LONG_S


@triton.jit
def send_once(context, to, source, num_bytes, flag, rank):
    network.send(to, source, num_bytes, flag, 1, rank, context)


@triton.jit
def fence_once(context, rank):
    network.fence(rank, context)


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


@triton.jit
def wait_once(context, flag, rank):
    one = tl.arange(0, 1)
    lang.wait(flag + one, one == 0, 1, one + rank, context, PHASE_ROWS)


def test_a_wrong_rank_or_address_is_an_error_of_the_poster(ranks):
    for rank, (errors, flag) in enumerate(ranks.run(send_wrongly, num_ranks=4)):
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


def test_without_other_nodes_there_is_no_network(ranks):
    for text in ranks.run(send_within_a_node, num_ranks=2):
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


def test_a_message_to_a_wrong_node_is_missed(ranks):
    _, missed, _ = ranks.run(send_to_a_wrong_node, num_ranks=3)
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


def test_a_store_to_another_node_ends_the_process(ranks):
    assert ranks.run(store_to, 1, num_ranks=4) == [0, 1, 0, 0]
    assert ranks.run(store_to, 2, num_ranks=4, expect_death={0}) == [None, 0, 0, 0]


# --- Blocks ----------------------------------------------------------------------------------


def mapped_by_network():
    """How many blocks the network of this rank maps."""
    return Path(f"/proc/{Nic.of_process().pid}/maps").read_text().count("/memfd:moe_engine ")


def use_several_blocks(group):
    """What came, through blocks that are freed, dropped and allocated anew, and how many blocks
    were mapped at each step beyond those at first."""
    me, far = group.rank(), (group.rank() + 2) % 4
    gc.collect()
    Place(group, 4096).block.free()  # with it, what other tests have dropped
    before, came, mapped = mapped_by_network(), [], []
    first, second = Place(group, 4096), Place(group, 8192)

    def send(source, to):
        source.local[:64] = 10 * me + len(came) + 1
        dist.barrier(group)
        own = source.local.data_ptr(), to.local.data_ptr()
        launch(send_once, (1,), second.context, own[1], own[0], 64, own[1] + 1024, far)
        launch(wait_once, (1,), second.context, own[1] + 1024, far)
        came.append(to.local[:64].unique().tolist())
        mapped.append(mapped_by_network() - before)
        dist.barrier(group)

    send(second.block, first.block)
    first.block.free()
    first.block.free()
    third = Place(group, 4096)
    send(third.block, second.block)
    del third
    fourth = Place(group, 16384)
    send(second.block, fourth.block)
    fourth.block.free()
    second.block.free()
    mapped.append(mapped_by_network() - before)
    return came, mapped


def test_blocks_come_and_go(ranks):
    for rank, (came, mapped) in enumerate(ranks.run(use_several_blocks, num_ranks=4)):
        far = 10 * ((rank + 2) % 4)
        assert came == [[far + 1], [far + 2], [far + 3]]
        assert mapped == [6, 6, 6, 0]  # of this rank and of two others, for each block


@triton.jit
def send_last_bytes(context, to, rank):
    network.send_bytes(to, to + 1024, 64, rank, context)


def free_at_once(group):
    """What was there of 64 bytes without a flag before their sender freed its block, and after.
    The sender changed them meanwhile."""
    place = Place(group, 4096, NIC_HOLD_S=600)
    place.block.local[1024:1088] = group.rank() + 1
    view = place.block.local[:64]
    dist.barrier(group)
    launch(send_last_bytes, (1,), place.context, view.data_ptr(), (group.rank() + 2) % 4)
    while not Nic.of_process()._queue.is_empty:
        time.sleep(0.01)
    held = view.tolist()
    place.block.local[1024:1088] = 10 * (group.rank() + 1)
    dist.barrier(group)
    place.block.free()
    dist.barrier(group)
    return held, view.tolist()


def test_free_delivers_what_was_sent_which_is_read_no_earlier(ranks):
    for rank, (held, came) in enumerate(ranks.run(free_at_once, num_ranks=4)):
        assert held == [0] * 64
        assert came == [10 * ((rank + 2) % 4 + 1)] * 64


def peers_of(group):
    block = Place(group, 4096).block
    found = []
    for rank in range(group.size()):
        try:
            found.append(block.peer(rank).numel())
        except BackendError as error:
            found.append(str(error))
    return found, block.network != 0


def test_only_ranks_of_the_node_are_mapped(ranks):
    for rank, (found, has_network) in enumerate(ranks.run(peers_of, num_ranks=4)):
        for peer, one in enumerate(found):
            is_near = peer // 2 == rank // 2
            assert one == 4096 if is_near else f"rank {peer} is of another node" in one
        assert has_network


def abandon_on_rank_1(group):
    layout = SlotLayout(group.size(), 1024)
    block = Place(group, layout.num_bytes).block
    context = DeviceContext(layout, group.rank(), block, 60.0)
    dist.barrier(group)
    if group.rank() == 1:
        context.abandon("ValueError", "rank 1 has had enough.")
    dist.barrier(group)
    return int(context.fields[BROKEN.value]) >> TOLD_BIT


def test_who_abandons_a_call_tells_its_node(ranks):
    assert ranks.run(abandon_on_rank_1, num_ranks=4) == [1, 1, 0, 0]


# --- The process of the network --------------------------------------------------------------


def network_pid(group):
    Place(group, 4096)
    return Nic.of_process().pid


def has_ended(pid):
    """Whether a process ended. Nobody may have waited for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def die_on_rank_0(group):
    pid = network_pid(group)
    if group.rank() == 0:
        Path(os.environ["NIC_PID_FILE"]).write_text(str(pid))
        os.kill(os.getpid(), signal.SIGKILL)
    return pid


@pytest.mark.parametrize("end", ["killed", "closed"])
def test_the_network_ends_with_its_rank(tmp_path, end):
    cases.skip_without_interpreter()
    path = tmp_path / "pid"
    with RankPool(2, nodes=2, timeout_s=60, env={"NIC_PID_FILE": str(path)}) as pair:
        if end == "killed":
            _, other = pair.run(die_on_rank_0, expect_death={0})
            pids = [int(path.read_text()), other]
        else:
            pids = pair.run(network_pid)
            assert not any(map(has_ended, pids))
    deadline = time.monotonic() + LONG_S
    while not all(map(has_ended, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert all(map(has_ended, pids))


def send_without_network(group):
    """The error of a rank whose network has died, and what the next one delivers."""
    place = Place(group, 4096, 1)
    own, peer = place.block.local.data_ptr(), 1 - group.rank()
    pid = Nic.of_process().pid
    os.kill(pid, signal.SIGKILL)
    while not has_ended(pid):
        time.sleep(0.01)
    with pytest.raises(BackendError) as caught:
        launch(send_once, (1,), place.context, own, own + 1024, 64, own + 2048, peer)
    place.block.free()
    return str(caught.value), send_many_words(group, 3, 0.0, 60.0)[0]


def test_a_network_that_died_is_told_and_replaced(ranks):
    for error, came in ranks.run(send_without_network, num_ranks=2):
        assert "is gone, exit code -9" in error
        assert came == [1, 2, 3]


# --- Nodes -----------------------------------------------------------------------------------


def nodes_of_group(group, size=None, host=None):
    """The nodes, or the error, of ranks with this MOE_ENGINE_NODE_SIZE, on these hosts."""
    before = symm._host
    symm._host = before if host is None else lambda: host
    try:
        with symm.environment({} if size is None else {"MOE_ENGINE_NODE_SIZE": size}):
            return find_nodes(group)
    finally:
        symm._host = before


def test_nodes_are_found(ranks):
    assert ranks.run(nodes_of_group) == [Nodes(3, 2)] * 6
    assert ranks.run(nodes_of_group, num_ranks=4) == [Nodes(2, 2)] * 4
    assert ranks.run(nodes_of_group, "4", num_ranks=4) == [Nodes(1, 4)] * 4
    assert ranks.run(nodes_of_group, num_ranks=1) == [Nodes(1, 1)]
    hosts = PerRank(["a", "a", "b", "b"])
    assert ranks.run(nodes_of_group, "100", hosts, num_ranks=4) == [Nodes(2, 2)] * 4
    assert find_nodes(None) == Nodes(1, 1)


def errors_of(pool, *args, num_ranks):
    with pytest.raises(RankError) as caught:
        pool.run(*args, num_ranks=num_ranks)
    assert sorted(caught.value.errors) == list(range(num_ranks))
    return caught.value.errors.values()


def test_nodes_that_differ_are_refused_on_all_ranks(ranks):
    for function, *args in ((nodes_of_group,), (peers_of,)):
        for error in errors_of(ranks, function, *args, num_ranks=3):
            assert type(error) is BackendError
            assert "ranks 0, 1; rank 2" in str(error) and "torchrun" in str(error)
    hosts = PerRank(["a", "b", "a", "b"])
    for error in errors_of(ranks, nodes_of_group, "100", hosts, num_ranks=4):
        assert "ranks 0, 2; ranks 1, 3" in str(error)
    with pytest.raises(BackendError, match=r"ranks 0, 3; ranks 1, 2"):
        nodes_of([("a", 0), ("b", 0), ("b", 0), ("a", 0)])


@pytest.mark.parametrize("size", ["0", "-2", "two", ""])
def test_a_wrong_node_size_is_refused(ranks, size):
    for error in errors_of(ranks, nodes_of_group, size, num_ranks=2):
        assert f"MOE_ENGINE_NODE_SIZE is {size!r}; it must be a positive integer" in str(error)


def allocate_with(group, name, value):
    with symm.environment({name: value}):
        symm.allocate(group, 4096)


def allocate_under_another_pid(group):
    """As in another PID namespace: rank 1's number of itself is another process's here."""
    getpid = os.getpid
    if group.rank() == 1:
        os.getpid = os.getppid
    try:
        Place(group, 4096, 1)
    finally:
        os.getpid = getpid


def test_memory_that_the_network_cannot_map_is_refused_on_all_ranks(ranks):
    for error in errors_of(ranks, allocate_under_another_pid, num_ranks=2):
        assert type(error) is BackendError
        assert "cannot map the memory of ranks of other nodes" in str(error)
    assert ranks.run(peers_of, num_ranks=4)  # the network lives on


@pytest.mark.parametrize("name", ["MOE_ENGINE_NIC_HOLD_S", "MOE_ENGINE_NIC_STALL_S"])
@pytest.mark.parametrize("value", ["soon", "-1", "nan"])
def test_a_wrong_setting_is_refused(ranks, name, value):
    for error in errors_of(ranks, allocate_with, name, value, num_ranks=4):
        assert type(error) is BackendError and f"{name} is {value!r}" in str(error)


def test_nodes_of_a_pool_have_as_many_ranks_each():
    for nodes in (3, 0):
        with pytest.raises(ShapeError, match=f"4 ranks .* {nodes} nodes"):
            RankPool(4, nodes=nodes)
