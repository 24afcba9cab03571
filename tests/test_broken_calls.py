"""A call that breaks off on one rank, at any moment: no rank ever takes other rows for its own."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

import cases
import pytest
import torch
from rounds import VERBS, Faults, Injected, Round, again, new_buffer, outcome, run

from moe_engine import CallAbandoned

SOAK = pytest.mark.soak
MINUTES = pytest.mark.timeout(900)
STRIDE = 6
"""One of so many events of a round is tried, and in a soak each of them."""
FEW = [(verb,) for verb in VERBS if verb not in ("cached", "layer_backward")]
"""Verbs that are tried by default."""


def raise_it(name):
    """An interrupt where a host would be interrupted, else what a failed allocation raises."""
    raise KeyboardInterrupt(name) if name.startswith("after") else Injected(name)


def break_off(group, verb, broken_rank, first, stride):
    """For every event of two rounds, of which the second is prepared, at which rank `broken_rank`
    breaks off: what each of four rounds was on this rank. Its events are counted first."""
    one = Round(verb)
    buffer, events = new_buffer(group), []
    for number, each in enumerate([one, *again(one, 1)]):
        with Faults(None, raise_it).installed() as counted:
            assert outcome(each, buffer) == "right"
        events += [(number, at, name) for at, name in enumerate(counted.names)]
    buffer.destroy()
    of_ranks = [[]] * group.size()
    torch.distributed.all_gather_object(of_ranks, events, group)
    found = []
    for broken_round, at, name in of_ranks[broken_rank][first::stride]:
        buffer = new_buffer(group)
        torch.distributed.barrier(group)
        since = time.monotonic()
        results = []
        for number, each in enumerate([one, *again(one, 3)]):
            is_broken = number == broken_round and group.rank() == broken_rank
            with Faults(at if is_broken else None, raise_it).installed():
                results.append(outcome(each, buffer))
        found.append((name, broken_round, results, time.monotonic() - since))
        torch.distributed.barrier(group)
        buffer.destroy()
    return found


def check_outcomes(by_rank, broken_rank):
    """Right, then typed errors for good; on the rank itself nothing but errors."""
    for rank, found in enumerate(by_rank):
        for name, broken_round, results, _ in found:
            what = f"rank {rank} of a call broken off at '{name}' on {broken_rank}: {results}"
            errors = [result for result in results if result != "right"]
            assert results == ["right"] * (4 - len(errors)) + errors, what
            assert errors, what
            first, *later = errors
            if rank == broken_rank:
                assert len(errors) == 4 - broken_round, what
                assert first.startswith(("untyped Injected", "untyped KeyboardInterrupt")), what
            for error in later if rank == broken_rank else errors:
                assert error == "CallAbandoned", what


@MINUTES
@pytest.mark.parametrize("verb", cases.slow_unless(FEW, VERBS))
def test_a_call_that_breaks_off_ends_the_buffer_on_all_ranks(pool, verb):
    first = VERBS.index(verb) % STRIDE
    stride = STRIDE * 6 if verb == "layer_backward" else STRIDE  # which has many, of many kernels
    check_outcomes(pool.run(break_off, verb, 0, first, stride, num_ranks=2, timeout_s=800), 0)


@SOAK
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("verb", VERBS)
def test_wherever_it_breaks_off(pool, verb, num_ranks):
    for rank in range(num_ranks):
        results = pool.run(break_off, verb, rank, 0, 1, num_ranks=num_ranks, timeout_s=3600)
        check_outcomes(results, rank)


def texts(group, verb):
    """The errors of a rank when rank 1 breaks off at its last launch; what a new Buffer does."""
    one = Round(verb)
    buffer = new_buffer(group)
    outcome(one, buffer)
    with Faults(None, raise_it).installed() as counted:
        outcome(again(one, 1)[0], buffer)
    last = max(at for at, name in enumerate(counted.names) if name.startswith("before"))
    with Faults(last if group.rank() == 1 else None, raise_it).installed():
        first = outcome(again(one, 1)[0], buffer)
    with pytest.raises(CallAbandoned) as told:
        for each in again(one, 2):
            run_it(each, buffer)
    torch.distributed.barrier(group)
    buffer.destroy()
    buffer = new_buffer(group)
    second = outcome(one, buffer)
    buffer.destroy()
    return first, str(told.value), second


def run_it(one, buffer):
    is_right = run(one, buffer)
    buffer.check()  # on a GPU a call that was broken off has no result, which its next one tells
    assert is_right


PHASES = {
    "normal": "final_sum",
    "cached": "final_sum",
    "layer": "gemm_combine",
    "low_latency": "low_latency_combine, receive",
    "decode": "low_latency_combine, both",
    "layer_backward": "release",  # of rows of x, which were sent again
}


@pytest.mark.parametrize(
    "verb",
    cases.slow_unless(FEW, VERBS),
)
def test_the_others_learn_who_where_and_why(pool, verb):
    for _, text, second in pool.run(texts, verb, num_ranks=min(3, pool.num_ranks)):
        assert "rank 1 abandoned call" in text
        assert f"in phase '{PHASES[verb]}' because of Injected: before" in text
        assert text.endswith("Make a new Buffer.")
        assert second == "right"


# --- Killed, and two Buffers ---------------------------------------------------------------------


def kill(name):
    os.kill(os.getpid(), signal.SIGKILL)


def be_killed(group, verb, at):
    """What rounds are on a rank that lives, when rank 1 is killed at an event of the second."""
    one, make = Round(verb), partial(new_buffer, group)
    buffer, _, first = cases.used_buffer(group, make, lambda buffer: outcome(one, buffer), 3.0)
    results = [first]
    for number, each in enumerate(again(one, 3)):
        strikes = number == 0 and group.rank() == 1
        with Faults(at if strikes else None, kill).installed():
            results.append(outcome(each, buffer))
    return results


@MINUTES
@pytest.mark.parametrize(
    ("verb", "at"),
    [
        ("normal", 9),
        pytest.param("layer", 20, marks=pytest.mark.slow),
        # A prepared round of the decode layer has 12 events, the fewest.
        *(pytest.param(v, at, marks=SOAK) for v in VERBS for at in range(0, 12, 2)),
    ],
)
def test_a_rank_killed_anywhere_leaves_typed_errors(pool, verb, at):
    if pool.device == "cuda":
        pytest.skip("a killed process takes its part of the NCCL group along")
    results = pool.run(be_killed, verb, at, num_ranks=3, expect_death={1})
    for rank in (0, 2):
        assert results[rank][0] == "right"
        assert set(results[rank]) <= {"right", "PeerTimeout"}, results[rank]
        assert results[rank][-1] == "PeerTimeout"


def interleave(group, seed, at):
    """What rounds are on two Buffers in random order, the first of which is broken off."""
    generator = torch.Generator().manual_seed(seed)
    buffers, found = [new_buffer(group), new_buffer(group)], [[], []]
    for number in range(8):
        which, verb = torch.randint(0, 2 * len(VERBS), (2,), generator=generator).tolist()
        strikes = number == 3 and group.rank() == 0
        which = 0 if number == 3 else which % 2
        with Faults(at if strikes else None, raise_it).installed():
            one = Round(VERBS[verb % len(VERBS)], seed=number)
            found[which].append((number, outcome(one, buffers[which])))
    torch.distributed.barrier(group)
    for buffer in buffers:
        buffer.destroy()
    return found


@MINUTES
@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=SOAK) for s in range(1, 20))])
def test_another_buffer_goes_on(pool, seed):
    for broken, other in pool.run(interleave, seed, 4 + seed % 7, num_ranks=2):
        assert [result for _, result in other] == ["right"] * len(other)
        assert all(result == "right" for number, result in broken if number < 3)
        assert all(result != "wrong" for _, result in broken)
        assert not any(result == "right" for number, result in broken if number > 3)
