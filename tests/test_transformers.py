"""Models of transformers with their experts on several ranks, against the same model unsharded."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cases
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("transformers")

from transformers import StaticCache
from transformers_cases import build, difference

from moe_engine.emulation import RankError, RankPool
from moe_engine.errors import (
    BackendError,
    CallAbandoned,
    CapacityError,
    OutOfStep,
    TooManyTokens,
)
from moe_engine.integrations import forward_passes
from moe_engine.integrations import transformers as integration
from moe_engine.integrations.data_parallel import average_expert_gradients
from moe_engine.integrations.forward_passes import ForwardPasses
from moe_engine.integrations.transformers import (
    experts_layers,
    fix_max_tokens,
    join,
    join_empty,
    shard_experts,
    unshard_experts,
)
from moe_engine.tools.models import Kind

BATCHES = ((1, 7), (2, 3), (0, 0), (1, 1))
"""Batch size and length on each rank; the third has nothing to read."""


def read(model: Any, rank: int) -> Tensor | None:
    """Logits of the rank's own batch."""
    batch, length = BATCHES[rank]
    if batch == 0:
        join_empty(model)
        return None
    ids = torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(rank))
    return model(ids.to(model.device)).logits.float()


@torch.inference_mode()
def compare_logits(group: dist.ProcessGroup, kind: Kind) -> tuple[float, list[list[int]]]:
    rank = dist.get_rank(group)
    model = build(kind)
    want = read(model, rank) if BATCHES[rank][0] else None
    buffer = shard_experts(model, group, max_tokens=12)
    got = read(model, rank)
    buffer.destroy()
    shapes = [list(p.shape) for name, p in model.named_parameters() if ".experts." in name]
    return difference(got, want), shapes


@pytest.mark.parametrize(("kind", "num_ranks"), cases.one_of_each(Kind, 2, 1, 4, 3))
def test_logits_are_those_of_the_unsharded_model(
    pool: RankPool, kind: Kind, num_ranks: int
) -> None:
    if num_ranks > pool.num_ranks:
        pytest.skip(f"{num_ranks} ranks, and the pool has {pool.num_ranks}")
    for error, shapes in pool.run(compare_logits, kind, num_ranks=num_ranks):
        assert error <= 1e-5
        assert {shape[0] for shape in shapes} == {12 // num_ranks}


# --- How many tokens a pass has -----------------------------------------------------------------


@contextmanager
def recorded_hints() -> Iterator[tuple[list[int], list[int]]]:
    """What reaches `moe_ffn` as max_tokens, layer by layer, and what came of each agreement."""
    hints: list[int] = []
    agreed: list[int] = []
    moe_ffn, agree = integration.moe_ffn, ForwardPasses._agree

    def note_hint(*args: Any, **more: Any) -> Tensor:
        hints.append(args[-1])
        return moe_ffn(*args, **more)

    def note_agreement(*args: Any) -> int:
        agreed.append(agree(*args))
        return agreed[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(integration, "moe_ffn", note_hint)
        patch.setattr(ForwardPasses, "_agree", note_agreement)
        yield hints, agreed


@torch.inference_mode()
def generate(group: dist.ProcessGroup) -> tuple[list[int], ...]:
    """What the unsharded and the sharded model write from prompts of each rank's own shape, one of
    them empty, with the hints of all layers and the agreements."""
    batch, length = BATCHES[dist.get_rank(group)]
    model = build(Kind.MIXTRAL)
    ids = torch.full((batch, length), 40 + batch, device=model.device)

    def write() -> list[int]:
        if batch == 0:
            return []
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, min_new_tokens=3, max_new_tokens=3)
        return out[:, length:].flatten().tolist()

    want = write()
    buffer = shard_experts(model, group, max_tokens=12)
    with recorded_hints() as (hints, agreed):
        got = write()
        if batch == 0:
            with join(model):
                pass
    buffer.destroy()
    return got, want, hints, agreed


@pytest.mark.parametrize("num_ranks", cases.slow_unless([(1,), (3,)], [1, 3, 4]))
def test_generation_with_prompts_of_different_length(pool: RankPool, num_ranks: int) -> None:
    if num_ranks > pool.num_ranks:
        pytest.skip(f"{num_ranks} ranks, and the pool has {pool.num_ranks}")
    most = [7, 1, 1] if num_ranks == 1 else [7, 2, 2]  # in the prefill and each step of decode
    for rank, (got, want, hints, agreed) in enumerate(pool.run(generate, num_ranks=num_ranks)):
        assert got == want
        assert len(got) == 3 * BATCHES[rank][0]
        assert hints == [tokens for tokens in most for _ in range(2)]  # two layers
        assert agreed == (most if got else [])  # `join` asks by itself


@torch.inference_mode()
def call_parts(group: dist.ProcessGroup) -> tuple[list[int], list[int], list[int]]:
    """Hints of calls with an explicit one, of the inner model, and of one layer again and again."""
    rank = dist.get_rank(group)
    model = build(Kind.QWEN3_MOE)
    ids = torch.full((1, 3 + rank), 7, device=model.device)
    buffer = shard_experts(model, group, max_tokens=12)
    with recorded_hints() as (fixed, agreed):
        with fix_max_tokens(model, 9):
            model(ids)
            join_empty(model)
        assert agreed == []
    with recorded_hints() as (inner, agreed):
        model.model(ids)
        assert agreed == [4]
    with recorded_hints() as (one_layer, _):
        for length in (5, 2):
            x = torch.randn(1, length - rank, 64, device=model.device)
            model.model.layers[1].mlp(x)
    buffer.destroy()
    return fixed, inner, one_layer


def test_explicit_hints_and_calls_of_inner_modules(pool: RankPool) -> None:
    for fixed, inner, one_layer in pool.run(call_parts, num_ranks=2):
        assert fixed == [9, 9, 9, 9]
        assert inner == [4, 4]
        assert one_layer == [5, 2]


@contextmanager
def recorded_events(model: Any) -> Iterator[list[str]]:
    """In their order: questions to the other hosts, begins of the first decoder layer, answers."""
    events: list[str] = []
    ask, answer = ForwardPasses._ask, ForwardPasses._answer

    def note_question(passes: Any, num_tokens: int) -> None:
        events.append(f"ask {num_tokens}")
        ask(passes, num_tokens)

    def note_answer(passes: Any) -> int:
        events.append("answer")
        return answer(passes)

    decoder = model.model.layers[0]
    handle = decoder.register_forward_pre_hook(lambda *_: events.append("layer"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ForwardPasses, "_ask", note_question)
        patch.setattr(ForwardPasses, "_answer", note_answer)
        yield events
    handle.remove()


@torch.inference_mode()
def ask_early(group: dist.ProcessGroup) -> list[list[str]]:
    """Events of calls with ids, with embeddings, of the inner model, of a copy, without tokens, of
    a layer alone, with a fixed number, of layers in falling order, and of an unsharded model."""
    model = build(Kind.QWEN3_MOE)
    ids = torch.full((2, 3), 7, device=model.device)
    embedded = model.get_input_embeddings()(ids)
    x = torch.randn(1, 5, 64, device=model.device)
    buffer = shard_experts(model, group, max_tokens=12)
    twin = copy.deepcopy(model)
    seen = []

    def note(call: Any, model: Any = model) -> None:
        with recorded_events(model) as events:
            call()
        seen.append(events)

    note(lambda: model(ids))
    note(lambda: model(inputs_embeds=embedded))
    note(lambda: model.model(input_ids=ids))
    note(lambda: twin(ids), twin)
    note(lambda: join_empty(model))
    note(lambda: model.model.layers[0].mlp(x))
    with fix_max_tokens(model, 9):
        note(lambda: model(ids))
    note(lambda: [model.model.layers[number].mlp(x) for number in (1, 1, 0)])
    for one in (model, twin):
        unshard_experts(one)
        note(lambda one=one: one(ids), one)
    buffer.destroy()
    return seen


def test_the_hosts_ask_before_the_first_layer(pool: RankPool) -> None:
    early, late = ["ask 6", "layer", "answer"], ["ask 5", "answer"]
    for *sharded, fixed, falling, whole, whole_twin in pool.run(ask_early, num_ranks=2):
        assert sharded == [early] * 4 + [["ask 0", "answer"], late]
        assert fixed == ["ask 6", "layer"]  # which sends nothing
        assert falling == late * 3
        assert whole == whole_twin == ["layer"]


@torch.inference_mode()
def break_off(group: dist.ProcessGroup) -> float:
    """A pass after one that broke off, on all ranks, after the hosts had asked."""
    rank = dist.get_rank(group)
    model = build(Kind.MIXTRAL)
    ids = torch.full((1, 4 + rank), 7, device=model.device)
    want = model(ids).logits
    buffer = shard_experts(model, group, max_tokens=12)
    with pytest.raises(RuntimeError, match="size of tensor"):
        model(ids[:, :2], position_ids=torch.zeros(2, 1, 3, device=model.device))
    if rank == 0:
        join_empty(model)
    else:
        model(ids)
    error = difference(model(ids).logits, want)
    buffer.destroy()
    return error


def test_a_pass_after_one_that_broke_off(pool: RankPool) -> None:
    assert max(pool.run(break_off, num_ranks=2)) <= 1e-5


@torch.inference_mode()
def bring_other_numbers(group: dist.ProcessGroup, num_tokens: int) -> tuple[list[int], str]:
    """The hints of a pass in which rank 1 calls the model with 2 tokens, and brings others to the
    experts, and its error."""
    model = build(Kind.MIXTRAL)
    buffer = shard_experts(model, group, max_tokens=12)

    def change(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(one[:1].repeat(num_tokens, 1) for one in args)

    experts = model.model.layers[0].mlp.experts
    if dist.get_rank(group) == 1:
        experts.register_forward_pre_hook(change)
        experts.register_forward_hook(lambda _, args, out: out[:1].repeat(2, 1))
    text = ""
    with recorded_hints() as (hints, _):
        try:
            model(torch.full((1, 2), 7, device=model.device))
            buffer.check()
        except (TooManyTokens, CallAbandoned) as error:
            text = str(error)
    dist.barrier(group)
    buffer.destroy()
    return hints, text


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_layers_that_bring_other_numbers_of_tokens(pool: RankPool, num_tokens: int) -> None:
    for hints, text in pool.run(bring_other_numbers, num_tokens, num_ranks=2):
        assert hints[0] == 2
        assert ("3" in text and "2" in text) == (num_tokens == 3), text


@torch.inference_mode()
def replay_decode(group: dist.ProcessGroup) -> tuple[float, str]:
    """Two steps of decode from one CUDA graph, against the unsharded model, and what a capture
    without a hint raises."""
    rank = dist.get_rank(group)
    model = build(Kind.QWEN3_MOE)
    prompt = torch.full((1 + rank, 4), 40 + rank, device="cuda")
    ids = torch.full((1 + rank, 1), 50, device="cuda")

    def start() -> StaticCache:
        cache = StaticCache(config=model.config, max_cache_len=12)
        model(prompt, past_key_values=cache)
        return cache

    cache = start()
    want = [model(ids + step, past_key_values=cache).logits for step in range(2)]
    buffer = shard_experts(model, group, max_tokens=12)
    cache = start()
    with fix_max_tokens(model, 2):
        model(ids, past_key_values=cache)  # compiles
        for layer in cache.layers:
            layer.cumulative_length.sub_(1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = model(ids, past_key_values=cache).logits
    got = []
    for _ in range(2):
        graph.replay()
        got.append(logits.clone())
        ids += 1
    with pytest.raises(BackendError) as raised, torch.cuda.graph(torch.cuda.CUDAGraph()):
        model(ids, past_key_values=cache)
    buffer.check()
    dist.barrier(group)
    buffer.destroy()
    return max(map(difference, got, want)), str(raised.value)


@pytest.mark.multi_gpu
def test_decode_in_a_cuda_graph(pool: RankPool) -> None:
    for error, text in pool.run(replay_decode, num_ranks=2):
        assert error <= 1e-5
        assert "with fix_max_tokens(model, max_tokens)" in text


def agree_in_capture(group: dist.ProcessGroup) -> None:
    class OnGpu(list):
        is_cuda = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        ForwardPasses(group, 4).max_tokens(0, OnGpu())  # type: ignore[arg-type]


def test_a_capture_without_a_hint_is_refused(pool: RankPool) -> None:
    with pytest.raises(RankError, match="with fix_max_tokens") as raised:
        pool.run(agree_in_capture, num_ranks=2)
    assert raised.value.cause_type is BackendError


@torch.inference_mode()
def read_too_much(group: dist.ProcessGroup) -> None:
    model = build(Kind.MIXTRAL)
    buffer = shard_experts(model, group, max_tokens=4)
    try:
        model(torch.full((1, 4 + dist.get_rank(group)), 7, device=model.device))
    finally:
        buffer.destroy()


def test_a_pass_too_large_for_one_rank_is_refused_by_all(pool: RankPool) -> None:
    with pytest.raises(
        RankError, match="5 tokens for this pass, and the Buffer was made for 4"
    ) as e:
        pool.run(read_too_much, num_ranks=2)
    assert {type(error) for error in e.value.errors.values()} == {CapacityError}
    assert len(e.value.errors) == 2


@torch.inference_mode()
def fall_out_of_step(group: dist.ProcessGroup) -> tuple[float, str]:
    """A pass of all ranks, then one that rank 0 makes alone."""
    model = build(Kind.MIXTRAL)
    ids = torch.full((1, 2), 7, device=model.device)
    want = model(ids).logits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward_passes, "timeout_seconds", lambda: 10.0)
        patch.setattr(forward_passes, "COMPILE_S", 0.0)
        buffer = shard_experts(model, group, max_tokens=12)
    error = difference(model(ids).logits, want)
    text = ""
    if dist.get_rank(group) == 0:
        with pytest.raises(OutOfStep) as raised:
            model(ids)
        text = str(raised.value)
    dist.barrier(group)
    buffer.destroy()
    return error, text


def test_a_rank_that_makes_a_pass_alone_is_told_so(pool: RankPool) -> None:
    (error, text), (error_there, _) = pool.run(fall_out_of_step, num_ranks=2)
    assert max(error, error_there) <= 1e-5
    assert text.startswith("rank 0 waited up to 10 s for the other ranks")
    assert "join_empty(model)" in text


@torch.inference_mode()
def read_compiled(group: dist.ProcessGroup) -> float:
    model = build(Kind.QWEN3_MOE)
    want = read(model, dist.get_rank(group))
    buffer = shard_experts(model, group, max_tokens=12)
    got = read(torch.compile(model, backend="eager"), dist.get_rank(group))
    buffer.destroy()
    return difference(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_compiled_model(pool: RankPool, num_ranks: int) -> None:
    assert max(pool.run(read_compiled, num_ranks=num_ranks)) <= 1e-5


@torch.inference_mode()
def shared_expert_alone(group: dist.ProcessGroup) -> float:
    """Differences with routed experts that give nothing: what is left is the shared expert."""
    rank = dist.get_rank(group)
    model = build(Kind.QWEN2_MOE)
    for layer in model.model.layers:
        layer.mlp.experts.down_proj.zero_()
    want = read(model, rank)
    for layer in model.model.layers:
        layer.mlp.shared_expert.down_proj.weight.mul_(-1)
    flipped = read(model, rank)
    for layer in model.model.layers:
        layer.mlp.shared_expert.down_proj.weight.mul_(-1)
    assert difference(flipped, want) > 1e-2
    buffer = shard_experts(model, group, max_tokens=12)
    got = read(model, rank)
    buffer.destroy()
    return difference(got, want)


def test_shared_expert_stays_on_every_rank(pool: RankPool) -> None:
    assert max(pool.run(shared_expert_alone, num_ranks=2)) <= 1e-5


# --- Refusals --------------------------------------------------------------------------------


# --- Data parallelism ----------------------------------------------------------------------------


def average_and_unshard(group: dist.ProcessGroup) -> list[str]:
    """Weights that DistributedDataParallel leaves out of a model with all experts on each rank."""
    model = build(Kind.QWEN3_MOE)
    buffer = shard_experts(model, group, max_tokens=12, backend="collective")
    average_expert_gradients(model)
    assert len(model._ddp_params_and_buffers_to_ignore) == 2 * len(experts_layers(model))
    unshard_experts(model)
    buffer.destroy()
    return list(model._ddp_params_and_buffers_to_ignore)


def test_whole_experts_are_reduced_by_ddp_again(pool: RankPool) -> None:
    assert pool.run(average_and_unshard, num_ranks=2) == [[], []]
