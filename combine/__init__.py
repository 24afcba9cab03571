"""Combine: return the experts' rows to the tokens' ranks and add them up there."""

from .launch import Sums, final_sum, return_rows
from .layer import LayerSums, gemm_combine, sum_experts

__all__ = [
    "LayerSums",
    "Sums",
    "final_sum",
    "gemm_combine",
    "return_rows",
    "sum_experts",
]
