"""EPHandle: what a dispatch of ElasticBuffer returns for its combine, and for cached dispatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from . import checks
from .engines.base import Handle
from .engines.expanded import Numbers, Places
from .engines.internode import InternodeHandle
from .errors import ShapeError
from .handles import parts_of


def _place(name: str, field: str) -> Any:
    """The tensor `field` of a handle's `places`, under DeepEP's `name`, by which another one can be
    assigned."""

    def get(handle: EPHandle) -> torch.Tensor:
        tensor: torch.Tensor = getattr(handle.places, field)
        return tensor

    def assign(handle: EPHandle, tensor: torch.Tensor) -> None:
        _check_like(name, tensor, get(handle))
        handle._set_places(**{field: tensor})

    return property(get, assign)


def _check_like(
    name: str, tensor: torch.Tensor, old: torch.Tensor, shape: Sequence[int] | None = None
) -> None:
    """A tensor that is assigned must be like the `old` one, or of this shape."""
    checks.check_tensor(name, tensor, shape or list(old.shape), [old.dtype], old.device)
    if old.is_contiguous():
        checks.check_contiguous(name, tensor)


def _version_of(tensor: torch.Tensor) -> int:
    """How often torch has written into it, 0 where torch does not count that."""
    return 0 if tensor.is_inference() else tensor._version


@dataclass(eq=False)
class EPHandle:
    """What combine and a cached dispatch need from a dispatch, with the fields of DeepEP V2's.

    do_expand: whether rows are in the order of experts, one for each expert of a token.
    num_experts, expert_alignment, num_max_tokens_per_rank, num_sms: of the dispatch.
    topk_idx int64 [T, K]: a copy of what was sent, or that itself without do_handle_copy; it must
    not be written to then.
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

    numbers, places, sent, recv_topk_idx: where the above come from, and what rows travel by.

    The tensors with DeepEP's names can be assigned, as autograd functions do that save them and put
    them back: the next call uses the new ones. Shape, dtype and device must be those of the old
    one (ShapeError, DtypeError). recv_src_metadata may have fewer rows, after a dispatch whose host
    has not waited; N then is their number. Do not assign the other fields: a call may see the old
    ones.
    """

    do_expand: bool
    numbers: Numbers
    num_sms: int
    _topk_idx: torch.Tensor
    num_recv_tokens: int
    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: list[int]
    places: Places = field(repr=False)
    sent: Handle | InternodeHandle = field(repr=False)
    recv_topk_idx: torch.Tensor = field(repr=False)
    token_metadata_at_forward: None = None
    channel_linked_list: None = None
    _topk_version: int | None = field(default=None, repr=False)

    def keep_callers_idx(self) -> None:
        """Note that topk_idx is the caller's tensor, which it may write to."""
        self._topk_version = _version_of(self._topk_idx)

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
    def topk_idx(self) -> torch.Tensor:
        return self._topk_idx

    @topk_idx.setter
    def topk_idx(self, tensor: torch.Tensor) -> None:
        _check_like("topk_idx", tensor, self._topk_idx, [self.num_tokens, self.num_topk])
        self._topk_idx = tensor
        self.keep_callers_idx()
        self.__dict__.pop("described", None)
        self.__dict__.pop("dst_buffer_slot_idx", None)

    psum_num_recv_tokens_per_scaleup_rank = _place(
        "psum_num_recv_tokens_per_scaleup_rank", "psum_per_rank"
    )
    psum_num_recv_tokens_per_expert = _place("psum_num_recv_tokens_per_expert", "psum_per_expert")
    num_unaligned_recv_tokens_per_expert = _place(
        "num_unaligned_recv_tokens_per_expert", "num_per_expert"
    )

    @property
    def recv_src_metadata(self) -> torch.Tensor:
        return self.places.src_metadata

    @recv_src_metadata.setter
    def recv_src_metadata(self, tensor: torch.Tensor) -> None:
        old = self.places.src_metadata
        num_rows = len(tensor) if isinstance(tensor, torch.Tensor) and tensor.dim() else 0
        if num_rows > len(old):
            raise ShapeError(
                f"recv_src_metadata has {num_rows} rows; it must be that of a dispatch which "
                f"received at most {len(old)}."
            )
        _check_like("recv_src_metadata", tensor, old, [num_rows, old.shape[1]])
        self._set_places(src_metadata=tensor)
        self.recv_topk_idx, self.num_recv_tokens = self.recv_topk_idx[:num_rows], num_rows

    def _set_places(self, **tensors: torch.Tensor) -> None:
        self.places = self.places._replace(**tensors)
        self.__dict__.pop("described", None)

    @property
    def has_same_topk_idx(self) -> bool:
        """Whether topk_idx is as it was in the dispatch, as far as torch counts what writes to
        it."""
        known = self._topk_version
        return known is None or _version_of(self._topk_idx) == known

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
