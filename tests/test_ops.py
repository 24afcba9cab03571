"""The operators `dispatch` and `combine`: what comes where, gradients against fp64, steps."""

from __future__ import annotations

import cases
import pytest
import torch
from ops_cases import buffer_for, experts, layer, layer_in_parts
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from training_cases import check_gradients, end, gradients, make_case, on_device

from moe_engine.checkpointing import SAVED_OPS
from moe_engine.emulation import PerRank
from moe_engine.operators import operators
from moe_engine.ops import (
    combine,
    combine_start,
    combine_wait,
    dispatch,
    dispatch_start,
    dispatch_wait,
)

# --- Gradients -----------------------------------------------------------------------------------


def run_layers(group, backend, how, *parts):
    """Result and gradients of a layer, and whether they have the same bits in parts, and when the
    step is repeated with rows checked."""
    parts = on_device(parts)
    x, idx, weights, up, _, _ = parts
    buffer = buffer_for(group, parts, backend)
    with cases.filled_memory():
        found = gradients(lambda *a: layer(*a, buffer, **how), *parts)
        in_parts = gradients(lambda *a: layer_in_parts(*a, buffer, **how), *parts)
        got = dispatch(x, idx, weights, group.size() * len(up), buffer, **how)
    same = all(map(torch.equal, found, in_parts))
    end(buffer)
    values = got.rows, got.row_weights, got.offsets, got.counts, got.plan.slots
    return [one.cpu() for one in found], same, [one.cpu() for one in values]


def check_rows(parts, rank, values, alignment):
    """Each expert's rows are its tokens by source rank, token and k; then come zeros."""
    rows, row_weights, offsets, counts, slots = values
    x, idx, weights, up, *_ = parts
    num_local = len(up[0])
    assert (
        counts.tolist()
        == torch.bincount(
            torch.cat(idx).flatten()[torch.cat(idx).flatten() >= 0], minlength=num_local * len(x)
        ).tolist()
    )
    for local in range(num_local):
        wanted = [
            (source, token, k)
            for source in range(len(x))
            for token, k in (idx[source] == rank * num_local + local).nonzero().tolist()
        ]
        first, last = offsets[local], offsets[local + 1]
        assert last - first == -(-len(wanted) // alignment) * alignment
        for row, (source, token, k) in enumerate(wanted, int(first)):
            assert torch.equal(rows[row], x[source][token])
            assert row_weights[row] == weights[source][token, k]
        assert not rows[first + len(wanted) : last].any()
        assert not row_weights[first + len(wanted) : last].any()
        assert (slots[first + len(wanted) : last] == -1).all()
    assert not rows[offsets[-1] :].any()


CASES = {
    "one rank": ([9], "uniform", {}),
    "two ranks": ([9, 4], "duplicates", {"alignment": 16}),
    "a rank without tokens": ([5, 0, 4], "holes", {"alignment": 32}),
    "all to one rank": ([6, 5], "one_hot", {}),
    "experts without rows": ([4, 2, 3, 1], "empty_rank", {"max_rows": 128, "alignment": 16}),
    "no rows": ([3, 2], "nothing", {"max_rows": 8}),
    "no tokens": ([0, 0], "uniform", {"alignment": 128}),
    "room left": ([5, 3], "uniform", {"max_rows": 256, "alignment": 32}),
}
LONG = {"experts without rows"}


@pytest.mark.parametrize("name", cases.slow_unless([(n,) for n in CASES if n not in LONG], CASES))
def test_gradients(pool, name):
    num_tokens, kind, how = CASES[name]
    num_topk = 1 if kind == "one_hot" else 3
    parts = make_case(len(num_tokens), num_tokens, kind=kind, num_topk=num_topk)
    ranks = [PerRank(part) for part in parts]
    found = pool.run(run_layers, "auto", how, *ranks, num_ranks=len(num_tokens))
    check_gradients([one for one, _, _ in found], parts)
    for rank, (_, same, values) in enumerate(found):
        assert same
        check_rows(parts, rank, values, how.get("alignment", 1))
        assert len(values[0]) == how.get("max_rows", values[2][-1])


def test_collectives(pool):
    parts = make_case(3, [7, 0, 5], kind="holes")
    ranks = [PerRank(part) for part in parts]
    found = pool.run(run_layers, "collective", {"alignment": 16}, *ranks, num_ranks=3)
    check_gradients([one for one, _, _ in found], parts)
    for rank, (_, same, values) in enumerate(found):
        assert same
        check_rows(parts, rank, values, 16)


def test_bf16(pool):
    parts = make_case(2, [9, 6], dtype="bf16", kind="holes")
    ranks = [PerRank(part) for part in parts]
    found = pool.run(run_layers, "auto", {}, *ranks, num_ranks=2)
    check_gradients([one for one, _, _ in found], parts, "bf16")


# --- Micro-batches, checkpoints, compilers -------------------------------------------------------


def run_micro_batches(group, *parts):
    """Whether two micro-batches in flight at once give the bits of one after the other, forward and
    backward in either order; whether gradients add up over them."""
    x, idx, weights, up, down, dy = on_device(parts)
    buffer, num_experts = buffer_for(group, parts), group.size() * len(up)
    batches = x, 2 * x
    wanted = [gradients(lambda *a: layer(*a, buffer), one, idx, weights, up, down, dy)
              for one in batches]  # fmt: skip

    def start(batch):
        leaves = [one.clone().requires_grad_() for one in (batch, weights)]
        return leaves, dispatch_start(leaves[0], idx, leaves[1], num_experts, buffer)

    def compute(sent):
        got = dispatch_wait(sent)
        y = experts(got.rows, got.offsets, *shared) * got.row_weights[:, None]
        return combine_start(y, got.plan, buffer), got.plan

    shared = [one.clone().requires_grad_() for one in (up, down)]
    (first, one), (second, two) = start(batches[0]), start(batches[1])
    in_flight = compute(one), compute(two)
    outs = [combine_wait(*these) for these in in_flight]
    outs[1].backward(dy)
    outs[0].backward(dy)
    same = [torch.equal(out, want[0]) for out, want in zip(outs, wanted, strict=True)]
    for leaves, want in zip((first, second), wanted, strict=True):
        same += [torch.equal(leaf.grad, one) for leaf, one in zip(leaves, want[1:3], strict=True)]
    sums = [a + b for a, b in zip(wanted[1][3:], wanted[0][3:], strict=True)]
    same += [torch.equal(leaf.grad, one) for leaf, one in zip(shared, sums, strict=True)]
    same.append(not buffer._in_flight or x.device.type == "cpu")
    end(buffer)
    return same


def test_two_micro_batches_in_flight(pool):
    parts = [PerRank(part) for part in make_case(2, [6, 5], num_topk=2)]
    for same in pool.run(run_micro_batches, *parts, num_ranks=2):
        assert all(same), same


def run_checkpoints(group, *parts):
    """Whether checkpoints give the bits of a plain step, and how many calls each of them makes."""
    parts = on_device(parts)
    buffer, calls = buffer_for(group, parts), []
    engine = buffer._engine

    def noted(name, call):
        return lambda *args, **more: (calls.append(name), call(*args, **more))[1]

    for name in ("dispatch", "dispatch_cached", "combine"):
        setattr(engine, name, noted(name, getattr(engine, name)))

    def saved(*args):
        def contexts():
            return create_selective_checkpoint_contexts(list(SAVED_OPS))

        return checkpoint(
            lambda *a: layer(*a, buffer), *args, use_reentrant=False, context_fn=contexts
        )

    ways = {
        "plain": lambda *a: layer(*a, buffer),
        "checkpoint": lambda *a: checkpoint(layer, *a, buffer, use_reentrant=False),
        "selective": saved,
    }
    found = {}
    for name, way in ways.items():
        calls.clear()
        found[name] = gradients(way, *parts), list(calls)
    end(buffer)
    same = [all(map(torch.equal, found["plain"][0], one)) for one, _ in found.values()]
    return same, [made for _, made in found.values()]


def test_checkpoints(pool):
    parts = [PerRank(part) for part in make_case(2, [5, 3], num_topk=2)]
    for same, (plain, whole, selective) in pool.run(run_checkpoints, *parts, num_ranks=2):
        assert all(same)
        assert plain == selective == ["dispatch", "combine", "dispatch_cached", "combine"]
        assert sorted(whole) == sorted([*plain, "dispatch", "combine"])


def grouped_layer(x, router, up, down, buffer, num_topk, max_rows):
    """A router, and experts by torch's grouped GEMM: nothing here waits for the device."""
    weights, idx = (x.float() @ router.T).softmax(-1).topk(num_topk)
    got = dispatch(x, idx, weights, len(router), buffer, max_rows=max_rows, alignment=16)
    ends = got.offsets[1:]
    gate, gated = torch._grouped_mm(got.rows, up.transpose(1, 2), offs=ends).chunk(2, 1)
    act = torch.nn.functional.silu(gate) * gated
    y = torch._grouped_mm(act, down.transpose(1, 2), offs=ends)
    y = torch.where(got.plan.slots[:, None] < 0, 0.0, y) * got.row_weights[:, None]
    return combine(y.to(x.dtype), got.plan, buffer)


def run_compiled(group, max_rows, router, *parts):
    """Whether a layer compiled as one graph gives what it gives uncompiled, with gradients; for
    two numbers of tokens."""
    torch._dynamo.reset()
    x, idx, _, up, down, dy = on_device(parts)
    buffer, router = buffer_for(group, parts), router.to(x.device)
    compiled = torch.compile(grouped_layer, fullgraph=True, backend="aot_eager")
    same = []
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for num_tokens in (len(x), len(x) - 2):
            found = []
            for function in (grouped_layer, compiled):
                leaves = [
                    one.clone().requires_grad_() for one in (x[:num_tokens], router, up, down)
                ]
                out = function(*leaves, buffer, idx.shape[1], max_rows)
                found.append([out, *torch.autograd.grad(out, leaves, dy[:num_tokens])])
            same.append([torch.equal(*pair) for pair in zip(*found, strict=True)])
    torch._dynamo.reset()
    end(buffer)
    return same


@pytest.mark.parametrize("max_rows", cases.slow_unless([(96,)], [96, None]))
def test_a_layer_is_one_graph(pool, max_rows):
    parts = make_case(2, [6, 5], num_local=2, num_topk=2, intermediate=16, dtype="bf16")
    router = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    found = pool.run(run_compiled, max_rows, router, *map(PerRank, parts), num_ranks=2)
    for same in found:
        assert same == [[True] * 5] * 2


CHECKS = "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"


def run_opcheck(group, *parts):
    """torch's own checks of all operators, by name, on plans of a real dispatch."""
    x, idx, weights, up, _, _ = on_device(parts)
    buffer, num_experts = buffer_for(group, parts), group.size() * len(up)
    x, weights = x.requires_grad_(), weights.requires_grad_()
    args = x, idx, weights, num_experts, buffer.id
    sent = dispatch_start(x, idx, weights, num_experts, buffer)
    got = dispatch_wait(sent)
    rows, plan = got.rows.detach().requires_grad_(), list(got.plan)
    back = combine_start(rows, got.plan, buffer)
    combine_wait(back, got.plan)
    tickets = [torch.ones_like(one).requires_grad_() for one in sent.tickets]
    ticket = torch.ones_like(back.ticket).requires_grad_()
    y, in_flight = back.sums.detach(), [one.detach() for one in sent.sent]
    found = {}
    inputs = {
        "dispatch": [args, (*args, 64, 16)],
        "dispatch_start": [args, (*args, 64, 16)],
        "dispatch_wait": [(*tickets, in_flight, plan, buffer.id)],
        "combine": [
            (rows, None, plan, buffer.id),
            (rows, got.row_weights.detach(), plan, buffer.id),
        ],
        "combine_start": [(rows, None, plan, buffer.id)],
        "combine_wait": [(ticket, y, y.new_empty(0), plan, buffer.id)],
        "cached_dispatch": [(x, plan, buffer.id)],
        "cached_dispatch_start": [(x.detach(), plan, buffer.id)],
        "cached_dispatch_wait": [(in_flight[0], plan, buffer.id)],
    }
    for name, of in inputs.items():
        for number, one in enumerate(of):
            is_new = name in ("dispatch", "dispatch_start") and buffer.num_nodes > 1
            operator = getattr(operators, is_new * "internode_" + name).default
            # A plan has the number of its call, so that two calls of these are never the same; and
            # what is in flight on a GPU is not there to be compared.
            differs = name.startswith("dispatch") or (x.is_cuda and name.endswith("_start"))
            tests = CHECKS[:-1] if differs and name != "dispatch_wait" else CHECKS
            results = torch.library.opcheck(operator, one, test_utils=tests, raise_exception=False)
            found[name, number] = {test: str(result) for test, result in results.items()}
    end(buffer)
    return found


@pytest.mark.slow
def test_opcheck(pool):
    parts = [PerRank(part) for part in make_case(1, [4], num_local=2, num_topk=2)]
    for found in pool.run(run_opcheck, *parts, num_ranks=1):
        for name, results in found.items():
            assert set(results.values()) == {"SUCCESS"}, (name, results)
        assert len(found) == 12


def run_steps(group, *parts):
    """Whether gradients of the experts add up over two steps, and what autocast changes of rows."""
    x, idx, weights, up, down, dy = parts = on_device(parts)
    buffer = buffer_for(group, parts)
    leaves = [one.clone().requires_grad_() for one in (up, down)]
    for scale in (1, 2):
        layer(scale * x, idx, weights, *leaves, buffer).backward(dy)
    alone = [gradients(lambda *a: layer(*a, buffer), scale * x, idx, weights, up, down, dy)[3:]
             for scale in (1, 2)]  # fmt: skip
    same = [
        torch.equal(leaf.grad, sum(one))
        for leaf, one in zip(leaves, zip(*alone, strict=True), strict=True)
    ]
    leaf = x.clone().requires_grad_()
    with torch.autocast(x.device.type, torch.bfloat16):
        out = layer(leaf, idx, weights, up, down, buffer)
    out.backward(dy)
    error = cases.relative_error(leaf.grad, gradients(lambda *a: layer(*a, buffer), *parts)[1])
    end(buffer)
    return same, out.dtype, leaf.grad.dtype, error


def test_steps_and_autocast(pool):
    parts = [PerRank(part) for part in make_case(2, [5, 4], num_topk=2)]
    for same, *dtypes, error in pool.run(run_steps, *parts, num_ranks=2):
        assert all(same)
        assert dtypes == [torch.float32] * 2
        assert 0 < error < 0.03  # the experts' products were of bf16
