"""Experts of other forms than Mixtral's, compared with the unsharded model: those of gpt-oss, whose
weights are transposed and interleaved, and which have biases; those of MiniMax-M3. The gates of
both have limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers_cases import difference

from moe_engine import BackendError
from moe_engine.device.lang import INTERPRETED
from moe_engine.emulation import RankError, RankPool
from moe_engine.integrations.expert_parts import Part, expert_parts, whole_state_dict
from moe_engine.integrations.transformers import (
    experts_layers,
    shard_experts,
    unshard_experts,
)
from moe_engine.integrations.transformers_checkpoints import load_sharded, save_whole

SIZES: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_local_experts=6,
    num_experts_per_tok=2,
    pad_token_id=0,
)
OWN: dict[str, dict[str, Any]] = {
    "gpt_oss": dict(intermediate_size=24, swiglu_limit=0.3),
    "minimax_m3_vl_text": dict(
        intermediate_size=24, swiglu_limit=0.3, bos_token_id=1, eos_token_id=2
    ),
}


def build(kind: str, device: str | None = None) -> Any:
    """A model whose experts reach their limits, and whose biases are not 0."""
    config = AutoConfig.for_model(kind, **SIZES | OWN[kind])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for experts in experts_layers(model):
            for weight in experts.parameters():
                weight.normal_(std=0.3)
    return model.to(device or ("cpu" if INTERPRETED else "cuda"))


def ids_of(rank: int, model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(64, (2, 3 + rank), generator=generator).to(model.device)


def run_logits(group: dist.ProcessGroup, kind: str) -> list[float]:
    """How far logits, answers and the weights of the whole model are from those unsharded."""
    model = build(kind)
    ids = ids_of(group.rank(), model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    how: dict[str, Any] = dict(max_new_tokens=2 + group.rank(), do_sample=False)
    with torch.no_grad():
        want, answer = model(ids).logits, model.generate(ids, **how)
        buffer = shard_experts(model, group, max_tokens=16)
        got = model(ids).logits
        assert torch.equal(model.generate(ids, **how), answer)
    whole = whole_state_dict(model)
    unshard_experts(model)
    again = model.state_dict()
    for name, value in before.items():
        assert torch.equal(whole[name].cpu(), value.cpu()), name
        assert torch.equal(again[name], value), name
    buffer.destroy()
    return [difference(got, want), difference(model(ids).logits, want)]


@pytest.mark.parametrize("kind", OWN)
def test_logits(pool: RankPool, kind: str) -> None:
    for found in pool.run(run_logits, kind, num_ranks=2):
        assert max(found) < 1e-5, found


def run_gradients(group: dist.ProcessGroup, kind: str) -> list[float]:
    """How far all gradients of a mean loss are from those of the unsharded model with the batches
    of all ranks."""
    plain, model = build(kind), build(kind)
    ids = [ids_of(rank, plain) for rank in range(group.size())]
    sum(plain(one, labels=one).loss for one in ids).backward()
    buffer = shard_experts(model, group, max_tokens=16)
    mine = ids[group.rank()]
    model(mine, labels=mine).loss.backward()
    wanted = {name: one.grad for name, one in plain.named_parameters()}
    found = []
    for name, one in model.named_parameters():
        want, got = wanted[name], one.grad
        if ".experts." in name:
            got = _as_saved(model, name, got, group)
        elif got is not None:
            dist.all_reduce(got, group=group)
        found.append(cases.relative_error(got, want))
    buffer.destroy()
    return found


def _as_saved(model: Any, name: str, grad: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The gradient of a weight of experts, of all ranks, in the form that the model has."""
    [part] = [one for one in expert_parts(model) if one.weight is model.get_parameter(name)]
    holder = torch.nn.Module()
    setattr(holder, part.name, torch.nn.Parameter(grad))
    turned = Part(holder, part.name, 0, part.is_transposed, part.is_interleaved)
    return turned.gather(group)


@pytest.mark.parametrize("kind", OWN)
def test_gradients(pool: RankPool, kind: str) -> None:
    for found in pool.run(run_gradients, kind, num_ranks=2):
        assert max(found) < 1e-4, found


def run_loading(group: dist.ProcessGroup, folder: Path) -> float:
    """How far the logits of a model of `load_sharded` are; it is written again, bit for bit."""
    plain = AutoModelForCausalLM.from_pretrained(folder / "saved")
    model, buffer = load_sharded(folder / "saved", group, max_tokens=16)
    ids = ids_of(group.rank(), model)
    with torch.no_grad():
        found = difference(model(ids).logits.cpu(), plain(ids.cpu()).logits)
    save_whole(model, folder / "again")
    buffer.destroy()
    return found


@pytest.mark.parametrize("kind", OWN)
def test_checkpoints(pool: RankPool, kind: str, tmp_path: Path) -> None:
    build(kind, "cpu").save_pretrained(tmp_path / "saved")
    for found in pool.run(run_loading, tmp_path, num_ranks=2):
        assert found < 1e-5
    held = [load_file(tmp_path / name / "model.safetensors") for name in ("saved", "again")]
    assert held[0].keys() == held[1].keys()
    assert all(torch.equal(value, held[1][name]) for name, value in held[0].items())


def run_mesh(group: dist.ProcessGroup, kind: str) -> None:
    mesh = torch.distributed.device_mesh.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("ep",))
    shard_experts(build(kind, "cpu"), mesh=mesh, backend="collective")


def test_a_mesh_is_refused(pool: RankPool) -> None:
    with pytest.raises(RankError, match="which a mesh cannot take") as raised:
        pool.run(run_mesh, "gpt_oss", num_ranks=2)
    assert raised.value.cause_type is BackendError
