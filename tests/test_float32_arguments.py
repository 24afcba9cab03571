"""Every argument whose docstring says float32 is refused in another dtype, after a call with the
right one, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cases
import torch
from torch import Tensor

from moe_engine import Buffer, DtypeError, ElasticBuffer, moe_ffn, ops, start_moe_ffn
from moe_engine.emulation import RankPool
from moe_engine.grouped_gemm import grouped_gemm, grouped_mlp, quantize_rows, quantize_weights

T, H, E, K, I = 4, 128, 4, 2, 32
OTHERS = torch.bfloat16, torch.float16, torch.float64


def calls_of_verbs(group: Any) -> dict[str, Callable[[torch.dtype], Any]]:
    """By "verb argument": the call of a verb on one rank with the argument in this dtype."""
    on = cases.device()
    x = torch.randn(T, H).bfloat16().to(on)
    idx = torch.tensor([[0, 1], [2, 3], [1, 0], [3, -1]], device=on)
    up, down = torch.randn(E, 2 * I, H), torch.randn(E, H, I)
    up, down = up.bfloat16().to(on), down.bfloat16().to(on)
    offsets = torch.arange(E + 1, dtype=torch.int32, device=on)
    buffer = Buffer.for_tokens(group, 8, H, E, K)
    elastic = ElasticBuffer(group, num_max_tokens_per_rank=8, hidden=H, num_topk=K)
    e4m3, scales = quantize_rows(x)
    w_e4m3, w_scales = quantize_weights(up)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, E)
    layout = dict(num_tokens_per_rank=per_rank, is_token_in_rank=in_rank)
    layout["num_tokens_per_expert"] = per_expert

    def ones(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.ones(shape, dtype=dtype, device=on)

    weights = ones(torch.float32, T, K)
    rows, _, _, _, handle, _ = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, **layout)
    parts = elastic.dispatch(x, topk_idx=idx, topk_weights=weights, num_experts=E)
    low, _, low_handle, _, _ = buffer.low_latency_dispatch(x, idx, 8, E, use_fp8=False)
    return {
        "moe_ffn topk_weights": lambda of: moe_ffn(x, idx, ones(of, T, K), up, down, buffer),
        "moe_ffn w_down[1]": lambda of: moe_ffn(
            x, idx, weights, (w_e4m3, w_scales), tuple_of(down, of), buffer
        ),
        "start_moe_ffn topk_weights": lambda of: start_moe_ffn(
            x, idx, ones(of, T, K), up, down, buffer
        ).finish(),
        "dispatch topk_weights": lambda of: buffer.dispatch(
            x, topk_idx=idx, topk_weights=ones(of, T, K), **layout
        ),
        "dispatch x[1]": lambda of: buffer.dispatch(
            (e4m3, scales.to(of)), topk_idx=idx, topk_weights=weights, **layout
        ),
        "combine topk_weights": lambda of: buffer.combine(
            rows, handle, topk_weights=ones(of, len(rows), K)
        ),
        "low_latency_combine topk_weights": lambda of: buffer.low_latency_combine(
            low, idx, ones(of, T, K), low_handle
        ),
        "elastic dispatch topk_weights": lambda of: elastic.dispatch(
            x, topk_idx=idx, topk_weights=ones(of, T, K), num_experts=E
        ),
        "elastic dispatch x[1]": lambda of: elastic.dispatch(
            (e4m3, scales.to(of)), topk_idx=idx, topk_weights=weights, num_experts=E
        ),
        "elastic dispatch by handle topk_weights": lambda of: elastic.dispatch(
            x, topk_weights=ones(of, T, K), handle=parts[3]
        ),
        "elastic combine topk_weights": lambda of: elastic.combine(
            parts[0], parts[3], topk_weights=ones(of, len(parts[0]), K)
        ),
        "ops.dispatch topk_weights": lambda of: ops.dispatch(x, idx, ones(of, T, K), E, buffer),
        "grouped_gemm row_weight": lambda of: grouped_gemm(x, up, offsets, row_weight=ones(of, T)),
        "grouped_gemm x[1]": lambda of: grouped_gemm(
            (e4m3, scales.to(of)), (w_e4m3, w_scales), offsets
        ),
        "grouped_gemm w[1]": lambda of: grouped_gemm(
            (e4m3, scales), (w_e4m3, w_scales.to(of)), offsets
        ),
        "grouped_mlp row_weight": lambda of: grouped_mlp(
            x, up, down, offsets, row_weight=ones(of, T)
        ),
    }


def tuple_of(w: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    values, scales = quantize_weights(w)
    return values, scales.to(dtype)


def run(group: Any) -> list[str]:
    """What was not refused as it must be."""
    wrong = []
    for name, call in calls_of_verbs(group).items():
        call(torch.float32)
        for dtype in OTHERS:
            try:
                call(dtype)
                wrong.append(f"{name} was taken in {dtype}")
            except DtypeError as error:
                if not str(error).startswith(name.split()[-1] + " is "):
                    wrong.append(f"{name} in {dtype}: {error}")
        call(torch.float32)
    return wrong


def test_other_dtypes_are_refused(pool: RankPool) -> None:
    assert pool.run(run, num_ranks=1) == [[]]
