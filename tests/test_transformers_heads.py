"""Checkpoints that are loaded as models with another head, which is made, alike on all ranks."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    MixtralForSequenceClassification,
    MixtralModel,
)
from transformers_cases import difference

from moe_engine.device.lang import INTERPRETED
from moe_engine.emulation import RankError, RankPool
from moe_engine.integrations.transformers_checkpoints import load_sharded

CONFIG = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "pad_token_id": 0,
}
TWO_LABELS = {"model_class": MixtralForSequenceClassification, "num_labels": 2}


def save(folder: Path, kind: Any = MixtralForCausalLM, **changes: Any) -> str:
    kind(MixtralConfig(**CONFIG | changes)).save_pretrained(folder)
    return str(folder)


@torch.inference_mode()
def load(
    group: dist.ProcessGroup, folder: str, head: str, how: dict[str, Any]
) -> tuple[torch.Tensor, float, list[str]]:
    """The head, the error of the model's result, and what was warned of."""
    torch.manual_seed(group.rank())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model, buffer = load_sharded(folder, group, max_tokens=8, **how)
    whole = (
        type(model)
        .from_pretrained(
            folder, **{name: value for name, value in how.items() if name != "model_class"}
        )
        .to("cpu" if INTERPRETED else "cuda")
    )
    made = model.get_parameter(head).detach()
    whole.get_parameter(head).copy_(made)
    ids = torch.full((1, 3 + group.rank()), 40 + group.rank(), device=made.device)
    error = difference(model(ids).logits, whole(ids).logits)
    buffer.destroy()
    return made.cpu(), error, [str(one.message) for one in caught if head in str(one.message)]


@pytest.mark.parametrize(
    ("kind", "labels", "head", "how"),
    [
        (MixtralForCausalLM, 2, "score.weight", TWO_LABELS),
        (MixtralModel, 2, "lm_head.weight", {"model_class": MixtralForCausalLM}),
        (
            MixtralForSequenceClassification,
            5,
            "score.weight",
            TWO_LABELS | {"ignore_mismatched_sizes": True},
        ),
    ],
    ids=["another class", "the decoder's checkpoint", "another number of labels"],
)
def test_a_head_is_made_alike_on_all_ranks(
    pool: RankPool, tmp_path: Path, kind: Any, labels: int, head: str, how: dict[str, Any]
) -> None:
    folder = save(tmp_path, kind, num_labels=labels)
    (first, *_, texts), (second, *_, others) = found = pool.run(
        load, folder, head, how, num_ranks=2
    )
    assert torch.equal(first, second) and first.abs().sum() > 0
    assert [error <= 1e-5 for _, error, _ in found] == [True, True]
    assert len(texts) == 1 and f"has no {head} for" in texts[0] and not others


def load_alone(group: dist.ProcessGroup, folder: str, **how: Any) -> None:
    load_sharded(folder, group, max_tokens=8, **how)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (TWO_LABELS | {"num_hidden_layers": 2}, "CheckpointError: .* lacks .*, the first of them"),
        (
            {"intermediate_size": 24, "ignore_mismatched_sizes": True},
            "CheckpointError: .* experts are not made anew",
        ),
        ({"device_map": "auto"}, "BackendError: device_map= is given, .* device= is the device"),
    ],
)
def test_what_is_not_made(pool: RankPool, tmp_path: Path, how: dict[str, Any], words: str) -> None:
    folder = save(tmp_path)
    with pytest.raises(RankError, match=words):
        pool.run(partial(load_alone, **how), folder, num_ranks=2)
