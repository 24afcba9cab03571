"""Mixture-of-experts models of transformers with random weights, for the demo and the tests."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import torch


class Kind(StrEnum):
    """A model family; the value is its `model_type` in transformers, with hyphens."""

    MIXTRAL = "mixtral"
    QWEN2_MOE = "qwen2-moe"
    QWEN3_MOE = "qwen3-moe"
    DEEPSEEK_V3 = "deepseek-v3"


# The more experts, the closer a random router's choices: with all 128 of Qwen3-30B-A3B, rounding
# in bf16 alone changes the experts of one token in twenty per layer.
SMALL: dict[Kind, dict[str, Any]] = {
    Kind.MIXTRAL: dict(
        intermediate_size=64,
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
    Kind.QWEN2_MOE: dict(
        moe_intermediate_size=64,
        shared_expert_intermediate_size=128,
        num_experts=8,
        num_experts_per_tok=4,
    ),
    Kind.QWEN3_MOE: dict(
        head_dim=16,
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=4,
        norm_topk_prob=True,
    ),
    Kind.DEEPSEEK_V3: dict(
        intermediate_size=128,
        moe_intermediate_size=64,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        num_key_value_heads=4,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
    ),
}

LARGE: dict[Kind, dict[str, Any]] = {
    Kind.MIXTRAL: dict(  # Mixtral-8x7B
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
    Kind.QWEN2_MOE: dict(  # Qwen2-57B-A14B with half of its experts
        hidden_size=3584,
        moe_intermediate_size=2560,
        shared_expert_intermediate_size=20480,
        num_attention_heads=28,
        num_key_value_heads=4,
        num_experts=32,
        num_experts_per_tok=4,
    ),
    Kind.QWEN3_MOE: dict(  # Qwen3-30B-A3B with half of its experts
        hidden_size=2048,
        head_dim=128,
        moe_intermediate_size=768,
        num_attention_heads=32,
        num_key_value_heads=4,
        num_experts=64,
        num_experts_per_tok=4,
        norm_topk_prob=True,
    ),
    Kind.DEEPSEEK_V3: dict(  # DeepSeek-V3 with a quarter of its experts
        hidden_size=7168,
        moe_intermediate_size=2048,
        num_attention_heads=128,
        num_key_value_heads=128,
        n_routed_experts=64,
        num_experts_per_tok=8,
        first_k_dense_replace=1,
    ),
}


def build_config(kind: Kind, large: bool = False, **changes: Any) -> Any:
    """The configuration of a byte-level model of two layers, of the real widths if `large`."""
    from transformers import AutoConfig

    sizes: dict[str, Any] = dict(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    sizes |= (LARGE if large else SMALL)[kind] | changes
    # Layers that keep the scale of their input, so that each of them weighs in the logits.
    sizes["initializer_range"] = sizes["hidden_size"] ** -0.5
    return AutoConfig.for_model(kind.replace("-", "_"), **sizes)


def build_model(
    config: Any, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Any:
    """The model of a configuration, with the same weights in every process. The biases of routers
    are float32, as `from_pretrained` leaves them."""
    from transformers import AutoModelForCausalLM

    from ..integrations.balancing import BIAS, routers_with_bias

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(dtype).eval()
    for router in routers_with_bias(model).values():
        setattr(router, BIAS, getattr(router, BIAS).float())
    return model
