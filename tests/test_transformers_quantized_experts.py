"""Models whose experts were made e4m3, against unsharded ones that compute so in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from einops import rearrange

pytest.importorskip("transformers")

from safetensors.torch import load_file
from test_transformers_quantized import pytestmark as of_new_transformers
from test_transformers_quantized import save_fp8
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers_cases import NUM_EXPERTS, difference

from moe_engine import BackendError, DtypeError, ShapeError, reference
from moe_engine.emulation import RankPool
from moe_engine.grouped_gemm import quantize_weights
from moe_engine.integrations import quantized_experts
from moe_engine.integrations.expert_parts import whole_state_dict
from moe_engine.integrations.quantized_experts import dequantize_experts, quantize_experts
from moe_engine.integrations.transformers import (
    experts_layers,
    join_empty,
    shard_experts,
    unshard_experts,
)
from moe_engine.integrations.transformers_checkpoints import dequantize_options, load_sharded
from moe_engine.integrations.transformers_experts import activation_of, gate_of, names_of
from moe_engine.tools.models import Kind, build_config, build_model

SIZES: dict[str, Any] = dict(
    vocab_size=64, hidden_size=128, intermediate_size=48, num_hidden_layers=2, head_dim=16
)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=2, num_local_experts=6)
SIZES |= dict(num_experts_per_tok=2, pad_token_id=0)


def build(kind: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    if kind == "gpt_oss":
        torch.manual_seed(0)
        config = AutoConfig.for_model("gpt_oss", **SIZES)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        with torch.no_grad():
            for experts in experts_layers(model):
                for weight in experts.parameters():
                    weight.normal_(std=0.1)
    else:
        config = build_config(Kind(kind), **NUM_EXPERTS[Kind(kind)], hidden_size=128)
        model = build_model(config, "cpu", dtype)
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def as_quantized(self: Any, x: torch.Tensor, ids: torch.Tensor, weights: Any) -> torch.Tensor:
    """Experts of an unsharded model as `quantize_experts` makes them, in plain torch."""
    gate = gate_of(self)
    assert gate is not None
    both = [getattr(self, name).detach() for name in names_of(self)]
    if self.is_transposed:
        both[:2] = [one.transpose(1, 2) for one in both[:2]]
    if gate.is_interleaved:
        for at in (0, 2):
            both[at] = rearrange(both[at], "e (rows part) ... -> e (part rows) ...", part=2)
    (up, s_up), (down, s_down) = (quantize_weights(one) for one in both[:2])
    biases = both[2:] or (None, None)
    rows = reference.expert_rows(x, ids, up, down, *biases, activation_of(self), s_up, s_down)
    return reference.sum_topk(rows, weights.float())


def ids_of(rank: int, model: Any, length: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(64, (2, length + rank), generator=generator).to(model.device)


def num_bytes(model: Any) -> int:
    return sum(one.nbytes for experts in experts_layers(model) for one in experts.parameters())


@torch.no_grad()
def run_logits(group: dist.ProcessGroup, kind: str) -> list[float]:
    """How far logits are from those of the model in plain torch: of a prefill, of a step, of both
    unsharded again and in bf16; the share of memory of the experts."""
    model, plain = build(kind), build(kind)
    ALL_EXPERTS_FUNCTIONS.register("as_quantized", as_quantized)
    plain.set_experts_implementation("as_quantized")
    ids = ids_of(group.rank(), plain)
    want, want_step = (plain(one).logits.float() for one in (ids, ids[:, :1]))
    buffer = shard_experts(model, group, max_tokens=64)
    before = num_bytes(model)
    quantize_experts(model)
    share = num_bytes(model) / before
    found = [difference(model(ids).logits.float(), want)]
    found.append(difference(model(ids[:, :1]).logits.float(), want_step))
    generated = model.generate(ids, max_new_tokens=2 + group.rank(), do_sample=False)
    assert generated.shape[1] == ids.shape[1] + 2 + group.rank()
    with pytest.raises(BackendError, match="would lack their scales"):
        whole_state_dict(model)
    with pytest.raises(ShapeError, match="quantized already"):
        quantize_experts(model)
    unshard_experts(model)
    for one in (model, plain):
        one.set_experts_implementation("eager")
    for experts, other in zip(experts_layers(model), experts_layers(plain), strict=True):
        for name in names_of(experts):
            have, same = getattr(experts, name), getattr(other, name)
            assert have.dtype == same.dtype and have.shape == same.shape
            assert difference(have.float(), same.float()) < 0.04
            same.copy_(have)
    found.append(difference(model(ids).logits.float(), plain(ids).logits.float()))
    buffer.destroy()
    return [*found, share]


@pytest.mark.parametrize("kind", ["mixtral", "qwen3-moe", "gpt_oss"])
def test_logits(pool: RankPool, kind: str) -> None:
    for prefill, step, again, share in pool.run(run_logits, kind, num_ranks=2):
        assert prefill < 4e-2, prefill  # both compute in bf16
        assert step < 4e-2, step
        assert again == 0
        assert share < 0.53


def quantize_twice(group: dist.ProcessGroup) -> None:
    """A layer is quantized whole or not at all, and trains again when it is bf16 again."""
    model = build("mixtral")
    for experts in experts_layers(model):
        experts.down_proj.requires_grad_(False)
    buffer = shard_experts(model, group, max_tokens=16)
    no_room = torch.OutOfMemoryError("no room for values and scales")
    made = quantize_weights(experts_layers(model)[0].gate_up_proj.detach())
    with (
        mock.patch.object(quantized_experts, "quantize_weights", side_effect=[made, no_room]),
        pytest.raises(torch.OutOfMemoryError),
    ):
        quantize_experts(model)
    for experts in experts_layers(model):
        assert {one.dtype for one in experts.parameters()} == {torch.bfloat16}
    quantize_experts(model)
    assert not any(one.requires_grad for one in experts.parameters())
    unshard_experts(model)
    for experts in experts_layers(model):
        assert experts.gate_up_proj.requires_grad
        assert not experts.down_proj.requires_grad
    buffer.destroy()


def train_between(group: dist.ProcessGroup) -> None:
    """An optimizer of weights that were e4m3 in between is told; those of a copy train as well."""
    model = build("mixtral")
    buffer = shard_experts(model, group, max_tokens=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    quantize_experts(model)
    copied = copy.deepcopy(model)
    for one in (model, copied):
        dequantize_experts(one)
        assert all(weight.requires_grad for weight in experts_layers(one)[0].parameters())
    ids = ids_of(dist.get_rank(group), model)
    model(ids, labels=ids).loss.backward()
    with pytest.raises(BackendError, match="an optimizer steps a parameter of experts"):
        optimizer.step()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = experts_layers(model)[0].down_proj.detach().clone()
    optimizer.step()
    assert not torch.equal(experts_layers(model)[0].down_proj.detach(), before)
    dist.barrier(group)
    buffer.destroy()


def test_weights_train_that_were_e4m3(pool: RankPool) -> None:
    pool.run(train_between, num_ranks=2)


def test_a_layer_is_quantized_as_a_whole(pool: RankPool) -> None:
    pool.run(quantize_twice, num_ranks=1)


@torch.no_grad()
def run_a_rank_without_tokens(group: dist.ProcessGroup) -> None:
    model = build("mixtral")
    buffer = shard_experts(model, group, max_tokens=16)
    quantize_experts(model)
    if group.rank():
        join_empty(model)
    else:
        model(ids_of(0, model))
    dequantize_experts(model)
    dequantize_experts(model)  # which changes nothing
    model(ids_of(group.rank(), model))
    buffer.destroy()


def test_a_rank_without_tokens(pool: RankPool) -> None:
    pool.run(run_a_rank_without_tokens, num_ranks=2)


def run_checkpoint(group: dist.ProcessGroup, folder: Path) -> None:
    """What is quantized in the checkpoint is so again, with the same values."""
    model, buffer = load_sharded(folder, group, max_tokens=16, **dequantize_options(folder))
    quantize_experts(model)
    [experts] = experts_layers(model)
    first = group.rank() * len(experts.down_proj)
    stored = load_file(folder / "model.safetensors")
    for number in range(len(experts.down_proj)):
        name = f"model.layers.0.mlp.experts.{first + number}.{{}}_proj.weight"
        values = [stored[name.format(part)].view(torch.int8) for part in ("gate", "up", "down")]
        scales = [stored[name.format(part) + "_scale_inv"] for part in ("gate", "up", "down")]
        both = (experts.gate_up_proj, experts.gate_up_proj_scale_inv)
        for (have, scale), of, its in (
            (both, torch.cat(values[:2]), torch.cat(scales[:2])),
            ((experts.down_proj, experts.down_proj_scale_inv), values[2], scales[2]),
        ):
            assert torch.equal(have[number].view(torch.int8).cpu(), of)
            assert torch.allclose(scale[number].cpu(), its, rtol=2**-8)
    buffer.destroy()


@of_new_transformers
def test_a_checkpoint_of_e4m3(pool: RankPool, tmp_path: Path) -> None:
    save_fp8(tmp_path)
    pool.run(run_checkpoint, tmp_path, num_ranks=2)


def test_what_is_refused() -> None:
    model = build("mixtral")
    with pytest.raises(BackendError, match="call shard_experts"):
        quantize_experts(model)


def run_fp32(group: dist.ProcessGroup, make: Callable[..., Any]) -> None:
    model = make("mixtral", torch.float32)
    buffer = shard_experts(model, group, max_tokens=16)
    before = num_bytes(model)
    with pytest.raises(DtypeError, match="bfloat16 ones can be quantized"):
        quantize_experts(model)
    assert num_bytes(model) == before
    buffer.destroy()


def test_fp32_is_refused(pool: RankPool) -> None:
    pool.run(run_fp32, build, num_ranks=2)


def run_not_finite(group: dist.ProcessGroup, make: Callable[..., Any], value: float) -> None:
    model = make("mixtral")
    buffer = shard_experts(model, group, max_tokens=16)
    last, before = experts_layers(model)[-1], num_bytes(model)
    last.down_proj.data[1, 2, 3] = value
    with pytest.raises(DtypeError, match=r"experts.down_proj is NaN or infinite in 1 of its"):
        quantize_experts(model)
    assert num_bytes(model) == before  # of the layers before, too
    buffer.destroy()


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(pool: RankPool, value: float) -> None:
    pool.run(run_not_finite, build, value, num_ranks=1)


@torch.no_grad()
def run_outlier(group: dist.ProcessGroup, make: Callable[..., Any]) -> None:
    model = make("mixtral")
    buffer = shard_experts(model, group, max_tokens=16)
    experts_layers(model)[0].gate_up_proj.data[1, 2, 3] = 3e38
    with pytest.warns(UserWarning, match=r"experts.gate_up_proj: in 1 of \d+ blocks") as caught:
        quantize_experts(model)
    assert len(caught) == 1
    buffer.destroy()


def test_weights_that_vanish_beside_an_outlier_warn(pool: RankPool) -> None:
    pool.run(run_outlier, build, num_ranks=1)


@torch.no_grad()
def run_cast_since(group: dist.ProcessGroup, make: Callable[..., Any], dtype: Any) -> None:
    model = make("mixtral")
    buffer = shard_experts(model, group, max_tokens=16)
    quantize_experts(model)
    model.to(dtype)
    for call in (lambda: model(ids_of(0, model)), lambda: dequantize_experts(model)):
        with pytest.raises(DtypeError, match="Cast the model first, then call quantize_experts"):
            call()
    buffer.destroy()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_a_model_that_was_cast_since_is_refused(pool: RankPool, dtype: torch.dtype) -> None:
    pool.run(run_cast_since, build, dtype, num_ranks=1)
