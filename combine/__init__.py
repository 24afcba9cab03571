"""Combine: return the experts' rows to the tokens' ranks and add them up there."""

from .launch import Sums, final_sum, return_rows, return_sums

__all__ = ["Sums", "final_sum", "return_rows", "return_sums"]
