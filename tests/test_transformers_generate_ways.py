"""`generate` in the ways that transformers offers, token for token as unsharded, on two ranks that
have different prompts and make different numbers of passes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, CompileConfig
from transformers_cases import NUM_EXPERTS, build

from moe_engine.emulation import RankPool
from moe_engine.integrations.transformers import shard_experts
from moe_engine.integrations.transformers_checkpoints import load_sharded
from moe_engine.tools.models import Kind, build_config, build_model

PROMPTS = [[[7, 62, 62, 62, 62], [5]], [[9, 8, 3]]]
"""Those of each rank. Mixtral continues the first with 62, as a lookup in the prompt expects."""
NUM_TOKENS = [8, 2]
PAD = 0
WAYS: dict[str, dict[str, Any]] = {
    "padded": {},
    "no cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "chunks": {"prefill_chunk_size": 2},
    "chunks, static cache": {
        "prefill_chunk_size": 2,
        "cache_implementation": "static",
        "disable_compile": True,
    },
    "beams": {"num_beams": 2, "num_return_sequences": 2},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "assistant": {},
}
WITHOUT_BATCHES = ["prompt lookup", "assistant"]


def write(
    model: Any, rank: int, how: dict[str, Any], num_prompts: int = 2
) -> tuple[list[Any], int]:
    """What the model adds to a rank's prompts, padded on the left, and in how many passes."""
    prompts, passes = PROMPTS[rank][:num_prompts], []
    longest = max(map(len, prompts))
    padded = [[PAD] * (longest - len(prompt)) + prompt for prompt in prompts]
    ids = torch.tensor(padded, device=model.device)
    count = torch.compiler.disable(lambda *_: passes.append(1))
    hook = model.model.register_forward_pre_hook(count)
    how = {"max_new_tokens": NUM_TOKENS[rank], "do_sample": False, "pad_token_id": PAD} | how
    out = model.generate(ids, attention_mask=(ids != PAD).long(), **how)
    hook.remove()
    return out[:, longest:].tolist(), len(passes)


@torch.inference_mode()
def generate(group: dist.ProcessGroup, kind: Kind, way: str) -> tuple[Any, Any]:
    """What the sharded and the unsharded model write, each with its number of passes."""
    model, how, num_prompts = build(kind), WAYS[way], 1 if way in WITHOUT_BATCHES else 2
    if way == "assistant":
        how = {"assistant_model": copy.deepcopy(model)}
    want = write(model, group.rank(), how, num_prompts)
    buffer = shard_experts(model, group, max_tokens=24)
    got = write(model, group.rank(), how, num_prompts)
    buffer.destroy()
    return got, want


@pytest.mark.parametrize(
    ("kind", "way"),
    cases.slow_unless(
        [(Kind.MIXTRAL, way) for way in WAYS if way not in ("no cache", "chunks, static cache")],
        Kind,
        WAYS,
    ),
)
def test_ways(pool: RankPool, kind: Kind, way: str) -> None:
    found = pool.run(generate, kind, way, num_ranks=2)
    for got, want in found:
        assert got == want
    passes = [num_passes for (_, num_passes), _ in found]
    assert passes[0] != passes[1]


@torch.inference_mode()
def generate_compiled(group: dist.ProcessGroup, how: str) -> tuple[Any, Any, int]:
    """What a compiled sharded model and the unsharded one write, and the number of graphs."""
    model, graphs = build(Kind.MIXTRAL), []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    static: dict[str, Any] = {"cache_implementation": "static", "disable_compile": True}
    want = write(model, group.rank(), static)
    buffer = shard_experts(model, group, max_tokens=24)
    if how == "forward":
        model.forward = torch.compile(model.forward, backend=backend)
    elif how == "module":
        model.compile(backend=backend)
    else:
        config = CompileConfig(backend=backend, mode=None)
        config._compile_all_devices = True  # on the CPU, too
        static |= {"compile_config": config, "disable_compile": False}
    torch.compiler.reset()
    got = write(model, group.rank(), static)
    torch.compiler.reset()
    buffer.destroy()
    return got, want, len(graphs)


@pytest.mark.parametrize(
    "how", cases.slow_unless([("generate",)], ["generate", "forward", "module"])
)
def test_a_compiled_model_with_a_static_cache(pool: RankPool, how: str) -> None:
    for got, want, num_graphs in pool.run(generate_compiled, how, num_ranks=2):
        assert got == want
        assert num_graphs > 2  # the experts of each layer end one


@torch.inference_mode()
def generate_loaded(group: dist.ProcessGroup, folder: Path) -> tuple[Any, Any]:
    """What the model of a checkpoint writes, loaded by parts and whole."""
    model, buffer = load_sharded(folder, group, max_tokens=24)
    got = write(model, group.rank(), {})
    want = write(AutoModelForCausalLM.from_pretrained(folder).to(model.device), group.rank(), {})
    buffer.destroy()
    return got, want


def test_a_loaded_model(pool: RankPool, tmp_path: Path) -> None:
    config = build_config(Kind.QWEN3_MOE, **NUM_EXPERTS[Kind.QWEN3_MOE])
    build_model(config).save_pretrained(tmp_path)
    for got, want in pool.run(generate_loaded, tmp_path, num_ranks=2):
        assert got == want
