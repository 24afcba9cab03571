"""Calls say which layer they are of, backwards which forward, and ranks how many calls they
refused: ranks that pair other calls are out of step, and take no rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cases
import pytest
import torch

from moe_engine import (
    Buffer,
    ElasticBuffer,
    MoeEngineError,
    MoEFeedForward,
    Options,
    calls_tagged,
    moe_ffn,
    ops,
    reference,
    start_moe_ffn,
)
from moe_engine.callers import MOST_FORWARDS, Callers
from moe_engine.errors import DtypeError
from moe_engine.prepared import OWN_AFTER

E, H, I, K, T = 4, 16, 8, 2, 3
FEW = 8
Error = tuple[str, str]


def new_buffer(group, backend="auto", **options) -> Buffer:
    options = Options(**{"decode_tokens": FEW, "timeout_s": 60.0, **options})
    return Buffer.for_tokens(group, 16, H, 2 * group.size(), K, torch.float32, backend, options)


def inputs(rank: int, layer: int = 0) -> tuple[torch.Tensor, ...]:
    """(x, topk_idx, topk_weights, this rank's w_gate_up and w_down of 2) of a layer."""
    generator = torch.Generator().manual_seed(10 * layer + rank)
    x, idx = torch.randn(T, H, generator=generator), torch.tensor([[0, 3], [1, 2], [2, 0]])
    weights = torch.rand(T, K, generator=generator)
    up, down = (torch.randn(2, *sizes, generator=generator) for sizes in ((2 * I, H), (H, I)))
    return tuple(one.to(cases.device()) for one in (x, idx, weights, up, down))


def attempt(group, buffer, calls: list[Callable[[], Any]]) -> Error | None:
    """The error of these calls in their order, if one comes; the Buffer is destroyed."""
    error = None
    try:
        for call in calls:
            call()
        buffer.check()
    except MoeEngineError as raised:
        error = type(raised).__name__, str(raised)
    torch.distributed.barrier(group)
    buffer.destroy()
    return error


def in_turns(group, calls: list[Any]) -> list[Any]:
    """The calls, in the other order on rank 0."""
    return calls[::-1] if group.rank() == 0 else calls


def check_names(errors: list[Error | None], *names: str) -> None:
    """All ranks are out of step, and each names both ranks and both layers."""
    for error in errors:
        assert error is not None
        assert error[0] == "OutOfStep", error
        for name in ("rank 0", "rank 1", *names):
            assert name in error[1], (name, error)


# --- Layers in another order ---------------------------------------------------------------------


def swapped_layers(group, way: str, backend: str = "auto") -> Error | None:
    """Two layers of equal sizes, in another order on each rank."""
    more: dict[str, Any] = dict(capacity_factor=1.0) if way == "passes" else {}
    buffer, rank = new_buffer(group, backend, **more), group.rank()
    few = FEW if way == "decode" else None
    layers = [inputs(rank, number) for number in range(2)]
    modules = [MoEFeedForward(2, H, I, buffer, torch.float32).to(cases.device()) for _ in range(2)]

    def call(number: int) -> Any:
        x, idx, weights, up, down = layers[number]
        if way == "module":
            return modules[number](x, idx, weights)
        if way == "started":
            return start_moe_ffn(*layers[number], buffer, tag=number).finish()
        if way == "trained":
            return moe_ffn(x.requires_grad_(), idx, weights, up, down, buffer, tag=number)
        if way == "block":
            with calls_tagged(number):
                return moe_ffn(*layers[number], buffer)
        if way == "columns":
            columns = I if number else I // 2
            up, down = up[:, : 2 * columns].contiguous(), down[..., :columns].contiguous()
            return moe_ffn(x, idx, weights, up, down, buffer)
        return moe_ffn(*layers[number], buffer, few, tag=number)

    calls = [lambda number=number: call(number) for number in in_turns(group, [0, 1])]
    return attempt(group, buffer, calls)


@pytest.mark.parametrize("way", ["plain", "decode", "started", "trained", "passes", "block"])
def test_layers_in_another_order(pool, way):
    check_names(pool.run(swapped_layers, way, num_ranks=2), "layer 0", "layer 1")


def test_modules_in_another_order(pool):
    errors = pool.run(swapped_layers, "module", num_ranks=2)
    check_names(errors, "'MoEFeedForward'", "'MoEFeedForward (2)'")


def test_layers_without_a_tag_differ_by_their_columns(pool):
    check_names(pool.run(swapped_layers, "columns", num_ranks=2), "columns, swiglu")


@pytest.mark.parametrize("way", ["plain", "trained"])
def test_layers_in_another_order_without_kernels(pool, way):
    errors = pool.run(swapped_layers, way, "collective", num_ranks=2)
    check_names(errors, "layer 0", "layer 1")


@pytest.mark.parametrize("way", ["plain", "decode", "trained"])
def test_layers_in_another_order_on_two_nodes(nodes, way):
    check_names(nodes("2x1").run(swapped_layers, way), "layer 0", "layer 1")


def left_out(group) -> Error | None:
    """Rank 1 leaves the second of three layers out."""
    buffer, rank = new_buffer(group), group.rank()
    numbers = [0, 2] if rank else [0, 1, 2]
    args = [inputs(rank, number) for number in numbers]
    calls = [
        lambda tag=tag, of=of: moe_ffn(*of, buffer, tag=tag)
        for tag, of in zip(numbers, args, strict=True)
    ]
    return attempt(group, buffer, calls)


def test_a_layer_that_a_rank_leaves_out(pool):
    check_names(pool.run(left_out, num_ranks=2), "layer 1", "layer 2")


def many_calls(group, decode: bool) -> Any:
    """Layers by turns, each more often than it takes to have launches of its own; then one rank
    takes another order. (whether all were right, the error)"""
    buffer, rank = new_buffer(group), group.rank()
    few = FEW if decode else None
    layers, right = [inputs(rank, number) for number in range(3)], True
    first = [moe_ffn(*of, buffer, few, tag=tag) for tag, of in enumerate(layers)]
    for _ in range(OWN_AFTER + 2):
        for tag, of in enumerate(layers):
            right &= torch.equal(moe_ffn(*of, buffer, few, tag=tag), first[tag])
    order = [0, 2, 1] if rank else [0, 1, 2]
    calls = [lambda tag=tag: moe_ffn(*layers[tag], buffer, few, tag=tag) for tag in order]
    return right, attempt(group, buffer, calls)


@pytest.mark.parametrize("decode", [False, True])
def test_repeated_calls_name_their_layers(pool, decode):
    rights, errors = zip(*pool.run(many_calls, decode, num_ranks=2), strict=True)
    assert all(rights)
    check_names(list(errors), "layer 1", "layer 2")


# --- Other verbs ---------------------------------------------------------------------------------


def swapped_dispatches(group, verb: str, backend: str) -> Error | None:
    """Two dispatches of one verb, with other tags, in another order on each rank."""
    rank = group.rank()
    if verb == "elastic":
        elastic = ElasticBuffer(group, num_max_tokens_per_rank=8, hidden=H, num_topk=K)
    buffer = new_buffer(group, backend)
    x, idx, weights, *_ = inputs(rank)

    def call(tag: int) -> Any:
        if verb == "ops":
            return ops.dispatch(x, idx, weights, E, buffer, tag=tag)
        with calls_tagged(tag):
            if verb == "elastic":
                return elastic.dispatch(x.bfloat16(), idx, weights, num_experts=E)
            if verb == "low_latency":
                bf16 = x.bfloat16()
                return buffer.low_latency_dispatch(bf16, idx, FEW, E, use_fp8=False)
            if verb == "hooked":
                how = dict(use_fp8=False, return_recv_hook=True)
                *_, hook = buffer.low_latency_dispatch(x.bfloat16(), idx, FEW, E, **how)
                return hook
            per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, E)
            counts = per_rank, None, in_rank, per_expert
            return buffer.dispatch(x, None, *counts, idx, weights)

    calls: list[Callable[[], Any]] = [lambda t=t: call(t) for t in in_turns(group, [5, 6])]
    if verb == "hooked":  # the hooks are called when another call runs
        hooks: list[Callable[[], None]] = []
        calls = [lambda c=c: hooks.append(c()) for c in calls]
        calls += [lambda at=at: hooks[at]() for at in (1, 0)]
    error = attempt(group, elastic if verb == "elastic" else buffer, calls)
    if verb == "elastic":
        buffer.destroy()
    return error


@pytest.mark.parametrize("verb", ["dispatch", "ops", "elastic", "low_latency", "hooked"])
def test_dispatches_in_another_order(pool, verb):
    errors = pool.run(swapped_dispatches, verb, "auto", num_ranks=2)
    check_names(errors, "layer 5", "layer 6")


def test_dispatches_in_another_order_without_kernels(pool):
    errors = pool.run(swapped_dispatches, "dispatch", "collective", num_ranks=2)
    check_names(errors, "layer 5", "layer 6")


@pytest.mark.parametrize("verb", ["dispatch", "low_latency"])
def test_dispatches_in_another_order_on_two_nodes(nodes, verb):
    check_names(nodes("2x1").run(swapped_dispatches, verb, "auto"))


def hooks_in_another_order(group) -> bool:
    """Two dispatches of two layers whose hooks are called in another order: both are right."""
    buffer = new_buffer(group)
    x, idx, *_ = inputs(group.rank())
    found = []
    for _ in range(3):  # the last ones are prepared
        got = []
        for tag in (1, 2):
            with calls_tagged(tag):
                rows = (x * tag).bfloat16()
                how = dict(use_fp8=False, return_recv_hook=True)
                got.append(buffer.low_latency_dispatch(rows, idx, FEW, E, **how))
        for *_, hook in got[::-1]:
            hook()
        (one, count, *_), (two, *_) = got
        rows = [(e, r) for e in range(len(count)) for r in range(int(count[e]))]
        found.append(all(torch.equal(one[at] * 2, two[at]) for at in rows) and len(rows) > 0)
    buffer.check()
    torch.distributed.barrier(group)
    buffer.destroy()
    return all(found)


def test_hooks_in_another_order_are_right(pool):
    assert pool.run(hooks_in_another_order, num_ranks=2) == [True, True]


# --- Backwards -----------------------------------------------------------------------------------


def swapped_backwards(group, save: str, backend: str, compiled: bool) -> Error | None:
    """Two micro-batches of a layer, whose backwards come in another order on each rank."""
    buffer, rank = new_buffer(group, backend), group.rank()
    losses = []
    layer = moe_ffn
    if compiled:
        layer = torch.compile(moe_ffn, backend="aot_eager")
    for batch in range(2):
        x, idx, weights, *_ = inputs(rank, batch)
        *_, up, down = inputs(rank)
        y = layer(x.requires_grad_(), idx, weights, up, down, buffer, save=save, tag="only")
        losses.append(y.sum())
    return attempt(group, buffer, [loss.backward for loss in in_turns(group, losses)])


@pytest.mark.parametrize("save", ["pre", "none"])
def test_backwards_in_another_order(pool, save):
    errors = pool.run(swapped_backwards, save, "auto", False, num_ranks=2)
    check_names(errors, "forward 1, of layer 'only'", "forward 2, of layer 'only'")


def test_backwards_in_another_order_without_kernels(pool):
    errors = pool.run(swapped_backwards, "rows", "collective", False, num_ranks=2)
    check_names(errors, "forward 1, of layer 'only'", "forward 2, of layer 'only'")


def test_backwards_in_another_order_on_two_nodes(nodes):
    check_names(nodes("2x1").run(swapped_backwards, "rows", "auto", False))


def test_compiled_backwards_in_another_order(pool):
    errors = pool.run(swapped_backwards, "pre", "auto", True, num_ranks=2)
    check_names(errors, "forward 1", "forward 2")


def backwards_alike(group, backend: str) -> bool:
    """Three micro-batches of two layers, whose backwards come last first: dx is right."""
    buffer, rank = new_buffer(group, backend), group.rank()
    layers = [inputs(rank, number)[3:] for number in range(2)]
    made, right = [], True
    for batch in range(3):
        x, idx, weights, *_ = inputs(rank, batch)
        x.requires_grad_()
        for tag, (up, down) in enumerate(layers):
            made.append((x, moe_ffn(x, idx, weights, up, down, buffer, tag=tag)))
    for x, y in made[::-1]:
        (dx,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        (again,) = torch.autograd.grad(y.sum(), x)
        right &= torch.equal(dx, again)
    buffer.check()
    torch.distributed.barrier(group)
    buffer.destroy()
    return right


@pytest.mark.parametrize("backend", ["auto", "collective"])
def test_backwards_in_one_order_are_right(pool, backend):
    assert pool.run(backwards_alike, backend, num_ranks=2) == [True, True]


# --- Refused calls -------------------------------------------------------------------------------


def refuse(buffer, verb: str, args: tuple[torch.Tensor, ...]) -> None:
    """A call that is refused."""
    x, idx, weights, up, down = args
    with pytest.raises((MoeEngineError, TypeError)):
        if verb == "dispatch":
            per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(
                idx, 2 * buffer.group_size
            )
            counts = per_rank, None, in_rank, per_expert
            buffer.dispatch(x, None, *counts, idx, weights, num_worst_tokens=10**13)
        elif verb == "an argument that does not exist":
            buffer.combine(x, nonsense=1)
        elif verb == "low_latency_dispatch":
            buffer.low_latency_dispatch(x.double(), idx, FEW, E)
        elif verb == "moe_ffn":
            moe_ffn(x, idx, weights, up, down, buffer, layout="nonsense")
        elif verb == "start_moe_ffn":
            start_moe_ffn(x, idx.int(), weights, up, down, buffer)
        elif verb == "ops":
            ops.dispatch(x, idx, weights, E, buffer, alignment=0)
        else:
            moe_ffn(x.requires_grad_(), idx, weights, up, down, buffer, save="nonsense")


def refused_on(group, ranks: list[int], verb: str, backend: str, few: bool) -> Any:
    """Layers before and after a call that some ranks refuse: (errors, results right)."""
    buffer, rank = new_buffer(group, backend), group.rank()
    args, most = inputs(rank), FEW if few else None
    first = moe_ffn(*args, buffer, most)
    for _ in range(2):
        if rank in ranks:
            refuse(buffer, verb, inputs(rank))
    found: list[bool] = []

    def call() -> None:
        y = moe_ffn(*args, buffer, most)
        buffer.check()  # a GPU tells later
        found.append(torch.equal(y, first))

    return attempt(group, buffer, [call] * 2), found


REFUSALS = ["dispatch", "low_latency_dispatch", "moe_ffn", "start_moe_ffn", "ops", "a forward"]
REFUSALS.append("an argument that does not exist")
NAMES = {"ops": "send", "a forward": "moe_ffn", "start_moe_ffn": "moe_ffn"}
"""The verbs that errors name, where they have other names."""


@pytest.mark.parametrize("verb", REFUSALS)
@pytest.mark.parametrize("few", [False, True])
def test_a_call_that_one_rank_refuses(pool, verb, few):
    for error, found in pool.run(refused_on, [1], verb, "auto", few, num_ranks=2):
        assert not found
        check_names([error], "rank 1 refused 2 calls that rank 0 did not")
        name = NAMES.get(verb, verb)
        assert f"in {name}, by " in error[1] or verb == REFUSALS[-1], error


@pytest.mark.parametrize("backend", ["auto", "collective"])
def test_calls_that_all_ranks_refuse(pool, backend):
    for few in (False, True):
        for verb in ("dispatch", "moe_ffn", REFUSALS[-1]):
            for error, found in pool.run(refused_on, [0, 1], verb, backend, few, num_ranks=2):
                assert error is None and found == [True, True]


def test_a_call_that_one_rank_refuses_without_kernels(pool):
    errors = [e for e, _ in pool.run(refused_on, [0], "dispatch", "collective", False, num_ranks=2)]
    check_names(errors, "rank 0 refused 2 calls that rank 1 did not", "num_worst_tokens")


@pytest.mark.parametrize("shape", ["2x1", "2x2"])
def test_a_call_that_a_rank_of_another_node_refuses(nodes, shape):
    for few in (False, True):
        errors = [e for e, _ in nodes(shape).run(refused_on, [1], "dispatch", "auto", few)]
        for error in errors:
            assert error is not None and error[0] == "OutOfStep", errors
        assert any("num_worst_tokens" in text for _, text in errors), errors
        told = [text for _, text in errors if "rank 1 refused" in text]
        assert told and all("in dispatch, by ShapeError: num_worst_tokens" in one for one in told)


def local_refusals(group) -> bool:
    """Calls that send nothing, refused on rank 0 alone: the next call is right."""
    buffer, rank = new_buffer(group), group.rank()
    args = inputs(rank)
    first = moe_ffn(*args, buffer)
    if rank == 0:
        for call in (lambda: buffer.get_dispatch_layout(args[1], 5), buffer.release):
            with pytest.raises(MoeEngineError):
                call()
    right = torch.equal(moe_ffn(*args, buffer), first)
    buffer.check()
    torch.distributed.barrier(group)
    buffer.destroy()
    return right


def test_refusals_of_what_sends_nothing_do_not_count(pool):
    assert pool.run(local_refusals, num_ranks=2) == [True, True]


# --- Callers -------------------------------------------------------------------------------------


def test_callers_follow_from_tags():
    one, two = Callers(), Callers()
    assert one.number("a") == two.number("a") != one.number("b")
    assert one.number(7) == two.number("7") != one.number("07")
    assert two.name(one.number(123)) == "layer 123"
    assert two.name(one.number("never")) == "a layer that this rank has never called"
    every = {one.number(tag) for tag in range(1000)} | {one.number(f"a{n}") for n in range(1000)}
    assert len(every) == 2000 and all(0 < caller < 2**31 for caller in every)
    with pytest.raises(DtypeError, match="tag is a float"):
        one.number(1.5)


def test_new_tags_are_numbered():
    callers = Callers()
    assert [callers.new_tag(name) for name in "aab"] == ["a", "a (2)", "b"]


def test_backwards_name_their_forwards():
    callers = Callers()
    for tag in ("x", "y"):
        callers.running = callers.number(tag)
        callers.new_forward()
    name = callers.name(callers.backward_of(1))
    assert name == "the backward of forward 1, of layer 'x'"
    assert callers.name(callers.backward_of(9)) == "the backward of forward 9"


def test_forwards_take_the_least_number_that_is_free():
    """Steps of training that are alike number their forwards alike, whatever never goes back."""
    callers = Callers()
    for _ in range(3):
        assert [callers.new_forward() for _ in range(4)] == [1, 2, 3, 4]
        for number in (3, 1, 4, 2, 2):
            callers.end_forward(number)
    first = [callers.new_forward() for _ in range(MOST_FORWARDS)]
    assert first == [*range(1, MOST_FORWARDS + 1)]
    assert [callers.new_forward() for _ in range(2)] == [1, 2]


def test_the_layer_of_two_ranks_is_that_of_the_reference(pool):
    """What swapped layers would give is not what a layer gives."""
    found = pool.run(one_layer, num_ranks=2)
    assert max(found) < 1e-5


def one_layer(group) -> float:
    buffer, rank = new_buffer(group), group.rank()
    *mine, up, _ = inputs(rank)
    all_up, all_down = (torch.cat([inputs(r)[at] for r in range(2)]) for at in (3, 4))
    down = all_down[2 * rank :][:2]
    y = moe_ffn(*mine, up, down.contiguous(), buffer, tag="one")
    given = [inputs(r)[:3] for r in range(2)]
    want = reference.moe_ffn(*zip(*given, strict=True), all_up.split(2), all_down.split(2))[rank]
    error = cases.relative_error(y, want)
    buffer.destroy()
    return error
