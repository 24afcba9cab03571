"""The plain-torch oracle of every verb: what the kernels must give, written to be read.

Functions that take lists see all ranks at once: item r belongs to rank r. The others are one
rank's part.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from einops import einsum, reduce, repeat

from .grouped_gemm.activations import Activation, AnyActivation
from .grouped_gemm.quantization import dequantize, quantize_rows


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in the dtype of sums: fp32, or fp64 where it is fp64 already."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def layout(
    topk_idx_TK: torch.Tensor, num_experts: int, num_ranks: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """How many tokens go to each rank, int32 [R], and to each expert, int32 [E], and which token
    goes to which rank, bool [T, R].

    Example, 2 ranks of 2 experts, topk_idx [[0, 3], [2, -1], [1, 0], [-1, -1]]:
    per rank [2, 2], per expert [2, 1, 1, 1], in rank [[1, 1], [0, 1], [1, 0], [0, 0]].
    """
    valid = (topk_idx_TK >= 0) & (topk_idx_TK < num_experts)
    per_expert = torch.bincount(topk_idx_TK[valid], minlength=num_experts).int()
    ranks = torch.arange(num_ranks, dtype=torch.int64, device=topk_idx_TK.device)
    owner_TK = torch.where(valid, topk_idx_TK // (num_experts // num_ranks), -1)
    in_rank = reduce((owner_TK[..., None] == ranks).int(), "t k r -> t r", "max").bool()
    return in_rank.sum(0).int(), per_expert, in_rank


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """Where one rank's tokens become expert rows, and where its own experts' rows begin."""

    expert_offsets: torch.Tensor  # int32 [L + 1]
    remote_offsets: torch.Tensor  # int32 [L + 1], the same for rows from other ranks alone
    dst_row: torch.Tensor  # int32 [T, K], row on the rank of the k's expert, -1 for bad ids
    first_row: torch.Tensor  # int32 [T, K], the token's first row on that rank


def placed_rows(topk_idx: list[torch.Tensor], num_experts: int) -> list[PlacedRows]:
    """Give each k of each token a row among those of its expert: first those of the expert's own
    rank, then those dealt from the others as long as these have any: the first row of the rank
    before it, of the one before that, ...; then the second of each, ... The rows of a source are in
    the order of its tokens, then of k.

    Example, 2 ranks of 2 experts, topk_idx [[0, 3], [2, 0]] and [[3, 2], [0, 1]], rows as
    (source, token): rank 0 has (0, 0) (0, 1) (1, 1) | (1, 1), rank 1 has (1, 0) (0, 1) | (1, 0)
    (0, 0). remote_offsets are [0, 1, 2] and [0, 1, 2], dst_row [[0, 3], [1, 1]] and
    [[2, 0], [2, 3]], first_row [[0, 3], [1, 1]] and [[0, 0], [2, 2]].
    """
    num_ranks = len(topk_idx)
    num_local = num_experts // num_ranks
    dst_row = [torch.full_like(ids, -1, dtype=torch.int32) for ids in topk_idx]
    expert_offsets, remote_offsets = [], []
    for rank in range(num_ranks):
        sources = [(rank - distance) % num_ranks for distance in range(1, num_ranks)]
        row, offsets, num_own = 0, [0], [0]
        for expert in range(rank * num_local, (rank + 1) * num_local):
            own = (topk_idx[rank] == expert).nonzero().tolist()
            theirs = [(topk_idx[source] == expert).nonzero().tolist() for source in sources]
            turns = itertools.zip_longest(*theirs)
            remote = [pair for turn in turns for pair in zip(sources, turn, strict=True) if pair[1]]
            for source, at in [*((rank, at) for at in own), *remote]:
                dst_row[source][*at] = row
                row += 1
            offsets.append(row)
            num_own.append(num_own[-1] + len(own))
        device = topk_idx[rank].device
        expert_offsets.append(torch.tensor(offsets, dtype=torch.int32, device=device))
        own_offsets = torch.tensor(num_own, dtype=torch.int32, device=device)
        remote_offsets.append(expert_offsets[-1] - own_offsets)
    first_row = []
    for ids, rows in zip(topk_idx, dst_row, strict=True):
        owner = torch.where(rows >= 0, ids // num_local, -1)
        same = (owner[:, :, None] == owner[:, None, :]) & (rows >= 0)[:, None, :]
        of_token = torch.where(same, rows[:, None, :], torch.iinfo(torch.int32).max)
        first_row.append(torch.where(rows >= 0, of_token.amin(2), -1))
    of_ranks = zip(expert_offsets, remote_offsets, dst_row, first_row, strict=True)
    return [PlacedRows(*of_rank) for of_rank in of_ranks]


def send_plan(
    is_token_in_rank_TR: torch.Tensor, topk_idx_TK: torch.Tensor | None, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(send_token_idx int32 [R, T], send_head int32 [T, R]) of one rank; unused entries are -1.

    `send_token_idx[d]` lists the tokens sent to rank d, in token order. `send_head[t]` lists
    row * R + rank for the rows of token t in the order of the final sum: ranks by their last k of
    the top-k, or by number without ids.
    """
    num_tokens, num_ranks = is_token_in_rank_TR.shape
    in_rank = is_token_in_rank_TR.cpu()
    send_token_idx = in_rank.new_full((num_ranks, num_tokens), -1, dtype=torch.int32)
    send_head = in_rank.new_full((num_tokens, num_ranks), -1, dtype=torch.int32)
    ranks = torch.arange(num_ranks, dtype=torch.int64, device="cpu")
    row_TR = in_rank.int().cumsum(0) - 1
    for rank in range(num_ranks):
        tokens = in_rank[:, rank].nonzero().flatten()
        send_token_idx[rank, : len(tokens)] = tokens.int()
    key_TR = repeat(ranks, "r -> t r", t=num_tokens).clone()
    if topk_idx_TK is not None:
        ids = topk_idx_TK.cpu()
        owner = torch.where((ids >= 0) & (ids < num_experts), ids // (num_experts // num_ranks), -1)
        for k in range(ids.shape[1]):
            valid = owner[:, k] >= 0
            key_TR[valid, owner[valid, k]] = k
    key_TR = torch.where(in_rank, key_TR, torch.iinfo(torch.int64).max)
    order_TR = key_TR.argsort(dim=1, stable=True)
    code_TR = row_TR * num_ranks + ranks
    code_TR = torch.where(in_rank, code_TR, -1).gather(1, order_TR)
    send_head[:] = code_TR.int()
    return send_token_idx.to(is_token_in_rank_TR.device), send_head.to(is_token_in_rank_TR.device)


@dataclass(frozen=True, slots=True)
class Received:
    """What one rank has after a dispatch. Rows are in the order of source ranks, then tokens."""

    x: torch.Tensor  # [N, H]
    topk_idx: torch.Tensor  # int64 [N, K], local ids, -1 where the expert is elsewhere
    topk_weights: torch.Tensor  # float32 [N, K], 0 where topk_idx is -1
    src_idx: torch.Tensor  # int32 [N], token on its source rank
    source: torch.Tensor  # int64 [N], source rank
    num_tokens_per_expert: list[int]


def dispatch(
    x: list[torch.Tensor],
    topk_idx: list[torch.Tensor],
    topk_weights: list[torch.Tensor],
    num_experts: int,
) -> list[Received]:
    """Send each token once to every rank that holds one of its experts."""
    num_ranks = len(x)
    num_local = num_experts // num_ranks
    received = []
    for rank in range(num_ranks):
        parts = []
        for source in range(num_ranks):
            local = topk_idx[source] - rank * num_local
            here = (local >= 0) & (local < num_local) & (topk_idx[source] >= 0)
            tokens = here.any(dim=1).nonzero().flatten()
            parts.append(
                (
                    x[source][tokens],
                    torch.where(here, local, -1)[tokens],
                    torch.where(here, topk_weights[source], 0.0)[tokens],
                    tokens.int(),
                    torch.full_like(tokens, source),
                )
            )
        rows, ids, weights, tokens, origin = (
            torch.cat(column) for column in zip(*parts, strict=True)
        )
        counts = torch.bincount(ids[ids >= 0], minlength=num_local).tolist()
        received.append(Received(rows, ids, weights, tokens, origin, counts))
    return received


def combine(
    y: list[torch.Tensor],
    received: list[Received],
    topk_idx: list[torch.Tensor] | None,
    num_tokens: list[int],
    num_experts: int,
    bias: list[list[torch.Tensor]] | None = None,
    ranks_per_node: int | None = None,
) -> list[torch.Tensor]:
    """Add up the rows [N, H] of each token on the ranks that it was sent to.

    A sum is made in fp32 and rounded once. It begins with the biases; ranks follow in the order of
    their last k of the top-k (of their numbers if `topk_idx` is None).

    With ranks_per_node, for several nodes, a token's rows of a node are added up first, in the
    order of its ranks, by a sum of their own; these sums then take the place of rows, and nodes
    that of ranks.
    """
    num_ranks, size = len(y), ranks_per_node or 1
    outputs = []
    for source in range(num_ranks):
        dtype, hidden = y[source].dtype, y[source].shape[1]
        out = _wide(y[source].new_zeros(num_tokens[source], hidden))
        for one in bias[source] if bias else []:
            out += _wide(one)
        sums: dict[tuple[int, int], torch.Tensor] = {}
        for rank in range(num_ranks):
            mine = (received[rank].source == source).nonzero().flatten()
            for row in mine.tolist():
                at = int(received[rank].src_idx[row]), rank // size
                sums[at] = sums.get(at, torch.zeros_like(out[0])) + _wide(y[rank][row])
        for token in range(num_tokens[source]):
            parts = [part for part in range(num_ranks // size) if (token, part) in sums]
            if topk_idx is not None:
                owners = (topk_idx[source][token] // (num_experts // num_ranks * size)).tolist()
                parts.sort(key=lambda p: max(k for k, owner in enumerate(owners) if owner == p))
            for part in parts:
                out[token] += _wide(sums[token, part].to(dtype))
        outputs.append(out.to(dtype))
    return outputs


@dataclass(frozen=True, slots=True)
class Places:
    """Where the rows that one rank has received come from, and where they go in the order of its
    experts."""

    src_metadata: torch.Tensor  # int32 [N, 2 + K], see `place`
    psum_per_expert: torch.Tensor  # int32 [L]: the end of each expert's rows, without padding
    num_per_expert: torch.Tensor  # int32 [L]
    psum_per_rank: torch.Tensor  # int32 [R]: the end of each source rank's received rows
    num_expanded: int  # rows in the order of experts, with padding


def place(
    received: Received, num_ranks: int, num_local: int, max_tokens: int, alignment: int
) -> Places:
    """Give each received row a row among those of each of its experts, in the order in which rows
    were received, then of k. The rows of an expert begin at a multiple of `alignment`.

    src_metadata of a row: source rank * max_tokens + token; source rank * K + its last k with an
    expert on this rank; then the row of each k in the order of experts, -1 where there is none.

    Example, 2 ranks, 2 local experts, alignment 2, max_tokens 4: tokens 0, 1, 3 of rank 0 and token
    2 of rank 1 were received with topk_idx [[0, -1], [1, 0], [-1, 0], [0, -1]]. Expert 0 has rows
    0 to 3, expert 1 has row 4 and a row of padding: psum_per_expert [4, 5], psum_per_rank [3, 4],
    src_metadata [[0, 0, 0, -1], [1, 1, 4, 1], [3, 1, -1, 2], [6, 2, 3, -1]].
    """
    ids_NK, num_topk = received.topk_idx, received.topk_idx.shape[1]
    counts = torch.bincount(ids_NK[ids_NK >= 0], minlength=num_local)
    aligned = (counts + alignment - 1) // alignment * alignment
    begins = aligned.cumsum(0) - aligned
    slots_NK = torch.full_like(ids_NK, -1)
    for expert in range(num_local):
        row, k = (ids_NK == expert).nonzero(as_tuple=True)
        slots_NK[row, k] = begins[expert] + torch.arange(len(row), dtype=torch.int64)
    numbers = torch.arange(num_topk, dtype=torch.int64)
    last_k = torch.where(ids_NK >= 0, numbers, -1).amax(1)
    first = torch.stack(
        [received.source * max_tokens + received.src_idx, received.source * num_topk + last_k], 1
    )
    per_rank = torch.bincount(received.source, minlength=num_ranks)
    return Places(
        torch.cat([first, slots_NK], 1).int(),
        (begins + counts).int(),
        counts.int(),
        per_rank.cumsum(0).int(),
        int(aligned.sum()),
    )


def expand(rows: torch.Tensor, places: Places) -> torch.Tensor:
    """[M, ...]: received rows [N, ...] in the order of experts, 0 in padding."""
    out = rows.new_zeros(places.num_expanded, *rows.shape[1:])
    slots_NK = places.src_metadata[:, 2:].long()
    row, k = (slots_NK >= 0).nonzero(as_tuple=True)
    out[slots_NK[row, k]] = rows[row]
    return out


def reduce_expanded(
    rows_MH: torch.Tensor, places: Places, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """[N, H] in `dtype`, or that of the rows: the sum of the rows of each received row, in the
    order of k, in fp32 and rounded once."""
    slots_NK = places.src_metadata[:, 2:].long()
    out = _wide(rows_MH.new_zeros(len(slots_NK), rows_MH.shape[1]))
    for k in range(slots_NK.shape[1]):
        here = slots_NK[:, k] >= 0
        out[here] += _wide(rows_MH[slots_NK[here, k]])
    return out.to(dtype or rows_MH.dtype)


def expert_rows(
    x_NH: torch.Tensor,
    topk_idx_NK: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    b_gate_up: torch.Tensor | None = None,
    b_down: torch.Tensor | None = None,
    activation: AnyActivation = "swiglu",
    s_gate_up: torch.Tensor | None = None,
    s_down: torch.Tensor | None = None,
) -> torch.Tensor:
    """[N, K, H] in x's dtype: each row through each of its local experts; 0 where the id is -1.

    w_gate_up [L, 2I, H] holds the gate rows, then the up rows; or it is [L, 2, I, H], of any
    strides; w_down [L, H, I]; biases [L, 2I] and [L, H]. The activation is rounded to x's dtype
    between the projections, as the kernels do. With scales [L, 2I / 128, H / 128] and [L, H / 128,
    I / 128] the weights are e4m3, and rows and activations are cast to it as well.
    """

    def cast(rows: torch.Tensor) -> torch.Tensor:
        return _wide(rows) if s_down is None else dequantize(*quantize_rows(rows), 1)

    def expert_weights(w: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        return _wide(w) if scales is None else dequantize(w, scales)

    num_rows, num_topk = topk_idx_NK.shape
    out = x_NH.new_zeros(num_rows, num_topk, x_NH.shape[1])
    for expert in range(w_gate_up.shape[0]):
        rows, ks = (topk_idx_NK == expert).nonzero(as_tuple=True)
        if len(rows) == 0:
            continue
        scales = [None if one is None else one[expert] for one in (s_gate_up, s_down)]
        both = expert_weights(w_gate_up[expert], scales[0]).flatten(0, -2)
        gate_up = einsum(cast(x_NH[rows]), both, "n h, i h -> n i")
        if b_gate_up is not None:
            gate_up = gate_up + _wide(b_gate_up[expert])
        act = Activation.of(activation)(gate_up).to(x_NH.dtype)
        y = einsum(cast(act), expert_weights(w_down[expert], scales[1]), "n i, h i -> n h")
        if b_down is not None:
            y = y + _wide(b_down[expert])
        out[rows, ks] = y.to(x_NH.dtype)
    return out


def sum_topk(y_NKH: torch.Tensor, weights_NK: torch.Tensor) -> torch.Tensor:
    """[N, H] in y's dtype: the weighted sum of each row's K results, in their order, in fp32."""
    total = _wide(torch.zeros_like(y_NKH[:, 0]))
    for k in range(y_NKH.shape[1]):
        total += _wide(weights_NK[:, k, None]) * _wide(y_NKH[:, k])
    return total.to(y_NKH.dtype)


def moe_ffn_gradients(
    x: list[torch.Tensor],
    topk_idx: list[torch.Tensor],
    topk_weights: list[torch.Tensor],
    w_gate_up: list[torch.Tensor],
    w_down: list[torch.Tensor],
    dy: list[torch.Tensor],
    biases: Sequence[list[torch.Tensor]] = (),
    activation: AnyActivation = "swiglu",
) -> list[tuple[torch.Tensor, ...]]:
    """Each rank's gradients of x, topk_weights, w_gate_up, w_down and, where they are given, of
    both biases in fp64, given those of the results, dy: by torch's autograd of a layer that no rank
    shares with another."""
    floats = [[part.detach().double().requires_grad_() for part in parts]
              for parts in (x, topk_weights, w_gate_up, w_down, *biases)]  # fmt: skip
    tokens_TH, weights_TK, up_EIH, down_EHI, *biases_E = (torch.cat(parts) for parts in floats)
    ids_TK, out_TH = torch.cat(topk_idx), torch.zeros_like(tokens_TH)
    for expert in range(len(up_EIH)):
        token, k = (ids_TK == expert).nonzero(as_tuple=True)
        gate_up = tokens_TH[token] @ up_EIH[expert].T
        if biases_E:
            gate_up = gate_up + biases_E[0][expert]
        rows = Activation.of(activation)(gate_up) @ down_EHI[expert].T
        if biases_E:
            rows = rows + biases_E[1][expert]
        out_TH = out_TH.index_add(0, token, weights_TK[token, k, None] * rows)
    leaves = [leaf for parts in floats for leaf in parts]
    grads = iter(torch.autograd.grad(out_TH, leaves, torch.cat(dy).double()))
    of_kinds = [[next(grads) for _ in parts] for parts in floats]
    return list(zip(*of_kinds, strict=True))


def moe_ffn(
    x: list[torch.Tensor],
    topk_idx: list[torch.Tensor],
    topk_weights: list[torch.Tensor],
    w_gate_up: list[torch.Tensor],
    w_down: list[torch.Tensor],
    biases: Sequence[list[torch.Tensor]] = (),
    activation: AnyActivation = "swiglu",
    scales: Sequence[list[torch.Tensor]] = (),
) -> list[torch.Tensor]:
    """The routed experts of a layer on all ranks; weights, and both biases and scales, are each
    rank's own experts'."""
    num_experts = sum(len(w) for w in w_gate_up)
    received = dispatch(x, topk_idx, topk_weights, num_experts)
    none: list[torch.Tensor | None] = [None] * len(x)
    both_biases, both_scales = biases or (none, none), scales or (none, none)
    parts = zip(received, w_gate_up, w_down, *both_biases, *both_scales, strict=True)
    y = [
        sum_topk(
            expert_rows(r.x, r.topk_idx, up, down, b_up, b_dn, activation, s_up, s_dn),
            r.topk_weights,
        )
        for r, up, down, b_up, b_dn, s_up, s_dn in parts
    ]
    return combine(y, received, topk_idx, [len(part) for part in x], num_experts)
