"""Combine: return the experts' rows to the tokens' ranks and add them up there."""

from .launch import Sums, final_sum, return_rows
from .layer import Returns, gemm_combine

__all__ = [
    "Returns",
    "Sums",
    "final_sum",
    "gemm_combine",
    "return_rows",
]
