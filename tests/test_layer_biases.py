"""Layers whose experts have biases and other activations, on every engine, against fp64."""

from __future__ import annotations

from typing import Any

import cases
import pytest
import torch
import torch.distributed as dist
from cases import relative_error
from einops import rearrange
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from training_cases import NAMES, end, make_case, new_buffer, on_device

from moe_engine import (
    Activation,
    Buffer,
    DelayedWgrad,
    DtypeError,
    MoEFeedForward,
    Options,
    ShapeError,
    WgradSink,
    moe_ffn,
    reference,
    start_moe_ffn,
)
from moe_engine.emulation import PerRank, RankPool

GPT_OSS = Activation("swiglu", limit=0.6, alpha=1.702, shift=1.0)
"""gpt-oss's, with a limit that random rows reach."""
WITH_BIASES = *NAMES, "b_gate_up", "b_down"
BOTH = ("gate_up", "down")
Parts = list[list[torch.Tensor]]


def make(
    num_tokens: list[int], biases: tuple[str, ...] = BOTH, has_gate: bool = True, **sizes: Any
) -> Parts:
    """Per-rank lists: x, ids, weights, both weights of experts, both biases (or empty), dy."""
    *parts, dy = make_case(len(num_tokens), num_tokens, **sizes)
    if not has_gate:
        parts[3] = [one[:, : one.shape[1] // 2].contiguous() for one in parts[3]]
    generator = torch.Generator().manual_seed(3)
    for name, like in zip(BOTH, parts[3:], strict=True):
        size = like[0].shape[:2] if name in biases else (0,)
        added = torch.randn(len(num_tokens), *size, generator=generator).to(like[0].dtype)
        parts.append(list(added.unbind()))
    return [*parts, dy]


def leaves_of(parts: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """x, weights, both weights of experts, both biases or None, as leaves."""
    return [
        one.detach().clone().requires_grad_() if one.numel() or at < 4 else None
        for at, one in enumerate((parts[0], *parts[2:7]))
    ]


def gradients(layer: Any, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """The result of a layer, and the gradients of its `leaves_of`."""
    leaves = leaves_of(parts)
    out = layer(leaves[0], parts[1], *leaves[1:4], biases=tuple(leaves[4:]))
    wanted = [one for one in leaves if one is not None]
    return [out.detach(), *torch.autograd.grad(out, wanted, parts[-1])]


def run(
    group: dist.ProcessGroup, activation: Any, how: dict[str, Any], policies: Any, *parts: Any
) -> dict[str, list[torch.Tensor]]:
    parts = on_device(parts)
    x, idx, _, up, *_ = parts
    max_tokens = max(how["max_tokens"])
    buffer = new_buffer(
        group, x, group.size() * len(up), idx.shape[1], max_tokens, how.get("backend", "auto"),
        **how.get("options", {}),
    )  # fmt: skip
    found = {}
    with cases.filled_memory():
        for save in policies:
            more: dict[str, Any] = dict(save=save, activation=activation)
            found[save] = gradients(
                lambda *a, more=more, **b: moe_ffn(*a, buffer, **more, **b), parts
            )
        again = gradients(lambda *a, **b: start_moe_ffn(*a, buffer, **more, **b).finish(), parts)
    assert all(map(torch.equal, again, found[save]))
    end(buffer)
    return {save: [one.cpu() for one in parts] for save, parts in found.items()}


def check(
    pool: RankPool,
    parts: Parts,
    activation: Any = GPT_OSS,
    policies: tuple[str, ...] = ("pre",),
    tolerance: float = 1e-5,
    **how: Any,
) -> None:
    """The result and the gradients of all ranks, the same bits by each policy."""
    ranks = len(parts[0])
    how["max_tokens"] = [len(x) for x in parts[0]]
    per_rank = [PerRank(part) for part in parts]
    found = pool.run(run, activation, how, policies, *per_rank, num_ranks=ranks)
    for have in found:
        for save in policies[1:]:
            assert all(map(torch.equal, have[policies[0]], have[save])), save
    *inputs, b_gate_up, b_down, dy = parts
    biases = [
        [one if one.numel() else torch.zeros_like(w[:, :, 0]) for one, w in zip(*both, strict=True)]
        for both in ((b_gate_up, inputs[3]), (b_down, inputs[4]))
    ]
    outs = reference.moe_ffn(
        *([one.double() if one.is_floating_point() else one for one in part] for part in inputs),
        biases=[[one.double() for one in part] for part in biases],
        activation=activation,
    )
    want = reference.moe_ffn_gradients(*inputs, dy, biases, activation)
    for have, out, grads in zip(found, outs, want, strict=True):
        present = [at for at in range(6) if at < 4 or parts[at + 1][0].numel()]
        wanted = [out, *(grads[at] for at in present)]
        names = ["y", *(WITH_BIASES[at] for at in present)]
        for name, one, other in zip(names, have[policies[0]], wanted, strict=True):
            error = relative_error(one, other)
            assert error < tolerance or not (one.any() or other.any()), f"{name}: {error}"


@pytest.mark.parametrize(
    ("activation", "biases"),
    [(GPT_OSS, BOTH), ("geglu_tanh", ()), ("swiglu", ("down",)), ("geglu", ("gate_up",))],
    ids=str,
)
def test_layers(pool: RankPool, activation: Any, biases: tuple[str, ...]) -> None:
    parts = make([9, 4], biases, kind="duplicates")
    check(pool, parts, activation, ("none", "pre", "rows", "all"))


@pytest.mark.parametrize(("activation", "biases"), [("relu2", ()), ("gelu_tanh", BOTH)], ids=str)
def test_layers_without_a_gate(pool: RankPool, activation: str, biases: tuple[str, ...]) -> None:
    parts = make([9, 4], biases, has_gate=False, kind="duplicates")
    check(pool, parts, activation, ("none", "pre", "rows", "all"))


def test_collectives_without_a_gate(pool: RankPool) -> None:
    parts = make([7, 5], (), has_gate=False)
    check(pool, parts, "relu2", ("none", "rows"), backend="collective")


@pytest.mark.parametrize("kind", ["holes", "empty_rank", "nothing"])
def test_routings(pool: RankPool, kind: str) -> None:
    check(pool, make([5, 0, 4], kind=kind), policies=("auto",))


def test_bf16(pool: RankPool) -> None:
    sizes: dict[str, Any] = dict(hidden=64, intermediate=48, dtype="bf16")
    activation = Activation("swiglu", limit=50.0, alpha=1.702, shift=1.0)
    check(pool, make([24, 16], **sizes), activation, tolerance=2e-2)


def test_collectives(pool: RankPool) -> None:
    check(pool, make([7, 0, 5], kind="holes"), policies=("none", "rows"), backend="collective")


def test_passes(pool: RankPool) -> None:
    """Every row goes to rank 0, which has room for a part of them."""
    parts = make([8, 7], kind="one_hot", num_topk=1)
    check(pool, parts, options={"capacity_factor": 1.0})


# --- Decode ----------------------------------------------------------------------------------


def run_decode(group: dist.ProcessGroup, activation: Any, *parts: Any) -> torch.Tensor:
    x, idx, weights, up, down, *biases, _ = on_device(parts)
    buffer = new_buffer(group, x, group.size() * len(up), idx.shape[1], 8)
    args = x, idx, weights, up, down, buffer
    with torch.no_grad(), cases.filled_memory():
        out = [moe_ffn(*args, biases=tuple(biases), activation=activation) for _ in range(3)]
    assert cases.num_low_latency_calls(buffer), "no low-latency call was made"
    assert torch.equal(out[0], out[2])
    end(buffer)
    return out[0].cpu()


@pytest.mark.parametrize(("activation", "has_gate"), [(GPT_OSS, True), ("relu2", False)], ids=str)
def test_decode(pool: RankPool, activation: Any, has_gate: bool) -> None:
    parts = make([3, 8], has_gate=has_gate)
    found = pool.run(run_decode, activation, *map(PerRank, parts), num_ranks=2)
    doubles = [[one.double() if one.is_floating_point() else one for one in p] for p in parts]
    wanted = reference.moe_ffn(*doubles[:5], biases=doubles[5:7], activation=activation)
    for one, other in zip(found, wanted, strict=True):
        assert relative_error(one, other) < 1e-5


# --- Where gradients of weights go elsewhere ---------------------------------------------------


def run_sinks(group: dist.ProcessGroup, *parts: Any) -> list[bool]:
    """Gradients of weights into a sink, delayed, and of interleaved rows: the same as to autograd,
    where those of biases go in each case."""
    parts = on_device(parts)
    x, idx, _, up, down, *_ = parts
    buffer = new_buffer(group, x, group.size() * len(up), idx.shape[1], 8)
    more: dict[str, Any] = dict(activation=GPT_OSS)
    plain = gradients(lambda *a, **b: moe_ffn(*a, buffer, **more, **b), parts)

    def with_wgrad(wgrad: Any) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        leaves = leaves_of(parts)
        tensors = leaves[0], idx, *leaves[1:4]
        out = moe_ffn(*tensors, buffer, wgrad=wgrad, biases=tuple(leaves[4:]), **more)
        out.backward(parts[-1])
        found = [one.grad for one in leaves]
        return found, leaves

    sink = WgradSink(torch.empty_like(up), torch.empty_like(down), accumulate=False)
    into, _ = with_wgrad(sink)
    assert into[2] is None
    assert into[3] is None
    later = DelayedWgrad()
    delayed, leaves = with_wgrad(later)
    assert delayed[2] is None
    later.backward_dw()
    of_leaves = [one.grad for one in leaves]
    rows = rearrange(up, "l (part rows) h -> l (rows part) h", part=2).contiguous()
    turned = [*parts[:3], rows, *parts[4:]]
    more["layout"] = "interleaved"
    in_turn = gradients(lambda *a, **b: moe_ffn(*a, buffer, **more, **b), turned)
    in_turn[3] = rearrange(in_turn[3], "l (rows part) h -> l (part rows) h", part=2)
    end(buffer)
    wanted = plain[1:]
    sunk = [into[0], into[1], sink.gate_up, sink.down, *into[4:]]
    every = zip(wanted, sunk, of_leaves, in_turn[1:], strict=True)
    return [torch.equal(first, one) for first, *others in every for one in others]


def test_other_ways_of_the_weights(pool: RankPool) -> None:
    parts = make([6, 3])
    for found in pool.run(run_sinks, *map(PerRank, parts), num_ranks=2):
        assert all(found), found


def run_module(group: dist.ProcessGroup, *parts: Any) -> None:
    x, idx, weights, up, down, *biases, dy = on_device(parts)
    buffer = new_buffer(group, x, group.size() * len(up), idx.shape[1], 8)
    sizes = len(up), x.shape[1], down.shape[2], buffer, x.dtype
    module = MoEFeedForward(*sizes, requires_grad=True, bias=True, activation=GPT_OSS)
    module.to(x.device)
    named = dict(module.named_parameters())
    assert list(named) == ["gate_up_proj", "down_proj", "gate_up_bias", "down_bias"]
    assert not named["gate_up_bias"].any()
    with torch.no_grad():
        for one, value in zip(named.values(), (up, down, *biases), strict=True):
            one.copy_(value)
    module(x, idx, weights).backward(dy)
    found = [one.grad for one in named.values()]
    more: dict[str, Any] = dict(activation=GPT_OSS)
    want = gradients(lambda *a, **b: moe_ffn(*a, buffer, **more, **b), on_device(parts))
    assert all(map(torch.equal, found, want[3:]))
    end(buffer)


def test_the_module(pool: RankPool) -> None:
    pool.run(run_module, *map(PerRank, make([6, 3])), num_ranks=2)


def run_one_bias_of_a_module(group: dist.ProcessGroup, *parts: Any) -> None:
    x, idx, weights, up, down, b_gate_up, _, _ = on_device(parts)
    buffer = new_buffer(group, x, group.size() * len(up), idx.shape[1], 8)
    module = MoEFeedForward(len(up), x.shape[1], down.shape[2], buffer, x.dtype, bias=True)
    for one, value in zip(module.parameters(), (up, down, b_gate_up), strict=False):
        one.data = value
    module.down_bias = None
    want = moe_ffn(x, idx, weights, up, down, buffer, biases=(b_gate_up, None))
    assert torch.equal(module(x, idx, weights), want)
    assert not torch.equal(moe_ffn(x, idx, weights, up, down, buffer), want)
    end(buffer)


def test_a_module_may_have_one_bias(pool: RankPool) -> None:
    pool.run(run_one_bias_of_a_module, *map(PerRank, make([6, 3])), num_ranks=2)


# --- Calls that are made again -------------------------------------------------------------------


def run_again(group: dist.ProcessGroup, *batches: Any) -> list[list[torch.Tensor]]:
    """Biases alone are trained, in calls of one kind with other numbers of rows; each backward runs
    twice, and the layer once more in a checkpoint, with the same bits."""
    found = []
    batches = [on_device(parts) for parts in batches]
    x, idx, _, up, *_ = batches[0]
    buffer = new_buffer(group, x, group.size() * len(up), idx.shape[1], 8)
    for parts in batches:
        x, idx, weights, up, down, *biases, dy = parts
        biases = [one.clone().requires_grad_() for one in biases]

        def layer(*both: torch.Tensor, tensors: Any = (x, idx, weights, up, down)) -> torch.Tensor:
            return moe_ffn(*tensors, buffer, biases=both, activation=GPT_OSS)

        out = layer(*biases)
        grads = torch.autograd.grad(out, biases, dy, retain_graph=True)
        assert all(map(torch.equal, torch.autograd.grad(out, biases, dy), grads))
        out = checkpoint(layer, *biases, use_reentrant=False)
        assert all(map(torch.equal, torch.autograd.grad(out, biases, dy), grads))
        found.append([one.cpu() for one in grads])
    end(buffer)
    return found


def test_biases_alone_are_trained(pool: RankPool) -> None:
    kinds = "holes", "uniform", "one_hot", "nothing", "uniform"
    batches = [make([6, 6], kind=kind, seed=seed) for seed, kind in enumerate(kinds)]
    ranks = [PerRank(list(zip(*parts, strict=True))) for parts in batches]
    found = pool.run(run_again, *ranks, num_ranks=2)
    for parts, *of_ranks in zip(batches, *found, strict=True):
        *inputs, b_gate_up, b_down, dy = parts
        want = reference.moe_ffn_gradients(*inputs, dy, [b_gate_up, b_down], GPT_OSS)
        for have, grads in zip(of_ranks, want, strict=True):
            for one, other in zip(have, grads[4:], strict=True):
                assert relative_error(one, other) < 1e-5 or not (one.any() or other.any())


def run_delayed(group: dist.ProcessGroup, *parts: Any) -> list[torch.Tensor]:
    """Delayed gradients of weights over collectives, on ranks of which one gets no rows."""
    parts = on_device(parts)
    x, idx, _, up, *_ = parts
    buffer = new_buffer(group, x, group.size() * len(up), idx.shape[1], 8, "collective")
    leaves, later = leaves_of(parts), DelayedWgrad()
    more: dict[str, Any] = dict(wgrad=later, biases=tuple(leaves[4:]), activation=GPT_OSS)
    moe_ffn(leaves[0], idx, *leaves[1:4], buffer, **more).backward(parts[-1])
    later.backward_dw()
    end(buffer)
    return [one.grad.cpu() for one in leaves]


def test_delayed_gradients_of_experts_without_rows(pool: RankPool) -> None:
    parts = make([5, 4], kind="one_hot", num_topk=1)
    found = pool.run(run_delayed, *map(PerRank, parts), num_ranks=2)
    assert all(one.any() for one in found[0][2:])
    assert not any(one.any() for one in found[1][2:])


# --- Operators -----------------------------------------------------------------------------------


class Seen(TorchDispatchMode):
    """Notes the operators of this package that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "moe_engine":
            self.names.add(func._schema.name)
        return func(*args, **kwargs or {})


def run_seen(group: dist.ProcessGroup, *parts: Any) -> list[bool]:
    x, idx, weights, up, down, *biases, _ = on_device(parts)
    buffer = new_buffer(group, x, group.size() * len(up), idx.shape[1], 8)
    found = []
    for more in (
        {},
        {"activation": Activation("swiglu"), "biases": (None, None)},
        {"activation": GPT_OSS},
        {"biases": tuple(biases)},
    ):
        with Seen() as seen:
            moe_ffn(x, idx, weights, up, down, buffer, **more)
        found.append("moe_engine::moe_ffn" in seen.names)
    end(buffer)
    return found


def test_plain_layers_are_operators(pool: RankPool) -> None:
    [found] = pool.run(run_seen, *(part[0] for part in make([4])), num_ranks=1)
    assert found == [True, True, False, False]


# --- Bad input -------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused() -> None:
    x, idx, weights, up, down, b_gate_up, b_down, _ = (part[0] for part in make([4]))
    sizes = 4, x.shape[1], len(up), idx.shape[1], x.dtype
    buffer = Buffer.for_tokens(None, *sizes, backend="collective", options=Options())
    args = x, idx, weights, up, down, buffer
    for more, error, text in (
        (dict(biases=b_gate_up), ShapeError, r"it must be a pair \(b_gate_up, b_down\)"),
        (dict(biases=(b_down, None)), ShapeError, "b_gate_up has shape"),
        (dict(biases=(None, b_down[:-1])), ShapeError, "b_down has shape"),
        (dict(biases=(b_gate_up.double(), None)), DtypeError, "b_gate_up"),
        (dict(biases=(None, 1.0)), DtypeError, "b_down"),
        (dict(biases=(None, b_down.T.contiguous().T)), ShapeError, "b_down"),
        (dict(activation="relu"), ShapeError, "it must be one of"),
        (dict(activation="none"), ShapeError, "that of a layer must be one of"),
        (dict(activation="silu"), ShapeError, "w_down has shape"),
    ):
        with pytest.raises(error, match=text):
            moe_ffn(*args, **more)  # type: ignore[arg-type]
    moe_ffn(*args, biases=(b_gate_up, b_down))
    buffer.destroy()
