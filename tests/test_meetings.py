"""Meetings of hosts: all ranks learn what each brings, or all raise soon and name who was where."""

import os
import signal
import threading
import time
from datetime import timedelta

import cases
import pytest
import torch.distributed as dist

from moe_engine import Buffer, agreement, errors, lifecycle
from moe_engine.deadline import timeout_seconds
from moe_engine.emulation import RankPool
from moe_engine.errors import BackendError, OutOfStep, PeerTimeout, ShapeError
from moe_engine.symm import emulated, exchange, meeting
from moe_engine.symm.torch_symm import _MeetingStore

SOON_S, LONG_S = 0.3, 60.0
BOTH_S = 2
"""The deadline of two hosts that wait in vain for a third one, and both begin within it."""


class Host:
    """As much of a process group as hosts need to meet."""

    def __init__(self, rank, num_ranks, store):
        self.rank, self.size, self.store = lambda: rank, lambda: num_ranks, store


@pytest.fixture(autouse=True)
def stores_of_hosts(monkeypatch):
    monkeypatch.setattr(dist.distributed_c10d, "_get_process_group_store", lambda g: g.store)


@pytest.fixture(params=["hash", "tcp", "file"])
def stores(request, tmp_path):
    """Three ranks' ways to one store."""
    if request.param == "hash":
        return [dist.HashStore()] * 3
    if request.param == "file":
        return [dist.FileStore(str(tmp_path / "store")) for _ in range(3)]
    first = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return [first, *(dist.TCPStore("127.0.0.1", first.port) for _ in range(2))]


@pytest.fixture
def hosts():
    store = dist.HashStore()
    return [Host(rank, 3, store) for rank in range(3)]


def meet(hosts, make, what="test", timeout_s=LONG_S, begins=False):
    """What `exchange` returned or raised for each host, in a thread of its own. make: a function of
    the rank, or what each rank brings, exceptions to be raised. what: one name, or one per rank."""
    ended = {}

    def take_part(host):
        rank = host.rank()

        def bring():
            if callable(make):
                return make(rank)
            if isinstance(make[rank], BaseException):
                raise make[rank]
            return make[rank]

        label = what if isinstance(what, str) else what[rank]
        try:
            ended[rank] = exchange(host, bring, label, timeout_s, begins)
        except BaseException as error:
            ended[rank] = error

    threads = [threading.Thread(target=take_part, args=(host,)) for host in hosts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return [ended[host.rank()] for host in hosts]


def works(hosts):
    """Whether these ranks meet as if nothing had been."""
    return meet(hosts, lambda rank: rank) == [list(range(len(hosts)))] * len(hosts)


# --- Who comes -----------------------------------------------------------------------------------


def test_all_learn_what_each_brings(stores):
    hosts = [Host(rank, 3, store) for rank, store in enumerate(stores)]
    for step in range(5):
        values = [{"step": step}, (None, b"\0\xff" * 1000), "é" * 10**step]
        assert meet(hosts, values) == [values] * 3
    table = dist.PrefixStore("moe_engine/meetings/3", stores[0])
    left = [(n, rank) for n in range(5) for rank in range(3) if table.check([f"{n}/{rank}"])]
    assert left == [(4, 0), (4, 1), (4, 2)]


def test_two_groups_at_one_store_do_not_mix():
    store = dist.HashStore()
    groups = [[Host(r, 2, dist.PrefixStore(name, store)) for r in range(2)] for name in "ab"]
    for _ in range(2):
        assert meet(groups[0], "xy") == [["x", "y"]] * 2
    assert meet(groups[1], "zw") == [["z", "w"]] * 2


def test_a_group_that_is_made_anew_reads_no_old_messages():
    """At a store that outlives groups, as torchrun's does, under a name that returns."""
    store = dist.HashStore()
    for life in range(2):
        hosts = [Host(rank, 2, store) for rank in range(2)]
        for step in range(3):

            def bring(rank, life=life, step=step):
                time.sleep(0.2 * rank * (life == 1 and step == 2))
                return life, step, rank

            assert meet(hosts, bring) == [[(life, step, rank) for rank in range(2)]] * 2


def test_one_rank_meets_itself(hosts):
    for group in (None, Host(0, 1, None)):
        value = [1]
        (got,) = exchange(group, lambda value=value: value, "test")
        assert got == value and got is not value
        with pytest.raises(BackendError, match=r"KeyError: 1 \(rank 0\)"):
            exchange(group, lambda: {}[1], "test")


def test_a_rank_that_does_not_arrive_is_named_and_told(hosts):
    start = time.monotonic()
    for error in meet([hosts[0], hosts[2]], "abc", "allocating memory", BOTH_S):
        assert type(error) is OutOfStep
        assert f"waited {BOTH_S} s for rank 1 at the meeting 'allocating memory'" in str(error)
    assert BOTH_S <= time.monotonic() - start < LONG_S
    start = time.monotonic()
    (late,) = meet([hosts[1]], "abc", "allocating memory")
    assert type(late) is OutOfStep and time.monotonic() - start < LONG_S
    assert f"rank 0 waited {BOTH_S} s for rank 1" in str(late)
    assert str(late).endswith("(rank 2)")
    assert works(hosts)


def test_all_that_do_not_arrive_are_named(hosts):
    (error,) = meet(hosts[:1], "abc", timeout_s=SOON_S)
    assert "rank 0 waited 0.3 s for ranks 1, 2 at" in str(error)


def test_the_deadline_counts_from_when_a_rank_waits(hosts):
    def make(rank):
        time.sleep(2)
        return rank

    assert meet(hosts, make, timeout_s=1.5) == [[0, 1, 2]] * 3


def test_the_deadline_is_the_engines(hosts, monkeypatch):
    monkeypatch.setenv("MOE_ENGINE_TIMEOUT_S", "0.25")
    (error,) = meet(hosts[:1], "abc", timeout_s=None)
    assert "rank 0 waited 0.25 s" in str(error) and "MOE_ENGINE_TIMEOUT_S" in str(error)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e10", "0", "-1", "soon", ""])
def test_deadlines_that_are_none(monkeypatch, text, hosts):
    monkeypatch.setenv("MOE_ENGINE_TIMEOUT_S", text)
    with pytest.raises(BackendError, match=f"MOE_ENGINE_TIMEOUT_S is '{text}'; it must be a pos"):
        timeout_seconds()


def test_ranks_at_different_meetings_all_raise(hosts):
    for error in meet(hosts, "abc", ["making a Buffer", "growing", "making a Buffer"]):
        assert type(error) is OutOfStep
        assert "'making a Buffer' on ranks 0, 2, 'growing' on rank 1" in str(error)
    assert works(hosts)


def test_a_rank_elsewhere_and_one_that_is_gone_are_both_named(hosts):
    for error in meet(hosts[:2], "abc", ["here", "there", ""], BOTH_S):
        assert "for rank 2 at" in str(error)
        assert "'here' on rank 0, 'there' on rank 1" in str(error)


# --- What goes wrong ------------------------------------------------------------------------------

CLASSES = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.MoeEngineError)
]


class OwnShapeError(ShapeError):
    pass


@pytest.mark.parametrize("kind", CLASSES)
def test_errors_of_the_package_keep_their_class(hosts, kind):
    cause = kind(0, 2, "counts", 7, 1, 1.5) if kind is PeerTimeout else kind("too wide")
    ended = meet(hosts, [0, cause, 2])
    assert [type(error) for error in ended] == [kind] * 3
    assert {str(error) for error in ended} == {f"{cause} (rank 1)"}
    assert [error.__cause__ for error in ended] == [None, cause, None]
    if kind is PeerTimeout:
        assert all(
            (e.rank, e.peer, e.phase, e.epoch, e.slot) == (0, 2, "counts", 7, 1) for e in ended
        )
    assert works(hosts)


@pytest.mark.parametrize(
    ("cause", "kind", "text"),
    [
        (OSError("no memory"), BackendError, "OSError: no memory"),
        (MemoryError(), BackendError, "MemoryError"),
        (OwnShapeError("too wide"), ShapeError, "too wide"),
    ],
)
def test_other_errors_become_the_nearest_class(hosts, cause, kind, text):
    ended = meet(hosts, [0, 1, cause])
    assert [(type(e), str(e)) for e in ended] == [(kind, f"{text} (rank 2)")] * 3


def test_errors_of_several_ranks_are_all_told(hosts):
    for error in meet(hosts, [ShapeError("a"), OSError("b"), ShapeError("a")]):
        assert type(error) is ShapeError and str(error) == "a (ranks 0, 2); OSError: b (rank 1)"


def test_what_cannot_travel_is_refused_on_all(hosts):
    ended = meet(hosts, [0, lambda: 1, 2])
    assert {type(error) for error in ended} == {BackendError}
    assert all("lambda" in str(error) and "(rank 1)" in str(error) for error in ended)


def test_an_error_is_told_where_another_rank_is_gone(hosts):
    (second,) = meet([hosts[1]], [0, ShapeError("too wide"), 2], timeout_s=SOON_S)
    (first,) = meet([hosts[0]], "abc", timeout_s=SOON_S)  # when rank 1 has given up
    for error in (first, second):
        assert type(error) is OutOfStep
        assert "for rank" in str(error) and str(error).endswith("too wide (rank 1)")
    assert (type(first.__cause__), type(second.__cause__)) == (type(None), ShapeError)


@pytest.mark.parametrize("cause", [KeyboardInterrupt(), SystemExit(3)])
def test_what_ends_a_rank_is_told_to_the_others(hosts, cause):
    first, second, third = meet(hosts, [0, cause, 2])
    assert second is cause
    for error in (first, third):
        assert type(error) is BackendError
        assert str(error) == meeting._Failure.of(cause).text + " (rank 1)"
        assert type(cause).__name__ in str(error)
    assert works(hosts)


def test_ctrl_c_ends_a_wait_and_is_told(hosts):
    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    start = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, SOON_S)
            exchange(hosts[0], lambda: 0, "test", LONG_S)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - start < LONG_S
    for error in meet(hosts[1:], "abc"):
        assert type(error) is BackendError and str(error) == "KeyboardInterrupt (rank 0)"
    assert works(hosts)


REFUSALS = ShapeError("too wide"), OutOfStep("too late")


@pytest.mark.parametrize("cause", [KeyboardInterrupt(), *REFUSALS])
def test_what_begins_does_not_pass_over_a_failure(hosts, cause):
    """Rank 0 waits in vain, rank 1 fails, and rank 2, which arrives last, raises that."""
    (first,) = meet(hosts[:1], [0, cause, 2], timeout_s=SOON_S, begins=True)
    (second,) = meet(hosts[1:2], [0, cause, 2], timeout_s=SOON_S, begins=True)
    (third,) = meet(hosts[2:], [0, cause, 2], begins=True)
    assert type(first) is OutOfStep and "waited 0.3 s for ranks 1, 2" in str(first)
    failure = meeting._Failure.of(cause)
    assert (type(third).__name__, str(third)) == (failure.kind, f"{failure.text} (rank 1)")
    if isinstance(cause, KeyboardInterrupt):
        assert second is cause
    else:
        assert "for rank 2" in str(second) and str(second).endswith(f"{cause} (rank 1)")
    assert works(hosts)


@pytest.mark.parametrize("cause", REFUSALS)
@pytest.mark.parametrize("absent", [False, True])
def test_what_begins_does_not_pass_over_its_own_refusal(hosts, cause, absent):
    early = [hosts[0], hosts[2]] if absent else []
    for error in meet(early, [0, cause, 2], timeout_s=BOTH_S, begins=True):
        assert type(error) is OutOfStep and f"waited {BOTH_S} s for rank 1" in str(error)
    for error in meet(hosts[1:2] if absent else hosts, [0, cause, 2], begins=True):
        assert (type(error), str(error)) == (type(cause), f"{cause} (rank 1)")
    assert works(hosts)


def test_a_store_that_is_gone():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    host = Host(1, 2, dist.TCPStore("127.0.0.1", server.port))
    servers, ended = [server], []
    del server

    def end():
        ended.append(True)
        servers.clear()

    threading.Timer(SOON_S, end).start()
    with pytest.raises(OutOfStep, match="rank 1 lost the store of its group at the meeting 'test'"):
        exchange(host, lambda: 0, "test", LONG_S)
    assert ended


def test_a_rendezvous_of_torch_has_the_deadline(monkeypatch):
    monkeypatch.setenv("MOE_ENGINE_TIMEOUT_S", str(SOON_S))
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=LONG_S))
    one = _MeetingStore(store)
    one.set("symm/5/0", b"here")
    assert one.get("symm/5/0") == store.get("symm/0/0") == b"here"
    start = time.monotonic()
    with pytest.raises(OutOfStep, match=r"rank 1 did not arrive within 0\.3 s"):
        one.get("symm/5/1")
    with pytest.raises(OutOfStep, match=r"ranks 1, 2 did not arrive"):
        one.wait(["symm/5/0", "symm/5/1", "symm/5/2"], timedelta(seconds=LONG_S))
    assert time.monotonic() - start < LONG_S


# --- Real groups ---------------------------------------------------------------------------------


def meet_in_groups(group, backend):
    """What ranks 1 and 2 bring to a group of their own, and all three to theirs."""
    few = dist.new_group([1, 2], backend=backend)
    rank = dist.get_rank(group)
    got = exchange(few, lambda: rank, "few") if rank else None
    return got, exchange(group, lambda: rank, "all")


def test_groups_of_some_ranks(pool):
    assert pool.run(meet_in_groups, "gloo", num_ranks=3) == [
        (None, [0, 1, 2]),
        ([1, 2], [0, 1, 2]),
        ([1, 2], [0, 1, 2]),
    ]


def meet_over_nccl(group):
    nccl = dist.new_group(backend="nccl")
    return exchange(nccl, nccl.rank, "test")


@pytest.mark.multi_gpu
def test_groups_of_gpus_alone(pool):
    assert pool.run(meet_over_nccl) == [list(range(pool.num_ranks))] * pool.num_ranks


def meet_without_a_store(group):
    def no_store(group):
        raise KeyError(group)

    real = dist.distributed_c10d._get_process_group_store
    dist.distributed_c10d._get_process_group_store = no_store

    def refuse():
        if group.rank() == 1:
            raise ShapeError("too wide")

    try:
        got = exchange(group, group.rank, "test")
        with pytest.raises(ShapeError, match=r"^too wide \(rank 1\)$"):
            exchange(group, refuse, "test")
    finally:
        dist.distributed_c10d._get_process_group_store = real
    return got


def test_groups_without_a_store(pool):
    assert pool.run(meet_without_a_store, num_ranks=2) == [[0, 1]] * 2


def meet_with_a_bad_deadline(group):
    if group.rank() == 1:
        os.environ["MOE_ENGINE_TIMEOUT_S"] = "nan"
    try:
        exchange(group, lambda: 0, "test")
    except BackendError as error:
        return str(error)
    finally:
        os.environ.pop("MOE_ENGINE_TIMEOUT_S", None)


def test_a_bad_deadline_of_one_rank_is_told_to_all(pool):
    start = time.monotonic()
    for text in pool.run(meet_with_a_bad_deadline, num_ranks=2):
        assert text.startswith("MOE_ENGINE_TIMEOUT_S is 'nan'") and text.endswith("(rank 1)")
    assert time.monotonic() - start < LONG_S


# --- Buffers -------------------------------------------------------------------------------------

DEADLINE_S = 5.0


@pytest.fixture(scope="module")
def three():
    cases.skip_without_interpreter()
    with RankPool(3, timeout_s=100, env={"MOE_ENGINE_TIMEOUT_S": str(DEADLINE_S)}) as ranks:
        yield ranks


def make_buffer(group, step, end):
    """(error, its text, seconds) of a Buffer that rank 1 does not make beyond a step; end: how it
    ends at it, None for not at all."""

    def stop(*_, **__):
        if end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise {"refused": ShapeError("stop"), "interrupted": KeyboardInterrupt("stop")}[end]

    module, name = {
        "backend": (lifecycle, "choose_backend"),
        "options": (agreement, "exchange"),
        "create": (emulated.os, "memfd_create"),
        "map": (emulated, "_map"),
    }[step]
    real = getattr(module, name)
    if group.rank() == 1 and end is not None:
        setattr(module, name, stop)
    dist.barrier(group)
    start = time.monotonic()
    try:
        Buffer(group, 1 << 20)
    except BaseException as error:
        return type(error).__name__, str(error), time.monotonic() - start
    finally:
        setattr(module, name, real)
    return None


@pytest.mark.parametrize("step", cases.slow_unless([("map",)], ["backend", "options", "map"]))
def test_a_rank_killed_while_a_buffer_is_made_is_named(three, step):
    ended = three.run(make_buffer, step, "killed", expect_death={1})
    for kind, text, seconds in (ended[0], ended[2]):
        assert kind == "OutOfStep" and f"waited {DEADLINE_S:g} s for rank 1 at the meeting" in text
        assert DEADLINE_S <= seconds < 4 * DEADLINE_S


@pytest.mark.parametrize(
    ("end", "kinds"),
    [("refused", ["ShapeError"] * 3), ("interrupted", ["BackendError", "KeyboardInterrupt"])],
)
@pytest.mark.parametrize("step", ["create", "map"])
def test_a_rank_that_fails_while_a_buffer_is_made_is_named_at_once(three, step, end, kinds):
    ended = three.run(make_buffer, step, end)
    assert [kind for kind, _, _ in ended][: len(kinds)] == kinds
    for kind, text, _ in (ended[0], ended[2]):
        assert kind == kinds[0] and "stop (rank 1)" in text
        # An interrupted rank takes its memory along: who had not mapped that yet fails as well.
        assert text.endswith("(rank 1)") or (step, end) == ("map", "interrupted")
    assert three.run(make_buffer, step, None) == [None] * 3


def come_late(group):
    """Rank 1 misses two meetings that begin the same thing; then all ranks meet."""
    if group.rank() != 1:
        for _ in range(2):
            with pytest.raises(OutOfStep):
                exchange(group, lambda: None, "the same", 0.2, begins=True)
    dist.barrier(group)
    return exchange(group, group.rank, "the same", 20.0, begins=True)


def test_a_rank_that_did_not_arrive_may_arrive_next_time(pool):
    assert pool.run(come_late, num_ranks=3) == [[0, 1, 2]] * 3


def wait_in_vain_and_begin(group):
    """Rank 1 waits at two meetings to which nobody comes; then all begin something new."""
    if group.rank() == 1:
        for _ in range(2):
            with pytest.raises(OutOfStep):
                exchange(group, lambda: None, "nobody else", 0.2)
    dist.barrier(group)
    return exchange(group, group.rank, "something new", 20.0, begins=True)


def test_what_begins_passes_over_meetings_that_were_left(pool):
    assert pool.run(wait_in_vain_and_begin, num_ranks=3) == [[0, 1, 2]] * 3


def test_a_beginning_follows_ranks_that_broke_off_at_different_meetings(hosts, monkeypatch):
    """Ranks 0 and 2 give up a Buffer just after rank 1 has read their messages, which so goes on to
    the next meeting of it; all make the next Buffer."""
    with monkeypatch.context() as patch:
        patch.setattr(meeting._Table, "leave", lambda *args: None)
        meet([hosts[0], hosts[2]], "abc", "making a Buffer", SOON_S, begins=True)
    assert meet([hosts[1]], "abc", "making a Buffer", SOON_S, begins=True) == [["a", "b", "c"]]
    ended = {}

    def make_next(rank):
        if rank == 1:
            try:
                exchange(hosts[1], lambda: "x", "allocating memory", LONG_S)
            except OutOfStep as error:
                ended["error"] = str(error)
        ended[rank] = exchange(hosts[rank], lambda: rank, "making a Buffer", LONG_S, begins=True)

    threads = [threading.Thread(target=make_next, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert "'allocating memory' on rank 1" in ended.pop("error")
    assert ended == {rank: [0, 1, 2] for rank in range(3)}
    assert works(hosts)
