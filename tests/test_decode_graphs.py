"""`generate` that replays decode steps, token for token as unsharded. CPU ranks have a stand-in for
the graphs themselves; on GPUs the same tests run with CUDA graphs."""

from __future__ import annotations

import copy
import gc
import inspect
import itertools
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import cases
import graph_cases
import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

from transformers import StaticCache
from transformers_cases import build

from moe_engine import Buffer
from moe_engine.device.lang import INTERPRETED
from moe_engine.emulation import PerRank, RankPool
from moe_engine.errors import BackendError, DtypeError
from moe_engine.integrations.balancing import record_counts
from moe_engine.integrations.recorded_routing import record_routing
from moe_engine.integrations.transformers import (
    experts_layers,
    fix_max_tokens,
    join,
    shard_experts,
    unshard_experts,
)
from moe_engine.integrations.transformers_checkpoints import load_sharded
from moe_engine.tools.models import Kind, build_config, build_model

PAD, MAX_TOKENS = 0, 24
Prompts = list[list[int]]


def write(model: Any, prompts: Prompts, num_new: int, **how: Any) -> list[list[int]]:
    """What the model adds to prompts, which are padded on the left."""
    longest = max(map(len, prompts))
    padded = [[PAD] * (longest - len(prompt)) + prompt for prompt in prompts]
    ids = torch.tensor(padded, device=model.device)
    how = {"max_new_tokens": num_new, "min_new_tokens": num_new, "do_sample": False} | how
    how |= {"pad_token_id": PAD}
    return model.generate(ids, attention_mask=(ids != PAD).long(), **how)[:, longest:].tolist()


def shard(model: Any, group: dist.ProcessGroup, cuda_graphs: bool = True) -> Any:
    with graph_cases.graphs():
        return shard_experts(model, group, max_tokens=MAX_TOKENS, cuda_graphs=cuda_graphs)


# --- Ranks ---------------------------------------------------------------------------------------


@torch.inference_mode()
def write_all(
    group: dist.ProcessGroup, calls: list[tuple[Prompts, int]], cuda_graphs: bool = True
) -> tuple[Any, Any, list[int]]:
    """What the unsharded and the sharded model write in the calls of a rank, which may be fewer
    than those of another, and how many steps each call has replayed, those of others included."""
    model = build(Kind.MIXTRAL)
    want = [write(model, *call) for call in calls]
    buffer = shard(model, group, cuda_graphs)
    got, replays = [], [0]
    with graph_cases.graphs(), join(model):
        for call in calls:
            got.append(write(model, *call))
            replays.append(model.forward.num_replays if cuda_graphs else 0)
    if cuda_graphs:
        replays.append(model.forward.num_replays)
    buffer.check()
    buffer.destroy()
    return got, want, [after - before for before, after in itertools.pairwise(replays)]


A, B, C = [[7, 62, 62, 62], [5]], [[9, 8, 3]], [[1, 2], [3, 4, 5], [6]]


def test_ranks_with_other_prompts_batches_and_stops(pool: RankPool) -> None:
    calls = [[(A, 9), (C, 6)], [(B, 6)]]
    first, second = pool.run(write_all, PerRank(calls), num_ranks=2)
    for got, want, _ in (first, second):
        assert got == want
    # Of 8 steps after the prefill one warms up, with each number of tokens of the busiest rank.
    assert first[2][0] >= 5
    assert second[2][0] >= 2
    assert second[2][-1] > 0  # passes without tokens


def test_a_rank_without_graphs_beside_one_with(pool: RankPool) -> None:
    calls, which = [[(A, 7)], [(C, 5)]], [True, False]
    first, second = pool.run(write_all, PerRank(calls), PerRank(which), num_ranks=2)
    for got, want, _ in (first, second):
        assert got == want
    assert first[2][0] == 4  # one step with the 3 tokens of the other rank warms up, one with 2
    assert second[2] == [0]


def test_one_rank(pool: RankPool) -> None:
    [(got, want, replays)] = pool.run(write_all, [(A, 6), (A, 6), (B, 3)], num_ranks=1)
    assert got == want
    assert replays[:3] == [4, 4, 1]


WAYS: dict[str, tuple[dict[str, Any], int]] = {
    "static cache": ({"cache_implementation": "static"}, 4),
    "sampling": ({"do_sample": True, "temperature": 2.0}, 4),
    "logits": ({"return_dict_in_generate": True, "output_logits": True}, 4),
    "dynamic cache": ({"cache_implementation": "dynamic"}, 0),
    "no cache": ({"use_cache": False}, 0),
    "beams": ({"num_beams": 2}, 0),
    "beams, static cache": ({"num_beams": 2, "cache_implementation": "static"}, 0),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, 0),
    "hidden states": ({"return_dict_in_generate": True, "output_hidden_states": True}, 0),
}


@torch.inference_mode()
def write_way(group: dist.ProcessGroup, how: dict[str, Any]) -> tuple[bool, int]:
    """Whether a model writes in a way what it writes without graphs, and the steps replayed."""
    model, twin = build(Kind.QWEN3_MOE), build(Kind.QWEN3_MOE)
    ids = torch.tensor([[9, 8, 3, 8, 3]], device=model.device) + group.rank()
    buffer, plain = shard(model, group), shard_experts(twin, group, max_tokens=MAX_TOKENS)

    def outputs(model: Any, how: dict[str, Any]) -> list[torch.Tensor]:
        torch.manual_seed(5)
        given = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False} | how
        given |= {"attention_mask": torch.ones_like(ids), "pad_token_id": PAD}
        out = model.generate(ids, **given)
        return [out] if isinstance(out, torch.Tensor) else [out.sequences, *(out.logits or ())]

    with graph_cases.graphs():
        got, want = outputs(model, how), outputs(twin, how | {"disable_compile": True})
    same = len(got) == len(want) and all(
        torch.allclose(one, other, atol=1e-4) for one, other in zip(got, want, strict=False)
    )
    buffer.destroy()
    plain.destroy()
    return same, model.forward.num_replays


QUICK = "sampling", "beams, static cache", "hidden states"


@pytest.mark.parametrize("way", cases.slow_unless([(way,) for way in QUICK], WAYS))
def test_ways_to_generate(pool: RankPool, way: str) -> None:
    how, num_replays = WAYS[way]
    assert pool.run(write_way, how, num_ranks=2) == [(True, num_replays)] * 2


@torch.inference_mode()
def watch(group: dist.ProcessGroup) -> list[Any]:
    """The counts of experts with and without graphs; replays of steps whose routing is recorded,
    and with a fixed number of tokens; of a copied model, and what is left of the graphs."""
    model, found = build(Kind.QWEN3_MOE), []
    plain = build(Kind.QWEN3_MOE)
    buffers = [shard(model, group), shard_experts(plain, group, max_tokens=MAX_TOKENS)]
    with graph_cases.graphs():
        for one in (plain, model):
            with record_counts(one) as counts:
                write(one, B, 5)
            found.append([count.tolist() for count in counts])
        found.append(model.forward.num_replays)
        with record_routing(model) as routing:
            write(model, B, 5)
        found += [len(routing), model.forward.num_replays]
        with fix_max_tokens(model, 6):
            write(model, B, 5)
        found.append(model.forward.num_replays)
        twin = copy.deepcopy(model)
        assert twin.forward._model is twin and twin.forward is not model.forward
        same = write(twin, A, 6) == write(model, A, 6)
        found += [same, twin.forward.num_replays > found[-1]]
        unshard_experts(twin)
        assert "forward" not in vars(twin)
        buffers[0].destroy()
        found.append(len(model.forward._captured))
        with pytest.raises(BackendError, match="destroyed"):
            model(torch.ones(1, 2, dtype=torch.long, device=model.device))
    buffers[1].destroy()
    return found


def test_counts_routing_copies_and_the_end(pool: RankPool) -> None:
    for plain, counted, *rest in pool.run(watch, num_ranks=2):
        assert counted == plain
        assert rest == [3, 2 * 5, 3, 6, True, True, 0]


@torch.inference_mode()
def keep_a_cache(group: dist.ProcessGroup) -> tuple[Any, Any, list[int], list[int]]:
    """What is written with one cache that is kept, and in a loop of the caller's; the steps that
    are replayed; and for how many caches there are graphs before and after it is dropped, and after
    a call whose cache is its own."""
    model = build(Kind.MIXTRAL)
    want = [write(model, prompts, 5) for prompts in (A, [[3], [4, 4]])]
    buffer = shard(model, group)
    cache = StaticCache(config=model.config, max_cache_len=16)
    got, replays = [], []
    with graph_cases.graphs():
        for prompts in (A, [[3], [4, 4]]):
            cache.reset()
            got.append(write(model, prompts, 5, past_key_values=cache))
            replays.append(model.forward.num_replays)
        cache = StaticCache(config=model.config, max_cache_len=16)
        ids = torch.tensor([[9, 8, 3]], device=model.device)
        want.append([[]])
        got.append([[]])
        for steps, found in ((want, None), (got, cache)):
            seen, new = ids, ids
            for _ in range(5):
                logits = model(new if found else seen, past_key_values=found).logits[:, -1]
                new = logits.argmax(-1, keepdim=True)
                seen = torch.cat([seen, new], 1)
            steps[-1][0] += seen[0].tolist()
    replays.append(model.forward.num_replays)
    held = [num_caches(model)]
    del cache, found
    held.append(num_caches(model))
    write(model, A, 5)
    held.append(num_caches(model))
    buffer.destroy()
    return got, want, replays, held


def num_caches(model: Any) -> int:
    """For how many caches there are graphs."""
    return sum(isinstance(owner, StaticCache) for owner in model.forward._captured)


def test_a_cache_that_is_kept(pool: RankPool) -> None:
    for got, want, replays, held in pool.run(keep_a_cache, num_ranks=2):
        assert got == want
        assert replays == [3, 3 + 4, 3 + 4 + 3]
        assert held == [1, 0, 0]


@torch.no_grad()
def with_adapters(group: dist.ProcessGroup) -> tuple[Any, Any, int]:
    """What a model with LoRA adapters of its experts writes unsharded and by graphs."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    parts: dict[str, Any] = {"target_modules": ["q_proj"], "target_parameters": ["gate_up_proj"]}
    model = get_peft_model(build(Kind.MIXTRAL), LoraConfig(init_lora_weights=False, **parts))
    how = {"input_ids": torch.tensor([[9, 8, 3 + group.rank()]], device=model.device)}
    how |= {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": PAD}
    want = model.eval().generate(**how).tolist()
    buffer = shard(model, group)
    with graph_cases.graphs():
        got = model.generate(**how).tolist()
    num_replays = model.base_model.model.forward.num_replays
    unshard_experts(model)
    assert "forward" not in vars(model.base_model.model)
    buffer.destroy()
    return got, want, num_replays


def test_adapters(pool: RankPool) -> None:
    pytest.importorskip("peft")
    for got, want, num_replays in pool.run(with_adapters, num_ranks=2):
        assert got == want
        assert num_replays == 4


@torch.inference_mode()
def cannot_capture(group: dist.ProcessGroup) -> str:
    """What a rank raises where the first one cannot capture its step."""

    class Failing(graph_cases.RecordedCalls):
        def capture(self, call: Any) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")

    model = build(Kind.MIXTRAL)
    shard(model, group)
    with graph_cases.graphs(*[Failing] * (group.rank() == 0)):
        try:
            write(model, A, 6)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_step_that_cannot_be_captured(pool: RankPool) -> None:
    if pool.device == "cuda":
        pytest.skip("emulated: steps are captured on this machine")
    first, second = pool.run(cannot_capture, num_ranks=2)
    assert first.startswith("BackendError: cuda_graphs is True, and a decode step of Mixtral")
    assert "operation not permitted" in first
    assert "without cuda_graphs" in first
    assert second.startswith("CallAbandoned: rank 0")


@torch.inference_mode()
def memory(group: dist.ProcessGroup) -> list[int]:
    """Bytes in use of a GPU after each of some calls of generate, and after the end of the model
    and its Buffer."""
    model = build(Kind.MIXTRAL)
    buffer = shard(model, group)
    found = []
    for prompts in (A, C, A, C, A):
        write(model, prompts, 6)
        found.append(torch.cuda.memory_allocated())
    assert model.forward.num_replays > 0
    unshard_experts(model)
    buffer.destroy()
    del model, buffer
    gc.collect()
    return [*found, torch.cuda.memory_allocated()]


@torch.inference_mode()
def write_with_other_weights(group: dist.ProcessGroup, num_new: int) -> tuple[Any, Any]:
    """What is written after the weights of experts were replaced, and what the unsharded model
    writes with them."""
    model, twin = build(Kind.MIXTRAL), build(Kind.MIXTRAL)
    buffer = shard(model, group)
    with graph_cases.graphs():
        write(model, A, num_new)
        generator = torch.Generator().manual_seed(7)
        for experts, whole in zip(experts_layers(model), experts_layers(twin), strict=True):
            value = torch.randn(whole.down_proj.shape, generator=generator).to(whole.down_proj)
            whole.down_proj = torch.nn.Parameter(value, requires_grad=False)
            mine = value.chunk(group.size())[group.rank()].clone()
            experts.down_proj = torch.nn.Parameter(mine, requires_grad=False)
        got = write(model, A, num_new)
    buffer.destroy()
    return got, write(twin, A, num_new)


def test_weights_are_replaced_between_two_calls(pool: RankPool) -> None:
    """Also for the tokens of a rank whose peer is done, and has no cache."""
    for got, want in pool.run(write_with_other_weights, PerRank([9, 3]), num_ranks=2):
        assert got == want


@pytest.mark.gpu
def test_graphs_go_with_their_cache(pool: RankPool) -> None:
    for used in pool.run(memory, num_ranks=2):
        assert used[-2] <= used[1]  # the first calls of each shape have made what stays
        assert used[-1] < used[0]


# --- What is refused -----------------------------------------------------------------------------


def refuse(group: dist.ProcessGroup) -> list[str]:
    """The errors of models and arguments with which nothing can be captured."""
    errors = []

    def note(model: Any, cuda_graphs: Any = True, **how: Any) -> None:
        try:
            shard_experts(model, group, cuda_graphs=cuda_graphs, **how)
        except (BackendError, DtypeError) as error:
            errors.append(str(error))

    note(build(Kind.MIXTRAL), "yes")
    if INTERPRETED:
        note(build(Kind.MIXTRAL))
    with graph_cases.graphs():
        note(build(Kind.MIXTRAL), backend="collective")
        note(build(Kind.MIXTRAL).model)
        hooked = build(Kind.MIXTRAL)
        hooked.forward = partial(hooked.forward)  # as accelerate's hooks and torch.compile set it
        note(hooked)
        note(build(Kind.MIXTRAL, sliding_window=4))
    return errors


def test_what_is_refused(pool: RankPool) -> None:
    [errors] = pool.run(refuse, num_ranks=1)
    texts = [
        "cuda_graphs is 'yes'; it must be True or False",
        "cuda_graphs is True on a CPU",
        "cuda_graphs is True with backend 'collective'",
        "cuda_graphs is True for a MixtralModel, which has no generate",
        "the MixtralForCausalLM has a forward of its own",
        "the static cache of MixtralForCausalLM has StaticSlidingWindowLayer",
    ]
    texts = [text for text in texts if pool.device == "cpu" or "CPU" not in text]
    for error, text in zip(errors, texts, strict=True):
        assert text in error


def load(group: dist.ProcessGroup, folder: Path) -> str:
    with pytest.raises(BackendError) as info:
        load_sharded(folder, group, cuda_graphs=True)
    return str(info.value)


def test_a_checkpoint_is_refused_before_it_is_read(pool: RankPool, tmp_path: Path) -> None:
    if pool.device == "cuda":
        pytest.skip("emulated: there are graphs on this machine")
    build_model(build_config(Kind.MIXTRAL, num_local_experts=4)).save_pretrained(tmp_path)
    for text in pool.run(load, tmp_path, num_ranks=2):
        assert "cuda_graphs is True on a CPU" in text


# --- Parts ---------------------------------------------------------------------------------------


class Held:
    """What a Buffer's graphs could be."""

    def __init__(self) -> None:
        self.is_free = False

    def free(self) -> None:
        self.is_free = True


def launch(group: dist.ProcessGroup) -> list[Any]:
    """What comes of work that a Buffer launches before and after its end, and of those that were to
    be told of it, of which one lives."""
    buffer = Buffer.for_tokens(group, 4, 64, 4, 2, torch.float32)
    found, held, gone = [buffer.launch(lambda: 7)], Held(), Held()
    buffer.before_destroy(held.free)
    buffer.before_destroy(gone.free)
    watched = weakref.ref(gone)
    del gone
    buffer.destroy()
    with pytest.raises(BackendError, match="destroyed"):
        buffer.launch(lambda: 8)
    return [*found, held.is_free, watched() is None]


def test_what_a_buffer_launches(pool: RankPool) -> None:
    assert pool.run(launch, num_ranks=1) == [[7, True, True]]


def signature(group: dist.ProcessGroup) -> bool:
    """Whether generate finds the arguments of the model's forward, of which it asks."""
    model = build(Kind.MIXTRAL)
    want = inspect.signature(model.forward)
    shard(model, group).destroy()
    return inspect.signature(model.forward) == want


def test_the_signature_is_that_of_the_model(pool: RankPool) -> None:
    assert pool.run(signature, num_ranks=1) == [True]
