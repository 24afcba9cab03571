"""EPHandle: what a dispatch of ElasticBuffer returns for its combine, and for cached dispatches."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from .engines.base import Handle
from .engines.expanded import Numbers, Places
from .engines.internode import InternodeHandle
from .handles import parts_of


@dataclass(eq=False)
class EPHandle:
    """What combine and a cached dispatch need from a dispatch, with the fields of DeepEP V2's.

    do_expand: whether rows are in the order of experts, one for each expert of a token.
    num_experts, expert_alignment, num_max_tokens_per_rank, num_sms: of the dispatch.
    topk_idx int64 [T, K]: a copy of what was sent, or that itself without do_handle_copy.
    num_recv_tokens, num_expanded_tokens: rows by token and by expert, padding included; the most
    that there can be, where the host has not waited for the counts.
    num_recv_tokens_per_expert_list: rows of each local expert, rounded up to expert_alignment; []
    where the host has not waited.
    psum_num_recv_tokens_per_scaleup_rank int32 [R]: the end of each source rank's rows.
    psum_num_recv_tokens_per_expert int32 [L]: the end of each local expert's rows: with padding, or
    without it where do_expand is set; the next expert's rows begin after the padding.
    num_unaligned_recv_tokens_per_expert int32 [L]: rows of each local expert.
    recv_src_metadata int32 [N, 2 + K]: of each received token, source rank *
    num_max_tokens_per_rank + token; source rank * K + its last k with an expert here; and the
    expanded row of each k, -1 for none. See `reference.place` for an example.
    token_metadata_at_forward, channel_linked_list: None; what ranks forward is in `sent`.

    numbers, places, sent, recv_topk_idx: where the above come from, and what rows travel by. Do not
    assign fields: a call may see the old ones.
    """

    do_expand: bool
    numbers: Numbers
    num_sms: int
    topk_idx: torch.Tensor
    num_recv_tokens: int
    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: list[int]
    places: Places = field(repr=False)
    sent: Handle | InternodeHandle = field(repr=False)
    recv_topk_idx: torch.Tensor = field(repr=False)
    token_metadata_at_forward: None = None
    channel_linked_list: None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that were sent, however long a `topk_idx` of the caller's is by now."""
        return self.sent.is_token_in_rank.shape[0]

    @property
    def num_topk(self) -> int:
        return self.places.src_metadata.shape[1] - 2

    @property
    def num_experts(self) -> int:
        return self.numbers.num_local_experts * self.numbers.num_ranks

    @property
    def expert_alignment(self) -> int:
        return self.numbers.alignment

    @property
    def num_max_tokens_per_rank(self) -> int:
        return self.numbers.max_tokens

    @property
    def psum_num_recv_tokens_per_scaleup_rank(self) -> torch.Tensor:
        return self.places.psum_per_rank

    @property
    def psum_num_recv_tokens_per_expert(self) -> torch.Tensor:
        return self.places.psum_per_expert

    @property
    def num_unaligned_recv_tokens_per_expert(self) -> torch.Tensor:
        return self.places.num_per_expert

    @property
    def recv_src_metadata(self) -> torch.Tensor:
        return self.places.src_metadata

    @cached_property
    def described(self) -> tuple[Any, ...]:
        """What decides how a call with this handle is made, besides the numbers of rows."""
        sent, _ = parts_of(self.sent, type(self.sent))
        fixed = self.do_expand, self.num_sms, *self.numbers, self.topk_idx
        return *fixed, self.places.psum_per_expert, *sent

    @cached_property
    def dst_buffer_slot_idx(self) -> torch.Tensor:
        """int32 [T, K]: the row of each k of a token among those that this rank sent to the rank of
        the k's expert, -1 for none. Computed when first asked for."""
        in_rank_TR = self.sent.is_token_in_rank
        is_valid = (self.topk_idx >= 0) & (self.topk_idx < self.num_experts)
        num_local = self.num_experts // in_rank_TR.shape[1]
        owner_TK = torch.where(is_valid, self.topk_idx // num_local, -1)
        row_TR = torch.where(in_rank_TR, in_rank_TR.cumsum(0) - 1, -1)
        row_TK = row_TR.gather(1, owner_TK.clamp(min=0))
        return torch.where(owner_TK < 0, -1, row_TK).int()

    def deterministic_sort(self, *args: object, **kwargs: object) -> None:
        """Does nothing: received rows are always by source rank, then token, and those of an expert
        in the same order."""
