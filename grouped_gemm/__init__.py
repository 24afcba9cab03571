"""Grouped GEMM: every expert's rows times its weights in one launch, and the gradients."""

from .activations import Activation
from .autograd import grouped_gemm, grouped_mlp
from .backward import dgrad, wgrad
from .descriptors import ragged
from .launch import gemm_config, num_compute_programs
from .operands import check_weights
from .quantization import dequantize_weights, quantize_rows, quantize_weights
from .schedule import TileSchedule, tile_schedule
from .tuning import tune_gemm

__all__ = [
    "Activation",
    "TileSchedule",
    "check_weights",
    "dequantize_weights",
    "dgrad",
    "gemm_config",
    "grouped_gemm",
    "grouped_mlp",
    "num_compute_programs",
    "quantize_rows",
    "quantize_weights",
    "ragged",
    "tile_schedule",
    "tune_gemm",
    "wgrad",
]
