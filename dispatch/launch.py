"""Host side of what a dispatch sends: one function per launch, in the order in which a call makes
them. What it receives: `receive.py`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..device.constants import constants
from ..device.context import SIGNATURE_WORDS
from ..device.lang import INTERPRETED
from ..device.push import PushSizes
from ..device.signature import RowShape
from ..hardware import gpu, has_pdl
from ..routing_kernels import send_plan_kernel
from ..row_vectors import COPY_ROWS, RowVectors
from ..symm.slots import RowLayout, SlotLayout, Slots, row_in_region
from ..utils import next_power_of_2
from .exchange_kernels import ExchangeSizes, exchange_kernel
from .internode_kernels import send_rows_kernel
from .place_tokens_kernels import place_tokens_kernel
from .send_kernels import Metadata, MetadataSizes, SendPlan, metadata_kernel, push_kernel

NUM_WARPS = 16
NUM_CONCURRENT = 2 if INTERPRETED else 20
"""Programs of a launch that runs concurrently with a GEMM."""
MOST_PUSHING = 14
"""Programs that push while all others copy; ten fill the link."""
METADATA_ROWS = 64
"""Rows whose metadata a program writes at a time."""


def programs_on_all_sms() -> int:
    """Two on each SM. So many programs of kernels with few registers run at once; of others one
    runs on an SM after the other."""
    return 2 * gpu().num_sms


def programs_that_pace() -> int:
    """One on each SM, for a push that is paced: its pace assumes that all its programs run at
    once."""
    return gpu().num_sms


@dataclass(frozen=True, slots=True)
class Partition:
    """How a dispatch's programs are shared: `push` of them push, `early` ones concurrently receive
    what has arrived. most_span: see `push.PushSizes.SPAN`; at most so many chunks. overlaps:
    without early ones, the last launch, which receives all rows, may begin during the push."""

    push: int
    early: int
    most_span: int = 8
    overlaps: bool = False

    def receiving(self, num_programs: int) -> list[tuple[int, int]]:
        """The launches that receive, each as (its programs, those that push meanwhile): the early
        one, if there is one, and the last one, of num_programs."""
        early = [(self.early, self.push)] if self.early else []
        return [*early, (num_programs, 0)]

    @property
    def lets_next_begin(self) -> bool:
        """Whether the launch after the push may begin during it."""
        return self.early > 0 or self.overlaps

    @property
    def fills_chip(self) -> bool:
        """Whether early programs leave no SM to others."""
        return self.push + self.early > gpu().num_sms

    @classmethod
    def choose(cls, num_programs: int, owned: bool) -> Partition:
        """Ten programs fill the link. Copies (`owned`) take up to half, where they can begin while
        the push runs; addresses are found at the end, in no time."""
        if not owned:
            return cls(num_programs, 0)
        if INTERPRETED:
            return cls(max(1, num_programs - 1), 1)
        early = min(num_programs // 2, max(0, num_programs - 10)) if has_pdl() else 0
        return cls(num_programs - early, early)

    @classmethod
    def by_expert(cls, num_programs: int) -> Partition:
        """Where rows are copied to the order of experts, K of them for one that comes: two programs
        on each SM on which none pushes copy what has arrived. So many wait for flags that these are
        raised sooner."""
        if INTERPRETED:
            return cls(max(1, num_programs - 1), 1, 2)
        push = min(num_programs, MOST_PUSHING)
        early = max(0, 2 * (gpu().num_sms - push)) if has_pdl() else 0
        return cls(push, early, 2)


class DispatchLayout(NamedTuple):
    """Where the tokens of a rank go: num_tokens_per_rank int32 [R], num_tokens_per_expert int32
    [E], is_token_in_rank bool [T, R]; see `reference.layout`."""

    num_tokens_per_rank: torch.Tensor
    num_tokens_per_expert: torch.Tensor
    is_token_in_rank: torch.Tensor

    @property
    def num_experts(self) -> int:
        return self.num_tokens_per_expert.numel()


class Tokens(NamedTuple):
    """What a rank sends: x [T, H] contiguous; topk_idx int64 [T, K] and topk_weights float32
    [T, K], or None, and ids may come without weights; scales [T, S] of 4 bytes each and any
    strides, or None. returned_bytes: the payload of a row that returns for these; 0: that of as
    many bf16 values as x has columns."""

    x: torch.Tensor
    topk_idx: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    returned_bytes: int = 0

    @property
    def num_topk(self) -> int:
        return 0 if self.topk_idx is None else self.topk_idx.shape[1]

    @property
    def row(self) -> RowLayout:
        num_scales = 0 if self.scales is None else self.scales.shape[1]
        return RowLayout(self.x.shape[1] * self.x.itemsize, self.num_topk, num_scales)

    @property
    def shape(self) -> RowShape:
        row = self.row
        return RowShape(row.payload_bytes, row.num_topk, self.x.itemsize, row.num_scales)


class Counts(NamedTuple):
    """The exchanged counts, on the device.

    rank_prefix_matrix int32 [R, R]: rows that ranks 0..i send to rank j. recv_expert_counts int32
    [R, L]: rows of each source for each local expert. expert_offsets int32 [L + 1]: their running
    total by expert. signature int32 [16]: of the dispatch, see `device/signature.py`. group_counts
    int32 [E]: rows of all ranks for each expert of all ranks. recv_rank_prefix int32 [R], on
    several nodes and for ElasticBuffer: rows of ranks 0..i to this rank. earlier_ranks int32 [E],
    of rows by expert: rows of the ranks before this one for each expert of all ranks. See
    `TotalsWanted`: psum_per_expert int32 [L], where the rows of each local expert end,
    num_per_expert int32 [L], and stats int32 [L], which is added to.
    """

    rank_prefix_matrix: torch.Tensor
    recv_expert_counts: torch.Tensor
    expert_offsets: torch.Tensor
    signature: torch.Tensor
    group_counts: torch.Tensor
    recv_rank_prefix: torch.Tensor | None = None
    earlier_ranks: torch.Tensor | None = None
    psum_per_expert: torch.Tensor | None = None
    num_per_expert: torch.Tensor | None = None
    stats: torch.Tensor | None = None

    @classmethod
    def empty(
        cls, layout: DispatchLayout, num_nodes: int = 1, totals: TotalsWanted | None = None
    ) -> Counts:
        """Room for the counts of all ranks."""
        num_ranks = layout.num_tokens_per_rank.numel()
        num_local_experts = layout.num_experts // num_ranks
        new = layout.num_tokens_per_rank.new_empty
        counts = cls(
            new((num_ranks, num_ranks)),
            new((num_ranks, num_local_experts)),
            new(num_local_experts + 1),
            new(SIGNATURE_WORDS.value),
            new(layout.num_experts),
            new(num_ranks) if num_nodes > 1 else None,
        )
        if totals is None:
            return counts
        return counts._replace(
            earlier_ranks=new(layout.num_experts) if totals.by_expert else None,
            psum_per_expert=new(num_local_experts),
            num_per_expert=new(num_local_experts),
            recv_rank_prefix=new(num_ranks),
            # Without stats the kernel adds to memory that nobody reads: it is one kernel for both.
            stats=new(num_local_experts) if totals.stats is None else totals.stats,
        )

    @property
    def totals(self) -> tuple[torch.Tensor, ...]:
        """psum_per_expert, num_per_expert and recv_rank_prefix, if they were wanted."""
        if self.psum_per_expert is None:
            return ()
        assert self.num_per_expert is not None and self.recv_rank_prefix is not None
        return self.psum_per_expert, self.num_per_expert, self.recv_rank_prefix


class TotalsWanted(NamedTuple):
    """What ElasticBuffer wants of a dispatch besides. The rows of each expert are padded to a
    multiple of the alignment, and end after that padding, or by_expert before it. `src_metadata`
    numbers the max_tokens of a rank. stats int32 [L], to which the rows of each local expert are
    added, or None."""

    alignment: int
    max_tokens: int
    by_expert: bool
    stats: torch.Tensor | None


def form_of(may_grow: bool, totals: TotalsWanted | None) -> int:
    """What kernels take for the form of a dispatch: 1 where memory may grow, 2 for rows by expert,
    and 4 times their alignment."""
    return may_grow + (2 * totals.by_expert + 4 * totals.alignment if totals else 0)


@functools.cache
def exchange_sizes(num_ranks: int, num_experts: int, num_nodes: int = 1) -> ExchangeSizes:
    """Returns the sizes of an exchange of counts between num_ranks ranks."""
    sizes = ExchangeSizes(
        RANKS_PAD=next_power_of_2(num_ranks),
        EXPERTS=num_experts // num_ranks,
        EXPERTS_PAD=max(32, next_power_of_2(num_experts // num_ranks)),
        ALL_EXPERTS_PAD=next_power_of_2(num_experts),
        NODES=num_nodes,
    )
    return constants(sizes)


def exchange(
    counts: Counts,
    layout: DispatchLayout,
    tokens: Tokens,
    max_rows: int,
    form: int,
    slots: Slots,
    num_early_programs: int = 0,
) -> None:
    """Tell every rank this rank's counts and learn theirs. Begins a call. num_early_programs: of
    the next launch, if it may begin before all ranks are in the call.

    The rows' shape and `form`, see `form_of`, go along: ranks that disagree on it stop here,
    and all ranks do where one of them has more than `max_rows` rows for another.
    """
    num_ranks = slots.layout.num_ranks
    slots.context.launch(
        exchange_kernel,
        (num_ranks + 1,),
        layout.num_tokens_per_rank,
        layout.num_tokens_per_expert,
        counts,
        slots.context.fields,
        num_early_programs,
        max_rows,
        tokens.shape,
        form,
        slots.context.callers.running,
        SIZES=exchange_sizes(num_ranks, layout.num_experts),
        step="exchange",
        after=(send_plan_kernel,),
    )


@functools.cache
def metadata_sizes(
    num_ranks: int, row: RowLayout, block_rows: int, is_early: bool = False
) -> MetadataSizes:
    """For blocks of so many rows."""
    sizes = MetadataSizes(
        NUM_TOPK=row.num_topk,
        NUM_SCALES=row.num_scales,
        TRAILER_PAD=next_power_of_2((row.num_bytes - row.ids) // 4),
        BLOCK_SCALES=32,
        BLOCK_ROWS=block_rows,
        RANKS_PAD=next_power_of_2(num_ranks),
        IS_EARLY=is_early,
    )
    return constants(sizes)


def send_metadata(
    tokens: Tokens,
    plan: SendPlan,
    header_bytes: int,
    num_programs: int,
    slots: Slots,
    dispatched: torch.Tensor | None = None,
) -> None:
    """Write what goes with the rows into the destinations' slots. A cached dispatch begins with
    this, and with `dispatched`, the signature in its handle."""
    row, layout = tokens.row, slots.layout
    is_early = layout.num_nodes > 1
    after = () if dispatched is not None else (exchange_kernel, place_tokens_kernel)
    scales = None if tokens.scales is None else tokens.scales.view(torch.int32)
    slots.context.launch(
        metadata_kernel,
        (num_programs if dispatched is None else 1 + num_programs,),
        Metadata(scales, tokens.topk_idx, tokens.topk_weights),
        plan,
        dispatched,
        slots.context.fields,
        len(tokens.x),
        *((0, 0) if scales is None else scales.stride()),
        row_in_region(row, header_bytes),
        tokens.shape,
        SIZES=metadata_sizes(layout.num_ranks, row, METADATA_ROWS, is_early),
        step="send_metadata",
        after=(send_rows_kernel,) if is_early else after,
        num_warps=8,
    )


@functools.cache
def push_sizes(
    layout: SlotLayout,
    row: RowLayout,
    vectors: RowVectors,
    relays: bool = False,
    most_span: int = 8,
) -> PushSizes:
    """Returns the sizes of a push of rows. relays: the rows are of other nodes, and their chunks
    are passed on one by one. most_span: see `Partition`."""
    sizes = PushSizes(
        ALIGNED=vectors.aligned,
        RANKS_PAD=next_power_of_2(layout.num_ranks),
        CHUNK_ROWS=layout.chunk_rows(row.num_bytes),
        SPAN=1 if relays else min(most_span, layout.span(row.num_bytes)),
        BLOCK_ROWS=COPY_ROWS,
        BLOCK_COLUMNS=vectors.block_vecs,
        NUM_TOPK=0,
        SLACK=0,
        RELAYS=relays,
    )
    return constants(sizes)


def push(
    tokens: Tokens,
    plan: SendPlan,
    header_bytes: int,
    partition: Partition,
    slots: Slots,
    is_cached: bool = False,
) -> None:
    """Write the payload of one row per (token, destination rank) into the destinations' slots.
    is_cached: ranks may not be in the call yet."""
    vectors, row = RowVectors.of(tokens.x.shape[1], tokens.x.dtype), tokens.row
    slots.context.launch(
        push_kernel,
        (partition.push,),
        vectors.view(tokens.x),
        plan,
        slots.context.fields,
        int(partition.lets_next_begin),
        int(is_cached and partition.fills_chip),
        len(tokens.x),
        vectors.num_vecs,
        row_in_region(row, header_bytes),
        SIZES=push_sizes(slots.layout, row, vectors, most_span=partition.most_span),
        step="push",
        after=(metadata_kernel,),
        num_warps=NUM_WARPS,
    )
