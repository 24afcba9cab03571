"""Everything public, called with odd values: each call is refused by a typed error, or right, and
the next good one works."""

from __future__ import annotations

import random
import re
import signal
import time
import warnings
from typing import Any

import cases
import fuzz_calls
import fuzz_values
import pytest
import torch
from fuzz_values import ANY, EQUAL, REFUSED
from fuzz_world import Target, World, flat, same

from moe_engine import BackendError, MoeEngineError, RoutingError
from moe_engine.emulation import RankError, RankPool, send_message

BUDGETS_S = 4.0, pytest.param(20.0, marks=pytest.mark.slow)
HANG_S = 20.0
SEED = 18
WHOLE = 12
"""Every so many calls on a Buffer, all its verbs are called, else one."""
BINDING = re.compile(
    r"missing \d+ required|unexpected keyword argument|positional arguments? but|multiple values"
)
"""TypeErrors of Python itself."""
MOST_FAILURES = 12

Change = dict[str, str]
"""The name of an odd value for each argument that is not good."""

OF_AN_INDEX = "what an index holds is not checked: it would take rows that are not there"
EXCLUDED = {
    (".*combine.*", "bias", r"pair|\(\)|backwards|one item less"): "any number up to 2 is fine",
    ("grouped_gemm|grouped_mlp|wgrad", "x", "shorter"): OF_AN_INDEX,
    ("grouped_gemm by row_offset", "x", "shorter|one item|expanded"): OF_AN_INDEX,
    ("layer with gradients", ".*", "parameter"): "it wants no gradient",
    ("allocate", "device|num_bytes", ".*"): "the symmetric memory's own checks are another part",
}
"""(callable, argument, odd value) as regular expressions, and why it is not called so."""


class Hang(BaseException):
    """A call took longer than HANG_S, and much longer than a good one."""


def all_cases(targets: dict[str, Target]) -> list[tuple[str, Change]]:
    """Each odd value of each argument alone, and each argument left out."""
    found: list[tuple[str, Change]] = []
    for name, target in targets.items():
        found.append((name, {}))
        found.append((name, {"nonsense": "unknown"}))
        for argument, kind in target.kinds.items():
            found.append((name, {argument: "missing"}))
            odds = fuzz_values.odds_of(kind, target.good[argument])
            found += [(name, {argument: odd.name}) for odd in odds]
    return [case for case in found if not is_excluded(*case)]


def is_excluded(name: str, change: Change) -> bool:
    return any(
        re.fullmatch(of, name) and re.fullmatch(argument, one) and re.fullmatch(odd, value)
        for of, argument, odd in EXCLUDED
        for one, value in change.items()
    )


def pairs(targets: dict[str, Target], rng: random.Random) -> tuple[str, Change]:
    """Two odd values at once."""
    while True:
        name = rng.choice([name for name, target in targets.items() if len(target.kinds) > 1])
        target, change = targets[name], {}
        for argument in rng.sample(sorted(target.kinds), 2):
            odds = fuzz_values.odds_of(target.kinds[argument], target.good[argument])
            change[argument] = rng.choice(odds).name
        if not is_excluded(name, change):
            return name, change


class Fuzz:
    """Calls in one rank, and what was wrong with them."""

    def __init__(self, group: Any):
        self.world = World(group)
        self.world.check_oracle()
        self.calls = 0
        self.make_targets()
        self.quick = {name: self.world.quick(name) for name in self.world.buffers}
        self.whole = {name: self.world.whole(name) for name in self.world.buffers}
        self.results: dict[str, Any] = {}
        self.seconds: dict[str, float] = {}

    def make_targets(self) -> None:
        self.targets = fuzz_calls.targets(self.world)

    def arguments(self, name: str, change: Change) -> tuple[dict[str, Any], str]:
        """Arguments of a call, and what may come of it."""
        target = self.targets[name]
        arguments, outcomes = dict(target.good), []
        for argument, value in change.items():
            if value == "missing":
                del arguments[argument]
                outcomes.append(ANY)  # it may have a default
            elif value == "unknown":
                arguments[argument] = None
                outcomes.append(REFUSED)
            else:
                good = target.good[argument]
                odds = fuzz_values.odds_of(target.kinds[argument], good)
                odd = next(odd for odd in odds if odd.name == value)
                arguments[argument] = odd.make(good)
                outcomes.append(odd.outcome)
        if len(outcomes) == 1:
            return arguments, outcomes[0]
        return arguments, EQUAL if set(outcomes) <= {EQUAL} else ANY

    def run(self, name: str, change: Change) -> str | None:
        """Call so; what was wrong, or None."""
        if name not in self.results:
            start = time.monotonic()
            self.results[name] = self.call(name, self.targets[name].good, 10 * HANG_S)
            self.seconds[name] = max(HANG_S, 10 * (time.monotonic() - start))
        good = self.results[name]
        if isinstance(good, BaseException) and not isinstance(good, BackendError):
            return f"the good call: {type(good).__name__}: {str(good)[:300]}"
        try:
            arguments, outcome = self.arguments(name, change)
        except Exception:  # torch has no such tensor
            return None
        result = self.call(name, arguments, self.seconds[name])
        problem = self.judge(result, outcome, self.results[name])
        if problem is None:
            problem = self.next_good_call(name, result)
        return problem

    def call(self, name: str, arguments: dict[str, Any], seconds: float) -> Any:
        """What is kept of the result, or the exception; Hang is raised."""
        target = self.targets[name]
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            return flat(target.keep(target.call(**arguments)))
        except Hang:
            raise
        except BaseException as error:
            return error
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def judge(self, result: Any, outcome: str, good: Any) -> str | None:
        if isinstance(result, MoeEngineError):
            return None if str(result).strip() else "an error without a text"
        if isinstance(result, TypeError) and BINDING.search(str(result)):
            return None
        if isinstance(result, BaseException):
            return f"{type(result).__name__}: {str(result)[:300]}"
        if outcome == REFUSED and not isinstance(good, BaseException):
            return "accepted"
        if outcome == EQUAL and not same(result, good):
            return "another result than with the good value"
        return None

    def next_good_call(self, name: str, result: Any) -> str | None:
        """Make a good call on the same Buffer, or on a new one where the error asks for it."""
        uses = self.targets[name].uses
        if uses is None:
            return None
        self.calls += 1
        if isinstance(result, MoeEngineError) and "new Buffer" in str(result):
            self.world.lose(uses)
            self.make_targets()
        for kind, every in (("quick", 1), ("whole", WHOLE)):
            if self.calls % every:
                continue
            try:
                found = self.good_call(kind, uses)
            except BaseException as error:
                self.world.lose(uses)
                self.make_targets()
                return f"the next good call: {type(error).__name__}: {str(error)[:300]}"
            if not same(found, getattr(self, kind)[uses]):
                return f"the next good call ({kind}) gave another result"
        return None

    def good_call(self, kind: str, uses: str) -> list[Any]:
        """The result; bad ids of the call before are reported once."""
        try:
            return getattr(self.world, kind)(uses)
        except RoutingError:
            return getattr(self.world, kind)(uses)


def raise_hang(*_: object) -> None:
    raise Hang("no answer")


def run_cases(
    group: Any, budget_s: float, least: int, skip: int, only: list | None, seed: int
) -> tuple[int, int]:
    """Run as many cases as the time allows, at least `least`, all ranks the same, from number
    `skip` on. Sends the pool each case before it begins and each that fails; returns how many were
    run and how many there are."""
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, raise_hang)
    fuzz = Fuzz(group)
    end = time.monotonic() + budget_s
    cases = list(only or all_cases(fuzz.targets))
    random.Random(seed).shuffle(cases)
    number = -1
    for number, case in enumerate(cases[skip:], skip):
        if number >= least and not _go_on(group, end):
            return number, len(cases)
        rng = random.Random(f"{seed} {number}")
        one = case if only or rng.random() < 0.8 else pairs(fuzz.targets, rng)
        send_message(("begin", number, one))
        problem = fuzz.run(*one)
        if problem is not None:
            send_message(("failed", number, (one, problem)))
    return number + 1, len(cases)


def _go_on(group: Any, end: float) -> bool:
    """Whether there is time left, as rank 0 sees it."""
    left = torch.tensor(end - time.monotonic(), dtype=torch.float64)
    torch.distributed.broadcast(left, 0, group=group)
    return bool(left > 0)


def fuzz(
    num_ranks: int, budget_s: float, only: list | None = None, least: int = 0, seed: int = SEED
) -> tuple[int, int, list[str]]:
    """(cases run, cases there are, what was wrong) on ranks of their own."""
    last: dict[int, tuple] = {}
    failures: list[str] = []

    def note(rank: int, message: tuple) -> None:
        what, number, case = message
        if what == "begin":
            last[rank] = number, case
        else:
            (name, change), problem = case
            failures.append(describe(rank, number, name, change, problem))

    end, skip, total = time.monotonic() + budget_s, 0, 0
    cases.skip_without_interpreter()
    with RankPool(num_ranks, timeout_s=budget_s + 300) as pool:
        while (left := end - time.monotonic()) > 0 and len(failures) < MOST_FAILURES:
            try:
                args = left, least, skip, only, seed
                [(skip, total), *_] = pool.run(run_cases, *args, on_message=note)
                break
            except RankError as error:
                if not last:
                    raise
                number, (name, change) = max(last.values(), key=lambda case: case[0])
                failures.append(describe(error.rank, number, name, change, str(error)[-1500:]))
                skip = number + 1
    return skip, total, failures


def describe(rank: int, number: int, name: str, change: Change, problem: str) -> str:
    return (
        f"rank {rank}, case {number}: {name} with {change}: {problem}\n"
        f"    again: fuzz(num_ranks, 60, [({name!r}, {change!r})])"
    )


@pytest.mark.timeout(400)
@pytest.mark.parametrize("budget_s", BUDGETS_S)
def test_one_rank(budget_s: float) -> None:
    _, _, failures = fuzz(1, budget_s, least=50 if budget_s > 8 else 20)
    assert not failures, "\n".join(failures)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("budget_s", BUDGETS_S)
def test_two_ranks_make_the_same_calls(budget_s: float) -> None:
    _, _, failures = fuzz(2, budget_s / 2, least=10 if budget_s > 8 else 4)
    assert not failures, "\n".join(failures)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_every_odd_value() -> None:
    done, total, failures = fuzz(1, 7000)
    assert not failures, "\n".join(failures)
    assert done == total
