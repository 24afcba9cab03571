"""The pool of ranks: results and errors come back, and no process is ever left or waited for."""

import ctypes
import gc
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import cases
import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import (
    all_gather_tensor,
    all_reduce,
    reduce_scatter_tensor,
)

from moe_engine import emulation
from moe_engine.device import lang
from moe_engine.emulation import PerRank, RankError, RankPool, send_message
from moe_engine.errors import BackendError, MoeEngineError, PeerTimeout, ShapeError

LONG_S = 90.0
"""More than what is to happen at once takes on a busy machine."""


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    """Two ranks of this module's own, as some tests kill them."""
    with RankPool(2, timeout_s=LONG_S) as ranks:
        yield ranks


def get_pid(group):
    return os.getpid()


def is_gone(pid: int) -> bool:
    """Whether the process ended and was waited for: a zombie still has its /proc entry."""
    return not Path(f"/proc/{pid}").exists()


# --- Runs ------------------------------------------------------------------------------------


def add_to_rank(group, x, y):
    total = torch.tensor(group.rank())
    dist.all_reduce(total, group=group)
    x += y
    return group.rank(), group.size(), int(total), x


def test_each_rank_gets_its_arguments_and_returns_its_result(pool):
    x = torch.zeros(3)
    items = [torch.full((3,), float(r)) for r in range(pool.num_ranks)]
    results = pool.run(add_to_rank, x, PerRank(items))
    num_ranks = pool.num_ranks
    for rank, (own_rank, size, total, y) in enumerate(results):
        assert (own_rank, size, total) == (rank, num_ranks, num_ranks * (num_ranks - 1) // 2)
        torch.testing.assert_close(y, items[rank])
    assert x.eq(0).all()  # the ranks changed copies


def call_collectives(group):
    """Those of torch on this rank's device, in the forms that FSDP2 and DTensors call."""
    rank, size = group.rank(), group.size()
    every = torch.arange(size * size).view(size, size).to(cases.device(), torch.bfloat16)
    own, total = every[rank].clone(), every.sum(0)

    def check(out, expected, work=None):
        if work is not None:
            work.wait()
        torch.testing.assert_close(out, expected)

    whole = torch.zeros_like(every).flatten()
    check(whole, every.flatten(), dist.all_gather_into_tensor(whole, own, group, async_op=True))
    dist.all_gather(rows := [torch.zeros_like(own) for _ in range(size)], own, group)
    check(torch.stack(rows), every)
    gathered = [torch.zeros_like(own) for _ in range(size)] if rank == 0 else None
    dist.gather(own, gathered, group=group, group_dst=0)
    check(gathered, [*every] if rank == 0 else None)
    check(all_gather_tensor(own, 0, group).wait(), every.flatten())
    for op, expected in (dist.ReduceOp.SUM, total), (dist.ReduceOp.AVG, total / size):
        part = own.new_zeros(1)
        dist.reduce_scatter_tensor(part, own, op, group)
        check(part, expected[rank : rank + 1])
        check(reduce_scatter_tensor(own, op.name, 0, group).wait(), part)
        check(all_reduce(own, op.name, group).wait(), expected)
        summed = own.clone()
        check(summed, expected, dist.all_reduce(summed, op, group, async_op=True))
    dist.all_to_all_single(column := torch.zeros_like(own), own, group=group)
    check(column, every[:, rank])
    dist.broadcast(first := own.clone(), group=group, group_src=0)
    check(first, every[0])
    dist.scatter(first.zero_(), [*every] if rank == 0 else None, group=group, group_src=0)
    check(first, own)


def test_collectives_of_torch(pool):
    pool.run(call_collectives)


def get_group_id(group):
    return group.size(), id(group)


def test_a_group_is_made_once_per_size(pool):
    for num_ranks in range(1, pool.num_ranks + 1):
        first = pool.run(get_group_id, num_ranks=num_ranks)
        assert [size for size, _ in first] == [num_ranks] * num_ranks
        assert pool.run(get_group_id, num_ranks=num_ranks) == first
        assert len(pool.run(add_to_rank, 0, 0, num_ranks=num_ranks)) == num_ranks


def test_wrong_numbers_of_ranks_are_refused(pair):
    with pytest.raises(ShapeError, match="num_ranks is 3; this pool has 1 to 2"):
        pair.run(get_pid, num_ranks=3)
    with pytest.raises(ShapeError, match="3 items, and 2 ranks run"):
        pair.run(get_pid, PerRank([1, 2, 3]))
    for number in (0, -1, "2"):
        with pytest.raises(MoeEngineError, match="num_ranks is "):
            RankPool(number)
    with pytest.raises(BackendError, match="'tpu'"):
        RankPool(2, "tpu")
    if not torch.cuda.is_available():
        with pytest.raises(BackendError, match="there is no GPU here; choose 'cpu'"):
            RankPool(2, "cuda")


def count_files(group, x):
    return x, len(os.listdir("/proc/self/fd"))


def test_tensors_leave_no_open_files(pair):
    x = torch.arange(1000)
    gc.collect()  # what earlier tests left
    before = [files for _, files in pair.run(count_files, x)], len(os.listdir("/proc/self/fd"))
    results = [pair.run(count_files, x) for _ in range(20)]
    after = [files for _, files in pair.run(count_files, x)], len(os.listdir("/proc/self/fd"))
    assert results[0][0][0].equal(x)
    assert before == after


def get_environment(group):
    return lang.INTERPRETED, os.environ.get("MOE_TEST"), torch.get_num_threads()


def test_ranks_have_their_own_environment():
    before = dict(os.environ)
    with RankPool(1, env={"MOE_TEST": "yes"}) as one:
        assert one.run(get_environment) == [(True, "yes", 1)]
    assert dict(os.environ) == before


# --- What others see --------------------------------------------------------------------------


def open_to_others() -> set[str]:
    """Inodes of the sockets of this machine that listen on more than the loopback device."""
    found = set()
    for name, loopback in (("tcp", "0100007F"), ("tcp6", "0" * 24 + "01000000")):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            _, local, _, state, *_ = fields = line.split()
            if state == "0A" and not local.startswith(loopback):
                found.add(fields[9])
    return found


def sockets_of(pid: int) -> set[str]:
    """Inodes of the sockets of a process."""
    files = [os.path.realpath(f"/proc/{pid}/fd/{n}") for n in os.listdir(f"/proc/{pid}/fd")]
    return {file.partition("socket:[")[2][:-1] for file in files if "/socket:[" in file}


def test_nothing_listens_to_other_machines(pair):
    pids = pair.run(get_pid)
    assert all(sockets_of(pid) for pid in pids)
    with socket.create_server(("", 0)):
        assert sockets_of(os.getpid()) & open_to_others()
    for pid in (os.getpid(), *pids):
        assert not sockets_of(pid) & open_to_others()


def test_the_store_is_for_this_user_and_goes_with_the_ranks(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # that of no other pool
    with RankPool(1) as one:
        one.run(get_pid)
        (folder,) = tmp_path.glob("moe_engine-*")
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()


# --- Messages --------------------------------------------------------------------------------


def send_three(group):
    for step in range(3):
        send_message((group.rank(), step))
    return "done"


def test_messages_arrive_in_order(pair):
    got = []
    results = pair.run(send_three, on_message=lambda rank, message: got.append((rank, message)))
    assert results == ["done", "done"]
    for rank in range(2):
        assert [m for r, m in got if r == rank] == [(rank, step) for step in range(3)]
    assert pair.run(send_three) == ["done", "done"]


def test_an_interrupted_run_does_not_disturb_the_next(pair):
    def interrupt(rank, message):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pair.run(send_three, on_message=interrupt)
    assert pair.run(add_to_rank, 1, 2) == [(0, 2, 1, 3), (1, 2, 1, 3)]


def test_messages_need_a_rank():
    with pytest.raises(BackendError, match="outside the ranks"):
        send_message(1)


# --- Errors ----------------------------------------------------------------------------------


def raise_on_rank_1(group):
    if group.rank() == 1:
        raise PeerTimeout(rank=1, peer=0, phase="rows", epoch=7, slot=1, seconds=3)
    return "fine"


def test_an_exception_comes_back_whole_and_the_pool_goes_on(pair):
    pids = pair.run(get_pid)
    with pytest.raises(RankError, match=r"in phase 'rows'[^$]*in raise_on_rank_1") as caught:
        pair.run(raise_on_rank_1)
    error = caught.value
    assert (error.rank, error.cause_type) == (1, PeerTimeout)
    assert list(error.errors) == [1]
    assert (error.errors[1].peer, error.errors[1].epoch) == (0, 7)
    assert pair.run(get_pid) == pids


def raise_local(group):
    class LocalError(Exception):
        pass

    raise LocalError("cannot be pickled")


class Demanding(Exception):
    def __new__(cls, text):
        return super().__new__(cls)

    def __init__(self, text):
        super().__init__()


def raise_demanding(group):
    raise Demanding("cannot be rebuilt")


def return_lambda(group):
    return lambda: None


def exit_python(group):
    sys.exit(3)


def test_what_cannot_be_pickled_comes_back_as_text(pair):
    pids = pair.run(get_pid)
    with pytest.raises(RankError, match="RuntimeError: LocalError: cannot be pickled"):
        pair.run(raise_local)
    with pytest.raises(RankError, match="RuntimeError: Demanding"):
        pair.run(raise_demanding)
    with pytest.raises(RankError, match="lambda"):
        pair.run(return_lambda)
    with pytest.raises(RankError, match="SystemExit: 3"):
        pair.run(exit_python)
    assert pair.run(get_pid) == pids


def raise_before_barrier(group):
    if group.rank() == 0:
        raise ValueError("before the barrier")
    dist.barrier(group)


def test_a_rank_that_waits_for_one_that_raised_is_ended(pair, monkeypatch):
    monkeypatch.setattr(emulation, "GRACE_S", 0.5)
    pids = pair.run(get_pid)
    with pytest.raises(RankError, match="before the barrier") as caught:
        pair.run(raise_before_barrier)
    assert caught.value.cause_type is ValueError
    assert isinstance(caught.value.errors[1], TimeoutError)
    assert all(map(is_gone, pids))
    assert len(pair.run(get_pid)) == 2


# --- Death -----------------------------------------------------------------------------------


def die_on_rank_1(group, others):
    """Rank 1 dies soon, while the others wait for it, sleep, or have raised."""
    if group.rank() == 1:
        time.sleep(3 if others == "raise" else 0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    if others == "raise":
        raise ValueError("rank 1 is so slow")
    if others == "sleep":
        time.sleep(300)
    dist.barrier(group)


@pytest.mark.parametrize("others", ["wait", "sleep", "raise"])
def test_an_unexpected_death_ends_all_at_once(pair, others):
    pids = pair.run(get_pid)
    start = time.monotonic()
    with pytest.raises(
        RankError, match=r"^rank 1: ChildProcessError: died, exit code -9"
    ) as caught:
        pair.run(die_on_rank_1, others)
    assert time.monotonic() - start < LONG_S
    assert (caught.value.rank, caught.value.cause_type) == (1, ChildProcessError)
    assert isinstance(caught.value.errors.get(0), ValueError) == (others == "raise")
    assert all(map(is_gone, pids))
    assert not set(pair.run(get_pid)) & set(pids)


def die_alone(group):
    if group.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def test_an_expected_death_is_no_error(pair):
    pids = pair.run(get_pid)
    assert pair.run(die_alone, expect_death={1}) == ["alive", None]
    assert all(map(is_gone, pids))
    assert pair.run(get_pid, expect_death={1}) != pids


def test_a_rank_that_died_between_runs_is_replaced(pair):
    victim = pair.run(get_pid)[1]
    os.kill(victim, signal.SIGKILL)
    while pair._ranks[1][0].is_alive():
        time.sleep(0.01)
    assert victim not in pair.run(get_pid)


def crash(group):
    ctypes.string_at(0)


def test_a_crash_is_told_with_its_stack(pair):
    with pytest.raises(RankError, match=r"(?s)died, exit code -11.*in crash") as caught:
        pair.run(crash)
    assert caught.value.cause_type is ChildProcessError


def total_of_a_new_group(group):
    made = dist.new_group(list(range(group.size())))
    total = torch.ones(1)
    dist.all_reduce(total, group=made)
    return total.item()


def test_jobs_on_some_ranks_may_make_groups(pair):
    assert pair.run(total_of_a_new_group, num_ranks=1) == [1]
    assert pair.run(total_of_a_new_group) == [2, 2]


def sleep_on_rank_0(group, seconds):
    if group.rank() == 0:
        time.sleep(seconds)


def test_silence_ends_in_an_error(pair):
    pids = pair.run(get_pid)
    start = time.monotonic()
    with pytest.raises(
        RankError, match=r"rank 0: TimeoutError: no answer within ([5-9]|\d\d)"
    ) as caught:
        pair.run(sleep_on_rank_0, 300, timeout_s=5)
    assert time.monotonic() - start < LONG_S
    assert caught.value.cause_type is TimeoutError
    assert "in sleep_on_rank_0" in str(caught.value)  # its stack
    assert all(map(is_gone, pids))
    pair.run(sleep_on_rank_0, 0)


def test_close_ends_all_and_may_be_repeated():
    ranks = RankPool(2)
    ranks.close()
    pids = ranks.run(get_pid)
    ranks.close()
    assert all(map(is_gone, pids))
    ranks.close()
    assert len(ranks.run(get_pid)) == 2
    del ranks


SCRIPT = """
import os, sys, time
from moe_engine.emulation import RankPool

def get_pid(group):
    return os.getpid()

def sleep(group):
    time.sleep(300)

if __name__ == "__main__":
    pool = RankPool(2)
    print(*pool.run(get_pid), flush=True)
    if sys.argv[1] == "wait":
        pool.run(sleep)
"""


@pytest.mark.parametrize("end", cases.slow_unless([("wait",)], ["exit", "wait"]))
def test_ranks_end_with_the_process_that_made_them(tmp_path, end):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(
        [sys.executable, script, end],
        env=os.environ | {"PYTHONPATH": path, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert end == "exit" or list(tmp_path.glob("moe_engine-*"))
        if end == "wait":
            parent.kill()
        parent.wait(LONG_S)
    deadline = time.monotonic() + LONG_S
    while not all(map(is_gone, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(map(is_gone, pids))
    assert not list(tmp_path.glob("moe_engine-*"))


START_METHOD = """
import multiprocessing, os
from moe_engine.emulation import RankPool

def interpreted(*_):
    return os.environ.get("TRITON_INTERPRET")

if __name__ == "__main__":
    multiprocessing.set_start_method("forkserver")
    with RankPool(1) as pool:
        assert pool.run(interpreted) == ["1"]
    with multiprocessing.Pool(1) as own:
        assert own.apply(interpreted) is None
"""


@pytest.mark.slow
def test_a_forkserver_of_others_does_not_get_the_environment_of_ranks(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(START_METHOD)
    path = os.pathsep.join(filter(None, sys.path))
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, script], env=env | {"PYTHONPATH": path}, check=True)


def test_a_start_that_breaks_off_leaves_no_ranks(monkeypatch):
    """The next run starts them all."""
    start, number = ForkServerProcess.start, itertools.count()

    def interrupted(self):
        if next(number) == 1:
            raise KeyboardInterrupt
        start(self)

    monkeypatch.setattr(ForkServerProcess, "start", interrupted)
    with RankPool(2, "cpu", timeout_s=60) as pool:
        with pytest.raises(KeyboardInterrupt):
            pool.run(rank_of)
        assert pool._ranks == []
        assert pool.run(rank_of) == [0, 1]


def rank_of(group):
    return group.rank()
