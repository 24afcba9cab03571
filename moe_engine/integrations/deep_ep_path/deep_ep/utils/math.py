"""The arithmetic of DeepEP's tests."""

from typing import Any

import torch
from einops import rearrange, reduce, repeat

BLOCK = 128
"""Columns that share a scale."""
LARGEST = 448.0
"""The largest number of e4m3."""


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """How far two tensors are from being equal: 1 less the cosine-like similarity of x + 1 and
    y + 1 in fp64, 0 where they are equal."""
    x, y = x.double() + 1, y.double() + 1
    return float(1 - 2 * (x * y).sum() / (x.square() + y.square()).sum())


def safe_div(a: float, b: float) -> float:
    """a / b; 0 / 0 is 0."""
    return 0 if a == 0 and b == 0 else a / b


def ceil_div(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)


def align(x: int, y: int) -> int:
    """The next multiple of y."""
    return ceil_div(x, y) * y


def per_token_cast_to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [N, H] as e4m3 [N, H] and scales float32 [N, ceil(H / 128)], of 128 columns each."""
    blocks = _blocks(x.float())
    largest = reduce(blocks.abs(), "n s c -> n s", "max").clamp(min=1e-4)
    rows = rearrange(blocks * (LARGEST / largest)[..., None], "n s c -> n (s c)")
    return rows[:, : x.shape[1]].to(torch.float8_e4m3fn).contiguous(), largest / LARGEST


def per_token_cast_back(x_fp8: torch.Tensor, x_scales: torch.Tensor) -> torch.Tensor:
    """bf16 [N, H] of e4m3 rows and their scales: float32 [N, S], or int32 [N, S / 4], four
    exponents (UE8M0) in each; these also as [N / 4, S], as DeepEP's tests have them."""
    if x_scales.dtype == torch.int32:
        exponents = x_scales.contiguous().view(torch.uint8)
        x_scales = (exponents.to(torch.int32) << 23).view(torch.float32)
    if len(x_fp8):
        x_scales = x_scales.reshape(len(x_fp8), -1)
    blocks = _blocks(x_fp8.float())
    x = rearrange(blocks * x_scales[:, : blocks.shape[1], None], "n s c -> n (s c)")
    return x[:, : x_fp8.shape[1]].bfloat16().contiguous()


def _blocks(x: torch.Tensor) -> torch.Tensor:
    """[N, S, 128]: x [N, H], with zeros after the last columns."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % BLOCK))
    return rearrange(padded, "n (s c) -> n s c", c=BLOCK)


def inplace_unique(x: torch.Tensor, num_slots: int) -> None:
    """In each row of ids [N, K] below num_slots, leave each once: the most frequent ids that fit,
    in descending order, then -1."""
    counts = x.new_zeros(len(x), num_slots + 1)
    counts.scatter_add_(1, torch.where(x < 0, num_slots, x), torch.ones_like(x))
    counts, ids = counts[:, :num_slots].sort(descending=True)
    kept = torch.where(counts > 0, ids, -1)[:, : x.shape[1]]
    x.fill_(-1)
    x[:, : kept.shape[1]] = kept.sort(descending=True).values


def create_grouped_scores(
    scores: torch.Tensor, group_idx: torch.Tensor, num_groups: int
) -> torch.Tensor:
    """Scores [N, E] where an expert's group is among group_idx [N, G], else 0."""
    is_chosen = torch.zeros(len(scores), num_groups, dtype=torch.bool, device=scores.device)
    is_chosen.scatter_(1, group_idx, True)
    return scores * repeat(is_chosen, "n g -> n (g e)", e=scores.shape[1] // num_groups)


def hash_tensor(t: torch.Tensor) -> int:
    """The sum of its bits, taken as int32."""
    return int(t.contiguous().view(torch.int32).sum())


def hash_tensors(*tensors: Any) -> int:
    """The exclusive or of the hashes of tensors, in tuples or not."""
    value = 0
    for one in tensors:
        if isinstance(one, tuple | list):
            value ^= hash_tensors(*one)
        elif isinstance(one, torch.Tensor):
            value ^= hash_tensor(one)
    return value


def count_bytes(*tensors: Any) -> int:
    """The bytes of tensors, in tuples or not; None has none."""
    total = 0
    for one in tensors:
        if isinstance(one, tuple | list):
            total += count_bytes(*one)
        elif one is not None:
            total += one.numel() * one.element_size()
    return total
