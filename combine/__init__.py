"""Combine: return the experts' rows to the tokens' ranks and add them up there."""

from .fused import Returns, gemm_combine
from .launch import ReturnedRows, Sums, final_sum, return_rows

__all__ = [
    "ReturnedRows",
    "Returns",
    "Sums",
    "final_sum",
    "gemm_combine",
    "return_rows",
]
