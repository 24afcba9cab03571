"""Host side of dispatch: one function per launch, in the order in which a call makes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..device.context import SIGNATURE_WORDS
from ..device.lang import INTERPRETED
from ..hardware import has_pdl, pdl_options
from ..row_vectors import COPY_ROWS, RowVectors
from ..symm.slots import RowLayout, Slots
from ..utils import next_power_of_2
from .exchange_kernels import exchange_kernel
from .receive_kernels import collect_kernel, locate_kernel, release_kernel
from .send_kernels import metadata_kernel, push_kernel

NUM_WARPS = 16
LOCATE_ROWS = 128
"""Rows whose addresses a program writes at a time."""
METADATA_LANES = 64
"""Rows whose metadata a program writes at a time."""
NUM_METADATA_PROGRAMS = 2 if INTERPRETED else 256
"""Few enough to run all at once: the push begins when they have begun. Only behind an exchange,
since they wait for peers otherwise, and would hold all of the chip."""
NUM_COLLECT_PROGRAMS = 2 if INTERPRETED else 264


@dataclass(frozen=True, slots=True)
class Partition:
    """How a dispatch's programs are shared: `push` of them push, `early` ones meanwhile receive
    what has arrived."""

    push: int
    early: int

    @classmethod
    def choose(cls, num_programs: int, owned: bool) -> Partition:
        """Ten programs fill the link. Copies (`owned`) take up to half; addresses are found at the
        end, in no time."""
        if not owned:
            return cls(num_programs, 0)
        if INTERPRETED:
            return cls(max(1, num_programs - 1), 1)
        early = min(num_programs // 2, max(0, num_programs - 10)) if has_pdl() else 0
        return cls(num_programs - early, early)


@dataclass(frozen=True, slots=True)
class Counts:
    """The exchanged counts, on the device.

    rank_prefix_matrix int32 [R, R]: rows that ranks 0..i send to rank j. recv_expert_counts int32
    [R, L]: rows of each source for each local expert. expert_offsets int32 [L + 1]: their running
    total by expert. signature int32 [16]: of the dispatch, see `device/signature.py`.
    """

    rank_prefix_matrix: torch.Tensor
    recv_expert_counts: torch.Tensor
    expert_offsets: torch.Tensor
    signature: torch.Tensor

    @classmethod
    def empty(cls, num_tokens_per_rank: torch.Tensor, num_experts: int) -> Counts:
        """Room for the counts of all ranks."""
        num_ranks = num_tokens_per_rank.numel()
        num_local_experts = num_experts // num_ranks
        new = num_tokens_per_rank.new_empty
        return cls(
            new((num_ranks, num_ranks)),
            new((num_ranks, num_local_experts)),
            new(num_local_experts + 1),
            new(SIGNATURE_WORDS.value),
        )


def exchange(
    counts: Counts,
    num_tokens_per_rank: torch.Tensor,
    num_tokens_per_expert: torch.Tensor,
    row: RowLayout,
    item_bytes: int,
    max_rows: int,
    may_grow: bool,
    slots: Slots,
) -> None:
    """Tell every rank this rank's counts (int32 [R] and [E]) and learn theirs. Begins a call; the
    launch before it is the send plan's.

    The rows' layout and whether memory may grow go along: ranks that disagree on it stop here, and
    all ranks do where one of them has more than `max_rows` rows for another.
    """
    slots.context.step = "exchange"
    num_ranks = slots.layout.num_ranks
    num_experts = num_tokens_per_expert.numel()
    num_local_experts = num_experts // num_ranks
    exchange_kernel[(num_ranks + 1,)](
        num_tokens_per_rank,
        num_tokens_per_expert,
        counts.rank_prefix_matrix,
        counts.recv_expert_counts,
        counts.expert_offsets,
        counts.signature,
        slots.context.fields,
        max_rows,
        num_local_experts,
        row.payload_bytes,
        row.num_topk,
        item_bytes,
        row.num_scales,
        int(may_grow),
        RANKS_PAD=next_power_of_2(num_ranks),
        EXPERTS_PAD=max(32, next_power_of_2(num_local_experts)),
        ALL_EXPERTS_PAD=next_power_of_2(num_experts),
        PDL=has_pdl(),
        **pdl_options(),
    )


@dataclass(frozen=True, slots=True)
class Outgoing:
    """The rows a rank sends: x [T, H] contiguous; scales [T, S] of 4 bytes each and any strides, or
    None; topk_idx int64 [T, K] and topk_weights float32 [T, K], or None; num_tokens_per_rank int32
    [R]; send_token_idx int32 [R, T]."""

    x: torch.Tensor
    scales: torch.Tensor | None
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    num_tokens_per_rank: torch.Tensor
    send_token_idx: torch.Tensor

    @property
    def row(self) -> RowLayout:
        return row_layout(self.x, self.scales, self.topk_idx)


def row_layout(
    x: torch.Tensor, scales: torch.Tensor | None, topk_idx: torch.Tensor | None
) -> RowLayout:
    """The row of x [T, H] with its scales [T, S] and routing [T, K], where it has them."""
    return RowLayout(
        x.shape[1] * x.itemsize,
        0 if topk_idx is None else topk_idx.shape[1],
        0 if scales is None else scales.shape[1],
    )


def send_metadata(
    rows: Outgoing,
    num_local_experts: int,
    header_bytes: int,
    num_programs: int,
    slots: Slots,
    dispatched: torch.Tensor | None = None,
) -> None:
    """Write what goes with the rows into the destinations' slots. The launch before it is the
    exchange, or any in a cached dispatch, which this begins with `dispatched`, the signature in its
    handle."""
    slots.context.step = "send_metadata"
    num_tokens, num_ranks = len(rows.x), slots.layout.num_ranks
    row = rows.row
    scales = None if rows.scales is None else rows.scales.view(torch.int32)
    metadata_kernel[(num_programs if dispatched is None else 1 + num_programs,)](
        scales,
        rows.topk_idx,
        rows.topk_weights,
        rows.num_tokens_per_rank,
        rows.send_token_idx,
        dispatched,
        slots.context.fields,
        num_tokens,
        *((0, 0) if scales is None else scales.stride()),
        num_local_experts,
        header_bytes,
        row.num_bytes,
        row.payload_bytes,
        rows.x.itemsize,
        row.ids,
        NUM_TOPK=row.num_topk,
        TAIL_PAD=next_power_of_2((row.num_bytes - row.ids) // 4),
        NUM_SCALES=row.num_scales,
        SCALES_BLOCK=32,
        RANKS_PAD=next_power_of_2(num_ranks),
        LANES=METADATA_LANES,
        PDL=has_pdl(),
        num_warps=8,
        **pdl_options(),
    )


def push(rows: Outgoing, header_bytes: int, partition: Partition, slots: Slots) -> None:
    """Write the payload of one row per (token, destination rank) into the destinations' slots. The
    launch before it is the metadata's."""
    slots.context.step = "push"
    vectors, row = RowVectors.of(rows.x.shape[1], rows.x.dtype), rows.row
    push_kernel[(partition.push,)](
        vectors.view(rows.x),
        rows.num_tokens_per_rank,
        rows.send_token_idx,
        slots.context.fields,
        partition.early,
        len(rows.x),
        vectors.num_vecs,
        header_bytes,
        row.num_bytes,
        ALIGNED=vectors.aligned,
        RANKS_PAD=next_power_of_2(slots.layout.num_ranks),
        CHUNK_ROWS=slots.layout.chunk_rows(row.num_bytes),
        SPAN=slots.layout.span(row.num_bytes),
        LANES=COPY_ROWS,
        BLOCK_VECS=vectors.block_vecs,
        PDL=has_pdl(),
        num_warps=NUM_WARPS,
        **pdl_options(),
    )


@dataclass(frozen=True, slots=True)
class Collected:
    """Received rows, by source rank, then token.

    x [N, H], or int64 [N] with the address of each row; scales [N, S]; topk_idx int64 [N, K] with
    local ids, -1 where the expert is elsewhere; topk_weights float32 [N, K], 0 there; src_idx int32
    [N], the token's number on its source rank. Scales and both top-k tensors are None where
    dispatch had none.
    """

    x: torch.Tensor
    scales: torch.Tensor | None
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    src_idx: torch.Tensor

    @property
    def payload(self) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The rows, with their scales where they have some."""
        return self.x if self.scales is None else (self.x, self.scales)

    def arguments(
        self, rank_prefix_matrix: torch.Tensor, row: RowLayout, header_bytes: int, slots: Slots
    ) -> dict[str, Any]:
        """What both kernels that receive are launched with."""
        return dict(
            rank_prefix_matrix=rank_prefix_matrix,
            recv_scales=None if self.scales is None else self.scales.view(torch.int32),
            recv_topk_idx=self.topk_idx,
            recv_topk_weights=self.topk_weights,
            recv_src_idx=self.src_idx,
            context=slots.context.fields,
            max_rows=self.x.shape[0],
            region_rows=slots.layout.max_rows(row.num_bytes, header_bytes),
            header_bytes=header_bytes,
            row_bytes=row.num_bytes,
            scales_offset=row.scales,
            ids_offset=row.ids,
            weights_offset=row.weights,
            token_offset=row.token,
            NUM_TOPK=row.num_topk,
            TOPK_PAD=next_power_of_2(max(1, row.num_topk)),
            NUM_SCALES=row.num_scales,
            SCALES_PAD=next_power_of_2(max(1, row.num_scales)),
            CHUNK_ROWS=slots.layout.chunk_rows(row.num_bytes),
            num_warps=NUM_WARPS,
        )


def new_collected(
    rows: torch.Tensor, scales: torch.Tensor | None = None, num_topk: int = 0
) -> Collected:
    """Room for what comes with received `rows` [N, ...]: scales like [T, S], and top-k lanes."""
    num_rows = rows.shape[0]
    return Collected(
        rows,
        None if scales is None else scales.new_empty(num_rows, scales.shape[1]),
        rows.new_empty((num_rows, num_topk), dtype=torch.int64) if num_topk else None,
        rows.new_empty((num_rows, num_topk), dtype=torch.float32) if num_topk else None,
        rows.new_empty(num_rows, dtype=torch.int32),
    )


def collect(
    out: Collected,
    x: torch.Tensor,
    row: RowLayout,
    rank_prefix_matrix: torch.Tensor,
    header_bytes: int,
    slots: Slots,
    partition: Partition,
) -> None:
    """Copy the received rows out of the slot, and this rank's own out of the x [T, H] it sent;
    release the slot. Ends a call; the launch before it is the push."""
    slots.context.step = "collect"
    vectors = RowVectors.of(x.shape[1], x.dtype)
    arguments = out.arguments(rank_prefix_matrix, row, header_bytes, slots) | dict(
        x=vectors.view(x),
        recv_x=vectors.view(out.x),
        num_vecs=vectors.num_vecs,
        ROWS=COPY_ROWS,
        ALIGNED=vectors.aligned,
        BLOCK_VECS=vectors.block_vecs,
        PDL=has_pdl(),
        **pdl_options(),
    )
    if partition.early:
        collect_kernel[(partition.early,)](num_push_programs=partition.push, **arguments)
    collect_kernel[(NUM_COLLECT_PROGRAMS,)](num_push_programs=0, **arguments)
    slots.context.step = None


def locate(
    out: Collected,
    x: torch.Tensor,
    row: RowLayout,
    rank_prefix_matrix: torch.Tensor,
    header_bytes: int,
    slots: Slots,
) -> None:
    """Write the addresses of the received rows to out.x int64 [N]; `release` ends the call."""
    slots.context.step = "locate"
    locate_kernel[(NUM_COLLECT_PROGRAMS,)](
        x.view(torch.uint8),
        recv_address=out.x,
        hidden=x.shape[1] * x.itemsize,
        ROWS=LOCATE_ROWS,
        **out.arguments(rank_prefix_matrix, row, header_bytes, slots),
    )
    slots.context.step = None


def release(slots: Slots) -> None:
    """End a call whose rows were read in place; the slot goes back to its writers."""
    slots.context.step = "release"
    release_kernel[(1,)](slots.context.fields)
    slots.context.step = None
