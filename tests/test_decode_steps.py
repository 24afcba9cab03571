"""What a decode step is that can be captured, and what of it a graph keeps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache, GenerationConfig, MixtralConfig, StaticCache
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from moe_engine.integrations.decode_graphs import (
    CACHE_NAMES,
    Output,
    Step,
    items,
    with_static_cache,
)


def config(**changes: Any) -> MixtralConfig:
    return MixtralConfig(num_hidden_layers=2, **changes)


def filled(cache: StaticCache) -> StaticCache:
    """A cache after the prefill of two sequences."""
    rows = torch.zeros(2, 8, 3, 4)
    for layer in range(len(cache.layers)):
        cache.update(rows, rows, layer)
    return cache


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_what_a_decode_step_is(name: str) -> None:
    ids, cache = torch.ones(2, 1, dtype=torch.long), filled(StaticCache(config(), max_cache_len=8))
    mask = {"full": torch.ones(2, 8), "none": None}
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": True, name: cache}
    step = Step.of(inputs)
    assert step is not None and step.cache is cache and step.cache_name == name
    assert step.num_tokens == 2 and name not in step.inputs
    same = Step.of(
        inputs | {"input_ids": ids + 1, "attention_mask": mask | {"full": mask["full"] * 2}}
    )
    assert same is not None and same.kind == step.kind
    changes: tuple[dict[str, Any], ...] = (
        {"use_cache": False},
        {"input_ids": ids[:1]},
        {"input_ids": ids.int()},
        {"attention_mask": mask | {"full": torch.ones(2, 9)}},
        {"attention_mask": mask["full"]},
        {"logits_to_keep": 1},
        {name: filled(StaticCache(config(), max_cache_len=8))},
    )
    for change in changes:
        other = Step.of(inputs | change)
        assert other is not None and other.kind != step.kind
    cache.reorder_cache(torch.tensor([1, 0]))
    moved = Step.of(inputs)
    assert moved is not None and moved.kind != step.kind


def test_what_no_decode_step_is() -> None:
    ids, cache = torch.ones(2, 1, dtype=torch.long), filled(StaticCache(config(), max_cache_len=8))
    inputs = {"input_ids": ids, "past_key_values": cache}
    changes: tuple[dict[str, Any], ...] = (
        {"input_ids": torch.ones(2, 3, dtype=torch.long)},
        {"input_ids": None, "inputs_embeds": torch.ones(2, 1, 16)},
        {"past_key_values": None},
        {"past_key_values": DynamicCache()},
        {"past_key_values": StaticCache(config(), max_cache_len=8)},  # before the prefill
        {"past_key_values": filled(StaticCache(config(sliding_window=4), max_cache_len=8))},
        {"images": [ids]},
    )
    for change in changes:
        assert Step.of(inputs | change) is None


def test_inputs_by_name() -> None:
    assert dict(items({"a": 1, "b": {"c": 2, "d": {"e": None}}})) == {
        "a": 1,
        "b.c": 2,
        "b.d.e": None,
    }


def test_an_output_without_its_cache() -> None:
    cache, logits = DynamicCache(), torch.ones(2)
    output = MoeCausalLMOutputWithPast(logits=logits, past_key_values=cache)
    kept = Output.of(output, cache)
    assert kept is not None and cache not in kept.values.values()
    copied = kept.copied(cache)
    assert type(copied) is type(output) and copied.past_key_values is cache
    assert torch.equal(copied.logits, logits) and copied.logits is not logits
    assert Output.of((logits, cache), cache) is None
    assert (
        Output.of(MoeCausalLMOutputWithPast(logits=logits, hidden_states=(logits,)), cache) is None
    )


@pytest.mark.parametrize(
    ("more", "is_static"),
    [
        ({}, True),
        ({"num_beams": 1, "use_cache": True}, True),
        ({"generation_config": GenerationConfig(max_new_tokens=3)}, True),
        ({"generation_config": GenerationConfig(cache_implementation="offloaded")}, False),
        ({"generation_config": GenerationConfig(num_beams=2)}, False),
        ({"cache_implementation": "dynamic"}, False),
        ({"past_key_values": DynamicCache()}, False),
        ({"use_cache": False}, False),
        ({"assistant_model": torch.nn.Identity()}, False),
        ({"prompt_lookup_num_tokens": 3}, False),
    ],
)
def test_which_cache_generate_gets(more: dict[str, Any], is_static: bool) -> None:
    model = SimpleNamespace(generation_config=GenerationConfig())
    found = with_static_cache(model, (), more)
    assert found.pop("disable_compile") is True
    assert found == (more | {"cache_implementation": "static"} if is_static else more)
