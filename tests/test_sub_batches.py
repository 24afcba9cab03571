"""Layers of more tokens than one call takes: sub-batches, equally many on all ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import cases
import pytest
import test_callers as callers
import test_layer_biases as with_biases
import test_passes as in_passes
import test_quantized_layer as quantized
import torch
import torch.distributed as dist
from training_cases import check_training, end, gradients, make_case, new_buffer, on_device

from moe_engine import (
    Buffer,
    CapacityError,
    MoeEngineError,
    MoEFeedForward,
    Options,
    ShapeError,
    moe_ffn,
    reference,
    start_moe_ffn,
)
from moe_engine import passes as layer_passes
from moe_engine.emulation import PerRank
from moe_engine.options import sizes_for_tokens
from moe_engine.symm.slots import SlotLayout


@dataclass(frozen=True)
class SmallCalls:
    """A pool of ranks whose calls take up to most_rows tokens."""

    pool: Any
    most_rows: int = 8

    @property
    def num_ranks(self) -> int:
        return self.pool.num_ranks

    def run(self, function: Callable[..., Any], *args: Any, **more: Any) -> list[Any]:
        """See `RankPool.run`."""
        return self.pool.run(with_small_calls, self.most_rows, function, *args, **more)


def with_small_calls(group: Any, most_rows: int, function: Callable[..., Any], *args: Any) -> Any:
    with mock.patch.object(SlotLayout, "most_rows", most_rows):
        return function(group, *args)


def counted() -> Any:
    """Counts the calls of layers that may take several."""
    spy = mock.Mock(wraps=layer_passes._forward_pass)
    return mock.patch.object(layer_passes, "_forward_pass", spy)


def new(group: Any, parts: Any, max_tokens: int, **options: Any) -> Buffer:
    """A Buffer for the layer of a case."""
    x, idx, _, up, *_ = parts
    sizes = group.size() * len(up), idx.shape[1], max_tokens
    return new_buffer(group, x, *sizes, **dict(decode_tokens=0) | options)


# --- Results and gradients -----------------------------------------------------------------------


CASES: dict[str, tuple[list[int], str, int]] = {
    "one rank has more": ([20, 5, 0], "uniform", 20),
    "both have more": ([16, 11], "skewed", 16),
    "alone": ([19], "duplicates", 19),
    "fewer than sub-batches": ([1, 0], "one_hot", 30),
    "no rows": ([17, 2], "nothing", 17),
}
"""Tokens of each rank, the routing, max_tokens."""


def compare(
    group: dist.ProcessGroup, max_tokens: int, in_graph: bool, factor: float | None, *parts: Any
) -> tuple[list[int], list[torch.Tensor]]:
    """How many calls a layer takes, forward, without gradients and started; its result and its
    gradients: but for those of weights, whose sums have another order, they have the bits of a
    layer whose calls take all tokens."""
    parts = on_device(parts)
    x, *_ = parts
    buffer = new(group, parts, max_tokens)
    save = "none" if in_graph else "auto"
    with cases.filled_memory():
        want = gradients(partial(moe_ffn, buffer=buffer), *parts)
        _, counts = moe_ffn(*parts[:5], buffer, return_counts=True)
    end(buffer)
    numbers = []

    def number(call: Callable[[], Any]) -> Any:
        with counted() as calls:
            made = call()
        numbers.append(calls.call_count)
        return made

    def check(group: dist.ProcessGroup) -> list[torch.Tensor]:
        buffer = new(group, parts, max_tokens, capacity_factor=factor)
        layer = partial(moe_ffn, buffer=buffer, save=save)
        have = number(lambda: gradients(layer, *parts))
        out, found_counts = number(lambda: moe_ffn(*parts[:5], buffer, return_counts=True))
        started = number(lambda: start_moe_ffn(*parts[:5], buffer)).finish()
        end(buffer)
        assert torch.equal(found_counts, counts)
        # The interpreter's products round a row by its place in a tile.
        near = partial(torch.testing.assert_close, rtol=0, atol=0 if x.is_cuda else 1e-5)
        for one, other in zip((out, started, *have[:3]), (*want[:1] * 2, *want[:3]), strict=True):
            near(one, other)
        return have

    with cases.filled_memory():
        if in_graph:
            with in_passes.as_in_a_graph():
                have = with_small_calls(group, 8, check)
        else:
            have = with_small_calls(group, 8, check)
    return numbers, [one.cpu() for one in have]


@pytest.mark.parametrize("name", CASES)
def test_the_same_result(pool, name):
    num_tokens, kind, max_tokens = CASES[name]
    num_ranks = len(num_tokens)
    parts = make_case(num_ranks, num_tokens, kind=kind)
    per_rank = map(PerRank, parts)
    found = pool.run(compare, max_tokens, False, None, *per_rank, num_ranks=num_ranks)
    for numbers, _ in found:
        assert numbers == [-(-max_tokens // 8)] * 3
    check_gradients_of(found, parts)


@pytest.mark.parametrize("in_graph", [False, True])
def test_sub_batches_in_passes(pool, in_graph):
    """Every row goes to rank 0, which has room for 8 in a call: the sub-batches bring it 8 + 3, 8
    and 4, so that the first one goes in two slices. In a graph each has two."""
    parts = make_case(2, [20, 3], num_topk=1, kind="one_hot")
    per_rank = map(PerRank, parts)
    found = pool.run(compare, 20, in_graph, 1.0, *per_rank, num_ranks=2)
    for numbers, _ in found:
        assert numbers == [3 + 2 * (3 if in_graph else 1)] * 3
    check_gradients_of(found, parts)


def check_gradients_of(found: Any, parts: Any) -> None:
    in_passes.check_gradients([have for _, have in found], parts)


def test_every_policy(pool):
    check_training(SmallCalls(pool), [18, 0, 9], kind="holes")


def test_bf16(pool):
    sizes: dict[str, Any] = dict(hidden=64, intermediate=48)
    check_training(SmallCalls(pool), [12, 9], "bf16", policies=("pre",), **sizes)


def test_collectives_take_all_tokens_in_one_call(pool):
    check_training(SmallCalls(pool), [18, 5], backend="collective", policies=("none",))


def test_several_nodes(nodes):
    check_training(SmallCalls(nodes("2x2")), [11, 0, 3, 9], policies=("none", "rows"))


def test_biases_and_another_activation(pool):
    parts = with_biases.make([9, 4], with_biases.BOTH, kind="duplicates")
    with_biases.check(SmallCalls(pool, 4), parts, with_biases.GPT_OSS, ("none", "pre"))


def test_weights_in_e4m3(pool):
    quantized.check(SmallCalls(pool, 4), quantized.make([9, 4, 0]))


def test_gradients_of_weights_go_where_they_are_wanted(pool):
    parts = make_case(2, [7, 5], num_topk=1, kind="one_hot")
    args = in_passes.train_into_sinks, 7, *map(PerRank, parts)
    assert SmallCalls(pool, 4).run(*args, num_ranks=2) == [4, 4]


def test_a_backward_makes_all_its_calls_after_a_bad_id(pool):
    parts = make_case(2, [7, 7], num_topk=1, kind="uniform")
    args = in_passes.go_on_after_a_bad_id, 7, *map(PerRank, parts)
    first, second = SmallCalls(pool, 4).run(*args, num_ranks=2)
    assert first > 0
    assert second == 0


@pytest.mark.parametrize("factor", [None, 1.0])
def test_operators_make_the_same_calls(pool, factor):
    """In compiled code, and under modes of torch."""
    parts = make_case(2, [7, 5], num_topk=1, kind="one_hot")
    args = in_passes.compare_operators, 7, factor, *map(PerRank, parts)
    for called, changed in SmallCalls(pool, 4).run(*args, num_ranks=2):
        assert called == ["moe_ffn_forward", "moe_ffn_backward", "moe_ffn"]
        assert changed == []


@pytest.mark.gpu
def test_in_a_graph(pool):
    num_ranks = pool.num_ranks
    num_tokens = [40, *[9] * (num_ranks - 1)]
    cases_of = [
        make_case(num_ranks, num_tokens, num_topk=1, kind=kind, dtype="bf16")
        for kind in ("uniform", "one_hot", "nothing")
    ]
    routings = PerRank([list(ids) for ids in zip(*(one[1] for one in cases_of), strict=True)])
    args = in_passes.replay, 40, routings, *map(PerRank, cases_of[0])
    assert all(SmallCalls(pool, 16).run(*args, num_ranks=num_ranks))


# --- How many calls ------------------------------------------------------------------------------


def calls_by_hint(group: dist.ProcessGroup, *parts: Any) -> dict[Any, tuple[int, bool, bool]]:
    """By the hint: how many calls a layer of 4 or fewer tokens takes that trains; whether one
    without gradients may take several; whether it runs by low-latency calls."""
    parts, found = on_device(parts), {}
    buffer = new(group, parts, 20, decode_tokens=4)
    want = moe_ffn(*parts[:5], buffer)
    for hint in (None, 4, 8, 9, 16, 17, 100):
        decodes = mock.Mock(wraps=buffer._low_latency.moe_ffn)
        with mock.patch.object(buffer._low_latency, "moe_ffn", decodes), counted() as calls:
            out = moe_ffn(*parts[:5], buffer, hint)
            number = calls.call_count
            gradients(partial(moe_ffn, buffer=buffer, max_tokens=hint), *parts)
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
        found[hint] = number, calls.call_count - number, decodes.call_count
    buffer.warmup(32, group.size() * len(parts[3]), 3, torch.float32, weights=tuple(parts[3:5]))
    end(buffer)
    return found


def test_the_most_tokens_of_any_rank_decide(pool):
    """As all ranks know them. Layers that train go by what the Buffer was made for."""
    parts = make_case(2, [4, 2])
    wanted = {None: 3, 4: 0, 8: 0, 9: 2, 16: 2, 17: 3, 100: 3}
    for found in SmallCalls(pool).run(calls_by_hint, *map(PerRank, parts), num_ranks=2):
        assert found == {hint: (num, 3, int(hint == 4)) for hint, num in wanted.items()}


def run_module(group: dist.ProcessGroup, *parts: Any) -> torch.Tensor:
    x, idx, weights, up, down, _ = parts = on_device(parts)
    buffer = new(group, parts, 20)
    experts = MoEFeedForward(len(up), *down.shape[1:], buffer, torch.float32).to(x.device)
    with torch.no_grad():
        experts.gate_up_proj.copy_(up)
        experts.down_proj.copy_(down)
    out = experts.start(x, idx, weights).finish()
    assert torch.equal(out, experts(x, idx, weights))
    end(buffer)
    return out.cpu()


def test_modules(pool):
    parts = make_case(2, [20, 6])
    found = SmallCalls(pool).run(run_module, *map(PerRank, parts), num_ranks=2)
    for have, want in zip(found, reference.moe_ffn(*parts[:5]), strict=True):
        assert cases.relative_error(have, want) < 1e-5


# --- Which layer a sub-batch is of ---------------------------------------------------------------


@pytest.mark.parametrize("way", ["plain", "trained"])
def test_sub_batches_have_the_tag_of_their_layer(pool, way):
    errors = SmallCalls(pool).run(callers.swapped_layers, way, num_ranks=2)
    callers.check_names(errors, "layer 0", "layer 1")


def swapped_backwards(group: dist.ProcessGroup, of_operators: bool) -> callers.Error | None:
    with in_passes.Operators() if of_operators else nullcontext():
        return callers.swapped_backwards(group, "pre", "auto", compiled=False)


@pytest.mark.parametrize("of_operators", [False, True])
def test_backwards_in_another_order(pool, of_operators):
    """A backward names the forwards of its sub-batches, of which each layer has two."""
    errors = SmallCalls(pool).run(swapped_backwards, of_operators, num_ranks=2)
    callers.check_names(errors, "forward 1, of layer 'only'", "forward 3, of layer 'only'")


@pytest.mark.parametrize("verb", ["moe_ffn", "a forward"])
def test_a_layer_that_one_rank_refuses(pool, verb):
    """It counts once, however many sub-batches it has."""
    args = callers.refused_on, [1], verb, "auto", False
    for error, found in SmallCalls(pool).run(*args, num_ranks=2):
        assert not found
        callers.check_names([error], "rank 1 refused 2 calls that rank 0 did not")


# --- Errors --------------------------------------------------------------------------------------


def bring(group: dist.ProcessGroup, is_trained: bool, hint: int | None, *parts: Any) -> str:
    """What a layer raises on a Buffer for 17 tokens."""
    x, *more = on_device(parts)[:5]
    buffer, text = new(group, parts, 17), ""
    moe_ffn(x[:1], *(one[:1] for one in more[:2]), *more[2:], buffer)  # ranks meet for memory
    buffer.check()
    dist.barrier(group)  # or a rank is told while it still is in this layer
    try:
        moe_ffn(x.requires_grad_(is_trained), *more, buffer, hint)
        buffer.check()
    except MoeEngineError as error:
        text = f"{type(error).__name__}: {error}"
    dist.barrier(group)
    buffer.destroy()
    return text


@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "hint", "pattern"),
    [
        (20, None, "20 tokens .* takes 8, and a layer in sub-batches 17"),
        (14, 13, "max_tokens = 13"),
    ],
)
def test_more_tokens_than_the_layer_may_have(pool, is_trained, num_tokens, hint, pattern):
    parts = make_case(2, [num_tokens, 3])
    args = bring, is_trained, hint, *map(PerRank, parts)
    refused, told = SmallCalls(pool).run(*args, num_ranks=2)
    assert refused.startswith("TooManyTokens"), refused
    assert re.search(pattern, refused), refused
    assert told.startswith(("TooManyTokens", "CallAbandoned")), told


def refuse(group: dist.ProcessGroup, *parts: Any) -> None:
    """Arguments that do not fit are refused before any call, and the Buffer goes on."""
    x, idx, weights, up, down, _ = parts = on_device(parts)
    buffer = new(group, parts, 17)
    want = moe_ffn(*parts[:5], buffer)
    for is_trained in (False, True):
        given = x.detach().requires_grad_(is_trained)
        with counted() as calls:
            with pytest.raises(ShapeError, match="topk_idx"):
                moe_ffn(given, idx[:-1], weights, up, down, buffer)
            with pytest.raises(ShapeError, match="max_tokens is -1"):
                moe_ffn(given, idx, weights, up, down, buffer, -1)
        assert not calls.call_count or is_trained
    assert torch.equal(moe_ffn(*parts[:5], buffer), want)
    end(buffer)


def test_what_is_refused(pool):
    parts = make_case(2, [12, 3])
    SmallCalls(pool).run(refuse, *map(PerRank, parts), num_ranks=2)


def test_memory_is_for_one_call():
    most, sizes = SlotLayout.most_rows, (64, 8, 2, torch.bfloat16, 4)
    assert most == 65_536
    of_call, of_more = (sizes_for_tokens(Options(), n, *sizes) for n in (most, 2 * most + 1))
    assert of_call[:2] == of_more[:2]
    assert of_more[2].max_tokens == 2 * most + 1
    with pytest.raises(CapacityError, match="one call takes at most 65536"):
        Buffer.size_hint(65_537, 128, 1, 8, 2)
