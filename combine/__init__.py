"""Combine: return the experts' rows to the tokens' ranks and add them up there."""

from .fused import Returns, gemm_combine
from .launch import ReturnedRows, Sums, return_and_sum

__all__ = [
    "ReturnedRows",
    "Returns",
    "Sums",
    "gemm_combine",
    "return_and_sum",
]
