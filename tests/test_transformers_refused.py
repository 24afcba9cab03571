"""Models and ranks that the integration with transformers refuses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers_cases import build

from moe_engine.emulation import RankError, RankPool
from moe_engine.errors import (
    BackendError,
    CheckpointError,
    DtypeError,
    MoeEngineError,
    ShapeError,
)
from moe_engine.integrations.transformers import fix_max_tokens, register, shard_experts
from moe_engine.integrations.transformers_checkpoints import empty_model
from moe_engine.tools.models import Kind


def tiny(model_type: str, **changes: Any) -> Any:
    sizes = dict(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
    )
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes | changes))


def without_gate() -> Any:
    model = tiny("mixtral")
    model.model.layers[0].mlp.experts.has_gate = False
    return model


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: tiny("mixtral", hidden_act="relu"), BackendError, "the activation ReLU"),
        (without_gate, BackendError, "MixtralExperts has up_proj of type NoneType"),
        (lambda: tiny("mixtral").half(), DtypeError, "float16"),
        (lambda: tiny("llama"), BackendError, "LlamaForCausalLM has no experts"),
        (lambda: 3, DtypeError, "model is 3"),
    ],
)
def test_experts_of_another_kind_are_refused(
    make: Callable[[], Any], error: type[MoeEngineError], text: str
) -> None:
    with pytest.raises(error, match=text):
        shard_experts(make())


def test_a_config_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        empty_model(tmp_path / "nothing")


def test_a_model_without_buffer_is_refused() -> None:
    model = tiny("mixtral")
    register()
    model.set_experts_implementation("moe_engine")
    with pytest.raises(BackendError, match="shard_experts"):
        model(torch.zeros(1, 2, dtype=torch.int64))


def shard(group: dist.ProcessGroup, kind: Kind, times: int) -> None:
    model = build(kind, num_local_experts=8)
    for _ in range(times):
        shard_experts(model, group, max_tokens=4)


def test_a_hint_for_a_model_without_buffer_is_refused() -> None:
    with pytest.raises(BackendError, match="shard_experts"), fix_max_tokens(tiny("mixtral"), 4):
        pass


@pytest.mark.parametrize(
    ("num_ranks", "times", "text"),
    [(3, 1, "8 experts, which 3 ranks cannot share"), (2, 2, "sharded already")],
)
def test_what_cannot_be_shared_is_refused(
    pool: RankPool, num_ranks: int, times: int, text: str
) -> None:
    if num_ranks > pool.num_ranks:
        pytest.skip(f"{num_ranks} ranks, and the pool has {pool.num_ranks}")
    with pytest.raises(RankError, match=text) as raised:
        pool.run(shard, Kind.MIXTRAL, times, num_ranks=num_ranks)
    assert raised.value.cause_type is ShapeError


@pytest.mark.parametrize(
    ("how", "text"),
    [
        (lambda _: {"assistant_early_exit": 1}, "assistant_early_exit does not run"),
        (lambda _: {"generation_config": GenerationConfig(use_mtp=True)}, "use_mtp does not run"),
        (lambda model: {"assistant_model": model}, "load it whole on every rank"),
    ],
)
def test_drafts_of_sharded_experts_are_refused(
    how: Callable[[Any], dict[str, Any]], text: str
) -> None:
    model = tiny("mixtral")
    shard_experts(model, backend="collective")
    with pytest.raises(BackendError, match=text):
        model.generate(torch.ones(1, 2, dtype=torch.int64), **how(model))
