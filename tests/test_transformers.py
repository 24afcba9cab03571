"""Models of transformers with their experts on several ranks, against the same model unsharded."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModelForCausalLM

from moe_engine.emulation import RankError, RankPool
from moe_engine.errors import BackendError, DtypeError, MoeEngineError, ShapeError
from moe_engine.integrations.transformers import (
    join_empty,
    record_routing,
    register,
    replay_routing,
    shard_experts,
)
from moe_engine.lang import INTERPRETED
from moe_engine.models import Kind, build_config, build_model

BATCHES = ((1, 12), (2, 5), (0, 0), (1, 1))
"""Batch size and length on each rank; the third has nothing to read."""
NUM_EXPERTS = {  # 12 experts go evenly to 1, 2, 3 and 4 ranks
    Kind.MIXTRAL: {"num_local_experts": 12},
    Kind.QWEN2_MOE: {"num_experts": 12},
    Kind.QWEN3_MOE: {"num_experts": 12},
    Kind.DEEPSEEK_V3: {"n_routed_experts": 12},
}


def build(kind: Kind, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    config = build_config(kind, **NUM_EXPERTS[kind] | changes)
    return build_model(config, "cpu" if INTERPRETED else "cuda", dtype)


def read(model: Any, rank: int) -> Tensor | None:
    """Logits of the rank's own batch."""
    batch, length = BATCHES[rank]
    if batch == 0:
        join_empty(model)
        return None
    ids = torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(rank))
    return model(ids.to(model.device)).logits.float()


def difference(got: Tensor | None, want: Tensor | None) -> float:
    """The largest, relative to the largest logit."""
    if got is None or want is None:
        return 0.0
    return float((got - want).abs().max() / want.abs().max())


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


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", list(Kind))
def test_logits_are_those_of_the_unsharded_model(
    pool: RankPool, kind: Kind, num_ranks: int
) -> None:
    if num_ranks > pool.num_ranks:
        pytest.skip(f"{num_ranks} ranks, and the pool has {pool.num_ranks}")
    for error, shapes in pool.run(compare_logits, kind, num_ranks=num_ranks):
        assert error <= 1e-5
        assert {shape[0] for shape in shapes} == {12 // num_ranks}


@torch.inference_mode()
def replay_bf16(group: dist.ProcessGroup) -> tuple[float, bool]:
    rank = dist.get_rank(group)
    model = build(Kind.QWEN3_MOE, torch.bfloat16)
    with record_routing(model) as routing:
        want = read(model, rank)
    buffer = shard_experts(model, group, max_tokens=12)
    with replay_routing(model, routing), record_routing(model) as replayed:
        got = read(model, rank)
    buffer.destroy()
    same = [
        torch.equal(idx, idx_again) and torch.equal(weights, weights_again)
        for (idx, weights), (idx_again, weights_again) in zip(routing, replayed, strict=True)
    ]
    return difference(got, want), all(same)


def test_bf16_logits_with_the_routing_replayed(pool: RankPool) -> None:
    for error, same in pool.run(replay_bf16, num_ranks=2):
        assert error <= 2e-2
        assert same


@torch.inference_mode()
def generate(group: dist.ProcessGroup) -> tuple[list[int], list[int]]:
    """What the unsharded and the sharded model write; the last rank has nothing to do."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    model = build(Kind.MIXTRAL)
    ids = torch.full((1, 5), 40 + rank, device=model.device)

    def write() -> list[int]:
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), min_new_tokens=3, max_new_tokens=3
        )
        return out[0].tolist()

    want = write()
    buffer = shard_experts(model, group, max_tokens=5)
    if rank == num_ranks - 1:
        join_empty(model, calls=3)
        got = want
    else:
        got = write()
    buffer.destroy()
    return got, want


def test_generation_in_step(pool: RankPool) -> None:
    for got, want in pool.run(generate, num_ranks=2):
        assert got == want
        assert len(got) == 8


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
        (lambda: tiny("gpt_oss", num_local_experts=4), BackendError, "biases, transposed weights"),
        (lambda: tiny("mixtral", hidden_act="gelu"), BackendError, "GELUActivation"),
        (without_gate, BackendError, "MixtralExperts has no gate"),
        (lambda: tiny("mixtral").half(), DtypeError, "float16"),
        (lambda: tiny("llama"), BackendError, "LlamaForCausalLM has no experts"),
    ],
)
def test_experts_of_another_kind_are_refused(
    make: Callable[[], Any], error: type[MoeEngineError], text: str
) -> None:
    with pytest.raises(error, match=text):
        shard_experts(make())


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
