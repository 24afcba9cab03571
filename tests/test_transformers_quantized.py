"""Checkpoints of quantized weights, in MXFP4 as gpt-oss's and in e4m3 as DeepSeek-V3's, which
transformers dequantizes while each rank reads its part."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from einops import rearrange, reduce

pytest.importorskip("transformers")

import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config
from transformers_cases import difference

from moe_engine import BackendError
from moe_engine.emulation import RankPool
from moe_engine.integrations.expert_parts import whole_state_dict
from moe_engine.integrations.transformers_checkpoints import (
    check_dequantized,
    dequantize_options,
    load_sharded,
)
from moe_engine.tools.models import Kind, build_config, build_model

Tensors = dict[str, torch.Tensor]
DEQUANTIZED: dict[str, Any] = {
    "mxfp4": Mxfp4Config(dequantize=True),
    "fp8": FineGrainedFP8Config(dequantize=True),
}
pytestmark = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23),
    reason="transformers before 5.23 was not tried",
)


def write(folder: Path, model: Any, tensors: Tensors, quantization: dict[str, Any]) -> None:
    """The checkpoint of a model with other tensors in it."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def save_mxfp4(folder: Path) -> None:
    """gpt-oss with drawn blocks of 32 values of 4 bits and their scales, powers of 2."""
    sizes: dict[str, Any] = dict(vocab_size=64, hidden_size=64, intermediate_size=32, head_dim=16)
    sizes |= dict(num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)
    config = AutoConfig.for_model("gpt_oss", **sizes, num_local_experts=4, num_experts_per_tok=2)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tensors: Tensors = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, depth, columns = weight.shape
            shape = experts, columns, depth // 32
            tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(118, 124, shape, dtype=torch.uint8)
        else:
            tensors[name] = weight
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]
    how = {"quant_method": "mxfp4", "modules_to_not_convert": [*kept, "lm_head"]}
    write(folder, model, tensors, how)


def save_fp8(folder: Path) -> None:
    """Qwen3-MoE with e4m3 weights and a scale for each 128 x 128."""
    sizes = dict(hidden_size=128, moe_intermediate_size=256, num_experts=4, num_hidden_layers=1)
    model = build_model(build_config(Kind.QWEN3_MOE, **sizes), "cpu", torch.bfloat16)
    model.save_pretrained(folder)
    tensors: Tensors = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        tensors[name] = weight
        if name.endswith("proj.weight"):
            rows, columns = (-(-size // 128) for size in weight.shape)
            padded = weight.new_zeros(128 * rows, 128 * columns, dtype=torch.float32)
            padded[: weight.shape[0], : weight.shape[1]] = weight
            tiles = rearrange(padded, "(i r) (j c) -> i j r c", r=128, c=128)
            scales = reduce(tiles.abs(), "i j r c -> i j", "max") / 448
            values = rearrange(tiles / scales[:, :, None, None], "i j r c -> (i r) (j c)")
            values = values[: weight.shape[0], : weight.shape[1]]
            tensors[name] = values.to(torch.float8_e4m3fn).contiguous()
            tensors[f"{name}_scale_inv"] = scales
    how = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    kept = ["lm_head", "model.layers.0.mlp.gate"]
    write(folder, model, tensors, how | {"modules_to_not_convert": kept})


def test_nothing_is_dequantized_where_nothing_is_quantized(tmp_path: Path) -> None:
    build_config(Kind.QWEN3_MOE).save_pretrained(tmp_path)
    assert dequantize_options(tmp_path) == {}


SAVE = {"mxfp4": save_mxfp4, "fp8": save_fp8}


def read(group: dist.ProcessGroup, folder: Path, kind: str) -> float:
    """How far the logits are from those of the model that transformers dequantizes itself, whose
    weights must be the same."""
    plain = AutoModelForCausalLM.from_pretrained(folder, quantization_config=DEQUANTIZED[kind])
    model, buffer = load_sharded(folder, group, max_tokens=16, **dequantize_options(folder))
    whole = whole_state_dict(model)
    for name, value in plain.state_dict().items():
        assert torch.equal(whole[name].cpu(), value), name
    ids = torch.tensor([[1, 2, 3, 4 + group.rank()]])
    with torch.no_grad():
        found = difference(
            model(ids.to(model.device)).logits.cpu().float(), plain(ids).logits.float()
        )
    buffer.destroy()
    return found


@pytest.mark.parametrize("kind", SAVE)
def test_weights_are_dequantized(pool: RankPool, tmp_path: Path, kind: str) -> None:
    SAVE[kind](tmp_path)
    for found in pool.run(read, tmp_path, kind, num_ranks=2):
        assert found < 3e-2  # both compute in bf16


@pytest.mark.parametrize("how", [Mxfp4Config(), FineGrainedFP8Config(), {"quant_method": "gptq"}])
def test_weights_that_stay_as_they_are_are_refused(how: Any) -> None:
    with pytest.raises(BackendError, match="folder holds a quantized model") as raised:
        check_dequantized(Path("folder"), SimpleNamespace(quantization_config=how))
    assert "Pass **dequantize_options(checkpoint)" in str(raised.value)
    for allowed in (None, *DEQUANTIZED.values()):
        check_dequantized(Path("folder"), SimpleNamespace(quantization_config=allowed))
