"""Nodes of ranks: which ranks map each other, and the emulated network between them."""

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
from network_cases import LONG_S, Place, send_many_words, send_once, wait_once

from moe_engine import symm
from moe_engine.device import network
from moe_engine.emulation import PerRank, RankError, RankPool
from moe_engine.errors import BackendError, ShapeError
from moe_engine.launch import launch
from moe_engine.symm import base
from moe_engine.symm.nic import Nic
from moe_engine.symm.nodes import Nodes, find_nodes, nodes_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="of emulated ranks")


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


def test_blocks_come_and_go(ranks_of_nodes):
    for rank, (came, mapped) in enumerate(ranks_of_nodes.run(use_several_blocks, num_ranks=4)):
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


def test_free_delivers_what_was_sent_which_is_read_no_earlier(ranks_of_nodes):
    for rank, (held, came) in enumerate(ranks_of_nodes.run(free_at_once, num_ranks=4)):
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


def test_only_ranks_of_the_node_are_mapped(ranks_of_nodes):
    for rank, (found, has_network) in enumerate(ranks_of_nodes.run(peers_of, num_ranks=4)):
        for peer, one in enumerate(found):
            is_near = peer // 2 == rank // 2
            assert one == 4096 if is_near else f"rank {peer} is of another node" in one
        assert has_network


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


def test_a_network_that_died_is_told_and_replaced(ranks_of_nodes):
    for error, came in ranks_of_nodes.run(send_without_network, num_ranks=2):
        assert "is gone, exit code -9" in error
        assert came == [1, 2, 3]


# --- Nodes -----------------------------------------------------------------------------------


def nodes_of_group(group, size=None, host=None):
    """The nodes, or the error, of ranks with this MOE_ENGINE_NODE_SIZE, on these hosts."""
    before = base.this_host
    base.this_host = before if host is None else lambda: host
    try:
        with base.environment({} if size is None else {"MOE_ENGINE_NODE_SIZE": size}):
            return find_nodes(group)
    finally:
        base.this_host = before


def test_nodes_are_found(ranks_of_nodes):
    assert ranks_of_nodes.run(nodes_of_group) == [Nodes(3, 2)] * 6
    assert ranks_of_nodes.run(nodes_of_group, num_ranks=4) == [Nodes(2, 2)] * 4
    assert ranks_of_nodes.run(nodes_of_group, "4", num_ranks=4) == [Nodes(1, 4)] * 4
    assert ranks_of_nodes.run(nodes_of_group, num_ranks=1) == [Nodes(1, 1)]
    hosts = PerRank(["a", "a", "b", "b"])
    assert ranks_of_nodes.run(nodes_of_group, "100", hosts, num_ranks=4) == [Nodes(2, 2)] * 4
    assert find_nodes(None) == Nodes(1, 1)


def errors_of(pool, *args, num_ranks):
    with pytest.raises(RankError) as caught:
        pool.run(*args, num_ranks=num_ranks)
    assert sorted(caught.value.errors) == list(range(num_ranks))
    return caught.value.errors.values()


def test_nodes_that_differ_are_refused_on_all_ranks(ranks_of_nodes):
    for function, *args in ((nodes_of_group,), (peers_of,)):
        for error in errors_of(ranks_of_nodes, function, *args, num_ranks=3):
            assert type(error) is BackendError
            assert "ranks 0, 1; rank 2" in str(error) and "torchrun" in str(error)
    hosts = PerRank(["a", "b", "a", "b"])
    for error in errors_of(ranks_of_nodes, nodes_of_group, "100", hosts, num_ranks=4):
        assert "ranks 0, 2; ranks 1, 3" in str(error)
    with pytest.raises(BackendError, match=r"ranks 0, 3; ranks 1, 2"):
        nodes_of([("a", 0), ("b", 0), ("b", 0), ("a", 0)])


@pytest.mark.parametrize("size", ["0", "-2", "two", ""])
def test_a_wrong_node_size_is_refused(ranks_of_nodes, size):
    for error in errors_of(ranks_of_nodes, nodes_of_group, size, num_ranks=2):
        assert f"MOE_ENGINE_NODE_SIZE is {size!r}; it must be a positive integer" in str(error)


def allocate_with(group, name, value):
    with base.environment({name: value}):
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


def test_memory_that_the_network_cannot_map_is_refused_on_all_ranks(ranks_of_nodes):
    for error in errors_of(ranks_of_nodes, allocate_under_another_pid, num_ranks=2):
        assert type(error) is BackendError
        assert "cannot map the memory of ranks of other nodes" in str(error)
    assert ranks_of_nodes.run(peers_of, num_ranks=4)  # the network lives on


@pytest.mark.parametrize("name", ["MOE_ENGINE_NIC_HOLD_S", "MOE_ENGINE_NIC_STALL_S"])
@pytest.mark.parametrize("value", ["soon", "-1", "nan"])
def test_a_wrong_setting_is_refused(ranks_of_nodes, name, value):
    for error in errors_of(ranks_of_nodes, allocate_with, name, value, num_ranks=4):
        assert type(error) is BackendError and f"{name} is {value!r}" in str(error)


def test_nodes_of_a_pool_have_as_many_ranks_each():
    for nodes, text in ((3, "4 ranks .* 3 nodes"), (0, "nodes is 0")):
        with pytest.raises(ShapeError, match=text):
            RankPool(4, nodes=nodes)
