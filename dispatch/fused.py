"""Host side of a layer's way there: one function per launch, in the order in which they are made."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..config import GemmConfig
from ..grouped_gemm import num_compute_programs, ragged
from ..hardware import early_launch, launches_overlap, share_sms
from ..lang import INTERPRETED
from ..routing import Layout
from ..slots import RowLayout, Slots, next_power_of_2
from ..stages import StagedSchedule
from ..words import Words
from .exchange_kernels import exchange_shares_kernel
from .fused_kernels import dispatch_gemm_kernel, push_lanes_kernel, send_records_kernel

PLACE_PARTS = 4
"""Programs that find the places of this rank's rows on one destination."""
PUSH_BATCH = 32
"""Rows whose way a program looks up at a time."""
PUSH_ROWS, PUSH_WORDS = 2, 512
"""Rows that a program copies at a time, and words of each."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """What a rank sends to the experts: x [T, H] contiguous, topk_idx int64 [T, K] and topk_weights
    float32 [T, K], and their layout. A rank gets its sums back in num_shares parts."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    layout: Layout
    num_shares: int

    @property
    def row(self) -> RowLayout:
        """A row on its way back, and the record that says of which expert rows it is the sum."""
        return RowLayout(self.x.shape[1] * self.x.itemsize, self.topk_idx.shape[1])

    @property
    def blocks_per_share(self) -> int:
        return triton.cdiv(len(self.layout.earlier_counts), self.num_shares)

    @property
    def tokens_per_share(self) -> int:
        """Tokens of a share: whole blocks of the layout. Share s has those from s times that on."""
        return self.blocks_per_share * self.layout.block_tokens

    @property
    def num_experts(self) -> int:
        return self.layout.num_tokens_per_expert.numel()


@dataclass(frozen=True, slots=True)
class Places:
    """Where rows go and come from, on the device; see `exchange_shares_kernel`.

    share_rows int32 [R, SHARES + 1], expert_rows int32 [SHARES + 1, L], expert_offsets int32 [L +
    1]: what this rank receives. first_place int32 [SHARES, E], first_lane int32 [E], stage_begin
    int32 [R, S + 1]: where its lanes go.
    """

    share_rows: torch.Tensor
    expert_rows: torch.Tensor
    expert_offsets: torch.Tensor
    first_place: torch.Tensor
    first_lane: torch.Tensor
    stage_begin: torch.Tensor


def exchange_shares(lanes: Lanes, stage_count: int, slots: Slots) -> Places:
    """Tell every rank this rank's counts by share and learn theirs. Begins a call; the launch
    before it is the layout's."""
    num_ranks, num_shares = slots.layout.num_ranks, lanes.num_shares
    num_local = lanes.num_experts // num_ranks
    new, row = lanes.layout.earlier_counts.new_empty, lanes.row
    places = Places(
        new((num_ranks, num_shares + 1)),
        new((num_shares + 1, num_local)),
        new(num_local + 1),
        new((num_shares, lanes.num_experts)),
        new(lanes.num_experts),
        new((num_ranks, stage_count + 1)),
    )
    exchange_shares_kernel[(num_ranks + 1 + num_ranks * PLACE_PARTS,)](
        lanes.layout.earlier_counts,
        lanes.layout.num_tokens_per_expert,
        lanes.layout.num_tokens_per_rank,
        places.share_rows,
        places.expert_rows,
        places.expert_offsets,
        places.first_place,
        places.first_lane,
        places.stage_begin,
        slots.context.words,
        len(lanes.layout.earlier_counts),
        lanes.blocks_per_share,
        num_local,
        row.payload_bytes,
        lanes.x.itemsize,
        stage_count,
        NUM_TOPK=row.num_topk,
        RANKS=num_ranks,
        RANKS_PAD=next_power_of_2(num_ranks),
        EXPERTS_PAD=next_power_of_2(num_local),
        COLUMNS_PAD=next_power_of_2(lanes.num_experts + num_ranks),
        SHARES=num_shares,
        PARTS=PLACE_PARTS,
        OVERLAP=launches_overlap(),
        **early_launch(),
    )
    return places


def push_lanes(
    x: torch.Tensor,
    lane_order: torch.Tensor,
    places: Places,
    schedule: StagedSchedule,
    num_programs: int,
    slots: Slots,
) -> None:
    """Copy each lane's row of x [T, H] to its place among the expert rows of all ranks; lane_order:
    see `routing.place_lanes`. The launch before it is the schedule's."""
    num_ranks = slots.layout.num_ranks
    words = Words.of(x.shape[1], x.dtype)
    compiled = push_lanes_kernel[(2 if INTERPRETED else num_programs,)](
        words.view(x),
        lane_order,
        places.stage_begin,
        schedule.pushed,
        slots.expert_rows.peer_addresses,
        slots.context.words,
        schedule.stage_count,
        words.num_words,
        x.shape[1] * x.itemsize,
        RANKS=num_ranks,
        RANKS_PAD=next_power_of_2(num_ranks),
        BATCH=PUSH_BATCH,
        LANES=PUSH_BATCH if INTERPRETED else PUSH_ROWS,
        ALIGNED=words.aligned,
        BLOCK_WORDS=min(next_power_of_2(words.num_words), PUSH_WORDS),
        OVERLAP=launches_overlap(),
        num_warps=1,
        **early_launch(),
    )
    if not INTERPRETED:
        share_sms(compiled.function)


def dispatch_gemm(
    a: torch.Tensor,
    w: torch.Tensor,
    places: Places,
    schedule: StagedSchedule,
    config: GemmConfig,
    slots: Slots,
) -> torch.Tensor:
    """silu(gate) * up [M, I] of the expert rows a [M, H] times w [L, 2I, H], while they arrive. The
    launch before it is that of `push_lanes`."""
    num_columns, depth = w.shape[1] // 2, w.shape[2]
    out = a.new_empty(len(a), num_columns)
    block_n, by_part = config.block_n // 2, w.view(-1, num_columns, depth)
    dispatch_gemm_kernel[(num_compute_programs(a.device, config),)](
        create_ragged_descriptor(a, [config.block_m, config.block_k]),
        TensorDescriptor.from_tensor(by_part, [2, block_n, config.block_k]),
        ragged(out[None], config.block_m, block_n // config.subtiles),
        schedule.tiles[0],
        schedule.first_tile[-1:],
        places.expert_offsets[-1:],
        slots.context.words,
        schedule.stage_count,
        num_columns,
        depth,
        RANKS=slots.layout.num_ranks,
        RANKS_PAD=next_power_of_2(slots.layout.num_ranks),
        OVERLAP=launches_overlap(),
        **config.launch_options(),
        **early_launch(),
    )
    return out


def send_records(
    lanes: Lanes, lane_place: torch.Tensor, header_bytes: int, slots: Slots
) -> torch.Tensor:
    """Tell each rank which of its expert rows belong to each token; returns send_head int32 [T, R],
    see `reference.send_plan`. The launch before it is that of `dispatch_gemm`."""
    num_tokens, num_topk = lanes.topk_idx.shape
    num_ranks, row = slots.layout.num_ranks, lanes.row
    send_head = lane_place.new_empty((num_tokens, num_ranks))
    send_records_kernel[(len(lanes.layout.earlier_counts),)](
        lanes.topk_idx,
        lanes.topk_weights,
        lane_place,
        lanes.layout.earlier_counts,
        send_head,
        slots.context.words,
        num_tokens,
        lanes.num_experts // num_ranks,
        header_bytes,
        row.num_bytes,
        row.ids,
        row.weights,
        NUM_TOPK=num_topk,
        TOPK_PAD=next_power_of_2(num_topk),
        RANKS=num_ranks,
        RANKS_PAD=next_power_of_2(num_ranks),
        BLOCK=lanes.layout.block_tokens,
        OVERLAP=launches_overlap(),
        num_warps=4,
        **early_launch(),
    )
    return send_head
