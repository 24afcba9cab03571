"""Combine: return the experts' rows to the tokens' ranks and add them up there."""

from .fused import WeightGradient, gemm_combine
from .launch import ReturnedRows, Sums, return_and_sum
from .return_metadata import ReturnMetadata, send_return_metadata

__all__ = [
    "ReturnMetadata",
    "ReturnedRows",
    "Sums",
    "WeightGradient",
    "gemm_combine",
    "return_and_sum",
    "send_return_metadata",
]
