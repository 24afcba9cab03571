"""Overrides for torchtitan's `--override.imports`, which name a function of this module each:

    moe_engine.integrations.torchtitan_overrides.token_dispatcher    the experts stay torchtitan's
    moe_engine.integrations.torchtitan_overrides.routed_experts      one fused layer
    moe_engine.integrations.torchtitan_overrides.selective_ac        recomputation sends nothing

The first two exclude each other. Importing this needs torchtitan.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from ..checkpointing import SAVED_OPS
from ..errors import BackendError
from .torchtitan import EngineDispatcher, EngineRoutedExperts

try:
    from torchtitan.config import derive, override
    from torchtitan.distributed.activation_checkpoint import SelectiveAC
    from torchtitan.models.common.moe import RoutedExperts
    from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher
except ImportError as error:
    raise ImportError(
        f"{__name__} extends classes of torchtitan, which cannot be imported: pip install "
        "torchtitan."
    ) from error


class TokenDispatcher(EngineDispatcher, BaseEPTokenDispatcher):
    """See `EngineDispatcher`."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):
        """num_max_tokens_per_rank and hidden_dim are needed."""

        num_max_tokens_per_rank: int | None = None
        hidden_dim: int | None = None
        dtype: torch.dtype = torch.bfloat16
        alignment: int = 1


class FusedRoutedExperts(EngineRoutedExperts, RoutedExperts):
    """See `EngineRoutedExperts`."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        """save: see `moe_engine.moe_ffn`."""

        save: str = "auto"

    def __init__(self, config: Any):
        super().__init__(config)
        self.save = config.save


class SavingAC(SelectiveAC):
    """`SelectiveAC` that saves the results of this engine's operators too."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        """That of SelectiveAC."""

    def get_save_ops(self) -> set:
        """See `moe_engine.checkpointing.SAVED_OPS`."""
        return super().get_save_ops() | {*SAVED_OPS}


@override(target=BaseEPTokenDispatcher.Config, description="moe_engine's dispatch and combine")
def token_dispatcher(cfg: Any, **more: Any) -> Any:
    """Dispatch and combine by this engine. `more` are fields of the config, such as
    num_max_tokens_per_rank and hidden_dim where the model's comm_backend is not "deepep"."""
    return derive(cfg, TokenDispatcher.Config, **more)


@override(target=RoutedExperts.Config, description="moe_engine's fused layer")
def routed_experts(cfg: Any, *, save: str = "auto", w13: bool = True, **more: Any) -> Any:
    """Routed experts by `moe_ffn`, whose gate and up lie in one `w13`, as torchtitan's override
    `fused_grouped_experts` has them, with the same checkpoints; w13=False keeps w1 and w3, which
    each forward copies. `more`: as in `token_dispatcher`.

    BackendError where torchtitan hands experts [B, L, D], as up to 0.3.0."""
    if "x_TD" not in inspect.signature(RoutedExperts.forward).parameters:
        raise BackendError(
            "this torchtitan hands RoutedExperts tokens of three dimensions, as up to 0.3.0: "
            "install one of 21 August 2026 or later, or override the token dispatcher alone."
        )
    inner = cfg.inner_experts
    if w13:
        from torchtitan.overrides.fused_swiglu import FusedGroupedExperts, fused_grouped_experts

        inner = fused_grouped_experts(inner)
        if not isinstance(inner, FusedGroupedExperts.Config):
            raise BackendError(
                f"the routed experts are {type(inner).__qualname__}, and one fused layer computes "
                "those of GroupedExperts alone. Override the token dispatcher instead."
            )
    dispatcher = token_dispatcher(cfg.token_dispatcher, **{"hidden_dim": inner.dim} | more)
    parts = dict(inner_experts=inner, token_dispatcher=dispatcher)
    return derive(cfg, FusedRoutedExperts.Config, save=save, **parts)


@override(target=SelectiveAC.Config, description="saves the results of moe_engine's operators")
def selective_ac(cfg: Any) -> Any:
    """Selective activation checkpointing whose recomputation dispatches and combines nothing."""
    return derive(cfg, SavingAC.Config)
