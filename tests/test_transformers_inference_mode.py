"""Experts that are sharded, loaded, quantized and made whole within `torch.inference_mode` are
ordinary parameters, as the rest of the model is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

from transformers_cases import build

from moe_engine.emulation import RankPool
from moe_engine.integrations.quantized_experts import dequantize_experts, quantize_experts
from moe_engine.integrations.transformers import shard_experts, unshard_experts
from moe_engine.integrations.transformers_checkpoints import load_sharded
from moe_engine.tools.models import Kind


def num_of_inference(model: Any) -> int:
    return sum(one.is_inference() for one in model.parameters())


def run(group: dist.ProcessGroup, folder: str) -> list[int]:
    """The number of parameters that are none for autograd, after each step."""
    model = build(Kind.QWEN3_MOE, torch.bfloat16)
    if group.rank() == 0:
        model.save_pretrained(folder)
    dist.barrier(group)
    found = []
    with torch.inference_mode():
        buffer = shard_experts(model, group, max_tokens=8)
        found.append(num_of_inference(model))
    model(torch.full((1, 4), 40, device=model.device)).logits.float().sum().backward()
    assert all(one.grad is not None for name, one in model.named_parameters() if "experts" in name)
    for step in (quantize_experts, dequantize_experts, unshard_experts):
        with torch.inference_mode():
            step(model)
        found.append(num_of_inference(model))
    buffer.destroy()
    with torch.inference_mode():
        model, buffer = load_sharded(folder, group, max_tokens=8)
    found.append(num_of_inference(model))
    buffer.destroy()
    return found


def test_experts_stay_ordinary_parameters(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(run, str(tmp_path), num_ranks=2) == [[0] * 5] * 2
