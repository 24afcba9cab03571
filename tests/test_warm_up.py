"""The dtype of a warm-up is that of the weights that it gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_engine import Buffer
from moe_engine.device.lang import INTERPRETED
from moe_engine.emulation import RankError, RankPool
from moe_engine.grouped_gemm import quantize_weights

BF16, FP32 = torch.bfloat16, torch.float32


def warm(
    group: dist.ProcessGroup,
    dtype: torch.dtype,
    given: torch.dtype | None,
    is_quantized: bool = False,
) -> set[torch.dtype]:
    """The dtypes of the rows of layers in a warm-up with weights of `dtype`."""
    device = "cpu" if INTERPRETED else "cuda"
    up, down = (torch.ones(4, *sizes, dtype=dtype, device=device) for sizes in ((32, 32), (32, 16)))
    weights: Any = up, down
    if is_quantized:
        weights = quantize_weights(up), quantize_weights(down)
    buffer = Buffer.for_tokens(group, 8, 32, 4, 2, dtype=given or dtype)
    seen, call = set[torch.dtype](), buffer.moe_ffn

    def note(inputs: Any, *args: Any, **more: Any) -> Any:
        seen.add(inputs.x.dtype)
        return call(inputs, *args, **more)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(buffer, "moe_ffn", note)
            buffer.warmup(32, 4, 2, given, weights)
    finally:
        buffer.destroy()
    return seen


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_it_is_that_of_the_weights(pool: RankPool, dtype: torch.dtype) -> None:
    assert pool.run(warm, dtype, None, num_ranks=1) == [{dtype}]


def test_it_is_bf16_for_e4m3_weights(pool: RankPool) -> None:
    assert pool.run(warm, BF16, None, True, num_ranks=1) == [{BF16}]


@pytest.mark.parametrize(
    ("dtype", "given", "is_quantized", "words"),
    [
        (FP32, BF16, False, r"dtype is torch.bfloat16, and .* weights\[0\] is .*float32 are"),
        (BF16, FP32, True, r"dtype is torch.float32, and .* weights\[0\] is .*e4m3fn are"),
        (torch.float16, BF16, False, r"weights\[0\].dtype is torch.float16"),
    ],
)
def test_another_one_is_refused(
    pool: RankPool, dtype: torch.dtype, given: torch.dtype, is_quantized: bool, words: str
) -> None:
    with pytest.raises(RankError, match=f"DtypeError: {words}"):
        pool.run(warm, dtype, given, is_quantized, num_ranks=1)
