"""Models that transformers itself distributes, with their experts on this engine: the logits and
gradients of its own exchange."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers.distributed.expert_parallel")

from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers_cases import NUM_EXPERTS, difference

from moe_engine import CapacityError, ShapeError
from moe_engine.emulation import RankError, RankPool
from moe_engine.integrations.transformers import register
from moe_engine.integrations.transformers_distributed import ExpertParallelism
from moe_engine.tools.models import Kind, build_config, build_model

SIZES = {
    "shared batches": {"fsdp_size": 2, "tp_size": 2, "ep_size": 4},
    "batches of their own": {"fsdp_size": 4, "ep_size": 4},
    "one tensor-parallel group": {"fsdp_size": 2, "tp_size": 2, "ep_size": 2},
    "copies of experts": {"fsdp_size": 4, "ep_size": 2},
}


def read(
    group: dist.ProcessGroup, folder: str, sizes: dict[str, int], how: str, max_tokens: int = 16
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The logits and the whole gradients of a model that is loaded, and called twice, on 4 ranks,
    each tensor-parallel group with a batch of its own, of 3 tokens and more."""
    rank, gpu = dist.get_rank(), cases.device().index or 0
    register(max_tokens=max_tokens)
    with pytest.MonkeyPatch.context() as patch:
        # transformers takes LOCAL_RANK for the number of the GPU.
        for name, value in ("RANK", rank), ("LOCAL_RANK", gpu), ("WORLD_SIZE", group.size()):
            patch.setenv(name, str(value))
        plan = DistributedConfig(**sizes, ep_implementation=how)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, distributed_config=plan)
        batch = rank // sizes.get("tp_size", 1)
        ids = torch.arange(3 + 2 * batch, device=model.device)[None] + 10 * batch
        with torch.no_grad():
            model(ids[:, 1:])
        logits = model(ids).logits
        logits.square().mean().backward()
    grads = {name: whole(one.grad) for name, one in model.named_parameters()}
    return logits.detach().cpu(), grads


def drop(group: dist.ProcessGroup, folder: str) -> bool:
    """Whether the Buffer of a model lives longer than the model."""
    read(group, folder, SIZES["shared batches"], "moe_engine")
    gc.collect()
    return ExpertParallelism._last is not None and ExpertParallelism._last() is not None


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).cpu()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("qwen3")
    config = build_config(Kind.QWEN3_MOE, **NUM_EXPERTS[Kind.QWEN3_MOE])
    build_model(config, "cpu", torch.float32).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", cases.slow_unless([("shared batches",)], SIZES))
def test_logits_and_gradients(pool: RankPool, checkpoint: Path, name: str) -> None:
    ours = pool.run(read, str(checkpoint), SIZES[name], "moe_engine", num_ranks=4)
    theirs = pool.run(read, str(checkpoint), SIZES[name], "all_to_all", num_ranks=4)
    for (got, grads), (want, want_grads) in zip(ours, theirs, strict=True):
        assert difference(got, want) <= 1e-5
        assert grads.keys() == want_grads.keys()
        for of, one in grads.items():
            assert difference(one, want_grads[of]) <= 1e-5, of


def test_more_tokens_than_the_buffer_was_made_for(pool: RankPool, checkpoint: Path) -> None:
    with pytest.raises(RankError, match="give shard_experts, or register, max_tokens") as info:
        sizes = SIZES["batches of their own"]
        pool.run(read, str(checkpoint), sizes, "moe_engine", 4, num_ranks=4)
    assert CapacityError.__name__ in str(info.value)


def test_a_model_takes_its_buffer_along(pool: RankPool, checkpoint: Path) -> None:
    assert pool.run(drop, str(checkpoint), num_ranks=4) == [False] * 4


def test_experts_that_are_refused(pool: RankPool, checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text()) | {"hidden_act": "relu"}
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RankError, match=r"BackendError: .*has the activation"):
        pool.run(read, str(tmp_path), SIZES["shared batches"], "moe_engine", num_ranks=4)


def test_register_refuses() -> None:
    with pytest.raises(ShapeError, match="max_tokens"):
        register(max_tokens=0)
