"""Two calls of different verbs, in another order on each rank: each result is what it is in one
order, or all ranks are out of step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations
from typing import Any

import cases
import pytest
import torch
from test_callers import FEW, H, K, inputs, new_buffer

from moe_engine import ElasticBuffer, MoeEngineError, calls_tagged, moe_ffn, ops

Call = Callable[[], Any]
Results = list[torch.Tensor]

NORMAL = (
    *("dispatch", "cached dispatch", "combine", "layer", "other layer", "trained layer"),
    *("backward", "rows", "sums of rows", "backward of rows"),
)
LOW_LATENCY = (
    *("low-latency dispatch", "low-latency combine", "layer of few"),
    *("hooked dispatch", "hooked combine"),
)
ELASTIC = "dispatch", "expanded dispatch", "cached dispatch", "combine", "expanded combine"
VERBS = {"normal": NORMAL, "collective": NORMAL, "low latency": LOW_LATENCY, "elastic": ELASTIC}
"""The verbs of each kind of Buffer that meet in the same memory."""
ALIKE = {
    ("low-latency dispatch", "hooked dispatch"),
    ("low-latency combine", "hooked combine"),
    ("dispatch", "expanded dispatch"),
}
"""Pairs of one verb, whose calls have tags; combines have those of their dispatches."""
LATE = {("low-latency dispatch", "hooked combine"), ("layer of few", "hooked combine")}
"""Pairs that wait for each other before they compare what they are, until the deadline."""
ONE_PLAN = ("sums of rows", "backward of rows")
"""Both return rows by one plan; they differ in that weights travel with those of a backward."""
QUICK = {
    "normal": [
        ("dispatch", "combine"),
        ("dispatch", "layer"),
        ("trained layer", "backward"),
        ("combine", "backward"),
        ("cached dispatch", "backward of rows"),
        ("layer", "sums of rows"),
        ONE_PLAN,
    ],
    "collective": [
        ONE_PLAN,
        ("dispatch", "combine"),
        ("layer", "backward"),
        ("rows", "cached dispatch"),
    ],
    "low latency": [
        ("low-latency dispatch", "low-latency combine"),
        ("low-latency combine", "layer of few"),
        ("hooked dispatch", "hooked combine"),
        ("layer of few", "hooked combine"),
    ],
    "elastic": [("dispatch", "combine"), ("expanded dispatch", "cached dispatch")],
    "both": [("dispatch", "low-latency dispatch")],
}


def normal_calls(group: Any, backend: str = "auto") -> tuple[Any, dict[str, Call]]:
    buffer = new_buffer(group, backend)
    return buffer, calls_of_normal(buffer)


def calls_of_normal(buffer: Any) -> dict[str, Call]:
    """Calls that can be repeated."""
    x, idx, weights, up, down = inputs(buffer.rank)
    num_experts = 2 * buffer.group_size
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, num_experts)

    def dispatch() -> Any:
        return buffer.dispatch(x, None, per_rank, None, in_rank, per_expert, idx, weights)

    def trained(tag: str) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x.clone().requires_grad_()
        return leaf, moe_ffn(leaf, idx, weights, up, down, buffer, tag=tag)

    recv, _, recv_weights, _, handle, _ = dispatch()
    leaf, y = trained("of the backward")
    rows_leaf = x.clone().requires_grad_()
    rows = ops.dispatch(rows_leaf, idx, weights, num_experts, buffer)
    return {
        "dispatch": lambda: dispatch()[:3],
        "cached dispatch": lambda: buffer.dispatch(2 * x, handle)[0],
        "combine": lambda: buffer.combine(recv, handle, recv_weights)[:2],
        "layer": lambda: moe_ffn(x, idx, weights, up, down, buffer, tag="plain"),
        "other layer": lambda: moe_ffn(2 * x, idx, weights, up, down, buffer, tag="other"),
        "trained layer": lambda: trained("trained")[1],
        "backward": lambda: torch.autograd.grad(y.sum(), leaf, retain_graph=True),
        "rows": lambda: ops.dispatch(2 * x, idx, weights, num_experts, buffer)[:5],
        "sums of rows": lambda: ops.combine(rows.rows.detach(), rows.plan, buffer),
        "backward of rows": lambda: torch.autograd.grad(
            rows.rows.sum(), rows_leaf, retain_graph=True
        ),
    }


def low_latency_calls(group: Any, late: bool = False) -> tuple[Any, dict[str, Call]]:
    make = partial(new_buffer, group, num_slots=4)
    if late:
        buffer, _, calls = cases.used_buffer(group, make, calls_of_low_latency)
        return buffer, calls
    buffer = make()
    return buffer, calls_of_low_latency(buffer)


def calls_of_low_latency(buffer: Any) -> dict[str, Call]:
    x, idx, weights, up, down = inputs(buffer.rank)
    bf16, num_experts = x.bfloat16(), 2 * buffer.group_size

    def dispatch(times: int = 1, hooked: bool = False) -> Any:
        sizes = FEW, num_experts
        rows, counts, handle, _, hook = buffer.low_latency_dispatch(
            times * bf16, idx, *sizes, use_fp8=False, return_recv_hook=hooked
        )
        return rows, counts, handle, hook

    def written(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return torch.where((torch.arange(rows.shape[1]) < counts[:, None])[..., None], rows, 0)

    def combine(dispatched: Any, hooked: bool = False) -> Any:
        y, handle = written(*dispatched[:2]), dispatched[2]
        out, _, hook = buffer.low_latency_combine(y, idx, weights, handle, return_recv_hook=hooked)
        return out, hook

    def hooked_dispatch() -> Any:
        rows, counts, _, hook = dispatch(2, hooked=True)
        return lambda: (hook(), written(rows, counts), counts)[1:]

    def hooked_combine() -> Any:
        out, hook = combine(far, hooked=True)
        return lambda: (hook(), out)[1:]

    near, far = dispatch(), dispatch(2)
    return {
        "low-latency dispatch": lambda: written(*dispatch()[:2]),
        "low-latency combine": lambda: combine(near)[0],
        "layer of few": lambda: moe_ffn(x, idx, weights, up, down, buffer, FEW, tag="few"),
        "hooked dispatch": hooked_dispatch,
        "hooked combine": hooked_combine,
    }


def calls_of_both(group: Any) -> tuple[Any, dict[str, Call]]:
    """Calls of one Buffer in two memories, where each of a pair waits for the other in vain."""

    def calls(buffer: Any) -> dict[str, Call]:
        return calls_of_normal(buffer) | calls_of_low_latency(buffer)

    make = partial(new_buffer, group, num_slots=4)
    buffer, _, found = cases.used_buffer(group, make, calls)
    return buffer, found


def elastic_calls(group: Any) -> tuple[Any, dict[str, Call]]:
    buffer = ElasticBuffer(group, num_max_tokens_per_rank=FEW, hidden=H, num_topk=K)
    x, idx, weights, *_ = inputs(group.rank())
    bf16, num_experts = x.bfloat16(), 2 * group.size()

    def dispatch(expands: bool) -> Any:
        return buffer.dispatch(bf16, idx, weights, num_experts=num_experts, do_expand=expands)

    near, far = dispatch(False), dispatch(True)
    return buffer, {
        "dispatch": lambda: dispatch(False)[:3],
        "expanded dispatch": lambda: dispatch(True)[0:3:2],
        "cached dispatch": lambda: buffer.dispatch(2 * bf16, handle=near[3])[0],
        "combine": lambda: buffer.combine(near[0], near[3])[0],
        "expanded combine": lambda: buffer.combine(far[0], far[3])[0],
    }


MAKERS: dict[str, Callable[..., tuple[Any, dict[str, Call]]]] = {
    "normal": normal_calls,
    "collective": lambda group: normal_calls(group, "collective"),
    "low latency": low_latency_calls,
    "both": calls_of_both,
    "elastic": elastic_calls,
}


def make(calls: list[Call]) -> Iterator[Results]:
    """The results of calls in their order; hooks are called after all calls."""
    results = [call() for call in calls]
    for result in results:
        result = result() if callable(result) else result
        yield [one.clone() for one in (result if isinstance(result, tuple | list) else [result])]


def tagged(tag: str, call: Call) -> Call:
    def run() -> Any:
        with calls_tagged(tag):
            return call()

    return run


def swapped(group: Any, where: str, pair: tuple[str, str], first: int) -> str:
    """What two calls give that rank `first` makes in their order, and the others in the other:
    "right", "wrong", or the error."""
    more = dict(late=True) if pair in LATE else {}
    buffer, calls = MAKERS[where](group, **more)
    both = [tagged(name, calls[name]) if pair in ALIKE else calls[name] for name in pair]
    want = list(make(both))
    order = [0, 1] if group.rank() == first else [1, 0]
    torch.distributed.barrier(group)
    try:
        found = list(make([both[at] for at in order]))
        buffer.check()
        equal = [
            torch.equal(one, other)
            for at, results in zip(order, found, strict=True)
            for one, other in zip(results, want[at], strict=True)
        ]
        outcome = "right" if equal and all(equal) else "wrong"
    except MoeEngineError as error:
        outcome = f"{type(error).__name__}: {error}"
    torch.distributed.barrier(group)
    buffer.destroy()
    return outcome


def marks(where: str, pair: tuple[str, str]) -> list[Any]:
    return [] if pair in QUICK[where] else [pytest.mark.slow]


ALL = [
    pytest.param(where, pair, marks=marks(where, pair))
    for where, names in VERBS.items()
    for pair in combinations(names, 2)
]
ALL += [
    pytest.param("both", pair, marks=marks("both", pair))
    for pair in [
        *QUICK["both"],
        ("layer", "layer of few"),
        ("backward", "low-latency combine"),
        ("combine", "hooked dispatch"),
        ("rows", "hooked combine"),
        ("cached dispatch", "layer of few"),
    ]
]


@pytest.mark.parametrize(("where", "pair"), ALL)
def test_verbs_in_another_order(pool: Any, where: str, pair: tuple[str, str]) -> None:
    cases.skip_where_shapes_compile(pool)
    found = pool.run(swapped, where, pair, len(pair[0]) % 2, num_ranks=2)
    if found != ["right", "right"]:
        kind = "ShapeError" if pair == ONE_PLAN else "OutOfStep"
        assert all(one.startswith(f"{kind}: ") for one in found), found
        assert all("rank 0" in one and "rank 1" in one for one in found), found
