"""Grouped GEMM: every expert's rows times its weights in one launch, SwiGLU in the epilogue."""

from .launch import (
    TileSchedule,
    check_weights,
    gathered_gemm,
    gemm_config,
    grouped_gemm,
    tile_schedule,
)

__all__ = [
    "TileSchedule",
    "check_weights",
    "gathered_gemm",
    "gemm_config",
    "grouped_gemm",
    "tile_schedule",
]
