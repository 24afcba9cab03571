"""What the tests of the integration with transformers share: small models, and how far logits
differ."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_engine.device.lang import INTERPRETED
from moe_engine.tools.models import Kind, build_config, build_model

NUM_EXPERTS = {  # 12 experts go evenly to 1, 2, 3 and 4 ranks
    Kind.MIXTRAL: {"num_local_experts": 12},
    Kind.QWEN2_MOE: {"num_experts": 12},
    Kind.QWEN3_MOE: {"num_experts": 12},
    Kind.DEEPSEEK_V3: {"n_routed_experts": 12},
}


def build(kind: Kind, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    config = build_config(kind, **NUM_EXPERTS[kind] | changes)
    return build_model(config, "cpu" if INTERPRETED else "cuda", dtype)


def difference(got: Tensor | None, want: Tensor | None) -> float:
    """The largest, relative to the largest logit."""
    if got is None or want is None:
        return 0.0
    return float((got - want).abs().max() / want.abs().max())
