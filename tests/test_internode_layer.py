"""Layers of ranks on several emulated nodes, forward and backward, against the oracle in fp64."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import cases
import internode_cases as calls
import pytest
import test_compiled_layer
import test_decode_layer as of_decode
import test_layer_biases as with_biases
import test_quantized_layer as quantized
import test_weight_gradients as of_weights
import torch
import torch.distributed as dist
from layer_cases import check_layer
from node_cases import InParts
from training_cases import (
    check_training,
    end,
    gradients,
    make_case,
    new_buffer,
    on_device,
    poison_all,
)

from moe_engine import BackendError, Buffer, MoEFeedForward, Options, moe_ffn, reference
from moe_engine.emulation import PerRank
from moe_engine.engines import internode_layer, layer_by_verbs
from moe_engine.engines.base import LayerInputs
from moe_engine.errors import TooManyTokens
from moe_engine.grouped_gemm.quantization import quantized_bytes
from moe_engine.symm.nic import Nic
from moe_engine.symm.slots import RowLayout
from moe_engine.tools.models import Kind

STAGED: dict[str, Any] = {"options": {"decode_tokens": 0}}


every_routing = pytest.mark.parametrize(
    ("kind", "shape"),
    cases.slow_unless(
        [("skewed", "2x2"), ("one_hot", "3x2"), ("empty_rank", "4x1"), ("nothing", "2x2")],
        cases.ROUTINGS,
        ["2x2", "3x2", "4x1"],
    ),
)


def per_rank(parts: list[list[torch.Tensor]]) -> list[PerRank]:
    return [PerRank(part) for part in parts]


# --- Forward and backward ------------------------------------------------------------------------


@every_routing
def test_every_routing(nodes, shape, kind):
    on = nodes(shape)
    num_tokens = [20, 0, 11, 7, 1, 9][: on.num_ranks]
    check_layer(on, on.num_ranks, num_tokens, 32, 24, 2, 3, kind, "bf16", num_calls=2)


CASES: dict[str, tuple[str, list[int], str, tuple[str, ...]]] = {
    "every policy": ("2x2", [9, 4, 0, 5], "duplicates", ("none", "pre", "rows", "all")),
    "nodes of one rank": ("4x1", [6, 3, 0, 4], "holes", ("rows",)),
    "three nodes": ("3x2", [5, 0, 4, 3, 1, 6], "empty_rank", ("none",)),
    "no rows": ("2x2", [3, 2, 1, 1], "nothing", ("pre",)),
    "no tokens": ("2x2", [0, 0, 0, 0], "uniform", ("auto",)),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients(nodes, name):
    shape, num_tokens, kind, policies = CASES[name]
    check_training(nodes(shape), num_tokens, kind=kind, policies=policies)


def test_bf16(nodes):
    sizes: dict[str, Any] = dict(hidden=64, intermediate=48)
    check_training(nodes("2x2"), [12, 8, 5, 9], "bf16", policies=("pre",), **sizes)


@pytest.mark.parametrize(
    ("activation", "has_gate", "biases"),
    [(with_biases.GPT_OSS, True, with_biases.BOTH), ("relu2", False, ())],
    ids=str,
)
def test_biases_and_other_activations(nodes, activation, has_gate, biases):
    parts = with_biases.make([6, 4, 0, 3], biases, has_gate, kind="duplicates")
    with_biases.check(nodes("2x2"), parts, activation, ("none", "rows"), **STAGED)


def test_weights_in_e4m3(nodes):
    parts = quantized.make([4, 7, 0, 5], has_bias=True)
    quantized.check(nodes("2x2"), parts, with_biases.GPT_OSS)


def bytes_sent(group: dist.ProcessGroup, hint: int | None, *parts: Any) -> list[Counter[int]]:
    """Over the network to each rank, by a layer with bf16 weights and by one with e4m3 weights."""
    x, idx, weights, up, down, s_up, s_down, *_ = quantized.got(parts)
    sizes, options = (group.size() * len(up), idx.shape[1], 8), {} if hint else {"decode_tokens": 0}
    buffer = new_buffer(group, x, *sizes, **options)
    counted = [Nic.of_process().num_bytes.copy()]
    for both in ((up.bfloat16(), down.bfloat16()), ((up, s_up), (down, s_down))):
        moe_ffn(x, idx, weights, *both, buffer, max_tokens=hint)
        counted.append(Nic.of_process().num_bytes.copy())
    end(buffer)
    return [after - before for before, after in pairwise(counted)]


@pytest.mark.parametrize(("which", "hint"), [("none", None), ("all", None), ("none", 8)])
def test_rows_cross_the_network_in_e4m3(nodes, which, hint):
    """For e4m3 weights; sums return in bf16."""
    parts = quantized.make([4, 7, 0, 5])
    idx, num_local = parts[1], len(parts[3][0])
    num_topk, hidden = idx[0].shape[1], parts[0][0].shape[1]
    rows = (RowLayout(n, num_topk).num_bytes for n in (2 * hidden, quantized_bytes(hidden)))
    saved = operator.sub(*rows)
    assert saved > 0.9 * hidden
    on = nodes("2x2") if hint else InParts(nodes("2x2"), which)
    for rank, (wide, narrow) in enumerate(on.run(bytes_sent, hint, *quantized.sent(parts))):
        peer = (rank + 2) % 4
        assert [*wide] == [*narrow] == [peer]
        num_rows = calls.tokens_for(idx[rank], peer // 2, 2 * num_local)
        assert wide[peer] - narrow[peer] == num_rows * saved


def in_memory_of(
    group: dist.ProcessGroup, dtype: torch.dtype | None, *parts: Any
) -> tuple[torch.Tensor | None, str]:
    """The result of a layer with e4m3 weights on a Buffer for rows of this dtype, None: one that
    grows; or the name of its error."""
    x, idx, weights, up, down, s_up, s_down, *_ = quantized.got(parts)
    options = Options(decode_tokens=0)
    if dtype is None:
        buffer = Buffer(group, 1 << 20, options=options)
    else:
        sizes = len(x), x.shape[1], group.size() * len(up), idx.shape[1]
        buffer = Buffer.for_tokens(group, *sizes, dtype, options=options)
    try:
        return moe_ffn(x, idx, weights, (up, s_up), (down, s_down), buffer), ""
    except TooManyTokens as error:
        return None, str(error)


MANY: dict[str, Any] = dict(num_local=1, num_topk=1, hidden=1024, intermediate=144, kind="one_hot")
"""Of 64 tokens these are 64 KB in e4m3, and twice as much in bf16, in which sums return."""


def test_memory_grows_for_the_sums_of_rows_in_e4m3(nodes):
    parts = quantized.make([64] * 4, **MANY)
    found = nodes("2x2").run(in_memory_of, None, *quantized.sent(parts))
    *routed, up, down, s_up, s_down, _, _ = parts
    wanted = reference.moe_ffn(*routed, up, down, activation="swiglu", scales=(s_up, s_down))
    for (have, error), want in zip(found, wanted, strict=True):
        assert not error
        assert cases.relative_error(have, want) < quantized.TOLERANCE


@pytest.mark.parametrize("which", ["none", "all"])
def test_memory_without_room_for_the_sums_is_refused(nodes, which):
    """Before anything is sent, on all ranks."""
    sent = quantized.sent(quantized.make([64] * 4, **MANY))
    found = InParts(nodes("2x2"), which).run(in_memory_of, torch.float8_e4m3fn, *sent)
    for have, error in found:
        assert have is None
        assert "64 tokens of 2048 bytes" in error


# --- In two parts, where the network is to be hidden ---------------------------------------------


def result_and_gradients(group: dist.ProcessGroup, max_tokens: int, *parts: Any) -> Any:
    """By twice the same calls, on poisoned memory: the result of inference, that of training, and
    the gradients."""
    x, idx, weights, up, down, dy = on_device(parts)
    sizes = group.size() * len(up), idx.shape[1], max_tokens
    buffer = new_buffer(group, x, *sizes, decode_tokens=0)
    found = []
    with cases.filled_memory():
        for _ in range(2):
            plain = moe_ffn(x, idx, weights, up, down, buffer)
            both = []
            for save in ("pre", "rows"):
                layer = partial(moe_ffn, buffer=buffer, save=save)
                both.append(gradients(layer, x, idx, weights, up, down, dy))
            assert all(torch.equal(*pair) for pair in zip(*both, strict=True))
            found.append([plain, *both[0]])
            poison_all(buffer)
    end(buffer)
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    return found[0]


PARTS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "uniform": ([9, 4, 7, 5], {}),
    "duplicates": ([9, 4, 0, 5], dict(kind="duplicates", dtype="bf16")),
    "one expert": ([3, 2, 6, 1], dict(kind="one_hot")),
    "ranks without rows": ([6, 3, 2, 4], dict(kind="empty_rank")),
    "nothing": ([3, 2, 1, 1], dict(kind="nothing")),
    "no tokens": ([0, 0, 0, 0], {}),
    "holes": ([12, 0, 5, 9], dict(kind="holes", hidden=40, num_topk=5)),
}


@pytest.mark.parametrize("name", PARTS)
def test_two_parts(nodes, name):
    """As one part, on ranks that have two and that do not; rows lie in other places of tiles."""
    num_tokens, more = PARTS[name]
    parts = per_rank(make_case(len(num_tokens), num_tokens, **more))
    expected, *both = (
        InParts(nodes("2x2"), how).run(result_and_gradients, 12, *parts)
        for how in ("none", "all", "some")
    )
    for one, other in (pair for found in both for pair in zip(found, expected, strict=True)):
        for pair in zip(one[:2], other[:2], strict=True):
            torch.testing.assert_close(*pair)
        assert all(torch.equal(*pair) for pair in zip(one[2:], other[2:], strict=True))


@pytest.mark.parametrize("shape", ["3x2", "4x1"])
def test_two_parts_on_more_nodes(nodes, shape):
    on = InParts(nodes(shape))
    sizes = [5, 0, 4, 3, 1, 6][: on.num_ranks], 32, 24, 3, 3
    check_layer(on, on.num_ranks, *sizes, "skewed", "bf16", num_calls=3)


def test_two_parts_with_biases(nodes):
    parts = with_biases.make([6, 4, 0, 3], with_biases.BOTH, True, kind="duplicates")
    with_biases.check(InParts(nodes("2x2")), parts, with_biases.GPT_OSS, ("none",), **STAGED)


def test_two_parts_with_weights_in_e4m3(nodes):
    parts = quantized.make([4, 7, 0, 5], has_bias=True)
    quantized.check(InParts(nodes("2x2")), parts, with_biases.GPT_OSS)


def test_two_parts_without_a_wait_for_counts(nodes):
    """As in a graph, see below."""
    parts = per_rank(make_case(4, [6, 3, 0, 12], num_local=2, num_topk=3, kind="holes"))
    for same in InParts(nodes("2x2")).run(run_as_in_a_graph, *parts):
        assert same == [True] * 6


def test_what_is_predicted():
    """Two parts for many tokens on few nodes; one where little crosses the network, or where the
    weights take longer to be read again. Backwards overlap but for products that take very long."""
    new = partial(torch.empty, device="meta", dtype=torch.bfloat16)

    def layer(num_tokens: int, num_local: int, columns: int = 2048) -> LayerInputs:
        ids = new(num_tokens, 8, dtype=torch.int64)
        x, down = new(num_tokens, 7168), new(num_local, 7168, columns)
        return LayerInputs(x, ids, ids.float(), new(num_local, 2 * columns, 7168), down)

    is_faster = partial(internode_layer.is_faster, num_ranks=16, num_nodes=2)
    assert is_faster(layer(4096, 16))
    assert not any(map(is_faster, (layer(64, 16), layer(512, 64), layer(0, 16))))
    overlaps = partial(internode_layer.overlaps, num_ranks=16, num_nodes=2)
    assert overlaps(layer(4096, 16)) == (True, True)
    assert overlaps(layer(4096, 1, 32 * 2048)) == (False, False)
    assert overlaps(layer(0, 16)) == (False, False)


# --- Of few tokens, by low-latency calls ---------------------------------------------------------


@every_routing
def test_decode(nodes, shape, kind):
    on = nodes(shape)
    num_tokens = [5, 0, 8, 2, 1, 3][: on.num_ranks]
    check_layer(on, on.num_ranks, num_tokens, 32, 24, 3, 4, kind, "bf16", "decode", num_calls=4)


@pytest.mark.parametrize("num_topk", [1, 5])
def test_decode_in_fp32(nodes, num_topk):
    """Of odd sizes, with more slots of the top-k than experts of a rank."""
    check_layer(nodes("2x2"), 4, [3, 1], 40, 24, 2, num_topk, "duplicates", "fp32", "decode")


def fill_the_room(group: dist.ProcessGroup) -> list[float]:
    """Errors where all slots of all tokens name one expert, by low-latency calls and as in a
    graph."""
    num_tokens, num_topk = 5, 3
    generator = torch.Generator().manual_seed(group.rank())
    x = torch.randn(num_tokens, 32, generator=generator).to(cases.device())
    idx = torch.zeros(num_tokens, num_topk, dtype=torch.int64, device=x.device)
    weights = torch.rand(num_tokens, num_topk, generator=generator).to(x.device)
    up, down = x.new_ones(1, 48, 32) / 32, x.new_ones(1, 32, 24) / 24
    parts = [[one] * group.size() for one in (x, idx, weights, up, down)]
    wanted = reference.moe_ffn(*parts)[0]
    errors = []
    for decode_tokens in (num_tokens, 0):
        sizes = group.size(), num_topk, num_tokens
        buffer = new_buffer(group, x, *sizes, decode_tokens=decode_tokens)
        with as_in_a_graph():
            out = moe_ffn(x, idx, weights, up, down, buffer)
        errors.append(cases.relative_error(out, wanted))
        end(buffer)
    return errors


def test_tokens_that_name_an_expert_twice_have_room(nodes):
    for on in nodes("2x2"), InParts(nodes("2x2")):
        for errors in on.run(fill_the_room):
            assert max(errors) < 1e-5


def test_decode_with_biases(nodes):
    parts = with_biases.make([6, 4, 0, 3], with_biases.BOTH, True, kind="duplicates")
    with_biases.check(nodes("2x2"), parts, with_biases.GPT_OSS, ("none",), decode_tokens=8)


def test_decode_with_weights_in_e4m3(nodes):
    parts = quantized.make([4, 7, 0, 5], has_bias=True)
    quantized.check(nodes("2x2"), parts, with_biases.GPT_OSS, decode=True)


def test_the_number_of_tokens_chooses(nodes):
    of_decode.check_choice(nodes("2x2"), {"decode_tokens": 20}, [None, 9, 20, 21], [0, 2, 2, 0])


# --- Where gradients of weights go ---------------------------------------------------------------


def test_sinks_delays_and_layouts_have_the_same_bits(nodes):
    parts = per_rank(with_biases.make([6, 3, 0, 4]))
    for found in nodes("2x2").run(with_biases.run_sinks, *parts):
        assert all(found), found


def test_micro_batches_add_up_in_a_sink(nodes):
    parts = per_rank(make_case(4, [12, 5, 0, 6], **of_weights.SIZES))
    for errors, num_ready in nodes("2x2").run(of_weights.run_sink, "auto", *parts):
        assert max(errors) < 1e-6
        assert num_ready == of_weights.NUM_BATCHES


def test_fp32_sinks_of_bf16_weights_are_not_rounded(nodes):
    parts = per_rank(make_case(4, [16, 9, 8, 7], dtype="bf16", **of_weights.SIZES))
    assert nodes("2x2").run(of_weights.run_wide, *parts) == [([True, True], True)] * 4


def test_delayed_gradients_of_a_module_and_a_checkpoint(nodes):
    parts = per_rank(make_case(4, [3, 7, 0, 4], **of_weights.SIZES))
    for same, error, of_x in nodes("2x2").run(of_weights.run_delayed, "auto", *parts):
        assert same == [True, True]
        assert error < 1e-6
        assert of_x


# --- Around layers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["2x1", *(pytest.param(name, marks=pytest.mark.slow) for name in ("2x2", "collective"))]
)
def test_a_compiled_layer_is_one_graph(nodes, name):
    options, shape = {}, name
    if name == "collective":
        options, shape = {"backend": "collective"}, "1x2"
    on = nodes(shape)
    parts = per_rank(make_case(on.num_ranks, [6, 5, 4, 3], num_local=2, num_topk=2))
    for same in on.run(test_compiled_layer.run_compiled, {"save": "pre"}, options, *parts):
        assert same == [True] * 18


def run_module(group: dist.ProcessGroup, *parts: Any) -> None:
    """A module that is warmed up, called and started; what its Buffer has, and what it refuses."""
    x, idx, weights, up, down, _ = on_device(parts)
    num_experts, num_topk = group.size() * len(up), idx.shape[1]
    buffer = new_buffer(group, x, num_experts, num_topk, 8, decode_tokens=0)
    module = MoEFeedForward(len(up), x.shape[1], down.shape[2], buffer, x.dtype, requires_grad=True)
    buffer.warmup(x.shape[1], num_experts, num_topk, x.dtype, tuple(module.parameters()))
    with torch.no_grad():
        for one, value in zip(module.parameters(), (up, down), strict=True):
            one.copy_(value)
    out, counts = module(x, idx, weights, return_counts=True)
    started = module.start(x, idx, weights).finish()
    plain = moe_ffn(x, idx, weights, up, down, buffer)
    assert torch.equal(out, started)
    assert torch.equal(out, plain)
    total = torch.tensor([idx.numel()])
    dist.all_reduce(total, group=group)
    assert counts.sum() == total
    assert (buffer.num_nodes, buffer.has_fused_layers) == (2, False)
    with pytest.raises(BackendError, match="only Buffers with fused layers choose"):
        buffer.layer_config(up, num_topk)
    end(buffer)
    with pytest.raises(BackendError, match="destroyed"):
        module(x, idx, weights)


def test_modules_warm_up_and_end(nodes):
    nodes("2x2").run(run_module, *per_rank(make_case(4, [6, 3, 0, 4], num_topk=2)))


def test_models_of_transformers(nodes):
    pytest.importorskip("transformers")
    import test_transformers as with_transformers

    for error, shapes in nodes("2x2").run(with_transformers.compare_logits, Kind.QWEN3_MOE):
        assert error <= 1e-5
        assert {shape[0] for shape in shapes} == {3}


@contextmanager
def as_in_a_graph() -> Iterator[None]:
    """The calls that a graph keeps, whose host waits for no count."""
    with pytest.MonkeyPatch.context() as patch:
        for module in layer_by_verbs, internode_layer:
            patch.setattr(module, "is_captured", lambda x: True)
        yield


def run_as_in_a_graph(group: dist.ProcessGroup, *parts: Any) -> list[bool]:
    """Whether a layer whose host waits for no count has the bits of one that does: forward, both
    ways, and gradients. Emulated ranks have no graphs; they make the calls that a graph keeps."""
    x, idx, weights, up, down, dy = on_device(parts)
    buffer = new_buffer(group, x, group.size() * len(up), idx.shape[1], 12, decode_tokens=0)

    def run() -> list[torch.Tensor]:
        leaves = [one.detach().clone().requires_grad_() for one in (x, weights, up, down)]
        out = moe_ffn(leaves[0], idx, *leaves[1:], buffer, save="none")
        plain = moe_ffn(x, idx, weights, up, down, buffer)
        return [plain, out, *torch.autograd.grad(out, leaves, dy)]

    expected = run()
    with as_in_a_graph():
        found = run()
    end(buffer)
    return [torch.equal(*pair) for pair in zip(found, expected, strict=True)]


def test_nothing_of_a_captured_layer_waits_for_counts(nodes):
    parts = per_rank(make_case(4, [6, 3, 0, 12], num_local=2, num_topk=3, kind="holes"))
    for same in nodes("2x2").run(run_as_in_a_graph, *parts):
        assert same == [True] * 6


def run_refused(group: dist.ProcessGroup, *parts: Any) -> None:
    x, idx, weights, up, down, _ = on_device(parts)
    buffer = Buffer(group, backend="collective")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer_by_verbs, "is_captured", lambda x: True)
        with pytest.raises(BackendError, match="Call it outside of graphs"):
            moe_ffn(x, idx, weights, up, down, buffer)
    end(buffer)


def test_collective_layers_are_not_captured(pool):
    pool.run(run_refused, *per_rank(make_case(2, [3, 2])), num_ranks=2)
