"""Checks of the values of counts and handles, before kernels use them as indices.

They wait for the device, so only a Buffer in debug mode makes them: `Options.debug`, or
MOE_ENGINE_DEBUG=1 when it is made.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from einops import reduce

from .engines.base import Handle
from .engines.internode import InternodeHandle
from .engines.internode_low_latency import InternodeLowLatencyHandle
from .errors import RoutingError, ShapeError, bad_ids
from .low_latency_handle import LowLatencyHandle, LowLatencySizes


def check_layout_values(
    num_tokens_per_rank: torch.Tensor,
    num_tokens_per_expert: torch.Tensor,
    is_token_in_rank: torch.Tensor,
    topk_idx: torch.Tensor | None,
    rank: int,
) -> None:
    """Counts must be those of is_token_in_rank and of topk_idx, whose ids must be in range."""
    counts, num_experts = is_token_in_rank.sum(0), num_tokens_per_expert.numel()
    if not torch.equal(num_tokens_per_rank.long(), counts):
        _refuse(
            f"num_tokens_per_rank is {num_tokens_per_rank.tolist()}, and is_token_in_rank counts "
            f"{counts.tolist()}; both must be those of get_dispatch_layout",
            rank,
        )
    if topk_idx is None:
        if bool((num_tokens_per_expert < 0).any()):
            _refuse("num_tokens_per_expert has negative counts", rank)
        return
    check_ids(topk_idx, num_experts, rank)
    per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts)
    if not torch.equal(num_tokens_per_expert.long(), per_expert):
        _refuse("num_tokens_per_expert is not that of get_dispatch_layout for topk_idx", rank)
    num_local = num_experts // is_token_in_rank.shape[1]
    owners = torch.where(topk_idx >= 0, topk_idx // num_local, -1)
    ranks = torch.arange(is_token_in_rank.shape[1], device=owners.device)
    if not torch.equal((owners[..., None] == ranks).any(1), is_token_in_rank):
        _refuse("is_token_in_rank is not that of get_dispatch_layout for topk_idx", rank)


def check_node_values(
    num_tokens_per_rdma_rank: torch.Tensor | None, is_token_in_rank: torch.Tensor, rank: int
) -> None:
    """Counts of tokens for each node, if any are given, must be those of is_token_in_rank."""
    if num_tokens_per_rdma_rank is None:
        return
    num_nodes = num_tokens_per_rdma_rank.numel()
    counts = reduce(is_token_in_rank, "t (node rank) -> t node", "any", node=num_nodes).sum(0)
    if not torch.equal(num_tokens_per_rdma_rank.long(), counts):
        _refuse(
            f"num_tokens_per_rdma_rank is {num_tokens_per_rdma_rank.tolist()}, and "
            f"is_token_in_rank counts {counts.tolist()}; both must be those of get_dispatch_layout",
            rank,
        )


def check_ids(topk_idx: torch.Tensor, num_experts: int, rank: int) -> None:
    """Ids must be -1 .. num_experts-1."""
    num_bad = int(((topk_idx < -1) | (topk_idx >= num_experts)).sum())
    if num_bad:
        raise RoutingError(bad_ids(rank, num_bad))


def check_handle_values(handle: Handle | InternodeHandle, rank: int) -> None:
    """All that the kernels of `rank` read in a handle must be indices within the tensors of the
    call."""
    prefix, in_rank = handle.rank_prefix_matrix.long(), handle.is_token_in_rank
    num_ranks, num_rows = in_rank.shape[1], handle.recv_src_idx.numel()
    sent = torch.diff(prefix, dim=0, prepend=prefix.new_zeros(1, num_ranks))
    if bool((sent < 0).any()):
        _refuse("handle.rank_prefix_matrix falls", rank)
    if int(prefix[-1, rank]) > num_rows:
        _refuse(
            f"handle.rank_prefix_matrix counts {int(prefix[-1, rank])} received rows, and there "
            f"are {num_rows}",
            rank,
        )
    counts = in_rank.sum(0)
    if not torch.equal(sent[rank], counts):
        _refuse(
            f"handle.rank_prefix_matrix counts {sent[rank].tolist()} rows sent to each rank, and "
            f"handle.is_token_in_rank {counts.tolist()}",
            rank,
        )
    if isinstance(handle, InternodeHandle):
        _check_routes(handle, sent, rank)
    else:
        _check_sent(in_rank, handle.send_token_idx, "handle.send_token_idx", "rank", rank)
        _check_head(in_rank, handle.send_head, "handle.send_head", rank)
    received = handle.recv_src_idx[: int(prefix[-1, rank])]
    if bool((received < 0).any()):
        _refuse("handle.recv_src_idx has negative tokens", rank)


def _check_sent(
    is_sent: torch.Tensor, token_idx: torch.Tensor, name: str, part: str, rank: int
) -> None:
    """token_idx [P, T] must begin with the tokens that are sent to each part, by bool [T, P]."""
    for to, count in enumerate(is_sent.sum(0).tolist()):
        tokens = is_sent[:, to].nonzero().flatten()
        if not torch.equal(token_idx[to, :count].long(), tokens):
            _refuse(f"{name}[{to}] are not the tokens sent to {part} {to}", rank)


def _check_head(is_sent: torch.Tensor, head: torch.Tensor, name: str, rank: int) -> None:
    """The entries of a token must be row * P + part for each of its parts, by bool [T, P], in any
    order, then -1."""
    row = torch.where(is_sent, is_sent.long().cumsum(0) - 1, -1)
    parts = torch.arange(is_sent.shape[1], device=row.device)
    wanted = torch.where(row >= 0, row * len(parts) + parts, -1)
    if not torch.equal(head.long().sort(1).values, wanted.sort(1).values):
        _refuse(f"{name} does not hold the rows of handle.is_token_in_rank", rank)


def _check_routes(handle: InternodeHandle, sent: torch.Tensor, rank: int) -> None:
    """What a handle says of nodes: where this rank's tokens go, and the rows that it forwards. sent
    [R, R]: rows from each rank to each."""
    in_rank, num_nodes = handle.is_token_in_rank, handle.send_head.shape[1]
    num_near = in_rank.shape[1] // num_nodes
    own_node, place = divmod(rank, num_near)
    near = slice(own_node * num_near, (own_node + 1) * num_near)
    in_node = reduce(in_rank, "t (node rank) -> t node", "any", node=num_nodes)
    in_near = in_rank[:, near]
    of_nodes, of_ranks = handle.sent_token_idx.split([num_nodes, num_near])
    _check_sent(in_node, of_nodes, "handle.sent_token_idx", "node", rank)
    _check_sent(in_near, of_ranks, "handle.sent_token_idx", "near rank", rank)
    _check_head(in_node, handle.send_head, "handle.send_head", rank)
    num_sent, num_forwarded = handle.node_rows.tolist()
    most = handle.rank_head.shape[1]
    if num_sent != in_node.sum(0).tolist() or num_forwarded[own_node] != num_sent[own_node]:
        _refuse("handle.node_rows are not the rows of handle.is_token_in_rank", rank)
    if min(num_forwarded) < 0 or max(num_forwarded) > most:
        _refuse(f"handle.node_rows has {num_forwarded} rows to forward, of up to {most}", rank)
    for node, count in enumerate(num_forwarded):
        is_forwarded = in_rank.new_zeros(count, num_near)
        for to, num_rows in enumerate(sent[node * num_near + place, near].tolist()):
            rows = handle.row_idx[node, to, :num_rows].long()
            is_rising = bool((torch.diff(rows) > 0).all())
            if not is_rising or bool(((rows < 0) | (rows >= count)).any()) or num_rows > most:
                _refuse(f"handle.row_idx[{node}, {to}] does not rise within 0 .. {count - 1}", rank)
            is_forwarded[rows, to] = True
        _check_head(is_forwarded, handle.rank_head[node, :count], "handle.rank_head", rank)


def check_low_latency_values(
    handle: LowLatencyHandle | InternodeLowLatencyHandle, topk_idx: torch.Tensor, rank: int
) -> None:
    """The rows and slots of the top-k that a low-latency handle names must be within the tensors of
    its call, and topk_idx must not contradict what it says of this rank's tokens."""
    check_ids(topk_idx, handle.sizes.num_experts, rank)
    if isinstance(handle, InternodeLowLatencyHandle):
        num_received, num_rows = int(handle.rank_prefix_matrix[-1, rank]), handle.src_info.numel()
        if not 0 <= num_received <= len(handle.dst_row):
            _refuse(f"handle.rank_prefix_matrix counts {num_received} received rows", rank)
        rows = handle.dst_row[:num_received]  # those after them are not written
        if bool(((rows < -1) | (rows >= num_rows)).any()):
            _refuse(f"handle.dst_row has rows outside -1 .. {num_rows - 1}", rank)
        begin, end = (int(one) for one in handle.rank_prefix_matrix[:, rank][[rank - 1, rank]])
        own = slice(begin if rank else 0, end)
        _check_own_slots(topk_idx, handle.src_idx[own], handle.dst_row[own], handle.sizes, rank)
        return
    max_tokens, num_rows = handle.returns.shape[1], handle.src_info.numel()
    num_topk, num_tokens = handle.sizes.num_topk, handle.call[1:]
    if bool(((num_tokens < 0) | (num_tokens > max_tokens)).any()):
        _refuse(f"handle.call has {num_tokens.tolist()} tokens of up to {max_tokens}", rank)
    tokens = torch.arange(max_tokens, device=num_tokens.device)
    returns = handle.returns[tokens < num_tokens[:, None]]  # those after them are not written
    num_copies, rows, slots = returns[:, :1], returns[:, 1:], returns[:, 1 + num_topk :]
    if bool(((num_copies < 0) | (num_copies > num_topk)).any()):
        _refuse(f"handle.returns has tokens of less than 0 or more than {num_topk} rows", rank)
    used = torch.arange(num_topk, device=returns.device) < num_copies
    for name, value, end in (
        ("rows", rows[:, :num_topk], num_rows),
        ("slots of the top-k", slots[:, :num_topk], num_topk),
    ):
        if bool((used & ((value < 0) | (value >= end))).any()):
            _refuse(f"handle.returns has {name} outside 0 .. {end - 1}", rank)
    num_own = int(num_tokens[rank])
    if len(topk_idx) > num_own:
        _refuse(f"topk_idx has {len(topk_idx)} tokens, and the dispatch had {num_own}", rank)
    copies, row_of, slot_of = handle.returns[rank, :num_own].split([1, num_topk, 2 * num_topk], 1)
    is_used = torch.arange(num_topk, device=copies.device) < copies
    row_of_slot = torch.full((num_own, num_topk + 1), -1, device=copies.device, dtype=copies.dtype)
    slot_of = torch.where(is_used, slot_of[:, :num_topk], num_topk).long()
    row_of_slot.scatter_(1, slot_of, row_of)
    own_tokens = torch.arange(num_own, device=copies.device)
    _check_own_slots(topk_idx, own_tokens, row_of_slot[:, :num_topk], handle.sizes, rank)


def _check_own_slots(
    topk_idx: torch.Tensor,
    tokens: torch.Tensor,
    rows: torch.Tensor,
    sizes: LowLatencySizes,
    rank: int,
) -> None:
    """Ids [T, K] must agree with the rows [n, K] (-1: none) that experts of this rank have for its
    own tokens [n]; those that are -1 only now do."""
    rows_of_expert = sizes.num_ranks * sizes.max_tokens
    known = torch.full_like(topk_idx, -1)
    is_there = tokens < len(topk_idx)  # a combine may have fewer tokens
    experts = rank * sizes.num_local + rows.long() // rows_of_expert
    known[tokens[is_there].long()] = torch.where(rows < 0, -1, experts)[is_there]
    of_own_experts = (topk_idx // sizes.num_local == rank) | (known >= 0)
    wrong = (topk_idx >= 0) & of_own_experts & (topk_idx != known)
    if bool(wrong.any()):
        token, k = wrong.nonzero()[0].tolist()
        _refuse(
            f"topk_idx[{token}, {k}] is {int(topk_idx[token, k])}, and was "
            f"{int(known[token, k]) if known[token, k] >= 0 else 'no expert of this rank'} in the "
            "dispatch",
            rank,
        )


def _refuse(what: str, rank: int) -> NoReturn:
    raise ShapeError(
        f"rank {rank}: {what}. Pass what the dispatch of this Buffer returned, unchanged; nothing "
        "was sent, and the other ranks wait for this one until their deadline."
    )
