"""The gradients of moe_ffn on every engine, against fp64 autograd of a layer on one rank."""

from __future__ import annotations

import math
from contextlib import contextmanager
from functools import partial
from unittest import mock

import cases
import pytest
import torch
from prepared_cases import prepared_as_graphs
from torch.utils.checkpoint import checkpoint
from training_cases import (
    NAMES,
    POLICIES,
    check_gradients,
    check_training,
    end,
    gradients,
    make_case,
    new_buffer,
    on_device,
)

from moe_engine import MoEFeedForward, launch, moe_ffn, prepared, reference
from moe_engine.emulation import PerRank
from moe_engine.grouped_gemm import grouped_mlp
from moe_engine.streams import ConcurrentReads

CASES = {
    "one rank": ([9], "uniform", POLICIES),
    "one rank, fewer rows than have room": ([9], "holes", POLICIES),
    "two ranks": ([9, 4], "duplicates", POLICIES),
    "a rank without tokens": ([5, 0, 4], "holes", ("pre",)),
    "all to one rank": ([6, 5], "one_hot", ("none",)),
    "experts without rows": ([4, 2, 3, 1], "empty_rank", ("all",)),
    "no rows": ([3, 2], "nothing", ("none", "all")),
    "no tokens": ([0, 0], "uniform", ("auto",)),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients(pool, name):
    num_tokens, kind, policies = CASES[name]
    if kind == "one_hot":  # every k of every token on rank 0
        check_training(pool, num_tokens, kind=kind, policies=policies, num_topk=1)
    else:
        check_training(pool, num_tokens, kind=kind, policies=policies)


def test_more_columns_than_hidden(pool):
    """Then rows are saved by default; and blocks of columns that are not full."""
    check_training(pool, [12, 5], intermediate=72, policies=("auto", "pre"))


def test_collectives(pool):
    check_training(pool, [7, 0, 5], kind="holes", backend="collective", policies=("none", "rows"))


@contextmanager
def noting_launches():
    """(name, grid) of each kernel that is interpreted meanwhile."""
    made, run = [], launch.InterpretedLaunch.__call__

    def noting(self, stream):
        made.append((self.name, self._grid))
        run(self, stream)

    with mock.patch.object(launch.InterpretedLaunch, "__call__", noting):
        yield made


def programs_of_backwards(group, routed, x, idx, *parts):
    """How many programs the pass over the gradients of activations has in backwards of a layer with
    so many routed tokens, one after the other."""
    buffer = new_buffer(group, x, group.size() * len(parts[1]), idx.shape[1], len(x))
    with noting_launches() as made:
        for number in routed:
            ids = torch.where(torch.arange(len(x))[:, None] < number, idx, -1)
            gradients(lambda *a: moe_ffn(*a, buffer, save="pre"), x, ids, *parts)
    end(buffer)
    return [grid for name, grid in made if name == "_activation_gradient_kernel"]


def test_a_first_backward_of_few_rows_does_not_limit_later_ones(pool):
    cases.skip_where_shapes_compile(pool)  # where a grid is seen in its launch
    parts = [PerRank(part) for part in make_case(1, [40])]
    ((first, second),) = pool.run(programs_of_backwards, [1, 40], *parts, num_ranks=1)
    assert first == second
    assert first[0] > 1


def copies_of_rows(group, save, x, idx, *parts):
    """How often a forward and its backward copy expert rows, and how often for them to stay."""
    buffer = new_buffer(group, x, group.size() * len(parts[1]), idx.shape[1], len(x))
    with noting_launches() as made:
        gradients(lambda *a: moe_ffn(*a, buffer, save=save), x, idx, *parts)
    end(buffer)
    names = [name for name, _ in made]
    return names.count("copy_rows_kernel"), names.count("keep_rows_kernel")


@pytest.mark.parametrize(("num_ranks", "kept"), [(1, 0), (2, 1)])
def test_saved_rows_of_one_rank_come_where_they_stay(pool, num_ranks, kept):
    cases.skip_where_shapes_compile(pool)
    parts = [PerRank(part) for part in make_case(num_ranks, [4])]
    for save, count in (("all", (2, kept)), ("pre", (3, 0))):
        found = pool.run(copies_of_rows, save, *parts, num_ranks=num_ranks)
        assert found == [count] * num_ranks


def under_autocast(group, x, *parts):
    """How far autocast moves the result and the gradients, by the kernels and by collectives."""
    parts, errors = on_device([x, *parts]), []
    for backend in ("auto", "collective"):
        sizes = group.size() * len(parts[3]), parts[1].shape[1], len(x), backend
        buffer = new_buffer(group, parts[0], *sizes)
        plain, cast = (
            gradients(partial(autocasting, enabled, buffer), *parts) for enabled in (False, True)
        )
        errors += map(cases.relative_error, cast, plain)
        end(buffer)
    return errors


def autocasting(enabled, buffer, x, *rest):
    with torch.autocast(x.device.type, torch.bfloat16, enabled=enabled):
        return moe_ffn(x, *rest, buffer)


def test_experts_do_not_follow_autocast(pool):
    parts = [PerRank(part) for part in make_case(1, [6])]
    assert max(*pool.run(under_autocast, *parts, num_ranks=1)) < 1e-6


def test_a_rank_without_tokens_or_rows_gets_zeros(pool):
    _, found = check_training(pool, [4, 3], kind="empty_rank", num_topk=1, policies=("pre",))
    *_, of_gate_up, of_down = found[1]
    assert not of_gate_up.any()
    assert not of_down.any()


def run_alone(group, *parts):
    """Gradients of the layer by `grouped_mlp` on one rank, whose rows are added up in fp32."""
    x, idx, weights, up, down, dy = on_device(parts)
    leaves = [one.detach().clone().requires_grad_() for one in (x, weights, up, down)]
    token, k = (idx >= 0).nonzero(as_tuple=True)
    order = idx[token, k].argsort(stable=True)
    token, k = token[order], k[order]
    ends = torch.bincount(idx[token, k], minlength=len(up)).cumsum(0)
    offsets = torch.nn.functional.pad(ends, (1, 0)).int()
    row_weight = leaves[1][token, k]
    y = grouped_mlp(leaves[0], *leaves[2:], offsets, row_index=token, row_weight=row_weight)
    out = torch.zeros(x.shape, device=x.device).index_add(0, token, y.float())
    return [one.cpu() for one in torch.autograd.grad(out.to(x.dtype), leaves, dy)]


def test_bf16_is_as_exact_as_without_other_ranks(pool):
    sizes = dict(hidden=64, intermediate=48, num_local=2, num_topk=3)
    parts, found = check_training(pool, [40, 24], "bf16", policies=("pre",), **sizes)
    [alone] = pool.run(run_alone, *(torch.cat(part) for part in parts), num_ranks=1)
    wanted = [torch.cat(one) for one in zip(*reference.moe_ffn_gradients(*parts), strict=True)]
    have = [torch.cat(one) for one in list(zip(*found, strict=True))[1:]]
    for name, one, other, want in zip(NAMES, have, alone, wanted, strict=True):
        assert cases.relative_error(one, want) <= 1.25 * cases.relative_error(other, want), name


# --- Calls of a kind, and what they are asked for ------------------------------------------------


def run_again(group, *batches):
    """Gradients of layers of one shape and other routings, so other numbers of rows."""
    batches = [on_device(parts) for parts in batches]
    x, idx, _, up, _, _ = batches[0]
    buffer = new_buffer(group, x, group.size() * len(up), idx.shape[1], len(x))
    read = ConcurrentReads.read
    reading = mock.patch.object(ConcurrentReads, "read", autospec=True, side_effect=read)
    sharing = mock.patch.object(prepared, "OWN_AFTER", math.inf)  # by weights at other addresses
    with prepared_as_graphs(), sharing, reading as reads:
        found = [gradients(lambda *a: moe_ffn(*a, buffer), *parts) for parts in batches]
    num_kinds = len(buffer._engine.slots.calls)
    if group.size() == 1:  # a forward, which waits for nothing, and a backward
        assert (num_kinds, reads.call_count) == (2, 0)
    else:  # three parts of a forward and a backward, each prepared once
        assert (num_kinds, reads.call_count) == (4, len(batches))
    for parts, first in zip(batches, found, strict=True):  # others have run since
        with sharing:
            second = gradients(lambda *a: moe_ffn(*a, buffer), *parts)
        assert all(map(torch.equal, first, second))
    assert len(buffer._engine.slots.calls) == num_kinds
    kinds = buffer._engine.slots.calls._kinds.values()
    alone = [call._graphs is None for kind in kinds for call in kind.prepared.values()]
    assert sum(alone) == (0 if group.size() == 1 else 2)  # rows are sent, and multiplied meanwhile
    end(buffer)
    return [[one.cpu() for one in parts] for parts in found]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_kind_of_call_takes_any_number_of_rows(pool, num_ranks):
    kinds = "holes", "uniform", "one_hot"
    batches = [make_case(num_ranks, [8], kind=kind, seed=seed) for seed, kind in enumerate(kinds)]
    ranks = [PerRank(list(zip(*parts, strict=True))) for parts in batches]
    found = pool.run(run_again, *ranks, num_ranks=num_ranks)
    for parts, of_ranks in zip(batches, zip(*found, strict=True), strict=True):
        check_gradients(of_ranks, parts)


def run_some(group, x, idx, weights, up, down, dy):
    """The gradients of one of the four at a time, of all, and of a sum, whose gradient has strides
    of 0, with those of a gradient of ones."""
    x, idx, weights, up, down, dy = on_device((x, idx, weights, up, down, dy))
    buffer = new_buffer(group, x, group.size() * len(up), idx.shape[1], 8)
    args = [x, weights, up, down]
    all_of_them = gradients(lambda *a: moe_ffn(*a, buffer), x, idx, weights, up, down, dy)[1:]
    some = []
    for number in range(4):
        one = args[number].clone().requires_grad_()
        parts = [*args[:number], one, *args[number + 1 :]]
        moe_ffn(parts[0], idx, *parts[1:], buffer).backward(dy)
        some.append(one.grad)
    ones = gradients(lambda *a: moe_ffn(*a, buffer), x, idx, *args[1:], torch.ones_like(x))[1:]
    leaves = [one.clone().requires_grad_() for one in args]
    moe_ffn(leaves[0], idx, *leaves[1:], buffer).sum().backward()
    end(buffer)
    return (
        [torch.equal(*pair) for pair in zip(all_of_them, some, strict=True)],
        [torch.equal(one, leaf.grad) for one, leaf in zip(ones, leaves, strict=True)],
    )


def test_gradients_that_are_asked_for(pool):
    parts = [PerRank(part) for part in make_case(2, [8, 3])]
    for some, of_sum in pool.run(run_some, *parts, num_ranks=2):
        assert all(some)
        assert all(of_sum)


# --- Modules, checkpoints, micro-batches ---------------------------------------------------------


def two_layers(group, x, num_topk, up, down):
    """(Buffer, two modules) on it, whose experts are those given and the same scaled."""
    buffer = new_buffer(group, x, group.size() * len(up), num_topk, 16)
    layers = []
    for scale in (1.0, 0.5):
        layer = MoEFeedForward(*up.shape[::2], down.shape[2], buffer, x.dtype, requires_grad=True)
        layer = layer.to(cases.device())
        with torch.no_grad():
            layer.gate_up_proj.copy_(up * scale)
            layer.down_proj.copy_(down * scale)
        layers.append(layer)
    return buffer, torch.nn.ModuleList(layers)


def run_orders(group, num_batches, x, idx, weights, up, down, dy):
    """Gradients of the experts of two layers over micro-batches, one after the other and by 1F1B
    with checkpoints: whether they are the same; and the bytes of expert rows."""
    x, idx, weights, up, down, dy = on_device((x, idx, weights, up, down, dy))
    buffer, layers = two_layers(group, x, idx.shape[1], up, down)
    batches = [x * (1 + number) for number in range(num_batches)]

    def forward(batch, checkpointed=False):
        for layer in layers:
            args = batch, idx, weights
            y = checkpoint(layer, *args, use_reentrant=False) if checkpointed else layer(*args)
            batch = batch + y
        return batch

    def collect():
        grads = [one.grad.clone() for one in layers.parameters()]
        layers.zero_grad()
        return grads

    for batch in batches:
        forward(batch).backward(dy)
    plain = collect()
    outs = [forward(batch, checkpointed=True) for batch in batches[:2]]
    for number, batch in enumerate(batches[2:]):  # one forward, one backward
        outs.pop(0).backward(dy)
        outs.append(forward(batch, checkpointed=number % 2 == 0))
    for out in outs:
        out.backward(dy)
    in_turn = collect()
    num_bytes = buffer._engine.slots.expert_rows.local.numel()
    end(buffer)
    return all(map(torch.equal, plain, in_turn)), num_bytes


def test_micro_batches_in_any_order(pool):
    parts = [PerRank(part) for part in make_case(2, [6, 5], num_topk=2)]
    found = pool.run(run_orders, 3, *parts, num_ranks=2)
    assert all(is_same for is_same, _ in found)
    # Rows, and 12 bytes for each of them: two ranks bring up to 16 tokens of top 2.
    assert found[0][1] == 2 * 16 * 2 * (32 * 4 + 12)
