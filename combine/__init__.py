"""Combine: return the experts' rows to the tokens' ranks and add them up there."""

from .fused import gemm_combine
from .launch import Sums, final_sum, return_rows
from .return_metadata import ReturnMetadata, send_return_metadata

__all__ = [
    "ReturnMetadata",
    "Sums",
    "final_sum",
    "gemm_combine",
    "return_rows",
    "send_return_metadata",
]
