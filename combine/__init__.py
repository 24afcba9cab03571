"""Combine: return the experts' rows to the tokens' ranks and add them up there."""

from .launch import final_sum, return_rows, return_sums

__all__ = ["final_sum", "return_rows", "return_sums"]
