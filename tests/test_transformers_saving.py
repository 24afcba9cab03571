"""Sharded models saved, loaded, copied, and switched to other implementations."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM
from transformers_cases import build, difference

from moe_engine.emulation import RankPool
from moe_engine.errors import BackendError, ShapeError
from moe_engine.integrations import expert_parts
from moe_engine.integrations.transformers import (
    fix_max_tokens,
    shard_experts,
    unshard_experts,
)
from moe_engine.tools.models import Kind, build_config, build_model


def read(model: Any, rank: int) -> torch.Tensor:
    """Logits of two tokens, other ones on each rank."""
    return model(torch.tensor([[40 + rank, 50]], device=model.device)).logits.float()


def same_weights(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@torch.inference_mode()
def save(group: dist.ProcessGroup, folder: str, kind: Kind, dtype: torch.dtype) -> None:
    """Shard, save what each rank has, unshard, save the whole from one rank, and shard again."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    model = build(kind, dtype)
    whole = copy.deepcopy(model.state_dict())
    before = model.config._experts_implementation
    buffer = shard_experts(model, group, max_tokens=12)

    path = Path(folder) / f"rank{rank}.pt"
    torch.save(model.state_dict(), path)
    for name, tensor in torch.load(path, map_location=model.device).items():
        share = slice(None)
        if ".experts." in name:
            num_local = 12 // num_ranks
            share = slice(rank * num_local, (rank + 1) * num_local)
        assert torch.equal(tensor, whole[name][share])

    for part in (model, model.model):
        with pytest.raises(BackendError, match=r"unshard_experts\(model\) on every rank"):
            part.save_pretrained(folder)
    assert not list(Path(folder).glob("*.safetensors"))
    with pytest.raises(ShapeError, match="sharded already"):
        shard_experts(model, group)

    unshard_experts(model)
    buffer.destroy()
    assert same_weights(model.state_dict(), whole)
    assert model.config._experts_implementation == before
    if rank == 0:
        model.save_pretrained(folder)
    dist.barrier(group)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(model.device)
    assert same_weights(loaded.state_dict(), whole)

    want = read(loaded, rank)
    buffer = shard_experts(model, group, max_tokens=12)
    assert difference(read(model, rank), want) <= (1e-5 if dtype == torch.float32 else 2e-2)
    buffer.destroy()


def unshard_twice(group: dist.ProcessGroup, folder: str) -> None:
    """The second call brings back what the first one, which had no memory, did not."""
    model = build(Kind.MIXTRAL)
    whole = copy.deepcopy(model.state_dict())
    buffer, gather, calls = shard_experts(model, group, max_tokens=12), expert_parts._gather, []

    def gather_two(*args: Any) -> torch.Tensor:
        calls.append(args)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("no room for all experts")
        return gather(*args)

    with mock.patch.object(expert_parts, "_gather", gather_two):
        with pytest.raises(torch.OutOfMemoryError):
            unshard_experts(model)
        with pytest.raises(BackendError, match=r"unshard_experts\(model\) on every rank"):
            model.save_pretrained(folder)
        marks = vars(expert_parts.expert_parts(model)[0].weight)
        if group.rank() == 0:  # as if it had raised earlier
            del marks["is_restored"]
        with pytest.raises(BackendError, match=r"brought back \[1, 2\] parameters"):
            unshard_experts(model)
        marks["is_restored"] = True
        unshard_experts(model)
    assert same_weights(model.state_dict(), whole)
    buffer.destroy()


def test_a_model_that_could_not_be_whole_stays_sharded(pool: RankPool, tmp_path: Path) -> None:
    pool.run(unshard_twice, str(tmp_path), num_ranks=2)


@pytest.mark.parametrize(
    ("num_ranks", "kind", "dtype"),
    [(2, Kind.MIXTRAL, torch.float32), (1, Kind.QWEN2_MOE, torch.bfloat16)],
)
def test_a_sharded_model_is_saved_whole(
    pool: RankPool, tmp_path: Path, num_ranks: int, kind: Kind, dtype: torch.dtype
) -> None:
    pool.run(save, str(tmp_path), kind, dtype, num_ranks=num_ranks)


@torch.inference_mode()
def copy_sharded(group: dist.ProcessGroup) -> None:
    """A copy reads while the original lives, has its own hint and weights, and outlives it."""
    rank = dist.get_rank(group)
    model = build(Kind.MIXTRAL)
    want = read(model, rank)
    buffer = shard_experts(model, group, max_tokens=12)
    twin = copy.deepcopy(model)
    ours, theirs = (m.model.layers[0].mlp.experts for m in (model, twin))
    assert theirs.moe_share.buffer is buffer
    assert theirs.moe_share.passes is not ours.moe_share.passes
    assert len({id(layer.mlp.experts.moe_share.passes) for layer in twin.model.layers}) == 1
    with fix_max_tokens(twin, 5):
        assert ours.moe_share.passes.fixed is None
    for reader in (twin, model, twin):
        assert difference(read(reader, rank), want) <= 1e-5
    with pytest.raises(BackendError, match="save_pretrained"):
        twin.save_pretrained("nowhere")
    unshard_experts(model)
    twin.set_experts_implementation("moe_engine")
    assert model.config._experts_implementation != "moe_engine"
    del model, ours
    assert difference(read(twin, rank), want) <= 1e-5
    with pytest.raises(BackendError, match="moe_engine"):
        twin.set_experts_implementation("eager")
    buffer.destroy()


def test_a_copied_model_shares_the_buffer(pool: RankPool) -> None:
    pool.run(copy_sharded, num_ranks=2)


# --- Implementations ---------------------------------------------------------------------------


@torch.inference_mode()
def switch(group: dist.ProcessGroup) -> None:
    model = build(Kind.MIXTRAL)
    buffer = shard_experts(model, group, max_tokens=12)
    model.set_experts_implementation("moe_engine")
    for part in (model, model.model):
        with pytest.raises(BackendError, match="'eager', and sharded experts run"):
            part.set_experts_implementation("eager")
        assert model.config._experts_implementation == "moe_engine"
    unshard_experts(model)
    model.set_experts_implementation("eager")
    with pytest.raises(BackendError, match="shard_experts"):
        unshard_experts(model)
    buffer.destroy()


def test_other_implementations_of_sharded_experts_are_refused(pool: RankPool) -> None:
    pool.run(switch, num_ranks=1)


def test_a_layer_with_a_config_of_its_own_is_refused() -> None:
    model = build_model(build_config(Kind.MIXTRAL))
    before = model.config._experts_implementation
    experts = model.model.layers[1].mlp.experts
    experts.config = copy.deepcopy(experts.config)
    with pytest.raises(BackendError, match="did not reach MixtralExperts"):
        shard_experts(model)
    assert model.config._experts_implementation == before


def test_a_shard_that_fails_leaves_the_model_as_it_was() -> None:
    model = build_model(build_config(Kind.MIXTRAL))
    before = model.config._experts_implementation
    with pytest.raises(BackendError, match="backend is 'none'"):
        shard_experts(model, backend="none")
    assert model.config._experts_implementation == before
    assert not hasattr(model.model.layers[0].mlp.experts, "moe_share")
