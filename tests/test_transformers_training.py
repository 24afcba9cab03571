"""Models of transformers with sharded experts under FSDP2: trained, checkpointed, saved whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

from data_parallel_cases import FULL, end, meshes
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM
from transformers_cases import build

from moe_engine.emulation import RankPool
from moe_engine.errors import BackendError
from moe_engine.integrations.data_parallel import clip_grad_norm_, fully_shard_experts
from moe_engine.integrations.transformers import shard_experts, unshard_experts
from moe_engine.tools.models import Kind

LR = 0.5


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(256, (1, 4), generator=generator).to(cases.device())


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, labels=ids).loss


def train(group: dist.ProcessGroup, folder: str, num_steps: int) -> tuple[list[float], float]:
    """The norms of the gradients of each step, and how far the saved model is from one that was
    trained whole."""
    both, world = meshes(2)
    whole, model = build(Kind.QWEN3_MOE), build(Kind.QWEN3_MOE)
    early = torch.optim.SGD(model.parameters(), lr=LR)
    buffer = shard_experts(model, mesh=both["ep"], max_tokens=12, backend="collective")
    with pytest.raises(BackendError, match="Make the optimizer afterwards"):
        early.step()
    fully_shard_experts(model, both["efsdp"])
    for layer in model.model.layers:
        fully_shard(layer, mesh=world)
    fully_shard(model, mesh=world)
    optimizers = [torch.optim.SGD(one.parameters(), lr=LR) for one in (whole, model)]
    norms = []
    for step in range(num_steps):
        ids = [batch(rank, step) for rank in range(group.size())]
        loss_of(whole, torch.cat(ids)).backward()
        loss_of(model, ids[group.rank()]).backward()
        want = torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        norms.append(float(clip_grad_norm_(model.parameters(), 1.0)))
        assert norms[-1] == pytest.approx(float(want), rel=1e-4)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(BackendError, match="FSDP2 holds the experts"):
        unshard_experts(model)
    with pytest.raises(BackendError, match="get_model_state_dict"):
        model.save_pretrained(folder)
    state = get_model_state_dict(model, options=FULL)
    if group.rank() == 0:
        model.save_pretrained(folder, state_dict=state)
    dist.barrier(group)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(
        {name: one.cpu() for name, one in loaded.state_dict().items()},
        {name: one.cpu() for name, one in whole.state_dict().items()},
    )
    end(buffer)
    return norms


@pytest.mark.parametrize("num_steps", cases.slow_unless([(2,)], [2, 5]))
def test_a_model_trains_as_one_process_and_is_saved_whole(
    pool: RankPool, tmp_path: Path, num_steps: int
) -> None:
    norms = pool.run(train, str(tmp_path), num_steps, num_ranks=4)
    assert all(have == norms[0] for have in norms)
