"""Checks of the values of counts and handles, before kernels use them as indices.

They wait for the device, so only a Buffer in debug mode makes them: `Options.debug`, or
MOE_ENGINE_DEBUG=1 when it is made.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from .dispatch.low_latency import LowLatencyHandle
from .engines.base import Handle
from .engines.internode_low_latency import InternodeLowLatencyHandle
from .errors import RoutingError, ShapeError, bad_ids


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


def check_ids(topk_idx: torch.Tensor, num_experts: int, rank: int) -> None:
    """Ids must be -1 .. num_experts-1."""
    num_bad = int(((topk_idx < -1) | (topk_idx >= num_experts)).sum())
    if num_bad:
        raise RoutingError(bad_ids(rank, num_bad))


def check_handle_values(handle: Handle, rank: int) -> None:
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
    for peer, count in enumerate(counts.tolist()):
        tokens = in_rank[:, peer].nonzero().flatten()
        if not torch.equal(handle.send_token_idx[peer, :count].long(), tokens):
            _refuse(f"handle.send_token_idx[{peer}] are not the tokens sent to rank {peer}", rank)
    # The entries of a token: row * R + rank for each of its ranks, in any order, then -1.
    row = torch.where(in_rank, in_rank.long().cumsum(0) - 1, -1)
    ranks = torch.arange(num_ranks, device=row.device)
    wanted = torch.where(row >= 0, row * num_ranks + ranks, -1)
    if not torch.equal(handle.send_head.long().sort(1).values, wanted.sort(1).values):
        _refuse("handle.send_head does not hold the rows of handle.is_token_in_rank", rank)
    received = handle.recv_src_idx[: int(prefix[-1, rank])]
    if bool((received < 0).any()):
        _refuse("handle.recv_src_idx has negative tokens", rank)


def check_low_latency_values(
    handle: LowLatencyHandle | InternodeLowLatencyHandle, topk_idx: torch.Tensor, rank: int
) -> None:
    """The rows and slots of the top-k that a low-latency handle names must be within the tensors of
    its call."""
    check_ids(topk_idx, handle.num_experts, rank)
    if isinstance(handle, InternodeLowLatencyHandle):
        num_received, num_rows = int(handle.rank_prefix_matrix[-1, rank]), handle.src_info.numel()
        if not 0 <= num_received <= len(handle.dst_row):
            _refuse(f"handle.rank_prefix_matrix counts {num_received} received rows", rank)
        rows = handle.dst_row[:num_received]  # those after them are not written
        if bool(((rows < -1) | (rows >= num_rows)).any()):
            _refuse(f"handle.dst_row has rows outside -1 .. {num_rows - 1}", rank)
        return
    max_tokens, num_rows = handle.returns.shape[1], handle.src_info.numel()
    num_topk = (handle.returns.shape[2] - 1) // 3
    num_tokens = handle.call[1:]
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


def _refuse(what: str, rank: int) -> NoReturn:
    raise ShapeError(
        f"rank {rank}: {what}. Pass what the dispatch of this Buffer returned, unchanged; nothing "
        "was sent, and the other ranks wait for this one until their deadline."
    )
