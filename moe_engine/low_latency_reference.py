"""The plain-torch oracle of the low-latency verbs, written to be read.

Functions that take lists see all ranks at once, index = rank. M is the most tokens of a rank.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from einops import reduce

from .grouped_gemm.quantization import cast


@dataclass(frozen=True, slots=True)
class LowLatencyReceived:
    """What one rank has after a low-latency dispatch; beyond `counts` rows are 0, src_info -1."""

    x: torch.Tensor  # [L, R * M, H], bf16 or e4m3
    scales: torch.Tensor | None  # float32 [L, R * M, H/128] or int32 [L, R * M, H/512]
    counts: torch.Tensor  # int32 [L]
    src_info: torch.Tensor  # int32 [L, R * M], token on its source rank
    layout_range: torch.Tensor  # int64 [L, R], first row << 32 | number of rows of each source

    def rows_of(self, expert: int, source: int) -> slice:
        """Where a local expert's rows from a source stand."""
        begin, count = divmod(int(self.layout_range[expert, source]), 1 << 32)
        return slice(begin, begin + count)


def without(
    topk_idx: list[torch.Tensor], masked: Collection[int], num_experts: int
) -> list[torch.Tensor]:
    """The ids as the other ranks see them that have masked some: these send and get nothing."""
    num_local = num_experts // len(topk_idx)
    left = []
    for rank, ids in enumerate(topk_idx):
        gone = torch.isin(ids // num_local, ids.new_tensor(sorted(masked)))
        left.append(torch.where(gone | (rank in masked), -1, ids))
    return left


def low_latency_dispatch(
    x: list[torch.Tensor],
    topk_idx: list[torch.Tensor],
    max_tokens: int,
    num_experts: int,
    use_fp8: bool = True,
    round_scale: bool = False,
    use_ue8m0: bool = False,
) -> list[LowLatencyReceived]:
    """Send each token x[r][t] (bf16) once to each of its experts, which has room for max_tokens
    rows of every rank. Rows of an expert stand by source rank, then token.

    Example, 2 ranks of 2 experts with 2 tokens each, M = 2, topk_idx [[0, 3], [2, 0]] and
    [[3, 2], [0, 1]]; rows as (source, token). Rank 0 has (0, 0) (0, 1) (1, 1) - | (1, 1) - - -:
    counts [3, 1], src_info [[0, 1, 1, -1], [1, -1, -1, -1]], layout_range as (first row, rows)
    [[(0, 2), (2, 1)], [(0, 0), (0, 1)]]. Rank 1 has (0, 1) (1, 0) - - | (0, 0) (1, 0) - -: counts
    [2, 2], src_info [[1, 0, -1, -1], [0, 0, -1, -1]], layout_range [[(0, 1), (1, 1)]] * 2.
    """
    num_ranks, hidden = len(x), x[0].shape[1]
    num_local = num_experts // num_ranks
    shape = num_local, num_ranks * max_tokens
    pairs = [cast(part, round_scale, use_ue8m0) for part in x] if use_fp8 else []
    sent = [values for values, _ in pairs] if use_fp8 else x
    results = []
    for rank in range(num_ranks):
        new = topk_idx[rank].new_zeros
        rows = new(*shape, hidden, dtype=sent[0].dtype)
        scales = None
        if use_fp8:
            scales = new(*shape, pairs[0][1].shape[1], dtype=pairs[0][1].dtype)
        src_info = new(shape, dtype=torch.int32).fill_(-1)
        layout_range = new(num_local, num_ranks, dtype=torch.int64)
        counts = new(num_local, dtype=torch.int32)
        for expert in range(num_local):
            begin = 0
            for source in range(num_ranks):
                names_it = (topk_idx[source] == rank * num_local + expert).any(dim=1)
                tokens = names_it.nonzero().flatten()
                end = begin + len(tokens)
                rows[expert, begin:end] = sent[source][tokens]
                if scales is not None:
                    scales[expert, begin:end] = pairs[source][1][tokens]
                src_info[expert, begin:end] = tokens.int()
                layout_range[expert, source] = begin << 32 | len(tokens)
                begin = end
            counts[expert] = begin
        results.append(LowLatencyReceived(rows, scales, counts, src_info, layout_range))
    return results


def low_latency_combine(
    y: list[torch.Tensor],
    received: list[LowLatencyReceived],
    topk_idx: list[torch.Tensor],
    topk_weights: list[torch.Tensor],
    node_ranks: int | None = None,
) -> list[torch.Tensor]:
    """The weighted sums [T, H] (bf16) of the expert rows y[r] [L, R * M, H] of each token.

    Each expert rank adds up its rows of a token in top-k order and rounds to bf16; the source adds
    the ranks' sums in the order of each rank's right-most slot of the top-k and rounds once more;
    all in fp32. Where ranks are on several nodes, of node_ranks each, each node adds up the sums of
    its ranks, in their order, and rounds once more, and the source adds the nodes' sums.

    Example, the ranks of `low_latency_dispatch`: token 1 of rank 1, ids [0, 1], comes out as
    bf16(w0 * y[0][0, 2] + w1 * y[0][1, 0]); token 0 of rank 0, ids [0, 3], as
    bf16(bf16(w0 * y[0][0, 0]) + bf16(w1 * y[1][1, 0])).
    """
    num_ranks, num_local, hidden = len(y), y[0].shape[0], y[0].shape[2]
    outputs = []
    for source, (ids, weights) in enumerate(zip(topk_idx, topk_weights, strict=True)):
        sums = weights.new_zeros(num_ranks, len(ids), hidden)
        last_k = ids.new_full((num_ranks, len(ids)), -1)
        for k in range(ids.shape[1]):
            for rank in range(num_ranks):
                for expert in range(num_local):
                    tokens = (ids[:, k] == rank * num_local + expert).nonzero().flatten()
                    rows = received[rank].rows_of(expert, source)
                    at = torch.searchsorted(received[rank].src_info[expert, rows], tokens.int())
                    found = y[rank][expert, rows][at].float()
                    sums[rank, tokens] += weights[tokens, k, None] * found
                    last_k[rank, tokens] = k
        sums = sums.bfloat16().float()
        if node_ranks is not None:
            of_nodes = [sum(node) for node in sums.split(node_ranks)]
            sums = torch.stack(of_nodes).bfloat16().float()
            last_k = reduce(last_k, "(node rank) t -> node t", "max", rank=node_ranks)
        out = weights.new_zeros(len(ids), hidden)
        for k in range(ids.shape[1]):
            for part in range(len(sums)):
                tokens = (last_k[part] == k).nonzero().flatten()
                out[tokens] += sums[part, tokens]
        outputs.append(out.bfloat16())
    return outputs
