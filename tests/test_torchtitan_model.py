"""torchtitan's Qwen3 with its own `parallelize_qwen3`, where torchtitan is installed: FSDP2 of the
dense part and of the experts, tensor and sequence parallelism, expert parallelism over the ranks of
both, against one process in plain torch.

Two parts are not its own: its attentions need a GPU, and its scale of the sums of gradients is set
so that gloo can add them up. The backend is "partial_dtensor": "spmd_types" needs an FSDP2 newer
than that of torch 2.13.
"""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from training_cases import end

from moe_engine.integrations import torchtitan

pytest.importorskip("torchtitan.models.qwen3", reason="pip install torchtitan")
from torchtitan.models.common import CosSinRoPE

if "max_context_length" not in {field.name for field in fields(CosSinRoPE.Config)}:
    pytest.skip("models before August 2026, of other shapes", allow_module_level=True)

DIM, HEAD, HEADS, INTERMEDIATE, EXPERTS, TOPK, VOCABULARY, TOKENS = 32, 8, 4, 16, 8, 2, 40, 8


def attention(q_TNH, k_TNH, v_TNH, *, attention_masks=None, scale=None, enable_gqa=False):
    q, k, v = (one.transpose(0, 1).unsqueeze(0) for one in (q_TNH, k_TNH, v_TNH))
    how = dict(is_causal=True, scale=scale, enable_gqa=enable_gqa)
    return F.scaled_dot_product_attention(q, k, v, **how).squeeze(0).transpose(0, 1)


def make_config():
    from torchtitan.models import qwen3
    from torchtitan.models.common import Embedding, Linear

    layers = qwen3._build_qwen3_moe_layers(
        n_layers=2, dim=DIM, n_heads=HEADS, n_kv_heads=2, head_dim=HEAD,
        moe_hidden_dim=INTERMEDIATE, num_experts=EXPERTS, top_k=TOPK, attn_backend="flex",
        moe_comm_backend="standard",
        rope=CosSinRoPE.Config(dim=HEAD, max_context_length=64, theta=1e4),
    )  # fmt: skip
    embeddings = dict(num_embeddings=VOCABULARY, embedding_dim=DIM)
    return qwen3.Qwen3Model.Config(
        vocab_size=VOCABULARY,
        dim=DIM,
        norm=qwen3._qwen3_norm(DIM),
        tok_embeddings=Embedding.Config(**embeddings, param_init=qwen3._EMBEDDING_INIT),
        lm_head=Linear.Config(
            in_features=DIM, out_features=VOCABULARY, param_init=qwen3._LINEAR_INIT
        ),
        layers=layers,
    )


def build(config):
    """On the CPU, with the attention of this file."""
    from torchtitan.models.common.attention import FlexAttention

    model = config.build()
    for module in model.modules():
        if isinstance(module, FlexAttention):
            module.forward = attention
    torch.manual_seed(0)
    model.init_states()
    return model


# --- One process ---------------------------------------------------------------------------------


def in_fp32(inner, x_TD, scores, ids, _):
    """All experts, in plain torch: the oracle. torchtitan's own compute in bf16."""
    out = torch.zeros_like(x_TD)
    weights = zip(inner.w1_EFD, inner.w3_EFD, inner.w2_EDF, strict=True)
    for e, (gate, up, down) in enumerate(weights):
        act = F.silu(x_TD @ gate.T) * (x_TD @ up.T)
        out = out + (scores * (ids == e)).sum(1, keepdim=True) * (act @ down.T)
    return out


def whole_model():
    from torchtitan.models.common.moe import RoutedExperts

    model = build(make_config())
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight *= 8  # so that each layer weighs in the logits
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            module.forward = partial(in_fp32, module.inner_experts)
    return model


def batches(dp):
    """Tokens int64 [T] and factors of the loss [T, V] of each data-parallel rank."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (dp, TOKENS), generator=generator)
    return [*zip(ids, torch.randn(dp, TOKENS, VOCABULARY, generator=generator), strict=True)]


def loss_of(model, ids, factor):
    out = model(ids, torch.arange(TOKENS))
    out = out.full_tensor() if hasattr(out, "full_tensor") else out
    return (out.float() * factor).mean()


def fused(state):
    """Gate and up as w13, in a dict of names."""
    found = {name: one for name, one in state.items() if "w1_EFD" not in name and "w3_" not in name}
    for name, gate in state.items():
        if "w1_EFD" in name:
            up = state[name.replace("w1_EFD", "w3_EFD")]
            found[name.replace("w1_EFD", "w13")] = torch.stack([gate, up], 2)
    return found


# --- Over ranks ----------------------------------------------------------------------------------


def parallel_model(override, tp, ep, whole):
    """(the model with the weights of `whole`, torchtitan's dimensions)."""
    from torchtitan.config import ParallelismConfig
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.distributed import parallel_dims, utils
    from torchtitan.distributed.fsdp import FSDPModule
    from torchtitan.models.qwen3.parallelize import parallelize_qwen3
    from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

    utils.set_spmd_backend("partial_dtensor")
    settings = ParallelismConfig(
        tensor_parallel_degree=tp, expert_parallel_degree=ep, spmd_backend="partial_dtensor"
    )
    dims = parallel_dims.ParallelDims.from_config(settings, dist.get_world_size())
    with patch.object(parallel_dims, "device_type", "cpu"):
        dims.build_mesh()
    config = make_config()
    set_qwen3_sharding_config(config, enable_sp=True, enable_ep=ep > 1)
    more = {"num_max_tokens_per_rank": TOKENS, "dtype": torch.float32}
    if override == "token_dispatcher":
        more["hidden_dim"] = DIM
    target = f"moe_engine.integrations.torchtitan_overrides.{override}"
    apply_overrides(OverrideConfig(imports=[(target, more)]), config)
    model = build(config)
    state = whole.state_dict()
    model.load_state_dict(fused(state) if override == "routed_experts" else state)
    training = SimpleNamespace(
        mixed_precision_param="float32", mixed_precision_reduce="float32", enable_cpu_offload=False
    )
    parallelize_qwen3(
        model, parallel_dims=dims, training=training, parallelism=settings,
        compile_config=SimpleNamespace(enable=False, components=[]), ac_config=None, dump_folder="",
    )  # fmt: skip
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    return model, dims


def run(group, override, tp, ep, tolerance):
    """Loss and gradients are those of one process with all tokens."""
    whole = whole_model()
    dp = group.size() // tp
    want = sum(loss_of(whole, *batch) for batch in batches(dp))
    want.backward()
    wanted = {name: one.grad for name, one in whole.named_parameters()}
    wanted = fused(wanted) if override == "routed_experts" else wanted
    model, dims = parallel_model(override, tp, ep, whole)
    loss = loss_of(model, *batches(dp)[dims.get_mesh("fsdp").get_local_rank()])
    loss.backward()
    dist.all_reduce(total := loss.detach().clone(), group=group)
    torch.testing.assert_close(total / tp, want.detach(), rtol=tolerance, atol=tolerance)
    found = {name: one.grad.full_tensor() for name, one in model.named_parameters()}
    assert found.keys() == wanted.keys()
    for name, grad in found.items():
        error = (grad - wanted[name]).abs().max() / wanted[name].abs().max()
        assert error < tolerance, f"{name}: {error}"
    torchtitan._buffers.clear()
    buffers = {layer.moe.routed_experts.token_dispatcher.buffer for layer in model.layers.values()}
    for buffer in buffers:
        end(buffer)


# With tensor parallelism and no expert parallelism torchtitan's own gradients differ from these.
@pytest.mark.parametrize(("tp", "ep"), [(1, 2), (1, 4), (2, 2), (2, 4)])
@pytest.mark.parametrize(
    ("override", "tolerance"), [("routed_experts", 1e-4), ("token_dispatcher", 3e-2)]
)
def test_model_trains_as_one_process(pool, override, tolerance, tp, ep):
    if pool.device != "cpu":
        pytest.skip("meshes of CPU ranks")
    pool.run(run, override, tp, ep, tolerance, num_ranks=4)
