"""Scores of routers that send more tokens to one rank than to the others."""

import torch

from .math import ceil_div

CHOSEN = 0.9
"""With `precise`, chosen experts score more than this, the others less."""


def get_unbalanced_scores(
    num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float, precise: bool
) -> torch.Tensor:
    """float32 [T, E], whose top-k sends `ratio` times as many tokens to rank 0 as to each other
    rank on average. `precise`: it does so up to rounding, and the other ranks get equally many.
    Needs at least two ranks for a ratio other than 1."""
    if precise:
        return _exact_scores(num_tokens, num_experts, num_ranks, num_topk, ratio)
    low, high = 1.0, 100.0 if ratio != 1 else 1.0
    for _ in range(20 if ratio != 1 else 0):
        factor = (low + high) / 2
        scores = _scaled_scores(num_tokens, num_experts, num_ranks, factor)
        num_per_rank = _owners(scores, num_ranks, num_topk).sum(0).float()
        if num_per_rank[0] > ratio * num_per_rank[1:].mean():
            high = factor
        else:
            low = factor
    return _scaled_scores(num_tokens, num_experts, num_ranks, low)


def _scaled_scores(
    num_tokens: int, num_experts: int, num_ranks: int, factor: float
) -> torch.Tensor:
    """Random scores, those of rank 0's experts times `factor`."""
    scores = torch.rand(num_tokens, num_experts, dtype=torch.float32)
    scores[:, : num_experts // num_ranks] *= factor
    return scores


def _owners(scores: torch.Tensor, num_ranks: int, num_topk: int) -> torch.Tensor:
    """bool [T, R]: the ranks of each token's experts."""
    owner = scores.topk(num_topk).indices // (scores.shape[1] // num_ranks)
    has = torch.zeros(len(scores), num_ranks, dtype=torch.bool)
    return has.scatter_(1, owner, True)


def _exact_scores(
    num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float
) -> torch.Tensor:
    """Tokens have as many ranks as random ones would have, up to a bound at which rank 0 can still
    have its share. Which tokens go to rank 0 is drawn; the other ranks are dealt in turn."""
    num_local, others = num_experts // num_ranks, num_ranks - 1
    most = int(others / ratio) + 1
    if ratio < 1 or others == 0 or ceil_div(num_topk, num_local) > most:
        raise ValueError(
            f"ratio is {ratio} with {num_ranks} ranks of {num_local} experts and top-{num_topk}; "
            f"it must be at least 1 and leave a token {ceil_div(num_topk, num_local)} ranks."
        )
    num_owners = _owners(torch.rand(num_tokens, num_experts), num_ranks, num_topk).sum(1)
    num_owners = num_owners.clamp(max=most)
    total = int(num_owners.sum())
    must = num_owners == num_ranks  # of rank 0, too
    num_special = max(int(must.sum()), min(num_tokens, round(total * ratio / (others + ratio))))
    order = (must + torch.rand(num_tokens)).argsort(descending=True)
    is_special = torch.zeros(num_tokens, dtype=torch.bool)
    is_special[order[:num_special]] = True
    # Deal the other ranks, so that tokens that follow each other get different ones.
    num_dealt = num_owners - is_special.long()
    first = num_dealt.cumsum(0) - num_dealt
    choice = torch.arange(num_topk) % num_owners[:, None]  # the j-th of a token's ranks
    dealt = torch.randperm(others)[(first[:, None] + choice - is_special[:, None].long()) % others]
    owner = torch.where(is_special[:, None] & (choice == 0), 0, dealt + 1)
    num_chosen = torch.zeros(num_tokens, num_ranks, dtype=torch.int64)
    num_chosen.scatter_add_(1, owner, torch.ones_like(owner))
    place = torch.rand(num_tokens, num_ranks, num_local).argsort(2)
    is_chosen = (place < num_chosen[:, :, None]).flatten(1)
    scores = torch.rand(num_tokens, num_experts, dtype=torch.float32)
    return torch.where(is_chosen, CHOSEN + (1 - CHOSEN) * scores, CHOSEN * scores)
