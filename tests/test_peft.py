"""LoRA adapters of models with sharded experts: of attention, and of the experts themselves."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")
pytest.importorskip("peft")

from data_parallel_cases import end
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.device_mesh import DeviceMesh
from transformers_cases import build, difference

from moe_engine.emulation import RankPool
from moe_engine.errors import BackendError
from moe_engine.integrations.expert_parts import expert_parts, whole_state_dict
from moe_engine.integrations.transformers import (
    join_empty,
    shard_experts,
    unshard_experts,
)
from moe_engine.tools.models import Kind

Targets = dict[str, Any]
ATTENTION: Targets = {"target_modules": ["q_proj", "v_proj"]}
EXPERTS: Targets = {"target_modules": [], "target_parameters": ["gate_up_proj", "down_proj"]}
ONE_WEIGHT: Targets = ATTENTION | {"target_parameters": ["mlp.experts.down_proj"]}
LR = 0.5


def adapted(targets: Targets, model: Any = None) -> Any:
    """A Qwen3-MoE with adapters, which change what it computes, the same on all ranks."""
    model = build(Kind.QWEN3_MOE) if model is None else model
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=3, lora_alpha=6, **targets))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    return model


def batch(model: Any, rank: int, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(256, (1, 4), generator=generator).to(model.device)


def trained_state(model: Any) -> dict[str, torch.Tensor]:
    return {name: one for name, one in model.state_dict().items() if "lora_" in name}


def train(group: dist.ProcessGroup, targets: Targets, backend: str) -> None:
    """Adapters trained and merged over ranks are those of one process with the whole batch."""
    whole, model = adapted(targets), adapted(targets)
    buffer = shard_experts(model, group, max_tokens=4, backend=backend)
    mine = {id(part.weight) for part in expert_parts(model)}
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizers = [torch.optim.SGD(one.parameters(), lr=LR) for one in (whole, model)]
    for step in range(2):
        ids = [batch(model, rank, step) for rank in range(group.size())]
        whole(torch.cat(ids), labels=torch.cat(ids)).loss.backward()
        model(ids[group.rank()], labels=ids[group.rank()]).loss.backward()
        for weight in trained:
            if id(weight) not in mine:
                dist.all_reduce(weight.grad, group=group)
            weight.grad /= group.size()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    have, want = whole_state_dict(model), trained_state(whole)
    assert want
    for name, before in trained_state(adapted(targets)).items():
        torch.testing.assert_close(have[name].to(before.device), want[name])
        assert not torch.allclose(want[name], before)  # it has learned
    model, whole = model.merge_and_unload(), whole.merge_and_unload()
    unshard_experts(model)
    torch.testing.assert_close(model.state_dict(), whole.state_dict())
    end(buffer)


@pytest.mark.parametrize(
    ("targets", "backend"),
    [
        (ATTENTION, "collective"),
        (EXPERTS, "collective"),
        (ONE_WEIGHT, "collective"),
        pytest.param(EXPERTS, "auto", marks=pytest.mark.slow),
    ],
)
def test_adapters_train_as_in_one_process(pool: RankPool, targets: Targets, backend: str) -> None:
    pool.run(train, targets, backend, num_ranks=2)


def save(group: dist.ProcessGroup, folder: str) -> None:
    """A rank without tokens takes part; adapters are saved whole, loaded, and made whole again."""
    model = adapted(EXPERTS)
    before, whole_state = trained_state(model), copy.deepcopy(model.state_dict())
    ids = batch(model, 0)
    with torch.no_grad():
        want = model(ids).logits
    buffer = shard_experts(model, group, max_tokens=4, backend="collective")
    if group.rank() == 0:
        with torch.no_grad():
            assert difference(model(ids).logits, want) <= 1e-5
    else:
        join_empty(model)
    with pytest.raises(BackendError, match=r"whole_state_dict\(model\) gathers on every rank"):
        model.save_pretrained(folder)
    state = whole_state_dict(model, keep=group.rank() == 0)
    part = whole_state_dict(model, keep=group.rank() == 0, adapters_only=True)
    if group.rank() == 0:
        torch.testing.assert_close(state, whole_state, rtol=0, atol=0, check_device=False)
        base = state.keys() - part.keys()
        assert base and all("experts" in name and "lora" not in name for name in base)
        model.save_pretrained(folder, state_dict=part)
    else:
        assert not state and not part
    dist.barrier(group)
    loaded = PeftModel.from_pretrained(build(Kind.QWEN3_MOE), folder)
    unshard_experts(model)
    for one in (model, loaded):
        torch.testing.assert_close(trained_state(one), before, rtol=0, atol=0)
        with torch.no_grad():
            assert difference(one(ids).logits, want) <= 1e-5
    end(buffer)


def test_adapters_of_experts_are_saved_whole(pool: RankPool, tmp_path: Path) -> None:
    pool.run(save, str(tmp_path), num_ranks=2)


def refuse(group: dist.ProcessGroup) -> None:
    model = build(Kind.QWEN3_MOE)
    ids = batch(model, 0)
    buffer = shard_experts(model, group, max_tokens=4, backend="collective")
    late = adapted(ATTENTION, model)
    late(ids).logits.sum().backward()  # adapters of what is not sharded may come later
    late = adapted(EXPERTS, late.unload())
    with pytest.raises(BackendError, match=r"Call get_peft_model first, then shard_experts"):
        late(ids)
    end(buffer)

    mesh = DeviceMesh.from_group(group, model.device.type)
    with pytest.raises(BackendError, match=r"shard_experts\(model, group\), without mesh"):
        shard_experts(adapted(EXPERTS), mesh=mesh)
    copies = get_peft_model(
        build(Kind.QWEN3_MOE), LoraConfig(**ATTENTION, modules_to_save=["experts"])
    )
    with pytest.raises(BackendError, match="peft has put a ModulesToSaveWrapper around experts"):
        shard_experts(copies, group)


def test_what_is_refused(pool: RankPool) -> None:
    pool.run(refuse, num_ranks=1)
